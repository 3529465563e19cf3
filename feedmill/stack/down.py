"""Stop the `feedmill up` of a data folder from another process."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import StackError
from shared.linux import process_namespace
from shared.settings import LOCK_FILE, is_folder_locked

#: Maximum size of the lock file in bytes.
MAX_FILE_BYTES = 4096
#: Seconds between checks whether the stack has stopped.
POLL_INTERVAL_S = 0.1


def stop_stack(folder: Path, timeout: float, say: Callable[[str], None]) -> int | None:
    """Send SIGTERM to the stack that uses the folder and wait until it has stopped. Return its PID; None without one.

    say: prints a line. Raises StackError if it cannot be stopped, or has not stopped after `timeout` seconds.
    """
    if not is_folder_locked(folder):
        return None
    pid = _pid(folder)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise StackError(
            f"Process {pid}, the `feedmill up` with data in {folder}, belongs to another user. Stop it as that user."
        ) from None
    say("waiting for the worker to finish its messages …")
    deadline = time.monotonic() + timeout
    while is_folder_locked(folder):
        if time.monotonic() > deadline:
            raise StackError(
                f"Process {pid}, the `feedmill up` with data in {folder}, still runs {timeout:.0f} s after SIGTERM. "
                "Run `feedmill down` again to wait longer."
            )
        time.sleep(POLL_INTERVAL_S)
    return pid


def _pid(folder: Path) -> int:
    """Return the PID of the process that holds the lock. Raises StackError if it is unknown, or valid elsewhere."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            found = json.loads(file.read(MAX_FILE_BYTES))
        pid, namespace = int(found["pid"]), found["namespace"]
    except (OSError, ValueError, KeyError, TypeError):
        pid, namespace = 0, ""
    if pid <= 0 or not namespace or namespace != process_namespace():
        raise StackError(
            f"A `feedmill up` uses {folder}, but its process is not known here: it may run in a container or on "
            "another machine. Stop it there."
        )
    return pid
