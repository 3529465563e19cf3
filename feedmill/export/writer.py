"""Export results to a single file, or to a folder of parts by day. Published files are always complete.

Data is written to a temporary file and renamed once it is complete and synced to disk. In a folder, the names of the
parts record which stream entries they hold, so a crash never causes duplicates. A single CSV or JSONL file resumes from
its `.partial`, truncated to the size in its saved state. A single Parquet file starts over.

Purged posts are left out: each row is checked when it is read, and all rows of a file again before it is published.
Posts purged later are removed when the same export runs again, every `SWEEP_INTERVAL_S` seconds while an export follows
the stream, and by `purge`. Docs: docs/export.md.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from feedmill.export.purging import without_purged
from feedmill.export.single_file import File, ParquetFile, partial_path
from feedmill.export.state import STATE_VERSION, read_state
from feedmill.export.text import COLUMNS, Csv, Format, Jsonl, Writer
from feedmill.reading.entry_ids import id_before, seconds_of
from feedmill.reading.rows import ResultRow, RowReader
from shared.atomic_files import publish, replacing, sync, temporary_path
from shared.errors import UserError, explain_missing, printable
from shared.scripts.stream import Place

#: State file of a folder: the export's options and position. Dataset readers ignore names that begin with `_`.
STATE_FILE = "_export.json"
#: Name of a part, with the ids of its first and last stream entry.
PART_NAME = re.compile(r"part-(\d+-\d+)_(\d+-\d+)\.(csv|jsonl|parquet)")
#: Endings of single files, each the name of its format.
ENDINGS = ("parquet", "csv", "jsonl")
#: Approximate number of rows in a part. A part is closed at the end of a fetch, and when the day changes.
PART_ROWS = 100_000
#: Seconds between removals of posts that were purged after their part was closed, while an export follows the stream.
SWEEP_INTERVAL_S = 3600.0
#: First bytes of a Parquet file.
PARQUET_MAGIC = b"PAR1"
#: Maximum bytes of a file's first line to read when checking whether it is an export.
FIRST_LINE_BYTES = 2_000_000


class ExportFilter(NamedTuple):
    """A selection of results: stored at or after `since` and before `until` (seconds since 1970), with this label and
    run.

    latest: keep only the newest result of each post. Single files only, because a folder's parts are published before
    later results are known.
    """

    since: float | None = None
    until: float | None = None
    label: str | None = None
    latest: bool = False
    run: str | None = None

    def of(self, rows: Sequence[ResultRow]) -> Sequence[ResultRow]:
        if self.label is not None:
            rows = [row for row in rows if row.found["label"] == self.label]
        return rows if self.run is None else [row for row in rows if row.post.get("run") == self.run]


def format_of(name: str, columns: Sequence[str] = COLUMNS, for_excel: bool = False) -> Format:
    """Return the format called `name`. Raises UserError if its package is not installed.

    for_excel: mark CSV files as UTF-8.
    """
    if name != "parquet":
        return Csv(columns, for_excel) if name == "csv" else Jsonl(columns)
    with explain_missing("Parquet", "export"):
        from feedmill.export.parquet import Parquet  # noqa: PLC0415 - pyarrow, which the extra `export` brings
    return Parquet(columns)


@contextmanager
def opened(
    out: Path, form: Format, wanted: ExportFilter, reader: RowReader, in_parts: bool = False, part_rows: int = PART_ROWS
) -> Iterator["Target"]:
    """Open the target of an export and lock it. An unfinished export with the same options is resumed.

    in_parts: write a folder of parts, as Parquet does unless OUT ends in .parquet, and as any earlier export to this
    folder did. Raises UserError, OSError and redis.exceptions.RedisError.
    """
    state = {"version": STATE_VERSION, "format": form.name, "columns": [*form.columns], **wanted._asdict()}
    with ExitStack() as stack:
        if in_parts or (form.name == "parquet" and not names_file(out)) or (out / STATE_FILE).is_file():
            if out.exists() and not out.is_dir():
                raise UserError(f"{out} is a file, but {form.name} in parts needs a folder. Give another OUT.")
            # A run that was killed at its start leaves only the temporary file of the state.
            if (
                out.is_dir()
                and {*out.iterdir()} - {temporary_path(out / STATE_FILE)}
                and not (out / STATE_FILE).is_file()
            ):
                raise UserError(f"{out} contains other files. Give a new or an empty folder.")
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(out))
            folder = Folder(out, form, state, reader, part_rows)
            stack.callback(folder.abandon)
            yield folder
        else:
            if out.is_dir():
                raise UserError(f"{out} is a folder. Name a file in it, such as {out / f'results.{form.name}'}.")
            if not out.parent.is_dir():
                raise UserError(f"The folder {out.parent} does not exist. Create it, or give another OUT.")
            partial = partial_path(out)
            opened_partial = stack.enter_context(partial.open("ab+"))
            stack.enter_context(_locked(partial))
            file = (
                ParquetFile(out, form, wanted.latest, reader, state)
                if form.name == "parquet"
                else File(out, opened_partial, form, state, reader)  # type: ignore[arg-type]  # not Parquet
            )
            stack.callback(file.abandon)
            yield file


def names_file(out: Path) -> bool:
    """Return whether OUT ends like a file of an export format. Other names are folders for Parquet and `--follow`."""
    return out.suffix.lower().removeprefix(".") in ENDINGS


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the path inside the block. Raises UserError if another process holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another export is writing to {path}. Wait for it, or stop it.") from None
        yield
    finally:
        os.close(descriptor)


class Folder:
    """A folder of parts, one or more per UTC day on which results were stored: OUT/day=2026-11-21/part-….parquet.

    The methods raise OSError, and redis.exceptions.RedisError when they look for purged posts.
    """

    can_resume = True

    def __init__(
        self, out: Path, form: Format, state: dict[str, Any], reader: RowReader, part_rows: int = PART_ROWS
    ) -> None:
        self._out = out
        self._part_rows = part_rows
        self._format = form
        self._reader = reader
        self._state = state
        known = read_state(out / STATE_FILE, state)
        #: True if this run continues an earlier one.
        self.resumed = known is not None
        #: Stream position up to which rows were added.
        self.place = Place(**known["place"]) if known else Place(id_before(state["since"] or 0.0))
        self._skip_published_parts()
        for left_over in out.glob("**/.*.tmp"):
            left_over.unlink()
        #: Rows removed because their posts were purged, and rows in published files.
        self.removed = self.written = 0
        self._writer: Writer | None = None
        self._first = self._last = ""
        self.rows = 0
        self.begun = time.monotonic()
        self._save_state()

    def _skip_published_parts(self) -> None:
        """Move `place` past the newest part: a crash may come between publishing a part and saving the state."""
        newest = max((_order(match[2]) for _, match in parts(self._out)), default=(0, 0))
        if newest > _order(self.place.cursor):
            self.place = Place(f"{newest[0]}-{newest[1]}")

    def add(self, rows: Sequence[ResultRow], place: Place) -> None:
        """Append rows. place: the reader's position after them."""
        for day, some in groupby(rows, key=lambda row: _day_of(row.entry)):
            if self._writer and day != _day_of(self._last):
                self._publish()
            self._write(day, list(some))
        if self.rows >= self._part_rows:
            self.close(place)

    def _write(self, day: str, rows: Sequence[ResultRow]) -> None:
        if self._writer is None:
            self._beside = self._out / f"day={day}" / f".part.{self._format.name}.tmp"
            self._beside.parent.mkdir(exist_ok=True)
            self._writer = self._format.create(self._beside)
            self._first = rows[0].entry
            self.begun = time.monotonic()
        self._writer.add(rows)
        self._last = rows[-1].entry
        self.rows += len(rows)

    def close(self, place: Place) -> None:
        """Publish all rows added so far."""
        self._publish()
        if place != self.place:
            self.place = place
            self._save_state()

    stop = close

    def _publish(self) -> None:
        """Close the open part, remove purged posts from it and publish it."""
        if self._writer is None:
            return
        self._writer.close()
        path = self._beside.with_name(f"part-{self._first}_{self._last}.{self._format.name}")
        copy = self._beside.with_suffix(".copy.tmp")
        removed, left = without_purged(self._beside, copy, self._format, self._reader)
        if left is not None:
            copy.replace(self._beside)
        if left == 0:
            self._beside.unlink()
        else:
            publish(self._beside, path)
            sync(self._out)  # the day's folder may be new
        self.written += self.rows - removed
        self._writer, self.rows = None, 0

    def abandon(self) -> None:
        """Discard the open part. The reader resumes at `place` and adds its rows again."""
        if self._writer is not None:
            with suppress(Exception):  # an interrupted writer may fail in any way
                self._writer.close()
            self._beside.unlink(missing_ok=True)
            self._writer, self.rows = None, 0
            self._skip_published_parts()

    def resume(self) -> Place:
        """Discard the open part, and return the place to read from."""
        self.abandon()
        return self.place

    def sweep(self) -> None:
        """Remove posts that were purged after their parts were published."""
        self.removed += _sweep(self._out, self._format, self._reader)

    def _save_state(self) -> None:
        with replacing(self._out / STATE_FILE, durable=True) as temporary:
            temporary.write_text(json.dumps(self._state | {"place": self.place._asdict()}))


Target = Folder | File | ParquetFile


def parts(out: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the parts in a folder, oldest first, each with its PART_NAME match."""
    named = ((path, PART_NAME.fullmatch(path.name)) for path in out.glob("day=*/part-*"))
    return sorted(((path, match) for path, match in named if match), key=lambda part: _order(part[1][1]))


def purge(out: Path, reader: RowReader) -> int:
    """Remove purged posts from a finished export; return the number of removed rows.

    Raises UserError, OSError and redis.exceptions.RedisError.
    """
    if out.is_dir():
        state = out / STATE_FILE
        if not state.is_file():
            raise UserError(
                f"{out} is not a folder of `feedmill export`: it has no {STATE_FILE}. Give the OUT of an earlier "
                "export."
            )
        try:
            form = format_of(str(json.loads(state.read_bytes())["format"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"Cannot read {state}, the state of the export. Export to a new folder.") from None
        with _locked(out):
            return _sweep(out, form, reader)
    if not out.is_file():
        raise UserError(f"{out} does not exist. Give the OUT of an earlier export.")
    form = _format_of_file(out)
    with replacing(out, durable=True) as temporary:
        removed, _ = without_purged(out, temporary, form, reader)
    return removed


def _format_of_file(path: Path) -> Format:
    """Detect the format of a file by its first line. Raises UserError if it is not an export."""
    with path.open("rb") as file:
        line = file.readline(FIRST_LINE_BYTES)
    with suppress(ValueError):  # pyarrow's errors are ValueErrors, too
        if line.startswith(PARQUET_MAGIC):
            with explain_missing("Parquet", "export"):
                from feedmill.export.parquet import Parquet  # noqa: PLC0415 - pyarrow, which the extra `export` brings
            if _are_ours(Parquet.columns_of(path)):
                return Parquet()
        if line.startswith(b"{") and _are_ours(json.loads(line)):
            return Jsonl()
        if _are_ours(line.decode("utf-8-sig").strip().split(",")):
            return Csv()
    raise UserError(
        f"{printable(str(path))} is not an export of results: it has other columns. Give the OUT of an earlier export."
    )


def _are_ours(columns: Collection[str]) -> bool:
    """Return whether these are columns of an export: `id`, and a second one or no columns of the user's own.

    Case is ignored, because exports of earlier versions have columns like `Title`.
    """
    known = sum(column.lower() in COLUMNS for column in columns)
    return "id" in columns and (known > 1 or known == len(columns))


def _sweep(out: Path, form: Format, reader: RowReader) -> int:
    removed = 0
    for path, _ in parts(out):
        with replacing(path, durable=True) as temporary:
            fewer, left = without_purged(path, temporary, form, reader)
            if left == 0:
                temporary.unlink()
        if left == 0:
            path.unlink()
            with suppress(OSError):  # the day's folder holds other parts
                path.parent.rmdir()
            sync(out)
        removed += fewer
    return removed


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _day_of(entry: str) -> str:
    return datetime.fromtimestamp(seconds_of(entry), UTC).date().isoformat()
