"""Check the names of runs and labels that users give, and suggest similar ones. Raises redis.exceptions.RedisError."""

from collections import Counter

from redis import Redis

from feedmill.reading.rows import RowReader
from feedmill.shared import runs
from feedmill.shared.errors import UserError, printable, similar_name
from feedmill.shared.scripts.stream import Place

#: Labels and recent runs that a message names.
MAX_LABELS, MAX_RUNS = 50, 5
BEGINNING = Place("0-0")


def check_run(redis: Redis, run: str) -> None:
    """Raise UserError if there is no such run. Its results may outlive its counts."""
    if runs.progress(redis, run) is None:
        rows = (row for chunk in RowReader(redis).chunks(BEGINNING) for row in chunk.rows)
        if all(row.post.get("run") != run for row in rows):
            raise UserError(unknown_run(redis, run))


def unknown_run(redis: Redis, run: str) -> str:
    """Return a message about a run that does not exist."""
    names = [progress.run for progress in runs.recent(redis, runs.MAX_RUNS)]
    similar = similar_name(run, names)
    hint = f"Did you mean {similar!r}?" if similar else f"Recent runs: {', '.join(names[:MAX_RUNS]) or 'none'}."
    return printable(f"There is no run {run!r}, or its posts were sent too long ago. {hint}")


def unknown_label(reader: RowReader, label: str, run: str | None) -> str | None:
    """Return a message if no result in the stream, or of the run, has this label; else None."""
    rows = (row for chunk in reader.chunks(BEGINNING) for row in chunk.rows)
    labels = Counter(row.found["label"] for row in rows if run in (None, row.post.get("run")))
    if label in labels:
        return None
    similar = similar_name(label, list(labels))
    hint = "" if similar is None else f" Did you mean {similar!r:.80}?"
    frequent = ", ".join(name for name, _ in labels.most_common(MAX_LABELS))
    more = ", …" * (len(labels) > MAX_LABELS)
    return printable(f"No result has the label {label!r:.80}.{hint} Labels seen: {frequent or 'none'}{more}.")
