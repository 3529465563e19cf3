"""Posts from files: JSONL, a JSON array, or CSV; plain, gzip or zstd; a path or standard input.

Every record gives a post, or a `BadRecord` that says where it stands and what is wrong with it, or is `LeftOut`: a bad
line never costs a good one. Files are read as a stream, and no line or record is read without a bound, so that a dump
of millions of posts takes no more memory than the window that it was packed with.
"""

import codecs
import csv
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BufferedReader, TextIOWrapper
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic_core import from_json

from producers import exported
from producers.records import (
    EVERYTHING,
    FIELD_NAMES,
    NAMES,
    BadRecord,
    Filters,
    Item,
    LeftOut,
    has_id,
    is_removed,
    plain_key,
    post_of,
    with_plain_keys,
)
from producers.unpack import CHUNK, CountedFile, unpacked
from shared.errors import InputError, json_problem, printable

#: Characters of one record, at most; of a line of JSON, bytes. The longest post there can be, escaped, is well below.
MAX_RECORD = 2_000_000
#: A file is no text when more than this share of its beginning are control characters or bytes that are not UTF-8.
#: Random bytes and UTF-16 have half; Latin-1, of which letters with accents alone are lost, a fifth at most.
NO_TEXT = 0.3
#: Characters that no text has, and the one that stands for bytes that are none.
UNKNOWN = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
#: Of a record with bytes that are no UTF-8: to guess what they were would change the text, and tell nobody.
NOT_UTF8 = "not UTF-8; save the file as UTF-8, or try `iconv -f cp1252 -t utf-8 FILE | feedmill enqueue -`"

#: A record as it was read, or why it could not be, or that it need not be.
Record = dict[str, Any] | str | LeftOut
#: What a row of an export gives.
Found = TypeVar("Found")
#: A record's line, and in an array which element it is.
Place = int | str


class Source:
    """A file's posts, in order, and how far they are read; "-" is standard input.

    start: how many records are passed over, from the beginning: nothing is said of them.
    id_column: which column, or key, is the posts' id; None finds it by its name.
    """

    def __init__(self, path: str, filters: Filters = EVERYTHING, start: int = 0, id_column: str | None = None) -> None:
        self._path = path
        #: What it is called where something is said of it.
        self.name = "stdin" if path == "-" else printable(path)
        self._filters = filters
        self._start = start
        self._id_column = None if id_column is None else plain_key(id_column)
        #: Where no column is an id, those which mean nothing else; None where one is. The first record tells.
        self.columns_to_choose: list[str] | None = None
        self._file: CountedFile | None = None
        #: Bytes of the file as it lies there; None where that is not known.
        self.size = Path(path).stat().st_size if is_file(path) else None

    @property
    def done(self) -> int:
        """Bytes of the file that were read."""
        return self._file.done if self._file else 0

    def items(self) -> Iterator[Item]:
        """What each record gives.

        Raises InputError when the file as a whole cannot be read; UserError where a package is missing for it.
        """
        return self._items(exported.post_of)

    def labelled(self) -> Iterator[Item | exported.Labelled]:
        """The same; of an export the posts with their labels. Raises as `items` does."""
        return self._items(exported.labelled_of)

    def _items(self, read_export: Callable[[dict[str, Any], str], Iterator[Found]]) -> Iterator[Item | Found]:
        wants_all = self._filters == EVERYTHING
        looked = self._start > 0
        try:
            with ExitStack() as opened:
                for place, record in self._records(opened):
                    if isinstance(record, LeftOut):
                        yield record
                    elif isinstance(record, str):
                        yield BadRecord(f"{self.name}:{place}", record)
                    else:
                        fields = with_plain_keys(record)
                        if not looked:
                            self._look_for_ids(fields)
                            looked = True
                        if not (wants_all or self._filters.admit(fields)):
                            yield LeftOut.BY_FILTERS
                        elif is_removed(fields):
                            yield LeftOut.REMOVED
                        else:
                            place_of_it = f"{self.name}:{place}"
                            if exported.is_exported(fields):
                                yield from read_export(fields, place_of_it)
                            else:
                                yield from post_of(fields, place_of_it, self._id_column)
        except FileNotFoundError:
            raise InputError(f"There is no file {self._path}.") from None
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{self.name} cannot be read to its end: {error}.") from None

    def _look_for_ids(self, first: dict[str, Any]) -> None:
        """Raises InputError where the first record has no such column as was asked for."""
        if self._id_column is None:
            if not has_id(first):
                self.columns_to_choose = [column for column in first if column and column not in FIELD_NAMES]
        elif exported.is_exported(first):
            raise InputError(f"{self.name} is an export of results, which has ids of its own: leave out --id-column.")
        elif self._id_column not in first:
            raise InputError(
                f"{self.name} has no column {printable(self._id_column)}. Its columns: "
                f"{printable(', '.join(first)):.200}. Name one of them with --id-column, or leave it out."
            )

    def _records(self, opened: ExitStack) -> Iterator[tuple[Place, Record]]:
        """(place, record) for each record, in the format that the file's first character tells."""
        binary = unpacked(self._open(opened), self.name, opened)
        head = binary.peek(CHUNK).removeprefix(codecs.BOM_UTF8).lstrip()
        if head.startswith(b"PAR1"):
            raise InputError(f"{self.name} is Parquet. Give the same as JSONL or CSV, as docs/export.md shows.")
        is_array, is_lines = head.startswith(b"["), head.startswith(b"{")
        if not is_array and not is_lines:
            beginning = head.decode(errors="replace")
            if len(UNKNOWN.findall(beginning)) > NO_TEXT * len(beginning):
                raise InputError(
                    f"{self.name} holds no text in UTF-8: an archive, a spreadsheet, or text in another encoding, "
                    "such as UTF-16? Give it as JSONL, a JSON array or CSV, in UTF-8."
                )
            # A damaged first line must not cost the lines after it.
            is_lines = b"\n{" in head and not _posts_columns(beginning.partition("\n")[0])
        if is_lines:
            return _json_lines(binary, self._filters, self._start)
        # In an export every line end within a text is kept as it is; elsewhere \r\n and \r count as \n.
        is_export = exported.is_exported(_columns(head.partition(b"\n")[0].decode(errors="replace"))[1])
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
        return cast(BufferedReader, opened.enter_context(BufferedReader(self._file, CHUNK)))


def read(path: str) -> Iterator[Item]:
    """The posts of a file, in order; "-" is standard input. Raises as `Source.items` does."""
    return Source(path).items()


def is_file(path: str) -> bool:
    """Whether there is a file, which can be read twice: no pipe, and not standard input."""
    try:
        return path != "-" and Path(path).is_file()
    except OSError:  # not ours to look at: opening it says so
        return False


def _json_lines(binary: BufferedReader, filters: Filters, start: int) -> Iterator[tuple[int, Record]]:
    for number, line in islice(_lines(binary), start, None):
        if line is None:
            yield number, f"the line is longer than {MAX_RECORD:,} bytes"
        elif filters.reject_line(line):
            yield number, LeftOut.BY_FILTERS
        else:
            yield number, _json_record(line)


def _lines(binary: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Lines that hold something, with their numbers; None for one that is too long."""
    number = 0
    while line := binary.readline(MAX_RECORD):
        number += 1
        if len(line) == MAX_RECORD and not line.endswith(b"\n"):
            while (rest := binary.readline(CHUNK)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line and not line.isspace():
            yield number, line


def _json_record(line: bytes) -> Record:
    # Twice as fast as Python's own, which takes more, such as halves of characters, and says better what is wrong.
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
    """The array's elements, one at a time: an array may be larger than memory."""
    decode = json.JSONDecoder().raw_decode
    held, line, element = "", 1, 1
    while (character := text.read(1)) != "[":  # what stands before the bracket is white space
        line += character == "\n"
    while True:
        separators = len(held) - len(held.lstrip(" \t\r\n,"))
        line += held.count("\n", 0, separators)
        held = held[separators:]
        if held.startswith("]"):
            return
        place = f"{line} (element {element})"
        try:
            value, end = decode(held)
        except (ValueError, RecursionError) as error:
            # Not whole yet? Doubling what is held keeps the cost of trying again in proportion.
            more = text.read(max(CHUNK, len(held))) if len(held) < MAX_RECORD else ""
            if not more:
                problem = json_problem(error, "the element's character")
                yield place, f"not JSON, and the rest of the array cannot be read: {problem}"
                return
            held += more
            continue
        yield place, _object(value) if _is_utf8(held[:end]) else NOT_UTF8
        element += 1
        line += held.count("\n", 0, end)
        held = held[end:]


def _object(value: object) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"expected an object with a post's fields, got {value!r:.80}"


def _csv(text: TextIOWrapper, name: str) -> Iterator[tuple[Place, Record]]:
    header_line = text.readline(CHUNK)
    if not header_line.strip():
        raise InputError(f"{name} is empty.")
    delimiter, header = _columns(header_line)
    if not _posts_columns(header_line):
        raise InputError(
            f"{name} is no JSON, and as CSV it has no column for a title or a body. Its columns: "
            f"{printable(', '.join(header)):.200}. Name one of them {' or '.join(NAMES['title'] + NAMES['body'])}."
        )
    is_exported = exported.is_exported(header)
    csv.field_size_limit(MAX_RECORD)
    # Strict: else a quotation mark that is never closed would swallow every row after it, and say nothing.
    rows = csv.reader(iter(lambda: text.readline(MAX_RECORD), ""), delimiter=delimiter, strict=True)
    while True:
        line = rows.line_num + 2  # the header was line 1
        row: list[str] = []
        problem = None
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                problem = "a quotation mark is opened here and never closed; the rest of the file is not read"
            else:
                problem = f"not CSV: {error}; is a quotation mark missing, or one within a text not written twice?"
        if len(row) > len(header):
            problem = f"{len(row)} fields under {len(header)} columns; is a quotation mark missing?"
        elif not _is_utf8("".join(row)):
            problem = NOT_UTF8
        if problem:
            # Reading goes on after the last line that was taken for a part of the row, whatever it was.
            last = rows.line_num + 1
            yield line if line == last else f"{line}-{last}", problem
        elif row:
            cells = map(exported.unescaped, row) if is_exported else row
            yield line, dict(zip_longest(header, cells, fillvalue=""))


def _is_utf8(text: str) -> bool:
    """Whether its bytes were: those that were not stand in it as halves of characters (`surrogateescape`)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _columns(header_line: str) -> tuple[str, list[str]]:
    """(delimiter, column names) of a CSV file's first line."""
    delimiter = max(",;\t", key=header_line.count)
    names = next(csv.reader([header_line], delimiter=delimiter), [])
    return delimiter, [plain_key(name) for name in names]


def _posts_columns(header_line: str) -> bool:
    """Whether a CSV file with this first line holds posts."""
    return any(column in NAMES["title"] + NAMES["body"] for column in _columns(header_line)[1])
