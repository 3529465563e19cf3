"""Entry point of the `feedmill` command."""

import atexit
import gc
import os
import signal
import sys


def main() -> None:
    """Lock the data folder of `up`, then run the command of feedmill/cli/main.py."""
    _open_closed_streams()
    gc.set_threshold(20_000)  # imports make a million objects and little garbage
    atexit.register(gc.freeze)  # runs last: the exit would search torch's objects for garbage, which takes a second
    # Until the command runs, Ctrl-C ends the process without a traceback: imports take a second, and hold nothing.
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from feedmill.stack.lock import lock_early  # noqa: PLC0415 - after the streams are open

    lock_early(sys.argv[1:])
    from feedmill.cli.main import run  # noqa: PLC0415 - takes a second

    signal.signal(signal.SIGINT, interrupt)
    run()


def _open_closed_streams() -> None:
    """Replace closed standard streams, as some daemons leave them, by the null device. Python has None for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # In this order, it gets the stream's descriptor, the lowest that is free. A file of posts must not get it.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - open until the end


if __name__ == "__main__":
    main()
