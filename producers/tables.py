"""Read the records of table files: CSV, JSON lines, a JSON array, Parquet or lines of text; plain, gzip or zstd.

Files are streamed, and the length of a record is bounded. A malformed record becomes its place and the reason; those
after it are read. Knows nothing about posts.
"""

import codecs
import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import BufferedReader, FileIO, RawIOBase, TextIOWrapper
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic_core import from_json, to_jsonable_python

from feedmill.shared.errors import InputError, clause, explain_missing, json_problem

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
#: Byte order marks of UTF-16.
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: Rows of Parquet converted at once.
PARQUET_ROWS = 1000
DELIMITERS = ",;\t|"
#: Excel's line that names the delimiter.
DELIMITER_LINE = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)
QUOTED = re.compile(r'"[^"]*"?')
#: Reason for rejecting a record that is not UTF-8: guessing its encoding could silently change the text.
NOT_UTF8 = "not UTF-8; save the file as UTF-8, or give its encoding, such as --encoding cp1252 for Excel on Windows"

#: A line number, a range of lines such as "20-21", the number of an array's element or of a row of Parquet.
Place = int | str
#: The cells of a row of CSV in the order of the header; or a batch of Parquet, and the row in it.
Cells = list[str] | tuple[Any, int]


class Record(NamedTuple):
    """A record with its place.

    fields: the values by name; the reason why it could not be parsed; or None for a row of empty cells, and for a line
    that was skipped. cells: the row as in the file; None for JSON.
    """

    place: Place
    fields: dict[str, Any] | str | None
    cells: Cells | None = None


class CountedFile(FileIO):
    """A file that counts the bytes read from it."""

    done = 0

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        size = super().readinto(buffer)
        self.done += size or 0
        return size


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


def check_encoding(name: str) -> str:
    """Return Python's name of an encoding. Raises InputError if there is no such text encoding."""
    try:
        "".encode(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise InputError(
            f"--encoding: unknown encoding {name!r:.40}. Excel on Windows writes cp1252; others are latin-1, utf-16 "
            "and shift_jis."
        ) from None


def text_of(binary: BufferedReader, encoding: str, opened: ExitStack) -> TextIOWrapper:
    """Return a reader of the text, with any line end. Invalid bytes become lone surrogates, except in UTF-16 and
    UTF-32, which have none.
    """
    errors = "replace" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
    return opened.enter_context(TextIOWrapper(binary, encoding, errors, newline=""))


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


def text_lines(text: TextIOWrapper) -> Iterator[Record]:
    """Yield each line as the field `text`."""
    for number, line in _lines(text):
        if line is None:
            yield Record(number, f"the line is {TOO_LONG}")
        else:
            yield Record(number, {"text": line.strip()} if is_utf8(line) else NOT_UTF8)


def json_lines(text: TextIOWrapper, rejects: Callable[[str], bool], start: int) -> Iterator[Record]:
    """Yield the object in each line after the first `start` ones. rejects: whether to skip a line unparsed."""
    for number, line in islice(_lines(text), start, None):
        if line is None:
            yield Record(number, f"the line is {TOO_LONG}")
        else:
            yield Record(number, None if rejects(line) else _parsed(line))


def _parsed(line: str) -> dict[str, Any] | str:
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
        self._text, self._name = text, name
        self._line = 0
        lines = self._lines()
        first = _first_line(lines)
        if found := DELIMITER_LINE.fullmatch(first):
            first = _first_line(lines)
        if not first:
            raise InputError(f"{name} is empty. Give another file.")
        self.delimiter = found[1] if found else delimiter_of(first)
        #: The file's line end, which its header line has.
        self.line_end = "\r\n" if first.endswith("\r\n") else "\n"
        # Strict: otherwise an unclosed quote silently swallows all following rows.
        self._rows = csv.reader(chain([first], lines), delimiter=self.delimiter, strict=True)
        try:
            #: Column names as in the file.
            self.header = next(self._rows)
        except csv.Error as error:
            raise InputError(
                f"{name} is neither JSON nor a CSV file with a header ({error}). Give another file."
            ) from None

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

    def rows(self) -> Iterator[tuple[Place, list[str], str]]:
        """Yield the lines and the cells of each row that is not a blank line, and why it is malformed, or "".

        A short row gets empty cells. Empty cells beyond the header, as after a delimiter at the end of each line, are
        dropped. Raises InputError for a cell that is too long.
        """
        width = len(self.header)
        while True:
            first, problem = self._line + 1, ""
            try:
                row = next(self._rows)
            except StopIteration:
                return
            except csv.Error as error:
                if "field limit" in str(error):
                    raise self._too_long(first) from None
                row, problem = [], f"not CSV: {error}; a quote may be missing, or a quote in a text may not be doubled"
            if any(row[width:]):
                problem = f"{len(row)} fields, but {width} columns; a quote may be missing"
            if row or problem:
                place: Place = first if first >= self._line else f"{first}-{self._line}"
                yield place, [*row[:width], *[""] * (width - len(row))], problem


def _first_line(lines: Iterator[str]) -> str:
    """Return the next line that is not blank; "" at the end of the file."""
    return next((line for line in lines if line.strip()), "")


def delimiter_of(header_line: str) -> str:
    """Return the delimiter that occurs most often outside quotes."""
    return max(DELIMITERS, key=QUOTED.sub("", header_line).count)


def column_names(header_line: str) -> Sequence[str]:
    """Return the column names in a CSV file's first line; none if it is not CSV."""
    try:
        return next(csv.reader([header_line], delimiter=delimiter_of(header_line)), [])
    except csv.Error:
        return []


class ParquetTable:
    """A Parquet file's rows, with values as in JSON: dates as text. Holds a thousand rows, besides what pyarrow needs.

    Raises InputError, and UserError if pyarrow is not installed.
    """

    def __init__(self, binary: BufferedReader, name: str, opened: ExitStack) -> None:
        with explain_missing(f"Reading {name}", "tables"):
            import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
        self._name = name
        if not binary.seekable():
            raise InputError(f"{name} is Parquet, which cannot be read from a pipe. Give the path of a file.")
        try:
            self._file = opened.enter_context(pq.ParquetFile(binary))
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None
        self.schema, self.length = self._file.schema_arrow, self._file.metadata.num_rows
        self.header = self.schema.names

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(f"Cannot read {self._name} as Parquet: {clause(error)}. Give another file.")

    def records(self) -> Iterator[Record]:
        """Yield the rows."""
        number = 0
        try:
            for batch in self._file.iter_batches(PARQUET_ROWS):
                for index, row in enumerate(batch.to_pylist()):
                    number += 1
                    yield Record(number, to_jsonable_python(row, bytes_mode="base64", fallback=str), (batch, index))
        except (OSError, ValueError, NotImplementedError) as error:
            raise self._unreadable(error) from None
