"""Pauses between attempts that failed."""

import random
from dataclasses import dataclass

#: Doublings after which every pause has reached its limit. Without a bound, the power of two would
#: be too large for a float after 1,024 failures.
MAX_DOUBLINGS = 30


@dataclass
class Backoff:
    """Exponential backoff: each pause is twice as long as the one before, up to a limit.

    jitter: draw each pause from its second half, so that processes that failed together do not
    try again together.
    """

    first_s: float
    max_s: float
    jitter: bool = False

    def pause_s(self, failures: int) -> float:
        """Return the seconds to wait before the next attempt.

        failures: failures in a row before the latest one, so that 0 gives the first pause.
        """
        doublings = min(failures, MAX_DOUBLINGS)
        factor: int = 2**doublings
        pause_s = min(self.first_s * factor, self.max_s)
        if self.jitter:
            return random.uniform(pause_s / 2, pause_s)
        return pause_s
