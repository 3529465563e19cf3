"""Entry point of the `feedmill` command: verify that Python imports our packages, then run feedmill/cli/main.py."""

import os
import signal
import sys
from typing import NoReturn

from feedmill.packages import shadowed_package

#: Commands that start the embedded stack, and flags with which they do not.
STARTING_COMMANDS, NOT_STARTING_FLAGS = ("demo", "up"), ("--help", "--own")
#: Commands that run until a signal, which is their normal end (docs/reference/errors.md). They handle it themselves
#: once they have started.
SERVICES = ("up", "worker", "flower", "metrics", "ingest")


def main() -> None:
    """Run the command; exit with status 2 if another package shadows one of ours."""
    _open_closed_streams()
    # Until the command runs, Ctrl-C ends the process without a traceback: imports take a second, and hold nothing.
    interrupt = signal.getsignal(signal.SIGINT)
    if _is_service(sys.argv[1:]):
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
        and (sys.argv[1] != "up" or _lock_data_folder())
    ):
        # Before the imports, which take seconds on a slow disk.
        sys.stderr.write("Starting Redis, a worker and Flower\n")
        sys.stderr.flush()
    from feedmill.cli.main import run  # noqa: PLC0415 - imports the packages checked above
    from feedmill.stack.signals import repeat_dropped_interrupts  # noqa: PLC0415

    repeat_dropped_interrupts()
    signal.signal(signal.SIGINT, interrupt)
    run()


def _is_service(arguments: list[str]) -> bool:
    """Return whether the command runs until a signal."""
    if arguments[:1] == ["export"]:
        return "--follow" in arguments
    return bool(arguments) and arguments[0] in SERVICES and not {"--once", "gaps"}.intersection(arguments)


def _open_closed_streams() -> None:
    """Replace closed standard streams, as some daemons leave them, by the null device. Python has None for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # In this order, it gets the stream's descriptor, the lowest that is free.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - open until the end


def _lock_data_folder() -> bool:
    """Lock the data folder of `feedmill up`, so that other commands know that it is starting.

    Returns False if another one uses the folder. Problems are left to the command, which reports them.
    """
    from feedmill.stack.lock import lock_early  # noqa: PLC0415 - imports the packages checked above
    from shared.errors import SettingsError  # noqa: PLC0415
    from shared.settings import load  # noqa: PLC0415

    flag = "--data-folder"
    given = [
        argument.partition("=")[2] if "=" in argument else following
        for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True)
        if argument.split("=")[0] == flag
    ]
    try:
        settings = load(data_folder=given[-1] if given else None)
    except SettingsError:
        return True
    return settings.redis_url is not None or lock_early(settings.data_folder)


def _end_service(*_: object) -> NoReturn:
    """End a service that has not started. No exception: packages with C code replace or ignore it in imports."""
    os._exit(0)


if __name__ == "__main__":
    main()
