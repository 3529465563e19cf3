"""Steps that may hang: what each of the pipeline's threads runs, since when, and for how long it may.

Hanging is measured by a clock that the watching thread drives: while the whole process is paused (SIGSTOP,
`docker pause`), the clock stops as well.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Step(NamedTuple):
    """What a thread runs.

    began: a time of the watch's clock. limit: seconds after which it counts as hanging; None for what may take any
    time.
    """

    thread: int
    what: str
    began: float
    limit: float | None


class Watch:
    """The steps of the threads that use it, for the thread that watches them.

    max_gap: seconds that the clock advances between two calls of `tick`, at most.
    """

    def __init__(self, max_gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_gap = max_gap
        self._clock = clock
        #: One attribute, so that other threads read both values of one tick: the clock's time then, and this one's.
        self._latest_tick = clock(), 0.0
        self._steps: dict[int, Step] = {}

    def tick(self) -> None:
        """Let the clock advance further; for the watching thread, at each look."""
        self._latest_tick = self._read()

    def now(self) -> float:
        """Return the seconds for which this process has run, without its pauses."""
        return self._read()[1]

    def _read(self) -> tuple[float, float]:
        now, (then, counted) = self._clock(), self._latest_tick
        return now, counted + min(now - then, self._max_gap)

    @contextmanager
    def step(self, what: str, limit: float | None) -> Iterator[None]:
        """Run the block as a watched step of the calling thread; steps do not nest."""
        thread = threading.get_ident()
        self._steps[thread] = Step(thread, what, self.now(), limit)
        try:
            yield
        finally:
            del self._steps[thread]

    def longer_than(self, seconds: float) -> list[Step]:
        """Return the steps that have run for longer than their limit, or than `seconds` where they have none."""
        now = self.now()
        steps = list(self._steps.values())
        return [step for step in steps if now - step.began > (seconds if step.limit is None else step.limit)]
