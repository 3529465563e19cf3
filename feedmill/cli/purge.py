"""The `feedmill purge` command: delete what is stored about posts, by id or by run, or the messages of a queue."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from redis import Redis
from typer import Argument, Option

from feedmill.cli.options import AsJson, RunName, Yes, excludes, with_settings
from feedmill.cli.terminal import confirm
from feedmill.producers.clear import clear, purge_run
from feedmill.reading.rows import unknown_run
from feedmill.shared import runs
from feedmill.shared.broker import connect, queue_depth
from feedmill.shared.errors import UserError, printable
from feedmill.shared.model_routing import check_queue
from feedmill.shared.purge import TOMBSTONE_TTL_S, lift_tombstones
from feedmill.shared.purge import purge as purge_posts
from feedmill.shared.settings import DAY_S, Settings

app = typer.Typer()

#: Numbers of removed things by name, and a summary.
Done = tuple[dict[str, int], str]


@app.command()
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
    """Delete everything stored about the given posts and block them from being ingested again.

    Asks first in a terminal. The block lasts a year. With --run, delete what is stored about a run; with --queue,
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
    found = purge_posts(redis, settings, posts)._asdict()
    # The id may be mistyped, and then a later post with that id would not be read.
    hint = "" if any(found.values()) else "; `feedmill purge --lift ID` unblocks"
    return {"posts": len(posts)} | found, f"{subject} purged ({_listed(found)}), now blocked for {blocked}{hint}"


def _purge_run(redis: Redis, settings: Settings, run: str, yes: bool) -> Done:
    """Purge a run, after asking."""
    known = runs.progress(redis, run)
    stored = f"{known.sent:,} sent, {known.settled:,} classified" if known else "not in the list of runs"
    confirm(f"Delete all posts and results of run {printable(run)} ({stored})", yes)
    found = purge_run(redis, settings, run)._asdict()
    if known is None and not any(found.values()):
        raise UserError(unknown_run(redis, run))
    outside = found["outside"] and (
        f"; {found['outside']:,} earlier results are no longer in the results stream: they were purged before, or "
        f"expire within {settings.results_ttl / DAY_S:.3g} days"
    )
    return found, f"run {run} purged ({_listed(found | {'outside': 0})}){outside or ''}"


def _clear(redis: Redis, settings: Settings, yes: bool) -> Done:
    """Empty a queue, after asking."""
    waiting = queue_depth(redis, settings.queue).waiting
    if not waiting:
        check_queue(redis, settings.queue)
    confirm(f"Remove all messages that wait in queue {printable(settings.queue)} ({waiting:,})", yes or not waiting)
    found = clear(redis, settings)._asdict()
    held = queue_depth(redis, settings.queue).held
    finish = f"; workers finish the {held:,} that they hold" if held else ""
    return found | {"held": held}, f"queue {settings.queue} emptied ({_listed(found)}){finish}"


def _listed(counts: dict[str, int]) -> str:
    """Format what was removed, such as `sent: 1, dead letters: 2`."""
    shown = (f"{what.replace('_', ' ')}: {count:,}" for what, count in counts.items() if count)
    return ", ".join(shown) or "nothing was stored"


def _lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input."""
    for line in sys.stdin.buffer:
        if text := line.decode(errors="replace").strip():
            yield text
