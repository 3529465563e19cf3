"""Export results to a single file, or to a folder of parts by day.

Published files are always complete.

Data is written to a temporary file, and renamed once it is complete and synced to disk. In a
folder, the names of the parts record which stream entries they hold, so a crash never causes
duplicates. A single file starts over.

Purged posts are left out: each row is checked when it is read, and again before its file is
published.
Posts purged later are removed when the same export runs again, every `SWEEP_INTERVAL_S` seconds
while an export follows the stream, and by `purge`. Docs: docs/export.md.
"""

import csv
import fcntl
import json
import os
import re
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from itertools import accumulate, chain, compress, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from feedmill.exporting.columns import (
    BATCH_ROWS,
    COLUMNS,
    FURTHER_COLUMNS,
    POST_FIELDS,
    ExportFilter,
    all_columns,
    check_same_options,
    choose,
    label_set,
)
from feedmill.exporting.sink import DEFAULT_PART_S
from feedmill.outcomes.rows import (
    Place,
    ResultRow,
    RowReader,
    best_label,
    id_before,
    label_score,
    order,
    parse_place,
    seconds_of,
)
from feedmill.producers.parquet import MAX_CELL
from feedmill.producers.records import unescape_formula
from feedmill.shared.atomic_files import (
    PRIVATE,
    final_path,
    fitting_name,
    publish,
    replacing,
    sync,
    temporary_path,
)
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import applying_labels
from feedmill.tables import compression_of
from feedmill.tables.writing import (
    JSON,
    TEXTS,
    ParquetWriter,
    json_column,
    writer_to,
)

#: State file of a folder: the export's options and position. Dataset readers ignore names that
#: begin with `_`.
STATE_FILE = "_export.json"
#: Formats of an export.
FORMS = ("csv", "jsonl", "parquet")
#: Name of a part, with the ids of its first and last stream entry.
PART_NAME = re.compile(r"part-(\d+-\d+)_(\d+-\d+)\.(csv|jsonl|parquet)")
#: Approximate number of rows in a part, which are held in memory until the part is written.
PART_ROWS = 50_000
#: Seconds between removals of posts that were purged after their part was closed, while an export
#: follows the stream.
SWEEP_INTERVAL_S = 3600.0
TEXT = pa.string()
NUMBER = pa.float64()
TIME = pa.timestamp("us", tz="UTC")
SCORES = pa.map_(TEXT, NUMBER)
TYPES = dict.fromkeys(COLUMNS, TEXT) | dict.fromkeys(
    ("date", "edited", "classified_at"), TIME
)
TYPES |= dict.fromkeys(("stickied", "nsfw", "spoiler"), pa.bool_()) | dict.fromkeys(
    ("extra", "scores"), JSON
)
TYPES |= {"best_label": TEXT, "labels": TEXTS, "language": TEXT, "kind": TEXT}
TYPES |= {"label_score": NUMBER, "queued_seconds": NUMBER, "score": pa.int64()}
#: Columns of some sinks only: when the result was stored, and the id of its stream entry, which is
#: not written.
STORED_AT = pa.field("stored_at", TIME)
ENTRY = pa.field("feedmill:entry", TEXT)


def _labels(classification: Mapping[str, Any]) -> list[str]:
    """Return the labels that apply to a post, best first; none if it has no label."""
    threshold = classification.get("labels_threshold")
    return applying_labels(
        classification["label"],
        classification["scores"],
        threshold,
    )


COMPUTED: dict[str, Callable[[ResultRow], Any]] = {
    "label_score": lambda row: label_score(row.found),
    "best_label": lambda row: best_label(row.found),
    "labels": lambda row: _labels(row.found),
    "label_set": lambda row: label_set(row.found["scores"]),
    "kind": lambda row: row.post.get("kind"),
    STORED_AT.name: lambda row: seconds_of(row.entry),
    ENTRY.name: lambda row: row.entry,
}


def schema_of(
    columns: Sequence[str], parquet: bool = False, own: Sequence[str] = ()
) -> pa.Schema:
    """Return the schema of these columns; those of the user's own hold JSON.

    parquet: with the scores as a map. own: the user's own columns, which may have the name of one
    of FURTHER_COLUMNS.
    """
    types = dict(TYPES)
    for column in FURTHER_COLUMNS:
        if column in own:
            types[column] = JSON
    if parquet:
        types["scores"] = SCORES

    fields: list[pa.Field] = []
    for column in columns:
        kind = types.get(column, JSON)
        fields.append(pa.field(column, kind))
    return pa.schema(fields)


def batch_of(rows: Sequence[ResultRow], schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to a batch, by column: by row it takes ten times as long."""
    arrays = [_array(rows, field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(rows: Sequence[ResultRow], field: pa.Field) -> pa.Array:
    name = field.name
    kind = field.type
    if kind == JSON and name not in COLUMNS:
        return json_column(_extra(row, name) for row in rows)

    values = _values(rows, name)
    if kind == JSON:
        return json_column(values)
    if kind == SCORES:
        return _score_maps(values)
    if kind == TIME:
        values = _microseconds(values)
    return pa.array(values, kind)


def _extra(row: ResultRow, name: str) -> Any:
    """Return a value of the user's own columns; None if the post has none."""
    extra = row.post.get("extra") or {}
    return extra.get(name)


def _microseconds(times: Sequence[float | None]) -> list[int | None]:
    """Convert seconds, all in one call: a call for each takes as long as its conversion."""
    microseconds: list[int | None] = []
    for seconds in times:
        count = None if seconds is None else round(seconds * 1_000_000)
        microseconds.append(count)
    return microseconds


def _score_maps(scores: Sequence[dict[str, float]]) -> pa.Array:
    """Return a column of maps from label to score."""
    lengths = map(len, scores)
    offsets = list(accumulate(lengths, initial=0))
    labels = chain.from_iterable(scores)
    numbers = chain.from_iterable(map(dict.values, scores))
    return pa.MapArray.from_arrays(
        offsets, pa.array(labels, TEXT), pa.array(numbers, NUMBER)
    )


def _values(rows: Sequence[ResultRow], column: str) -> list[Any]:
    """Return a column's values as they are stored: times in seconds since 1970."""
    if column in POST_FIELDS:
        field, default = POST_FIELDS[column]
        return [row.post.get(field, default) for row in rows]
    if column in COMPUTED:
        compute = COMPUTED[column]
        return [compute(row) for row in rows]
    return [row.found.get(column) for row in rows]


class File:
    """A file that is being written, to become `out` once the export is complete.

    Raises UserError if another process writes it, and OSError. Its methods, and those of `Folder`,
    raise OSError, and redis.exceptions.RedisError when they look for purged posts.
    """

    can_resume = False
    publish_interval_s = DEFAULT_PART_S
    resumed = False
    replaces_rows = False
    refused = 0

    def __init__(
        self,
        out: Path,
        form: str,
        schema: pa.Schema,
        selection: ExportFilter,
        reader: RowReader,
    ) -> None:
        compression = compression_of(out)
        # a symbolic link stays, and the file that it names is replaced
        out = final_path(out)
        # before the name is shortened, because it refuses a name that is too long
        replaces_file = out.exists()

        name = fitting_name(f".{out.name}", f".partial{compression}")
        self._path = out.with_name(name)
        self._file: BinaryIO = self._path.open("ab")
        descriptor = self._file.fileno()
        try:
            _lock(descriptor, self._path, out)
        except UserError:
            self._file.close()
            raise
        self._file.truncate(0)
        if replaces_file:
            # `publish` gives it the mode of the file that it replaces
            self._path.chmod(PRIVATE)

        self._out = out
        self._form = form
        self._compression = compression
        self._reader = reader
        self.schema = schema
        self._start = _start_of(selection)
        self._begin()

    def _begin(self) -> None:
        """Begin to write the empty file."""
        self._writer = writer_to(
            self._file,
            self._form,
            self.schema,
            self._compression,
        )
        self.written = 0
        self.removed = 0
        self.place = self._start
        self.begun = time.monotonic()

    def add(self, batch: pa.RecordBatch, place: Place) -> None:
        """Append rows. place: the reader's position after them."""
        self._writer.write(batch)
        self.written += batch.num_rows
        self.place = place

    def close(self, _: Place) -> None:
        """Complete the file and publish it, or a copy without purged posts."""
        self._writer.close()
        self._file.flush()
        self.removed = _remove_purged(
            self._path,
            self._out,
            self._form,
            self._reader,
        )
        self.written -= self.removed
        if self.removed:
            self._path.unlink()
        else:
            publish(self._path, self._out)
        self._file.close()

    def resume(self) -> Place:
        """Discard all rows, and return the place of the first one."""
        with suppress(Exception):  # an interrupted writer may fail in any way
            self._writer.close()
        self._file.truncate(0)
        self._begin()
        return self.place

    def abandon(self) -> None:
        """Delete the file unless it was published."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            with suppress(Exception):  # an interrupted writer may fail in any way
                self._writer.close()
            self._file.close()


class Folder:
    """A folder of parts, one or more per UTC day on which results were stored:
    OUT/day=2026-11-21/part-….parquet.
    """

    can_resume = True
    publish_interval_s = DEFAULT_PART_S
    replaces_rows = False
    refused = 0

    def __init__(
        self,
        out: Path,
        form: str,
        schema: pa.Schema,
        selection: ExportFilter,
        reader: RowReader,
    ) -> None:
        self._out = out
        self._form = form
        self._reader = reader
        self.schema = schema.append(ENTRY)
        self._state = {
            "format": form,
            "columns": schema.names,
            **selection._asdict(),
        }

        stored = read_state(out)
        self.resumed = bool(stored)
        if stored:
            check_same_options(str(out), stored, self._state)
            self.place = Place(**stored["place"])
        else:
            self.place = _start_of(selection)
        self._skip_published_parts()

        for temporary in out.glob("**/.*.tmp"):
            temporary.unlink()
        self.removed = 0
        self.written = 0
        self._pending: list[pa.RecordBatch] = []
        #: Time at which the first pending row was added (monotonic seconds), and of the last
        #: removal of purged posts.
        self.begun = time.monotonic()
        self._swept_at = -SWEEP_INTERVAL_S
        self._save_state()

    def _skip_published_parts(self) -> None:
        """Move `place` past the newest part: a crash may come between publishing a part and saving
        the state.
        """
        newest = self.place.cursor
        for _, match in parts(self._out):
            last_entry = match[2]
            newest = max(newest, last_entry, key=order)
        if newest != self.place.cursor:
            self.place = Place(newest)

    def add(self, batch: pa.RecordBatch, place: Place) -> None:
        if not self._pending:
            self.begun = time.monotonic()
        self._pending.append(batch)
        pending_rows = sum(pending.num_rows for pending in self._pending)
        if pending_rows >= PART_ROWS:
            self.close(place)

    def close(self, place: Place) -> None:
        """Publish all rows added so far, and remove posts that were purged since their parts were
        published.
        """
        if self._pending:
            self._publish_pending()
        if place != self.place:
            self.place = place
            self._save_state()

        now = time.monotonic()
        if now - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = now
            self.removed += _sweep(self._out, self._form, self._reader)

    def _publish_pending(self) -> None:
        """Write a part for each day of the pending rows."""
        table = pa.Table.from_batches(self._pending)
        entry_column = table[ENTRY.name].to_pylist()
        rows = table.drop_columns([ENTRY.name])
        start = 0
        for day, entries_of_day in groupby(entry_column, key=_day_of):
            entries = list(entries_of_day)
            rows_of_day = rows.slice(start, len(entries))
            self._publish(day, entries, rows_of_day)
            start += len(entries)
        self._pending.clear()

    def _publish(self, day: str, entries: Sequence[str], rows: pa.Table) -> None:
        """Write a part, without posts that were purged since they were read. entries: the rows'
        stream entries.
        """
        ids = rows["id"].to_pylist()
        gone = self._reader.gone(ids)
        if gone:
            mask = [post_id not in gone for post_id in ids]
            rows = rows.filter(pa.array(mask))
        if not rows.num_rows:
            return

        form = self._form
        folder = self._out / f"day={day}"
        folder.mkdir(exist_ok=True)
        first_entry = entries[0]
        last_entry = entries[-1]
        path = folder / f"part-{first_entry}_{last_entry}.{form}"
        with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
            writer = writer_to(file, form, rows.schema)
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
        state = self._state | {"place": self.place._asdict()}
        path = self._out / STATE_FILE
        with replacing(path, durable=True) as temporary:
            temporary.write_text(json.dumps(state))


def _start_of(selection: ExportFilter) -> Place:
    """Return the place before the first result of a selection."""
    since = selection.since or 0.0
    return Place(id_before(since))


@contextmanager
def opened(
    out: Path,
    form: str,
    schema: pa.Schema,
    selection: ExportFilter,
    reader: RowReader,
    in_parts: bool = False,
) -> Iterator[File | Folder]:
    """Open the target of an export and lock it.

    A folder's export with the same options is continued.

    form: csv, jsonl or parquet. in_parts: write a folder. Raises UserError, OSError and
    redis.exceptions.RedisError.
    """
    if in_parts:
        out.mkdir(parents=True, exist_ok=True)
        state_file = out / STATE_FILE
        # A run that was killed at its start leaves only the temporary file of the state.
        other_files = {*out.iterdir()} - {temporary_path(state_file)}
        if other_files and not state_file.is_file():
            raise UserError(
                f"{out} contains other files. Give a new or an empty folder."
            )

    kind = Folder if in_parts else File
    lock = hold_lock(out) if in_parts else nullcontext()
    with lock:
        target = kind(out, form, schema, selection, reader)
        try:
            yield target
        finally:
            target.abandon()


class FileDestination:
    """The place of a single file.

    form: csv, jsonl or parquet. columns: names separated by commas; None are all.
    """

    def __init__(self, out: Path, form: str, columns: str | None = None) -> None:
        self._out = out
        self._form = form
        self._columns = columns

    def __str__(self) -> str:
        return str(self._out)

    @contextmanager
    def opened(
        self,
        selection: ExportFilter,
        reader: RowReader,
        run_columns: Sequence[str] = (),
        _stop: Sequence[int] = (),
    ) -> Iterator[File | Folder]:
        schema = _chosen_schema(self._form, self._columns, run_columns)
        with opened(self._out, self._form, schema, selection, reader) as sink:
            yield sink

    def purge(self, reader: RowReader, runs: Collection[str] = ()) -> int:
        return purge(self._out, self._form, reader, runs)

    def records(self, reader: RowReader) -> Iterator[dict[str, Any]]:  # noqa: ARG002 - `Destination`
        form = self._form
        paths = [self._out]
        if self._out.is_dir():
            form = read_state(self._out).get("format", form)
            paths = [path for path, _ in parts(self._out)]
        with _explained(self._out):
            for path in paths:
                yield from records(path, form)


class FolderDestination(FileDestination):
    """The place of a folder of parts. See `FileDestination`."""

    def __str__(self) -> str:
        return f"the folder {self._out}"

    @contextmanager
    def opened(
        self,
        selection: ExportFilter,
        reader: RowReader,
        run_columns: Sequence[str] = (),
        _stop: Sequence[int] = (),
    ) -> Iterator[File | Folder]:
        # A folder keeps its columns when its run gets further ones.
        stored_columns = read_state(self._out).get("columns")
        if stored_columns and self._columns is None:
            is_parquet = self._form == "parquet"
            schema = schema_of(stored_columns, is_parquet, run_columns)
        else:
            schema = _chosen_schema(self._form, self._columns, run_columns)
        with opened(
            self._out,
            self._form,
            schema,
            selection,
            reader,
            in_parts=True,
        ) as sink:
            yield sink


def _chosen_schema(
    form: str, columns: str | None, run_columns: Sequence[str]
) -> pa.Schema:
    """Return the schema of the chosen columns.

    columns: see `FileDestination`. run_columns: further columns that the posts carry. Raises
    UserError for an unknown column.
    """
    if columns is None:
        names = all_columns(run_columns)
    else:
        names = choose(columns, run_columns)
    return schema_of(names, form == "parquet", run_columns)


def parts(out: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the parts in a folder, oldest first, each with its PART_NAME match."""
    paths_and_matches: list[tuple[Path, re.Match[str]]] = []
    for path in out.glob("day=*/part-*"):
        match = PART_NAME.fullmatch(path.name)
        if match:
            paths_and_matches.append((path, match))
    return sorted(paths_and_matches, key=_first_entry)


def _first_entry(part: tuple[Path, re.Match[str]]) -> tuple[int, ...]:
    """Return the sort key of a part's first entry."""
    _, match = part
    return order(match[1])


def purge(out: Path, form: str, reader: RowReader, runs: Collection[str] = ()) -> int:
    """Remove purged posts, and those of these runs, from a finished export; return the number of
    removed rows.

    form: format of a file; that of a folder is in its state. Raises UserError, OSError and
    redis.exceptions.RedisError.
    """
    state: dict[str, Any] = {}
    if out.is_dir():
        state = read_state(out)
        if not state:
            raise UserError(
                f"{out} is not a folder of `feedmill export`: it has no {STATE_FILE}. "
                "Give another OUT."
            )
    if not out.exists():
        raise UserError(f"{out} does not exist. Give the OUT of an earlier export.")
    with _explained(out):
        if not state:
            return _remove_purged(out, out, form, reader, runs)
        with hold_lock(out):
            return _sweep(out, state["format"], reader, runs)


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Convert the errors of a file that is not an export to UserError."""
    try:
        yield
    except (csv.Error, ValueError, LookupError, TypeError):
        raise UserError(
            f"{printable(str(out))} is damaged or not an export of results: a row has no id. Give "
            "the OUT of an earlier export."
        ) from None


def read_state(out: Path) -> dict[str, Any]:
    """Return a folder's state; empty if there is none.

    Raises UserError if it is damaged, and OSError.
    """
    path = out / STATE_FILE
    try:
        text = path.read_bytes()
        state = dict(json.loads(text))
        parse_place(state["place"])
        "".join(state["columns"])
        if state["format"] not in FORMS:
            raise ValueError("not a format of an export")
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"Cannot read {path}, the state of the export. Export to a new folder."
        ) from None
    return state


def _sweep(out: Path, form: str, reader: RowReader, runs: Collection[str] = ()) -> int:
    """Remove purged posts, and those of these runs, from the parts of a folder. Returns the number
    of removed rows.
    """
    removed = 0
    for path, _ in parts(out):
        removed_here = _remove_purged(path, path, form, reader, runs)
        removed += removed_here
        if removed_here and _is_empty(path, form):
            path.unlink()
            with suppress(OSError):  # the day's folder holds other parts
                path.parent.rmdir()
            sync(out)
    return removed


def _is_empty(path: Path, form: str) -> bool:
    first_id = next(post_ids(path, form), None)
    return first_id is None


def _remove_purged(
    path: Path,
    target: Path,
    form: str,
    reader: RowReader,
    runs: Collection[str] = (),
) -> int:
    """Copy a file to `target` without purged posts and those of these runs, unless there are none;
    return the number of removed rows.
    """
    ids = post_ids(path, form)
    gone = reader.gone(ids)
    if not gone and not runs:
        return 0
    ids = post_ids(path, form)  # read a second time: a file can have millions
    mask = [post_id not in gone for post_id in ids]
    if runs:
        for number, record in enumerate(records(path, form)):
            if record.get("run") in runs:
                mask[number] = False
    if all(mask):
        return 0
    with replacing(target, durable=True) as temporary:
        copy_rows(path, temporary, form, mask)
    return mask.count(False)


@contextmanager
def hold_lock(path: Path, what: str = "export") -> Iterator[None]:
    """Lock a folder of parts inside the block. Raises UserError if another process writes it.

    what: what is written, for the error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(
            descriptor,
            path,
            path,
            what,
        )
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, out: Path, what: str = "export") -> None:
    """Lock an open file or folder until it is closed.

    Raises UserError if another process holds the lock.
    """
    try:
        exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
        fcntl.flock(descriptor, exclusive)
        # not renamed by a process that has just ended
        open_file = os.fstat(descriptor)
        is_current = os.path.samestat(open_file, path.stat())
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    if not is_current:
        raise UserError(f"Another {what} is writing to {out}. Wait for it, or stop it.")


def _day_of(entry: str) -> str:
    time_stored = datetime.fromtimestamp(seconds_of(entry), UTC)
    return time_stored.date().isoformat()


def post_ids(path: Path, form: str) -> Iterator[str]:
    """Yield the posts' ids in file order.

    Raises csv.Error, ValueError, LookupError or TypeError for other files.
    """
    if form == "parquet":
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=["id"]):
                yield from batch["id"].to_pylist()
        return
    with _text(path, path.suffix) as text:
        if form == "jsonl":
            for line in text:
                record = from_json(line)
                yield record["id"]
            return
        rows = _rows(text)
        header = next(rows, [])
        index = header.index("id")
        for cells in rows:
            yield unescape_formula(cells[index])


def records(path: Path, form: str) -> Iterator[dict[str, Any]]:
    """Yield the rows in file order, by column.

    Raises csv.Error, ValueError, LookupError or TypeError for other files.
    """
    if form == "parquet":
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
        return
    with _text(path, path.suffix) as text:
        if form == "jsonl":
            for line in text:
                yield dict(from_json(line))
            return
        rows = _rows(text)
        header = next(rows, [])
        for cells in rows:
            values = map(unescape_formula, cells)
            yield dict(zip(header, values, strict=True))


def _text(
    path: Path, suffix: str, opened: Callable[..., Any] = pa.input_stream
) -> TextIO:
    """Open a text file. suffix: ".gz" or ".zst" if it is compressed."""
    compression = {".gz": "gzip", ".zst": "zstd"}.get(suffix.lower())
    stream = opened(str(path), compression=compression)
    return TextIOWrapper(stream, encoding="utf-8", newline="")


def _rows(file: TextIO) -> Iterator[list[str]]:
    # The csv module's default of 131,072 is too low.
    csv.field_size_limit(MAX_CELL)
    return csv.reader(file, strict=True)


def copy_rows(path: Path, target: Path, form: str, mask: Iterable[bool]) -> None:
    """Copy the rows of a file for which the mask is true."""
    if form == "parquet":
        _copy_parquet_rows(path, target, mask)
        return
    with (
        _text(path, path.suffix) as source,
        _text(target, path.suffix, pa.output_stream) as copy,
    ):
        if form == "jsonl":
            copy.writelines(compress(source, mask))
        else:
            _copy_csv_rows(source, copy, mask)


def _copy_csv_rows(source: TextIO, copy: TextIO, mask: Iterable[bool]) -> None:
    rows = _rows(source)
    writer = csv.writer(copy)
    header = list(islice(rows, 1))
    chosen_rows = compress(rows, mask)
    writer.writerows(chain(header, chosen_rows))


def _copy_parquet_rows(path: Path, target: Path, mask: Iterable[bool]) -> None:
    remaining_mask = iter(mask)
    with pq.ParquetFile(path) as source, target.open("wb") as copy:
        writer = ParquetWriter(copy, source.schema_arrow)
        for batch in source.iter_batches(BATCH_ROWS):
            mask_of_batch = islice(remaining_mask, batch.num_rows)
            chosen_rows = batch.filter(pa.array(mask_of_batch, pa.bool_()))
            writer.write(chosen_rows)
        writer.close()
