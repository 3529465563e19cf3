"""Read texts from data frames and add columns to them, with narwhals: pandas, polars, pyarrow, DuckDB and others."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import narwhals as nw

from feedmill.api.items import TEXT_FIELDS, Item, make_item
from feedmill.producers.records import Columns, check_columns, listed, normalize_column
from feedmill.shared.errors import InputError, UserError

#: Rows converted to Python objects at once.
ROWS_AT_ONCE = 10_000
#: Name of a Series' column, if the Series has no name.
SERIES_NAME = "text"
#: Types of columns that may hold text.
TEXT_TYPES = (nw.String, nw.Categorical, nw.Enum, nw.Object, nw.Unknown)


class Table:
    """A frame of any package."""

    def __init__(self, frame: nw.DataFrame[Any]) -> None:
        self._frame = frame
        self.names: list[Any] = frame.columns

    def __len__(self) -> int:
        return len(self._frame)

    def items(self, columns: Columns) -> Iterator[Item]:
        """Yield an item for each row. Raises InputError, before the first row, if no column has text."""
        places = self._places(columns)
        for name in (*places["title"], *places["body"]):
            column = self._frame.get_column(name)
            if not isinstance(column.dtype, TEXT_TYPES) and column.null_count() < len(column):
                raise InputError(
                    f"The column {listed([name])!r} has the type {column.dtype}, not text. Name the text column with "
                    "title= or body=, or convert the column to text first."
                )
        return self._items(places)

    def _places(self, columns: Columns) -> dict[str, list[Any]]:
        """Return the names of the columns that may hold each field, in order of preference. Raises InputError."""
        known = {normalize_column(str(name)): name for name in self.names}
        if len(known) == 1 and not (columns.text or columns.texts_among(known)):
            return {"title": [], "body": self.names, "id": []}
        check_columns("The frame", self.names, columns, flag="{}=")
        fields = {field: columns.names_of(field) for field in (*TEXT_FIELDS, "id")}
        return {field: [known[name] for name in names if name in known] for field, names in fields.items()}

    def _items(self, places: Mapping[str, list[Any]]) -> Iterator[Item]:
        columns = {name: self._frame.get_column(name) for names in places.values() for name in names}
        for start in range(0, len(self), ROWS_AT_ONCE):
            part = [column[start : start + ROWS_AT_ONCE].to_list() for column in columns.values()]
            for position, values in enumerate(zip(*part, strict=True), start):
                row = dict(zip(columns, values, strict=True))
                title, body, ids = ([row[name] for name in names] for names in places.values())
                yield make_item(position, title, body, ids)

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> Any:
        """Return the frame with more columns, the first of text, the others of numbers; None is missing.

        The rows keep their order and their index.
        """
        package = self._frame.implementation
        label, *scores = columns.items()
        new = [nw.new_series(*label, nw.String, backend=package)]
        new += [nw.new_series(name, values, nw.Float64, backend=package) for name, values in scores]
        frame = self._frame.with_columns(*new).to_native()
        if attributes := getattr(self._frame.to_native(), "attrs", None):  # of pandas: narwhals does not copy them
            frame.attrs = attributes
        return frame


def table_of(given: Any) -> Table | None:
    """Return a frame or a Series as a table; None if it is neither. Raises InputError for columns of one name."""
    allow_series = hasattr(given, "to_frame")
    try:
        frame: Any = nw.from_native(given, pass_through=True, allow_series=allow_series)
    except nw.exceptions.DuplicateError as error:
        raise InputError(f"The frame has several columns of one name ({error}). Rename all but one of them.") from None
    if isinstance(frame, nw.LazyFrame):
        frame = frame.collect()
    if isinstance(frame, nw.Series):
        frame = (frame if frame.name else frame.alias(SERIES_NAME)).to_frame()
    return Table(frame) if isinstance(frame, nw.DataFrame) else None


def make_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a frame of pandas, or of polars if only that is installed. Raises UserError if neither is."""
    for package in ("pandas", "polars"):
        with suppress(ImportError):
            return import_module(package).DataFrame(dict(columns))
    raise UserError("to_frame requires pandas or polars: run `pip install pandas`.")
