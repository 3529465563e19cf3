"""What a process holds of a Redis' messages: reserved under leases, renewed while it lives, put back when they end.

    `reserved`         hash: tag -> the message as it lay in its list
    `reserved_index`   sorted set: tag -> when its lease ends, by Redis' own clock
    `undecodable`      list, newest first, bounded: what is no message and was set aside

A *tag* names one reservation of one message: `<process>-<reservation>-<position> <list>`. Tags sort in the order of
taking, say where the message goes back to, and a late acknowledgement cannot take away a later delivery. The keys are
not kombu's `unacked`: neither sweeps what the other holds.

What a process holds is kept for it whole, whichever connection it came over. A thread renews each lease for as
long as the message is not acknowledged and *something still refers to it*, and puts back what nobody renews, whoever
took it. So a lost connection costs nothing: what works on a message goes on, and its acknowledgement goes out over the
next one. A message that comes back is the next out of its own list; its `delivery_info` then has `redelivered`, as with
kombu, and `delivery_count`, how many times it was delivered before.

What it takes for granted of a channel: the options that shared/transport.py names, and where its Redis is.
"""

import atexit
import gc
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any
from uuid import uuid4
from weakref import WeakSet, ref

from redis import Redis
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

#: Takes up to ARGV[2] messages, or ARGV[3] bytes, from lists KEYS[3..], the first of them first; ARGV[4..] says of each
#: list for how many seconds they are leased, 0 for not at all. Returns list and number, list and number, …, and the
#: messages. The first two commands fail on keys of another type before anything is taken. Once a script has
#: written, Redis lets it go on at `maxmemory`: RPOP takes memory from nobody.
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

#: Renews the leases of tags ARGV[5..] in index KEYS[1] for ARGV[1] seconds, then finds up to ARGV[2] that ended, the
#: latest first, unless the last contact, ARGV[3], is longer ago than ARGV[4] seconds: Redis was away, and living
#: holders had no chance to renew. Returns the time and what was found. For ZREM, of nothing, see above.
KEEP = """
redis.call('ZREM', KEYS[1], '')
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
for number = 5, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + ARGV[1], ARGV[number]) end
local ended = {}
if now - ARGV[3] <= tonumber(ARGV[4]) then
    ended = redis.call('ZREVRANGEBYSCORE', KEYS[1], now, '-inf', 'LIMIT', 0, ARGV[2])
end
return {string.format('%.6f', now), ended}
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

#: Tags renewed, or leases looked at, in one call: a call of either size takes Redis a millisecond or so.
RENEWED, SWEPT = 1000, 100
#: Bytes that are kept of what is no message, at most: 64 MiB of all of it, unless `undecodable_limit` is set higher.
KEPT_ASIDE = 2**16
#: Seconds between two collections of garbage, while something is held that came over a closed channel: requests that
#: Celery drops with a lost connection refer to themselves.
COLLECT = 5.0


class Held(ref[Any]):
    """A message, for as long as something else refers to it, and how many bytes it has."""

    __slots__ = ("size",)
    size: int


class Leases:
    """What this process holds of one Redis, and the thread that keeps it."""

    def __init__(self, channel: Any) -> None:
        prefix = channel.global_keyprefix
        self.reserved, self.index, self.undecodable = (
            prefix + key for key in (channel.reserved_key, channel.reserved_index_key, channel.undecodable_key)
        )
        self.seconds = float(channel.visibility_timeout)
        self._interval = min(float(channel.unacked_restore_interval), self.seconds / 3)
        self._kept_aside = channel.undecodable_limit
        pool = channel._get_pool()
        #: An answer that takes longer than this would let leases end.
        self.patience = self._interval
        for option in {"socket_timeout", "socket_connect_timeout"} & pool.connection_kwargs.keys():
            pool.connection_kwargs[option] = self.patience
        self.client: Redis = Redis(connection_pool=pool)
        self._keep, self._restore, self._set_aside = map(self.client.register_script, (KEEP, RESTORE, SET_ASIDE))
        self.reserve = self.client.register_script(RESERVE)
        #: By tag.
        self.held: dict[str, Held] = {}
        #: Of those that came over a channel that is closed: since when, by tag.
        self.left_behind: dict[str, float] = {}
        self._patience_left_behind = float(channel.left_behind_timeout)
        #: Tags whose acknowledgement waits to be sent.
        self.acknowledged: deque[str] = deque()
        self.channels: WeakSet[Any] = WeakSet()
        self._process, self._numbers = uuid4().hex, count()
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._pid = os.getpid()
        atexit.register(self.release)

    def prefix(self) -> str:
        """What the tags of one reservation begin with; later ones sort later."""
        return f"{self._process}-{next(self._numbers):012d}"

    def hold(self, tag: str, message: Any) -> None:
        self.held[tag] = held = Held(message)
        held.size = len(message.body)

    def bytes_held(self) -> int:
        return sum(held.size for held in tuple(self.held.values()))

    def take_acknowledged(self) -> list[str]:
        with self._lock:
            return [self.acknowledged.popleft() for _ in range(len(self.acknowledged))]

    def acknowledge(self, tag: str) -> None:
        self.held.pop(tag, None)
        self.acknowledged.append(tag)

    def flush(self) -> None:
        """Send the acknowledgements that wait. Not by MULTI, which is refused at `maxmemory`."""
        if tags := self.take_acknowledged():
            try:
                pipe = self.client.pipeline(transaction=False)
                pipe.hdel(self.reserved, *tags)
                pipe.zrem(self.index, *tags)
                pipe.execute()
            except BaseException:
                self.acknowledged.extend(tags)
                raise

    def try_writing(self) -> None:
        """Raises what Redis answers where nothing can be reserved: a replica, no permission, a disk that is full."""
        self.client.zrem(self.index, "")
        self.client.hdel(self.reserved, "")

    def give_back(self, tags: Sequence[str], until: str = "+inf", command: str = "RPUSH") -> None:
        """Put messages back that are held under these tags, in this order: the last is the next out."""
        if tags:
            arguments: list[Any] = [command, until]
            messages: list[Any] = self.client.hmget(self.reserved, tags)
            for tag, message in zip(tags, messages, strict=True):
                arguments += (tag, marked(message or b""))
            self._restore([self.reserved, self.index, *(tag.partition(" ")[2] for tag in tags)], arguments)
            if until == "+inf":
                for tag in tags:
                    self.held.pop(tag, None)

    def set_aside(self, tag: str, message: bytes, reason: str) -> None:
        """Keep for people what is no message, or its beginning, so that no worker meets it again."""
        queue = tag.partition(" ")[2]
        logger.error("an element of %r is no message (%s); it goes to %r", queue, reason, self.undecodable)
        keys = [self.reserved, self.index, self.undecodable]
        if gone := self._set_aside(keys, [tag, message[:KEPT_ASIDE], self._kept_aside]):
            logger.warning("%r is full: %d of its oldest elements were dropped", self.undecodable, gone)

    def start(self, channel: Any) -> None:
        """Keep leases, and look for ended ones, for as long as this channel is open or something is held."""
        with self._lock:
            self.channels.add(channel)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._run, name="kombu-redis-leases", daemon=True)
                self._keeper.start()

    def _run(self) -> None:
        renew_at = contact = since = collected_at = 0.0
        pause, told = threading.Event(), False
        while True:
            try:
                self.flush()
                held: list[str] = []
                if self._are_left_behind() and monotonic() - collected_at > COLLECT:
                    gc.collect()
                    collected_at = monotonic()
                if monotonic() >= renew_at:
                    renew_at = monotonic() + self.seconds / 3
                    held = self._living()
                    for start in range(RENEWED, len(held), RENEWED):
                        self._keep([self.index], [self.seconds, 0, 0, 0, *held[start : start + RENEWED]])
                settled = contact - since >= 1.5 * self._interval
                now, ended = self._keep(
                    [self.index],
                    [self.seconds, SWEPT if settled else 0, contact, 2 * self._interval, *held[:RENEWED]],
                )
                if float(now) - contact > 2 * self._interval:
                    since = float(now)
                contact = float(now)
                while ended:
                    self.give_back([tag.decode() for tag in ended], until=now.decode())
                    _, ended = self._keep([self.index], [self.seconds, SWEPT, contact, 2 * self._interval])
                told = False
            except Exception as fault:  # whatever it is: while this process lives, so must its leases
                logger.log(logging.DEBUG if told else logging.WARNING, "leases cannot be renewed for now (%s)", fault)
                renew_at, told = 0.0, True
            with self._lock:
                if not (self.channels or self._living() or self.acknowledged):
                    self._keeper = None
                    break
            pause.wait(self._interval)
        self.client.connection_pool.disconnect(inuse_connections=False)

    def _living(self) -> list[str]:
        """Tags of what something refers to. The others are forgotten; nobody can acknowledge them any more."""
        for tag in tuple(self.held):
            if (message := self.held.get(tag)) and message() is None:
                self.held.pop(tag, None)
        return list(self.held)

    def _are_left_behind(self) -> bool:
        """Whether something of closed channels is held still; what has been for too long is forgotten."""
        for tag, since in tuple(self.left_behind.items()):
            if monotonic() - since > self._patience_left_behind:
                self.held.pop(tag, None)
            if tag not in self.held:
                self.left_behind.pop(tag, None)
        return bool(self.left_behind)

    def release(self) -> None:
        """What this process leaves unfinished need not wait for its lease."""
        if os.getpid() == self._pid and (self.held or self.acknowledged):
            with suppress(RedisError, OSError):
                self.flush()
                self.give_back(sorted(self.held, reverse=True))


#: By connection parameters and keys.
_LEASES: dict[tuple[Any, ...], Leases] = {}


def release() -> None:
    """Put back all that this process holds: for an end by `os._exit`, of which `atexit` does not hear."""
    for leases in _LEASES.values():
        leases.release()


def leases_of(channel: Any) -> Leases:
    keys = channel.global_keyprefix, channel.reserved_key, channel.reserved_index_key
    where = (os.getpid(), *keys, *map(repr, channel.connection.client.__eqhash__()))
    if where not in _LEASES:
        _LEASES[where] = Leases(channel)
    return _LEASES[where]


def marked(message: bytes) -> bytes | str:
    """A message that comes back: it says so, and how many times. What is no message stays as it is."""
    try:
        found = json.loads(message)
        info = found["properties"]["delivery_info"]
        found["headers"]["redelivered"] = info["redelivered"] = True
        info["delivery_count"] = int(info.get("delivery_count", 0)) + 1
        return json.dumps(found)
    except Exception:  # what a sender can put there has many; without an answer nothing else would come back either
        return message
