"""Copy a file's rows with a label for each, as Arrow record batches. Columns keep their order, types and metadata."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import PydanticSerializationError, to_json

from feedmill.producers.files import CsvTable, ParquetTable, Row, Source
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, is_missing
from feedmill.tables.writing import JSON, CsvLayout, compressed, json_column, writer_to

#: Rows per batch.
BATCH_ROWS = 1000
#: Decimals of a score in CSV.
DECIMALS = 6
MAX_INTEGER = 2**63 - 1
#: Types of values in JSON -> type of their column in Parquet. All other columns hold text.
KINDS = {frozenset({bool}): pa.bool_(), frozenset({int}): pa.int64()}
KINDS |= dict.fromkeys((frozenset({float}), frozenset({int, float})), pa.float64())
NEW_TYPES = (pa.string(), pa.float64())


def schema_of(rows: Iterable[Row], form: str) -> tuple[pa.Schema, int]:
    """Return a column for each key of JSON records, in order, and the number of rows."""
    kinds: dict[str, set[type]] = {}
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        for key, value in row.values.items() if isinstance(row.values, dict) else ():
            known = kinds.setdefault(key, set())
            if not is_missing(value):
                is_large = type(value) is int and abs(value) > MAX_INTEGER
                known.add(str if is_large else type(value))
    types = {key: KINDS.get(frozenset(known), JSON) if form == "parquet" else JSON for key, known in kinds.items()}
    return pa.schema(list(types.items())), count


class LabelledCopy:
    """Write the rows of a source with their labels to an open file.

    keys: the columns of JSON records, see `schema_of`. new: names of the columns for the label, its score, and the
    scores of `labels`. batch_rows: rows that are written at once.
    """

    def __init__(
        self,
        file: BinaryIO,
        out: Path,
        form: str,
        source: Source,
        keys: pa.Schema,
        new: Sequence[str],
        labels: Sequence[str],
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        table = source.table
        self._is_parquet, self._labels, self._batch_rows = form == "parquet", labels, batch_rows
        self._decimals = DECIMALS if form in ("csv", "tsv") else None
        self._given = (
            keys if table is None else table.schema if isinstance(table, ParquetTable) else _texts(table, form)
        )
        fields = [pa.field(name, NEW_TYPES[index > 0]) for index, name in enumerate(new)]
        self._schema = pa.schema([*self._given, *fields], self._given.metadata)
        layout = None
        if isinstance(table, CsvTable):
            delimiter = "\t" if form == "tsv" else table.delimiter
            layout = CsvLayout(delimiter, table.line_end, source.has_mark, escapes=False)
        self._writer = writer_to(file, form, self._schema, out.suffix.lower(), layout)
        self._rows: list[tuple[Row, Classification | None]] = []

    def add(self, row: Row, found: Classification | None) -> None:
        if self._rows and _batch(row) is not _batch(self._rows[0][0]):
            self._flush()
        self._rows.append((row, found))
        if len(self._rows) >= self._batch_rows:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            rows, found = zip(*self._rows, strict=True)
            columns = [*self._copied(rows), *self._new(found)]
            self._writer.write(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._rows.clear()

    def _copied(self, rows: Sequence[Row]) -> list[pa.Array]:
        """Return the given columns of some rows."""
        values: Any = [row.values for row in rows]
        if isinstance(values[0], tuple):
            batch, first = values[0]
            return list(batch.slice(first, len(rows)).columns)
        if isinstance(values[0], dict):
            return [_array([record.get(field.name) for record in values], field.type) for field in self._given]
        columns = [pa.array(map(valid, column), pa.string()) for column in zip(*values, strict=True)]
        return [pc.if_else(pc.equal(column, ""), None, column) for column in columns] if self._is_parquet else columns

    def _new(self, found: Sequence[Classification | None]) -> list[pa.Array]:
        """Return the new columns of some rows."""
        labels = pa.array([each and each.label for each in found], pa.string())
        columns = [[each and each.scores[each.label] for each in found]]
        columns += [[each and each.scores.get(label) for each in found] for label in self._labels]
        scores = [pa.array(column, pa.float64()) for column in columns]
        return [
            labels,
            *(scores if self._decimals is None else [pc.round(column, self._decimals) for column in scores]),
        ]

    def close(self) -> None:
        self._flush()
        self._writer.close()


class JsonCopy:
    """Write JSON records with their labels as JSON lines, each as soon as it is added. Keys and values stay."""

    def __init__(self, file: BinaryIO, out: Path, new: Sequence[str], labels: Sequence[str]) -> None:
        self._file, self._stream = file, compressed(file, out.suffix.lower())
        self._new, self._labels = new, labels

    def add(self, row: Row, found: Classification | None) -> None:
        record: Any = row.values
        if key := next((key for key in self._new if key in record), None):  # later records are not known beforehand
            raise UserError(f"A record already has the key {key}. Give --prefix for the names of the new keys.")
        scores = [] if found is None else [found.label, found.scores[found.label], *map(found.scores.get, self._labels)]
        record = record | dict.fromkeys(self._new) | dict(zip(self._new, scores, strict=False))
        try:
            line = to_json(record, inf_nan_mode="null")
        except PydanticSerializationError:  # lone surrogates
            line = json.dumps(record).encode()
        self._stream.write(line + b"\n")

    def close(self) -> None:
        if self._stream is not self._file:
            self._stream.close()


def _batch(row: Row) -> object:
    """Return the batch of a row of Parquet; None for other rows."""
    return row.values[0] if isinstance(row.values, tuple) else None


def _texts(table: CsvTable, form: str) -> pa.Schema:
    """Return the columns of a CSV file. Names that are empty or repeated are changed, except in CSV."""
    names: list[str] = []
    for number, name in enumerate(table.header, 1):
        plain = name if form in ("csv", "tsv") else name.strip() or f"column_{number}"
        names.append(f"{plain}_{number}" if plain in names and form not in ("csv", "tsv") else plain)
    return pa.schema([pa.field(name, pa.string()) for name in names])


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    values = [None if is_missing(value) else value for value in values]
    return json_column(values) if kind == JSON else pa.array(values, kind)


def valid(cell: str) -> str:
    """Return a cell with replacement characters for bytes that were not UTF-8."""
    return cell if cell.isascii() else cell.encode("utf-8", "surrogateescape").decode(errors="replace")
