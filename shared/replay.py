"""Repeat the writes of the last seconds when Redis may have lost them.

A killed Redis can lose the last second of its append-only file. A promoted replica can lack what its master had not
yet replicated. A worker could then acknowledge a message whose result was lost. Such a loss always closes connections,
so each new connection checks the server's identity. If the server is the same, nothing was lost.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from redis import Redis
from redis.exceptions import ResponseError

T = TypeVar("T")
#: Seconds of writes that Redis may lose: two with a slow disk and an append-only file; ten with a replica and the
#: `min-replicas-max-lag` recommended in docs/durability.md.
LOSABLE_S = 10.0
#: Maximum bytes of writes kept for repetition.
MAX_KEPT_BYTES = 64 * 2**20


class Connections:
    """Identity of the server that a client is connected to. Pass an instance to redis-py as `redis_connect_func`."""

    def __init__(self) -> None:
        #: The server's `run_id` and `master_replid`; the latter changes when a replica is promoted. A unique object if
        #: the server does not report them. None before `start`: not every user has permission for INFO.
        self.latest: object = None

    def __call__(self, connection: Any) -> None:
        # Without health checks: a failed one connects again, and so calls this, without end if Redis does not answer.
        interval, connection.health_check_interval = connection.health_check_interval, 0
        try:
            connection.on_connect()
            if self.latest is not None:
                connection.send_command("INFO")
                self._note(connection.read_response)
        finally:
            connection.health_check_interval = interval

    def start(self, redis: Redis) -> None:
        """Start identifying the server on each connection. Raises redis.exceptions.RedisError."""
        if self.latest is None:
            self._note(redis.info)

    def _note(self, ask: Callable[[], object]) -> None:
        try:
            found = re.findall(r"\b(?:run_id|master_replid)\W+(\w+)", str(ask()))
        except ResponseError:  # no permission for INFO
            found = []
        self.latest = tuple(found) or object()


class _Write(NamedTuple):
    repeat: Callable[[], object]
    size: int
    at: float


class Replay:
    """Recent idempotent writes of one client, repeated to each new server. Thread-safe.

    redis: a client of `feedmill.shared.broker.connect`. With any other client, nothing is kept or repeated.
    """

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._clock = clock
        found = redis.connection_pool.connection_kwargs.get("redis_connect_func")
        self._connections = found if isinstance(found, Connections) else None
        #: The server that has received all kept writes; None before `start`.
        self._seen: object = None
        self._kept: deque[_Write] = deque()
        self._size = 0
        #: Time of Redis' last answer. Writes more than LOSABLE_S seconds older than this are safe.
        self._contact = clock()
        self._lock = threading.RLock()

    def start(self) -> None:
        """Identify the server, so that writes are kept from now on. Only the first call uses Redis and can raise
        redis-py's errors.
        """
        if self._connections and self._seen is None:
            with self._lock:
                if self._seen is None:
                    self._connections.start(self._redis)
                    self._seen = self._connections.latest

    def write(self, write: Callable[[], T], size: int) -> T:
        """Call `write` and return its result, then repeat writes that Redis may have lost. Raises redis-py's errors.

        size: bytes of the write.
        """
        with self._lock:
            self.start()
            written = write()
            self.keep(write, size)
            self.catch_up()
            return written

    def keep(self, write: Callable[[], object], size: int) -> None:
        """Keep a finished write for repetition. Without effect before `start`. Does not use Redis."""
        if self._seen is None:
            return
        with self._lock:
            self._kept.append(_Write(write, size, self._clock()))
            self._size += size
            while self._size > MAX_KEPT_BYTES:
                self._size -= self._kept.popleft().size

    def check(self) -> None:
        """Ping Redis if it may still lose a kept write, then catch up. Raises redis-py's errors."""
        if self._kept:
            self._redis.ping()
            self.catch_up()

    def catch_up(self) -> None:
        """Repeat kept writes if the server is new, and forget writes that are safe. Raises redis-py's errors.

        Call after a successful command: while Redis is unreachable, nothing may be forgotten.
        """
        with self._lock:
            while self._connections and self._seen is not None and self._seen != (latest := self._connections.latest):
                now = self._clock()
                self._forget(self._contact)
                for _ in range(len(self._kept)):
                    self._kept[0].repeat()
                    # Keep it with a new time: the new server can lose it too.
                    self._kept.append(self._kept.popleft()._replace(at=now))
                self._seen = latest
            self._contact = self._clock()
            self._forget(self._contact)

    def _forget(self, now: float) -> None:
        while self._kept and now - self._kept[0].at > LOSABLE_S:
            self._size -= self._kept.popleft().size
