"""The `feedmill enqueue` command: send a file's posts to the queue."""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Annotated

import typer
from redis import Redis
from rich.console import Console
from typer import Option

from feedmill.cli.options import (
    SENDING,
    File,
    FileFlags,
    KindFlags,
    Limit,
    MessageFlags,
    Period,
    excludes,
    with_settings,
)
from feedmill.cli.status import wait_for_run
from feedmill.console import Figures, LiveBar, counted, notes_console
from feedmill.exporting.columns import COLUMNS
from feedmill.producers.files import FileReading
from feedmill.producers.push import Pusher
from feedmill.producers.records import (
    NO_FILTERS,
    Filters,
    author_name,
    subreddit_name,
)
from feedmill.producers.run_names import default_run
from feedmill.shared import runs
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import UserError, printable
from feedmill.shared.language import parse_languages
from feedmill.shared.messages import parse_run
from feedmill.shared.model_routing import check_options, missing_worker
from feedmill.shared.settings import Settings, is_folder_locked

#: Valid subreddit names in lower case. Some of the oldest contain dots.
SUBREDDIT_NAME = re.compile(r"[a-z0-9_.-]{1,50}")


@excludes("--no-run", "--run", "--keep", "--wait")
@with_settings(*SENDING, "posts_per_message", "languages")
def enqueue(
    settings: Settings,
    file: File,
    columns: FileFlags,
    kinds: KindFlags,
    flags: MessageFlags,
    period: Period,
    subreddit: Annotated[
        list[str] | None,
        Option(help=("Send only posts of these subreddits: a,b,c; may be repeated.")),
    ] = None,
    run: Annotated[
        str | None,
        Option(
            metavar="NAME",
            parser=parse_run,
            help=(
                "Run that the posts belong to (default: the file's name and a digest of its "
                "start)."
            ),
        ),
    ] = None,
    no_run: Annotated[
        bool,
        Option(
            "--no-run",
            help=(
                "Send posts as `feedmill ingest` does, in no run, and skip those that it sent."
            ),
        ),
    ] = False,
    keep: Annotated[
        list[str] | None,
        Option(
            help=(
                "Columns of the file to carry along and export: a,b,c; may be repeated."
            )
        ),
    ] = None,
    limit: Limit = None,
    wait: Annotated[
        bool,
        Option(
            "--wait",
            help=(
                "Wait until all posts of the run are classified, or have left the queue "
                "without a result."
            ),
        ),
    ] = False,
    again: Annotated[
        bool,
        Option(
            "--again", help=("Start over, and resend posts that were already sent.")
        ),
    ] = False,
) -> None:
    """Skips posts that were already sent, records without text and malformed records.

    After an interruption, the same command sends the rest. Exits 1 if a record was malformed, no
    record had text, the filters excluded every record, or, with --wait, a post failed.
    """
    options = flags.options(settings)
    filters = filters_of(subreddit or [], period, settings.languages, kinds.kinds)
    extra_columns = _columns(keep or [])
    notes = notes_console()
    name = None
    if not no_run:
        name = run or default_run(file)
    redis = connect(settings)
    flags.check_queue(redis)
    check_options(redis, settings.queue, options)
    celery = make_app(settings)
    pusher = Pusher(
        celery,
        redis,
        settings,
        options,
        again=again,
        wait_for_memory=True,
        run=name,
    )
    _note_missing_processes(redis, settings, notes)
    try:
        new_columns: set[str] = set()
        if name and extra_columns:
            new_columns = _keep_columns(pusher, name, extra_columns)
        with kinds.open_titles(file, columns, filters.subreddits) as titles:
            reading = FileReading(
                file,
                notes,
                shows_ids=True,
                filters=filters,
                columns=columns.columns(extra_columns),
                encoding=columns.encoding,
                titles=titles,
            )
            with _bar(reading, pusher, notes):
                posts = islice(reading.posts(), limit)
                pusher.push(posts)
    except KeyboardInterrupt:
        notes.print(_interruption_message(pusher, name), markup=False)
        raise
    _end(reading, pusher, filters)
    matches_none = 0 < reading.left_out == reading.records
    if matches_none:
        notes.print(
            "The filters exclude every record, including records without a subreddit or date."
        )
    if name:
        _note_earlier_posts(pusher, name, new_columns, notes)
    failures = 0
    if name:
        failures = _follow_run(pusher, name, notes, wait=wait)
    if matches_none or failures or _is_incomplete(reading, pusher):
        raise typer.Exit(1)


def _follow_run(pusher: Pusher, run: str, notes: Console, *, wait: bool) -> int:
    """Wait for the results of a run, or say what shows its progress. Return how many of its posts
    failed meanwhile.
    """
    if wait:
        has_resent = pusher.again and pusher.sent > 0
        return wait_for_run(
            pusher.redis,
            pusher.settings,
            notes,
            run,
            by_counts=not has_resent,
        )
    if pusher.sent:
        notes.print(
            f"run {printable(run)}: `feedmill status` shows its progress",
            markup=False,
        )
    return 0


def _note_missing_processes(redis: Redis, settings: Settings, notes: Console) -> None:
    """Note if no stack runs whose Redis is meant, or if no worker serves the queue."""
    if settings.redis_url is None and not is_folder_locked(settings.data_folder):
        notes.print(
            f"no `feedmill up` is running: sending to the Redis at {settings.redis_address}",
            markup=False,
        )
    warning = missing_worker(redis, settings)
    if warning:
        notes.print(warning, markup=False)


def _keep_columns(pusher: Pusher, run: str, columns: Sequence[str]) -> set[str]:
    """Store the names of columns that the posts of a run carry.

    Return those that the run's earlier posts lack.
    """
    redis = pusher.redis
    # Reading writes, too, if Redis must load the functions first.
    before = pusher.retry_until_memory(partial(runs.progress, redis, run))
    keep_columns = partial(
        runs.keep_columns, redis, run, columns, pusher.settings.sent_ttl
    )
    pusher.retry_until_memory(keep_columns)
    if before is None:
        return set()
    return set(columns).difference(before.columns)


def _interruption_message(pusher: Pusher, run: str | None) -> str:
    posts_sent = counted(pusher.sent, "post")
    again_with = ""
    if run:
        again_with = f" with --run {shlex.quote(run)}"
    return (
        f"interrupted: {posts_sent} sent. The same command sends the rest{again_with}."
    )


def _note_earlier_posts(
    pusher: Pusher, run: str, new_columns: Collection[str], notes: Console
) -> None:
    """Note that posts of the run were sent before, if that may not be what the user expects."""
    if new_columns and (pusher.again or pusher.skipped):
        notes.print(
            "posts of this run that were sent before stay without the columns of --keep: "
            "give another --run"
        )
    elif pusher.skipped and not pusher.sent:
        notes.print(
            f"run {printable(run)} has these posts already. --again sends them again",
            markup=False,
        )


def _is_incomplete(reading: FileReading, pusher: Pusher) -> bool:
    """Return whether records were malformed, or none had text."""
    if reading.skipped > reading.without_text:
        return True
    posts = pusher.sent + pusher.skipped + pusher.gone
    return reading.skipped > 0 and posts == 0


def _columns(lists: Iterable[str]) -> tuple[str, ...]:
    """Parse `--keep`, each a list of names. Raises UserError for a name that an export uses
    itself.
    """
    columns: dict[str, None] = {}
    for names in lists:
        for name in names.split(","):
            columns[name.strip()] = None
    columns.pop("", None)
    export_columns = set(map(str.lower, COLUMNS))
    conflicts = export_columns.intersection(map(str.lower, columns))
    if conflicts:
        name = min(conflicts)
        raise UserError(
            f"--keep: exports have a column {name} of their own. Rename it in the file."
        )
    return tuple(columns)


def filters_of(
    subreddits: Iterable[str],
    period: Period,
    languages: str | None,
    kinds: frozenset[str],
    authors: Iterable[str] = (),
    words: Iterable[str] = (),
) -> Filters:
    """Return the filters of the options; each text is a list, separated by commas.

    Raises UserError for a malformed subreddit or an unknown language.
    """
    names = set()
    for part in _parts(subreddits):
        name = subreddit_name(part)
        if not SUBREDDIT_NAME.fullmatch(name):
            raise UserError(
                f"--subreddit: {name!r:.80} is not a subreddit name. Separate names by commas."
            )
        names.add(name)
    codes = frozenset[str]()
    if languages is not None:
        codes = parse_languages(languages)
    author_names = [author_name(part) for part in _parts(authors) if part]
    phrases = filter(None, _parts(words))
    return Filters(
        subreddits=frozenset(names),
        since=period.since,
        until=period.until,
        languages=codes,
        kinds=kinds,
        authors=frozenset(author_names),
        words=tuple(dict.fromkeys(phrases)),
    )


def _parts(lists: Iterable[str]) -> Iterator[str]:
    """Yield the parts of lists that are separated by commas."""
    for text in lists:
        for part in text.split(","):
            yield part.strip()


def _end(reading: FileReading, pusher: Pusher, filters: Filters) -> None:
    """Print sums and the summary. Raises InputError if the file could not be read to its end."""
    try:
        reading.end()
    finally:
        if reading.records:
            summary = _summary(reading, pusher, filters)
            typer.echo(summary)


def _summary(reading: FileReading, pusher: Pusher, filters: Filters) -> str:
    posts = counted(pusher.sent, "post")
    malformed = reading.skipped - reading.without_text
    counts = [
        f"{posts} sent (messages: {pusher.messages:,})",
        f"{pusher.skipped:,} already sent or repeated",
        f"{malformed:,} malformed",
    ]
    if reading.without_text:
        counts.append(f"{reading.without_text:,} without text")
    if pusher.gone:
        first = printable(pusher.first_gone)
        counts.append(
            f"{pusher.gone:,} purged (such as id {first}; `feedmill purge {first} "
            "--lift` unblocks it)"
        )
    if reading.removed:
        counts.append(f"{reading.removed:,} deleted or removed")
    if filters != NO_FILTERS:
        counts.append(f"{reading.left_out:,} excluded by the filters")
    return ", ".join(counts)


def _bar(reading: FileReading, pusher: Pusher, notes: Console) -> LiveBar:
    """Return a bar of the bytes read. It stays current while the queue is full."""

    def figures(seconds: float) -> Figures:
        text = f"{reading.records:,} read"
        if seconds:
            rate = reading.records / seconds
            text += f", {rate:,.0f}/s"
        text += f", {pusher.sent:,} sent"
        if pusher.waiting:
            text += f"; {pusher.waiting}, waiting"
        return Figures(text, done=reading.done, total=reading.size)

    return LiveBar(notes, figures)
