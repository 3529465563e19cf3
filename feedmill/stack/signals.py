"""Handle signals inside a block, and lose none."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Signals that ask a command to end.
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that are not ignored: under nohup, closing the terminal must not end the process."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def handle_signals(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals inside the block, and restore their previous handlers after it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def note_signals(*others: signal.Signals, once: bool = False) -> Iterator[list[int]]:
    """Note EXIT_SIGNALS and others inside the block, and yield the list of their numbers so far.

    once: a second signal has its usual effect.

    For code that starts processes. Python drops an exception that a handler raises during a fork, and at other moments
    such an exception can leave a lock of `subprocess` locked for good.
    """
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in not_ignored(*EXIT_SIGNALS, *others)}

    def note(number: int, _: object) -> None:
        received.append(number)
        if once:
            signal.signal(number, before[signal.Signals(number)])

    with handle_signals(note, *before):
        yield received
