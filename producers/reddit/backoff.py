"""Pauses after failures."""

from random import uniform

#: Seconds of pause after a first failure, and at most.
FIRST, LONGEST = 5.0, 600.0


class Backoff:
    """Pauses that double with each failure in a row, each a little different, so that failures do not meet again."""

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = longest
        #: In a row; set it to 0 when something has worked.
        self.failures = 0

    def next(self) -> float:
        """Seconds to pause after one more failure."""
        pause: float = min(self._longest, FIRST * 2**self.failures)
        self.failures += pause < self._longest
        return pause * uniform(0.5, 1.0)
