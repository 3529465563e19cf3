"""`feedmill ingest`: posts from Reddit, as a daemon or in one pass, and what there is to know of it."""

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from feedmill.flags import (
    AsJson,
    Labels,
    MultiLabel,
    Priority,
    RedisUrl,
    Template,
    ToModel,
    ToQueue,
    options_of,
    sending,
    settings_of,
)
from producers.push import Pusher
from producers.reddit import topics as topics_file
from producers.reddit.clock import Clock, Stopped
from producers.reddit.metrics import Metrics
from producers.reddit.state import State
from shared.broker import connect, make_app, told_plainly
from shared.errors import UserError, printable
from shared.messages import ClassifyOptions
from shared.settings import Settings

if TYPE_CHECKING:  # PRAW is there only where posts are read from Reddit
    from producers.reddit.daemon import Daemon

logger = logging.getLogger(__name__)

#: Posts of a topic that are read where no limit is given.
LIMIT = 100
#: Seconds between two words of how it goes: on a terminal, where one line is written over, and in a log.
REFRESH, LOG_EVERY = 1.0, 60.0

app = typer.Typer(help="Read posts from Reddit.", no_args_is_help=True)


class Kind(StrEnum):
    """Reddit's listings."""

    HOT = "hot"
    NEW = "new"
    TOP = "top"
    RISING = "rising"


class Period(StrEnum):
    """What the listing `top` is made of."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    YEAR = "year"
    ALL = "all"


@app.command()
def reddit(
    once: Annotated[bool, typer.Option("--once", help="One pass over the topics, and end.")] = False,
    listing: Annotated[
        Kind | None, typer.Option(help="What one pass reads: hot unless given. The daemon reads new.")
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Posts of each topic; of the daemon, those to begin with.", min=1, max=1000)
    ] = LIMIT,
    period: Annotated[Period, typer.Option(help="Of what time, with --listing top.")] = Period.ALL,
    topics: Annotated[Path | None, typer.Option(help="File of topics, in TOML.", show_default=False)] = None,
    labels: Labels = None,
    template: Template = None,
    multi_label: MultiLabel = False,
    to_model: ToModel = None,
    to_queue: ToQueue = None,
    priority: Priority = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve the daemon's metrics to Prometheus, on loopback.", show_default=False)
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Send Reddit's posts to the queue: each new one as it comes, until SIGTERM; with --once, what is there now."""
    if not once and listing not in (None, Kind.NEW):
        raise UserError(f"The daemon reads new posts. For one pass over {listing}, add --once.")
    settings = settings_of(
        redis_url=redis_url,
        reddit_topics=topics,
        labels=labels,
        template=template,
        queue=to_queue,
        priority=priority,
        metrics_port=metrics_port,
    )
    options = options_of(settings, labels, template, multi_label)
    if find_spec("praw") is None:
        raise UserError("Reading Reddit needs PRAW: `pip install 'feedmill[reddit]'` brings it.")
    clock = Clock()
    with _ended_by(clock), told_plainly(settings):
        redis = connect(settings)
        redis.ping()  # before Reddit is asked for anything
        settings = sending(settings, redis, to_model, to_queue)
        if once:
            _one_pass(settings, options, clock, listing or Kind.HOT, limit, period)
        else:
            _keep_reading(settings, options, clock, limit)
    raise typer.Exit(1 if once else 0)  # asked to end: of one pass something is left


@contextmanager
def _ended_by(clock: Clock) -> Iterator[None]:
    """Inside the block SIGTERM, SIGHUP and Ctrl-C end every wait at once, and leave by Stopped, which ends here."""
    # What is ignored stays ignored: under nohup a closed terminal is no reason to end.
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: clock.stop()) for number in wanted}
    try:
        yield
    except Stopped:
        logger.info("ended; what was read and not sent will be read again")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep_reading(settings: Settings, options: ClassifyOptions, clock: Clock, limit: int) -> None:
    from producers.reddit.budget import Budget  # noqa: PLC0415
    from producers.reddit.client import Reddit  # noqa: PLC0415
    from producers.reddit.daemon import Daemon  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    budget = Budget(clock, settings.reddit_requests_per_minute)
    redis = connect(settings)
    pusher = Pusher(make_app(settings), redis, settings, options, wait=clock.wait)
    reddit = Reddit(settings, budget, topics.topic_of)
    daemon = Daemon(reddit, budget, redis, pusher, topics, settings, clock, limit)
    measure = _measured(settings)
    with _line() as show:
        while True:
            pause = daemon.step()
            show(daemon)
            measure(daemon)
            clock.wait(min(pause, REFRESH))


def _measured(settings: Settings) -> Callable[["Daemon"], None]:
    """What hands the daemon's figures to Prometheus, where a port was set."""
    if not settings.metrics_port:
        return lambda _: None
    metrics = Metrics(settings)
    metrics.serve()
    return lambda daemon: metrics.tell(daemon.status())


@contextmanager
def _line() -> Iterator[Any]:
    """Shows how the daemon fares: in one line that is written over, or, where there is no terminal, in the log."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        told = time.monotonic() - LOG_EVERY + 10  # soon after the start, and then calmly

        def log(daemon: "Daemon") -> None:
            nonlocal told
            if time.monotonic() - told >= LOG_EVERY:
                told = time.monotonic()
                logger.info("%s", described(daemon.status()))

        yield log
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)  # Live's, which writes above the line
        shown = 0.0

        def draw(daemon: "Daemon") -> None:
            nonlocal shown
            if time.monotonic() - shown >= REFRESH:
                shown = time.monotonic()
                live.update(Text(described(daemon.status()), no_wrap=True, overflow="ellipsis"), refresh=True)

        yield draw


def described(status: dict[str, Any]) -> str:
    """How the daemon fares, in a line."""
    parts = [f"{status['subreddits']} subreddits of {status['topics']} topics", f"{status['sent']:,} sent"]
    if status["paused"]:
        parts.append(f"PAUSED, the queue is full; {status['held']:,} held")
    elif status["held"]:
        parts.append(f"{status['held']:,} held")
    if status["hindrance"]:
        parts.append(status["hindrance"])
    if status["failing"]:
        parts.append(f"{len(status['failing'])} failing")
    if status["gaps"]:
        parts.append(f"{status['gaps']} gaps")
    if status["purged"]:
        parts.append(f"{status['purged']:,} purged")
    parts.append(f"{status['requests']:,} requests")
    if status["budget"] is not None:
        parts.append(f"{status['budget']:.0f} left")
    return " · ".join(parts)


def _one_pass(
    settings: Settings, options: ClassifyOptions, clock: Clock, kind: Kind, limit: int, period: Period
) -> None:
    from producers.reddit.budget import Budget  # noqa: PLC0415
    from producers.reddit.client import Reddit  # noqa: PLC0415
    from producers.reddit.client import told_plainly as reddit_told_plainly  # noqa: PLC0415
    from producers.reddit.looks import Looks  # noqa: PLC0415
    from producers.reddit.once import Listing, Once, Reading, patiently  # noqa: PLC0415
    from producers.reddit.subreddits import Roster  # noqa: PLC0415
    from producers.reddit.things import Fault, RedditFault  # noqa: PLC0415

    topics = topics_file.read(settings.reddit_topics)
    reddit = Reddit(settings, Budget(clock, settings.reddit_requests_per_minute), topics.topic_of)
    redis = connect(settings)
    state = State(redis)
    pusher = Pusher(make_app(settings), redis, settings, options, wait=clock.wait)
    roster = Roster(reddit, topics, state, clock)
    once = Once(reddit, pusher, state, clock)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    listing = Listing(kind.value, limit, period.value if kind is Kind.TOP else "")
    columns = (
        TextColumn("{task.description:<16}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    problems = 0
    with reddit_told_plainly(settings), Progress(*columns, console=notes) as progress:
        for topic in topics.topics:
            bar = progress.add_task(topic, total=limit, note="checking its subreddits")
            try:
                patiently(partial(roster.check, topic), clock)
            except Fault as fault:
                notes.print(f"{topic}: its subreddits could not be checked ({fault})", markup=False)
            reading = Reading()
            for reading in once.read(roster.active[topic], listing):
                note = f"{reading.sent:,} sent, {reading.skipped:,} sent before"
                progress.update(
                    bar, completed=reading.read, note=f"{note}; {reading.problem}" if reading.problem else note
                )
            progress.update(bar, total=max(reading.read, 1) if not reading.problem else limit)
            problems += bool(reading.problem)
        looks = Looks(reddit, redis, state, settings, clock, once.send)
        try:
            while not patiently(looks.run, clock):
                pass
        except RedditFault as fault:
            notes.print(f"the second look at earlier posts failed ({fault}); it comes again", markup=False)
    sent = f"{pusher.sent:,} post{'s' if pusher.sent != 1 else ''} sent (messages: {pusher.messages:,})"
    typer.echo(f"{sent}, {pusher.skipped:,} skipped as sent before")
    raise typer.Exit(1 if problems else 0)


@app.command()
def gaps(
    clear: Annotated[bool, typer.Option("--clear", help="Forget them, once they are filled from a dump, say.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """List the gaps: times of which the daemon could not reach a subreddit's posts."""
    settings = settings_of(redis_url=redis_url)
    with told_plainly(settings):
        state = State(connect(settings))
        found = state.gaps()
        if clear:
            state.forget_gaps()
    for gap in found:
        if as_json:
            typer.echo(json.dumps(gap._asdict()))
        else:
            times = f"{_time(gap.since)} to {_time(gap.until)}, noted {_time(gap.noted)}"
            typer.echo(f"r/{printable(gap.subreddit):<22} {times}")
    if not found and not as_json:
        typer.echo("No gaps.")


@app.command()
def subreddits(as_json: AsJson = False, topics: Annotated[Path | None, typer.Option(help="File of topics.")] = None,
               redis_url: RedisUrl = None) -> None:  # fmt: skip
    """List the subreddits of each topic, and those that are not read, with the reason and who stands in."""
    settings = settings_of(redis_url=redis_url, reddit_topics=topics)
    listed = topics_file.read(settings.reddit_topics)
    with told_plainly(settings):
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
            instead = f"r/{each.by} stands in" if each.by else "nobody stands in"
            typer.echo(printable(f"{'':<16} r/{each.subreddit} is {each.reason} since {_time(each.since)}; {instead}"))


@app.command("topics")
def print_topics() -> None:
    """Print the default file of topics, to start one of your own."""
    typer.echo(topics_file.DEFAULT.read_text(encoding="utf-8"), nl=False)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
