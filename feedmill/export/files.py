"""Export results to a single file, or to a folder of parts by day. Published files are always complete.

Data is written to a temporary file, and renamed once it is complete and synced to disk. In a folder, the names of the
parts record which stream entries they hold, so a crash never causes duplicates. A single file starts over.

Purged posts are left out: each row is checked when it is read, and all rows of a file again before it is published.
Posts purged later are removed when the same export runs again, every `SWEEP_INTERVAL_S` seconds while an export follows
the stream, and by `purge`. Docs: docs/export.md.
"""

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from feedmill.export.batches import ENTRY, schema_of
from feedmill.export.columns import COLUMNS, UNESCAPED, ExportFilter, check_options
from feedmill.export.rewriting import copy_rows, format_of_file, post_keys
from feedmill.reading.rows import Place, RowReader, id_before, order, seconds_of
from feedmill.shared.atomic_files import publish, replacing, sync, temporary_path
from feedmill.shared.errors import UserError
from feedmill.tables import COMPRESSIONS
from feedmill.tables.writing import writer_to

#: State file of a folder: the export's options and position. Dataset readers ignore names that begin with `_`.
STATE_FILE = "_export.json"
#: Name of a part, with the ids of its first and last stream entry.
PART_NAME = re.compile(r"part-(\d+-\d+)_(\d+-\d+)\.(csv|jsonl|parquet)")
#: Rows per batch. Batches of a single fetch, about 500 rows, take twice as long per row.
BATCH_ROWS = 2000
#: Approximate number of rows in a part. A part is closed at the end of a fetch, and when the day changes.
PART_ROWS = 100_000
#: Seconds between removals of posts that were purged after their part was closed, while an export follows the stream.
SWEEP_INTERVAL_S = 3600.0


class Layout(NamedTuple):
    """Format (csv, jsonl or parquet) and columns of an export's files."""

    form: str
    columns: Sequence[str] = COLUMNS

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self.columns, self.form == "parquet")


class _Output:
    """A file that is being written, to become `out` or a part of it.

    Raises UserError if another process writes it, and OSError.
    """

    def __init__(self, path: Path, out: Path, layout: Layout, compression: str = "") -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab")
        try:
            _lock(self._file.fileno(), path, out)
        except UserError:
            self._file.close()
            raise
        self._file.truncate(0)
        escaped = set(layout.columns) - UNESCAPED
        self._writer = writer_to(self._file, layout.form, layout.schema, escaped, compression)
        #: Rows that were added.
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._writer.write(batch)
        self.rows += batch.num_rows

    def publish(self, path: Path, form: str, reader: RowReader, latest: bool = False) -> int:
        """Complete the file, and rename it, or publish a copy without purged posts: see `_remove_purged`.

        Returns the number of removed rows of purged posts, and sets `rows` to the number of rows left.
        """
        self._writer.close()
        self._file.flush()
        removed, left = _remove_purged(self.path, path, form, reader, latest)
        if left is None:
            publish(self.path, path)
        else:
            self.rows = left
            self.path.unlink()
        self._file.close()
        return removed

    def discard(self) -> None:
        """Delete the file unless it was published."""
        if not self._file.closed:
            self.path.unlink(missing_ok=True)
            with suppress(Exception):  # an interrupted writer may fail in any way
                self._writer.close()
            self._file.close()


class File:
    """A single file, published as `out` when the export is complete.

    Its methods, and those of `Folder`, raise OSError, and redis.exceptions.RedisError when they look for purged posts.
    """

    #: True if a later run continues this one; if this run continues an earlier one; and if rows replace earlier ones.
    can_resume = resumed = replaces_rows = False
    #: Rows that were refused.
    refused = 0
    batch_rows = BATCH_ROWS

    def __init__(self, out: Path, layout: Layout, selection: ExportFilter, reader: RowReader) -> None:
        self._out, self._form, self._latest, self._reader = out, layout.form, selection.latest, reader
        #: Schema of the batches.
        self.schema = layout.schema
        #: Rows in the file, and rows removed because their posts were purged.
        self.written = self.removed = 0
        #: Stream position up to which rows were added.
        self.place = Place(id_before(selection.since or 0.0))
        self.begun = time.monotonic()
        compression = out.suffix.lower() if out.suffix.lower() in COMPRESSIONS else ""
        path = out.with_name(f".{out.name}.partial{compression}")
        self._output = _Output(path, out, layout, compression)

    def add(self, batch: pa.RecordBatch, place: Place) -> None:
        """Append rows. place: the reader's position after them."""
        self._output.add(batch)
        self.place = place

    def close(self, _: Place) -> None:
        """Publish the file."""
        self.removed = self._output.publish(self._out, self._form, self._reader, self._latest)
        self.written = self._output.rows

    def abandon(self) -> None:
        """Delete the file unless it was published."""
        self._output.discard()


class Folder:
    """A folder of parts, one or more per UTC day on which results were stored: OUT/day=2026-11-21/part-….parquet."""

    can_resume, replaces_rows, refused = True, False, 0
    batch_rows = BATCH_ROWS

    def __init__(self, out: Path, layout: Layout, selection: ExportFilter, reader: RowReader) -> None:
        self._out, self._layout, self._reader = out, layout, reader
        self.schema = layout.schema.append(ENTRY)
        self._state = {"format": layout.form, "columns": [*layout.columns], **selection._asdict()}
        stored = _read_state(out / STATE_FILE)
        if stored:
            check_options(str(out), stored, self._state)
        self.resumed = bool(stored)
        self.place = Place(**stored["place"]) if stored else Place(id_before(selection.since or 0.0))
        self._skip_published_parts()
        for left_over in out.glob("**/.*.tmp"):
            left_over.unlink()
        self.removed = self.written = 0
        self._output: _Output | None = None
        self._first = self._last = ""
        #: Time at which the open part was begun (monotonic seconds), and of the last removal of purged posts.
        self.begun, self._swept_at = time.monotonic(), -SWEEP_INTERVAL_S
        self._save_state()

    def _skip_published_parts(self) -> None:
        """Move `place` past the newest part: a crash may come between publishing a part and saving the state."""
        newest = max((match[2] for _, match in parts(self._out)), default="0-0", key=order)
        if order(newest) > order(self.place.cursor):
            self.place = Place(newest)

    def add(self, batch: pa.RecordBatch, place: Place) -> None:
        entries = batch.column(ENTRY.name).to_pylist()
        batch, start = batch.drop_columns([ENTRY.name]), 0
        for day, group in groupby(entries, key=_day_of):
            of_day = list(group)
            if self._output and day != _day_of(self._last):
                self._publish()
            self._write(day, batch.slice(start, len(of_day)), of_day[0], of_day[-1])
            start += len(of_day)
        if self._output and self._output.rows >= PART_ROWS:
            self.close(place)

    def _write(self, day: str, batch: pa.RecordBatch, first: str, last: str) -> None:
        """Add the rows of a day, with their first and last stream entry."""
        if self._output is None:
            folder = self._out / f"day={day}"
            folder.mkdir(exist_ok=True)
            self._output = _Output(folder / f".part.{self._layout.form}.tmp", self._out, self._layout)
            self._first, self.begun = first, time.monotonic()
        self._output.add(batch)
        self._last = last

    def close(self, place: Place) -> None:
        """Publish all rows added so far, and remove posts that were purged since their parts were published."""
        self._publish()
        if place != self.place:
            self.place = place
            self._save_state()
        if time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            self.removed += _sweep(self._out, self._layout.form, self._reader)

    def _publish(self) -> None:
        """Close the open part, remove purged posts from it and publish it."""
        if self._output is None:
            return
        output, form = self._output, self._layout.form
        path = output.path.with_name(f"part-{self._first}_{self._last}.{form}")
        output.publish(path, form, self._reader)
        if not output.rows:
            path.unlink()
        sync(self._out)  # the day's folder may be new
        self.written += output.rows
        self._output = None

    def abandon(self) -> None:
        """Discard the open part. The reader resumes at `place` and adds its rows again."""
        if self._output is not None:
            self._output.discard()
            self._output = None
            self._skip_published_parts()

    def resume(self) -> Place:
        """Discard the open part, and return the place to read from."""
        self.abandon()
        return self.place

    def _save_state(self) -> None:
        with replacing(self._out / STATE_FILE, durable=True) as temporary:
            temporary.write_text(json.dumps(self._state | {"place": self.place._asdict()}))


@contextmanager
def opened(
    out: Path, layout: Layout, selection: ExportFilter, reader: RowReader, in_parts: bool = False
) -> Iterator[File | Folder]:
    """Open the target of an export and lock it. A folder's export with the same options is continued.

    in_parts: write a folder of parts. Raises UserError, OSError and redis.exceptions.RedisError.
    """
    if not in_parts:
        if out.is_dir():
            raise UserError(f"{out} is a folder. Name a file in it, such as {out / f'results.{layout.form}'}.")
        if not out.parent.is_dir():
            raise UserError(f"The folder {out.parent} does not exist. Create it, or give another OUT.")
        file = File(out, layout, selection, reader)
        try:
            yield file
        finally:
            file.abandon()
        return
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, but an export in parts needs a folder. Give another OUT.")
    # A run that was killed at its start leaves only the temporary file of the state.
    if not (out / STATE_FILE).is_file() and out.is_dir() and {*out.iterdir()} - {temporary_path(out / STATE_FILE)}:
        raise UserError(f"{out} contains other files. Give a new or an empty folder.")
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        folder = Folder(out, layout, selection, reader)
        try:
            yield folder
        finally:
            folder.abandon()


def parts(out: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the parts in a folder, oldest first, each with its PART_NAME match."""
    named = ((path, PART_NAME.fullmatch(path.name)) for path in out.glob("day=*/part-*"))
    return sorted(((path, match) for path, match in named if match), key=lambda part: order(part[1][1]))


def purge(out: Path, reader: RowReader) -> int:
    """Remove purged posts from a finished export; return the number of removed rows.

    Raises UserError, OSError and redis.exceptions.RedisError.
    """
    if out.is_dir():
        state = _read_state(out / STATE_FILE)
        if not state:
            raise UserError(f"{out} is not a folder of `feedmill export`: it has no {STATE_FILE}. Give another OUT.")
        with _locked(out):
            return _sweep(out, state["format"], reader)
    if not out.is_file():
        raise UserError(f"{out} does not exist. Give the OUT of an earlier export.")
    return _remove_purged(out, out, format_of_file(out), reader)[0]


def _read_state(path: Path) -> dict[str, Any]:
    """Return a folder's state; empty if there is none. Raises UserError if it is damaged."""
    try:
        state = dict(json.loads(path.read_bytes()))
        Place(**state["place"])
        str(state["format"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"Cannot read {path}, the state of the export. Export to a new folder.") from None
    return state


def _sweep(out: Path, form: str, reader: RowReader) -> int:
    """Remove purged posts from the parts of a folder. Returns the number of removed rows."""
    removed = 0
    for path, _ in parts(out):
        fewer, left = _remove_purged(path, path, form, reader)
        removed += fewer
        if left == 0:
            path.unlink()
            with suppress(OSError):  # the day's folder holds other parts
                path.parent.rmdir()
            sync(out)
    return removed


def _remove_purged(
    path: Path, target: Path, form: str, reader: RowReader, latest: bool = False
) -> tuple[int, int | None]:
    """Copy a file to `target` without purged posts and, if `latest`, with only the last row of each post.

    Returns the number of removed rows of purged posts, and the number of rows in `target`. If nothing has to be
    removed, makes no copy and returns (0, None).
    """
    gone = reader.gone(post.id for post in post_keys(path, form))
    if not gone and not latest:
        return 0, None
    rows = Counter(post_keys(path, form))
    removed = sum(count for post, count in rows.items() if post.id in gone)
    left = len(rows) - sum(post.id in gone for post in rows) if latest else rows.total() - removed
    if left == rows.total():
        return 0, None

    def mask() -> Iterator[bool]:
        for post in post_keys(path, form):
            rows[post] -= 1  # now the number of later rows of this post
            yield post.id not in gone and not (latest and rows[post])

    with replacing(target, durable=True) as temporary:
        copy_rows(path, temporary, form, mask())
    return removed, left


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(descriptor, path, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, out: Path) -> None:
    """Lock an open file or folder until it is closed. Raises UserError if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.path.samestat(os.fstat(descriptor), path.stat())  # not renamed by a process that has just ended
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    if not is_current:
        raise UserError(f"Another export is writing to {out}. Wait for it, or stop it.")


def _day_of(entry: str) -> str:
    return datetime.fromtimestamp(seconds_of(entry), UTC).date().isoformat()
