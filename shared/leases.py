"""What a process holds of a Redis' messages: reserved under leases, renewed while it lives, put back when they end.

    `reserved`         hash: tag -> the message as it lay in its list
    `reserved_index`   sorted set: tag -> when its lease ends, by Redis' own clock
    `undecodable`      list, newest first, bounded: what is no message and was set aside

A *tag* names one reservation of one message: `<process>-<seconds of a lease>-<reservation>-<position> <list>`. Tags
sort in the order of taking, say where the message goes back to, and a late acknowledgement cannot take away a later
delivery. The keys are not kombu's `unacked`: neither sweeps what the other holds.

A message is held until it is acknowledged or given back; a thread renews the leases meanwhile, and puts back what other
processes stopped renewing. When a connection ends, its messages go back to their lists, but for those that are
*claimed*: work on them goes on, and their acknowledgements go out over the next connection. Who claims a message must
acknowledge it, reject it or give up the claim. Neither references nor garbage collection decide anything.

A message that comes back is the next out of its own list. Its `delivery_info` then has `redelivered`, as with kombu;
`delivery_count`, its earlier deliveries; `lapse_count`, how many of those ended with a lease that nobody renewed, which
means that the process vanished or stood still; and `alone_lapse_count`, in how many of these it was handled alone
(shared/transport.py).

Channels are expected to have the options that shared/transport.py names.
"""

import atexit
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any
from uuid import uuid4
from weakref import WeakSet

from redis import Redis
from redis.exceptions import RedisError

from shared.encoding import is_too_large, memory_of
from shared.lease_scripts import KEEP, REPLACE, RESERVE, RESTORE, SET_ASIDE
from shared.refusals import is_replica

logger = logging.getLogger(__name__)

#: Bytes of one message, at most, as it lies in its list and as it is unpacked: a thousand of the longest posts that
#: Reddit takes. And bytes of memory, at most, of the objects that are made of it: four times as many.
MAX_MESSAGE = 64 * 2**20
MAX_DECODED = 4 * MAX_MESSAGE
#: Tags renewed, leases looked at, and bytes put back (or one message more) in one call: each takes Redis a few
#: milliseconds at most.
RENEWED, SWEPT, SWEPT_BYTES = 1000, 100, 2**20
#: Bytes that are kept of what is no message, at most: 64 MiB of all of it, unless `undecodable_limit` is set higher.
KEPT_ASIDE = 2**16


@dataclass(slots=True)
class Held:
    """A message that this process holds."""

    #: Bytes, as it lay in its list; 0 where it was taken by itself.
    queued: int = 0
    #: Estimated bytes of memory, and once it is delivered those of its body as well.
    size: int = 0
    delivered: bool = False
    #: Whether it is held beyond the end of its connection.
    claimed: bool = False
    #: Whether it waits for a time, or a rate limit.
    later: bool = False


class Leases:
    """What this process holds of one Redis, and the thread that keeps it. Thread-safe."""

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
        script = self.client.register_script
        self._keep, self._restore, self._set_aside, self._replace = map(script, (KEEP, RESTORE, SET_ASIDE, REPLACE))
        self.reserve = script(RESERVE)
        #: By tag.
        self.held: dict[str, Held] = {}
        #: Estimated bytes of the delivered messages, and apart from them of those that wait for something else.
        self.bytes_held = self.bytes_later = 0
        #: The tag of the message that is handled alone, and the message as it came.
        self._alone: tuple[str, bytes] | None = None
        #: Tags of delivered messages that wait to be handled alone: nothing else is delivered meanwhile.
        self.waiting_alone: set[str] = set()
        #: Tags of messages that are to go back as soon as Redis answers, and the command that puts them back.
        self._returning: deque[tuple[list[str], str]] = deque()
        #: Tags whose acknowledgement waits to be sent.
        self.acknowledged: deque[str] = deque()
        self.channels: WeakSet[Any] = WeakSet()
        #: Whether an event loop sends acknowledgements, over the connections of its channels alone: what it has stored
        #: before may have to be written again first (shared/replay.py).
        self.evented = False
        self._process, self._numbers = uuid4().hex, count()
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        #: When leases are to be renewed, by the monotonic clock. By Redis' clock: its last answer, and since when it
        #: has answered without a gap.
        self._renew_at = self._contact = self._since = 0.0
        self._pid = os.getpid()
        atexit.register(self.release)

    def prefix(self) -> str:
        """What the tags of one reservation begin with; later ones sort later."""
        return f"{self._process}-{self.seconds:g}-{next(self._numbers):012d}"

    # What is held.

    def hold(self, tag: str, message: bytes) -> None:
        """Renew the lease of a reserved message from now on."""
        with self._lock:
            self.held[tag] = Held(len(message), memory_of(message))

    def deliver(self, tag: str, size: int) -> None:
        """Note that a message was delivered, and the bytes of memory that its body takes."""
        with self._lock:
            found = self.held.setdefault(tag, Held())
            found.size += size
            found.delivered = True
            self.bytes_held += found.size

    def claim(self, tag: str) -> None:
        """Hold a message until it is acknowledged or given back, even past the end of its connection."""
        with self._lock:
            if found := self.held.get(tag):
                found.claimed = True
                if found.later:
                    found.later = False
                    self.bytes_held += found.size
                    self.bytes_later -= found.size

    def unclaim(self, tag: str) -> None:
        """Give up a claim: the message goes back when its connection ends."""
        if found := self.held.get(tag):
            found.claimed = False

    def are_claimed(self) -> bool:
        """Return whether any message is being worked on."""
        with self._lock:
            return any(found.claimed for found in self.held.values())

    def put_off(self, tag: str) -> None:
        """Count a message that waits for a time, or a rate limit, apart from those that are worked on."""
        with self._lock:
            found = self.held.get(tag)
            if found and not (found.claimed or found.later):
                found.later = True
                self.bytes_held -= found.size
                self.bytes_later += found.size

    def _forget(self, tag: str) -> None:
        with self._lock:
            found = self.held.pop(tag, None)
            if found and found.later:
                self.bytes_later -= found.size
            elif found and found.delivered:
                self.bytes_held -= found.size
            if self._alone and self._alone[0] == tag:
                self._alone = None
            self.waiting_alone.discard(tag)

    # A message that is handled alone.

    def begin_alone(self, tag: str, message: bytes) -> None:
        """Note in Redis that this message is handled alone, so that a vanished process counts against it."""
        self._alone = tag, message
        noted = json.loads(message)
        noted["properties"]["delivery_info"]["alone"] = True
        self._replace([self.reserved], [tag, json.dumps(noted)])

    def note_alone(self, tag: str) -> None:
        """Note the same of a message that was delivered before and is begun now."""
        if tag in self.held and not self.is_alone(tag):
            held: Any = self.client.hget(self.reserved, tag)
            if held:
                self.begin_alone(tag, held)

    def end_alone(self, tag: str) -> None:
        """Take the note back: the message has proved harmless, or what comes next is watched elsewhere."""
        alone = self._alone
        if alone and alone[0] == tag:
            self._replace([self.reserved], [tag, alone[1]])

    def is_alone(self, tag: str) -> bool:
        alone = self._alone
        return bool(alone and alone[0] == tag)

    def is_one_alone(self) -> bool:
        """Return whether a message is being handled alone."""
        alone = self._alone
        found = self.held.get(alone[0]) if alone else None
        return bool(found and found.claimed)

    # How it ends.

    def take_acknowledged(self) -> list[str]:
        with self._lock:
            return [self.acknowledged.popleft() for _ in range(len(self.acknowledged))]

    def acknowledge(self, tag: str) -> None:
        self.acknowledged.append(tag)  # first: with nothing left to do, the thread ends
        self._forget(tag)

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

    def give_back(self, tags: Sequence[str], command: str = "RPUSH") -> None:
        """Put back messages that this process holds, in this order: the last is the next out."""
        delivered = {tag: not (found := self.held.get(tag)) or found.delivered for tag in tags}
        self._put_back(tags, "+inf", command, lambda tag, message: counted(message) if delivered[tag] else message)
        for tag in tags:
            self._forget(tag)

    def let_go(self, tags: Iterable[str], command: str = "RPUSH") -> None:
        """Give back what is not claimed, now or as soon as Redis answers. Its leases are renewed until then."""
        free = [tag for tag in tags if (found := self.held.get(tag)) and not found.claimed]
        self._returning.append((free, command))
        with suppress(RedisError, OSError):
            self._return()

    def _return(self) -> None:
        while self._returning:
            with self._lock:
                tags, command = self._returning.popleft() if self._returning else ([], "")
            try:
                self.give_back([tag for tag in tags if tag in self.held], command)
            except BaseException:
                self._returning.appendleft((tags, command))
                raise

    def _put_back(self, tags: Sequence[str], until: str, command: str, marked: Any) -> None:
        if tags:
            arguments: list[Any] = [command, until]
            messages: list[Any] = self.client.hmget(self.reserved, tags)
            for tag, message in zip(tags, messages, strict=True):
                arguments += (tag, marked(tag, message or b""))
            self._restore([self.reserved, self.index, *(tag.partition(" ")[2] for tag in tags)], arguments)

    def set_aside(self, tag: str, message: bytes, reason: str) -> None:
        """Keep for people what is no message, or its beginning, so that no worker meets it again."""
        queue = tag.partition(" ")[2]
        logger.error("undecodable message in %r (%s): moved to %r", queue, reason, self.undecodable)
        keys = [self.reserved, self.index, self.undecodable]
        self._forget(tag)
        if gone := self._set_aside(keys, [tag, message[:KEPT_ASIDE], self._kept_aside]):
            logger.warning("%r is full: %d of its oldest elements were dropped", self.undecodable, gone)

    # The thread.

    def start(self, channel: Any) -> None:
        """Keep leases, and look for ended ones, for as long as this channel is open or something is held."""
        with self._lock:
            self.channels.add(channel)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._run, name="kombu-redis-leases", daemon=True)
                self._keeper.start()

    def _run(self) -> None:
        pause, told = threading.Event(), False
        while True:
            more = False
            try:
                more, told = self._turn(), False
            except Exception as fault:  # whatever it is: while this process lives, so must its leases
                logger.log(logging.DEBUG if told else logging.WARNING, "leases cannot be renewed for now (%s)", fault)
                self._renew_at, told = 0.0, True
                if is_replica(fault):  # the master is elsewhere, and a new connection may lead there
                    self.client.connection_pool.disconnect(inuse_connections=False)
            with self._lock:
                if not (self.channels or self.held or self.acknowledged):
                    self._keeper = None
                    break
            if not more:
                pause.wait(self._interval)
        self.client.connection_pool.disconnect(inuse_connections=False)

    def _turn(self) -> bool:
        """Renew leases when they are due, then put back some that ended; whether there are more.

        The work of a turn is bounded, so that whatever ends elsewhere, the leases of this process are renewed.
        """
        held: list[str] = []
        if monotonic() >= self._renew_at:
            self._renew_at = monotonic() + self.seconds / 3
            with self._lock:
                held = list(self.held)
            for start in range(RENEWED, len(held), RENEWED):
                self._look(held[start : start + RENEWED], 0)
        settled = self._contact - self._since >= 1.5 * self._interval
        now, ended, more = self._look(held[:RENEWED], SWEPT if settled else 0)
        if not 0 <= float(now) - self._contact <= 2 * self._interval:
            self._since = float(now)  # Redis was away, or its clock was set
        self._contact = float(now)
        if not self.evented:
            self.flush()
        self._return()
        self._put_back([tag.decode() for tag in ended], now.decode(), "RPUSH", lambda _, message: lapsed(message))
        return bool(more)

    def _look(self, renewed: Sequence[str], limit: int) -> Any:
        """Renew these leases, and find up to `limit` that ended; return what KEEP does."""
        arguments: list[Any] = [self.seconds, limit, self._contact, 2 * self._interval, SWEPT_BYTES, *renewed]
        return self._keep([self.index, self.reserved], arguments)

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


def counted(message: bytes, *, lapse: bool = False) -> bytes | str:
    """A message that comes back, marked as redelivered and counted. What is no message stays as it is."""
    try:
        if is_too_large(message, MAX_DECODED):
            return message
        found = json.loads(message)
        info = found["properties"]["delivery_info"]
        info["redelivered"] = True
        if isinstance(found.get("headers"), dict):
            found["headers"]["redelivered"] = True
        alone = info.pop("alone", None) is True
        counts = {"delivery_count": True, "lapse_count": lapse, "alone_lapse_count": lapse and alone}
        info |= {name: count_in(info, name) + 1 for name, applies in counts.items() if applies}
        return json.dumps(found)
    except Exception:  # what a sender can put there has many; without an answer nothing else would come back either
        return message


def lapsed(message: bytes) -> bytes | str:
    """A message that comes back because its lease ended: its process vanished, or stood still."""
    return counted(message, lapse=True)


def count_in(delivery_info: dict[str, Any], name: str) -> int:
    """A count that `counted` made; 0 where a sender put something else in its place."""
    found = delivery_info.get(name)
    return found if type(found) is int and 0 < found < 2**31 else 0
