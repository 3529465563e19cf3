-- Messages under leases: workers/transport/leases.py describes the keys, which ARGV[1] and ARGV[2] name: `reserved`, a
-- hash, and `reserved_index`, a sorted set.

--   ARGV[3]  prefix of tags    ARGV[4]  maximum messages   ARGV[5]  bytes after which to stop
--   ARGV[6]  length of a lease in seconds                  KEYS     lists, in order of delivery
--
-- Returns a flat array: the position of a list, and a message from it, of each message. If it reaches no limit, it reads
-- the length of each list: with CLIENT TRACKING, Redis then notifies the caller of the next message. Redis 7.0 tracks the
-- keys that the caller declared, later versions those that were read.
register('reserve', SHRINKS, function(ARGV, KEYS)
  local reserved, index, now = ARGV[1], ARGV[2], current_time()
  redis.call('HDEL', reserved, '')
  redis.call('ZREM', index, '')
  local left, room = tonumber(ARGV[4]), tonumber(ARGV[5])
  local taken = {}
  for number, list in ipairs(KEYS) do
    while left > 0 and room > 0 do
      local message = redis.call('RPOP', list)
      if not message then break end
      taken[#taken + 1], taken[#taken + 2] = number - 1, message
      left, room = left - 1, room - #message
      local tag = string.format('%s-%04d %s', ARGV[3], #taken / 2, list)
      redis.call('HSET', reserved, tag, message)
      redis.call('ZADD', index, now + ARGV[6], tag)
    end
  end
  if left > 0 and room > 0 then
    for _, list in ipairs(KEYS) do redis.call('LLEN', list) end
  end
  return taken
end)

-- A lease that ends later than its length from now was made before Redis' clock was set back. It is shortened to its
-- length.
--
--   ARGV[3]  length of a lease, seconds       ARGV[4]  maximum expired leases to find
--   ARGV[5]  time of the last contact         ARGV[6]  maximum seconds since the last contact
--   ARGV[7]  bytes of expired messages after which to stop    ARGV[8+] tags to renew
--
-- Returns the time, the tags of expired leases, and their number if more leases may have expired, else 0.
register('renew', SHRINKS, function(ARGV)
  local reserved, index, now = ARGV[1], ARGV[2], current_time()
  redis.call('ZREM', index, '')
  for number = 8, #ARGV do redis.call('ZADD', index, 'XX', now + ARGV[3], ARGV[number]) end
  local limit, room, ended, found = tonumber(ARGV[4]), tonumber(ARGV[7]), {}, {}
  if limit > 0 then
    for _, tag in ipairs(redis.call('ZREVRANGEBYSCORE', index, '+inf', now + ARGV[3] + 1, 'LIMIT', 0, limit)) do
      local seconds = tonumber(string.match(tag, '^%x+%-([%d.]+)%-%d+%-%d+ '))
      if seconds and redis.call('ZSCORE', index, tag) - now > seconds + 1 then
        redis.call('ZADD', index, 'XX', now + seconds, tag)
      end
    end
  end
  if now - ARGV[5] <= tonumber(ARGV[6]) then
    found = redis.call('ZREVRANGEBYSCORE', index, now, '-inf', 'LIMIT', 0, limit)
    for _, tag in ipairs(found) do
      if room <= 0 then break end
      room = room - redis.call('HSTRLEN', reserved, tag)
      ended[#ended + 1] = tag
    end
  end
  return {string.format('%.17g', now), ended, (#found == limit or #ended < #found) and #ended or 0}
end)

--   ARGV[3]  RPUSH or LPUSH    ARGV[4]  latest end of a lease, or "+inf"    ARGV[5+] tag and message of each
register('restore', SHRINKS, function(ARGV)
  local reserved, index, till = ARGV[1], ARGV[2], ARGV[4]
  for number = 5, #ARGV, 2 do
    local tag, message = ARGV[number], ARGV[number + 1]
    local ends = redis.call('ZSCORE', index, tag)
    if till == '+inf' or ends and tonumber(ends) <= tonumber(till) then
      redis.call('ZREM', index, tag)
      if redis.call('HDEL', reserved, tag) == 1 then redis.call(ARGV[3], string.match(tag, ' (.*)'), message) end
    end
  end
end)
