"""The daemon that follows a live source: read a batch of events, send its posts, store the position.

The position is stored last. A daemon that is killed reads the events after it again, and skips the posts that it has
sent (producers/push.py). After any failure, the daemon drops the unfinished batch and resumes from the stored position.
While the queue is full it does not read, and the source keeps the events.
"""

import logging
from collections import Counter
from collections.abc import Generator
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis
from redis.backoff import EqualJitterBackoff
from redis.exceptions import RedisError

from producers.live.clock import Clock
from producers.live.purges import Purges, author_of
from producers.live.source import Event, Source, SourceFailed
from producers.live.state import LiveState, Position
from producers.push import FULL_QUEUE_POLL_S, Pusher
from shared.errors import PostRefused, clause, printable
from shared.messages import Post
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: Maximum posts per batch, and maximum seconds until a batch is sent.
MAX_BATCH_POSTS, MAX_BATCH_S = 256, 1.0
#: Maximum events per batch: deletions and filtered events must not delay the position.
MAX_BATCH_EVENTS = 4_096
#: Seconds between updates of the status for `feedmill status`.
STATUS_INTERVAL_S = 10.0
#: Pauses in seconds after consecutive failures. Integers: floats would overflow after 1,024 failures.
SOURCE_BACKOFF, REDIS_BACKOFF = EqualJitterBackoff(cap=300, base=2), EqualJitterBackoff(cap=30, base=2)


class LiveDaemon:
    """Read and send one batch per `step`. Not thread-safe. Close it to close the source's connection."""

    def __init__(self, source: Source, redis: Redis, pusher: Pusher, settings: Settings, clock: Clock) -> None:
        self._source = source
        self._pusher = pusher
        self._posts_per_message = settings.posts_per_message
        self._redis_address = settings.redis_address
        self._clock = clock
        self._state = LiveState(redis, source.name)
        self._purges = Purges(redis, settings, self._state, clock)
        #: Events of the open connection; None while it is closed.
        self._events: Generator[Event | None] | None = None
        #: The position from which the connection was opened, until its first event has arrived; then None.
        self._resumed: Position | None = None
        #: Position up to which everything is sent.
        self._position: Position | None = None
        #: Failure that ended the events of the latest batch, to be handled after it.
        self._failure: SourceFailed | None = None
        #: Events before this position are repetitions.
        self._floor = 0
        self._failures = 0
        #: Times of the next batch and of the next status update (monotonic seconds).
        self._due = self._status_due = clock.monotonic()
        #: Counts since the start: events, filtered and refused posts, connections, gaps; and failures by kind.
        self.read = self.filtered = self.refused = self.connections = self.gaps = 0
        #: Gaps in the list, those of earlier processes included, at the latest status update.
        self._gaps_recorded = 0
        self.faults: Counter[str] = Counter()
        #: Current failure of the source or of Redis, for display; "" if there is none.
        self.hindrance = ""

    def step(self) -> float:
        """Read and send one batch if it is time; return the seconds until the next one. Raises Stopped."""
        try:
            self._store_status()
            if (pause := self._due - self._clock.monotonic()) <= 0:
                pause = self._run()
        except SourceFailed as fault:
            pause = self._failed("source", f"{self._source.name}: {fault}", SOURCE_BACKOFF, fault.retry_after)
        except (RedisError, OperationalError) as error:
            pause = self._failed("redis", f"Redis at {self._redis_address} failed ({clause(error)})", REDIS_BACKOFF)
        except Exception:
            logger.exception("unexpected error; resuming from the stored position")
            pause = self._failed("unexpected", "unexpected error, see the log", SOURCE_BACKOFF)
        return pause

    def close(self) -> None:
        """Close the source's connection. The next step opens it again."""
        events, self._events, self._failure = self._events, None, None
        if events is not None:
            events.close()

    def report_end(self) -> None:
        """Record that the daemon stops on request. Raises redis.exceptions.RedisError."""
        self._state.store_status(self.status(), ended=True)

    def _run(self) -> float:
        self._purges.run_if_due()
        if not (room := self._pusher.gate.room()):
            return FULL_QUEUE_POLL_S
        if batch := self._read(min(MAX_BATCH_POSTS, room * self._posts_per_message)):
            self._send(batch)
            if self.hindrance:
                logger.info("%s can be read again", self._source.name)
            self._failures, self.hindrance = 0, ""
        return 0.0

    def _failed(self, kind: str, reason: str, backoff: EqualJitterBackoff, at_least: float = 0.0) -> float:
        """Close the connection after a failure, and return the seconds until the next attempt."""
        self.faults[kind] += 1
        if not self.hindrance and kind != "redis":
            self._status_due = self._clock.monotonic()  # report the first failure at once
        self.close()
        pause = max(backoff.compute(self._failures), at_least)
        self._failures += 1
        self._due = self._clock.monotonic() + pause
        self.hindrance = printable(reason)
        logger.warning("%s; retrying in %.0f s", self.hindrance, pause)
        return pause

    # Reading.

    def _read(self, most: int) -> list[Event]:
        """Return the events of the next second, with at most this many posts. Raises SourceFailed."""
        if failure := self._failure:
            self._failure = None
            raise failure
        events = self._events or self._open()
        batch: list[Event] = []
        posts = 0
        until = self._clock.monotonic() + MAX_BATCH_S
        while posts < most and len(batch) < MAX_BATCH_EVENTS and self._clock.monotonic() < until:
            try:
                event = next(events)
            except (StopIteration, SourceFailed) as fault:
                failure = fault if isinstance(fault, SourceFailed) else SourceFailed("the stream of events ended")
                if not batch:
                    raise failure from None
                # Send what was read: else a source that often fails would never get beyond it.
                self._failure = failure
                break
            if event is None:
                break
            self._note_gap(event)
            if event.cursor >= self._floor:
                batch.append(event)
                posts += event.post is not None
        return batch

    def _open(self) -> Generator[Event | None]:
        self._resumed = self._position = self._state.position()
        # Servers may repeat far more than asked for. Everything before the overlap has been sent.
        self._floor = self._resumed.cursor - self._source.overlap if self._resumed else 0
        self._events = _generate(self._source, self._floor if self._resumed else None)
        self.connections += 1
        return self._events

    def _note_gap(self, event: Event) -> None:
        """Record a gap if a connection's first event is later than the stored position, whose event must come again."""
        before, self._resumed = self._resumed, None
        if before is None or event.cursor <= before.cursor:
            return
        self._state.record_gap(before, event.at, self._clock.time())
        self.gaps += 1
        logger.error(
            "gap in %s: the events of %.0f minutes are missing, because the source no longer has them; `feedmill "
            "ingest gaps` lists it",
            self._source.name,
            (event.at - before.at) / 60,
        )

    # Sending.

    def _send(self, batch: list[Event]) -> None:
        posts: dict[str, Post] = {}
        deleted, authors = set[str](), set[str]()
        for event in batch:
            if event.post is not None and (post := self._parse(event.post)):
                posts[post.id] = post
                authors.discard(author_of(post.id))
            if event.deleted is not None:
                deleted.add(event.deleted)
                posts.pop(event.deleted, None)
            if event.deleted_author is not None:
                authors.add(event.deleted_author)
            self.filtered += event.filtered
        self._pusher.push(posts.values())
        self._purges.add(deleted, authors, {author_of(post_id) for post_id in posts} - authors)
        last = max(batch, key=lambda event: event.cursor)
        if self._position is None or last.cursor > self._position.cursor:
            self._position = Position(last.cursor, last.at)
            self._state.advance(self._position)
        self.read += len(batch)

    def _parse(self, fields: Any) -> Post | None:
        try:
            return Post.parse(dict(fields))
        except PostRefused as refused:
            self.refused += 1
            logger.warning("skipped a post of %s: %s", self._source.name, refused)
            return None

    # Status.

    def _store_status(self) -> None:
        now = self._clock.monotonic()
        if now >= self._status_due:
            self._status_due = now + STATUS_INTERVAL_S
            self._gaps_recorded = len(self._state.gaps())
            self._state.store_status(self.status())

    def status(self) -> dict[str, Any]:
        """Return counters and state, for `feedmill status` and metrics. delay: age of the newest event in seconds."""
        return {
            "source": self._source.name,
            "read": self.read,
            "sent": self._pusher.sent,
            "skipped": self._pusher.skipped + self._pusher.gone,
            "filtered": self.filtered,
            "refused": self.refused,
            "purged": self._purges.purged,
            "gaps": self.gaps,
            "gaps_recorded": self._gaps_recorded,
            "connections": self.connections,
            "faults": dict(self.faults),
            "paused": self._pusher.gate.closed,
            "delay": max(0.0, self._clock.time() - self._position.at) if self._position else None,
            "hindrance": self.hindrance,
        }


def _generate(source: Source, cursor: int | None) -> Generator[Event | None]:
    """Return the source's events as a generator, which can be closed."""
    yield from source.events(cursor)
