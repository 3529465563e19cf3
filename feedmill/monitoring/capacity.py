"""Estimate how much of Redis' memory the current rate needs, and how long the memory lasts.

Each new post adds a result (kept for `results_ttl`), a sent record (kept for `sent_ttl`) and, until the results stream
reaches its maximum length, a stream entry, up to `results_memory` and `sent_memory` (shared/retention.py). If what the
rate needs in the end does not fit, memory is full when the room is used up. The backlog (bounded by `queue_limit`) and
dead letters are not counted.
"""

from typing import NamedTuple

from redis import Redis

from feedmill.shared.metrics import read_memory
from feedmill.shared.results import HOUR_S
from feedmill.shared.retention import Kept, needs
from feedmill.shared.settings import DAY_S, PREFIX, Settings

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
    #: Seconds until the limit is reached at that rate; None if it never is.
    full_seconds: float | None
    #: Bytes that Redis needs at that rate until results and sent records expire, or reach their bounds.
    needed: float = 0.0
    #: Bytes that results and sent records would need without bounds.
    results_needed: float = 0.0
    sent_needed: float = 0.0
    #: Seconds for which results and sent records are kept at that rate; None if until they expire.
    results_kept_seconds: float | None = None
    sent_kept_seconds: float | None = None

    @property
    def full(self) -> bool:
        return self.used >= self.limit

    @property
    def warning(self) -> str:
        """Describe what the current rate needs, if that exceeds the limit; else return an empty text."""
        if self.needed <= self.limit or not self.posts_per_second:
            return ""
        return (
            f"warning: {self.posts_per_second:,.1f} posts/s need {size(self.needed)} until results and sent records "
            f"expire: {ADVICE}"
        )

    def __str__(self) -> str:
        text = f"{size(self.used)} of {size(self.limit)}"
        if self.machine:
            text += " (the machine's memory: maxmemory is not set)"
        if self.full:
            return f"{text}: full"
        if not self.posts_per_second:
            return text
        rate = f"at {self.posts_per_second:,.1f} posts/s"
        if self.full_seconds is None:
            return f"{text}; suffices {rate}"
        return f"{text}; full in about {span(self.full_seconds)} {rate}"


#: How to need less memory.
ADVICE = f"raise maxmemory, or lower {PREFIX}RESULTS_MEMORY and {PREFIX}SENT_MEMORY"


def estimate_memory(
    redis: Redis, settings: Settings, posts_per_second: float
) -> tuple[Memory, Kept] | tuple[None, None]:
    """Estimate what is kept of posts, and how long Redis' memory lasts.

    Returns None, None if this Redis user may not run INFO and MEMORY USAGE. Raises redis.exceptions.RedisError.
    """
    if (memory := read_memory(redis, settings)) is None:
        return None, None
    used, limit, is_machine, kept = memory
    wanted = needs(kept, settings, posts_per_second)
    needed = wanted.of_redis(kept, used)
    seconds = None
    if used >= limit:
        seconds = 0.0
    elif posts_per_second and needed > limit:
        is_growing = kept.stream_entries < settings.results_stream_length
        per_post = kept.result_bytes + kept.sent_record_bytes + is_growing * kept.stream_entry_bytes
        seconds = (limit - used) / (posts_per_second * per_post) if per_post else None
    return Memory(used, limit, is_machine, posts_per_second, seconds, needed, *wanted), kept


def size(count: float) -> str:
    """Format a number of bytes with its unit: bytes, KB, MB or GB."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    if count >= 1e6:
        return f"{count / 1e6:,.0f} MB"
    return f"{count / 1e3:,.0f} KB" if count >= 1e3 else f"{count:,.0f} bytes"


def span(seconds: float) -> str:
    """Format a duration as seconds, minutes, hours or days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.0f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days"
