"""The console of tables on standard output."""

from typing import Any

from rich.console import Console

#: Columns of a console that writes to a pipe or file: wide enough for whole cells.
PIPE_WIDTH = 10_000


def output_console() -> Console:
    """Return a console for standard output. Without a terminal, it shows whole cells and no trailing blanks."""
    console = Console(highlight=False)
    return console if console.is_terminal else _PipeConsole(highlight=False, width=PIPE_WIDTH)


class _PipeConsole(Console):
    """A console without trailing blanks. rich pads each line of a table."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))
        self.file.flush()
