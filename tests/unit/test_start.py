"""feedmill/stack/start.py: progress while the embedded stack starts."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from feedmill.stack.start import start


class Starting:
    """A stack whose only process answers at once."""

    step, notes = "loading the model", ["port 1 is taken [/x]"]

    def start(self) -> Iterator[str]:
        yield "worker [/x]"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_shows_the_current_step_in_a_terminal_only(is_terminal: bool) -> None:
    output = io.StringIO()
    stack: Any = Starting()
    start(stack, Console(file=output, force_terminal=is_terminal, width=80))
    assert "✓ worker [/x]\n" in output.getvalue().replace("\x1b[32m✓\x1b[0m", "✓")
    assert " port 1 is taken [/x]\n" in output.getvalue()
    assert ("loading the model …" in output.getvalue()) == is_terminal
