"""Resume positions of files in Redis, and default names of runs. Both identify a file by its beginning.

A position counts the records whose posts are all in the queue and marked as sent; the caller of `save` ensures that.
"""

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis import Redis

from feedmill.producers.files import is_file
from feedmill.shared.errors import UNPRINTABLE_CHARACTERS
from feedmill.shared.keys import position_key
from feedmill.shared.messages import MAX_RUN, digest
from feedmill.shared.settings import DAY_S

#: Lifetime of a position in seconds; equal to the default of the setting `sent_ttl`.
POSITION_TTL = 30 * DAY_S
#: Leading bytes that identify a file. Its size does not, since an interrupted download may continue later.
HEAD_BYTES = 1 << 16
#: Characters of the digest in a run's name.
DIGEST_CHARACTERS = 6


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


def default_run(path: str) -> str:
    """Return the run of a file's posts, without blanks: "posts.csv-3f2a9c".

    Sending the file again continues its run and skips what was sent; another file of this name is another run. A file
    that cannot be read twice, such as standard input, is a run of its own each time: "stdin-2026-11-22T21:30:05" (UTC).
    """
    suffix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    if is_file(path):
        with suppress(OSError):  # reading the file reports it
            suffix = digest(head(path))[:DIGEST_CHARACTERS]
    name = "_".join(UNPRINTABLE_CHARACTERS.sub("_", Path(path).name).split())
    if path == "-":
        name = "stdin"
    elif name.isdecimal() and not is_file(path):  # /dev/fd/63, the shell's name of <(command)
        name = "pipe"
    return f"{name[: MAX_RUN - len(suffix) - 1]}-{suffix}"
