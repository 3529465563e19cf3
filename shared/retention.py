"""Bound the memory of stored results and of sent records: drop the oldest ones, and count them.

Results are the packed ones, their contexts and the results stream, which may take half of `results_memory`. Sent
records have a bound of their own, `sent_memory`.

Nothing is measured while results are written. The script that stores a micro-batch tells its worker when enough
results for a check were stored, by whichever workers; so one worker checks. The memory of buckets is estimated from a
sample: linear hashing spreads records evenly. If it is too large, the sample also gives the time before which records
are dropped, and a sweep through all buckets drops them, some hundred buckets per call. The script that writes a
micro-batch bounds the stream (shared/scripts/results.py).
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from feedmill.shared.keys import CONTEXTS, COUNTERS, MARKS, RESULTS_STREAM, STORED, STREAM_SIZES, SWEEPER
from feedmill.shared.redis_errors import rejects_writes
from feedmill.shared.result_records import HEAD, TAIL, split
from feedmill.shared.scripts import results as result_scripts
from feedmill.shared.scripts import retention as scripts
from feedmill.shared.scripts.buckets import HOUR_BYTES, MARK_BYTES, SCORE
from feedmill.shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: Seconds between two checks by a worker that stores few results, such as after a bound was lowered.
CHECK_INTERVAL_S = 60.0
#: Seconds after which another worker may drop records, if the one that did so has vanished.
LOCK_S = 30
#: Shares of a bound above which the oldest records are dropped, and to which. The difference is dropped at once: a
#: sweep reads all buckets.
DROP_ABOVE, DROP_TO = 0.9, 0.83
#: Maximum share of records that one sweep drops, since it is estimated. Another one follows if it was too small.
MAX_DROPPED = 0.5
#: A check follows each time this share of `results_memory` may have been written, at this many bytes per result.
CHECK_SHARE, BYTES_PER_RESULT = 0.02, 1500
#: Minimum number of results between two checks.
MIN_CHECK_RESULTS = 100
#: Buckets in a sample: the error is about 3%. Fewer are enough to show sizes.
SAMPLED_BUCKETS, SHOWN_BUCKETS = 256, 64
#: Contexts in a sample.
SAMPLED_CONTEXTS = 20
#: Bytes that MEMORY USAGE leaves out: of a key with a time of expiry, in Redis' two hash tables; and of a context's
#: entry in the sorted set.
KEY_BYTES, CONTEXT_ENTRY_BYTES = 80, 130
HOUR_S = 3600
#: Hours of marks are numbers modulo this.
HOURS = 2**16


class Table(NamedTuple):
    """Size of a table of buckets, estimated: bytes of memory and of records, number of records and of buckets."""

    memory: float = 0.0
    content: float = 0.0
    records: float = 0.0
    buckets: int = 0

    @property
    def record_bytes(self) -> float:
        """Bytes of memory per record."""
        return self.memory / self.records if self.records else 0.0


class Kept(NamedTuple):
    """Estimated size of what is kept of posts, and its bounds. All in bytes, except the two numbers."""

    #: Results: packed ones with their contexts, and entries of the stream.
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


def check_interval(settings: Settings) -> int:
    """Return the number of new results after which one worker checks the bounds."""
    return max(MIN_CHECK_RESULTS, int(settings.results_memory * CHECK_SHARE / BYTES_PER_RESULT))


def measure(redis: Redis, settings: Settings) -> Kept:
    """Estimate what is kept of posts, in about two milliseconds. Raises redis.exceptions.RedisError."""
    results, _ = _sampled(redis, STORED, _result_times)
    sent, _ = _sampled(redis, MARKS, _mark_times)
    stream_bytes, entries = _stream_size(redis)
    results_bytes = results.memory + _contexts_bytes(redis)
    return Kept(
        results_bytes + stream_bytes,
        settings.results_memory,
        round(results.records),
        results_bytes / results.records if results.records else 0.0,
        stream_bytes,
        entries,
        stream_bytes / entries if entries else 0.0,
        sent.memory,
        settings.sent_memory,
        round(sent.records),
        sent.record_bytes,
    )


def needs(kept: Kept, settings: Settings, posts_per_second: float) -> Needs:
    """Return the memory that a rate needs until the times to live are met."""
    stream = min(kept.stream_entry_bytes * settings.results_stream_length, result_scripts.stream_limit(settings))
    per_second = posts_per_second * kept.result_bytes
    results = stream + per_second * settings.results_ttl if posts_per_second else kept.results_bytes
    sent_per_second = posts_per_second * kept.sent_record_bytes
    sent = sent_per_second * settings.sent_ttl if posts_per_second else kept.sent_bytes
    return Needs(
        results,
        sent,
        (DROP_TO * kept.results_limit - stream) / per_second if per_second and results > kept.results_limit else None,
        DROP_TO * kept.sent_limit / sent_per_second if sent_per_second and sent > kept.sent_limit else None,
    )


class MemoryBounds:
    """A thread that keeps results and sent records within their bounds.

    Several workers may run it on one Redis; the lowest bound applies.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._due, self._stopping = threading.Event(), threading.Event()
        self._due.set()  # check at the start: the bounds may be new
        self._warned = False
        self._locked_at = 0.0
        self._thread = threading.Thread(target=self._loop, name="memory bounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A sweep that has begun is left to the next check, by any worker."""
        self._stopping.set()
        self._due.set()
        self._thread.join(1.0)

    def check_soon(self) -> None:
        """Check the bounds on the thread."""
        self._due.set()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._due.wait(CHECK_INTERVAL_S)
            self._due.clear()
            if self._stopping.is_set():
                return
            try:
                self.check()
                self._warned = False
            except RedisError as fault:
                level = logging.DEBUG if self._warned else logging.WARNING
                logger.log(level, "cannot check the memory of results and sent records: %s", fault)
                self._warned = True
            except Exception:
                logger.exception("cannot check the memory of results and sent records")

    def check(self) -> None:
        """Drop what exceeds the bounds. Raises redis.exceptions.RedisError."""
        result_scripts.trim(self._redis, self._settings)
        scripts.drop_contexts(self._redis, self._now())
        if not (self._results_excess() or self._sent_excess()) or not self._lock(nx=True):
            return
        try:
            while self._drop_results() or self._drop_sent():
                pass
        finally:
            self._redis.delete(SWEEPER)

    def _now(self) -> int:
        """Return Redis' time in seconds since 1970: records expire by it, and workers' clocks differ."""
        seconds, _ = self._redis.time()
        return seconds

    def _lock(self, nx: bool = False) -> bool:
        """Have no other worker drop records for the next LOCK_S seconds: together they would drop too many.

        nx: only if no other worker does.
        """
        self._locked_at = time.monotonic()
        try:
            return bool(self._redis.set(SWEEPER, 1, ex=LOCK_S, nx=nx))
        except ResponseError as fault:
            if not rejects_writes(fault):
                raise
            return True  # at maxmemory: the sweep makes room

    def _results_excess(self) -> float:
        """Return the bytes of results to drop; 0 if all are within their limit."""
        results = _sample(self._redis, STORED).memory + _contexts_bytes(self._redis)
        return _excess(results + _stream_size(self._redis)[0], self._settings.results_memory)

    def _sent_excess(self) -> float:
        """Return the bytes of sent records to drop; 0 if all are within their limit."""
        return _excess(_sample(self._redis, MARKS).memory, self._settings.sent_memory)

    def _drop_results(self) -> int:
        """Drop some of the oldest results if all exceed their limit. Return how many."""
        if not (excess := self._results_excess()):
            return 0
        table, times = _sampled(self._redis, STORED, _result_times, SAMPLED_BUCKETS)
        before, share = _cut(times, excess, table.content + _contexts_bytes(self._redis))
        now = self._now()
        removed = self._sweep(lambda start: scripts.drop_results(self._redis, start, before, share, now))
        scripts.drop_contexts(self._redis, before)
        logger.info("dropped the %d oldest results, which exceed %sRESULTS_MEMORY", removed, PREFIX)
        return removed

    def _drop_sent(self) -> int:
        """Drop some of the oldest records of sent posts if all exceed their limit. Return how many."""
        if not (excess := self._sent_excess()):
            return 0
        origin = (self._now() // HOUR_S - HOURS // 2) % HOURS  # expired hours are below the middle of the range
        table, hours = _sampled(self._redis, MARKS, lambda bucket: _mark_times(bucket, origin), SAMPLED_BUCKETS)
        cut = _cut(hours, excess, table.content)
        removed = self._sweep(lambda start: scripts.drop_marks(self._redis, start, *cut, HOURS // 2 - 1, origin))
        logger.info("dropped the %d oldest records of sent posts, which exceed %sSENT_MEMORY", removed, PREFIX)
        return removed

    def _sweep(self, drop: Callable[[int], tuple[int, int]]) -> int:
        """Drop records of all buckets. Buckets that are added meanwhile are at the end."""
        start, left, total = 0, 1, 0
        while left and not self._interrupted():
            left, removed = drop(start)
            start, total = start + scripts.BUCKETS_PER_CALL, total + removed
        return total

    def _interrupted(self) -> bool:
        """Renew the lock, and return whether to stop."""
        if time.monotonic() - self._locked_at > LOCK_S / 3:
            self._lock()
        return self._stopping.is_set()


def _stream_size(redis: Redis) -> tuple[float, int]:
    """Return the memory of the results stream, estimated, and the number of its entries."""
    pipe: Any = redis.pipeline(transaction=False)
    pipe.xlen(RESULTS_STREAM).hget(COUNTERS, "stream_bytes").lindex(STREAM_SIZES, 0)
    length, total, first = pipe.execute()
    return float(total or 0) - float(first.split()[1] if first else 0) if length else 0.0, length


def _excess(used: float, limit: float) -> float:
    return used - DROP_TO * limit if used > DROP_ABOVE * limit else 0.0


class _Record(NamedTuple):
    """When a record expires, its bytes, and 1 if it is a result or a sent record, else 0."""

    time: int
    size: int
    number: int


def _result_times(bucket: bytes) -> Iterator[_Record]:
    for each in split(bucket):
        size = HEAD.size + len(each.post_id) + len(each.content) + TAIL.size
        yield _Record(each.expires, size, int(each.kind != SCORE))


def _mark_times(bucket: bytes, origin: int = 0) -> Iterator[_Record]:
    for end in range(MARK_BYTES, len(bucket) + 1, MARK_BYTES):
        hour = int.from_bytes(bucket[end - HOUR_BYTES : end], "big")
        yield _Record((hour - origin) % HOURS, MARK_BYTES, 1)


def _sample(redis: Redis, table: str) -> Table:
    """Estimate a table's memory only."""
    found = scripts.sample(redis, table, SAMPLED_BUCKETS, random.random(), records=False)
    return Table((found.memory + KEY_BYTES * found.existing) * found.buckets / max(1, found.looked))


def _sampled(
    redis: Redis, table: str, records_of: Callable[[bytes], Iterator[_Record]], count: int = SHOWN_BUCKETS
) -> tuple[Table, Mapping[int, int]]:
    """Estimate a table's size, and return the bytes of records by time of expiry in the sample."""
    found = scripts.sample(redis, table, count, random.random(), records=True)
    times: Counter[int] = Counter()
    number = 0
    for bucket in found.records:
        for record in records_of(bucket):
            times[record.time] += record.size
            number += record.number
    scale = found.buckets / max(1, found.looked)
    memory = found.memory + KEY_BYTES * found.existing
    return Table(memory * scale, sum(times.values()) * scale, number * scale, found.buckets), times


def _cut(times: Mapping[int, int], excess: float, content: float) -> tuple[int, float]:
    """Return the time before which records are dropped, and the share of those at that time, so that together the
    excess bytes of a content are dropped, but at most half of it.

    times: bytes by time of expiry in a sample of the content.
    """
    wanted = min(MAX_DROPPED, excess / max(1.0, content)) * sum(times.values())
    for at, size in sorted(times.items()):
        if size >= wanted:
            return at, wanted / size
        wanted -= size
    return 0, 0.0


def _contexts_bytes(redis: Redis) -> float:
    """Estimate the memory of contexts from the first and the last ones."""
    half = SAMPLED_CONTEXTS // 2
    pipe: Any = redis.pipeline(transaction=False)
    pipe.zcard(CONTEXTS).zrange(CONTEXTS, 0, half - 1).zrange(CONTEXTS, -half, -1)
    number, first, last = pipe.execute()
    keys = dict.fromkeys([*first, *last])
    for key in keys:
        pipe.memory_usage(key)
    usage = [each for each in pipe.execute() if each] if keys else []
    return float(number * (sum(usage) / max(1, len(usage)) + KEY_BYTES + CONTEXT_ENTRY_BYTES))
