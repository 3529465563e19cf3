"""End a command after Ctrl-C with status 130 and without a traceback, at any time.

Ctrl-C raises KeyboardInterrupt wherever the main thread is. That does not suffice: Python drops it
in a finalizer, which is often the first code to run after a long import; libraries drop it or turn
it into an error of their own, such as a missing package; and a process that exits while torch
computes aborts.

Imports little, because it is imported first.

Relies on these private names of Python: `atexit._run_exitfuncs` (`_run_exitfuncs`) and
`sys._current_exceptions` (`_current_exceptions`).
"""

import atexit
import os
import signal
import sys
import time
from _thread import interrupt_main
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: Seconds after which an interrupt is repeated if the command works on as if nothing had happened.
REPEAT_AFTER_S = 1.0

_received: list[int] = []
_ended: list[bool] = []


def watch() -> None:
    """Note Ctrl-C, and repeat its KeyboardInterrupt if that is dropped.

    Do nothing if Ctrl-C is ignored (nohup).
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)
        sys.unraisablehook = _report


def received() -> bool:
    """Return whether Ctrl-C was pressed, so that an error may be its consequence."""
    return bool(_received)


def stop_watching() -> None:
    """Let Ctrl-C end the process at once, when the command has ended."""
    _ended.append(True)
    handler = signal.getsignal(signal.SIGINT)
    if handler is _note:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end() -> NoReturn:
    """Exit with status 130, without waiting for threads."""
    stop_watching()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    atexit._run_exitfuncs()  # temporary folders are removed there
    os._exit(INTERRUPTED)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if len(_received) == 1:
        from threading import Thread  # noqa: PLC0415 - rarely needed

        Thread(
            target=_insist,
            daemon=True,
        ).start()
    signal.default_int_handler(number, frame)


def _report(dropped: "UnraisableHookArgs") -> None:
    """Report an exception that Python drops, but not KeyboardInterrupt, which is repeated."""
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)


def _insist() -> None:
    """Repeat the interrupt until the main thread handles it."""
    from threading import main_thread  # noqa: PLC0415

    main = main_thread().ident
    while not _ended:
        time.sleep(REPEAT_AFTER_S)
        current: Any = sys._current_exceptions().get(main)  # type: ignore
        error = current
        if isinstance(current, tuple):  # up to Python 3.11
            _, error, _ = current
        if not _ended and not _is_of_interrupt(error):
            interrupt_main()


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is a KeyboardInterrupt, or was raised while one was handled."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
