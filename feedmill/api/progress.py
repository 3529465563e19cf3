"""A progress bar for terminals and notebooks."""

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Seconds between two updates in a notebook.
NOTEBOOK_INTERVAL_S = 0.2
#: Characters of the bar's line in a notebook.
NOTEBOOK_WIDTH = 100


class Advance(Protocol):
    """Move the bar forward to this number of items."""

    def __call__(self, done: int) -> None: ...


@contextmanager
def progress_bar(shown: bool, what: str, total: int | None) -> Iterator[Advance]:
    """Show a bar until the block ends. total: number of items; None if unknown."""
    if not shown:
        yield lambda done: None  # noqa: ARG005 - named in the protocol
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    if in_notebook():
        notebook = _NotebookBar(columns, what, total)
        try:
            yield notebook.advance
        finally:
            notebook.draw()
        return
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


class _NotebookBar:
    """One line of text that is updated in place. rich's own bar needs ipywidgets in a notebook."""

    def __init__(self, columns: Any, what: str, total: int | None) -> None:
        show: Any = import_module("IPython.display").display
        self._bar = Progress(*columns, console=Console(file=io.StringIO()), auto_refresh=False)
        self._task = self._bar.add_task(what, total=total)
        self._drawn_at = time.monotonic()
        self._handle: Any = show({"text/plain": self._line()}, raw=True, display_id=True)

    def advance(self, done: int) -> None:
        self._bar.update(self._task, completed=done)
        if time.monotonic() - self._drawn_at >= NOTEBOOK_INTERVAL_S:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._handle.update({"text/plain": self._line()}, raw=True)

    def _line(self) -> str:
        console = Console(file=io.StringIO(), width=NOTEBOOK_WIDTH, force_terminal=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(self._bar.get_renderable())
        return captured.get().rstrip()
