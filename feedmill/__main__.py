"""Entry point of the `feedmill` command: verify that Python imports our packages, then run feedmill/cli/main.py."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "producers", "workers")
#: Commands that start the embedded stack, and flags with which they do not.
STARTING_COMMANDS, NOT_STARTING_FLAGS = ("demo", "up"), ("--help", "--own")


def shadowed_package() -> str | None:
    """Return an error message if another package shadows one of ours, else None.

    The package names are common words, and Python imports the first match on its path, which may lie in the working
    directory.
    """
    for name in PACKAGES:
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != HOME / name:
            return (
                f"package {name!r} must come from {HOME / name}, but Python finds {found or 'none'}. "
                "Run the installed `feedmill` from another directory."
            )
    return None


def main() -> None:
    """Run the command; exit with status 2 if another package shadows one of ours."""
    # Until the command runs, Ctrl-C ends the process without a traceback: imports take a second, and hold nothing.
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
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


if __name__ == "__main__":
    main()
