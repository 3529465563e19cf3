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
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from feedmill import __version__, flags, offline_commands, tuning_commands
from feedmill.demo import run as run_demo
from feedmill.flags import (
    AsJson,
    DataFolder,
    Device,
    Dtype,
    Engine,
    Kind,
    Labels,
    Model,
    MultiLabel,
    RedisUrl,
    Revision,
    Template,
    settings_of,
)
from feedmill.reading import Reading
from feedmill.stack import Stack, ended_by_signals
from feedmill.watch import status as look_around
from producers.push import Pusher
from shared.broker import connect, make_app, told_plainly
from shared.errors import SettingsError, UserError, printable
from shared.messages import Classification, ClassifyOptions, DeadLetter, Post
from shared.results import Result, ResultsStore

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Posts in, labels out: enqueue posts, classify them in micro-batches, read the results.",
)  # fmt: skip
results_app = typer.Typer(help="Read the results.", invoke_without_command=True, no_args_is_help=False)
app.add_typer(results_app, name="results")
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


@app.command()
def enqueue(
    file: Annotated[str, typer.Argument(help="JSONL, a JSON array or CSV, plain or gzip; - is standard input.")],
    labels: Labels = None,
    template: Template = None,
    multi_label: MultiLabel = False,
    again: Annotated[bool, typer.Option(help="Send also what was sent before.")] = False,
    posts_per_message: Annotated[int | None, typer.Option(help="Posts in one message.")] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Send the posts of a file to the queue. What was sent before is skipped, and so are bad lines."""
    settings = settings_of(redis_url=redis_url, posts_per_message=posts_per_message, labels=labels, template=template)
    # Where the flags are not given, the worker's settings count, not those of this process.
    options = ClassifyOptions(
        labels=None if labels is None else settings.labels, template=template, multi_label=multi_label
    )
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    reading = Reading(file, notes)
    pusher = Pusher(make_app(settings), connect(settings), settings, options, again)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with told_plainly(settings), Progress(*columns, console=notes, transient=True) as progress:
        bar = progress.add_task("reading", total=None)

        def posts() -> Iterator[Post]:
            for number, post in enumerate(reading.posts(), 1):
                if number % 100 == 0:
                    waiting = "; the queue is full, waiting" if pusher.waiting else ""
                    progress.update(bar, description=f"{number:,} read, {pusher.sent:,} sent{waiting}")
                yield post

        pusher.push(posts())
    if reading.told_all:
        typer.echo(
            f"{pusher.sent:,} posts sent (messages: {pusher.messages:,}), {pusher.skipped:,} skipped as sent before, "
            f"{reading.skipped:,} skipped as bad"
        )
    reading.end()
    raise typer.Exit(1 if reading.skipped else 0)


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
    with told_plainly(settings):
        found = ResultsStore(connect(settings), settings).get(post_id)
    if not found:
        typer.echo(f"No result of a post {post_id!r} is in the store: not classified yet, or expired.", err=True)
        raise typer.Exit(1)
    for classification in found:
        typer.echo(classification.model_dump_json() if as_json else _described(classification))


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
        entry = {"queue": seen.queue._asdict(), "workers": seen.workers, "results": seen.results._asdict()}
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
    # A block for each: a table of all this is wider than many a terminal.
    for node, pool in seen.workers.items():
        typer.echo(
            f"worker   {node} on {pool['device'].partition(': ')[0]}\n"
            f"         {pool['model']}\n"
            f"         {pool['posts']:,} posts done, {pool['rows_waiting']:,} waiting; lately "
            f"{pool['recent']['posts_per_second']:.1f} posts/s, device busy {pool['recent']['device_busy']:.2f}\n"
            f"         padding efficiency {pool['padding_efficiency']:.2f}"
        )


def run() -> None:
    """The console script: a mistake is shown as its sentence, never as a traceback."""
    try:
        app()
    except UserError as error:
        sys.stderr.write(f"feedmill: {error}\n")
        sys.exit(2)
