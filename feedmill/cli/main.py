"""The `feedmill` command. Each subcommand reads its options, calls one function and prints the result.

Exit status: 0 on success, and when the reader of a pipe closes it; 1 if part of the input was skipped or nothing was
found; 2 on a user error, which the message explains, or if the output cannot be written; 130 after Ctrl-C, except
services, which end with 0 after Ctrl-C and SIGTERM (docs/reference/errors.md).
"""

import errno
import io
import logging
import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from functools import partial
from threading import Timer
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer import Option

from feedmill import __version__
from feedmill.cli import deletions, deploy, enqueue, export, ingest, measuring, offline, results, status, train
from feedmill.cli.options import with_settings
from feedmill.console import notes_console
from feedmill.shared.errors import SettingsError, UserError, explain_missing, printable, printable_lines
from feedmill.shared.settings import PREFIX, Settings, is_folder_locked
from feedmill.stack.demo import run as run_demo
from feedmill.stack.embedded import Stack, flower_url, start
from feedmill.stack.lock import stop_stack
from feedmill.stack.signals import not_ignored, note_signals
from feedmill.stack.supervisor import Supervisor, shares

logger = logging.getLogger(__name__)

#: Seconds that `feedmill down` waits longer than the worker may take to finish its messages.
STOP_MARGIN_S = 30.0
#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: Errors of a failed write that are reported without a traceback: disk full, over quota, file too large, I/O error.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Classify streams of posts: enqueue posts, run workers, read the labels.\n\n"
    "Environment variables set option defaults, such as FEEDMILL_TOKEN_BUDGET for --token-budget.",
)  # fmt: skip


def _print_version(is_given: bool) -> None:
    """Print the version and exit, if `--version` is given."""
    if is_given:
        typer.echo(f"feedmill {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that need no command."""


@with_settings()
def demo(
    settings: Settings,
    all_posts: Annotated[bool, Option("--all", help="Show every post instead of a random sample.")] = False,
) -> None:
    """Run the whole system once on the bundled posts.

    Starts Redis, a worker and Flower in a temporary folder, classifies 160 posts, prints their labels and stops.
    """
    run_demo(settings, all_posts)


@with_settings("data_folder")
def up(settings: Settings) -> None:
    """Run Redis, a worker and Flower until Ctrl-C or SIGTERM.

    Data, logs, ports and passwords stay in the data folder for the next `feedmill up`. Processes that exit are
    restarted. While it runs, other commands connect to its Redis by default.
    """
    if settings.redis_url is not None:
        raise SettingsError(
            "`feedmill up` starts its own Redis, but FEEDMILL_REDIS_URL is set and sends the other commands "
            "elsewhere. Unset it, or run `feedmill worker` to use that Redis."
        )
    notes = notes_console()
    with note_signals() as received:
        stack = Stack(settings, settings.data_folder, durable=True, signals=received)
        try:
            start(stack, notes)
            notes.print(Text(f"Data and logs: {settings.data_folder}. Ctrl-C or `feedmill down` stops everything."))
            folder = f"export {PREFIX}DATA_FOLDER={shlex.quote(str(settings.data_folder))}"
            steps = (folder, "feedmill enqueue posts.csv", "feedmill results --follow")
            notes.print(Text("\n  ".join(["In another terminal:", *steps])))
            stack.stay(partial(notes.print, markup=False))
        except (KeyboardInterrupt, SystemExit):  # a signal during the start is a normal end, too
            notes.print("stopping …")
        finally:
            stack.stop()
            notes.print("stopped")


@with_settings("data_folder")
def down(settings: Settings) -> None:
    """Stop the `feedmill up` that runs with this data folder.

    Waits until its worker has finished the messages it holds. Data, ports and passwords stay for the next `feedmill
    up`. Exits 1 if none is running.
    """
    pid = stop_stack(settings.data_folder, settings.drain + STOP_MARGIN_S, partial(typer.echo, err=True))
    folder = printable(str(settings.data_folder))
    if pid is None:
        typer.echo(f"No `feedmill up` is running with data in {folder}.", err=True)
        raise typer.Exit(1)
    typer.echo(f"Stopped `feedmill up` (process {pid}). Its data stays in {folder}.")


@with_settings("data_folder")
def url(
    settings: Settings,
    flower: Annotated[
        bool, Option("--flower", help="Print the URL of the Flower of `feedmill up`, with user and password.")
    ] = False,
) -> None:
    """Print the URL of the Redis that the commands use, including its password.

    Pass it to other programs: `FEEDMILL_REDIS_URL=$(feedmill url) python app.py`.
    """
    if flower:
        typer.echo(flower_url(settings.data_folder))
        return
    if settings.redis_url is None and not is_folder_locked(settings.data_folder):
        raise SettingsError(
            f"No `feedmill up` is running with data in {settings.data_folder}, and {PREFIX}REDIS_URL is not set. "
            "Start `feedmill up`, or set the variable."
        )
    typer.echo(settings.broker_url)


@with_settings(
    "model", "queue", "revision", "classifier", "engine", "device", "devices", "dtype", "token_budget", "metrics_port",
    "include", "redis_url", explains_redis=False,
)  # fmt: skip
def worker(
    settings: Settings,
    name: Annotated[
        str | None, Option(help="Worker name, unique among the workers of one Redis (default: generated).")
    ] = None,
) -> None:
    """Run a worker on one device, or one worker per device.

    On SIGTERM, a worker finishes the messages it holds and exits. After FEEDMILL_DRAIN seconds (30) it returns the rest
    to the queue.
    """
    if settings.devices:
        found = shares(settings.devices)
        if len(found) > 1:
            raise typer.Exit(Supervisor(settings, found, name).run())
        (share,) = found
        os.environ.update(share.environment)  # before the import of torch, which reads it once
        settings, name = settings.model_copy(update={"device": share.device}), share.node(name)
    for number in not_ignored(signal.SIGINT, signal.SIGTERM):
        # Until the worker takes messages, it holds nothing. No exception: packages with C code swallow it in imports.
        signal.signal(number, lambda *_: os._exit(0))
    with explain_missing("A worker", "worker"):
        from feedmill.workers.run import run_worker  # noqa: PLC0415 - needs torch, which only workers have
    raise typer.Exit(run_worker(settings, name))


@with_settings("data_folder", "redis_url")
def flower(
    settings: Settings,
    port: Annotated[int, Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 5555,
    address: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Run Flower, Celery's dashboard of queues, workers and messages.

    The user is feedmill; set the password in FEEDMILL_FLOWER_PASSWORD.
    """
    with explain_missing("Flower", "monitor"):
        from feedmill.monitoring.dashboard import Dashboard  # noqa: PLC0415 - needs Flower, an optional package
    Dashboard(settings, address, port).run()


#: Commands and groups of commands by purpose, the panels of `feedmill --help`.
COMMANDS: dict[str, tuple[Any, ...]] = {
    "Try it": (demo, offline.classify),
    "Run it": (up, down, url, worker, flower),
    "Send posts": (enqueue.enqueue, ingest.app),
    "Read results": (results.results, results.report, export.export),
    "Observe it": (status.status, status.health, status.metrics),
    "Handle failures and deletions": (deletions.purge, deletions.dead_app),
    "Improve the model": (measuring.tune, measuring.evaluate, train.label, train.train, deploy.deploy),
}
for purpose, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=purpose)
        else:
            app.command(rich_help_panel=purpose)(command)


def run() -> None:
    """Run the console script; report user errors as a message, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # characters that the encoding lacks
    sys.unraisablehook = _repeat_interrupt
    try:
        try:
            _format_help(typer.main.get_command(app))(prog_name="feedmill")
        finally:
            sys.stdout.flush()
    except UserError as error:
        _end(2, str(error))
    except SystemExit as end:
        # typer and rich exit with status 1 when the reader of standard output closes the pipe.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _end(0)
    except KeyboardInterrupt:  # before or after the command; within it, typer exits with INTERRUPTED
        _end(INTERRUPTED)
    except BrokenPipeError:
        _end(0)
    except OSError as error:
        if error.errno not in WRITE_ERRORS or error.filename is not None:
            raise
        _end(2, f"Cannot write the output: {error.strerror}.")


def _repeat_interrupt(dropped: Any) -> None:
    """Send Ctrl-C again, soon, if Python has dropped it in a callback of an import."""
    if dropped.exc_type is KeyboardInterrupt:
        Timer(0.01, signal.raise_signal, (signal.SIGINT,)).start()
    else:
        sys.__unraisablehook__(dropped)


def _format_help(command: Any) -> Any:
    """Join the lines of each paragraph of the help, and show no type for flags without a value."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
    for option in command.params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        _format_help(subcommand)
    return command


def _end(status: int, message: str = "") -> NoReturn:
    """Exit with a message on standard error; discard output that cannot be written."""
    with suppress(OSError):
        if message:
            sys.stderr.write(f"feedmill: {printable_lines(message)}\n")
            sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        # Python flushes stdout again at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
