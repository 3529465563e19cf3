"""Reserve messages in batches: send reservations and acknowledgements, read replies, and deliver from a buffer.

workers/transport/redis_transport.py describes the transport.
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis as _kombu_redis
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import RedisError, ResponseError

from shared.scripts import is_missing, load_functions
from shared.scripts.leases import Reservation, Taken, list_of
from workers.transport.decoding import UndecodableError, decoded, needs_isolation
from workers.transport.leases import Leases, leases_of

logger = logging.getLogger(__name__)

#: Typed as Any: kombu's stubs cover few internals.
kombu_redis: Any = _kombu_redis

#: Seconds after which a wait is restarted, in case a notification was lost.
REARM_AFTER_S = 5.0


class ReservingChannel(kombu_redis.Channel):  # type: ignore[misc]  # see kombu_redis
    """A channel that reserves messages instead of popping them. `Channel` adds its options."""

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
        """Return whether delivery must pause: held messages fill the memory limit, or one needs isolation."""
        leases = self.leases
        return leases.is_isolating() or bool(leases.waiting_for_isolation) or leases.bytes_held >= self.held_bytes

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
