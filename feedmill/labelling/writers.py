"""Write labelled rows as CSV, tab-separated values or JSONL. Parquet: parquet.py."""

import csv
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pydantic_core import PydanticSerializationError, to_json

from feedmill.labelling.columns import Columns, as_text
from feedmill.producers.exported import escape_formula
from feedmill.shared.errors import UserError, explain_missing

#: Formats by the ending of the output file.
FORMATS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
#: Decimals of a score in CSV.
DECIMALS = 6

Values = list[str] | dict[str, Any]
Found = Sequence[str | float | None]


class RowWriter(Protocol):
    """A writer of rows to a binary file, which the caller opens and closes."""

    def add(self, values: Values, found: Found) -> None:
        """Write a row of the input and the values of the new columns."""

    def end(self) -> None:
        """Write what is held back."""


class CsvLayout:
    """Layout of a CSV output: that of the input, if it is CSV.

    has_mark: begin with a byte order mark, by which Excel recognizes UTF-8. delimiter_line: Excel's line that names the
    delimiter. It is left out after a mark, which Excel would ignore because of it.
    """

    def __init__(
        self, delimiter: str = ",", line_end: str = "\n", has_mark: bool = False, delimiter_line: str = ""
    ) -> None:
        self.delimiter = delimiter
        self.line_end = line_end
        self.has_mark = has_mark
        self.delimiter_line = "" if has_mark else delimiter_line


def format_of(out: str) -> str:
    """Return the format of an output file by its ending. Raises UserError for any other ending."""
    if (form := FORMATS.get(Path(out).suffix.lower())) is None:
        raise UserError(
            f"Cannot tell the format of {out}. Give an --out that ends in .csv, .tsv, .jsonl or .parquet; or - for "
            "standard output, in the format of the input."
        )
    return form


def writer_of(form: str, file: BinaryIO, columns: Columns, layout: CsvLayout, parquet: str | None = None) -> RowWriter:
    """Return a writer. parquet: path of the input, if it is Parquet. Raises UserError if a package is not installed."""
    if form == "csv":
        return CsvWriter(file, columns, layout)
    if form == "jsonl":
        return JsonlWriter(file, columns)
    with explain_missing("Parquet", "tables"):
        from feedmill.labelling.parquet import ParquetCopier, ParquetWriter  # noqa: PLC0415 - needs pyarrow, an extra
    if parquet is not None:
        return ParquetCopier(file, columns.new, parquet)
    return ParquetWriter(file, columns)


class CsvWriter:
    """Write CSV. Cells of a CSV input are unchanged; texts of a JSON input are escaped against spreadsheet formulas."""

    def __init__(self, file: BinaryIO, columns: Columns, layout: CsvLayout) -> None:
        self._file, self._columns, self._line_end = file, columns, layout.line_end
        self._rows = csv.writer(self, delimiter=layout.delimiter)
        if layout.has_mark:
            file.write("\ufeff".encode())
        if layout.delimiter_line:
            self.write(layout.delimiter_line)
        self._rows.writerow([*columns.given, *columns.new])

    def write(self, row: str) -> None:
        """Write a row. Bytes that were not UTF-8 in the input are written as they were."""
        # csv quotes a cell with \r only if \r is part of the line end, so rows get theirs here.
        self._file.write((row.removesuffix("\r\n") + self._line_end).encode("utf-8", "surrogateescape"))

    def add(self, values: Values, found: Found) -> None:
        if isinstance(values, dict):
            cells = [escape_formula(as_text(values.get(key)) or "") for key in self._columns.given]
            cells = [cell.encode("utf-8", "replace").decode() for cell in cells]
        else:
            cells = values + [""] * (len(self._columns.given) - len(values))
        self._rows.writerow([*cells, *map(_cell, found)])

    def end(self) -> None: ...


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.{DECIMALS}f}"


class JsonlWriter:
    """Write JSONL. Cells of a CSV input become strings."""

    def __init__(self, file: BinaryIO, columns: Columns) -> None:
        self._file, self._columns = file, columns
        self._names = columns.names()

    def add(self, values: Values, found: Found) -> None:
        if isinstance(values, dict):
            for key in self._columns.new:
                if key in values:  # a stream, whose later records are not known beforehand
                    raise UserError(f"A record already has the key {key}. Give --prefix for the names of the new keys.")
            record = values | dict(zip(self._columns.new, found, strict=True))
        else:
            cells = values + [""] * (len(self._columns.given) - len(values))
            record = dict(zip(self._names, [*map(valid, cells), *found], strict=True))
        with suppress(PydanticSerializationError):  # lone surrogates
            self._file.write(to_json(record, inf_nan_mode="null") + b"\n")
            return
        self._file.write(json.dumps(record).encode() + b"\n")

    def end(self) -> None: ...


def valid(cell: str) -> str:
    """Return a cell with replacement characters for bytes that were not UTF-8."""
    return cell if cell.isascii() else cell.encode("utf-8", "surrogateescape").decode(errors="replace")
