"""Repeat the writes of the last seconds when Redis may have lost them.

A killed Redis can lose the last second of its append-only file. A promoted replica can lack what its master had not
yet replicated. A worker could then acknowledge a message whose result was lost. So each answer of the store's functions
carries the server's identity: its `run_id`, and its `master_replid`, which changes when a replica is promoted. If it is
the same, nothing was lost.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")
#: Seconds of writes that Redis may lose: two with a slow disk and an append-only file; ten with a replica and the
#: `min-replicas-max-lag` recommended in docs/durability.md.
LOSABLE_S = 10.0
#: Maximum bytes of writes kept for repetition.
MAX_KEPT_BYTES = 64 * 2**20


class _Write(NamedTuple):
    #: Write, and return the server's identity and the answer.
    repeat: Callable[[], tuple[str, object]]
    size: int
    at: float


class Replay:
    """Recent idempotent writes of one client, repeated to each new server. Thread-safe.

    identify: returns the server's identity. It and writes raise redis-py's errors.
    """

    def __init__(self, identify: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._identify = identify
        self._clock = clock
        #: The server that has received all kept writes; "" if there may be none, None if there are no writes yet.
        self._server: str | None = None
        self._kept: deque[_Write] = deque()
        self._size = 0
        #: Time of Redis' last answer. Writes more than LOSABLE_S seconds older than this are safe.
        self._contact = clock()
        self._lock = threading.RLock()

    def write(self, write: Callable[[], tuple[str, T]], size: int) -> T:
        """Write, keep the write for repetition, and catch up. size: bytes of the write."""
        with self._lock:
            server, answer = write()
            self.note(server)
            self.keep(write, size)
            self._catch_up(server)
            return answer

    def note(self, server: str) -> None:
        """Note the server that gave the latest answer."""
        with self._lock:
            self._server = server if self._server in (None, server) else ""

    def keep(self, write: Callable[[], tuple[str, object]], size: int) -> None:
        """Keep a write for repetition whose results the server has. Does not use Redis."""
        with self._lock:
            self._kept.append(_Write(write, size, self._clock()))
            self._size += size
            while self._size > MAX_KEPT_BYTES:
                self._size -= self._kept.popleft().size

    def check(self) -> None:
        """Catch up if Redis may still lose a kept write."""
        if self._kept:
            self._catch_up(self._identify())

    def _catch_up(self, server: str) -> None:
        """Repeat kept writes if another server answers than the one that has them, and forget writes that are safe.

        While Redis is unreachable, nothing may be forgotten.
        """
        with self._lock:
            while self._server != server:
                self._forget(self._contact)
                # With a new time: the new server can lose them too.
                self._kept = deque(write._replace(at=self._clock()) for write in self._kept)
                expected, self._server = server, ""
                for write in self._kept:
                    server, _ = write.repeat()
                self._server = expected
            self._contact = self._clock()
            self._forget(self._contact)

    def _forget(self, now: float) -> None:
        while self._kept and now - self._kept[0].at > LOSABLE_S:
            self._size -= self._kept.popleft().size
