"""Memory of results and of sent records, and what a rate of posts needs.

Results are the table of records with their contexts, and the results stream, which may take STREAM_SHARE of
`results_memory`. Sent records may take half as much in addition. The function that writes a micro-batch drops
what exceeds them (shared/scripts/results.lua).
"""

from typing import NamedTuple

from redis import Redis

from feedmill.shared.results import memory_limits
from feedmill.shared.scripts import call
from feedmill.shared.settings import Settings


class Kept(NamedTuple):
    """Estimated size of what is kept of posts, and its bounds. All in bytes, except the three numbers."""

    #: Results: their records with contexts, and entries of the stream.
    results_bytes: float
    results_limit: int
    results: int
    result_bytes: float
    stream_bytes: float
    stream_entries: int
    stream_entry_bytes: float
    #: Records of sent posts.
    sent_bytes: float
    sent_limit: int
    sent: int
    sent_record_bytes: float


class Needs(NamedTuple):
    """Bytes needed at a rate until the times to live are met, and the minimum seconds for which records are kept.

    The seconds are None where the bound suffices for the time to live.
    """

    results: float
    sent: float
    results_kept_s: float | None
    sent_kept_s: float | None

    def of_redis(self, kept: Kept, used: int) -> float:
        """Return the bytes that Redis will need in all, within the bounds. used: bytes it uses now."""
        others = max(0.0, used - kept.results_bytes - kept.sent_bytes)
        return others + min(self.results, kept.results_limit) + min(self.sent, kept.sent_limit)


#: A generation's share of a bound: dropping one leaves less than the bound by this (shared/scripts/tables.lua).
DROPPED_SHARE = 1 / 8


def measure(redis: Redis, settings: Settings) -> Kept:
    """Estimate what is kept of posts, in less than a millisecond. Raises redis.exceptions.RedisError."""
    records_bytes, results, stream_bytes, entries, sent_bytes, sent = call(redis, "measure")
    return Kept(
        records_bytes + stream_bytes,
        settings.results_memory,
        results,
        records_bytes / results if results else 0.0,
        stream_bytes,
        entries,
        stream_bytes / entries if entries else 0.0,
        sent_bytes,
        settings.sent_memory,
        sent,
        sent_bytes / sent if sent else 0.0,
    )


def needs(kept: Kept, settings: Settings, posts_per_second: float) -> Needs:
    """Return the memory that a rate needs until the times to live are met."""
    stream = min(kept.stream_entry_bytes * settings.results_stream_length, memory_limits(settings)["stream"])
    kept_s = 1 + DROPPED_SHARE
    per_second, sent_per_second = posts_per_second * kept.result_bytes, posts_per_second * kept.sent_record_bytes
    results = stream + per_second * settings.results_ttl * kept_s if posts_per_second else kept.results_bytes
    sent = sent_per_second * settings.sent_ttl * kept_s if posts_per_second else kept.sent_bytes
    left = 1 - DROPPED_SHARE
    return Needs(
        results,
        sent,
        left * (kept.results_limit - stream) / per_second if per_second and results > kept.results_limit else None,
        left * kept.sent_limit / sent_per_second if sent_per_second and sent > kept.sent_limit else None,
    )
