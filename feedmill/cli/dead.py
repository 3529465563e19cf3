"""The `feedmill dead` commands: list, show, retry and drop dead letters."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated

import typer
from redis import Redis

from feedmill.cli.dates import utc
from feedmill.cli.options import AsJson, RedisUrl, RunFilter, settings_of
from feedmill.producers.push import Pusher
from feedmill.reading.dead_letters import DeadLetterEntry, DeadLetters, UndecodableMessage
from feedmill.reading.names import check_run
from feedmill.shared.broker import Application, connect, make_app, user_errors
from feedmill.shared.errors import PostRefused, RequestRefused, UserError, json_line, printable
from feedmill.shared.messages import ClassifyOptions, DeadLetter, Post, parse_run

#: Dead letters that `list` shows by default.
DEFAULT_COUNT = 20
#: Ids that an error message quotes at most.
MAX_QUOTED_IDS = 5

app = typer.Typer(
    name="dead", help="List, retry or drop dead letters (posts that could not be classified).", no_args_is_help=True
)

DeadLetterId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the dead letter, as `list` shows it, or of its post.")
]
DeadLetterIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID...", help="Ids of dead letters or of their posts.")
]
Entry = DeadLetterEntry | UndecodableMessage
All = Annotated[bool, typer.Option("--all", help="Select every dead letter.")]


@app.command("list")
def list_(
    count: Annotated[int, typer.Option(help="Number of dead letters to show.", min=1)] = DEFAULT_COUNT,
    run: RunFilter = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """List the newest dead letters with id, post, time and reason."""
    settings = settings_of(redis_url=redis_url)
    is_empty = True
    with user_errors(settings):
        redis, run = connect(settings), None if run is None else parse_run(run)
        if run is not None:
            check_run(redis, run)
        for each in DeadLetters(redis).newest(count, run):
            is_empty = False
            typer.echo(_as_json(each) if as_json else _line(each))
    if is_empty:
        typer.echo("no dead letters", err=True)


@app.command()
def show(name: DeadLetterId, as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """Show one dead letter in full: reason, post, options and traceback."""
    settings = settings_of(redis_url=redis_url)
    with user_errors(settings):
        found, missing = _named(DeadLetters(connect(settings)), [name])
        for each in found:
            typer.echo(_as_json(each) if as_json else _described(each))
    _report_missing(missing)
    raise typer.Exit(1 if missing else 0)


@app.command()
def retry(ids: DeadLetterIds = None, every: All = False, redis_url: RedisUrl = None) -> None:
    """Send the posts of dead letters to their queues again, with their original options.

    A dead letter is removed once its post is in the queue. Exits 1 if a dead letter was not found or could not be
    retried.
    """
    settings = settings_of(redis_url=redis_url)
    redis = connect(settings)
    dead = DeadLetters(redis)

    @cache
    def app_of(queue: str | None) -> Application:
        """Return an application that sends to this queue."""
        return make_app(settings.model_copy(update={"queue": queue or settings.queue}))

    sent = refused = 0
    with user_errors(settings):
        chosen, missing = _chosen(dead, ids, every)
        for each in chosen:
            if why := _send_again(each, dead, redis, app_of):
                typer.echo(f"feedmill: {printable(each.name)} not retried: {printable(why)}", err=True)
                refused += 1
            else:
                dead.remove_retried(each)
                sent += 1
    _report_missing(missing)
    typer.echo(f"{sent:,} retried" + (f", {refused:,} not retried and kept" if refused else ""))
    raise typer.Exit(1 if refused or missing else 0)


@app.command()
def drop(
    ids: DeadLetterIds = None,
    every: All = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation with --all.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Delete dead letters permanently."""
    settings = settings_of(redis_url=redis_url)
    dead = DeadLetters(connect(settings))
    dropped = 0
    with user_errors(settings):
        chosen, missing = _chosen(dead, ids, every)
        if every and not yes:
            _confirm(dead.count())
        for each in chosen:
            dead.remove(each)
            dropped += 1
    _report_missing(missing)
    typer.echo(f"{dropped:,} dropped")
    raise typer.Exit(1 if missing else 0)


def _confirm(count: int) -> None:
    """Ask for confirmation and abort on "no". Raises UserError if standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise UserError("--all drops every dead letter permanently. Add --yes to confirm.")
    typer.confirm(f"Drop {count:,} dead letters permanently?", abort=True)


def _chosen(dead: DeadLetters, ids: Sequence[str] | None, every: bool) -> tuple[Iterator[Entry], list[str]]:
    """Return the selected dead letters, and the ids without one. Raises UserError without ids and --all."""
    if bool(ids) == every:
        raise UserError("Select dead letters: give ids, as `feedmill dead list` shows them, or --all.")
    return (dead.all(), []) if every else _named(dead, ids or [])


def _named(dead: DeadLetters, ids: Sequence[str]) -> tuple[Iterator[Entry], list[str]]:
    """Return the dead letter for each id, read lazily, and the ids without one.

    Raises UserError if several dead letters match one id.
    """
    found = dead.find(ids)
    for name, several in found.items():
        if len(several) > 1:
            names = ", ".join(several[:MAX_QUOTED_IDS]) + (", …" if len(several) > MAX_QUOTED_IDS else "")
            raise UserError(
                f"{len(several):,} dead letters match {printable(name)}, so nothing was changed. Give the id of one: "
                f"{names}."
            )
    chosen = dict.fromkeys(each for several in found.values() for each in several)
    letters = (letter for each in chosen if (letter := dead.get(each)))
    return letters, [name for name, several in found.items() if not several]


def _report_missing(ids: Sequence[str]) -> None:
    for name in ids:
        typer.echo(f"feedmill: no dead letter matches {printable(name)}; list them with `feedmill dead list`", err=True)


def _send_again(
    each: Entry,
    dead: DeadLetters,
    redis: Redis,
    app_of: Callable[[str | None], Application],
) -> str | None:
    """Publish the post of a dead letter again; return the reason if that is impossible, else None."""
    if isinstance(each, UndecodableMessage):
        return "it is not a message"
    try:
        post, options = _read(each.letter)
    except (PostRefused, RequestRefused) as refused:
        return str(refused)
    dead.expect_again(each.letter)
    app = app_of(each.letter.queue)
    pusher = Pusher(app, redis, app.settings, options, again=True)
    pusher.push([post])
    return f"post {post.id} was purged" if pusher.gone else None


def _read(letter: DeadLetter) -> tuple[Post, ClassifyOptions]:
    """Return the post and options of a dead letter. Raises PostRefused or RequestRefused if one was not stored."""
    if letter.post is None:
        raise PostRefused(
            letter.id, "", "the dead letter does not contain the post; send the post again from its source"
        )
    if letter.options is None:
        raise RequestRefused("the options were too long to store; send the post again from its source")
    return Post.parse(json.loads(letter.post)), ClassifyOptions.parse(json.loads(letter.options))


def _as_json(each: Entry) -> str:
    if isinstance(each, UndecodableMessage):
        found: dict[str, object] = {"entry": each.name, "element": each.content.decode("utf-8", "replace")}
    else:
        found = {"entry": each.name, **each.letter.model_dump()}
    return json_line(found)


def _line(each: Entry) -> str:
    if isinstance(each, UndecodableMessage):
        return f"{each.name}  {len(each.content):,} bytes, not a message"
    letter = each.letter
    return printable(f"{each.name:<18} {letter.id or '-':<12} {utc(letter.failed_at)}  {letter.reason}")


def _described(each: Entry) -> str:
    if isinstance(each, UndecodableMessage):
        return f"{each.name}  not a message:\n{printable(each.content.decode('utf-8', 'replace'))}"
    letter = each.letter
    facts = {
        "letter": each.name,
        "post": letter.id,
        "reason": letter.reason,
        "failed": f"{utc(letter.failed_at)} on {letter.worker}",
        "attempts": str(letter.attempts),
        "message": letter.message,
        "queue": letter.queue,
        "run": letter.run,
        "fields": letter.post,
        "options": letter.options,
        "payload": letter.payload,
    }
    lines = [f"{name:<10} {printable(value)}" for name, value in facts.items() if value is not None]
    return "\n".join([*lines, *map(printable, (letter.traceback or "").splitlines())])
