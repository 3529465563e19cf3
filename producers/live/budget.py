"""When requests may be sent: a token bucket at the configured rate, and exponential backoff after failures."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from redis.backoff import EqualJitterBackoff

from feedmill.producers.live.clock import Clock
from feedmill.producers.live.source import SourceFailed

#: Maximum requests without a pause after an idle period.
BURST_REQUESTS = 30
#: Requests of Reddit's stated budget that stay unused: for a restarted process, which does not know the previous one's
#: requests, and for other users of the same credentials.
RESERVED_REQUESTS = 5
#: Maximum wait in seconds that a server can impose. Reddit's rate-limit windows last ten minutes.
MAX_WAIT_S = 3600.0
#: Smallest value of a reset that is a time, in seconds since 1970, instead of a duration.
MIN_RESET_TIME = 1e9
#: Tolerance for rounding in the token count, without which a nearly full token causes ever smaller waits.
TOKEN_TOLERANCE = 1e-6
#: Pauses in seconds after failures in a row.
BACKOFF = EqualJitterBackoff(cap=600, base=5)
#: Attempts before a failure is final, if something waits for the answer.
MAX_ATTEMPTS = 4

Answer = TypeVar("Answer")


class RequestBudget:
    """A token bucket. It refills at the configured rate, or slower if needed to spread what Reddit has left evenly
    over the rest of its rate-limit window.
    """

    def __init__(self, clock: Clock, per_minute: float) -> None:
        self._clock = clock
        self._rate = per_minute / 60
        self._tokens = float(BURST_REQUESTS)
        self._filled = clock.monotonic()
        self._paused_until = -math.inf
        #: Requests left in Reddit's rate-limit window, and its end (monotonic seconds); None and infinite if unknown.
        self.remaining: float | None = None
        self._resets = math.inf
        #: Requests since the start.
        self.spent = 0

    def take(self) -> None:
        """Wait for a token, then spend it. Raises Stopped."""
        while (pause := self.pending()) > 0:
            self._clock.wait(pause)
        self._tokens -= 1
        self.spent += 1
        if self.remaining is not None:
            self.remaining -= 1

    def pending(self) -> float:
        """Return the seconds until the next request is allowed; 0 if it is allowed now."""
        now = self._clock.monotonic()
        if now < self._paused_until:
            return self._paused_until - now
        if now >= self._resets:
            self.remaining, self._resets = None, math.inf
        rate = self._rate
        if self.remaining is not None:
            spare = self.remaining - RESERVED_REQUESTS
            if spare < 1:
                return self._resets - now
            rate = min(rate, spare / max(self._resets - now, 1.0))
        self._tokens = min(float(BURST_REQUESTS), self._tokens + (now - self._filled) * rate)
        self._filled = now
        lacking = 1 - self._tokens
        return lacking / rate if lacking > TOKEN_TOLERANCE else 0.0

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
