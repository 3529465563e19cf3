"""Entry point of the `feedmill` command: verify that Python imports our packages, then run feedmill/cli/main.py."""

import os
import signal
import sys
from typing import NoReturn

from feedmill.packages import shadowed_package

#: Commands that start the embedded stack, and flags with which they do not.
STARTING_COMMANDS, NOT_STARTING_FLAGS = ("demo", "up"), ("--help", "--live", "--own")
#: Commands that run until a signal, which is their normal end (docs/reference/errors.md). They handle it themselves
#: once they have started.
SERVICES = ("up", "worker", "trainer", "flower", "metrics")


def main() -> None:
    """Run the command; exit with status 2 if another package shadows one of ours."""
    # Until the command runs, Ctrl-C ends the process without a traceback: imports take a second, and hold nothing.
    interrupt = signal.getsignal(signal.SIGINT)
    if sys.argv[1:2] and sys.argv[1] in SERVICES:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _end_service)
        interrupt = signal.getsignal(signal.SIGINT)
    elif interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if problem := shadowed_package():
        sys.stderr.write(f"feedmill: {problem}\n")
        sys.exit(2)
    if (
        sys.argv[1:2]
        and sys.argv[1] in STARTING_COMMANDS
        and not any(argument.startswith(NOT_STARTING_FLAGS) for argument in sys.argv[2:])
    ):
        # Before the imports, which take seconds on a slow disk.
        sys.stderr.write("Starting Redis, a worker and Flower\n")
        sys.stderr.flush()
    from feedmill.cli.main import run  # noqa: PLC0415 - imports the packages checked above

    signal.signal(signal.SIGINT, interrupt)
    run()


def _end_service(*_: object) -> NoReturn:
    """End a service that has not started. No exception: packages with C code replace or ignore it in imports."""
    os._exit(0)


if __name__ == "__main__":
    main()
