"""The `feedmill ingest` commands: read posts from Reddit, Bluesky or another live source, and show gaps."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Annotated, Any, Literal

import typer
from redis import Redis
from redis.exceptions import RedisError
from typer import Argument, Option

from feedmill.cli.options import SENDING, AsJson, MessageFlags, excludes, needs, utc, with_settings
from feedmill.console import counted, span
from feedmill.producers.live.daemon import LiveDaemon, LiveMetrics
from feedmill.producers.live.rechecks import Rechecks
from feedmill.producers.live.source import (
    Clock,
    RequestBudget,
    RequestFailed,
    Source,
    SourceFailed,
    Stopped,
    with_retries,
)
from feedmill.producers.live.state import Gap, Gaps
from feedmill.producers.push import Pusher
from feedmill.producers.reddit import topics as topics_file
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import UserError, explain_missing, printable
from feedmill.shared.settings import Settings
from feedmill.stack.processes import EXIT_SIGNALS, handle_signals, not_ignored
from feedmill.workers.models.plugins import load_plugin

logger = logging.getLogger(__name__)

#: Posts per topic that are read by default.
DEFAULT_LIMIT = 100
#: Seconds between two status lines in a log, and until the first one.
LOG_INTERVAL_S, FIRST_LOG_DELAY_S = 60.0, 10.0

ingest = typer.Typer(no_args_is_help=True)

#: Reddit listings, and periods of the listing `top`.
ListingKind = Literal["hot", "new", "top", "rising"]
Period = Literal["hour", "day", "week", "month", "year", "all"]
#: Sources of Reddit's posts.
RedditSite = Literal["reddit", "arctic-shift"]


@ingest.command()
@needs("--listing", "--once")
@needs("--period", "--once")
@excludes("--once", "--source")
@with_settings(*SENDING, "reddit_topics", "metrics_port")
def reddit(
    settings: Settings,
    flags: MessageFlags,
    once: Annotated[bool, Option("--once", help="Read each topic once and exit.")] = False,
    listing: Annotated[ListingKind, Option(help="Listing to read with --once; without --once, always new.")] = "hot",
    limit: Annotated[
        int, Option(help="Posts to read per topic; without --once, in the first pass only.", min=1, max=1000)
    ] = DEFAULT_LIMIT,
    period: Annotated[Period, Option(help="Period for --listing top.")] = "all",
    source: Annotated[
        RedditSite, Option(help="Reddit's API, or arctic-shift: an archive that needs no credentials.")
    ] = "reddit",
) -> None:
    """Send new Reddit posts to the queue until SIGTERM.

    With --once, send the posts that the listing contains now and exit, with status 1 if a topic could not be read.
    Posts that were already sent are skipped.
    """
    with explain_missing("This source", "reddit"):
        import feedmill.producers.reddit.client  # noqa: F401, PLC0415 - needs praw, an optional package
    if once:
        _one_pass(settings, flags, listing, limit, period)
    else:
        _follow(partial(_reddit_source, limit, source), settings, flags)


def _reddit_source(limit: int, site: RedditSite, settings: Settings, clock: Clock, redis: Redis) -> Any:
    # Imported late: these need optional packages.
    from feedmill.producers.reddit import arctic_shift, client  # noqa: PLC0415
    from feedmill.producers.reddit.source import ArchiveSource, RedditSource  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    budget = RequestBudget(clock, arctic_shift.REQUESTS_PER_MINUTE)
    archive = arctic_shift.ArcticShiftClient(settings, budget, topics.topic_of)
    if site == "arctic-shift":
        return ArchiveSource(archive, redis, topics, settings, clock, limit)
    api = client.RedditClient(settings, RequestBudget(clock, client.REQUESTS_PER_MINUTE), topics.topic_of)
    return RedditSource(api, redis, topics, settings, clock, limit, archive if settings.reddit_fill_gaps else None)


@ingest.command()
@with_settings(*SENDING, "bluesky_languages", "bluesky_min_characters", "metrics_port")
def bluesky(settings: Settings, flags: MessageFlags) -> None:
    """Send Bluesky's new posts to the queue until SIGTERM, dozens per second. Needs no key.

    Starts with the posts of this moment; a restart resumes where the command stopped. Posts that were already sent are
    skipped, and posts that their authors delete are purged.
    """
    with explain_missing("This source", "bluesky"):
        from feedmill.producers.bluesky import BlueskySource  # noqa: PLC0415 - needs websockets, an optional package
    _follow(lambda settings, clock, _: BlueskySource(settings, clock), settings, flags)


@ingest.command()
@with_settings(*SENDING, "metrics_port")
def live(
    settings: Settings,
    flags: MessageFlags,
    source: Annotated[str, Argument(metavar="MODULE:CLASS", help="Class of the source (docs/extending.md).")],
) -> None:
    """Send the new posts of your own live source to the queue until SIGTERM, as `ingest bluesky` does."""
    make = load_plugin(source, "MODULE:CLASS")
    _follow(lambda settings, clock, _: make(settings, clock), settings, flags)


@contextmanager
def _connected(
    settings: Settings, flags: MessageFlags, clock: Clock, is_service: bool = True
) -> Iterator[tuple[Redis, Pusher]]:
    """Yield a connection, and a pusher to the selected queue. Leave the block on SIGTERM, SIGHUP or Ctrl-C.

    is_service: signals are the normal end. Otherwise the command exits with status 128 + the signal's number.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        clock.stop()

    options = flags.options(settings)
    with handle_signals(stop, *not_ignored(*EXIT_SIGNALS)):
        try:
            redis = connect(settings)
            redis.ping()  # fail before the first request to the source
            flags.check_queue(redis)
            yield redis, Pusher(make_app(settings), redis, settings, options, wait=clock.wait)
        except SourceFailed as fault:
            raise UserError(f"{fault}. Posts sent so far are in the queue; run the command again later.") from fault
        except Stopped:
            logger.info("stopped; posts that were read but not sent will be read again")
            if not is_service:
                raise SystemExit(128 + received[0]) from None


def _follow(make: Callable[[Settings, Clock, Redis], Source], settings: Settings, flags: MessageFlags) -> None:
    """Run the daemon of a source until a signal arrives."""
    clock = Clock()
    with _connected(settings, flags, clock) as (redis, pusher):
        source = make(settings, clock, redis)
        metrics = LiveMetrics(settings, source.name)
        if settings.metrics_port:
            metrics.serve()
        log_at = time.monotonic() + FIRST_LOG_DELAY_S
        with closing(LiveDaemon(source, redis, pusher, settings, clock)) as daemon:
            try:
                while True:
                    pause = daemon.step()
                    metrics.update(daemon.status())
                    if time.monotonic() >= log_at:
                        log_at = time.monotonic() + LOG_INTERVAL_S
                        logger.info("%s", format_status(daemon.status()))
                    clock.wait(min(pause, 1.0))
            except Stopped:
                with suppress(RedisError):  # `feedmill health` then takes the daemon for lost
                    daemon.report_end()
                raise


#: Counts in the status line, in this order, each shown unless it is 0 or missing.
COUNTS = {
    "filtered": "{:,} filtered", "purged": "{:,} purged", "failing": "failing subreddits: {:,}",
    "replaced": "replaced subreddits: {:,}", "gaps": "gaps: {:,}",
    "filled": "gaps filled: {:,}", "ahead": "{:,} from the future", "unreadable": "{:,} unreadable",
    "requests": "requests: {:,}", "budget": "requests left: {:,.0f}",
}  # fmt: skip


def format_status(status: dict[str, Any]) -> str:
    """Format the status of a source's daemon as one line."""
    parts = [f"{status['subreddits']} subreddits of {status['topics']} topics"] if "topics" in status else []
    parts.append(f"{status['sent']:,} sent")
    if status["paused"]:
        parts.append("PAUSED: the queue is full")
    if status["hindrance"]:
        parts.append(status["hindrance"])
    if status["delay"] is not None:
        parts.append(f"newest event {span(status['delay'])} old")
    counts = {words: status.get(key) for key, words in COUNTS.items()}
    numbers = {words: len(count) if isinstance(count, list) else count for words, count in counts.items()}
    return " · ".join(parts + [words.format(number) for words, number in numbers.items() if number])


def _one_pass(settings: Settings, flags: MessageFlags, kind: ListingKind, limit: int, period: Period) -> None:
    """Read each topic's listing once, recheck earlier posts, print a summary and exit."""
    from feedmill.producers.reddit.source import Listing  # noqa: PLC0415 - needs requests, an optional package

    clock = Clock()
    listing = Listing(kind, limit, period if kind == "top" else "")
    failed = False
    with _connected(settings, flags, clock, is_service=False) as (redis, pusher):
        source = _reddit_source(limit, "reddit", settings, clock, redis)
        rechecks = Rechecks(source, redis, settings, pusher, clock)
        for topic in source.active:
            with_retries(partial(source.check, topic), clock)
            problems: list[str] = []
            posts = list(source.snapshot(source.active[topic], listing, problems))
            rechecks.schedule(posts)
            pusher.push(posts)
            failed |= bool(problems)
            typer.echo(printable(f"{topic:<16} {len(posts)} of {limit}{'; '.join(['', *problems])}"), err=True)
        try:
            while rechecks.run():
                pass
        except RequestFailed as fault:
            logger.warning("recheck of earlier posts failed (%s); the next run repeats it", fault)
    sent = counted(pusher.sent, "post")
    typer.echo(f"{sent} sent (messages: {pusher.messages:,}), {pusher.skipped:,} already sent")
    raise typer.Exit(1 if failed else 0)


@ingest.command()
@with_settings("redis_url")
def gaps(
    settings: Settings,
    clear: Annotated[bool, Option("--clear", help="Clear the list after printing it.")] = False,
    as_json: AsJson = False,
) -> None:
    """List gaps: periods in which posts of a subreddit or of a live source were missed.

    With FEEDMILL_REDDIT_FILL_GAPS, `ingest reddit` fills those of Reddit. Or fill one from a dump with `feedmill
    enqueue --subreddit --since --until`, then clear the list.
    """
    known = Gaps(connect(settings))
    found = known.all()
    if clear:
        known.clear()
    for gap in found:
        name = printable(gap.place)
        times = f"{utc(gap.since)} to {utc(gap.until)}, recorded {utc(gap.noted)}"
        typer.echo(json.dumps(gap._asdict()) if as_json else f"{name:<24} {times}; {_gap_state(gap)}")
    if not found and not as_json:
        typer.echo("No gaps.")


def _gap_state(gap: Gap) -> str:
    """Return whether a gap is filled, or why not."""
    if gap.filled:
        return f"filled with {gap.found:,} posts"
    return f"open: {printable(gap.problem)}" if gap.problem else "open"


@ingest.command()
def topics() -> None:
    """Print the default topics file, as a template for your own."""
    typer.echo(topics_file.DEFAULT_TOPICS_FILE.read_text(encoding="utf-8"), nl=False)
