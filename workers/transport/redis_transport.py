"""kombu's Redis transport without message loss and without one round trip per message.

Uses kombu's queue keys and wire format, so stock clients and workers can share its queues. kombu takes a message with
BRPOP and records it as unacknowledged afterwards: if the worker is killed in between, the message is lost. kombu also
takes only one message per round trip. Here, one Lua script *reserves* a batch: it atomically moves messages from the
queues' lists to a hash and gives each a *lease*. `Leases` (workers/transport/leases.py) manages them.

Waiting removes nothing from a queue: with CLIENT TRACKING, Redis notifies the worker when a list changes.
Acknowledgements are sent with the next reservation, in one packet per turn of the event loop.

No more is reserved while claimed messages take HELD_BYTES. A message whose lease has expired twice because its worker
vanished is handled in *isolation*: while no other message is claimed, and no other is started until it is finished. If
that worker vanishes too, the message caused it. A consumer asks `admit` before it decodes a message, and claims
(`claim`) each one that it keeps working on after its connection ends. Unclaimed messages return to their queue.

This module contains the transports and the poller; channel.py the channel; leases.py the messages that the process
holds, and their parser.

Options in `broker_transport_options`: the names of the three keys (`reserved_key`, …); `visibility_timeout`, the length
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

from typing import Any

from redis.exceptions import ResponseError

from feedmill.shared import broker
from feedmill.shared.encoding import limit_bodies
from feedmill.workers.transport.channel import Channel, kombu_redis


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
        broker_transport_options={
            **broker.sentinel_options(settings),
            **broker.TRANSPORT_KEYS,
            "visibility_timeout": settings.visibility_timeout,
            "unacked_restore_interval": settings.visibility_timeout / 3,
        },
    )
