"""kombu's Redis transport without message loss and without one round trip per message.

Uses kombu's queue keys and wire format, so stock clients and workers can share its queues. kombu
takes a message with BRPOP and records it as unacknowledged afterwards: if the worker is killed in
between, the message is lost. kombu also takes only one message per round trip. Here, one Lua
script *reserves* a batch: it atomically moves messages from the queues' lists to a hash and gives
each a *lease*. `Leases` (workers/transport/leases.py) manages them.

Waiting removes nothing from a queue: with CLIENT TRACKING, Redis notifies the worker when a list
changes. Acknowledgements are sent with the next reservation, in one packet per turn of the event
loop.

No more is reserved while held messages take HELD_BYTES. Those that are due later are not held:
Redis keeps them (workers/transport/delays.py). A message whose lease has expired twice because its
worker vanished is handled in *isolation*: while no other message is claimed, and no other is
started until it is finished. If that worker vanishes too, the message or its posts on the device
are to blame. A consumer calls `try_start` before it decodes a message, and claims (`claim`) each
one that it keeps working on after its connection ends. Unclaimed messages return to their queue.

Only the worker's consumer uses this transport (`lease_options`): tasks, events and callbacks use
kombu's own.

Options: the names of the four keys (`reserved_key`, …); `visibility_timeout`, the length
of a lease in seconds; `unacked_restore_interval`, the seconds between searches for expired leases.
Leases can be short, because a thread renews them even while the event loop is busy.

The overrides rely on kombu's internals; tests/integration/test_transport.py fails if kombu
changes. Beyond reserving and leases, they

- send what is due and read every reply on each turn of the event loop, and wake every second
  without one;
- return only unclaimed messages when a channel closes, and send unanswered acknowledgements again;
- tolerate `maxmemory`, at which Redis rejects bindings and MULTI and no consumer could connect to
  empty a queue;
- use RESP 3, which notifications need;
- reconnect after an error reply (out of memory, read-only after a failover) instead of exiting,
  and treat a Redis that rejects writes as unreachable, so that Celery waits before it reconnects.

Private names of kombu 5.7 that are overridden or used: of its Redis channel `_brpop_read`,
`_brpop_sent_at`, `_closing`, `_connparams`, `_delete`, `_flush_brpop_reauth`, `_in_poll`,
`_on_connection_disconnect`, `_poll_error`, `_queue_bind`, `_queue_cycle`, `_size` and
`_update_queue_cycle`; of its poller `_channels`, `_client_registered`, `_fd_to_chan`,
`_in_protected_read`, `_register`, `_register_BRPOP`, `_register_LISTEN` and
`_update_brpop_polling`; of its transport `_avail_channels`, `_callbacks` and `_deliver`; of its
QoS
`_delivered` and `_on_collect`; `_socket_readable`. Of redis-py: `_sock` of a connection.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis as _kombu_redis
from kombu.transport.virtual import QoS as _VirtualQoS
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from feedmill.shared import broker
from feedmill.shared.bindings import BindingsChannel
from feedmill.shared.redis_errors import is_full
from feedmill.shared.scripts import is_missing, load_functions
from feedmill.shared.settings import Settings
from feedmill.workers.transport.leases import (
    RESERVED_AT,
    LeasedMessage,
    Leases,
    Reservation,
    ReservedMessage,
    UndecodableError,
    decoded,
    leases_of,
    stand_in,
)

logger = logging.getLogger(__name__)

#: Typed as Any: kombu's stubs cover few internals.
kombu_redis: Any = _kombu_redis

#: Messages per reservation, and bytes at which a reservation ends; its last message may exceed
#: them.
RESERVE_LIMIT = 64
RESERVE_BYTES = 2**20
#: Bytes of held messages, as in their lists, at which a worker reserves no more.
HELD_BYTES = 2**25
#: Seconds after which a wait is restarted, in case a notification was lost.
REARM_AFTER_S = 5.0
#: Seconds by which Redis answers a later command on another connection, after which a silent
#: connection is lost: Redis runs commands in their order of arrival.
OVERTAKEN_S = 2.0
VirtualQoS: Any = _VirtualQoS


class QoS(kombu_redis.QoS):  # type: ignore[misc]  # see kombu_redis
    """Prefetch accounting of a channel's consumer. Held messages are tracked in `Leases`."""

    channel: "Channel"

    def room(self) -> int | None:
        """Return the number of messages to reserve next; None if unlimited.

        Returns 0 instead of a small number: reserving a few messages at a time would be as slow as
        popping them.
        """
        if not self.can_consume():
            return 0
        free: int | None = self.can_consume_max_estimate()
        if free is None:
            return None
        enough = min(RESERVE_LIMIT, self.prefetch_count // 4)
        return free if free >= enough else 0

    def append(self, message: Any, delivery_tag: str) -> None:
        VirtualQoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        self.channel._acknowledge(delivery_tag)
        VirtualQoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message.

        If requeued, it is delivered last, as in kombu: delivered next, it would loop.
        """
        if not requeue:
            self.ack(delivery_tag)
            return
        leases = self.channel.leases
        leases.unclaim(delivery_tag)
        leases.return_unclaimed([delivery_tag], command="LPUSH")
        VirtualQoS.ack(self, delivery_tag)

    def delay(self, delivery_tag: str, seconds: float) -> None:
        """Give a message back to Redis until it is due, and make room for another one."""
        self.channel.leases.delay(delivery_tag, seconds)
        VirtualQoS.ack(self, delivery_tag)

    def restore_unacked_once(self, *_: Any) -> None:
        """Return unclaimed messages when the channel closes.

        Claimed ones are still being processed.
        """
        self._on_collect.cancel()
        self._flush()
        tags = list(self._delivered)
        tags.reverse()
        self._delivered.clear()
        self.channel.leases.return_unclaimed(tags)

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Do nothing: the lease thread returns expired messages, even while the event loop is
        busy.
        """


class Channel(BindingsChannel):
    """A channel that reserves messages instead of popping them, for consumers with and without
    acknowledgements.
    """

    # Options.

    Message = LeasedMessage
    QoS = QoS

    reserved_key = "reserved"
    reserved_index_key = "reserved_index"
    delayed_key = "delayed"
    delayed_index_key = "delayed_index"
    visibility_timeout = 6
    unacked_restore_interval = 2
    #: Timeout of a command in seconds. Without it, an unresponsive Redis would block the worker
    #: forever.
    socket_timeout = 10
    socket_connect_timeout = 5

    from_transport_options = (
        *kombu_redis.Channel.from_transport_options,
        *broker.TRANSPORT_KEYS,
    )

    #: The consumer's own limits on a reservation, in messages and bytes.
    consumer_room: Callable[[], tuple[int, int]] | None = None
    #: False if Redis does not support notifications; its lists are then polled every second.
    _tracking = True
    #: Start of the current wait for a notification, by the monotonic clock; None while not
    #: waiting.
    _armed_at: float | None = None
    #: True if this connection has enabled tracking.
    _tracking_requested = False
    #: True if a notification has arrived since the pending reservation was sent.
    _notified = False
    #: kombu's attributes: the connection while a reservation or notification is pending; start of
    #: the oldest pending command; and whether the channel is closing.
    _in_poll: Any = None
    _brpop_sent_at: float | None = None
    _closing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Pending replies, in order: kind, and the data needed to handle the reply.
        self._expected = deque[tuple[str, Any]]()
        #: Queues whose messages need no acknowledgement.
        self._unacknowledged = set[str]()
        super().__init__(*args, **kwargs)

    @cached_property
    def leases(self) -> Leases:
        return leases_of(self)

    def _is_connected(self) -> bool:
        client = self.__dict__.get("client")
        if not client or not client.connection:
            return False
        return bool(client.connection._sock)

    def _update_queue_cycle(self) -> None:
        """Restart the wait, because the set of queues has changed."""
        super()._update_queue_cycle()
        self._notified = True
        self._wake()

    # Sending.

    def is_due(self) -> bool:
        """Return whether there is anything to send or deliver now.

        Raises a connection error if a reply is overdue.
        """
        if self._expected:
            self._check_overdue()
        elif self._armed_at:
            waited_s = monotonic() - self._armed_at
            rearm_after_s = REARM_AFTER_S if self._tracking else self.brpop_timeout
            if waited_s > rearm_after_s:
                self._wake()
        leases = self.leases
        if leases.acknowledged or leases.delays.pending:
            return True
        if self._in_poll:
            return False
        messages, _ = self._room()
        return bool(messages)

    def _check_overdue(self) -> None:
        """Raise a connection error if the reply to the oldest pending command is overdue."""
        sent_at = self._brpop_sent_at or monotonic()
        silent_s = monotonic() - sent_at
        is_overdue = False
        if self.socket_timeout:
            is_overdue = silent_s > self.socket_timeout
        overtaken_s = self.leases.answered_at - sent_at
        is_overtaken = overtaken_s > OVERTAKEN_S
        if not (is_overdue or is_overtaken):
            return
        connection = self.client.connection
        if kombu_redis._socket_readable(connection._sock):
            return
        connection.disconnect()
        raise ConnectionFault(f"Redis has not answered for {silent_s:.0f} seconds")

    def _room(self) -> tuple[int, int]:
        """Return the limits of the next reservation, in messages and bytes; 0 messages while there
        is no room.
        """
        free: int | None = self.qos.room()
        if free == 0 or self.leases.is_isolating():
            return 0, 0
        if self.leases.bytes_held >= HELD_BYTES:
            return 0, 0
        # no prefetch limit; without an event loop, consumers expect one message at a time
        if free is None:
            free = RESERVE_LIMIT if self.connection.cycle.evented else 1
        messages = min(free, RESERVE_LIMIT)
        size = RESERVE_BYTES
        if self.consumer_room:
            consumer_messages, consumer_size = self.consumer_room()
            messages = min(messages, consumer_messages)
            size = min(size, consumer_size)
        return messages, size

    def send_due(self) -> None:
        """Send in one packet: acknowledgements, delays, and a reservation if there is room."""
        connection = self.client.connection
        leases = self.leases
        commands: list[tuple[Any, ...]] = []
        if not self._expected:
            self._flush_brpop_reauth()
            self._brpop_sent_at = monotonic()
        if not self._tracking_requested:
            self._tracking_requested = True
            self._expect(
                commands,
                kind="tracking",
                detail=None,
                command=("CLIENT", "TRACKING", "ON", "NOLOOP"),
            )
        tags = leases.take_acknowledged()
        if tags:
            self._expect(
                commands,
                kind="acknowledged",
                detail=None,
                command=("HDEL", leases.reserved, *tags),
            )
            # both are sent again if the second reply is lost
            self._expect(
                commands,
                kind="acknowledged",
                detail=tags,
                command=("ZREM", leases.index, *tags),
            )
        delays = leases.delays.take()
        if delays:
            self._expect(
                commands,
                kind="delayed",
                detail=delays,
                command=leases.delays.command(delays),
            )
        messages, size = (0, 0) if self._in_poll else self._room()
        if messages:
            reservation = self._reservation(messages, size)
            self._notified = False
            self._expect(
                commands,
                kind="reserved",
                detail=reservation,
                command=reservation.command(),
            )
            self._in_poll = connection
        if commands:
            packet = connection.pack_commands(commands)
            connection.send_packed_command(packet, check_health=False)

    def _reservation(self, limit: int, max_bytes: int) -> Reservation:
        """Return a reservation over the lists of all priorities, in order of delivery.

        kombu's `_q_for_pri` rounds to the steps with which this process sends: senders can have
        others.
        """
        queues = self._queue_cycle.consume(len(self.active_queues))
        prefix = self.global_keyprefix
        lists = [
            (prefix + broker.queue_list(queue, step), queue)
            for step in broker.READ_STEPS
            for queue in queues
        ]
        return self.leases.reservation(lists, limit, max_bytes)

    def _expect(
        self,
        commands: list[tuple[Any, ...]],
        kind: str,
        detail: Any,
        command: tuple[Any, ...],
    ) -> None:
        """Add a command to those to send, and its reply to the pending ones."""
        commands.append(command)
        self._expected.append((kind, detail))

    # Receiving.

    def _brpop_read(self, **_: Any) -> bool:
        """Handle all replies that have arrived, and deliver reserved messages.

        Raises Empty if none was delivered.
        """
        delivered = False
        while True:
            connection = self.client.connection
            reply = self._next_reply(connection)
            if reply is None:
                self._notified = True
                self._wake()
            elif self._handle(reply):
                delivered = True
            self._brpop_sent_at = monotonic() if self._expected else None
            if self.closed or connection._sock is None:
                break
            if not connection.can_read(timeout=0):
                break
        if not delivered:
            raise Empty
        return True

    def _poll_error(self, kind: str, **_: Any) -> Any:
        if kind == "BRPOP":
            return self._brpop_read()
        return super()._poll_error(kind)

    def _next_reply(self, connection: Any, **options: Any) -> Any:
        """Read a reply.

        Returns None for a notification, and error replies as exceptions without raising them.
        """
        try:
            return connection.read_response(push_request=True, **options)
        except ResponseError as error:
            return error
        except self.connection_errors:
            connection.disconnect()
            raise

    def _wake(self) -> None:
        """End the wait for a notification: the next turn may send a reservation."""
        if self._armed_at:
            self._armed_at = None
            self._in_poll = None

    def _handle(self, reply: Any) -> bool:
        """Handle the oldest pending reply. Return whether messages were delivered."""
        kind, detail = self._expected.popleft()
        if isinstance(reply, ResponseError):
            self._handle_error(kind, detail, reply)
            return False
        if kind == "reserved":
            return self._reserved(reply, detail)
        return False

    def _handle_error(self, kind: str, detail: Any, error: ResponseError) -> None:
        if kind == "tracking":
            logger.warning(
                "cannot enable notifications (%s); polling queues every second", error
            )
            self._tracking = False
        elif is_missing(error):
            with self.conn_or_acquire() as client:
                load_functions(client)
            if kind == "delayed":
                self.leases.delays.restore(detail)
                return
            self._in_poll = None
        else:
            self._send_again(kind, detail)
            self.client.connection.disconnect()
            raise error

    def _send_again(self, kind: str, detail: Any) -> None:
        """Send acknowledgements or delays again whose answer is an error or is lost."""
        if detail and kind == "acknowledged":
            self.leases.acknowledged.extend(detail)
        elif kind == "delayed":
            self.leases.delays.restore(detail)

    def _reserved(self, reply: Any, reservation: Reservation) -> bool:
        """Deliver reserved messages; return those of cancelled consumers.

        Return whether any was delivered.

        A reservation that reached no limit has emptied all lists, and asked for a notification of
        each.
        """
        messages = reservation.messages_in(reply)
        sizes = [len(message.content) for message in messages]
        reached_limit = len(messages) == reservation.limit
        reached_bytes = sum(sizes) >= reservation.max_bytes
        emptied_lists = not (reached_limit or reached_bytes)
        self._in_poll = None
        if emptied_lists and not self._notified:
            self._armed_at = monotonic()
            self._in_poll = self.client.connection
        queues = dict.fromkeys(message.queue for message in messages)
        for queue in queues:
            self._queue_cycle.rotate(queue)
        for message in messages:
            self.leases.hold(message.tag, message.content)
        return self._deliver_or_return(messages)

    def _deliver_or_return(self, messages: Sequence[ReservedMessage]) -> bool:
        """Deliver messages, and return those without a consumer, or all if a callback raises.

        Return whether any was delivered.
        """
        delivered = False
        undelivered: list[str] = []
        waiting = deque(messages)
        try:
            while waiting:
                message = waiting.popleft()
                if self._closing or not self._has_consumer(message.queue):
                    undelivered.append(message.tag)
                else:
                    delivered = True
                    self._deliver(message)
        finally:  # a callback may raise, to end the worker for example
            undelivered.extend(message.tag for message in waiting)
            self.leases.return_unclaimed(reversed(undelivered))
        return delivered

    def _has_consumer(self, queue: str) -> bool:
        return queue in self.connection._callbacks

    def _deliver(self, reserved: ReservedMessage) -> None:
        """Deliver a message, or a stand-in that the consumer refuses if it cannot be decoded."""
        try:
            message = decoded(reserved.content)
            self._deliver_as(message, reserved)
        except UndecodableError as error:
            message = stand_in(reserved.content, str(error))
            self._deliver_as(message, reserved)

    def _deliver_as(self, message: dict[str, Any], reserved: ReservedMessage) -> None:
        properties = message["properties"]
        properties["delivery_tag"] = reserved.tag
        properties["delivery_info"][RESERVED_AT] = reserved.at_ns
        self.connection._deliver(message, reserved.queue)
        if reserved.queue in self._unacknowledged:
            self._acknowledge(reserved.tag)

    # Closing.

    def _on_connection_disconnect(self, connection: Any) -> None:
        client = self.__dict__.get("client")
        is_own = client is not None and client.connection is connection
        if is_own:
            for kind, detail in self._expected:
                self._send_again(kind, detail)
            self._expected.clear()
            self._tracking_requested = False
            self._armed_at = None
            self._brpop_sent_at = None
        super()._on_connection_disconnect(connection)

    def close(self) -> None:
        leases = self.__dict__.get("leases")
        if leases and not self._closing:
            self._closing = True
            with suppress(RedisError, OSError, Empty):
                self._await_reservation(leases.timeout_s)
            # otherwise the next connection sends them, after repeating lost writes
            if self._is_connected():
                with suppress(RedisError, OSError):
                    leases.flush()
            leases.channels.discard(self)
        self._in_poll = None
        super().close()

    def _is_reserving(self) -> bool:
        kinds = [kind for kind, _ in self._expected]
        return "reserved" in kinds

    def _await_reservation(self, timeout_s: float) -> None:
        """Read replies until none with reserved messages is pending."""
        while self._is_reserving():
            connection = self.client.connection
            reply = self._next_reply(connection, timeout=timeout_s)
            if reply is not None:
                self._handle(reply)

    # kombu's other methods.

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        if asynchronous:
            return parameters | {"protocol": 3}
        return parameters

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        self.leases.start(self)
        needs_no_ack = no_ack or not self.ack_emulation
        if needs_no_ack:
            self._unacknowledged.add(queue)
        else:
            self._unacknowledged.discard(queue)
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        if not no_ack:
            raise NotImplementedError(
                "without a consumer, a message has no lease: consume it, or set no_ack"
            )
        return super().basic_get(queue, no_ack, **kwargs)

    def _acknowledge(self, tag: str) -> None:
        self.leases.acknowledge(tag)
        if not self.connection:
            return
        cycle = self.connection.cycle
        if cycle and not (cycle.evented or cycle._in_protected_read):
            self.leases.flush()

    def _size(self, queue: str) -> int:
        with (
            self.conn_or_acquire() as client,
            client.pipeline(transaction=False) as pipe,
        ):
            for name in broker.queue_lists(queue):
                pipe.llen(name)
            return sum(pipe.execute())

    def _queue_bind(
        self, exchange: str, routing_key: str, pattern: str, queue: str
    ) -> None:
        with self._tolerate_full_redis(
            f"cannot record the binding of queue {queue!r} to exchange {exchange!r}"
        ):
            super()._queue_bind(exchange, routing_key, pattern, queue)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        with self._tolerate_full_redis(
            f"cannot delete queue {queue!r}; it will expire"
        ):
            super()._delete(queue, *args, **kwargs)

    @contextmanager
    def _tolerate_full_redis(self, what: str) -> Iterator[None]:
        """Log an error from a Redis at its memory limit and continue: workers must connect in
        order to free memory.
        """
        try:
            yield
        except ResponseError as error:
            if not is_full(error):
                raise
            logger.warning(
                "%s: Redis is at its memory limit (%s); raise maxmemory", what, error
            )

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        try:
            return super().decode_body(body, encoding)
        except (ValueError, TypeError, AttributeError) as error:
            raise UndecodableError(
                "the body does not match its declared encoding"
            ) from error


class Poller(kombu_redis.MultiChannelPoller):  # type: ignore[misc]  # see kombu_redis
    """kombu's poller, changed to send pending commands on each turn and to read every reply."""

    #: True if an event loop drives the poller. Otherwise, data must be sent at once, because there
    #: is no next turn.
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
        channel.send_due()

    def _update_brpop_polling(self) -> None:
        pass

    def maybe_check_brpop_health(self) -> None:
        pass  # `Channel.is_due` does

    def on_readable(self, fileno: int) -> bool | None:
        channel, kind = self._fd_to_chan.get(fileno, (None, None))
        delivered: bool | None
        if kind == "BRPOP":
            delivered = channel._brpop_read()
        else:
            delivered = super().on_readable(fileno)
        return delivered

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        timeout_s = 1 if timeout is None else min(timeout, 1)
        try:
            return super().get(callback, timeout_s)
        finally:
            if not self.evented:
                self._flush_leases()

    def _flush_leases(self) -> None:
        """Send what no next turn of an event loop sends."""
        for channel in tuple(self._channels):
            leases = channel.__dict__.get("leases")
            if leases:
                leases.flush()


class Transport(kombu_redis.Transport):  # type: ignore[misc]  # see kombu_redis
    """Transport for redis:// and rediss:// URLs.

    kombu ignores the URL's scheme if the transport is set by class path: rediss:// needs
    `broker_use_ssl`, too.
    """

    Channel = Channel

    # InvalidResponse: another program may answer on the port while Redis is restarted.
    connection_errors = (
        *kombu_redis.Transport.connection_errors,
        ResponseError,
        InvalidResponse,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.cycle = Poller()

    def establish_connection(self) -> Any:
        connection = super().establish_connection()
        self._avail_channels[0].leases.check_writable()
        return connection

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.cycle.evented = True
        channels = tuple(self.cycle._channels)
        for channel in channels:
            channel.leases.evented = True
        super().register_with_event_loop(connection, loop)


# See kombu_redis.
class SentinelChannel(Channel, kombu_redis.SentinelChannel):  # type: ignore[misc]
    """A channel to the master that Redis Sentinel reports."""

    from_transport_options = tuple(
        dict.fromkeys(
            (
                *Channel.from_transport_options,
                *kombu_redis.SentinelChannel.from_transport_options,
            )
        )
    )


class SentinelTransport(Transport):
    """Transport for sentinel:// URLs. Requires the option `master_name`."""

    default_port = kombu_redis.SentinelTransport.default_port
    Channel = SentinelChannel

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        # kombu would switch to the next URL; here, every connection tries all Sentinels
        client.cycle = None


def lease_options(settings: Settings) -> dict[str, Any]:
    """Return the arguments of `connection_for_read` for a connection that receives messages under
    leases.
    """
    scheme = settings.redis.scheme
    kind = "Transport"
    if scheme == "sentinel":
        kind = "SentinelTransport"
    return {
        "transport": f"{__name__}:{kind}",
        "transport_options": {
            **broker.TRANSPORT_KEYS,
            "health_check_interval": broker.CHECK_INTERVAL_S,
        },
    }
