"""Start the embedded stack and show the progress: a line for each process, and in a terminal a spinner meanwhile."""

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from feedmill.stack.embedded import Stack


def start(stack: Stack, notes: Console) -> None:
    """Start the stack; print a line about each process once it answers. Raises StackError."""
    notes.print("Starting Redis, a worker and Flower")
    for note in stack.notes:
        notes.print("[yellow]![/]", Text(note))
    with Live(Spinner("dots", _Step(stack)), console=notes, transient=True):
        for line in stack.start():
            notes.print("[green]✓[/]", Text(line))


class _Step:
    """The current step of a starting stack. rich reads it at each redraw."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def __rich__(self) -> RenderableType:
        return Text(f"{self._stack.step} …", no_wrap=True, overflow="ellipsis")
