"""Poison tracking: count how often each post was in a forward pass when its worker died.

A poison post kills its worker, returns to the queue and kills the next worker. So before each forward pass, a worker
records the posts in flight: it sends one Redis command, and does not wait for the answer. When a message is
redelivered, the records of dead workers count against its posts. A post with such a count is a suspected poison post,
and the pipeline computes it in isolation. Other posts of the message, and messages that only waited in the dead worker,
are not suspected.

Records outlive their worker. A leftover record does not affect a finished post, which is never redelivered.
"""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from redis import Redis
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import RedisError, ResponseError

from feedmill.shared.keys import PASSES, poison_key
from feedmill.shared.messages import digest
from feedmill.shared.redis_errors import is_replica
from feedmill.shared.scripts import load_functions
from feedmill.shared.scripts import poison as scripts

#: Number of deaths after which a post is not computed again. In all passes but the first it ran in isolation.
MAX_DEATHS = 3
#: Seconds for which records and counts are kept. Redelivery takes only seconds.
NOTE_TTL_S = 86_400
#: Notes without an answer from Redis. Beyond them, the device waits for Redis.
MAX_UNANSWERED = 8


class PoisonTracker:
    """Record the posts in flight of this worker, and read the records of dead workers. Thread-safe."""

    def __init__(self, redis: Redis) -> None:
        """Create a tracker. redis: a client with short timeouts, because the device waits if Redis stops answering."""
        self._redis = redis
        self._worker = uuid4().hex
        with suppress(RedisError):  # Redis may be unreachable, or full: a later call loads them
            load_functions(redis)  # now, because `note` does not wait for its answer
        #: By lane. Each is used by the lane's thread, and by `release` after that thread has ended.
        self._notes: dict[int, _Notes] = {}

    def note(self, lane: int, posts: Iterable[tuple[str | None, int]]) -> None:
        """Record the posts of the forward pass that this lane starts, as (message id, index). Ignore Redis errors.

        Returns when the record is sent, not when Redis has answered. A record that is sent reaches Redis even if the
        process is killed at once.
        """
        noted: dict[str | None, list[int]] = {}
        for message, index in dict.fromkeys(posts):
            noted.setdefault(message, []).append(index)
        note = json.dumps({"at": int(time.time()), "posts": {digest(name): each for name, each in noted.items()}})
        if (notes := self._notes.get(lane)) is None:
            notes = self._notes[lane] = _Notes(self._redis)
        notes.send(f"{self._worker}/{lane}", note)

    def wait(self) -> None:
        """Wait until Redis has every record. Not while a lane's thread uses `note`."""
        for notes in self._notes.values():
            notes.wait()

    def deaths(self, message: str | None) -> dict[int, int]:
        """Return how many workers died in a pass with each post of a redelivered message, by the post's index.

        Empty while Redis is unreachable; the records stay, and count at the next redelivery.
        """
        with suppress(RedisError):
            return scripts.count(self._redis, digest(message), self._worker, NOTE_TTL_S)
        return {}

    def clear(self, message: str | None) -> None:
        """Delete the counts of a message that has ended."""
        with suppress(RedisError):
            self._redis.delete(poison_key(digest(message)))

    def release(self, lanes: int) -> None:
        """Delete this worker's records on a normal exit, so that its returned messages are not suspected."""
        self.wait()
        with suppress(RedisError):
            self._redis.hdel(PASSES, *(f"{self._worker}/{lane}" for lane in range(lanes)))


class _Notes:
    """A connection that sends records of forward passes, and reads the answers later. Not thread-safe.

    At most a few answers are outstanding. Waiting for each would add a round trip to every forward pass.
    """

    def __init__(self, redis: Redis) -> None:
        self._pool: Any = redis.connection_pool
        self._connection: Any = None
        self._unanswered = 0

    def send(self, name: str, record: str) -> None:
        """Send a record. Drop it if Redis is unreachable."""
        for _ in range(2):  # again over a new connection, for example after a restart of Redis
            try:
                self._send(scripts.note(name, record, NOTE_TTL_S))
                return
            except (RedisError, OSError):
                self._disconnect()

    def wait(self) -> None:
        """Wait until Redis has answered everything."""
        try:
            self._read(0)
        except (RedisError, OSError):
            self._disconnect()

    def _send(self, command: Sequence[Any]) -> None:
        self._read(MAX_UNANSWERED - 1)
        if self._connection is None:
            self._connection = self._pool.get_connection()
        elif not self._unanswered and self._connection.can_read(timeout=0):
            raise ConnectionFault("the connection was closed")
        # No health check: it would take an outstanding answer for its own.
        self._connection.send_packed_command(self._connection.pack_command(*command), check_health=False)
        self._unanswered += 1

    def _read(self, limit: int) -> None:
        """Read the answers that have arrived, and wait while more than `limit` are outstanding."""
        while self._unanswered and (self._unanswered > limit or self._connection.can_read(timeout=0)):
            self._unanswered -= 1
            try:
                self._connection.read_response()
            except ResponseError as error:  # Redis rejects the record, for example because it is full
                if is_replica(error):  # a new connection may reach the master
                    raise

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.disconnect()
            self._pool.release(self._connection)
        self._connection, self._unanswered = None, 0
