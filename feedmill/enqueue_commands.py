"""`feedmill enqueue`: a file's posts into the queue, from where the last run stopped."""

import re
from collections.abc import Iterable
from functools import partial
from typing import Annotated

import typer
from redis import Redis
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from feedmill.file_reading import Reading
from feedmill.flags import (
    IdColumn,
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
from producers.files import is_file
from producers.positions import Position
from producers.push import Pusher, purpose
from producers.records import EVERYTHING, Filters, seconds_of_date, subreddit_name
from shared.broker import connect, make_app, told_plainly
from shared.errors import UserError

app = typer.Typer()

#: Posts after which the position in the file is noted, about; a crash has so many looked up again.
TRIP_POSTS = 1000
#: What a subreddit may be called; dots are in some of the oldest.
SUBREDDIT = re.compile(r"[a-z0-9_.-]{1,50}")


@app.command()
def enqueue(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="JSONL, a JSON array or CSV; plain, gzip or zstd; - is standard input."),
    ],
    id_column: IdColumn = None,
    subreddit: Annotated[
        list[str] | None, typer.Option(help="Only posts of these: a,b,c, or once for each.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="Only posts since then: 2024-01-31, or 2024-01-31T12:30; UTC.", show_default=False
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Only posts from before then.", show_default=False)
    ] = None,
    labels: Labels = None,
    template: Template = None,
    multi_label: MultiLabel = False,
    to_model: ToModel = None,
    to_queue: ToQueue = None,
    priority: Priority = None,
    again: Annotated[bool, typer.Option(help="Send also what was sent before, from the file's beginning.")] = False,
    posts_per_message: Annotated[int | None, typer.Option(help="Posts in one message.")] = None,
    when_full: Annotated[
        str | None, typer.Option(help="What to do while the queue is full: wait, or refuse.", show_default=False)
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Send the posts of a file to the queue. What was sent before is skipped, and so are bad lines.

    A run that was interrupted goes on where it stopped when it is started again.
    """
    settings = settings_of(
        redis_url=redis_url,
        posts_per_message=posts_per_message,
        when_full=when_full,
        queue=to_queue,
        priority=priority,
        labels=labels,
        template=template,
    )
    options = options_of(settings, labels, template, multi_label)
    filters = _filters(subreddit or [], since, until)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    redis = connect(settings)
    settings = sending(settings, redis, to_model, to_queue)
    refuse = settings.when_full == "refuse"
    pusher = Pusher(make_app(settings), redis, settings, options, again, refuse=refuse, wait_for_memory=not refuse)
    with told_plainly(settings):
        position = _position(redis, file, purpose(settings, options), filters, id_column)
        start = position.load() if position and not again else 0
        if start:
            notes.print(f"going on at record {start + 1:,}, where the last run stopped (--again starts over)")
        reading = Reading(file, notes, filters, start, id_column, shows_ids=True)
        with _Bar(reading, pusher, notes):
            if position:
                _push(reading, pusher, position, settings.posts_per_message)
            else:
                # Nothing is noted of it; posts of a slow pipe should not wait for others.
                pusher.push(reading.posts())
    if reading.told_all:
        typer.echo(_told(reading, pusher, filters))
    reading.end()
    found_none = start == 0 < reading.left_out == reading.records
    if found_none:
        notes.print(
            "The filters leave out every record, as they do one that does not say its subreddit or its date: is the "
            "subreddit named as Reddit has it, and the date right?"
        )
    raise typer.Exit(1 if reading.skipped or found_none else 0)


def _push(reading: Reading, pusher: Pusher, position: Position, posts_per_message: int) -> None:
    # Whole messages: what a trip has left over goes into a smaller one.
    for trip in reading.trips(posts_per_message * -(-TRIP_POSTS // posts_per_message)):
        pusher.push(trip)
        if reading.complete:
            position.forget()
        elif reading.records:
            pusher.once_there_is_memory(partial(position.save, reading.records))


def _position(redis: Redis, file: str, sent_for: str, filters: Filters, id_column: str | None) -> Position | None:
    """None where the file cannot be read twice, or not at all, which its reading then says."""
    if not is_file(file):
        return None
    wanted = (",".join(sorted(filters.subreddits)), f"{filters.since} {filters.until}", id_column)
    try:
        return Position(redis, file, sent_for, *wanted)
    except OSError:
        return None


def _filters(subreddits: Iterable[str], since: str | None, until: str | None) -> Filters:
    """Raises UserError."""
    names: set[str] = set()
    for given in subreddits:
        found = [subreddit_name(name) for name in given.split(",") if name.strip()] or [given]
        for name in found:
            if not SUBREDDIT.fullmatch(name):
                raise UserError(f"--subreddit: {name!r:.80} is no subreddit's name; write python,learnpython.")
        names.update(found)
    filters = Filters(frozenset(names), _seconds("--since", since), _seconds("--until", until))
    if filters.since is not None and filters.until is not None and filters.since >= filters.until:
        raise UserError(f"--since {since} is not before --until {until}: no post is from between them.")
    return filters


def _seconds(flag: str, date: str | None) -> float | None:
    if date is None:
        return None
    try:
        return seconds_of_date(date.strip())
    except ValueError:
        raise UserError(
            f"{flag}: {date!r:.80} is no date; write it as 2024-01-31, or with a time (UTC) as 2024-01-31T12:30."
        ) from None


def _told(reading: Reading, pusher: Pusher, filters: Filters) -> str:
    told = [
        f"{pusher.sent:,} post{'s' if pusher.sent != 1 else ''} sent (messages: {pusher.messages:,})",
        f"{pusher.skipped:,} skipped as sent before",
        f"{reading.skipped:,} skipped as bad",
    ]
    if pusher.gone:
        told.append(f"{pusher.gone:,} skipped as purged")
    if reading.removed:
        told.append(f"{reading.removed:,} removed on Reddit")
    if filters != EVERYTHING:
        told.append(f"{reading.left_out:,} left out by the filters")
    return ", ".join(told)


class _Bar(Progress):
    """How far reading and sending are, looked at anew each time that it is drawn: also while nothing is read."""

    def __init__(self, reading: Reading, pusher: Pusher, notes: Console) -> None:
        self._reading, self._pusher = reading, pusher
        self._start = reading.records
        size = reading.source.size
        ends = (TimeElapsedColumn(),) if size is None else (TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *ends)
        super().__init__(*columns, console=notes, transient=True, disable=not notes.is_terminal)
        self.add_task("reading", total=size)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich, some times a second."""
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
