"""Runs: progress of each named set of posts, from counters in Redis.

The functions that mark posts as sent, store results and store dead letters count them, too
(shared/scripts/results.lua), so that a redelivered message counts once and no reader scans the store.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import RUN, RUNS

#: Maximum number of runs listed: the most recently active ones.
MAX_RUNS = 1000
#: Seconds without activity after which a run with pending posts counts as waiting for a worker.
WAITING_AFTER_S = 60.0


class Progress(NamedTuple):
    """The progress of a run. Times are seconds since 1970, by Redis' clock."""

    run: str
    #: Distinct posts sent. 0 if the sender does not record what it sent.
    sent: int = 0
    #: Results stored, and posts that became dead letters.
    stored: int = 0
    failed: int = 0
    began: float = 0.0
    latest: float = 0.0
    #: Seconds in which the run was active, without pauses of more than a minute.
    used: float = 0.0
    #: Columns of the file that its posts carry in `extra`.
    columns: tuple[str, ...] = ()

    @property
    def settled(self) -> int:
        """Return the number of posts with a result or a dead letter."""
        return self.stored + self.failed

    @property
    def pending(self) -> int:
        """Return the number of posts that were sent and are not settled."""
        return max(0, self.sent - self.settled)

    @property
    def rate(self) -> float | None:
        """Return the settled posts per second of the time used; None if nothing can be said yet."""
        return self.settled / self.used if self.settled and self.used > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds until nothing is pending; None without a rate."""
        return self.pending / self.rate if self.rate else None

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"pending": self.pending, "rate": self.rate, "seconds_left": self.seconds_left}


def progress(redis: Redis, run: str) -> Progress | None:
    """Return the progress of a run; None if it is unknown. Raises redis.exceptions.RedisError."""
    (found,) = _read(redis, [run])
    return found


def keep_columns(redis: Redis, run: str, columns: Sequence[str], ttl: int) -> None:
    """Record which columns the run's posts carry in `extra`, for exports. Raises redis.exceptions.RedisError."""
    pipe: Any = redis.pipeline()
    pipe.hset(RUN + run, "columns", json.dumps(columns))
    pipe.expire(RUN + run, ttl)
    pipe.execute()


def recent(redis: Redis, count: int) -> list[Progress]:
    """Return the most recently active runs, newest first. Raises redis.exceptions.RedisError."""
    names: Any = redis.zrevrange(RUNS, 0, count - 1) if count > 0 else []
    return [found for found in _read(redis, names) if found]


def _read(redis: Redis, runs: Sequence[str]) -> list[Progress | None]:
    pipe: Any = redis.pipeline(transaction=False)
    for run in runs:
        pipe.hgetall(RUN + run)
    return [_parsed(run, fields) if fields else None for run, fields in zip(runs, pipe.execute(), strict=True)]


def _parsed(run: str, fields: dict[str, str]) -> Progress:
    sent, stored, failed = (_number(fields.get(name)) for name in ("sent", "stored", "failed"))
    began, latest, used = (_number(fields.get(name)) / 1000 for name in ("began", "latest", "used"))
    try:
        columns = tuple(map(str, json.loads(fields.get("columns", "[]"))))
    except (ValueError, TypeError):
        columns = ()
    return Progress(run, sent, stored, failed, began, latest, used, columns)


def _number(text: str | None) -> int:
    """Return a counter; 0 if it is absent or not one, because producers may write anything there."""
    return int(text) if text and re.fullmatch(r"\d{1,18}", text, re.ASCII) else 0


def is_waiting(found: Progress, now: float) -> bool:
    """Return whether posts are pending, but nothing has happened for a while. now: seconds since 1970."""
    return bool(found.pending) and now - found.latest > WAITING_AFTER_S
