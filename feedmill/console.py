"""The console of tables on standard output, the bar of long commands on standard error, and words for both."""

import shutil
import sys
from collections.abc import Callable, Iterable

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from feedmill.shared.errors import printable
from feedmill.shared.messages import Post

#: Columns of a console that writes to a pipe or file: wide enough for whole cells.
PIPE_WIDTH = 10_000
#: Width of the id column in characters. Longer ids move the rest of their lines.
ID_WIDTH = 12
#: Cells that a title gets in a terminal that is too narrow.
MIN_TITLE_WIDTH = 20


def output_console() -> Console:
    """Return a console for standard output. Without a terminal, it shows whole cells."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


class LiveBar(Progress):
    """Progress on a terminal, which asks for its figures at each redraw: description, amount done, total or None."""

    def __init__(self, notes: Console, figures: Callable[[float], tuple[str, float, float | None]]) -> None:
        self._figures = figures
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        ends = (TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(*columns, *ends, console=notes, transient=True, disable=not notes.is_terminal)
        self.add_task("", total=None)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            description, done, total = self._figures(task.elapsed or 0.0)
            self.update(task.id, description=description, completed=done, total=total)
        return super().get_renderables()


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
