"""Time, as the daemon sees it: what tells it, and what waits. Tests put their own in its place."""

import time


class Stopped(BaseException):
    """The process was asked to end. No Exception, so that what handles faults lets it pass."""


class Clock:
    """The real time. Its waits end at once when the process is asked to end: see `stop`."""

    def __init__(self) -> None:
        self._stopping = False

    def time(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment, which no setting of the clock changes."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Raises Stopped."""
        if self._stopping:
            raise Stopped
        if seconds > 0:
            time.sleep(seconds)

    def stop(self) -> None:
        """For a signal handler: raises Stopped wherever the process is, which every order of commits here survives.

        Python drops an exception that a handler raises inside a finaliser; the next wait then raises it again.
        """
        self._stopping = True
        raise Stopped
