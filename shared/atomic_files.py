"""Replace files atomically: readers and later runs see the old file or the new one, never a part of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """Return the name under which a file is written before it replaces `path`."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename that file to `path` at the end of the block.

    After an error, `path` is unchanged and the temporary file is deleted. If the block writes no file, `path` is
    unchanged as well. Only one process may replace a file at a time. Raises OSError.

    durable: sync the file to disk, so that it survives a power failure.
    """
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)  # left by a process that was killed, possibly with other permissions
    try:
        yield temporary
        if temporary.exists():
            publish(temporary, path, durable)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path, durable: bool = True) -> None:
    """Rename a complete file to `path`, synced to disk if `durable`. Raises OSError."""
    if durable:
        sync(temporary)
    temporary.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Write a file or a folder from the system's cache to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
