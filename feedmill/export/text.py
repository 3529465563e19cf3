"""Write export rows as CSV and JSONL, and define the columns of every export format."""

import csv
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pydantic_core import from_json, to_json

from feedmill.reading.rows import ResultRow
from producers import exported
from shared.messages import Post

#: Column of a post -> the post's field, and the field's default, which stored posts omit.
POST_FIELDS = {column: (field, Post.model_fields[field].default) for field, column in exported.COLUMNS.items()}
#: All columns in order: the fields of the post, then the classification. Docs: docs/export.md.
RESULT_COLUMNS = (
    "label", "label_score", "scores", "model", "revision", "weights", "fingerprint", "classified_at",
    "queued_seconds",
)  # fmt: skip
COLUMNS = (*POST_FIELDS, *RESULT_COLUMNS)
TIME_COLUMNS = ("Date", "edited", "classified_at")
#: CSV columns with text from users, which is escaped. All other columns hold numbers, dates, digests or generated JSON.
ESCAPED = frozenset({"id", "Topic", "Title", "Body", "Subreddit", "URL", "permalink", "label", "model", "revision"})


class Writer(Protocol):
    """A writer of rows to one file."""

    def add(self, rows: Sequence[ResultRow]) -> None: ...

    def close(self) -> None:
        """Flush everything to the operating system and close the file."""


class Format(Protocol):
    """A file format. `columns` applies to writing; reading takes the columns from the file."""

    name: str
    #: Columns to write, out of `COLUMNS`, in this order. `id` is required, because purged posts are found by it.
    columns: Sequence[str]

    def create(self, path: Path) -> Writer: ...

    def ids(self, path: Path) -> Iterable[str]:
        """Yield the posts' ids in file order."""

    def copy(self, path: Path, target: Path, kept: Callable[[str], bool]) -> int:
        """Copy the rows for which `kept(post id)` is True, called once per row in order. Return their number."""


class TextFormat(Format, Protocol):
    """A format whose files can be appended to."""

    def __init__(self, columns: Sequence[str] = COLUMNS) -> None:
        self.columns = columns

    def create(self, path: Path) -> Writer:
        return self.open(path.open("wb"))

    def open(self, file: BinaryIO) -> Writer:
        """Return a writer that appends to the file, after a header if the file is empty and the format has one."""


class Jsonl(TextFormat):
    """JSON Lines: one object per line."""

    name = "jsonl"

    def open(self, file: BinaryIO) -> Writer:
        return _JsonlWriter(file, self.columns)

    def ids(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            for line in file:
                yield from_json(line)["id"]

    def copy(self, path: Path, target: Path, kept: Callable[[str], bool]) -> int:
        rows = 0
        with path.open("rb") as file, target.open("wb") as copied:
            for line in file:
                if kept(from_json(line)["id"]):
                    copied.write(line)
                    rows += 1
        return rows


class _JsonlWriter:
    def __init__(self, file: BinaryIO, columns: Sequence[str]) -> None:
        self._file = file
        self._columns = columns

    def add(self, rows: Sequence[ResultRow]) -> None:
        records = ({column: values[column] for column in self._columns} for values in map(_values, rows))
        self._file.write(b"".join(to_json(record) + b"\n" for record in records))

    def close(self) -> None:
        self._file.close()


class Csv(TextFormat):
    """Comma-separated values with a header line; scores are JSON. Text is escaped against spreadsheet formulas.

    has_mark: begin new files with a byte order mark, by which Excel recognizes UTF-8.
    """

    name = "csv"

    def __init__(self, columns: Sequence[str] = COLUMNS, has_mark: bool = False) -> None:
        super().__init__(columns)
        self._has_mark = has_mark

    def open(self, file: BinaryIO) -> Writer:
        return _CsvWriter(file, self.columns, self._has_mark)

    def ids(self, path: Path) -> Iterator[str]:
        rows = self._rows(path)
        id_column = next(rows, ["id"]).index("id")
        return (exported.unescape_formula(row[id_column]) for row in rows)

    def copy(self, path: Path, target: Path, kept: Callable[[str], bool]) -> int:
        count = 0
        with target.open("w", encoding="utf-8", newline="") as copied:
            copied.write("\ufeff" * _has_mark(path))
            lines = csv.writer(copied)
            rows = self._rows(path)
            lines.writerow(columns := next(rows))
            id_column = columns.index("id")
            for row in rows:
                if kept(exported.unescape_formula(row[id_column])):
                    lines.writerow(row)
                    count += 1
        return count

    def _rows(self, path: Path) -> Iterator[list[str]]:
        """Yield the header, then the rows."""
        # In characters; no escaped cell is longer. The csv module's default of 131,072 is too low.
        csv.field_size_limit(2_000_000)
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.reader(file, strict=True)


def _has_mark(path: Path) -> bool:
    """Return whether a file begins with a byte order mark."""
    with path.open("rb") as file:
        return file.read(len(BOM_UTF8)) == BOM_UTF8


class _CsvWriter:
    def __init__(self, file: BinaryIO, columns: Sequence[str], has_mark: bool) -> None:
        self._text = TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        self._lines = csv.writer(self._text)
        self._columns = [(column, column in ESCAPED) for column in columns]
        if file.tell() == 0:
            self._text.write("\ufeff" * has_mark)
            self._lines.writerow(columns)

    def add(self, rows: Sequence[ResultRow]) -> None:
        self._lines.writerows(
            [_cell(values[column], escape) for column, escape in self._columns] for values in map(_values, rows)
        )

    def close(self) -> None:
        self._text.close()


def _cell(value: Any, escape: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return exported.escape_formula(value) if escape else value
    if isinstance(value, bool | dict):
        return to_json(value).decode()
    return repr(value)  # the shortest text that parses to the same float


def _values(row: ResultRow) -> dict[str, Any]:
    """Return the value of every column of a row."""
    values = {column: row.post.get(field, default) for column, (field, default) in POST_FIELDS.items()} | row.found
    values["label_score"] = values["scores"][values["label"]]
    return values | {column: _date(values[column]) for column in TIME_COLUMNS}


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
