"""Leases of the messages that this process holds, and the thread that renews them and returns expired messages.

    `reserved`         hash: tag -> the message as it was in its list
    `reserved_index`   sorted set: tag -> expiry of its lease, by Redis' clock

A *tag* names one reservation of one message: `<process>-<lease seconds>-<reservation>-<position> <list>`. Tags sort in
order of reservation and name the list that the message returns to. A late acknowledgement cannot remove a later
delivery, because that has another tag. The keys differ from kombu's `unacked`: stock workers and Feedmill's workers
never redeliver each other's messages.

A message is held until it is acknowledged or returned. Until then, the lease thread renews its lease. The thread also
returns messages of other processes whose leases expired. When a connection ends, its messages return to their lists,
except *claimed* ones: work on them continues, and their acknowledgements are sent over the next connection. The code
that claims a message must acknowledge it, reject it or drop the claim: garbage collection does none of these.

A returned message is the next to be delivered from its list. Its `delivery_info` then contains `redelivered`, as in
kombu; `delivery_count`, the number of earlier deliveries; and `lapse_count`, the deliveries whose lease expired because
the process vanished or stalled. While a message is handled in isolation, `suspects` are the indexes of its posts that
are on the device, or WHOLE before it starts. If its lease expires then, they are appended to `deaths`.

Channels must provide the options listed in workers/transport/redis_transport.py.
"""

import atexit
import json
import logging
import os
import threading
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakSet

from kombu.transport.virtual import Message as VirtualMessage
from redis import Redis
from redis.exceptions import RedisError

from feedmill.shared import encoding, scripts
from feedmill.shared.broker import PRIORITY_MARK, UNDECODABLE
from feedmill.shared.redis_errors import is_replica

logger = logging.getLogger(__name__)

#: Limits per Redis call, which keep each one to a few milliseconds: leases renewed; expired leases returned; bytes of
#: messages returned, which the last message may exceed.
RENEWALS_PER_CALL, EXPIRED_PER_CALL, EXPIRED_BYTES = 1000, 100, 2**20
#: Bytes of an undecodable message that its stand-in holds.
MAX_UNDECODABLE_BYTES = 2**16
#: Expired leases after which a message is delivered in isolation. One proves nothing: a vanished worker held many
#: messages.
EXPIRIES_BEFORE_ISOLATION = 2
#: Stands for the message itself among the indexes of its posts.
WHOLE = -1
#: Optional parts of a message, and the types that kombu assumes without checking.
PART_TYPES = {"headers": dict, "content-type": str, "content-encoding": str}


class Taken(NamedTuple):
    """A reserved message, its queue, and its tag."""

    queue: str
    tag: str
    message: bytes


class Reservation(NamedTuple):
    """A request for messages of several lists, in order of delivery. prefix: of the messages' tags."""

    reserved: str
    reserved_index: str
    prefix: str
    #: Maximum messages, bytes of messages after which the reservation ends, and seconds of a lease.
    limit: int
    max_bytes: int
    lease_s: float
    #: Each list, with the name of its queue.
    lists: Sequence[tuple[str, str]]

    def command(self) -> tuple[Any, ...]:
        """Return the command, to be sent with others."""
        return scripts.command("reserve", *self[:-1], *(name for name, _ in self.lists))

    def taken(self, answer: Sequence[Any]) -> list[Taken]:
        """Parse the command's answer."""
        sources = (self.lists[number] for number in answer[::2])
        return [
            Taken(queue, f"{self.prefix}-{place:04d} {name}", message)
            for place, ((name, queue), message) in enumerate(zip(sources, answer[1::2], strict=True), 1)
        ]


class UndecodableError(ValueError):
    """A message in a queue cannot be decoded. The text gives the reason."""


def decoded(message: bytes) -> dict[str, Any]:
    """Parse a message. Raises UndecodableError."""
    try:
        found = encoding.read(message)
        body, delivery = found["body"], found["properties"]["delivery_info"]
    except Exception as error:  # kombu's JSON types raise more types of errors than JSON does
        why = str(error) if type(error) is ValueError else type(error).__name__  # other texts quote the message
        raise UndecodableError(f"malformed message ({why})") from error
    if not (isinstance(body, str) and isinstance(delivery, dict)):
        raise UndecodableError("body must be a string, and delivery_info an object")
    if not all(isinstance(found.get(name), kind | None) for name, kind in PART_TYPES.items()):
        raise UndecodableError(f"{', '.join(PART_TYPES)}: wrong type")
    delivery.pop("consumer_tag", None)  # a sender's tag of a no-ack consumer would disable acknowledgement
    return found  # type: ignore[no-any-return]  # the sender controls its content


def stand_in(message: bytes, reason: str) -> dict[str, Any]:
    """Return a message for a consumer to refuse, with the start of an undecodable one as its body."""
    start = b64encode(message[:MAX_UNDECODABLE_BYTES]).decode()
    properties = {"body_encoding": "base64", "delivery_info": {}}
    return {"body": start, "content-type": UNDECODABLE, "content-encoding": reason, "properties": properties}


def count_delivery(message: bytes, *, lapse: bool = False) -> bytes | str:
    """Mark a message as redelivered and increment its counters. Undecodable messages are returned unchanged.

    lapse: its lease expired because its process vanished or stalled.
    """
    try:
        encoding.check_size(message)
        found = json.loads(message)
        info = found["properties"]["delivery_info"]
        info["redelivered"] = True
        if isinstance(found.get("headers"), dict):
            found["headers"]["redelivered"] = True
        info["delivery_count"] = delivery_counter(info, "delivery_count") + 1
        suspects = info.pop("suspects", None)
        if lapse:
            info["lapse_count"] = delivery_counter(info, "lapse_count") + 1
            info["deaths"] = [*deaths_in(info).elements(), *(suspects if isinstance(suspects, list) else [])]
        return json.dumps(found)
    except Exception:  # malformed input can raise any error; raising would block the return of all other messages
        return message


def delivery_counter(delivery_info: Mapping[str, Any], name: str) -> int:
    """Return a counter written by `count_delivery`; 0 if the sender put an invalid value there."""
    found = delivery_info.get(name)
    return found if type(found) is int and 0 < found < 2**31 else 0


def deaths_in(delivery_info: Mapping[str, Any]) -> Counter[int]:
    """Return how many workers died with a message in isolation: by the index of the posts that were on the device, or
    as WHOLE, before any was. Ignores invalid values, which the sender set.
    """
    found = delivery_info.get("deaths")
    return Counter(index for index in found if type(index) is int) if isinstance(found, list) else Counter()


class Leases:
    """Leases of the messages that this process holds in one Redis, and the thread that renews them. Thread-safe."""

    def __init__(self, channel: Any) -> None:
        prefix = channel.global_keyprefix
        self.reserved, self.index = prefix + channel.reserved_key, prefix + channel.reserved_index_key
        self.seconds = float(channel.visibility_timeout)
        self._interval_s = min(float(channel.unacked_restore_interval), self.seconds / 3)
        pool = channel._get_pool()
        #: Timeout of a command, in seconds. Waiting longer would let leases expire.
        self.timeout_s = self._interval_s
        for option in {"socket_timeout", "socket_connect_timeout"} & pool.connection_kwargs.keys():
            pool.connection_kwargs[option] = self.timeout_s
        self.client: Redis = Redis(connection_pool=pool)
        #: Tags of the messages that this process holds, and of those that stay held when their connection ends; with
        #: the bytes of the message in its list.
        self.held: dict[str, int] = {}
        self._claimed: dict[str, int] = {}
        #: Tags of unclaimed messages to return as soon as Redis answers, and the command that returns each.
        self._leaving: dict[str, str] = {}
        #: Tag of the message handled in isolation.
        self._isolated: str | None = None
        #: Tags of delivered messages that wait for isolation. No other message is reserved meanwhile.
        self._waiting_for_isolation: set[str] = set()
        #: Tags whose acknowledgements have not been sent yet.
        self.acknowledged: deque[str] = deque()
        self.channels: WeakSet[Any] = WeakSet()
        #: True if an event loop sends the acknowledgements. It uses only its channels' connections: after a reconnect,
        #: recent results may have to be written again first (shared/results.py).
        self.evented = False
        self._process, self._numbers = uuid4().hex, count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: Time of the next renewal, by the monotonic clock. Times of Redis' last answer, and of its first answer after
        #: the last interruption, by Redis' clock.
        self._renew_at = self._contact = self._since = 0.0
        self._pid = os.getpid()
        atexit.register(self.release)

    def reservation(self, lists: Sequence[tuple[str, str]], limit: int, max_bytes: int) -> Reservation:
        """Return a reservation. Tags of later ones sort later."""
        prefix = f"{self._process}-{self.seconds:g}-{next(self._numbers):012d}"
        return Reservation(self.reserved, self.index, prefix, limit, max_bytes, self.seconds, lists)

    # Held messages.

    def hold(self, tag: str, message: bytes) -> None:
        """Start renewing the lease of a reserved message."""
        with self._lock:
            self.held[tag] = len(message)

    def is_held(self, tag: str) -> bool:
        with self._lock:
            return tag in self.held and tag not in self._leaving

    def claim(self, tag: str) -> None:
        with self._lock:
            if tag in self.held:
                self._claimed[tag] = self.held[tag]

    def unclaim(self, tag: str) -> None:
        with self._lock:
            self._claimed.pop(tag, None)

    @property
    def bytes_claimed(self) -> int:
        with self._lock:
            return sum(self._claimed.values())

    def _forget(self, tag: str) -> None:
        with self._lock:
            self.held.pop(tag, None)
            self._claimed.pop(tag, None)
            self._leaving.pop(tag, None)
            if self._isolated == tag:
                self._isolated = None
            self._waiting_for_isolation.discard(tag)

    # Isolation.

    def admit(self, tag: str, suspicious: bool) -> bool:
        """Return whether a message may be handled now: not while another one is isolated, or waits for that.

        suspicious: handle it alone. Records that in Redis, so that a crash counts against it.
        """
        with self._lock:  # the lease thread may return the message meanwhile
            if self._isolated == tag or tag not in self.held:
                return True
            if self._is_claimed_alone():
                return False
            if suspicious and self._claimed:
                self._waiting_for_isolation.add(tag)
                return False
            self._waiting_for_isolation.discard(tag)
        if suspicious:
            self._suspect(tag, [WHOLE])
            with self._lock:
                self._isolated = tag if tag in self.held else None
        return True

    def suspect(self, tag: str, posts: Sequence[int]) -> None:
        if self._isolated == tag:
            self._suspect(tag, posts)

    def _suspect(self, tag: str, posts: Sequence[int]) -> None:
        message: Any = self.client.hget(self.reserved, tag)
        if message:
            noted = json.loads(message)
            noted["properties"]["delivery_info"]["suspects"] = list(posts)
            scripts.call(self.client, "replace", self.reserved, message, json.dumps(noted), tag)

    def postpone(self, tag: str) -> None:
        if self._isolated == tag and not self._is_claimed_alone():
            self._suspect(tag, [])
            with self._lock:
                self._isolated = None

    def is_isolating(self) -> bool:
        """Return whether a message is handled in isolation, or waits for that."""
        return bool(self._waiting_for_isolation) or self._is_claimed_alone()

    def _is_claimed_alone(self) -> bool:
        return self._isolated in self._claimed

    # Acknowledging and returning messages.

    def take_acknowledged(self) -> list[str]:
        with self._lock:
            return [self.acknowledged.popleft() for _ in range(len(self.acknowledged))]

    def acknowledge(self, tag: str) -> None:
        self.acknowledged.append(tag)  # before `_forget`: the lease thread exits once nothing is held or pending
        self._forget(tag)

    def flush(self) -> None:
        """Send pending acknowledgements. Does not use MULTI, which Redis rejects at `maxmemory`."""
        if tags := self.take_acknowledged():
            try:
                pipe = self.client.pipeline(transaction=False)
                pipe.hdel(self.reserved, *tags)
                pipe.zrem(self.index, *tags)
                pipe.execute()
            except BaseException:
                self.acknowledged.extend(tags)
                raise

    def check_writable(self) -> None:
        """Test that Redis accepts writes. Raises its error otherwise: read-only replica, no permission, disk full."""
        self.client.zrem(self.index, "")
        self.client.hdel(self.reserved, "")

    def return_messages(self, tags: Sequence[str], command: str = "RPUSH", lapse: bool = False) -> None:
        """Return messages that this process holds to their lists. The last tag is the next message to be delivered.

        lapse: as if their leases had expired.
        """
        self._restore(tags, lapse, "+inf", command)
        for tag in tags:
            self._forget(tag)

    def return_unclaimed(self, tags: Iterable[str], command: str = "RPUSH") -> None:
        """Return unclaimed messages, now or as soon as Redis answers. Otherwise their leases would lapse."""
        with self._lock:
            self._leaving |= {tag: command for tag in tags if tag in self.held and tag not in self._claimed}
        with suppress(RedisError, OSError):
            self._return_leaving()

    def _return_leaving(self) -> None:
        with self._lock:
            leaving = list(self._leaving.items())
        for command in {command for _, command in leaving}:
            self.return_messages([tag for tag, by in leaving if by == command], command)

    def _restore(self, tags: Sequence[str], lapse: bool, until: float | str, command: str) -> None:
        """Put messages back into their lists, with their counters. Skip messages whose leases end after `until`.

        command: RPUSH makes a message the next to be delivered, LPUSH the last.
        """
        if tags:
            messages: list[Any] = self.client.hmget(self.reserved, tags)
            counted = (count_delivery(message or b"", lapse=lapse) for message in messages)
            self._call("restore", command, until, *chain.from_iterable(zip(tags, counted, strict=True)))

    # The lease thread.

    def start(self, channel: Any) -> None:
        """Run the lease thread for as long as this channel is open or a message is held."""
        with self._lock:
            self.channels.add(channel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kombu-redis-leases", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause, warned = threading.Event(), False
        while True:
            more = False
            try:
                more, warned = self._run_once(), False
            except Exception as fault:  # any error: leases must be renewed as long as the process lives
                logger.log(logging.DEBUG if warned else logging.WARNING, "cannot renew leases (%s); retrying", fault)
                self._renew_at, warned = 0.0, True
                if is_replica(fault):  # after a failover, a new connection may reach the new master
                    self.client.connection_pool.disconnect(inuse_connections=False)
            with self._lock:
                if not (self.channels or self.held or self.acknowledged):
                    self._thread = None
                    break
            if not more:
                pause.wait(self._interval_s)
        self.client.connection_pool.disconnect(inuse_connections=False)

    def _run_once(self) -> bool:
        """Renew leases that are due, and requeue some expired messages. Return whether more have expired.

        Each call handles a bounded number, so that expired leases cannot delay the renewal of this process's own.
        """
        held: list[str] = []
        if monotonic() >= self._renew_at:
            self._renew_at = monotonic() + self.seconds / 3
            with self._lock:
                # Acknowledgements can wait: for the event loop, or for a worker whose threads are ending. A message
                # whose lease expired meanwhile would be delivered again.
                held = [*self.held, *self.acknowledged]
            for start in range(RENEWALS_PER_CALL, len(held), RENEWALS_PER_CALL):
                self._renew(held[start : start + RENEWALS_PER_CALL], 0)
        settled = self._contact - self._since >= 1.5 * self._interval_s
        now, ended, more = self._renew(held[:RENEWALS_PER_CALL], EXPIRED_PER_CALL if settled else 0)
        if not 0 <= now - self._contact <= 2 * self._interval_s:
            self._since = now  # Redis was unreachable, or its clock was changed
        self._contact = now
        if not self.evented:
            self.flush()
        self._return_leaving()
        self._restore(ended, True, now, "RPUSH")
        return more

    def _renew(self, tags: Sequence[str], limit: int) -> tuple[float, list[str], bool]:
        """Renew these leases. Then find up to `limit` expired ones, latest first, of up to EXPIRED_BYTES.

        Finds none if Redis was unreachable since the last contact: living workers could not renew their leases. Returns
        Redis' time, the tags of expired leases, and whether more may have expired.
        """
        limits = limit, self._contact, 2 * self._interval_s, EXPIRED_BYTES
        now, expired, more = self._call("renew", self.seconds, *limits, *tags)
        return float(now), [tag.decode() for tag in expired], bool(more)

    def _call(self, name: str, *args: Any) -> Any:
        return scripts.call(self.client, name, self.reserved, self.index, *args)

    def release(self) -> None:
        """Send pending acknowledgements and return all held messages without waiting for their leases to expire."""
        if os.getpid() == self._pid and (self.held or self.acknowledged):
            with suppress(RedisError, OSError):
                self.flush()
                self.return_messages(sorted(self.held, reverse=True))


#: Leases by process, keys and connection parameters.
_LEASES: dict[tuple[Any, ...], Leases] = {}


def release() -> None:
    """Return all messages that this process holds. Call before `os._exit`, which skips `atexit` handlers."""
    for leases in _LEASES.values():
        leases.release()


def leases_of(channel: Any) -> Leases:
    keys = channel.global_keyprefix, channel.reserved_key, channel.reserved_index_key
    where = (os.getpid(), *keys, *map(repr, channel.connection.client.__eqhash__()))
    if where not in _LEASES:
        _LEASES[where] = Leases(channel)
    return _LEASES[where]


class LeasedMessage(VirtualMessage):
    """A message that was delivered under a lease. Methods raise redis-py's errors."""

    channel: Any
    delivery_tag: Any

    @property
    def leases(self) -> Leases:
        leases: Leases = self.channel.leases
        return leases

    @property
    def is_held(self) -> bool:
        """True until the message is acknowledged, or returned or about to be."""
        return self.leases.is_held(self.delivery_tag)

    @property
    def queued_size(self) -> int:
        """Bytes of the message in its list; 0 if it is no longer held."""
        return self.leases.held.get(self.delivery_tag, 0)

    @property
    def deliveries(self) -> int:
        """Number of deliveries, including this one."""
        return 1 + delivery_counter(self.delivery_info, "delivery_count")

    @property
    def needs_isolation(self) -> bool:
        """True if the message must be handled in isolation, because workers that held it vanished repeatedly."""
        return delivery_counter(self.delivery_info, "lapse_count") >= EXPIRIES_BEFORE_ISOLATION

    @property
    def deaths(self) -> Counter[int]:
        """Number of workers that died with the message in isolation; see `deaths_in`."""
        return deaths_in(self.delivery_info)

    @property
    def queue(self) -> str | None:
        """Queue that the message came from. Read from the tag, not from the sender's data."""
        return str(self.delivery_tag).partition(" ")[2].partition(PRIORITY_MARK)[0] or None

    def admit(self) -> bool:
        """Return whether the message may be handled now. If not, try again later: another one is isolated, or this one
        needs isolation.
        """
        return not self.is_held or self.leases.admit(self.delivery_tag, self.needs_isolation)

    def claim(self) -> bool:
        """Hold an admitted message until it is acknowledged, rejected or unclaimed, even if its connection ends.

        Returns False, and does nothing, if `admit` does.
        """
        admitted = self.admit()
        if admitted:
            self.leases.claim(self.delivery_tag)
        return admitted

    def unclaim(self) -> None:
        """Drop a claim: the message returns to its queue when its connection ends."""
        self.leases.unclaim(self.delivery_tag)

    def postpone(self) -> None:
        """End the isolation of a message that was admitted and not claimed: it starts later, and others may start."""
        with suppress(RedisError):  # a crash meanwhile counts against the message, although it may not be the cause
            self.leases.postpone(self.delivery_tag)

    def suspect(self, posts: Sequence[int]) -> None:
        """Record which posts to blame if this process vanishes now, if the message is handled in isolation."""
        self.leases.suspect(self.delivery_tag, posts)

    def return_lapsed(self) -> None:
        """Return the message to its list as if this process had vanished, because it may be to blame for a failure."""
        if self.is_held:
            self.leases.return_messages([self.delivery_tag], lapse=True)
