"""Write labelled rows as Parquet with pyarrow (the extra `export`). Imported only when Parquet is requested."""

from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from feedmill.labelling.columns import Columns, as_kind
from feedmill.labelling.writers import Found, Values, valid

TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
#: Rows and characters at which a row group is written.
GROUP_ROWS, GROUP_CHARACTERS = 20_000, 2**25


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
