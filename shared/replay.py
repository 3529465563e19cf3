"""Writes of the last seconds, repeated when Redis may have lost them.

A Redis that is killed can lose the last second of its append-only file, and a replica that takes its place what the
master had not passed on: always the latest writes. A worker that stored a result before that and acknowledges its
message after it would lose the result. A lost connection is the sign: no connection survives the server that it led
to. Each new connection asks which server it is: as long as it is the same one, nothing was lost.
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
#: Seconds of writes that a Redis may lose: two of its append-only file while the disk is slow; of a replica ten, with
#: the `min-replicas-max-lag` that docs/durability.md advises.
LOSABLE = 10.0
#: Bytes of writes that are kept, at most.
MOST_KEPT = 64 * 2**20


class Connections:
    """Notices when a client is connected to another server; pass it to redis-py as `redis_connect_func`."""

    def __init__(self) -> None:
        #: The server's `run_id` and `master_replid`, which changes when a replica takes its place; an object of its own
        #: where it does not tell, which equals no other; None before `start`, since not every user may ask.
        self.latest: object = None

    def __call__(self, connection: Any) -> None:
        connection.on_connect()
        if self.latest is not None:
            connection.send_command("INFO")
            self._note(connection.read_response)

    def start(self, redis: Redis) -> None:
        """Ask for the server from now on. Raises redis.exceptions.RedisError."""
        if self.latest is None:
            self._note(redis.info)

    def _note(self, ask: Callable[[], object]) -> None:
        try:
            found = re.findall(r"\b(?:run_id|master_replid)\W+(\w+)", str(ask()))
        except ResponseError:  # this user may not ask
            found = []
        self.latest = tuple(found) or object()


class _Write(NamedTuple):
    repeat: Callable[[], object]
    size: int
    at: float


class Replay:
    """The latest idempotent writes of one client, which it repeats to each new server. Thread-safe.

    redis: of `shared.broker.connect`; over any other client, nothing is kept or repeated.
    """

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._clock = clock
        found = redis.connection_pool.connection_kwargs.get("redis_connect_func")
        self._connections = found if isinstance(found, Connections) else None
        #: The server that has all that is kept; None before there is any.
        self._seen: object = None
        self._kept: deque[_Write] = deque()
        self._size = 0
        #: When Redis was last known to answer: what it lost was written LOSABLE seconds before at most.
        self._contact = clock()
        self._lock = threading.RLock()

    def write(self, write: Callable[[], T], size: int) -> T:
        """Return what `write` does, when all that Redis may have lost is written again. Raises redis' errors.

        size: bytes of it.
        """
        with self._lock:
            written = write()
            self.keep(write, size)
            self.catch_up()
            return written

    def keep(self, write: Callable[[], object], size: int) -> None:
        """Note what Redis holds already: it is written again if Redis loses it. Raises redis' errors the first time."""
        if self._connections is None:
            return
        with self._lock:
            if self._seen is None:
                self._connections.start(self._redis)
                self._seen = self._connections.latest
            self._kept.append(_Write(write, size, self._clock()))
            self._size += size
            while self._size > MOST_KEPT:
                self._size -= self._kept.popleft().size

    def check(self) -> None:
        """Ask Redis for a sign of life while it may lose something, and catch up. Raises redis' errors."""
        if self._kept:
            self._redis.ping()
            self.catch_up()

    def catch_up(self) -> None:
        """Repeat what is kept, where the server is new; forget what Redis can no longer lose. Raises redis' errors.

        To be called after a command has succeeded: while Redis is away, nothing is forgotten.
        """
        with self._lock:
            while self._connections and self._seen is not None and self._seen != (latest := self._connections.latest):
                now = self._clock()
                self._forget(self._contact)
                for _ in range(len(self._kept)):
                    self._kept[0].repeat()
                    # Moved to the end with a new time: it can be lost once more.
                    self._kept.append(self._kept.popleft()._replace(at=now))
                self._seen = latest
            self._contact = self._clock()
            self._forget(self._contact)

    def _forget(self, now: float) -> None:
        while self._kept and now - self._kept[0].at > LOSABLE:
            self._size -= self._kept.popleft().size
