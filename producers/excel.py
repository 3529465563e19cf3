"""Read the first visible sheet of an Excel workbook (.xlsx), row by row.

Needs openpyxl, an optional package.

Workbooks come from strangers: they are ZIP archives of XML, which can be made to unpack to any
size. The sizes that the archive states are checked first; zipfile never unpacks more of a file
than that.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date, datetime, time, timedelta
from itertools import chain
from typing import Any, BinaryIO
from zipfile import ZipFile

from feedmill.shared.errors import InputError, clause, explain_missing, printable

#: Maximum bytes of an unpacked workbook; of its files but sheets, such as shared texts, which are
#: held in memory; and maximum number of its files.
MAX_UNPACKED = 2**30
MAX_IN_MEMORY = 2**28
MAX_FILES = 10_000
#: Maximum bytes of one text of a sheet, which is held in memory several times; Excel's own limit
#: is 32,767 characters. Bytes that are searched for such texts at once.
MAX_TEXT = 2**24
SEARCHED_BYTES = 2**20
#: Maximum columns of a sheet, and rows, which are Excel's own: a file of 5 KB can number its only
#: row 10^11, and all rows before it are read as empty ones.
MAX_COLUMNS = 2_000
MAX_ROWS = 1_048_576
WORKBOOK = "xl/workbook.xml"
SHEETS = "xl/worksheets/"
#: State of a sheet that is shown. Others are "hidden" and "veryHidden".
VISIBLE = "visible"
#: Type of a cell with an error.
ERROR = "e"
ADVICE = "Save the sheet as CSV UTF-8, and read that"


class ErrorCell(str):
    """The text of an error, such as #N/A: a copy keeps it, and a post takes it for a missing
    value.
    """

    __slots__ = ()


def sheet_rows(
    file: BinaryIO, name: str, opened: ExitStack
) -> Iterator[tuple[int, list[str]]]:
    """Return an iterator of the first sheet's rows: the number and the cells as text, empty rows
    left out.

    Hidden sheets, charts and sheets without cells are no first sheets.

    name: the file's name in errors. opened: closes the workbook. Raises InputError, also while
    iterating, and UserError if openpyxl is missing.
    """
    _check_sizes(file, name)
    with explain_missing(f"Reading {name}", "excel"):
        from openpyxl import load_workbook  # noqa: PLC0415 - an optional package
    # About styles, and later about times that cannot be: a command would show them with lines of
    # openpyxl's code.
    warnings.filterwarnings("ignore", module=r"openpyxl\.")
    try:
        workbook: Any = load_workbook(
            file,
            read_only=True,
            data_only=True,
            keep_links=False,
        )
        sheets = workbook.worksheets
    except Exception as error:
        raise _unreadable(name, error) from None
    opened.callback(workbook.close)
    for sheet in sheets:
        if sheet.sheet_state != VISIBLE:
            continue
        rows = _rows(sheet, name)
        first = next(rows, None)
        if first is not None:
            return chain([first], rows)
    raise InputError(
        f"{name} has no visible sheet with cells. Show the sheet of the posts in Excel, or give "
        "another file."
    )


def _check_sizes(file: BinaryIO, name: str) -> None:
    """Raise InputError unless the file is a workbook of a reasonable size."""
    try:
        with ZipFile(file) as archive:
            members = archive.infolist()
            has_long_text = _has_long_text(archive)
    except Exception as error:  # zipfile and its decoders raise errors of many types
        raise _unreadable(name, error) from None
    if all(member.filename != WORKBOOK for member in members):
        raise InputError(
            f"{name} is an archive. Unpack it, and give a file in it. If it is another "
            "spreadsheet, save the sheet as CSV UTF-8."
        )
    if has_long_text:
        raise InputError(
            f"{name} has a text of more than {MAX_TEXT:,} bytes in a cell. {ADVICE}."
        )
    unpacked = 0
    in_memory = 0
    for member in members:
        unpacked += member.file_size
        if not member.filename.startswith(SHEETS):
            in_memory += member.file_size
    if unpacked > MAX_UNPACKED or in_memory > MAX_IN_MEMORY or len(members) > MAX_FILES:
        mebibytes = unpacked >> 20
        raise InputError(
            f"{name} is too large to be read as Excel: {mebibytes:,} MiB unpacked. {ADVICE}."
        )
    file.seek(0)


def _has_long_text(archive: ZipFile) -> bool:
    """Return whether a sheet has a text, or another part without a tag, of more than MAX_TEXT."""
    for member in archive.infolist():
        is_sheet = member.filename.startswith(SHEETS)
        if not is_sheet or not MAX_TEXT < member.file_size <= MAX_UNPACKED:
            continue
        length = 0
        with archive.open(member) as file:
            while part := file.read(SEARCHED_BYTES):
                end = part.find(b"<")
                length += len(part) if end < 0 else end
                if length > MAX_TEXT:
                    return True
                if end >= 0:
                    length = len(part) - 1 - part.rfind(b"<")
    return False


def _rows(sheet: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    # The size that a sheet states may be wrong, or millions of columns.
    sheet.reset_dimensions()
    number = 0
    rows = sheet.iter_rows()
    while True:
        try:
            cells = next(rows, None)
        except Exception as error:
            raise _unreadable(name, error) from None
        if cells is None:
            return
        number += 1
        if number > MAX_ROWS:
            raise InputError(
                f"{name} has rows beyond {MAX_ROWS:,}, the last one of a sheet. {ADVICE}."
            )
        texts = [_text_of(cell) for cell in cells]
        while texts and not texts[-1]:
            texts.pop()
        if len(texts) > MAX_COLUMNS:
            raise InputError(
                f"{name} has more than {MAX_COLUMNS:,} columns in row {number}. {ADVICE}."
            )
        if texts:
            yield number, texts


def _text_of(cell: Any) -> str:
    if cell.data_type == ERROR:
        return ErrorCell(cell.value)
    return cell_text(cell.value)


def cell_text(value: object) -> str:
    """Return a cell's value as text: whole numbers without a point, times in ISO 8601."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number_text(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    return str(value)


def _number_text(value: float) -> str:
    if not math.isfinite(value):
        return ""
    is_exact = abs(value) < 2**53
    if is_exact and value.is_integer():
        return str(int(value))
    return repr(value)


def _unreadable(name: str, error: Exception) -> InputError:
    return InputError(
        f"Cannot read {name} as an Excel workbook: {printable(clause(error)):.200}. {ADVICE}."
    )
