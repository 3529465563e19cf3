"""The `feedmill` command. Each subcommand reads its options, calls one function and prints the result.

Exit status: 0 on success, and when the reader of a pipe closes it; 1 if part of the input was skipped or nothing was
found; 2 on a user error, which the message explains, or if the output cannot be written; 130 after Ctrl-C, except
services, which end with 0 after Ctrl-C and SIGTERM (docs/reference/errors.md).
"""

import atexit
import errno
import gc
import io
import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from feedmill import __version__
from feedmill.shared.errors import UserError, printable_lines

#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: Errors of a failed write that are reported without a traceback: disk full, over quota, file too large, I/O error.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _print_version(is_given: bool) -> None:
    """Print the version and exit, if `--version` is given."""
    if is_given:
        typer.echo(f"feedmill {__version__}")
        raise typer.Exit


def main(
    _version: Annotated[
        bool, Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that need no command."""


#: Commands: their panel in `feedmill --help`, their module and name, and the start of their help, which the docstring
#: continues.
COMMANDS = (
    ("Try it", "running.demo", "Run the whole system once on the bundled posts."),
    ("Try it", "offline.classify", "Classify a text or a file's posts in this process."),
    ("Run it", "running.up", "Run Redis, a worker and Flower until Ctrl-C or SIGTERM."),
    ("Run it", "running.down", "Stop the `feedmill up` that runs with this data folder."),
    ("Run it", "running.url", "Print the URL of the Redis that the commands use, including its password."),
    ("Run it", "running.worker", "Run a worker on one device, or one worker per device."),
    ("Run it", "running.flower", "Run Flower, Celery's dashboard of queues, workers and messages."),
    ("Send posts", "enqueue.enqueue", "Send the posts of a file to the queue."),
    ("Send posts", "ingest.ingest", "Read posts from Reddit, Bluesky or your own source and send them to the queue."),
    ("Read results", "results.results", "Show the newest results, follow new ones, or look up posts."),
    ("Read results", "results.report", "Write an HTML report on the last hours."),
    ("Read results", "export.export", "Write results to Parquet, CSV or JSONL files, or to a table in PostgreSQL."),
    ("Observe it", "status.status", "Show the state of queues, workers, results and Redis memory."),
    ("Observe it", "status.health", "Check health. Exits 0 if healthy, 1 if not."),
    ("Observe it", "status.metrics", "Serve Prometheus metrics of queues and results until SIGTERM."),
    ("Clean up", "deletions.purge", "Delete everything stored about posts, and block them from being ingested again."),
    ("Clean up", "deletions.dead", "List, retry or drop dead letters (posts that could not be classified)."),
    ("Improve it", "measuring.tune", "Measure token budgets, the sizes of micro-batches, on a file's posts."),
    ("Improve it", "measuring.evaluate", "Compare a model's labels with the topics of a file's posts."),
    ("Improve it", "train.label", "Label the posts that teach most, with a key per post, and make a model of them."),
    ("Improve it", "train.train", "Fine-tune a classifier on labelled posts, or fit a head on embeddings (--head)."),
    ("Improve it", "deploy.deploy", "Switch the workers of a queue to another model without stopping them."),
)


def application(*names: str) -> typer.Typer:
    """Return the application with these commands, or all. The others have only the start of their help: no imports."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
        help="Classify streams of posts: enqueue posts, run workers, read the labels.\n\n"
        "Environment variables set option defaults, such as FEEDMILL_TOKEN_BUDGET for --token-budget.",
    )  # fmt: skip
    app.callback()(main)
    for panel, place, start in COMMANDS:
        module, name = place.split(".")
        if names and name not in names:
            app.command(name, help=start, rich_help_panel=panel)(main)
        elif isinstance(command := getattr(import_module(f"feedmill.cli.{module}"), name), typer.Typer):
            app.add_typer(command, name=name, help=start, rich_help_panel=panel)
        else:
            app.command(name, help=f"{start}\n\n{getdoc(command) or ''}", rich_help_panel=panel)(command)
    return app


def run() -> None:
    """Run the console script; report user errors as a message, without a traceback."""
    _open_closed_streams()
    gc.set_threshold(20_000)  # imports make a million objects and little garbage
    atexit.register(gc.freeze)  # runs last: the exit would search torch's objects for garbage, which takes a second
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # characters that the encoding lacks
    try:
        try:
            app = application(*sys.argv[1:2] or ["--help"])  # a command is always the first argument
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


def _open_closed_streams() -> None:
    """Replace closed standard streams, as some daemons leave them, by the null device. Python has None for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # In this order, it gets the stream's descriptor, the lowest that is free. A file of posts must not get it.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - open until the end


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
