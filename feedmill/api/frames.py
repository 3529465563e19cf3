"""Read texts from data frames and add columns to them, with narwhals: pandas, polars, pyarrow, DuckDB and others."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import narwhals as nw

from feedmill.api.items import FIELDS, Item, item_of
from feedmill.producers.records import Columns, check_columns, listed, normalize_column
from feedmill.shared.errors import InputError, UserError
from feedmill.tables.labels import check_new_columns, label_columns

if TYPE_CHECKING:
    from feedmill.api.predictions import Prediction

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
        self._names = {normalize_column(str(name)): name for name in frame.columns}

    def __len__(self) -> int:
        return len(self._frame)

    def items(self, columns: Columns) -> Iterator[Item]:
        """Yield an item for each row. Raises InputError, before the first row, if no column has text."""
        if len(self._names) == 1 and not (columns.text or columns.texts_among(self._names)):
            columns = columns._replace(body=next(iter(self._names)))
        check_columns("The frame", self._frame.columns, columns, flag="{}=")
        for key in columns.texts_among(self._names):
            column = self._frame.get_column(self._names[key])
            if not isinstance(column.dtype, TEXT_TYPES) and column.null_count() < len(column):
                raise InputError(
                    f"The column {listed([self._names[key]])!r} has the type {column.dtype}, not text. Name the text "
                    "column with title= or body=, or convert the column to text first."
                )
        return self._items(columns)

    def _items(self, columns: Columns) -> Iterator[Item]:
        wanted = {name for field in FIELDS for name in columns.names_of(field)}
        read = {key: self._frame.get_column(name) for key, name in self._names.items() if key in wanted}
        for start in range(0, len(self), ROWS_AT_ONCE):
            part = [column[start : start + ROWS_AT_ONCE].to_list() for column in read.values()]
            for position, values in enumerate(zip(*part, strict=True), start):
                yield item_of(dict(zip(read, values, strict=True)), position, columns)

    def check_new(self, labels: Sequence[str], prefix: str) -> None:
        """Raise UserError if the frame has one of the columns that `labelled` adds."""
        check_new_columns("The frame", self._frame.columns, label_columns(labels, prefix), "prefix=")

    def labelled(self, found: Iterable["Prediction"], labels: Sequence[str], prefix: str) -> Any:
        """Return the frame with the label, its score and the scores of `labels`; None is missing.

        The rows keep their order and their index. Raises UserError, before the first row, as `check_new` does.
        """
        self.check_new(labels, prefix)
        label, *scores = label_values(found, labels, prefix).items()
        package = self._frame.implementation
        new = [nw.new_series(*label, nw.String, backend=package)]
        new += [nw.new_series(*column, nw.Float64, backend=package) for column in scores]
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


def label_values(found: Iterable["Prediction"], labels: Sequence[str], prefix: str = "") -> dict[str, list[Any]]:
    """Return the columns of some predictions: the label, its score and the scores of `labels`."""
    names = label_columns(labels, prefix)
    rows = [(each.label, each.score, *map(each.scores.get, labels)) for each in found]
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {name: [] for name in names}


def make_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a frame of pandas, or of polars if only that is installed. Raises UserError if neither is."""
    for package in ("pandas", "polars"):
        with suppress(ImportError):
            return import_module(package).DataFrame(dict(columns))
    raise UserError("to_frame requires pandas or polars: run `pip install pandas`.")
