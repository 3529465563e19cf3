"""Check that a run exists."""

from redis import Redis

from feedmill.reading.entry_ids import id_before
from feedmill.reading.rows import RowReader
from shared import runs
from shared.errors import UserError, printable, similar_name
from shared.scripts.stream import Place

#: Recent runs that an error names.
MAX_NAMES = 5


def check_run(redis: Redis, run: str) -> None:
    """Raise UserError if there is no such run. Raises redis.exceptions.RedisError."""
    if runs.progress(redis, run) is None and not _has_results(redis, run):
        raise UserError(unknown_run(redis, run))


def unknown_run(redis: Redis, run: str) -> str:
    """Return a message about a run that does not exist. Raises redis.exceptions.RedisError."""
    names = [found.run for found in runs.recent(redis, runs.MAX_RUNS)]
    meant = similar_name(run, names)
    hint = f"Did you mean {meant!r}?" if meant else f"Recent runs: {', '.join(names[:MAX_NAMES]) or 'none'}."
    return printable(f"There is no run {run!r}, or its posts were sent too long ago. {hint}")


def _has_results(redis: Redis, run: str) -> bool:
    """Return whether the stream holds results of a run. They may outlive its counts."""
    chunks = RowReader(redis).chunks(Place(id_before(0.0)))
    return any(row.post.get("run") == run for chunk in chunks for row in chunk.rows)
