"""kombu's channel to Redis, with prefetch accounting, transport options and tolerance of a full Redis."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

from kombu.transport.virtual import QoS as _VirtualQoS
from redis.exceptions import ResponseError

from shared.encoding import memory_of
from shared.redis_errors import is_full
from workers.transport.decoding import UndecodableError
from workers.transport.reservations import ReservingChannel, kombu_redis

logger = logging.getLogger(__name__)

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
        self.channel.leases.deliver(delivery_tag, memory_of(message.body))
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


class Channel(ReservingChannel):
    """A channel for consumers with and without acknowledgements."""

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
