"""The console of tables on standard output, the progress of long commands on standard error, and words for both."""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich import progress
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from feedmill.shared.errors import printable
from feedmill.shared.messages import Post

#: Columns of a console that writes to a pipe or file: wide enough for whole cells.
PIPE_WIDTH = 10_000
#: Width of the id column in characters. Longer ids move the rest of their lines.
ID_WIDTH = 12
#: Cells that a title gets in a terminal that is too narrow.
MIN_TITLE_WIDTH = 20
#: Seconds between progress lines if there is no progress bar.
PROGRESS_INTERVAL_S = 10.0

Counted = TypeVar("Counted")


def output_console() -> Console:
    """Return a console for standard output. Without a terminal, it shows whole cells."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _columns(figure: progress.ProgressColumn) -> tuple[progress.ProgressColumn, ...]:
    description = progress.TextColumn("{task.description}", markup=False)
    return progress.SpinnerColumn(), description, progress.BarColumn(), figure, progress.TimeRemainingColumn()


class LiveBar(progress.Progress):
    """Progress on a terminal, which asks for its figures at each redraw: description, amount done, total or None."""

    def __init__(self, notes: Console, figures: Callable[[float], tuple[str, float, float | None]]) -> None:
        self._figures = figures
        columns = _columns(progress.TimeElapsedColumn())
        super().__init__(*columns, console=notes, transient=True, disable=not notes.is_terminal)
        self.add_task("", total=None)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            description, done, total = self._figures(task.elapsed or 0.0)
            self.update(task.id, description=description, completed=done, total=total)
        return super().get_renderables()


class Report:
    """A bar for each phase on a terminal; else a line for each phase, and every ten seconds. Silent without `notes`."""

    def __init__(self, notes: Console | None = None) -> None:
        self._notes = notes or Console(quiet=True)
        self._bar, self._what = progress.Progress(disable=True), ""
        self._printed_at = 0.0

    def print(self, line: str) -> None:
        self._notes.print(printable(line), markup=False)

    def phase(self, what: str, total: int | None = None) -> None:
        """Begin a phase. total: number of its posts or steps, if known."""
        self.stop()
        columns, is_terminal = _columns(progress.MofNCompleteColumn()), self._notes.is_terminal
        self._bar = progress.Progress(*columns, console=self._notes, transient=True, disable=not is_terminal)
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


def notes_console() -> Console:
    """Return a console for notes on standard error, whose lines a terminal wraps."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 post` or `1,200 posts`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """Format a duration as seconds, minutes, hours or days."""
    for unit, length, enough in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < enough:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def with_title(start: str, post: Post) -> str:
    """Append the post's title, or else its body, to the start of a line. Only a terminal gets it cut to its width."""
    title = Text(printable(" ".join((post.title or post.body).split())))
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - cell_len(start)
        title.truncate(max(room, MIN_TITLE_WIDTH), overflow="ellipsis")
    return f"{start}{title.plain}"
