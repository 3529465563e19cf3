"""The `feedmill status`, `health` and `metrics` commands: show, check and export the state of the
running system.
"""

import json
import signal
import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from redis import Redis
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from typer import Option

from feedmill.cli import ingest
from feedmill.cli.options import AsJson, RunName, with_settings
from feedmill.console import Figures, LiveBar, counted, output_console, span
from feedmill.monitoring import watch
from feedmill.monitoring.departures import Departures
from feedmill.monitoring.gpus import gpu_lines
from feedmill.monitoring.watch import HealthPart
from feedmill.outcomes.rows import unknown_run
from feedmill.shared import runs
from feedmill.shared.broker import make_app
from feedmill.shared.errors import UserError, printable
from feedmill.shared.metrics import SystemMetrics, connect_for_monitoring
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
    redis = connect_for_monitoring(settings)
    app = make_app(settings)
    snapshot = watch.status(redis, app, settings)
    if as_json:
        document = json.dumps(snapshot.as_json())
        typer.echo(document)
        return
    table = _table(snapshot, settings)
    console = output_console()
    console.print(table)


def _show_run(settings: Settings, name: str, as_json: bool) -> None:
    """Print the progress of one run. Raises UserError if it is unknown."""
    redis = connect_for_monitoring(settings)
    progress = runs.progress(redis, name)
    if progress is None:
        raise UserError(unknown_run(redis, name))
    if as_json:
        document = json.dumps(progress.to_dict())
        typer.echo(document)
        return
    # Only a run with pending posts depends on the workers.
    app = make_app(settings) if progress.pending else None
    snapshot = watch.status(redis, app, settings)
    line = _run(snapshot, progress)
    typer.echo(line)


def _run(snapshot: watch.Status, progress: runs.Progress) -> str:
    has_worker = bool(snapshot.workers) or not snapshot.asked
    has_messages = any(snapshot.queue)
    return progress_line(
        progress,
        now=time.time(),
        has_worker=has_worker,
        has_messages=has_messages,
    )


def progress_line(
    progress: runs.Progress,
    now: float,
    has_worker: bool = True,
    has_messages: bool = True,
) -> str:
    """Return the progress of a run in one line.

    now: seconds since 1970. has_worker: False if no worker answers. Nothing then tells when the
    run will end. has_messages: False if no message waits, is held by a worker or is due later.
    Posts without a result then never get one.
    """
    if progress.sent:
        parts = [f"{progress.stored:,} of {progress.sent:,} done"]
    else:
        parts = [f"{progress.stored:,} done"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    silence = span(max(0.0, now - progress.latest))
    is_waiting = runs.is_waiting(progress, now)
    if is_waiting and not has_messages:
        parts.append(f"{progress.pending:,} purged or cleared")
        parts.append(f"ended {silence} ago")
    elif is_waiting and has_worker:
        parts.append(f"waiting for {silence}")
    elif progress.pending and not has_worker:
        parts.append(f"waiting for {silence}: no worker answers")
    else:
        if progress.rate is not None:
            parts.append(_rate(progress.rate))
        parts.append(_end(progress, silence))
    facts = " · ".join(parts)
    return printable(f"{progress.run}: {facts}")


def _rate(posts_per_second: float) -> str:
    """Format a run's rate, with two digits if it is less than one post a second."""
    if posts_per_second >= 1:
        return f"{posts_per_second:,.1f} posts/s"
    return f"{posts_per_second:.2g} posts/s"


def _end(progress: runs.Progress, silence: str) -> str:
    """Return when a run ended, or when it is going to end."""
    if not progress.pending:
        return f"ended {silence} ago"
    seconds_left = progress.seconds_left
    if seconds_left is None:
        return "starting"
    return f"about {span(seconds_left)} left"


def wait_for_run(
    redis: Redis, settings: Settings, notes: Console, run: str, by_counts: bool = True
) -> int:
    """Wait until the run's posts are classified, with a progress bar; print a summary, and return
    how many failed.

    Posts can leave the queue without a result, for example by a purge. So the wait also ends when
    all messages that wait in the queue now have left it. by_counts: False if posts were sent a
    second time, which the counts do not show. Raises redis.exceptions.RedisError.
    """
    before = runs.progress(redis, run)
    if before is None:
        before = runs.Progress(run)
    progress = before
    departures = Departures(redis, settings.queue)
    began = time.monotonic()

    def figures(_: float) -> Figures:
        line = progress_line(progress, now=time.time())
        total = progress.sent or None
        return Figures(line, done=progress.settled, total=total)

    try:
        with LiveBar(notes, figures):
            while True:
                # Departures first: a message's results are stored before it leaves the queue.
                has_left = departures.are_complete()
                progress = runs.progress(redis, run) or before
                is_classified = progress.sent > 0 and not progress.pending
                if has_left or (by_counts and is_classified):
                    break
                time.sleep(POLL_INTERVAL_S)
    except KeyboardInterrupt:
        notes.print(
            "interrupted: the posts stay in the queue; `feedmill status` shows their progress",
            markup=False,
        )
        raise
    duration = span(time.monotonic() - began)
    summary = _run_summary(progress, duration)
    typer.echo(printable(f"run {run}: {summary}"))
    return max(0, progress.failed - before.failed)


def _run_summary(progress: runs.Progress, duration: str) -> str:
    """Return how a run ended."""
    summary = f"{progress.stored:,} done, {progress.failed:,} failed after {duration}"
    if progress.pending:
        summary += f", {progress.pending:,} without a result: purged, or cleared from the queue"
    return summary


def _memory(snapshot: watch.Status, settings: Settings) -> list[str]:
    """Return lines about Redis' memory, and that of results and sent records.

    The number of the latter is estimated.
    """
    memory = snapshot.memory
    counts = snapshot.results
    results = _record_memory(
        "results",
        used=memory.results_bytes,
        limit=settings.results_memory,
        count=f"{memory.results:,}",
        dropped=counts.dropped,
    )
    sent_records = _record_memory(
        "sent records",
        used=memory.sent_bytes,
        limit=settings.sent_memory,
        count=f"about {memory.sent:,}",
        dropped=counts.sent_dropped,
    )
    return [snapshot.memory_use, results, sent_records]


def _record_memory(what: str, used: int, limit: int, count: str, dropped: int) -> str:
    """Format the memory of records of one kind."""
    share = f"{decimal(used)} of {decimal(limit)}"
    line = f"{what}: about {share} · {count} stored"
    if dropped:
        line += f" · {dropped:,} dropped"
    return line


def _queues(snapshot: watch.Status) -> list[str]:
    """Return a line per queue."""
    served = set()
    for pool in snapshot.workers.values():
        served.update(pool["queues"])
    lines = []
    for name, queue in snapshot.queues.items():
        model = queue.model or "no model yet"
        line = f"{name}: {queue.waiting:,} waiting for {model}"
        if snapshot.asked and name not in served:
            line += " (no worker)"
        lines.append(line)
    return lines


def _dead_letters(snapshot: watch.Status) -> str:
    """Format the number of dead letters, and of those that were trimmed."""
    count = snapshot.dead_letters
    trimmed = snapshot.results.dead_trimmed
    if not count and not trimmed:
        return "0"
    numbers = f"{count:,}"
    if trimmed:
        numbers += f", {trimmed:,} older ones trimmed"
    return f"{numbers} · `feedmill dead list`"


class Fact(NamedTuple):
    """Lines about one part of the system."""

    name: str
    lines: list[str]
    is_alarming: bool = False


def _table(snapshot: watch.Status, settings: Settings) -> RenderableType:
    """Return a line or more for each part of the system and a table of the workers, in 80
    columns.
    """
    facts = Table.grid(padding=(0, 2))
    for fact in _facts(snapshot, settings):
        style = "red" if fact.is_alarming else ""
        heading = printable(fact.name)
        for line in fact.lines:
            text = Text(printable(line), style)
            facts.add_row(heading, text)
            heading = ""  # once for all lines of a part
    if not snapshot.workers:
        return facts
    workers = _workers(snapshot)
    return Group(facts, Text(), workers)


def _facts(snapshot: watch.Status, settings: Settings) -> Iterator[Fact]:
    """Yield the facts about each part of the system."""
    unread_lists = map(str, snapshot.unread)
    yield Fact("queue", [_messages(snapshot), *_queues(snapshot), *unread_lists])
    yield Fact("results", [_results(snapshot)])
    yield Fact("dead letters", [_dead_letters(snapshot)])
    yield Fact("runs", [_run(snapshot, progress) for progress in snapshot.runs])
    for name, report in snapshot.live.items():
        subreddits = ingest.format_subreddits(report)
        yield Fact(name, [ingest.format_status(report), *subreddits])
    yield Fact("gaps", [_gaps(snapshot)])
    yield Fact("memory", _memory(snapshot, settings))
    yield Fact("GPUs", gpu_lines(snapshot.gpus))
    texts = [problem.text for problem in snapshot.problems]
    if texts:
        yield Fact("problems", texts, is_alarming=True)
    yield from _rate_limits(snapshot)
    yield from _worker_alarms(snapshot, settings)


def _gaps(snapshot: watch.Status) -> str:
    """Format the number of gaps."""
    if not snapshot.gaps:
        return "0"
    return f"{snapshot.gaps:,} · `feedmill ingest gaps`"


def _worker_alarms(snapshot: watch.Status, settings: Settings) -> Iterator[Fact]:
    """Yield the facts about workers that do not answer."""
    for node, age in snapshot.missing.items():
        silence = f"last report, one a minute, {span(age)} ago"
        yield Fact("worker", [f"{node} does not answer; {silence}"], is_alarming=True)
    if not snapshot.asked:
        yield Fact("workers", [watch.WORKERS_UNKNOWN], is_alarming=True)
    elif not snapshot.workers:
        advice = _worker_advice(settings)
        yield Fact("workers", [f"none answers: {advice}"], is_alarming=True)


def _messages(snapshot: watch.Status) -> str:
    """Format the depth of all queues together, and the age of their oldest message."""
    depth = snapshot.queue
    parts = [
        f"{depth.waiting:,} messages waiting",
        f"{depth.held:,} held by workers",
    ]
    if depth.delayed:
        parts.append(f"{depth.delayed:,} due later")
    age = snapshot.oldest_seconds
    if age is not None:
        parts.append(f"oldest sent {span(age)} ago")
    return " · ".join(parts)


def _results(snapshot: watch.Status) -> str:
    """Format the number of results, and how many are stored per minute."""
    counts = snapshot.results
    duplicates = counts.answered + counts.repeated
    parts = [
        f"{counts.stored:,} stored so far",
        f"{duplicates:,} duplicates",
    ]
    results_per_minute = 60 * snapshot.results_per_second
    if results_per_minute:
        parts.insert(0, f"{results_per_minute:,.0f} a minute")
    return " · ".join(parts)


def _worker_advice(settings: Settings) -> str:
    """Return what to do if no worker answers."""
    uses_stack = settings.redis_url is None
    if uses_stack and is_folder_locked(settings.data_folder):
        return "`feedmill up` is running, and starts one"
    return "start one with `feedmill worker`"


def _rate_limits(snapshot: watch.Status) -> Iterator[Fact]:
    """Yield a fact about the rate limits that workers apply, which senders do not see."""
    lines = []
    for node, pool in snapshot.workers.items():
        rate_limits = pool.get("rate_limits", {})
        for task, limit in rate_limits.items():
            pace = _pace(limit["messages_per_second"])
            messages = counted(limit["messages_held"], "message")
            lines.append(f"{task} on {node}: {pace} · {messages} held back")
    if lines:
        yield Fact("rate limits", lines)


def _pace(per_second: float) -> str:
    """Format a rate limit per second, minute or hour, as Celery's `rate_limit` takes it."""
    if per_second >= 1:
        return f"{per_second:,.4g}/s"
    per_minute = 60 * per_second
    if per_minute >= 1:
        return f"{per_minute:,.4g}/m"
    per_hour = 3600 * per_second
    return f"{per_hour:,.4g}/h"


def _workers(snapshot: watch.Status) -> Table:
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("device", no_wrap=True)
    for name in ("posts/s", "busy", "waiting", "posts"):
        table.add_column(name, justify="right", no_wrap=True)
    for node, pool in snapshot.workers.items():
        recent = pool["recent"]
        device, _, _ = str(pool["device"]).partition(": ")
        table.add_row(
            Text(printable(node)),
            Text(printable(device)),
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
        list[HealthPart] | None,
        Option(
            "--check",
            help=("Check only this part; may be repeated (default: all parts)."),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    findings = watch.check_health(settings, parts or tuple(HealthPart))
    is_healthy = all(finding.well for finding in findings)
    if as_json:
        checks: list[dict[str, Any]] = []
        for finding in findings:
            check = {
                "check": finding.part,
                "healthy": finding.well,
                "said": finding.said,
            }
            checks.append(check)
        document = json.dumps({"healthy": is_healthy, "checks": checks})
        typer.echo(document)
    else:
        for finding in findings:
            mark = "✓" if finding.well else "✗"
            state = printable(finding.said)
            typer.echo(f"{mark} {finding.part:<8} {state}")
    raise typer.Exit(0 if is_healthy else 1)


@with_settings("metrics_port", "redis_url")
def metrics(settings: Settings) -> None:
    """Needs no worker.

    Workers and ingesting daemons serve their own with --metrics-port. Default port: 9107.
    """
    port = settings.metrics_port or DEFAULT_METRICS_PORT
    settings = settings.model_copy(update={"metrics_port": port})
    end_signals = (signal.SIGTERM, signal.SIGINT)
    # before the server starts threads, which would receive them
    signal.pthread_sigmask(signal.SIG_BLOCK, end_signals)
    SystemMetrics(settings).start()
    signal.sigwait(end_signals)
