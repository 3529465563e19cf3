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
  for i, known in ipairs(records_of(MARKS, buckets, valid_marks)) do
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
  local known, key = records_of(MARKS, buckets, valid_marks), open(MARKS, ttl, ARGV[4])
  local own = in_parts(buckets, 'HMGET', key)
  for i, mark in ipairs(marks) do
    local bucket, held = buckets[i], changed[buckets[i]] or valid_marks(own[i] or '')
    if not purged[i] and not find_mark(held, mark) then
      if not find_mark(known[i], mark) then new = new + 1 end
      changed[bucket] = string.sub(held, -SIZE * (MAX_MARKS - 1)) .. mark
    end
  end
  for bucket, held in pairs(changed) do fields[#fields + 1], fields[#fields + 2] = bucket, held end
  add(key, fields, ttl)
  if new > 0 and ARGV[5] ~= '' then count_progress(ARGV[5], {sent = new}, ttl, true) end
end)

-- Forget that these posts were sent, because their message is removed. posts: {id, run} of each.
local function forget_sent(posts)
  local sent = {}
  bound_generations(MARKS)
  for _, post in ipairs(posts) do
    local id, run = post[1], post[2]
    local bucket, start = bucket_of(id)
    forget_marks(bucket, start .. digest_of(run, RUN_BYTES))
    sent[run] = (sent[run] or 0) + 1
  end
  for run, count in pairs(sent) do uncount(run, 'sent', count) end
end

--   ARGV[1]  list of a queue    ARGV[2]  the message    ARGV[3]  {id, run} of each post, as JSON
--
-- Returns 1 if the message was there and was removed, else 0.
register('remove_waiting', SHRINKS, function(ARGV)
  local posts = cjson.decode(ARGV[3])
  if redis.call('LREM', ARGV[1], 1, ARGV[2]) == 0 then return 0 end
  forget_sent(posts)
  return 1
end)

--   ARGV[1]  delayed        ARGV[2]  delayed_index    ARGV[3]  tag of a message
--   ARGV[4]  the message    ARGV[5]  {id, run} of each post, as JSON
--
-- Returns 1 if the message was there and was removed, else 0.
register('remove_delayed', SHRINKS, function(ARGV)
  local posts = cjson.decode(ARGV[5])
  if redis.call('HGET', ARGV[1], ARGV[3]) ~= ARGV[4] then return 0 end
  redis.call('HDEL', ARGV[1], ARGV[3])
  redis.call('ZREM', ARGV[2], ARGV[3])
  forget_sent(posts)
  return 1
end)

--   ARGV[1]  ids, as JSON
--
-- Returns a digit per id: 1 if it was sent or has results.
register('known', READS, function(ARGV)
  local ids, buckets, starts, found = cjson.decode(ARGV[1]), {}, {}, {}
  for i, id in ipairs(ids) do buckets[i], starts[i] = bucket_of(id) end
  local sent, stored = records_of(MARKS, buckets, valid_marks), records_of(STORED, ids)
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
    local message = try('LINDEX', ARGV[number], -1)
    if message then
      found[#found + 1] = string.match(string.sub(message, -32768), '"' .. ARGV[1] .. '": *(%d+%.?%d*)')
    end
  end
  return found
end)

--   ARGV[1]  {id} of each post, as JSON; or {id, fingerprint, run} to delete only these records of the id
--
-- Deletes records. Returns a digit per post: 1 if it was sent; another one: 1 if it had results; and the number of
-- results.
register('forget', SHRINKS, function(ARGV)
  local posts, sent, stored, results = cjson.decode(ARGV[1]), {}, {}, 0
  bound_generations(MARKS)
  for i, post in ipairs(posts) do
    local id, fingerprint, run = unpack(post)
    local bucket, start = bucket_of(id)
    sent[i] = forget_marks(bucket, start .. (run and digest_of(run, RUN_BYTES) or '')) and 1 or 0
    local deleted = forget_results(id, fingerprint)
    stored[i] = deleted > 0 and 1 or 0
    results = results + deleted
  end
  return {table.concat(sent), table.concat(stored), results}
end)

--   ARGV[1]  a list    ARGV[2]  position of the first message    ARGV[3]  maximum messages
--   ARGV[4]  bytes of messages after which to stop
register('read_list', READS, function(ARGV)
  local messages, bytes = {}, 0
  while #messages < tonumber(ARGV[3]) and bytes < tonumber(ARGV[4]) do
    local message = try('LINDEX', ARGV[1], ARGV[2] + #messages)
    if not message then break end
    messages[#messages + 1] = message
    bytes = bytes + #message
  end
  return messages
end)
