"""The Lua scripts of the leases: reserve, renew and find ended ones, put back, replace, set aside.

shared/leases.py describes the keys. Redis refuses a script at `maxmemory` unless its first write frees memory; after
that it lets the script go on. So each begins by deleting nothing, which also fails on keys of another type before
anything was changed.
"""

#: Takes up to ARGV[2] messages, or ARGV[3] bytes, from lists KEYS[3..], the first of them first; ARGV[4..] says of each
#: list for how many seconds they are leased, 0 for not at all. Returns list and number, list and number, …, and the
#: messages.
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

#: Renews the leases of tags ARGV[6..] in index KEYS[1] for ARGV[1] seconds. Then finds up to ARGV[2] that ended, the
#: latest first, whose messages in hash KEYS[2] have ARGV[5] bytes, or a message more; none when the last contact,
#: ARGV[3], is longer ago than ARGV[4] seconds: Redis was away, and living holders had no chance to renew. Returns the
#: time, the tags found, and whether there may be more. A lease that ends later than its own length from now dates from
#: before Redis' clock was set back; it is cut to that length.
KEEP = """
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

#: Puts messages back that are still held: by ARGV[1], RPUSH for next out, into lists KEYS[3..], tag and message by
#: turns in ARGV[3..]; only where the lease ends by ARGV[2].
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

#: Moves what ARGV[1] holds to the front of list KEYS[3], of which ARGV[3] are kept. Returns how many are there no more.
SET_ASIDE = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
local length = redis.call('LPUSH', KEYS[3], ARGV[2])
redis.call('LTRIM', KEYS[3], 0, ARGV[3] - 1)
return math.max(0, length - ARGV[3])
"""

#: Replaces the message that is held under ARGV[1] by ARGV[2], if it is held still.
REPLACE = """
redis.call('HDEL', KEYS[1], '')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
"""
