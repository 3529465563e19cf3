"""The columns of a results table in PostgreSQL: their types, and their values as psycopg expects them."""

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any, LiteralString

from psycopg.sql import SQL, Composable, Identifier
from pydantic_core import to_json

from feedmill.export.text import POST_FIELDS, RESULT_COLUMNS, TIME_COLUMNS, label_set_of
from feedmill.reading.entry_ids import seconds_of
from feedmill.reading.rows import ResultRow

#: Column -> type. `stored_at` is the time at which the result was stored in Redis.
TYPES: dict[str, LiteralString] = dict.fromkeys((*POST_FIELDS, *RESULT_COLUMNS), "text") | dict.fromkeys(
    TIME_COLUMNS, "timestamptz"
)
TYPES |= dict.fromkeys(("stickied", "nsfw", "spoiler"), "boolean") | dict.fromkeys(("extra", "scores"), "jsonb")
TYPES |= {"score": "bigint", "label_score": "float8", "queued_seconds": "float8", "stored_at": "timestamptz"}
#: Columns that identify a result.
KEY = ("id", "fingerprint")
REQUIRED = {"id", "label", "scores", "fingerprint", "stored_at"}
#: What PostgreSQL cannot store in text, and what it stores instead.
NUL, REPLACEMENT = "\0", "\ufffd"


def names(columns: Collection[str]) -> Composable:
    """Return the columns' names, separated by commas."""
    return SQL(", ").join(map(Identifier, columns))


def definition(name: str, optional: bool = False) -> Composable:
    """Return a column's definition. optional: without its NOT NULL."""
    required = SQL(" NOT NULL") if name in REQUIRED and not optional else SQL("")
    return SQL("{} {}{}").format(Identifier(name), SQL(TYPES[name]), required)


def as_text(value: str | None) -> str | None:
    """Replace what PostgreSQL cannot store."""
    return value and value.replace(NUL, REPLACEMENT)


def as_time(seconds: float | None) -> datetime | None:
    """Convert seconds since 1970."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def to_jsonb(value: object) -> bytes:
    """Serialize JSON for jsonb, which rejects NUL in strings."""
    text = to_json(value)
    return to_json(_without_nul(value)) if b"\\u0000" in text else text


def _without_nul(value: Any) -> Any:
    if isinstance(value, dict):
        return {as_text(name): _without_nul(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_without_nul, value))
    return as_text(value) if isinstance(value, str) else value


#: Type -> conversion of its values. psycopg converts the others.
CONVERSIONS: dict[str, Callable[[Any], object]] = {"text": as_text, "timestamptz": as_time}
#: Field of a post, its default and its conversion, for each column; then column and conversion of a result.
POST_VALUES = [(*field, CONVERSIONS.get(TYPES[column])) for column, field in POST_FIELDS.items()]
FOUND_VALUES = [(column, CONVERSIONS.get(TYPES[column])) for column in (*RESULT_COLUMNS, "stored_at")]


def values_of(row: ResultRow) -> list[object]:
    """Return a row's values in the order of TYPES."""
    post, scores = row.post, row.found["scores"]
    found = row.found | {
        "label_score": scores[row.found["label"]],
        "label_set": label_set_of(row.found),
        "stored_at": seconds_of(row.entry),
    }
    values = [
        post.get(field, default) if convert is None else convert(post.get(field, default))
        for field, default, convert in POST_VALUES
    ]
    values += [found.get(column) if convert is None else convert(found.get(column)) for column, convert in FOUND_VALUES]
    return values
