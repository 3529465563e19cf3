"""Lua scripts for leases: reserve, renew, find expired, return, replace; and move undecodable messages.

leases.py describes the keys. At `maxmemory` Redis rejects a script at its first write that can use memory, but
lets it continue after a write that cannot. So each script starts with a deletion, even of nothing. This also makes
the script fail on keys of the wrong type before it changes anything.
"""

#: Reserves up to ARGV[2] messages, or until ARGV[3] bytes are reached, from lists KEYS[3..], in that order. ARGV[4..]
#: are the lease lengths in seconds, one per list; 0 takes messages without a lease. Returns a flat array (list number,
#: message count, list number, message count, …) of the lists that had any, and the messages.
RESERVE = """
redis.call('HDEL', KEYS[1], '')
redis.call('ZREM', KEYS[2], '')
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local left, room = tonumber(ARGV[2]), tonumber(ARGV[3])
local runs, messages = {}, {}
for number = 3, #KEYS do
    local list, seconds, before = KEYS[number], tonumber(ARGV[number + 1]), #messages
    while left > 0 and room > 0 do
        local message = redis.call('RPOP', list)
        if not message then break end
        messages[#messages + 1] = message
        left, room = left - 1, room - #message
        if seconds > 0 then
            local tag = string.format('%s-%04d %s', ARGV[1], #messages, list)
            redis.call('HSET', KEYS[1], tag, message)
            redis.call('ZADD', KEYS[2], now + seconds, tag)
        end
    end
    if #messages > before then
        runs[#runs + 1] = number - 3
        runs[#runs + 1] = #messages - before
    end
end
return {runs, messages}
"""

#: Renews the leases of tags ARGV[6..] in index KEYS[1] for ARGV[1] seconds. Then finds up to ARGV[2] expired leases,
#: latest first, until their messages in hash KEYS[2] reach ARGV[5] bytes. Finds none if the last contact, ARGV[3], was
#: more than ARGV[4] seconds ago: Redis was unreachable, and living workers could not renew. Returns the time, the
#: expired tags, and their number if there may be more, else 0. A lease that ends further in the future than its own
#: length was made before Redis' clock was set back; it is shortened to that length.
RENEW = """
redis.call('ZREM', KEYS[1], '')
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
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
"""

#: Returns messages to their lists KEYS[3..] with command ARGV[1]: RPUSH makes a message the next to be delivered.
#: ARGV[3..] alternates tags and messages. Skips messages that are no longer held, or whose lease ends after ARGV[2].
RESTORE = """
for number = 3, #KEYS do
    local tag, message = ARGV[2 * number - 3], ARGV[2 * number - 2]
    local ends = redis.call('ZSCORE', KEYS[2], tag)
    if ARGV[2] == '+inf' or ends and tonumber(ends) <= tonumber(ARGV[2]) then
        redis.call('ZREM', KEYS[2], tag)
        if redis.call('HDEL', KEYS[1], tag) == 1 then redis.call(ARGV[1], KEYS[number], message) end
    end
end
"""

#: Moves the message held under tag ARGV[1] to the front of list KEYS[3], as ARGV[2], and trims that list to ARGV[3]
#: entries. Returns how many were trimmed.
SET_ASIDE = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
local length = redis.call('LPUSH', KEYS[3], ARGV[2])
redis.call('LTRIM', KEYS[3], 0, ARGV[3] - 1)
return math.max(0, length - ARGV[3])
"""

#: Replaces the message held under tag ARGV[1] with ARGV[2], if it is still held.
REPLACE = """
redis.call('HDEL', KEYS[1], '')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
"""
