"""Watch for hung steps: record what each of the pipeline's threads runs, since when, and for how long it may.

Time is measured by a clock that the watcher thread drives. The clock stops while the whole process is paused (SIGSTOP,
`docker pause`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Step(NamedTuple):
    """A step, such as a forward pass, that a thread runs now."""

    thread: int
    what: str
    #: Start time on the watch's clock.
    began: float
    #: Seconds after which the step counts as hung; None for no limit.
    limit: float | None


class Watch:
    """The current steps of all threads, for the watcher thread.

    max_gap: maximum seconds that the clock advances between two calls of `tick`.
    """

    def __init__(self, max_gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_gap = max_gap
        self._clock = clock
        #: The clock's time at the latest tick, and this watch's time then. A single attribute, so that other threads
        #: read both consistently.
        self._latest_tick = clock(), 0.0
        self._steps: dict[int, Step] = {}

    def tick(self) -> None:
        """Advance the clock. The watcher thread calls this in each iteration."""
        self._latest_tick = self._read()

    def now(self) -> float:
        """Return the seconds since this watch was created, without pauses of the process."""
        return self._read()[1]

    def _read(self) -> tuple[float, float]:
        now, (then, counted) = self._clock(), self._latest_tick
        return now, counted + min(now - then, self._max_gap)

    @contextmanager
    def step(self, what: str, limit: float | None) -> Iterator[None]:
        """Run the block as a watched step of the calling thread. Steps do not nest."""
        thread = threading.get_ident()
        self._steps[thread] = Step(thread, what, self.now(), limit)
        try:
            yield
        finally:
            del self._steps[thread]

    def longer_than(self, seconds: float) -> list[Step]:
        """Return the steps that have run for longer than their limit, or longer than `seconds`."""
        now = self.now()
        steps = list(self._steps.values())
        return [step for step in steps if now - step.began > min(seconds, step.limit or seconds)]
