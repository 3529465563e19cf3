"""An export's rows as CSV and as JSONL, and what every format says in its columns."""

import csv
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pydantic_core import from_json, to_json

from feedmill.result_rows import Row
from producers import exported

#: The columns, in their order: a post's, by its fields; then what it was found to be. Docs: docs/export.md.
POST_COLUMNS = tuple(exported.COLUMNS.values())
COLUMNS = (
    *POST_COLUMNS,
    "label",
    "label_score",
    "scores",
    "model",
    "revision",
    "weights",
    "fingerprint",
    "classified_at",
    "queued_seconds",
)
#: Columns of CSV whose text came from somebody; the others hold numbers, dates, digests or JSON of ours.
ESCAPED = [column in {"id", "Topic", "Title", "Body", "Subreddit", "URL", "permalink", "label", "model", "revision"}
           for column in COLUMNS]  # fmt: skip


class Writer(Protocol):
    """Writes one file."""

    def add(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None:
        """Everything is handed to the operating system."""


class Format(Protocol):
    """How rows lie in a file."""

    name: str

    def create(self, path: Path) -> Writer: ...

    def ids(self, path: Path) -> Iterable[str]:
        """The posts' ids, in order."""

    def copy(self, path: Path, target: Path, without: Collection[str]) -> int:
        """Write the same file without some posts; returns how many rows are left."""


class TextFormat(Format, Protocol):
    """A format that is appended to."""

    def open(self, file: BinaryIO) -> Writer:
        """Goes on at a file's end; begins it where it is empty."""


class Jsonl:
    """One object a line."""

    name = "jsonl"

    def create(self, path: Path) -> Writer:
        return self.open(path.open("wb"))

    def open(self, file: BinaryIO) -> Writer:
        return _JsonlWriter(file)

    def ids(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            for line in file:
                yield from_json(line)["id"]

    def copy(self, path: Path, target: Path, without: Collection[str]) -> int:
        rows = 0
        with path.open("rb") as file, target.open("wb") as copied:
            for line in file:
                if from_json(line)["id"] not in without:
                    copied.write(line)
                    rows += 1
        return rows


class _JsonlWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, rows: Sequence[Row]) -> None:
        records = (dict(zip(COLUMNS, _values(row), strict=True)) for row in rows)
        self._file.write(b"".join(to_json(record) + b"\n" for record in records))

    def close(self) -> None:
        self._file.close()


class Csv:
    """Commas, with a line of column names; scores are JSON. No cell is a formula to a spreadsheet (`escaped`)."""

    name = "csv"

    def create(self, path: Path) -> Writer:
        return self.open(path.open("wb"))

    def open(self, file: BinaryIO) -> Writer:
        return _CsvWriter(file)

    def ids(self, path: Path) -> Iterator[str]:
        return (exported.unescaped(row[0]) for row in self._rows(path))

    def copy(self, path: Path, target: Path, without: Collection[str]) -> int:
        rows = 0
        with target.open("w", encoding="utf-8", newline="") as copied:
            lines = csv.writer(copied)
            lines.writerow(COLUMNS)
            for row in self._rows(path):
                if exported.unescaped(row[0]) not in without:
                    lines.writerow(row)
                    rows += 1
        return rows

    def _rows(self, path: Path) -> Iterator[list[str]]:
        # Not above the longest text that a post may have, escaped; csv's own limit is below.
        csv.field_size_limit(2_000_000)
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            next(rows, None)
            yield from rows


class _CsvWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._text = TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        self._lines = csv.writer(self._text)
        if file.tell() == 0:
            self._lines.writerow(COLUMNS)

    def add(self, rows: Sequence[Row]) -> None:
        self._lines.writerows(map(_cells, rows))

    def close(self) -> None:
        self._text.close()


def _cells(row: Row) -> list[str]:
    return [_cell(value, escape) for value, escape in zip(_values(row), ESCAPED, strict=True)]


def _cell(value: Any, escape: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return exported.escaped(value) if escape else value
    if isinstance(value, bool | dict):
        return to_json(value).decode()
    return repr(value)  # of a float the shortest text that is read as the same


def _values(row: Row) -> tuple[Any, ...]:
    """A row's columns, in the order of `COLUMNS`."""
    post, found = row.post, row.found
    label = found["label"]
    return (
        post["id"],
        post.get("topic"),
        post.get("title", ""),
        post.get("body", ""),
        post.get("subreddit"),
        post.get("score"),
        post.get("url"),
        _date(post.get("created_utc")),
        post.get("permalink"),
        _date(post.get("edited_utc")),
        post.get("stickied", False),
        post.get("nsfw", False),
        post.get("spoiler", False),
        post.get("extra"),
        label,
        found["scores"][label],
        found["scores"],
        found["model"],
        found["revision"],
        found["weights"],
        found["fingerprint"],
        _date(found["classified_at"]),
        found["queued_seconds"],
    )


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
