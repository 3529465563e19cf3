"""Read Parquet with bounded memory, and convert any of its values without failing.

A file of 3 KB can describe gigabytes: a cell that a dictionary names a thousand times, or a page
that unpacks to 2 GB. So only the columns that are needed become Python values, the rows that are
decoded at once depend on the sizes of the pages, which are read before any page is decoded, and a
page and a cell have a maximum.
"""

import math
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from io import SEEK_END, BufferedReader
from typing import Any, NamedTuple

from pydantic_core import to_json

from feedmill.producers.records import normalize_key
from feedmill.shared.errors import (
    InputError,
    clause,
    explain_missing,
    printable,
    truncate,
)

#: Maximum rows decoded at once, and maximum bytes of them, unless a single row has more.
MAX_ROWS = 1000
MAX_BATCH_BYTES = 1 << 25
#: Maximum characters of a cell. Four bytes can be one character.
MAX_CELL = 2_000_000
MAX_CELL_BYTES = 4 * MAX_CELL
#: Maximum bytes of a page, which is decompressed as a whole. DuckDB writes pages of up to
#: 100,000,000.
MAX_PAGE_BYTES = 1 << 27
#: Maximum values in a page of a column with lists: a few bytes can stand for any number of equal
#: values.
MAX_LISTED_VALUES = 1 << 24
#: Maximum values in lists and maps that become Python's values, at 100 bytes and 1 µs each: so
#: many of a file, and for each byte of it so many more. A kilobyte of equal values can stand for
#: any number of them.
MAX_FILE_LISTED = 1 << 22
LISTED_PER_BYTE = 1 << 9
#: Maximum values in the lists of a cell, which is then within MAX_CELL as text, and of the rows
#: converted at once.
MAX_CELL_LISTED = MAX_CELL // 2
LISTED_AT_ONCE = 1 << 18
#: Bytes read for the header of a page at first, and at most.
HEADER_BYTES = 1 << 8
MAX_HEADER_BYTES = 1 << 20
#: Bytes of the file that are read at once per column.
READ_BYTES = 1 << 16
#: Bytes per value of the types of fixed size.
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
#: Reasons why a cell cannot be read.
TOO_LONG = f"longer than {MAX_CELL:,} characters"
NOT_TEXT = "bytes that are not UTF-8"
#: Errors of Arrow about values that it cannot convert. Damage of the file is an OSError.
UNDECODABLE = (ValueError, NotImplementedError)
#: Numbers of the fields in Parquet's page headers (parquet.thrift): sizes of the page, and its
#: kinds of header with their number of values.
UNCOMPRESSED = 2
COMPRESSED = 3
DATA_PAGES = (5, 8)
VALUES = 1
#: Kinds of values in Thrift's compact encoding, and the sizes of those of fixed size. A boolean is
#: its kind.
BOOLEANS = (1, 2)
INTEGERS = (4, 5, 6)
BINARY = 8
LISTS = (9, 10)
STRUCT = 12
SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
#: Maximum structs and lists within each other. Those of page headers have at most 3.
MAX_DEPTH = 16
#: Maximum bytes of an integer, with 7 of its 64 bits each.
MAX_INTEGER_BYTES = 10


#: Patterns in Arrow's texts of times, and their replacements for ISO 8601, in order: the space
#: before the time, decimals that are zeros, and zones without a colon.
ISO_REPLACEMENTS = (
    (r"^(-?\d+-\d\d-\d\d) ", r"\1T"),
    (r"\.0+(Z|[+-]\d+)?$", r"\1"),
    (r"([+-]\d\d)(\d\d)$", r"\1:\2"),
)


class NotTextError(ValueError):
    """Bytes are not UTF-8."""


class Unreadable(NamedTuple):
    """A cell that cannot be read, and why."""

    reason: str


class ParquetRow(NamedTuple):
    """A row. number: from 1. fields: the readable values by column. problems: the other columns,
    with reasons.
    """

    number: int
    fields: dict[str, Any]
    problems: tuple[tuple[str, str], ...]


class ParquetTable:
    """A Parquet file. binary: stays open while it is read. name: the file's name in errors.

    Raises UserError if pyarrow is not installed, and OSError, ValueError and NotImplementedError
    if the file is damaged, as `rows` does.
    """

    def __init__(self, binary: BufferedReader, name: str) -> None:
        with explain_missing(f"Reading {name}", "tables"):
            import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
        self._binary = binary
        self._name = name
        # Legacy timestamps with nanoseconds would silently wrap around in 2262, and many files end
        # in 9999.
        self._file = pq.ParquetFile(
            binary,
            buffer_size=READ_BYTES,
            coerce_int96_timestamp_unit="us",
        )
        self._metadata = self._file.metadata
        self.schema = self._file.schema_arrow
        self.header = self.schema.names
        #: The largest pages that are known, by the place of their column in the file.
        self._pages: dict[int, Page] = {}
        #: Columns that Arrow cannot decode in some row group, with the reason.
        self.undecodable: dict[str, str] = {}
        #: Rows read so far, and all rows.
        self.read = 0
        self.total = self._metadata.num_rows

    def close(self) -> None:
        self._file.close()

    def rows(self, keys: Collection[str]) -> Iterator[ParquetRow]:
        """Yield the rows with the values of these columns as in JSON. keys: in the form of
        `normalize_key`.

        Raises InputError before the first row if a page is too large.
        """
        names = [name for name in self.header if normalize_key(name) in keys]
        if not names:
            for index in range(self.total):
                yield ParquetRow(
                    number=index + 1,
                    fields={},
                    problems=(),
                )
            return
        self.check_pages(names)
        self.check_lists(names)
        for batch in self._batches(names):
            yield from self._rows_of(batch, names)

    def _columns_of(self, batch: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return the cells of these columns, all `Unreadable` in one that cannot be decoded."""
        columns: dict[str, list[Any]] = {}
        for index, name in enumerate(batch.schema.names):
            column = batch.column(index)
            columns[name] = cells_of(column)
        for name in names:
            if name not in columns:
                reason = self.undecodable[name]
                unreadable = Unreadable(reason)
                columns[name] = [unreadable] * batch.num_rows
        return columns

    def _rows_of(self, batch: Any, names: Sequence[str]) -> Iterator[ParquetRow]:
        columns = self._columns_of(batch, names)
        damaged_columns: list[str] = []
        for name, cells in columns.items():
            if any(type(cell) is Unreadable for cell in cells):
                damaged_columns.append(name)
        for row in zip(*columns.values(), strict=True):
            self.read += 1
            fields = dict(zip(columns, row, strict=True))
            problems: list[tuple[str, str]] = []
            for name in damaged_columns:
                cell = fields[name]
                if type(cell) is Unreadable:
                    problem = (name, cell.reason)
                    problems.append(problem)
                    del fields[name]
            yield ParquetRow(
                number=self.read,
                fields=fields,
                problems=tuple(problems),
            )

    def batches(self) -> Iterator[Any]:
        """Yield record batches of all columns, as they are in the file, but those that cannot be
        decoded.

        Raises InputError if the file is damaged.
        """
        try:
            yield from self._batches(None)
        except (OSError, ValueError, NotImplementedError) as error:
            reason = printable(clause(error))
            raise InputError(
                f"Cannot read {self._name}: {reason}. Check the file, then run the command again."
            ) from None

    def check_pages(self, names: Collection[str] | None = None) -> None:
        """Raise InputError if a page of these columns, or of any, is too large to be decoded."""
        for group in range(self._metadata.num_row_groups):
            for leaf, index in self._leaves(group, names):
                page = self._largest_page(leaf)
                column = printable(leaf.path_in_schema)
                number = group + 1
                where = f"{self._name}: row group {number}, column {column}"
                if page.size > MAX_PAGE_BYTES:
                    raise InputError(
                        f"{where}: a page has {page.size:,} bytes, and at most {MAX_PAGE_BYTES:,} "
                        "are read. Write the file with smaller pages, or without this column."
                    )
                if page.values > MAX_LISTED_VALUES and self._has_lists(index):
                    raise InputError(
                        f"{where}: a page has {page.values:,} values in lists, and at most "
                        f"{MAX_LISTED_VALUES:,} are read. Write the file with smaller pages, or "
                        "without this column."
                    )

    def check_lists(self, names: Collection[str] | None = None) -> None:
        """Raise InputError if lists in these columns, or in any, hold too many values for a file
        of this size.

        Call it before these columns become Python's values; copies within Parquet need no such
        bound.
        """
        size = self._size()
        limit = MAX_FILE_LISTED + size * LISTED_PER_BYTE
        values = 0
        for group in range(self._metadata.num_row_groups):
            for leaf, index in self._leaves(group, names):
                if not self._has_lists(index):
                    continue
                largest_page = self._largest_page(leaf)
                values += max(leaf.num_values, largest_page.all_values)
                if values > limit:
                    column = printable(leaf.path_in_schema)
                    raise InputError(
                        f"{self._name}: row group {group + 1}, column {column}: the lists up to "
                        f"here have {values:,} values, and at most {limit:,} are read from "
                        f"{size:,} bytes. Write the file without this column, or label it with "
                        "an --out that ends in .parquet."
                    )

    def _size(self) -> int:
        """Return the file's size in bytes, and leave its position."""
        position = self._binary.tell()
        size = self._binary.seek(0, SEEK_END)
        self._binary.seek(position)
        return size

    def _has_lists(self, place: int) -> bool:
        """Return whether a stored column is within lists."""
        column = self._file.schema.column(place)
        return bool(column.max_repetition_level > 0)

    def columns_of_bytes(self, limit: int | None = None) -> list[str]:
        """Return the binary columns that hold bytes other than UTF-8 text, in the first `limit`
        rows.
        """
        names = [field.name for field in self.schema if has_binary(field.type)]
        count = len(names)
        if count == 0:
            return []
        of_bytes: list[str] = []
        rows = 0
        for batch in self._batches(names):
            part = batch
            if limit is not None:
                remaining = limit - rows
                part = batch.slice(0, remaining)
            rows += part.num_rows
            columns = zip(part.schema.names, part.columns, strict=True)
            for name, column in columns:
                if name not in names or name in of_bytes:
                    continue
                if not is_text(column):
                    of_bytes.append(name)
            if rows == limit or len(of_bytes) == count:
                break
        return of_bytes

    def _batches(self, names: Collection[str] | None) -> Iterator[Any]:
        """Yield record batches of these columns, or of all, without those that cannot be decoded
        in a row group.
        """
        for group in range(self._metadata.num_row_groups):
            yield from self._batches_of(group, names)

    def _batches_of(self, group: int, names: Collection[str] | None) -> Iterator[Any]:
        rows_at_once = self._rows_at_once(group, names)
        columns: list[str] | None = None
        if names is not None:
            columns = list(names)
        done = 0
        while True:
            to_skip = done
            try:
                batches = self._file.iter_batches(
                    rows_at_once,
                    row_groups=[group],
                    columns=columns,
                )
                for batch in batches:
                    skipped = min(to_skip, batch.num_rows)
                    to_skip -= skipped
                    part = batch.slice(skipped)
                    done += part.num_rows
                    if part.num_rows:
                        yield part
                return
            except UNDECODABLE:
                if columns is None:
                    columns = self.header
                columns = self._decodable(group, columns)
                if not columns:
                    raise

    def _decodable(self, group: int, names: Sequence[str]) -> list[str]:
        """Return the columns that can be decoded in a row group; none if all can, or if two have
        one name.

        Arrow's error names no column, so each one is decoded by itself.
        """
        if len(set(names)) < len(names):
            return []
        decodable = []
        for name in names:
            rows_at_once = self._rows_at_once(group, [name])
            try:
                batches = self._file.iter_batches(
                    rows_at_once,
                    row_groups=[group],
                    columns=[name],
                )
                for _ in batches:
                    pass
                decodable.append(name)
            except UNDECODABLE as error:
                reason = truncate(clause(error))
                reason = printable(reason)
                self.undecodable.setdefault(name, reason)
        if len(decodable) == len(names):
            return []
        return decodable

    def _leaves(
        self, group: int, names: Collection[str] | None
    ) -> Iterator[tuple[Any, int]]:
        """Yield the stored columns of a row group that belong to these columns, with their
        places.
        """
        row_group = self._metadata.row_group(group)
        for index in range(row_group.num_columns):
            leaf = row_group.column(index)
            path = leaf.path_in_schema
            if names is None or _belongs_to(path, names):
                yield leaf, index

    def _rows_at_once(self, group: int, names: Collection[str] | None) -> int:
        """Return how many rows of a row group can be decoded at once within MAX_BATCH_BYTES, at
        least one.
        """
        row_group = self._metadata.row_group(group)
        count = max(1, row_group.num_rows)
        leaves = self._leaves(group, names)
        sizes = [self._size_of(leaf, index, count) for leaf, index in leaves]
        rows = MAX_ROWS
        while rows > 1:
            batch_bytes = 0
            for per_row, most in sizes:
                column_bytes = rows * per_row
                batch_bytes += min(column_bytes, most)
            if batch_bytes <= MAX_BATCH_BYTES:
                break
            rows //= 2
        return rows

    def _size_of(self, leaf: Any, place: int, rows: int) -> tuple[int, int]:
        """Return the maximum bytes of a row of a stored column, on average if it has lists, and of
        all its rows.
        """
        count = leaf.num_values
        values_per_row = math.ceil(count / rows)
        kind = leaf.physical_type
        is_plain = False
        if kind in WIDTHS:
            width = WIDTHS[kind]
        elif kind == "FIXED_LEN_BYTE_ARRAY":
            column = self._file.schema.column(place)
            width = column.length
        else:
            # A cell is at most as long as its page, or as the page of its dictionary, which can be
            # repeated for each row.
            page = self._largest_page(leaf)
            width = page.size
            is_delta = "DELTA_BYTE_ARRAY" in leaf.encodings
            is_plain = not leaf.has_dictionary_page and not is_delta
        per_row = values_per_row * width
        most = count * width
        if is_plain:
            most = leaf.total_uncompressed_size
        return per_row, most

    def _largest_page(self, leaf: Any) -> "Page":
        """Return the size of the largest page, and the most values of a page."""
        start = leaf.data_page_offset
        if leaf.dictionary_page_offset:
            start = min(start, leaf.dictionary_page_offset)
        page = self._pages.get(start)
        if page is None:
            page = self._measure_page(leaf, start)
            self._pages[start] = page
        return page

    def _measure_page(self, leaf: Any, start: int) -> "Page":
        at = start
        end = start + leaf.total_compressed_size
        size = 0
        values = 0
        all_values = 0
        try:
            while at < end:
                page, length = self._page_at(at)
                size = max(size, page.size)
                values = max(values, page.values)
                all_values += max(0, page.values)
                at += length
        # Damaged, even with a place before the file's begin: reading it reports that.
        except (IndexError, KeyError, ValueError, TypeError, OSError, OverflowError):
            size = max(size, leaf.total_uncompressed_size)
        return Page(
            size=size,
            values=values,
            all_values=all_values,
        )

    def _page_at(self, at: int) -> tuple["Page", int]:
        """Return a page's sizes from its header, and the bytes from there to the next page."""
        window = HEADER_BYTES
        while True:
            self._binary.seek(at)
            data = self._binary.read(window)
            try:
                header, length = read_struct(data, 0)
                break
            except IndexError:  # longer: it may have statistics
                ends_here = len(data) < window
                if ends_here or window >= MAX_HEADER_BYTES:
                    raise
                window *= 4
        size = header[UNCOMPRESSED]
        packed = header[COMPRESSED]
        if size < 0 or packed < 0:
            raise ValueError("a negative size")
        counts: list[int] = []
        for kind in DATA_PAGES:
            page_header = header.get(kind, {})
            if not isinstance(page_header, dict):
                raise TypeError("a value instead of the header of a page")
            count = page_header.get(VALUES, 0)
            counts.append(count)
        values = max(counts)
        page = Page(
            size=size,
            values=values,
            all_values=values,
        )
        return page, length + packed


def _belongs_to(path: str, names: Collection[str]) -> bool:
    """Return whether a stored column is one of these columns, or a part of one."""
    if path in names:
        return True
    return any(path.startswith(f"{name}.") for name in names)


class Page(NamedTuple):
    """Bytes and values of the largest page of a column, and the values of all of its pages."""

    size: int
    values: int
    all_values: int


def read_struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Read a struct in Thrift's compact encoding: its values by number, and the place after it.

    depth: structs and lists around it. Raises IndexError if the data ends before it, and
    ValueError.
    """
    _check_depth(depth)
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        kind = data[at] & 15
        step = data[at] >> 4
        at += 1
        if step:
            number += step
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(kind, data, at, depth)
    return fields, at + 1


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} values within each other")


def _value(kind: int, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Read an integer or a struct, or skip another value: only those matter here."""
    if kind in INTEGERS:
        return _integer(data, at)
    if kind == STRUCT:
        return read_struct(data, at, depth + 1)
    return None, _skip_value(kind, data, at, depth)


def _skip_value(kind: int, data: bytes, at: int, depth: int) -> int:
    """Return the place after a value. Raises like `read_struct`."""
    if kind in LISTS:
        return _skip_list(data, at, depth + 1)
    if kind in SIZES:
        length = SIZES[kind]
    elif kind == BINARY:
        length, at = _varint(data, at)
    else:
        raise ValueError(f"an unknown kind of value: {kind}")
    end = at + length
    if end > len(data):
        raise IndexError
    return end


def _skip_list(data: bytes, at: int, depth: int) -> int:
    _check_depth(depth)
    kind = data[at] & 15
    count = data[at] >> 4
    at += 1
    if count == 15:
        count, at = _varint(data, at)
    # Each element has a byte at least.
    if count > len(data) - at:
        raise IndexError
    if kind in BOOLEANS:
        return at + count
    for _ in range(count):
        _, at = _value(kind, data, at, depth)
    return at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    shift = 0
    for byte_at in range(at, at + MAX_INTEGER_BYTES):
        byte = data[byte_at]
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, byte_at + 1
    raise ValueError(f"an integer of more than {MAX_INTEGER_BYTES} bytes")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    zigzag, at = _varint(data, at)
    magnitude = zigzag >> 1
    sign = -(zigzag & 1)
    return magnitude ^ sign, at


def cells_of(column: Any) -> list[Any]:
    """Return a column's values as in JSON, with an `Unreadable` for a cell that is too long or not
    UTF-8.
    """
    if _has_short_cells(column):
        try:
            return values_of(column)
        except NotTextError:
            pass
    cells: list[Any] = []
    for row in range(len(column)):
        part = column.slice(row, 1)
        cells.append(_cell(part))
    return cells


def _has_short_cells(column: Any) -> bool:
    """Return whether no cell is too long; false if that takes a look at each cell."""
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415

    types = pa.types
    kind = column.type
    if types.is_string(kind) or types.is_binary(kind):
        lengths = pc.binary_length(column)
        longest = pc.max(lengths).as_py()
        if longest is None:
            return True
        return bool(longest <= MAX_CELL)
    if types.is_nested(kind) and count_listed(column) > LISTED_AT_ONCE:
        return False
    if types.is_primitive(kind):
        return True
    return bool(column.nbytes <= MAX_CELL)


def _cell(column: Any) -> Any:
    """Return the only value of a column as `cells_of` does."""
    if column.nbytes > MAX_CELL_BYTES:
        return Unreadable(TOO_LONG)
    if count_listed(column) > MAX_CELL_LISTED:
        return Unreadable(TOO_LONG)
    try:
        (value,) = values_of(column)
    except NotTextError:
        return Unreadable(NOT_TEXT)
    if isinstance(value, str) and len(value) > MAX_CELL:
        return Unreadable(TOO_LONG)
    return value


def strictly(data: bytes) -> str:
    """Decode UTF-8. Raises NotTextError."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise NotTextError(NOT_TEXT) from None


def leniently(data: bytes) -> str:
    """Decode UTF-8, with U+FFFD for other bytes."""
    return data.decode(errors="replace")


def as_base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def values_of(column: Any, decode: Callable[[bytes], str] = strictly) -> list[Any]:
    """Return a column's values as in JSON: bytes and dates as text.

    decode: converts bytes to text: `strictly`, `leniently` or `as_base64`. Nothing else can fail.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    types = pa.types
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _extension_values(column, decode)
    if types.is_dictionary(kind):
        words = values_of(column.dictionary, decode)
        indexes = column.indices.to_pylist()
        return _convert(indexes, words.__getitem__)
    if is_bytes(kind) or is_string(kind):
        return _texts(column, decode)
    # By the values inside them: Arrow converts a list one by one, 20 times as slowly.
    if types.is_struct(kind):
        return _struct_values(column, decode)
    if types.is_nested(kind):
        return _list_values(column, decode)
    if types.is_temporal(kind):
        column = time_texts(column)
    elif types.is_decimal(kind):
        column = column.cast(pa.string())
    values: list[Any] = column.to_pylist()
    return values


def _extension_values(column: Any, decode: Callable[[bytes], str]) -> list[Any]:
    if column.type.extension_name == "arrow.uuid":
        uuids = column.to_pylist()
        return _convert(uuids, str)
    return values_of(column.storage, decode)


def _convert(values: Iterable[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Return the converted values. None stays None."""
    return [None if value is None else convert(value) for value in values]


def _texts(column: Any, decode: Callable[[bytes], str]) -> list[Any]:
    """Return texts, and bytes as text."""
    if is_string(column.type):
        try:
            return list(column.to_pylist())
        except UnicodeDecodeError:  # a writer that does not check its texts
            column = _as_binary(column)
            if decode is as_base64:
                decode = leniently
    cells = column.to_pylist()
    return _convert(cells, decode)


def _as_binary(column: Any) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column.cast(pa.binary())


def _struct_values(column: Any, decode: Callable[[bytes], str]) -> list[Any]:
    """Return structs; those with a repeated name become lists of pairs."""
    names = [field.name for field in column.type]
    parts = [values_of(part, decode) for part in column.flatten()]
    rows: Iterable[tuple[Any, ...]] = [()] * len(column)
    if parts:
        rows = zip(*parts, strict=True)
    valid = column.is_valid().to_pylist()
    structs: list[Any] = []
    for row, is_valid in zip(rows, valid, strict=True):
        struct = None
        if is_valid:
            struct = _pairs(names, row)
        structs.append(struct)
    return structs


def _list_values(column: Any, decode: Callable[[bytes], str]) -> list[Any]:
    """Return lists and maps; maps with a repeated key become lists of pairs."""
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415

    is_map = pa.types.is_map(column.type)
    lists = as_list(column)
    lengths = pc.list_value_length(lists).to_pylist()
    valid = lists.is_valid().to_pylist()
    items = lists.flatten()
    if is_map:
        raw_keys = values_of(items.field(0), decode)
        keys = [_key_text(key) for key in raw_keys]
        items = items.field(1)
    values = values_of(items, decode)
    rows: list[Any] = []
    start = 0
    for length, is_valid in zip(lengths, valid, strict=True):
        if length is None or not is_valid:
            rows.append(None)
            continue
        end = start + length
        row: Any = values[start:end]
        if is_map:
            names = keys[start:end]
            row = _pairs(names, row)
        rows.append(row)
        start = end
    return rows


def _pairs(names: Sequence[str], values: Sequence[Any]) -> Any:
    """Return values by name, or a list of pairs if a name is repeated."""
    fields = dict(zip(names, values, strict=True))
    if len(fields) == len(names):
        return fields
    return [list(pair) for pair in zip(names, values, strict=True)]


def _key_text(key: Any) -> str:
    """Return the key of a map as a text, as JSON needs it."""
    if isinstance(key, str):
        return key
    return to_json(key, inf_nan_mode="constants").decode()


def as_list(column: Any) -> Any:
    """Return a map as a list of its pairs, which more of Arrow's functions take; lists are
    unchanged.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    kind = column.type
    if not pa.types.is_map(kind):
        return column
    key = pa.field("key", kind.key_type)
    value = pa.field("value", kind.item_type)
    pair = pa.struct([key, value])
    return column.cast(pa.list_(pair))


def count_listed(column: Any) -> int:
    """Return the number of values in a column's lists and maps, including those in lists within
    lists.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return count_listed(column.storage)
    if pa.types.is_struct(kind):
        return sum(count_listed(part) for part in column.flatten())
    if pa.types.is_nested(kind):
        lists = as_list(column)
        items = lists.flatten()
        return len(items) + count_listed(items)
    return 0


def short_parts(column: Any) -> Iterator[Any]:
    """Yield a column in parts whose lists have few values, so that they can be converted without
    much memory.
    """
    rows = len(column)
    if rows <= 1 or count_listed(column) <= LISTED_AT_ONCE:
        yield column
        return
    half = rows // 2
    first_half = column.slice(0, half)
    second_half = column.slice(half)
    yield from short_parts(first_half)
    yield from short_parts(second_half)


def without_long_lists(column: Any) -> tuple[Any, int]:
    """Return a column with null for cells of more than MAX_CELL_LISTED values in lists, and the
    number of such.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if count_listed(column) <= MAX_CELL_LISTED:
        return column, 0
    parts = []
    too_long = 0
    for part in short_parts(column):
        if count_listed(part) > MAX_CELL_LISTED:
            null = pa.nulls(1, column.type)
            parts.append(null)
            too_long += 1
        else:
            parts.append(part)
    return pa.concat_arrays(parts), too_long


def time_texts(column: Any) -> Any:
    """Return dates, times and durations as texts: ISO 8601 with all stored digits, and "Z" for
    UTC.

    A date that is too far from today is a text with its number; a time in an unknown zone is in
    UTC.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415

    kind = column.type
    text_type = pa.string()
    if not pa.types.is_timestamp(kind):
        return column.cast(text_type)
    try:
        texts = column.cast(text_type)
    # The zone is unknown, or this machine lacks a database of time zones.
    except ValueError:
        utc_type = pa.timestamp(kind.unit, "UTC")
        utc_times = column.cast(utc_type)
        texts = utc_times.cast(text_type)
    for pattern, replacement in ISO_REPLACEMENTS:
        texts = pc.replace_substring_regex(
            texts,
            pattern,
            replacement,
        )
    return texts


def is_text(column: Any) -> bool:
    """Return whether all bytes in a column are UTF-8."""
    try:
        values_of(column)
    except NotTextError:
        return False
    return True


def has_binary(kind: Any) -> bool:
    """Return whether a type is of bytes, or has parts of bytes."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return False
        return has_binary(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return has_binary(kind.value_type)
    if is_bytes(kind):
        return True
    parts = [kind.field(index) for index in range(kind.num_fields)]
    return any(has_binary(part.type) for part in parts)


def is_bytes(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415 - an extra

    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def is_string(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415 - an extra

    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
    )
