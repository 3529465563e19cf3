"""`feedmill dead`: what could not be classified, and why; sent again, or dropped."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Annotated

import typer
from redis import Redis

from feedmill.flags import AsJson, RedisUrl, settings_of
from producers.push import Pusher
from shared.broker import Application, connect, make_app, told_plainly
from shared.dead import DeadLetters, Element, Entry
from shared.errors import PostRefused, RequestRefused, UserError, json_line, printable
from shared.messages import ClassifyOptions, DeadLetter, Post

#: Letters that are shown where no number is given.
COUNT = 20
#: Names of letters that a sentence quotes.
QUOTED = 5

app = typer.Typer(help="See to dead letters: what could not be classified, and why.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="The letter's id, as `list` shows it, or its post's.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Letters' ids, or their posts'.")]
All = Annotated[bool, typer.Option("--all", help="All that are there now.")]


@app.command("list")
def list_(
    count: Annotated[int, typer.Option(help="How many of the newest to show.", min=1)] = COUNT,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show the newest dead letters: id, post, time, reason."""
    settings = settings_of(redis_url=redis_url)
    is_empty = True
    with told_plainly(settings):
        for each in DeadLetters(connect(settings)).newest(count):
            is_empty = False
            typer.echo(_as_json(each) if as_json else _line(each))
    if is_empty:
        typer.echo("no dead letters", err=True)


@app.command()
def show(name: Id, as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """Show all that is kept of one: reason, post, options, traceback."""
    settings = settings_of(redis_url=redis_url)
    with told_plainly(settings):
        found, missing = _named(DeadLetters(connect(settings)), [name])
        for each in found:
            typer.echo(_as_json(each) if as_json else _described(each))
    _tell_missing(missing)
    raise typer.Exit(1 if missing else 0)


@app.command()
def retry(ids: Ids = None, every: All = False, redis_url: RedisUrl = None) -> None:
    """Send the posts of dead letters again, each with its options and to the queue that it came out of.

    A letter goes once its post is in the queue.
    """
    settings = settings_of(redis_url=redis_url)
    redis = connect(settings)
    dead = DeadLetters(redis)

    @cache
    def app_of(queue: str | None) -> Application:
        """What sends to this queue; an application has one."""
        return make_app(settings.model_copy(update={"queue": queue or settings.queue}))

    sent = refused = 0
    with told_plainly(settings):
        chosen, missing = _chosen(dead, ids, every)
        for each in chosen:
            if why := _send_again(each, dead, redis, app_of):
                typer.echo(f"feedmill: {printable(each.name)} {printable(why)}", err=True)
                refused += 1
            else:
                dead.remove(each)
                sent += 1
    _tell_missing(missing)
    typer.echo(f"{sent:,} sent again" + (f", {refused:,} cannot be and stay" if refused else ""))
    raise typer.Exit(1 if refused or missing else 0)


@app.command()
def drop(
    ids: Ids = None,
    every: All = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before all are dropped.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Remove dead letters for good."""
    settings = settings_of(redis_url=redis_url)
    dead = DeadLetters(connect(settings))
    dropped = 0
    with told_plainly(settings):
        chosen, missing = _chosen(dead, ids, every)
        if every and not yes:
            _ask(dead.count())
        for each in chosen:
            dead.remove(each)
            dropped += 1
    _tell_missing(missing)
    typer.echo(f"{dropped:,} dropped")
    raise typer.Exit(1 if missing else 0)


def _ask(count: int) -> None:
    """Returns if a person says yes. Raises UserError where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise UserError("--all drops every dead letter for good: add --yes.")
    typer.confirm(f"Drop {count:,} dead letters for good?", abort=True)


def _chosen(dead: DeadLetters, ids: Sequence[str] | None, every: bool) -> tuple[Iterator[Entry | Element], list[str]]:
    """Those that are meant, and the ids that none goes by. Raises UserError."""
    if bool(ids) == every:
        raise UserError("Say which dead letters: ids, as `feedmill dead list` shows them, or --all.")
    return (dead.all(), []) if every else _named(dead, ids or [])


def _named(dead: DeadLetters, ids: Sequence[str]) -> tuple[Iterator[Entry | Element], list[str]]:
    """Find the one that goes by each id, read when its turn comes; and the ids that none goes by.

    Raises UserError where several go by one.
    """
    found = dead.find(ids)
    for name, several in found.items():
        if len(several) > 1:
            names = ", ".join(several[:QUOTED]) + (", …" if len(several) > QUOTED else "")
            raise UserError(
                f"{len(several):,} dead letters go by {printable(name)}, and nothing was done: give the id of one "
                f"({names})."
            )
    chosen = dict.fromkeys(each for several in found.values() for each in several)
    letters = (letter for each in chosen if (letter := dead.get(each)))
    return letters, [name for name, several in found.items() if not several]


def _tell_missing(ids: Sequence[str]) -> None:
    for name in ids:
        typer.echo(f"feedmill: no dead letter goes by {printable(name)}: gone, or never there", err=True)


def _send_again(
    each: Entry | Element, dead: DeadLetters, redis: Redis, app_of: Callable[[str | None], Application]
) -> str | None:
    """Publish its post once more; why not, where it cannot be."""
    if isinstance(each, Element):
        return "is no message, and cannot be sent again"
    try:
        post, options = _read(each.letter)
    except (PostRefused, RequestRefused) as refused:
        return f"cannot be sent again: {refused}"
    dead.expect_again(each.letter)
    app = app_of(each.letter.queue)
    pusher = Pusher(app, redis, app.settings, options, again=True)
    pusher.push([post])
    return f"cannot be sent again: post {post.id} was purged" if pusher.gone else None


def _read(letter: DeadLetter) -> tuple[Post, ClassifyOptions]:
    """What it takes to send a letter's post again. Raises PostRefused and RequestRefused."""
    if letter.post is None:
        raise PostRefused(letter.id, "", "no post was kept of it")
    if letter.options is None:
        raise RequestRefused("its options were too long to be kept")
    return Post.parse(json.loads(letter.post)), ClassifyOptions.parse(json.loads(letter.options))


def _as_json(each: Entry | Element) -> str:
    if isinstance(each, Element):
        found: dict[str, object] = {"entry": each.name, "element": each.content.decode("utf-8", "replace")}
    else:
        found = {"entry": each.name, **each.letter.model_dump()}
    return json_line(found)


def _line(each: Entry | Element) -> str:
    if isinstance(each, Element):
        return f"{each.name}  {len(each.content):,} bytes that are no message"
    letter = each.letter
    return printable(f"{each.name:<18} {letter.id or '-':<12} {_time(letter.failed_at)}  {letter.reason}")


def _described(each: Entry | Element) -> str:
    if isinstance(each, Element):
        return f"{each.name}  no message:\n{printable(each.content.decode('utf-8', 'replace'))}"
    letter = each.letter
    facts = {
        "letter": each.name,
        "post": letter.id,
        "reason": letter.reason,
        "failed": f"{_time(letter.failed_at)} on {letter.worker}",
        "attempts": str(letter.attempts),
        "message": letter.message,
        "queue": letter.queue,
        "fields": letter.post,
        "options": letter.options,
        "payload": letter.payload,
    }
    lines = [f"{name:<10} {printable(value)}" for name, value in facts.items() if value is not None]
    return "\n".join([*lines, *map(printable, (letter.traceback or "").splitlines())])


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
