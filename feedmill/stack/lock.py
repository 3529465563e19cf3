"""Lock the data folder of a `feedmill up`: so other commands see that it runs, and `feedmill down` stops it."""

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from feedmill.shared.errors import StackError
from feedmill.shared.linux import process_namespace
from feedmill.shared.settings import LOCK_FILE, is_folder_locked

#: Attempts to lock the data folder. Several are needed, because `is_folder_locked` holds the lock for microseconds.
LOCK_ATTEMPTS = 10
#: Seconds between these attempts, and between checks whether a stack has stopped.
LOCK_PAUSE_S, POLL_INTERVAL_S = 0.05, 0.1


def lock_folder(folder: Path) -> IO[str]:
    """Create the data folder, and lock it until the file is closed. Raises StackError if another stack uses it."""
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
