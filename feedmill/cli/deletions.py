"""The `feedmill dead` commands: list or show, retry and drop dead letters; and `feedmill purge`: delete what is stored
about posts, by id or by run, or the messages of a queue.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Annotated, Any, NamedTuple

import typer
from redis import Redis
from typer import Argument, Option

from feedmill.cli.options import AsJson, RunName, Yes, excludes, utc, with_settings
from feedmill.producers.push import Pusher
from feedmill.reading import check_run, unknown_run
from feedmill.shared import runs
from feedmill.shared.broker import Application, connect, make_app, queue_depth
from feedmill.shared.errors import PostRefused, RequestRefused, UserError, json_line, printable
from feedmill.shared.keys import DEAD_LETTER, DEAD_LETTERS
from feedmill.shared.messages import ClassifyOptions, DeadLetter, Post
from feedmill.shared.model_routing import check_queue
from feedmill.shared.purge import TOMBSTONE_TTL_S, clear, lift_tombstones, purge_run
from feedmill.shared.purge import purge as purge_posts
from feedmill.shared.results import PAGE_SIZE, dead_letter_digest, newest_first
from feedmill.shared.scripts import call
from feedmill.shared.settings import DAY_S, Settings

#: Dead letters that `list` shows by default.
DEFAULT_COUNT = 20
#: Ids that an error message quotes at most.
MAX_QUOTED_IDS = 5

#: Numbers of removed things by name, and a summary.
Done = tuple[dict[str, int], str]

dead = typer.Typer(no_args_is_help=True)


class DeadLetterEntry(NamedTuple):
    """A dead letter and the id of its stream entry, such as `1795255200000-0`."""

    name: str
    letter: DeadLetter

    @property
    def post_id(self) -> str | None:
        return None if self.letter.id is None else self.letter.id.strip()


class DeadLetters:
    """Access to the dead letters in Redis. Each method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def newest(self, count: int, run: str | None = None) -> Iterator[DeadLetterEntry]:
        """Yield the newest `count` dead letters, of the run if given, oldest first, one page in memory at a time."""
        entries = (_entry(*entry) for entry in newest_first(self._redis, DEAD_LETTERS))
        names = list(islice((name for name, letter in entries if run in (None, letter.run)), count))
        return (entry for name in reversed(names) if (entry := self.get(name)))

    def all(self) -> Iterator[DeadLetterEntry]:
        """Yield all dead letters, oldest first; skip letters added meanwhile."""
        newest: Any = self._redis.xrevrange(DEAD_LETTERS, count=1)
        if newest:
            yield from self._between("-", newest[0][0])

    def find(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of all entries that match each given name or post id. Does not keep their content."""
        found: dict[str, list[str]] = {name: [] for name in names}
        for entry in self.all():
            for name in {entry.name, entry.post_id} & found.keys():
                found[str(name)].append(entry.name)
        return found

    def get(self, name: str) -> DeadLetterEntry | None:
        """Return the entry with this name, or None if it no longer exists."""
        return next(self._between(name, name), None)

    def remove_retried(self, entry: DeadLetterEntry) -> None:
        """Delete an entry whose post was sent again, and subtract it from the failures of its run."""
        call(self._redis, "remove_retried", entry.name, entry.letter.run or "")

    def _between(self, start: str, end: str) -> Iterator[DeadLetterEntry]:
        """Yield the letters between two stream ids, oldest first."""
        client: Any = self._redis
        while letters := client.xrange(DEAD_LETTERS, start, end, count=PAGE_SIZE):
            yield from (_entry(*letter) for letter in letters)
            start = f"({letters[-1][0]}"


def _entry(name: str, fields: dict[str, str]) -> DeadLetterEntry:
    return DeadLetterEntry(name, DeadLetter.model_validate_json(fields["letter"]))


DeadLetterIds = Annotated[list[str] | None, Argument(metavar="ID...", help="Ids of dead letters or of their posts.")]
All = Annotated[bool, Option("--all", help="Select every dead letter.")]


@dead.command("list")
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


@dead.command()
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
            redis.delete(DEAD_LETTER + dead_letter_digest(letter))  # else a second failure would write none
            _send_again(post, options, redis, app_of(letter.queue))
        except (PostRefused, RequestRefused) as why:
            typer.echo(f"feedmill: {printable(each.name)} not retried: {printable(str(why))}", err=True)
            refused += 1
        else:
            dead.remove_retried(each)
            sent += 1
    typer.echo(f"{sent:,} retried" + (f", {refused:,} not retried and kept" if refused else ""))
    raise typer.Exit(1 if refused else 0)


@dead.command()
@with_settings("redis_url")
def drop(settings: Settings, ids: DeadLetterIds = None, every: All = False, yes: Yes = False) -> None:
    """Delete dead letters permanently. Asks first with --all."""
    redis = connect(settings)
    dead = DeadLetters(redis)
    chosen = _chosen(dead, ids, every)
    confirm(f"Drop {redis.xlen(DEAD_LETTERS):,} dead letters permanently", yes or not every)
    dropped = sum(1 for each in chosen if redis.xdel(DEAD_LETTERS, each.name))
    typer.echo(f"{dropped:,} dropped")


def confirm(action: str, yes: bool, only_in_terminal: bool = False) -> None:
    """Ask for confirmation of an action, unless `yes`; abort on "no".

    action: such as "Drop 3 dead letters". Without a terminal, raises UserError, or returns if `only_in_terminal`.
    """
    if yes or (only_in_terminal and not sys.stdin.isatty()):
        return
    if not sys.stdin.isatty():
        raise UserError(f"{action}? Add --yes to confirm.")
    typer.confirm(f"{action}?", abort=True)


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


@excludes("--lift", "--run", "--queue")
@excludes("--run", "ID...", "--queue")
@excludes("--queue", "ID...")
@with_settings("redis_url")
def purge(
    settings: Settings,
    ids: Annotated[
        list[str] | None, Argument(metavar="ID...", help="Post ids; - reads one per line from standard input.")
    ] = None,
    run: RunName = None,
    queue_name: Annotated[
        str | None, Option("--queue", metavar="NAME", help="Remove the messages that wait in this queue instead.")
    ] = None,
    yes: Yes = False,
    lift: Annotated[bool, Option("--lift", help="Unblock the posts instead; deletes and restores nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Asks first in a terminal. The block lasts a year. With --run, delete what is stored about a run; with --queue,
    remove the messages that no worker has taken yet. Neither blocks anything: the posts can be sent again. Exits 1 if
    nothing was stored.
    """
    redis = connect(settings)
    if run is not None:
        counts, summary = _purge_run(redis, settings, run, yes)
    elif queue_name is not None:
        counts, summary = _clear(redis, settings.model_copy(update={"queue": queue_name}), yes)
    elif ids:
        counts, summary = _purge_posts(redis, settings, ids, lift, yes)
    else:
        raise UserError("Give the ids of posts, --run NAME or --queue NAME.")
    typer.echo(json.dumps(counts) if as_json else printable(summary))
    raise typer.Exit(0 if any(count for what, count in counts.items() if what not in ("posts", "held")) else 1)


def _purge_posts(redis: Redis, settings: Settings, ids: Sequence[str], lift: bool, yes: bool) -> Done:
    """Purge posts, after asking in a terminal, or unblock them."""
    posts = dict.fromkeys(post_id.strip() for given in ids for post_id in (_lines() if given == "-" else [given]))
    if not posts:
        raise UserError("Standard input contains no post id. Give one id per line.")
    subject = next(iter(posts)) if len(posts) == 1 else f"{len(posts):,} posts"
    if lift:
        lifted = lift_tombstones(redis, posts)
        return {"posts": len(posts), "lifted": lifted}, f"{subject} unblocked ({lifted:,} had been purged)"
    blocked = f"{TOMBSTONE_TTL_S // DAY_S} days"
    # Scripts delete posts at their authors' request; a block by mistake is lifted by --lift.
    confirm(
        f"Delete everything stored about {printable(subject)}, and block it for {blocked}", yes or "-" in ids,
        only_in_terminal=True,
    )  # fmt: skip
    found = purge_posts(redis, settings, posts)
    # The id may be mistyped, and then a later post with that id would not be read.
    hint = "" if any(found.values()) else "; `feedmill purge --lift ID` unblocks"
    return {"posts": len(posts), **found}, f"{subject} purged ({_listed(found)}), now blocked for {blocked}{hint}"


def _purge_run(redis: Redis, settings: Settings, run: str, yes: bool) -> Done:
    """Purge a run, after asking."""
    known = runs.progress(redis, run)
    stored = f"{known.sent:,} sent, {known.settled:,} classified" if known else "not in the list of runs"
    confirm(f"Delete all posts and results of run {printable(run)} ({stored})", yes)
    found = purge_run(redis, settings, run)
    if known is None and not any(found.values()):
        raise UserError(unknown_run(redis, run))
    outside = found["outside"] and (
        f"; {found['outside']:,} earlier results are no longer in the results stream: they were purged before, or "
        f"expire within {settings.results_ttl / DAY_S:.3g} days"
    )
    return found, f"run {run} purged ({_listed({**found, 'outside': 0})}){outside or ''}"


def _clear(redis: Redis, settings: Settings, yes: bool) -> Done:
    """Empty a queue, after asking."""
    waiting = queue_depth(redis, settings.queue).waiting
    if not waiting:
        check_queue(redis, settings.queue)
    confirm(f"Remove all messages that wait in queue {printable(settings.queue)} ({waiting:,})", yes or not waiting)
    found = clear(redis, settings)
    held = queue_depth(redis, settings.queue).held
    finish = f"; workers finish the {held:,} that they hold" if held else ""
    return {**found, "held": held}, f"queue {settings.queue} emptied ({_listed(found)}){finish}"


def _listed(counts: dict[str, int]) -> str:
    """Format what was removed, such as `sent: 1, dead letters: 2`."""
    shown = (f"{what.replace('_', ' ')}: {count:,}" for what, count in counts.items() if count)
    return ", ".join(shown) or "nothing was stored"


def _lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input."""
    for line in sys.stdin.buffer:
        if text := line.decode(errors="replace").strip():
            yield text
