"""Read Reddit without Redis: a snapshot for `ingest reddit --once --out`, a check for
`ingest subreddits --check`.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from feedmill.console import counted
from feedmill.producers.live.source import (
    Clock,
    RequestBudget,
    RequestFailed,
    SourceFailed,
    Stopped,
    with_retries,
)
from feedmill.producers.reddit import topics as topics_file
from feedmill.producers.reddit.checks import SubredditState, states_of
from feedmill.producers.reddit.topics import describe_replaced
from feedmill.shared.errors import (
    UserError,
    explain_missing,
    explain_unwritable,
    printable,
)
from feedmill.shared.settings import Settings
from feedmill.stack.processes import EXIT_SIGNALS, handle_signals, not_ignored
from feedmill.tables import check_output

if TYPE_CHECKING:
    from feedmill.producers.reddit.snapshot import Listing, Snapshots
    from feedmill.tables.posts import PostFile

logger = logging.getLogger(__name__)


def write_snapshot(
    settings: Settings,
    listing: "Listing",
    out: Path,
    *,
    is_raw: bool = False,
    for_excel: bool = False,
) -> None:
    """Write the posts of each topic to a file, print a summary and exit, with status 1 if a topic
    could not be read.

    is_raw, for_excel: see PostFile. Raises UserError, also after a part was written.
    """
    # Needs requests, an optional package.
    from feedmill.producers.reddit.snapshot import Snapshots  # noqa: PLC0415

    file = _open(out, is_raw=is_raw, for_excel=for_excel)
    topics = topics_file.read(settings.reddit_topics)
    names = list(topics.topics)
    clock = Clock()
    with closing(_client(settings, topics, clock)) as reddit:
        snapshots = Snapshots(reddit, topics, clock)
        with _end_on_signals(file, clock), explain_unwritable(out), file:
            failed = _read(
                snapshots,
                names,
                listing,
                file,
                clock,
            )
    posts = counted(file.rows, "post")
    summary = printable(f"{posts} written to {out}")
    typer.echo(summary)
    raise typer.Exit(1 if failed else 0)


def checked_states(settings: Settings) -> Iterator[SubredditState]:
    """Ask Reddit about each subreddit of the topics file; yield their states. Raises UserError."""
    with explain_missing("This source", "reddit"):
        from feedmill.producers.reddit.snapshot import problem_of  # noqa: PLC0415 - needs requests

    topics = topics_file.read(settings.reddit_topics)
    clock = Clock()
    with closing(_client(settings, topics, clock)) as reddit:
        for topic, names in topics.topics.items():
            reasons: dict[str, str] = {}
            for name in names:
                now = clock.time()
                ask = partial(
                    problem_of,
                    reddit,
                    name,
                    now,
                    raise_fault,
                )
                try:
                    reasons[name] = with_retries(ask, clock)
                except SourceFailed as fault:
                    raise UserError(
                        f"Cannot check r/{name}: {fault}. Run the command again later."
                    ) from fault
            now = clock.time()
            yield from states_of(topics, topic, reasons, now)


def raise_fault(fault: RequestFailed) -> None:
    """Raise a failure of a check that leaves its answer unclear."""
    raise fault


def _client(settings: Settings, topics: topics_file.Topics, clock: Clock) -> Any:
    from feedmill.producers.reddit import client  # noqa: PLC0415 - needs praw, an optional package

    budget = RequestBudget(clock, client.REQUESTS_PER_MINUTE)
    return client.RedditClient(settings, budget, topics.topic_of)


def _open(out: Path, *, is_raw: bool, for_excel: bool) -> "PostFile":
    """Return the file to write, before anything is requested. Raises UserError."""
    check_output(out, for_excel=for_excel)
    with explain_missing("--out", "tables"):
        from feedmill.tables.posts import PostFile  # noqa: PLC0415 - pyarrow, an extra
    return PostFile(out, is_raw=is_raw, has_mark=for_excel)


def _read(
    snapshots: "Snapshots",
    topics: list[str],
    listing: "Listing",
    file: "PostFile",
    clock: Clock,
) -> bool:
    """Add each topic's posts to the file.

    Return whether some could not be read. Raises SourceFailed and Stopped.
    """
    failed = False
    for topic in topics:
        choose = partial(snapshots.choose, topic)
        choice = with_retries(choose, clock)
        for entry in choice.replaced:
            warning = describe_replaced(topic, entry)
            logger.warning("%s", warning)
        problems: list[str] = []
        rows_before = file.rows
        posts = snapshots.posts(choice.active, listing, problems)
        file.add(posts)
        clock.wait(0)  # a signal that came during a write ends the command here
        rows = file.rows - rows_before
        line = f"{topic:<16} {rows} of {listing.limit}"
        for problem in problems:
            failed = True
            line += f"; {problem}"
        typer.echo(printable(line), err=True)
    return failed


@contextmanager
def _end_on_signals(file: "PostFile", clock: Clock) -> Iterator[None]:
    """End the block on SIGTERM, SIGHUP or Ctrl-C, and say what an unfinished file contains."""
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        if file.is_writing:
            clock.stop_later()
        else:
            clock.stop()

    with handle_signals(stop, *not_ignored(*EXIT_SIGNALS)):
        try:
            yield
        except SourceFailed as fault:
            state = _state(file)
            raise UserError(
                f"{fault}. {state}; run the command again later."
            ) from fault
        except Stopped:
            number = received[0]
            name = signal.Signals(number).name
            state = _state(file)
            typer.echo(f"interrupted by {name}. {state}.", err=True)
            raise SystemExit(128 + number) from None


def _state(file: "PostFile") -> str:
    """Return what an unfinished file contains."""
    if file.written is None:
        return "No post was written"
    posts = counted(file.rows, "post")
    name = printable(str(file.written))
    state = f"The {posts} read until then are in {name}"
    if file.written != file.path:
        target = printable(str(file.path))
        state += f"; {target} is unchanged"
    return state
