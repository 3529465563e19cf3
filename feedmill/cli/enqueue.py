"""The `feedmill enqueue` command: send a file's posts to the queue."""

import re
import shlex
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from feedmill.cli.options import SENDING, File, FileFlags, Limit, MessageFlags, Period, excludes, with_settings
from feedmill.cli.status import wait_for_run
from feedmill.console import LiveBar, counted, notes_console
from feedmill.export.columns import COLUMNS
from feedmill.producers.files import FileReading, is_file
from feedmill.producers.push import Pusher
from feedmill.producers.records import NO_FILTERS, Filters, subreddit_name
from feedmill.shared import runs
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import UNPRINTABLE_CHARACTERS, UserError, printable
from feedmill.shared.messages import MAX_RUN, digest, parse_run
from feedmill.shared.model_routing import check_options, missing_worker
from feedmill.shared.settings import Settings, is_folder_locked

#: Leading bytes that identify a file. Its size does not, since an interrupted download may continue later.
HEAD_BYTES = 1 << 16
#: Characters of the digest in a run's name.
DIGEST_CHARACTERS = 6
#: Valid subreddit names in lower case. Some of the oldest contain dots.
SUBREDDIT_NAME = re.compile(r"[a-z0-9_.-]{1,50}")


@excludes("--no-run", "--run", "--keep", "--wait")
@with_settings(*SENDING, "posts_per_message")
def enqueue(
    settings: Settings,
    file: File,
    columns: FileFlags,
    flags: MessageFlags,
    period: Period,
    date_format: Annotated[
        str | None,
        Option(metavar="FORMAT", help="Format of the file's dates, such as %d.%m.%Y (default: ISO)."),
    ] = None,
    subreddit: Annotated[
        list[str] | None, Option(help="Send only posts of these subreddits: a,b,c; may be repeated.")
    ] = None,
    run: Annotated[
        str | None,
        Option(
            metavar="NAME",
            parser=parse_run,
            help="Run that the posts belong to (default: the file's name and a digest of its start).",
        ),
    ] = None,
    no_run: Annotated[
        bool, Option("--no-run", help="Send posts as `feedmill ingest` does, in no run, and skip those that it sent.")
    ] = False,
    keep: Annotated[
        list[str] | None, Option(help="Columns of the file to carry along and export: a,b,c; may be repeated.")
    ] = None,
    limit: Limit = None,
    wait: Annotated[bool, Option("--wait", help="Wait until all posts of the run are classified.")] = False,
    again: Annotated[bool, Option("--again", help="Start over, and resend posts that were already sent.")] = False,
) -> None:
    """Skips posts that were already sent, records without text and malformed records. After an interruption, the same
    command sends the rest. Exits 1 if a record was malformed, no record had text, the filters excluded every record,
    or, with --wait, a post failed.
    """
    options = flags.options(settings)
    filters = _filters(subreddit or [], period)
    kept = _columns(keep or [])
    notes = notes_console()
    name = None if no_run else run or default_run(file)
    redis = connect(settings)
    flags.check_queue(redis)
    check_options(redis, settings.queue, options)
    celery = make_app(settings)
    pusher = Pusher(celery, redis, settings, options, again, wait_for_memory=True, run=name)
    chosen = columns.columns(date_format, kept)
    reading = FileReading(file, notes, shows_ids=True, filters=filters, columns=chosen, encoding=columns.encoding)
    if settings.redis_url is None and not is_folder_locked(settings.data_folder):
        notes.print(f"no `feedmill up` is running: sending to the Redis at {settings.redis_address}", markup=False)
    if warning := missing_worker(redis, settings):
        notes.print(warning, markup=False)
    try:
        before = runs.progress(redis, name) if name and kept else None
        if name and kept:
            pusher.retry_until_memory(partial(runs.keep_columns, redis, name, kept, settings.sent_ttl))
        with _bar(reading, pusher, notes):
            pusher.push(islice(reading.posts(), limit))
    except KeyboardInterrupt:
        again_with = f" with --run {shlex.quote(name)}" if name else ""
        notes.print(
            f"interrupted: {counted(pusher.sent, 'post')} sent. The same command sends the rest{again_with}.",
            markup=False,
        )
        raise
    _end(reading, pusher, filters)
    found_none = 0 < reading.left_out == reading.records
    if found_none:
        notes.print("The filters exclude every record, including records without a subreddit or date.")
    failed = 0
    if before and not {*kept} <= {*before.columns} and (again or pusher.skipped):
        notes.print("posts of this run that were sent before stay without the columns of --keep: give another --run")
    elif name and pusher.skipped and not pusher.sent:
        notes.print(f"run {printable(name)} has these posts already. --again sends them again", markup=False)
    if name and wait:
        failed = wait_for_run(redis, settings, notes, name, by_counts=not again)
    elif name and pusher.sent:
        notes.print(f"run {printable(name)}: `feedmill status` shows its progress", markup=False)
    raise typer.Exit(1 if _is_incomplete(reading, pusher) or found_none or failed else 0)


def _is_incomplete(reading: FileReading, pusher: Pusher) -> bool:
    """Return whether records were malformed, or none had text."""
    found = pusher.sent + pusher.skipped + pusher.gone
    return reading.skipped > reading.without_text or (reading.skipped > 0 and not found)


def _columns(given: Iterable[str]) -> tuple[str, ...]:
    """Parse `--keep`. Raises UserError for a name that an export uses itself."""
    columns = tuple(dict.fromkeys(name.strip() for names in given for name in names.split(",") if name.strip()))
    if taken := {name.lower() for name in columns} & {column.lower() for column in COLUMNS}:
        raise UserError(f"--keep: exports have a column {min(taken)} of their own. Rename it in the file.")
    return columns


def default_run(path: str) -> str:
    """Return the run of a file's posts, without blanks: "posts.csv-3f2a9c".

    Sending the file again continues its run and skips what was sent; another file of this name is another run. A file
    that cannot be read twice, such as standard input, is a run of its own each time: "stdin-2026-11-22T21:30:05" (UTC).
    """
    suffix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    if is_file(path):
        with suppress(OSError), Path(path).open("rb") as file:  # reading the file reports it
            suffix = digest(file.read(HEAD_BYTES).decode("latin-1"))[:DIGEST_CHARACTERS]
    name = "_".join(UNPRINTABLE_CHARACTERS.sub("_", Path(path).name).split())
    if path == "-":
        name = "stdin"
    elif name.isdecimal() and not is_file(path):  # /dev/fd/63, the shell's name of <(command)
        name = "pipe"
    return f"{name[: MAX_RUN - len(suffix) - 1]}-{suffix}"


def _filters(subreddits: Iterable[str], period: Period) -> Filters:
    """Return the filters of the options. Raises UserError for a malformed subreddit."""
    names = [subreddit_name(name) for given in subreddits for name in given.split(",")]
    for name in names:
        if not SUBREDDIT_NAME.fullmatch(name):
            raise UserError(f"--subreddit: {name!r:.80} is not a subreddit name. Separate names by commas.")
    return Filters(frozenset(names), period.since, period.until)


def _end(reading: FileReading, pusher: Pusher, filters: Filters) -> None:
    """Print sums and the summary. Raises InputError if the file could not be read to its end."""
    try:
        reading.end()
    finally:
        if reading.records:
            typer.echo(_summary(reading, pusher, filters))


def _summary(reading: FileReading, pusher: Pusher, filters: Filters) -> str:
    counts = [
        f"{counted(pusher.sent, 'post')} sent (messages: {pusher.messages:,})",
        f"{pusher.skipped:,} already sent or repeated",
        f"{reading.skipped - reading.without_text:,} malformed",
    ]
    if reading.without_text:
        counts.append(f"{reading.without_text:,} without text")
    if pusher.gone:
        first = printable(pusher.first_gone)
        counts.append(f"{pusher.gone:,} purged (such as id {first}; `feedmill purge {first} --lift` unblocks it)")
    if reading.removed:
        counts.append(f"{reading.removed:,} deleted or removed")
    if filters != NO_FILTERS:
        counts.append(f"{reading.left_out:,} excluded by the filters")
    return ", ".join(counts)


def _bar(reading: FileReading, pusher: Pusher, notes: Console) -> LiveBar:
    """Return a bar of the bytes read. It stays current while the queue is full."""

    def figures(seconds: float) -> tuple[str, float, float | None]:
        records = reading.records
        rate = f", {records / seconds:,.0f}/s" if seconds else ""
        waiting = f"; {pusher.waiting}, waiting" if pusher.waiting else ""
        return f"{records:,} read{rate}, {pusher.sent:,} sent{waiting}", reading.done, reading.size

    return LiveBar(notes, figures)
