"""Read posts from files: JSONL, JSON arrays, CSV, Parquet or lines of text; plain, gzip or zstd; or standard input.

Files are streamed, and the length of a record is bounded. Each record yields a post, a `BadRecord` with place and
reason, or `LeftOut`; bad records do not affect good ones. producers/records.py makes posts of records.
"""

import codecs
import csv
import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from io import BufferedReader, FileIO, RawIOBase, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic_core import from_json, to_jsonable_python
from rich.console import Console

from feedmill.producers import records
from feedmill.producers.records import NO_TEXT, BadRecord, Columns, Filters, Labelled, LeftOut, normalize_keys
from feedmill.shared.errors import InputError, clause, explain_missing, json_problem, printable
from feedmill.shared.messages import Post

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Maximum characters of a line and of a cell. The largest valid post, escaped, is well below.
MAX_RECORD_SIZE = 2_000_000
TOO_LONG = f"longer than {MAX_RECORD_SIZE:,} characters"
#: Bytes per read; and of compressed zstd, of which 4 bytes can stand for 128 KiB.
CHUNK_BYTES, ZSTD_BYTES = 1 << 16, 1 << 10
#: Maximum zstd window in bytes, held in memory. Dumps use windows of 128 MiB to 2 GiB.
MAX_WINDOW = 2**31
#: First bytes of compressed files. A zstd file may begin with a skippable frame: 0x50 to 0x5f, then ZSTD_SKIPPABLE.
GZIP, ZSTD, ZSTD_SKIPPABLE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
#: First bytes of Parquet; and of ZIP archives, which modern Excel files are, and of older Excel files.
PARQUET, SPREADSHEETS = b"PAR1", (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
#: Byte order marks of UTF-16.
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: Names of files with a text per line.
TEXT_FILE = re.compile(r"\.txt(\.gz|\.zst)?$", re.IGNORECASE)
LINE_END = re.compile(r"[\r\n]")
DELIMITERS = ",;\t|"
QUOTED = re.compile(r'"[^"]*"?')
#: Rows of Parquet converted at once.
PARQUET_ROWS = 1000
#: Reason for rejecting a record that is not UTF-8: guessing its encoding could silently change the text.
NOT_UTF8 = "not UTF-8; save the file as UTF-8, or give its encoding, such as --encoding cp1252 for Excel on Windows"
#: Reasons of bad records to print, each with its first record. Other records are only counted.
REASONS_SHOWN = 20

#: A line number, a range of lines such as "20-21", the number of an array's element or of a row of Parquet.
Place = int | str
#: The cells of a row of CSV in the order of the header; or a batch of Parquet, and the row in it.
Cells = list[str] | tuple[Any, int]
#: Result of reading a record. A record whose post lacks an invalid field yields a `BadRecord` first.
Item = Post | Labelled | BadRecord | LeftOut


class Record(NamedTuple):
    """A record with its place.

    fields: the values by name; the reason why it could not be parsed; or None for a row of empty cells. cells: the row
    as in the file; None for JSON.
    """

    place: Place
    fields: dict[str, Any] | str | None
    cells: Cells | None = None


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

    columns: columns that the user chose; a missing one is an error.
    encoding: name of the text's encoding; None is UTF-8, or UTF-16 with a byte order mark.
    """

    def __init__(
        self,
        path: str,
        filters: Filters = records.NO_FILTERS,
        columns: Columns = records.DETECTED,
        encoding: str | None = None,
    ) -> None:
        self._path = path
        #: Name in messages.
        self.name = "stdin" if path == "-" else printable(path)
        self._filters, self._columns = filters, columns
        self._encoding = encoding
        #: True if ids are derived from the texts, because no id column was found. Set after the first record.
        self.lacks_ids = False
        #: The table of CSV or Parquet; None for JSON. Set after the first record.
        self.table: CsvTable | ParquetTable | None = None
        #: True if a copy for Excel must begin with a byte order mark: the file does, or has another encoding than
        #: UTF-8. Set after the first record.
        self.has_mark = False
        self._file: FileIO | None = None
        #: Size of the file in bytes; None if unknown.
        self.size = Path(path).stat().st_size if is_file(path) else None

    @property
    def unit(self) -> str:
        """The word for a record's place."""
        return "row" if isinstance(self.table, ParquetTable) else "line"

    @property
    def done(self) -> int:
        """Bytes read so far, before decompression."""
        with suppress(ValueError, OSError):  # the file is closed, or a pipe
            return self._file.tell() if self._file else 0
        return self.size or 0

    def items(self, labelled: bool = False) -> Iterator[Item]:
        """Yield the items of each record. labelled: yield the posts of an export with their labels.

        Raises InputError if the file cannot be read, UserError if a required package is not installed.
        """
        for place, record, _ in self._records():
            if record is None:
                yield LeftOut.BLANK
            elif isinstance(record, str):
                yield BadRecord(f"{self.name}:{place}", record)
            else:
                fields = normalize_keys(record)
                if not self._filters.admit(fields, self._columns.date_format):
                    yield LeftOut.BY_FILTERS
                elif records.removal_of(fields):
                    yield LeftOut.REMOVED
                elif records.is_export_row(fields):
                    yield from records.parse_export(fields, f"{self.name}:{place}", labelled)
                else:
                    yield from records.parse_post(fields, f"{self.name}:{place}", self._columns)

    def rows(self) -> Iterator[Row]:
        """Yield each record as in the file, with its text. Filters do not apply. Raises the same errors as `items`."""
        for number, (place, fields, cells) in enumerate(self._records(), 1):
            if isinstance(fields, dict):
                post = records.parse_text(normalize_keys(fields), str(number), self._columns)
                yield Row(place, fields if cells is None else cells, post)
            else:
                yield Row(place, cells, NO_TEXT if fields is None else fields)

    def _records(self) -> Iterator[Record]:
        """Yield each record after checking the first one's columns. Raises InputError if all are empty rows."""
        checked, is_empty = False, True
        try:
            with ExitStack() as opened:
                for record in self._parsed(opened):
                    if not checked and isinstance(record.fields, dict):
                        self._check_columns(record.fields)
                        checked = True
                    is_empty &= record.fields is None
                    yield record
        # pyarrow raises ValueError and NotImplementedError, too; UnicodeError for a text that is not UTF-8.
        except (OSError, EOFError, zlib.error, ValueError, LookupError, NotImplementedError) as error:
            kinds = ValueError | LookupError if self._encoding else UnicodeError
            if isinstance(error, kinds) and not isinstance(self.table, ParquetTable):
                encoding = printable(self._encoding or "UTF-16")
                raise InputError(
                    f"Cannot read {self.name} as {encoding:.40}: {printable(str(error))}. Give another --encoding, "
                    "such as cp1252 for Excel on Windows, or none for UTF-8."
                ) from None
            reason = printable(getattr(error, "strerror", None) or clause(error))
            raise InputError(
                f"Cannot read {self.name}: {reason}. Check the file, then run the command again."
            ) from None
        if is_empty:
            raise InputError(f"{self.name} contains no posts. Give another file.")

    def _check_columns(self, fields: dict[str, Any]) -> None:
        """Check the first record. Raises InputError if it lacks a chosen column, or a text."""
        first, columns = normalize_keys(fields), self._columns
        if records.is_export_row(first) and (columns.id is not None or columns.keep):
            raise InputError(
                f"{self.name} is an export of results and has its own ids and `extra`: omit --id-column and --keep."
            )
        names = self.table.header if self.table else list(fields)
        records.check_columns(self.name, names, columns, needs_text=self.table is not None)
        self.lacks_ids = columns.id is None and not records.has_id(first)

    def _parsed(self, opened: ExitStack) -> Iterator[Record]:
        """Yield each record, detecting the format by the file's first characters."""
        binary = decompressed(self._open(opened), self.name, opened)
        start = binary.peek(4)
        if start.startswith(PARQUET):
            self.table = ParquetTable(binary, self.name, opened)
            return self.table.records()
        if start.startswith(SPREADSHEETS):
            raise InputError(f"{self.name} is an Excel file or an archive. Save the sheet as CSV UTF-8, or unpack it.")
        "".encode(self._encoding or "utf-8")  # raises LookupError for an unknown encoding of text
        given = self._encoding and codecs.lookup(self._encoding).name
        encoding = given or ("utf-16" if start[:2] in UTF16_MARKS else "utf-8")
        self.has_mark = encoding != "utf-8" or start.startswith(codecs.BOM_UTF8)
        encoding = "utf-8-sig" if encoding == "utf-8" else encoding
        head = codecs.getincrementaldecoder(encoding)("replace").decode(binary.peek(CHUNK_BYTES))
        head = head.lstrip("\ufeff \t\r\n")
        # Invalid bytes become lone surrogates, except in UTF-16 and UTF-32, which have none.
        errors = "replace" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
        text = opened.enter_context(TextIOWrapper(binary, encoding, errors, newline=""))
        if head.startswith("["):
            return json_array(text)
        first_line = LINE_END.split(head, maxsplit=1)[0]
        header = [records.normalize_key(name) for name in column_names(first_line)]
        is_table = bool(self._columns.texts_among(header))
        # JSONL with a damaged first line is still JSONL.
        if head.startswith("{") or (not is_table and "\n{" in head):
            return line_records(text, _json_line)
        # Each line is a text in a file `.txt`, and on standard input if no delimiter is in sight.
        is_text = TEXT_FILE.search(self._path) or (self._path == "-" and len(header) == 1)
        if is_text and first_line and not (is_table or self._columns.text):
            return line_records(text, _text_line)
        self.table = CsvTable(text, self.name)
        return self.table.records()

    def _open(self, opened: ExitStack) -> BufferedReader:
        if self._path == "-":
            return cast(BufferedReader, sys.stdin.buffer)
        self._file = FileIO(self._path)
        return opened.enter_context(BufferedReader(self._file, CHUNK_BYTES))


class FileReading(Source):
    """Read one file's posts, count its records, and print the bad ones.

    If reading fails, the posts read before the error are still yielded, and `end` raises the error.

    shows_ids: print a note if the file has no id column, for commands that find posts by id.
    text_only: do not report invalid optional fields, for commands that use only the text.
    options: see `Source`.
    """

    def __init__(
        self, file: str, notes: Console, *, shows_ids: bool = False, text_only: bool = False, **options: Any
    ) -> None:
        super().__init__(file, **options)
        self._notes, self._shows_ids, self._text_only = notes, shows_ids, text_only
        #: Number of bad records by reason, or by the column of an invalid value.
        self._bad: Counter[str] = Counter()
        self._broken: InputError | None = None
        #: Records read, dropped by the filters, and removed from Reddit.
        self.records = self.left_out = self.removed = 0
        #: Skipped records, and those of them that have no text.
        self.skipped = self.without_text = 0

    def posts(self) -> Iterator[Post]:
        """Yield the valid posts."""
        return (post for post in self._counted() if isinstance(post, Post))

    def labelled(self) -> Iterator[Post | Labelled]:
        """Yield the valid posts. Posts of an export come as Labelled, with their classification."""
        return (found for found in self._counted(labelled=True) if found)

    def end(self) -> None:
        """Print sums of what was not shown. Raises InputError if the file could not be read to its end."""
        for what, count in self._bad.items():
            if count > 1:
                self._notes.print(printable(f"… and {count - 1:,} more: {what}"), markup=False)
        if self._broken:
            raise self._broken

    def _counted(self, labelled: bool = False) -> Iterator[Post | Labelled | None]:
        """Yield each record's post, or None for a record without one."""
        try:
            for item in self.items(labelled):
                if self._shows_ids and self.lacks_ids:
                    self._shows_ids = False
                    known = ", ".join(records.FIELD_ALIASES["id"])
                    note = f"no id column ({known}), so ids are derived from the text; --id-column names another"
                    self._notes.print(f"{self.name}: {note}", markup=False)
                if isinstance(item, BadRecord):
                    self._report_bad(item)
                    if not item.skipped:  # the record's post is the next item
                        continue
                self.records += 1
                self.left_out += item is LeftOut.BY_FILTERS
                self.removed += item is LeftOut.REMOVED
                yield item if isinstance(item, Post | Labelled) else None
        except InputError as error:
            self._broken = error

    def _report_bad(self, bad: BadRecord) -> None:
        """Count a bad record, and print it if it is the first one with its reason."""
        if not bad.skipped and self._text_only and bad.column not in ("", self._columns.id):
            return
        self.skipped += bad.skipped
        self.without_text += bad.skipped and bad.reason == NO_TEXT
        what = f"column {bad.column}" if bad.column and not bad.skipped else bad.reason
        if what not in self._bad and len(self._bad) >= REASONS_SHOWN:
            what = "bad records"
        elif what not in self._bad:
            outcome = "skipped" if bad.skipped else f"kept without {what}" if bad.column else "kept"
            self._notes.print(printable(f"{bad.where}: {bad.reason} ({outcome})"), markup=False)
        self._bad[what] += 1


def is_file(path: str) -> bool:
    """Return true for a regular file, which can be read twice; false for pipes and standard input."""
    try:
        return path != "-" and Path(path).is_file()
    except OSError:  # no access: opening the file reports it
        return False


def decompressed(packed: BufferedReader, name: str, opened: ExitStack) -> BufferedReader:
    """Return a reader of the decompressed bytes, or `packed` itself if it is not compressed.

    name: file name for errors. opened: exit stack that closes the readers.
    Reading raises OSError, EOFError and zlib.error, or UserError if zstandard is not installed.
    """
    magic = packed.peek(4)[:4]
    if magic.startswith(GZIP):
        return cast(BufferedReader, opened.enter_context(gzip.GzipFile(fileobj=packed)))
    if magic == ZSTD or (magic[1:] == ZSTD_SKIPPABLE and magic[0] >> 4 == 5):
        return opened.enter_context(BufferedReader(_Chunks(_unzstd(packed, name)), CHUNK_BYTES))
    return packed


class _Chunks(RawIOBase):
    """A stream over chunks of bytes. Valid bytes are returned before a later chunk's error is raised."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._held = filter(None, chunks), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer)
        held = self._held or memoryview(next(self._chunks, b""))
        size = min(len(target), len(held))
        target[:size], self._held = held[:size], held[size:]
        return size


def _unzstd(packed: BufferedReader, name: str) -> Iterator[bytes]:
    """Yield decompressed bytes, frame by frame, because zstandard's own reader accepts a truncated frame."""
    with explain_missing(f"Reading {name}", "dumps"):
        import zstandard  # noqa: PLC0415 - optional dependency
    data = packed.read(ZSTD_BYTES)
    while data:
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        try:
            yield frame.decompress(data)
            while not frame.eof:
                if not (data := packed.read(ZSTD_BYTES)):
                    raise EOFError("the file is truncated")
                yield frame.decompress(data)
        except zstandard.ZstdError as error:
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
            while (rest := text.readline(CHUNK_BYTES)) and not rest.endswith("\n"):
                pass
            yield number, None
        elif not line.isspace():
            yield number, line


def line_records(text: TextIOWrapper, parse: Callable[[str], dict[str, Any] | str]) -> Iterator[Record]:
    """Yield a record for each line. parse: returns a line's fields: see `Record`."""
    for number, line in _lines(text):
        yield Record(number, f"the line is {TOO_LONG}" if line is None else parse(line))


def _text_line(line: str) -> dict[str, Any] | str:
    return {"text": line.strip()} if is_utf8(line) else NOT_UTF8


def _json_line(line: str) -> dict[str, Any] | str:
    # Twice as fast as json, which is the fallback: it has clearer errors, and accepts lone surrogates, as invalid bytes
    # are.
    try:
        return _object(from_json(line, cache_strings="keys"))
    except (ValueError, TypeError):
        pass
    try:
        return _object(json.loads(line)) if is_utf8(line) else NOT_UTF8
    except (ValueError, RecursionError) as error:
        return f"not JSON: {json_problem(error)}"


def _object(value: object) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"expected an object with the fields of a post, got {value!r:.80}"


def json_array(text: TextIOWrapper) -> Iterator[Record]:
    """Yield the array's elements one at a time, because an array may be larger than memory."""
    decode = json.JSONDecoder().raw_decode
    while text.read(1) != "[":  # only white space precedes the bracket
        pass
    buffer, element = "", 1
    while not (buffer := buffer.lstrip(" \t\r\n,")).startswith("]"):
        try:
            value, end = decode(buffer)
        except (ValueError, RecursionError) as error:
            # The element may be incomplete. Doubling the buffer keeps repeated parsing linear overall.
            more = text.read(max(CHUNK_BYTES, len(buffer))) if len(buffer) < MAX_RECORD_SIZE else ""
            if not more:
                problem = json_problem(error, "the element's character")
                yield Record(f"element {element}", f"not JSON, and the rest of the array cannot be read: {problem}")
                return
            buffer += more
            continue
        yield Record(f"element {element}", _object(value) if is_utf8(buffer[:end]) else NOT_UTF8)
        buffer, element = buffer[end:], element + 1


class CsvTable:
    """A CSV file's header and rows, with any common delimiter and line end, and line breaks in cells.

    name: the file's name in errors. Raises InputError for a file without a readable header.
    """

    def __init__(self, text: TextIOWrapper, name: str) -> None:
        csv.field_size_limit(MAX_RECORD_SIZE)
        self._text, self._name, self._line = text, name, 0
        lines = self._lines()
        first = next((line for line in lines if line.strip()), "")
        self.delimiter = delimiter_of(first)
        #: The file's line end, which its header line has.
        self.line_end = "\r\n" if first.endswith("\r\n") else "\n"
        # Strict: otherwise an unclosed quote silently swallows all following rows.
        self._rows = csv.reader(chain([first], lines), delimiter=self.delimiter, strict=True)
        try:
            #: Column names as in the file.
            self.header = next(self._rows)
        except csv.Error as error:
            raise InputError(f"{name} is neither JSON nor a CSV file with a header ({error}).") from None
        if not self.header:
            raise InputError(f"{name} is empty. Give another file.")
        if not is_utf8("".join(self.header)):
            raise InputError(f"The header of {name} is {NOT_UTF8}.")

    def _lines(self) -> Iterator[str]:
        while line := self._text.readline(MAX_RECORD_SIZE):
            self._line += 1
            if len(line) == MAX_RECORD_SIZE:
                raise self._too_long(self._line)
            yield line

    def _too_long(self, line: int) -> InputError:
        return InputError(
            f"Cannot read {self._name} after line {line}: a cell is {TOO_LONG}; a quotation mark may be missing. "
            "Correct the file, then run the command again."
        )

    def records(self) -> Iterator[Record]:
        """Yield each row that is not a blank line. Raises InputError for a cell that is too long.

        A short row gets empty cells. Empty cells beyond the header, as after a delimiter at the end of each line, are
        dropped.
        """
        names, width = [records.normalize_key(name) for name in self.header], len(self.header)
        # Exports escape formulas.
        convert = records.unescape_formula if records.is_export_row(names) else str
        while True:
            first = self._line + 1
            try:
                row, problem = next(self._rows), ""
            except StopIteration:
                return
            except csv.Error as error:
                if "field limit" in str(error):
                    raise self._too_long(first) from None
                row, problem = [], f"not CSV: {error}; a quote may be missing, or a quote in a text may not be doubled"
            place: Place = first if first >= self._line else f"{first}-{self._line}"
            if any(row[width:]):
                problem = f"{len(row)} fields, but {width} columns; a quote may be missing"
            cells = [*row[:width], *[""] * (width - len(row))]
            if problem:
                yield Record(place, problem)
            elif not is_utf8("".join(cells)):
                yield Record(place, NOT_UTF8, cells)
            elif row:
                fields = dict(zip(names, map(convert, cells), strict=True)) if any(row) else None
                yield Record(place, fields, cells)


def delimiter_of(header_line: str) -> str:
    """Return the delimiter that occurs most often outside quotes."""
    return max(DELIMITERS, key=QUOTED.sub("", header_line).count)


def column_names(header_line: str) -> list[str]:
    """Return the column names in a CSV file's first line; none if it is not CSV."""
    try:
        return next(csv.reader([header_line], delimiter=delimiter_of(header_line)), [])
    except csv.Error:
        return []


class ParquetTable:
    """A Parquet file's rows, with values as in JSON: dates as text. Holds a thousand rows, besides what pyarrow needs.

    Raises InputError, UserError if pyarrow is not installed, and OSError, ValueError and NotImplementedError, as its
    `records` do, if the file is damaged.
    """

    def __init__(self, binary: BufferedReader, name: str, opened: ExitStack) -> None:
        with explain_missing(f"Reading {name}", "tables"):
            import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
        if not binary.seekable():
            raise InputError(f"{name} is Parquet, which cannot be read from a pipe. Give the path of a file.")
        self._file = opened.enter_context(pq.ParquetFile(binary))
        self.schema = self._file.schema_arrow
        self.header = self.schema.names

    def records(self) -> Iterator[Record]:
        """Yield the rows."""
        number = 0
        for batch in self._file.iter_batches(PARQUET_ROWS):
            rows = to_jsonable_python(batch.to_pylist(), bytes_mode="base64", fallback=str)
            for index, row in enumerate(rows):
                number += 1
                yield Record(number, row, (batch, index))
