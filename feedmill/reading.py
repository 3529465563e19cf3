"""Read the results stream: as raw rows, for exports of a hundred thousand results and more; and as models, by followers
with a private cursor, by members of consumer groups, and with `feedmill.results`.

Per chunk, one script fetches about five hundred rows and another checks them for purged posts. Rows are plain dicts:
building pydantic models would be slow. Ids of entries are `<milliseconds>-<sequence number>`, by Redis' clock.

Redis trims entries whether or not they were read, and a reader would silently continue at the oldest entry left. So
each entry carries its number, and a reader compares the next one with that of its place. XREAD is used only to wait,
because it cannot tell what was trimmed.
"""

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from typing import Any, NamedTuple

from pydantic_core import from_json
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from feedmill.producers.records import subreddit_name
from feedmill.shared import runs
from feedmill.shared.broker import connect
from feedmill.shared.errors import UserError, clause, printable
from feedmill.shared.keys import COUNTERS, RESULTS_STREAM
from feedmill.shared.messages import Classification, Post, in_utc, parse_run
from feedmill.shared.redis_errors import is_temporary, rejects_writes, user_errors
from feedmill.shared.results import Result, newest_first
from feedmill.shared.scripts import call
from feedmill.shared.settings import load_arguments

logger = logging.getLogger(__name__)

#: Approximate bytes of entries per fetch. A fetch blocks Redis for one or two milliseconds.
FETCH_BYTES = 2**19
#: Posts per call of the script that checks for purged posts.
POSTS_PER_CHECK = 1000
#: Recent runs that a message about an unknown one names.
MAX_RUNS = 5
#: Largest sequence number of an entry's id.
MAX_SEQUENCE = 2**64 - 1
#: Entries per fetch of the newest results.
NEWEST_AT_ONCE = 500
#: Seconds that a follower whose entries were lost goes back beyond its latest read.
LOST_MARGIN_S = 5.0
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
#: Maximum seconds that a reader waits for an entry before it returns to its caller.
WAIT_S = 1.0
#: Delays before reconnecting, in seconds. The last one repeats.
RECONNECT_DELAYS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
#: Valid names of groups and members.
READER_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,64}")
#: Seconds since 1970: the end of the year 9999.
MAX_UNIX_TIME = 253_402_300_800


class Place(NamedTuple):
    """A reader's place in the stream."""

    #: Id of the last entry that was read.
    cursor: str
    #: Its number; None if unknown.
    number: int | None = None


def order(entry_id: str) -> tuple[int, ...]:
    """Return the sort key of an entry's id."""
    return tuple(map(int, entry_id.split("-")))


def id_before(since: float) -> str:
    """Return the largest id before a time in seconds since 1970, so that reading after it starts at that time."""
    milliseconds = int(since * 1000)
    return f"{milliseconds - 1}-{MAX_SEQUENCE}" if milliseconds > 0 else "0-0"


def seconds_of(entry_id: str) -> float:
    """Return the time at which an entry was written, in seconds since 1970."""
    return int(entry_id.partition("-")[0]) / 1000


@dataclass(frozen=True)
class Missed:
    """Results that were trimmed before they were read. Times are seconds since 1970."""

    #: Number of results, with those among them that had been purged before; None if unknown.
    count: int | None
    #: The results were written between these times.
    since: float
    until: float


class ResultRow(NamedTuple):
    """A result as stored: the fields of Classification and Post (shared/messages.py) as dicts.

    The post's body is truncated, fields with default values are absent, and the Reddit score is the latest one known.
    """

    entry: str
    found: dict[str, Any]
    post: dict[str, Any]

    @property
    def result(self) -> Result:
        """The row as models, which are not validated again: the body may be truncated."""
        return Result(Post.model_construct(**self.post), Classification.model_construct(**self.found))


class Chunk(NamedTuple):
    """Consecutive rows in stream order."""

    rows: list[ResultRow]
    #: Place after the rows, including the omitted rows of purged posts.
    place: Place
    ended: bool
    #: Results that were trimmed before they could be read, if any.
    missed: Missed | None = None
    #: Approximate number of entries after the rows; None if unknown.
    left: int | None = None
    #: True if the stream has lost the entries up to the place, and new ones come before it.
    lost: bool = False


class RowReader:
    """A reader of the results stream. Every method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, until: float | None = None) -> None:
        """Create a reader. until: stop before entries written at or after this time, in seconds since 1970."""
        self.redis = redis
        self._until = math.inf if until is None else int(until * 1000) / 1000  # in whole milliseconds, as ids have

    def fetch(self, place: Place) -> Chunk:
        """Return the next rows after `place`, without those of purged posts."""
        is_past = seconds_of(place.cursor) >= self._until
        ended, first, last, *texts = (1, 0, 0) if is_past else call(self.redis, "fetch_rows", place.cursor, FETCH_BYTES)
        if not texts:
            return Chunk([], place, bool(ended), lost=is_lost(self.redis, place))
        left = max(0, counter(self.redis, "stored") - last) if last and math.isinf(self._until) else None
        missed, now = missed_between(self.redis, place, texts[0], first or None), Place(texts[-3], last or None)
        rows = self.parse(texts)
        if seconds_of(now.cursor) >= self._until:  # the first entry after the end tells what was trimmed before it
            rows = [row for row in rows if seconds_of(row.entry) < self._until]
        return Chunk(rows, now, bool(ended), missed, left)

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """Yield all rows present after `place`, fetching the next chunk while the caller works on the current one."""
        with ThreadPoolExecutor(1, "fetch") as ahead:
            coming = ahead.submit(self.fetch, place)
            while True:
                chunk = coming.result()
                if not chunk.ended:
                    coming = ahead.submit(self.fetch, chunk.place)
                yield chunk
                if chunk.ended:
                    return

    def wait(self, place: Place, seconds: float) -> None:
        """Block until there is an entry after `place`, or until `seconds` have passed."""
        milliseconds = max(1, math.ceil(seconds * 1000))  # Redis treats 0 as forever
        self.redis.xread({RESULTS_STREAM: place.cursor}, count=1, block=milliseconds)

    def parse(self, texts: list[str]) -> list[ResultRow]:
        """Parse (id, classification, post, id, …) into rows, drop those of purged posts and update the others' scores.

        Logs and skips unreadable entries.
        """
        rows, checked = _read(texts), []
        for row, (_, note) in zip(rows, self._notes(row.post["id"] for row in rows), strict=True):
            if note is not False:
                if note is not None:
                    row.post["score"] = note["score"]
                checked.append(row)
        return checked

    def gone(self, ids: Iterable[str]) -> set[str]:
        """Return the ids of the posts that were purged."""
        return {post_id for post_id, note in self._notes(ids) if note is False}

    def _notes(self, ids: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield each post's id with False if it was purged, else its latest score as a dict, or None."""
        remaining = iter(ids)
        while some := list(islice(remaining, POSTS_PER_CHECK)):
            yield from zip(some, from_json(call(self.redis, "check_posts", json.dumps(some))), strict=True)


def check_run(redis: Redis, run: str) -> None:
    """Raise UserError if there is no such run. Its results may outlive its counts."""
    if runs.progress(redis, run) is None:
        rows = (row for chunk in RowReader(redis).chunks(Place("0-0")) for row in chunk.rows)
        if all(row.post.get("run") != run for row in rows):
            raise UserError(unknown_run(redis, run))


def unknown_run(redis: Redis, run: str) -> str:
    """Return a message about a run that does not exist."""
    recent = ", ".join(progress.run for progress in runs.recent(redis, MAX_RUNS)) or "none"
    return printable(f"There is no run {run!r}, or its posts were sent too long ago. Recent runs: {recent}.")


def texts_of(entry_id: str, fields: Mapping[str, str]) -> list[str]:
    """Return an entry's id, classification and post."""
    return [entry_id, fields.get("classification", ""), fields.get("post", "")]


def counter(redis: Redis, name: str) -> int:
    """Return a counter of the stream: entries ever `stored`, the newest one's number, or `trimmed`."""
    count: Any = redis.hget(COUNTERS, name)
    return int(count or 0)


def missed_between(redis: Redis, place: Place, entry_id: str, number: int | None) -> Missed | None:
    """Return the results that were trimmed between a place and the next entry, if any. number: that entry's.

    If an entry is left up to the place, missing ones were purged, because trimming removes the oldest. From the
    beginning, nothing can have been missed.
    """
    count = None if number is None or place.number is None else number - place.number - 1
    if place.cursor == "0-0" if count is None else count <= 0:
        return None
    if not counter(redis, "trimmed") or redis.xrange(RESULTS_STREAM, max=place.cursor, count=1):
        return None
    return Missed(count, seconds_of(place.cursor), seconds_of(entry_id))


def is_lost(redis: Redis, place: Place) -> bool:
    """Return whether Redis has lost the entry at a place that has been read, and the stream's ids went back."""
    if place.number is None:
        return False
    try:
        info: Any = redis.xinfo_stream(RESULTS_STREAM)
    except ResponseError:  # there is no stream
        return False
    return order(info["last-generated-id"]) < order(place.cursor)


def _read(texts: list[str]) -> list[ResultRow]:
    """Parse rows, and skip unreadable ones.

    Parsing one joined JSON array is faster than two per row, and by a fifth faster if only keys are cached.
    """
    ids = texts[::3]
    del texts[::3]
    values = _from_json(f"[{','.join(texts)}]") or ()
    if len(values) != len(texts):
        values = [*map(_from_json, texts)]
    return [row for row in map(ResultRow, ids, values[::2], values[1::2]) if _is_readable(row)]


def _from_json(text: str) -> Any:
    """Parse a value; None for invalid JSON."""
    try:
        return from_json(text, cache_strings="keys")
    except ValueError:
        return None


def _is_readable(row: ResultRow) -> bool:
    """Return whether an entry has what every reader needs; log a warning if not."""
    _, found, post = row
    if isinstance(found, dict) and isinstance(post, dict) and "label" in found and "scores" in found and "id" in post:
        return True
    logger.warning("skipping unreadable entry %s of %s", row.entry, RESULTS_STREAM)
    return False


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
        found, run, subreddit = row.found, row.post.get("run"), row.post.get("subreddit") or ""
        return (
            (self.label is None or found["label"] == self.label)
            and (self.min_score is None or found["scores"][found["label"]] >= self.min_score)
            and (self.run is None or run == self.run)
            and (self.subreddit is None or subreddit_name(subreddit) == subreddit_name(self.subreddit))
        )


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
        self, redis: Redis, wanted: ResultFilter = NO_FILTER, since: float | None = None, history: int = 0
    ) -> None:
        """Create a follower.

        since: start time, in seconds since 1970; None for the stream's end. history: number of earlier results to read
        first.
        """
        self._rows = RowReader(redis)
        self._wanted, self._history = wanted, history
        self._place = None if since is None else Place(id_before(since))
        #: Time of the latest read (monotonic seconds).
        self._read_at = time.monotonic()

    def read(self) -> list[Read] | None:
        """Return available items without waiting. None if there are none; an empty list if none match the filter."""
        place = self._place = self._place or end_of(self._rows.redis)
        if self._history:
            found = newest(self._rows.redis, self._history, self._wanted, until=place.cursor)
            self._history = 0
            return list(map(Read, found))
        chunk = self._rows.fetch(place)
        if chunk.lost:
            self._go_back()
            return []
        self._read_at, self._place = time.monotonic(), chunk.place
        if chunk.place == place:
            return None
        missed = [Read(chunk.missed)] if chunk.missed else []
        return missed + [Read(row.result) for row in chunk.rows if self._wanted.has(row)]

    def _go_back(self) -> None:
        """Continue with what Redis stored since the latest read: it has smaller ids than what was read then."""
        now: Any = self._rows.redis.time()
        since = now[0] - (time.monotonic() - self._read_at) - LOST_MARGIN_S
        logger.warning("Redis lost its latest results, and its clock went back: results of the last seconds come again")
        self._place = Place(id_before(since))

    def wait(self, seconds: float) -> None:
        """Return as soon as there may be something to read, or after `seconds`."""
        if self._place:
            self._rows.wait(self._place, seconds)

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Do nothing: followers have no pending entries."""


def newest(
    redis: Redis, count: int, wanted: ResultFilter = NO_FILTER, until: str = "+", since: float | None = None
) -> list[Result]:
    """Return the newest `count` matching results up to the entry id `until`, oldest first.

    since: seconds since 1970; results that were stored earlier are left out.
    """
    first = "-" if since is None else f"({id_before(since)}"
    size = min(count, NEWEST_AT_ONCE) if wanted == NO_FILTER else NEWEST_AT_ONCE
    entries = newest_first(redis, RESULTS_STREAM, first, until, size)
    found: list[Result] = []
    while len(found) < count and (page := [*islice(entries, size)]):
        rows = RowReader(redis).parse([text for entry in page for text in texts_of(*entry)])
        found += [row.result for row in rows if wanted.has(row)]
    return found[:count][::-1]


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
        self._redis, self._rows = redis, RowReader(redis)
        self._group, self._consumer = group, consumer
        self._wanted, self._claim_after = wanted, claim_after
        #: The group's place in the stream. For a new group, the start of the group.
        self._place = None if since is None else Place(id_before(since))
        self._claim_from = "0-0"
        self._claim_at = self._read_at = time.monotonic()
        #: Entries to acknowledge.
        self._to_acknowledge: list[str] = []
        #: Reports to return from the next `read` that succeeds.
        self._missed: list[Read] = []

    @property
    def stale(self) -> bool:
        return time.monotonic() - self._read_at > self._claim_after * STALE_FRACTION

    def read(self) -> list[Read] | None:
        self._send_acknowledgements()
        if time.monotonic() >= self._claim_at:
            self._missed += self._claim_entries()
        self._read_at = time.monotonic()
        pending, found, *place = self._call("fetch_group", GIVEN_AT_ONCE, self._group, self._consumer)
        entries = [(entry_id, flat and dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in found]
        if pending:
            self._missed += self._lost([entry_id for entry_id, fields in entries if fields is None])
        else:
            before = self._place = Place(*place)
            if entries:
                (first, fields), (last, latest) = entries[0], entries[-1]
                missed = missed_between(self._redis, before, first, _number(fields.get("number")))
                self._missed += [Read(missed)] if missed else []
                self._place = Place(last, _number(latest.get("number")))
        present = {entry_id: texts_of(entry_id, fields) for entry_id, fields in entries if fields is not None}
        rows = [row for row in self._rows.parse([*chain(*present.values())]) if self._wanted.has(row)]
        self._to_acknowledge += present.keys() - {row.entry for row in rows}
        reads, self._missed = self._missed, []
        reads += [Read(row.result, (row.entry,)) for row in rows]
        return reads if entries else reads or None

    def wait(self, seconds: float) -> None:
        # Not XREADGROUP: it would deliver entries without checking for trimmed ones.
        seconds = min(seconds, self._claim_at - time.monotonic())
        if seconds > 0:
            self._rows.wait(self._place or Place("$"), seconds)

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
        idle_ms, ttl_ms = math.ceil(self._claim_after * 1000), MEMBER_TTL_S * 1000
        self._claim_from, deleted = self._call(
            "claim", self._group, self._consumer, idle_ms, self._claim_from, GIVEN_AT_ONCE, ttl_ms
        )
        # Continue right after this batch if more entries can be taken over.
        pause = max(self._claim_after * CLAIM_FRACTION, MIN_CLAIM_INTERVAL_S) if self._claim_from == "0-0" else 0.0
        self._claim_at = time.monotonic() + pause
        return self._lost(deleted)

    def _lost(self, ids: Sequence[str]) -> list[Read]:
        """Report pending entries that were trimmed, and acknowledge those that were purged."""
        oldest: Any = ids and counter(self._redis, "trimmed") and self._redis.xrange(RESULTS_STREAM, count=1)
        lost = [entry_id for entry_id in ids if oldest and order(entry_id) < order(oldest[0][0])]
        self._to_acknowledge.extend(set(ids).difference(lost))
        return [Read(Missed(len(lost), seconds_of(lost[0]), seconds_of(lost[-1])), tuple(lost))] if lost else []

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
            self._redis.xgroup_create(RESULTS_STREAM, self._group, mkstream=True, **start)
        except ResponseError as fault:
            if "BUSYGROUP" not in str(fault):  # another member created it first
                raise
        return call(self._redis, name, *args)


def end_of(redis: Redis) -> Place:
    """Return the end of the stream."""
    latest: Any = redis.xrevrange(RESULTS_STREAM, count=1)
    return Place(latest[0][0] if latest else "0-0", counter(redis, "stored"))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


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
    if wanted.subreddit is not None and not subreddit_name(wanted.subreddit):
        raise UserError(f"{printable(wanted.subreddit)!r:.80} is not a subreddit's name; write python, or r/python.")
    if wanted.min_score is not None and not _is_finite(wanted.min_score):
        raise UserError(f"min_score must be a finite number, not {wanted.min_score!r:.80}.")
    if since is not None and not (_is_finite(since) and 0 <= since < MAX_UNIX_TIME):
        raise UserError(f"since must be a time before the year 10000, not {since!r}.")
    if group is None:
        if consumer is not None:
            raise UserError("consumer requires a group. Name the group as well, or leave out the consumer.")
        return Follower(redis, wanted, since, history)
    if not (_is_finite(claim_after) and 0 < claim_after < MAX_UNIX_TIME):
        raise UserError(f"claim_after must be a positive number of seconds, not {claim_after!r}.")
    if consumer is None:
        consumer = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{socket.gethostname():.48}-{os.getpid()}")
    for what, name in (("group", group), ("consumer", consumer)):
        if not READER_NAME.fullmatch(name):
            raise UserError(
                f"'{printable(name):.80}' is not a valid {what} name. Use 1 to 64 letters, digits, or any of - _ . : @"
            )
    return GroupReader(redis, group, consumer, wanted, since, claim_after)


def _is_finite(value: object) -> bool:
    """Return whether a value is a finite number. NaN would match no result, and a group would acknowledge all."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def batches(reader: Reader, follow: bool = True, wait: float = WAIT_S) -> Iterator[list[Read]]:
    """Yield batches of items as they arrive; an empty list at least every `wait` seconds.

    Retries for as long as Redis is unreachable, or rejects the writes of a group. Without `follow`, stops at the end of
    the stream. The caller acknowledges. Raises redis.exceptions.RedisError if the first attempt fails, or if Redis will
    never accept a command.
    """
    answered, failures = False, 0
    while True:
        try:
            batch = reader.read()
            if batch is None and follow:
                reader.wait(wait)
        except RedisError as fault:
            if not answered or not is_temporary(fault):
                raise
            if not failures:
                what = "rejects writes" if rejects_writes(fault) else "is unreachable"
                logger.warning("Redis %s (%s); retrying until it answers", what, clause(fault))
            time.sleep(RECONNECT_DELAYS_S[min(failures, len(RECONNECT_DELAYS_S) - 1)])
            failures += 1
            continue
        if failures:
            logger.warning("Redis answers again; continuing at the same position")
        answered, failures = True, 0
        if batch is None and not follow:
            return
        yield batch or []


def items(reader: Reader, follow: bool = True) -> Iterator[Result | Missed]:
    """Yield single items, each acknowledged when the next one is requested. Otherwise like `batches`."""
    for batch in batches(reader, follow):
        for item, ids in batch:
            yield item
            reader.acknowledge(ids)
            if reader.stale and isinstance(item, Result):
                break  # the rest is still pending, or was taken over; the next `read` decides


def results(
    redis_url: str | None = None,
    *,
    group: str | None = None,
    consumer: str | None = None,
    follow: bool = True,
    label: str | None = None,
    min_score: float | None = None,
    subreddit: str | None = None,
    run: str | None = None,
    since: float | datetime | None = None,
    claim_after: float = 60.0,
) -> Generator[Result | Missed]:
    """Yield classification results from Redis as they arrive.

    The generator connects when the first item is requested. After a lost connection it reconnects and continues at the
    same place.

    Args:
        redis_url: URL of Redis, such as `redis://:password@host:6379/0`. Default: FEEDMILL_REDIS_URL, else the running
            `feedmill up`, else localhost.
        group: Name of a consumer group. The readers of a group share its results, and the group continues where it
            stopped. Each result is delivered at least once; requesting the next item acknowledges it.
        consumer: Name of this reader, unique in the group. Default: host name and process ID.
        follow: Wait for new results. With False, stop when no result is left.
        label: Yield only results with this best label, spelled exactly.
        min_score: Yield only results whose best label has at least this score.
        subreddit: Yield only posts of this subreddit, in upper or lower case, with or without `r/`.
        run: Yield only posts of this run.
        since: Start at this time: a datetime (UTC if it has no zone), or seconds since 1970; 0 starts at the oldest
            result in the stream. Default: now, or 0 with `follow=False` and no group. An existing group ignores it.
        claim_after: Seconds after which this reader takes over results that another reader of the group received and
            has not acknowledged. Must exceed the time that one result takes to process.

    Yields:
        A Result for each classification: `result.post` and `result.classification`. A Missed where results were
        trimmed from the stream before this reader reached them.

    Raises:
        feedmill.UserError: At the call, for an invalid argument or setting. At the first item, if Redis cannot be
            reached or refuses the connection, or has no such run and `follow` is False. Later, only if Redis refuses a
            command.

    Example:
        import feedmill

        for item in feedmill.results(group="archive", since=0, follow=False):
            if isinstance(item, feedmill.Missed):
                print("missed", item.count or "some", "results")
            else:
                found = item.classification
                print(item.post.id, found.label, found.scores[found.label])
    """
    settings = load_arguments(redis_url=redis_url)
    if since is None and not follow and group is None:
        since = 0.0
    if isinstance(since, datetime):
        since = in_utc(since)
    run = None if run is None else parse_run(run)
    redis = connect(settings)
    wanted = ResultFilter(label, min_score, subreddit, run)
    reader = open_reader(redis, group, consumer, wanted, since, claim_after=claim_after)

    def found() -> Generator[Result | Missed]:
        with closing(redis), user_errors(settings):
            if not follow and run is not None:
                check_run(redis, run)
            yield from items(reader, follow)

    return found()
