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

--   KEYS[1]  feedmill:sent-marks, table
--   ARGV[1]  ids, as JSON    ARGV[2]  their buckets and marks    ARGV[3]  prefix of tombstones
--
-- Returns a digit per post: 0 if unknown, 1 if sent, 2 if purged.
register('lookup', READS, function(KEYS, ARGV)
  local purged, found = tombstones(ARGV[3], cjson.decode(ARGV[1])), {}
  local buckets, marks = split_marks(ARGV[2])
  for i, known in ipairs(records_of(KEYS[1], buckets)) do
    found[i] = purged[i] and 2 or find_mark(known, marks[i]) and 1 or 0
  end
  return table.concat(found)
end)

--   KEYS[1]  feedmill:sent-marks, table    KEYS[2]  feedmill:runs, zset
--   ARGV[1], ARGV[2], ARGV[3]  as for `lookup`    ARGV[4]  ttl, seconds    ARGV[5]  bytes of the table
--   ARGV[6]  the posts' run, "" for none    ARGV[7]  prefix of the names of runs' keys    ARGV[8]  maximum runs listed
register('mark', WRITES, function(KEYS, ARGV)
  local ttl, new, changed, fields = tonumber(ARGV[4]), 0, {}, {}
  local purged = tombstones(ARGV[3], cjson.decode(ARGV[1]))
  local buckets, marks = split_marks(ARGV[2])
  local known, key = records_of(KEYS[1], buckets), open(KEYS[1], ttl, ARGV[5])
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
  if new > 0 and ARGV[6] ~= '' then
    count_progress(KEYS[2], ARGV[7], ARGV[6], {sent = new}, ttl, ARGV[8], true)
  end
end)

--   KEYS[1]  list of the queue    KEYS[2]  feedmill:clears, hash    KEYS[3]  feedmill:sent-marks, table
--   ARGV[1]  the message          ARGV[2]  the possible marks of each post, in hex, and its run, as JSON
--   ARGV[3]  prefix of the names of runs' keys    ARGV[4]  the queue
register('remove_waiting', SHRINKS, function(KEYS, ARGV)
  if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
  redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
  for _, sent in ipairs(cjson.decode(ARGV[2])) do
    local removed, run = false, ARGV[3] .. sent[2]
    for _, hex in ipairs(sent[1]) do
      local buckets, marks = split_marks(unhex(hex))
      removed = removed or forget_marks(KEYS[3], buckets[1], marks[1])
    end
    if removed and sent[2] ~= '' and tonumber(redis.call('HGET', run, 'sent') or 0) > 0 then
      redis.call('HINCRBY', run, 'sent', -1)
    end
  end
  return 1
end)

--   KEYS[1], KEYS[2]  feedmill:sent-marks and feedmill:stored, tables    ARGV[1]  ids, as JSON
--
-- Returns a digit per id: 1 if it was sent or has results.
register('known', READS, function(KEYS, ARGV)
  local ids, buckets, starts, found = cjson.decode(ARGV[1]), {}, {}, {}
  for i, id in ipairs(ids) do buckets[i], starts[i] = bucket_of(id) end
  local sent, stored = records_of(KEYS[1], buckets), records_of(KEYS[2], ids)
  for i = 1, #ids do found[i] = (find_mark(sent[i], starts[i]) or stored[i] ~= '') and 1 or 0 end
  return table.concat(found)
end)

--   KEYS  the lists of one queue    ARGV[1]  a header's name
--
-- Reads the last 32 KiB of a message only, because messages can be megabytes long: kombu writes headers after the body.
-- Post text cannot match, because its quotes are escaped.
register('next_headers', READS, function(KEYS, ARGV)
  local found = {}
  for _, list in ipairs(KEYS) do
    local message = redis.call('LINDEX', list, -1)
    if message then
      found[#found + 1] = string.match(string.sub(message, -32768), '"' .. ARGV[1] .. '": *(%d+%.?%d*)')
    end
  end
  return found
end)

--   KEYS[1], KEYS[2]  feedmill:sent-marks and feedmill:stored, tables    ARGV[1]  ids, as JSON
--
-- Deletes all records of these ids. Returns the numbers of ids that were sent, and that had results.
register('forget', SHRINKS, function(KEYS, ARGV)
  local sent, stored = 0, 0
  for _, id in ipairs(cjson.decode(ARGV[1])) do
    if forget_marks(KEYS[1], bucket_of(id)) then sent = sent + 1 end
    if change(KEYS[2], id, function() return '' end) then stored = stored + 1 end
  end
  return {sent, stored}
end)
