"""Write Arrow record batches as CSV, JSONL or Parquet.

Text formats can be compressed. In every format, a column of type `JSON` holds values of any kind: CSV and Parquet get a
string as it is and other values as JSON, JSONL gets the value itself.
"""

import json
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic_core import PydanticSerializationError, from_json, to_json

try:
    from isal.igzip import open as gzip_open  # four times as fast
except ImportError:  # isal has no wheel for this platform
    from gzip import open as gzip_open

#: Type of a column whose values are JSON texts.
JSON = pa.json_()
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
    stream = compressed(file, compression)
    if form == "jsonl":
        return JsonlWriter(stream, schema, stream is not file)
    return CsvWriter(stream, schema, stream is not file, layout or CsvLayout("\t" if form == "tsv" else ","))


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


class _TextWriter:
    """A writer of lines. They are put together by column: in Python, by row, it takes twice as long.

    closes: close the file at the end.
    """

    def __init__(self, file: BinaryIO, closes: bool = False, line_end: str = "\n") -> None:
        self._file, self._closes, self._line_end = file, closes, line_end

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            lines = self._lines(batch)
            joined = pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), self._line_end)
            self._file.write(joined[0].as_buffer())
            self._file.write(self._line_end.encode())

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        raise NotImplementedError

    def close(self) -> None:
        if self._closes:
            self._file.close()


class JsonlWriter(_TextWriter):
    """JSON Lines: one object per row, with null for missing and infinite values."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, closes: bool = False) -> None:
        super().__init__(file, closes)
        self._keys = [f"{',' if index else '{'}{to_json(name).decode()}:" for index, name in enumerate(schema.names)]

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        parts = [part for key, column in zip(self._keys, batch.columns, strict=True) for part in (key, _json(column))]
        return pc.binary_join_element_wise(*parts, "}", "", null_handling="replace", null_replacement="null")


class CsvWriter(_TextWriter):
    """CSV with a header. Cells are quoted where needed; nested values are JSON; missing values are empty."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, closes: bool, layout: CsvLayout) -> None:
        super().__init__(file, closes, layout.line_end)
        self._delimiter, self._escapes = layout.delimiter, layout.escapes
        self._quoted = f'[{layout.delimiter}"\r\n]'
        if layout.has_mark:
            file.write("\ufeff".encode())
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
