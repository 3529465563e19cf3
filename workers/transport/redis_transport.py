"""kombu's Redis transport without message loss and without one round trip per message.

Uses kombu's queue keys and wire format, so stock clients and workers can share its queues. kombu takes a message with
BRPOP and records it as unacknowledged afterwards: if the worker is killed in between, the message is lost. kombu also
takes only one message per round trip. Here, one Lua script *reserves* a batch: it atomically moves messages from the
queues' lists to a hash and gives each a *lease*. `Leases` (workers/transport/leases.py) manages them.

Waiting removes nothing from a queue: with CLIENT TRACKING, Redis notifies the worker when a list changes.
Acknowledgements are sent with the next reservation, in one packet per turn of the event loop.

No more is reserved while claimed messages take HELD_BYTES. A message whose lease has expired twice because its worker
vanished is handled in *isolation*: while no other message is claimed, and no other is started until it is finished. If
that worker vanishes too, the message or its posts on the device are to blame. A consumer asks `admit` before it decodes
a message, and claims
(`claim`) each one that it keeps working on after its connection ends. Unclaimed messages return to their queue.

Options in `broker_transport_options`: the names of the two keys (`reserved_key`, …); `visibility_timeout`, the length
of a lease in seconds; `unacked_restore_interval`, the seconds between searches for expired leases. Leases can be short,
because a thread renews them even while the event loop is busy.

The overrides rely on kombu's internals; tests/integration/test_transport.py fails if kombu changes. Beyond reserving
and leases, they

- send what is due and read every reply on each turn of the event loop, and wake every second without one;
- return only unclaimed messages when a channel closes, and send unanswered acknowledgements again;
- tolerate `maxmemory`, at which Redis rejects bindings and MULTI and no consumer could connect to empty a queue;
- use RESP 3, which notifications need;
- reconnect after an error reply (out of memory, read-only after a failover) instead of exiting, and treat a Redis that
  rejects writes as unreachable, so that Celery waits before it reconnects.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis as _kombu_redis
from kombu.transport.virtual import QoS as _VirtualQoS
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import RedisError, ResponseError

from feedmill.shared import broker
from feedmill.shared.encoding import limit_bodies
from feedmill.shared.redis_errors import is_full
from feedmill.shared.scripts import is_missing, load_functions
from feedmill.workers.transport.leases import (
    LeasedMessage,
    Leases,
    Reservation,
    Taken,
    UndecodableError,
    decoded,
    leases_of,
    stand_in,
)

logger = logging.getLogger(__name__)

#: Typed as Any: kombu's stubs cover few internals.
kombu_redis: Any = _kombu_redis

#: Messages per reservation, and bytes at which a reservation ends; its last message may exceed them.
RESERVE_LIMIT, RESERVE_BYTES = 64, 2**20
#: Bytes of claimed messages, as in their lists, at which a worker reserves no more.
HELD_BYTES = 2**25
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
        return free if free is None or free >= min(RESERVE_LIMIT, self.prefetch_count // 4) else 0

    def append(self, message: Any, delivery_tag: str) -> None:
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

    Message, QoS = LeasedMessage, QoS

    reserved_key = "reserved"
    reserved_index_key = "reserved_index"
    visibility_timeout = 6
    unacked_restore_interval = 2
    #: Timeout of a command in seconds. Without it, an unresponsive Redis would block the worker forever.
    socket_timeout = 10
    socket_connect_timeout = 5

    from_transport_options = (*kombu_redis.Channel.from_transport_options, "reserved_key", "reserved_index_key")

    #: The consumer's own limits on a reservation, in messages and bytes.
    consumer_room: Callable[[], tuple[int, int]] | None = None
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
        #: Queues whose messages need no acknowledgement.
        self._unacknowledged: set[str] = set()
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
        return bool(self.leases.acknowledged or (not self._in_poll and self._room()[0]))

    def _room(self) -> tuple[int, int]:
        """Return the limits of the next reservation, in messages and bytes; 0 messages while there is no room."""
        free: int | None = self.qos.room()
        if free == 0 or self.leases.is_isolating() or self.leases.bytes_claimed >= HELD_BYTES:
            return 0, 0
        if free is None:  # no prefetch limit; without an event loop, consumers expect one message at a time
            free = RESERVE_LIMIT if self.connection.cycle.evented else 1
        messages, size = self.consumer_room() if self.consumer_room else (free, RESERVE_BYTES)
        return min(free, messages, RESERVE_LIMIT), min(size, RESERVE_BYTES)

    def _brpop_start(self, *_: Any) -> None:
        """Send in one packet: acknowledgements, and a reservation if there is room."""
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
        messages, size = (0, 0) if self._in_poll else self._room()
        if messages:
            reservation = self._reservation(messages, size)
            self._expect(commands, "reserved", reservation, *reservation.command())
            self._in_poll = connection
            if not self._last_was_full:
                self._waiting, self._notified = 0, False
                for number, (name, _queue) in enumerate(reservation.lists, 1):
                    self._expect(commands, "waiting", number == len(reservation.lists), "LLEN", name)
        if commands:
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)

    def _reservation(self, limit: int, max_bytes: int) -> Reservation:
        """Return a reservation over the lists of all priorities, in order of delivery."""
        queues = self._queue_cycle.consume(len(self.active_queues))
        lists = [(self.global_keyprefix + self._q_for_pri(q, step), q) for step in self.priority_steps for q in queues]
        return self.leases.reservation(lists, limit, max_bytes)

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
            return self._reserved(reply, detail)
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

    def _reserved(self, reply: Any, reservation: Reservation) -> bool:
        """Deliver reserved messages; return those of cancelled consumers. Return whether any was delivered."""
        self._reservation_answered()
        taken = reservation.taken(reply)
        size = sum(len(each.message) for each in taken)
        self._last_was_full = len(taken) == reservation.limit or size >= reservation.max_bytes
        for queue in dict.fromkeys(each.queue for each in taken):
            self._queue_cycle.rotate(queue)
        for each in taken:
            self.leases.hold(each.tag, each.message)
        delivered, undelivered = False, []
        left = deque(taken)
        try:
            while left:
                each = left.popleft()
                if self._closing or each.queue not in self.connection._callbacks:
                    undelivered.append(each.tag)
                else:
                    delivered = True
                    self._deliver(each)
        finally:  # a callback may raise, to end the worker for example
            undelivered += [each.tag for each in left]
            self.leases.return_unclaimed(reversed(undelivered))
        return delivered

    def _reservation_answered(self) -> None:
        """Allow the next reservation, unless list lengths are still pending."""
        if not (self._expected and self._expected[0][0] == "waiting"):
            self._in_poll = None

    def _deliver(self, taken: Taken) -> None:
        """Deliver a message, or a stand-in that the consumer refuses if it cannot be decoded."""
        try:
            self._deliver_as(decoded(taken.message), taken)
        except UndecodableError as error:
            self._deliver_as(stand_in(taken.message, str(error)), taken)

    def _deliver_as(self, message: dict[str, Any], taken: Taken) -> None:
        message["properties"]["delivery_tag"] = taken.tag
        self.connection._deliver(message, taken.queue)
        if taken.queue in self._unacknowledged:
            self._acknowledge(taken.tag)

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
            leases.channels.discard(self)
        self._in_poll = None
        super().close()

    # kombu's other methods.

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        return parameters | {"protocol": 3} if asynchronous else parameters

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        self.leases.start(self)
        (self._unacknowledged.add if no_ack or not self.ack_emulation else self._unacknowledged.discard)(queue)
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        if not no_ack:
            raise NotImplementedError("without a consumer, a message has no lease: consume it, or set no_ack")
        return super().basic_get(queue, no_ack, **kwargs)

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
        try:
            return super().get(callback, 1 if timeout is None else min(timeout, 1))
        finally:
            for channel in tuple(self._channels):
                if not self.evented and (leases := channel.__dict__.get("leases")):
                    leases.flush()


class Transport(kombu_redis.Transport):  # type: ignore[misc]  # see kombu_redis
    """Transport for redis:// and rediss:// URLs.

    kombu ignores the URL's scheme if the transport is set by class path: rediss:// needs `broker_use_ssl`, too.
    """

    Channel = Channel

    connection_errors = (*kombu_redis.Transport.connection_errors, ResponseError)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.cycle = Poller()

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

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        client.cycle = None  # kombu would switch to the next URL; here, every connection tries all Sentinels


def use_leases(app: broker.Application) -> None:
    """Make the application receive messages under leases. Call in workers only."""
    settings = app.settings
    limit_bodies()
    kind = "SentinelTransport" if settings.redis.scheme == "sentinel" else "Transport"
    app.conf.update(
        broker_transport=f"{__name__}:{kind}",
        broker_transport_options=broker.sentinel_options(settings) | broker.TRANSPORT_KEYS,
    )
