-- Messages under leases: workers/transport/leases.py describes the keys `reserved`, a hash, and `reserved_index`, a
-- sorted set.

--   KEYS[1]  reserved          KEYS[2]  reserved_index     KEYS[3+] lists, in order of delivery
--   ARGV[1]  prefix of tags    ARGV[2]  maximum messages   ARGV[3]  bytes after which to stop
--   ARGV[4]  length of a lease in seconds
--
-- Returns a flat array (list number, message count, list number, message count, …) of the lists that had messages, and
-- the messages.
register('reserve', SHRINKS, function(KEYS, ARGV)
  redis.call('HDEL', KEYS[1], '')
  redis.call('ZREM', KEYS[2], '')
  local now = current_time()
  local left, room = tonumber(ARGV[2]), tonumber(ARGV[3])
  local runs, messages = {}, {}
  for number = 3, #KEYS do
    local list, before = KEYS[number], #messages
    while left > 0 and room > 0 do
      local message = redis.call('RPOP', list)
      if not message then break end
      messages[#messages + 1] = message
      left, room = left - 1, room - #message
      local tag = string.format('%s-%04d %s', ARGV[1], #messages, list)
      redis.call('HSET', KEYS[1], tag, message)
      redis.call('ZADD', KEYS[2], now + ARGV[4], tag)
    end
    if #messages > before then
      runs[#runs + 1] = number - 3
      runs[#runs + 1] = #messages - before
    end
  end
  return {runs, messages}
end)

-- A lease that ends later than its length from now was made before Redis' clock was set back. It is shortened to its
-- length.
--
--   KEYS[1]  reserved_index                   KEYS[2]  reserved
--   ARGV[1]  length of a lease, seconds       ARGV[2]  maximum expired leases to find
--   ARGV[3]  time of the last contact         ARGV[4]  maximum seconds since the last contact
--   ARGV[5]  bytes of expired messages after which to stop    ARGV[6+] tags to renew
--
-- Returns the time, the tags of expired leases, and their number if more leases may have expired, else 0.
register('renew', SHRINKS, function(KEYS, ARGV)
  redis.call('ZREM', KEYS[1], '')
  local now = current_time()
  for number = 6, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + ARGV[1], ARGV[number]) end
  local limit, room, ended, found = tonumber(ARGV[2]), tonumber(ARGV[5]), {}, {}
  if limit > 0 then
    for _, tag in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now + ARGV[1] + 1, 'LIMIT', 0, limit)) do
      local seconds = tonumber(string.match(tag, '^%x+%-([%d.]+)%-%d+%-%d+ '))
      if seconds and redis.call('ZSCORE', KEYS[1], tag) - now > seconds + 1 then
        redis.call('ZADD', KEYS[1], 'XX', now + seconds, tag)
      end
    end
  end
  if now - ARGV[3] <= tonumber(ARGV[4]) then
    found = redis.call('ZREVRANGEBYSCORE', KEYS[1], now, '-inf', 'LIMIT', 0, limit)
    for _, tag in ipairs(found) do
      if room <= 0 then break end
      room = room - redis.call('HSTRLEN', KEYS[2], tag)
      ended[#ended + 1] = tag
    end
  end
  return {string.format('%.17g', now), ended, (#found == limit or #ended < #found) and #ended or 0}
end)

--   KEYS[1]  reserved    KEYS[2]  reserved_index    KEYS[3+] list of each message
--   ARGV[1]  RPUSH or LPUSH    ARGV[2]  latest end of a lease, or "+inf"    ARGV[3+] tag and message of each
register('restore', SHRINKS, function(KEYS, ARGV)
  for number = 3, #KEYS do
    local tag, message = ARGV[2 * number - 3], ARGV[2 * number - 2]
    local ends = redis.call('ZSCORE', KEYS[2], tag)
    if ARGV[2] == '+inf' or ends and tonumber(ends) <= tonumber(ARGV[2]) then
      redis.call('ZREM', KEYS[2], tag)
      if redis.call('HDEL', KEYS[1], tag) == 1 then redis.call(ARGV[1], KEYS[number], message) end
    end
  end
end)

--   KEYS[1]  reserved    KEYS[2]  reserved_index    KEYS[3]  undecodable, list
--   ARGV[1]  tag         ARGV[2]  the message       ARGV[3]  maximum entries of that list
register('set_aside', SHRINKS, function(KEYS, ARGV)
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  local length = redis.call('LPUSH', KEYS[3], ARGV[2])
  redis.call('LTRIM', KEYS[3], 0, ARGV[3] - 1)
  return math.max(0, length - ARGV[3])
end)

--   KEYS[1]  reserved    ARGV[1]  tag    ARGV[2]  the new message
register('replace_held', SHRINKS, function(KEYS, ARGV)
  redis.call('HDEL', KEYS[1], '')
  if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
end)
