"""Export results to a single file, or to a folder of parts by day. Published files are always complete.

Data is written to a temporary file and renamed once it is complete and synced to disk. In a folder, the names of the
parts record which stream entries they hold, so a crash never causes duplicates. A single file resumes from its
`.partial`, truncated to the size in its saved state.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from feedmill.export.text import COLUMNS, Csv, Format, Jsonl, PostKey, TextFormat, Writer
from feedmill.reading.entry_ids import id_before, seconds_of
from feedmill.reading.rows import ResultRow, RowReader
from shared.atomic_files import publish, replacing, sync, temporary_path
from shared.errors import UserError, explain_missing, printable
from shared.scripts.stream import Place

#: State file of a folder: the export's options and position. Dataset readers ignore names that begin with `_`.
STATE_FILE = "_export.json"
#: Version of the state. Increase it when this version cannot resume an export of an earlier one.
STATE_VERSION = 1
#: Name of a part, with the ids of its first and last stream entry.
PART_NAME = re.compile(r"part-(\d+-\d+)_(\d+-\d+)\.(csv|jsonl|parquet)")
#: Approximate number of rows in a part. A part is closed at the end of a fetch, and when the day changes.
PART_ROWS = 100_000
#: Approximate number of rows between saves of a single file's state.
SAVE_INTERVAL_ROWS = 20_000
#: Seconds between removals of posts that were purged after their part was closed, while an export follows the stream.
SWEEP_INTERVAL_S = 3600.0
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
) -> Iterator["Folder | File"]:
    """Open the target of an export and lock it. An unfinished export with the same options is resumed.

    in_parts: write a folder of parts; Parquet always does. Raises UserError, OSError and redis.exceptions.RedisError.
    """
    state = {"version": STATE_VERSION, "format": form.name, "columns": [*form.columns], **wanted._asdict()}
    with ExitStack() as stack:
        if in_parts or form.name == "parquet" or (out / STATE_FILE).is_file():
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
            partial = out.with_name(f"{out.name}.partial")
            opened_partial = stack.enter_context(partial.open("ab+"))
            stack.enter_context(_locked(partial))
            file = File(out, opened_partial, form, state, reader)  # type: ignore[arg-type]  # not Parquet
            stack.callback(file.abandon)
            yield file


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


def _read_state(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of an earlier run, or None. Raises UserError if it belongs to an export with other options."""
    try:
        # Defaults for states written before these options existed.
        state = {"columns": [*COLUMNS], "latest": False, "run": None} | json.loads(path.read_bytes())
        asked = {name: state[name] for name in wanted}
        Place(**state["place"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"Cannot read {path}, the state of an unfinished export. Delete this file and the unfinished export."
        ) from None
    for name, value in wanted.items():
        if asked[name] != value:
            if name == "version":
                raise UserError(f"{path} was written by another version of feedmill. Give another OUT.")
            flag = f"without --{name}" if asked[name] in (None, False) else f"with another value of --{name}"
            flag = f"with --{name}" if asked[name] is True else flag
            raise UserError(f"{path} belongs to an export {flag}. Give another OUT, or repeat the earlier flags.")
    return dict(state)


def _without_purged(
    path: Path, target: Path, form: Format, reader: RowReader, latest: bool = False
) -> tuple[int, int | None]:
    """Copy a file to `target` without purged posts and, if `latest`, with only the last row of each post.

    Returns the number of removed rows of purged posts, and the number of rows in `target`. If nothing has to be
    removed, makes no copy and returns (0, None).
    """
    gone = reader.gone(post.id for post in form.posts(path))
    rows = Counter(form.posts(path) if gone or latest else ())
    if not gone and rows.total() == len(rows):
        return 0, None
    removed = sum(count for post, count in rows.items() if post.id in gone)

    def kept(post: PostKey) -> bool:
        rows[post] -= 1  # now the number of later rows of this post
        return post.id not in gone and not (latest and rows[post])

    return removed, form.copy(path, target, kept)


class Folder:
    """A folder of parts, one or more per UTC day on which results were stored: OUT/day=2026-11-21/part-….parquet.

    The methods raise OSError, and redis.exceptions.RedisError when they look for purged posts.
    """

    def __init__(
        self, out: Path, form: Format, state: dict[str, Any], reader: RowReader, part_rows: int = PART_ROWS
    ) -> None:
        self._out = out
        self._part_rows = part_rows
        self._format = form
        self._reader = reader
        self._state = state
        known = _read_state(out / STATE_FILE, state)
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
        removed, left = _without_purged(self._beside, copy, self._format, self._reader)
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

    def sweep(self) -> None:
        """Remove posts that were purged after their parts were published."""
        self.removed += _sweep(self._out, self._format, self._reader)

    def _save_state(self) -> None:
        with replacing(self._out / STATE_FILE, durable=True) as temporary:
            temporary.write_text(json.dumps(self._state | {"place": self.place._asdict()}))


class File:
    """A single file, published as OUT when the export is complete. See Folder; `written` includes earlier runs' rows.

    partial: OUT.partial, open for appending.
    """

    def __init__(
        self, out: Path, partial: BinaryIO, form: TextFormat, state: dict[str, Any], reader: RowReader
    ) -> None:
        self._out, self._partial = out, out.with_name(f"{out.name}.partial")
        self._state_file = out.with_name(f"{out.name}.partial.json")
        self._format = form
        self._reader = reader
        self._state = state
        size = self._partial.stat().st_size
        known = _read_state(self._state_file, state) if size else None
        if known is not None and known["bytes"] > size:  # the state belongs to another file
            known = None
        self.resumed = known is not None
        self.place = Place(**known["place"]) if known else Place(id_before(state["since"] or 0.0))
        self.written = int(known["rows"]) if known else 0
        self.removed = 0
        os.truncate(self._partial, known["bytes"] if known else 0)
        partial.seek(0, os.SEEK_END)
        self._file = partial
        self._writer = form.open(partial)
        self._rows_saved = self.written

    def add(self, rows: Sequence[ResultRow], place: Place) -> None:
        self._writer.add(rows)
        self.written += len(rows)
        self.place = place
        if self.written - self._rows_saved >= SAVE_INTERVAL_ROWS:
            self.stop(place)

    def stop(self, place: Place) -> None:
        """Save the position of an unfinished export, so that a later run can resume it."""
        self.place = place
        self._file.flush()
        os.fsync(self._file.fileno())
        state = self._state | {
            "place": self.place._asdict(), "rows": self.written, "bytes": self._partial.stat().st_size
        }  # fmt: skip
        with replacing(self._state_file, durable=True) as temporary:
            temporary.write_text(json.dumps(state))
        self._rows_saved = self.written

    def close(self, place: Place) -> None:
        self.place = place
        self._file.flush()
        # The state is deleted first: it does not match the file published below. After a crash here, a later run starts
        # from the beginning.
        self._state_file.unlink(missing_ok=True)
        copy = temporary_path(self._out)
        latest = self._state["latest"]
        self.removed, left = _without_purged(self._partial, copy, self._format, self._reader, latest)
        self.written = self.written if left is None else left
        publish(self._partial if left is None else copy, self._out)

    def abandon(self) -> None:
        """Delete the partial file unless a later run can resume it."""
        if not self._state_file.exists():
            self._partial.unlink(missing_ok=True)


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
        removed, _ = _without_purged(out, temporary, form, reader)
    return removed


def _format_of_file(path: Path) -> Format:
    """Detect the format of a file by its first line. Raises UserError if it is not an export."""
    with path.open("rb") as file:
        line = file.readline(FIRST_LINE_BYTES)
    with suppress(ValueError):
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
            fewer, left = _without_purged(path, temporary, form, reader)
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
