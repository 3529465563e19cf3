"""Entry point of the `feedmill` command: verify that Python imports our packages, then run feedmill/cli/main.py."""

import os
import signal
import sys

from feedmill.packages import shadowed_package


def main() -> None:
    """Run the command; exit with status 2 if another package shadows one of ours."""
    _open_closed_streams()
    # Until the command runs, Ctrl-C ends the process without a traceback: imports take a second, and hold nothing.
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if problem := shadowed_package():
        sys.stderr.write(f"feedmill: {problem}\n")
        sys.exit(2)
    from feedmill.stack.lock import lock_early  # noqa: PLC0415 - imports the packages checked above

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
