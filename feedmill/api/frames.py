"""Read texts from frames of pandas, polars and pyarrow, and add columns to them. Imports none of these packages."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

from feedmill.api.items import TEXT_FIELDS, Columns, Item, make_item, type_of
from feedmill.producers.records import FIELD_ALIASES, normalize_key
from feedmill.shared.errors import InputError, UserError, similar_name, truncate

#: Rows converted to Python objects at once.
ROWS_AT_ONCE = 10_000
#: Name of a Series' column, if the Series has no name.
SERIES_NAME = "text"
#: Columns of a frame, one row of which could be taken for a column of texts.
MAX_ROW_COLUMNS = 1000
#: Columns named in an error.
MAX_COLUMNS_NAMED = 8


class Table(Protocol):
    """A frame of any of the packages."""

    names: list[Any]
    #: The frame was made of a Series.
    is_series: bool = False

    def __len__(self) -> int: ...

    def kind(self, at: int) -> str | None:
        """Return the type of a column that holds no text; None if it may hold some, or if all values are missing."""

    def values(self, at: int) -> Iterator[Any]:
        """Yield the values of the column at this place."""

    def with_columns(self, texts: Mapping[str, Sequence[Any]], numbers: Mapping[str, Sequence[float]]) -> Any:
        """Return the frame with more columns: texts, where None is missing, then numbers, where NaN is missing.

        The rows keep their order and their index.
        """


class PandasTable(Table):
    def __init__(self, pandas: Any, frame: Any) -> None:
        self._pandas, self._frame = pandas, frame
        self.names = list(frame.columns)

    def __len__(self) -> int:
        return len(self._frame)

    def kind(self, at: int) -> str | None:
        column, types = self._frame.iloc[:, at], self._pandas.api.types
        checks = (types.is_numeric_dtype, types.is_datetime64_any_dtype, types.is_timedelta64_dtype)
        holds_others = any(check(column.dtype) for check in checks)
        return str(column.dtype) if holds_others and column.notna().any() else None

    def values(self, at: int) -> Iterator[Any]:
        for start in range(0, len(self), ROWS_AT_ONCE):
            yield from self._frame.iloc[start : start + ROWS_AT_ONCE, at].tolist()

    def with_columns(self, texts: Mapping[str, Sequence[Any]], numbers: Mapping[str, Sequence[float]]) -> Any:
        # Without the index of the new columns, so that rows are matched by position.
        made = {name: self._pandas.Series(values, dtype="float64").array for name, values in numbers.items()}
        below = [""] * (self._frame.columns.nlevels - 1)
        frame = self._frame.copy()
        for name, values in {**texts, **made}.items():
            frame[(name, *below) if below else name] = values
        return frame


class PolarsTable(Table):
    def __init__(self, polars: Any, frame: Any) -> None:
        self._polars, self._frame = polars, frame
        self.names = list(frame.columns)

    def __len__(self) -> int:
        return int(self._frame.height)

    def kind(self, at: int) -> str | None:
        column, polars = self._frame.to_series(at), self._polars
        kind = column.dtype
        holds_text = kind in (polars.String, polars.Categorical, polars.Enum, polars.Object, polars.Null)
        return None if holds_text or column.null_count() == len(column) else str(kind)

    def values(self, at: int) -> Iterator[Any]:
        for start in range(0, len(self), ROWS_AT_ONCE):
            yield from self._frame.to_series(at).slice(start, ROWS_AT_ONCE).to_list()

    def with_columns(self, texts: Mapping[str, Sequence[Any]], numbers: Mapping[str, Sequence[float]]) -> Any:
        polars = self._polars
        made = [polars.Series(name, values, dtype=polars.String) for name, values in texts.items()]
        made += [
            polars.Series(name, list(values), dtype=polars.Float64).fill_nan(None) for name, values in numbers.items()
        ]
        return self._frame.with_columns(made)


class ArrowTable(Table):
    def __init__(self, pyarrow: Any, frame: Any) -> None:
        self._pyarrow, self._frame = pyarrow, frame
        self.names = list(frame.column_names)

    def __len__(self) -> int:
        return int(self._frame.num_rows)

    def kind(self, at: int) -> str | None:
        column, types = self._frame.column(at), self._pyarrow.types
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        checks = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
        return None if any(check(kind) for check in checks) or column.null_count == len(column) else str(kind)

    def values(self, at: int) -> Iterator[Any]:
        for start in range(0, len(self), ROWS_AT_ONCE):
            yield from self._frame.column(at).slice(start, ROWS_AT_ONCE).to_pylist()

    def with_columns(self, texts: Mapping[str, Sequence[Any]], numbers: Mapping[str, Sequence[float]]) -> Any:
        pyarrow, frame = self._pyarrow, self._frame
        for name, values in texts.items():
            frame = frame.append_column(name, pyarrow.array(values, pyarrow.string()))
        for name, scores in numbers.items():
            frame = frame.append_column(name, pyarrow.array(scores, pyarrow.float64(), from_pandas=True))
        return frame


def table_of(given: Any) -> Table | None:
    """Return a frame or a Series as a table; None if it is neither. Raises InputError for tables of other packages."""
    pandas: Any = sys.modules.get("pandas")
    polars: Any = sys.modules.get("polars")
    pyarrow: Any = sys.modules.get("pyarrow")
    if pandas is not None and isinstance(given, pandas.DataFrame):
        return PandasTable(pandas, given)
    if polars is not None and isinstance(given, polars.DataFrame):
        return PolarsTable(polars, given)
    if pyarrow is not None and isinstance(given, pyarrow.Table):
        return ArrowTable(pyarrow, given)
    if pandas is not None and isinstance(given, pandas.Series) and _is_row(given):
        raise InputError(
            "The Series is a row of a DataFrame, not a column. Give its to_dict(), or the DataFrame's rows, as in "
            "frame.iloc[[0]]."
        )
    series: Table | None = None
    if pandas is not None and isinstance(given, pandas.Series):
        series = PandasTable(pandas, given.to_frame(SERIES_NAME if given.name is None else given.name))
    if polars is not None and isinstance(given, polars.Series):
        series = PolarsTable(polars, given.to_frame(given.name or SERIES_NAME))
    if series is not None:
        series.is_series = True
        return series
    kind = type_of(given)
    if polars is not None and isinstance(given, polars.LazyFrame):
        raise InputError(f"A {kind} has no rows yet. Call its collect() first.")
    if hasattr(given, "columns"):  # iterating it would yield the names of its columns
        raise InputError(f"Cannot read a {kind}. Convert it to a pandas or polars DataFrame first.")
    return None


def _is_row(series: Any) -> bool:
    """Return whether a pandas Series is a row of a frame: it is indexed by the names of columns with text."""
    known = {name for field in TEXT_FIELDS for name in FIELD_ALIASES[field]}
    return len(series) <= MAX_ROW_COLUMNS and any(normalize_key(str(name)) in known for name in series.index)


def frame_package() -> Any:
    """Return pandas, or polars if only that is installed. Raises UserError if neither is."""
    try:
        import pandas  # noqa: PLC0415 - optional

        return pandas
    except ImportError:
        pass
    try:
        import polars  # noqa: PLC0415 - optional

        return polars
    except ImportError:
        raise UserError("to_frame requires pandas or polars: run `pip install pandas`.") from None


def make_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a frame of pandas, or of polars if only that is installed. Raises UserError if neither is."""
    return frame_package().DataFrame(dict(columns))


def rows_of(table: Table, columns: Columns) -> Iterator[Item]:
    """Yield an item for each row. Raises InputError, before the first row, if no column has text."""
    places = _text_columns(table, columns)
    for field in TEXT_FIELDS:
        for at in places[field]:
            if (kind := table.kind(at)) and table.is_series:
                raise InputError(f"The Series has the type {kind}, not text. Convert it to text first.")
            if kind:
                raise InputError(
                    f"The column {_quoted(table.names[at])} has the type {kind}, not text. Name the text column with "
                    "title= or body=, or convert the column to text first."
                )
    return _rows(table, places["title"], places["body"], _id_column(table, columns))


def _rows(table: Table, titles: list[int], bodies: list[int], id_column: int | None) -> Iterator[Item]:
    def values(columns: list[int]) -> Iterator[tuple[Any, ...]]:
        return zip(*map(table.values, columns), strict=True) if columns else repeat(())

    ids = repeat(None) if id_column is None else table.values(id_column)
    for position, title, body, own_id in zip(range(len(table)), values(titles), values(bodies), ids, strict=False):
        yield make_item(position, title, body, own_id)


def _text_columns(table: Table, columns: Columns) -> dict[str, list[int]]:
    """Return the places of the columns that may hold each text field, in order of preference. Raises InputError."""
    if columns.names_text:
        named = {field: _named(table, getattr(columns, field), field) for field in TEXT_FIELDS}
        return {field: [] if at is None else [at] for field, at in named.items()}
    known = {normalize_key(str(name)): at for at, name in reversed(list(enumerate(table.names)))}
    found = {field: [known[name] for name in FIELD_ALIASES[field] if name in known] for field in TEXT_FIELDS}
    for at in (*found["title"], *found["body"]):
        _check_unique(table, table.names[at])
    if not any(found.values()):
        if len(table.names) == 1:
            return {"title": [], "body": [0]}
        raise InputError(
            f"The frame has no column that is known to hold text (title, body, text, …). Name it with title= or body=. "
            f"{_columns_of(table)}"
            if table.names
            else "The frame has no columns. Give one with a column of texts."
        )
    return found


def _id_column(table: Table, columns: Columns) -> int | None:
    """Return the place of the column with ids, by the names that files use, unless one is named. Raises InputError."""
    if columns.id is not None or table.is_series:
        return _named(table, columns.id, "id")
    known = {normalize_key(str(name)): at for at, name in reversed(list(enumerate(table.names)))}
    place = next((known[name] for name in FIELD_ALIASES["id"] if name in known), None)
    if place is not None:
        _check_unique(table, table.names[place])
    return place


def _named(table: Table, name: Any, argument: str) -> int | None:
    """Return the place of the column that the caller named. Raises InputError."""
    if name is None:
        return None
    if name not in table.names:
        raise InputError(
            f"{argument}={truncate(repr(name))}: the frame has no such column.{_suggestion(table, name)} "
            f"{_columns_of(table)}"
        )
    _check_unique(table, name)
    return table.names.index(name)


def _columns_of(table: Table) -> str:
    return f"Its columns are: {_listed(table.names)}." if table.names else "It has no columns."


def _suggestion(table: Table, name: Any) -> str:
    names = [each for each in table.names if isinstance(each, str)]
    found = similar_name(name, names) if isinstance(name, str) else None
    return "" if found is None else f" Did you mean {_quoted(found)}?"


def _check_unique(table: Table, name: Any) -> None:
    if Counter(table.names)[name] > 1:
        raise InputError(f"The frame has several columns named {_quoted(name)}. Rename all but one of them.")


def check_new_columns(table: Table, new: Sequence[str], prefix: str) -> None:
    """Raise InputError if the frame has one of these columns already."""
    if clash := [name for name in new if name in table.names]:
        hint = "Rename or drop it, or" if len(clash) == 1 else "Rename or drop them, or"
        example = "predicted_" if prefix != "predicted_" else "feedmill_"
        raise InputError(
            f"The frame already has the column{'s' if len(clash) > 1 else ''} {_listed(clash)}. {hint} name the new "
            f"columns differently, for example with prefix={example!r}."
        )


def _quoted(name: Any) -> str:
    return truncate(repr(name), 60)


def _listed(names: Sequence[Any]) -> str:
    shown = ", ".join(map(_quoted, names[:MAX_COLUMNS_NAMED]))
    return f"{shown}, …" if len(names) > MAX_COLUMNS_NAMED else shown
