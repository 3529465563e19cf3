"""Read the results stream as raw rows, for readers of a hundred thousand results and more.

Per chunk, one script fetches about five hundred rows and another checks them for purged posts. Rows are plain dicts:
building pydantic models would be slow.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

from pydantic_core import from_json
from redis import Redis

from feedmill.reading.readers import wait_for_entry
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.scripts.stream import Place, check_posts, entries_stored, fetch_rows, is_lost, trimmed_between

logger = logging.getLogger(__name__)

#: Approximate bytes of entries per fetch. A fetch blocks Redis for one or two milliseconds.
FETCH_BYTES = 2**19
#: Posts per call of the script that checks for purged posts.
POSTS_PER_CHECK = 1000


class ResultRow(NamedTuple):
    """A result as stored: the fields of Classification and Post (shared/messages.py) as dicts.

    The post's body is truncated, fields with default values are absent, and the Reddit score is the latest one known.
    """

    entry: str
    found: dict[str, Any]
    post: dict[str, Any]


class Chunk(NamedTuple):
    """Consecutive rows in stream order."""

    rows: list[ResultRow]
    #: Place after the rows, including the omitted rows of purged posts.
    place: Place
    ended: bool
    #: Number of results that were trimmed before they could be read; None if unknown.
    missed: int | None = 0
    #: Approximate number of entries after the rows; None if unknown.
    left: int | None = None
    #: True if the stream has lost the entries up to the place, and new ones come before it.
    lost: bool = False


class RowReader:
    """A reader of the results stream. Every method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, until: float | None = None) -> None:
        """Create a reader. until: stop before entries written at or after this time, in seconds since 1970."""
        self.redis = redis
        self._end = "+" if until is None else f"({int(until * 1000)}-0"

    def fetch(self, place: Place) -> Chunk:
        """Return the next rows after `place`, without those of purged posts."""
        ended, first, last, texts = fetch_rows(self.redis, place.cursor, self._end, FETCH_BYTES)
        if not texts:
            return Chunk([], place, ended, lost=is_lost(self.redis, place))
        _, missed = trimmed_between(self.redis, place, first)
        left = max(0, entries_stored(self.redis) - last) if last and self._end == "+" else None
        now = Place(texts[-3], last)
        return Chunk(self._checked(_read(texts)), now, ended, missed, left)

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """Yield all rows present after `place`, fetching the next chunk while the caller works on the current one."""
        with ThreadPoolExecutor(1, "fetch") as ahead:
            coming = ahead.submit(self.fetch, place)
            while True:
                chunk = coming.result()
                if not chunk.ended:
                    coming = ahead.submit(self.fetch, chunk.place)
                yield chunk
                if chunk.ended:
                    return

    def wait(self, place: Place, seconds: float) -> None:
        """Block until there is an entry after `place`, or until `seconds` have passed."""
        wait_for_entry(self.redis, place, seconds)

    def _checked(self, rows: Sequence[ResultRow]) -> list[ResultRow]:
        """Drop the rows of purged posts and update the others' scores."""
        checked: list[ResultRow] = []
        for row, (_, note) in zip(rows, self._notes(row.post["id"] for row in rows), strict=True):
            if note is not False:
                if note is not None:
                    row.post["score"] = note["score"]
                checked.append(row)
        return checked

    def gone(self, ids: Iterable[str]) -> set[str]:
        """Return the ids of the posts that were purged."""
        return {post_id for post_id, note in self._notes(ids) if note is False}

    def _notes(self, ids: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield each post's id with False if it was purged, else its latest score as a dict, or None."""
        remaining = iter(ids)
        while some := list(islice(remaining, POSTS_PER_CHECK)):
            yield from zip(some, from_json(check_posts(self.redis, some)), strict=True)


def _read(texts: list[str]) -> list[ResultRow]:
    """Parse (id, classification, post, id, …) into rows, and skip unreadable ones.

    Parsing one joined JSON array is faster than two per row, and by a fifth faster if only keys are cached.
    """
    ids = texts[::3]
    del texts[::3]
    read: Iterator[Any]
    try:
        read = iter(from_json(f"[{','.join(texts)}]", cache_strings="keys"))
        rows = [ResultRow(entry_id, found, post) for entry_id, found, post in zip(ids, read, read, strict=True)]
    except ValueError:
        read = map(_from_json, texts)
        rows = [ResultRow(entry_id, found, post) for entry_id, found, post in zip(ids, read, read, strict=True)]
    return [row for row in rows if _is_readable(row)]


def _from_json(text: str) -> Any:
    """Parse a value; None for invalid JSON."""
    try:
        return from_json(text)
    except ValueError:
        return None


def _is_readable(row: ResultRow) -> bool:
    """Return whether an entry has what every reader needs; log a warning if not."""
    _, found, post = row
    if isinstance(found, dict) and isinstance(post, dict) and "label" in found and "scores" in found and "id" in post:
        return True
    logger.warning("skipping unreadable entry %s of %s", row.entry, RESULTS_STREAM)
    return False
