-- Messages that are due later: workers/transport/delays.py describes the keys, which the first arguments name:
-- `delayed`, a hash, and `delayed_index`, a sorted set.

-- Seconds after which a message is tried again whose list's name belongs to a key of another type.
local RETRY_S = 60

--   ARGV[1]  reserved        ARGV[2]  reserved_index
--   ARGV[3]  delayed         ARGV[4]  delayed_index
--   ARGV[5+] tag, and seconds until it is due, of each message
--
-- Moves messages under leases to those that are due later, and ends their leases.
register('delay', SHRINKS, function(ARGV)
  local reserved, index, now = ARGV[1], ARGV[2], current_time()
  for number = 5, #ARGV, 2 do
    local tag, due = ARGV[number], now + ARGV[number + 1]
    local message = redis.call('HGET', reserved, tag)
    if message then
      redis.call('HSET', ARGV[3], tag, message)
      redis.call('ZADD', ARGV[4], due, tag)
      redis.call('HDEL', reserved, tag)
      redis.call('ZREM', index, tag)
    end
  end
  return 1  -- the transport takes an answer of null for a notification
end)

--   ARGV[1]  delayed                ARGV[2]  delayed_index
--   ARGV[3]  maximum messages       ARGV[4]  bytes of messages after which to stop
--
-- Returns due messages to their lists; the one due first is the next to be delivered. Returns the number of messages
-- that it moved, and the seconds until the next one is due, "" if none waits.
register('return_due', SHRINKS, function(ARGV)
  local delayed, index, now = ARGV[1], ARGV[2], current_time()
  local room, due = tonumber(ARGV[4]), {}
  for _, tag in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, ARGV[3])) do
    if room <= 0 then break end
    room = room - redis.call('HSTRLEN', delayed, tag)
    due[#due + 1] = tag
  end
  for place = #due, 1, -1 do
    local tag = due[place]
    local list, message = string.match(tag, ' (.*)'), redis.call('HGET', delayed, tag)
    if not message or not list or try('RPUSH', list, message) then
      redis.call('HDEL', delayed, tag)
      redis.call('ZREM', index, tag)
    else
      redis.call('ZADD', index, now + RETRY_S, tag)
    end
  end
  local first = redis.call('ZRANGE', index, 0, 0, 'WITHSCORES')
  return {#due, first[2] and string.format('%.6f', math.max(0, first[2] - now)) or ''}
end)
