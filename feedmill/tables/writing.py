"""Write Arrow record batches as CSV, JSONL or Parquet, and copies of a file's rows with a label for each.

Copied columns keep their order, types and metadata. Text formats can be compressed. In every format, a column of type
`JSON` holds values of any kind: CSV and Parquet get a string as it is and other values as JSON, JSONL gets the value
itself.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic_core import PydanticSerializationError, from_json, to_json

from feedmill.producers.files import CsvTable, ParquetTable, Row, Source
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, is_missing

try:
    from isal.igzip import open as gzip_open  # four times as fast
except ImportError:  # isal has no wheel for this platform
    from gzip import open as gzip_open

#: Type of a column whose values are JSON texts.
JSON = pa.json_()
#: Rows per batch of a copy, and decimals of a score in CSV.
COPIED_ROWS, DECIMALS = 1000, 6
MAX_INTEGER = 2**63 - 1
#: Types of values in JSON -> type of their column in Parquet. All other columns hold text.
KINDS = {frozenset({bool}): pa.bool_(), frozenset({int}): pa.int64()}
KINDS |= dict.fromkeys((frozenset({float}), frozenset({int, float})), pa.float64())
NEW_TYPES = (pa.string(), pa.float64())
#: A cell that a spreadsheet would run as a formula, plain or escaped. See producers/records.py.
FORMULA = r"\A('*[=+\-@\t\r\n＝＋－＠])"
#: Rows and bytes at which a row group of Parquet is closed. Readers skip or load whole row groups.
GROUP_ROWS, GROUP_BYTES = 20_000, 2**25
#: A character that JSON escapes in texts.
SPECIAL = r'[\x00-\x1f"\\]'


def writer_to(
    file: BinaryIO,
    form: str,
    schema: pa.Schema,
    compression: str = "",
    layout: "CsvLayout | None" = None,
) -> "Writer":
    """Return a writer of a format to an open file, which stays open. compression: ".gz", ".zst" or none."""
    if form == "parquet":
        return ParquetWriter(file, schema)
    if form == "jsonl":
        return JsonlWriter(file, schema, compression)
    return CsvWriter(file, schema, compression, layout or CsvLayout("\t" if form == "tsv" else ","))


def compressed(file: BinaryIO, compression: str) -> Any:
    """Return a stream that compresses into an open file, which stays open; the file itself without compression."""
    if compression == ".gz":
        return gzip_open(file, "wb")  # type: ignore[no-untyped-call]
    if compression == ".zst":
        return pa.CompressedOutputStream(open(file.fileno(), "wb", closefd=False), "zstd")
    return file


class CsvLayout(NamedTuple):
    """Layout of CSV.

    has_mark: begin with a byte order mark, by which Excel recognizes UTF-8. escapes: put an apostrophe before formulas
    in the header and in columns of text.
    """

    delimiter: str = ","
    line_end: str = "\r\n"
    has_mark: bool = False
    escapes: bool = True


class ParquetWriter:
    """Parquet compressed with zstd. Row groups are closed at GROUP_ROWS or GROUP_BYTES."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._schema = pa.schema(
            [field.with_type(pa.string()) if field.type == JSON else field for field in schema], schema.metadata
        )
        self._file = pq.ParquetWriter(file, self._schema, compression="zstd", compression_level=1)
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [plain_text(column) if column.type == JSON else column for column in batch.columns]
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        rows = sum(part.num_rows for part in self._batches)
        if rows >= GROUP_ROWS or sum(part.nbytes for part in self._batches) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            self._file.write_table(pa.Table.from_batches(self._batches))
            self._batches.clear()

    def close(self) -> None:
        self._flush()
        self._file.close()


class _TextFile:
    """A text file, which stays open. compression: ".gz", ".zst" or none."""

    def __init__(self, file: BinaryIO, compression: str) -> None:
        self._file, self._stream = file, compressed(file, compression)

    def close(self) -> None:
        if self._stream is not self._file:
            self._stream.close()


class _TextWriter(_TextFile):
    """A writer of lines. They are put together by column: in Python, by row, it takes twice as long."""

    def __init__(self, file: BinaryIO, compression: str, line_end: str = "\n") -> None:
        super().__init__(file, compression)
        self._line_end = line_end

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            lines = self._lines(batch)
            joined = pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), self._line_end)
            self._stream.write(joined[0].as_buffer())
            self._stream.write(self._line_end.encode())

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        raise NotImplementedError


class JsonlWriter(_TextWriter):
    """JSON Lines: one object per row, with null for missing and infinite values."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, compression: str) -> None:
        super().__init__(file, compression)
        self._keys = [f"{',' if index else '{'}{to_json(name).decode()}:" for index, name in enumerate(schema.names)]

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        parts = [part for key, column in zip(self._keys, batch.columns, strict=True) for part in (key, _json(column))]
        return pc.binary_join_element_wise(*parts, "}", "", null_handling="replace", null_replacement="null")


class CsvWriter(_TextWriter):
    """CSV with a header. Cells are quoted where needed; nested values are JSON; missing values are empty."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, compression: str, layout: CsvLayout) -> None:
        super().__init__(file, compression, layout.line_end)
        self._delimiter, self._escapes = layout.delimiter, layout.escapes
        self._quoted = f'[{layout.delimiter}"\r\n]'
        if layout.has_mark:
            self._stream.write("\ufeff".encode())
        self.write(pa.RecordBatch.from_arrays([pa.array([name]) for name in schema.names], schema.names))

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        cells = map(self._cells, batch.columns)
        return pc.binary_join_element_wise(*cells, self._delimiter, null_handling="replace", null_replacement="")

    def _cells(self, column: pa.Array) -> pa.Array:
        texts = _text(column)
        if self._escapes and column.type in (JSON, pa.string()):
            texts = pc.replace_substring_regex(texts, FORMULA, r"'\1", max_replacements=1)
        special = pc.match_substring_regex(texts, self._quoted)
        if not pc.any(special).as_py():
            return texts
        quoted = pc.binary_join_element_wise('"', pc.replace_substring(texts, '"', '""'), '"', "")
        return pc.if_else(special, quoted, texts)


Writer = CsvWriter | JsonlWriter | ParquetWriter


def plain_text(column: pa.Array) -> pa.Array:
    """Return a JSON column as text: strings as they are, other values as JSON. Other columns are unchanged."""
    if column.type != JSON:
        return column
    texts = column.storage.to_pylist()
    return pa.array([from_json(text) if text and text[0] == '"' else text for text in texts], pa.string())


def json_column(values: Iterable[Any]) -> pa.Array:
    """Return a column of JSON texts; null for None."""
    texts = [None if value is None else _json_text(value) for value in values]
    return pa.ExtensionArray.from_storage(JSON, pa.array(texts, pa.string()))


def _json_text(value: Any) -> str:
    try:
        return to_json(value).decode()
    except PydanticSerializationError:  # lone surrogates
        return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


def _text(column: pa.Array) -> pa.Array:
    """Return a column as texts: times in ISO 8601, nested values as JSON."""
    kind = column.type
    if kind == JSON:
        return plain_text(column)
    if pa.types.is_timestamp(kind):
        texts = pc.replace_substring(column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.string()), " ", "T")
        return pc.replace_substring(pc.replace_substring(texts, "Z", "+00:00"), ".000000", "")
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        return _json(column)
    return column if kind == pa.string() else column.cast(pa.string())


def _json(column: pa.Array) -> pa.Array:
    """Return a column's values as JSON texts."""
    kind = column.type
    if kind == JSON:
        return column.storage
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_finite(column), column, None).cast(pa.string())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.string())
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        values = column.to_pylist(maps_as_pydicts="strict")
        texts = [None if value is None else to_json(value, inf_nan_mode="null").decode() for value in values]
        return pa.array(texts, pa.string())
    texts = _text(column)
    if pc.any(pc.match_substring_regex(texts, SPECIAL)).as_py():
        return json_column(texts.to_pylist()).storage
    return pc.binary_join_element_wise('"', texts, '"', "")


def schema_of(rows: Iterable[Row], form: str) -> pa.Schema:
    """Return a column for each key of JSON records, in order."""
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for key, value in row.values.items() if isinstance(row.values, dict) else ():
            known = kinds.setdefault(key, set())
            if not is_missing(value):
                is_large = type(value) is int and abs(value) > MAX_INTEGER
                known.add(str if is_large else type(value))
    types = {key: KINDS.get(frozenset(known), JSON) if form == "parquet" else JSON for key, known in kinds.items()}
    return pa.schema(list(types.items()))


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
        batch_rows: int = COPIED_ROWS,
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


class JsonCopy(_TextFile):
    """Write JSON records with their labels as JSON lines, each as soon as it is added. Keys and values stay."""

    def __init__(self, file: BinaryIO, out: Path, new: Sequence[str], labels: Sequence[str]) -> None:
        super().__init__(file, out.suffix.lower())
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
