"""The `feedmill` command: makes sure of its own packages, then hands over to feedmill/cli.py."""

import sys
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "producers", "workers")


def mixed_up() -> str | None:
    """What is wrong when a package beside ours bears one of our names; None when all four share one parent.

    The names are general, and Python takes the first that it finds: in the working directory, say.
    """
    for name in PACKAGES:
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != HOME / name:
            return (
                f"the package {name!r} should come from {HOME / name}, but Python finds "
                f"{found or 'none'}. Start `feedmill` as installed, or leave the folder that holds the other one."
            )
    return None


def main() -> None:
    if problem := mixed_up():
        sys.stderr.write(f"feedmill: {problem}\n")
        sys.exit(2)
    from feedmill.cli import run  # noqa: PLC0415 - imports the packages that were just checked

    run()


if __name__ == "__main__":
    main()
