"""One token bucket for the process: Reddit's rules, which its answers can only make stricter."""

import math
from collections.abc import Mapping

from producers.reddit.clock import Clock

#: Requests that may follow each other without a pause, after a quiet time.
BURST = 30
#: Requests of the stated budget that are left over: for a process that has just been started again, and knows nothing
#: of what this one has spent, and for whoever else uses the same credentials.
RESERVE = 5
#: Seconds that Reddit may have us wait, at most; its windows last ten minutes.
LONGEST_WAIT = 3600.0
#: What a sum of parts of tokens may lack to be a whole one: else it is waited for in ever smaller parts.
ROUNDING = 1e-6


class Budget:
    """Lets a request go when there is a token for it. Tokens come at the rate that was set, or, where that is slower,
    at the rate at which what Reddit has left until its next window would last to the end of it.
    """

    def __init__(self, clock: Clock, per_minute: float) -> None:
        self._clock = clock
        self._rate = per_minute / 60
        self._tokens = float(BURST)
        self._filled = clock.monotonic()
        self._paused_until = -math.inf
        #: Requests left in Reddit's window, and when it ends; None: not known.
        self.remaining: float | None = None
        self._resets = math.inf
        #: Requests let go since the start.
        self.spent = 0

    def take(self) -> None:
        """Wait for a token, and take it. Raises Stopped."""
        while (pause := self.pending()) > 0:
            self._clock.wait(pause)
        self._tokens -= 1
        self.spent += 1
        if self.remaining is not None:
            self.remaining -= 1

    def pending(self) -> float:
        """Seconds until a request may go; 0 where it may now."""
        now = self._clock.monotonic()
        if now < self._paused_until:
            return self._paused_until - now
        if now >= self._resets:
            self.remaining, self._resets = None, math.inf
        rate = self._rate
        if self.remaining is not None:
            spare = self.remaining - RESERVE
            if spare < 1:
                return self._resets - now
            rate = min(rate, spare / max(self._resets - now, 1.0))
        self._tokens = min(float(BURST), self._tokens + (now - self._filled) * rate)
        self._filled = now
        lacking = 1 - self._tokens
        return lacking / rate if lacking > ROUNDING else 0.0

    def pause(self, seconds: float) -> None:
        """No request for so long: Reddit said so (429)."""
        self._paused_until = max(self._paused_until, self._clock.monotonic() + min(seconds, LONGEST_WAIT))

    def learn(self, headers: Mapping[str, str]) -> None:
        """Read what an answer says of Reddit's budget; strange values count as not said."""
        remaining = number(headers.get("x-ratelimit-remaining"))
        resets = number(headers.get("x-ratelimit-reset"))
        if remaining is not None and resets is not None:
            self.remaining = remaining
            self._resets = self._clock.monotonic() + min(resets, LONGEST_WAIT)


def number(text: str | None) -> float | None:
    """A header's value where it is a finite number, and not negative."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
