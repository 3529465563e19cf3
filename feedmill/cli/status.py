"""The `feedmill status`, `health` and `metrics` commands: show, check and export the state of the running system."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer import Option

from feedmill.cli import ingest, run_progress
from feedmill.cli.option_groups import with_settings
from feedmill.cli.options import AsJson, RunName
from feedmill.console import output_console
from feedmill.monitoring import watch
from feedmill.monitoring.capacity import size, span
from feedmill.monitoring.watch import HealthPart
from feedmill.reading.rows import unknown_run
from feedmill.shared import runs
from feedmill.shared.broker import make_app
from feedmill.shared.errors import UserError, printable
from feedmill.shared.metrics import REDIS_METRICS, RedisMetrics, connect_for_monitoring, serve
from feedmill.shared.settings import Settings, is_folder_locked

#: Number of records from which it is an estimate from a sample. A smaller table is read as a whole.
MIN_ESTIMATED = 50
#: Port on which `feedmill metrics` serves by default.
DEFAULT_METRICS_PORT = 9107
#: Shown in place of the memory and of the workers when they cannot be read.
MEMORY_UNKNOWN = "unknown: this Redis user may not read it"
WORKERS_UNKNOWN = "unknown while Redis refuses writes: see `feedmill health`"

app = typer.Typer()


@app.command()
@with_settings("redis_url")
def status(settings: Settings, run: RunName = None, as_json: AsJson = False) -> None:
    """Show the state of queues, workers, results and Redis memory. With --run, only the progress of this run."""
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
    found = runs.progress(redis, name)
    if found is None:
        raise UserError(unknown_run(redis, name))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return
    has_worker = not found.pending or watch.has_worker(settings)
    has_messages = not found.pending or watch.has_messages(redis, settings)
    typer.echo(run_progress.line(found, time.time(), has_worker, has_messages))


def _memory(seen: watch.Status) -> list[str]:
    """Return lines about Redis' memory, that of results and sent records (estimated from a sample), and warnings."""
    kept = seen.kept
    if not seen.memory or not kept:
        return [MEMORY_UNKNOWN]
    # Results that were stored are counted. The estimate may be higher.
    count = min(kept.results, seen.results.stored)
    lines = [str(seen.memory)]
    lines.append(_used("results", kept.results_bytes, kept.results_limit, count, kept.result_bytes))
    if kept.stream_entries:
        lines.append(f"their stream: {kept.stream_entries:,} of {kept.stream_entry_bytes:,.0f} bytes")
    lines.append(_used("sent records", kept.sent_bytes, kept.sent_limit, kept.sent, kept.sent_record_bytes))
    lines.append(seen.memory.warning)
    needs, counts = seen.memory, seen.results
    lines.append(_dropping("results", needs.results_needed, needs.results_kept_seconds, counts.dropped))
    lines.append(_dropping("sent records", needs.sent_needed, needs.sent_kept_seconds, counts.sent_dropped))
    return list(filter(None, lines))


def _used(what: str, used: float, limit: int, count: int, record_bytes: float) -> str:
    """Format how much memory records of one kind use and may use, their number and the bytes of each."""
    if not count:
        return f"{what}: nothing stored, limit {size(limit)}"
    shown = f"{count:,}" if count < MIN_ESTIMATED else f"about {round(count, 3 - len(str(count))):,}"
    return f"{what}: about {size(used)} of {size(limit)} · {shown} of {record_bytes:,.0f} bytes"


def _dropping(what: str, needed: float, kept_seconds: float | None, dropped: int) -> str:
    """Say how many records were dropped, and how long they are kept at the current rate; "" if all are."""
    facts = [f"{dropped:,} {what} dropped"] if dropped else []
    if kept_seconds is not None:
        facts.append(f"{what} kept for about {span(kept_seconds)} at this rate; about {size(needed)} would keep all")
    return " · ".join(facts)


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
    has_worker, has_messages = bool(seen.workers) or not seen.asked, bool(seen.queue.waiting or seen.queue.held)
    yield "runs", [run_progress.line(run, time.time(), has_worker, has_messages) for run in seen.runs]
    for name, report in seen.live.items():
        yield name, [ingest.format_status(report)]
    yield "gaps", [f"{seen.gaps:,} · `feedmill ingest gaps`" if seen.gaps else "0"]
    yield "memory", _memory(seen)
    for node, age in seen.missing.items():
        yield "worker", [f"{node} does not answer; last report, one a minute, {span(age)} ago"]
    if not seen.asked:
        yield "workers", [WORKERS_UNKNOWN]
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


@app.command()
@with_settings("redis_url")
def health(
    settings: Settings,
    parts: Annotated[
        list[HealthPart] | None, Option("--check", help="Check only this part; may be repeated (default: all parts).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check health. Exits 0 if healthy, 1 if not."""
    findings = list(watch.check_health(settings, parts or tuple(HealthPart)))
    well = all(finding.well for finding in findings)
    if as_json:
        checks = [{"check": finding.part, "healthy": finding.well, "said": finding.said} for finding in findings]
        typer.echo(json.dumps({"healthy": well, "checks": checks}))
    else:
        for finding in findings:
            typer.echo(f"{'✓' if finding.well else '✗'} {finding.part:<8} {printable(finding.said)}")
    raise typer.Exit(0 if well else 1)


@app.command()
@with_settings("metrics_port", "redis_url")
def metrics(settings: Settings) -> None:
    """Serve Prometheus metrics of queues and results until SIGTERM.

    Needs no worker. Workers and ingesting daemons serve their own metrics with --metrics-port. Default port: 9107.
    """
    settings = settings.model_copy(update={"metrics_port": settings.metrics_port or DEFAULT_METRICS_PORT})
    figures = RedisMetrics(settings)
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server starts threads, which would receive them
    serve(settings, [(REDIS_METRICS, figures.values)], list, figures.problems)
    signal.sigwait(ends)
