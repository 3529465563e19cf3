"""Check the names of runs that users give, and suggest similar ones. Raises redis.exceptions.RedisError."""

from redis import Redis

from feedmill.reading.rows import RowReader
from feedmill.shared import runs
from feedmill.shared.errors import UserError, printable, similar_name
from feedmill.shared.scripts.stream import Place

#: Recent runs that a message names.
MAX_RUNS = 5


def check_run(redis: Redis, run: str) -> None:
    """Raise UserError if there is no such run. Its results may outlive its counts."""
    if runs.progress(redis, run) is None:
        rows = (row for chunk in RowReader(redis).chunks(Place("0-0")) for row in chunk.rows)
        if all(row.post.get("run") != run for row in rows):
            raise UserError(unknown_run(redis, run))


def unknown_run(redis: Redis, run: str) -> str:
    """Return a message about a run that does not exist."""
    names = [progress.run for progress in runs.recent(redis, runs.MAX_RUNS)]
    similar = similar_name(run, names)
    hint = f"Did you mean {similar!r}?" if similar else f"Recent runs: {', '.join(names[:MAX_RUNS]) or 'none'}."
    return printable(f"There is no run {run!r}, or its posts were sent too long ago. {hint}")
