-- Sent posts, and messages that wait. With pipelines of small commands instead, redis-py would take two thirds of the
-- publishing time; it is slow with many arguments, too, so the buckets and marks of several posts are one argument.

-- Return the buckets and the marks in an argument.
local function split_marks(text)
  local buckets, marks = {}, {}
  for at = 1, #text, BUCKET + SIZE do
    buckets[#buckets + 1] = string.sub(text, at, at + BUCKET - 1)
    marks[#marks + 1] = string.sub(text, at + BUCKET, at + BUCKET + SIZE - 1)
  end
  return buckets, marks
end

--   ARGV[1]  ids, as JSON    ARGV[2]  their buckets and marks
--
-- Returns a digit per post: 0 if unknown, 1 if sent, 2 if purged.
register('lookup', READS, function(ARGV)
  local purged, found = tombstones(cjson.decode(ARGV[1])), {}
  local buckets, marks = split_marks(ARGV[2])
  for i, known in ipairs(records_of(MARKS, buckets)) do
    found[i] = purged[i] and 2 or find_mark(known, marks[i]) and 1 or 0
  end
  return table.concat(found)
end)

--   ARGV[1], ARGV[2]  as for `lookup`    ARGV[3]  ttl, seconds    ARGV[4]  bytes of the table
--   ARGV[5]  the posts' run, "" for none
register('mark', WRITES, function(ARGV)
  local ttl, new, changed, fields = tonumber(ARGV[3]), 0, {}, {}
  local purged = tombstones(cjson.decode(ARGV[1]))
  local buckets, marks = split_marks(ARGV[2])
  local known, key = records_of(MARKS, buckets), open(MARKS, ttl, ARGV[4])
  local own = in_parts(buckets, 'HMGET', key)
  for i, mark in ipairs(marks) do
    local bucket, held = buckets[i], changed[buckets[i]] or own[i] or ''
    if not purged[i] and not find_mark(held, mark) then
      if not find_mark(known[i], mark) then new = new + 1 end
      -- Producers may have written anything there.
      changed[bucket] = (#held % SIZE == 0 and string.sub(held, -SIZE * (MAX_MARKS - 1)) or '') .. mark
    end
  end
  for bucket, held in pairs(changed) do fields[#fields + 1], fields[#fields + 2] = bucket, held end
  add(key, fields, ttl)
  if new > 0 and ARGV[5] ~= '' then count_progress(ARGV[5], {sent = new}, ttl, true) end
end)

--   ARGV[1]  list of a queue    ARGV[2]  the message    ARGV[3]  {id, run} of each post, as JSON
register('remove_waiting', SHRINKS, function(ARGV)
  if redis.call('LREM', ARGV[1], 1, ARGV[2]) == 0 then return 0 end
  for _, post in ipairs(cjson.decode(ARGV[3])) do
    local bucket, start = bucket_of(post[1])
    local run = RUN .. post[2]
    forget_marks(bucket, start .. digest_of(post[2], RUN_BYTES))
    if post[2] ~= '' and tonumber(redis.call('HGET', run, 'sent') or 0) > 0 then
      redis.call('HINCRBY', run, 'sent', -1)
    end
  end
  return 1
end)

--   ARGV[1]  ids, as JSON
--
-- Returns a digit per id: 1 if it was sent or has results.
register('known', READS, function(ARGV)
  local ids, buckets, starts, found = cjson.decode(ARGV[1]), {}, {}, {}
  for i, id in ipairs(ids) do buckets[i], starts[i] = bucket_of(id) end
  local sent, stored = records_of(MARKS, buckets), records_of(STORED, ids)
  for i = 1, #ids do found[i] = (find_mark(sent[i], starts[i]) or stored[i] ~= '') and 1 or 0 end
  return table.concat(found)
end)

--   ARGV[1]  a header's name    ARGV[2+]  the lists of one queue
--
-- Reads the last 32 KiB of a message only, because messages can be megabytes long: kombu writes headers after the body.
-- Post text cannot match, because its quotes are escaped.
register('next_headers', READS, function(ARGV)
  local found = {}
  for number = 2, #ARGV do
    local message = redis.call('LINDEX', ARGV[number], -1)
    if message then
      found[#found + 1] = string.match(string.sub(message, -32768), '"' .. ARGV[1] .. '": *(%d+%.?%d*)')
    end
  end
  return found
end)

--   ARGV[1]  {id} of each post, as JSON; or {id, fingerprint, run} to delete only these records of the id
--
-- Deletes records. Returns the numbers of ids that were sent, and that had results.
register('forget', SHRINKS, function(ARGV)
  local sent, stored = 0, 0
  for _, post in ipairs(cjson.decode(ARGV[1])) do
    local id, fingerprint, run = unpack(post)
    local bucket, start = bucket_of(id)
    if forget_marks(bucket, start .. (run and digest_of(run, RUN_BYTES) or '')) then sent = sent + 1 end
    if forget_results(id, fingerprint) then stored = stored + 1 end
  end
  return {sent, stored}
end)
