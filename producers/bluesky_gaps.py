"""Fill Bluesky's gaps from the archive of a Jetstream server.

A gap is read block by block, and the progress is stored with it. A post that was deleted after the
gap is not in the live stream's past, and may still be in the archive: `needed_later` keeps its
deletion until the gap is filled.
"""

import logging
import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

from redis import Redis

from feedmill.producers.bluesky import time_of_post
from feedmill.producers.dag_cbor import decode
from feedmill.producers.jetstream import MAX_EVENT_BYTES
from feedmill.producers.jetstream_archive import (
    ArchivedEvent,
    JetstreamArchive,
    Segment,
)
from feedmill.producers.live.rechecks import author_of
from feedmill.producers.live.source import (
    Clock,
    Event,
    RequestFailed,
    SourceFailed,
)
from feedmill.producers.live.state import Gap, Gaps
from feedmill.producers.push import known_ids
from feedmill.shared.keys import LIVE_AUTHORS, LIVE_DELETED, LIVE_EDITED

logger = logging.getLogger(__name__)

#: Name of the source.
SOURCE = "bluesky"
#: Seconds between checks for open gaps, and after a failure.
POLL_INTERVAL_S = 60.0
#: Seconds around a gap that are read, too: servers see an event at different times.
MARGIN_S = 60
#: Seconds around a gap within which a deleted post may have been written: its key has the time of
#: its author's clock.
WRITTEN_MARGIN_S = 3600.0
#: Events of a block, by default. After deletions, it has fewer.
EVENTS_PER_BLOCK = 4096
#: Maximum pages of segments, and segments of one gap, of about 256 MiB each.
MAX_PAGES = 1000
MAX_SEGMENTS = 10_000
#: Kinds of archived events, and the operations of those that change a record.
OPERATIONS = {1: "create", 2: "update", 3: "delete", 7: "create"}
DELETE = 3
ACCOUNT = 5
#: Maximum number of edits to remember while gaps are open, and the seconds for which they are.
MAX_EDITS = 100_000
EDITS_TTL_S = 30 * 86_400
#: Reasons for keeping a gap.
BEHIND = "the archive has not reached the end of the gap yet"
TOO_YOUNG = "the archive does not have the beginning of the gap"
ENDLESS = "the archive's list of segments is too long, or repeats itself"
MISSING = "the archive lists a segment that it does not have"

#: Value that `_fill` yields after each request.
STEP = object()


class BlueskyGapFiller:
    """Fill the gaps in turn, oldest first, one request per step.

    parse: reads an event in the form of the live stream. collection: of the records to read.
    """

    def __init__(
        self,
        archive: JetstreamArchive,
        redis: Redis,
        parse: Callable[[dict[str, Any]], Event],
        collection: str,
        clock: Clock,
    ) -> None:
        self._archive = archive
        self._redis = redis
        self._gaps = Gaps(redis)
        self._parse = parse
        self._collection = collection.encode()
        self._clock = clock
        #: Time of the next step (monotonic seconds), and the gap that is being read.
        self._due = clock.monotonic()
        self._work: Generator[Any] | None = None
        self._gap: Gap | None = None
        #: Beginning of the gap that was tried last, in seconds since 1970.
        self._tried_since = -math.inf
        #: Times of the live stream's edits since the latest step, by post id.
        self._edits: dict[str, float] = {}
        #: Filled gaps since the start.
        self.filled = 0

    def needed_later(self, ids: Collection[str]) -> set[str]:
        """Return those deleted posts that may have been written in an open gap."""
        if not ids:
            return set()
        gaps = self._gaps.open(SOURCE)
        if not gaps:
            return set()
        return {post_id for post_id in ids if _may_be_in(post_id, gaps)}

    def note_edit(self, post_id: str, at: float) -> None:
        """Remember that the live stream had an edit: the archive may have an older text.

        at: time of the edit, in seconds since 1970.
        """
        self._edits[post_id] = at

    def _store_edits(self) -> None:
        if not self._edits:
            return
        if self._gaps.open(SOURCE):
            redis: Any = self._redis
            key = LIVE_EDITED + SOURCE
            redis.zadd(key, self._edits, gt=True)
            redis.zremrangebyrank(key, 0, -1 - MAX_EDITS)
            redis.expire(key, EDITS_TTL_S)
        self._edits.clear()

    def step(self) -> Iterator[Any]:
        """Make the next request and yield its events, if it is time."""
        self._store_edits()
        now = self._clock.monotonic()
        if now < self._due or self._archive.budget.pending():
            return
        work = self._work or self._begin()
        # Until the step has ended, a failure of the daemon begins the gap where it was stored.
        self._work = None
        if work is None:
            self._due = now + POLL_INTERVAL_S
            return
        try:
            event = next(work)
            while event is not STEP:
                yield event
                event = next(work)
            self._work = work
        except StopIteration:  # the gap is filled
            return
        except SourceFailed as fault:
            self._due = now + max(POLL_INTERVAL_S, fault.retry_after)
            self._note(str(fault))

    def _begin(self) -> Generator[Any] | None:
        gaps = self._gaps.open(SOURCE)
        if not gaps:
            return None
        # In turn: one that always fails does not hold up the others.
        later_gaps = [gap for gap in gaps if gap.since > self._tried_since]
        self._gap = (later_gaps or gaps)[0]
        self._tried_since = self._gap.since
        return self._fill(self._gap)

    def _note(self, problem: str) -> None:
        gap = self._gap
        if gap is None or gap.problem == problem:
            return
        logger.warning(
            "cannot fill the gap in %s: %s; retrying later", gap.origin, problem
        )
        self._gap = gap._replace(problem=problem)
        self._gaps.record(self._gap)

    def _fill(self, gap: Gap) -> Generator[Any]:
        """Yield the gap's events, None when they must be sent, and STEP after each request."""
        begin = gap.reached or gap.since
        begin_us = _microseconds(begin - MARGIN_S)
        end_us = _microseconds(gap.until + MARGIN_S)
        segments = yield from self._segments(begin, begin_us, end_us)
        for segment in segments:
            yield from self._read(segment, begin_us, end_us)
        gap = self._gap or gap
        self._gap = gap._replace(
            filled=self._clock.time(), reached=gap.until, problem=""
        )
        self._gaps.record(self._gap)
        self.filled += 1
        logger.info(
            "filled the gap in %s with %d posts from the archive", gap.origin, gap.found
        )

    def _segments(
        self, begin: float, begin_us: int, end_us: int
    ) -> Generator[Any, Any, list[Segment]]:
        """Return the segments of a period, oldest first. Yield STEP after each request.

        begin: time that the archive must have, in seconds since 1970.
        """
        segments: list[Segment] = []
        newest_us = 0
        cursor = ""
        cursors: set[str] = set()
        while newest_us < end_us:
            cursors.add(cursor)
            page = self._archive.segments(cursor)
            yield STEP
            for segment in page.segments:
                newest_us = max(newest_us, segment.end_us)
                if segment.begin_us <= end_us and segment.end_us >= begin_us:
                    segments.append(segment)
            if not page.cursor:
                break
            cursor = page.cursor
            is_repeated = cursor in cursors
            is_too_long = len(cursors) >= MAX_PAGES or len(segments) > MAX_SEGMENTS
            if is_repeated or is_too_long:
                raise RequestFailed(ENDLESS)
        if newest_us < end_us:
            raise RequestFailed(BEHIND)
        segments.sort(key=lambda segment: segment.begin_us)
        latest_us = _microseconds(begin + MARGIN_S)
        if not segments or segments[0].begin_us > latest_us:
            raise RequestFailed(TOO_YOUNG)
        return segments

    def _read(self, segment: Segment, begin_us: int, end_us: int) -> Generator[Any]:
        """Yield the events of a segment's blocks in the gap."""
        index = 0
        if segment.begin_us < begin_us:
            index = yield from self._first_block(segment, begin_us)
        while True:
            events = self._archive.block(segment.name, index)
            if events is None:
                is_missing = index == 0 and segment.events > 0
                if is_missing:
                    raise RequestFailed(MISSING)
                return
            wanted = [event for event in events if begin_us <= event.at_us <= end_us]
            count = yield from self._send(wanted)
            yield None
            self._store(wanted, count)
            yield STEP
            if not _ends_before(events, end_us + 1):
                return
            index += 1

    def _first_block(self, segment: Segment, begin_us: int) -> Generator[Any, Any, int]:
        """Return the index of a block at or before the first event in the gap."""
        first = 0
        after = segment.events // EVENTS_PER_BLOCK + 1
        while first < after:
            middle = (first + after) // 2
            events = self._archive.block(segment.name, middle)
            yield STEP
            is_earlier = events is not None and _ends_before(events, begin_us)
            if is_earlier:
                first = middle + 1
            else:
                after = middle
        return first

    def _store(self, events: Sequence[ArchivedEvent], count: int) -> None:
        """Store the progress, with the posts that were sent."""
        gap = self._gap
        if gap is None or not events:
            return
        last = events[-1]
        reached = min(gap.until, last.at_us / 1_000_000)
        self._gap = gap._replace(
            reached=max(gap.reached, reached),
            found=gap.found + count,
            problem="",
        )
        self._gaps.record(self._gap)

    def _send(self, rows: Sequence[ArchivedEvent]) -> Generator[Any, Any, int]:
        """Yield the events of these rows, without posts that were sent. Return the count of
        posts.
        """
        events: list[Event] = []
        unreadable = 0
        for row in rows:
            is_operation = row.kind in OPERATIONS
            is_record = is_operation and row.collection == self._collection
            if not is_record and row.kind != ACCOUNT:
                continue
            # Before decoding: values need up to 64 times the memory of their bytes.
            if len(row.payload) > MAX_EVENT_BYTES:
                unreadable += 1
                continue
            try:
                data = _live_form(row)
                event = self._parse(data)
            except Exception:  # of any kind, because anyone can write a record
                unreadable += 1
                continue
            without_position = event._replace(cursor=None)
            events.append(without_position)
        if unreadable:
            logger.warning("skipped %d unreadable events of the archive", unreadable)
        ids: list[str] = []
        for event in events:
            if event.post is not None:
                fields = dict(event.post)
                post_id = str(fields["id"])
                ids.append(post_id)
        sent_ids = set(known_ids(self._redis, ids))
        edit_times = self._times_of(LIVE_EDITED, ids)
        authors = [author_of(post_id) for post_id in ids]
        deletion_times = self._times_of(LIVE_AUTHORS, authors)
        deleted_ids = self._deleted(ids)
        count = 0
        for event in events:
            if event.post is not None:
                fields = dict(event.post)
                post_id = str(fields["id"])
                is_edit = fields["edited_utc"] is not None
                if post_id in sent_ids and not is_edit:
                    continue
                # Sent now, a deleted post would count as written after its deletion, and an older
                # text as the newest.
                deleted_at = deletion_times.get(author_of(post_id), 0.0)
                changed_at = max(deleted_at, edit_times.get(post_id, 0.0))
                if post_id in deleted_ids or event.at < changed_at:
                    continue
                count += 1
            yield event
        return count

    def _deleted(self, ids: Sequence[str]) -> set[str]:
        """Return the posts that the live stream deleted since."""
        if not ids:
            return set()
        redis: Any = self._redis
        are_deleted = redis.smismember(LIVE_DELETED + SOURCE, ids)
        deleted: set[str] = set()
        for post_id, is_deleted in zip(ids, are_deleted, strict=True):
            if is_deleted:
                deleted.add(post_id)
        return deleted

    def _times_of(self, key: str, members: Sequence[str]) -> dict[str, float]:
        """Return the times of posts or accounts in a set of the source, in seconds since 1970."""
        if not members:
            return {}
        redis: Any = self._redis
        scores = redis.zmscore(key + SOURCE, members)
        times = dict(zip(members, scores, strict=True))
        return {member: at for member, at in times.items() if at is not None}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _ends_before(events: Sequence[ArchivedEvent], at_us: int) -> bool:
    """Return whether all events of a block are before this time."""
    if not events:
        return True
    last = events[-1]
    return last.at_us < at_us


def _live_form(row: ArchivedEvent) -> dict[str, Any]:
    """Return an archived event as the live stream has it."""
    did = row.did.decode()
    if row.kind == ACCOUNT:
        account = decode(row.payload)
        return {
            "time_us": row.at_us,
            "did": did,
            "kind": "account",
            "account": account,
        }
    commit: dict[str, Any] = {
        "operation": OPERATIONS[row.kind],
        "collection": row.collection.decode(),
        "rkey": row.rkey.decode(),
    }
    if row.kind != DELETE:
        commit["record"] = decode(row.payload)
    return {
        "time_us": row.at_us,
        "did": did,
        "kind": "commit",
        "commit": commit,
    }


def _may_be_in(post_id: str, gaps: Sequence[Gap]) -> bool:
    """Return whether a post may have been written in one of these gaps."""
    written = time_of_post(post_id)
    if written is None:
        return True
    for gap in gaps:
        begin = gap.since - WRITTEN_MARGIN_S
        end = gap.until + WRITTEN_MARGIN_S
        if begin <= written <= end:
            return True
    return False
