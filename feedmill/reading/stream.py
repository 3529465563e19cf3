"""Read the results stream from a private cursor, and report missed results.

Scripts fetch entries and count those trimmed unread (shared/scripts/stream.py). XREAD is used only to wait.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import Redis

from feedmill.reading.entry_ids import id_before, seconds_of
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.results import Result, read_entry
from feedmill.shared.scripts.stream import END, Fetched, Place, fetch

logger = logging.getLogger(__name__)

#: Entries per fetch of a follower.
FOLLOWED_AT_ONCE = 500
#: Seconds that a follower whose entries were lost goes back beyond its latest read.
LOST_MARGIN_S = 5.0


@dataclass(frozen=True)
class Missed:
    """Results that were trimmed before they were read. Times are seconds since 1970."""

    #: Number of trimmed results, not counting purged ones; None if unknown.
    count: int | None
    #: The results were written between these times.
    since: float
    until: float
    #: Upper bound on `count`, if posts were purged meanwhile; None if unknown.
    at_most: int | None = None


class ResultFilter(NamedTuple):
    """Filter for results. None matches all."""

    #: Best label, matched exactly.
    label: str | None = None
    #: Minimum score of the best label.
    min_score: float | None = None
    #: Subreddit, case-insensitive, with or without "r/".
    subreddit: str | None = None
    #: Name of the run, matched exactly.
    run: str | None = None

    def has(self, result: Result) -> bool:
        found = result.classification
        return (
            (self.label is None or found.label == self.label)
            and (self.min_score is None or found.scores[found.label] >= self.min_score)
            and (self.run is None or result.post.run == self.run)
            and (self.subreddit is None or normalize(result.post.subreddit or "") == normalize(self.subreddit))
        )


NO_FILTER = ResultFilter()


class Read(NamedTuple):
    """An item for the caller, and the entries to acknowledge once it is processed."""

    item: Result | Missed
    ids: tuple[str, ...] = ()


class Follower:
    """A reader with a private cursor. Returns each result once during its lifetime.

    Its methods, and those of `GroupReader`, raise redis.exceptions.RedisError.
    """

    #: True if another member may have taken over unacknowledged items: call `read` again.
    stale = False

    def __init__(
        self, redis: Redis, wanted: ResultFilter = NO_FILTER, since: float | None = None, history: int = 0
    ) -> None:
        """Create a follower.

        since: start time, in seconds since 1970; None for the stream's end. history: number of earlier results to read
        first.
        """
        self._redis = redis
        self._wanted = wanted
        self._history = history
        self._place = END if since is None else Place(id_before(since))
        #: Time of the latest read (monotonic seconds).
        self._read_at = time.monotonic()

    def read(self) -> list[Read] | None:
        """Return available items without waiting. None if there are none; an empty list if none match the filter."""
        if self._place == END:
            self._read()
        if self._history:
            found = newest(self._redis, self._history, self._wanted, until=self._place.cursor)
            self._history = 0
            return [Read(result) for result in found]
        return self._read()

    def _read(self) -> list[Read] | None:
        found = fetch(self._redis, FOLLOWED_AT_ONCE, self._place)
        if found.lost:
            self._go_back()
            return []
        self._place, self._read_at = found.place, time.monotonic()
        if not found.entries:
            return None
        return missed_before(found) + [
            Read(result) for _, result in parsed(found.entries) if result and self._wanted.has(result)
        ]

    def _go_back(self) -> None:
        """Continue with what Redis stored since the latest read: it has smaller ids than what was read then."""
        now: Any = self._redis.time()
        since = now[0] - (time.monotonic() - self._read_at) - LOST_MARGIN_S
        logger.warning("Redis lost its latest results, and its clock went back: results of the last seconds come again")
        self._place = Place(id_before(since))

    def wait(self, seconds: float) -> None:
        """Return as soon as there may be something to read, or after `seconds`."""
        wait_for_entry(self._redis, self._place, seconds)

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Do nothing: followers have no pending entries."""


def newest(
    redis: Redis, count: int, wanted: ResultFilter = NO_FILTER, until: str = "+", since: float | None = None
) -> list[Result]:
    """Return the newest `count` matching results up to the entry id `until`, oldest first.

    since: seconds since 1970; results that were stored earlier are left out.
    """
    found: list[Result] = []
    first = "-" if since is None else f"({id_before(since)}"
    while len(found) < count:
        at_once = min(FOLLOWED_AT_ONCE, count - len(found)) if wanted == NO_FILTER else FOLLOWED_AT_ONCE
        entries: Any = redis.xrevrange(RESULTS_STREAM, until, first, count=at_once)
        if not entries:
            break
        found += [result for _, result in parsed(entries) if result and wanted.has(result)]
        until = f"({entries[-1][0]}"
    return found[:count][::-1]


def wait_for_entry(redis: Redis, place: Place, seconds: float) -> None:
    """Block until there is an entry after `place`, or until `seconds` have passed."""
    redis.xread({RESULTS_STREAM: place.cursor}, count=1, block=milliseconds(seconds))


def parsed(entries: Iterable[Sequence[Any]]) -> Iterator[tuple[str, Result | None]]:
    """Yield (entry id, result). The result is None for unreadable entries, which would block a group forever."""
    for entry_id, fields in entries:
        try:
            by_name = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            yield entry_id, read_entry(by_name)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("skipping unreadable entry %s of %s: %r", entry_id, RESULTS_STREAM, error)
            yield entry_id, None


def missed_before(found: Fetched) -> list[Read]:
    """Report the gap before the fetched entries, if there is one."""
    if not found.gone:
        return []
    at_most = found.gone if found.gone > 0 else None
    count = None if found.purged_meanwhile else at_most
    return [Read(Missed(count, seconds_of(found.before), seconds_of(found.entries[0][0]), at_most))]


def normalize(subreddit: str) -> str:
    """Normalize a subreddit's name for comparison: "/r/Python" becomes "python"."""
    return subreddit.strip().casefold().removeprefix("/").removeprefix("r/").removesuffix("/")


def milliseconds(seconds: float) -> int:
    """Convert to milliseconds, at least 1: Redis treats 0 as forever."""
    return max(1, math.ceil(seconds * 1000))
