"""The data folder of a `feedmill up`: which server wrote it, in which format, who may read it, and
whether it is full.

The folder outlives the programs that write it. A redis-server that is installed later may not read
another one's files, and another version of Feedmill may keep its records under other keys: it
would start as if the folder were empty, and send every post again.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.shared import keys
from feedmill.shared.atomic_files import is_special, replacing
from feedmill.shared.broker import OWN_KEYS, TRANSPORT_KEYS
from feedmill.shared.errors import StackError, printable, truncate
from feedmill.stack.lock import unusable

#: Version of the keys and records that Feedmill stores in Redis. Raise it with each change that an
#: earlier version cannot read, or that makes records of earlier versions unreadable.
FORMAT = 1
#: File in the data folder with the format and the server of its data.
FORMAT_FILE = "format.json"
#: Its fields as Feedmill writes them: names of servers, and versions such as 7.0.15.
SERVER_NAME = re.compile(r"[A-Za-z0-9_]{1,40}")
SERVER_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}")
#: The first supported servers. Older ones never wrote a data folder.
FIRST_SERVERS = {"Redis": (7, 0), "Valkey": (8, 0)}
#: Advice about data of another version of Feedmill.
OTHER_VERSION = (
    "Use the version that wrote them, for example to export the results, or another "
    "--data-folder."
)
#: File that is written and deleted to find out whether the disk takes data.
PROBE_FILE = ".probe"
#: Size of that file: enough for Redis to start.
PROBE_BYTES = 1 << 16
#: Redis' data files in the folder.
DATA_FILES = ("appendonlydir/*", "*.aof", "*.rdb")
#: Other files that hold posts, or passwords.
PRIVATE_FILES = ("*.log", "*.json")
#: Permissions of other users.
OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: The first Redis whose files no Valkey reads.
FIRST_UNREADABLE_REDIS = (7, 4)
#: The first Valkey whose files have a format of its own, and their first bytes.
FIRST_OWN_VALKEY = (9, 0)
VALKEY_MAGIC = b"VALKEY"
#: Bytes of a JSON file in the folder: it has a few short fields.
MAX_JSON_BYTES = 1 << 16
#: Keys that one SCAN examines.
SCAN_COUNT = 1000


class Server(NamedTuple):
    """A program that reads and writes data folders: Redis or Valkey, and its version."""

    name: str
    version: tuple[int, ...]

    @property
    def number(self) -> str:
        """Its version as text, such as 7.0.15."""
        numbers = map(str, self.version)
        return ".".join(numbers)

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

    def reads(self, writer: "Server") -> bool:
        """Return whether this server reads the other one's data."""
        if self.name == writer.name:
            return self.version[:2] >= writer.version[:2]
        if (self.name, writer.name) != ("Valkey", "Redis"):
            return False
        return writer.version < FIRST_UNREADABLE_REDIS


def read_json(path: Path) -> Any:
    """Return what a file of the folder contains.

    Raises OSError, and ValueError for anything but a short JSON file.

    Opening a pipe would wait for a writer.
    """
    if is_special(path):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError("too long")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_writer(folder: Path) -> Server | None:
    """Return the server that FORMAT_FILE names; None without the file.

    Raises StackError for another format.
    """
    path = folder / FORMAT_FILE
    try:
        stored = read_json(path)
        number = stored["format"]
        if type(number) is not int:
            raise ValueError("not a number")
        if number != FORMAT:
            shown_number = truncate(str(number))
            raise StackError(
                f"The data in {folder} have format {shown_number}, and this version of "
                f"Feedmill reads format {FORMAT}. {OTHER_VERSION}"
            )
        name = stored["server"]
        version = stored["version"]
        return _server_of(name, version)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StackError(unusable(path, error)) from None
    except (ValueError, KeyError, TypeError):
        raise StackError(
            f"Cannot use {path}: it is damaged. Delete it if this version of Feedmill wrote the "
            "data, or use another --data-folder."
        ) from None


def _server_of(name: object, version: object) -> Server:
    """Return the server with a stored name and version.

    Raises ValueError unless Feedmill may have written them.

    Forks of Redis have other names: `reads` decides about them.
    """
    if not isinstance(name, str) or not SERVER_NAME.fullmatch(name):
        raise ValueError("not the name of a server")
    if not isinstance(version, str) or not SERVER_VERSION.fullmatch(version):
        raise ValueError("not a version")
    numbers = version.split(".")
    server = Server(
        name=name,
        version=tuple(map(int, numbers)),
    )
    oldest = FIRST_SERVERS.get(name)
    if oldest is not None and server.version < oldest:
        raise ValueError("older than the first supported server")
    return server


def guess_writer(folder: Path) -> Server | None:
    """Return the oldest Valkey with files of its own if one wrote a folder without FORMAT_FILE;
    None if others did.
    """
    for path in data_files(folder):
        try:
            with path.open("rb") as file:
                first_bytes = file.read(len(VALKEY_MAGIC))
        except OSError:
            continue
        if first_bytes == VALKEY_MAGIC:
            return Server("Valkey", FIRST_OWN_VALKEY)
    return None


def record_server(folder: Path, server: Server) -> None:
    """Store the format and the server of the data. Raises StackError."""
    path = folder / FORMAT_FILE
    stored = {
        "format": FORMAT,
        "server": server.name,
        "version": server.number,
    }
    text = json.dumps(stored)
    try:
        with replacing(path, mode=0o600) as temporary:
            temporary.write_text(f"{text}\n")
    except OSError as error:
        raise StackError(unusable(path, error)) from None


def check_keys(redis: Redis, folder: Path) -> None:
    """Check that data without a known format have only keys that this version knows.

    Raises StackError.

    Lists are waiting messages: other applications may have queues of any name.
    """
    for raw_key in _own_keys(redis):
        key = raw_key.decode(errors="backslashreplace")
        if not is_known(key) and redis.type(raw_key) != "list":
            raise StackError(
                f"Another version of Feedmill wrote the data in {folder}: this one does not know "
                f"the key {printable(key):.80}. {OTHER_VERSION}"
            )


def _own_keys(redis: Any) -> Iterator[bytes]:
    """Yield Feedmill's keys. What a producer has written there need not be UTF-8."""
    undecoded = {NEVER_DECODE: True}
    cursor = None
    while cursor != 0:
        cursor, keys = redis.scan(
            cursor or 0,
            match=f"{OWN_KEYS}*",
            count=SCAN_COUNT,
            **undecoded,
        )
        yield from keys


def is_known(key: str) -> bool:
    """Return whether this version of Feedmill writes the key."""
    names = {value for name, value in vars(keys).items() if name.isupper()}
    names.update(TRANSPORT_KEYS.values())
    if key in names:
        return True
    beginnings = [name for name in names if name.endswith(":")]
    # Those of their generations.
    beginnings += [
        f"{keys.MARKS}:",
        f"{keys.STORED}:",
    ]
    return key.startswith(tuple(beginnings))


def data_files(folder: Path) -> Iterator[Path]:
    """Yield Redis' data files in the folder."""
    for pattern in DATA_FILES:
        yield from sorted(folder.glob(pattern))


def make_private(folder: Path) -> None:
    """Take the permissions of others from files that hold posts or passwords, which another umask
    may have given.
    """
    paths = [folder / "appendonlydir"]
    for pattern in (*DATA_FILES, *PRIVATE_FILES):
        paths += folder.glob(pattern)
    for path in paths:
        with suppress(OSError):  # it does not exist, or belongs to another user
            status = path.stat()
            mode = stat.S_IMODE(status.st_mode)
            own_mode = mode & ~OTHERS
            if own_mode != mode:
                path.chmod(own_mode)


def exposure_of(folder: Path) -> str:
    """Return that other users have access to the folder, and what to do; "" if they do not."""
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if not mode & OTHERS:
        return ""
    right = "list"
    if mode & OTHERS_WRITE:
        right = "replace"
    path = printable(str(folder))
    return f"Other users may {right} the files in {path} (mode {mode:04o}). Run `chmod 700` on it."


def problem_of(folder: Path) -> str:
    """Return why the folder takes no data, and what to do; "" if it does.

    Writes and deletes a file.
    """
    probe = folder / PROBE_FILE
    try:
        try:
            content = os.urandom(PROBE_BYTES)  # random, because some disks compress
            probe.write_bytes(content)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return unusable(folder, error)
    return ""
