"""The `feedmill` command.

Each subcommand reads its options, calls one function and prints the result.

Exit status: 0 on success, and when the reader of a pipe closes it; 1 if part of the input was
skipped or nothing was found; 2 on a user error, which the message explains, or if the output
cannot be written; 130 after Ctrl-C, except services, which end with 0 after Ctrl-C and SIGTERM
(docs/reference/errors.md).
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
from typing import Annotated, Any, NoReturn, TypeGuard

import typer
from typer import Option

from feedmill import __version__
from feedmill.cli.none_flag import NoneCommand
from feedmill.shared.errors import UserError, printable_lines
from feedmill.shared.interrupts import INTERRUPTED, received

#: Errors of a failed write that are reported without a traceback: disk full, over quota, file too
#: large, I/O error.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _print_version(is_given: bool) -> None:
    """Print the version and exit, if `--version` is given."""
    if is_given:
        typer.echo(f"feedmill {__version__}")
        raise typer.Exit


def main(
    _version: Annotated[
        bool,
        Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Take the options that need no command."""


#: Commands: their panel in `feedmill --help`, their module and name, and the start of their help,
#: which the docstring continues.
COMMANDS = (
    ("Try it", "running.demo", "Run the whole system once on the bundled posts."),
    (
        "Try it",
        "offline.classify",
        "Classify a text or a file's posts in this process.",
    ),
    (
        "Try it",
        "study.study",
        "Label whole dumps into a folder of Parquet, with plots and a data set card.",
    ),
    (
        "Run it",
        "running.up",
        "Run Redis, a worker, Flower and the pages until Ctrl-C or SIGTERM.",
    ),
    (
        "Run it",
        "running.down",
        "Stop the `feedmill up` that runs with this data folder.",
    ),
    (
        "Run it",
        "running.url",
        "Print the URL of the Redis that the commands use, including its password.",
    ),
    (
        "Run it",
        "running.redis",
        "Send a command to the Redis that the commands use, and print its reply.",
    ),
    (
        "Run it",
        "running.worker",
        "Run a worker on one device, or one worker per device.",
    ),
    (
        "Run it",
        "running.flower",
        "Run Flower, Celery's dashboard of queues, workers and messages.",
    ),
    (
        "Run it",
        "running.web",
        "Run the web server: pages for people, and an HTTP endpoint for applications.",
    ),
    ("Send posts", "enqueue.enqueue", "Send the posts of a file to the queue."),
    (
        "Send posts",
        "ingest.ingest",
        "Read posts from Reddit, Bluesky or your own source and send them to the queue.",
    ),
    (
        "Read results",
        "results.results",
        "Show the newest results, follow new ones, or look up posts.",
    ),
    ("Read results", "results.report", "Write an HTML report on the last hours."),
    (
        "Read results",
        "export.export",
        "Write results to Parquet, CSV or JSONL files, or to a table in PostgreSQL.",
    ),
    (
        "Observe it",
        "status.status",
        "Show the state of queues, workers, results and Redis memory.",
    ),
    ("Observe it", "status.health", "Check health. Exits 0 if healthy, 1 if not."),
    (
        "Observe it",
        "status.metrics",
        "Serve Prometheus metrics of queues and results until SIGTERM.",
    ),
    (
        "Clean up",
        "forget.forget",
        "Delete every known copy of posts: by id, author, account, run or subreddit.",
    ),
    (
        "Clean up",
        "deletions.purge",
        "Delete everything stored about posts, and block them from being ingested again.",
    ),
    (
        "Clean up",
        "deletions.dead",
        "List, retry or drop dead letters (posts that could not be classified).",
    ),
    (
        "Improve it",
        "tune.tune",
        "Measure batch sizes, data types and each step from a pipeline to the queue.",
    ),
    (
        "Improve it",
        "evaluate.evaluate",
        "Compare a model's labels with the topics of a file's posts.",
    ),
    (
        "Improve it",
        "train.label",
        "Label the posts that teach most, with a key per post, and make a model of them.",
    ),
    (
        "Improve it",
        "train.train",
        "Fine-tune a classifier on labelled posts, or fit a head on embeddings (--head).",
    ),
    (
        "Improve it",
        "deploy.deploy",
        "Switch the workers of a queue to another model without stopping them.",
    ),
)
#: Commands whose flags come before their arguments: later words may begin with a dash, such as -1
#: in ZRANGE.
FLAGS_FIRST = {"redis"}


def application(*names: str) -> typer.Typer:
    """Return the application with these commands, or all.

    The others have only the start of their help: no imports.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
        help="Classify streams of posts: enqueue posts, run workers, read the labels.\n\n"
        "Environment variables set option defaults, such as FEEDMILL_TOKEN_BUDGET for "
        "--token-budget.",
    )
    app.callback()(main)
    for panel, place, start in COMMANDS:
        module_name, name = place.split(".")
        if names and name not in names:
            register = app.command(name, help=start, rich_help_panel=panel)
            register(main)
            continue
        module = import_module(f"feedmill.cli.{module_name}")
        command = getattr(module, name)
        if isinstance(command, typer.Typer):
            app.add_typer(
                command,
                name=name,
                help=start,
                rich_help_panel=panel,
            )
            continue
        details = getdoc(command) or ""
        register = app.command(
            name,
            help=f"{start}\n\n{details}",
            rich_help_panel=panel,
            cls=NoneCommand,
            context_settings={"allow_interspersed_args": name not in FLAGS_FIRST},
        )
        register(command)
    return app


def run() -> None:
    """Run the console script; report user errors as a message, without a traceback."""
    _open_closed_streams()
    gc.set_threshold(20_000)  # imports make a million objects and little garbage
    # runs last: the exit would search torch's objects for garbage, which takes a second
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            # for characters that the encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            # a command is always the first argument
            names = sys.argv[1:2] or ["--help"]
            app = application(*names)
            command = typer.main.get_command(app)
            _format_help(command)
            command(prog_name="feedmill")
        finally:
            sys.stdout.flush()
    except UserError as error:
        # a library reported Ctrl-C as an error of its own, such as a missing package
        if received():
            _end(INTERRUPTED)
        _end(2, str(error))
    except SystemExit as end:
        # typer and rich exit with status 1 when the reader of standard output closes the pipe.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _end(0)
    except UnicodeEncodeError as error:
        # the shell passes any bytes, and Python has surrogates for those that are not UTF-8
        if not any(error.object in argument for argument in sys.argv):
            raise
        _end(2, f"{error.object!r} is not UTF-8 text. Correct it.")
    except KeyboardInterrupt:
        # before or after the command; within it, typer exits with INTERRUPTED
        _end(INTERRUPTED)
    except BrokenPipeError:
        _end(0)
    except Exception as error:
        # as above: pyarrow has errors of its own for a call that Ctrl-C ended
        if received():
            _end(INTERRUPTED)
        if not is_write_error(error):
            raise
        _end(2, f"Cannot write the output: {error.strerror}.")


def is_write_error(error: Exception) -> TypeGuard[OSError]:
    """Return whether a standard stream could not be written."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    return error.errno in WRITE_ERRORS


def _open_closed_streams() -> None:
    """Replace closed standard streams, as some daemons leave them, by the null device.

    Python has None for them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # In this order, it gets the stream's descriptor, the lowest that is free. A file of
            # posts must not get it.
            # Open until the end.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
            setattr(sys, name, stream)


def _format_help(command: Any) -> None:
    """Join the lines of each paragraph of the help, and show no type for flags without a value."""
    text = command.help or ""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    for option in command.params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    subcommands = getattr(command, "commands", {})
    for subcommand in subcommands.values():
        _format_help(subcommand)


def _end(status: int, message: str = "") -> NoReturn:
    """Exit with a message on standard error; discard output that cannot be written."""
    with suppress(OSError):
        if message:
            text = printable_lines(message)
            sys.stderr.write(f"feedmill: {text}\n")
            sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        # Python flushes stdout again at exit, which would fail again.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
    sys.exit(status)
