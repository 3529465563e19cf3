"""kombu's channel to Redis, which reserves messages in batches under leases, with the options in redis_transport.py.

A channel sends reservations and acknowledgements, reads the replies, and delivers messages from a buffer. It tolerates
a Redis at its memory limit.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis as _kombu_redis
from kombu.transport.virtual import QoS as _VirtualQoS
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import RedisError, ResponseError

from feedmill.shared.redis_errors import is_full
from feedmill.shared.scripts import is_missing, load_functions
from feedmill.shared.scripts.leases import Reservation, Taken, list_of
from feedmill.workers.transport.decoding import UndecodableError, decoded, needs_isolation
from feedmill.workers.transport.leases import Leases, leases_of

logger = logging.getLogger(__name__)

#: Typed as Any: kombu's stubs cover few internals.
kombu_redis: Any = _kombu_redis

#: Seconds after which a wait is restarted, in case a notification was lost.
REARM_AFTER_S = 5.0
VirtualQoS: Any = _VirtualQoS


class QoS(kombu_redis.QoS):  # type: ignore[misc]  # see kombu_redis
    """Prefetch accounting of a channel's consumer. Held messages are tracked in `Leases`."""

    channel: "Channel"

    def room(self) -> int | None:
        """Return the number of messages to reserve next; None if unlimited.

        Returns 0 instead of a small number: reserving a few messages at a time would be as slow as popping them.
        """
        if not self.can_consume():
            return 0
        free: int | None = self.can_consume_max_estimate()
        return free if free is None or free >= min(self.channel.reserve_limit, self.prefetch_count // 4) else 0

    def append(self, message: Any, delivery_tag: str) -> None:
        self.channel.leases.deliver(delivery_tag, len(message.body or b""))
        VirtualQoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        self.channel._acknowledge(delivery_tag)
        VirtualQoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message. If requeued, it is delivered last, as in kombu: delivered next, it would loop."""
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


class Channel(kombu_redis.Channel):  # type: ignore[misc]  # see kombu_redis
    """A channel that reserves messages instead of popping them, for consumers with and without acknowledgements."""

    # Options.

    QoS = QoS

    reserved_key = "reserved"
    reserved_index_key = "reserved_index"
    undecodable_key = "undecodable"
    undecodable_limit = 1000
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
    reserve_limit = 64
    reserve_bytes = 1024 * 1024
    held_bytes = 128 * 1024 * 1024

    #: False if Redis does not support notifications; its lists are then polled every second.
    _tracking = True
    #: Start of the current wait for a notification, by the monotonic clock; None while not waiting.
    _armed_at: float | None = None
    #: True if this connection has enabled tracking.
    _tracking_requested = False
    #: True if the last reservation reached a limit: more messages probably wait.
    _last_was_full = False
    #: Messages left in the lists after a reservation; and whether a notification has arrived since.
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

    @cached_property
    def leases(self) -> Leases:
        return leases_of(self)

    def _is_connected(self) -> bool:
        client = self.__dict__.get("client")
        return bool(client and client.connection and client.connection._sock)

    def _update_queue_cycle(self) -> None:
        """Restart the wait, because the set of queues has changed."""
        super()._update_queue_cycle()
        self._notified = True
        self._wake()

    # Sending.

    def is_due(self) -> bool:
        """Return whether there is anything to send or deliver now. Raises a connection error if a reply is overdue."""
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
        """Return whether delivery must pause: claimed messages fill the memory limit, or one needs isolation."""
        leases = self.leases
        return leases.is_isolating() or bool(leases.waiting_for_isolation) or leases.bytes_claimed >= self.held_bytes

    def room_bytes(self) -> int:
        """Return the bytes at which a reservation ends. The last message may exceed them."""
        return self.reserve_bytes

    def _reservation(self, queues: Sequence[str], limit: int, max_bytes: int) -> tuple[Reservation, list[str]]:
        """Return a reservation over the lists of all priorities, in order of delivery, and the queue of each list."""
        leases, queue_of_list = self.leases, [queue for _ in self.priority_steps for queue in queues]
        lists = [self.global_keyprefix + self._q_for_pri(q, step) for step in self.priority_steps for q in queues]
        seconds = [0 if queue in self._unleased else leases.seconds for queue in queue_of_list]
        prefix = leases.prefix()
        return Reservation(leases.reserved, leases.index, prefix, lists, seconds, limit, max_bytes), queue_of_list

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
            reservation, queue_of_list = self._reservation(queues, room, self.room_bytes())
            self._expect(commands, "reserved", (reservation, queue_of_list), *reservation.command())
            self._in_poll = connection
            if not self._last_was_full:
                self._waiting, self._notified = 0, False
                for number, name in enumerate(reservation.lists, 1):
                    self._expect(commands, "waiting", number == len(reservation.lists), "LLEN", name)
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
            return self._reserved(reply, *detail)
        elif kind == "waiting":
            self._waiting += reply
            if detail:  # the reply for the last list
                self._in_poll = None
                if not self._waiting and not self._notified:
                    self._armed_at, self._in_poll = monotonic(), self.client.connection
        return False

    def _handle_error(self, kind: str, detail: Any, error: ResponseError) -> None:
        if kind == "tracking":
            logger.warning("cannot enable notifications (%s); polling queues every second", error)
            self._tracking = False
        elif is_missing(error):
            with self.conn_or_acquire() as client:
                load_functions(client)
            self._notified = True
            self._reservation_answered()
        else:
            if detail and kind == "acknowledged":
                self.leases.acknowledged.extend(detail)
            self.client.connection.disconnect()
            raise error

    def _reserved(self, reply: Any, reservation: Reservation, queue_of_list: Sequence[str]) -> bool:
        self._reservation_answered()
        taken = reservation.taken(reply)
        size = sum(len(each.message) for each in taken)
        self._last_was_full = len(taken) == reservation.limit or size >= reservation.max_bytes
        for queue in dict.fromkeys(queue_of_list[each.list_number] for each in taken):
            self._queue_cycle.rotate(queue)
        unleased = []
        for each in taken:
            queue = queue_of_list[each.list_number]
            if queue in self._unleased:
                unleased.append((queue, each))
            else:
                self._add_to_buffer(queue, each)
        delivered = self._deliver_unleased(unleased)
        return self._deliver_buffer() or delivered

    def _reservation_answered(self) -> None:
        """Allow the next reservation, unless list lengths are still pending."""
        if not (self._expected and self._expected[0][0] == "waiting"):
            self._in_poll = None

    def _add_to_buffer(self, queue: str, taken: Taken) -> None:
        with suppress(RedisError, OSError):  # on failure, its lease expires and it is redelivered
            if found := self._decoded(taken):
                self.leases.hold(taken.tag, taken.message)
                self._buffer.append((queue, taken.tag, taken.message, found))

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
        return not (needs_isolation(self._buffer[0][3]["properties"]["delivery_info"]) and self.leases.are_claimed())

    def _deliver_buffer(self) -> bool:
        """Deliver buffered messages as far as possible. Return whether any was delivered."""
        delivered = False
        while not self._closing and self._may_deliver():
            queue, tag, message, found = self._buffer[0]
            alone = queue in self.connection._callbacks and needs_isolation(found["properties"]["delivery_info"])
            if alone:
                self.leases.begin_isolation(tag, message)  # may raise; the message then stays buffered
            self._buffer.popleft()
            if queue not in self.connection._callbacks:  # the consumer was cancelled
                self.leases.return_unclaimed([tag])
                continue
            delivered = True
            self._deliver(queue, tag, message, found)
            if alone and not self.leases.is_isolating():  # decoding it was harmless, and it is not started yet
                self.leases.end_isolation(tag)
        return delivered

    def _deliver_unleased(self, messages: Sequence[tuple[str, Taken]]) -> bool:
        """Deliver messages without a lease; return those of cancelled consumers. Return whether any was delivered."""
        delivered, undelivered = False, []
        for queue, each in messages:
            if self._closing or queue not in self.connection._callbacks:
                undelivered.append(each)
                continue
            delivered = True
            if found := self._decoded(each):
                self._deliver(queue, each.tag, each.message, found)
        with suppress(RedisError, OSError):
            for each in reversed(undelivered):
                self.leases.client.rpush(list_of(each.tag), each.message)
        return delivered

    def _decoded(self, taken: Taken) -> dict[str, Any] | None:
        """Decode a message; set it aside and return None if that is impossible."""
        try:
            return decoded(taken.message)
        except UndecodableError as error:
            self.leases.set_aside(taken.tag, taken.message, str(error))
            return None

    # Closing.

    def _on_connection_disconnect(self, connection: Any) -> None:
        client = self.__dict__.get("client")
        if client is not None and client.connection is connection:
            for kind, detail in self._expected:
                if kind == "acknowledged" and detail:
                    self.leases.acknowledged.extend(detail)
            self._expected.clear()
            self._tracking_requested = self._last_was_full = False
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

    # kombu's other methods.

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        return parameters | {"protocol": 3} if asynchronous else parameters

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
            reservation, _ = self._reservation([queue], 1, 1)
            taken = reservation.reserve(self.leases.client)
            with self.conn_or_acquire() as client:
                self._maybe_update_queues_expire(client, queue)
            if not taken:
                raise Empty
            if message := self._decoded(taken[0]):
                message["properties"]["delivery_tag"] = taken[0].tag
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
        """Log an error from a Redis at its memory limit and continue: workers must connect in order to free memory."""
        try:
            yield
        except ResponseError as error:
            if not is_full(error):
                raise
            logger.warning("%s: Redis is at its memory limit (%s); raise maxmemory", what, error)

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        try:
            return super().decode_body(body, encoding)
        except (ValueError, TypeError, AttributeError) as error:
            raise UndecodableError("the body does not match its declared encoding") from error
