"""Give up a process' connections to Redis together.

A network that has lost one connection without a word has probably lost them all. Each would wait
for its own timeout, one after the other: half a minute until a result is stored.

Relies on these internals. redis-py: a `ConnectionPool` holds `_available_connections` and
`_in_use_connections`, guarded by `_lock`; the `_sock` of each is None while disconnected.
kombu 5.7: a pool of connections holds idle ones in `_resource` and used ones in `_dirty`; each has
a `_transport` with `channels`, and a Redis channel has a `_pool`. Celery 5.7: the Redis backend
has a `client`, once it is used.
"""

import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from celery import Celery


def shut_down_pool(pool: Any) -> None:
    """Shut down the sockets of a client's connections, idle and used ones, from any thread.

    The thread that uses a connection gets an error at once, as if Redis had closed it, and
    reconnects.
    """
    with pool._lock:
        connections = [*pool._available_connections, *pool._in_use_connections]
    for connection in connections:
        current = connection._sock
        if current is not None:
            with suppress(OSError):  # closed meanwhile
                # Not the method of a TLS socket, which changes what the other thread uses.
                socket.socket.shutdown(current, socket.SHUT_RDWR)


def shut_down_backends(backends: Iterable[Any]) -> None:
    """Shut down the connections over which Celery stores results."""
    for backend in backends:
        client = vars(backend).get("client")
        if client is not None:
            shut_down_pool(client.connection_pool)


def shut_down_publishers(app: Celery) -> None:
    """Shut down the connections over which an application sends tasks."""
    for pool in _pools_of(app):
        shut_down_pool(pool)


def _pools_of(app: Any) -> Iterator[Any]:
    """Yield the Redis pools of the connections in an application's pool."""
    connections = app.pool
    for connection in [*connections._resource.queue, *connections._dirty]:
        transport = getattr(connection, "_transport", None)
        for channel in getattr(transport, "channels", None) or ():
            pool = getattr(channel, "_pool", None)
            if pool is not None:
                yield pool
