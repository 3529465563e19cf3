"""Lock the data folder of a `feedmill up`: so other commands see that it runs, and `feedmill down`
stops it.
"""

import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from feedmill.shared.atomic_files import is_special
from feedmill.shared.errors import StackError, printable
from feedmill.shared.linux import process_namespace
from feedmill.shared.settings import LOCK_FILE, is_folder_locked

#: Attempts to lock the data folder. Several are needed, because `is_folder_locked` holds the lock
#: for microseconds.
LOCK_ATTEMPTS = 10
#: Seconds between these attempts, and between checks whether a stack has stopped.
LOCK_PAUSE_S = 0.05
POLL_INTERVAL_S = 0.1
#: The largest process ID of Linux.
MAX_PID = 2**22
#: Errors of a disk that has no room.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def unusable(path: Path, error: OSError) -> str:
    """Return an error of a file or folder as a sentence with what to do."""
    advice = "Correct its permissions, or use another --data-folder."
    if error.errno in FULL_DISK:
        advice = "Free space on its disk, then run the command again; what is stored there stays."
    return f"Cannot use {printable(str(path))}: {error.strerror or error}. {advice}"


def lock_folder(folder: Path) -> IO[str]:
    """Create the data folder, and lock it until the file is closed.

    Raises StackError if another stack uses it.
    """
    try:
        folder.mkdir(
            parents=True,
            exist_ok=True,
            mode=0o700,
        )
        path = folder / LOCK_FILE
        if is_special(path):  # opening a pipe would wait for a reader
            raise StackError(
                f"Cannot use {printable(str(path))}: it is not a regular file. Delete it."
            )
        lock = path.open("a")
        if _locks(lock):
            lock.truncate(0)
            lock.write(
                json.dumps({"pid": os.getpid(), "namespace": process_namespace()})
            )
            lock.flush()
            return lock
    except OSError as error:
        raise StackError(unusable(folder, error)) from None
    lock.close()
    raise StackError(
        f"`feedmill up` is already running with data in {folder}. Stop it with `feedmill down`, "
        "or use another --data-folder."
    )


def _locks(lock: IO[str]) -> bool:
    """Lock the file; return False if another stack holds the lock."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        else:
            return True
    return False


def stop_stack(folder: Path, timeout: float, say: Callable[[str], None]) -> int | None:
    """Send SIGTERM to the stack that uses the folder and wait until it has stopped.

    Return its PID; None without one.

    say: prints a line. Raises StackError if it cannot be stopped, or has not stopped after
    `timeout` seconds.
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
        raise StackError(
            f"{what} belongs to another user. Stop it as that user."
        ) from None
    say("waiting for the worker to finish its messages …")
    deadline = time.monotonic() + timeout
    while is_folder_locked(folder):
        if time.monotonic() > deadline:
            raise StackError(
                f"{what} still runs {timeout:.0f} s after SIGTERM. Run `feedmill "
                "down` again to wait on."
            )
        time.sleep(POLL_INTERVAL_S)
    return pid


def _pid(folder: Path) -> int:
    """Return the PID of the process that holds the lock.

    Raises StackError if it is unknown, or valid elsewhere.
    """
    pid = None
    is_here = False
    # The file may be missing, damaged or that of another version.
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        holder = json.loads((folder / LOCK_FILE).read_text())
        namespace = holder["namespace"]
        is_here = bool(namespace) and namespace == process_namespace()
        pid = holder["pid"]
    if not is_here or type(pid) is not int or not 0 < pid <= MAX_PID:
        raise StackError(
            f"A `feedmill up` uses {folder}, but its process is not known here: it may run in a "
            "container or on another machine. Stop it there."
        )
    return pid
