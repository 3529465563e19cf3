"""The `feedmill status`, `health` and `metrics` commands: show, check and export the state of the running system."""

import json
import signal
import time
from collections.abc import Iterator
from itertools import chain, repeat
from textwrap import wrap
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
from feedmill.monitoring.watch import HealthPart, StatusMonitor, StatusWithRates
from feedmill.reading.names import unknown_run
from feedmill.stack.signals import exit_on_signals
from shared import runs
from shared.broker import user_errors
from shared.errors import UserError, clause, printable
from shared.messages import parse_run
from shared.metrics import REDIS_METRICS, RedisMetrics, connect_for_monitoring, serve
from shared.settings import Settings, is_folder_locked

#: Seconds between two snapshots of `status --watch`; the workers take about one second to answer.
REFRESH_INTERVAL_S = 2.0
#: Characters of a value in the output of `status`: 80 columns without the name and two spaces.
VALUE_WIDTH = 66
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
            seen = watch.status(settings)
        typer.echo(json.dumps(seen.as_json()) if as_json else _summary(seen, settings))
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


def _summary(seen: watch.Status, settings: Settings) -> str:
    """Format a snapshot as lines of a name and a value."""
    facts = [
        ("queue", _queue(seen)),
        *(("", line) for line in _queues(seen)),
        ("results", _results(seen)),
        ("dead letters", _dead_letters(seen)),
        *(
            (name, run_progress.line(found, time.time(), _has_worker(seen), _has_messages(seen)))
            for name, found in _named_runs(seen)
        ),
        *zip(chain(("memory",), repeat("")), _memory(seen), strict=False),
    ]
    if not seen.asked:
        facts.append(("workers", WORKERS_UNKNOWN))
    elif not seen.workers:
        facts.append(("workers", _no_worker(settings)))
    facts += [("worker", _missing(node, age)) for node, age in seen.missing.items()]
    if seen.reddit:
        facts.append(("reddit", ingest.format_daemon_status(seen.reddit)))
    facts += [(name, ingest.format_live_status(report)) for name, report in seen.live.items()]
    if seen.gaps:
        facts.append(("gaps", f"{seen.gaps:,} · `feedmill ingest gaps`"))
    # One block per worker: a table of these values is wider than most terminals.
    for node, pool in seen.workers.items():
        recent = pool["recent"]
        facts += [
            ("worker", node),
            *(("", part) for part in wrap(pool["device"], VALUE_WIDTH)),
            ("", f"{pool['model']}, queue {', '.join(pool['queues'])}"),
            ("", f"{pool['posts']:,} posts done, {pool['rows_waiting']:,} waiting"),
            (
                "",
                f"{recent['posts_per_second']:.1f} posts/s, device busy {recent['device_busy']:.2f} "
                f"in the last {span(recent['seconds'])}",
            ),
            ("", f"padding efficiency {pool['padding_efficiency']:.2f}"),
        ]
    return "\n".join(f"{name:<12}  {printable(value)}" for name, value in facts)


def _no_worker(settings: Settings) -> str:
    if settings.redis_url is None and is_folder_locked(settings.data_folder):
        return "none answers: `feedmill up` is running, and starts one"
    return "none answers: start one with `feedmill worker` or `feedmill up`"


def _missing(node: str, age: float) -> str:
    return printable(f"{node} does not answer; last report, one a minute, {span(age)} ago")


def _queue(seen: watch.Status) -> str:
    oldest = "" if seen.oldest_seconds is None else f" · oldest sent {span(seen.oldest_seconds)} ago"
    return f"{seen.queue.waiting:,} messages waiting · {seen.queue.held:,} held by workers{oldest}"


def _results(seen: watch.Status) -> str:
    return f"{seen.results.stored:,} stored so far · {seen.results.answered + seen.results.repeated:,} duplicates"


def _memory(seen: watch.Status) -> list[str]:
    """Return lines about Redis' memory, and about that of results and sent records."""
    if not seen.memory or not seen.kept:
        return [MEMORY_UNKNOWN]
    kept = seen.kept
    # Results that were stored are counted. The estimate from a sample may be higher.
    results, stream = min(kept.results, seen.results.stored), kept.stream_entries
    lines = [
        *str(seen.memory).split("; "),
        _used("results", kept.results_bytes, kept.results_limit),
        _each(results, "stored result", "stored results", kept.result_bytes),
        _each(stream, "entry in their stream", "entries in their stream", kept.stream_entry_bytes, is_exact=True),
        _used("sent records", kept.sent_bytes, kept.sent_limit),
        _each(kept.sent, "sent post", "sent posts", kept.sent_record_bytes),
        *(wrapped for line in _memory_warnings(seen) for wrapped in wrap(line, VALUE_WIDTH)),
    ]
    return [line for line in lines if line]


def _used(what: str, used: float, limit: int) -> str:
    """Say how much memory records of one kind use, which is estimated, and how much they may use."""
    return f"{what}: {f'about {size(used)}' if used else 'nothing stored'}, limit {size(limit)}"


def _each(count: int, one: str, many: str, record_bytes: float, is_exact: bool = False) -> str:
    """Return a line with the number of records and the estimated bytes of each, or "" without any."""
    if not count:
        return ""
    shown = f"{count:,}" if is_exact or count < MIN_ESTIMATED else f"about {round(count, 3 - len(str(count))):,}"
    return f"  {shown} {one if count == 1 else many}, about {record_bytes:,.0f} bytes each"


def _memory_warnings(seen: watch.Status) -> list[str]:
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


def _queues(seen: watch.Status) -> list[str]:
    """Return a line per queue, or none if there is only one queue."""
    if len(seen.queues) == 1:
        return []
    served = {name for pool in seen.workers.values() for name in pool["queues"]}
    return [
        printable(
            f"{name}: {queue.waiting:,} waiting for {queue.model or 'no model yet'}"
            f"{'' if name in served or not seen.asked else ' (no worker)'}"
        )
        for name, queue in seen.queues.items()
    ]


def _named_runs(seen: watch.Status) -> Iterator[tuple[str, runs.Progress]]:
    """Yield each run with the name of its line, which only the first one has."""
    yield from zip(("runs", *[""] * len(seen.runs)), seen.runs, strict=False)


def _has_messages(seen: watch.Status) -> bool:
    return bool(seen.queue.waiting or seen.queue.held)


def _has_worker(seen: watch.Status) -> bool:
    """Return False if no worker answers; True also if that is unknown."""
    return bool(seen.workers) or not seen.asked


def _dead_letters(seen: watch.Status) -> str:
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
            if isinstance(seen, StatusWithRates):
                entry |= seen.status.as_json()
                entry |= {"results_per_second": seen.results, "posts_per_second": seen.posts, "device_busy": seen.busy}
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


def _snapshots(settings: Settings) -> Iterator[StatusWithRates | str]:
    """Yield a snapshot every two seconds without end, or an error message while Redis is unreachable."""
    lookout = StatusMonitor(settings)
    while True:
        began = time.monotonic()
        try:
            yield lookout.look()
        except (RedisError, OperationalError) as fault:
            yield f"Redis at {settings.redis_address} is unreachable ({clause(fault)})"
        time.sleep(max(0.0, began + REFRESH_INTERVAL_S - time.monotonic()))


def _screen(seen: StatusWithRates | str, settings: Settings) -> RenderableType:
    """Return a screen 80 columns wide, with a line per worker and about a dozen more."""
    head = Text(f"feedmill · {settings.redis_address} · {time.strftime('%H:%M:%S')} · Ctrl-C quits", style="bold")
    if isinstance(seen, str):
        return Group(head, Text(), Text(printable(seen), style="red"))
    found = seen.status
    facts = Table.grid(padding=(0, 2))
    facts.add_row("queue", _queue(found))
    for line in _queues(found):
        facts.add_row("", Text(line, no_wrap=True, overflow="ellipsis"))
    pace = "…" if seen.results is None else f"{60 * seen.results:,.0f}"
    facts.add_row("results", f"{pace} a minute · {_results(found)}")
    facts.add_row("dead letters", _dead_letters(found))
    for name, run in _named_runs(found):
        shown = run_progress.line(run, time.time(), _has_worker(found), _has_messages(found))
        facts.add_row(name, Text(shown, no_wrap=True, overflow="ellipsis"))
    if found.reddit:
        facts.add_row("reddit", Text(printable(ingest.format_daemon_status(found.reddit))))
    for name, report in found.live.items():
        facts.add_row(printable(name), Text(printable(ingest.format_live_status(report))))
    facts.add_row("gaps", f"{found.gaps:,} · `feedmill ingest gaps`" if found.gaps else "0")
    facts.add_row("memory", "\n".join([str(found.memory or MEMORY_UNKNOWN), *_memory_warnings(found)]))
    for node, age in found.missing.items():
        facts.add_row("worker", Text(_missing(node, age), style="red"))
    if not found.asked:
        return Group(head, Text(), facts, Text(), Text(WORKERS_UNKNOWN, style="red"))
    if not found.workers:
        return Group(head, Text(), facts, Text(), Text(f"workers: {_no_worker(settings)}", style="red"))
    return Group(head, Text(), facts, Text(), _workers(seen))


def _workers(seen: StatusWithRates) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("device", no_wrap=True)
    for name in ("posts/s", "busy", "waiting", "posts"):
        table.add_column(name, justify="right", no_wrap=True)
    for node, pool in seen.status.workers.items():
        recent = pool["recent"]
        table.add_row(
            Text(printable(node)),
            Text(printable(_device(pool))),
            f"{seen.posts.get(node, recent['posts_per_second']):,.1f}",
            f"{seen.busy.get(node, recent['device_busy']):.2f}",
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
        typer.Option("--check", help="Check only this part; may be repeated (default: all parts)."),
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
