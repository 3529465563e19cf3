"""Runs: progress of each named set of posts, from counters in Redis.

The functions that mark posts as sent, store results and store dead letters count them, too
(shared/scripts/results.lua), so that a redelivered message counts once and no reader scans the
store.

Producers may write anything there: a value that is not valid counts as absent.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic_core import from_json
from redis import Redis

from feedmill.shared.errors import RequestRefused, UserError
from feedmill.shared.messages import ClassifyOptions, Labels, parse_run
from feedmill.shared.scripts import call

#: Maximum number of runs listed: the most recently active ones.
MAX_RUNS = 1000
#: Characters of a run's labels with their descriptions, as ASCII JSON.
MAX_LABELS_BYTES = 65_536
#: The latest time in the counters of a run: the last second of the year 9999, in milliseconds.
MAX_TIME_MS = 253_402_300_799_999
#: Texts of each run in an answer of shared/scripts/results.lua.
TEXTS_PER_RUN = 8
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
        """Return the settled posts per second of the time used; None if nothing can be
        said yet.
        """
        if self.settled == 0 or self.used <= 0:
            return None
        return self.settled / self.used

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds until nothing is pending; None without a rate."""
        rate = self.rate
        return self.pending / rate if rate else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the figures derived from them, for JSON."""
        return self._asdict() | {
            "pending": self.pending,
            "rate": self.rate,
            "seconds_left": self.seconds_left,
        }


def progress(redis: Redis, run: str) -> Progress | None:
    """Return the progress of a run; None if it is unknown. Raises redis.exceptions.RedisError."""
    texts = call(
        redis,
        "progress",
        run,
        raw=True,
    )
    return next(_parse_runs(texts), None)


def keep_columns(redis: Redis, run: str, columns: Sequence[str], ttl: int) -> None:
    """Record columns that the run's posts carry in `extra`, beside earlier ones, for exports.

    Raises redis.exceptions.RedisError.
    """
    call(redis, "keep_columns", run, json.dumps(columns), ttl)


def keep_labels(redis: Redis, run: str, labels: Labels, ttl: int) -> None:
    """Record the descriptions of the labels that the run's posts are sent with. Teaching reads
    them: results have the names alone. Too long ones are left out.

    Raises redis.exceptions.RedisError.
    """
    text = json.dumps(labels)
    if len(text) <= MAX_LABELS_BYTES:
        call(redis, "keep_labels", run, text, ttl)


def kept_labels(redis: Redis, run: str) -> Labels | None:
    """Return the labels that the run's posts were last sent with; None if they are unknown.

    Raises redis.exceptions.RedisError.
    """
    text = call(
        redis,
        "kept_labels",
        run,
        MAX_LABELS_BYTES,
        raw=True,
    )
    try:
        return ClassifyOptions.parse({"labels": from_json(text)}).labels
    except (ValueError, RequestRefused):
        return None


def recent(redis: Redis, count: int) -> list[Progress]:
    """Return the most recently active runs, newest first. Raises redis.exceptions.RedisError."""
    texts = call(
        redis,
        "recent",
        count,
        raw=True,
    )
    return list(_parse_runs(texts))


def _parse_runs(texts: Sequence[bytes]) -> Iterator[Progress]:
    """Yield the runs in an answer of shared/scripts/results.lua: name, numbers and columns of
    each.
    """
    for start in range(0, len(texts), TEXTS_PER_RUN):
        run_texts = texts[start : start + TEXTS_PER_RUN]
        name, sent, stored, failed, began, latest, used, columns = run_texts
        with suppress(UserError, UnicodeDecodeError):  # no name that a run can have
            yield Progress(
                run=parse_run(name.decode()),
                sent=_number(sent),
                stored=_number(stored),
                failed=_number(failed),
                began=_seconds(began),
                latest=_seconds(latest),
                used=_seconds(used),
                columns=_columns(columns),
            )


def _number(text: bytes) -> int:
    """Return a counter; 0 if it is absent or not one."""
    return int(text) if text.isdigit() else 0


def _seconds(text: bytes) -> float:
    """Return a counter of milliseconds in seconds; 0 if it is absent or not one."""
    milliseconds = _number(text)
    if milliseconds > MAX_TIME_MS:
        return 0.0
    return milliseconds / 1000


def _columns(text: bytes) -> tuple[str, ...]:
    """Return the names in a JSON array; none if it is not one."""
    try:
        names = from_json(text)
    except ValueError:
        return ()
    if not isinstance(names, list):
        return ()
    return tuple(str(name) for name in names)


def is_waiting(found: Progress, now: float) -> bool:
    """Return whether posts are pending, but nothing has happened for a while. now: seconds since
    1970.
    """
    silence = now - found.latest
    return found.pending > 0 and silence > WAITING_AFTER_S
