"""Leases of the messages that this process holds, and the thread that renews them and returns
expired messages.

    `reserved`         hash: tag -> the message as it was in its list
    `reserved_index`   sorted set: tag -> expiry of its lease, by Redis' clock

A *tag* names one reservation of one message: `<process>-<lease seconds>-<reservation>-<position>
<list>`. Tags sort in order of reservation and name the list that the message returns to. A late
acknowledgement cannot remove a later delivery, because that has another tag. The keys differ from
kombu's `unacked`: stock workers and Feedmill's workers never redeliver each other's messages.

A message is held until it is acknowledged or returned. Until then, the lease thread renews its
lease. The thread also returns messages of other processes whose leases expired. When a connection
ends, its messages return to their lists, except *claimed* ones: work on them continues, and their
acknowledgements are sent over the next connection. The code that claims a message must acknowledge
it, reject it or drop the claim: garbage collection does none of these.

A returned message is the next to be delivered from its list. Its `delivery_info` then contains
`redelivered`, as in kombu; `delivery_count`, the number of earlier deliveries; and `lapse_count`,
the deliveries whose lease expired because the process vanished or stalled. While a message is
handled in isolation, `suspects` are the indexes of its posts that are on the device, or WHOLE
before it starts. If its lease expires then, they are appended to `deaths`.

Channels must provide the options listed in workers/transport/redis_transport.py.

Relies on `_get_pool` of kombu's Redis channel, the pool of its connections.
"""

import atexit
import json
import logging
import os
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Lock, Thread
from time import monotonic, time_ns
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakSet

from kombu.transport.virtual import Message as VirtualMessage
from redis import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as TimeoutFault

from feedmill.shared import encoding, scripts
from feedmill.shared.broker import PRIORITY_MARK, UNDECODABLE
from feedmill.shared.redis_errors import is_replica
from feedmill.workers.transport.delays import MIN_PAUSE_S, Delays

logger = logging.getLogger(__name__)

#: Limits per Redis call, which keep each one to a few milliseconds: leases renewed; expired leases
#: returned; bytes of messages returned, which the last message may exceed.
RENEWALS_PER_CALL = 1000
EXPIRED_PER_CALL = 100
EXPIRED_BYTES = 2**20
#: Bytes of an undecodable message that its stand-in holds.
MAX_UNDECODABLE_BYTES = 2**16
#: Expired leases after which a message is delivered in isolation. One proves nothing: a vanished
#: worker held many messages.
EXPIRIES_BEFORE_ISOLATION = 2
#: Stands for the message itself among the indexes of its posts.
WHOLE = -1
#: Field of a held message's `delivery_info` with the time of its reservation. Redis never has it.
RESERVED_AT = "reserved_at_ns"
#: Headers and properties that tell who waits for a message.
CALLER_HEADERS = ("id", "root_id", "parent_id", "group", "group_index", "ignore_result")
CALLER_PROPERTIES = ("correlation_id", "reply_to")
#: Optional parts of a message, and the types that kombu assumes without checking.
PART_TYPES = {"headers": dict, "content-type": str, "content-encoding": str}


class ReservedMessage(NamedTuple):
    """A reserved message, its queue, and its tag. at_ns: time of the reservation, in nanoseconds
    since 1970.
    """

    queue: str
    tag: str
    content: bytes
    at_ns: int


class Reservation(NamedTuple):
    """A request for messages of several lists, in order of delivery. prefix: of the messages'
    tags.
    """

    reserved: str
    reserved_index: str
    prefix: str
    #: Maximum messages, bytes of messages after which the reservation ends, and seconds of a
    #: lease.
    limit: int
    max_bytes: int
    lease_s: float
    #: Each list, with the name of its queue.
    lists: Sequence[tuple[str, str]]

    def command(self) -> tuple[Any, ...]:
        """Return the command, to be sent with others."""
        names = [name for name, _ in self.lists]
        return scripts.command(
            "reserve",
            self.reserved,
            self.reserved_index,
            self.prefix,
            self.limit,
            self.max_bytes,
            self.lease_s,
            keys=names,
        )

    def messages_in(self, answer: Sequence[Any]) -> list[ReservedMessage]:
        """Parse the command's answer: the number of a list, a message of it, and so on."""
        numbers = answer[::2]
        contents = answer[1::2]
        now = time_ns()
        messages: list[ReservedMessage] = []
        for number, content in zip(numbers, contents, strict=True):
            name, queue = self.lists[number]
            position = len(messages) + 1
            tag = f"{self.prefix}-{position:04d} {name}"
            message = ReservedMessage(
                queue=queue,
                tag=tag,
                content=content,
                at_ns=now,
            )
            messages.append(message)
        return messages


class UndecodableError(ValueError):
    """A message in a queue cannot be decoded. The text gives the reason."""


def decoded(message: bytes) -> dict[str, Any]:
    """Parse a message. Raises UndecodableError."""
    try:
        envelope = encoding.read(message)
        body = envelope["body"]
        delivery_info = envelope["properties"]["delivery_info"]
    except Exception as error:
        # kombu's JSON types raise more types of errors than JSON does
        why = type(error).__name__
        if type(error) in (ValueError, encoding.UnreadableError):
            why = str(error)  # the text of any other error quotes the message
        raise UndecodableError(f"malformed message ({why})") from error
    if not (isinstance(body, str) and isinstance(delivery_info, dict)):
        raise UndecodableError("body must be a string, and delivery_info an object")
    for name, kind in PART_TYPES.items():
        if not isinstance(envelope.get(name), kind | None):
            raise UndecodableError(f"{', '.join(PART_TYPES)}: wrong type")
    # a sender's tag of a no-ack consumer would disable acknowledgement
    delivery_info.pop("consumer_tag", None)
    return envelope  # type: ignore[no-any-return]  # the sender controls its content


def stand_in(message: bytes, reason: str) -> dict[str, Any]:
    """Return a message for a consumer to refuse, with the start of an undecodable one as
    its body.
    """
    start = message[:MAX_UNDECODABLE_BYTES]
    caller_properties = find_part(message, "properties", CALLER_PROPERTIES)
    return {
        "body": b64encode(start).decode(),
        "content-type": UNDECODABLE,
        "content-encoding": reason,
        "headers": find_part(message, "headers", CALLER_HEADERS),
        "properties": {
            **caller_properties,
            "body_encoding": "base64",
            "delivery_info": {},
        },
    }


def find_part(message: bytes, part: str, names: Sequence[str]) -> dict[str, str | int]:
    """Return what an undecodable message says about its callers, if it can be found at its end or
    its start.

    kombu writes a message's body first, and its headers and properties last. Nothing else is
    decoded.
    """
    end = message[-MAX_UNDECODABLE_BYTES:]
    start = message[:MAX_UNDECODABLE_BYTES]
    for piece in (end, start):
        text = piece.decode(errors="replace")
        _, name_of_part, rest = text.rpartition(f'"{part}":')
        if not name_of_part:
            continue
        value = None
        decoder = json.JSONDecoder()
        with suppress(ValueError, RecursionError):
            value, _ = decoder.raw_decode(rest.lstrip())
        if isinstance(value, dict):
            return {
                name: value[name]
                for name in names
                if isinstance(value.get(name), str | int)
            }
    return {}


def count_delivery(message: bytes, *, lapse: bool = False) -> bytes | str:
    """Mark a message as redelivered and increment its counters.

    Undecodable messages are returned unchanged.

    lapse: its lease expired because its process vanished or stalled.
    """
    try:
        encoding.check_size(message)
        envelope = json.loads(message)
        info = envelope["properties"]["delivery_info"]
        info["redelivered"] = True
        headers = envelope.get("headers")
        if isinstance(headers, dict):
            headers["redelivered"] = True
        info["delivery_count"] = delivery_counter(info, "delivery_count") + 1
        suspects = info.pop("suspects", None)
        if lapse:
            info["lapse_count"] = delivery_counter(info, "lapse_count") + 1
            deaths = list(deaths_in(info).elements())
            if isinstance(suspects, list):
                deaths.extend(suspects)
            info["deaths"] = deaths
        return json.dumps(envelope)
    except Exception:
        # malformed input can raise any error; raising would block the return of all other messages
        return message


def delivery_counter(delivery_info: Mapping[str, Any], name: str) -> int:
    """Return a counter written by `count_delivery`; 0 if the sender put an invalid value there."""
    number = delivery_info.get(name)
    if type(number) is int and 0 < number < 2**31:
        return number
    return 0


def deaths_in(delivery_info: Mapping[str, Any]) -> Counter[int]:
    """Return how many workers died with a message in isolation: by the index of the posts that
    were on the device, or as WHOLE, before any was. Ignores invalid values, which the sender set.
    """
    deaths = delivery_info.get("deaths")
    if not isinstance(deaths, list):
        return Counter()
    indexes = [index for index in deaths if type(index) is int]
    return Counter(indexes)


class Leases:
    """Leases of the messages that this process holds in one Redis, and the thread that renews
    them. Thread-safe.
    """

    def __init__(self, channel: Any) -> None:
        prefix = channel.global_keyprefix
        self.reserved = prefix + channel.reserved_key
        self.index = prefix + channel.reserved_index_key
        self.seconds = float(channel.visibility_timeout)
        self._interval_s = min(
            float(channel.unacked_restore_interval), self.seconds / 3
        )
        pool = channel._get_pool()
        #: Timeout of a command, in seconds. Waiting longer would let leases expire.
        self.timeout_s = self._interval_s
        for option in ("socket_timeout", "socket_connect_timeout"):
            if option in pool.connection_kwargs:
                pool.connection_kwargs[option] = self.timeout_s
        self.client: Redis = Redis(connection_pool=pool)
        delayed = prefix + channel.delayed_key
        delayed_index = prefix + channel.delayed_index_key
        self.delays = Delays(
            self.client,
            (self.reserved, self.index, delayed, delayed_index),
            self._interval_s,
        )
        #: Tags of the messages that this process holds, and of those that stay held when their
        #: connection ends; with the bytes of the message in its list.
        self.held = dict[str, int]()
        self._claimed = dict[str, int]()
        self._bytes_held = 0
        #: Tags of unclaimed messages to return as soon as Redis answers, and the command that
        #: returns each.
        self._leaving = dict[str, str]()
        #: Tag of the message handled in isolation.
        self._isolated: str | None = None
        #: Tags of delivered messages that wait for isolation. No other message is reserved
        #: meanwhile.
        self._waiting_for_isolation = set[str]()
        #: Tags whose acknowledgements have not been sent yet.
        self.acknowledged = deque[str]()
        self.channels = WeakSet[Any]()
        #: True if an event loop sends the acknowledgements. It uses only its channels'
        #: connections: after a reconnect, recent results may have to be written again first
        #: (shared/results.py).
        self.evented = False
        self._process = uuid4().hex
        self._numbers = count()
        self._lock = Lock()
        self._thread: Thread | None = None
        #: Time of the next renewal, by the monotonic clock.
        self._renew_at = 0.0
        #: Time of Redis' last answer, by Redis' clock.
        self._contact = 0.0
        #: Time of Redis' first answer after the last interruption, by Redis' clock.
        self._since = 0.0
        #: Time of the next search for expired leases, by the monotonic clock.
        self._sweep_at = 0.0
        #: Time of sending, by the monotonic clock, of the latest renewal that Redis answered.
        self.answered_at = 0.0
        self._pid = os.getpid()
        atexit.register(self.release)

    def reservation(
        self, lists: Sequence[tuple[str, str]], limit: int, max_bytes: int
    ) -> Reservation:
        """Return a reservation. Tags of later ones sort later."""
        number = next(self._numbers)
        return Reservation(
            reserved=self.reserved,
            reserved_index=self.index,
            prefix=f"{self._process}-{self.seconds:g}-{number:012d}",
            limit=limit,
            max_bytes=max_bytes,
            lease_s=self.seconds,
            lists=lists,
        )

    # Held messages.

    def hold(self, tag: str, message: bytes) -> None:
        """Start renewing the lease of a reserved message."""
        size = len(message)
        with self._lock:
            self.held[tag] = size
            self._bytes_held += size

    def is_held(self, tag: str) -> bool:
        with self._lock:
            if tag in self._leaving:
                return False
            return tag in self.held

    def claim(self, tag: str) -> None:
        with self._lock:
            if tag in self.held:
                size = self.held[tag]
                self._claimed[tag] = size

    def unclaim(self, tag: str) -> None:
        with self._lock:
            self._claimed.pop(tag, None)

    @property
    def bytes_held(self) -> int:
        with self._lock:
            return self._bytes_held

    def _forget(self, tag: str) -> None:
        with self._lock:
            size = self.held.pop(tag, 0)
            self._bytes_held -= size
            self._claimed.pop(tag, None)
            self._leaving.pop(tag, None)
            if self._isolated == tag:
                self._isolated = None
            self._waiting_for_isolation.discard(tag)

    # Isolation.

    def try_start(self, tag: str, suspicious: bool) -> bool:
        """Start to handle a message, unless another one is isolated or waits for that.

        Return whether it has started.

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
            self._store_suspects(tag, [WHOLE])
            with self._lock:
                self._isolated = tag if tag in self.held else None
        return True

    def suspect(self, tag: str, posts: Sequence[int]) -> None:
        if self._isolated == tag:
            self._store_suspects(tag, posts)

    def _store_suspects(self, tag: str, posts: Sequence[int]) -> None:
        """Store in a held message which posts to blame if this process vanishes now."""
        message: Any = self.client.hget(self.reserved, tag)
        if not message:
            return
        envelope = json.loads(message)
        delivery_info = envelope["properties"]["delivery_info"]
        delivery_info["suspects"] = list(posts)
        replacement = json.dumps(envelope)
        scripts.call(
            self.client,
            "replace",
            self.reserved,
            message,
            replacement,
            tag,
        )

    def postpone(self, tag: str) -> None:
        is_isolated = self._isolated == tag
        if is_isolated and not self._is_claimed_alone():
            self._store_suspects(tag, [])
            with self._lock:
                self._isolated = None

    def is_isolating(self) -> bool:
        """Return whether a message is handled in isolation, or waits for that."""
        if self._waiting_for_isolation:
            return True
        return self._is_claimed_alone()

    def _is_claimed_alone(self) -> bool:
        return self._isolated in self._claimed

    # Acknowledging and returning messages.

    def take_acknowledged(self) -> list[str]:
        with self._lock:
            number = len(self.acknowledged)
            return [self.acknowledged.popleft() for _ in range(number)]

    def acknowledge(self, tag: str) -> None:
        # before `_forget`: the lease thread exits once nothing is held or pending
        self.acknowledged.append(tag)
        self._forget(tag)

    def delay(self, tag: str, seconds: float) -> None:
        """Give a message back to Redis until it is due. seconds: from now."""
        self.delays.add(tag, seconds)  # before `_forget`, as in `acknowledge`
        self._forget(tag)

    def flush(self) -> None:
        """Send pending acknowledgements and delays.

        Does not use MULTI, which Redis rejects at `maxmemory`.
        """
        self.delays.flush()
        tags = self.take_acknowledged()
        if not tags:
            return
        try:
            pipe = self.client.pipeline(transaction=False)
            pipe.hdel(self.reserved, *tags)
            pipe.zrem(self.index, *tags)
            pipe.execute()
        except BaseException:
            self.acknowledged.extend(tags)
            raise

    def check_writable(self) -> None:
        """Test that Redis accepts writes.

        Raises its error otherwise: read-only replica, no permission, disk full.
        """
        self.client.zrem(self.index, "")
        self.client.hdel(self.reserved, "")

    def return_messages(
        self, tags: Sequence[str], command: str = "RPUSH", lapse: bool = False
    ) -> None:
        """Return messages that this process holds to their lists.

        The last tag is the next message to be delivered.

        lapse: as if their leases had expired.
        """
        self._restore(
            tags,
            lapse=lapse,
            until="+inf",
            command=command,
        )
        for tag in tags:
            self._forget(tag)

    def return_unclaimed(self, tags: Iterable[str], command: str = "RPUSH") -> None:
        """Return unclaimed messages, now or as soon as Redis answers.

        Otherwise their leases would lapse.
        """
        with self._lock:
            for tag in tags:
                if tag in self.held and tag not in self._claimed:
                    self._leaving[tag] = command
        with suppress(RedisError, OSError):
            self._return_leaving()

    def _return_leaving(self) -> None:
        tags_by_command: dict[str, list[str]] = {}
        with self._lock:
            for tag, command in self._leaving.items():
                tags = tags_by_command.setdefault(command, [])
                tags.append(tag)
        for command, tags in tags_by_command.items():
            self.return_messages(tags, command)

    def _restore(
        self, tags: Sequence[str], lapse: bool, until: float | str, command: str
    ) -> None:
        """Put messages back into their lists, with their counters.

        Skip messages whose leases end after `until`.

        command: RPUSH makes a message the next to be delivered, LPUSH the last.
        """
        if not tags:
            return
        messages: list[Any] = self.client.hmget(self.reserved, tags)
        arguments: list[str | bytes] = []
        for tag, message in zip(tags, messages, strict=True):
            arguments.append(tag)
            replacement = count_delivery(message or b"", lapse=lapse)
            arguments.append(replacement)
        self._call(
            "restore",
            command,
            until,
            *arguments,
        )

    # The lease thread.

    def start(self, channel: Any) -> None:
        """Run the lease thread for as long as this channel is open or a message is held."""
        with self._lock:
            self.channels.add(channel)
            if self._thread is None:
                self._thread = Thread(
                    target=self._run,
                    name="kombu-redis-leases",
                    daemon=True,
                )
                self._thread.start()

    def _run(self) -> None:
        warned = False
        while True:
            more = False
            timed_out = False
            try:
                if monotonic() >= self._sweep_at:
                    more = self._run_once()
                    self._schedule_sweep(at_once=more)
                more |= self.delays.return_due()
                warned = False
            except Exception as fault:
                # any error: leases must be renewed as long as the process lives
                level = logging.DEBUG if warned else logging.WARNING
                logger.log(level, "cannot renew leases (%s); retrying", fault)
                self._renew_at = 0.0
                warned = True
                # The connection may be lost, and another try took as long as a pause: leases would
                # expire.
                timed_out = isinstance(fault, TimeoutFault)
                self._schedule_sweep(at_once=timed_out)
                # after a failover, a new connection may reach the new master
                if is_replica(fault):
                    self.client.connection_pool.disconnect(inuse_connections=False)
            with self._lock:
                if not (self.channels or self._has_messages()):
                    self._thread = None
                    break
            if not more and not timed_out:
                pause_s = self._pause()
                self.delays.wait(pause_s)
        self.client.connection_pool.disconnect(inuse_connections=False)

    def _has_messages(self) -> bool:
        """Return whether a message is held, or its acknowledgement or delay not yet sent."""
        if self.held or self.acknowledged:
            return True
        return bool(self.delays.pending)

    def _schedule_sweep(self, at_once: bool) -> None:
        """Set the time of the next search for expired leases."""
        pause_s = 0.0 if at_once else self._interval_s
        self._sweep_at = monotonic() + pause_s

    def _pause(self) -> float:
        """Return the seconds until the next search for expired leases or due messages."""
        to_sweep = self._sweep_at - monotonic()
        to_look = self.delays.seconds_to_look()
        to_look = max(MIN_PAUSE_S, to_look)
        pause_s = min(to_sweep, to_look)
        return max(0.0, pause_s)

    def _run_once(self) -> bool:
        """Renew leases that are due, and requeue some expired messages.

        Return whether more have expired.

        Each call handles a bounded number, so that expired leases cannot delay the renewal of this
        process's own.
        """
        tags: list[str] = []
        if monotonic() >= self._renew_at:
            self._renew_at = monotonic() + self.seconds / 3
            tags = self._tags_to_renew()
        first_tags = tags[:RENEWALS_PER_CALL]
        for start in range(RENEWALS_PER_CALL, len(tags), RENEWALS_PER_CALL):
            end = start + RENEWALS_PER_CALL
            self._renew(tags[start:end], 0)
        # Redis has answered without interruption for this long.
        stable_s = self._contact - self._since
        expired_limit = 0
        if stable_s >= 1.5 * self._interval_s:
            expired_limit = EXPIRED_PER_CALL
        now, expired_tags, more = self._renew(first_tags, expired_limit)
        silent_s = now - self._contact
        max_silence_s = 2 * self._interval_s
        if not 0 <= silent_s <= max_silence_s:
            self._since = now  # Redis was unreachable, or its clock was changed
        self._contact = now
        if not self.evented:
            self.flush()
        self._return_leaving()
        self._restore(
            expired_tags,
            lapse=True,
            until=now,
            command="RPUSH",
        )
        return more

    def _tags_to_renew(self) -> list[str]:
        """Return the tags of all messages whose lease this process has not ended in Redis.

        Acknowledgements can wait: for the event loop, or for a worker whose threads are ending. A
        message whose lease expired meanwhile would be delivered again.
        """
        with self._lock:
            tags = [*self.held, *self.acknowledged]
            delays = tuple(self.delays.pending)
        tags.extend(delay.tag for delay in delays)
        return tags

    def _renew(self, tags: Sequence[str], limit: int) -> tuple[float, list[str], bool]:
        """Renew these leases.

        Then find up to `limit` expired ones, latest first, of up to EXPIRED_BYTES.

        Finds none if Redis was unreachable since the last contact: living workers could not renew
        their leases. Returns Redis' time, the tags of expired leases, and whether more may have
        expired.
        """
        max_silence_s = 2 * self._interval_s
        sent_at = monotonic()
        now, expired, more = self._call(
            "renew",
            self.seconds,
            limit,
            self._contact,
            max_silence_s,
            EXPIRED_BYTES,
            *tags,
        )
        self.answered_at = sent_at
        expired_tags = [tag.decode() for tag in expired]
        return float(now), expired_tags, bool(more)

    def _call(self, name: str, *args: Any) -> Any:
        return scripts.call(
            self.client,
            name,
            self.reserved,
            self.index,
            *args,
        )

    def release(self) -> None:
        """Send pending acknowledgements and return all held messages without waiting for their
        leases to expire.
        """
        if os.getpid() != self._pid:
            return  # a child process: the leases are its parent's
        if not self._has_messages():
            return
        with suppress(RedisError, OSError):
            self.flush()
            tags = sorted(self.held, reverse=True)
            self.return_messages(tags)


#: Leases by process, keys and connection parameters.
_LEASES: dict[tuple[Any, ...], Leases] = {}


def release() -> None:
    """Return all messages that this process holds.

    Call before `os._exit`, which skips `atexit` handlers.
    """
    for leases in _LEASES.values():
        leases.release()


def leases_of(channel: Any) -> Leases:
    parameters = channel.connection.client.__eqhash__()
    place = (
        os.getpid(),
        channel.global_keyprefix,
        channel.reserved_key,
        channel.reserved_index_key,
        *map(repr, parameters),
    )
    if place not in _LEASES:
        _LEASES[place] = Leases(channel)
    return _LEASES[place]


class LeasedMessage(VirtualMessage):
    """A message that was delivered under a lease. Methods raise redis-py's errors."""

    channel: Any
    delivery_tag: Any
    #: The ETA that a message had, as its sender gave it; None before it is due.
    eta: Any = None

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
    def reserved_at_ns(self) -> int:
        """Time at which this process reserved the message, in nanoseconds since 1970."""
        reserved_at_ns: int = self.delivery_info[RESERVED_AT]
        return reserved_at_ns

    @property
    def needs_isolation(self) -> bool:
        """True if the message must be handled in isolation, because workers that held it vanished
        repeatedly.
        """
        lapses = delivery_counter(self.delivery_info, "lapse_count")
        return lapses >= EXPIRIES_BEFORE_ISOLATION

    @property
    def deaths(self) -> Counter[int]:
        """Number of workers that died with the message in isolation; see `deaths_in`."""
        return deaths_in(self.delivery_info)

    @property
    def queue(self) -> str | None:
        """Queue that the message came from. Read from the tag, not from the sender's data."""
        tag = str(self.delivery_tag)
        _, _, list_name = tag.partition(" ")
        queue, _, _ = list_name.partition(PRIORITY_MARK)
        return queue or None

    def try_start(self) -> bool:
        """Start to handle the message. Return whether it has started.

        If not, try again later: another one is isolated, or this one needs isolation.
        """
        if not self.is_held:
            return True
        return self.leases.try_start(self.delivery_tag, self.needs_isolation)

    def claim(self) -> bool:
        """Start the message, and hold it until it is acknowledged, rejected or unclaimed, even if
        its connection ends.

        Returns False, and holds nothing, if the message cannot start now.
        """
        has_started = self.try_start()
        if has_started:
            self.leases.claim(self.delivery_tag)
        return has_started

    def unclaim(self) -> None:
        """Drop a claim: the message returns to its queue when its connection ends."""
        self.leases.unclaim(self.delivery_tag)

    def delay(self, seconds: float) -> None:
        """Give the message back to Redis until it is due. seconds: from now."""
        self.channel.qos.delay(self.delivery_tag, seconds)
        self._state = "REQUEUED"

    def postpone(self) -> None:
        """End the isolation of a message that was started and not claimed: it starts later, and
        others may start.
        """
        # a crash meanwhile counts against the message, although it may not be the cause
        with suppress(RedisError):
            self.leases.postpone(self.delivery_tag)

    def suspect(self, posts: Sequence[int]) -> None:
        """Record which posts to blame if this process vanishes now, if the message is handled in
        isolation.
        """
        self.leases.suspect(self.delivery_tag, posts)

    def return_lapsed(self) -> None:
        """Return the message to its list as if this process had vanished, because it may be to
        blame for a failure.
        """
        if self.is_held:
            self.leases.return_messages([self.delivery_tag], lapse=True)
