"""Exponential backoff."""

from random import uniform

#: First pause and default maximum, in seconds.
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 600.0


class Backoff:
    """Exponential backoff with jitter, so that simultaneous failures do not retry together."""

    def __init__(self, longest: float = MAX_PAUSE_S) -> None:
        self._longest = longest
        #: Number of consecutive failures; callers reset it to 0 after a success.
        self.failures = 0

    def next(self) -> float:
        """Record a failure, and return the seconds to pause."""
        pause: float = min(self._longest, FIRST_PAUSE_S * 2**self.failures)
        self.failures += pause < self._longest
        return pause * uniform(0.5, 1.0)
