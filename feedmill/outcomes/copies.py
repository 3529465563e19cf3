"""Remember which exports and answers hold copies of posts outside Redis, so that `feedmill forget`
finds them.

`feedmill export` and `feedmill label` note what they write in a file of the data folder: a copy is
known on the machine, and to the user, that made it. Without a data folder that can be written,
nothing is noted.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit, urlunsplit

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import printable
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: File in the data folder.
COPIES_FILE = "copies.json"
#: Copies that are remembered, the newest first.
MAX_COPIES = 1000
#: Maximum bytes of the file, which nobody but Feedmill writes.
MAX_BYTES = 2**23

Kind = Literal["export", "answers"]


class Copy(NamedTuple):
    """A place with copies of posts.

    place: absolute path, or address of a database without its password. form: of an export to a
    file. table: in a database.
    """

    kind: Kind
    place: str
    form: str | None = None
    table: str | None = None


def note_copy(settings: Settings, copy: Copy) -> None:
    """Remember a copy, as the newest one. A folder that cannot be written is no error: the copy
    can be named when posts are forgotten.
    """
    try:
        with _locked(settings.data_folder):
            newest = dict.fromkeys([copy, *read_copies(settings)])
            copies = list(newest)
            for dropped in copies[MAX_COPIES:]:
                logger.warning(
                    (
                        "cannot note more than %d copies for `feedmill forget`: %s is no longer "
                        "noted; name it when posts are forgotten, or delete it"
                    ),
                    MAX_COPIES,
                    printable(dropped.place),
                )
            entries = []
            for noted in copies[:MAX_COPIES]:
                fields = noted._asdict()
                entries.append(fields)
            path = settings.data_folder / COPIES_FILE
            text = json.dumps(entries, indent=1)
            with replacing(path, mode=0o600) as temporary:
                temporary.write_text(f"{text}\n")
    except OSError as error:
        logger.debug("cannot note the copy %s: %s", copy.place, error)


def read_copies(settings: Settings) -> list[Copy]:
    """Return the copies that are remembered, the newest first; none from a damaged file."""
    path = settings.data_folder / COPIES_FILE
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
        entries = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(entries, list):
        return []
    copies = []
    for entry in entries:
        copy = _copy_of(entry)
        if copy is not None:
            copies.append(copy)
    return copies


def _copy_of(entry: Any) -> Copy | None:
    """Return the copy of an entry; None if it is damaged."""
    if not isinstance(entry, dict) or entry.get("kind") not in get_args(Kind):
        return None
    place = entry.get("place")
    if not isinstance(place, str) or not place:
        return None
    details: dict[str, str | None] = {}
    for name in ("form", "table"):
        value = entry.get(name)
        if value is not None and not isinstance(value, str):
            return None
        details[name] = value
    return Copy(
        kind=entry["kind"],
        place=place,
        form=details["form"],
        table=details["table"],
    )


def without_password(address: str) -> str:
    """Return the address of a database without a password in it. libpq finds one elsewhere."""
    parts = urlsplit(address)
    netloc = parts.netloc
    user, at, host = netloc.rpartition("@")
    name, _, _ = user.partition(":")
    plain_netloc = f"{name}{at}{host}"
    options = parts.query.split("&")
    secrets = ("password=", "sslpassword=")
    plain_options = [
        option for option in options if not option.lower().startswith(secrets)
    ]
    query = "&".join(plain_options)
    return urlunsplit(parts._replace(netloc=plain_netloc, query=query))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing the file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # NFS does not lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
