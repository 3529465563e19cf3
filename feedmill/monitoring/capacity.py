"""Estimate how long Redis' memory lasts at the current rate.

The estimate takes a single reading. Each new post adds a result (kept for `results_ttl`), a sent mark (kept for
`sent_ttl`) and, until the results stream reaches its maximum length, a stream entry. Their sizes are measured on the
newest results. Keys that expire in the meantime are subtracted, using the hourly counts of results stored one TTL
earlier. The backlog (bounded by `queue_limit`) and dead letters are not counted.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import NoPermissionError

from shared.keys import MARKS, RESULTS_STREAM, STORED, labels_key
from shared.result_records import SCORE, split
from shared.results import HOUR_S
from shared.scripts.buckets import bucket_key
from shared.scripts.marks import MARK_BYTES
from shared.settings import DAY_S, Settings

#: Number of newest results whose memory is measured.
SAMPLE_RESULTS = 10
#: Hours that the estimate looks ahead.
HORIZON_HOURS = 7 * 24
#: The health check warns if memory is full in less than WARNING_S seconds, and fails below CRITICAL_S.
WARNING_S, CRITICAL_S = DAY_S, HOUR_S


class Memory(NamedTuple):
    """Redis' memory use in bytes, with an estimate of the time until it is full."""

    used: int
    limit: int
    #: True if `maxmemory` is not set, so that the limit is the machine's memory.
    machine: bool
    #: Recent throughput of all workers together.
    posts_per_second: float
    #: Seconds until the limit is reached at that rate; None if that takes more than HORIZON_HOURS.
    full_seconds: float | None

    @property
    def full(self) -> bool:
        return self.used >= self.limit

    def __str__(self) -> str:
        text = f"{size(self.used)} of {size(self.limit)}"
        if self.machine:
            text += " (the machine's memory: maxmemory is not set)"
        if self.full:
            return f"{text}: full"
        if not self.posts_per_second:
            return f"{text}; no posts are being classified"
        rate = f"at {self.posts_per_second:,.1f} posts/s"
        if self.full_seconds is None:
            return f"{text}; lasts more than {HORIZON_HOURS // 24} days {rate}"
        return f"{text}; full in about {span(self.full_seconds)} {rate}"


def estimate_memory(redis: Redis, settings: Settings, posts_per_second: float) -> Memory | None:
    """Estimate how long Redis' memory lasts. Return None if this Redis user may not run INFO and MEMORY USAGE.

    Raises redis.exceptions.RedisError.
    """
    try:
        info: Any = redis.info("memory")
        limit = info["maxmemory"] or info["total_system_memory"]
        room, seconds = limit - info["used_memory"], None
        if room <= 0:
            seconds = 0.0
        elif posts_per_second:
            seconds = _seconds_left(redis, settings, room, posts_per_second)
    except NoPermissionError:
        return None
    return Memory(info["used_memory"], limit, not info["maxmemory"], posts_per_second, seconds)


def _seconds_left(redis: Redis, settings: Settings, room: float, posts_per_second: float) -> float | None:
    """Return the seconds until `room` bytes are used, or None if that takes more than HORIZON_HOURS."""
    sizes = _measure(redis)
    length: int = redis.xlen(RESULTS_STREAM)
    stream: Any = redis.memory_usage(RESULTS_STREAM)
    entry, entries_left = (stream or 0) / max(length, 1), float(max(0, settings.results_stream_length - length))
    stored = posts_per_second * HOUR_S
    if room > HORIZON_HOURS * stored * (entry + sum(sizes)):
        return None
    expiring = [_stored_by_hour(redis, time.time() - ttl) for ttl in (settings.results_ttl, settings.sent_ttl)]
    for hour in range(HORIZON_HOURS):
        grown = min(stored, entries_left) * entry
        grown += sum(size * (stored - gone[hour]) for size, gone in zip(sizes, expiring, strict=True))
        if grown >= room:
            return HOUR_S * (hour + room / grown)
        room -= grown
        entries_left = max(0.0, entries_left - stored)
    return None


def _measure(redis: Redis) -> tuple[float, float]:
    """Return the mean bytes of the newest posts' results and of their sent marks. A missing key counts as zero."""
    newest: Any = redis.xrevrange(RESULTS_STREAM, count=SAMPLE_RESULTS)
    ids = [fields.get("id", "") for _, fields in newest]
    results = _bytes_per_record(redis, STORED, ids, lambda bucket: sum(each.kind != SCORE for each in split(bucket)))
    return results, _bytes_per_record(redis, MARKS, ids, lambda bucket: len(bucket) // MARK_BYTES)


def _bytes_per_record(redis: Redis, table: str, ids: Sequence[str], records_in: Callable[[bytes], int]) -> float:
    """Return the bytes of memory per record of a table, from the buckets of these ids."""
    untyped: Any = redis
    if (buckets := untyped.get(table)) is None:
        return 0.0
    used = records = 0
    for key in {bucket_key(table, post_id, int(buckets)) for post_id in ids}:
        if (bucket := untyped.execute_command("GET", key, **{NEVER_DECODE: True})) is not None:
            used += untyped.memory_usage(key) or 0
            records += records_in(bucket)
    return used / max(records, 1)


def _stored_by_hour(redis: Redis, since: float) -> list[int]:
    """Return the number of results stored in each of the HORIZON_HOURS hours that follow `since`."""
    pipe: Any = redis.pipeline(transaction=False)
    for hour in range(HORIZON_HOURS):
        pipe.hvals(labels_key(math.floor(since / HOUR_S) + hour))
    return [sum(map(int, counts)) for counts in pipe.execute()]


def size(count: float) -> str:
    """Format a number of bytes as MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def span(seconds: float) -> str:
    """Format a duration as seconds, minutes, hours or days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.0f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days"
