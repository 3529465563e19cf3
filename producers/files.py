"""Read posts from files: JSONL, a JSON array or CSV; plain, gzip or zstd; from a path or standard input.

Each record yields a post, a `BadRecord` with place and reason, or `LeftOut`; bad records do not affect good ones. Files
are streamed and record length is bounded, so a dump of millions of posts needs no more memory than its compression
window.
"""

import codecs
import csv
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import BufferedReader, TextIOWrapper
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic_core import from_json

from producers import exported
from producers.records import (
    FIELD_ALIASES,
    FIELD_NAMES,
    NO_FILTERS,
    BadRecord,
    Filters,
    Item,
    LeftOut,
    has_id,
    is_removed,
    normalize_key,
    normalize_keys,
    parse_post,
)
from producers.unpack import CHUNK_BYTES, CountedFile, decompressed
from shared.errors import InputError, json_problem, printable

#: Maximum size of a record: characters, or bytes for a line of JSON. The largest valid post, escaped, is well below.
MAX_RECORD_SIZE = 2_000_000
#: A file is binary if control characters and invalid UTF-8 make up more than this share of its first chunk. Random
#: bytes and UTF-16 reach a half; Latin-1 text, where only accented letters are invalid, a fifth at most.
MAX_BINARY_SHARE = 0.3
#: Control characters that text does not contain, and the replacement character for invalid UTF-8.
BINARY_CHARACTERS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
#: Reason for rejecting a record that is not UTF-8: guessing its encoding could silently change the text.
NOT_UTF8 = "not UTF-8; save the file as UTF-8, or try `iconv -f cp1252 -t utf-8 FILE | feedmill enqueue -`"

#: A parsed record, the reason why it could not be parsed, or why it was skipped.
Record = dict[str, Any] | str | LeftOut
#: Result type of a row of an export.
Found = TypeVar("Found")
#: A record's line number; for a JSON array, line and element.
Place = int | str


class Source:
    """A file of posts, read in order, with progress. "-" is standard input.

    start: number of records to skip without reporting them.
    id_column: column or key with the posts' ids; None detects it by name.
    keep: columns or keys whose values the posts carry in `extra`.
    """

    def __init__(
        self,
        path: str,
        filters: Filters = NO_FILTERS,
        start: int = 0,
        id_column: str | None = None,
        keep: Sequence[str] = (),
    ) -> None:
        self._path = path
        #: Name in messages.
        self.name = "stdin" if path == "-" else printable(path)
        self._filters = filters
        self._start = start
        self._id_column = None if id_column is None else normalize_key(id_column)
        self._keep = {normalize_key(name): name for name in keep}
        #: Candidate id columns if none was found, else None. Set after the first record.
        self.columns_to_choose: list[str] | None = None
        self._file: CountedFile | None = None
        #: Size of the file in bytes; None if unknown.
        self.size = Path(path).stat().st_size if is_file(path) else None

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

    def _items(self, read_export: Callable[[dict[str, Any], str], Iterator[Found]]) -> Iterator[Item | Found]:
        wants_all = self._filters == NO_FILTERS
        id_column_checked = self._start > 0
        try:
            with ExitStack() as opened:
                for place, record in self._records(opened):
                    if isinstance(record, LeftOut):
                        yield record
                    elif isinstance(record, str):
                        yield BadRecord(f"{self.name}:{place}", record)
                    else:
                        fields = normalize_keys(record)
                        if not id_column_checked:
                            self._look_for_ids(fields)
                            self._look_for_kept(fields)
                            id_column_checked = True
                        if not (wants_all or self._filters.admit(fields)):
                            yield LeftOut.BY_FILTERS
                        elif is_removed(fields):
                            yield LeftOut.REMOVED
                        else:
                            place_of_it = f"{self.name}:{place}"
                            if exported.is_export_row(fields):
                                yield from read_export(fields, place_of_it)
                            else:
                                yield from parse_post(fields, place_of_it, self._id_column, self._keep)
        except FileNotFoundError:
            raise InputError(f"There is no file {self._path}. Check the path.") from None
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"Cannot read {self.name} to the end: {error}. Check the file, then run the command again."
            ) from None

    def _look_for_ids(self, first: dict[str, Any]) -> None:
        """Find the id column. Raises InputError if the first record lacks the requested one."""
        if self._id_column is None:
            if not has_id(first):
                self.columns_to_choose = [column for column in first if column and column not in FIELD_NAMES]
        elif exported.is_export_row(first):
            raise InputError(f"{self.name} is an export of results and has its own ids: omit --id-column.")
        elif self._id_column not in first:
            raise InputError(
                f"{self.name} has no column {printable(self._id_column)} (--id-column). Choose one of its columns: "
                f"{printable(', '.join(first)):.200}; or omit --id-column."
            )

    def _look_for_kept(self, first: dict[str, Any]) -> None:
        """Raise InputError if the first record lacks a column to keep."""
        missing = [name for key, name in self._keep.items() if key not in first]
        if self._keep and exported.is_export_row(first):
            raise InputError(f"{self.name} is an export of results and keeps its own `extra`: omit --keep.")
        if missing:
            raise InputError(
                f"{self.name} has no column {printable(missing[0])} (--keep). Choose from its columns: "
                f"{printable(', '.join(first)):.200}."
            )

    def _records(self, opened: ExitStack) -> Iterator[tuple[Place, Record]]:
        """Yield (place, record) for each record, detecting the format by the file's first characters."""
        binary = decompressed(self._open(opened), self.name, opened)
        head = binary.peek(CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        if head.startswith(b"PAR1"):
            raise InputError(f"{self.name} is a Parquet file. Convert it to JSONL or CSV, as docs/export.md shows.")
        is_array, is_lines = head.startswith(b"["), head.startswith(b"{")
        if not is_array and not is_lines:
            beginning = head.decode(errors="replace")
            if len(BINARY_CHARACTERS.findall(beginning)) > MAX_BINARY_SHARE * len(beginning):
                raise InputError(
                    f"{self.name} is not UTF-8 text; it may be an archive, a spreadsheet or another encoding such as "
                    "UTF-16. Convert it to JSONL, a JSON array or CSV in UTF-8."
                )
            # JSONL with a damaged first line is still JSONL.
            is_lines = b"\n{" in head and not _posts_columns(beginning.partition("\n")[0])
        if is_lines:
            return _json_lines(binary, self._filters, self._start)
        # Exports keep the line ends within texts; in other files \r\n and \r are read as \n.
        is_export = exported.is_export_row(_columns(head.partition(b"\n")[0].decode(errors="replace"))[1])
        newline = "" if is_export else None
        text = opened.enter_context(
            TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
        )
        records: Iterator[tuple[Place, Record]] = _json_array(text) if is_array else _csv(text, self.name)
        return islice(records, self._start, None)

    def _open(self, opened: ExitStack) -> BufferedReader:
        if self._path == "-":
            return cast(BufferedReader, sys.stdin.buffer)
        self._file = CountedFile(self._path)
        return cast(BufferedReader, opened.enter_context(BufferedReader(self._file, CHUNK_BYTES)))


def is_file(path: str) -> bool:
    """Return true for a regular file, which can be read twice; false for pipes and standard input."""
    try:
        return path != "-" and Path(path).is_file()
    except OSError:  # no access: opening the file reports it
        return False


def _json_lines(binary: BufferedReader, filters: Filters, start: int) -> Iterator[tuple[int, Record]]:
    for number, line in islice(_lines(binary), start, None):
        if line is None:
            yield number, f"the line is longer than {MAX_RECORD_SIZE:,} bytes"
        elif filters.reject_line(line):
            yield number, LeftOut.BY_FILTERS
        else:
            yield number, _json_record(line)


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


def _json_array(text: TextIOWrapper) -> Iterator[tuple[str, Record]]:
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
                yield place, f"not JSON, and the rest of the array cannot be read: {problem}"
                return
            buffer += more
            continue
        yield place, _object(value) if _is_utf8(buffer[:end]) else NOT_UTF8
        element += 1
        line += buffer.count("\n", 0, end)
        buffer = buffer[end:]


def _object(value: object) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"expected an object with the fields of a post, got {value!r:.80}"


def _csv(text: TextIOWrapper, name: str) -> Iterator[tuple[Place, Record]]:
    header_line = text.readline(CHUNK_BYTES)
    if not header_line.strip():
        raise InputError(f"{name} is empty. Give another file.")
    delimiter, header = _columns(header_line)
    if not _posts_columns(header_line):
        raise InputError(
            f"{name} is neither JSON nor a CSV file with a title or body column (its columns: "
            f"{printable(', '.join(header)):.200}). Rename one to: "
            f"{', '.join(FIELD_ALIASES['title'] + FIELD_ALIASES['body'])}."
        )
    is_exported = exported.is_export_row(header)
    csv.field_size_limit(MAX_RECORD_SIZE)
    # Strict: otherwise an unclosed quote silently swallows all following rows.
    rows = csv.reader(iter(lambda: text.readline(MAX_RECORD_SIZE), ""), delimiter=delimiter, strict=True)
    while True:
        line = rows.line_num + 2  # line 1 is the header
        row: list[str] = []
        problem = None
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                problem = "a quote opened here is never closed; the rest of the file is not read"
            else:
                problem = f"not CSV: {error}; a quote may be missing, or a quote inside a text may not be doubled"
        if len(row) > len(header):
            problem = f"{len(row)} fields, but {len(header)} columns; a quote may be missing"
        elif not _is_utf8("".join(row)):
            problem = NOT_UTF8
        if problem:
            # Continue after the last line that was consumed as part of this row.
            last = rows.line_num + 1
            yield line if line == last else f"{line}-{last}", problem
        elif row:
            cells = map(exported.unescape_formula, row) if is_exported else row
            yield line, dict(zip_longest(header, cells, fillvalue=""))


def _is_utf8(text: str) -> bool:
    """Return false if the bytes were invalid UTF-8, which `surrogateescape` decodes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _columns(header_line: str) -> tuple[str, list[str]]:
    """Return (delimiter, column names) from a CSV file's first line."""
    delimiter = max(",;\t", key=header_line.count)
    names = next(csv.reader([header_line], delimiter=delimiter), [])
    return delimiter, [normalize_key(name) for name in names]


def _posts_columns(header_line: str) -> bool:
    """Return true if a CSV file with this header contains posts."""
    return any(column in FIELD_ALIASES["title"] + FIELD_ALIASES["body"] for column in _columns(header_line)[1])
