"""Read CSV as people and programs write it: any common delimiter and line end, `sep=;` lines, line breaks in cells.

Row length is bounded. A malformed row is reported with its lines, and reading continues on the next line.
"""

import csv
import re
from collections.abc import Iterator
from io import TextIOWrapper

from feedmill.producers.unpack import CHUNK_BYTES
from feedmill.shared.errors import InputError

#: Maximum characters of a line and of a cell.
MAX_ROW_SIZE = 2_000_000
#: Maximum characters to skip in search of the quote that ends an overlong cell. Beyond it, the quote was probably
#: never closed, and reading continues on the next line.
MAX_SKIPPED = 8 * MAX_ROW_SIZE
DELIMITERS = ",;\t|"
#: Excel's line that names the delimiter.
DELIMITER_LINE = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)
QUOTED = re.compile(r'"[^"]*"?')
TOO_LONG = f"longer than {MAX_ROW_SIZE:,} characters"

#: A line number, or a range of lines such as "20-21".
Lines = int | str


class _LineTooLongError(Exception):
    """A line was skipped because it is too long."""


class _LineReader:
    """Yield a file's lines with their ends, and count them. Raises _LineTooLongError after skipping a long line."""

    def __init__(self, text: TextIOWrapper) -> None:
        self._text = text
        #: Lines read so far.
        self.number = 0
        #: Line to return once more.
        self.held = ""
        self.delimiter = ","
        #: Lines read before the current row.
        self.row_start = 0
        #: True if the last line ended within quotes. Set only for overlong lines.
        self.quoted = False
        self._line = ""

    def __iter__(self) -> "_LineReader":
        return self

    def __next__(self) -> str:
        line, self.held = self.held or self._text.readline(MAX_ROW_SIZE), ""
        if line == "\n" and len(self._line) == MAX_ROW_SIZE:  # the limit separated it from its \r
            line = self._text.readline(MAX_ROW_SIZE)
        if not line:
            raise StopIteration
        self._line = line
        self.number += 1
        if len(line) == MAX_ROW_SIZE and not line.endswith(("\n", "\r")):
            within_quotes, quotes = self._ends_within_quotes(line), 0
            while rest := self._text.readline(CHUNK_BYTES):
                quotes += rest.count('"')
                if rest.endswith(("\n", "\r")):
                    break
            self.quoted = within_quotes and quotes % 2 == 0
            raise _LineTooLongError
        return line

    def _ends_within_quotes(self, line: str) -> bool:
        """Return true if a quote opened in this line, or in an earlier line of the row, is still open at its end."""
        start = '"' if self.number > self.row_start + 1 else ""
        try:
            next(csv.reader([start + line], delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            return "unexpected end" in str(error)
        return False

    def skip_quoted(self) -> None:
        """Skip lines until the open quote is closed, but no more than MAX_SKIPPED characters."""
        skipped = 0
        while self.quoted and skipped < MAX_SKIPPED and (line := self._text.readline(MAX_ROW_SIZE)):
            self.number += line.endswith(("\n", "\r")) or len(line) < MAX_ROW_SIZE
            skipped += len(line)
            self.quoted = line.count('"') % 2 == 0

    def skip_cell(self) -> None:
        """Skip the rest of a cell that is too long. Such a cell spans lines, so it is quoted."""
        self.quoted = self._line.count('"') % 2 == 0
        self.skip_quoted()


class Table:
    """A CSV file's header and rows. Raises InputError for a file without a readable header.

    text: the file, opened with newline="". name: its name in errors.
    """

    def __init__(self, text: TextIOWrapper, name: str) -> None:
        csv.field_size_limit(MAX_ROW_SIZE)
        self._lines = _LineReader(text)
        try:
            first = self._first_line()
            #: Excel's line that names the delimiter; "" if there is none.
            self.delimiter_line = ""
            if found := DELIMITER_LINE.fullmatch(first):
                self.delimiter_line = first.strip()
                first, self.delimiter = self._first_line(), found[1]
            else:
                self.delimiter = delimiter_of(first)
            if not first:
                raise InputError(f"{name} is empty. Give another file.")
            #: The file's line end, which its header line has.
            self.line_end = "\r\n" if first.endswith("\r\n") else "\n"
            self._lines.held, self._lines.delimiter = first, self.delimiter
            self._lines.number -= 1
            # Strict: otherwise an unclosed quote silently swallows all following rows.
            self._rows = csv.reader(self._lines, delimiter=self.delimiter, strict=True)
            #: Column names as in the file.
            self.header = next(self._rows)
        except (csv.Error, _LineTooLongError) as error:
            reason = str(error) or f"its first line is {TOO_LONG}"
            raise InputError(
                f"{name} is neither JSON nor a CSV file with a header ({reason}). Give another file."
            ) from None

    def _first_line(self) -> str:
        """Return the next line that is not blank; "" at the end of the file."""
        return next((line for line in self._lines if line.strip()), "")

    def rows(self) -> Iterator[tuple[Lines, list[str] | str]]:
        """Yield (lines, cells) for each row that is not a blank line; instead of cells, the reason why it is malformed.

        A short row lacks its last cells. Empty cells beyond the header, as after a delimiter at the end of each line,
        are dropped.
        """
        lines, width = self._lines, len(self.header)
        while True:
            lines.row_start = lines.number
            row: list[str] = []
            problem = ""
            try:
                row = next(self._rows)
            except StopIteration:
                return
            except _LineTooLongError:
                lines.skip_quoted()
                problem = f"the row is {TOO_LONG}"
            except csv.Error as error:
                if "field limit" in str(error):
                    lines.skip_cell()
                    problem = f"a cell is {TOO_LONG}; a quote may be missing"
                elif "unexpected end" in str(error):
                    problem = "a quote opened here is never closed; the rest of the file is not read"
                else:
                    problem = f"not CSV: {error}; a quote may be missing, or a quote inside a text may not be doubled"
            if any(row[width:]):
                problem = f"{len(row)} fields, but {width} columns; a quote may be missing"
            if row or problem:
                first, last = lines.row_start + 1, lines.number
                yield first if first >= last else f"{first}-{last}", problem or row[:width]


def delimiter_of(header_line: str) -> str:
    """Return the delimiter that occurs most often outside quotes."""
    return max(DELIMITERS, key=QUOTED.sub("", header_line).count)


def column_names(header_line: str) -> list[str]:
    """Return the column names in a CSV file's first line; none if it is not CSV."""
    try:
        return next(csv.reader([header_line], delimiter=delimiter_of(header_line)), [])
    except csv.Error:
        return []
