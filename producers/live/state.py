"""The persistent state of live sources in Redis: positions, gaps, status.

Every method may be repeated after a crash during it. All raise redis.exceptions.RedisError.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import LIVE_GAPS, LIVE_POSITION, LIVE_STATUS

#: Maximum number of stored gaps; the oldest are deleted first.
MAX_GAPS = 10_000
#: Seconds after which a status is out of date: its daemon no longer runs.
STATUS_TTL = 120
#: Seconds after which a daemon that does not report is no longer expected to run.
EXPECTED_S = 7 * 86_400


class Position(NamedTuple):
    """A position in a source up to which everything is sent. at: its time at the source, in seconds since 1970."""

    cursor: int
    at: float


class Gap(NamedTuple):
    """A period, in seconds since 1970, whose posts could not be read. subreddit: "" for sources without subreddits."""

    source: str
    subreddit: str
    since: float
    until: float
    #: Time of detection.
    noted: float
    #: Time up to which the gap has been filled so far; 0 at first.
    reached: float = 0.0
    #: Number of posts found there.
    found: int = 0
    #: Time at which the gap was filled; 0 while it is open.
    filled: float = 0.0
    #: Reason why the latest attempt to fill it failed.
    problem: str = ""

    @property
    def field(self) -> str:
        return f"{self.source} {self.subreddit} {self.since}"

    @property
    def place(self) -> str:
        """The subreddit, or the source."""
        return f"r/{self.subreddit}" if self.subreddit else self.source


class Gaps:
    """The list of gaps of all sources."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def record(self, gap: Gap) -> bool:
        """Add a gap, or replace the one that begins there. Return whether it is a new one."""
        is_new = bool(self._redis.hset(LIVE_GAPS, gap.field, json.dumps(gap)))
        if int(self._redis.hlen(LIVE_GAPS)) > MAX_GAPS:
            oldest = sorted(self.all(), key=lambda gap: gap.noted)[:-MAX_GAPS]
            self._redis.hdel(LIVE_GAPS, *(gap.field for gap in oldest))
        return is_new

    def all(self) -> list[Gap]:
        """Return the gaps, oldest first."""
        values: Any = self._redis.hvals(LIVE_GAPS)
        return sorted((Gap(*json.loads(value)) for value in values), key=lambda gap: gap.since)

    def open(self, source: str | None = None) -> list[Gap]:
        """Return the gaps that are not filled, of one source or of all, oldest first."""
        return [gap for gap in self.all() if not gap.filled and source in (None, gap.source)]

    def clear(self) -> None:
        self._redis.delete(LIVE_GAPS)


class LiveStatus(NamedTuple):
    """The latest status of a source's daemon. age: seconds since it was stored. ended: it was stopped on request."""

    report: dict[str, Any]
    age: float
    ended: bool

    @property
    def running(self) -> bool:
        return self.age <= STATUS_TTL and not self.ended


class LiveState:
    """The state of one source."""

    def __init__(self, redis: Redis, source: str) -> None:
        self._redis = redis
        self._source = source

    def position(self) -> Position | None:
        """Return the position from which to resume; None at the first start."""
        found: Any = self._redis.hgetall(LIVE_POSITION + self._source)
        return Position(int(found["cursor"]), float(found["at"])) if found else None

    def advance(self, position: Position) -> None:
        """Store the position up to which everything is sent."""
        values: dict[Any, Any] = position._asdict()
        self._redis.hset(LIVE_POSITION + self._source, mapping=values)

    def store_status(self, report: Mapping[str, Any], ended: bool = False) -> None:
        """Store the daemon's status for `feedmill status`. ended: the daemon stops on request, and is not missed."""
        status = {**report, "at": _now(self._redis), "ended": ended}
        self._redis.hset(LIVE_STATUS, self._source, json.dumps(status))


def statuses(redis: Redis) -> dict[str, LiveStatus]:
    """Return the latest status of each source whose daemon ran in the last EXPECTED_S seconds."""
    found: Any = redis.hgetall(LIVE_STATUS)
    now = _now(redis) if found else 0
    reports = {name: json.loads(text) for name, text in found.items()}
    known = {
        name: LiveStatus(report, max(0.0, now - report["at"]), report.get("ended", False))
        for name, report in sorted(reports.items())
    }
    return {name: status for name, status in known.items() if status.age <= EXPECTED_S}


def _now(redis: Redis) -> int:
    """Return the time by Redis' clock, which all machines share, in seconds since 1970."""
    now: Any = redis.time()
    return int(now[0])
