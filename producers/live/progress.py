"""The position of a source, and clocks that go back.

A source numbers its events by a clock or a counter, which may go back: a server restarts with
another clock, or another server answers. Its new events are then before the position, like those
that a server repeats. So all of them are sent: the records of sent posts tell repetitions from new
ones. Once new posts come from before the position alone, the position follows them.

A connection begins in one of three ways. The server continues at the position. Or it begins
earlier, and reaches the position soon: Jetstream's version 2 repeats up to an hour. Or its clock
has gone back, and the position is in its future: then it sends new events only, and leaves out
those since the last connection. To tell the latter two apart takes until the position is reached,
nothing comes for a moment, or the events turn out to be as far apart as they arrive. Then reading
goes back by the time without a connection, at the source's clock.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from redis import Redis

from feedmill.producers.live.source import Clock, Event, Source
from feedmill.producers.live.state import Gap, LiveState, Position
from feedmill.producers.push import known_ids
from feedmill.shared.purge import tombstones

logger = logging.getLogger(__name__)

#: Maximum seconds that an event's time may be ahead of this machine's clock to become a position,
#: once that time has come; and maximum number of such events to remember, one per batch.
MAX_AHEAD_S = 600.0
MAX_UPCOMING = 4_096
#: Seconds after which events from before the position count as new ones, if the source's clock
#: advances at most this much faster than this machine's meanwhile. Repetitions come much faster.
JUDGED_AFTER_S = 60.0
MAX_LIVE_SPEED = 1.5
#: Seconds without an event after which that judgement starts again: reading stops while the queue
#: is full.
READING_STOPPED_S = 5.0
#: Seconds between two times that reading goes back: a server may send new events only, whatever it
#: is asked for.
REWIND_INTERVAL_S = 3600.0
#: After waiting for a position that was ahead: seconds that the clock may have stepped, and
#: seconds before that may have passed without a connection.
MAX_STEP_S = 60.0
CLOSED_BEFORE_S = 600.0


class _Ahead(NamedTuple):
    """The moment at which a stored position was ahead of this machine's clock: monotonic time,
    time, and by how many seconds.
    """

    monotonic: float
    at: float
    seconds: float


class _FirstEvent(NamedTuple):
    """The first event's time by this machine's clock, and by the source's."""

    received_at: float
    at: float


class SourceProgress:
    """The position of a source up to which everything is sent. It is stored in Redis.

    Call `open` for each connection, `note` for each of its events, `idle` if there are none,
    `advance` for each batch that was sent, and then `follow`, which follows the source's clock if
    it has gone back.
    """

    def __init__(
        self, source: Source, redis: Redis, state: LiveState, clock: Clock
    ) -> None:
        self._source = source
        self._redis = redis
        self._state = state
        self._clock = clock
        self.position: Position | None = None
        #: Counts since the start: events in the future, events from before the position, and times
        #: that the source's clock went back.
        self.ahead = 0
        self.earlier = 0
        self.steps_back = 0
        #: The last position of each batch that was slightly ahead of the clock, until its time has
        #: come.
        self._upcoming: list[Position] = []
        #: Whether the latest batch had events from the future.
        self._are_ahead = False
        #: Lowest position that was ever stored, before which events are older than the first
        #: start; None if unknown.
        self._began: int | None = None
        #: Highest position so far, from which the source's clock went back, and how far, in
        #: seconds.
        #: Until reading reaches it again, the clock is behind.
        self._highest: Position | None = None
        self._behind_s = 0.0
        #: Earliest time at which reading may go back again (monotonic seconds).
        self._rewind_due = -math.inf
        #: Whether the position was moved back for the next connection.
        self.is_rewound = False
        #: When the stored position was first found ahead of this machine's clock; None while it is
        #: not.
        self._ahead_since: _Ahead | None = None

        # Of the open connection.
        #: Whether the position was moved back for it. There may be no event at such a position.
        self.has_moved_back = False
        #: Time at which the position was stored before, in seconds since 1970; None if unknown.
        self._read_before: float | None = None
        #: The connection's first event; None before it.
        self._first_event: _FirstEvent | None = None
        #: Monotonic time and the source's time from which its speed is judged, and monotonic time
        #: of the latest event.
        self._judged_from = (0.0, 0.0)
        self._noted = -math.inf
        #: Whether the position was reached. Servers may begin earlier than asked.
        self._has_caught_up = False
        #: Whether its events are new ones, repeated ones beside them.
        self._is_live = False
        #: Position of the newest new event from before the position; None if there is none.
        self._new_before: Position | None = None

    def note_ahead(self, stored: Position) -> float:
        """Note that the stored position is ahead of this machine's clock. Return by how many
        seconds.
        """
        now = self._clock.time()
        ahead_s = stored.at - now
        if self._ahead_since is None:
            self._ahead_since = _Ahead(
                monotonic=self._clock.monotonic(), at=now, seconds=ahead_s
            )
        return ahead_s

    def open(self) -> Position | None:
        """Begin a connection, and return the position to read from."""
        stored = self._state.position()
        self.position = stored
        self._read_before = self._state.stored_at()
        self._began = self._state.began()
        self.has_moved_back = self.is_rewound
        self.is_rewound = False
        self._upcoming = []
        self._first_event = None
        self._noted = -math.inf
        self._has_caught_up = stored is None
        self._is_live = stored is None
        self._new_before = None
        if stored is None or self.is_ahead(stored.at):
            return stored
        self._read_again_after_wait(stored)
        return self.position

    def is_ahead(self, at: float) -> bool:
        """Return whether a time, in seconds since 1970, is so far in the future that it must be
        wrong.
        """
        latest = self._clock.time() + MAX_AHEAD_S
        return at > latest

    def note(self, event: Event) -> bool:
        """Note an event that was read. Return whether it is to be sent.

        One from before the first start is not, as long as the server may be repeating it.
        """
        if event.cursor is None or self.is_ahead(event.at):
            return True
        if self._first_event is None:
            self._first_event = _FirstEvent(received_at=self._clock.time(), at=event.at)
        if not self._is_before(event.cursor):
            self._has_caught_up = True
            self._is_live = True
            self._new_before = None
            return True
        self.earlier += 1
        self._judge_speed(event.at)
        if self._is_live or not self._is_older_than_start(event):
            return True
        self._new_before = Position(event.cursor, event.at)
        return False

    def idle(self) -> None:
        """Note that the source has no event now. A server that repeats events has more."""
        if self._first_event is not None:
            self._is_live = True

    def new_places(
        self, batch: Sequence[Event], places: Mapping[str, Position]
    ) -> list[Position]:
        """Return the positions of posts that were neither sent nor purged, if the source's clock
        may have gone back.

        places: the position of each post of the batch.
        """
        is_behind = self._highest is not None
        if not is_behind and not self._has_earlier(batch):
            return []
        ids = list(places)
        processed = known_ids(self._redis, ids)
        purged = tombstones(self._redis, ids)
        processed.update(purged)
        return [place for post_id, place in places.items() if post_id not in processed]

    def _has_earlier(self, batch: Iterable[Event]) -> bool:
        """Return whether an event is before the stored position by more than the overlap."""
        for event in batch:
            if event.cursor is None:
                continue
            if self._is_before(event.cursor):
                return True
        return False

    def advance(
        self,
        batch: Sequence[Event],
        new: Sequence[Position] = (),
        may_store: bool = True,
    ) -> None:
        """Store the position after a batch, which is never ahead of the clock.

        new: see `new_places`. may_store: whether all events before were sent.
        """
        now = self._clock.time()
        last = self._last_past(batch, now)
        if last is None:
            return
        if self.position is None:
            self._store(last)
            return
        if not may_store:
            return
        highest = self._highest or self.position
        if last > highest:
            self._store(last)
            return
        # Others than new posts may be repetitions, also of what came before the clock went back.
        new_past = [place for place in new if place.at <= now]
        last_new = max(new_past, default=None)
        has_posts = any(event.post is not None for event in batch)
        if last_new is None and self._has_caught_up and not has_posts:
            last_new = last
        if last_new is None:
            return
        if not self._is_before(last_new.cursor):
            if last_new > self.position:
                self._store(last_new)
        elif self._is_before(last.cursor):
            self._new_before = last_new

    def _last_past(self, batch: Iterable[Event], now: float) -> Position | None:
        """Return the last position that is not ahead of the clock, of this batch and of earlier
        ones that were ahead then; None if there is none.
        """
        past: list[Position] = []
        upcoming: list[Position] = []
        future_count = 0
        for event in batch:
            if self.is_ahead(event.at):
                future_count += 1
                continue
            if event.cursor is None:
                continue
            place = Position(event.cursor, event.at)
            if place.at > now:
                upcoming.append(place)
            else:
                past.append(place)
        self._note_future(future_count)
        if upcoming:
            last_upcoming = max(upcoming)
            self._upcoming.append(last_upcoming)
        past += [place for place in self._upcoming if place.at <= now]
        still_upcoming = [place for place in self._upcoming if place.at > now]
        self._upcoming = still_upcoming[-MAX_UPCOMING:]
        return max(past, default=None)

    def follow(self) -> Gap | None:
        """Follow the source's clock if it has gone back. Return a period that cannot be read.

        Sets `is_rewound` if the source must be read from the new position.
        """
        before = self.position
        last = self._new_before
        if last is None or before is None or not self._is_live:
            return None
        self._new_before = None
        self.steps_back += 1
        self._highest = self._highest or before
        self._behind_s = max(0.0, self._highest.at - last.at)
        self._upcoming.clear()
        logger.warning(
            "the positions of %s went back, as after a step of its clock by %.0f s; following "
            "them, and sending the posts that were not sent before",
            self._source.name,
            self._behind_s,
        )
        if self._has_caught_up:
            self._store(last)
            return None

        # The position was in the source's future, so it left out the events since the last
        # connection.
        missed_since = self._missed_since(before)
        begin = self._begin_of_missed(missed_since)
        monotonic = self._clock.monotonic()
        if begin is not None and monotonic >= self._rewind_due:
            self._rewind_due = monotonic + REWIND_INTERVAL_S
            self.is_rewound = True
            self._store(begin)
            return None
        self._store(last)
        now = self._clock.time()
        return Gap(
            source=self._source.name,
            subreddit="",
            since=min(missed_since, now),
            until=now,
            noted=now,
        )

    def note_for_display(self) -> str:
        """Return the state of the source's clock or of this machine's; "" if nothing is wrong with
        them.
        """
        if self._highest is not None:
            if self._behind_s:
                return f"its clock went back by {self._behind_s:,.0f} s"
            return "its positions went back"
        if self._are_ahead:
            return "its events are from the future"
        return ""

    def _judge_speed(self, at: float) -> None:
        """Find out whether events are as far apart as they arrive, and so new ones. at: the
        source's time.
        """
        now = self._clock.monotonic()
        if now - self._noted > READING_STOPPED_S:
            self._judged_from = (now, at)
        self._noted = now
        began, began_at = self._judged_from
        elapsed_s = now - began
        elapsed_at_source_s = at - began_at
        if (
            elapsed_s >= JUDGED_AFTER_S
            and elapsed_at_source_s <= elapsed_s * MAX_LIVE_SPEED
        ):
            self._is_live = True

    def _is_before(self, cursor: int) -> bool:
        """Return whether a position is before the stored one by more than the overlap, within
        which order may vary.
        """
        if self.position is None:
            return False
        lowest = self.position.cursor - self._source.overlap
        return cursor < lowest

    def _is_older_than_start(self, event: Event) -> bool:
        """Return whether an event is older than the first start, at a source that can be read from
        there later.
        """
        if event.cursor is None or self._began is None:
            return False
        if self._source.position_at(event.at) is None:
            return False
        lowest = self._began - self._source.overlap
        return event.cursor < lowest

    def _read_again_after_wait(self, stored: Position) -> None:
        """Move the position back if its time has come without a step of this machine's clock.

        Then that clock was right, or went back together with the source's: the source's new events
        are before the position. Otherwise this machine's clock was wrong before.
        """
        if self._ahead_since is None:
            return
        ahead = self._ahead_since
        ahead_s = ahead.seconds
        self._ahead_since = None
        shown_s = self._clock.time() - ahead.at
        elapsed_s = self._clock.monotonic() - ahead.monotonic
        step_s = shown_s - elapsed_s
        begin_at = stored.at - ahead_s - CLOSED_BEFORE_S
        cursor = self._source.position_at(begin_at)
        if step_s > MAX_STEP_S or cursor is None:
            return
        self.has_moved_back = True
        self._highest = stored
        self._behind_s = ahead_s
        self.steps_back += 1
        logger.warning(
            "the stored position of %s was %.0f s ahead of the clock, which did not change "
            "since: reading again from there, for the case that the source's clock went back as "
            "well",
            self._source.name,
            ahead_s,
        )
        self._store(Position(cursor, begin_at))

    def _missed_since(self, before: Position) -> float:
        """Return the time since which events may have been missed, in seconds since 1970.

        The last connection may have ended while it read old events: it lacks those after the
        position, which may be much older than the time at which the position was stored.
        """
        if self._read_before is None:
            return before.at
        return min(before.at, self._read_before)

    def _begin_of_missed(self, missed_since: float) -> Position | None:
        """Return the position of the first missed event, by the source's clock; None if it is
        unknown.
        """
        if self._first_event is None or self._read_before is None:
            return None
        first_event = self._first_event
        missed_s = first_event.received_at - missed_since
        if missed_s < 0:  # this machine's clock went back, too
            return None
        at = first_event.at - missed_s
        cursor = self._source.position_at(at)
        if cursor is None:
            return None
        return Position(cursor, at)

    def _note_future(self, count: int) -> None:
        """Count events from the future, and log the first ones."""
        if count and not self.ahead:
            logger.warning(
                "%s sends events from the future. They are processed, but reading resumes before "
                "them. If all events are, this machine's clock is wrong",
                self._source.name,
            )
        self.ahead += count
        self._are_ahead = count > 0

    def _store(self, position: Position) -> None:
        if self.position is None:
            self._began = position.cursor
        elif self._began is not None:
            self._began = min(self._began, position.cursor)
        self.position = position
        now = self._clock.time()
        self._state.advance(
            position,
            now,
            self._began,
        )
        if self._highest is not None and position >= self._highest:
            logger.info(
                "the clock of %s is where it was before it went back", self._source.name
            )
            self._highest = None
            self._behind_s = 0.0
