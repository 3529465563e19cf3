"""Lock the data folder of a `feedmill up`. By this lock, other commands see that it runs, and `feedmill down` stops it.

Imports little, because `feedmill up` locks its folder before it imports the rest, which takes a second. Commands that
start meanwhile would otherwise use another Redis on localhost.
"""

import fcntl
import json
import os
import signal
import time
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from feedmill.shared.errors import StackError, UserError
from feedmill.shared.linux import process_namespace
from feedmill.shared.settings import LOCK_FILE, is_folder_locked, load

#: Attempts to lock the data folder. Several are needed, because `is_folder_locked` holds the lock for microseconds.
LOCK_ATTEMPTS = 10
#: Seconds between these attempts, and between checks whether a stack has stopped.
LOCK_PAUSE_S, POLL_INTERVAL_S = 0.05, 0.1
#: The lock that `lock_early` took, until the stack takes it over, with its folder.
_early: dict[Path, IO[str]] = {}


def lock_early(arguments: Sequence[str]) -> None:
    """Lock the data folder if these are the arguments of `feedmill up`, for a later `lock_folder` in this process.

    Leaves errors to the command.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("command", nargs="?")
    parser.add_argument("--data-folder")
    with suppress(ArgumentError, UserError):
        given, others = parser.parse_known_args(arguments)
        if given.command == "up" and not others:
            folder = load(data_folder=given.data_folder).data_folder
            _early[folder] = lock_folder(folder)


def lock_folder(folder: Path) -> IO[str]:
    """Create the data folder, and lock it until the file is closed. Raises StackError if another stack uses it."""
    if folder in _early:
        return _early.pop(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / LOCK_FILE).open("a")
        if _locks(lock):
            lock.truncate(0)
            lock.write(json.dumps({"pid": os.getpid(), "namespace": process_namespace()}))
            lock.flush()
            return lock
    except OSError as error:
        raise StackError(f"Cannot use the data folder {folder}: {error.strerror}. Set another --data-folder.") from None
    lock.close()
    raise StackError(
        f"`feedmill up` is already running with data in {folder}. Stop it with `feedmill down`, or use another "
        "--data-folder."
    )


def _locks(lock: IO[str]) -> bool:
    """Lock the file; return False if another stack holds the lock."""
    for _ in range(LOCK_ATTEMPTS):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOCK_PAUSE_S)
    return False


def stop_stack(folder: Path, timeout: float, say: Callable[[str], None]) -> int | None:
    """Send SIGTERM to the stack that uses the folder and wait until it has stopped. Return its PID; None without one.

    say: prints a line. Raises StackError if it cannot be stopped, or has not stopped after `timeout` seconds.
    """
    if not is_folder_locked(folder):
        return None
    pid = _pid(folder)
    what = f"Process {pid}, the `feedmill up` with data in {folder},"
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise StackError(f"{what} belongs to another user. Stop it as that user.") from None
    say("waiting for the worker to finish its messages …")
    deadline = time.monotonic() + timeout
    while is_folder_locked(folder):
        if time.monotonic() > deadline:
            raise StackError(f"{what} still runs {timeout:.0f} s after SIGTERM. Run `feedmill down` again to wait on.")
        time.sleep(POLL_INTERVAL_S)
    return pid


def _pid(folder: Path) -> int:
    """Return the PID of the process that holds the lock. Raises StackError if it is unknown, or valid elsewhere."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads((folder / LOCK_FILE).read_text())
        if holder["pid"] > 0 and holder["namespace"] and holder["namespace"] == process_namespace():
            return int(holder["pid"])
    raise StackError(
        f"A `feedmill up` uses {folder}, but its process is not known here: it may run in a container or on another "
        "machine. Stop it there."
    )
