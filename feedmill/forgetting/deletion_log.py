"""The log of deletions: what was forgotten and when, so that it can be forgotten again after a
restore.

Entries are only appended, one JSON object a line, synced to disk. The log is not bounded: an entry
that is missing would bring deleted posts back. It holds ids, which a replay needs, and never a
text. An entry is written before the deletion, and another one after it, so that an interrupted
deletion shows.
"""

import fcntl
import getpass
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from feedmill.forgetting.selection import Selection, are_texts, parse_selection
from feedmill.shared.errors import UserError, explain_unwritable, printable
from feedmill.shared.settings import Settings

#: File in the data folder.
LOG_FILE = "forgotten.jsonl"
#: Posts per entry, so that a line has a bounded length; and that length in characters.
IDS_PER_ENTRY = 10_000
MAX_LINE = 2**23
#: Version of the entries.
VERSION = 1


class Deletion(NamedTuple):
    """An entry of the log.

    name: the same in the entries before and after a deletion. at: seconds since 1970. ids: posts
    that were found. counts: numbers of removed items; None before the deletion.
    """

    name: str
    at: float
    by: str
    selection: Selection
    ids: Sequence[str]
    counts: Mapping[str, int] | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "version": VERSION,
            "name": self.name,
            "at": self.at,
            "date": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds"),
            "by": self.by,
            "selection": self.selection.to_dict(),
            "ids": list(self.ids),
        }
        if self.note:
            fields["note"] = self.note
        if self.counts is not None:
            fields["counts"] = dict(self.counts)
        return fields


def begin(selection: Selection, ids: Sequence[str], note: str) -> list[Deletion]:
    """Return the entries of a deletion that begins now."""
    at = time.time()
    by = _user()
    entries = []
    for start in range(0, max(1, len(ids)), IDS_PER_ENTRY):
        end = start + IDS_PER_ENTRY
        entry = Deletion(
            name=token_hex(8),
            at=at,
            by=by,
            selection=selection,
            ids=ids[start:end],
            note=note,
        )
        entries.append(entry)
    return entries


def _user() -> str:
    """Return the name of this user; its number if it has none, as in containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def path_of(settings: Settings) -> Path:
    return settings.data_folder / LOG_FILE


def append(path: Path, entries: Iterable[Deletion]) -> None:
    """Append entries, and wait until they are on the disk. Raises UserError."""
    lines = []
    for entry in entries:
        text = json.dumps(entry.to_dict())
        lines.append(f"{text}\n")
    data = "".join(lines).encode()
    with explain_unwritable(path):
        path.parent.mkdir(
            parents=True,
            exist_ok=True,
            mode=0o700,
        )
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _end_last_line(descriptor, path)
            while data:
                written = os.write(descriptor, data)
                data = data[written:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _end_last_line(descriptor: int, path: Path) -> None:
    """Remove a last line that was not written to its end, in a crash or on a full disk: nothing
    was deleted by it. An entry that only lacks its line end gets one. Raises OSError.
    """
    size = os.fstat(descriptor).st_size
    start = max(0, size - MAX_LINE)
    tail = os.pread(descriptor, MAX_LINE, start)
    line = tail[tail.rfind(b"\n") + 1 :]
    if not line:
        return
    if _is_entry(line, path):
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, size - len(line))


def _is_entry(line: bytes, path: Path) -> bool:
    try:
        _parse(line, path, 0)
    except UserError:
        return False
    return True


def read(path: Path) -> Iterator[Deletion]:
    """Yield the entries, oldest first; none without a file.

    Raises UserError for a line that is not an entry. An incomplete last line is skipped, as
    nothing was deleted by it.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if line.endswith(b"\n") or _is_entry(line, path):
                    yield _parse(line, path, number)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"Cannot read {printable(str(path))}: {error.strerror or error}. Give another log."
        ) from None


def _parse(line: bytes, path: Path, number: int) -> Deletion:
    try:
        if len(line) > MAX_LINE:
            raise ValueError("too long")
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.get("version") != VERSION:
            raise ValueError(f"not an entry of version {VERSION}")
        ids = fields["ids"]
        counts = fields.get("counts")
        if not are_texts(ids):
            raise ValueError("ids must be a list of texts")
        if counts is not None and not isinstance(counts, dict):
            raise ValueError("counts must be an object")
        return Deletion(
            name=str(fields["name"]),
            at=float(fields["at"]),
            by=str(fields["by"]),
            selection=parse_selection(fields["selection"]),
            ids=ids,
            counts=counts,
            note=str(fields.get("note", "")),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{printable(str(path))}:{number} is not an entry of a log of deletions "
            f"({printable(str(error)):.200}). Restore the log from a backup, or remove the line."
        ) from None


def by_name(entries: Iterable[Deletion]) -> list[Deletion]:
    """Return each deletion once, with its counts if it was finished, oldest first."""
    deletions: dict[str, Deletion] = {}
    for entry in entries:
        name = entry.name
        earlier = deletions.get(name)
        if earlier is None:
            deletions[name] = entry
        else:
            deletions[name] = earlier._replace(counts=entry.counts)
    return list(deletions.values())


def unfinished(path: Path, deletions: Sequence[Deletion]) -> list[Deletion]:
    """Return those of these deletions that the log does not have as finished."""
    if not deletions:
        return []
    finished = set()
    for entry in read(path):
        if entry.counts is not None:
            finished.add(entry.name)
    return [deletion for deletion in deletions if deletion.name not in finished]
