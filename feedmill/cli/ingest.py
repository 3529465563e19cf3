"""The `feedmill ingest` commands: read posts from Reddit, Bluesky, feeds or another live source,
and show gaps.
"""

import faulthandler
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from redis import Redis
from redis.exceptions import RedisError
from typer import Argument, Option

from feedmill.cli.none_flag import NoneCommand
from feedmill.cli.options import (
    SENDING,
    AsJson,
    ForExcel,
    MessageFlags,
    excludes,
    needs,
    utc,
    with_settings,
)
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
from feedmill.producers.live.state import Gap, Gaps, parse_gaps
from feedmill.producers.push import Pusher
from feedmill.producers.reddit import topics as topics_file
from feedmill.producers.reddit.checks import (
    SUBSTITUTE,
    VERIFIED,
    SubredditState,
    stored_states,
)
from feedmill.shared.broker import connect, make_app, wait_while_starting
from feedmill.shared.errors import UserError, explain_missing, printable
from feedmill.shared.settings import Settings
from feedmill.stack.processes import EXIT_SIGNALS, handle_signals, not_ignored
from feedmill.tables import ENDINGS
from feedmill.workers.models.plugins import load_plugin

logger = logging.getLogger(__name__)

#: Seconds that a process may take to end after a signal. Containers are killed after 30.
STOP_LIMIT_S = 20.0
#: Descriptor of standard error.
STDERR = 2

#: Posts per topic that are read by default.
DEFAULT_LIMIT = 100
#: Seconds between two status lines in a log, and until the first one.
LOG_INTERVAL_S = 60.0
FIRST_LOG_DELAY_S = 10.0

ingest = typer.Typer(no_args_is_help=True)

#: Reddit listings, and periods of the listing `top`.
ListingKind = Literal["hot", "new", "top", "rising"]
Period = Literal["hour", "day", "week", "month", "year", "all"]
#: Sources of Reddit's posts.
RedditSite = Literal["reddit", "arctic-shift"]


@ingest.command(cls=NoneCommand)
@needs("--listing", "--once")
@needs("--period", "--once")
@needs("--out", "--once")
@needs("--raw", "--out")
@needs("--excel", "--out")
@excludes("--once", "--source")
@excludes(
    "--check",
    "--once",
    "--source",
    "--limit",
    "--out",
    "--labels",
    "--template",
    "--multi-label",
    "--none",
    "--queue",
    "--priority",
    "--redis-url",
    "--metrics-port",
)
@excludes(
    "--out",
    "--labels",
    "--template",
    "--multi-label",
    "--none",
    "--queue",
    "--priority",
    "--redis-url",
    "--metrics-port",
)
@with_settings(*SENDING, "reddit_topics", "metrics_port")
def reddit(
    settings: Settings,
    flags: MessageFlags,
    once: Annotated[
        bool, Option("--once", help="Read each topic once and exit.")
    ] = False,
    listing: Annotated[
        ListingKind,
        Option(help=("Listing to read with --once; without --once, always new.")),
    ] = "hot",
    limit: Annotated[
        int,
        Option(
            help="Posts to read per topic; without --once, in the first pass only, and rounded up "
            "to pages of 100.",
            min=1,
            max=1000,
        ),
    ] = DEFAULT_LIMIT,
    period: Annotated[Period, Option(help="Period for --listing top.")] = "all",
    source: Annotated[
        RedditSite,
        Option(
            help=(
                "Reddit's API, or arctic-shift: an archive that needs no credentials."
            )
        ),
    ] = "reddit",
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help=(
                f"With --once: write the posts to this {ENDINGS} file; needs no Redis."
            ),
        ),
    ] = None,
    raw: Annotated[
        bool,
        Option(
            "--raw",
            help=(
                "With --out: write texts as Reddit returned them, not unescaped and trimmed."
            ),
        ),
    ] = False,
    excel: ForExcel = False,
    check: Annotated[
        bool,
        Option(
            "--check",
            help="Try each way to read Reddit, say which works, and exit; needs no Redis.",
        ),
    ] = False,
) -> None:
    """Send new Reddit posts to the queue until SIGTERM.

    With --once, send the posts that the listing contains now and exit, with status 1 if a topic
    could not be read. Posts that were already sent are skipped. With --out, write the posts to a
    file instead. With --check, exits with status 1 if no way works.
    """
    with explain_missing("This source", "reddit"):
        # Needs praw, an optional package.
        import feedmill.producers.reddit.client  # noqa: F401, PLC0415
    if check:
        _check_ways(settings)
    elif out is not None:
        from feedmill.cli.dataset import write_snapshot  # noqa: PLC0415 - needed with --out alone

        chosen = _listing(listing, limit, period)
        write_snapshot(
            settings,
            chosen,
            out,
            is_raw=raw,
            for_excel=excel,
        )
    elif once:
        _one_pass(
            settings,
            flags,
            listing,
            limit,
            period,
        )
    else:
        make = partial(_reddit_source, limit, source)
        _follow(make, settings, flags)


def _check_ways(settings: Settings) -> None:
    """Print for each way to read Reddit whether it works, and exit."""
    # Needs praw, an optional package.
    from feedmill.producers.reddit.access import check_ways  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    is_readable = False
    for way in check_ways(settings, topics, Clock()):
        line = f"{way.name:<8} does not work: {way.result} See {way.explanation}"
        if way.works:
            is_readable = True
            line = f"{way.name:<8} works: {way.result}. Run `{way.command}`"
        typer.echo(printable(line))
    typer.echo("dumps    need no access. Run `feedmill enqueue RS_2026-10.zst`")
    raise typer.Exit(0 if is_readable else 1)


def _reddit_source(
    limit: int, site: RedditSite, settings: Settings, clock: Clock, redis: Redis
) -> Any:
    # Imported late: these need optional packages.
    from feedmill.producers.reddit import arctic_shift, client  # noqa: PLC0415
    from feedmill.producers.reddit.source import ArchiveSource, RedditSource  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    archive_budget = RequestBudget(clock, arctic_shift.REQUESTS_PER_MINUTE)
    archive = arctic_shift.ArcticShiftClient(settings, archive_budget, topics.topic_of)
    if site == "arctic-shift":
        return ArchiveSource(
            archive,
            redis,
            topics,
            settings,
            clock,
            limit,
        )
    budget = RequestBudget(clock, client.REQUESTS_PER_MINUTE)
    api = client.RedditClient(settings, budget, topics.topic_of)
    return RedditSource(
        api,
        redis,
        topics,
        settings,
        clock,
        limit,
        archive if settings.reddit_fill_gaps else None,
    )


@ingest.command(cls=NoneCommand)
@with_settings(
    *SENDING,
    "languages",
    "bluesky_accounts",
    "bluesky_languages",
    "bluesky_min_characters",
    "metrics_port",
)
def bluesky(settings: Settings, flags: MessageFlags) -> None:
    """Send Bluesky's new posts to the queue until SIGTERM, dozens per second. Needs no key.

    Starts with the posts of this moment; a restart resumes where the command stopped. Posts that
    were already sent are skipped, and posts that their authors delete are purged.
    """
    with explain_missing("This source", "bluesky"):
        # Needs websockets, an optional package.
        from feedmill.producers.bluesky import BlueskySource  # noqa: PLC0415

    def make(settings: Settings, clock: Clock, redis: Redis) -> Source:
        return BlueskySource(settings, clock, redis)

    _follow(make, settings, flags)


@ingest.command("hacker-news", cls=NoneCommand)
@with_settings(*SENDING, "metrics_port")
def hacker_news(settings: Settings, flags: MessageFlags) -> None:
    """Send Hacker News' new stories to the queue until SIGTERM. Needs no key.

    Starts with the next story; a restart resumes where the command stopped. Stories that are
    deleted or flagged dead are purged.
    """
    with explain_missing("This source", "feeds"):
        # Needs requests, an optional package.
        from feedmill.producers.hacker_news import HackerNews  # noqa: PLC0415

    def make(settings: Settings, clock: Clock, _: Redis) -> Source:
        return HackerNews(settings, clock)

    _follow(make, settings, flags)


@ingest.command(cls=NoneCommand)
@with_settings(*SENDING, "languages", "mastodon_url", "metrics_port")
def mastodon(
    settings: Settings,
    flags: MessageFlags,
    tag: Annotated[
        list[str] | None,
        Option(
            "--tag",
            help="Read only posts with this tag; repeatable. All public posts by default.",
        ),
    ] = None,
    local: Annotated[
        bool, Option("--local", help="Read only posts of the server's own users.")
    ] = False,
) -> None:
    """Send a Mastodon server's new public posts to the queue until SIGTERM.

    Starts with the posts of this moment; a restart resumes where the command stopped. Posts that
    were already sent are skipped, and deleted ones are purged when they are rechecked.
    """
    with explain_missing("This source", "feeds"):
        # Needs requests, an optional package.
        from feedmill.producers.mastodon import MastodonSource  # noqa: PLC0415

    tags = [name.removeprefix("#") for name in tag or ()]
    if not all(tags):
        raise UserError("--tag: write a tag's name, such as --tag photography.")

    def make(settings: Settings, clock: Clock, redis: Redis) -> Source:
        return MastodonSource(settings, clock, redis, tags, local)

    _follow(make, settings, flags)


@ingest.command(cls=NoneCommand)
@excludes("--check", "--opml")
@with_settings(*SENDING, "languages", "feeds_user_agent", "metrics_port")
def feeds(
    settings: Settings,
    flags: MessageFlags,
    file: Annotated[
        Path,
        Argument(metavar="FEEDS", help="Feeds file: .toml (docs/feeds.md) or .opml."),
    ],
    limit: Annotated[
        int,
        Option(
            help="Entries per feed to start with, the newest ones. Later ones are all read.",
            min=1,
            max=5_000,
        ),
    ] = DEFAULT_LIMIT,
    check: Annotated[
        bool,
        Option(
            "--check",
            help="Read each feed once, show what it has, and exit; needs no Redis.",
        ),
    ] = False,
    opml: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the feeds to this OPML file for other readers, and exit.",
        ),
    ] = None,
) -> None:
    """Send new entries of RSS, Atom and JSON feeds to the queue until SIGTERM.

    A restart resumes where the command stopped. With --check, exits with status 1 if a feed cannot
    be read.
    """
    with explain_missing("This source", "feeds"):
        # Need fastfeedparser, lxml and requests, optional packages.
        import fastfeedparser  # noqa: F401, PLC0415

        from feedmill.producers.feeds import checks, subscriptions  # noqa: PLC0415
        from feedmill.producers.feeds.source import FeedsSource  # noqa: PLC0415

    named = subscriptions.read(file)
    if opml is not None:
        subscriptions.write_opml(opml, named)
        return
    if check:
        problems = 0
        for line, is_read in checks.check_all(named, settings, Clock()):
            typer.echo(printable(line))
            problems += not is_read
        raise typer.Exit(min(problems, 1))

    def make(settings: Settings, clock: Clock, redis: Redis) -> Source:
        return FeedsSource(named, redis, settings, clock, limit)

    _follow(make, settings, flags)


@ingest.command(cls=NoneCommand)
@with_settings(*SENDING, "metrics_port")
def live(
    settings: Settings,
    flags: MessageFlags,
    source: Annotated[
        str,
        Argument(
            metavar="MODULE:CLASS", help=("Class of the source (docs/extending.md).")
        ),
    ],
) -> None:
    """Send the new posts of your own live source to the queue until SIGTERM, as `ingest bluesky`
    does.
    """
    source_class: Callable[..., Source] = load_plugin(source, "MODULE:CLASS")

    def make(settings: Settings, clock: Clock, _: Redis) -> Source:
        return source_class(settings, clock)

    _follow(make, settings, flags)


@contextmanager
def _connect(
    settings: Settings, flags: MessageFlags, clock: Clock, is_service: bool = True
) -> Iterator[tuple[Redis, Pusher]]:
    """Yield a connection, and a pusher to the selected queue.

    Leave the block on SIGTERM, SIGHUP or Ctrl-C. A process that does not end within STOP_LIMIT_S
    is ended with its stack in the log, and with status 1.

    is_service: signals are the normal end. Otherwise the command exits with status 128 + the
    signal's number.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        # Not even a hang of the exit itself outlasts it, and the log then tells where it was.
        faulthandler.dump_traceback_later(STOP_LIMIT_S, exit=True, file=STDERR)
        clock.stop()

    options = flags.options(settings)
    with handle_signals(stop, *not_ignored(*EXIT_SIGNALS)):
        try:
            redis = connect(settings)
            # Fail before the first request to the source.
            if is_service:
                wait_while_starting(redis, settings, clock.wait)
            else:
                redis.ping()
            flags.check_queue(redis)
            app = make_app(settings)
            pusher = Pusher(
                app,
                redis,
                settings,
                options,
                wait=clock.wait,
            )
            yield redis, pusher
        except SourceFailed as fault:
            raise UserError(
                f"{fault}. Posts sent so far are in the queue; run the command again later."
            ) from fault
        except Stopped:
            logger.info("stopped; posts that were read but not sent will be read again")
            # Also before the block has begun, where merely returning would be an error of the
            # context manager.
            exit_status = 0 if is_service else 128 + received[0]
            raise SystemExit(exit_status) from None


def _follow(
    make: Callable[[Settings, Clock, Redis], Source],
    settings: Settings,
    flags: MessageFlags,
) -> None:
    """Run the daemon of a source until a signal arrives."""
    clock = Clock()
    with _connect(settings, flags, clock) as (redis, pusher):
        source = make(settings, clock, redis)
        metrics = LiveMetrics(settings, source.name)
        metrics.start()
        log_at = time.monotonic() + FIRST_LOG_DELAY_S
        live_daemon = LiveDaemon(
            source,
            redis,
            pusher,
            settings,
            clock,
        )
        with closing(live_daemon) as daemon:
            try:
                while True:
                    pause = daemon.step()
                    metrics.update(daemon.status())
                    if time.monotonic() >= log_at:
                        log_at = time.monotonic() + LOG_INTERVAL_S
                        line = format_status(daemon.status())
                        logger.info("%s", line)
                    clock.wait(min(pause, 1.0))
            except Stopped:
                # If it fails, `feedmill health` takes the daemon for lost.
                with suppress(RedisError):
                    daemon.report_end()
                raise


#: Counts in the status line, in this order, each shown unless it is 0 or missing.
COUNTS = {
    "filtered": "{:,} filtered", "purged": "{:,} purged", "failing": "failing subreddits: {:,}",
    "failing_feeds": "failing feeds: {:,}", "gone_feeds": "gone feeds: {:,}",
    "replaced": "replaced subreddits: {:,}", "gaps": "gaps: {:,}",
    "filled": "gaps filled: {:,}", "ahead": "{:,} from the future",
    "steps_back": "clock went back: {:,}", "switches": "server changes: {:,}",
    "unreadable": "{:,} unreadable",
    "requests": "requests: {:,}", "budget": "requests left: {:,.0f}",
}  # fmt: skip


def format_status(status: dict[str, Any]) -> str:
    """Format the status of a source's daemon as one line."""
    parts = []
    if "topics" in status:
        parts.append(f"{status['subreddits']} subreddits of {status['topics']} topics")
    if "feeds" in status:
        parts.append(counted(status["feeds"], "feed"))
    if status.get("server"):
        parts.append(f"reading {status['server']}")
    parts.append(f"{status['sent']:,} sent")
    if status["paused"]:
        parts.append("PAUSED: the queue is full")
    if status["hindrance"]:
        parts.append(status["hindrance"])
    if status.get("clock"):
        parts.append(status["clock"])
    delay = status["delay"]
    if delay is not None:
        parts.append(f"newest event {span(delay)} old")
    for key, words in COUNTS.items():
        count = status.get(key)
        if isinstance(count, list):
            count = len(count)
        if count:
            parts.append(words.format(count))
    return " · ".join(parts)


def _listing(kind: ListingKind, limit: int, period: Period) -> Any:
    """Return the listing to read once. Only the listing top has a period."""
    # Needs requests, an optional package.
    from feedmill.producers.reddit.snapshot import Listing  # noqa: PLC0415

    if kind != "top":
        return Listing(kind, limit, "")
    return Listing(kind, limit, period)


def _one_pass(
    settings: Settings,
    flags: MessageFlags,
    kind: ListingKind,
    limit: int,
    period: Period,
) -> None:
    """Read each topic's listing once, recheck earlier posts, print a summary and exit."""
    clock = Clock()
    listing = _listing(kind, limit, period)
    failed = False
    with _connect(
        settings,
        flags,
        clock,
        is_service=False,
    ) as (redis, pusher):
        source = _reddit_source(
            limit,
            "reddit",
            settings,
            clock,
            redis,
        )
        rechecks = Rechecks(
            source,
            redis,
            settings,
            pusher,
            clock,
        )
        for topic in source.active:
            choose = partial(source.choose_subreddits, topic)
            with_retries(choose, clock)
            problems: list[str] = []
            subreddits = source.active[topic]
            posts = list(source.snapshot(subreddits, listing, problems))
            rechecks.schedule(posts)
            pusher.push(posts)
            line = f"{topic:<16} {len(posts)} of {limit}"
            for problem in problems:
                failed = True
                line += f"; {problem}"
            typer.echo(printable(line), err=True)
        try:
            while rechecks.run():
                pass
        except RequestFailed as fault:
            logger.warning(
                "recheck of earlier posts failed (%s); the next run repeats it", fault
            )
    posts_sent = counted(pusher.sent, "post")
    messages = f"messages: {pusher.messages:,}"
    typer.echo(f"{posts_sent} sent ({messages}), {pusher.skipped:,} already sent")
    raise typer.Exit(1 if failed else 0)


@ingest.command(cls=NoneCommand)
@with_settings("redis_url")
def gaps(
    settings: Settings,
    clear: Annotated[
        bool, Option("--clear", help="Clear the list after printing it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List gaps: periods in which posts of a subreddit or of a live source were missed.

    With FEEDMILL_REDDIT_FILL_GAPS, `ingest reddit` fills those of Reddit, and with
    FEEDMILL_BLUESKY_ARCHIVE_URL, `ingest bluesky` those of Bluesky. Or fill one from a dump
    with `feedmill enqueue --subreddit --since --until`, then clear the list.
    """
    recorded = Gaps(connect(settings))
    stored = recorded.stored()
    parsed_gaps = parse_gaps(stored)
    for gap in parsed_gaps:
        if as_json:
            line = json.dumps(gap._asdict())
        else:
            line = _gap_line(gap)
        typer.echo(line)
    if not parsed_gaps and not as_json:
        typer.echo("No gaps.")
    if clear:
        # Last, and only what was printed: after a closed pipe or a full disk, nobody has read the
        # list.
        recorded.remove(stored)


def _gap_line(gap: Gap) -> str:
    """Return a line about a gap: where and when, and whether it is filled."""
    name = printable(gap.origin)
    since = utc(gap.since)
    until = utc(gap.until)
    recorded = utc(gap.noted)
    state = _gap_state(gap)
    return f"{name:<24} {since} to {until}, recorded {recorded}; {state}"


def _gap_state(gap: Gap) -> str:
    """Return whether a gap is filled, or why not."""
    if gap.filled:
        return f"filled with {gap.found:,} posts"
    if gap.problem:
        problem = printable(gap.problem)
        return f"open: {problem}"
    return "open"


@ingest.command(cls=NoneCommand)
@with_settings("reddit_topics", "redis_url")
def subreddits(
    settings: Settings,
    check: Annotated[
        bool,
        Option(
            "--check",
            help=(
                "Ask Reddit about every subreddit of the topics file now; needs no Redis."
            ),
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List subreddits: which ones are verified, missing, private or asleep, and which are read
    instead.

    Shows what `ingest reddit` found at its latest check, at its start and daily.
    """
    states: Iterable[SubredditState]
    if check:
        # Needs requests, an optional package.
        from feedmill.cli.dataset import checked_states  # noqa: PLC0415

        states = checked_states(settings)
    else:
        states = stored_states(connect(settings))
    is_empty = True
    for state in states:
        is_empty = False
        if as_json:
            line = json.dumps(state._asdict())
        else:
            line = format_subreddit(state)
        typer.echo(line)
    if is_empty and not as_json:
        typer.echo(
            "No subreddit was checked yet. Run `feedmill ingest reddit`, or give --check."
        )


def format_subreddit(state: SubredditState) -> str:
    """Return a line about a subreddit."""
    name = f"r/{state.subreddit}"
    if state.state == VERIFIED:
        words = f"verified {utc(state.since)}"
    elif state.state == SUBSTITUTE:
        words = "can be read; a substitute"
    else:
        substitute = _substitute(state.by)
        words = f"{state.state} since {utc(state.since)}; {substitute}"
    line = f"{state.topic:<16} {name:<24} {words}"
    return printable(line)


def _substitute(subreddit: str | None) -> str:
    """Return which subreddit is read in place of another. subreddit: None if none is."""
    if not subreddit:
        return "no substitute"
    return f"r/{subreddit} is read instead"


#: Subreddits named in `feedmill status`; the rest are counted.
MAX_VERIFIED_SHOWN = 4
MAX_REPLACED_SHOWN = 5


def format_subreddits(status: dict[str, Any]) -> list[str]:
    """Return lines about the subreddits in the status of Reddit's daemon; none for other
    sources.
    """
    lines = []
    verified = []
    for names in status.get("verified", {}).values():
        verified.extend(names)
    if verified:
        first_names = [f"r/{name}" for name in verified[:MAX_VERIFIED_SHOWN]]
        listed = ", ".join(first_names)
        more = len(verified) - len(first_names)
        if more:
            listed += f" and {more:,} more"
        lines.append(f"verified: {listed} · `feedmill ingest subreddits`")
    entries = status.get("replaced", [])
    replaced = [entry for entry in entries if isinstance(entry, dict)]
    first_entries = replaced[:MAX_REPLACED_SHOWN]
    for entry in first_entries:
        substitute = _substitute(entry["by"])
        lines.append(f"r/{entry['subreddit']} is {entry['reason']}: {substitute}")
    more = len(replaced) - len(first_entries)
    if more:
        lines.append(f"and {more:,} more are not read")
    return lines


@ingest.command(cls=NoneCommand)
def topics() -> None:
    """Print the default topics file, as a template for your own."""
    text = topics_file.DEFAULT_TOPICS_FILE.read_text(encoding="utf-8")
    typer.echo(text, nl=False)
