"""Write labelled rows as Parquet with pyarrow (the extra `export`). Imported only when Parquet is requested."""

from collections.abc import Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from feedmill.labelling.columns import Columns, as_kind
from feedmill.labelling.writers import Found, Values, valid
from feedmill.producers.files import PARQUET_ROWS

TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
#: Rows and characters at which a row group is written.
GROUP_ROWS, GROUP_CHARACTERS = 20_000, 2**25
#: The same for the bytes of a copied file's columns in memory.
GROUP_BYTES = 2**26


class ParquetWriter:
    """Write Parquet. Cells of a CSV input are strings, and null if empty; values of a JSON input keep their type."""

    def __init__(self, file: BinaryIO, columns: Columns) -> None:
        self._columns = columns
        self._kinds = columns.kinds or [str] * len(columns.given)
        kinds = [*self._kinds, str, *[float] * (len(columns.new) - 1)]
        self._schema = pa.schema(
            [pa.field(name, TYPES[kind]) for name, kind in zip(columns.names(), kinds, strict=True)]
        )
        self._file = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._held: list[list[Any]] = [[] for _ in kinds]
        self._characters = 0

    def add(self, values: Values, found: Found) -> None:
        if isinstance(values, dict):
            given = zip(self._columns.given, self._kinds, strict=True)
            row = [as_kind(values.get(key), kind) for key, kind in given]
            row = [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in row]
        else:
            row = [valid(cell) or None for cell in values] + [None] * (len(self._columns.given) - len(values))
        for column, value in zip(self._held, [*row, *found], strict=True):
            column.append(value)
            self._characters += len(value) if isinstance(value, str) else 8
        if len(self._held[0]) >= GROUP_ROWS or self._characters >= GROUP_CHARACTERS:
            self._write()

    def _write(self) -> None:
        if self._held[0]:
            arrays = [pa.array(values, field.type) for values, field in zip(self._held, self._schema, strict=True)]
            self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
            for column in self._held:
                column.clear()
            self._characters = 0

    def end(self) -> None:
        self._write()
        self._file.close()


class ParquetCopier:
    """Copy a Parquet file's columns as they are, with new ones: types, index and metadata stay.

    Reads the file a second time, because the rows to classify hold values of JSON. It has a label for each row, in
    order. source: path of the file.
    """

    def __init__(self, file: BinaryIO, new: Sequence[str], source: str) -> None:
        self._source = pq.ParquetFile(source)
        self._batches = self._source.iter_batches(PARQUET_ROWS)
        schema = self._source.schema_arrow
        for name, kind in zip(new, [str, *[float] * (len(new) - 1)], strict=True):
            schema = schema.append(pa.field(name, TYPES[kind]))
        self._schema = schema
        self._file = pq.ParquetWriter(file, schema, compression="zstd")
        #: The batch that the next row belongs to, and the values of the new columns for its first rows.
        self._batch: pa.RecordBatch | None = None
        self._found: list[Found] = []
        #: Complete batches of the next row group.
        self._held: list[pa.RecordBatch] = []

    def add(self, values: Values, found: Found) -> None:  # noqa: ARG002 - reads the values from the file
        if self._batch is None:
            self._batch = next(self._batches)
        self._found.append(found)
        if len(self._found) == self._batch.num_rows:
            self._complete(self._batch)

    def _complete(self, batch: pa.RecordBatch) -> None:
        """Add the new columns to a batch. Writes a row group if enough is held."""
        fields = list(self._schema)[batch.num_columns :]
        columns = zip(*self._found, strict=True)
        new = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
        self._held.append(pa.RecordBatch.from_arrays([*batch.columns, *new], schema=self._schema))
        self._batch, self._found = None, []
        rows, size = sum(held.num_rows for held in self._held), sum(held.nbytes for held in self._held)
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        if self._held:
            self._file.write_table(pa.Table.from_batches(self._held, self._schema))
            self._held.clear()

    def end(self) -> None:
        if self._batch is not None:  # with a limit, or before damage
            self._complete(self._batch.slice(0, len(self._found)))
        self._write()
        self._file.close()
        self._source.close()
