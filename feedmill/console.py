"""The console of tables on standard output, the progress of long commands on standard error, and
words for both.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from rich import progress
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from feedmill.shared.errors import printable
from feedmill.shared.messages import Classification, Post
from feedmill.shared.none_of_these import NO_LABEL

#: Columns of a console that writes to a pipe or file: wide enough for whole cells.
PIPE_WIDTH = 10_000
#: Width of the id column in characters. Longer ids move the rest of their lines.
ID_WIDTH = 12
#: Cells that a title gets in a terminal that is too narrow.
MIN_TITLE_WIDTH = 20
#: Seconds between progress lines if there is no progress bar.
PROGRESS_INTERVAL_S = 10.0

Counted = TypeVar("Counted")


def without_label(classification: Classification) -> str:
    """Return the words in place of the label of a post without one, with its language if known."""
    if classification.language is None:
        return NO_LABEL
    return f"{NO_LABEL}, language {classification.language}"


def output_console() -> Console:
    """Return a console for standard output. Without a terminal, it shows whole cells."""
    width = None
    if not sys.stdout.isatty():
        width = PIPE_WIDTH
    return Console(highlight=False, width=width)


def _columns(figure: progress.ProgressColumn) -> tuple[progress.ProgressColumn, ...]:
    description = progress.TextColumn("{task.description}", markup=False)
    return (
        progress.SpinnerColumn(),
        description,
        progress.BarColumn(),
        figure,
        progress.TimeRemainingColumn(),
    )


class Figures(NamedTuple):
    """The content of a bar: a description, the amount done, and the total if it is known."""

    description: str
    done: float
    total: float | None


class LiveBar(progress.Progress):
    """Progress on a terminal, which asks for its figures at each redraw, with the seconds that
    have passed.
    """

    def __init__(
        self,
        notes: Console,
        figures: Callable[[float], Figures],
    ) -> None:
        self._figures = figures
        columns = _columns(progress.TimeElapsedColumn())
        super().__init__(
            *columns,
            console=notes,
            transient=True,
            disable=not notes.is_terminal,
        )
        self.add_task("", total=None)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            elapsed = task.elapsed or 0.0
            figures = self._figures(elapsed)
            self.update(
                task.id,
                description=figures.description,
                completed=figures.done,
                total=figures.total,
            )
        return super().get_renderables()


class Report:
    """A bar for each phase on a terminal; else a line for each phase, and every ten seconds.

    Silent without `notes`.
    """

    def __init__(self, notes: Console | None = None) -> None:
        self._notes = notes or Console(quiet=True)
        self._bar = progress.Progress(disable=True)
        self._what = ""
        self._printed_at = 0.0

    def print(self, line: str) -> None:
        text = printable(line)
        self._notes.print(text, markup=False)

    def phase(self, what: str, total: int | None = None) -> None:
        """Begin a phase. total: number of its posts or steps, if known."""
        self.stop()
        columns = _columns(progress.MofNCompleteColumn())
        is_terminal = self._notes.is_terminal
        self._bar = progress.Progress(
            *columns,
            console=self._notes,
            transient=True,
            disable=not is_terminal,
        )
        self._what = printable(what)
        self._printed_at = time.monotonic()
        self._bar.add_task(self._what, total=total)
        self._bar.start()
        if not is_terminal:
            self.print(what)

    def advance(self, done: int, note: str = "") -> None:
        """Report how much of the phase is done. note: follows the phase, such as ", loss 0.3"."""
        bar = self._bar
        (task,) = bar.tasks
        description = f"{self._what}{note}"
        bar.update(
            task.id,
            completed=done,
            description=description,
        )
        if not bar.disable:
            return
        since_printed_s = time.monotonic() - self._printed_at
        if done != task.total and since_printed_s <= PROGRESS_INTERVAL_S:
            return
        remaining = ""
        remaining_s = task.time_remaining
        if remaining_s:
            duration = span(remaining_s)
            remaining = f", about {duration} left"
        total = task.total or 0
        self.print(f"{description}, {done:,} of {total:,}{remaining}")
        self._printed_at = time.monotonic()

    def counting(
        self, what: str, items: Iterable[Counted], total: int
    ) -> Iterator[Counted]:
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines, whose columns after the first are numbers."""
    text_table = Table(
        box=None,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for index, name in enumerate(columns):
        # In a narrow terminal only the first column wraps: a truncated count would be a wrong
        # number.
        if index == 0:
            text_table.add_column(name)
        else:
            text_table.add_column(
                name,
                justify="right",
                no_wrap=True,
            )
    for row in rows:
        text_table.add_row(*row)
    return text_table


def notes_console() -> Console:
    """Return a console for notes on standard error, whose lines a terminal wraps."""
    return Console(
        stderr=True,
        soft_wrap=True,
        highlight=False,
    )


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun, such as `1 post` or `1,200 posts`. plural: if not the noun
    with an s.
    """
    if count == 1:
        return f"1 {noun}"
    nouns = plural or f"{noun}s"
    return f"{count:,} {nouns}"


def number_text(figure: float | None, form: str) -> str:
    """Format a figure, or a dash if it was not measured. form: as of `format`, such as .3f."""
    if figure is None:
        return "–"
    return format(figure, form)


def span(seconds: float) -> str:
    """Format a duration as seconds, minutes, hours or days."""
    for unit, length, enough in (
        ("s", 1, 120),
        ("min", 60, 7200),
        ("h", 3600, 48 * 3600),
    ):
        if seconds < enough:
            count = seconds / length
            return f"{count:.0f} {unit}"
    days = seconds / 86_400
    return f"{days:.0f} days"


def with_title(start: str, post: Post) -> str:
    """Append the post's title, or else its body, to the start of a line.

    Only a terminal gets it cut to its width.
    """
    text = post.title or post.body
    words = text.split()
    line = " ".join(words)
    title = Text(printable(line))
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        room = width - cell_len(start)
        room = max(room, MIN_TITLE_WIDTH)
        title.truncate(room, overflow="ellipsis")
    return f"{start}{title.plain}"
