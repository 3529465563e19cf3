"""A simulated clock for daemons of live sources."""

from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import Clock, Stopped


class SimulatedClock(Clock):
    """A clock that advances only in `wait`. start: seconds since 1970; after `ends` seconds,
    `wait` raises Stopped.
    """

    def __init__(
        self, start: float = 1_800_000_000.0, ends: float = float("inf")
    ) -> None:
        super().__init__()
        self._start = start
        self._ends = ends
        self._passed = 0.0
        #: Durations of all waits so far, in seconds.
        self.waits: list[float] = []

    def time(self) -> float:
        return self._start + self._passed

    def monotonic(self) -> float:
        return self._passed

    def wait(self, seconds: float) -> None:
        if self._passed + seconds >= self._ends:
            self._passed = self._ends
            raise Stopped
        if seconds > 0:
            self.waits.append(seconds)
            self._passed += seconds


def run(daemon: LiveDaemon, clock: SimulatedClock, seconds: float) -> None:
    """Let a daemon step for some seconds of the clock."""
    until = clock.monotonic() + seconds
    while (left := until - clock.monotonic()) > 0:
        pause = max(daemon.step(), 0.1)
        clock.wait(min(pause, left))
