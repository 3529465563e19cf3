"""The `feedmill forget` command: delete every known copy of posts, log it, and list or replay the
log.
"""

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from feedmill.cli.deletions import confirm
from feedmill.cli.options import AsJson, Yes, excludes, needs, with_settings
from feedmill.console import counted
from feedmill.forgetting import deletion_log
from feedmill.forgetting.deletion_log import Deletion
from feedmill.forgetting.forget import (
    Forgetting,
    Forgotten,
    copies_of,
    ids_of_file,
    replay,
)
from feedmill.forgetting.selection import Selection, make_selection
from feedmill.shared.broker import connect
from feedmill.shared.errors import UserError, json_line, printable
from feedmill.shared.messages import MAX_ID
from feedmill.shared.purge import TOMBSTONE_TTL_S, tombstones
from feedmill.shared.settings import DAY_S, Settings

#: Ids that a message names.
MAX_NAMED = 5
#: Ids in another form that are printed.
MAX_FORMS = 1000
#: Items by the name of their count.
ITEMS = {
    "messages": "queued messages",
    "entries": "entries in the results stream",
    "results": "stored results",
    "sent": "sent records",
    "dead_letters": "dead letters",
    "celery_results": "Celery results",
    "flower_messages": "messages in Flower's file",
    "uploads": "files dropped on the pages",
    "answers": "answers of reviewers",
    "exported_rows": "rows of exports",
    "waiting": "posts in removed messages",
}


@excludes("--list", "ID...", "--author", "--account", "--run", "--subreddit", "--where")
@excludes("--list", "--from", "--replay", "--dry-run", "--yes", "--export", "--note")
@excludes("--replay", "ID...", "--author", "--account", "--run", "--subreddit")
@excludes("--replay", "--where", "--from", "--note")
@needs("--column", "--from")
@needs("--table", "--export")
@with_settings("answers", "data_folder", "redis_url")
def forget(
    settings: Settings,
    ids: Annotated[
        list[str] | None,
        Argument(
            metavar="ID...",
            help=(
                "Post ids in any form: bare, t3_…, an address, an at-URI; or an account's DID."
            ),
        ),
    ] = None,
    author: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Posts whose author is stored with them.",
        ),
    ] = None,
    account: Annotated[
        list[str] | None,
        Option(
            metavar="DID",
            help="Posts of an account on Bluesky.",
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="A run; its posts can be sent again.",
        ),
    ] = None,
    subreddit: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Posts of a subreddit.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        Option(
            metavar="COLUMN=VALUE",
            help="Posts with this value of a kept column, such as customer=4711.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        Option(
            "--from",
            metavar="FILE",
            help="Posts whose ids a file lists.",
        ),
    ] = None,
    column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Column of the ids (default: id).",
        ),
    ] = None,
    exports: Annotated[
        list[str] | None,
        Option(
            "--export",
            metavar="OUT",
            help="A further export, beside those that this machine remembers.",
        ),
    ] = None,
    table: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Table of --export in a database.",
        ),
    ] = None,
    labels: Annotated[
        list[Path] | None,
        Option(
            "--labelled", metavar="FOLDER", help="A further folder of `feedmill label`."
        ),
    ] = None,
    note: Annotated[
        str,
        Option(
            metavar="TEXT",
            help="Text for the log, such as a request's number.",
        ),
    ] = "",
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Show what would be deleted; delete nothing.",
        ),
    ] = False,
    yes: Yes = False,
    list_: Annotated[
        bool,
        Option(
            "--list",
            help="List the log of deletions; with --json, export it.",
        ),
    ] = False,
    replay_log: Annotated[
        Path | None,
        Option(
            "--replay",
            metavar="LOG",
            help="Repeat the deletions of a log.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Asks first in a terminal.

    Deletes messages, results, dead letters, answers, rows of exports and Flower's messages, blocks
    the posts for a year, and appends to the log forgotten.jsonl in the data folder. After a
    restore, --replay repeats a log. Exits 1 if nothing was found, or a place could not be changed.
    """
    path = deletion_log.path_of(settings)
    if list_:
        _show_log(path, as_json)
        return
    copies = copies_of(exports or (), labels or (), table)
    redis = connect(settings)
    if replay_log is not None:
        deletions = deletion_log.by_name(deletion_log.read(replay_log))
        if not deletions:
            raise UserError(
                f"{printable(str(replay_log))} has no deletions. Give a log of `feedmill forget`."
            )
        if dry_run:
            outcome = replay(redis, settings, deletions, copies, dry_run=True)
            _show_preview(outcome, shared=0, as_json=as_json)
            raise typer.Exit(_exit_status(outcome))
        confirm(_replayed(deletions), yes=yes, only_in_terminal=True)
        outcome = replay(redis, settings, deletions, copies)
        _finish(outcome, path, as_json)
    post_ids = tuple(ids or ())
    if file is not None:
        post_ids += ids_of_file(file, column or "id")
    selection = make_selection(
        ids=post_ids,
        authors=tuple(author or ()),
        accounts=tuple(account or ()),
        runs=tuple(run or ()),
        subreddits=tuple(subreddit or ()),
        values=tuple(where or ()),
    )
    _check(selection, file)
    forgetting = Forgetting(redis, settings, selection, copies, note)
    matches = forgetting.find()
    if not matches.ids and not matches.runs:
        outcome = forgetting.run()  # deletes nothing
        unmatched = matches.unmatched
        ids_in_form = [text for text in unmatched if len(text) <= MAX_ID]
        before = tombstones(redis, ids_in_form)
        _say_nothing_found(outcome, before, as_json)
        deletions = deletion_log.by_name(deletion_log.read(path))
        if any(deletion.counts is None for deletion in deletions):
            _say_how_to_repeat("an earlier deletion did not finish", path)
        raise typer.Exit(1)
    if not as_json:
        _say_forms(matches.forms)
    if dry_run:
        outcome = forgetting.preview()
        _show_preview(outcome, forgetting.shared, as_json)
        status = _exit_status(outcome)
        raise typer.Exit(status)
    what = _subject(matches.ids, matches.runs)
    confirm(f"Delete every known copy of {what}", yes=yes, only_in_terminal=True)
    outcome = forgetting.run()
    _finish(outcome, path, as_json)


def _replayed(deletions: Sequence[Deletion]) -> str:
    """Return the question about a replay, with the names that it deletes more than posts by."""
    runs: dict[str, None] = {}
    subreddits: dict[str, None] = {}
    for deletion in deletions:
        runs |= dict.fromkeys(deletion.selection.runs)
        subreddits |= dict.fromkeys(deletion.selection.subreddits)
    number = counted(len(deletions), "deletion")
    question = f"Repeat {number}"
    names = [f"run {run}" for run in runs]
    names += [f"r/{subreddit}" for subreddit in subreddits]
    if names:
        named = ", ".join(names[:MAX_NAMED])
        question += f", also of {named}"
    others = len(names) - MAX_NAMED
    if others > 0:
        question += f" and {others:,} more"
    return printable(question)


def _check(selection: Selection, file: str | None) -> None:
    if selection:
        return
    if file is not None:
        raise UserError(
            f"{printable(file)} has no ids. Give another --from or --column."
        )
    raise UserError(
        "Give what to forget: ids, --author, --account, --run, --subreddit, --where or --from; or "
        "--list or --replay LOG."
    )


def _finish(outcome: Forgotten, log: Path, as_json: bool) -> None:
    """Print an outcome, and exit."""
    if as_json:
        typer.echo(json_line(outcome._asdict()))
    else:
        subject = _subject(outcome.ids, outcome.runs)
        removed = _items(outcome.counts) or "nothing was stored"
        blocked = ""
        if outcome.ids:
            blocked = f"; the posts are blocked for {TOMBSTONE_TTL_S // DAY_S} days"
        _say(f"{subject} forgotten ({removed}){blocked}")
        _say_unmatched(outcome)
    _say_problems(outcome)
    if outcome.problems:
        _say_how_to_repeat("the deletion did not finish", log)
    status = _exit_status(outcome)
    raise typer.Exit(status)


def _say_how_to_repeat(reason: str, log: Path) -> None:
    """Print how a deletion is repeated in all places: a search finds what is left in some only."""
    quoted = shlex.quote(str(log))
    text = f"feedmill: {reason}: `feedmill forget --replay {quoted}` repeats it"
    typer.echo(printable(text), err=True)


def _say_forms(forms: Mapping[str, str]) -> None:
    """Print the ids that were found in another form, which may be those of other posts."""
    for text, post_id in list(forms.items())[:MAX_FORMS]:
        _say(f"nothing is stored as {text}: taken as {post_id}")
    others = len(forms) - MAX_FORMS
    if others > 0:
        _say(f"and {others:,} more ids are taken in other forms")


def _exit_status(outcome: Forgotten) -> int:
    if outcome.is_complete:
        return 0
    return 1


def _show_preview(outcome: Forgotten, shared: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json_line(outcome._asdict()))
    else:
        subject = _subject(outcome.ids, outcome.runs)
        _say(f"would forget {subject}:")
        for name, number in outcome.counts.items():
            item = ITEMS.get(name, f"rows of {name}")
            _say(f"  {number:>9,} {item}")
        for post_id in outcome.ids[:MAX_NAMED]:
            _say(f"  {post_id}")
        if len(outcome.ids) > MAX_NAMED:
            _say("  …")
        if shared:
            number_of_ids = counted(shared, "id")
            _say(
                f"{number_of_ids} of these occur in several runs: the posts of all runs are "
                "deleted"
            )
        _say_unmatched(outcome)
        _say("nothing was deleted")
    _say_problems(outcome)


def _say_nothing_found(
    outcome: Forgotten, before: Mapping[str, int], as_json: bool
) -> None:
    if as_json:
        typer.echo(json_line(outcome._asdict()))
    elif outcome.unmatched:
        _say_unmatched(outcome)
        for post_id, at in before.items():
            date = datetime.fromtimestamp(at, UTC).date()
            _say(f"{post_id} was deleted on {date}, and is still blocked")
    else:
        _say("nothing found")
    _say_problems(outcome)


def _say_problems(outcome: Forgotten) -> None:
    """Print the places that were not searched or changed."""
    for problem in outcome.problems:
        text = printable(problem)
        typer.echo(f"feedmill: {text}", err=True)


def _say_unmatched(outcome: Forgotten) -> None:
    """Print what nothing is stored about."""
    if not outcome.unmatched:
        return
    named = ", ".join(outcome.unmatched[:MAX_NAMED])
    others = len(outcome.unmatched) - MAX_NAMED
    if others > 0:
        named += f" and {others:,} more"
    text = f"nothing found about {named}"
    if outcome.similar:
        similar = ", ".join(outcome.similar)
        text += f"; did you mean {similar}?"
    _say(text)


def _say(text: str) -> None:
    typer.echo(printable(text))


def _subject(ids: Sequence[str], runs: Sequence[str]) -> str:
    parts = []
    if len(ids) == 1:
        parts.append(ids[0])
    elif ids:
        parts.append(counted(len(ids), "post"))
    parts += [f"run {run}" for run in runs]
    return printable(" and ".join(parts) or "no posts")


def _items(counts: Mapping[str, int]) -> str:
    """Format what was removed, such as `stored results: 1, dead letters: 2`."""
    parts = []
    for name, number in counts.items():
        item = ITEMS.get(name, name)
        parts.append(f"{item}: {number:,}")
    return ", ".join(parts)


def _show_log(path: Path, as_json: bool) -> None:
    """Print the log of deletions."""
    if as_json:
        for entry in deletion_log.read(path):
            typer.echo(json_line(entry.to_dict()))
        return
    deletions = deletion_log.by_name(deletion_log.read(path))
    if not deletions:
        typer.echo("no deletions", err=True)
    for deletion in deletions:
        _say(_log_line(deletion))


def _log_line(deletion: Deletion) -> str:
    date = datetime.fromtimestamp(deletion.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    state = "not finished: repeat it with --replay"
    if deletion.counts is not None:
        state = _items(deletion.counts) or "nothing was stored"
    selection: dict[str, Any] = deletion.selection.to_dict()
    kinds = []
    for name, items in selection.items():
        if items:
            kinds.append(name)
    subject = _subject(deletion.ids, deletion.selection.runs)
    parts = [
        date,
        deletion.by,
        subject,
    ]
    if kinds:
        names = ", ".join(kinds)
        parts.append(f"by {names}")
    if deletion.note:
        parts.append(deletion.note)
    parts.append(state)
    return "  ".join(parts)
