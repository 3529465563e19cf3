"""Show the progress of runs: a line of `feedmill status`, and the wait of `feedmill enqueue --wait`."""

import time

import typer
from redis import Redis
from rich.console import Console
from rich.markup import escape

from feedmill.console import LiveBar, span
from feedmill.shared import runs
from feedmill.shared.broker import queue_depth
from feedmill.shared.errors import printable
from feedmill.shared.settings import Settings

#: Seconds between two looks at a run's progress.
POLL_INTERVAL_S = 0.5


def line(found: runs.Progress, now: float, has_worker: bool = True, has_messages: bool = True) -> str:
    """Return the progress of a run in one line.

    now: seconds since 1970. has_worker: False if no worker answers. Nothing then tells when the run will end.
    has_messages: False if no message waits or is held by a worker. Posts without a result then never get one.
    """
    done = f"{found.stored:,} of {found.sent:,} done" if found.sent else f"{found.stored:,} done"
    parts = [done]
    if found.failed:
        parts.append(f"{found.failed:,} failed")
    if not has_messages and runs.is_waiting(found, now):
        parts += [f"{found.pending:,} purged or cleared", f"ended {span(now - found.latest)} ago"]
    elif found.pending and (not has_worker or runs.is_waiting(found, now)):
        why = "" if has_worker else ": no worker answers"
        parts.append(f"waiting for {span(max(0.0, now - found.latest))}{why}")
    else:
        if found.rate is not None:
            parts.append(f"{found.rate:,.1f} posts/s" if found.rate >= 1 else f"{found.rate:.2g} posts/s")
        parts.append(_left(found) if found.pending else f"ended {span(max(0.0, now - found.latest))} ago")
    return printable(f"{found.run}: {' · '.join(parts)}")


def _left(found: runs.Progress) -> str:
    return "starting" if found.seconds_left is None else f"about {span(found.seconds_left)} left"


def wait_for_run(redis: Redis, settings: Settings, notes: Console, run: str, by_counts: bool = True) -> int:
    """Wait until the run's posts are classified, with a progress bar; print a summary, and return how many failed.

    Posts can leave the queue without a result, for example by a purge. So the wait also ends when the queue is empty
    and no worker holds a message. by_counts: False if posts were sent a second time, which the counts do not show.
    Raises redis.exceptions.RedisError.
    """
    before = found = runs.progress(redis, run) or runs.Progress(run)
    began = time.monotonic()

    def figures(_: float) -> tuple[str, float, float | None]:
        return escape(line(found, time.time())), found.settled, found.sent or None

    try:
        with LiveBar(notes, figures):
            while True:
                # Depth first: a message's results are stored before it leaves the queue.
                depth = queue_depth(redis, settings.queue)
                found = runs.progress(redis, run) or before
                if not (depth.waiting or depth.held) or (by_counts and found.sent and not found.pending):
                    break
                time.sleep(POLL_INTERVAL_S)
    except KeyboardInterrupt:
        notes.print("interrupted: the posts stay in the queue; `feedmill status` shows their progress", markup=False)
        raise
    summary = f"{found.stored:,} done, {found.failed:,} failed after {span(time.monotonic() - began)}"
    if found.pending:
        summary += f", {found.pending:,} without a result: purged, or cleared from the queue"
    typer.echo(printable(f"run {run}: {summary}"))
    return max(0, found.failed - before.failed)
