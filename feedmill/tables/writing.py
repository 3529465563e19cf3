"""Write Arrow record batches as CSV, JSONL, Parquet or Excel, and copies of a file's rows with a
label for each.

Copied columns keep their order, types and metadata. Text formats can be compressed. In every
format, a column of type `JSON` holds values of any kind: CSV and Parquet get a string as it is and
other values as JSON, JSONL gets the value itself.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Union

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.types import (
    is_boolean,
    is_floating,
    is_integer,
    is_nested,
    is_timestamp,
)
from pydantic_core import PydanticSerializationError, from_json, to_json

from feedmill.producers.files import FileRow, FileSource, SheetTable, TextTable
from feedmill.producers.parquet import (
    MAX_CELL,
    MAX_CELL_LISTED,
    ParquetTable,
    as_base64,
    has_binary,
    is_string,
    leniently,
    short_parts,
    time_texts,
    values_of,
    without_long_lists,
)
from feedmill.producers.records import FORMULA
from feedmill.shared.errors import InputError, UserError, printable, truncate
from feedmill.shared.messages import Classification, is_missing
from feedmill.tables import LabelColumns

if TYPE_CHECKING:
    from feedmill.tables.excel import ExcelWriter

try:
    from isal.igzip import open as gzip_open  # four times as fast
except ImportError:  # isal has no wheel for this platform
    from gzip import open as gzip_open

#: Types of columns. Values of JSON are JSON texts.
TEXT = pa.string()
TEXTS = pa.list_(TEXT)
NUMBER = pa.float64()
JSON = pa.json_()
#: Names of Arrow's extension types with a text of their own. All others are written as what they
#: are stored as.
TEXT_EXTENSIONS = frozenset({"arrow.uuid"})
#: Rows per batch of a copy, and decimals of a score in CSV.
COPIED_ROWS = 1000
DECIMALS = 6
MAX_INTEGER = 2**63 - 1
#: Types of values in JSON -> type of their column in Parquet. All other columns hold text.
KINDS = {frozenset({bool}): pa.bool_(), frozenset({int}): pa.int64()}
KINDS |= dict.fromkeys((frozenset({float}), frozenset({int, float})), NUMBER)
#: The start of a formula, as the group that stays behind its apostrophe.
ESCAPED_FORMULA = rf"\A({FORMULA})"
#: Rows and bytes at which a row group of Parquet is closed. Readers skip or load whole row groups.
GROUP_ROWS = 20_000
GROUP_BYTES = 2**25
#: A character that JSON escapes in texts.
SPECIAL = r'[\x00-\x1f"\\]'


def writer_to(
    file: BinaryIO,
    form: str,
    schema: pa.Schema,
    compression: str = "",
    layout: "CsvLayout | None" = None,
    is_copy: bool = False,
) -> "Writer":
    """Return a writer of a format to an open file, which stays open.

    compression: ".gz", ".zst" or none. is_copy: columns come from Parquet, see `ParquetWriter`.
    """
    if form == "parquet":
        return ParquetWriter(file, schema, is_copy)
    if form == "xlsx":
        # Needs openpyxl, an optional package.
        from feedmill.tables.excel import ExcelWriter  # noqa: PLC0415

        return ExcelWriter(file, schema)
    if form == "jsonl":
        return JsonlWriter(file, schema, compression)
    if layout is None:
        layout = CsvLayout(delimiter_of(form))
    return CsvWriter(file, schema, compression, layout)


def delimiter_of(form: str) -> str:
    """Return what separates the cells of csv or tsv."""
    return "\t" if form == "tsv" else ","


def compressed(file: BinaryIO, compression: str) -> Any:
    """Return a stream that compresses into an open file, which stays open; the file itself without
    compression.
    """
    if compression == ".gz":
        return gzip_open(file, "wb")  # type: ignore[no-untyped-call]
    if compression == ".zst":
        return pa.CompressedOutputStream(
            open(file.fileno(), "wb", closefd=False),
            "zstd",
        )
    return file


class CsvLayout(NamedTuple):
    """Layout of CSV.

    has_mark: begin with a byte order mark, by which Excel recognizes UTF-8. escapes: put an
    apostrophe before formulas in the header and in columns of text.
    """

    delimiter: str = ","
    line_end: str = "\r\n"
    has_mark: bool = False
    escapes: bool = True


class ParquetWriter:
    """Parquet compressed with zstd. Row groups are closed at GROUP_ROWS or GROUP_BYTES.

    is_copy: leave columns of JSON as they are, because the columns come from Parquet.
    """

    def __init__(
        self, file: BinaryIO, schema: pa.Schema, is_copy: bool = False
    ) -> None:
        self._is_copy = is_copy
        self._schema = schema
        if not is_copy:
            fields = [_plain_field(field) for field in schema]
            self._schema = pa.schema(fields, schema.metadata)
        self._file = pq.ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            compression_level=1,
        )
        self._batches: list[pa.RecordBatch] = []
        #: Rows and bytes of the batches.
        self._rows = 0
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        columns = batch.columns
        if not self._is_copy:
            columns = [plain_text(column) for column in columns]
        part = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._batches.append(part)
        self._rows += part.num_rows
        self._bytes += part.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            group = pa.Table.from_batches(self._batches)
            self._file.write_table(group)
            self._batches.clear()
            self._rows = 0
            self._bytes = 0

    def close(self) -> None:
        self._flush()
        self._file.close()

    def abandon(self) -> None:
        """Close what is incomplete: at its deletion, when the file is closed, it would report that
        it cannot.
        """
        with suppress(Exception):
            self._file.close()


class _TextFile:
    """A text file, which stays open. compression: ".gz", ".zst" or none."""

    def __init__(self, file: BinaryIO, compression: str) -> None:
        self._file = file
        self._stream = compressed(file, compression)

    def close(self) -> None:
        if self._stream is not self._file:
            self._stream.close()

    def abandon(self) -> None:
        """Close what is incomplete: at its deletion, when the file is closed, it would report that
        it cannot.
        """
        with suppress(Exception):
            self.close()


class _TextWriter(_TextFile):
    """A writer of lines.

    They are put together by column: in Python, by row, it takes twice as long.
    """

    def __init__(self, file: BinaryIO, compression: str, line_end: str = "\n") -> None:
        super().__init__(file, compression)
        self._line_end = line_end

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        lines = self._lines(batch)
        one_list = pa.ListArray.from_arrays([0, len(lines)], lines)
        texts = pc.binary_join(one_list, self._line_end)
        text = texts[0]
        self._stream.write(text.as_buffer())
        self._stream.write(self._line_end.encode())

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        raise NotImplementedError


class JsonlWriter(_TextWriter):
    """JSON Lines: one object per row, with null for missing and infinite values."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, compression: str) -> None:
        super().__init__(file, compression)
        #: Text before the value of each column.
        self._keys: list[str] = []
        separator = "{"
        for name in schema.names:
            key = to_json(name).decode()
            self._keys.append(f"{separator}{key}:")
            separator = ","

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        parts: list[Any] = []
        for key, column in zip(self._keys, batch.columns, strict=True):
            parts.append(key)
            parts.append(_json(column))
        parts.append("}")
        nothing = ""
        return pc.binary_join_element_wise(
            *parts,
            nothing,
            null_handling="replace",
            null_replacement="null",
        )


class CsvWriter(_TextWriter):
    """CSV with a header.

    Cells are quoted where needed; nested values are JSON; missing values are empty.
    """

    def __init__(
        self, file: BinaryIO, schema: pa.Schema, compression: str, layout: CsvLayout
    ) -> None:
        super().__init__(file, compression, layout.line_end)
        self._delimiter = layout.delimiter
        self._escapes = layout.escapes
        self._quoted = f'[{layout.delimiter}"\r\n]'
        if layout.has_mark:
            self._stream.write("\ufeff".encode())
        cells = [pa.array([name]) for name in schema.names]
        header = pa.RecordBatch.from_arrays(cells, schema.names)
        self.write(header)

    def _lines(self, batch: pa.RecordBatch) -> pa.Array:
        cells = [self._cells(column) for column in batch.columns]
        return pc.binary_join_element_wise(
            *cells,
            self._delimiter,
            null_handling="replace",
            null_replacement="",
        )

    def _cells(self, column: pa.Array) -> pa.Array:
        texts = as_text(column)
        if self._escapes and column.type in (JSON, TEXT):
            texts = pc.replace_substring_regex(
                texts,
                ESCAPED_FORMULA,
                r"'\1",
                max_replacements=1,
            )
        special = pc.match_substring_regex(texts, self._quoted)
        if not pc.any(special).as_py():
            return texts
        doubled = pc.replace_substring(texts, '"', '""')
        quoted = _in_quotes(doubled)
        return pc.if_else(special, quoted, texts)


def _in_quotes(texts: pa.Array) -> pa.Array:
    separator = ""
    return pc.binary_join_element_wise('"', texts, '"', separator)


Writer = Union[CsvWriter, JsonlWriter, ParquetWriter, "ExcelWriter"]


def _plain_field(field: pa.Field) -> pa.Field:
    """Return the field that `plain_text` makes of a column's field."""
    if field.type == JSON:
        return field.with_type(TEXT)
    return field


def plain_text(column: pa.Array) -> pa.Array:
    """Return a JSON column as text: strings as they are, other values as JSON. Other columns are
    unchanged.
    """
    if column.type != JSON:
        return column
    texts: list[Any] = []
    for text in column.storage.to_pylist():
        if text and text[0] == '"':
            texts.append(from_json(text))
        else:
            texts.append(text)
    return pa.array(texts, TEXT)


def json_column(values: Iterable[Any]) -> pa.Array:
    """Return a column of JSON texts; null for None."""
    texts: list[str | None] = []
    for value in values:
        # most values of some columns are None, and a call takes as long as the rest
        text = None if value is None else _json_text(value)
        texts.append(text)
    storage = pa.array(texts, TEXT)
    return pa.ExtensionArray.from_storage(JSON, storage)


def _json_text(value: Any) -> str:
    try:
        return to_json(value).decode()
    except PydanticSerializationError:  # lone surrogates
        text = json.dumps(value, ensure_ascii=False)
        return text.encode(errors="replace").decode()


def as_text(column: pa.Array) -> pa.Array:
    """Return a column as texts: times in ISO 8601, nested values as JSON."""
    kind = column.type
    if kind == JSON:
        return plain_text(column)
    if kind == TEXT:
        return column
    if is_timestamp(kind):
        texts = time_texts(column)
        return pc.replace_substring_regex(texts, "Z$", "+00:00")
    if is_nested(kind):
        return _json(column)
    if is_boolean(kind) or is_integer(kind) or is_floating(kind):
        return column.cast(TEXT)
    values = values_of(column, leniently)
    return pa.array(values, TEXT)


def _json(column: pa.Array) -> pa.Array:
    """Return a column's values as JSON texts."""
    kind = column.type
    if kind == JSON:
        return column.storage
    if is_floating(kind):
        is_finite = pc.is_finite(column)
        finite = pc.if_else(is_finite, column, None)
        return finite.cast(TEXT)
    if is_integer(kind) or is_boolean(kind):
        return column.cast(TEXT)
    if is_nested(kind):
        values = values_of(column, leniently)
        texts = [_nested_json(value) for value in values]
        return pa.array(texts, TEXT)

    texts = as_text(column)
    special = pc.match_substring_regex(texts, SPECIAL)
    if not pc.any(special).as_py():
        return _in_quotes(texts)
    values = texts.to_pylist()
    return json_column(values).storage


def _nested_json(value: Any) -> str | None:
    """Return a nested value as JSON, with null for infinite numbers; None for None."""
    if value is None:
        return None
    return to_json(value, inf_nan_mode="null").decode()


def text_column(column: pa.Array, is_encoded: bool) -> pa.Array:
    """Return a column of Parquet for an output of text: bytes become texts, and text gets valid
    UTF-8.

    is_encoded: write bytes in Base64.
    """
    decode = as_base64 if is_encoded else leniently
    kind = column.type
    if kind == JSON:
        texts = values_of(column.storage, leniently)
        return json_column(_parse(text) for text in texts)
    if (
        isinstance(kind, pa.BaseExtensionType)
        and kind.extension_name not in TEXT_EXTENSIONS
    ):
        return text_column(column.storage, is_encoded)
    if is_nested(kind):
        values_of_parts = (values_of(part, decode) for part in short_parts(column))
        return json_column(chain.from_iterable(values_of_parts))
    if is_string(kind) or has_binary(kind):
        values = values_of(column, decode)
        return pa.array(values, TEXT)
    return column


def _parse(text: str | None) -> Any:
    """Return the value of a JSON text; the text itself if it is not JSON. Writers of Parquet do
    not check it.

    A very long one stays a text, because a few bytes of JSON can be a list of 60 bytes.
    """
    if text is None or len(text) > MAX_CELL:
        return text
    try:
        return from_json(text)
    except ValueError:
        return text


def schema_of(rows: Iterable[FileRow], form: str) -> pa.Schema:
    """Return a column for each key of JSON records, in order."""
    kinds_of: dict[str, set[type]] = {}
    for row in rows:
        record = row.values
        if not isinstance(record, dict):
            continue
        for key, value in record.items():
            kinds = kinds_of.setdefault(key, set())
            if is_missing(value):
                continue
            kind = type(value)
            if kind is int and abs(value) > MAX_INTEGER:
                kind = str
            kinds.add(kind)

    types = dict.fromkeys(kinds_of, JSON)
    if form == "parquet":
        for key, kinds in kinds_of.items():
            kinds_of_key = frozenset(kinds)
            types[key] = KINDS.get(kinds_of_key, JSON)
    names_and_types = list(types.items())
    return pa.schema(names_and_types)


class RestOfRows:
    """The columns of a Parquet file, read a second time when its rows are written.

    The model reads thousands of rows ahead, of which only the texts are in memory.

    encoded: for an output of text, the columns whose bytes are written in Base64; None for an
    output of Parquet.
    """

    def __init__(self, table: ParquetTable, encoded: Collection[str] | None) -> None:
        self._table = table
        self._batches = table.batches()
        self._encoded = encoded
        #: The batch that is being taken, and its rows that were taken.
        self._batch: pa.RecordBatch | None = None
        self._taken = 0
        #: Cells that are written empty, because they have too many values in lists, by column.
        self.too_long: Counter[str] = Counter()
        #: The columns as they are taken.
        self.schema = table.schema
        if encoded is not None:
            fields: list[pa.Field] = []
            for name, field in zip(table.header, table.schema, strict=True):
                empty = pa.nulls(0, field.type)
                converted = self._as_text(name, empty)
                fields.append(pa.field(name, converted.type))
            self.schema = pa.schema(fields)

    def take(self, count: int) -> Iterator[list[pa.Array]]:
        """Yield the columns of the next rows, in parts.

        Raises InputError if the file is damaged.
        """
        while count > 0:
            batch = self._batch
            if batch is None:
                batch = next(self._batches)
                self._batch = batch
                self._taken = 0
            part = batch.slice(self._taken, count)
            part_rows = part.num_rows
            count -= part_rows
            self._taken += part_rows
            if self._taken == batch.num_rows:
                self._batch = None
            if part_rows:
                columns = self._whole(part)
                yield self._convert(columns)

    def _whole(self, part: pa.RecordBatch) -> list[pa.Array]:
        """Return all columns of the table. Those that could not be decoded are empty.

        Raises InputError if the table says that such a column is never empty, and so must a copy
        in Parquet.
        """
        if part.num_columns == len(self._table.header):
            return list(part.columns)
        columns: list[pa.Array] = []
        for field in self._table.schema:
            name = field.name
            if name in part.schema.names:
                columns.append(part.column(name))
                continue
            if self._encoded is None and not field.nullable:
                reason = self._table.undecodable[name]
                raise InputError(
                    f"Cannot copy column {printable(name)}: {reason}. Write the file "
                    "without this column."
                )
            empty = pa.nulls(part.num_rows, field.type)
            columns.append(empty)
        return columns

    def lost(self) -> dict[str, str]:
        """Return the columns with cells that are empty in the output, with the cells and the
        reason.
        """
        lost = {}
        for name, reason in self._table.undecodable.items():
            lost[name] = f"cannot be decoded, and is empty in the output ({reason})"
        for name, count in self.too_long.items():
            cells = "1 cell" if count == 1 else f"{count:,} cells"
            lost[name] = (
                f"{cells} with more than {MAX_CELL_LISTED:,} values in lists, empty in the output"
            )
        return lost

    def _convert(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        if self._encoded is None:
            return list(columns)
        converted: list[pa.Array] = []
        for name, column in zip(self._table.header, columns, strict=True):
            texts = self._as_text(name, column)
            converted.append(texts)
        return converted

    def _as_text(self, name: str, column: pa.Array) -> pa.Array:
        shorter, too_long = without_long_lists(column)
        if too_long:
            self.too_long[name] += too_long
        encoded = self._encoded or ()
        return text_column(shorter, is_encoded=name in encoded)


class LabelledCopy:
    """Write the rows of a source with their labels to an open file.

    keys: the columns of JSON records, see `schema_of`. new: the columns of the label. batch_rows:
    rows that are written at once. encoded: columns of Parquet whose bytes are not text. has_mark:
    begin CSV with a byte order mark.
    """

    def __init__(
        self,
        file: BinaryIO,
        out: Path,
        form: str,
        source: FileSource,
        keys: pa.Schema,
        new: LabelColumns,
        batch_rows: int = COPIED_ROWS,
        encoded: Collection[str] = (),
        has_mark: bool = False,
    ) -> None:
        table = source.table
        self._source = source
        self._is_parquet = form == "parquet"
        self._new_columns = new
        self._batch_rows = batch_rows
        self._decimals = DECIMALS if form in ("csv", "tsv") else None
        self._rest: RestOfRows | None = None
        if isinstance(table, ParquetTable):
            self._rest = RestOfRows(table, None if self._is_parquet else encoded)
            self._copied_schema = self._rest.schema
        elif table is None:
            self._copied_schema = keys
        else:
            self._copied_schema = _texts(table, form)
        self._new_fields = label_fields(new)
        self._schema = pa.schema(
            [*self._copied_schema, *self._new_fields],
            self._copied_schema.metadata,
        )
        layout = CsvLayout(delimiter_of(form), has_mark=has_mark)
        if isinstance(table, TextTable):
            layout = CsvLayout(
                delimiter="\t" if form == "tsv" else table.delimiter,
                line_end=table.line_end,
                has_mark=source.has_mark or has_mark,
                # A copy keeps the cells of CSV. A sheet's texts are no formulas, but would be
                # in CSV.
                escapes=isinstance(table, SheetTable),
            )
        is_copy = self._rest is not None
        self._writer = writer_to(
            file,
            form,
            self._schema,
            out.suffix.lower(),
            layout,
            is_copy,
        )
        #: Rows that are not written yet, and what they were classified as.
        self._rows: list[FileRow] = []
        self._classifications: list[Classification | None] = []

    def add(self, row: FileRow, classification: Classification | None) -> None:
        """Add a row. Raises InputError if a column that is only copied is damaged."""
        self._rows.append(row)
        self._classifications.append(classification)
        if len(self._rows) >= self._batch_rows:
            self._flush()

    def _flush(self) -> None:
        rows = self._rows
        classifications = self._classifications
        self._rows = []
        self._classifications = []
        if self._rest is None:
            if rows:
                columns = self._copy_columns(rows)
                self._write(columns, classifications)
            return
        start = 0
        for columns in self._rest.take(len(rows)):
            end = start + len(columns[0])
            self._write(columns, classifications[start:end])
            start = end

    def _write(
        self,
        columns: Sequence[pa.Array],
        classifications: Sequence[Classification | None],
    ) -> None:
        new_columns = self._new(classifications)
        batch = pa.RecordBatch.from_arrays(
            [*columns, *new_columns],
            schema=self._schema,
        )
        self._writer.write(batch)

    def _copy_columns(self, rows: Sequence[FileRow]) -> list[pa.Array]:
        """Return the given columns of some rows of CSV or JSON."""
        values: Any = [row.values for row in rows]
        if isinstance(values[0], dict):
            return self._of_records(rows, values)
        columns: list[pa.Array] = []
        for cells in zip(*values, strict=True):
            valid_cells = map(valid, cells)
            column = pa.array(valid_cells, TEXT)
            if self._is_parquet:
                is_empty = pc.equal(column, "")
                column = pc.if_else(is_empty, None, column)
            columns.append(column)
        return columns

    def _of_records(
        self, rows: Sequence[FileRow], records: Sequence[dict[str, Any]]
    ) -> list[pa.Array]:
        """Return the columns of JSON records.

        Raises InputError for a key or a type that the first reading lacked.
        """
        names = set(self._copied_schema.names)
        for row, record in zip(rows, records, strict=True):
            for key in record:
                if key in names:
                    continue
                name = printable(truncate(key))
                raise self._changed_error(
                    f"{self._source.unit} {row.place} has the new key {name}"
                )
        columns: list[pa.Array] = []
        for field in self._copied_schema:
            values = [record.get(field.name) for record in records]
            try:
                column = _array(values, field.type)
            except (ValueError, TypeError, OverflowError):
                name = printable(truncate(field.name))
                raise self._changed_error(
                    f"key {name} has a value of another type near {rows[0].place}"
                ) from None
            columns.append(column)
        return columns

    def _changed_error(self, problem: str) -> InputError:
        return InputError(
            f"{self._source.name} changed while it was read: {problem}. Run the command again."
        )

    def _new(self, classifications: Sequence[Classification | None]) -> list[pa.Array]:
        """Return the new columns of some rows."""
        rows = [
            self._new_columns.values(classification)
            for classification in classifications
        ]
        columns: list[pa.Array] = []
        for index, field in enumerate(self._new_fields):
            values = [row[index] for row in rows]
            column = pa.array(values, field.type)
            if field.type == NUMBER and self._decimals is not None:
                column = pc.round(column, self._decimals)
            columns.append(column)
        return columns

    def rehearse(self) -> None:
        """Write the first row of Parquet without labels, so that what cannot be written is known
        early.
        """
        try:
            if self._rest is not None:
                for columns in self._rest.take(1):
                    self._write(columns, classifications=[None])
            if self._is_parquet:  # writes its rows at the end
                self._writer.close()
        finally:
            self._writer.abandon()

    def lost(self) -> dict[str, str]:
        """Return the columns that could not be copied as a whole, and what is empty in the output
        and why.
        """
        if self._rest is None:
            return {}
        return self._rest.lost()

    def finish(self) -> None:
        """Write the rows that remain, and close. Raises InputError as `add` does."""
        self._flush()
        self.close()

    def close(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        self._writer.abandon()


class JsonCopy(_TextFile):
    """Write JSON records with their labels as JSON lines, each as soon as it is added.

    Keys and values stay.
    """

    def __init__(
        self,
        file: BinaryIO,
        out: Path,
        new: LabelColumns,
    ) -> None:
        super().__init__(file, out.suffix.lower())
        self._new_columns = new
        self._new_keys = new.names

    def add(self, row: FileRow, classification: Classification | None) -> None:
        record: Any = row.values
        # later records are not known beforehand
        for key in self._new_keys:
            if key in record:
                raise UserError(
                    f"A record already has the key {key}. Give --prefix for the names of the "
                    "new keys."
                )
        values = self._new_columns.values(classification)
        new_values = dict(zip(self._new_keys, values, strict=True))
        record = record | new_values
        try:
            line = to_json(record, inf_nan_mode="null")
        except PydanticSerializationError:  # lone surrogates
            line = json.dumps(record).encode()
        self._stream.write(line + b"\n")

    def finish(self) -> None:
        self.close()

    def lost(self) -> dict[str, str]:
        """Return nothing: JSON has no columns that cannot be copied."""
        return {}


def _texts(table: TextTable, form: str) -> pa.Schema:
    """Return the columns of a CSV file or a sheet.

    Names that are empty or repeated are changed, except in CSV.
    """
    fields: list[pa.Field] = []
    names: set[str] = set()
    keeps_names = form in ("csv", "tsv")
    for number, header in enumerate(table.header, 1):
        name = header
        if not keeps_names:
            name = header.strip() or f"column_{number}"
            if name in names:
                name = f"{name}_{number}"
        names.add(name)
        field = pa.field(name, TEXT)
        fields.append(field)
    return pa.schema(fields)


def label_fields(columns: LabelColumns) -> list[pa.Field]:
    """Return the columns of the label with their types."""
    types = {
        columns.label: TEXT,
        columns.best_label: TEXT,
        columns.labels: TEXTS,
        columns.language: TEXT,
    }
    fields: list[pa.Field] = []
    for name in columns.names:
        kind = types.get(name, NUMBER)
        fields.append(pa.field(name, kind))
    return fields


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    cells: list[Any] = []
    for value in values:
        cell = None if is_missing(value) else value
        cells.append(cell)
    if kind == JSON:
        return json_column(cells)
    return pa.array(cells, kind)


def valid(cell: str) -> str:
    """Return a cell with replacement characters for bytes that were not UTF-8."""
    if cell.isascii():
        return cell
    cell_bytes = cell.encode("utf-8", "surrogateescape")
    return cell_bytes.decode(errors="replace")
