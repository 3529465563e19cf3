"""The `feedmill dead` commands: list or show, retry and drop dead letters."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated

import typer
from redis import Redis
from typer import Argument, Option

from feedmill.cli.options import AsJson, RunName, Yes, excludes, utc, with_settings
from feedmill.cli.terminal import confirm
from feedmill.producers.push import Pusher
from feedmill.reading.dead_letters import DeadLetterEntry, DeadLetters
from feedmill.reading.rows import check_run
from feedmill.shared.broker import Application, connect, make_app
from feedmill.shared.errors import PostRefused, RequestRefused, UserError, json_line, printable
from feedmill.shared.keys import DEAD_LETTERS
from feedmill.shared.messages import ClassifyOptions, DeadLetter, Post
from feedmill.shared.settings import Settings

#: Dead letters that `list` shows by default.
DEFAULT_COUNT = 20
#: Ids that an error message quotes at most.
MAX_QUOTED_IDS = 5

app = typer.Typer(
    name="dead", help="List, retry or drop dead letters (posts that could not be classified).", no_args_is_help=True
)

DeadLetterIds = Annotated[list[str] | None, Argument(metavar="ID...", help="Ids of dead letters or of their posts.")]
All = Annotated[bool, Option("--all", help="Select every dead letter.")]


@app.command("list")
@excludes("ID...", "--count", "--run")
@with_settings("redis_url")
def list_(
    settings: Settings,
    ids: DeadLetterIds = None,
    count: Annotated[int, Option(help="Number of dead letters to show.", min=1)] = DEFAULT_COUNT,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List the newest dead letters with id, post, time and reason. With ids, show these in full."""
    redis = connect(settings)
    dead = DeadLetters(redis)
    if run is not None:
        check_run(redis, run)
    show, is_empty = _as_json if as_json else _described if ids else _line, True
    for each in _named(dead, ids) if ids else dead.newest(count, run):
        is_empty = False
        typer.echo(show(each))
    if is_empty:
        typer.echo("no dead letters", err=True)


@app.command()
@with_settings("redis_url")
def retry(settings: Settings, ids: DeadLetterIds = None, every: All = False) -> None:
    """Send the posts of dead letters to their queues again, with their original options.

    A dead letter is removed once its post is in the queue. Exits 1 if one could not be retried.
    """
    redis = connect(settings)
    dead = DeadLetters(redis)
    app_of = cache(lambda queue: make_app(settings.model_copy(update={"queue": queue or settings.queue})))
    sent = refused = 0
    for each in _chosen(dead, ids, every):
        try:
            letter, post, options = _read(each)
            dead.expect_again(letter)
            _send_again(post, options, redis, app_of(letter.queue))
        except (PostRefused, RequestRefused) as why:
            typer.echo(f"feedmill: {printable(each.name)} not retried: {printable(str(why))}", err=True)
            refused += 1
        else:
            dead.remove_retried(each)
            sent += 1
    typer.echo(f"{sent:,} retried" + (f", {refused:,} not retried and kept" if refused else ""))
    raise typer.Exit(1 if refused else 0)


@app.command()
@with_settings("redis_url")
def drop(settings: Settings, ids: DeadLetterIds = None, every: All = False, yes: Yes = False) -> None:
    """Delete dead letters permanently. Asks first with --all."""
    redis = connect(settings)
    dead = DeadLetters(redis)
    chosen = _chosen(dead, ids, every)
    confirm(f"Drop {redis.xlen(DEAD_LETTERS):,} dead letters permanently", yes or not every)
    dropped = 0
    for each in chosen:
        dead.remove(each)
        dropped += 1
    typer.echo(f"{dropped:,} dropped")


def _chosen(dead: DeadLetters, ids: Sequence[str] | None, every: bool) -> Iterator[DeadLetterEntry]:
    """Return the selected dead letters. Raises UserError without ids and --all, and as `_named` does."""
    if bool(ids) == every:
        raise UserError("Select dead letters: give ids, as `feedmill dead list` shows them, or --all.")
    return dead.all() if every else _named(dead, ids or [])


def _named(dead: DeadLetters, ids: Sequence[str]) -> Iterator[DeadLetterEntry]:
    """Return the dead letter for each id, read lazily. Raises UserError if none or several match an id."""
    found = dead.find(ids)
    for name, several in found.items():
        if not several:
            raise UserError(f"No dead letter matches {printable(name)}. List them with `feedmill dead list`.")
        if len(several) > 1:
            quoted = ", ".join(several[:MAX_QUOTED_IDS]) + (", …" if len(several) > MAX_QUOTED_IDS else "")
            raise UserError(
                f"{len(several):,} dead letters match {printable(name)}, so nothing was changed. Give the id of one: "
                f"{quoted}."
            )
    names = dict.fromkeys(name for (name,) in found.values())
    return (letter for name in names if (letter := dead.get(name)))


def _read(each: DeadLetterEntry) -> tuple[DeadLetter, Post, ClassifyOptions]:
    """Return a dead letter, its post and options. Raises PostRefused or RequestRefused if one was not stored."""
    letter = each.letter
    if letter.post is None:
        raise PostRefused(
            letter.id, "", "the dead letter does not contain the post; send the post again from its source"
        )
    if letter.options is None:
        raise RequestRefused("the options were too long to store; send the post again from its source")
    return letter, Post.parse(json.loads(letter.post)), ClassifyOptions.parse(json.loads(letter.options))


def _send_again(post: Post, options: ClassifyOptions, redis: Redis, app: Application) -> None:
    """Publish the post of a dead letter again. Raises PostRefused if it was purged."""
    pusher = Pusher(app, redis, app.settings, options, again=True)
    pusher.push([post])
    if pusher.gone:
        raise PostRefused(post.id, "", f"post {post.id} was purged")


def _as_json(each: DeadLetterEntry) -> str:
    return json_line({"entry": each.name, **each.letter.model_dump()})


def _line(each: DeadLetterEntry) -> str:
    letter = each.letter
    return printable(f"{each.name:<18} {letter.id or '-':<12} {utc(letter.failed_at)}  {letter.reason}")


def _described(each: DeadLetterEntry) -> str:
    letter = each.letter
    facts = {"entry": each.name, **letter.model_dump(exclude={"traceback"}), "failed_at": utc(letter.failed_at)}
    lines = [f"{name:<10} {printable(str(value))}" for name, value in facts.items() if value is not None]
    return "\n".join([*lines, *map(printable, (letter.traceback or "").splitlines())])
