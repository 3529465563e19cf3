"""The `feedmill status`, `health` and `metrics` commands: show, check and export the state of the running system."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from feedmill.cli import ingest, run_progress
from feedmill.cli.option_groups import excludes
from feedmill.cli.options import AsJson, RedisUrl, settings_of
from feedmill.console import output_console
from feedmill.monitoring import watch
from feedmill.monitoring.capacity import size, span
from feedmill.monitoring.watch import HealthPart, Status
from feedmill.reading.names import unknown_run
from feedmill.shared import runs
from feedmill.shared.broker import make_app, user_errors
from feedmill.shared.errors import UserError, clause, printable
from feedmill.shared.messages import parse_run
from feedmill.shared.metrics import REDIS_METRICS, RedisMetrics, connect_for_monitoring, serve
from feedmill.shared.settings import Settings, is_folder_locked
from feedmill.stack.signals import exit_on_signals

#: Seconds between two snapshots of `status --watch`; the workers take about one second to answer.
REFRESH_INTERVAL_S = 2.0
#: Number of records from which it is an estimate from a sample. A smaller table is read as a whole.
MIN_ESTIMATED = 50
#: Port on which `feedmill metrics` serves by default.
DEFAULT_METRICS_PORT = 9107
#: Shown in place of the memory and of the workers when they cannot be read.
MEMORY_UNKNOWN = "unknown: this Redis user may not read it"
WORKERS_UNKNOWN = "unknown while Redis refuses writes: see `feedmill health`"

app = typer.Typer()


@app.command()
@excludes("--run", "--watch")
def status(
    watched: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until Ctrl-C.")] = False,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Show only the progress of this run.")
    ] = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show the state of queues, workers, results and Redis memory."""
    settings = settings_of(redis_url=redis_url)
    if run is not None:
        _show_run(settings, parse_run(run), as_json)
        return
    if not watched:
        with user_errors(settings):
            seen = watch.status(connect_for_monitoring(settings), make_app(settings), settings)
        if as_json:
            typer.echo(json.dumps(seen.as_json()))
        else:
            output_console().print(_table(seen, settings))
        return
    with user_errors(settings):
        connect_for_monitoring(settings).ping()  # fail if Redis is unreachable now; later losses are retried
    with exit_on_signals():
        try:
            _watch(settings, as_json)
        except KeyboardInterrupt:
            raise SystemExit(130) from None  # not typer.Exit, which main.py explains


def _show_run(settings: Settings, name: str, as_json: bool) -> None:
    """Print the progress of one run. Raises UserError if it is unknown."""
    with user_errors(settings):
        redis = connect_for_monitoring(settings)
        found = runs.progress(redis, name)
        if found is None:
            raise UserError(unknown_run(redis, name))
        has_worker = as_json or not found.pending or watch.has_worker(settings)
        has_messages = as_json or not found.pending or watch.has_messages(redis, settings)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        typer.echo(run_progress.line(found, time.time(), has_worker, has_messages))


def _no_worker(settings: Settings) -> str:
    if settings.redis_url is None and is_folder_locked(settings.data_folder):
        return "none answers: `feedmill up` is running, and starts one"
    return "none answers: start one with `feedmill worker` or `feedmill up`"


def _missing(node: str, age: float) -> str:
    return f"{node} does not answer; last report, one a minute, {span(age)} ago"


def _queue(seen: Status) -> str:
    oldest = "" if seen.oldest_seconds is None else f" · oldest sent {span(seen.oldest_seconds)} ago"
    return f"{seen.queue.waiting:,} messages waiting · {seen.queue.held:,} held by workers{oldest}"


def _results(seen: Status) -> str:
    return f"{seen.results.stored:,} stored so far · {seen.results.answered + seen.results.repeated:,} duplicates"


def _memory(seen: Status) -> list[str]:
    """Return lines about Redis' memory, and that of results and sent records, estimated from a sample."""
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
    return [*lines, *_memory_warnings(seen)]


def _used(what: str, used: float, limit: int, count: int, record_bytes: float) -> str:
    """Format how much memory records of one kind use and may use, their number and the bytes of each."""
    if not count:
        return f"{what}: nothing stored, limit {size(limit)}"
    shown = f"{count:,}" if count < MIN_ESTIMATED else f"about {round(count, 3 - len(str(count))):,}"
    return f"{what}: about {size(used)} of {size(limit)} · {shown} of {record_bytes:,.0f} bytes"


def _memory_warnings(seen: Status) -> list[str]:
    """Return what the current rate needs, if it is more than there is, and what was dropped therefore."""
    memory, counts = seen.memory, seen.results
    if not memory:
        return []
    lines = [
        memory.warning,
        _dropping("results", memory.results_needed, memory.results_kept_seconds, counts.dropped),
        _dropping("sent records", memory.sent_needed, memory.sent_kept_seconds, counts.sent_dropped),
    ]
    return [line for line in lines if line]


def _dropping(what: str, needed: float, kept_seconds: float | None, dropped: int) -> str:
    """Say how many records were dropped, and how long they are kept at the current rate; "" if all are."""
    facts = [f"{dropped:,} {what} dropped"] if dropped else []
    if kept_seconds is not None:
        facts.append(f"{what} kept for about {span(kept_seconds)} at this rate; about {size(needed)} would keep all")
    return " · ".join(facts)


def _queues(seen: Status) -> list[str]:
    """Return a line per queue."""
    served = {name for pool in seen.workers.values() for name in pool["queues"]}
    return [
        f"{name}: {queue.waiting:,} waiting for {queue.model or 'no model yet'}"
        f"{'' if name in served or not seen.asked else ' (no worker)'}"
        for name, queue in seen.queues.items()
    ]


def _dead_letters(seen: Status) -> str:
    """Format the number of dead letters, and of those that were trimmed."""
    trimmed = f", {seen.results.dead_trimmed:,} older ones trimmed" if seen.results.dead_trimmed else ""
    there = seen.dead_letters or trimmed
    return f"{seen.dead_letters:,}{trimmed} · `feedmill dead list`" if there else "0"


def _watch(settings: Settings, as_json: bool) -> None:
    """Show snapshots until Ctrl-C: on a full screen, or as consecutive blocks without a capable terminal."""
    console = output_console()
    snapshots = _snapshots(settings)
    if as_json:
        for seen in snapshots:
            entry: dict[str, Any] = {"at": time.time()}
            if isinstance(seen, Status):
                entry |= seen.as_json()
            else:
                entry["error"] = seen
            typer.echo(json.dumps(entry))
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for seen in snapshots:
                live.update(_screen(seen, settings), refresh=True)
    else:
        for seen in snapshots:
            console.print(_screen(seen, settings), "")


def _snapshots(settings: Settings) -> Iterator[Status | str]:
    """Yield a snapshot every two seconds without end, or an error message while Redis is unreachable."""
    redis, app = connect_for_monitoring(settings), make_app(settings)
    while True:
        began = time.monotonic()
        try:
            yield watch.status(redis, app, settings)
        except (RedisError, OperationalError) as fault:
            yield f"Redis at {settings.redis_address} is unreachable ({clause(fault)})"
        time.sleep(max(0.0, began + REFRESH_INTERVAL_S - time.monotonic()))


def _screen(seen: Status | str, settings: Settings) -> RenderableType:
    """Return a screen 80 columns wide."""
    head = Text(f"feedmill · {settings.redis_address} · {time.strftime('%H:%M:%S')} · Ctrl-C quits", style="bold")
    if isinstance(seen, str):
        return Group(head, Text(), Text(printable(seen), style="red"))
    return Group(head, Text(), _table(seen, settings))


def _table(seen: Status, settings: Settings) -> RenderableType:
    """Return a line or more for each part of the system and a table of the workers, in 80 columns."""
    facts = Table.grid(padding=(0, 2))
    for name, values in _facts(seen, settings):
        for number, value in enumerate(values):
            style = "red" if name.startswith("worker") else ""
            facts.add_row("" if number else printable(name), Text(printable(value), style))
    return Group(facts, Text(), _workers(seen)) if seen.workers else facts


def _facts(found: Status, settings: Settings) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each part of the system, and lines about it."""
    yield "queue", [_queue(found), *_queues(found)]
    pace = f"{60 * found.results_per_second:,.0f} a minute · " if found.results_per_second else ""
    yield "results", [f"{pace}{_results(found)}"]
    yield "dead letters", [_dead_letters(found)]
    has_worker, has_messages = bool(found.workers) or not found.asked, bool(found.queue.waiting or found.queue.held)
    yield "runs", [run_progress.line(run, time.time(), has_worker, has_messages) for run in found.runs]
    for name, report in found.live.items():
        yield name, [ingest.format_status(report)]
    yield "gaps", [f"{found.gaps:,} · `feedmill ingest gaps`" if found.gaps else "0"]
    yield "memory", _memory(found)
    yield "worker", [_missing(node, age) for node, age in found.missing.items()]
    if not found.asked:
        yield "workers", [WORKERS_UNKNOWN]
    elif not found.workers:
        yield "workers", [_no_worker(settings)]


def _workers(seen: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("device", no_wrap=True)
    for name in ("posts/s", "busy", "waiting", "posts"):
        table.add_column(name, justify="right", no_wrap=True)
    for node, pool in seen.workers.items():
        recent = pool["recent"]
        table.add_row(
            Text(printable(node)),
            Text(printable(_device(pool))),
            f"{recent['posts_per_second']:,.1f}",
            f"{recent['device_busy']:.2f}",
            f"{pool['rows_waiting']:,}",
            f"{pool['posts']:,}",
        )
    return table


def _device(pool: dict[str, Any]) -> str:
    return str(pool["device"]).partition(": ")[0]


@app.command()
def health(
    parts: Annotated[
        list[HealthPart] | None,
        typer.Option(
            "--check",
            metavar="PART",
            help=f"Check only this part: {', '.join(HealthPart)}; may be repeated (default: all parts).",
        ),
    ] = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Check health. Exits 0 if healthy, 1 if not."""
    settings = settings_of(redis_url=redis_url)
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
def metrics(
    metrics_port: Annotated[
        int | None, typer.Option(help=f"Port to serve on (default: {DEFAULT_METRICS_PORT}).")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Serve Prometheus metrics of queues and results until SIGTERM.

    Needs no worker. Workers and ingesting daemons serve their own metrics with --metrics-port.
    """
    settings = settings_of(metrics_port=metrics_port, redis_url=redis_url)
    settings = settings.model_copy(update={"metrics_port": settings.metrics_port or DEFAULT_METRICS_PORT})
    figures = RedisMetrics(settings)
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server starts threads, which would receive them
    serve(settings, [(REDIS_METRICS, figures.values)], list, figures.problems)
    signal.sigwait(ends)
