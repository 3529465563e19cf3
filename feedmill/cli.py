"""The `feedmill` command. Each command reads its flags, calls one thing and prints what came back.

Exit status: 0 when all went well, or the reader of a pipe closed it; 1 when part of the input was skipped, or nothing
was found; 2 when a mistake was made that the message explains, or the output could not be written.
"""

import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from feedmill import (
    __version__,
    dead_commands,
    deploy_commands,
    enqueue_commands,
    export_commands,
    flags,
    flower_commands,
    ingest_commands,
    measuring_commands,
    offline_commands,
    report_commands,
    results_commands,
    status_commands,
    train_commands,
)
from feedmill.demo import run as run_demo
from feedmill.devices import shares
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
from feedmill.processes import ended_by_signals, python_command
from feedmill.stack import Stack
from feedmill.supervisor import Supervisor
from shared.broker import connect, told_plainly
from shared.errors import SettingsError, UserError, printable, printable_lines
from shared.purge import Purged
from shared.purge import lift as lift_tombstones
from shared.purge import purge as purge_posts
from shared.purge import rewrite as rewrite_file
from shared.settings import DAY, PREFIX, stack_runs

#: Errors of a write that has no place for its data.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Posts in, labels out: enqueue posts, classify them in micro-batches, read the results.",
)  # fmt: skip
app.add_typer(results_commands.app, name="results")
app.add_typer(dead_commands.app, name="dead")
app.add_typer(deploy_commands.app)
app.add_typer(enqueue_commands.app)
app.add_typer(export_commands.app)
app.add_typer(flower_commands.app)
app.add_typer(ingest_commands.app, name="ingest")
app.add_typer(offline_commands.app)
app.add_typer(report_commands.app)
app.add_typer(status_commands.app)
app.add_typer(train_commands.app)
app.add_typer(measuring_commands.app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"feedmill {__version__}")
        raise typer.Exit


@app.callback()
def main(
    log_format: Annotated[
        str | None, typer.Option(help="What a line of the log is: text or json.", show_default=False)
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
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
    """Start a Redis, a worker and Flower, and keep them until Ctrl-C or SIGTERM, with their data in a folder."""
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
                notes.print("[green]✓[/]", Text(line))
            notes.print(Text(f"Data and logs are in {settings.data_folder}. Ctrl-C stops everything, as SIGTERM does."))
            notes.print("In another terminal:\n  feedmill enqueue posts.csv\n  feedmill results --follow")
            stack.stay(partial(notes.print, markup=False))
        finally:
            stack.stop()


@app.command()
def url(data_folder: DataFolder = None) -> None:
    """Print the address of the Redis that the commands use, with its password, for other programs.

    `FEEDMILL_REDIS_URL=$(feedmill url) python app.py` hands it to one.
    """
    settings = settings_of(data_folder=data_folder)
    if settings.redis_url is None and not stack_runs(settings.data_folder):
        raise SettingsError(
            f"No `feedmill up` runs with its data in {settings.data_folder}, and {PREFIX}REDIS_URL is not set: "
            "start the one, or set the other."
        )
    typer.echo(settings.broker_url)


@app.command()
def worker(
    model: Model = None,
    queue: Annotated[
        str | None, typer.Option(help="Queue to serve; each model has one of its own.", show_default=False)
    ] = None,
    revision: Revision = None,
    classifier: Kind = None,
    engine: Engine = None,
    device: Device = None,
    devices: Annotated[
        str | None,
        typer.Option(help="A worker on each device: all, GPUs such as 0,2, cpu or cpu:N.", show_default=False),
    ] = None,
    dtype: Dtype = None,
    token_budget: Annotated[int | None, typer.Option(help="Tokens of one micro-batch, padding included.")] = None,
    name: Annotated[str | None, typer.Option(help="Node name; unique among the workers of one Redis.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve metrics to Prometheus, on loopback.", show_default=False)
    ] = None,
    include: Annotated[
        str | None, typer.Option(help="Modules with Celery tasks of your own: a,b.c.", show_default=False)
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run one worker on one device, or one on each, until SIGTERM. They finish what they hold before they go."""
    flags = {
        "model": model,
        "queue": queue,
        "revision": revision,
        "classifier": classifier,
        "engine": engine,
        "device": device,
        "devices": devices,
        "dtype": dtype,
        "token_budget": token_budget,
        "metrics_port": metrics_port,
        "include": include,
        "redis_url": redis_url,
    }
    settings = settings_of(**flags)
    if settings.devices:
        found = shares(settings.devices)
        if len(found) > 1:
            raise typer.Exit(Supervisor(settings, found, name, [*python_command(), "worker"], flags).run())
        (share,) = found
        os.environ.update(share.environment)  # before torch is imported, which looks once
        settings, name = settings.model_copy(update={"device": share.device}), share.node(name)
    try:
        from workers.run import run_worker  # noqa: PLC0415 - torch, which only workers have
    except ModuleNotFoundError as missing:
        raise UserError(f"A worker needs {missing.name}, which `pip install 'feedmill[worker]'` brings.") from None
    raise typer.Exit(run_worker(settings, name))


@app.command()
def purge(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Posts' ids; - reads them, one a line.")],
    lift: Annotated[bool, typer.Option("--lift", help="Purge nothing: take the posts again from now on.")] = False,
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Have Redis write its append-only file anew, without them.")
    ] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Remove all that is kept of posts, and take them no more."""
    settings = settings_of(redis_url=redis_url)
    posts = dict.fromkeys(post_id.strip() for given in ids for post_id in (_lines() if given == "-" else [given]))
    if not posts:
        raise UserError("Standard input names no post: give ids, one a line.")
    if lift and rewrite:
        raise UserError("--lift brings nothing back and removes nothing: leave --rewrite out.")
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
    if rewrite:
        with told_plainly(settings):
            rewrite_file(redis)
    raise typer.Exit(0 if any(counts.values()) else 1)


def _removed(found: Purged) -> str:
    """What a purge found, in words."""
    counts = {
        "sent": found.sent,
        "results": found.results,
        "stream entries": found.entries,
        "dead letters": found.dead_letters,
        "Celery results": found.celery_results,
        "messages": found.messages,
    }
    return ", ".join(f"{what}: {count:,}" for what, count in counts.items() if count) or "nothing was kept"


def _lines() -> Iterator[str]:
    """The lines of standard input that are not empty."""
    for line in sys.stdin.buffer:
        if text := line.decode(errors="replace").strip():
            yield text


def run() -> None:
    """Run the console script: show a mistake as its sentence, never as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # escape what the encoding lacks
    try:
        try:
            app()
        finally:
            _flush()
    except UserError as error:
        _end(2, str(error))
    except SystemExit as end:
        # typer and rich end with status 1 when the reader of standard output has closed the pipe.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _end(0)
    except BrokenPipeError:
        _end(0)
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        _end(2, f"Output cannot be written: {error.strerror}.")


def _flush() -> None:
    if sys.stdout is not None:  # it is None where it was closed at the start
        sys.stdout.flush()


def _end(status: int, said: str = "") -> NoReturn:
    """Exit with a sentence; whatever of the output cannot be written is dropped."""
    with suppress(OSError):
        if said:
            sys.stderr.write(f"feedmill: {printable_lines(said)}\n")
            sys.stderr.flush()
    try:
        _flush()
    except OSError:
        # Python flushes stdout once more as it exits, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
