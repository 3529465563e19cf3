"""Write Arrow record batches as CSV, JSONL or Parquet.

    with open_writer(Path("labels.csv.gz"), schema) as writer:
        writer.write(batch)

The ending of the name sets the format. Text formats can be compressed. In every format, a column of type `JSON` holds
values of any kind: CSV and Parquet get a string as it is and other values as JSON, JSONL gets the value itself.
"""

import csv
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic_core import from_json, to_json

from shared.atomic_files import replacing
from shared.errors import UserError

try:
    from isal.igzip import open as gzip_open  # four times as fast
except ImportError:  # isal has no wheel for this platform
    from gzip import open as gzip_open

#: Type of a column whose values are JSON texts.
JSON = pa.json_()
#: Formats by ending, and endings of compressed text files.
FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
#: A cell that a spreadsheet would run as a formula, plain or escaped. See producers/exported.py.
FORMULA = r"\A('*[=+\-@\t\r\n＝＋－＠])"
#: Rows and bytes at which a row group of Parquet is closed. Readers skip or load whole row groups.
GROUP_ROWS, GROUP_BYTES = 20_000, 2**25
EPOCH = datetime(1970, 1, 1)


def format_of(name: str) -> str | None:
    """Return the format for the ending of a file's name, in any case; None for another ending."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        form = FORMATS.get(Path(path.stem).suffix)
        return None if form == "parquet" else form
    return FORMATS.get(path.suffix)


@contextmanager
def open_writer(path: Path, schema: pa.Schema, escaped: Collection[str] = ()) -> Iterator["Writer"]:
    """Write a file that appears under its name when the block ends, complete and synced to disk; not after an error.

    escaped: columns of text from strangers, which get an apostrophe in CSV where a spreadsheet would run a formula.
    Raises UserError for an unknown ending, and OSError.
    """
    form = format_of(path.name)
    if form is None:
        raise UserError(
            f"Cannot tell the format of {path}. Give a name that ends in .csv, .tsv, .jsonl or .parquet; or in .csv.gz "
            "or .jsonl.zst."
        )
    with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
        writer = writer_to(file, form, schema, escaped, Path(path.name.lower()).suffix)
        yield writer
        writer.close()


def writer_to(
    file: BinaryIO, form: str, schema: pa.Schema, escaped: Collection[str] = (), compression: str = ""
) -> "Writer":
    """Return a writer of a format to an open file, which stays open. compression: ".gz", ".zst" or none."""
    if form == "parquet":
        return ParquetWriter(file, schema)
    stream: Any = file
    if compression == ".gz":
        stream = gzip_open(file, "wb")  # type: ignore[no-untyped-call]  # noqa: SIM115 - its writer closes it
    elif compression == ".zst":
        stream = pa.CompressedOutputStream(pa.PythonFile(file, "w"), "zstd")
    if form == "jsonl":
        return JsonlWriter(stream, schema, stream is not file)
    return CsvWriter(stream, schema, stream is not file, escaped, "\t" if form == "tsv" else ",")


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


class JsonlWriter:
    """JSON Lines: one object per row, with null for missing and infinite values."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, closes: bool = False) -> None:
        self._file, self._names, self._closes = file, schema.names, closes

    def write(self, batch: pa.RecordBatch) -> None:
        rows = zip(*map(values_of, batch.columns), strict=True)
        records = (dict(zip(self._names, row, strict=True)) for row in rows)
        self._file.write(b"".join([to_json(record, inf_nan_mode="null") + b"\n" for record in records]))

    def close(self) -> None:
        if self._closes:
            self._file.close()


class CsvWriter:
    """CSV with a header. Cells are quoted where needed; nested values are JSON; missing values are empty."""

    def __init__(
        self,
        file: BinaryIO,
        schema: pa.Schema,
        closes: bool = False,
        escaped: Collection[str] = (),
        delimiter: str = ",",
    ) -> None:
        self._file, self._closes = file, closes
        self._escaped = [name in escaped for name in schema.names]
        self._text = TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        self._lines = csv.writer(self._text, delimiter=delimiter)
        header = pa.array(schema.names, pa.string())
        self._lines.writerow((escape_formulas(header) if any(self._escaped) else header).to_pylist())

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [
            cells_of(escape_formulas(column) if escaped and pa.types.is_string(column.type) else column)
            for column, escaped in zip(map(plain_text, batch.columns), self._escaped, strict=True)
        ]
        self._lines.writerows(zip(*columns, strict=True))

    def close(self) -> None:
        self._text.flush()
        self._text.detach()
        if self._closes:
            self._file.close()


Writer = CsvWriter | JsonlWriter | ParquetWriter


def escape_formulas(column: pa.Array) -> pa.Array:
    """Prefix an apostrophe to the texts that a spreadsheet would run as formulas."""
    return pc.replace_substring_regex(column, FORMULA, r"'\1", max_replacements=1)


def plain_text(column: pa.Array) -> pa.Array:
    """Return a JSON column as text: strings as they are, other values as JSON. Other columns are unchanged."""
    if column.type != JSON:
        return column
    texts = column.storage.to_pylist()
    return pa.array([from_json(text) if text and text[0] == '"' else text for text in texts], pa.string())


def values_of(column: pa.Array) -> list[Any]:
    """Return a column's values for JSON: times in ISO 8601, maps as dicts."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _times(column)
    if pa.types.is_map(kind):
        return _maps(column)
    if kind == JSON:
        return [None if text is None else from_json(text) for text in column.storage.to_pylist()]
    if pa.types.is_decimal(kind):
        column = column.cast(pa.string())
    return list(column.to_pylist())


def cells_of(column: pa.Array) -> list[Any]:
    """Return a column's values for CSV: numbers as the shortest text that parses to them, nested values as JSON."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return list(column.cast(pa.string()).to_pylist())
    values = values_of(column)
    if pa.types.is_nested(kind):
        return [None if value is None else to_json(value).decode() for value in values]
    return values


def _times(column: pa.Array) -> list[str | None]:
    start = EPOCH if column.type.tz is None else EPOCH.replace(tzinfo=UTC)
    values = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64()).to_pylist()
    return [None if value is None else (start + timedelta(microseconds=value)).isoformat() for value in values]


def _maps(column: pa.MapArray) -> list[dict[Any, Any] | None]:
    """Return maps as dicts. By column, because pyarrow takes three times as long value by value."""
    bounds, keys, items = column.offsets.to_pylist(), values_of(column.keys), values_of(column.items)
    maps = [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in pairwise(bounds)]
    if not column.null_count:
        return list(maps)
    return [values if valid else None for values, valid in zip(maps, column.is_valid().to_pylist(), strict=True)]
