"""Export results to a single file, or to a folder of parts by day. Published files are always complete.

Data is written to a temporary file, and renamed once it is complete and synced to disk. In a folder, the names of the
parts record which stream entries they hold, so a crash never causes duplicates. A single file starts over.

Purged posts are left out: each row is checked when it is read, and again before its file is published.
Posts purged later are removed when the same export runs again, every `SWEEP_INTERVAL_S` seconds while an export follows
the stream, and by `purge`. Docs: docs/export.md.
"""

import csv
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from itertools import accumulate, chain, compress, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from feedmill.export.columns import BATCH_ROWS, COLUMNS, POST_FIELDS, ExportFilter, check_options, label_set
from feedmill.producers.records import unescape_formula
from feedmill.reading import Place, ResultRow, RowReader, id_before, order, seconds_of
from feedmill.shared.atomic_files import publish, replacing, sync, temporary_path
from feedmill.shared.errors import UserError, printable
from feedmill.tables import COMPRESSIONS
from feedmill.tables.writing import JSON, ParquetWriter, json_column, writer_to

#: State file of a folder: the export's options and position. Dataset readers ignore names that begin with `_`.
STATE_FILE = "_export.json"
#: Name of a part, with the ids of its first and last stream entry.
PART_NAME = re.compile(r"part-(\d+-\d+)_(\d+-\d+)\.(csv|jsonl|parquet)")
#: Approximate number of rows in a part, which are held in memory until the part is written.
PART_ROWS = 50_000
#: Seconds between removals of posts that were purged after their part was closed, while an export follows the stream.
SWEEP_INTERVAL_S = 3600.0
#: Maximum characters of a cell. No exported one is longer; the csv module's default of 131,072 is too low.
MAX_CELL = 2_000_000
TEXT, NUMBER, TIME = pa.string(), pa.float64(), pa.timestamp("us", tz="UTC")
SCORES = pa.map_(TEXT, NUMBER)
TYPES = dict.fromkeys(COLUMNS, TEXT) | dict.fromkeys(("date", "edited", "classified_at"), TIME)
TYPES |= dict.fromkeys(("stickied", "nsfw", "spoiler"), pa.bool_()) | dict.fromkeys(("extra", "scores"), JSON)
TYPES |= {"label_score": NUMBER, "queued_seconds": NUMBER, "score": pa.int64()}
#: Columns of some sinks only: when the result was stored, and the id of its stream entry, which is not written.
STORED_AT, ENTRY = pa.field("stored_at", TIME), pa.field("feedmill:entry", TEXT)
COMPUTED: dict[str, Callable[[ResultRow], Any]] = {
    "label_score": lambda row: row.found["scores"][row.found["label"]],
    "label_set": lambda row: label_set(row.found["scores"]),
    STORED_AT.name: lambda row: seconds_of(row.entry),
    ENTRY.name: lambda row: row.entry,
}


def schema_of(columns: Sequence[str], parquet: bool = False) -> pa.Schema:
    """Return the schema of these columns; those of the user's own hold JSON. parquet: with the scores as a map."""
    types = TYPES | {"scores": SCORES} if parquet else TYPES
    return pa.schema([pa.field(column, types.get(column, JSON)) for column in columns])


def batch_of(rows: Sequence[ResultRow], schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to a batch, by column: by row it takes ten times as long."""
    return pa.RecordBatch.from_arrays([_array(rows, field) for field in schema], schema=schema)


def _array(rows: Sequence[ResultRow], field: pa.Field) -> pa.Array:
    if field.type == JSON and field.name not in COLUMNS:
        return json_column((row.post.get("extra") or {}).get(field.name) for row in rows)
    values = _values(rows, field.name)
    if field.type == SCORES:
        offsets = list(accumulate(map(len, values), initial=0))
        labels, numbers = chain.from_iterable(values), chain.from_iterable(map(dict.values, values))
        return pa.MapArray.from_arrays(offsets, pa.array(labels, TEXT), pa.array(numbers, NUMBER))
    if field.type == JSON:
        return json_column(values)
    if field.type == TIME:
        values = [None if seconds is None else round(seconds * 1_000_000) for seconds in values]
    return pa.array(values, field.type)


def _values(rows: Sequence[ResultRow], column: str) -> list[Any]:
    """Return a column's values as they are stored: times in seconds since 1970."""
    if column in POST_FIELDS:
        field, default = POST_FIELDS[column]
        return [row.post.get(field, default) for row in rows]
    if column in COMPUTED:
        return [*map(COMPUTED[column], rows)]
    return [row.found.get(column) for row in rows]


class File:
    """A file that is being written, to become `out` once the export is complete.

    Raises UserError if another process writes it, and OSError. Its methods, and those of `Folder`, raise OSError, and
    redis.exceptions.RedisError when they look for purged posts.
    """

    #: True if a later run continues this one; if this run continues an earlier one; and if rows replace earlier ones.
    can_resume = resumed = replaces_rows = False
    #: Rows that were refused.
    refused = 0

    def __init__(self, out: Path, form: str, schema: pa.Schema, selection: ExportFilter, reader: RowReader) -> None:
        compression = out.suffix.lower() if out.suffix.lower() in COMPRESSIONS else ""
        self._path = out.with_name(f".{out.name}.partial{compression}")
        self._file: BinaryIO = self._path.open("ab")
        try:
            _lock(self._file.fileno(), self._path, out)
        except UserError:
            self._file.close()
            raise
        self._file.truncate(0)
        self._out, self._form, self._reader = out, form, reader
        self._writer = writer_to(self._file, form, schema, compression)
        #: Schema of the batches.
        self.schema = schema
        #: Rows in the published file, and rows removed because their posts were purged.
        self.written = self.removed = 0
        #: Stream position up to which rows were added, and the time of the beginning in monotonic seconds.
        self.place, self.begun = Place(id_before(selection.since or 0.0)), time.monotonic()

    def add(self, batch: pa.RecordBatch, place: Place) -> None:
        """Append rows. place: the reader's position after them."""
        self._writer.write(batch)
        self.written += batch.num_rows
        self.place = place

    def close(self, _: Place) -> None:
        """Complete the file and publish it, or a copy without purged posts."""
        self._writer.close()
        self._file.flush()
        self.removed = _remove_purged(self._path, self._out, self._form, self._reader)
        self.written -= self.removed
        if self.removed:
            self._path.unlink()
        else:
            publish(self._path, self._out)
        self._file.close()

    def abandon(self) -> None:
        """Delete the file unless it was published."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            with suppress(Exception):  # an interrupted writer may fail in any way
                self._writer.close()
            self._file.close()


class Folder:
    """A folder of parts, one or more per UTC day on which results were stored: OUT/day=2026-11-21/part-….parquet."""

    can_resume, replaces_rows, refused = True, False, 0

    def __init__(self, out: Path, form: str, schema: pa.Schema, selection: ExportFilter, reader: RowReader) -> None:
        self._out, self._form, self._reader = out, form, reader
        self.schema = schema.append(ENTRY)
        self._state = {"format": form, "columns": schema.names, **selection._asdict()}
        stored = read_state(out)
        if stored:
            check_options(str(out), stored, self._state)
        self.resumed = bool(stored)
        self.place = Place(**stored["place"]) if stored else Place(id_before(selection.since or 0.0))
        self._skip_published_parts()
        for left_over in out.glob("**/.*.tmp"):
            left_over.unlink()
        self.removed = self.written = 0
        self._pending: list[pa.RecordBatch] = []
        #: Time at which the first pending row was added (monotonic seconds), and of the last removal of purged posts.
        self.begun, self._swept_at = time.monotonic(), -SWEEP_INTERVAL_S
        self._save_state()

    def _skip_published_parts(self) -> None:
        """Move `place` past the newest part: a crash may come between publishing a part and saving the state."""
        newest = max((match[2] for _, match in parts(self._out)), default="0-0", key=order)
        if order(newest) > order(self.place.cursor):
            self.place = Place(newest)

    def add(self, batch: pa.RecordBatch, place: Place) -> None:
        if not self._pending:
            self.begun = time.monotonic()
        self._pending.append(batch)
        if sum(each.num_rows for each in self._pending) >= PART_ROWS:
            self.close(place)

    def close(self, place: Place) -> None:
        """Publish all rows added so far, and remove posts that were purged since their parts were published."""
        if self._pending:
            rows, start = pa.Table.from_batches(self._pending), 0
            for day, group in groupby(rows[ENTRY.name].to_pylist(), key=_day_of):
                entries = list(group)
                self._publish(day, entries, rows.slice(start, len(entries)).drop_columns([ENTRY.name]))
                start += len(entries)
            self._pending.clear()
        if place != self.place:
            self.place = place
            self._save_state()
        if time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            self.removed += _sweep(self._out, self._form, self._reader)

    def _publish(self, day: str, entries: Sequence[str], rows: pa.Table) -> None:
        """Write a part, without posts that were purged since they were read. entries: the rows' stream entries."""
        ids = rows["id"].to_pylist()
        if gone := self._reader.gone(ids):
            rows = rows.filter(pa.array([post_id not in gone for post_id in ids]))
        if not rows.num_rows:
            return
        folder = self._out / f"day={day}"
        folder.mkdir(exist_ok=True)
        path = folder / f"part-{entries[0]}_{entries[-1]}.{self._form}"
        with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
            writer = writer_to(file, self._form, rows.schema)
            for batch in rows.to_batches():
                writer.write(batch)
            writer.close()
        sync(self._out)  # the day's folder may be new
        self.written += rows.num_rows

    def abandon(self) -> None:
        """Discard the pending rows. The reader resumes at `place` and adds them again."""
        self._pending.clear()
        self._skip_published_parts()

    def resume(self) -> Place:
        """Discard the pending rows, and return the place to read from."""
        self.abandon()
        return self.place

    def _save_state(self) -> None:
        with replacing(self._out / STATE_FILE, durable=True) as temporary:
            temporary.write_text(json.dumps(self._state | {"place": self.place._asdict()}))


@contextmanager
def opened(
    out: Path, form: str, schema: pa.Schema, selection: ExportFilter, reader: RowReader, in_parts: bool = False
) -> Iterator[File | Folder]:
    """Open the target of an export and lock it. A folder's export with the same options is continued.

    form: csv, jsonl or parquet. in_parts: write a folder. Raises UserError, OSError and redis.exceptions.RedisError.
    """
    if in_parts:
        out.mkdir(parents=True, exist_ok=True)
        # A run that was killed at its start leaves only the temporary file of the state.
        if not (out / STATE_FILE).is_file() and {*out.iterdir()} - {temporary_path(out / STATE_FILE)}:
            raise UserError(f"{out} contains other files. Give a new or an empty folder.")
    with _locked(out) if in_parts else nullcontext():
        target = (Folder if in_parts else File)(out, form, schema, selection, reader)
        try:
            yield target
        finally:
            target.abandon()


def parts(out: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the parts in a folder, oldest first, each with its PART_NAME match."""
    named = ((path, PART_NAME.fullmatch(path.name)) for path in out.glob("day=*/part-*"))
    return sorted(((path, match) for path, match in named if match), key=lambda part: order(part[1][1]))


def purge(out: Path, form: str, reader: RowReader) -> int:
    """Remove purged posts from a finished export; return the number of removed rows.

    form: format of a file; that of a folder is in its state. Raises UserError, OSError and
    redis.exceptions.RedisError.
    """
    state = read_state(out) if out.is_dir() else {}
    if out.is_dir() and not state:
        raise UserError(f"{out} is not a folder of `feedmill export`: it has no {STATE_FILE}. Give another OUT.")
    if not out.exists():
        raise UserError(f"{out} does not exist. Give the OUT of an earlier export.")
    try:
        if not state:
            return _remove_purged(out, out, form, reader)
        with _locked(out):
            return _sweep(out, state["format"], reader)
    except (csv.Error, ValueError, LookupError, TypeError):
        raise UserError(
            f"{printable(str(out))} is damaged or not an export of results: a row has no id. Give the OUT of an "
            "earlier export."
        ) from None


def read_state(out: Path) -> dict[str, Any]:
    """Return a folder's state; empty if there is none. Raises UserError if it is damaged, and OSError."""
    try:
        state = dict(json.loads((out / STATE_FILE).read_bytes()))
        Place(**state["place"])
        "".join([state["format"], *state["columns"]])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"Cannot read {out / STATE_FILE}, the state of the export. Export to a new folder.") from None
    return state


def _sweep(out: Path, form: str, reader: RowReader) -> int:
    """Remove purged posts from the parts of a folder. Returns the number of removed rows."""
    removed = 0
    for path, _ in parts(out):
        removed += (fewer := _remove_purged(path, path, form, reader))
        if fewer and next(post_ids(path, form), None) is None:
            path.unlink()
            with suppress(OSError):  # the day's folder holds other parts
                path.parent.rmdir()
            sync(out)
    return removed


def _remove_purged(path: Path, target: Path, form: str, reader: RowReader) -> int:
    """Copy a file to `target` without purged posts, unless there are none; return the number of removed rows."""
    gone = reader.gone(post_ids(path, form))
    if not gone:
        return 0
    mask = [post_id not in gone for post_id in post_ids(path, form)]
    with replacing(target, durable=True) as temporary:
        copy_rows(path, temporary, form, mask)
    return mask.count(False)


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


def post_ids(path: Path, form: str) -> Iterator[str]:
    """Yield the posts' ids in file order. Raises csv.Error, ValueError, LookupError or TypeError for other files."""
    if form == "parquet":
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=["id"]):
                yield from batch["id"].to_pylist()
        return
    with _text(path, path.suffix) as text:
        if form == "jsonl":
            yield from (from_json(line)["id"] for line in text)
            return
        rows = _rows(text)
        index = next(rows, []).index("id")
        yield from (unescape_formula(cells[index]) for cells in rows)


def _text(path: Path, suffix: str, opened: Callable[..., Any] = pa.input_stream) -> TextIO:
    """Open a text file. suffix: ".gz" or ".zst" if it is compressed."""
    compression = {".gz": "gzip", ".zst": "zstd"}.get(suffix.lower())
    return TextIOWrapper(opened(str(path), compression=compression), encoding="utf-8", newline="")


def _rows(file: TextIO) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_CELL)
    return csv.reader(file, strict=True)


def copy_rows(path: Path, target: Path, form: str, mask: Iterable[bool]) -> None:
    """Copy the rows of a file for which the mask is true."""
    mask = iter(mask)
    if form == "parquet":
        with pq.ParquetFile(path) as source, target.open("wb") as copy:
            writer = ParquetWriter(copy, source.schema_arrow)
            for batch in source.iter_batches(BATCH_ROWS):
                writer.write(batch.filter(pa.array(islice(mask, batch.num_rows), pa.bool_())))
            writer.close()
        return
    with _text(path, path.suffix) as file, _text(target, path.suffix, pa.output_stream) as text:
        if form == "jsonl":
            text.writelines(compress(file, mask))
        else:
            rows, lines = _rows(file), csv.writer(text)
            lines.writerow(next(rows))
            lines.writerows(compress(rows, mask))
