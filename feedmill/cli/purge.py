"""The `feedmill purge` command: delete what is stored about posts, by id or by run."""

import json
import sys
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer
from redis import Redis

from feedmill.cli.option_groups import excludes
from feedmill.cli.options import AsJson, RedisUrl, settings_of
from feedmill.producers.clear import purge_run
from feedmill.reading.names import unknown_run
from feedmill.shared import runs
from feedmill.shared.broker import connect, user_errors
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import parse_run
from feedmill.shared.purge import PurgeCounts, lift_tombstones
from feedmill.shared.purge import purge as purge_posts
from feedmill.shared.purge import rewrite_append_only_file as rewrite_file
from feedmill.shared.scripts.purge import TOMBSTONE_TTL_S
from feedmill.shared.settings import DAY_S, Settings

app = typer.Typer()


@app.command()
@excludes("--lift", "--rewrite", "--run")
@excludes("--run", "ID...")
def purge(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Post ids; - reads one per line from standard input.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Delete the posts and results of this run instead; blocks nothing."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    lift: Annotated[
        bool, typer.Option("--lift", help="Unblock the posts instead; deletes and restores nothing.")
    ] = False,
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite", help="Also make Redis rewrite its append-only file, which still holds the deleted data."
        ),
    ] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Delete everything stored about the given posts and block them from being ingested again.

    Asks first in a terminal. The block lasts a year. With --run, delete what is
    stored about a run: other runs keep their posts, and its file can be sent again. Exits 1 if nothing was stored.
    """
    settings = settings_of(redis_url=redis_url)
    if not ids and run is None:
        raise UserError("Give the ids of posts, or --run NAME.")
    redis = connect(settings)
    done = _purge_posts(redis, settings, ids or [], lift, yes) if run is None else _purge_run(redis, settings, run, yes)
    typer.echo(json.dumps(done.counts) if as_json else done.summary)
    if rewrite:
        with user_errors(settings):
            rewrite_file(redis)
    raise typer.Exit(0 if done.has_removed else 1)


class _Done(NamedTuple):
    """What the command did, for its output and its exit status."""

    counts: dict[str, int]
    summary: str
    has_removed: bool


def _purge_posts(redis: Redis, settings: Settings, ids: list[str], lift: bool, yes: bool) -> _Done:
    """Purge posts, after asking in a terminal, or unblock them."""
    posts = dict.fromkeys(post_id.strip() for given in ids for post_id in (_lines() if given == "-" else [given]))
    if not posts:
        raise UserError("Standard input contains no post id. Give one id per line.")
    subject = printable(next(iter(posts))) if len(posts) == 1 else f"{len(posts):,} posts"
    blocked = f"{TOMBSTONE_TTL_S // DAY_S} days"
    # Scripts delete posts at their authors' request; a block by mistake is lifted by --lift.
    if not (lift or yes or "-" in ids) and _in_terminal():
        typer.confirm(f"Delete everything stored about {subject}, and block it for {blocked}?", abort=True)
    with user_errors(settings):
        if lift:
            counts = {"lifted": lift_tombstones(redis, posts)}
            summary = f"{subject} unblocked ({counts['lifted']:,} had been purged)"
        else:
            found = purge_posts(redis, settings, posts)
            counts = found._asdict()
            summary = f"{subject} purged ({_removed(found)}); blocked for {blocked}"
            if not any(found):  # the id may be mistyped, and then a later post with that id would not be read
                hint = "`feedmill purge --lift ID` unblocks"
                summary = f"nothing was stored about {subject}, now blocked for {blocked}; {hint}"
    return _Done({"posts": len(posts)} | counts, summary, any(counts.values()))


def _purge_run(redis: Redis, settings: Settings, name: str, yes: bool) -> _Done:
    """Purge a run, after asking."""
    run = parse_run(name)
    with user_errors(settings):
        known = runs.progress(redis, run)
        stored = f"{known.sent:,} sent, {known.settled:,} classified" if known else "not in the list of runs"
        if not yes:
            _confirm(run, stored)
        found = purge_run(redis, settings, run)
        if known is None and not any(found):
            raise UserError(unknown_run(redis, run))
    counts = {"results": found.results, "dead letters": found.dead_letters, "posts that waited": found.waiting}
    summary = f"run {printable(run)} purged ({_listed(counts)})"
    if found.outside:
        summary += (
            f"; {found.outside:,} earlier results are no longer in the results stream: they were purged before, or "
            f"expire within {settings.results_ttl / DAY_S:.3g} days"
        )
    return _Done(found._asdict(), summary, any(found))


def _confirm(run: str, stored: str) -> None:
    """Ask for confirmation and abort on "no". Raises UserError if standard input is not a terminal."""
    what = f"all posts and results of run {printable(run)} ({stored})"
    if not _in_terminal():
        raise UserError(f"This deletes {what}. Add --yes to confirm.")
    typer.confirm(f"Delete {what}?", abort=True)


def _in_terminal() -> bool:
    return sys.stdin.isatty()


def _removed(found: PurgeCounts) -> str:
    """Format what a purge deleted, such as `sent: 1, results: 2`."""
    counts = {
        "marked as sent": found.sent,
        "results": found.results,
        "stream entries": found.entries,
        "dead letters": found.dead_letters,
        "Celery results": found.celery_results,
        "messages": found.messages,
    }
    return _listed(counts)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{what}: {count:,}" for what, count in counts.items() if count) or "nothing was stored"


def _lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input."""
    for line in sys.stdin.buffer:
        if text := line.decode(errors="replace").strip():
            yield text
