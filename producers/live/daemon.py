"""The daemon that follows a source: read a batch of events, send its posts, store the position.

The position is stored last. A daemon that is killed reads the events after it again, and skips the
posts that it has sent (producers/push.py). After any failure, the daemon drops the unfinished
batch and resumes from the stored position. While the queue is full it does not read, and the
source keeps the events.

Events are input from strangers. One that fails twice, while it is parsed or sent, becomes a dead
letter. One from the future is sent, but is no position: reading from there would leave out all
events until then.

A source's clock, by which it numbers its events, may go back. Then the position follows it
(progress.py).
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from feedmill.producers.live.progress import SourceProgress
from feedmill.producers.live.rechecks import Purges, Rechecks, author_of
from feedmill.producers.live.source import (
    MAX_WAIT_S,
    Clock,
    Event,
    Pause,
    RequestFailed,
    Source,
    SourceFailed,
)
from feedmill.producers.live.state import MAX_CURSOR, Gap, Gaps, LiveState, Position
from feedmill.producers.push import FULL_QUEUE_POLL_S, Pusher
from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import PostRefused, UserError, clause, printable
from feedmill.shared.keys import LIVE_POSITION
from feedmill.shared.messages import MAX_DEAD_POST_BYTES, DeadLetter, Post, digest
from feedmill.shared.metrics import Metric, ProcessMetrics, Values
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Maximum posts per batch, and maximum seconds until a batch is sent.
MAX_BATCH_POSTS = 256
MAX_BATCH_S = 1.0
#: Maximum events per batch: deletions and filtered events must not delay the position.
MAX_BATCH_EVENTS = 4_096
#: Seconds after which events that could not be read are read again.
REREAD_S = 5.0
#: Maximum failures of events to remember.
MAX_FAILURES_SEEN = 10_000
#: Limit of the characters of a deleted post's or account's id.
MAX_DELETED = 4096
#: Seconds between updates of the status for `feedmill status`.
STATUS_INTERVAL_S = 10.0
#: Pauses after consecutive failures.
SOURCE_BACKOFF = Backoff(first_s=2.0, max_s=300.0, jitter=True)
REDIS_BACKOFF = Backoff(first_s=2.0, max_s=30.0, jitter=True)


class LiveDaemon:
    """Read and send one batch per `step`.

    Not thread-safe. Close it to close the source's connection.
    """

    def __init__(
        self,
        source: Source,
        redis: Redis,
        pusher: Pusher,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._source = source
        self._pusher = pusher
        self._posts_per_message = settings.posts_per_message
        self._redis_address = settings.redis_address
        self._clock = clock
        self._state = LiveState(redis, source.name)
        self._progress = SourceProgress(source, redis, self._state, clock)
        self._gaps = Gaps(redis)
        self._store = ResultsStore(redis, settings)
        self._purges = Purges(redis, settings, source.name, clock, source.written_at)
        self._rechecks = Rechecks(source, redis, settings, pusher, clock)
        #: Events of the open connection; None while it is closed.
        self._events: Generator[Any] | None = None
        #: The position from which the connection was opened, until its first event has arrived;
        #: then None.
        self._resumed: Position | None = None
        #: Position of the event that was read last from the open connection; -1 before the first.
        self._reached = -1
        #: Time at which events that could not be read are read again (monotonic seconds); infinite
        #: if there are none. Until then others are sent, and the position stays.
        self._reread_at = math.inf
        #: Kinds of failures of events, with the event's position or digest: sources and the
        #: overlap repeat events.
        self._failures_seen: set[tuple[str, int | str]] = set()
        self._failures = 0
        now = clock.monotonic()
        #: End of the pause after a failure, end of the source's Pause, and time of the next status
        #: update (monotonic seconds).
        self._due = now
        self._rests_until = now
        self._status_due = now
        #: Counts since the start: events, filtered and refused posts, dead letters, connections,
        #: gaps; and failures by kind. `SourceProgress` has others.
        self.read = 0
        self.filtered = 0
        self.refused = 0
        self.unreadable = 0
        self.connections = 0
        self.gaps = 0
        #: Open gaps in the list, those of earlier processes included, at the latest status update.
        self._gaps_recorded = 0
        self.faults: Counter[str] = Counter()
        #: Current failure of the source or of Redis, for display; "" if there is none.
        self.hindrance = ""

    def step(self) -> float:
        """Read and send one batch if it is time; return the seconds until the next one.

        Raises Stopped, and UserError for a failure that only the user can correct.
        """
        try:
            self._store_status()
            pause = self._due - self._clock.monotonic()
            if pause <= 0:
                pause = self._run()
        except SourceFailed as fault:
            pause = self._handle_failure(
                "source",
                f"{self._source.name}: {fault}",
                SOURCE_BACKOFF,
                fault.retry_after,
            )
        except RedisError as error:
            pause = self._handle_failure(
                "redis",
                f"Redis at {self._redis_address} failed ({clause(error)})",
                REDIS_BACKOFF,
            )
        except UserError:
            raise
        except Exception:
            logger.exception("unexpected error; resuming from the stored position")
            pause = self._handle_failure(
                "unexpected", "unexpected error, see the log", SOURCE_BACKOFF
            )
        return pause

    def close(self) -> None:
        """Close the source's connection. The next step opens it again."""
        events = self._events
        self._events = None
        if events is not None:
            events.close()

    def report_end(self) -> None:
        """Record that the daemon stops on request. Raises redis.exceptions.RedisError."""
        self._state.store_status(self.status(), ended=True)

    def _run(self) -> float:
        self._purges.run_if_due()
        room = self._pusher.room()
        if not room:
            return FULL_QUEUE_POLL_S
        try:
            self._rechecks.run_if_due()
        except RequestFailed as fault:
            self.faults[type(fault).__name__] += 1
            logger.warning(
                "cannot recheck posts of %s (%s); retrying later",
                self._source.name,
                fault,
            )
        if self._clock.monotonic() >= self._rests_until:
            posts_with_room = room * self._posts_per_message
            batch, failure = self._read(min(MAX_BATCH_POSTS, posts_with_room))
            if batch:
                self._send(batch)
            self._follow_clock()
            if batch:
                if self.hindrance:
                    logger.info("%s can be read again", self._source.name)
                self._failures = 0
                self.hindrance = ""
            if failure:
                raise failure
        rest_s = max(0.0, self._rests_until - self._clock.monotonic())
        return min(rest_s, self._rechecks.pending())

    def _handle_failure(
        self, kind: str, reason: str, backoff: Backoff, at_least: float = 0.0
    ) -> float:
        """Close the connection after a failure, and return the seconds until the next attempt."""
        self.faults[kind] += 1
        if not self.hindrance and kind != "redis":
            # Report the first failure at once.
            self._status_due = self._clock.monotonic()
        self.close()
        pause = backoff.pause_s(self._failures)
        pause = max(pause, min(at_least, MAX_WAIT_S))
        self._failures += 1
        self._due = self._clock.monotonic() + pause
        hindrance = printable(reason)
        is_repeated = kind == "redis" and self.hindrance == hindrance
        self.hindrance = hindrance
        logger.log(
            logging.DEBUG if is_repeated else logging.WARNING,
            "%s; retrying in %.0f s",
            self.hindrance,
            pause,
        )
        return pause

    # Reading.

    def _read(self, most: int) -> tuple[list[Event], SourceFailed | None]:
        """Read the events of the next second, with at most this many posts; return them, and the
        failure that ended them.

        They are sent nevertheless: else a source that often fails would never get beyond them.
        """
        if self._clock.monotonic() >= self._reread_at:
            self._reread_at = math.inf
            raise SourceFailed("some events could not be read; reading them again")
        events = self._events
        if events is None:
            events = self._open()
        batch: list[Event] = []
        posts = 0
        until = self._clock.monotonic() + MAX_BATCH_S
        while (
            posts < most
            and len(batch) < MAX_BATCH_EVENTS
            and self._clock.monotonic() < until
        ):
            try:
                event = self._next(events)
            except StopIteration:
                return batch, SourceFailed("the stream of events ended")
            except SourceFailed as failure:
                return batch, failure
            if not isinstance(event, Event):
                self._progress.idle()
                rest_s = 0.0 if event is None else event.seconds
                self._rests_until = self._clock.monotonic() + rest_s
                break
            self._note_gap(event)
            if self._progress.note(event):
                batch.append(event)
                if event.post is not None:
                    posts += 1
        return batch, None

    def _next(self, events: Generator[Any]) -> Event | Pause | None:
        """Read up to the next event that can be read, and return it; None or a pause if there is
        none now.

        Raises StopIteration and SourceFailed.
        """
        while True:
            raw = next(events)
            if raw is None or isinstance(raw, Pause):
                return raw
            if isinstance(raw, Gap):
                self._record(raw)
                continue
            try:
                event = _check(self._source.parse(raw))
            except Exception as error:
                is_scheduled = self._schedule_rereading(raw)
                if not is_scheduled:
                    self._set_aside(raw, error)
            else:
                if event.cursor:
                    self._reached = event.cursor
                return event

    def _open(self) -> Generator[Any]:
        stored = self._progress.open()
        if stored and self._progress.is_ahead(stored.at):
            minutes = self._progress.note_ahead(stored) / 60
            raise SourceFailed(
                f"the stored position is {minutes:.0f} minutes ahead of this machine's clock: "
                f"correct the clock, or delete the key {LIVE_POSITION}{self._source.name} to skip "
                "events"
            )
        self._resumed = None if self._progress.has_moved_back else stored
        cursor = None
        if stored:
            cursor = stored.cursor - self._source.overlap
        self._events = _generate(self._source, cursor)
        self._reached = -1
        self._reread_at = math.inf
        self.connections += 1
        return self._events

    def _note_gap(self, event: Event) -> None:
        """Record a gap if a connection's first event is later than the stored position, whose
        event must come again. See `Source.gap_tolerance`.
        """
        if event.cursor is None or self._progress.is_ahead(event.at):
            return
        before = self._resumed
        self._resumed = None
        if before is None or event.cursor - before.cursor <= self._source.gap_tolerance:
            return
        gap = Gap(
            source=self._source.name,
            subreddit="",
            since=before.at,
            until=event.at,
            noted=self._clock.time(),
        )
        self._record(gap)

    def _follow_clock(self) -> None:
        """Follow the source's clock if it has gone back.

        Raises SourceFailed if reading must begin again.
        """
        gap = self._progress.follow()
        if gap is not None:
            self._record(gap)
        if self._progress.is_rewound:
            raise SourceFailed("its clock went back; reading again what it left out")

    def _record(self, gap: Gap) -> None:
        if self._gaps.record(gap):
            self.gaps += 1
            logger.error(
                "gap in %s: posts of %.0f minutes may be missing, because the source no longer "
                "lists them; `feedmill ingest gaps` shows it",
                gap.origin,
                (gap.until - gap.since) / 60,
            )

    # Sending.

    def _send(self, batch: list[Event]) -> None:
        """Send a batch.

        If that fails for another reason than Redis, send its events one by one to find the
        culprit.
        """
        try:
            self._deliver(batch)
        except RedisError:
            raise
        except Exception as error:
            if len(batch) > 1:
                for event in batch:
                    self._send([event])
                return
            (event,) = batch
            text = _text_of(event._asdict())
            place = digest(text) if event.cursor is None else event.cursor
            is_new = self._note_failure("unsent", place)
            if is_new:
                raise
            self._set_aside(text, error)
            self._advance(batch)

    def _deliver(self, batch: list[Event]) -> None:
        posts: dict[str, Post] = {}
        places: dict[str, Position] = {}
        deleted = set[str]()
        removed = set[str]()
        authors: dict[str, float] = {}
        for event in batch:
            post = None if event.post is None else self._parse(event.post)
            if post is not None:
                posts[post.id] = post
                deleted.discard(post.id)
                authors.pop(author_of(post.id), None)
                if event.cursor is not None:
                    places[post.id] = Position(event.cursor, event.at)
            if event.deleted is not None:
                deleted.add(event.deleted)
                posts.pop(event.deleted, None)
            if event.removed is not None:
                removed.add(event.removed)
                posts.pop(event.removed, None)
            if event.deleted_author is not None:
                authors[event.deleted_author] = self._deleted_at(event)
        new = self._progress.new_places(batch, places)
        self._rechecks.schedule(posts.values(), removed)
        self._pusher.push(posts.values())
        needed_later = self._source.needed_later(deleted)
        self._purges.add(deleted, authors, posts, needed_later)
        self._advance(batch, new)
        filtered = [event for event in batch if event.filtered]
        self.filtered += len(filtered)

    def _deleted_at(self, event: Event) -> float:
        """Return when an account was deleted, in seconds since 1970: now, unless the event is from
        the source's past.
        """
        now = self._clock.time()
        if event.cursor is None:
            return min(now, event.at)
        return now

    def _advance(self, batch: list[Event], new: Sequence[Position] = ()) -> None:
        """Store the position after a batch, and count its events. new: see
        `SourceProgress.new_places`.
        """
        may_store = math.isinf(self._reread_at)
        self._progress.advance(batch, new, may_store)
        self.read += len(batch)

    def _schedule_rereading(self, raw: Any) -> bool:
        """Schedule to read an event again, in case it was cut. Return false if that was tried."""
        # Both are noted: the next connection may repeat the event at another place, or cut it
        # elsewhere.
        is_new_place = self._note_failure("unreadable after", self._reached)
        is_new_text = self._note_failure("unreadable", digest(_text_of(raw)))
        if not (is_new_place and is_new_text):
            return False
        reread_at = self._clock.monotonic() + REREAD_S
        self._reread_at = min(self._reread_at, reread_at)
        return True

    def _note_failure(self, kind: str, place: int | str) -> bool:
        """Remember a failure, and return whether this is its first time."""
        if len(self._failures_seen) >= MAX_FAILURES_SEEN:
            self._failures_seen.clear()
        failure = (kind, place)
        is_new = failure not in self._failures_seen
        self._failures_seen.add(failure)
        return is_new

    def _set_aside(self, raw: Any, error: Exception) -> None:
        """Keep an event that failed twice as a dead letter."""
        text = _text_of(raw)
        is_new = self._note_failure("dead letter", digest(text))
        if not is_new:
            return
        reason = (
            f"an event of {self._source.name} cannot be read ({type(error).__name__})"
        )
        letter = DeadLetter(
            id=None,
            reason=reason,
            post=None,
            options=None,
            message=None,
            worker=f"ingest {self._source.name}",
            failed_at=self._clock.time(),
            payload=text[:MAX_DEAD_POST_BYTES],
        )
        self._store.write([], [letter])
        self.unreadable += 1
        logger.warning("%s: `feedmill dead list` shows it", reason)

    def _parse(self, fields: Any) -> Post | None:
        if isinstance(fields, Post):
            return fields
        try:
            return Post.parse(dict(fields))
        except PostRefused as refusal:
            # Sources repeat posts.
            is_new = self._note_failure("refused", digest(_text_of(fields)))
            if is_new:
                self.refused += 1
                logger.warning("skipped a post of %s: %s", self._source.name, refusal)
            return None

    # Status.

    def _store_status(self) -> None:
        now = self._clock.monotonic()
        if now < self._status_due:
            return
        self._status_due = now + STATUS_INTERVAL_S
        open_gaps = self._gaps.open(self._source.name)
        self._gaps_recorded = len(open_gaps)
        self._state.store_status(self.status())

    def status(self) -> dict[str, Any]:
        """Return counters and state, for `feedmill status` and metrics. delay: age of the newest
        event in seconds.
        """
        of_source = self._source.status()
        faults = self.faults + Counter(of_source.get("faults"))
        position = self._progress.position
        delay = None
        if position is not None:
            delay = max(0.0, self._clock.time() - position.at)
        return {
            "source": self._source.name,
            "read": self.read,
            "sent": self._pusher.sent,
            "skipped": self._pusher.skipped + self._pusher.gone,
            "filtered": self.filtered,
            "refused": self.refused,
            "ahead": self._progress.ahead,
            "earlier": self._progress.earlier,
            "steps_back": self._progress.steps_back,
            "clock": self._progress.note_for_display(),
            "unreadable": self.unreadable,
            "purged": self._purges.purged + self._rechecks.purged,
            "rechecked": self._rechecks.rechecked,
            "returned": self._rechecks.returned,
            "gaps": self.gaps,
            "gaps_recorded": self._gaps_recorded,
            "connections": self.connections,
            "paused": self._pusher.is_closed,
            "delay": delay,
            "hindrance": self.hindrance,
            **of_source,
            "faults": dict(faults),
        }


def _generate(source: Source, cursor: int | None) -> Generator[Any]:
    """Return the source's events as a generator, which can be closed."""
    yield from source.events(cursor)


def _text_of(raw: Any) -> str:
    """Return an event as text."""
    if isinstance(raw, str):
        return raw
    return json.dumps(raw, default=repr)


def _check(event: Event) -> Event:
    """Return the event. Raises ValueError for a value that Redis cannot store."""
    is_possible = event.cursor is None or 0 <= event.cursor < MAX_CURSOR
    if not is_possible or not math.isfinite(event.at):
        raise ValueError("the position or the time is out of range")
    for text in (event.deleted, event.removed, event.deleted_author):
        # a lone surrogate cannot be encoded
        if text is not None and len(text.encode()) > MAX_DELETED:
            raise ValueError("the id of what was deleted is too long")
    return event


#: Seconds without a finished step after which the daemon counts as stuck. A step may wait for the
#: end of Reddit's ten-minute rate-limit window; its requests have timeouts.
STUCK_AFTER_S = 900.0

#: Metrics by key of `LiveDaemon.status`: name without prefix, and help text. Counters start with
#: the process.
FIGURES = {
    "read": (
        "events_total",
        "Events read from the source, including deletions and filtered posts.",
    ),
    "sent": ("posts_sent_total", "Posts sent to the queue."),
    "skipped": (
        "posts_skipped_total",
        "Posts skipped because they were sent before, or purged.",
    ),
    "filtered": ("posts_filtered_total", "Posts left out by the source's filters."),
    "refused": ("posts_refused_total", "Posts that cannot be classified."),
    "ahead": (
        "events_ahead_total",
        "Events from the future, which are sent but are no positions.",
    ),
    "earlier": (
        "events_earlier_total",
        "Events from before the position: repeated, late, or sent after the source's clock went "
        "back. Their posts are sent unless they were sent before.",
    ),
    "steps_back": (
        "clock_steps_back_total",
        "Times that the source's clock went back. The position follows it.",
    ),
    "unreadable": (
        "events_unreadable_total",
        "Events that could not be read or sent twice, now dead letters.",
    ),
    "purged": (
        "posts_purged_total",
        "Posts purged because they were deleted or removed at the source.",
    ),
    "rechecked": ("posts_rechecked_total", "Rechecks of sent posts."),
    "returned": (
        "posts_returned_total",
        "Purged posts that came back and were sent again.",
    ),
    "polls": (
        "polls_total",
        "Polls of a topic's subreddits for new posts. Only Reddit.",
    ),
    "requests": (
        "requests_total",
        "Requests to the source. Not Bluesky and Hacker News.",
    ),
    "gaps": ("gaps_total", "Periods whose posts could not be read."),
    "filled": (
        "gaps_filled_total",
        "Gaps filled from an archive. Only Reddit and Bluesky.",
    ),
    "connections": ("connections_total", "Connections opened to the source."),
    "switches": (
        "server_switches_total",
        "Times that the daemon moved to another server after a failure. Only Bluesky.",
    ),
    "gaps_recorded": (
        "gaps_recorded",
        "Open gaps listed by `feedmill ingest gaps`, until they are filled or cleared.",
    ),
    "subreddits": ("subreddits", "Subreddits being read. Only Reddit."),
    "failing": (
        "subreddits_failing",
        "Subreddits whose last read failed. Only Reddit.",
    ),
    "feeds": ("feeds", "Feeds being read. Only feeds."),
    "failing_feeds": ("feeds_failing", "Feeds whose last read failed. Only feeds."),
    "paused": ("paused", "1 while the queue is full, otherwise 0."),
    "hindrance": (
        "hindered",
        "1 while the source or Redis is unavailable, otherwise 0.",
    ),
    "delay": (
        "delay_seconds",
        "Age of the newest event that was processed; absent before the first, and for Reddit.",
    ),
    "budget": (
        "budget_remaining_requests",
        (
            "Requests left in Reddit's rate-limit window, as reported by Reddit; absent once the "
            "window has ended."
        ),
    ),
    "faults": ("faults_total", "Failures of the source and of Redis."),
}
#: Labels of all metrics. Faults are also counted by kind.
METRICS = tuple(
    Metric(
        "counter" if name.endswith("_total") else "gauge",
        f"feedmill_live_{name}",
        text,
        ("source", "kind") if key == "faults" else ("source",),
    )
    for key, (name, text) in FIGURES.items()
)


class LiveMetrics(ProcessMetrics):
    """Metrics of a daemon's latest status."""

    metrics = METRICS

    def __init__(self, settings: Settings, source: str) -> None:
        super().__init__(settings)
        self._source = source
        #: Latest status. Replaced, never modified, because other threads read it.
        self._status: Mapping[str, Any] = {}
        self._turned = time.monotonic()

    def update(self, status: Mapping[str, Any]) -> None:
        """Store the daemon's status after a step."""
        self._status = status
        self._turned = time.monotonic()

    def values(self) -> Values:
        status = self._status
        values: Values = {}
        for key, (name, _) in FIGURES.items():
            if key in status:
                number = _as_number(status[key])
                values[f"feedmill_live_{name}"] = {self._source: number}
        if status:
            faults = status["faults"]
            values["feedmill_live_faults_total"] = {
                (self._source, kind): count for kind, count in faults.items()
            }
        return values

    def unhealthy(self) -> Sequence[str]:
        quiet = time.monotonic() - self._turned
        if quiet > STUCK_AFTER_S:
            return [f"the daemon has not finished a step for {quiet:.0f} s"]
        return []

    def unready(self) -> Sequence[str]:
        if not self._status.get("read"):
            return [
                self._status.get("hindrance") or "the daemon has not read anything yet"
            ]
        problems = self.unhealthy()
        if problems:
            return problems
        hindrance = self._status["hindrance"]
        if hindrance:
            return [hindrance]
        return super().unready()


def _as_number(value: Any) -> float | None:
    """Return a number as it is, the length of a list, and 1 for a text that is not empty."""
    if isinstance(value, list | dict):
        return len(value)
    if isinstance(value, str):
        return 1 if value else 0
    number: float | None = value
    return number
