"""The `feedmill` command. Each command reads its flags, calls one thing and prints what came back.

Exit status: 0 when all went well; 1 when part of the input was skipped, or nothing was found; 2 when a mistake
was made that the message explains.
"""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console

from feedmill import __version__, enqueue_commands, flags, ingest_commands, offline_commands, tuning_commands
from feedmill.demo import run as run_demo
from feedmill.flags import (
    AsJson,
    DataFolder,
    Device,
    Dtype,
    Engine,
    Kind,
    Model,
    RedisUrl,
    Revision,
    settings_of,
)
from feedmill.stack import Stack, ended_by_signals
from feedmill.watch import status as look_around
from shared.broker import connect, make_app, told_plainly
from shared.errors import SettingsError, UserError, printable
from shared.messages import Classification, DeadLetter
from shared.purge import Purged
from shared.purge import lift as lift_tombstones
from shared.purge import purge as purge_posts
from shared.results import Result, ResultsStore
from shared.settings import DAY

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Posts in, labels out: enqueue posts, classify them in micro-batches, read the results.",
)  # fmt: skip
results_app = typer.Typer(help="Read the results.", invoke_without_command=True, no_args_is_help=False)
app.add_typer(results_app, name="results")
app.add_typer(enqueue_commands.app)
app.add_typer(ingest_commands.app, name="ingest")
app.add_typer(offline_commands.app)
app.add_typer(tuning_commands.app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"feedmill {__version__}")
        raise typer.Exit


@app.callback()
def main(
    log_format: Annotated[str | None, typer.Option(help="text or json.", show_default=False)] = None,
    _version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Flags that hold for every command."""
    flags.log_format = log_format


@app.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Stay up until Ctrl-C.")] = False,
    all_posts: Annotated[bool, typer.Option("--all", help="Show every post, not one of each topic.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Start a Redis, a worker and Flower, classify the bundled posts, show the result, stop everything."""
    run_demo(settings_of(), keep, as_json, all_posts)


@app.command()
def up(data_folder: DataFolder = None) -> None:
    """Start a Redis, a worker and Flower, and keep them until Ctrl-C, with their data in a folder."""
    settings = settings_of(data_folder=data_folder)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    if settings.redis_url is not None:
        raise SettingsError(
            "`feedmill up` starts a Redis of its own, but FEEDMILL_REDIS_URL is set, and every other command would "
            "use that one. Unset it; or, to use that Redis, start `feedmill worker` instead."
        )
    with ended_by_signals():
        stack = Stack(settings, settings.data_folder, durable=True)
        try:
            for line in stack.start():
                notes.print(f"[green]✓[/] {line}")
            notes.print(f"Data and logs are in {settings.data_folder}. Ctrl-C stops everything.")
            stack.stay(notes.print)
        finally:
            stack.stop()


@app.command()
def worker(
    model: Model = None,
    revision: Revision = None,
    classifier: Kind = None,
    engine: Engine = None,
    device: Device = None,
    dtype: Dtype = None,
    token_budget: Annotated[int | None, typer.Option(help="Tokens of one micro-batch, padding included.")] = None,
    name: Annotated[str | None, typer.Option(help="Node name; unique among the workers of one Redis.")] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run one worker on one device, until SIGTERM. It finishes what it holds before it goes."""
    settings = settings_of(
        model=model,
        revision=revision,
        classifier=classifier,
        engine=engine,
        device=device,
        dtype=dtype,
        token_budget=token_budget,
        redis_url=redis_url,
    )
    try:
        from workers.run import run_worker  # noqa: PLC0415 - torch, which only workers have
    except ModuleNotFoundError as missing:
        raise UserError(f"A worker needs {missing.name}, which `pip install 'feedmill[worker]'` brings.") from None
    raise typer.Exit(run_worker(settings, name))


@app.command()
def flower(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 5555,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    redis_url: RedisUrl = None,
) -> None:
    """Run Flower, the dashboard of queue, workers and messages."""
    if find_spec("flower") is None:
        raise UserError("Flower is not installed: `pip install 'feedmill[monitor]'` brings it.")
    settings = settings_of(redis_url=redis_url)
    try:
        make_app(settings).start(["flower", f"--address={address}", f"--port={port}"])
    except OSError as error:
        if error.filename:  # of Flower's own configuration; the socket's errors name no file
            raise
        raise UserError(
            f"Flower cannot listen on {address}:{port}: {error.strerror}. Choose another --port, or another --address."
        ) from None


@results_app.callback()
def results(
    context: typer.Context,
    follow: Annotated[bool, typer.Option(help="Go on with results as they come, until Ctrl-C.")] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show instead the posts that got no label, and why.")
    ] = False,
    limit: Annotated[int, typer.Option(help="How many of the newest to show.", min=0)] = 20,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show the newest results; with --follow, also those to come; with --failed, what failed."""
    if context.invoked_subcommand:
        return
    if failed and follow:
        raise UserError("What failed is not followed: leave out --follow or --failed.")
    settings = settings_of(redis_url=redis_url)
    store = ResultsStore(connect(settings), settings)
    with told_plainly(settings):
        if failed:
            for letter in store.dead_letters(limit):
                typer.echo(letter.model_dump_json() if as_json else _failure(letter))
            return
        for result in store.follow(limit) if follow else store.latest(limit):
            if result is not None:
                _print_result(result, as_json)


def _print_result(result: Result, as_json: bool) -> None:
    post, found = result
    if as_json:
        entry = {"post": post.model_dump(mode="json", exclude_defaults=True), **found.model_dump(mode="json")}
        typer.echo(json.dumps(entry, ensure_ascii=False))
    else:
        title = printable(" ".join((post.title or post.body).split()))
        typer.echo(f"{printable(post.id):<12} {found.label:<16} {found.scores[found.label]:.2f}  {title:.80}")


def _failure(letter: DeadLetter) -> str:
    return printable(f"{letter.id or '-':<12} {_time(letter.failed_at)}  {letter.worker}  {letter.reason}")


@results_app.command("get")
def results_get(
    post_id: Annotated[str, typer.Argument(metavar="ID", help="The post's id.")],
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show every classification of one post: one for each text, model and label set."""
    settings = settings_of(redis_url=redis_url)
    store = ResultsStore(connect(settings), settings)
    with told_plainly(settings):
        found, score = store.get(post_id), store.score(post_id)
    if not found:
        typer.echo(f"No result of a post {post_id!r} is in the store: not classified yet, or expired.", err=True)
        raise typer.Exit(1)
    for classification in found:
        if as_json:
            seen = {} if score is None else {"score": score.score, "score_seen_at": score.at}
            typer.echo(json.dumps(classification.model_dump(mode="json") | seen, ensure_ascii=False))
        else:
            typer.echo(_described(classification))
    if score and not as_json:
        typer.echo(f"score {score.score}, seen {_time(score.at)}")


def _described(found: Classification) -> str:
    when = _time(found.classified_at)
    scores = "\n".join(f"  {score:6.3f}  {label}" for label, score in found.scores.items())
    return f"{found.id}: {found.label}, by {found.model} ({found.weights[:12]}) on {found.device}, {when}\n{scores}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")


@app.command()
def status(as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """Show how much waits, who works, and what is stored."""
    settings = settings_of(redis_url=redis_url)
    with told_plainly(settings):
        seen = look_around(settings)
    if as_json:
        entry = seen._asdict() | {"queue": seen.queue._asdict(), "results": seen.results._asdict()}
        typer.echo(json.dumps(entry))
        return
    typer.echo(
        f"queue    {seen.queue.waiting:,} messages waiting, {seen.queue.held:,} held by workers\n"
        f"results  {seen.results.stored:,} stored, {seen.results.repeated:,} came again, {seen.results.failed:,} failed"
    )
    if seen.results.failed:
        typer.echo("         `feedmill results --failed` shows the newest that failed, and why")
    if not seen.workers:
        typer.echo("workers  none answers: `feedmill worker` starts one, `feedmill up` everything")
    if seen.reddit:
        typer.echo(f"reddit   {ingest_commands.described(seen.reddit)}")
    # A block for each: a table of all this is wider than many a terminal.
    for node, pool in seen.workers.items():
        typer.echo(
            f"worker   {node} on {pool['device'].partition(': ')[0]}\n"
            f"         {pool['model']}\n"
            f"         {pool['posts']:,} posts done, {pool['rows_waiting']:,} waiting; lately "
            f"{pool['recent']['posts_per_second']:.1f} posts/s, device busy {pool['recent']['device_busy']:.2f}\n"
            f"         padding efficiency {pool['padding_efficiency']:.2f}"
        )


@app.command()
def purge(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Posts' ids; - reads them, one a line.")],
    lift: Annotated[bool, typer.Option("--lift", help="Purge nothing: take the posts again from now on.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Remove all that is kept of posts, and take them no more."""
    settings = settings_of(redis_url=redis_url)
    posts = dict.fromkeys(post_id.strip() for given in ids for post_id in (_lines() if given == "-" else [given]))
    if not posts:
        raise UserError("Standard input names no post: give ids, one a line.")
    subject = printable(next(iter(posts))) if len(posts) == 1 else f"{len(posts):,} posts"
    redis = connect(settings)
    with told_plainly(settings):
        if lift:
            counts = {"lifted": lift_tombstones(redis, posts)}
            told = f"{subject} may be sent again ({counts['lifted']:,} had been purged)"
        else:
            found = purge_posts(redis, settings, posts)
            counts = found._asdict()
            told = f"{subject} purged ({_removed(found)}); refused for {settings.tombstone_ttl / DAY:.3g} days"
    typer.echo(json.dumps({"posts": len(posts), **counts}) if as_json else told)
    raise typer.Exit(0 if any(counts.values()) else 1)


def _removed(found: Purged) -> str:
    """What a purge found, in words."""
    counts = {
        "sent": found.sent,
        "results": found.results,
        "stream entries": found.entries,
        "dead letters": found.dead_letters,
        "Celery results": found.celery_results,
    }
    return ", ".join(f"{what}: {count:,}" for what, count in counts.items() if count) or "nothing was kept"


def _lines() -> Iterator[str]:
    """The lines of standard input that are not empty."""
    for line in sys.stdin.buffer:
        if text := line.decode(errors="replace").strip():
            yield text


def run() -> None:
    """The console script: a mistake is shown as its sentence, never as a traceback."""
    try:
        app()
    except UserError as error:
        sys.stderr.write(f"feedmill: {error}\n")
        sys.exit(2)
