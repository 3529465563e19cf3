"""The `feedmill status`, `health` and `metrics` commands: show, check and export the state of the running system."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from redis import Redis
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from typer import Option

from feedmill.cli import ingest
from feedmill.cli.options import AsJson, RunName, with_settings
from feedmill.console import LiveBar, output_console, span
from feedmill.monitoring import watch
from feedmill.monitoring.watch import HealthPart
from feedmill.reading import unknown_run
from feedmill.shared import runs
from feedmill.shared.broker import make_app, queue_depth
from feedmill.shared.errors import UserError, printable
from feedmill.shared.metrics import ProcessMetrics, connect_for_monitoring
from feedmill.shared.settings import Settings, is_folder_locked

#: Port on which `feedmill metrics` serves by default.
DEFAULT_METRICS_PORT = 9107
#: Seconds between two looks at a run's progress.
POLL_INTERVAL_S = 0.5


@with_settings("redis_url")
def status(settings: Settings, run: RunName = None, as_json: AsJson = False) -> None:
    """With --run, show only the progress of this run."""
    if run is not None:
        _show_run(settings, run, as_json)
        return
    seen = watch.status(connect_for_monitoring(settings), make_app(settings), settings)
    if as_json:
        typer.echo(json.dumps(seen.as_json()))
    else:
        output_console().print(_table(seen, settings))


def _show_run(settings: Settings, name: str, as_json: bool) -> None:
    """Print the progress of one run. Raises UserError if it is unknown."""
    redis = connect_for_monitoring(settings)
    progress = runs.progress(redis, name)
    if progress is None:
        raise UserError(unknown_run(redis, name))
    if as_json:
        typer.echo(json.dumps(progress.as_json()))
        return
    seen = watch.status(redis, make_app(settings) if progress.pending else None, settings)
    typer.echo(_run(seen, progress))


def _run(seen: watch.Status, progress: runs.Progress) -> str:
    has_worker, has_messages = bool(seen.workers) or not seen.asked, any(seen.queue)
    return progress_line(progress, time.time(), has_worker, has_messages)


def progress_line(found: runs.Progress, now: float, has_worker: bool = True, has_messages: bool = True) -> str:
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
        if not found.pending:
            parts.append(f"ended {span(max(0.0, now - found.latest))} ago")
        else:
            parts.append("starting" if found.seconds_left is None else f"about {span(found.seconds_left)} left")
    return printable(f"{found.run}: {' · '.join(parts)}")


def wait_for_run(redis: Redis, settings: Settings, notes: Console, run: str, by_counts: bool = True) -> int:
    """Wait until the run's posts are classified, with a progress bar; print a summary, and return how many failed.

    Posts can leave the queue without a result, for example by a purge. So the wait also ends when the queue is empty
    and no worker holds a message. by_counts: False if posts were sent a second time, which the counts do not show.
    Raises redis.exceptions.RedisError.
    """
    before = found = runs.progress(redis, run) or runs.Progress(run)
    began = time.monotonic()

    def figures(_: float) -> tuple[str, float, float | None]:
        return progress_line(found, time.time()), found.settled, found.sent or None

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


def _memory(seen: watch.Status, settings: Settings) -> list[str]:
    """Return lines about Redis' memory, and that of results and sent records, which is estimated from a sample."""
    memory, counts = seen.memory, seen.results
    # Results that were stored are counted. The estimate may be higher.
    results = memory.results_bytes, settings.results_memory, min(memory.results, counts.stored), counts.dropped
    sent = memory.sent_bytes, settings.sent_memory, memory.sent, counts.sent_dropped
    return [seen.memory_use, _kept("results", *results), _kept("sent records", *sent)]


def _kept(what: str, used: int, limit: int, count: int, dropped: int) -> str:
    """Format the memory of records of one kind."""
    said = f"{what}: about {decimal(used)} of {decimal(limit)} · about {count:,} stored"
    return f"{said} · {dropped:,} dropped" if dropped else said


def _queues(seen: watch.Status) -> list[str]:
    """Return a line per queue."""
    served = {name for pool in seen.workers.values() for name in pool["queues"]}
    return [
        f"{name}: {queue.waiting:,} waiting for {queue.model or 'no model yet'}"
        f"{'' if name in served or not seen.asked else ' (no worker)'}"
        for name, queue in seen.queues.items()
    ]


def _dead_letters(seen: watch.Status) -> str:
    """Format the number of dead letters, and of those that were trimmed."""
    trimmed = f", {seen.results.dead_trimmed:,} older ones trimmed" if seen.results.dead_trimmed else ""
    there = seen.dead_letters or trimmed
    return f"{seen.dead_letters:,}{trimmed} · `feedmill dead list`" if there else "0"


def _table(seen: watch.Status, settings: Settings) -> RenderableType:
    """Return a line or more for each part of the system and a table of the workers, in 80 columns."""
    facts = Table.grid(padding=(0, 2))
    for name, values in _facts(seen, settings):
        for number, value in enumerate(values):
            style = "red" if name.startswith("worker") else ""
            facts.add_row("" if number else printable(name), Text(printable(value), style))
    return Group(facts, Text(), _workers(seen)) if seen.workers else facts


def _facts(seen: watch.Status, settings: Settings) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each part of the system, and lines about it."""
    oldest = "" if seen.oldest_seconds is None else f" · oldest sent {span(seen.oldest_seconds)} ago"
    queue = f"{seen.queue.waiting:,} messages waiting · {seen.queue.held:,} held by workers{oldest}"
    yield "queue", [queue, *_queues(seen)]
    duplicates = seen.results.answered + seen.results.repeated
    pace = f"{60 * seen.results_per_second:,.0f} a minute · " if seen.results_per_second else ""
    yield "results", [f"{pace}{seen.results.stored:,} stored so far · {duplicates:,} duplicates"]
    yield "dead letters", [_dead_letters(seen)]
    yield "runs", [_run(seen, progress) for progress in seen.runs]
    for name, report in seen.live.items():
        yield name, [ingest.format_status(report)]
    yield "gaps", [f"{seen.gaps:,} · `feedmill ingest gaps`" if seen.gaps else "0"]
    yield "memory", _memory(seen, settings)
    for node, age in seen.missing.items():
        yield "worker", [f"{node} does not answer; last report, one a minute, {span(age)} ago"]
    if not seen.asked:
        yield "workers", [watch.WORKERS_UNKNOWN]
    elif not seen.workers:
        is_starting = settings.redis_url is None and is_folder_locked(settings.data_folder)
        advice = "`feedmill up` is running, and starts one" if is_starting else "start one with `feedmill worker`"
        yield "workers", [f"none answers: {advice}"]


def _workers(seen: watch.Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("device", no_wrap=True)
    for name in ("posts/s", "busy", "waiting", "posts"):
        table.add_column(name, justify="right", no_wrap=True)
    for node, pool in seen.workers.items():
        recent = pool["recent"]
        table.add_row(
            Text(printable(node)),
            Text(printable(str(pool["device"]).partition(": ")[0])),
            f"{recent['posts_per_second']:,.1f}",
            f"{recent['device_busy']:.2f}",
            f"{pool['rows_waiting']:,}",
            f"{pool['posts']:,}",
        )
    return table


@with_settings("redis_url")
def health(
    settings: Settings,
    parts: Annotated[
        list[HealthPart] | None, Option("--check", help="Check only this part; may be repeated (default: all parts).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    findings = list(watch.check_health(settings, parts or tuple(HealthPart)))
    well = all(finding.well for finding in findings)
    if as_json:
        checks = [{"check": finding.part, "healthy": finding.well, "said": finding.said} for finding in findings]
        typer.echo(json.dumps({"healthy": well, "checks": checks}))
    else:
        for finding in findings:
            typer.echo(f"{'✓' if finding.well else '✗'} {finding.part:<8} {printable(finding.said)}")
    raise typer.Exit(0 if well else 1)


@with_settings("metrics_port", "redis_url")
def metrics(settings: Settings) -> None:
    """Needs no worker. Workers and ingesting daemons serve their own with --metrics-port. Default port: 9107."""
    settings = settings.model_copy(update={"metrics_port": settings.metrics_port or DEFAULT_METRICS_PORT})
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server starts threads, which would receive them
    ProcessMetrics(settings).serve()
    signal.sigwait(ends)
