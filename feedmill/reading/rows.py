"""Read the results stream as raw rows: for exports of a hundred thousand results and more, and for followers.

Per chunk, one script fetches about five hundred rows and another checks them for purged posts. Rows are plain dicts:
building pydantic models would be slow. Ids of entries are `<milliseconds>-<sequence number>`, by Redis' clock.

Redis trims entries whether or not they were read, and a reader would silently continue at the oldest entry left. So
each entry carries its number, and a reader compares the next one with that of its place.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from pydantic_core import from_json
from redis import Redis
from redis.exceptions import ResponseError

from feedmill.shared import runs
from feedmill.shared.errors import UserError, printable
from feedmill.shared.keys import COUNTERS, RESULTS_STREAM
from feedmill.shared.messages import Classification, Post
from feedmill.shared.results import Result
from feedmill.shared.scripts import call

logger = logging.getLogger(__name__)

#: Approximate bytes of entries per fetch. A fetch blocks Redis for one or two milliseconds.
FETCH_BYTES = 2**19
#: Posts per call of the script that checks for purged posts.
POSTS_PER_CHECK = 1000
#: Recent runs that a message about an unknown one names.
MAX_RUNS = 5
#: Largest sequence number of an entry's id.
MAX_SEQUENCE = 2**64 - 1


class Place(NamedTuple):
    """A reader's place in the stream."""

    #: Id of the last entry that was read.
    cursor: str
    #: Its number; None if unknown.
    number: int | None = None


def order(entry_id: str) -> tuple[int, ...]:
    """Return the sort key of an entry's id."""
    return tuple(map(int, entry_id.split("-")))


def id_before(since: float) -> str:
    """Return the largest id before a time in seconds since 1970, so that reading after it starts at that time."""
    milliseconds = int(since * 1000)
    return f"{milliseconds - 1}-{MAX_SEQUENCE}" if milliseconds > 0 else "0-0"


def seconds_of(entry_id: str) -> float:
    """Return the time at which an entry was written, in seconds since 1970."""
    return int(entry_id.partition("-")[0]) / 1000


@dataclass(frozen=True)
class Missed:
    """Results that were trimmed before they were read. Times are seconds since 1970."""

    #: Number of results, with those among them that had been purged before; None if unknown.
    count: int | None
    #: The results were written between these times.
    since: float
    until: float


class ResultRow(NamedTuple):
    """A result as stored: the fields of Classification and Post (shared/messages.py) as dicts.

    The post's body is truncated, fields with default values are absent, and the Reddit score is the latest one known.
    """

    entry: str
    found: dict[str, Any]
    post: dict[str, Any]

    @property
    def result(self) -> Result:
        """The row as models, which are not validated again: the body may be truncated."""
        return Result(Post.model_construct(**self.post), Classification.model_construct(**self.found))


class Chunk(NamedTuple):
    """Consecutive rows in stream order."""

    rows: list[ResultRow]
    #: Place after the rows, including the omitted rows of purged posts.
    place: Place
    ended: bool
    #: Results that were trimmed before they could be read, if any.
    missed: Missed | None = None
    #: Approximate number of entries after the rows; None if unknown.
    left: int | None = None
    #: True if the stream has lost the entries up to the place, and new ones come before it.
    lost: bool = False


class RowReader:
    """A reader of the results stream. Every method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, until: float | None = None) -> None:
        """Create a reader. until: stop before entries written at or after this time, in seconds since 1970."""
        self.redis = redis
        self._until = math.inf if until is None else int(until * 1000) / 1000  # in whole milliseconds, as ids have

    def fetch(self, place: Place) -> Chunk:
        """Return the next rows after `place`, without those of purged posts."""
        is_past = seconds_of(place.cursor) >= self._until
        ended, first, last, *texts = (1, 0, 0) if is_past else call(self.redis, "fetch_rows", place.cursor, FETCH_BYTES)
        if not texts:
            return Chunk([], place, bool(ended), lost=is_lost(self.redis, place))
        left = max(0, counter(self.redis, "stored") - last) if last and math.isinf(self._until) else None
        missed, now = missed_between(self.redis, place, texts[0], first or None), Place(texts[-3], last or None)
        rows = self.parse(texts)
        if seconds_of(now.cursor) >= self._until:  # the first entry after the end tells what was trimmed before it
            rows = [row for row in rows if seconds_of(row.entry) < self._until]
        return Chunk(rows, now, bool(ended), missed, left)

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
        milliseconds = max(1, math.ceil(seconds * 1000))  # Redis treats 0 as forever
        self.redis.xread({RESULTS_STREAM: place.cursor}, count=1, block=milliseconds)

    def parse(self, texts: list[str]) -> list[ResultRow]:
        """Parse (id, classification, post, id, …) into rows, drop those of purged posts and update the others' scores.

        Logs and skips unreadable entries.
        """
        rows, checked = _read(texts), []
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
            yield from zip(some, from_json(call(self.redis, "check_posts", json.dumps(some))), strict=True)


def check_run(redis: Redis, run: str) -> None:
    """Raise UserError if there is no such run. Its results may outlive its counts."""
    if runs.progress(redis, run) is None:
        rows = (row for chunk in RowReader(redis).chunks(Place("0-0")) for row in chunk.rows)
        if all(row.post.get("run") != run for row in rows):
            raise UserError(unknown_run(redis, run))


def unknown_run(redis: Redis, run: str) -> str:
    """Return a message about a run that does not exist."""
    recent = ", ".join(progress.run for progress in runs.recent(redis, MAX_RUNS)) or "none"
    return printable(f"There is no run {run!r}, or its posts were sent too long ago. Recent runs: {recent}.")


def texts_of(entry_id: str, fields: Mapping[str, str]) -> list[str]:
    """Return an entry's id, classification and post."""
    return [entry_id, fields.get("classification", ""), fields.get("post", "")]


def counter(redis: Redis, name: str) -> int:
    """Return a counter of the stream: entries ever `stored`, the newest one's number, or `trimmed`."""
    count: Any = redis.hget(COUNTERS, name)
    return int(count or 0)


def missed_between(redis: Redis, place: Place, entry_id: str, number: int | None) -> Missed | None:
    """Return the results that were trimmed between a place and the next entry, if any. number: that entry's.

    If an entry is left up to the place, missing ones were purged, because trimming removes the oldest. From the
    beginning, nothing can have been missed.
    """
    count = None if number is None or place.number is None else number - place.number - 1
    if place.cursor == "0-0" if count is None else count <= 0:
        return None
    if not counter(redis, "trimmed") or redis.xrange(RESULTS_STREAM, max=place.cursor, count=1):
        return None
    return Missed(count, seconds_of(place.cursor), seconds_of(entry_id))


def is_lost(redis: Redis, place: Place) -> bool:
    """Return whether Redis has lost the entry at a place that has been read, and the stream's ids went back."""
    if place.number is None:
        return False
    try:
        info: Any = redis.xinfo_stream(RESULTS_STREAM)
    except ResponseError:  # there is no stream
        return False
    return order(info["last-generated-id"]) < order(place.cursor)


def _read(texts: list[str]) -> list[ResultRow]:
    """Parse rows, and skip unreadable ones.

    Parsing one joined JSON array is faster than two per row, and by a fifth faster if only keys are cached.
    """
    ids = texts[::3]
    del texts[::3]
    values = _from_json(f"[{','.join(texts)}]") or ()
    if len(values) != len(texts):
        values = [*map(_from_json, texts)]
    return [row for row in map(ResultRow, ids, values[::2], values[1::2]) if _is_readable(row)]


def _from_json(text: str) -> Any:
    """Parse a value; None for invalid JSON."""
    try:
        return from_json(text, cache_strings="keys")
    except ValueError:
        return None


def _is_readable(row: ResultRow) -> bool:
    """Return whether an entry has what every reader needs; log a warning if not."""
    _, found, post = row
    if isinstance(found, dict) and isinstance(post, dict) and "label" in found and "scores" in found and "id" in post:
        return True
    logger.warning("skipping unreadable entry %s of %s", row.entry, RESULTS_STREAM)
    return False
