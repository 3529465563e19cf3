"""Where the reading of a file stopped, kept in Redis, so that the next run goes on there.

A position covers records all of whose posts are in the queue, and marked as sent: whoever saves one sees to that. It
knows neither formats nor posts.
"""

from pathlib import Path

from redis import Redis

from shared.keys import position_key
from shared.messages import digest
from shared.settings import DAY

#: Seconds for which a position is kept; as long as what was sent is remembered, unless that is set otherwise.
POSITION_TTL = 30 * DAY
#: Bytes at a file's beginning by which it is known again. Not by its size: a download may go on where it broke off.
BEGINNING = 1 << 16


class Position:
    """How many records of a file are done with, when it is read in one certain way.

    path: a file that can be read twice. way: whatever makes of the same file other messages, options and filters.
    Raises OSError. The methods raise redis.exceptions.RedisError.
    """

    def __init__(self, redis: Redis, path: str, *way: str | None) -> None:
        with Path(path).open("rb") as file:
            beginning = file.read(BEGINNING)
        self._redis = redis
        self._key = position_key(digest(str(Path(path).absolute()), *way, beginning.decode("latin-1")))

    def load(self) -> int:
        """Records done with; 0 where nothing is known."""
        found = self._redis.get(self._key)
        return int(found) if found else 0

    def save(self, records: int) -> None:
        """Note that so many records are done with."""
        self._redis.set(self._key, records, ex=POSITION_TTL)

    def forget(self) -> None:
        """The next run begins at the beginning."""
        self._redis.delete(self._key)
