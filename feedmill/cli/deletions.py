"""The `feedmill dead` commands: list or show, retry and drop dead letters; and `feedmill purge`:
delete what is stored about posts, by id or by run, or the messages of a queue.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple

import typer
from redis import Redis
from typer import Argument, Option

from feedmill.cli.options import (
    AsJson,
    MultiLabelOption,
    NoneOption,
    RunName,
    Yes,
    excludes,
    message_options,
    utc,
    with_settings,
)
from feedmill.outcomes.dead_letters import (
    DEFAULT_COUNT,
    MAX_QUOTED_IDS,
    DeadLetterEntry,
    DeadLetterStream,
    replacement,
)
from feedmill.outcomes.purge import (
    clear_queue,
    count_posts,
    count_waiting,
    purge_known_run,
    similar_ids,
)
from feedmill.outcomes.rows import check_run
from feedmill.shared import runs
from feedmill.shared.broker import connect
from feedmill.shared.errors import (
    UserError,
    json_line,
    printable,
    printable_lines,
)
from feedmill.shared.label_files import UTF16_MARKS
from feedmill.shared.purge import (
    TOMBSTONE_TTL_S,
    PurgedPosts,
    lift_tombstones,
    purge_posts,
    valid_ids,
)
from feedmill.shared.settings import DAY_S, Settings

#: Numbers in the outcome of a purge that say nothing of what was removed.
NOT_REMOVED = frozenset({"posts", "unmatched", "unreadable", "held"})


dead = typer.Typer(no_args_is_help=True)


class Done(NamedTuple):
    """Numbers of removed things by name, and a summary."""

    counts: dict[str, int]
    summary: str


DeadLetterIds = Annotated[
    list[str] | None,
    Argument(metavar="ID...", help=("Ids of dead letters or of their posts.")),
]
All = Annotated[bool, Option("--all", help="Select every dead letter.")]


Other = Annotated[
    bool,
    Option(
        "--other",
        help=(
            "Send none of the original options. Those that are not given are the worker's. "
            "Implied by --labels, --template, --multi-label and --none."
        ),
    ),
]


@dead.command("list")
@excludes("ID...", "--count", "--run")
@with_settings("redis_url")
def list_(
    settings: Settings,
    ids: DeadLetterIds = None,
    count: Annotated[
        int, Option(help="Number of dead letters to show.", min=1)
    ] = DEFAULT_COUNT,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List the newest dead letters: id, post, time and reason. With ids, show these in full."""
    redis = connect(settings)
    stream = DeadLetterStream(redis)
    if run is not None:
        check_run(redis, run)
    if ids:
        entries = stream.named(ids)
        format_entry = _format_in_full
    else:
        entries = stream.newest(count, run)
        format_entry = _format_line
    if as_json:
        format_entry = _format_json
    is_empty = True
    for entry in entries:
        is_empty = False
        typer.echo(format_entry(entry))
    if is_empty:
        typer.echo("no dead letters", err=True)


@dead.command()
@with_settings("labels", "template", "redis_url")
def retry(
    settings: Settings,
    ids: DeadLetterIds = None,
    every: All = False,
    other: Other = False,
    labels: str | None = None,
    template: str | None = None,
    multi_label: MultiLabelOption = False,
    none: NoneOption = None,
) -> None:
    """Send the posts of dead letters to their queues again, with their original options, or with
    others.

    A dead letter is removed once its post is in the queue. Exits 1 if one could not be retried.
    """
    given = message_options(
        labels=None if labels is None else settings.labels,
        template=template,
        multi_label=multi_label,
        none=none,
    )
    options = replacement(given, other=other)
    redis = connect(settings)
    stream = DeadLetterStream(redis)
    entries = _select(stream, ids, every)
    sent = 0
    refusals = 0
    for entry, refusal in stream.retry(entries, settings, options):
        if refusal is None:
            sent += 1
            continue
        refusals += 1
        name = printable(entry.name)
        reason = printable(refusal)
        typer.echo(f"feedmill: {name} not retried: {reason}", err=True)
    summary = f"{sent:,} retried"
    if refusals:
        summary += f", {refusals:,} not retried and kept"
    typer.echo(summary)
    raise typer.Exit(1 if refusals else 0)


@dead.command()
@with_settings("redis_url")
def drop(
    settings: Settings, ids: DeadLetterIds = None, every: All = False, yes: Yes = False
) -> None:
    """Delete dead letters permanently. Asks first with --all."""
    redis = connect(settings)
    stream = DeadLetterStream(redis)
    entries = _select(stream, ids, every)
    if every:
        number = stream.count()
        confirm(f"Drop {number:,} dead letters permanently", yes=yes)
    dropped = stream.drop(entries)
    typer.echo(f"{dropped:,} dropped")


def confirm(action: str, *, yes: bool, only_in_terminal: bool = False) -> None:
    """Ask for confirmation of an action, unless `yes`; abort on "no".

    action: such as "Drop 3 dead letters". Without a terminal, raises UserError, or returns if
    `only_in_terminal`.
    """
    if yes:
        return
    if sys.stdin.isatty():
        typer.confirm(f"{action}?", abort=True)
    elif not only_in_terminal:
        raise UserError(f"{action}? Add --yes to confirm.")


def _select(
    stream: DeadLetterStream, ids: Sequence[str] | None, every: bool
) -> Iterator[DeadLetterEntry]:
    """Return the selected dead letters.

    Raises UserError without ids and --all, and as `DeadLetterStream.named` does.
    """
    if bool(ids) == every:
        raise UserError(
            "Select dead letters: give ids, as `feedmill dead list` shows them, or --all."
        )
    if every:
        return stream.all()
    return stream.named(ids or [])


def _format_json(entry: DeadLetterEntry) -> str:
    letter = entry.letter.model_dump()
    return json_line({"entry": entry.name, **letter})


def _format_line(entry: DeadLetterEntry) -> str:
    letter = entry.letter
    post_id = letter.id or "-"
    failed_at = utc(letter.failed_at)
    line = f"{entry.name:<18} {post_id:<12} {failed_at}  {letter.reason}"
    return printable(line)


def _format_in_full(entry: DeadLetterEntry) -> str:
    letter = entry.letter
    facts = {
        "entry": entry.name,
        **letter.model_dump(exclude={"traceback"}),
        "failed_at": utc(letter.failed_at),
    }
    lines = []
    for name, value in facts.items():
        if value is not None:
            lines.append(f"{name:<10} {value}")
    traceback = letter.traceback or ""
    lines.extend(traceback.splitlines())
    return "\n".join(map(printable, lines))


@excludes("--lift", "--run", "--queue")
@excludes("--run", "ID...", "--queue")
@excludes("--queue", "ID...")
@with_settings("redis_url")
def purge(
    settings: Settings,
    ids: Annotated[
        list[str] | None,
        Argument(
            metavar="ID...",
            help=("Post ids; - reads one per line from standard input."),
        ),
    ] = None,
    run: RunName = None,
    queue_name: Annotated[
        str | None,
        Option(
            "--queue",
            metavar="NAME",
            help=("Remove the messages that wait in this queue instead."),
        ),
    ] = None,
    yes: Yes = False,
    lift: Annotated[
        bool,
        Option(
            "--lift", help=("Unblock the posts instead; deletes and restores nothing.")
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Asks first in a terminal.

    The block lasts a year. With --run, delete what is stored about a run; with --queue,
    remove the messages that no worker has taken yet. Neither blocks anything: the posts can be
    sent again. Exits 1 if nothing was stored.
    """
    redis = connect(settings)
    if run is not None:
        counts, summary = _purge_run(redis, settings, run, yes=yes)
    elif queue_name is not None:
        queue_settings = settings.model_copy(update={"queue": queue_name})
        counts, summary = _clear(redis, queue_settings, yes=yes)
    elif ids:
        posts = _read_ids(ids)
        if lift:
            counts, summary = _lift_posts(redis, posts)
        else:
            confirmed = yes or "-" in ids
            counts, summary = _purge_posts(redis, settings, posts, yes=confirmed)
    else:
        raise UserError("Give the ids of posts, --run NAME or --queue NAME.")
    if as_json:
        typer.echo(json.dumps(counts))
    else:
        typer.echo(printable_lines(summary))
    removed = 0
    for name, count in counts.items():
        if name not in NOT_REMOVED:
            removed += count
    raise typer.Exit(0 if removed else 1)


def _lift_posts(redis: Redis, posts: Sequence[str]) -> Done:
    """Unblock posts."""
    subject = printable(_subject(posts))
    lifted = lift_tombstones(redis, posts)
    counts = {"posts": len(posts), "lifted": lifted}
    return Done(counts, f"{subject} unblocked ({lifted:,} had been purged)")


def _purge_posts(
    redis: Redis, settings: Settings, posts: Sequence[str], *, yes: bool
) -> Done:
    """Purge posts, after asking in a terminal, unless `yes`."""
    subject = printable(_subject(posts))
    days = TOMBSTONE_TTL_S // DAY_S
    blocked = f"{days} days"
    # Scripts delete posts at their authors' request; a block by mistake is lifted by --lift.
    confirm(
        f"Delete everything stored about {subject}, and block it for {blocked}",
        yes=yes,
        only_in_terminal=True,
    )
    outcome = purge_posts(redis, settings, posts)
    counts = count_posts(posts, outcome)
    return Done(counts, _purge_summary(redis, outcome, blocked))


def _read_ids(ids: Sequence[str]) -> list[str]:
    """Return the ids of posts, those of standard input in place of -. Raises UserError."""
    post_ids: list[str] = []
    for post_id in ids:
        if post_id == "-":
            post_ids.extend(_stdin_lines())
        else:
            post_ids.append(post_id)
    posts = valid_ids(post_ids)
    if not posts:
        raise UserError("Standard input contains no post id. Give one id per line.")
    return posts


def _purge_summary(redis: Redis, outcome: PurgedPosts, blocked: str) -> str:
    """Return the summary of a purge of posts. blocked: for how long they are blocked."""
    sentences = []
    if outcome.matched:
        subject = _subject(outcome.matched)
        removed = _format_counts(outcome.counts)
        sentences.append(f"{subject} purged ({removed}), now blocked for {blocked}")
    if outcome.unmatched:
        subject = _subject(outcome.unmatched)
        if len(outcome.unmatched) > 1:
            subject += f", such as {outcome.unmatched[0]}"
        elif outcome.purged_before:
            subject += ", which was purged before"
        hint = _hint(redis, outcome.unmatched)
        # An id may be mistyped, and then a later post with that id would not be read.
        sentences.append(
            f"nothing is stored about {subject}: nothing was deleted, now blocked for {blocked}; "
            f"`feedmill purge --lift ID` unblocks{hint}"
        )
    if outcome.unreadable:
        sentences.append(
            f"{outcome.unreadable:,} messages in the queues cannot be read and were not changed: "
            "workers refuse them, and keep no text of a purged post"
        )
    return "\n".join(map(printable, sentences))


def _subject(ids: Sequence[str]) -> str:
    count = len(ids)
    if count == 1:
        return ids[0]
    return f"{count:,} posts"


def _hint(redis: Redis, ids: Sequence[str]) -> str:
    """Return a clause about the posts that were probably meant by ids that matched nothing; "" if
    there are none.
    """
    similar = similar_ids(redis, ids)
    if similar:
        quoted = ", ".join(similar[:MAX_QUOTED_IDS])
        return f". Did you mean {quoted}?"
    if any(post_id.startswith("did:") for post_id in ids):
        return ". A DID names an account: its posts have ids such as at://DID/app.bsky.feed.post/KEY"
    return ""


def _purge_run(redis: Redis, settings: Settings, run: str, *, yes: bool) -> Done:
    """Purge a run, after asking."""
    progress = runs.progress(redis, run)
    if progress:
        stored = f"{progress.sent:,} sent, {progress.settled:,} classified"
    else:
        stored = "not in the list of runs"
    name = printable(run)
    confirm(f"Delete all posts and results of run {name} ({stored})", yes=yes)
    counts = purge_known_run(redis, settings, run)
    removed = counts.copy()
    outside = removed.pop("outside")
    removed_text = _format_counts(removed)
    summary = f"run {run} purged ({removed_text})"
    if outside:
        days = settings.results_ttl / DAY_S
        summary += (
            f"; {outside:,} earlier results are no longer in the results stream: they "
            f"were purged before, or expire within {days:.3g} days"
        )
    return Done(counts, summary)


def _clear(redis: Redis, settings: Settings, *, yes: bool) -> Done:
    """Empty a queue, after asking."""
    waiting = count_waiting(redis, settings)
    name = printable(settings.queue)
    if waiting:
        confirm(f"Remove all messages that wait in queue {name} ({waiting:,})", yes=yes)
    counts = clear_queue(redis, settings)
    removed = counts.copy()
    in_progress = removed.pop("held")
    removed_text = _format_counts(removed)
    summary = f"queue {name} emptied ({removed_text})"
    if in_progress:
        summary += f"; workers finish the {in_progress:,} that they hold"
    return Done(counts, summary)


def _format_counts(counts: dict[str, int]) -> str:
    """Format what was removed, such as `sent: 1, dead letters: 2`."""
    parts = []
    for what, count in counts.items():
        if count:
            words = what.replace("_", " ")
            parts.append(f"{words}: {count:,}")
    if not parts:
        return "nothing was stored"
    return ", ".join(parts)


def _stdin_lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input, in UTF-8, or UTF-16 with a byte order mark."""
    source: Any = sys.stdin.buffer  # the stubs lack `peek`
    mark = source.peek(2)[:2]
    encoding = "utf-16" if mark in UTF16_MARKS else "utf-8-sig"
    for line in TextIOWrapper(source, encoding, errors="replace"):
        text = line.strip()
        if text:
            yield text
