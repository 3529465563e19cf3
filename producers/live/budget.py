"""When requests may be sent: at the configured rate, and with exponential backoff after failures."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from redis.backoff import EqualJitterBackoff

from feedmill.producers.live.source import Clock, SourceFailed

#: Maximum requests without a pause after an idle period.
BURST_REQUESTS = 30
#: Requests of Reddit's stated budget that stay unused: for a restarted process, which does not know the previous one's
#: requests, and for other users of the same credentials.
RESERVED_REQUESTS = 5
#: Maximum wait in seconds that a server can impose. Reddit's rate-limit windows last ten minutes.
MAX_WAIT_S = 3600.0
#: Smallest value of a reset that is a time, in seconds since 1970, instead of a duration.
MIN_RESET_TIME = 1e9
#: Pauses in seconds after failures in a row.
BACKOFF = EqualJitterBackoff(cap=600, base=5)
#: Attempts before a failure is final, if something waits for the answer.
MAX_ATTEMPTS = 4

Answer = TypeVar("Answer")


class RequestBudget:
    """Allows the configured rate after a burst, or less, to spread what Reddit has left over its rate-limit window."""

    def __init__(self, clock: Clock, per_minute: float) -> None:
        self._clock = clock
        self._interval = 60 / per_minute
        #: Time of the next request if they came evenly, and end of a pause (monotonic seconds).
        self._next, self._paused_until = clock.monotonic(), -math.inf
        #: Requests left in Reddit's rate-limit window, and its end (monotonic seconds); None and infinite if unknown.
        self.remaining: float | None = None
        self._resets = math.inf
        #: Requests since the start.
        self.spent = 0

    def take(self) -> None:
        """Wait until a request is allowed, and count it. Raises Stopped."""
        while (pause := self.pending()) > 0:
            self._clock.wait(pause)
        now, interval = self._clock.monotonic(), self._interval
        if self.remaining is not None:
            interval = max(interval, (self._resets - now) / (self.remaining - RESERVED_REQUESTS))
            self.remaining -= 1
        self._next = max(self._next, now) + interval
        self.spent += 1

    def pending(self) -> float:
        """Return the seconds until the next request is allowed; 0 if it is allowed now."""
        now = self._clock.monotonic()
        if now >= self._resets:
            self.remaining, self._resets = None, math.inf
        if self.remaining is not None and self.remaining - RESERVED_REQUESTS < 1:
            return max(self._resets, self._paused_until) - now
        burst = (BURST_REQUESTS - 1) * self._interval
        # Rounded, because waiting for less than a clock's step would not end.
        return max(0.0, round(max(self._paused_until, self._next - burst) - now, 6))

    def pause(self, seconds: float) -> None:
        """Block requests for this many seconds, after a 429 response or an outage."""
        self._paused_until = max(self._paused_until, self._clock.monotonic() + min(seconds, MAX_WAIT_S))

    def learn(self, headers: Mapping[str, str]) -> None:
        """Read rate-limit headers. Missing or invalid values are ignored. The reset may be a duration or a time."""
        remaining = number(headers.get("x-ratelimit-remaining"))
        resets = number(headers.get("x-ratelimit-reset"))
        if resets is not None and resets >= MIN_RESET_TIME:
            resets = max(0.0, resets - self._clock.time())
        if remaining is not None and resets is not None:
            self.remaining = remaining
            self._resets = self._clock.monotonic() + min(resets, MAX_WAIT_S)


def number(text: str | None) -> float | None:
    """Parse a header's value. Returns None unless it is finite and non-negative."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def with_retries(
    ask: Callable[[], Answer],
    clock: Clock,
    attempts: int = MAX_ATTEMPTS,
    failure: type[SourceFailed] = SourceFailed,
    note: Callable[[SourceFailed], object] = str,
) -> Answer:
    """Call `ask`, and again after failures of this type that may be temporary. Raises the last one, and Stopped.

    note: called with each failure but the last.
    """
    for attempt in range(attempts - 1):
        try:
            return ask()
        except failure as fault:
            note(fault)
            clock.wait(max(float(BACKOFF.compute(attempt)), fault.retry_after))
    return ask()
