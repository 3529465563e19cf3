"""Write Arrow record batches as an Excel workbook (.xlsx) with one sheet.

Needs openpyxl, an optional package.

All texts are cells of text: a sender's text is never a formula, whatever it begins with.
"""

import logging
import math
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, BinaryIO

import pyarrow as pa
from openpyxl import Workbook
from openpyxl.cell import WriteOnlyCell
from pyarrow.types import is_boolean, is_floating, is_integer, is_timestamp

from feedmill.producers.excel import MAX_ROWS
from feedmill.shared.errors import UserError
from feedmill.tables.writing import as_text

logger = logging.getLogger(__name__)

#: Further limits of Excel: characters of a cell, whole numbers that it holds exactly, and its
#: first year.
MAX_CHARACTERS = 32_767
MAX_EXACT = 2**53
FIRST_YEAR = 1900
#: Characters that XML cannot hold.
ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


class ExcelWriter:
    """A workbook with a header and one row for each row.

    It is written when it is closed, to a file that stays open.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._file = file
        self._workbook = Workbook(write_only=True)
        self._sheet: Any = self._workbook.create_sheet("posts")
        self._rows = 0
        #: Cells that were too long for Excel.
        self._cut = 0
        self._append(schema.names)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows. Raises UserError if the sheet has no room for them."""
        if self._rows + batch.num_rows > MAX_ROWS:
            raise UserError(
                f"A sheet of Excel has at most {MAX_ROWS:,} rows. Write .csv or .parquet instead."
            )
        columns = [_values(column) for column in batch.columns]
        rows = zip(*columns, strict=True)
        for row in rows:
            self._append(row)

    def _append(self, row: Any) -> None:
        cells = [self._cell(value) for value in row]
        self._sheet.append(cells)
        self._rows += 1

    def _cell(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        text = ILLEGAL.sub("\ufffd", value)
        if len(text) > MAX_CHARACTERS:
            self._cut += 1
            text = text[:MAX_CHARACTERS]
        cell = WriteOnlyCell(self._sheet, text)
        cell.data_type = "s"  # openpyxl takes a text that begins with = for a formula
        return cell

    def close(self) -> None:
        self._workbook.save(self._file)
        if self._cut:
            logger.warning(
                "cut %d texts to %d characters, the most that a cell of Excel holds",
                self._cut,
                MAX_CHARACTERS,
            )

    def abandon(self) -> None:
        """End what is incomplete: at its deletion, it would report that it cannot."""
        with suppress(Exception):
            self._sheet.close()


def _values(column: pa.Array) -> list[Any]:
    """Return a column's values as Excel holds them: numbers, truth values, times in UTC, and
    texts.
    """
    kind = column.type
    if is_boolean(kind):
        return list(column.to_pylist())
    if is_integer(kind) or is_floating(kind):
        numbers = column.to_pylist()
        return [_number(number) for number in numbers]
    texts: list[Any] = as_text(column).to_pylist()
    if not is_timestamp(kind) or kind.unit == "ns":
        return texts
    times: list[Any] = []
    for scalar, text in zip(column, texts, strict=True):
        time = _time(scalar, text)
        times.append(time)
    return times


def _number(value: float | None) -> float | str | None:
    """Return a number that Excel holds exactly; a text for a larger whole number; None for NaN and
    infinity.
    """
    if value is None:
        return None
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        return str(value)
    if not math.isfinite(value):
        return None
    return value


def _time(scalar: Any, text: str | None) -> datetime | str | None:
    """Return a time in UTC, without its zone, which Excel does not know.

    Return the text if Python has no such year or zone, or for a time before Excel's first year in
    UTC.
    """
    try:
        value: datetime | None = scalar.as_py()
        if value is not None and value.tzinfo is not None:
            in_utc = value.astimezone(UTC)
            value = in_utc.replace(tzinfo=None)
    except (OverflowError, LookupError, ValueError):
        return text
    if value is None or value.year < FIRST_YEAR:
        return text
    return value
