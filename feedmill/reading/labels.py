"""Explain a label that no result has."""

from collections import Counter

from feedmill.reading.entry_ids import id_before
from feedmill.reading.rows import RowReader
from shared.errors import printable, similar_name
from shared.scripts.stream import Place

#: Labels that a message names.
MAX_LABELS = 50


def unknown_label(reader: RowReader, label: str, run: str | None) -> str | None:
    """Return a message if no result in the stream, or of the run, has this label; else None.

    Raises redis.exceptions.RedisError.
    """
    rows = (row for chunk in reader.chunks(Place(id_before(0.0))) for row in chunk.rows)
    labels = Counter(row.found["label"] for row in rows if run in (None, row.post.get("run")))
    if label in labels:
        return None
    near = similar_name(label, list(labels))
    meant = "" if near is None else f" Did you mean {_named(near)}?"
    return f"No result has the label {_named(label)}.{meant} Labels seen: {_first(labels)}."


def _named(name: str) -> str:
    return printable(f"{name!r:.80}")


def _first(labels: Counter[str]) -> str:
    """Return the most frequent labels."""
    shown = printable(", ".join(label for label, _ in labels.most_common(MAX_LABELS)))
    return f"{shown}, …" if len(labels) > MAX_LABELS else shown or "none"
