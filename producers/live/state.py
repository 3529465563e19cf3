"""The persistent state of live sources in Redis: positions, gaps, status.

Every method may be repeated after a crash during it. All raise redis.exceptions.RedisError.
"""

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from redis import Redis

from feedmill.shared.errors import printable
from feedmill.shared.keys import LIVE_GAPS, LIVE_POSITION, LIVE_STATUS
from feedmill.shared.scripts import call

logger = logging.getLogger(__name__)

#: Limits of positions, and of times in seconds since 1970: the end of the year 9999.
MAX_CURSOR = 2**63
MAX_TIME = 253_402_300_800.0
#: Maximum number of stored gaps; the oldest are deleted first.
MAX_GAPS = 10_000
#: Seconds after which a status is out of date: its daemon no longer runs.
STATUS_TTL = 120
#: The source whose parts are subreddits.
REDDIT = "reddit"
#: Seconds after which a daemon that does not report is no longer expected to run.
EXPECTED_S = 7 * 86_400


class Position(NamedTuple):
    """A position in a source up to which everything is sent. at: its time at the source, in
    seconds since 1970.
    """

    cursor: int
    at: float


class Gap(NamedTuple):
    """A period, in seconds since 1970, whose posts could not be read. subreddit: or feed; "" for
    sources without parts.
    """

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
    def origin(self) -> str:
        """The subreddit, or the source, with the part of it that was not read."""
        if not self.subreddit:
            return self.source
        if self.source != REDDIT:
            return f"{self.source} {self.subreddit}"
        return f"r/{self.subreddit}"


#: Reads a gap as it is stored.
GAP = TypeAdapter(Gap, config=ConfigDict(allow_inf_nan=False))


class Gaps:
    """The list of gaps of all sources."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def record(self, gap: Gap) -> bool:
        """Add a gap, or replace the one that begins there. Return whether it is a new one."""
        redis = self._redis
        text = json.dumps(gap)
        added: Any = redis.hset(LIVE_GAPS, gap.field, text)
        count: Any = redis.hlen(LIVE_GAPS)
        if count > MAX_GAPS:
            gaps = self.all()
            gaps.sort(key=lambda gap: gap.noted)
            oldest = [gap.field for gap in gaps[:-MAX_GAPS]]
            redis.hdel(LIVE_GAPS, *oldest)
        return bool(added)

    def stored(self) -> dict[str, str]:
        """Return the gaps as Redis stores them, by field."""
        stored: Any = self._redis.hgetall(LIVE_GAPS)
        return dict(stored)

    def all(self) -> list[Gap]:
        """Return the gaps, oldest first."""
        stored = self.stored()
        return parse_gaps(stored)

    def open(self, source: str | None = None) -> list[Gap]:
        """Return the gaps that are not filled, of one source or of all, oldest first."""
        gaps = self.all()
        open_gaps = [gap for gap in gaps if not gap.filled]
        if source is None:
            return open_gaps
        return [gap for gap in open_gaps if gap.source == source]

    def remove(self, stored: Mapping[str, str]) -> None:
        """Remove gaps that were read with `stored`.

        One that was recorded again since stays, with its longer period.
        """
        for field, value in stored.items():
            call(
                self._redis,
                "remove_field",
                LIVE_GAPS,
                field,
                value,
            )


def parse_gaps(stored: Mapping[str, str]) -> list[Gap]:
    """Return the gaps, oldest first, without damaged ones."""
    gaps: list[Gap] = []
    for field, value in stored.items():
        try:
            gap = GAP.validate_json(value)
        except ValidationError:
            logger.warning("skipping unreadable gap %s", printable(field))
            continue
        gaps.append(gap)
    gaps.sort(key=lambda gap: gap.since)
    return gaps


class LiveStatus(NamedTuple):
    """The latest status of a source's daemon. age: seconds since it was stored. ended: it was
    stopped on request.
    """

    report: dict[str, Any]
    age: float
    ended: bool

    @property
    def running(self) -> bool:
        if self.ended:
            return False
        return self.age <= STATUS_TTL


class _Report(BaseModel):
    """A daemon's status, as readers need it."""

    model_config = ConfigDict(extra="allow")

    at: Annotated[float, Field(allow_inf_nan=False)]
    sent: int = 0
    read: int = 0
    hindrance: str = ""
    paused: bool = False
    ended: bool = False


class LiveState:
    """The state of one source."""

    def __init__(self, redis: Redis, source: str) -> None:
        self._redis = redis
        self._source = source
        self._key = LIVE_POSITION + source

    def position(self) -> Position | None:
        """Return the position from which to resume; None at the first start."""
        fields: Any = self._redis.hgetall(self._key)
        if not fields:
            return None
        cursor = int(fields["cursor"])
        at = float(fields["at"])
        return Position(cursor, at)

    def stored_at(self) -> float | None:
        """Return when the position was stored, in seconds since 1970; None if it is unknown."""
        try:
            text = self._field("stored_at")
            seconds = float(text)
        except ValueError:
            return None
        if 0 <= seconds < MAX_TIME:
            return seconds
        return None

    def began(self) -> int | None:
        """Return the lowest position that was ever stored; None if it is unknown."""
        try:
            text = self._field("began")
            position = int(text)
        except ValueError:
            return None
        if 0 <= position < MAX_CURSOR:
            return position
        return None

    def _field(self, name: str) -> str:
        """Return a field of the position, "" if it is missing.

        Other programs may have written it.
        """
        stored: Any = self._redis.hget(self._key, name)
        return stored or ""

    def advance(
        self, position: Position, now: float | None = None, began: int | None = None
    ) -> None:
        """Store the position up to which everything is sent.

        now: the time, in seconds since 1970. began: the lowest position that was ever stored.
        """
        values: dict[Any, Any] = position._asdict()
        if now is not None:
            values["stored_at"] = now
        if began is not None:
            values["began"] = began
        self._redis.hset(self._key, mapping=values)

    def store_status(self, report: Mapping[str, Any], ended: bool = False) -> None:
        """Store the daemon's status for `feedmill status`. ended: the daemon stops on request, and
        is not missed.
        """
        status = {
            **report,
            "at": _now(self._redis),
            "ended": ended,
        }
        text = json.dumps(status)
        self._redis.hset(LIVE_STATUS, self._source, text)


def statuses(redis: Redis) -> dict[str, LiveStatus]:
    """Return the latest status of each source whose daemon ran in the last EXPECTED_S seconds."""
    texts: Any = redis.hgetall(LIVE_STATUS)
    if not texts:
        return {}
    now = _now(redis)
    expected: dict[str, LiveStatus] = {}
    for name, text in sorted(texts.items()):
        try:
            report = _Report.model_validate_json(text).model_dump()
        except ValidationError:
            logger.warning("skipping the unreadable status of %s", printable(name))
            continue
        # After Redis' clock went back, the latest status of a daemon that was killed must not stay
        # new.
        age_s = float(abs(now - report["at"]))
        if age_s <= EXPECTED_S:
            expected[name] = LiveStatus(
                report=report,
                age=age_s,
                ended=report.get("ended", False),
            )
    return expected


def _now(redis: Redis) -> int:
    """Return the time by Redis' clock, which all machines share, in seconds since 1970."""
    now: Any = redis.time()
    return int(now[0])
