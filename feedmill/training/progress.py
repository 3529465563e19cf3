"""Print the progress of a training, a test or a measurement on standard error."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from feedmill.console import span
from feedmill.shared.errors import printable

Counted = TypeVar("Counted")

#: Seconds between progress lines if there is no progress bar.
PROGRESS_INTERVAL_S = 10.0


class Report:
    """A bar for each phase on a terminal; else a line for each phase, and every ten seconds. Silent without `notes`."""

    def __init__(self, notes: Console | None = None) -> None:
        self._notes = notes or Console(quiet=True)
        self._bar, self._what = Progress(disable=True), ""
        self._printed_at = 0.0

    def print(self, line: str) -> None:
        self._notes.print(printable(line), markup=False)

    def phase(self, what: str, total: int | None = None) -> None:
        """Begin a phase. total: number of its posts or steps, if known."""
        self.stop()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        left, is_terminal = TimeRemainingColumn(), self._notes.is_terminal
        self._bar = Progress(*columns, left, console=self._notes, transient=True, disable=not is_terminal)
        self._what, self._printed_at = printable(what), time.monotonic()
        self._bar.add_task(self._what, total=total)
        self._bar.start()
        if not is_terminal:
            self.print(what)

    def advance(self, done: int, note: str = "") -> None:
        """Report how much of the phase is done. note: follows the phase, such as ", loss 0.3"."""
        (task,) = self._bar.tasks
        self._bar.update(task.id, completed=done, description=f"{self._what}{note}")
        if self._bar.disable and (done == task.total or time.monotonic() - self._printed_at > PROGRESS_INTERVAL_S):
            left = task.time_remaining
            about = f", about {span(left)} left" if left else ""
            self.print(f"{task.description}, {done:,} of {task.total or 0:,}{about}")
            self._printed_at = time.monotonic()

    def counting(self, what: str, items: Iterable[Counted], total: int) -> Iterator[Counted]:
        """Begin a phase, and yield its items, counting them."""
        self.phase(what, total)
        try:
            for done, item in enumerate(items, 1):
                self.advance(done)
                yield item
        finally:
            self.stop()

    def stop(self) -> None:
        """Remove the progress bar after a phase has ended or failed."""
        self._bar.stop()
