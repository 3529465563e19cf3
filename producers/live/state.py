"""The persistent state of a live source in Redis: position, gaps, deletions to purge, status.

Every method may be repeated after a crash during it. All raise redis.exceptions.RedisError.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import LIVE_STATUS, live_authors_key, live_deleted_key, live_gaps_key, live_position_key

#: Maximum number of stored gaps; the oldest are deleted first.
MAX_GAPS = 1_000
#: Seconds after which a status is out of date: its daemon no longer runs.
STATUS_TTL = 120
#: Seconds after which a daemon that does not report is no longer expected to run.
EXPECTED_S = 7 * 86_400


class Position(NamedTuple):
    """A position in a source up to which everything is sent. at: its time at the source, in seconds since 1970."""

    cursor: int
    at: float


class LiveGap(NamedTuple):
    """A period, in seconds since 1970, whose events could not be read."""

    source: str
    since: float
    until: float
    #: Time of detection.
    noted: float


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
        found: Any = self._redis.hgetall(live_position_key(self._source))
        return Position(int(found["cursor"]), float(found["at"])) if found else None

    def advanced_at(self) -> float:
        """Return when the position was stored, in seconds since 1970 by Redis' clock; 0 if unknown."""
        found: Any = self._redis.hget(live_position_key(self._source), "stored")
        return float(found or 0)

    def advance(self, position: Position) -> None:
        """Store the position up to which everything is sent."""
        values: dict[Any, Any] = {"cursor": position.cursor, "at": position.at, "stored": _now(self._redis)}
        self._redis.hset(live_position_key(self._source), mapping=values)

    def record_gap(self, before: Position, until: float, noted: float) -> None:
        """Record that the events between a position and a time could not be read. Replaces a gap that begins there."""
        key = live_gaps_key(self._source)
        self._redis.hset(key, str(before.cursor), json.dumps([before.at, until, noted]))
        if self._redis.hlen(key) > MAX_GAPS:
            cursors: Any = self._redis.hkeys(key)
            self._redis.hdel(key, *sorted(cursors, key=int)[:-MAX_GAPS])

    def gaps(self) -> list[LiveGap]:
        """Return the gaps, oldest first."""
        found: Any = self._redis.hvals(live_gaps_key(self._source))
        return sorted(LiveGap(self._source, *json.loads(value)) for value in found)

    def forget_gaps(self) -> None:
        self._redis.delete(live_gaps_key(self._source))

    def add_deletions(self, ids: Collection[str]) -> None:
        """Remember deleted posts until they are purged."""
        if ids:
            self._redis.sadd(live_deleted_key(self._source), *ids)

    def add_authors(self, authors: Collection[str], at: float) -> None:
        """Remember accounts that were deleted at this time, in seconds since 1970."""
        if authors:
            self._redis.zadd(live_authors_key(self._source), dict.fromkeys(authors, at))

    def deleted(self) -> set[str]:
        """Return the deleted posts that are not purged yet."""
        found: Any = self._redis.smembers(live_deleted_key(self._source))
        return set(found)

    def deleted_authors(self) -> set[str]:
        """Return the beginnings of the ids of deleted accounts' posts."""
        found: Any = self._redis.zrange(live_authors_key(self._source), 0, -1)
        return set(found)

    def forget_deleted(self, ids: Iterable[str]) -> None:
        self._redis.srem(live_deleted_key(self._source), *ids)

    def forget_authors(self, authors: Collection[str]) -> None:
        if authors:
            self._redis.zrem(live_authors_key(self._source), *authors)

    def forget_authors_before(self, at: float) -> None:
        """Forget accounts that were deleted before this time, in seconds since 1970."""
        self._redis.zremrangebyscore(live_authors_key(self._source), "-inf", f"({at}")

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


def all_gaps(redis: Redis) -> list[LiveGap]:
    """Return the gaps of every source that has reported a status."""
    names: Any = redis.hkeys(LIVE_STATUS)
    return [gap for name in sorted(names) for gap in LiveState(redis, name).gaps()]


def _now(redis: Redis) -> int:
    """Return the time by Redis' clock, which all machines share, in seconds since 1970."""
    now: Any = redis.time()
    return int(now[0])
