"""Context managers that handle signals inside a block."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


def exit_on_signals() -> AbstractContextManager[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside the block, so that `finally` clauses run as after Ctrl-C."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return handle_signals(leave, *not_ignored(signal.SIGTERM, signal.SIGHUP))


def end_service_on_signals() -> AbstractContextManager[None]:
    """Turn the first SIGTERM, SIGHUP or Ctrl-C inside the block into SystemExit(0): services are stopped by them.

    A second signal, which interrupts the clean-up, raises SystemExit(128 + its number).
    """
    is_first = True

    def leave(number: int, _: object) -> None:
        nonlocal is_first
        status, is_first = 0 if is_first else 128 + number, False
        raise SystemExit(status)

    return handle_signals(leave, *not_ignored(*EXIT_SIGNALS))
