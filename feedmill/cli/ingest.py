"""The `feedmill ingest` commands: read posts from Reddit, Bluesky or another live source, and show gaps."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from feedmill.cli.dates import utc
from feedmill.cli.option_groups import with_groups
from feedmill.cli.options import (
    AsJson,
    MessageFlags,
    MetricsPort,
    RedisUrl,
    settings_of,
)
from feedmill.monitoring.capacity import span
from feedmill.producers.live.budget import RequestBudget
from feedmill.producers.live.clock import Clock, Stopped
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.metrics import DaemonMetrics, LiveMetrics
from feedmill.producers.live.source import Source
from feedmill.producers.live.state import LiveGap, LiveState, all_gaps
from feedmill.producers.push import Pusher
from feedmill.producers.reddit import topics as topics_file
from feedmill.producers.reddit.listing import ListingItem, Outage, RedditFault, RequestFailed
from feedmill.producers.reddit.metrics import Metrics
from feedmill.producers.reddit.state import ARCHIVE_RECHECK_DELAYS_S, Gap, State
from feedmill.shared.broker import connect, make_app, user_errors
from feedmill.shared.errors import UserError, convert_errors, printable
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.stack.signals import EXIT_SIGNALS, handle_signals, not_ignored
from feedmill.workers.models.plugins import load_plugin

if TYPE_CHECKING:  # needs PRAW, an optional package
    pass

logger = logging.getLogger(__name__)

#: Posts per topic that are read by default.
DEFAULT_LIMIT = 100
#: Seconds between two status lines: redrawn on a terminal, and appended to a log.
REFRESH_INTERVAL_S, LOG_INTERVAL_S = 1.0, 60.0
#: Seconds until the first status line in a log.
FIRST_LOG_DELAY_S = 10.0

app = typer.Typer(
    name="ingest",
    help="Read posts from Reddit, Bluesky or your own source and send them to the queue.",
    no_args_is_help=True,
)


#: Reddit listings, and periods of the listing `top`.
ListingKind = Literal["hot", "new", "top", "rising"]
Period = Literal["hour", "day", "week", "month", "year", "all"]
#: Sources of Reddit's posts.
RedditSource = Literal["reddit", "arctic-shift"]

TopicsFile = Annotated[Path | None, typer.Option(help="Topics file in TOML (default: built in).")]


@app.command()
@with_groups
def reddit(
    *,
    once: Annotated[bool, typer.Option("--once", help="Read each topic once and exit.")] = False,
    listing: Annotated[
        ListingKind | None, typer.Option(help="Listing to read with --once (default: hot); without --once, always new.")
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Posts to read per topic; without --once, in the first pass only.", min=1, max=1000)
    ] = DEFAULT_LIMIT,
    period: Annotated[Period, typer.Option(help="Period for --listing top.")] = "all",
    source: Annotated[
        RedditSource,
        typer.Option(help="Reddit's API, or arctic-shift: an archive that needs no credentials."),
    ] = "reddit",
    topics: TopicsFile = None,
    flags: MessageFlags,
    metrics_port: MetricsPort = None,
    redis_url: RedisUrl = None,
) -> None:
    """Send new Reddit posts to the queue until SIGTERM.

    With --once, send the posts that the listing contains now and exit, with status 1 if a topic could not be read.
    Posts that were already sent are skipped.
    """
    if not once and listing not in (None, "new"):
        raise UserError(
            f"--listing {listing} requires --once: without --once, only new posts are read. Add --once, or leave out "
            "--listing."
        )
    if once and source != "reddit":
        raise UserError(f"--once reads Reddit's listings, which {source} does not have. Leave out --once or --source.")
    settings = flags.settings_of(redis_url=redis_url, reddit_topics=topics, metrics_port=metrics_port)
    options = flags.options(settings)
    _require_packages()
    clock = Clock()
    with _stopping_on_signals(clock, is_service=not once), user_errors(settings):
        redis = connect(settings)
        redis.ping()  # fail before the first request to Reddit
        settings = flags.select_queue(settings, redis)
        if once:
            _one_pass(settings, options, clock, listing or "hot", limit, period)
        else:
            _keep_reading(settings, options, clock, limit, source)


@contextmanager
def _stopping_on_signals(clock: Clock, is_service: bool = True) -> Iterator[None]:
    """Leave the block as soon as SIGTERM, SIGHUP or Ctrl-C arrives, also during a wait.

    is_service: signals are the normal end. Otherwise the command exits with status 128 + the signal's number.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        clock.stop()

    with handle_signals(stop, *not_ignored(*EXIT_SIGNALS)):
        try:
            yield
        except Stopped:
            logger.info("stopped; posts that were read but not sent will be read again")
            if not is_service:
                raise SystemExit(128 + received[0]) from None


def _require_packages() -> None:
    if find_spec("praw") is None or find_spec("requests") is None:
        raise UserError("Reading Reddit requires the package praw: run `pip install 'feedmill[reddit]'`.")


def _keep_reading(settings: Settings, options: ClassifyOptions, clock: Clock, limit: int, source: RedditSource) -> None:
    """Run the daemon until a signal raises Stopped."""
    # Imported late: these need optional packages.
    from feedmill.producers.reddit.archive_daemon import ArchiveDaemon  # noqa: PLC0415
    from feedmill.producers.reddit.arctic_shift import ArcticShiftClient  # noqa: PLC0415
    from feedmill.producers.reddit.client import RedditClient  # noqa: PLC0415
    from feedmill.producers.reddit.daemon import Daemon  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    redis = connect(settings)
    pusher = Pusher(make_app(settings), redis, settings, options, wait=clock.wait)
    archive_budget = RequestBudget(clock, settings.arctic_shift_requests_per_minute)
    archive = ArcticShiftClient(settings, archive_budget, topics.topic_of)
    daemon: Daemon
    if source == "reddit":
        budget = RequestBudget(clock, settings.reddit_requests_per_minute)
        reddit = RedditClient(settings, budget, topics.topic_of)
        filling = (archive, archive_budget) if settings.reddit_fill_gaps else None
        daemon = Daemon(reddit, budget, redis, pusher, topics, settings, clock, limit, archive=filling)
    else:
        daemon = ArchiveDaemon(
            archive, archive_budget, redis, pusher, topics, settings, clock, limit,
            recheck_delays=ARCHIVE_RECHECK_DELAYS_S,
        )  # fmt: skip
    _run(daemon, Metrics(settings), format_daemon_status, settings, clock)


@app.command()
@with_groups
def bluesky(
    *,
    languages: Annotated[
        str | None, typer.Option(metavar="CODES", help="Read only posts that declare one of these languages: en,pt.")
    ] = None,
    min_characters: Annotated[
        int | None, typer.Option(metavar="N", help="Read only posts with at least this many characters (default: 1).")
    ] = None,
    flags: MessageFlags,
    metrics_port: MetricsPort = None,
    redis_url: RedisUrl = None,
) -> None:
    """Send Bluesky's new posts to the queue until SIGTERM, dozens per second. Needs no key.

    Starts with the posts of this moment; a restart resumes where the command stopped. Posts that were already sent are
    skipped, and posts that their authors delete are purged.
    """
    settings = flags.settings_of(
        redis_url=redis_url, bluesky_languages=languages, bluesky_min_characters=min_characters,
        metrics_port=metrics_port,
    )  # fmt: skip
    if find_spec("websockets") is None:
        raise UserError("Reading Bluesky requires the package websockets: run `pip install 'feedmill[bluesky]'`.")
    from feedmill.producers.bluesky import BlueskySource  # noqa: PLC0415 - needs websockets, an optional package

    _follow(BlueskySource, settings, flags)


@app.command()
@with_groups
def live(
    *,
    live_source: Annotated[
        str | None, typer.Option(metavar="MODULE:CLASS", help="Class of the source (docs/extending.md).")
    ] = None,
    flags: MessageFlags,
    metrics_port: MetricsPort = None,
    redis_url: RedisUrl = None,
) -> None:
    """Send the new posts of your own live source to the queue until SIGTERM, as `ingest bluesky` does."""
    settings = flags.settings_of(redis_url=redis_url, live_source=live_source, metrics_port=metrics_port)
    if settings.live_source is None:
        raise UserError("No source is given. Name its class with --live-source MODULE:CLASS.")
    _follow(load_plugin(settings.live_source, "live_source"), settings, flags)


def _follow(make: Callable[[Settings, Clock], Source], settings: Settings, flags: MessageFlags) -> None:
    """Run the daemon of a live source until a signal arrives."""
    options = flags.options(settings)
    clock = Clock()
    with _stopping_on_signals(clock), user_errors(settings):
        redis = connect(settings)
        redis.ping()
        settings = flags.select_queue(settings, redis)
        source = make(settings, clock)
        pusher = Pusher(make_app(settings), redis, settings, options, wait=clock.wait)
        with closing(LiveDaemon(source, redis, pusher, settings, clock)) as daemon:
            _run(daemon, LiveMetrics(settings, source.name), format_live_status, settings, clock)


class _Steps(Protocol):
    """A daemon, as far as its loop needs to know it."""

    def step(self) -> float: ...

    def status(self) -> dict[str, Any]: ...

    def report_end(self) -> None: ...


def _run(
    daemon: _Steps,
    metrics: DaemonMetrics,
    describe: Callable[[dict[str, Any]], str],
    settings: Settings,
    clock: Clock,
) -> None:
    """Run a daemon with its status line, and with metrics if a port is set, until a signal raises Stopped."""
    if settings.metrics_port:
        metrics.serve()
    with _status_line(describe) as show:
        try:
            while True:
                pause = daemon.step()
                show(daemon)
                metrics.update(daemon.status())
                clock.wait(min(pause, REFRESH_INTERVAL_S))
        except Stopped:
            with suppress(RedisError):  # `feedmill health` then takes the daemon for lost
                daemon.report_end()
            raise


@contextmanager
def _status_line(describe: Callable[[dict[str, Any]], str]) -> Iterator[Callable[[_Steps], None]]:
    """Yield a function that shows the daemon's status, in a line redrawn on a terminal, else in the log."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        logged_at = time.monotonic() - LOG_INTERVAL_S + FIRST_LOG_DELAY_S

        def log(daemon: _Steps) -> None:
            nonlocal logged_at
            if time.monotonic() - logged_at >= LOG_INTERVAL_S:
                logged_at = time.monotonic()
                logger.info("%s", describe(daemon.status()))

        yield log
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)  # the stream of Live, which writes above its line
        shown = 0.0

        def draw(daemon: _Steps) -> None:
            nonlocal shown
            if time.monotonic() - shown >= REFRESH_INTERVAL_S:
                shown = time.monotonic()
                live.update(Text(describe(daemon.status()), no_wrap=True, overflow="ellipsis"), refresh=True)

        yield draw


def format_daemon_status(status: dict[str, Any]) -> str:
    """Format the daemon's status as one line."""
    parts = [f"{status['subreddits']} subreddits of {status['topics']} topics", f"{status['sent']:,} sent"]
    if status["paused"]:
        parts.append(f"PAUSED: the queue is full, {status['held']:,} posts held")
    elif status["held"]:
        parts.append(f"{status['held']:,} posts held")
    if status["hindrance"]:
        parts.append(status["hindrance"])
    if status["failing"]:
        parts.append(f"{len(status['failing'])} subreddits failing")
    if status["gaps"]:
        parts.append(f"{status['gaps']} gaps" + (f", {status['filled']} filled" if status.get("filled") else ""))
    if status["purged"]:
        parts.append(f"{status['purged']:,} purged")
    parts.append(f"{status['requests']:,} requests")
    if status["budget"] is not None:
        parts.append(f"{status['budget']:.0f} left")
    return " · ".join(parts)


def format_live_status(status: dict[str, Any]) -> str:
    """Format the status of a live source's daemon as one line."""
    parts = [f"{status['sent']:,} sent"]
    if status["filtered"]:
        parts.append(f"{status['filtered']:,} filtered")
    if status["paused"]:
        parts.append("PAUSED: the queue is full")
    if status["hindrance"]:
        parts.append(status["hindrance"])
    if status["delay"] is not None:
        parts.append(f"newest event {span(status['delay'])} old")
    if status["gaps"]:
        parts.append(f"{status['gaps']} gap{'s' if status['gaps'] > 1 else ''}")
    if status["purged"]:
        parts.append(f"{status['purged']:,} purged")
    if status["ahead"]:
        parts.append(f"{status['ahead']:,} from the future")
    if status["unreadable"]:
        parts.append(f"{status['unreadable']:,} unreadable")
    return " · ".join(parts)


def _one_pass(
    settings: Settings, options: ClassifyOptions, clock: Clock, kind: ListingKind, limit: int, period: Period
) -> None:
    """Read each topic's listing once, recheck earlier posts, print a summary and exit."""
    # Imported late: needs PRAW, an optional package.
    from feedmill.producers.reddit.client import RedditClient, outage_error  # noqa: PLC0415
    from feedmill.producers.reddit.rechecks import Rechecker  # noqa: PLC0415
    from feedmill.producers.reddit.snapshot import Listing, SnapshotCounts, SnapshotReader, with_retries  # noqa: PLC0415
    from feedmill.producers.reddit.subreddits import Roster  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    reddit = RedditClient(settings, RequestBudget(clock, settings.reddit_requests_per_minute), topics.topic_of)
    redis = connect(settings)
    state = State(redis)
    pusher = Pusher(make_app(settings), redis, settings, options, wait=clock.wait)
    roster = Roster(reddit, topics, state, clock)
    snapshot = SnapshotReader(reddit, pusher, state, clock)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    listing = Listing(kind, limit, period if kind == "top" else "")
    columns = (
        TextColumn("{task.description:<16}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    problems = 0
    with convert_errors(partial(outage_error, settings), Outage), Progress(*columns, console=notes) as progress:
        for topic in topics.topics:
            bar = progress.add_task(topic, total=limit, note="checking subreddits")
            try:
                with_retries(partial(roster.check, topic), clock)
            except RequestFailed as fault:
                notes.print(
                    f"cannot check the subreddits of topic {topic} ({fault}); keeping the previous selection",
                    markup=False,
                )
            reading = SnapshotCounts()
            for reading in snapshot.read(roster.active[topic], listing):
                note = f"{reading.sent:,} sent, {reading.skipped:,} already sent"
                progress.update(
                    bar, completed=reading.read, note=f"{note}; {reading.problem}" if reading.problem else note
                )
            progress.update(bar, total=max(reading.read, 1) if not reading.problem else limit)
            problems += bool(reading.problem)
        rechecks = Rechecker(reddit, redis, state, settings, clock, snapshot.send)
        try:
            while not with_retries(rechecks.run, clock):
                pass
        except RedditFault as fault:
            notes.print(f"recheck of earlier posts failed ({fault}); the next run repeats it", markup=False)
    sent = f"{pusher.sent:,} post{'s' if pusher.sent != 1 else ''} sent (messages: {pusher.messages:,})"
    typer.echo(f"{sent}, {pusher.skipped:,} already sent")
    raise typer.Exit(1 if problems else 0)


@app.command()
@with_groups
def gaps(
    *,
    fill: Annotated[
        bool, typer.Option("--fill", help="Fill the gaps from Arctic Shift, an archive of Reddit.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Clear the list after printing it.")] = False,
    as_json: AsJson = False,
    topics: TopicsFile = None,
    flags: MessageFlags,
    redis_url: RedisUrl = None,
) -> None:
    """List gaps: periods in which posts of a subreddit or of a live source were missed.

    With --fill, send the posts that the archive has of these periods, with the given labels and options, and exit with
    status 1 if a gap of a subreddit remains. Or fill a gap from a dump with `feedmill enqueue --subreddit --since
    --until`, then clear the list.
    """
    settings = flags.settings_of(redis_url=redis_url, reddit_topics=topics)
    with user_errors(settings):
        redis = connect(settings)
        state = State(redis)
        if fill:
            options = flags.options(settings)
            _require_packages()
            clock = Clock()
            with _stopping_on_signals(clock):
                _fill_gaps(flags.select_queue(settings, redis), options, clock)
        found, live = state.gaps(), all_gaps(redis)
        if clear:
            state.forget_gaps()
            for name in {gap.source for gap in live}:
                LiveState(redis, name).forget_gaps()
    _print_live_gaps(live, as_json)
    for gap in found:
        if as_json:
            typer.echo(json.dumps(gap._asdict()))
        else:
            times = f"{utc(gap.since)} to {utc(gap.until)}, recorded {utc(gap.noted)}"
            typer.echo(f"r/{printable(gap.subreddit):<22} {times}; {_gap_state(gap)}")
    if not found and not live and not as_json:
        typer.echo("No gaps.")
    if fill and any(not gap.filled for gap in found):
        raise typer.Exit(1)


def _print_live_gaps(gaps: Sequence[LiveGap], as_json: bool) -> None:
    for gap in gaps:
        times = f"{utc(gap.since)} to {utc(gap.until)}, recorded {utc(gap.noted)}"
        typer.echo(json.dumps(gap._asdict()) if as_json else f"{gap.source:<24} {times}")


def _gap_state(gap: Gap) -> str:
    """Return whether a gap is filled, or why not."""
    if gap.filled:
        return f"filled with {gap.found:,} posts"
    return f"open: {printable(gap.problem)}" if gap.problem else "open"


def _fill_gaps(settings: Settings, options: ClassifyOptions, clock: Clock) -> None:
    """Fill all open gaps from Arctic Shift. Failures are stored with the gaps."""
    # Imported late: these need optional packages.
    from feedmill.producers.reddit.arctic_shift import ArcticShiftClient  # noqa: PLC0415
    from feedmill.producers.reddit.gap_filler import GapFiller  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    redis = connect(settings)
    state = State(redis)
    pusher = Pusher(make_app(settings), redis, settings, options, wait=clock.wait)
    budget = RequestBudget(clock, settings.arctic_shift_requests_per_minute)

    def send(items: Sequence[ListingItem], end: Callable[[], None]) -> None:
        present = [item for item in items if item.post and not item.gone]
        pusher.push(item.post for item in present if item.post)
        state.commit((), present, clock.time())
        end()

    filler = GapFiller(ArcticShiftClient(settings, budget, topics.topic_of), budget, state, clock, send)
    for number, gap in enumerate(state.open_gaps(), 1):
        filler.fill(gap)
        logger.info("gap %d: %d posts found so far, %d sent", number, filler.found, pusher.sent)


@app.command()
def subreddits(
    as_json: AsJson = False,
    topics: TopicsFile = None,
    redis_url: RedisUrl = None,
) -> None:
    """List each topic's subreddits, the replaced ones, and the reasons."""
    settings = settings_of(redis_url=redis_url, reddit_topics=topics)
    listed = topics_file.read(settings.reddit_topics)
    with user_errors(settings):
        replaced = State(connect(settings)).replaced()
    for topic, names in listed.topics.items():
        out = [replaced[name.lower()] for name in names if name.lower() in replaced]
        if as_json:
            typer.echo(
                json.dumps({"topic": topic, "subreddits": names, "replaced": [entry._asdict() for entry in out]})
            )
            continue
        typer.echo(printable(f"{topic:<16} {', '.join(names)}"))
        for each in out:
            instead = f"replaced by r/{each.by}" if each.by else "not replaced"
            typer.echo(printable(f"{'':<16} r/{each.subreddit}: {each.reason} since {utc(each.since)}; {instead}"))


@app.command("topics")
def print_topics() -> None:
    """Print the default topics file, as a template for your own."""
    typer.echo(topics_file.DEFAULT_TOPICS_FILE.read_text(encoding="utf-8"), nl=False)
