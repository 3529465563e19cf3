"""Lock the data folder of an embedded stack, by which other commands know that it runs."""

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from shared.errors import StackError
from shared.linux import process_namespace
from shared.settings import LOCK_FILE, STACK_FILE

#: Attempts to lock the data folder, and the seconds between them.
LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 0.05


def lock_folder(folder: Path) -> IO[str]:
    """Lock the data folder until the file is closed. Raises StackError if another stack uses it."""
    lock = _open_locked(folder)
    if lock is None:
        raise StackError(
            f"`feedmill up` is already running with data in {folder}. Stop it with `feedmill down`, or use another "
            "--data-folder."
        )
    try:
        lock.write(json.dumps({"pid": os.getpid(), "namespace": process_namespace()}))  # for `feedmill down`
        lock.flush()
    except OSError as error:
        raise StackError(f"Cannot write {folder / LOCK_FILE}: {error.strerror}. Set another --data-folder.") from None
    return lock


def _open_locked(folder: Path) -> IO[str] | None:
    """Return the locked file, emptied; None if another stack holds the lock."""
    lock = (folder / LOCK_FILE).open("a")
    if not _locks(lock):
        lock.close()
        return None
    (folder / STACK_FILE).unlink(missing_ok=True)  # a killed stack leaves it behind
    lock.truncate(0)
    return lock


def _locks(lock: IO[str]) -> bool:
    """Lock the file; return False if another stack holds the lock.

    Several attempts are needed, because commands that check for a running stack (`is_folder_locked`) hold the lock for
    microseconds.
    """
    for _ in range(LOCK_ATTEMPTS):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOCK_PAUSE_S)
    return False
