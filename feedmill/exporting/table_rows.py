"""Rows of a table of results: their columns, and their values as psycopg expects them."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import pyarrow as pa
import pyarrow.compute as pc

from feedmill.exporting.columns import COLUMNS, FURTHER_COLUMNS
from feedmill.exporting.files import STORED_AT, TIME, schema_of
from feedmill.tables.writing import JSON, TEXTS

#: The columns of a table: those of every export, and the time at which the result was stored in
#: Redis.
SCHEMA = schema_of((*COLUMNS, *FURTHER_COLUMNS)).append(STORED_AT)
KEY = ("id", "fingerprint")
ARROW_TYPES: dict[pa.DataType, LiteralString] = {
    pa.string(): "text", pa.int64(): "bigint", pa.float64(): "float8", pa.bool_(): "boolean",
    TIME: "timestamptz",
    JSON: "jsonb",
    TEXTS: "text[]",
}  # fmt: skip
#: Column -> type.
TYPES = {field.name: ARROW_TYPES[field.type] for field in SCHEMA}
#: Type -> types of its values in JSON.
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,), "jsonb": (str,), "timestamptz": (str,),
    "text[]": (list,), "bigint": (int,), "float8": (int, float), "boolean": (bool,),
}  # fmt: skip
EPOCH = datetime(
    1970,
    1,
    1,
    tzinfo=UTC,
)
#: Text that PostgreSQL cannot store, and its replacement; and NUL in JSON, after any
#: escaped backslashes.
NUL = "\0"
REPLACEMENT = "\ufffd"
NUL_IN_JSON = re.compile(r"((?<!\\)(?:\\\\)*)\\u0000")

#: A row's values, in the order of TYPES.
Row = tuple[Any, ...]


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return a batch's rows, without all but the last one of each result: an INSERT cannot update
    a row twice.

    The stream has a result twice if it was classified again, or if Redis lost its data and the
    worker repeated its last writes.
    """
    columns = [_values(column) for column in batch.columns]
    rows: dict[tuple[str, str], Row] = {}
    for row in zip(*columns, strict=True):
        rows[key_of(row)] = row
    return list(rows.values())


def key_of(row: Row) -> tuple[str, str]:
    """Return what identifies a row: its id and fingerprint."""
    post_id = value_of(row, "id")
    fingerprint = value_of(row, "fingerprint")
    return post_id, fingerprint


def value_of(row: Row, column: str) -> Any:
    return row[_PLACES[column]]


_PLACES = {column: place for place, column in enumerate(TYPES)}


def _values(column: pa.Array) -> list[Any]:
    """Return a column's values as psycopg expects them, without NUL in texts."""
    if column.type == TIME:
        microseconds = column.cast(pa.int64()).to_pylist()
        return [_time(count) for count in microseconds]
    if column.type == JSON:
        texts = column.storage.to_pylist()
        return [_without_nul(text) for text in texts]
    if column.type == TEXTS:
        lists = column.to_pylist()
        return [_texts_without_nul(texts) for texts in lists]
    if column.type == pa.string():
        column = pc.replace_substring(column, NUL, REPLACEMENT)
    return list(column.to_pylist())


def _time(microseconds: int | None) -> datetime | None:
    if microseconds is None:
        return None
    return EPOCH + timedelta(microseconds=microseconds)


def _without_nul(text: str | None) -> str | None:
    """Return a JSON text with a replacement character for each NUL."""
    if text is None:
        return None
    return NUL_IN_JSON.sub(r"\1\\ufffd", text)


def _texts_without_nul(texts: list[str] | None) -> list[str] | None:
    if texts is None:
        return None
    return [text.replace(NUL, REPLACEMENT) for text in texts]


def as_json(row: Row) -> str:
    """Return a row as JSON, by column."""
    values = dict(zip(TYPES, row, strict=True))
    return json.dumps(values, default=datetime.isoformat)


def from_json(text: str) -> Row:
    """Return the row that `as_json` wrote. Columns that it did not know are empty.

    Raises ValueError if the text is damaged.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("not an object")
    row = []
    for column, type_name in TYPES.items():
        value = values.get(column)
        if value is None and column in KEY:
            raise ValueError(f"{column} is missing")
        if value is not None:
            if not _has_type(value, type_name):
                raise ValueError(f"{column} is not of the type {type_name}")
            if type_name == "timestamptz":
                value = datetime.fromisoformat(value)
        row.append(value)
    return tuple(row)


def _has_type(value: Any, type_name: str) -> bool:
    """Return whether a value of JSON can be stored in a column of this type."""
    if type(value) not in JSON_TYPES[type_name]:
        return False
    if type_name == "text[]":
        return all(isinstance(text, str) for text in value)
    is_too_large = type_name == "bigint" and not -(2**63) <= value < 2**63
    return not is_too_large
