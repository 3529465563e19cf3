"""Convert results to Arrow record batches. Imported only by an export, because pyarrow takes time to import."""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

from feedmill.export.columns import COLUMNS, POST_FIELDS, label_set_of
from feedmill.reading.rows import ResultRow, seconds_of
from feedmill.tables.writing import JSON, json_column

TEXT, NUMBER, TIME = pa.string(), pa.float64(), pa.timestamp("us", tz="UTC")
SCORES = pa.map_(TEXT, NUMBER)
TYPES = dict.fromkeys(COLUMNS, TEXT) | dict.fromkeys(("date", "edited", "classified_at"), TIME)
TYPES |= dict.fromkeys(("stickied", "nsfw", "spoiler"), pa.bool_()) | dict.fromkeys(("extra", "scores"), JSON)
TYPES |= {"label_score": NUMBER, "queued_seconds": NUMBER, "score": pa.int64()}
#: Columns of some sinks only: when the result was stored, and the id of its stream entry, which is not written.
STORED_AT, ENTRY = pa.field("stored_at", TIME), pa.field("feedmill:entry", TEXT)
COMPUTED: dict[str, Callable[[ResultRow], Any]] = {
    "label_score": lambda row: row.found["scores"][row.found["label"]],
    "label_set": lambda row: label_set_of(row.found),
    STORED_AT.name: lambda row: seconds_of(row.entry),
    ENTRY.name: lambda row: row.entry,
}


def schema_of(columns: Sequence[str], parquet: bool = False) -> pa.Schema:
    """Return the schema of these columns; those of the user's own hold JSON. parquet: with the scores as a map."""
    types = TYPES | {"scores": SCORES} if parquet else TYPES
    return pa.schema([pa.field(column, types.get(column, JSON)) for column in columns])


def batch_of(rows: Sequence[ResultRow], schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to a batch, by column: by row it takes ten times as long."""
    return pa.RecordBatch.from_arrays([_array(rows, field) for field in schema], schema=schema)


def _array(rows: Sequence[ResultRow], field: pa.Field) -> pa.Array:
    if field.type == JSON and field.name not in COLUMNS:
        return json_column((row.post.get("extra") or {}).get(field.name) for row in rows)
    values = _values(rows, field.name)
    if field.type == SCORES:
        offsets = list(accumulate(map(len, values), initial=0))
        labels, numbers = chain.from_iterable(values), chain.from_iterable(map(dict.values, values))
        return pa.MapArray.from_arrays(offsets, pa.array(labels, TEXT), pa.array(numbers, NUMBER))
    if field.type == JSON:
        return json_column(values)
    if field.type == TIME:
        values = [None if seconds is None else round(seconds * 1_000_000) for seconds in values]
    return pa.array(values, field.type)


def _values(rows: Sequence[ResultRow], column: str) -> list[Any]:
    """Return a column's values as they are stored: times in seconds since 1970."""
    if column in POST_FIELDS:
        field, default = POST_FIELDS[column]
        return [row.post.get(field, default) for row in rows]
    if column in COMPUTED:
        return [*map(COMPUTED[column], rows)]
    return [row.found.get(column) for row in rows]
