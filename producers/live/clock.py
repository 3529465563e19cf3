"""Clock and interruptible waits. Tests replace the clock."""

import time


class Stopped(BaseException):
    """The process must end. A BaseException, so that handlers of Exception do not catch it."""


class Clock:
    """The system clock. `stop` ends its waits immediately."""

    def __init__(self) -> None:
        self._stopping = False

    def time(self) -> float:
        """Return seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Return monotonic seconds from an arbitrary start."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep. Raises Stopped once `stop` was called."""
        if self._stopping:
            raise Stopped
        if seconds > 0:
            time.sleep(seconds)

    def stop(self) -> None:
        """Raise Stopped, from a signal handler. Writes are ordered so that an interruption at any point is safe.

        If Python drops the exception, as it does in finalisers, the next wait raises Stopped again.
        """
        self._stopping = True
        raise Stopped
