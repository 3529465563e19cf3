"""Resume positions of files, stored in Redis.

A position counts the records whose posts are all in the queue and marked as sent; the caller of `save` ensures that.
"""

import re
from pathlib import Path
from typing import Any

from redis import Redis

from feedmill.shared.keys import position_key
from feedmill.shared.messages import digest
from feedmill.shared.settings import DAY_S

#: Lifetime of a position in seconds; equal to the default of the setting `sent_ttl`.
POSITION_TTL = 30 * DAY_S
#: Leading bytes that identify a file. Its size does not, since an interrupted download may continue later.
HEAD_BYTES = 1 << 16


def head(path: str) -> str:
    """Return the leading bytes that identify a file, as text. Raises OSError."""
    with Path(path).open("rb") as file:
        return file.read(HEAD_BYTES).decode("latin-1")


class Position:
    """Number of finished records of a file, for one combination of options and filters.

    path: a regular file. way: options and filters, which determine the file's messages.
    Raises OSError. The methods raise redis.exceptions.RedisError.
    """

    def __init__(self, redis: Redis, path: str, *way: str | None) -> None:
        self._redis = redis
        self._key = position_key(digest(str(Path(path).absolute()), *way, head(path)))

    def load(self) -> int:
        """Return the number of finished records; 0 if none is stored."""
        records: Any = self._redis.get(self._key) or ""
        return int(records) if re.fullmatch(r"\d{1,18}", records, re.ASCII) else 0

    def save(self, records: int) -> None:
        """Store the number of finished records."""
        self._redis.set(self._key, records, ex=POSITION_TTL)

    def forget(self) -> None:
        """Delete the position, so that the next run starts at the beginning."""
        self._redis.delete(self._key)
