"""Let signals end the processes that a task forks, as they do in a prefork worker's processes.

A forked process inherits the worker's handlers, which only note that a shutdown was requested, and
nothing in the child looks: `multiprocessing.Process.terminate` would have no effect. Signals are
blocked while a process forks, because Python forgets those that arrive in the child before it has
its own handlers.
"""

import os
import signal
from threading import local


class _Mask(local):
    """The signals that a thread blocked before it forked."""

    def __init__(self) -> None:
        self.signals: set[signal.Signals | int] = set()


_mask = _Mask()


def restore_signals_in_children() -> None:
    """Restore the default handlers in each process that this one forks from now on.

    Processes that execute a program, as those of `subprocess`, have them anyway.
    """
    os.register_at_fork(
        before=_block,
        after_in_parent=_unblock,
        after_in_child=_restore,
    )


def _block() -> None:
    _mask.signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.signals)


def _restore() -> None:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, signal.SIG_DFL)
    _unblock()
