"""Replace files atomically: readers and later runs see the old file or the new one, never a part
of it.

A replaced file keeps its mode and its owner. A symbolic link stays one: the file that it names is
replaced. Pipes and devices, such as /dev/stdout, are written directly, because there is no file to
replace.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Mode of a file that is being written and will replace another, until it gets that one's mode.
PRIVATE = stat.S_IRUSR | stat.S_IWUSR
#: Maximum bytes of the name of a file beside an output: 143 fit on eCryptfs, and 255 on most other
#: file systems.
MAX_NAME_BYTES = 143
#: Characters of the digest that keeps shortened names apart.
DIGEST_CHARACTERS = 16
#: Argument of chown for an owner that stays.
KEEPS = -1
#: Errors of chown: this user may not give the file away, this user namespace does not have the
#: owner, or the file system stores no owners.
REFUSALS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
#: Bits from the rights of others to those of the group, in a mode.
GROUP_SHIFT = 3


def temporary_path(path: Path) -> Path:
    """Return the name under which a file is written before it replaces `path`."""
    target = final_path(path)
    name = fitting_name(f".{target.name}", ".tmp")
    return target.with_name(name)


def fitting_name(start: str, ending: str) -> str:
    """Return `start` and `ending` as a file's name.

    A long start is cut, and gets a digest of what it was.

    A name of 255 bytes is valid for an output, but leaves no room for the ending of a file beside
    it.
    """
    name = start + ending
    if len(os.fsencode(name)) <= MAX_NAME_BYTES:
        return name
    data = os.fsencode(start)
    digest = hashlib.sha256(data).hexdigest()
    ending = f"-{digest[:DIGEST_CHARACTERS]}{ending}"
    room = max(0, MAX_NAME_BYTES - len(os.fsencode(ending)))
    beginning = data[:room].decode(errors="ignore")  # no part of a character
    return beginning + ending


def final_path(path: Path) -> Path:
    """Return the path that symbolic links lead to; it may not exist."""
    return Path(os.path.realpath(path))


def is_special(path: Path) -> bool:
    """Return whether the path leads to a pipe, a socket or a device; false if there is no access
    to it.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    is_usual = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    return not is_usual


@contextmanager
def replacing(
    path: Path, durable: bool = False, mode: int | None = None
) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename that file to `path` at the end of the block.

    The block writes the whole file. After an error, `path` is unchanged and the temporary file is
    deleted. Only one process may replace a file at a time. Raises OSError.

    durable: sync the file to disk, so that it survives a power failure. mode: permissions; None
    keeps those of an existing file, and gives a new one those of the umask.
    """
    if is_special(path):
        yield path
        return
    temporary = temporary_path(path)
    # left by a process that was killed, possibly with other permissions
    temporary.unlink(missing_ok=True)
    try:
        if mode is not None or path.exists():
            # Before the content is there: a private file must not be readable while it is written.
            temporary.touch(PRIVATE, exist_ok=False)
        yield temporary
        if temporary.exists():
            if mode is not None:
                temporary.chmod(mode)
            publish(
                temporary,
                path,
                durable=durable,
                keeps_mode=mode is None,
            )
    finally:
        temporary.unlink(missing_ok=True)


def publish(
    temporary: Path, path: Path, *, durable: bool = True, keeps_mode: bool = True
) -> None:
    """Rename a complete file to `path`, synced to disk if `durable`. Raises OSError.

    keeps_mode: give the new file the mode and the owner of the one that it replaces.
    """
    target = final_path(path)
    if keeps_mode:
        with suppress(FileNotFoundError):  # nothing to replace
            _copy_owner_and_mode(target, temporary)
    if durable:
        sync(temporary)
    temporary.replace(target)
    if durable:
        sync(target.parent)


def _copy_owner_and_mode(source: Path, target: Path) -> None:
    """Give a file the owner, the group and the mode of another, as far as this user and the file
    system allow.

    If the group stays another one, it may do no more than everybody. Raises OSError.
    """
    status = source.stat()
    mode = stat.S_IMODE(status.st_mode)
    if not _changes_owner(target, status.st_uid, status.st_gid):
        _changes_owner(target, KEEPS, status.st_gid)
    if target.stat().st_gid != status.st_gid:
        mode = _without_rights_of_group(mode)
    with suppress(PermissionError):
        target.chmod(mode)


def _changes_owner(path: Path, user: int, group: int) -> bool:
    """Return whether the file now has this owner and this group; false if that is refused."""
    try:
        os.chown(path, user, group)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return False
    return True


def _without_rights_of_group(mode: int) -> int:
    """Return the mode without rights that the group has and others have not."""
    others = mode & stat.S_IRWXO
    shared_with_others = others << GROUP_SHIFT
    of_group = mode & stat.S_IRWXG
    without_group = mode & ~(stat.S_IRWXG | stat.S_ISGID)
    return without_group | (of_group & shared_with_others)


def sync(path: Path) -> None:
    """Write a file or a folder from the system's cache to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
