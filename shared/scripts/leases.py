"""Scripts for leases: reserve, return and replace messages, renew leases, and set undecodable messages aside.

workers/transport/leases.py describes the keys `reserved`, a hash, and `reserved_index`, a sorted set.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.scripts import SHRINKS, Script, as_text

#:   KEYS[1]  reserved          KEYS[2]  reserved_index     KEYS[3+] lists, in order of delivery
#:   ARGV[1]  prefix of tags    ARGV[2]  maximum messages   ARGV[3]  bytes after which to stop
#:   ARGV[4]  length of a lease in seconds
#:
#: Returns a flat array (list number, message count, list number, message count, …) of the lists that had messages, and
#: the messages.
_RESERVE: Script[tuple[list[int], list[bytes]]] = Script(
    "leases_reserve",
    SHRINKS,
    """
redis.call('HDEL', KEYS[1], '')
redis.call('ZREM', KEYS[2], '')
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
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
""",
)
#: A lease that ends later than its length from now was made before Redis' clock was set back. It is shortened to its
#: length.
#:
#:   KEYS[1]  reserved_index                   KEYS[2]  reserved
#:   ARGV[1]  length of a lease, seconds       ARGV[2]  maximum expired leases to find
#:   ARGV[3]  time of the last contact         ARGV[4]  maximum seconds since the last contact
#:   ARGV[5]  bytes of expired messages after which to stop    ARGV[6+] tags to renew
#:
#: Returns the time, the tags of expired leases, and their number if more leases may have expired, else 0.
_RENEW: Script[tuple[str | bytes, list[str | bytes], int]] = Script(
    "leases_renew",
    SHRINKS,
    """
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
""",
)
#:   KEYS[1]  reserved    KEYS[2]  reserved_index    KEYS[3+] list of each message
#:   ARGV[1]  RPUSH or LPUSH    ARGV[2]  latest end of a lease, or "+inf"    ARGV[3+] tag and message of each
_RESTORE: Script[None] = Script(
    "leases_restore",
    SHRINKS,
    """
for number = 3, #KEYS do
    local tag, message = ARGV[2 * number - 3], ARGV[2 * number - 2]
    local ends = redis.call('ZSCORE', KEYS[2], tag)
    if ARGV[2] == '+inf' or ends and tonumber(ends) <= tonumber(ARGV[2]) then
        redis.call('ZREM', KEYS[2], tag)
        if redis.call('HDEL', KEYS[1], tag) == 1 then redis.call(ARGV[1], KEYS[number], message) end
    end
end
""",
)
#:   KEYS[1]  reserved    KEYS[2]  reserved_index    KEYS[3]  undecodable, list
#:   ARGV[1]  tag         ARGV[2]  the message       ARGV[3]  maximum entries of that list
_SET_ASIDE: Script[int] = Script(
    "leases_set_aside",
    SHRINKS,
    """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
local length = redis.call('LPUSH', KEYS[3], ARGV[2])
redis.call('LTRIM', KEYS[3], 0, ARGV[3] - 1)
return math.max(0, length - ARGV[3])
""",
)
#:   KEYS[1]  reserved    ARGV[1]  tag    ARGV[2]  the new message
_REPLACE: Script[None] = Script(
    "leases_replace",
    SHRINKS,
    """
redis.call('HDEL', KEYS[1], '')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
""",
)


class Taken(NamedTuple):
    """A reserved message, the position of its list in the reservation, and its tag."""

    list_number: int
    tag: str
    message: bytes


class Reservation(NamedTuple):
    """A request for messages of several lists, in order of delivery."""

    reserved: str
    reserved_index: str
    #: Prefix of the messages' tags.
    prefix: str
    lists: Sequence[str]
    #: Seconds of a lease.
    lease_s: float
    limit: int
    #: Bytes of messages after which the reservation ends.
    max_bytes: int

    def _parts(self) -> tuple[list[str], list[Any]]:
        """Return the script's keys and arguments."""
        keys = [self.reserved, self.reserved_index, *self.lists]
        return keys, [self.prefix, self.limit, self.max_bytes, self.lease_s]

    def command(self) -> tuple[Any, ...]:
        """Return the command, to be sent with others."""
        return _RESERVE.command(*self._parts())

    def taken(self, answer: tuple[Sequence[int], Sequence[bytes]]) -> list[Taken]:
        """Parse the command's answer."""
        runs, messages = answer
        numbers = [number for number, times in zip(runs[::2], runs[1::2], strict=True) for _ in range(times)]
        return [
            Taken(number, f"{self.prefix}-{place:04d} {self.lists[number]}", message)
            for place, (number, message) in enumerate(zip(numbers, messages, strict=True), 1)
        ]

    def reserve(self, redis: Redis) -> list[Taken]:
        return self.taken(_RESERVE(redis, *self._parts()))


def list_of(tag: str) -> str:
    """Return the list that a message was taken from."""
    return tag.partition(" ")[2]


class LeaseScripts:
    """Scripts on messages under leases."""

    def __init__(self, redis: Redis, reserved: str, index: str) -> None:
        self._redis, self._reserved, self._index = redis, reserved, index

    def renew(
        self, tags: Sequence[str], lease_s: float, contact: float, max_silence_s: float, limit: int, max_bytes: int
    ) -> tuple[float, list[str], bool]:
        """Renew the leases of these tags for `lease_s` seconds. Then find up to `limit` expired leases, latest first.

        Stops when the messages of the expired leases reach `max_bytes`. Finds none if the last `contact`, by Redis'
        clock, was more than `max_silence_s` ago: Redis was unreachable, and living workers could not renew their
        leases. Returns Redis' time, the tags of expired leases, and whether more may have expired.
        """
        arguments = [lease_s, limit, contact, max_silence_s, max_bytes, *tags]
        now, expired, more = _RENEW(self._redis, [self._index, self._reserved], arguments)
        return float(now), [as_text(tag) for tag in expired], bool(more)

    def restore(self, messages: Sequence[tuple[str, str | bytes]], until: float | None, command: str) -> None:
        """Return messages, by tag, to their lists. RPUSH makes a message the next to be delivered, LPUSH the last.

        Skips messages that are no longer held, or whose lease ends after `until`.
        """
        parts = (part for each in messages for part in each)
        keys = [self._reserved, self._index, *(list_of(tag) for tag, _ in messages)]
        _RESTORE(self._redis, keys, [command, "+inf" if until is None else until, *parts])

    def set_aside(self, tag: str, message: bytes, undecodable: str, limit: int) -> int:
        """Move a held message to the front of a list, and trim the list. Return how many messages were trimmed."""
        return _SET_ASIDE(self._redis, [self._reserved, self._index, undecodable], [tag, message, limit])

    def replace(self, tag: str, message: str | bytes) -> None:
        """Replace a message if it is still held."""
        _REPLACE(self._redis, [self._reserved], [tag, message])
