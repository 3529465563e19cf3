"""Read posts from files: JSONL, JSON arrays, CSV, Parquet or lines of text; from a path or standard input.

Each record yields a post, a `BadRecord` with place and reason, or `LeftOut`; bad records do not affect good ones. Files
are streamed and record length is bounded, so a dump of millions of posts needs no more memory than its compression
window.
"""

import codecs
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import BufferedReader, TextIOWrapper
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic_core import from_json, to_jsonable_python

from feedmill.producers import exported
from feedmill.producers.csv_files import DELIMITER_LINE, MAX_ROW_SIZE, Table, column_names
from feedmill.producers.records import (
    DETECTED,
    FIELD_ALIASES,
    FIELD_NAMES,
    NO_FILTERS,
    NO_TEXT,
    BadRecord,
    Columns,
    Filters,
    Item,
    LeftOut,
    has_id,
    is_removed,
    normalize_column,
    normalize_keys,
    parse_post,
    parse_text,
)
from feedmill.producers.transcode import UTF16_MARKS, check_encoding, transcoded
from feedmill.producers.unpack import CHUNK_BYTES, CountedFile, decompressed
from feedmill.shared.errors import InputError, clause, explain_missing, json_problem, printable, similar_name
from feedmill.shared.messages import Post

#: Maximum size of a record: characters, or bytes for a line of JSON. The largest valid post, escaped, is well below.
MAX_RECORD_SIZE = MAX_ROW_SIZE
#: A file is binary if control characters and invalid UTF-8 make up more than this share of its first chunk. Random
#: bytes and UTF-16 reach a half; Latin-1 text, where only accented letters are invalid, a fifth at most.
MAX_BINARY_SHARE = 0.3
#: Control characters that text does not contain, and the replacement character for invalid UTF-8.
BINARY_CHARACTERS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
LINE_END = re.compile(r"[\r\n]")
#: First bytes of Parquet; and of ZIP archives, which modern Excel files are, and of older Excel files.
PARQUET, SPREADSHEETS = b"PAR1", (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
#: Rows of Parquet converted at once.
PARQUET_ROWS = 1000
#: Names of files with a table, whose only column is the text; and with a text per line.
TABLE_FILE = re.compile(r"\.(csv|tsv)(\.gz|\.zst)?$", re.IGNORECASE)
TEXT_FILE = re.compile(r"\.txt(\.gz|\.zst)?$", re.IGNORECASE)
#: Reason for rejecting a record that is not UTF-8: guessing its encoding could silently change the text.
NOT_UTF8 = "not UTF-8; save the file as UTF-8, or give its encoding, such as --encoding cp1252 for Excel on Windows"

#: Maximum characters of a column's name that is taken for one without being known, and marks that end a sentence.
MAX_COLUMN_NAME, SENTENCE_ENDS = 40, (".", "!", "?", "…", "。", "！", "？")

#: A parsed record, the reason why it could not be parsed, or why it was skipped.
Record = dict[str, Any] | str | LeftOut
#: Result type of a row of an export.
Found = TypeVar("Found")
#: A record's line number, or a range of lines; for a JSON array, line and element.
Place = int | str


class Placed(NamedTuple):
    """A record with its place. cells: the cells of a CSV row, in the order of the header; None for JSON."""

    place: Place
    record: Record
    cells: list[str] | None = None


class Row(NamedTuple):
    """A record as in the file, and its text as a post.

    values: cells in the order of the header, or the first of them, or a JSON object; None if the record could not be
    parsed. post: a post with title and body, whose id is the record's number; or the reason why the record has none.
    """

    place: Place
    values: list[str] | dict[str, Any] | None
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
        #: True for standard input, and for a copy of it.
        self.is_stdin = path == "-"
        self._filters = filters
        self._start = start
        self._columns = columns
        self._encoding = None if encoding is None else check_encoding(encoding)
        #: Candidate id columns if none was found, else None. Set after the first record.
        self.columns_to_choose: list[str] | None = None
        #: The CSV table, whose header and delimiter a copy can use; None for JSON. Set after the first record.
        self.table: Table | None = None
        #: True if the file begins with a byte order mark, as files for Excel do. Set after the first record.
        self.has_mark = False
        #: Place of the record whose items were yielded last.
        self.place: Place = 0
        #: True if the text is decoded from another encoding than UTF-8.
        self.is_transcoded = self._encoding not in (None, "utf-8")
        #: True if the file is an export of results. Set after the first record.
        self.is_export = False
        #: Warning that the first line was taken for a header although it may be a text; "" if not. Set likewise.
        self.header_warning = ""
        #: True if the file is Parquet, whose places are rows instead of lines; and its rows, else None. Set likewise.
        self.is_parquet = False
        self.parquet_rows: int | None = None
        self._file: CountedFile | None = None
        #: Size of the file in bytes; None if unknown.
        self.size = Path(path).stat().st_size if is_file(path) else None

    @property
    def unit(self) -> str:
        """The word for a record's place."""
        return "row" if self.is_parquet else "line"

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
        for number, (place, record, cells) in enumerate(self._records(), self._start + 1):
            if isinstance(record, str):
                yield Row(place, cells, record)
            elif isinstance(record, LeftOut):  # a blank row
                yield Row(place, cells, NO_TEXT)
            else:
                post = parse_text(normalize_keys(record), str(number), self._columns)
                yield Row(place, record if cells is None else cells, post)

    def _items(self, read_export: Callable[[dict[str, Any], str], Iterator[Found]]) -> Iterator[Item | Found]:
        wants_all = self._filters == NO_FILTERS
        for place, record, _ in self._records():
            self.place = place
            if isinstance(record, LeftOut):
                yield record
            elif isinstance(record, str):
                yield BadRecord(f"{self.name}:{place}", record)
            else:
                fields = normalize_keys(record)
                if not (wants_all or self._filters.admit(fields)):
                    yield LeftOut.BY_FILTERS
                elif is_removed(fields):
                    yield LeftOut.REMOVED
                elif exported.is_export_row(fields):
                    yield from read_export(fields, f"{self.name}:{place}")
                else:
                    yield from parse_post(fields, f"{self.name}:{place}", self._columns)

    def _records(self) -> Iterator[Placed]:
        """Yield each record with its place, after checking the first one's columns."""
        checked = self._start > 0
        try:
            with ExitStack() as opened:
                for placed in self._parsed(opened):
                    if not checked and isinstance(placed.record, dict):
                        self._check_columns(placed.record)
                        checked = True
                    yield placed
        except FileNotFoundError:
            raise InputError(f"There is no file {self._path}. Check the path.") from None
        except IsADirectoryError:
            raise InputError(f"{self.name} is a folder. Give a file in it.") from None
        except UnicodeError as error:
            encoding = self._encoding or "UTF-16"
            raise InputError(
                f"Cannot read {self.name} as {encoding}: {error}. Give another --encoding, or none for UTF-8."
            ) from None
        except PermissionError:
            raise InputError(f"This user may not read {self._path}. Change the file's permissions.") from None
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"Cannot read {self.name} to the end: {error}. Check the file, then run the command again."
            ) from None

    def _check_columns(self, record: dict[str, Any]) -> None:
        """Find the id column. Raises InputError if the first record lacks a chosen column."""
        names = self.table.header if self.table else list(record)
        first = normalize_keys(record)
        self.is_export = exported.is_export_row(first)
        columns = self._columns
        if self.is_export and columns.id is not None:
            raise InputError(f"{self.name} is an export of results and has its own ids: omit --id-column.")
        for flag, column in (("id", columns.id), ("title", columns.title), ("body", columns.body)):
            # Objects of JSON may omit the title or the body, but not both.
            optional = self.table is None and flag != "id" and any(name in first for name in columns.text.values())
            if column is not None and column not in first and not optional:
                raise InputError(
                    f"{self.name} has no column {printable(column)} (--{flag}-column).{_suggestion(column, names)} "
                    f"Choose one of its columns: {listed(names)}; or omit --{flag}-column."
                )
        self._check_kept(first, names)
        if columns.id is None and not has_id(first):
            self.columns_to_choose = [
                name for name in names if name.strip() and normalize_column(name) not in FIELD_NAMES
            ]

    def _check_kept(self, first: dict[str, Any], names: Sequence[str]) -> None:
        """Raise InputError if the first record lacks a column to keep."""
        missing = [name for key, name in self._columns.keep if key not in first]
        if self._columns.keep and exported.is_export_row(first):
            raise InputError(f"{self.name} is an export of results and keeps its own `extra`: omit --keep.")
        if missing:
            raise InputError(
                f"{self.name} has no column {printable(missing[0])} (--keep).{_suggestion(missing[0], names)} Choose "
                f"from its columns: {listed(names)}."
            )

    def _parsed(self, opened: ExitStack) -> Iterator[Placed]:
        """Yield each record with its place, detecting the format by the file's first characters."""
        binary = decompressed(self._open(opened), self.name, opened)
        start = binary.peek(4)
        if start.startswith(PARQUET):
            return islice(self._parquet(binary), self._start, None)
        if start.startswith(SPREADSHEETS):
            raise InputError(f"{self.name} is an Excel file or an archive. Save the sheet as CSV UTF-8, or unpack it.")
        binary = transcoded(binary, self._encoding, opened)
        head = binary.peek(CHUNK_BYTES)
        self.has_mark = head.startswith(codecs.BOM_UTF8) or start.startswith(UTF16_MARKS)
        head = head.removeprefix(codecs.BOM_UTF8).lstrip()
        is_array, is_lines = head.startswith(b"["), head.startswith(b"{")
        if not is_array and not is_lines:
            beginning = head.decode(errors="replace")
            if len(BINARY_CHARACTERS.findall(beginning)) > MAX_BINARY_SHARE * len(beginning):
                raise InputError(
                    f"{self.name} is not UTF-8 text; it may be an archive, a spreadsheet or in another encoding. "
                    "Convert it to JSONL, a JSON array or CSV, or give its --encoding, such as utf-16-le."
                )
            first_line = LINE_END.split(beginning, maxsplit=1)[0]
            header = column_names(first_line)
            if not self._has_text(map(normalize_column, header)):
                # JSONL with a damaged first line is still JSONL.
                is_lines = b"\n{" in head
                if not is_lines and self._is_plain_text(first_line, header):
                    return _text_lines(binary, self._start)
        if is_lines:
            return _json_lines(binary, self._filters, self._start)
        text = opened.enter_context(
            TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=None if is_array else "")
        )
        return islice(_json_array(text) if is_array else self._csv(text), self._start, None)

    def _is_plain_text(self, first_line: str, header: Sequence[str]) -> bool:
        """Return true if each line is a text: in a file `.txt`, and from standard input if no delimiter is in sight."""
        if self._columns.text or not first_line or DELIMITER_LINE.fullmatch(first_line):
            return False
        return TEXT_FILE.search(self._path) is not None or (self.is_stdin and len(header) == 1)

    def _parquet(self, binary: BufferedReader) -> Iterator[Placed]:
        """Yield the rows of a Parquet file, with dates as text. Holds a thousand rows, besides what pyarrow needs."""
        with explain_missing(f"Reading {self.name}", "tables"):
            import pyarrow as pa  # noqa: PLC0415 - an extra
            import pyarrow.parquet as pq  # noqa: PLC0415
        if not binary.seekable():
            raise InputError(f"{self.name} is Parquet, which cannot be read from a pipe. Give the path of a file.")
        number = 0
        self.is_parquet = True
        try:
            with pq.ParquetFile(binary) as file:
                self.parquet_rows = file.metadata.num_rows
                for batch in file.iter_batches(PARQUET_ROWS):
                    for row in batch.to_pylist():
                        number += 1
                        yield Placed(number, to_jsonable_python(row, bytes_mode="base64", fallback=str))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"Cannot read {self.name} as Parquet: {clause(error)}. Give another file.") from None
        if not number:
            raise InputError(f"{self.name} has no rows. Give another file.")

    def _open(self, opened: ExitStack) -> BufferedReader:
        if self._path == "-":
            return cast(BufferedReader, sys.stdin.buffer)
        self._file = CountedFile(self._path)
        return cast(BufferedReader, opened.enter_context(BufferedReader(self._file, CHUNK_BYTES)))

    def _has_text(self, columns: Iterator[str]) -> bool:
        """Return true if a title or a body is among the columns."""
        if chosen := self._columns.text:
            return any(column in chosen.values() for column in columns)
        return any(column in FIELD_ALIASES["title"] + FIELD_ALIASES["body"] for column in columns)

    def _check_distinct(self, header: Sequence[str]) -> None:
        """Raise InputError if two columns have a name from which a value is read: only the last would be."""
        text = self._columns.text.values() or FIELD_ALIASES["title"] + FIELD_ALIASES["body"]
        kept = [key for key, _ in self._columns.keep]
        read = {*text, *kept, *([self._columns.id] if self._columns.id else FIELD_ALIASES["id"])}
        if twice := next((name for name in header if name in read and header.count(name) > 1), None):
            raise InputError(
                f"{self.name} has {header.count(twice)} columns {printable(twice)}. Rename all but one of them."
            )

    def _take_only_column(self, column: str, name: str) -> None:
        """Read the only column as the body. Raises InputError if its name looks like a text, which would be lost."""
        shown = f"{printable(' '.join(name.split()))!r:.80}"
        if _is_like_a_text(name):
            raise InputError(
                f"{self.name} has one column, whose first line ({shown}) may be its name or a text. If it is a text, "
                "insert the line `text` above it; if it is the name, give it as --body-column."
            )
        self.header_warning = (
            f"{self.name}: the first line ({shown}) was read as the header, not as a text. If it is a text, insert the "
            "line `text` above it"
        )
        self._columns = self._columns._replace(body=column)

    def _csv(self, text: TextIOWrapper) -> Iterator[Placed]:
        self.table = Table(text, self.name)
        header = [normalize_column(name) for name in self.table.header]
        is_named_table = TABLE_FILE.search(self._path) and not self._columns.text
        is_only = bool(header[0]) and not any(header[1:])  # empty names follow delimiters at the end of the line
        if is_named_table and is_only and header[0] not in FIELD_NAMES:
            self._take_only_column(header[0], self.table.header[0])
        if not self._has_text(iter(header)) and not self._columns.text:
            raise InputError(
                f"{self.name} is neither JSON nor a CSV file with a title or body column (its columns: "
                f"{listed(self.table.header)}). Name the column of the text with --body-column, or "
                f"rename it to one of: {', '.join(FIELD_ALIASES['title'] + FIELD_ALIASES['body'])}. If the "
                "first line is not a header, add one; or save a text per line as a .txt file."
            )
        self._check_distinct(header)
        is_export = exported.is_export_row(header)
        has_rows = False
        for place, row in self.table.rows():
            if isinstance(row, str):
                yield Placed(place, row)
            elif not _is_utf8("".join(row)):
                yield Placed(place, NOT_UTF8, row)
            elif not any(row):
                yield Placed(place, LeftOut.BLANK, row)
                continue
            else:
                # Exports keep the line ends within texts; in other files \r\n and \r are read as \n.
                cells = map(exported.unescape_formula if is_export else _plain_line_ends, row)
                yield Placed(place, dict(zip_longest(header, cells, fillvalue="")), row)
            has_rows = True
        if not has_rows:
            raise InputError(f"{self.name} has a header but no rows. Give another file.")


def _is_like_a_text(name: str) -> bool:
    """Return true if the first line of a column may be a text: it has several words, or looks like a sentence."""
    return len(name.split()) > 1 or len(name) > MAX_COLUMN_NAME or name.strip().endswith(SENTENCE_ENDS)


def listed(names: Sequence[str]) -> str:
    """Return columns for a message, names with commas in quotes."""
    quoted = (json.dumps(name, ensure_ascii=False) if "," in name else name for name in names)
    return f"{printable(', '.join(quoted)):.200}"


def _suggestion(given: str, names: Sequence[str]) -> str:
    """Return a question after the name that the user may have meant, or ""."""
    found = similar_name(normalize_column(given).replace("_", " "), names)
    return "" if found is None else f" Did you mean {printable(found):.80}?"


def is_file(path: str) -> bool:
    """Return true for a regular file, which can be read twice; false for pipes and standard input."""
    try:
        return path != "-" and Path(path).is_file()
    except OSError:  # no access: opening the file reports it
        return False


def _json_lines(binary: BufferedReader, filters: Filters, start: int) -> Iterator[Placed]:
    for number, line in islice(_lines(binary), start, None):
        if line is None:
            yield Placed(number, f"the line is longer than {MAX_RECORD_SIZE:,} bytes")
        elif filters.reject_line(line):
            yield Placed(number, LeftOut.BY_FILTERS)
        else:
            yield Placed(number, _json_record(line))


def _text_lines(binary: BufferedReader, start: int) -> Iterator[Placed]:
    """Yield each line of plain text as a record."""
    for number, line in islice(_lines(binary), start, None):
        if line is None:
            yield Placed(number, f"the line is longer than {MAX_RECORD_SIZE:,} bytes")
            continue
        try:
            yield Placed(number, {"text": line.decode().strip()})
        except UnicodeDecodeError:
            yield Placed(number, NOT_UTF8)


def _lines(binary: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Yield non-empty lines with their numbers; None replaces a line that is too long."""
    number = 0
    while line := binary.readline(MAX_RECORD_SIZE):
        number += 1
        if len(line) == MAX_RECORD_SIZE and not line.endswith(b"\n"):
            while (rest := binary.readline(CHUNK_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line and not line.isspace():
            yield number, line


def _json_record(line: bytes) -> Record:
    # Twice as fast as json, which is the fallback: it accepts lone surrogates and has clearer errors.
    try:
        return _object(from_json(line, cache_strings="keys"))
    except ValueError:
        pass
    try:
        return _object(json.loads(line.decode()))
    except UnicodeDecodeError:
        return NOT_UTF8
    except (ValueError, RecursionError) as error:
        return f"not JSON: {json_problem(error)}"


def _json_array(text: TextIOWrapper) -> Iterator[Placed]:
    """Yield the array's elements one at a time, because an array may be larger than memory."""
    decode = json.JSONDecoder().raw_decode
    buffer, line, element = "", 1, 1
    while (character := text.read(1)) != "[":  # only white space precedes the bracket
        line += character == "\n"
    while True:
        separators = len(buffer) - len(buffer.lstrip(" \t\r\n,"))
        line += buffer.count("\n", 0, separators)
        buffer = buffer[separators:]
        if buffer.startswith("]"):
            return
        place = f"{line} (element {element})"
        try:
            value, end = decode(buffer)
        except (ValueError, RecursionError) as error:
            # The element may be incomplete. Doubling the buffer keeps repeated parsing linear overall.
            more = text.read(max(CHUNK_BYTES, len(buffer))) if len(buffer) < MAX_RECORD_SIZE else ""
            if not more:
                problem = json_problem(error, "the element's character")
                yield Placed(place, f"not JSON, and the rest of the array cannot be read: {problem}")
                return
            buffer += more
            continue
        yield Placed(place, _object(value) if _is_utf8(buffer[:end]) else NOT_UTF8)
        element += 1
        line += buffer.count("\n", 0, end)
        buffer = buffer[end:]


def _object(value: object) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"expected an object with the fields of a post, got {value!r:.80}"


def _plain_line_ends(cell: str) -> str:
    return cell.replace("\r\n", "\n").replace("\r", "\n") if "\r" in cell else cell


def _is_utf8(text: str) -> bool:
    """Return false if the bytes were invalid UTF-8, which `surrogateescape` decodes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
