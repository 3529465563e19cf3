"""Read results as models: followers with a private cursor, members of consumer groups, and the
newest results.
"""

import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from feedmill.outcomes.rows import (
    Missed,
    Place,
    ResultRow,
    RowReader,
    counter,
    id_before,
    label_score,
    missed_between,
    order,
    seconds_of,
    texts_of,
)
from feedmill.producers.records import subreddit_name
from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import UserError, clause, printable
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.redis_errors import is_temporary, trouble
from feedmill.shared.results import Result, newest_first
from feedmill.shared.scripts import call

logger = logging.getLogger(__name__)

#: Entries per fetch of the newest results.
NEWEST_AT_ONCE = 500
#: Seconds that a follower whose entries were lost goes back beyond its latest read.
LOST_MARGIN_S = 5.0
#: Entries per fetch. If this member stops, other members receive these entries only after
#: CLAIM_AFTER_S.
GIVEN_AT_ONCE = 100
#: Seconds without acknowledgement after which another member takes over an entry.
CLAIM_AFTER_S = 60.0
#: Fractions of that time: interval between takeovers; and age at which a member re-reads its own
#: pending entries.
CLAIM_FRACTION = 0.25
STALE_FRACTION = 0.5
#: Minimum seconds between takeovers.
MIN_CLAIM_INTERVAL_S = 0.1
#: Seconds of inactivity after which a member without pending entries is removed. Its name can be
#: used again.
MEMBER_TTL_S = 3600
#: Maximum seconds that a reader waits for an entry before it returns to its caller.
WAIT_S = 1.0
#: Pauses before each attempt to reconnect.
RECONNECTIONS = Backoff(first_s=0.1, max_s=5.0)
#: Valid names of groups and members.
READER_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,64}")
#: Seconds since 1970: the end of the year 9999.
MAX_UNIX_TIME = 253_402_300_800


class ResultFilter(NamedTuple):
    """Filter for results. None matches all."""

    #: Best label, matched exactly.
    label: str | None = None
    #: Minimum score of the best label.
    min_score: float | None = None
    #: Subreddit, case-insensitive, with or without "r/".
    subreddit: str | None = None
    #: Name of the run, matched exactly.
    run: str | None = None

    def has(self, row: ResultRow) -> bool:
        """Return whether a row matches."""
        classification = row.found
        post = row.post
        label = classification["label"]
        if self.label is not None and label != self.label:
            return False
        if self.min_score is not None:
            score = label_score(classification)
            if score < self.min_score:
                return False
        if self.run is not None and post.get("run") != self.run:
            return False
        if self.subreddit is None:
            return True
        subreddit = post.get("subreddit") or ""
        return subreddit_name(subreddit) == subreddit_name(self.subreddit)


class RowFilter(Protocol):
    """A choice of rows."""

    def has(self, row: ResultRow) -> bool:
        """Return whether a row matches."""


NO_FILTER = ResultFilter()


class Read(NamedTuple):
    """An item for the caller, and the entries to acknowledge once it is processed."""

    item: Result | Missed
    ids: tuple[str, ...] = ()


class Follower:
    """A reader with a private cursor. Returns each result once during its lifetime.

    Its methods, and those of `GroupReader`, raise redis.exceptions.RedisError.
    """

    #: True if another member may have taken over unacknowledged items: call `read` again.
    stale = False

    def __init__(
        self,
        redis: Redis,
        wanted: ResultFilter = NO_FILTER,
        since: float | None = None,
        history: int = 0,
    ) -> None:
        """Create a follower.

        since: start time, in seconds since 1970; None for the stream's end. history: number of
        earlier results to read first.
        """
        self._rows = RowReader(redis)
        self._filter = wanted
        self._history = history
        self._place = _start(since)
        #: Time of the latest read (monotonic seconds).
        self._read_at = time.monotonic()

    def read(self) -> list[Read] | None:
        """Read on, and return the items that are available without waiting.

        None if there are none; an empty list if none match the filter.
        """
        redis = self._rows.redis
        place = self._place or end_of(redis)
        self._place = place
        if self._history:
            earlier = newest(
                redis,
                self._history,
                self._filter,
                until=place.cursor,
            )
            self._history = 0
            return [Read(result) for result in earlier]

        chunk = self._rows.fetch(place)
        if chunk.lost:
            self._go_back()
            return []
        self._read_at = time.monotonic()
        self._place = chunk.place
        if chunk.place == place:
            return None
        reads: list[Read] = []
        if chunk.missed:
            reads.append(Read(chunk.missed))
        matches = filter(self._filter.has, chunk.rows)
        reads.extend(Read(row.result) for row in matches)
        return reads

    def _go_back(self) -> None:
        """Continue with what Redis stored since the latest read: it has smaller ids than what was
        read then.
        """
        server_time: Any = self._rows.redis.time()
        server_seconds, _ = server_time
        since_read = time.monotonic() - self._read_at
        since = server_seconds - since_read - LOST_MARGIN_S
        logger.warning(
            "Redis lost its latest results, and its clock went back: results of the "
            "last seconds come again"
        )
        self._place = Place(id_before(since))

    def wait(self, seconds: float) -> None:
        """Return as soon as there may be something to read, or after `seconds`."""
        if self._place:
            self._rows.wait(self._place, seconds)

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Do nothing: followers have no pending entries."""


def newest(
    redis: Redis,
    count: int,
    wanted: ResultFilter = NO_FILTER,
    until: str = "+",
    since: float | None = None,
) -> list[Result]:
    """Return the newest `count` matching results up to the entry id `until`, oldest first.

    since: seconds since 1970; results that were stored earlier are left out.
    """
    rows = newest_rows(redis, count, wanted, until, since)
    return [row.result for row in rows]


def newest_rows(
    redis: Redis,
    count: int,
    wanted: RowFilter = NO_FILTER,
    until: str = "+",
    since: float | None = None,
    max_entries: int | None = None,
) -> list[ResultRow]:
    """Return the rows of `newest`. max_entries: entries to look at, however few match."""
    first = "-"
    if since is not None:
        first = f"({id_before(since)}"
    size = NEWEST_AT_ONCE
    if wanted == NO_FILTER:
        size = min(count, NEWEST_AT_ONCE)
    entries = newest_first(
        redis,
        RESULTS_STREAM,
        first,
        until,
        size,
    )
    if max_entries is not None:
        entries = islice(entries, max_entries)
    reader = RowReader(redis)
    rows: list[ResultRow] = []
    while len(rows) < count:
        page = list(islice(entries, size))
        if not page:
            break
        texts: list[str] = []
        for entry_id, fields in page:
            texts.extend(texts_of(entry_id, fields))
        matches = filter(wanted.has, reader.parse(texts))
        rows.extend(matches)
    del rows[count:]
    rows.reverse()
    return rows


class GroupReader:
    """A member of a consumer group.

    Members share the stream; an entry is delivered until a member acknowledges it.

    Results that do not match the filter are acknowledged at once, for the whole group. Member
    names must be unique: two processes with the same name would receive each other's pending
    entries.
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
        """Create a member. since: start of a new group, as in `Follower`. claim_after: see
        CLAIM_AFTER_S.
        """
        self._redis = redis
        self._rows = RowReader(redis)
        self._group = group
        self._consumer = consumer
        self._filter = wanted
        self._claim_after = claim_after
        #: The group's place in the stream. For a new group, the start of the group.
        self._place = _start(since)
        self._claim_from = "0-0"
        now = time.monotonic()
        self._claim_at = now
        self._read_at = now
        #: Entries to acknowledge.
        self._to_acknowledge: list[str] = []
        #: Reports to return from the next `read` that succeeds.
        self._missed: list[Read] = []

    @property
    def stale(self) -> bool:
        now = time.monotonic()
        age = now - self._read_at
        stale_age = self._claim_after * STALE_FRACTION
        return age > stale_age

    def read(self) -> list[Read] | None:
        self._send_acknowledgements()
        if time.monotonic() >= self._claim_at:
            self._missed += self._claim_entries()
        self._read_at = time.monotonic()
        is_pending, names_and_fields, *place = self._call(
            "fetch_group",
            GIVEN_AT_ONCE,
            self._group,
            self._consumer,
        )
        entries = [_entry(name, fields) for name, fields in names_and_fields]
        if is_pending:
            deleted = [entry.name for entry in entries if entry.fields is None]
            self._missed += self._lost(deleted)
        else:
            before = Place(*place)
            self._advance(before, entries)
        reads = self._missed
        self._missed = []
        reads += self._take_matching(entries)
        if entries:
            return reads
        return reads or None

    def _advance(self, before: Place, entries: "Sequence[_GroupEntry]") -> None:
        """Move the group's place past new entries, and note what was trimmed before them."""
        self._place = before
        if not entries:
            return
        first = entries[0]
        missed = missed_between(
            self._redis,
            before,
            first.name,
            first.number,
        )
        if missed:
            self._missed.append(Read(missed))
        last = entries[-1]
        self._place = Place(last.name, last.number)

    def _take_matching(self, entries: "Sequence[_GroupEntry]") -> list[Read]:
        """Return the entries that match the filter, and schedule the acknowledgement of the
        others.
        """
        texts: list[str] = []
        unmatched: set[str] = set()
        for name, fields in entries:
            if fields is not None:
                texts.extend(texts_of(name, fields))
                unmatched.add(name)
        reads: list[Read] = []
        for row in self._rows.parse(texts):
            if self._filter.has(row):
                read = Read(row.result, (row.entry,))
                reads.append(read)
                unmatched.discard(row.entry)
        self._to_acknowledge += unmatched
        return reads

    def wait(self, seconds: float) -> None:
        # Not XREADGROUP: it would deliver entries without checking for trimmed ones.
        now = time.monotonic()
        until_claim = self._claim_at - now
        seconds = min(seconds, until_claim)
        if seconds > 0:
            place = self._place or Place("$")
            self._rows.wait(place, seconds)

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Mark entries as processed.

        Call before the next `read`, which otherwise returns them again.

        If Redis is unreachable or rejects writes, the next `read` sends the acknowledgement.
        """
        self._to_acknowledge.extend(ids)
        try:
            self._send_acknowledgements()
        except RedisError as fault:
            if not is_temporary(fault):
                raise

    def _send_acknowledgements(self) -> None:
        ids = self._to_acknowledge
        if ids:
            self._redis.xack(RESULTS_STREAM, self._group, *ids)
            ids.clear()

    def _claim_entries(self) -> list[Read]:
        """Take over entries that other members did not acknowledge.

        The next fetch returns them as pending.
        """
        idle_ms = math.ceil(self._claim_after * 1000)
        ttl_ms = MEMBER_TTL_S * 1000
        self._claim_from, deleted = self._call(
            "claim",
            self._group,
            self._consumer,
            idle_ms,
            self._claim_from,
            GIVEN_AT_ONCE,
            ttl_ms,
        )
        # Continue right after this batch if more entries can be taken over.
        if self._claim_from == "0-0":
            pause = max(self._claim_after * CLAIM_FRACTION, MIN_CLAIM_INTERVAL_S)
        else:
            pause = 0.0
        self._claim_at = time.monotonic() + pause
        return self._lost(deleted)

    def _lost(self, ids: Sequence[str]) -> list[Read]:
        """Report pending entries that were trimmed, and acknowledge those that were purged."""
        if not ids:
            return []
        trimmed: list[str] = []
        oldest = self._oldest_if_trimmed()
        if oldest is not None:
            oldest_order = order(oldest)
            trimmed = [entry_id for entry_id in ids if order(entry_id) < oldest_order]
        purged = set(ids).difference(trimmed)
        self._to_acknowledge.extend(purged)
        if not trimmed:
            return []

        first = trimmed[0]
        last = trimmed[-1]
        missed = Missed(
            count=len(trimmed),
            since=seconds_of(first),
            until=seconds_of(last),
        )
        return [Read(missed, tuple(trimmed))]

    def _oldest_if_trimmed(self) -> str | None:
        """Return the id of the oldest entry; None if the stream was never trimmed, or is empty."""
        if not counter(self._redis, "trimmed"):
            return None
        oldest: Any = self._redis.xrange(RESULTS_STREAM, count=1)
        if not oldest:
            return None
        entry_id, _ = oldest[0]
        return str(entry_id)

    def _call(self, name: str, *args: Any) -> Any:
        """Call a function in Redis. If the group does not exist, create it and repeat the call."""
        try:
            return call(self._redis, name, *args)
        except ResponseError as fault:
            if "NOGROUP" not in str(fault):
                raise
        place = self._place or end_of(self._redis)
        start: dict[str, Any] = {"id": place.cursor, "entries_read": place.number}
        try:
            self._redis.xgroup_create(
                RESULTS_STREAM,
                self._group,
                mkstream=True,
                **start,
            )
        except ResponseError as fault:
            if "BUSYGROUP" not in str(fault):  # another member created it first
                raise
        return call(self._redis, name, *args)


def end_of(redis: Redis) -> Place:
    """Return the end of the stream."""
    latest: Any = redis.xrevrange(RESULTS_STREAM, count=1)
    cursor = "0-0"
    if latest:
        cursor, _ = latest[0]
    number = counter(redis, "stored")
    return Place(cursor, number)


def _start(since: float | None) -> Place | None:
    """Return the place from which a reader starts; None for the stream's end."""
    if since is None:
        return None
    return Place(id_before(since))


class _GroupEntry(NamedTuple):
    """An entry as a group received it. fields: None if it is pending and was deleted."""

    name: str
    fields: dict[str, str] | None

    @property
    def number(self) -> int | None:
        """Its number in the stream; None if unknown."""
        if self.fields is None:
            return None
        text = self.fields.get("number", "")
        return int(text) if text.isdecimal() else None


def _entry(name: str, flat_fields: list[str] | None) -> _GroupEntry:
    """Return an entry whose names and values of fields alternate."""
    if flat_fields is None:
        return _GroupEntry(name, fields=None)
    names = flat_fields[::2]
    values = flat_fields[1::2]
    fields = dict(zip(names, values, strict=True))
    return _GroupEntry(name, fields)


Reader = Follower | GroupReader


def open_reader(
    redis: Redis,
    group: str | None = None,
    consumer: str | None = None,
    wanted: ResultFilter = NO_FILTER,
    since: float | None = None,
    history: int = 0,
    claim_after: float = CLAIM_AFTER_S,
) -> Reader:
    """Create a follower, or a member of a group. Raises UserError for invalid values.

    consumer: the member's name; default: host name and process id.
    """
    _check_filter(wanted)
    if since is not None and not (_is_finite(since) and 0 <= since < MAX_UNIX_TIME):
        raise UserError(f"since must be a time before the year 10000, not {since!r}.")
    if group is None:
        if consumer is not None:
            raise UserError(
                "consumer requires a group. Name the group as well, or leave out the consumer."
            )
        return Follower(redis, wanted, since, history)
    if not (_is_finite(claim_after) and 0 < claim_after < MAX_UNIX_TIME):
        raise UserError(
            f"claim_after must be a positive number of seconds, not {claim_after!r}."
        )
    if consumer is None:
        process_name = f"{socket.gethostname():.48}-{os.getpid()}"
        consumer = re.sub(r"[^A-Za-z0-9_.-]", "-", process_name)
    _check_name("group", group)
    _check_name("consumer", consumer)
    return GroupReader(
        redis,
        group,
        consumer,
        wanted,
        since,
        claim_after,
    )


def _check_filter(wanted: ResultFilter) -> None:
    """Raise UserError for a filter that no result can pass."""
    subreddit = wanted.subreddit
    if subreddit is not None and not subreddit_name(subreddit):
        raise UserError(
            f"{printable(subreddit)!r:.80} is not a subreddit's name; write python, or r/python."
        )
    min_score = wanted.min_score
    if min_score is not None and not _is_finite(min_score):
        raise UserError(f"min_score must be a finite number, not {min_score!r:.80}.")


def _check_name(kind: str, name: str) -> None:
    """Raise UserError for an invalid name of a group or of a consumer."""
    if not READER_NAME.fullmatch(name):
        raise UserError(
            f"'{printable(name):.80}' is not a valid {kind} name. Use 1 to 64 letters, digits, or "
            "any of - _ . : @"
        )


def _is_finite(value: object) -> bool:
    """Return whether a value is a finite number.

    NaN would match no result, and a group would acknowledge all.
    """
    if isinstance(value, bool):
        return False
    if not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def batches(
    reader: Reader, follow: bool = True, wait: float = WAIT_S
) -> Iterator[list[Read]]:
    """Yield batches of items as they arrive; an empty list at least every `wait` seconds.

    Retries for as long as Redis is unreachable, or refuses commands for now. Without `follow`,
    stops at the end of the stream. The caller acknowledges. Raises redis.exceptions.RedisError if
    the first attempt fails, or if Redis will never accept a command.
    """
    answered = False
    failures = 0
    while True:
        try:
            batch = reader.read()
            if batch is None and follow:
                reader.wait(wait)
        except RedisError as fault:
            if not answered or not is_temporary(fault):
                raise
            if not failures:
                logger.warning(
                    "Redis %s (%s); retrying until it answers",
                    trouble(fault),
                    clause(fault),
                )
            time.sleep(RECONNECTIONS.pause_s(failures))
            failures += 1
            continue
        if failures:
            logger.warning("Redis answers again; continuing at the same position")
        answered = True
        failures = 0
        if batch is None and not follow:
            return
        yield batch or []


def items(reader: Reader, follow: bool = True) -> Iterator[Result | Missed]:
    """Yield single items, each acknowledged when the next one is requested.

    Otherwise like `batches`.
    """
    for batch in batches(reader, follow):
        for item, ids in batch:
            yield item
            reader.acknowledge(ids)
            if reader.stale and isinstance(item, Result):
                break  # the rest is still pending, or was taken over; the next `read` decides
