"""Estimate how long Redis' memory lasts at the current rate.

One look is enough. Each new post costs its result (kept for `results_ttl`), the note that it was sent
(`sent_ttl`) and, until the stream of results has its full length, an entry there; each is measured on the newest
results. What expires meanwhile is subtracted: as many posts as were stored one time to live earlier, by the counts by
hour. The backlog is left out, since `queue_limit` bounds it, and so are dead letters.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import NoPermissionError

from shared.keys import RESULTS_STREAM, labels_key, result_key, sent_key
from shared.results import HOUR
from shared.settings import DAY, Settings

#: Results that are measured.
SAMPLE = 10
#: Hours that the estimate looks ahead.
HORIZON = 7 * 24
#: Seconds of room below which an operator is warned, and below which Redis' memory counts as unhealthy.
WARNING_S, CRITICAL_S = DAY, HOUR


class Memory(NamedTuple):
    """Redis' memory, in bytes, and how long it lasts."""

    used: int
    limit: int
    #: Whether the limit is the machine's memory, since `maxmemory` is not set.
    machine: bool
    #: Posts that workers classify each second, lately.
    posts_per_second: float
    #: Seconds until the limit is reached at that rate; None: not within HORIZON.
    full_seconds: float | None

    @property
    def full(self) -> bool:
        return self.used >= self.limit

    def __str__(self) -> str:
        text = f"{size(self.used)} of {size(self.limit)}"
        if self.machine:
            text += " (the machine's: no maxmemory)"
        if self.full:
            return f"{text}: full"
        if not self.posts_per_second:
            return f"{text}; no posts are classified now"
        rate = f"at {self.posts_per_second:,.1f} posts/s"
        if self.full_seconds is None:
            return f"{text}; lasts more than {HORIZON // 24} days {rate}"
        return f"{text}; full in about {span(self.full_seconds)} {rate}"


class _Cost(NamedTuple):
    """Bytes that one post takes in one place, and the seconds after which they are free again."""

    size: float
    ttl: float


def look(redis: Redis, settings: Settings, posts_per_second: float) -> Memory | None:
    """Estimate how long Redis' memory lasts; None where Redis does not let this user ask.

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
    """Return the seconds until `room` bytes are taken; None beyond HORIZON."""
    costs = _measure(redis, settings)
    length: int = redis.xlen(RESULTS_STREAM)
    stream: Any = redis.memory_usage(RESULTS_STREAM)
    entry, entries_left = (stream or 0) / max(length, 1), float(max(0, settings.results_stream_length - length))
    stored = posts_per_second * HOUR
    if room > HORIZON * stored * (entry + sum(cost.size for cost in costs)):
        return None
    expiring = [_stored_by_hour(redis, time.time() - cost.ttl) for cost in costs]
    for hour in range(HORIZON):
        grown = min(stored, entries_left) * entry
        grown += sum(cost.size * (stored - gone[hour]) for cost, gone in zip(costs, expiring, strict=True))
        if grown >= room:
            return HOUR * (hour + room / grown)
        room -= grown
        entries_left = max(0.0, entries_left - stored)
    return None


def _measure(redis: Redis, settings: Settings) -> list[_Cost]:
    """Return what the newest posts cost on average, outside the stream."""
    newest: Any = redis.xrevrange(RESULTS_STREAM, count=SAMPLE)
    ids = [fields.get("id", "") for _, fields in newest]
    pipe: Any = redis.pipeline(transaction=False)
    for post_id in ids:
        pipe.memory_usage(result_key(post_id))
    for post_id in ids:
        pipe.memory_usage(sent_key(post_id))
    sizes = pipe.execute()
    results, sent = (_mean(some) for some in (sizes[: len(ids)], sizes[len(ids) :]))
    return [_Cost(results, settings.results_ttl), _Cost(sent, settings.sent_ttl)]


def _mean(sizes: Sequence[int | None]) -> float:
    """Return the mean of the sizes; a key that is gone has none, and counts as nothing."""
    return sum(size or 0 for size in sizes) / max(len(sizes), 1)


def _stored_by_hour(redis: Redis, since: float) -> list[int]:
    """Return how many results were stored in each of HORIZON hours from a time on."""
    pipe: Any = redis.pipeline(transaction=False)
    for hour in range(HORIZON):
        pipe.hvals(labels_key(math.floor(since / HOUR) + hour))
    return [sum(map(int, counts)) for counts in pipe.execute()]


def size(count: float) -> str:
    """Return bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def span(seconds: float) -> str:
    """Return seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR:.0f} h" if seconds < 2 * DAY else f"{seconds / DAY:.0f} days"
