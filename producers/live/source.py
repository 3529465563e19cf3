"""The interface of a live source: a stream of events, each with a position from which reading can
be resumed.

`Clock` is its time and its waits; tests replace it. `RequestBudget` and `with_retries` say when a
source may send requests: at a rate, and with exponential backoff after failures.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

from feedmill.shared.backoff import Backoff
from feedmill.shared.messages import Post, in_utc

#: Maximum requests without a pause after an idle period.
BURST_REQUESTS = 30
#: Requests of Reddit's stated budget that stay unused: for a restarted process, which does not
#: know the previous one's requests, and for other users of the same credentials.
RESERVED_REQUESTS = 5
#: Maximum wait in seconds that a server can impose. Reddit's rate-limit windows last ten minutes.
MAX_WAIT_S = 3600.0
#: Smallest value of a reset that is a time, in seconds since 1970, instead of a duration.
MIN_RESET_TIME = 1e9
#: Pauses after failures in a row.
BACKOFF = Backoff(first_s=5.0, max_s=600.0, jitter=True)
#: Attempts before a failure is final, if something waits for the answer.
MAX_ATTEMPTS = 4


class SourceFailed(Exception):  # noqa: N818 - named after the event
    """The source could not be read. retry_after: seconds to wait at least, as required by the
    source.
    """

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class RequestFailed(SourceFailed):
    """One request failed, or its result is not available. Other requests may succeed."""


class Event(NamedTuple):
    """A change at the source: a new or edited post, a deletion, or only progress.

    cursor: the event's position; positions increase and are below 2**63, except that they go back
    with a source's clock. None if the source stores its own positions.
    at: its time at the source, in seconds since 1970.
    post: a `feedmill.shared.messages.Post` or its fields; its id must be the same whenever the
    event is repeated. deleted: id of a post that was deleted. deleted_author: beginning of the ids
    of all posts of a deleted account, up to and including the last slash. filtered: true if a
    filter left the event's post out. removed: id of a post that is hidden, and may come back: its
    rechecks decide (producers/live/rechecks.py).
    """

    cursor: int | None
    at: float
    post: Post | Mapping[str, object] | None = None
    deleted: str | None = None
    deleted_author: str | None = None
    filtered: bool = False
    removed: str | None = None


class Pause(NamedTuple):
    """A pause: the source expects nothing for some seconds."""

    seconds: float


class Source:
    """A live source.

    A subclass has a `name` and implements `events`, and `parse` unless it yields `Event`s.
    """

    #: Name in commands, keys and metrics: lower-case letters, digits and underscores.
    name: str
    #: Distance before the stored position from which reading resumes, for events that arrive out
    #: of order.
    overlap = 0
    #: Distance after the stored position beyond which the first event after a reconnection means a
    #: gap: the event at the position did not come again. Infinite if the source yields its gaps.
    gap_tolerance: float = 0
    #: Seconds after sending at which posts are looked up again, in ascending order; none if the
    #: source reports edits and deletions by itself.
    recheck_delays: Sequence[float] = ()

    def events(self, cursor: int | None) -> Iterator[Any]:
        """Yield events from this position on, including it, oldest first; only new events if it is
        None.

        Events are as the source sent them: `parse` reads them.

        The first event may be earlier. If it is later than the position stored last, the daemon
        records a gap, because the event at that position was not repeated. If nothing arrives,
        yield None about once a second, or a Pause until the next poll: the daemon then sends what
        it has, and continues the generator once that is in the queue. Yield a Gap
        (producers/live/state.py) for a period that cannot be read: it is recorded at once. Raises
        SourceFailed; the daemon then pauses and calls this method again.
        """
        raise NotImplementedError

    def position_at(self, at: float) -> int | None:  # noqa: ARG002 - for subclasses
        """Return the position of a time at the source, in seconds since 1970; None if positions
        are no times.

        The daemon reads from there if the source's clock went back while no connection was open.
        """
        return None

    def parse(self, raw: Any) -> Event:
        """Read one of the events that `events` yielded.

        May raise any exception. The daemon then goes on, and reads the event once more within
        seconds, in case it was cut. If it cannot be read again, it becomes a dead letter.
        """
        event: Event = raw
        return event

    def needed_later(self, ids: Collection[str]) -> set[str]:  # noqa: ARG002 - for subclasses
        """Return those of deleted posts that were not sent, but may be read later, from a gap.

        They are blocked. Raises redis.exceptions.RedisError.
        """
        return set()

    def written_at(self, post_id: str) -> float | None:  # noqa: ARG002 - for subclasses
        """Return when a post was written, in seconds since 1970, if its id says so; else None.

        The id is a stranger's, and so is the time.
        """
        return None

    def look_up(self, ids: Sequence[str]) -> Mapping[str, Event]:
        """Return the present state of up to a hundred posts, by id, for rechecks; missing ones are
        absent.

        Each event has a post, the id of a deleted or removed post, or neither if the post cannot
        be classified. Raises SourceFailed, or RequestFailed if only this request failed.
        """
        raise NotImplementedError

    def pending(self) -> float:
        """Return the seconds until `look_up` may be called."""
        return 0.0

    def status(self) -> Mapping[str, Any]:
        """Return counters and state that the daemon adds to its own, or that replace them.

        `faults` are added up.
        """
        return {}


class Stopped(BaseException):
    """The process must end. A BaseException, so that handlers of Exception do not catch it."""


class Clock:
    """The system clock. `stop` ends its waits immediately."""

    def __init__(self) -> None:
        self._stopping = False

    def time(self) -> float:
        """Return seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Return monotonic seconds from an arbitrary start."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep. Raises Stopped once `stop` was called."""
        if self._stopping:
            raise Stopped
        if seconds > 0:
            time.sleep(seconds)

    def stop(self) -> None:
        """Raise Stopped, from a signal handler.

        Writes are ordered so that an interruption at any point is safe.

        If Python drops the exception, as it does in finalisers, the next wait raises Stopped
        again.
        """
        self._stopping = True
        raise Stopped

    def stop_later(self) -> None:
        """Let the next wait raise Stopped: for a signal handler while something is written that
        must be whole.
        """
        self._stopping = True


Answer = TypeVar("Answer")


class RequestBudget:
    """Allows the configured rate after a burst, or less, to spread what Reddit has left over its
    rate-limit window.
    """

    def __init__(self, clock: Clock, per_minute: float) -> None:
        self._clock = clock
        self._interval = 60 / per_minute
        #: Time of the next request if they came evenly, and end of a pause (monotonic seconds).
        self._next = clock.monotonic()
        self._paused_until = -math.inf
        #: Requests left in Reddit's rate-limit window, and its end (monotonic seconds); None and
        #: infinite if unknown.
        self.remaining: float | None = None
        self._resets = math.inf
        #: Requests since the start.
        self.spent = 0

    def now(self) -> float:
        """Return seconds since 1970."""
        return self._clock.time()

    def take(self) -> None:
        """Wait until a request is allowed, and count it. Raises Stopped."""
        while (pause := self.pending()) > 0:
            self._clock.wait(pause)
        now = self._clock.monotonic()
        interval = self._interval
        if self.remaining is not None:
            seconds_left = self._resets - now
            requests_left = self.remaining - RESERVED_REQUESTS
            interval = max(interval, seconds_left / requests_left)
            self.remaining -= 1
        self._next = max(self._next, now) + interval
        self.spent += 1

    def pending(self) -> float:
        """Return the seconds until the next request is allowed; 0 if it is allowed now."""
        now = self._clock.monotonic()
        if now >= self._resets:
            self.remaining = None
            self._resets = math.inf
        if self.remaining is not None and self.remaining - RESERVED_REQUESTS < 1:
            return max(self._resets, self._paused_until) - now
        burst_s = (BURST_REQUESTS - 1) * self._interval
        allowed_at = max(self._paused_until, self._next - burst_s)
        # Rounded, because waiting for less than a clock's step would not end.
        return max(0.0, round(allowed_at - now, 6))

    def pause(self, seconds: float) -> None:
        """Block requests for this many seconds, after a 429 response or an outage."""
        until = self._clock.monotonic() + min(seconds, MAX_WAIT_S)
        self._paused_until = max(self._paused_until, until)

    def learn(self, headers: Mapping[str, str]) -> None:
        """Read rate-limit headers.

        Missing or invalid values are ignored. The reset may be a duration or a time.
        """
        remaining = header_number(headers, "x-ratelimit-remaining")
        resets = header_number(headers, "x-ratelimit-reset")
        if resets is not None and resets >= MIN_RESET_TIME:
            resets = max(0.0, resets - self._clock.time())
        if remaining is not None and resets is not None:
            self.remaining = remaining
            self._resets = self._clock.monotonic() + min(resets, MAX_WAIT_S)


def header_number(headers: Mapping[str, str], name: str) -> float | None:
    """Return a header's value; None if it is absent, or not a finite, non-negative number."""
    try:
        value = float(headers.get(name, ""))
    except ValueError:
        return None
    if math.isfinite(value) and value >= 0:
        return value
    return None


def seconds_of_date(text: object) -> float | None:
    """Return a date of ISO 8601 in seconds since 1970; None if it is missing or invalid."""
    try:
        date = datetime.fromisoformat(str(text))
        seconds = in_utc(date)
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)


def retry_after_s(headers: Mapping[str, str], now: float) -> float:
    """Return the seconds that the header Retry-After asks to wait: a number, or until a date.

    0 if it is absent, invalid or past. now: seconds since 1970.
    """
    seconds = header_number(headers, "retry-after")
    if seconds is not None:
        return seconds
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
        until = in_utc(date)
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, until - now)


def with_retries(
    ask: Callable[[], Answer],
    clock: Clock,
    attempts: int = MAX_ATTEMPTS,
    failure: type[SourceFailed] = SourceFailed,
    note: Callable[[SourceFailed], object] = str,
) -> Answer:
    """Call `ask`, and again after failures of this type that may be temporary.

    Raises the last one, and Stopped.

    note: called with each failure but the last.
    """
    for attempt in range(attempts - 1):
        try:
            return ask()
        except failure as fault:
            note(fault)
            pause_s = BACKOFF.pause_s(attempt)
            clock.wait(max(pause_s, fault.retry_after))
    return ask()
