"""Read posts from files: JSONL, JSON arrays, CSV, Parquet or lines of text; from a path or standard input.

Each record yields a post, a `BadRecord` with place and reason, or `LeftOut`; bad records do not affect good ones.
producers/tables.py reads the formats, producers/records.py makes posts of records.
"""

import codecs
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from feedmill.producers import exported
from feedmill.producers.records import (
    DETECTED,
    FIELD_NAMES,
    NO_FILTERS,
    NO_TEXT,
    BadRecord,
    Columns,
    Filters,
    Item,
    LeftOut,
    check_columns,
    has_id,
    normalize_column,
    normalize_keys,
    parse_post,
    parse_text,
    removal_of,
)
from feedmill.producers.tables import (
    CHUNK_BYTES,
    DELIMITER_LINE,
    NOT_UTF8,
    UTF16_MARKS,
    Cells,
    CountedFile,
    CsvTable,
    ParquetTable,
    Place,
    Record,
    check_encoding,
    column_names,
    decompressed,
    is_utf8,
    json_array,
    json_lines,
    text_lines,
    text_of,
)
from feedmill.shared.errors import InputError, printable
from feedmill.shared.messages import Post

LINE_END = re.compile(r"[\r\n]")
#: First bytes of Parquet; and of ZIP archives, which modern Excel files are, and of older Excel files.
PARQUET, SPREADSHEETS = b"PAR1", (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
#: Names of files with a text per line.
TEXT_FILE = re.compile(r"\.txt(\.gz|\.zst)?$", re.IGNORECASE)

#: Result type of a row of an export.
Found = TypeVar("Found")


class Row(NamedTuple):
    """A record as in the file, and its text as a post.

    values: the row's cells, or a JSON object; None if the record could not be parsed. post: a post with title and body,
    whose id is the record's number; or the reason why the record has none.
    """

    place: Place
    values: Cells | Mapping[str, Any] | None
    post: Post | str


class Source:
    """A file of posts, read in order, with progress. "-" is standard input.

    start: number of records to skip without reporting them.
    columns: columns that the user chose; a missing one is an error.
    encoding: name of the text's encoding; None is UTF-8, or UTF-16 with a byte order mark.
    Raises InputError for an unknown encoding.
    """

    def __init__(
        self,
        path: str,
        filters: Filters = NO_FILTERS,
        start: int = 0,
        columns: Columns = DETECTED,
        encoding: str | None = None,
    ) -> None:
        self._path = path
        #: Name in messages.
        self.name = "stdin" if path == "-" else printable(path)
        self._filters, self._start, self._columns = filters, start, columns
        self._encoding = None if encoding is None else check_encoding(encoding)
        #: Candidate id columns if none was found, else None. Set after the first record.
        self.columns_to_choose: Sequence[str] | None = None
        #: The table of CSV or Parquet; None for JSON. Set after the first record.
        self.table: CsvTable | ParquetTable | None = None
        #: True if a copy for Excel must begin with a byte order mark: the file does, or has another encoding than
        #: UTF-8. Set after the first record.
        self.has_mark = False
        #: Place of the record whose items were yielded last.
        self.place: Place = 0
        self._file: CountedFile | None = None
        #: Size of the file in bytes; None if unknown.
        self.size = Path(path).stat().st_size if is_file(path) else None

    @property
    def unit(self) -> str:
        """The word for a record's place."""
        return "row" if isinstance(self.table, ParquetTable) else "line"

    @property
    def done(self) -> int:
        """Bytes read so far, before decompression."""
        return self._file.done if self._file else 0

    def items(self) -> Iterator[Item]:
        """Yield the items of each record.

        Raises InputError if the file cannot be read, UserError if a required package is not installed.
        """
        return self._items(exported.parse_post)

    def labelled(self) -> Iterator[Item | exported.Labelled]:
        """Yield items as `items` does, but from an export each post with its label. Raises the same errors."""
        return self._items(exported.parse_labelled)

    def rows(self) -> Iterator[Row]:
        """Yield each record as in the file, with its text. Filters do not apply. Raises the same errors as `items`."""
        for number, (place, fields, cells) in enumerate(self._records(), self._start + 1):
            if isinstance(fields, dict):
                post = parse_text(normalize_keys(fields), str(number), self._columns)
                yield Row(place, fields if cells is None else cells, post)
            else:
                yield Row(place, cells, NO_TEXT if fields is None else fields)

    def _items(self, read_export: Callable[[dict[str, Any], str], Iterator[Found]]) -> Iterator[Item | Found]:
        wants_all = self._filters == NO_FILTERS
        for place, record, cells in self._records():
            self.place = place
            if record is None:
                yield LeftOut.BY_FILTERS if cells is None else LeftOut.BLANK
            elif isinstance(record, str):
                yield BadRecord(f"{self.name}:{place}", record)
            else:
                fields = normalize_keys(record)
                if not (wants_all or self._filters.admit(fields)):
                    yield LeftOut.BY_FILTERS
                elif removal_of(fields):
                    yield LeftOut.REMOVED
                elif exported.is_export_row(fields):
                    yield from read_export(fields, f"{self.name}:{place}")
                else:
                    yield from parse_post(fields, f"{self.name}:{place}", self._columns)

    def _records(self) -> Iterator[Record]:
        """Yield each record after checking the first one's columns."""
        checked = self._start > 0
        try:
            with ExitStack() as opened:
                for record in self._parsed(opened):
                    if not checked and isinstance(record.fields, dict):
                        self._check_columns(record.fields)
                        checked = True
                    yield record
        except UnicodeError as error:
            encoding = self._encoding or "UTF-16"
            raise InputError(
                f"Cannot read {self.name} as {encoding}: {error}. Give another --encoding, or none for UTF-8."
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"Cannot read {self.name}: {reason}. Check the file, then run the command again."
            ) from None

    def _check_columns(self, fields: dict[str, Any]) -> None:
        """Find the id column. Raises InputError if the first record lacks a chosen column."""
        first, columns = normalize_keys(fields), self._columns
        if exported.is_export_row(first) and (columns.id is not None or columns.keep):
            raise InputError(
                f"{self.name} is an export of results and has its own ids and `extra`: omit --id-column and --keep."
            )
        names = self.table.header if self.table else list(fields)
        check_columns(self.name, names, columns, needs_text=self.table is not None)
        if columns.id is None and not has_id(first):
            self.columns_to_choose = [
                name for name in names if name.strip() and normalize_column(name) not in FIELD_NAMES
            ]

    def _parsed(self, opened: ExitStack) -> Iterator[Record]:
        """Yield each record, detecting the format by the file's first characters."""
        binary = decompressed(self._open(opened), self.name, opened)
        start = binary.peek(4)
        if start.startswith(PARQUET):
            self.table = ParquetTable(binary, self.name, opened)
            return islice(self._not_empty(self.table.records()), self._start, None)
        if start.startswith(SPREADSHEETS):
            raise InputError(f"{self.name} is an Excel file or an archive. Save the sheet as CSV UTF-8, or unpack it.")
        encoding = self._encoding or ("utf-16" if start[:2] in UTF16_MARKS else "utf-8")
        self.has_mark = encoding != "utf-8" or start.startswith(codecs.BOM_UTF8)
        encoding = "utf-8-sig" if encoding == "utf-8" else encoding
        head = (
            codecs.getincrementaldecoder(encoding)("replace").decode(binary.peek(CHUNK_BYTES)).lstrip("\ufeff \t\r\n")
        )
        text = text_of(binary, encoding, opened)
        if head.startswith("["):
            return islice(json_array(text), self._start, None)
        first_line = LINE_END.split(head, maxsplit=1)[0]
        header = [normalize_column(name) for name in column_names(first_line)]
        is_table = bool(self._columns.texts_among(header))
        # JSONL with a damaged first line is still JSONL.
        if head.startswith("{") or (not is_table and "\n{" in head):
            return json_lines(text, self._filters.reject_line, self._start)
        # Each line is a text in a file `.txt`, and on standard input if no delimiter is in sight.
        is_text = TEXT_FILE.search(self._path) or (self._path == "-" and len(header) == 1)
        if is_text and first_line and not (is_table or self._columns.text or DELIMITER_LINE.fullmatch(first_line)):
            return islice(text_lines(text), self._start, None)
        self.table = CsvTable(text, self.name)
        return islice(self._not_empty(self._csv(self.table)), self._start, None)

    def _open(self, opened: ExitStack) -> BufferedReader:
        if self._path == "-":
            return cast(BufferedReader, sys.stdin.buffer)
        self._file = CountedFile(self._path)
        return opened.enter_context(BufferedReader(self._file, CHUNK_BYTES))

    def _not_empty(self, records: Iterator[Record]) -> Iterator[Record]:
        """Yield the records of a table. Raises InputError if there is none."""
        is_empty = True
        for record in records:
            is_empty &= record.fields is None
            yield record
        if is_empty:
            raise InputError(f"{self.name} has no rows. Give another file.")

    def _csv(self, table: CsvTable) -> Iterator[Record]:
        if not is_utf8("".join(table.header)):
            raise InputError(f"The header of {self.name} is {NOT_UTF8}.")
        names = [normalize_column(name) for name in table.header]
        is_export = exported.is_export_row(names)
        for place, row, problem in table.rows():
            if problem:
                yield Record(place, problem)
            elif not is_utf8("".join(row)):
                yield Record(place, NOT_UTF8, row)
            elif not any(row):
                yield Record(place, None, row)
            else:
                # Exports keep the line ends within texts; in other files \r\n and \r are read as \n.
                cells = map(exported.unescape_formula if is_export else _plain_line_ends, row)
                yield Record(place, dict(zip(names, cells, strict=True)), row)


def is_file(path: str) -> bool:
    """Return true for a regular file, which can be read twice; false for pipes and standard input."""
    try:
        return path != "-" and Path(path).is_file()
    except OSError:  # no access: opening the file reports it
        return False


def _plain_line_ends(cell: str) -> str:
    return cell.replace("\r\n", "\n").replace("\r", "\n") if "\r" in cell else cell
