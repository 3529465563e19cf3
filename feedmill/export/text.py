"""Write export rows as CSV and JSONL, and define the columns of every export format."""

import csv
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from pydantic_core import from_json, to_json

from feedmill.reading.rows import ResultRow
from producers import exported
from shared.messages import Post

#: Column of a post -> the post's field, and the field's default, which stored posts omit.
POST_FIELDS = {column: (field, Post.model_fields[field].default) for field, column in exported.COLUMNS.items()}
#: All columns in order: the fields of the post, then the classification. Docs: docs/export.md.
RESULT_COLUMNS = (
    "label", "label_score", "label_set", "scores", "model", "revision", "weights", "fingerprint", "classified_at",
    "queued_seconds",
)  # fmt: skip
COLUMNS = (*POST_FIELDS, *RESULT_COLUMNS)
#: Separator of the labels in the name of a label set.
LABEL_SEPARATOR = ", "
TIME_COLUMNS = ("date", "edited", "classified_at")
#: CSV columns with text from users, which is escaped. All other columns hold numbers, dates, digests or generated JSON.
ESCAPED = frozenset({
    "id", "topic", "title", "body", "subreddit", "url", "permalink", "run", "label", "label_set", "model", "revision",
})  # fmt: skip


def label_set_of(found: Mapping[str, Any]) -> str:
    """Return the name of a result's label set. found: the result's fields."""
    return label_set(found["scores"])


def label_set(labels: Iterable[str]) -> str:
    """Return the name of a label set: its labels in alphabetical order. Results of one set can be compared."""
    return LABEL_SEPARATOR.join(sorted(labels))


def own_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns that are values of `extra`, which users chose with `feedmill enqueue --keep`."""
    return [column for column in columns if column not in COLUMNS]


class Writer(Protocol):
    """A writer of rows to one file."""

    def add(self, rows: Sequence[ResultRow]) -> None: ...

    def close(self) -> None:
        """Flush everything to the operating system and close the file."""


class Format(Protocol):
    """A file format. `columns` applies to writing; reading takes the columns from the file."""

    name: str
    #: Columns to write, in this order: those of `COLUMNS`, and keys of the posts' `extra`. `id` is required, because
    #: purged posts are found by it.
    columns: Sequence[str]

    def create(self, path: Path) -> Writer: ...

    def posts(self, path: Path) -> Iterable["PostKey"]:
        """Yield the posts' ids and runs in file order."""

    def copy(self, path: Path, target: Path, kept: Callable[["PostKey"], bool]) -> int:
        """Copy the rows for which `kept(post)` is True, called once per row in order. Return their number."""


class PostKey(NamedTuple):
    """A post of an export, as `--latest` and `--purge` tell them apart."""

    id: str
    #: Run within which the id is unique; None if there is none, or the file has no column `run`.
    run: str | None = None

    @classmethod
    def of(cls, post_id: str, run: str | None) -> "PostKey":
        return cls(post_id, run or None)


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

    def posts(self, path: Path) -> Iterator[PostKey]:
        with path.open("rb") as file:
            for line in file:
                yield self._post(line)

    def _post(self, line: bytes) -> PostKey:
        row = from_json(line)
        return PostKey.of(row["id"], row.get("run"))

    def copy(self, path: Path, target: Path, kept: Callable[[PostKey], bool]) -> int:
        rows = 0
        with path.open("rb") as file, target.open("wb") as copied:
            for line in file:
                if kept(self._post(line)):
                    copied.write(line)
                    rows += 1
        return rows


class _JsonlWriter:
    def __init__(self, file: BinaryIO, columns: Sequence[str]) -> None:
        self._file = file
        self._columns = columns

    def add(self, rows: Sequence[ResultRow]) -> None:
        records = ({column: values.get(column) for column in self._columns} for values in map(_values, rows))
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

    def posts(self, path: Path) -> Iterator[PostKey]:
        rows = self._rows(path)
        post = self._reader(next(rows, ["id"]))
        return map(post, rows)

    def _reader(self, columns: Sequence[str]) -> Callable[[list[str]], PostKey]:
        """Return a function that reads the post of a row. columns: the header."""
        at, run = columns.index("id"), columns.index("run") if "run" in columns else None

        def read(row: list[str]) -> PostKey:
            return PostKey.of(
                exported.unescape_formula(row[at]), None if run is None else exported.unescape_formula(row[run])
            )

        return read

    def copy(self, path: Path, target: Path, kept: Callable[[PostKey], bool]) -> int:
        count = 0
        with target.open("w", encoding="utf-8", newline="") as copied:
            copied.write("\ufeff" * _has_mark(path))
            lines = csv.writer(copied)
            rows = self._rows(path)
            lines.writerow(columns := next(rows))
            post = self._reader(columns)
            for row in rows:
                if kept(post(row)):
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
        own = own_columns(columns)
        self._columns = [(column, column in ESCAPED or column in own) for column in columns]
        if file.tell() == 0:
            self._text.write("\ufeff" * has_mark)
            self._lines.writerow(exported.escape_formula(column) for column in columns)

    def add(self, rows: Sequence[ResultRow]) -> None:
        self._lines.writerows(
            [_cell(values.get(column), escape) for column, escape in self._columns] for values in map(_values, rows)
        )

    def close(self) -> None:
        self._text.close()


def _cell(value: Any, escape: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return exported.escape_formula(value) if escape else value
    if isinstance(value, bool | dict | list):
        return to_json(value).decode()
    return repr(value)  # the shortest text that parses to the same float


def _values(row: ResultRow) -> dict[str, Any]:
    """Return the value of every column of a row."""
    values: dict[str, Any] = dict(row.post.get("extra") or {})  # own columns, which never replace the others
    values |= {column: row.post.get(field, default) for column, (field, default) in POST_FIELDS.items()}
    values |= {column: row.found.get(column) for column in RESULT_COLUMNS}
    values["label_score"] = values["scores"][values["label"]]
    values["label_set"] = label_set_of(row.found)
    return values | {column: _date(values[column]) for column in TIME_COLUMNS}


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
