"""Results into files that are always whole: as one file, or as a folder of parts by day.

What is written is put beside its name first, and renamed when it is complete and on the disk. Of a folder the names of
its parts say which entries of the stream they hold, so that what was written before a crash counts once, whatever the
crash came before. One file is gone on with in its `.partial`, up to the bytes that its state has noted.

A post that was purged does not appear: each row is checked when it is read, and all rows of a file again before the
file gets its name. What is purged later is taken out when the same export is run again, every `SWEEP_EVERY` seconds
while one follows, and by `purge`. Docs: docs/export.md.
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
from typing import Any, BinaryIO, NamedTuple, Protocol

from feedmill.export_text import COLUMNS, Csv, Format, Jsonl, TextFormat, Writer
from feedmill.result_rows import Place, Row, RowReader, just_before, seconds_of
from shared.errors import UserError, printable

#: Of a folder: what its export was asked for, and how far it is. Readers of such folders pass over names with `_`.
STATE = "_export.json"
#: Raised when a later version cannot go on with what an earlier one began.
VERSION = 1
#: A part: its first and its last entry in the stream.
PART = re.compile(r"part-(\d+-\d+)_(\d+-\d+)\.(csv|jsonl|parquet)")
#: Rows of a part, about; it is closed after whole fetches, and when a day ends.
PART_ROWS = 100_000
#: Rows after which the state of one file is noted, about.
NOTED_ROWS = 20_000
#: Seconds between two looks for posts that were purged after their part was closed, while one follows.
SWEEP_EVERY = 3600.0
#: What may be read of a file to tell whether it is an export.
FIRST_LINE = 2_000_000


class Wanted(NamedTuple):
    """Which results are exported: stored from `since` on and before `until`, seconds since 1970; of this label.

    latest: of each post the newest of these alone. For one file: a folder's parts are complete before it is known.
    """

    since: float | None = None
    until: float | None = None
    label: str | None = None
    latest: bool = False

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        return rows if self.label is None else [row for row in rows if row.found["label"] == self.label]


class Target(Protocol):
    """Where an export goes. Every method raises OSError, and redis.exceptions.RedisError where it looks for purges."""

    #: Where it goes on in the stream.
    place: Place
    #: Whether an earlier run began it.
    resumed: bool
    #: Rows in files that are complete; of one file also those that an earlier run wrote.
    written: int
    #: Rows of posts that were found to be purged, and taken out.
    removed: int

    def add(self, rows: Sequence[Row], place: Place) -> None:
        """These rows come next; the reader is at `place` after them."""

    def close(self, place: Place) -> None:
        """What was added is complete, and is not lost any more."""

    def stop(self, place: Place) -> None:
        """It is not complete, and a later run goes on here."""


def format_of(name: str, columns: Sequence[str] = COLUMNS) -> Format:
    """Raises UserError where a package is missing for it."""
    if name != "parquet":
        return Csv(columns) if name == "csv" else Jsonl(columns)
    try:
        from feedmill.export_parquet import Parquet  # noqa: PLC0415 - pyarrow, which the extra `export` brings
    except ModuleNotFoundError as missing:
        if missing.name != "pyarrow":
            raise
        raise UserError("Parquet needs pyarrow: `pip install 'feedmill[export]'` brings it.") from None
    return Parquet(columns)


@contextmanager
def opened(
    out: Path, form: Format, wanted: Wanted, reader: RowReader, in_parts: bool = False, part_rows: int = PART_ROWS
) -> Iterator[Target]:
    """The target for an export, held by this process alone. in_parts: a folder, which Parquet is in any case.

    What an earlier run of the same export wrote is gone on with. Raises UserError, and as Target does.
    """
    state = {"version": VERSION, "format": form.name, "columns": [*form.columns], **wanted._asdict()}
    with ExitStack() as stack:
        if in_parts or form.name == "parquet" or (out / STATE).is_file():
            if out.exists() and not out.is_dir():
                raise UserError(f"{out} is a file: {form.name} in parts goes into a folder.")
            # A run that was killed as it began has left no more than a state that never got its name.
            if out.is_dir() and {*out.iterdir()} - {_beside(out / STATE)} and not (out / STATE).is_file():
                raise UserError(f"{out} holds other files: give a new folder, or an empty one.")
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_held(out))
            folder = Folder(out, form, state, reader, part_rows)
            stack.callback(folder.abandon)
            yield folder
        else:
            if out.is_dir():
                raise UserError(f"{out} is a folder: name a file in it, such as {out / f'results.{form.name}'}.")
            if not out.parent.is_dir():
                raise UserError(f"There is no folder {out.parent} to write {out.name} into.")
            partial = out.with_name(f"{out.name}.partial")
            held = stack.enter_context(partial.open("ab+"))
            stack.enter_context(_held(partial))
            file = File(out, held, form, state, reader)  # type: ignore[arg-type]  # not Parquet
            stack.callback(file.abandon)
            yield file


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Inside the block no other process has it. Raises UserError where one has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another export is writing to {path}: wait for it, or end it.") from None
        yield
    finally:
        os.close(descriptor)


def _read_state(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of an earlier run, None where there is none. Raises UserError where it is of another export."""
    try:
        # What was not asked for before there was a choice.
        state = {"columns": [*COLUMNS], "latest": False} | json.loads(path.read_bytes())
        asked = {name: state[name] for name in wanted}
        Place(**state["place"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} should say how far an export is, but cannot be read; delete it, and what it is of."
        ) from None
    for name, value in wanted.items():
        if asked[name] != value:
            flag = "another version of feedmill" if name == "version" else f"another --{name}"
            raise UserError(f"{path} belongs to an export with {flag}: give another OUT, or the flags of before.")
    return dict(state)


def _replace(path: Path, text: bytes) -> None:
    """Write a small file so that it is whole at any time."""
    beside = _beside(path)
    beside.write_bytes(text)
    _publish(beside, path)


def _beside(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{path.name}.tmp")


def _publish(beside: Path, path: Path) -> None:
    """Give a complete file its name, once it is on the disk."""
    _sync(beside)
    beside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without_purged(
    path: Path, beside: Path, form: Format, reader: RowReader, latest: bool = False
) -> tuple[int, int | None]:
    """Look for purged posts in a file, and for all but each post's last row if only the latest are wanted.

    Where there are any, `beside` is the file without them. Returns how many rows of purged posts there were, and how
    many are left in `beside`; None where the file is as it should be.
    """
    gone = reader.gone(form.ids(path))
    rows = Counter(form.ids(path) if gone or latest else ())
    if not gone and rows.total() == len(rows):
        return 0, None
    removed = sum(rows[post_id] for post_id in gone)

    def kept(post_id: str) -> bool:
        rows[post_id] -= 1  # how many come after this one
        return post_id not in gone and not (latest and rows[post_id])

    return removed, form.copy(path, beside, kept)


class Folder:
    """OUT/day=2026-11-21/part-….parquet: the day, in UTC, on which results were stored."""

    def __init__(
        self, out: Path, form: Format, state: dict[str, Any], reader: RowReader, part_rows: int = PART_ROWS
    ) -> None:
        self._out = out
        self._part_rows = part_rows
        self._format = form
        self._reader = reader
        self._state = state
        known = _read_state(out / STATE, state)
        self.resumed = known is not None
        self.place = Place(**known["place"]) if known else Place(just_before(state["since"] or 0.0))
        self._go_on_after_parts()
        for left_over in out.glob("**/.*.tmp"):
            left_over.unlink()
        self.removed = self.written = 0
        self._writer: Writer | None = None
        self._first = self._last = ""
        self.rows = 0
        self.begun = time.monotonic()
        self._note()

    def _go_on_after_parts(self) -> None:
        """A part may have got its name, and the state not have been told."""
        newest = max((_order(match[2]) for _, match in parts(self._out)), default=(0, 0))
        if newest > _order(self.place.cursor):
            self.place = Place(f"{newest[0]}-{newest[1]}")

    def add(self, rows: Sequence[Row], place: Place) -> None:
        for day, some in groupby(rows, key=_day):
            if self._writer and day != _day_of(self._last):
                self._publish()
            self._write(day, list(some))
        if self.rows >= self._part_rows:
            self.close(place)

    def _write(self, day: str, rows: Sequence[Row]) -> None:
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
        self._publish()
        if place != self.place:
            self.place = place
            self._note()

    stop = close

    def _publish(self) -> None:
        """The part that is open gets its name."""
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
            _publish(self._beside, path)
            _sync(self._out)  # the day may be new
        self.written += self.rows - removed
        self._writer, self.rows = None, 0

    def abandon(self) -> None:
        """Forget the part that is open: its rows come again when the reader goes on at `place`."""
        if self._writer is not None:
            with suppress(Exception):  # it may have been left in the middle of anything
                self._writer.close()
            self._beside.unlink(missing_ok=True)
            self._writer, self.rows = None, 0
            self._go_on_after_parts()

    def sweep(self) -> None:
        """Take out what was purged since the parts were closed."""
        self.removed += _sweep(self._out, self._format, self._reader)

    def _note(self) -> None:
        _replace(self._out / STATE, json.dumps(self._state | {"place": self.place._asdict()}).encode())


class File:
    """OUT itself, which is there when it is complete. held: OUT.partial, open for appending."""

    def __init__(self, out: Path, held: BinaryIO, form: TextFormat, state: dict[str, Any], reader: RowReader) -> None:
        self._out, self._partial = out, out.with_name(f"{out.name}.partial")
        self._noted = out.with_name(f"{out.name}.partial.json")
        self._format = form
        self._reader = reader
        self._state = state
        size = self._partial.stat().st_size
        known = _read_state(self._noted, state) if size else None
        if known is not None and known["bytes"] > size:  # beyond what there is: of another file
            known = None
        self.resumed = known is not None
        self.place = Place(**known["place"]) if known else Place(just_before(state["since"] or 0.0))
        self.written = int(known["rows"]) if known else 0
        self.removed = 0
        os.truncate(self._partial, known["bytes"] if known else 0)
        held.seek(0, os.SEEK_END)
        self._file = held
        self._writer = form.open(held)
        self._rows_noted = self.written

    def add(self, rows: Sequence[Row], place: Place) -> None:
        self._writer.add(rows)
        self.written += len(rows)
        self.place = place
        if self.written - self._rows_noted >= NOTED_ROWS:
            self.stop(place)

    def stop(self, place: Place) -> None:
        self.place = place
        self._file.flush()
        os.fsync(self._file.fileno())
        state = self._state | {
            "place": self.place._asdict(), "rows": self.written, "bytes": self._partial.stat().st_size
        }  # fmt: skip
        _replace(self._noted, json.dumps(state).encode())
        self._rows_noted = self.written

    def close(self, place: Place) -> None:
        self.place = place
        self._file.flush()
        # From here on a later run begins anew: the state is of a file that is about to be another.
        self._noted.unlink(missing_ok=True)
        copy = self._out.with_name(f".{self._out.name}.tmp")
        latest = self._state["latest"]
        self.removed, left = _without_purged(self._partial, copy, self._format, self._reader, latest)
        self.written = self.written if left is None else left
        _publish(self._partial if left is None else copy, self._out)

    def abandon(self) -> None:
        """Leave nothing behind that no later run goes on with."""
        if not self._noted.exists():
            self._partial.unlink(missing_ok=True)


def parts(out: Path) -> list[tuple[Path, re.Match[str]]]:
    """The parts in a folder, the oldest first, with what their names say."""
    named = ((path, PART.fullmatch(path.name)) for path in out.glob("day=*/part-*"))
    return sorted(((path, match) for path, match in named if match), key=lambda part: _order(part[1][1]))


def purge(out: Path, reader: RowReader) -> int:
    """Take posts that were purged out of what was exported; returns how many rows there were.

    Raises UserError, and as Target does.
    """
    if out.is_dir():
        state = out / STATE
        if not state.is_file():
            raise UserError(f"{out} is no folder of `feedmill export`: it has no {STATE}.")
        try:
            form = format_of(str(json.loads(state.read_bytes())["format"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{state} should say what was exported, and cannot be read: export to a new folder."
            ) from None
        with _held(out):
            return _sweep(out, form, reader)
    if not out.is_file():
        raise UserError(f"There is no {out}.")
    form = _format_of_file(out)
    beside = out.with_name(f".{out.name}.tmp")
    removed, left = _without_purged(out, beside, form, reader)
    if left is not None:
        _publish(beside, out)
    return removed


def _format_of_file(path: Path) -> Format:
    """What the file's first line says. Raises UserError where it is no export."""
    with path.open("rb") as file:
        line = file.readline(FIRST_LINE)
    with suppress(ValueError):
        if line.startswith(b"{") and _are_ours(json.loads(line)):
            return Jsonl()
        if _are_ours(line.decode().strip().split(",")):
            return Csv()
    raise UserError(f"{printable(str(path))} is no export of results: it has not the columns of one.")


def _are_ours(columns: Collection[str]) -> bool:
    """Whether these may be an export's columns, all or some."""
    return "id" in columns and set(columns) <= set(COLUMNS)


def _sweep(out: Path, form: Format, reader: RowReader) -> int:
    removed = 0
    for path, _ in parts(out):
        beside = path.with_name(f".{path.name}.tmp")
        fewer, left = _without_purged(path, beside, form, reader)
        if left:
            _publish(beside, path)
        elif left == 0:
            beside.unlink()
            path.unlink()
            with suppress(OSError):  # the day has other parts
                path.parent.rmdir()
            _sync(out)
        removed += fewer
    return removed


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _day(row: Row) -> str:
    return _day_of(row.entry)


def _day_of(entry: str) -> str:
    return datetime.fromtimestamp(seconds_of(entry), UTC).date().isoformat()
