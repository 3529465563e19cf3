"""kombu's Redis transport without message loss and without one round trip per message.

Uses kombu's queue keys and wire format, so stock clients and workers can share its queues. kombu takes a message with
BRPOP and records it as unacknowledged afterwards: if the worker is killed in between, the message is lost. kombu also
takes only one message per round trip. Here, one Lua script *reserves* a batch: it atomically moves messages from the
queues' lists to a hash and gives each a *lease*. `Leases` (workers/transport/leases.py) manages them.

Waiting removes nothing from a queue: with CLIENT TRACKING, Redis notifies the worker when a list changes.
Acknowledgements are sent with the next reservation, in one packet per turn of the event loop.

Reserved messages stay in a *reservation buffer* until they are delivered. Delivery pauses while delivered messages take
`held_bytes` of memory, so that small messages that expand to gigabytes are decoded one at a time. A message whose lease
has expired twice because its worker vanished is delivered in *isolation*: while no other message is claimed, and with
no further delivery until it is finished. If that worker vanishes too, the message caused it.

A consumer that keeps working on messages after their connection ends must claim each one (`claim`). Unclaimed messages
return to their queue.

Additional options in `broker_transport_options`: the names of the three keys (`reserved_key`, …), `undecodable_limit`,
`reserve_limit` (messages per reservation), `reserve_bytes` (a reservation ends with the message that reaches it) and
`held_bytes` (see above). `visibility_timeout` is the length of a lease in seconds, `unacked_restore_interval` the
interval between searches for expired leases. Leases can be short, because a thread renews them even while the event
loop is busy.

Overridden methods, and why (tests/integration/test_transport.py fails if kombu changes one of them):

- `MultiChannelPoller.on_poll_start`, `_register_BRPOP`: send what is due on each turn. `on_readable`,
  `_update_brpop_polling`: always read replies, because reservations never exceed the prefetch limit. `get`: wake every
  second, and send acknowledgements if there is no event loop.
- `QoS.append`, `ack`, `reject`, `restore_unacked`, `restore_unacked_once`, `restore_by_tag`, `restore_visible`: use
  `Leases`. Closing returns unclaimed messages only, instead of all.
- `Channel._brpop_start`, `_brpop_read`, `_poll_error`, `_get`: reserve instead of pop. `basic_consume`, `basic_get`:
  handle consumers without acknowledgements. `_update_queue_cycle`: wait for the lists of the current queues.
  `decode_body`: report undecodable bodies. `_queue_bind`, `_delete`, `_size`: tolerate `maxmemory`, at which Redis
  rejects bindings and MULTI and no consumer could connect to empty a queue. `_connparams`: use RESP 3, which
  notifications need. `_on_connection_disconnect`: send unanswered acknowledgements again. `close`: do not wait for a
  dead connection.
- `Transport.connection_errors`: reconnect after an error reply (out of memory, read-only after a failover) instead of
  exiting. `register_with_event_loop`: record that there is an event loop. `establish_connection`: treat a Redis that
  rejects writes as unreachable, so that Celery waits before it reconnects.
"""

import json
import logging
import ssl
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis as _kombu_redis
from kombu.transport.virtual import QoS as _VirtualQoS
from kombu.utils.json import loads
from kombu.utils.url import parse_url
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import NoScriptError, RedisError, ResponseError

from shared import broker
from shared.encoding import MAX_DECODED, MAX_MESSAGE, is_too_large, limit_bodies, memory_of
from shared.redis_errors import is_full
from workers.transport.lease_scripts import RESERVE
from workers.transport.leases import Leases, delivery_counter, leases_of

logger = logging.getLogger(__name__)

#: Typed as Any: kombu's stubs cover few internals.
kombu_redis: Any = _kombu_redis
VirtualQoS: Any = _VirtualQoS

#: Seconds after which a wait is restarted, in case a notification was lost.
REARM_AFTER_S = 5.0


#: Expired leases after which a message is delivered in isolation. One can be a coincidence: a vanished worker held many
#: messages.
EXPIRIES_BEFORE_ISOLATION = 2
#: Optional parts of a message, and the types that kombu and Celery assume without checking.
MESSAGE_PART_TYPES = {"headers": dict, "content-type": str, "content-encoding": str}


class UndecodableError(ValueError):
    """A message in a queue cannot be decoded. The text gives the reason."""


def decoded(message: bytes) -> dict[str, Any]:
    """Parse a message. Raises UndecodableError. Looks for kombu's JSON types only if present, because that is slow."""
    if len(message) > MAX_MESSAGE:
        raise UndecodableError(f"{len(message):,} bytes exceed the limit of {MAX_MESSAGE:,}")
    if is_too_large(message, MAX_DECODED):
        raise UndecodableError(f"its objects would exceed {MAX_DECODED:,} bytes of memory")
    try:
        text = message.decode()
        found = loads(text) if '"__type__"' in text else json.loads(text)
        body, delivery = found["body"], found["properties"]["delivery_info"]
        parts = {name: found.get(name) for name in MESSAGE_PART_TYPES}
    except Exception as error:  # kombu's JSON types raise more types of errors than JSON does
        raise UndecodableError(f"malformed message ({type(error).__name__})") from error
    if not isinstance(body, str) or not isinstance(delivery, dict):
        raise UndecodableError("body must be a string, and delivery_info an object")
    if wrong := [name for name, part in parts.items() if not isinstance(part, MESSAGE_PART_TYPES[name] | None)]:
        raise UndecodableError(
            f"{wrong[0]} must be {MESSAGE_PART_TYPES[wrong[0]].__name__}, not {type(parts[wrong[0]]).__name__}"
        )
    delivery.pop("consumer_tag", None)  # a sender's tag of a no-ack consumer would disable acknowledgement
    return found  # type: ignore[no-any-return]  # the sender controls its content


def needs_isolation(message: Mapping[str, Any]) -> bool:
    """Return whether enough workers vanished while holding this message that it may be the cause."""
    return delivery_counter(message["properties"]["delivery_info"], "lapse_count") >= EXPIRIES_BEFORE_ISOLATION


def claim(message: Any) -> bool:
    """Hold a delivered message until it is acknowledged, rejected or unclaimed, even if its connection ends.

    Returns False for a message that needs isolation while another one is claimed; try again later.
    """
    leases, tag = getattr(message.channel, "leases", None), message.delivery_tag
    if leases is None or tag not in leases.held:  # delivered by kombu's own transport
        return True
    suspicious = delivery_counter(
        message.delivery_info, "lapse_count"
    ) >= EXPIRIES_BEFORE_ISOLATION and not leases.is_isolated(tag)
    if suspicious and leases.are_claimed():
        leases.waiting_for_isolation.add(tag)
        return False
    leases.waiting_for_isolation.discard(tag)
    leases.claim(tag)
    if suspicious:
        leases.record_isolation(tag)
    return True


def is_held(message: Any) -> bool:
    """Return whether a message is still held: neither acknowledged nor returned. True for messages without a lease."""
    leases = getattr(message.channel, "leases", None)
    return leases is None or message.delivery_tag in leases.held


def postpone(message: Any) -> None:
    """Record that a delivered message is postponed: it waits for its ETA or a rate limit."""
    if leases := getattr(message.channel, "leases", None):
        leases.postpone(message.delivery_tag)


def is_isolated(message: Any) -> bool:
    """Return whether this message is the one delivered in isolation."""
    leases = getattr(message.channel, "leases", None)
    return bool(leases and leases.is_isolated(message.delivery_tag))


def end_isolation(message: Any) -> None:
    """Record that a message delivered in isolation proved harmless; do nothing for others. Raises redis-py's errors."""
    if leases := getattr(message.channel, "leases", None):
        leases.end_isolation(message.delivery_tag)


def queued_size(message: Any) -> int:
    """Return the bytes of a held message in its list; 0 if unknown."""
    leases = getattr(message.channel, "leases", None)
    found = leases and leases.held.get(message.delivery_tag)
    return found.queued if found else 0


def unclaim(message: Any) -> None:
    """Drop a claim: the message returns to its queue when its connection ends."""
    if leases := getattr(message.channel, "leases", None):
        leases.unclaim(message.delivery_tag)


class QoS(kombu_redis.QoS):  # type: ignore[misc]  # see kombu_redis
    """Prefetch accounting of a channel's consumer. Held messages are tracked in `Leases`."""

    channel: "Channel"

    def room(self) -> int | None:
        """Return how many messages to reserve next; None if unlimited.

        Returns 0 instead of a small number while enough messages are prefetched: reserving them one by one would be as
        slow as popping.
        """
        if not self.can_consume():
            return 0
        free: int | None = self.can_consume_max_estimate()
        return free if free is None or free >= min(self.channel.reserve_limit, self.prefetch_count // 4) else 0

    def append(self, message: Any, delivery_tag: str) -> None:
        self.channel.leases.deliver(delivery_tag, memory_of(message.body))
        VirtualQoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        self.channel._acknowledge(delivery_tag)
        VirtualQoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message. A requeued one goes to the end of its list, as in kombu; otherwise it would loop."""
        if requeue:
            self.channel.leases.unclaim(delivery_tag)
            self.channel.leases.return_unclaimed([delivery_tag], command="LPUSH")
            VirtualQoS.ack(self, delivery_tag)
        else:
            self.ack(delivery_tag)

    def restore_unacked(self, *_: Any) -> None:
        self._flush()
        self.channel.leases.return_messages(list(reversed(self._delivered)))
        self._delivered.clear()

    def restore_by_tag(self, tag: str, _: Any = None, leftmost: bool = False) -> None:
        self.channel.leases.return_messages([tag], command="LPUSH" if leftmost else "RPUSH")

    def restore_unacked_once(self, *_: Any) -> None:
        """Return unclaimed messages when the channel closes. Claimed ones are still being processed."""
        self._on_collect.cancel()
        self._flush()
        tags = list(reversed(self._delivered))
        self._delivered.clear()
        self.channel.leases.return_unclaimed(tags)

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Do nothing: the lease thread returns expired messages, even while the event loop is busy."""


class Poller(kombu_redis.MultiChannelPoller):  # type: ignore[misc]  # see kombu_redis
    """kombu's poller, changed to send pending commands on each turn and to read every reply."""

    #: True if an event loop drives the poller. Otherwise, data must be sent at once, because there is no next turn.
    evented = False

    def on_poll_start(self) -> None:
        for channel in tuple(self._channels):
            if channel.active_queues and channel.is_due():
                self._register_BRPOP(channel)
            if channel.active_fanout_queues:
                self._register_LISTEN(channel)

    def _register_BRPOP(self, channel: Any) -> None:  # noqa: N802 - kombu's name
        ident = channel, channel.client, "BRPOP"
        if not self._client_registered(*ident):
            self._register(*ident)
        channel._brpop_start()

    def _update_brpop_polling(self) -> None:
        pass

    def on_readable(self, fileno: int) -> bool | None:
        channel, kind = self._fd_to_chan.get(fileno, (None, None))
        delivered: bool | None = channel._brpop_read() if kind == "BRPOP" else super().on_readable(fileno)
        return delivered

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        if any(channel._deliver_buffer() for channel in tuple(self._channels) if channel.active_queues):
            return None
        try:
            return super().get(callback, 1 if timeout is None else min(timeout, 1))
        finally:
            for channel in tuple(self._channels):
                if not self.evented and (leases := channel.__dict__.get("leases")):
                    leases.flush()


class Channel(kombu_redis.Channel):  # type: ignore[misc]  # see kombu_redis
    """A channel that reserves messages instead of popping them."""

    QoS = QoS

    reserved_key = "reserved"
    reserved_index_key = "reserved_index"
    undecodable_key = "undecodable"
    undecodable_limit = 1000
    reserve_limit = 64
    reserve_bytes = 1024 * 1024
    held_bytes = 128 * 1024 * 1024
    visibility_timeout = 6
    unacked_restore_interval = 2
    #: Timeout of a command in seconds. Without it, an unresponsive Redis would block the worker forever.
    socket_timeout = 10
    socket_connect_timeout = 5

    from_transport_options = (
        *kombu_redis.Channel.from_transport_options,
        "reserved_key",
        "reserved_index_key",
        "undecodable_key",
        "undecodable_limit",
        "reserve_limit",
        "reserve_bytes",
        "held_bytes",
    )

    #: False if Redis does not support notifications; its lists are then polled every second.
    _tracking = True
    #: Start of the current wait for a notification, by the monotonic clock; None while not waiting.
    _armed_at: float | None = None
    #: True if tracking was enabled on this connection; and true if Redis knows the script.
    _tracking_requested = _scripted = False
    #: True if the last reservation was full: more messages probably wait.
    _last_was_full = False
    #: Messages left in the lists after a reservation; and true if a notification has arrived since.
    _waiting, _notified = 0, False
    #: kombu's attributes: the connection while a reservation or notification is pending; start of the oldest pending
    #: command; and whether the channel is closing.
    _in_poll: Any = None
    _brpop_sent_at: float | None = None
    _closing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Pending replies, in order: kind, and the data needed to handle the reply.
        self._expected: deque[tuple[str, Any]] = deque()
        #: Reservation buffer: queue, tag, raw message and decoded message.
        self._buffer: deque[tuple[str, str, bytes, dict[str, Any]]] = deque()
        self._unleased: set[str] = set()
        super().__init__(*args, **kwargs)

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        return parameters | {"protocol": 3} if asynchronous else parameters

    def _is_connected(self) -> bool:
        client = self.__dict__.get("client")
        return bool(client and client.connection and client.connection._sock)

    @cached_property
    def leases(self) -> Leases:
        return leases_of(self)

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        self.leases.start(self)
        (self._unleased.add if no_ack or not self.ack_emulation else self._unleased.discard)(queue)
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message = super().basic_get(queue, no_ack, **kwargs)
        if message is not None and no_ack:
            self._acknowledge(message.delivery_tag)
        return message

    def _get(self, queue: str) -> dict[str, Any]:
        self.leases.start(self)
        while True:
            tags = self.leases.prefix()
            lists, keys, arguments = self._reservation(tags, [queue], 1, 1)
            runs, messages = self.leases.reserve(keys, arguments)
            with self.conn_or_acquire() as client:
                self._maybe_update_queues_expire(client, queue)
            if not messages:
                raise Empty
            tag = f"{tags}-0001 {lists[runs[0]][1]}"
            try:
                message = decoded(messages[0])
            except UndecodableError as error:
                self.leases.set_aside(tag, messages[0], str(error))
            else:
                message["properties"]["delivery_tag"] = tag
                return message

    def _acknowledge(self, tag: str) -> None:
        self.leases.acknowledge(tag)
        cycle = self.connection and self.connection.cycle
        if cycle and not cycle.evented and not cycle._in_protected_read:
            self.leases.flush()

    def _size(self, queue: str) -> int:
        with self.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for step in self.priority_steps:
                pipe.llen(self._q_for_pri(queue, step))
            return sum(pipe.execute())

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        with self._tolerate_full_redis(f"cannot record the binding of queue {queue!r} to exchange {exchange!r}"):
            super()._queue_bind(exchange, routing_key, pattern, queue)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        with self._tolerate_full_redis(f"cannot delete queue {queue!r}; it will expire"):
            super()._delete(queue, *args, **kwargs)

    @contextmanager
    def _tolerate_full_redis(self, what: str) -> Iterator[None]:
        """Log the error and continue if Redis is at its memory limit: workers must connect in order to free memory."""
        try:
            yield
        except ResponseError as error:
            if not is_full(error):
                raise
            logger.warning("%s: Redis is at its memory limit (%s)", what, error)

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        try:
            return super().decode_body(body, encoding)
        except (ValueError, TypeError, AttributeError) as error:
            raise UndecodableError("the body does not match its declared encoding") from error

    def _update_queue_cycle(self) -> None:
        """Restart the wait, because the set of queues has changed."""
        super()._update_queue_cycle()
        self._notified = True
        self._wake()

    # Sending.

    def is_due(self) -> bool:
        """Return whether anything can be sent now. Raises a connection error if a reply is overdue."""
        if self._expected:
            silent = monotonic() - (self._brpop_sent_at or monotonic())
            connection = self.client.connection
            if silent > (self.socket_timeout or silent) and not kombu_redis._socket_readable(connection._sock):
                connection.disconnect()
                raise ConnectionFault(f"Redis has not answered for {silent:.0f} seconds")
        elif self._armed_at and monotonic() - self._armed_at > (
            REARM_AFTER_S if self._tracking else self.brpop_timeout
        ):
            self._wake()
        return bool(self.leases.acknowledged or self._may_deliver() or (not self._in_poll and self._room()))

    def _room(self) -> int:
        free: int | None = self.qos.room()
        if free != 0 and (self._buffer or self._is_full()):
            return 0
        if free is None:  # no prefetch limit; without an event loop, consumers expect one message at a time
            return self.reserve_limit if self.connection.cycle.evented else 1
        return min(free, self.reserve_limit)

    def _is_full(self) -> bool:
        """Return whether delivery must pause: held messages fill the memory limit, or one needs isolation."""
        leases = self.leases
        return leases.is_isolating() or bool(leases.waiting_for_isolation) or leases.bytes_held >= self.held_bytes

    def room_bytes(self) -> int:
        """Return the bytes at which a reservation ends. The last message may exceed them."""
        return self.reserve_bytes

    def _reservation(
        self, tags: str, queues: Sequence[str], room: int, size: int
    ) -> tuple[list[tuple[str, str]], list[Any], list[Any]]:
        """Return (queue, list) of all priorities in order of delivery, and the RESERVE script's keys and arguments."""
        lists = [(q, self.global_keyprefix + self._q_for_pri(q, step)) for step in self.priority_steps for q in queues]
        seconds = [0 if queue in self._unleased else self.leases.seconds for queue, _ in lists]
        keys = [self.leases.reserved, self.leases.index, *(name for _, name in lists)]
        return lists, keys, [tags, room, size, *seconds]

    def _brpop_start(self, *_: Any) -> None:
        """Deliver buffered messages, then send in one packet: acknowledgements, and a reservation if there is room."""
        self._deliver_buffer()
        connection, leases = self.client.connection, self.leases
        commands: list[tuple[Any, ...]] = []
        if not self._expected:
            self._flush_brpop_reauth()
            self._brpop_sent_at = monotonic()
        if not self._tracking_requested:
            self._tracking_requested = True
            self._expect(commands, "tracking", None, "CLIENT", "TRACKING", "ON", "NOLOOP")
        if acknowledged := leases.take_acknowledged():
            self._expect(commands, "acknowledged", None, "HDEL", leases.reserved, *acknowledged)
            self._expect(commands, "acknowledged", acknowledged, "ZREM", leases.index, *acknowledged)
        if not self._in_poll and (room := self._room()):
            queues = self._queue_cycle.consume(len(self.active_queues))
            tags = leases.prefix()
            size = self.room_bytes()
            lists, keys, arguments = self._reservation(tags, queues, room, size)
            script: tuple[str, str] = ("EVALSHA", leases.reserve.sha) if self._scripted else ("EVAL", RESERVE)
            self._scripted, self._in_poll = True, connection
            self._expect(commands, "reserved", (tags, lists, room, size), *script, len(keys), *keys, *arguments)
            if not self._last_was_full:
                self._waiting, self._notified = 0, False
                for number, (__, name) in enumerate(lists, 1):
                    self._expect(commands, "waiting", number == len(lists), "LLEN", name)
        if commands:
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)

    def _expect(self, commands: list[tuple[Any, ...]], kind: str, detail: Any, *command: Any) -> None:
        commands.append(command)
        self._expected.append((kind, detail))

    # Receiving.

    def _brpop_read(self, **_: Any) -> bool:
        """Handle all replies that have arrived, and deliver reserved messages. Raises Empty if none was delivered."""
        delivered = False
        while True:
            connection = self.client.connection
            reply = self._next_reply(connection)
            if reply is None:
                self._notified = True
                self._wake()
            else:
                delivered = self._handle(*self._expected.popleft(), reply) or delivered
            self._brpop_sent_at = monotonic() if self._expected else None
            if self.closed or connection._sock is None or not connection.can_read(timeout=0):
                break
        if not delivered:
            raise Empty
        return True

    def _poll_error(self, kind: str, **_: Any) -> Any:
        return self._brpop_read() if kind == "BRPOP" else super()._poll_error(kind)

    def _next_reply(self, connection: Any, **options: Any) -> Any:
        """Read a reply. Returns None for a notification, and error replies as exceptions without raising them."""
        try:
            return connection.read_response(push_request=True, **options)
        except ResponseError as error:
            return error
        except self.connection_errors:
            connection.disconnect()
            raise

    def _wake(self) -> None:
        if self._armed_at:
            self._armed_at = self._in_poll = None

    def _handle(self, kind: str, detail: Any, reply: Any) -> bool:
        if isinstance(reply, ResponseError):
            self._handle_error(kind, detail, reply)
        elif kind == "reserved":
            return self._reserved(*detail, *reply)
        elif kind == "waiting":
            self._waiting += reply
            if detail:  # the reply for the last list
                self._in_poll = None
                if not self._waiting and not self._notified:
                    self._armed_at, self._in_poll = monotonic(), self.client.connection
        return False

    def _handle_error(self, kind: str, detail: Any, error: ResponseError) -> None:
        if kind == "tracking":
            logger.warning("cannot enable notifications, polling queues every second: %s", error)
            self._tracking = False
        elif isinstance(error, NoScriptError):
            self._scripted, self._notified = False, True
            self._reservation_answered()
        else:
            if detail and kind == "acknowledged":
                self.leases.acknowledged.extend(detail)
            self.client.connection.disconnect()
            raise error

    def _reserved(
        self, tags: str, lists: list[tuple[str, str]], room: int, size: int, runs: list[int], messages: list[bytes]
    ) -> bool:
        self._reservation_answered()
        self._last_was_full = len(messages) == room or sum(map(len, messages)) >= size
        sources = [lists[number] for number, times in zip(runs[::2], runs[1::2], strict=True) for _ in range(times)]
        for queue in dict.fromkeys(queue for queue, _ in sources):
            self._queue_cycle.rotate(queue)
        unleased = []
        for number, (message, (queue, name)) in enumerate(zip(messages, sources, strict=True), 1):
            tag = f"{tags}-{number:04d} {name}"
            if queue in self._unleased:
                unleased.append((queue, name, tag, message))
            else:
                self._add_to_buffer(queue, tag, message)
        delivered = self._deliver_unleased(unleased)
        return self._deliver_buffer() or delivered

    def _reservation_answered(self) -> None:
        """Allow the next reservation, unless list lengths are still pending."""
        if not (self._expected and self._expected[0][0] == "waiting"):
            self._in_poll = None

    def _add_to_buffer(self, queue: str, tag: str, message: bytes) -> None:
        try:
            found = decoded(message)
        except UndecodableError as error:
            with suppress(RedisError, OSError):  # on failure, its lease expires and it is redelivered
                self.leases.set_aside(tag, message, str(error))
        else:
            self.leases.hold(tag, message)
            self._buffer.append((queue, tag, message, found))

    def _deliver(self, queue: str, tag: str, message: bytes, found: dict[str, Any]) -> None:
        found["properties"]["delivery_tag"] = tag
        try:
            self.connection._deliver(found, queue)
        except UndecodableError as error:
            self.leases.set_aside(tag, message, str(error))
        except BaseException:
            if (held := self.leases.held.get(tag)) and not held.delivered:
                self.leases.return_unclaimed([tag])
            raise

    def _may_deliver(self) -> bool:
        """Return whether the first buffered message may be delivered now."""
        if not self._buffer or self._is_full():
            return False
        return not (needs_isolation(self._buffer[0][3]) and self.leases.are_claimed())

    def _deliver_buffer(self) -> bool:
        """Deliver buffered messages as far as possible. Return whether any was delivered."""
        delivered = False
        while not self._closing and self._may_deliver():
            queue, tag, message, found = self._buffer[0]
            alone = queue in self.connection._callbacks and needs_isolation(found)
            if alone:
                self.leases.begin_isolation(tag, message)  # raises if Redis is unreachable; the message stays buffered
            self._buffer.popleft()
            if queue not in self.connection._callbacks:  # the consumer was cancelled
                self.leases.return_unclaimed([tag])
                continue
            delivered = True
            self._deliver(queue, tag, message, found)
            if alone and not self.leases.is_isolating():  # decoding it was harmless, and it is not started yet
                self.leases.end_isolation(tag)
        return delivered

    def _deliver_unleased(self, messages: Sequence[tuple[str, str, str, bytes]]) -> bool:
        """Deliver messages without a lease; return those of cancelled consumers. Return whether any was delivered."""
        delivered, undelivered = False, []
        for queue, name, tag, message in messages:
            if self._closing or queue not in self.connection._callbacks:
                undelivered.append((name, message))
                continue
            delivered = True
            try:
                found = decoded(message)
            except UndecodableError as error:
                self.leases.set_aside(tag, message, str(error))
            else:
                self._deliver(queue, tag, message, found)
        with suppress(RedisError, OSError):
            for name, message in reversed(undelivered):
                self.leases.client.rpush(name, message)
        return delivered

    # Closing.

    def _on_connection_disconnect(self, connection: Any) -> None:
        client = self.__dict__.get("client")
        if client is not None and client.connection is connection:
            for kind, detail in self._expected:
                if kind == "acknowledged" and detail:
                    self.leases.acknowledged.extend(detail)
            self._expected.clear()
            self._tracking_requested = self._scripted = self._last_was_full = False
            self._armed_at = self._brpop_sent_at = None
        super()._on_connection_disconnect(connection)

    def close(self) -> None:
        if not self._closing and (leases := self.__dict__.get("leases")):
            self._closing = True
            with suppress(RedisError, OSError, Empty):
                while any(kind == "reserved" for kind, _ in self._expected):
                    reply = self._next_reply(self.client.connection, timeout=leases.timeout_s)
                    if reply is not None:
                        self._handle(*self._expected.popleft(), reply)
            if self._is_connected():  # otherwise the next connection sends them, after repeating lost writes
                with suppress(RedisError, OSError):
                    leases.flush()
            leases.return_unclaimed([tag for _, tag, _, _ in reversed(self._buffer)])
            self._buffer.clear()
            leases.channels.discard(self)
        self._in_poll = None
        super().close()


class Transport(kombu_redis.Transport):  # type: ignore[misc]  # see kombu_redis
    """Transport for redis:// and rediss:// URLs. Configure it with `settings_for`."""

    Channel = Channel

    connection_errors = (*kombu_redis.Transport.connection_errors, ResponseError)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.cycle = Poller()
        self._check_alternatives()

    def _check_alternatives(self) -> None:
        """Reject several URLs: kombu would switch to the next one with its own transport."""
        if len(self.client.alt) > 1:
            raise ValueError("several redis:// URLs are not supported: use sentinel:// for failover")

    def establish_connection(self) -> Any:
        connection = super().establish_connection()
        self._avail_channels[0].leases.check_writable()
        return connection

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.cycle.evented = True
        for channel in tuple(self.cycle._channels):
            channel.leases.evented = True
        super().register_with_event_loop(connection, loop)


class SentinelChannel(Channel, kombu_redis.SentinelChannel):  # type: ignore[misc]  # see kombu_redis
    """A channel to the master that Redis Sentinel reports."""

    from_transport_options = tuple(
        dict.fromkeys((*Channel.from_transport_options, *kombu_redis.SentinelChannel.from_transport_options))
    )


class SentinelTransport(Transport):
    """Transport for sentinel:// URLs. Requires the option `master_name`."""

    default_port = kombu_redis.SentinelTransport.default_port
    Channel = SentinelChannel

    def _check_alternatives(self) -> None:
        """Do nothing but disable kombu's cycle of URLs: every connection tries all Sentinels."""
        self.client.cycle = None


def settings_for(url: str, tls: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the Celery settings that use this transport for a broker URL.

    kombu ignores the URL's scheme if the transport is set by class path: `rediss` would silently connect without TLS.
    tls: arguments of redis-py's SSLConnection, such as `ssl_ca_certs`. Raises ValueError with a message for users.
    """
    schemes = {each.partition("://")[0] for each in url.split(";")}
    if len(schemes) != 1 or not schemes <= {"redis", "rediss", "sentinel"}:
        raise ValueError(f"a broker URL must begin with redis://, rediss:// or sentinel://, not {', '.join(schemes)}")
    scheme = schemes.pop()
    if scheme != "sentinel" and ";" in url:
        raise ValueError(f"several {scheme}:// URLs: for failover use sentinel://host;sentinel://host and master_name")
    settings = {
        "broker_url": url,
        "broker_transport": f"{__name__}:{'SentinelTransport' if scheme == 'sentinel' else 'Transport'}",
    }
    if scheme != "rediss" and tls is None:
        return settings
    given: dict[str, Any] = dict(tls or {}) | parse_url(url.partition(";")[0]).get("ssl", {})
    given.setdefault("ssl_cert_reqs", ssl.CERT_REQUIRED)
    if given["ssl_cert_reqs"] not in (ssl.CERT_REQUIRED, "required") or given.get("ssl_check_hostname") is False:
        raise ValueError("rediss:// requires certificate verification: set ssl_ca_certs instead of disabling it")
    return settings | {"broker_url": url.partition("?")[0], "broker_use_ssl": given}


def use_leases(app: broker.Application) -> None:
    """Make the application receive messages under leases. Call in workers only."""
    settings = app.settings
    limit_bodies(MAX_MESSAGE, MAX_DECODED)
    app.conf.update(
        settings_for(settings.broker_url, broker.tls(settings)),
        broker_transport_options={
            **broker.sentinel_options(settings),
            **broker.TRANSPORT_KEYS,
            "visibility_timeout": settings.visibility_timeout,
            "unacked_restore_interval": settings.visibility_timeout / 3,
        },
    )
