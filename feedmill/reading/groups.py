"""Read the results stream as a member of a consumer group."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from feedmill.reading.entry_ids import id_before, order, seconds_of
from feedmill.reading.stream import (
    NO_FILTER,
    Missed,
    Read,
    ResultFilter,
    milliseconds,
    missed_before,
    parsed,
    wait_for_entry,
)
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.redis_errors import is_temporary
from feedmill.shared.scripts.stream import END, Place, StreamState, claim, fetch

T = TypeVar("T")

#: Entries per fetch. If this member stops, other members receive these entries only after CLAIM_AFTER_S.
GIVEN_AT_ONCE = 100
#: Seconds without acknowledgement after which another member takes over an entry.
CLAIM_AFTER_S = 60.0
#: Fractions of that time: interval between takeovers; and age at which a member re-reads its own pending entries.
CLAIM_FRACTION, STALE_FRACTION = 0.25, 0.5
#: Minimum seconds between takeovers.
MIN_CLAIM_INTERVAL_S = 0.1
#: Seconds of inactivity after which a member without pending entries is removed. Its name can be used again.
MEMBER_TTL_S = 3600


class GroupReader:
    """A member of a consumer group. Members share the stream; an entry is delivered until a member acknowledges it.

    Results that do not match the filter are acknowledged at once, for the whole group. Member names must be unique:
    two processes with the same name would receive each other's pending entries.
    """

    def __init__(
        self,
        redis: Redis,
        group: str,
        consumer: str,
        wanted: ResultFilter = NO_FILTER,
        since: float | None = None,
        claim_after: float = CLAIM_AFTER_S,
    ) -> None:
        """Create a member. since: start of a new group, as in `Follower`. claim_after: see CLAIM_AFTER_S."""
        self._redis = redis
        self._group = group
        self._consumer = consumer
        self._wanted = wanted
        self._claim_after = claim_after
        #: The group's place in the stream. For a new group, the start of the group.
        self._place = END if since is None else Place(id_before(since))
        self._claim_from = "0-0"
        self._claim_at = self._read_at = time.monotonic()
        #: Entries to acknowledge.
        self._to_acknowledge: list[str] = []
        #: Items to return from the next `read`.
        self._lost_items: list[Read] = []

    @property
    def stale(self) -> bool:
        return time.monotonic() - self._read_at > self._claim_after * STALE_FRACTION

    def read(self) -> list[Read] | None:
        self._send_acknowledgements()
        if time.monotonic() >= self._claim_at:
            self._lost_items += self._claim_entries()
        self._read_at = time.monotonic()
        found = self._in_group(partial(fetch, self._redis, GIVEN_AT_ONCE, group=self._group, member=self._consumer))
        reads, self._lost_items = self._lost_items, []
        if found.pending:
            reads += self._lost([entry_id for entry_id, fields in found.entries if fields is None], found.stream)
        else:
            self._place = found.place
            if not found.entries:
                return reads or None
            reads += missed_before(found)
        for entry_id, result in parsed(entry for entry in found.entries if entry[1] is not None):
            if result and self._wanted.has(result):
                reads.append(Read(result, (entry_id,)))
            else:
                self._to_acknowledge.append(entry_id)
        return reads

    def wait(self, seconds: float) -> None:
        # Not XREADGROUP: it would deliver entries without checking for trimmed ones.
        seconds = min(seconds, self._claim_at - time.monotonic())
        if seconds > 0:
            wait_for_entry(self._redis, self._place, seconds)

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Mark entries as processed. Call before the next `read`, which otherwise returns them again.

        If Redis is unreachable or rejects writes, the next `read` sends the acknowledgement.
        """
        self._to_acknowledge.extend(ids)
        try:
            self._send_acknowledgements()
        except RedisError as fault:
            if not is_temporary(fault):
                raise

    def _send_acknowledgements(self) -> None:
        if self._to_acknowledge:
            self._redis.xack(RESULTS_STREAM, self._group, *self._to_acknowledge)
            self._to_acknowledge.clear()

    def _claim_entries(self) -> list[Read]:
        """Take over entries that other members did not acknowledge. The next fetch returns them as pending."""
        idle_ms, ttl_ms = milliseconds(self._claim_after), MEMBER_TTL_S * 1000
        self._claim_from, deleted, state = self._in_group(
            partial(claim, self._redis, self._group, self._consumer, idle_ms, self._claim_from, GIVEN_AT_ONCE, ttl_ms)
        )
        # Continue right after this batch if more entries can be taken over.
        pause = max(self._claim_after * CLAIM_FRACTION, MIN_CLAIM_INTERVAL_S) if self._claim_from == "0-0" else 0.0
        self._claim_at = time.monotonic() + pause
        return self._lost(deleted, state)

    def _lost(self, ids: Sequence[str], stream: StreamState) -> list[Read]:
        """Report pending entries that were trimmed, and acknowledge those that were purged."""
        # Trimming removes the oldest entries. Missing entries after the stream's first one were therefore purged.
        trimmed = stream.trimmed and stream.first
        lost = [entry_id for entry_id in ids if trimmed and order(entry_id) < order(stream.first)]
        self._to_acknowledge.extend(set(ids).difference(lost))
        if not lost:
            return []
        count = None if stream.purged else len(lost)
        return [Read(Missed(count, seconds_of(lost[0]), seconds_of(lost[-1]), len(lost)), tuple(lost))]

    def _in_group(self, call: Callable[[], T]) -> T:
        """Make a call. If the group does not exist, create it and repeat the call."""
        try:
            return call()
        except ResponseError as fault:
            if "NOGROUP" not in str(fault):
                raise
        try:
            self._redis.xgroup_create(RESULTS_STREAM, self._group, id=self._place.cursor, mkstream=True)
        except ResponseError as fault:
            if "BUSYGROUP" not in str(fault):  # another member created it first
                raise
        return call()
