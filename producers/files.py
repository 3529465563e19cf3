"""Read posts from files: JSONL, JSON arrays, CSV, Parquet, Excel or lines of text; or from
standard input.

Text can be compressed with gzip or zstd. Files are streamed, and the length of a record is
bounded. Each record yields a post, a `BadRecord` with place and reason, or `LeftOut`; bad records
do not affect good ones. producers/records.py makes posts of records.
"""

import codecs
import csv
import gzip
import json
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, closing
from io import BufferedReader, FileIO, RawIOBase, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from pydantic_core import from_json
from rich.console import Console

from feedmill.producers import records
from feedmill.producers.excel import ErrorCell, sheet_rows
from feedmill.producers.parquet import MAX_CELL, ParquetTable
from feedmill.producers.records import (
    NO_TEXT,
    BadRecord,
    Columns,
    Filters,
    Labelled,
    LeftOut,
    normalize_key,
    normalize_keys,
)
from feedmill.shared.errors import (
    InputError,
    clause,
    explain_missing,
    json_problem,
    printable,
)
from feedmill.shared.label_files import UTF16_MARKS
from feedmill.shared.messages import Post

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from feedmill.producers.titles import Titles

#: Maximum characters of a line and of a cell. The largest valid post, escaped, is well below.
MAX_RECORD_SIZE = MAX_CELL
TOO_LONG = f"longer than {MAX_RECORD_SIZE:,} characters"
#: Bytes per read; and of compressed zstd, of which 4 bytes can stand for 128 KiB.
CHUNK_BYTES = 1 << 16
ZSTD_BYTES = 1 << 10
#: Logarithm of the maximum zstd window in bytes, held in memory. Dumps use windows of 128 MiB to 2
#: GiB.
MAX_WINDOW_LOG = 31
#: First bytes of compressed files. A zstd file may begin with a skippable frame: 0x50 to 0x5f,
#: then ZSTD_SKIPPABLE.
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
SKIPPABLE_STARTS = [bytes([first]) for first in range(0x50, 0x60)]
#: First bytes of Parquet; of ZIP archives, which modern Excel files are; and of older Excel files.
PARQUET = b"PAR1"
WORKBOOK = b"PK\x03\x04"
OLD_SPREADSHEET = b"\xd0\xcf\x11\xe0"
#: Number of bytes that tell these kinds of files.
MAGIC_BYTES = 4
#: Names of files with a text per line.
TEXT_FILE = re.compile(r"\.txt(\.gz|\.zst)?$", re.IGNORECASE)
LINE_END = re.compile(r"[\r\n]")
DELIMITERS = ",;\t|"
#: A first line by which Excel is told the delimiter.
SEPARATOR_LINE = re.compile(r'"?sep=([^\w\s"]|\t)"?[ \t]*(\r|\n|\Z)', re.IGNORECASE)
QUOTED = re.compile(r'"[^"]*"?')
#: Reason for rejecting a record that is not UTF-8: guessing its encoding could silently change the
#: text.
NOT_UTF8 = (
    "not UTF-8; save the file as UTF-8, or give its encoding, such as --encoding cp1252 "
    "for Excel on Windows"
)
#: Beginnings of a single object with the columns or records of a whole table, and what to do
#: with it.
COLUMN_START = re.compile(r'\{\s*"[^"\\]*"\s*:\s*\{\s*"0"\s*:\s*[^{\s]')
LIST_START = re.compile(
    r'\{\s*"(data|posts|records|rows|items|results|schema|columns)"\s*:\s*[\[{]'
)
OF_COLUMNS = (
    "is one object of JSON with a column for each key, as df.to_json() of pandas writes it. Write "
    "one object per row: "
    'df.to_json("posts.jsonl", orient="records", lines=True).'
)
OF_LIST = (
    "is one object of JSON around the records. Write its list, for example with `jq -c '.data[]' "
    "FILE > posts.jsonl`, "
    'or with orient="records" from pandas.'
)
#: Reasons of bad records to print, each with its first record. Other records are only counted.
REASONS_SHOWN = 20

#: A line number, a range of lines such as "20-21", the number of an array's element or of a row of
#: Parquet.
Place = int | str
#: The cells of a row of CSV in the order of the header; or the number of a row of Parquet.
Cells = list[str] | int
#: Result of reading a record. A record whose post lacks an invalid field yields a `BadRecord`
#: first.
Item = Post | Labelled | BadRecord | LeftOut


class Record(NamedTuple):
    """A record with its place.

    fields: the values by name; the reason why it could not be parsed; or None for a row of empty
    cells. cells: the row as in the file; None for JSON. problems: columns of Parquet whose values
    could not be read, with reasons.
    """

    place: Place
    fields: dict[str, Any] | str | None
    cells: Cells | None = None
    problems: tuple[tuple[str, str], ...] = ()


class FileRow(NamedTuple):
    """A record as in the file, and its text as a post.

    values: the row's cells, or a JSON object; None if the record could not be parsed. post: a post
    with title and body, whose id is the record's number; or the reason why the record has none.
    """

    place: Place
    values: Cells | Mapping[str, Any] | None
    post: Post | str


class FileSource:
    """A file of posts, read in order, with progress. "-" is standard input.

    columns: columns that the user chose; a missing one is an error.
    encoding: name of the text's encoding; None is UTF-8, or UTF-16 with a byte order mark.
    titles: the titles of posts, which their comments get as context; None for no context. skip:
    records to skip, which an earlier reading has done.
    """

    def __init__(
        self,
        path: str,
        filters: Filters = records.NO_FILTERS,
        columns: Columns = records.DETECTED,
        encoding: str | None = None,
        titles: "Titles | None" = None,
        skip: int = 0,
    ) -> None:
        self._path = path
        #: Name in messages.
        self.name = printable(path)
        if path == "-":
            self.name = "stdin"
        self._filters = filters
        self._columns = columns
        self._encoding = encoding
        self._titles = titles
        self._skip = skip
        #: True if ids are derived from the texts, because no id column was found. Set after the
        #: first record.
        self.lacks_ids = False
        #: The table of CSV, Excel or Parquet; None for JSON. Set after the first record.
        self.table: CsvTable | SheetTable | ParquetTable | None = None
        #: True if a copy for Excel must begin with a byte order mark: the file does, or has
        #: another encoding than UTF-8. Set after the first record.
        self.has_mark = False
        self._file: FileIO | None = None
        #: File that `close` closes; None if the file is closed at its end.
        self._exit_stack: ExitStack | None = None
        #: Size of the file in bytes; None if unknown.
        self.size: int | None = None
        if is_file(path):
            self.size = Path(path).stat().st_size

    def keep_open(self) -> None:
        """Leave the file open at its end, until `close`: its table is read once more while rows
        are written.
        """
        self._exit_stack = ExitStack()

    def close(self) -> None:
        """Close a file that was kept open."""
        if self._exit_stack is not None:
            self._exit_stack.close()

    @property
    def unit(self) -> str:
        """The word for a record's place."""
        if isinstance(self.table, ParquetTable | SheetTable):
            return "row"
        return "line"

    @property
    def text_columns(self) -> list[str]:
        """The columns that are read as a title or a body; empty without a header."""
        if self.table is None:
            return []
        text_names = self._columns.text_names()
        return [name for name in self.table.header if normalize_key(name) in text_names]

    @property
    def done(self) -> int:
        """Bytes read so far, before decompression. Of Parquet, the share of the rows."""
        table = self.table
        if isinstance(table, ParquetTable) and self.size:
            rows = max(1, table.total)
            return int(self.size * table.read / rows)
        if self._file is None:
            return 0
        try:
            return self._file.tell()
        except (ValueError, OSError):  # the file is closed, or a pipe
            return self.size or 0

    def items(self, labelled: bool = False) -> Iterator[Item]:
        """Yield the items of each record. labelled: yield the posts of an export with their
        labels.

        Raises InputError if the file cannot be read, UserError if a required package is not
        installed.
        """
        keys = records.keys_of_items(self._columns)
        for place, record, _, problems in self._records(keys):
            where = f"{self.name}:{place}"
            why_unreadable = self._unreadable(problems)
            if record is None:
                yield LeftOut.BLANK
            elif isinstance(record, str):
                yield BadRecord(where, record)
            elif why_unreadable:
                yield BadRecord(where, why_unreadable)
            else:
                fields = normalize_keys(record)
                for name, reason in problems:
                    yield BadRecord(
                        where,
                        f"column {name}: {reason}",
                        skipped=False,
                        column=normalize_key(name),
                    )
                yield from self._items_of(fields, where, labelled)

    def _items_of(
        self, fields: dict[str, Any], where: str, labelled: bool
    ) -> Iterator[Item]:
        """Yield the items of a record with normalized keys."""
        columns = self._columns
        if not self._filters.admit(fields, columns):
            yield LeftOut.BY_FILTERS
        elif records.removal_of(fields):
            yield LeftOut.REMOVED
        elif records.is_export_row(fields):
            item = records.parse_export(
                fields,
                where,
                labelled,
                columns,
            )
            yield self._admitted(item)
        else:
            post_items = records.parse_post(
                fields,
                where,
                columns,
                reads_comments=self._filters.reads_comments,
                context=self._context_of(fields),
            )
            for post_item in post_items:
                yield self._admitted(post_item)

    def _context_of(self, fields: dict[str, Any]) -> str:
        """Return the title of a comment's post; "" for other records, and for unknown posts."""
        if self._titles is None or not records.is_comment(fields):
            return ""
        fullname = records.parent_post(fields)
        return self._titles.title_of(fullname)

    def _admitted(self, item: Item) -> Item:
        """Return an item, or LeftOut for a post whose text the filters do not admit."""
        post = item
        if isinstance(item, Labelled):
            post = item.post
        if not isinstance(post, Post) or self._filters.admit_text(post.text):
            return item
        return LeftOut.BY_FILTERS

    def _unreadable(self, problems: Sequence[tuple[str, str]]) -> str:
        """Return why a record cannot be a post without one of these columns; "" if it can."""
        for name, reason in problems:
            key = normalize_key(name)
            if not records.is_optional(key, self._columns):
                return f"column {name}: {reason}"
        return ""

    def rows(self) -> Iterator[FileRow]:
        """Yield each record as in the file, with its text.

        Of the filters, only the kinds apply. Raises the same errors as `items`.
        """
        keys = records.keys_of_texts(self._columns)
        for number, record in enumerate(self._records(keys), 1):
            place, fields, cells, problems = record
            why_unreadable = self._unreadable(problems)
            if why_unreadable:
                yield FileRow(place, cells, post=why_unreadable)
            elif isinstance(fields, dict):
                values: Cells | dict[str, Any] = fields
                if cells is not None:
                    values = cells
                by_key = normalize_keys(fields)
                post = records.parse_text(
                    by_key,
                    str(number),
                    self._columns,
                    kinds=self._filters.kinds,
                    context=self._context_of(by_key),
                )
                yield FileRow(place, values, post)
            elif fields is None:
                yield FileRow(place, cells, post=NO_TEXT)
            else:
                yield FileRow(place, cells, post=fields)

    def values(self, column: str) -> Iterator[str]:
        """Yield the values of one column as text, without empty ones.

        Raises InputError also if the first record lacks it.
        """
        key = normalize_key(column)
        is_first = True
        for record in self._records([key], checks=False):
            if not isinstance(record.fields, dict):
                continue
            fields = normalize_keys(record.fields)
            if is_first and key not in fields:
                header = record.fields if self.table is None else self.table.header
                names = ", ".join(header)
                raise InputError(
                    f"{self.name} has no column {column!r:.80}. Its columns: "
                    f"{printable(names):.500}."
                )
            is_first = False
            value = fields.get(key)
            if value is None or isinstance(value, dict | list):
                continue
            text = str(value).strip()
            if text:
                yield text

    def head(self, count: int) -> tuple[list[str], list[Record]]:
        """Return the names of the columns, and the first records with all of them.

        Needs no column that is known to hold text: people choose columns by what they see. Raises
        the same errors as `items`.
        """
        with closing(self._records(keys=(), checks=False)) as records_without_values:
            next(records_without_values, None)
        header = self.table.header if self.table is not None else []
        keys = [normalize_key(name) for name in header]
        with closing(self._records(keys, checks=False)) as all_records:
            first_records = list(islice(all_records, count))
        names = dict.fromkeys(header)
        if self.table is None:
            for record in first_records:
                if isinstance(record.fields, dict):
                    names |= dict.fromkeys(record.fields)
        return list(names), first_records

    def _records(self, keys: Collection[str], checks: bool = True) -> Generator[Record]:
        """Yield each record after checking the first one's columns, if `checks`.

        Raises InputError if all are empty rows.

        keys: columns of Parquet to read.
        """
        checked = not checks
        is_empty = self._skip == 0
        try:
            with ExitStack() as at_end:
                opened = at_end
                if self._exit_stack is not None:
                    opened = self._exit_stack
                parsed = self._parse(keys, opened)
                for record in islice(parsed, self._skip, None):
                    if not checked and isinstance(record.fields, dict):
                        self._check_columns(record.fields)
                        self.lacks_ids = self._lacks_ids(record.fields)
                        checked = True
                    is_empty &= record.fields is None
                    yield record
        # pyarrow raises ValueError and NotImplementedError, too; UnicodeError for a text that is
        # not UTF-8.
        except (
            OSError,
            EOFError,
            zlib.error,
            ValueError,
            LookupError,
            NotImplementedError,
        ) as error:
            raise self._input_error(error) from None
        if is_empty:
            raise InputError(f"{self.name} contains no posts. Give another file.")

    def _input_error(self, error: Exception) -> InputError:
        """Return the error that tells the user why the file cannot be read."""
        kinds = ValueError | LookupError if self._encoding else UnicodeError
        if isinstance(error, kinds) and not isinstance(self.table, ParquetTable):
            encoding = printable(self._encoding or "UTF-16")
            reason = printable(str(error))
            return InputError(
                f"Cannot read {self.name} as {encoding:.40}: {reason}. Give another --encoding, "
                "such as cp1252 for Excel on Windows, or none for UTF-8."
            )
        reason = getattr(error, "strerror", None) or clause(error)
        reason = printable(reason)
        return InputError(
            f"Cannot read {self.name}: {reason}. Check the file, then run the command again."
        )

    def _lacks_ids(self, fields: dict[str, Any]) -> bool:
        """Return whether ids must be derived from the texts, by the first record."""
        if self._columns.id is not None:
            return False
        first = normalize_keys(fields)
        return not records.has_id(first)

    def _check_columns(self, fields: dict[str, Any]) -> None:
        """Check the first record. Raises InputError if it lacks a chosen column, or a text."""
        first = normalize_keys(fields)
        columns = self._columns
        changes_rows = columns.id is not None or columns.keep
        if changes_rows and records.is_export_row(first):
            raise InputError(
                f"{self.name} is an export of results and has its own ids and `extra`: omit "
                "--id-column and --keep."
            )
        names = list(fields)
        if self.table is not None:
            names = self.table.header
        records.check_columns(
            self.name,
            names,
            columns,
            needs_text=self.table is not None,
        )

    def _parse(self, keys: Collection[str], opened: ExitStack) -> Iterator[Record]:
        """Yield each record, detecting the format by the file's first characters. keys: columns of
        Parquet to read.
        """
        packed = with_whole_start(self._open(opened), opened)
        binary = decompressed(packed, self.name, opened)
        is_packed = binary is not packed
        binary = with_whole_start(binary, opened)
        start = binary.peek(MAGIC_BYTES)
        if start.startswith(PARQUET):
            self.table = self._parquet(binary, is_packed, opened)
            rows = self.table.rows(keys)
            return (
                Record(
                    place=row.number,
                    fields=row.fields,
                    cells=row.number,
                    problems=row.problems,
                )
                for row in rows
            )
        if start.startswith(WORKBOOK):
            self.table = self._sheet(binary, is_packed, opened)
            self.has_mark = True
            return self.table.records()
        if start.startswith(OLD_SPREADSHEET):
            raise InputError(
                f"{self.name} is an old Excel file, or one with a password. Save the sheet as "
                ".xlsx without a password, or as CSV UTF-8."
            )
        return self._parse_text(binary, opened)

    def _parse_text(
        self, binary: BufferedReader, opened: ExitStack
    ) -> Iterator[Record]:
        """Yield each record of a text file, detecting the format by its first characters."""
        start = binary.peek(MAGIC_BYTES)
        if self._encoding:
            # Raises LookupError for an unknown encoding of text.
            "".encode(self._encoding)
            encoding = codecs.lookup(self._encoding).name
        elif start[:2] in UTF16_MARKS:
            encoding = "utf-16"
        else:
            encoding = "utf-8"
        self.has_mark = True
        if encoding == "utf-8":
            self.has_mark = start.startswith(codecs.BOM_UTF8)
            encoding = "utf-8-sig"
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        first_bytes = binary.peek(CHUNK_BYTES)
        head = decoder.decode(first_bytes)
        head = head.lstrip("\ufeff \t\r\n")
        # Invalid bytes become lone surrogates, except in UTF-16 and UTF-32, which have none.
        errors = "surrogateescape"
        if encoding.startswith(("utf-16", "utf-32")):
            errors = "replace"
        text = TextIOWrapper(
            binary,
            encoding,
            errors,
            newline="",
        )
        opened.enter_context(text)
        if SEPARATOR_LINE.match(head):
            self.table = CsvTable(text, self.name)
            return self.table.records()
        if head.startswith("["):
            return json_array(text)
        first_line = LINE_END.split(head, maxsplit=1)[0]
        names = column_names(first_line)
        header = [normalize_key(name) for name in names]
        is_table = bool(self._columns.texts_among(header))
        is_object = head.startswith("{")
        line = first_line.strip()
        # Whether no further record is in sight.
        is_only = line in ("{", head.strip())
        if is_object and is_only:
            reason = whole_object(first_line, self._columns)
            if reason:
                raise InputError(f"{self.name} {reason}")
        # JSONL with a damaged first line is still JSONL.
        if is_object or (not is_table and "\n{" in head):
            return line_records(text, _json_line, self._skip)
        # Each line is a text in a file `.txt`, and on standard input if no delimiter is in sight.
        if self._path == "-":
            is_text = len(header) == 1
        else:
            is_text = TEXT_FILE.search(self._path) is not None
        if is_text and first_line and not (is_table or self._columns.text):
            return line_records(text, _text_line)
        self.table = CsvTable(text, self.name)
        return self.table.records()

    def _parquet(
        self, binary: BufferedReader, is_packed: bool, opened: ExitStack
    ) -> ParquetTable:
        """Return a table of Parquet, which is read at many places.

        Raises InputError for a pipe.
        """
        if is_packed:
            # The exit stack closes it.
            copy = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            shutil.copyfileobj(binary, copy)
            binary = cast(BufferedReader, copy)
        elif not binary.seekable():
            raise InputError(
                f"{self.name} is Parquet, which cannot be read from a pipe. Give the "
                "path of a file."
            )
        table = ParquetTable(binary, self.name)
        opened.callback(table.close)
        return table

    def _sheet(
        self, binary: BufferedReader, is_packed: bool, opened: ExitStack
    ) -> "SheetTable":
        """Return a workbook's first sheet, which is read at many places.

        Raises InputError for a pipe.
        """
        if is_packed or not binary.seekable():
            raise InputError(
                f"{self.name} is Excel, which cannot be read from a pipe or compressed. Give a "
                ".xlsx file."
            )
        rows = sheet_rows(
            cast(BinaryIO, binary),
            self.name,
            opened,
        )
        return SheetTable(rows, self.name)

    def _open(self, opened: ExitStack) -> BufferedReader:
        if self._path == "-":
            return cast(BufferedReader, sys.stdin.buffer)
        self._file = FileIO(self._path)
        reader: BufferedReader = BufferedReader(self._file, CHUNK_BYTES)
        return opened.enter_context(reader)


class FileReading(FileSource):
    """Read one file's posts, count its records, and print the bad ones.

    If reading fails, the posts read before the error are still yielded, and `end` raises the
    error.

    shows_ids: print a note if the file has no id column, for commands that find posts by id.
    text_only: do not report invalid optional fields, for commands that use only the text.
    options: see `FileSource`.
    """

    def __init__(
        self,
        file: str,
        notes: Console,
        *,
        shows_ids: bool = False,
        text_only: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(file, **options)
        self._notes = notes
        self._shows_ids = shows_ids
        self._text_only = text_only
        #: Number of bad records by reason, or by the column of an invalid value.
        self._bad: Counter[str] = Counter()
        self._broken: InputError | None = None
        #: Records read, dropped by the filters, and removed from Reddit.
        self.records = 0
        self.left_out = 0
        self.removed = 0
        #: Skipped records, and those of them that have no text.
        self.skipped = 0
        self.without_text = 0

    def posts(self) -> Iterator[Post]:
        """Yield the valid posts."""
        for post in self._count_posts():
            if isinstance(post, Post):
                yield post

    def posts_of_records(self) -> Iterator[Post | None]:
        """Yield each record's post, or None for a record without one, so that a caller can stop
        while the filters leave out millions.
        """
        for item in self._count_posts():
            if isinstance(item, Labelled):
                yield item.post
            else:
                yield item

    def labelled(self) -> Iterator[Post | Labelled]:
        """Yield the valid posts.

        Posts of an export come as Labelled, with their classification.
        """
        for post in self._count_posts(labelled=True):
            if post is not None:
                yield post

    def end(self) -> None:
        """Print sums of what was not shown.

        Raises InputError if the file could not be read to its end.
        """
        for what, count in self._bad.items():
            others = count - 1
            if others > 0:
                note = printable(f"… and {others:,} more: {what}")
                self._notes.print(note, markup=False)
        if self._broken:
            raise self._broken

    def _count_posts(self, labelled: bool = False) -> Iterator[Post | Labelled | None]:
        """Yield each record's post, or None for a record without one."""
        try:
            for item in self.items(labelled):
                if self._shows_ids and self.lacks_ids:
                    self._shows_ids = False
                    id_names = ", ".join(records.FIELD_ALIASES["id"])
                    note = (
                        f"no id column ({id_names}), so ids are derived from the text; "
                        "--id-column names another"
                    )
                    line = f"{self.name}: {note}"
                    self._notes.print(line, markup=False)
                if isinstance(item, BadRecord):
                    self._report_bad(item)
                    if not item.skipped:  # the record's post is the next item
                        continue
                self.records += 1
                if item is LeftOut.BY_FILTERS:
                    self.left_out += 1
                elif item is LeftOut.REMOVED:
                    self.removed += 1
                if isinstance(item, Post | Labelled):
                    yield item
                else:
                    yield None
        except InputError as error:
            self._broken = error

    def _report_bad(self, bad: BadRecord) -> None:
        """Count a bad record, and print it if it is the first one with its reason."""
        if (
            not bad.skipped
            and self._text_only
            and bad.column not in ("", self._columns.id)
        ):
            return
        what = bad.reason
        outcome = "kept"
        if bad.skipped:
            outcome = "skipped"
            self.skipped += 1
            if bad.reason == NO_TEXT:
                self.without_text += 1
        elif bad.column:
            what = f"column {bad.column}"
            outcome = f"kept without {what}"
        if what not in self._bad:
            if len(self._bad) >= REASONS_SHOWN:
                what = "bad records"
            else:
                note = printable(f"{bad.where}: {bad.reason} ({outcome})")
                self._notes.print(note, markup=False)
        self._bad[what] += 1


def is_file(path: str) -> bool:
    """Return true for a regular file, which can be read twice; false for pipes and
    standard input.
    """
    try:
        return path != "-" and Path(path).is_file()
    except OSError:  # no access: opening the file reports it
        return False


def with_whole_start(reader: BufferedReader, exit_stack: ExitStack) -> BufferedReader:
    """Return a reader of the same bytes that shows the first MAGIC_BYTES in one `peek`, unless
    there are fewer.

    A pipe may deliver them one by one. exit_stack: closes the reader.
    """
    start = reader.peek(MAGIC_BYTES)
    if not start or len(start) >= MAGIC_BYTES:
        return reader
    chunks = _Chunks(_from_start(reader))
    whole: BufferedReader = BufferedReader(chunks, CHUNK_BYTES)
    return exit_stack.enter_context(whole)


def _from_start(reader: BufferedReader) -> Iterator[bytes]:
    """Yield all bytes, at least MAGIC_BYTES at first."""
    start = reader.read(MAGIC_BYTES)
    if len(start) < MAGIC_BYTES:  # the end: a terminal would wait for another one
        yield start
        return
    # With more of them, because the first line tells a table from a text.
    yield start + reader.read1(CHUNK_BYTES)
    while chunk := reader.read1(CHUNK_BYTES):
        yield chunk


def decompressed(
    packed: BufferedReader, name: str, exit_stack: ExitStack
) -> BufferedReader:
    """Return a reader of the decompressed bytes, or `packed` itself if it is not compressed.

    packed: shows its first bytes, as `with_whole_start` does. name: file name for errors.
    exit_stack: closes the readers.
    Reading raises OSError, EOFError and zlib.error, or UserError if the package for zstd is not
    installed.
    """
    magic = packed.peek(MAGIC_BYTES)[:MAGIC_BYTES]
    if magic.startswith(GZIP):
        unpacked = gzip.GzipFile(fileobj=packed)
        exit_stack.enter_context(unpacked)
        return cast(BufferedReader, unpacked)
    if magic == ZSTD or _is_skippable(magic):
        chunks = _Chunks(_unzstd(packed, name))
        reader: BufferedReader = BufferedReader(chunks, CHUNK_BYTES)
        return exit_stack.enter_context(reader)
    return packed


def _is_skippable(magic: bytes) -> bool:
    """Return whether a zstd file begins with a skippable frame."""
    return magic[:1] in SKIPPABLE_STARTS and magic[1:] == ZSTD_SKIPPABLE


class _Chunks(RawIOBase):
    """A stream over chunks of bytes.

    Valid bytes are returned before a later chunk's error is raised.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = filter(None, chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer)
        rest = self._rest
        if not rest:
            chunk = next(self._chunks, b"")
            rest = memoryview(chunk)
        size = min(len(target), len(rest))
        target[:size] = rest[:size]
        self._rest = rest[size:]
        return size


def _unzstd(packed: BufferedReader, name: str) -> Iterator[bytes]:
    """Yield decompressed bytes, frame by frame, each as soon as it is read."""
    with explain_missing(f"Reading {name}", "dumps"):
        if sys.version_info >= (3, 14):
            from compression import zstd  # noqa: PLC0415 - as the package for older ones
        else:
            # Not from backports, which exists if another of its packages is installed.
            import backports.zstd as zstd  # noqa: PLC0415, PLR0402 - optional dependency
    options: dict[int, int] = {
        zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG
    }
    data = packed.read(ZSTD_BYTES)
    while data:
        frame = zstd.ZstdDecompressor(options=options)
        try:
            yield frame.decompress(data)
            while not frame.eof:
                data = packed.read(ZSTD_BYTES)
                if not data:
                    raise EOFError("the file is truncated")
                yield frame.decompress(data)
        except zstd.ZstdError as error:
            raise OSError(f"zstd cannot decompress it: {error}") from None
        data = frame.unused_data or packed.read(ZSTD_BYTES)


def is_utf8(text: str) -> bool:
    """Return false if bytes were invalid, which `surrogateescape` decodes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(text: TextIOWrapper) -> Iterator[tuple[int, str | None]]:
    """Yield non-blank lines with their numbers; None replaces a line that is too long."""
    number = 0
    while line := text.readline(MAX_RECORD_SIZE):
        number += 1
        if len(line) == MAX_RECORD_SIZE and not line.endswith("\n"):
            rest = text.readline(CHUNK_BYTES)
            while rest and not rest.endswith("\n"):
                rest = text.readline(CHUNK_BYTES)
            yield number, None
        elif not line.isspace():
            yield number, line


def line_records(
    text: TextIOWrapper,
    parse: Callable[[str], dict[str, Any] | str],
    skip: int = 0,
) -> Iterator[Record]:
    """Yield a record for each line. parse: returns a line's fields: see `Record`.

    skip: first records that are not parsed, because the caller does not use them.
    """
    for index, (number, line) in enumerate(_lines(text)):
        if index < skip:
            yield Record(number, None)
        elif line is None:
            yield Record(number, f"the line is {TOO_LONG}")
        else:
            yield Record(number, parse(line))


def whole_object(first_line: str, columns: Columns) -> str:
    """Return why a file is a single object of JSON instead of one per line, and what to do; "" if
    it may not be.
    """
    if first_line.strip() == "{":
        return (
            "is JSON over several lines. Write each object on a line of its own, for example "
            "with `jq -c . FILE`."
        )
    try:
        fields = from_json(first_line)
    except ValueError:
        # Longer than what was read of it, or damaged.
        if COLUMN_START.match(first_line):
            return OF_COLUMNS
        if LIST_START.match(first_line):
            return OF_LIST
        return ""
    values = normalize_keys(fields)
    text_keys = columns.texts_among(values)
    for key in text_keys:
        text = values[key]
        if isinstance(text, list) or _is_column(text):
            return OF_COLUMNS
    if text_keys:
        return ""
    parts = values.values()
    holds_only_objects = all(isinstance(part, dict) for part in parts)
    if holds_only_objects or any(map(_holds_records, parts)):
        return OF_LIST
    return ""


def _holds_records(value: object) -> bool:
    """Return whether a value is a list of objects or of rows."""
    if not isinstance(value, list) or not value:
        return False
    return isinstance(value[0], dict | list)


def _is_column(value: object) -> bool:
    """Return whether a value is a column of pandas: values by the number of their row."""
    if not isinstance(value, dict) or not value:
        return False
    return all(key.isdecimal() for key in value)


def _text_line(line: str) -> dict[str, Any] | str:
    if not is_utf8(line):
        return NOT_UTF8
    return {"text": line.strip()}


def _json_line(line: str) -> dict[str, Any] | str:
    # Twice as fast as json, which is the fallback: it has clearer errors, and accepts lone
    # surrogates, as invalid bytes are.
    try:
        return _object(from_json(line, cache_strings="keys"))
    except (ValueError, TypeError):
        pass
    if not is_utf8(line):
        return NOT_UTF8
    try:
        return _object(json.loads(line))
    except (ValueError, RecursionError) as error:
        return f"not JSON: {json_problem(error)}"


def _object(value: object) -> dict[str, Any] | str:
    if isinstance(value, dict):
        return value
    return f"expected an object with the fields of a post, got {value!r:.80}"


def json_array(text: TextIOWrapper) -> Iterator[Record]:
    """Yield the array's elements one at a time, because an array may be larger than memory."""
    decode = json.JSONDecoder().raw_decode
    while text.read(1) != "[":  # only white space precedes the bracket
        pass
    buffer = ""
    element = 1
    while True:
        place = f"element {element}"
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            return
        try:
            value, end = decode(buffer)
        except (ValueError, RecursionError) as error:
            # The element may be incomplete. Doubling the buffer keeps repeated parsing linear
            # overall.
            more = ""
            length = len(buffer)
            if length < MAX_RECORD_SIZE:
                size = max(CHUNK_BYTES, length)
                more = text.read(size)
            if not more:
                problem = json_problem(error, "the element's character")
                yield Record(
                    place,
                    f"not JSON, and the rest of the array cannot be read: {problem}",
                )
                return
            buffer += more
            continue
        fields: dict[str, Any] | str = NOT_UTF8
        if is_utf8(buffer[:end]):
            fields = _object(value)
        yield Record(place, fields)
        buffer = buffer[end:]
        element += 1


def _first_line(lines: Iterator[str]) -> str:
    """Return the first line that is not blank; "" if there is none."""
    for line in lines:
        if line.strip():
            return line
    return ""


def _fit_width(cells: list[str], width: int) -> list[str]:
    """Return a row with a cell for each column: longer ones are cut, shorter ones filled up."""
    missing_count = width - len(cells)
    missing_cells = [""] * missing_count
    return cells[:width] + missing_cells


class CsvStart(NamedTuple):
    """The delimiter of a CSV file, and its line of column names."""

    delimiter: str
    header_line: str


def _read_start(lines: Iterator[str], name: str) -> CsvStart:
    """Read a CSV file's lines up to its header. Raises InputError for an unknown delimiter."""
    first_line = _first_line(lines)
    separator = SEPARATOR_LINE.match(first_line.lstrip("\ufeff \t"))
    if separator is None:
        return CsvStart(delimiter_of(first_line), first_line)
    delimiter = separator[1]
    if delimiter not in DELIMITERS:
        raise InputError(
            f"{name} begins with sep={delimiter}, but only commas, semicolons, tabs "
            "and | separate columns. Save the file with one of them."
        )
    return CsvStart(delimiter, _first_line(lines))


def _csv_rows(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Return the rows of CSV. Reading raises csv.Error."""
    # The library's limit is the process', not the reader's.
    csv.field_size_limit(MAX_RECORD_SIZE)
    # Strict: otherwise an unclosed quote silently swallows all following rows.
    return csv.reader(
        lines,
        delimiter=delimiter,
        strict=True,
    )


def _read_header(rows: Iterator[list[str]], name: str) -> list[str]:
    """Return the first row of CSV. Raises InputError if it cannot name columns."""
    try:
        header = next(rows)
    except csv.Error as error:
        raise InputError(
            f"{name} is neither JSON nor a CSV file with a header ({error})."
        ) from None
    if not header:
        raise InputError(f"{name} is empty. Give another file.")
    if not is_utf8("".join(header)):
        raise InputError(f"The header of {name} is {NOT_UTF8}.")
    return header


class CsvTable:
    """A CSV file's header and rows, with any common delimiter and line end, and line breaks in
    cells.

    name: the file's name in errors. Raises InputError for a file without a readable header.
    """

    def __init__(self, text: TextIOWrapper, name: str) -> None:
        self._text = text
        self._name = name
        self._line = 0
        lines = self._lines()
        start = _read_start(lines, name)
        self.delimiter = start.delimiter
        #: The file's line end, which its header line has.
        self.line_end = "\r\n" if start.header_line.endswith("\r\n") else "\n"
        all_lines = chain([start.header_line], lines)
        self._rows = _csv_rows(all_lines, self.delimiter)
        #: Column names as in the file.
        self.header = _read_header(self._rows, name)

    def _lines(self) -> Iterator[str]:
        while line := self._text.readline(MAX_RECORD_SIZE):
            self._line += 1
            if len(line) == MAX_RECORD_SIZE:
                raise self._too_long(self._line)
            yield line

    def _too_long(self, line: int) -> InputError:
        return InputError(
            f"Cannot read {self._name} after line {line}: a cell is {TOO_LONG}; a quotation mark "
            "may be missing. Correct the file, then run the command again."
        )

    def records(self) -> Iterator[Record]:
        """Yield each row that is not a blank line. Raises InputError for a cell that is too long.

        A short row gets empty cells. Empty cells beyond the header, as after a delimiter at the
        end of each line, are dropped.
        """
        names = [normalize_key(name) for name in self.header]
        width = len(self.header)
        convert: Callable[[str], str] = str
        if records.is_escaped_export(names):
            convert = records.unescape_formula
        while True:
            first_line = self._line + 1
            row, problem = self._next_row()
            if row is None:
                return
            place: Place = first_line
            if self._line > first_line:
                place = f"{first_line}-{self._line}"
            if any(row[width:]):
                problem = (
                    f"{len(row)} fields, but {width} columns; a quote may be missing"
                )
            cells = _fit_width(row, width)
            if problem:
                yield Record(place, problem)
            elif not is_utf8("".join(cells)):
                yield Record(place, NOT_UTF8, cells)
            elif any(row):
                values = map(convert, cells)
                fields = dict(zip(names, values, strict=True))
                yield Record(place, fields, cells)
            elif row:
                yield Record(place, None, cells)

    def _next_row(self) -> tuple[list[str] | None, str]:
        """Return the next row, None at the end, and why it cannot be read, or "".

        Raises InputError for a cell that is too long.
        """
        first_line = self._line + 1
        try:
            return next(self._rows, None), ""
        except csv.Error as error:
            if "field limit" in str(error):
                raise self._too_long(first_line) from None
            problem = (
                f"not CSV: {error}; a quote may be missing, or a quote in a text may not be "
                "doubled"
            )
            return [], problem


class SheetTable:
    """The header and the rows of an Excel workbook's first sheet, as those of `CsvTable`. Raises
    InputError without a header.

    rows: numbers and cells, see `sheet_rows`.
    """

    #: As Excel writes CSV.
    delimiter = ","
    line_end = "\r\n"

    def __init__(self, rows: Iterator[tuple[int, list[str]]], name: str) -> None:
        self._sheet_rows = rows
        _, self.header = next(rows, (0, []))
        if not self.header:
            raise InputError(f"{name} is empty. Give another file.")

    def records(self) -> Iterator[Record]:
        """Yield each row; see `CsvTable.records`."""
        names = [normalize_key(name) for name in self.header]
        width = len(names)
        for number, row in self._sheet_rows:
            cells = _fit_width(row, width)
            if len(row) > width:
                yield Record(number, f"{len(row)} cells, but {width} columns")
            elif any(len(cell) > MAX_RECORD_SIZE for cell in cells):
                yield Record(number, f"a cell is {TOO_LONG}")
            elif any(cells):
                values = ["" if isinstance(cell, ErrorCell) else cell for cell in cells]
                fields = dict(zip(names, values, strict=True))
                yield Record(number, fields, cells)
            else:
                yield Record(number, None, cells)


#: A table whose cells are texts.
TextTable = CsvTable | SheetTable


def delimiter_of(header_line: str) -> str:
    """Return the delimiter that occurs most often outside quotes."""
    unquoted = QUOTED.sub("", header_line)
    return max(DELIMITERS, key=unquoted.count)


def column_names(header_line: str) -> list[str]:
    """Return the column names in a CSV file's first line; none if it is not CSV."""
    delimiter = delimiter_of(header_line)
    rows = csv.reader([header_line], delimiter=delimiter)
    try:
        return next(rows, [])
    except csv.Error:
        return []
