"""Compare Redis' memory with what the current rate of posts needs until results and sent records expire.

Both are dropped beyond `results_memory` and half of it (shared/retention.py). The backlog (bounded by `queue_limit`)
and dead letters are not counted.
"""

from typing import NamedTuple

from redis import Redis

from feedmill.shared.metrics import read_memory
from feedmill.shared.results import HOUR_S
from feedmill.shared.retention import Kept, needs
from feedmill.shared.settings import DAY_S, PREFIX, Settings

#: Share of the memory limit from which the health check fails.
FULL_SHARE = 0.95
#: How to need less memory.
ADVICE = f"raise maxmemory, or lower {PREFIX}RESULTS_MEMORY"


class Memory(NamedTuple):
    """Redis' memory use in bytes, and what the current rate needs."""

    used: int
    limit: int
    #: True if `maxmemory` is not set, so that the limit is the machine's memory.
    machine: bool
    #: Recent throughput of all workers together.
    posts_per_second: float
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
        return self.used >= FULL_SHARE * self.limit

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
        return f"{text} (the machine's memory: maxmemory is not set)" if self.machine else text


def estimate_memory(
    redis: Redis, settings: Settings, posts_per_second: float
) -> tuple[Memory, Kept] | tuple[None, None]:
    """Return Redis' memory, and an estimate of what is kept of posts.

    Returns None, None if this Redis user may not run INFO and MEMORY USAGE. Raises redis.exceptions.RedisError.
    """
    if (memory := read_memory(redis, settings)) is None:
        return None, None
    used, limit, is_machine, kept = memory
    wanted = needs(kept, settings, posts_per_second)
    return Memory(used, limit, is_machine, posts_per_second, wanted.of_redis(kept, used), *wanted), kept


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
