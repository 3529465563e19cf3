"""The `feedmill enqueue` command: send a file's posts to the queue, resuming where the last run stopped."""

import re
from collections.abc import Iterable
from functools import partial
from typing import Annotated

import typer
from redis import Redis
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from feedmill.cli.dates import check_date_format, parse_period
from feedmill.cli.file_reading import FileReading
from feedmill.cli.option_groups import with_groups
from feedmill.cli.options import FileFlags, MessageFlags, RedisUrl
from producers.files import is_file
from producers.positions import Position
from producers.push import Pusher, send_scope
from producers.records import NO_FILTERS, Columns, Filters, subreddit_name
from shared.broker import connect, make_app, user_errors
from shared.errors import UserError

app = typer.Typer()

#: Posts between two saves of the position in the file, about. After a crash, this many are checked again.
SAVE_INTERVAL_POSTS = 1000
#: Valid subreddit names in lower case. Some of the oldest contain dots.
SUBREDDIT_NAME = re.compile(r"[a-z0-9_.-]{1,50}")


@app.command()
@with_groups
def enqueue(
    *,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Posts as JSONL, a JSON array or CSV; plain, gzip or zstd; - is standard input."
        ),
    ],
    columns: FileFlags,
    date_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Format of the file's dates, such as %d.%m.%Y (default: ISO).")
    ] = None,
    subreddit: Annotated[
        list[str] | None, typer.Option(help="Send only posts of these subreddits: a,b,c; may be repeated.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="Send only posts created since DATE, such as 2026-01-31 or 2026-01-31T12:30 (UTC)."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Send only posts created before DATE (UTC).")
    ] = None,
    flags: MessageFlags,
    again: Annotated[bool, typer.Option(help="Start over, and resend posts that were already sent.")] = False,
    posts_per_message: Annotated[int | None, typer.Option(help="Posts per message (default: 32).")] = None,
    when_full: Annotated[str | None, typer.Option(help="If the queue is full: wait or refuse (default: wait).")] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Send the posts of a file to the queue.

    Skips posts that were already sent and malformed records. An interrupted run resumes where it stopped when the same
    command runs again. Exits 1 if a record was malformed or the filters excluded every record.
    """
    settings = flags.settings_of(redis_url=redis_url, posts_per_message=posts_per_message, when_full=when_full)
    options = flags.options(settings)
    filters = _filters(subreddit or [], since, until, date_format)
    chosen = columns.columns(check_date_format(date_format))
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    redis = connect(settings)
    settings = flags.select_queue(settings, redis)
    refuse = settings.when_full == "refuse"
    pusher = Pusher(make_app(settings), redis, settings, options, again, refuse=refuse, wait_for_memory=not refuse)
    with user_errors(settings):
        position = _position(redis, file, send_scope(settings, options), filters, chosen, columns.encoding)
        start = position.load() if position and not again else 0
        if start:
            notes.print(f"resuming at record {start + 1:,}, where the last run stopped (--again starts over)")
        reading = FileReading(file, notes, filters, start, chosen, columns.encoding, shows_ids=True)
        with _EnqueueBar(reading, pusher, notes):
            if position:
                _push(reading, pusher, position, settings.posts_per_message)
            else:
                # A pipe has no position to save, and posts from a slow one should be sent at once.
                pusher.push(reading.posts())
    if reading.has_content:
        typer.echo(_summary(reading, pusher, filters))
    reading.end()
    found_none = start == 0 < reading.left_out == reading.records
    if found_none:
        notes.print(
            "The filters exclude every record, including records without a subreddit or date. Check --subreddit, "
            "--since and --until."
        )
    raise typer.Exit(1 if reading.skipped or found_none else 0)


def _push(reading: FileReading, pusher: Pusher, position: Position, posts_per_message: int) -> None:
    """Send the posts and save the position in the file after each batch, so that a later run can resume."""
    # A multiple of the message size: only the last message of a batch may be smaller.
    for trip in reading.trips(posts_per_message * -(-SAVE_INTERVAL_POSTS // posts_per_message)):
        pusher.push(trip)
        if reading.complete:
            position.forget()
        elif reading.records:
            pusher.retry_until_memory(partial(position.save, reading.records))


def _position(
    redis: Redis, file: str, sent_for: str, filters: Filters, columns: Columns, encoding: str | None
) -> Position | None:
    """Return the saved position in a regular file, or None if the input is a pipe or unreadable."""
    if not is_file(file):
        return None
    conditions = (",".join(sorted(filters.subreddits)), f"{filters.since} {filters.until}", *columns, encoding)
    try:
        return Position(redis, file, sent_for, *conditions)
    except OSError:
        return None


def _filters(subreddits: Iterable[str], since: str | None, until: str | None, date_format: str | None) -> Filters:
    """Parse the filter options. Raises UserError for a malformed subreddit or date, or an empty period."""
    names: set[str] = set()
    for given in subreddits:
        found = [subreddit_name(name) for name in given.split(",") if name.strip()] or [given]
        for name in found:
            if not SUBREDDIT_NAME.fullmatch(name):
                raise UserError(f"--subreddit: {name!r:.80} is not a subreddit name. Separate names by commas.")
        names.update(found)
    period = parse_period(since, until)
    return Filters(frozenset(names), *period, date_format if any(each is not None for each in period) else None)


def _summary(reading: FileReading, pusher: Pusher, filters: Filters) -> str:
    counts = [
        f"{pusher.sent:,} post{'s' if pusher.sent != 1 else ''} sent (messages: {pusher.messages:,})",
        f"{pusher.skipped:,} already sent",
        f"{reading.skipped:,} malformed",
    ]
    if pusher.gone:
        counts.append(f"{pusher.gone:,} purged")
    if reading.removed:
        counts.append(f"{reading.removed:,} removed on Reddit")
    if filters != NO_FILTERS:
        counts.append(f"{reading.left_out:,} excluded by the filters")
    return ", ".join(counts)


class _EnqueueBar(Progress):
    """Progress of reading and sending. Reads the counts at each redraw, so it stays current while the queue is full."""

    def __init__(self, reading: FileReading, pusher: Pusher, notes: Console) -> None:
        self._reading, self._pusher = reading, pusher
        self._start = reading.records
        size = reading.source.size
        ends = (TimeElapsedColumn(),) if size is None else (TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *ends)
        super().__init__(*columns, console=notes, transient=True, disable=not notes.is_terminal)
        self.add_task("reading", total=size)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Update the task before each redraw; rich calls this several times a second."""
        for task in self.tasks:
            self.update(task.id, completed=self._reading.source.done, description=self._described(task.elapsed))
        return super().get_renderables()

    def _described(self, seconds: float | None) -> str:
        records = self._reading.records
        if not records:
            return "reading"
        rate = f", {(records - self._start) / seconds:,.0f}/s" if seconds else ""
        waiting = f"; {self._pusher.waiting}, waiting" if self._pusher.waiting else ""
        return f"{records:,} read{rate}, {self._pusher.sent:,} sent{waiting}"
