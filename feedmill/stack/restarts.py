"""Restart processes that exit, with a backoff, and give up on those that keep failing."""

import time
from collections.abc import Callable

from feedmill.stack.processes import Child
from shared.errors import StackError

#: Consecutive failures after which a process is no longer restarted.
MAX_FAILURES = 5
#: Seconds before the first restart; the pause doubles with each further failure.
FIRST_RESTART_DELAY_S = 1.0
#: Seconds that a process must run for its next failure to count as the first again.
STABLE_AFTER_S = 60.0


class Failures:
    """Count a process's consecutive failures and compute the backoff before the next restart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._since = clock()

    def started(self) -> None:
        self._since = self._clock()

    def ended(self) -> float | None:
        """Record an exit. Return the seconds to wait before the restart, or None after MAX_FAILURES."""
        self._count = 1 if self._clock() - self._since >= STABLE_AFTER_S else self._count + 1
        return FIRST_RESTART_DELAY_S * 2 ** (self._count - 1) if self._count < MAX_FAILURES else None


class Service:
    """A process of the embedded stack, and its restarts.

    launch: starts the process. answers: returns True if the process serves requests.
    """

    def __init__(self, launch: Callable[[], Child], answers: Callable[[], bool]) -> None:
        self._launch = launch
        self.answers = answers
        self._failures = Failures()
        self.child = launch()
        #: Time of the next restart, by time.monotonic; None while the process runs.
        self._due: float | None = None
        self._is_restarting = False

    def supervise(self, say: Callable[[str], None]) -> None:
        """Restart the process if it has exited and its backoff is over. Call it regularly; it never waits.

        say: prints a line. Raises StackError after MAX_FAILURES consecutive failures.
        """
        if self._due is not None:
            if self._due <= time.monotonic():
                self._due = None
                try:
                    self.child = self._launch()
                except OSError as error:  # such as a data folder that was moved
                    raise StackError(
                        f"Cannot restart {self.child.name}: {error.strerror} ({error.filename or self.child.log}). "
                        "Correct the cause and run `feedmill up` again."
                    ) from None
                self._failures.started()
        elif self.child.process.poll() is not None:
            self._schedule(say)
        elif self._is_restarting and self.answers():
            self._is_restarting = False
            say(f"{self.child.name} answers again")

    def _schedule(self, say: Callable[[str], None]) -> None:
        name, status = self.child.name, self.child.process.returncode
        delay = self._failures.ended()
        if delay is None:
            raise StackError(
                f"{name} failed {MAX_FAILURES} times in a row, last with status {status}. Correct the cause and run "
                f"`feedmill up` again. {self.child.log_tail()}"
            )
        say(f"{name} exited with status {status}: restarting it in {delay:g} s")
        self._due = time.monotonic() + delay
        self._is_restarting = True
