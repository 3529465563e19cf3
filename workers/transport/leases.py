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
kombu; `delivery_count`, the number of earlier deliveries; `lapse_count`, the deliveries whose lease expired because the
process vanished or stalled; and `alone_lapse_count`, the deliveries in isolation among those (`admit`).

Channels must provide the options listed in workers/transport/redis_transport.py.
"""

import atexit
import json
import logging
import os
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any
from uuid import uuid4
from weakref import WeakSet

from kombu.utils.json import loads
from redis import Redis
from redis.exceptions import RedisError

from feedmill.shared import encoding
from feedmill.shared.broker import UNDECODABLE
from feedmill.shared.redis_errors import is_replica
from feedmill.shared.scripts import call
from feedmill.shared.scripts.leases import LeaseScripts

logger = logging.getLogger(__name__)

#: Limits per Redis call, which keep each one to a few milliseconds: leases renewed; expired leases returned; bytes of
#: messages returned, which the last message may exceed.
RENEWALS_PER_CALL, EXPIRED_PER_CALL, EXPIRED_BYTES = 1000, 100, 2**20
#: Bytes of an undecodable message that its stand-in holds.
MAX_UNDECODABLE_BYTES = 2**16
#: Expired leases after which a message is delivered in isolation. One proves nothing: a vanished worker held many
#: messages.
EXPIRIES_BEFORE_ISOLATION = 2
#: Optional parts of a message, and the types that kombu assumes without checking.
PART_TYPES = {"headers": dict, "content-type": str, "content-encoding": str}


class UndecodableError(ValueError):
    """A message in a queue cannot be decoded. The text gives the reason."""


def decoded(message: bytes) -> dict[str, Any]:
    """Parse a message. Raises UndecodableError. Uses kombu's slow parser only for messages with kombu's JSON types."""
    try:
        encoding.check_size(message)
        text = message.decode()
        found = loads(text) if '"__type__"' in text else json.loads(text)
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


def needs_isolation(delivery_info: Mapping[str, Any]) -> bool:
    """Return whether a message must be delivered in isolation: workers that held it vanished repeatedly."""
    return delivery_counter(delivery_info, "lapse_count") >= EXPIRIES_BEFORE_ISOLATION


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
        alone = info.pop("alone", None) is True
        counts = {"delivery_count": True, "lapse_count": lapse, "alone_lapse_count": lapse and alone}
        info |= {name: delivery_counter(info, name) + 1 for name, applies in counts.items() if applies}
        return json.dumps(found)
    except Exception:  # malformed input can raise any error; raising would block the return of all other messages
        return message


def delivery_counter(delivery_info: Mapping[str, Any], name: str) -> int:
    """Return a counter written by `count_delivery`; 0 if the sender put an invalid value there."""
    found = delivery_info.get(name)
    return found if type(found) is int and 0 < found < 2**31 else 0


@dataclass(slots=True)
class Held:
    """A message that this process holds."""

    #: Bytes of the message in its list.
    size: int
    delivered: bool = False
    #: True if the message stays held when its connection ends.
    claimed: bool = False


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
        self.scripts = LeaseScripts(self.client, self.reserved, self.index)
        #: Messages by tag.
        self.held: dict[str, Held] = {}
        #: Bytes of claimed messages.
        self.bytes_claimed = 0
        #: The message handled in isolation: its tag; and in Redis, as received, and with a note of its isolation.
        self._isolated: tuple[str, bytes, str] | None = None
        #: Tags of delivered messages that wait for isolation. No other message is reserved meanwhile.
        self._waiting_for_isolation: set[str] = set()
        #: Messages to return as soon as Redis answers: their tags, and the command that returns them.
        self._pending_returns: deque[tuple[list[str], str]] = deque()
        #: Tags whose acknowledgements have not been sent yet.
        self.acknowledged: deque[str] = deque()
        self.channels: WeakSet[Any] = WeakSet()
        #: True if an event loop sends the acknowledgements. It uses only its channels' connections: after a reconnect,
        #: recent results may have to be written again first (shared/replay.py).
        self.evented = False
        self._process, self._numbers = uuid4().hex, count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: Time of the next renewal, by the monotonic clock. Times of Redis' last answer, and of its first answer after
        #: the last interruption, by Redis' clock.
        self._renew_at = self._contact = self._since = 0.0
        self._pid = os.getpid()
        atexit.register(self.release)

    def prefix(self) -> str:
        """Return a new prefix for the tags of one reservation. Later prefixes sort later."""
        return f"{self._process}-{self.seconds:g}-{next(self._numbers):012d}"

    # Held messages.

    def hold(self, tag: str, message: bytes) -> None:
        """Start renewing the lease of a reserved message."""
        with self._lock:
            self.held[tag] = Held(len(message))

    def deliver(self, tag: str) -> None:
        """Record the delivery of a message."""
        with self._lock:
            if message := self.held.get(tag):
                message.delivered = True

    def claim(self, tag: str) -> None:
        """Hold a message until it is acknowledged or returned, even if its connection ends."""
        with self._lock:
            if (message := self.held.get(tag)) and not message.claimed:
                message.claimed = True
                self.bytes_claimed += message.size

    def unclaim(self, tag: str) -> None:
        """Drop a claim: the message returns to its list when its connection ends."""
        with self._lock:
            if message := self.held.get(tag):
                self._drop_claim(message)

    def _drop_claim(self, message: Held) -> None:
        if message.claimed:
            message.claimed = False
            self.bytes_claimed -= message.size

    def _forget(self, tag: str) -> None:
        with self._lock:
            if message := self.held.pop(tag, None):
                self._drop_claim(message)
            if self._isolated and self._isolated[0] == tag:
                self._isolated = None
            self._waiting_for_isolation.discard(tag)

    # Isolation.

    def admit(self, tag: str, suspicious: bool) -> bool:
        """Return whether a message may be handled now: not while another one is isolated, or waits for that.

        suspicious: handle it alone. Records that in Redis, so that a crash counts against it.
        """
        if self._isolated and self._isolated[0] == tag:
            return True
        if self._is_claimed_alone():
            return False
        if suspicious:
            if self._are_claimed():
                self._waiting_for_isolation.add(tag)
                return False
            self._waiting_for_isolation.discard(tag)
            message: Any = self.client.hget(self.reserved, tag)
            if message:
                noted = json.loads(message)
                noted["properties"]["delivery_info"]["alone"] = True
                self._isolated = tag, message, json.dumps(noted)
                call(self.client, "replace", self.reserved, message, self._isolated[2], tag)
        return True

    def end_isolation(self, tag: str) -> None:
        """Remove the record of isolation: the message proved harmless, or its next step is tracked elsewhere.

        It stays alone if it is claimed.
        """
        if self._isolated and self._isolated[0] == tag:
            _, message, noted = self._isolated
            call(self.client, "replace", self.reserved, noted, message, tag)
            if not self._is_claimed_alone():
                self._isolated = None

    def is_isolating(self) -> bool:
        """Return whether a message is handled in isolation, or waits for that."""
        return bool(self._waiting_for_isolation) or self._is_claimed_alone()

    def _is_claimed_alone(self) -> bool:
        message = self.held.get(self._isolated[0]) if self._isolated else None
        return bool(message and message.claimed)

    def _are_claimed(self) -> bool:
        with self._lock:
            return any(message.claimed for message in self.held.values())

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

    def return_messages(self, tags: Sequence[str], command: str = "RPUSH") -> None:
        """Return messages that this process holds to their lists. The last tag is the next message to be delivered."""
        delivered = {tag: not (found := self.held.get(tag)) or found.delivered for tag in tags}
        self._restore(tags, lambda tag, message: count_delivery(message) if delivered[tag] else message, None, command)
        for tag in tags:
            self._forget(tag)

    def return_unclaimed(self, tags: Iterable[str], command: str = "RPUSH") -> None:
        """Return unclaimed messages, now or as soon as Redis answers. Their leases are renewed until then."""
        free = [tag for tag in tags if (found := self.held.get(tag)) and not found.claimed]
        self._pending_returns.append((free, command))
        with suppress(RedisError, OSError):
            self._return_pending()

    def _return_pending(self) -> None:
        while self._pending_returns:
            with self._lock:
                tags, command = self._pending_returns.popleft() if self._pending_returns else ([], "")
            try:
                self.return_messages([tag for tag in tags if tag in self.held], command)
            except BaseException:
                self._pending_returns.appendleft((tags, command))
                raise

    def _restore(
        self, tags: Sequence[str], marked: Callable[[str, bytes], bytes | str], until: float | None, command: str
    ) -> None:
        """Put messages back into their lists, changed by `marked`. Skip messages whose leases end after `until`."""
        if tags:
            messages: list[Any] = self.client.hmget(self.reserved, tags)
            restored = [(tag, marked(tag, message or b"")) for tag, message in zip(tags, messages, strict=True)]
            self.scripts.restore(restored, until, command)

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
        self._return_pending()
        self._restore(ended, lambda _, message: count_delivery(message, lapse=True), now, "RPUSH")
        return more

    def _renew(self, tags: Sequence[str], limit: int) -> tuple[float, list[str], bool]:
        """Renew these leases, and find up to `limit` expired ones. See `LeaseScripts.renew`."""
        return self.scripts.renew(tags, self.seconds, self._contact, 2 * self._interval_s, limit, EXPIRED_BYTES)

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


# The state of a delivered kombu message.


def admit(message: Any) -> bool:
    """Return whether a delivered message may be handled now. If not, try again later: another one is isolated, or this
    one needs isolation. Raises redis-py's errors.
    """
    leases: Leases = message.channel.leases
    tag = message.delivery_tag
    return tag not in leases.held or leases.admit(tag, needs_isolation(message.delivery_info))


def claim(message: Any) -> bool:
    """Hold an admitted message until it is acknowledged, rejected or unclaimed, even if its connection ends.

    Returns False, and does nothing, if `admit` does. Raises redis-py's errors.
    """
    admitted = admit(message)
    if admitted:
        message.channel.leases.claim(message.delivery_tag)
    return admitted


def postpone(message: Any) -> None:
    """End the isolation of a message that was admitted and not claimed: it starts later, and others may start now."""
    held = message.channel.leases.held.get(message.delivery_tag)
    if held and not held.claimed:
        with suppress(RedisError):  # a crash meanwhile counts against the message, although it may not be the cause
            end_isolation(message)


def unclaim(message: Any) -> None:
    """Drop a claim: the message returns to its queue when its connection ends."""
    message.channel.leases.unclaim(message.delivery_tag)


def is_held(message: Any) -> bool:
    """Return whether a message is still held: neither acknowledged nor returned."""
    return message.delivery_tag in message.channel.leases.held


def end_isolation(message: Any) -> None:
    """Record that an isolated message proved harmless; do nothing for others. Raises redis-py's errors."""
    message.channel.leases.end_isolation(message.delivery_tag)


def queued_size(message: Any) -> int:
    """Return the bytes of a held message in its list; 0 if unknown."""
    held = message.channel.leases.held.get(message.delivery_tag)
    return held.size if held else 0
