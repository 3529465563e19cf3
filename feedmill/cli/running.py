"""Commands that run the system: `feedmill demo`, `up`, `down`, `url`, `redis`, `worker` and
`flower`.
"""

import os
import shlex
import signal
from functools import partial
from typing import Annotated

import typer
from rich.text import Text
from typer import Argument, Option

from feedmill.cli.options import excludes, needs, with_settings
from feedmill.console import notes_console
from feedmill.shared.errors import (
    SettingsError,
    explain_missing,
    json_line,
    printable,
)
from feedmill.shared.sender_options import celery_code, celery_options
from feedmill.shared.settings import PREFIX, Settings, is_folder_locked
from feedmill.stack.lock import lock_folder, stop_stack
from feedmill.stack.processes import not_ignored, note_signals
from feedmill.stack.supervisor import Supervisor, shares

#: Engines whose GPUs get one worker each, because its memory cannot be limited.
UNLIMITED_ENGINES = ("onnx", "tensorrt")
#: Seconds that `feedmill down` waits longer than the worker may take to finish its messages.
STOP_MARGIN_S = 30.0


@with_settings()
def demo(
    settings: Settings,
    all_posts: Annotated[
        bool, Option("--all", help="Show every post instead of a random sample.")
    ] = False,
) -> None:
    """Starts Redis, a worker and Flower in a temporary folder, classifies 160 posts, prints their
    labels and stops.
    """
    from feedmill.stack.demo import run  # noqa: PLC0415 - Celery

    run(settings, all_posts)


@with_settings("data_folder")
def up(settings: Settings) -> None:
    """Data, logs, ports and passwords stay in the data folder for the next `feedmill up`.

    Processes that exit are restarted. While it runs, other commands connect to its Redis by
    default.
    """
    if settings.redis_url is not None:
        raise SettingsError(
            "`feedmill up` starts its own Redis, but FEEDMILL_REDIS_URL is set and sends the "
            "other commands elsewhere. Unset it, or run `feedmill worker` to use that Redis."
        )
    notes = notes_console()
    lock = lock_folder(settings.data_folder)
    # Celery, after the lock, which commands look for.
    from feedmill.stack.embedded import Stack, start  # noqa: PLC0415
    from feedmill.stack.folder import exposure_of  # noqa: PLC0415 - Celery

    with note_signals() as received:
        stack = Stack(
            settings,
            settings.data_folder,
            durable=True,
            signals=received,
            lock=lock,
            pages=True,
        )
        try:
            exposure = exposure_of(settings.data_folder)
            if exposure:
                notes.print(Text(exposure))
            start(stack, notes)
            notes.print(
                Text(
                    f"Data and logs: {settings.data_folder}. Ctrl-C or `feedmill down` "
                    "stops everything."
                )
            )
            folder = shlex.quote(str(settings.data_folder))
            steps = [
                "In another terminal:",
                f"export {PREFIX}DATA_FOLDER={folder}",
                "feedmill enqueue posts.csv",
                "feedmill results --follow",
            ]
            notes.print(Text("\n  ".join(steps)))
            stack.stay(partial(notes.print, markup=False))
        except (KeyboardInterrupt, SystemExit):
            # a signal during the start is a normal end, too
            notes.print("stopping …")
        finally:
            stack.stop()
            notes.print("stopped")


@with_settings("data_folder")
def down(settings: Settings) -> None:
    """Waits until its worker has finished the messages it holds.

    Data, ports and passwords stay for the next `feedmill up`. Exits 1 if none is running.
    """
    time_limit = settings.drain + STOP_MARGIN_S
    note = partial(typer.echo, err=True)
    pid = stop_stack(settings.data_folder, time_limit, note)
    folder = printable(str(settings.data_folder))
    if pid is None:
        typer.echo(f"No `feedmill up` is running with data in {folder}.", err=True)
        raise typer.Exit(1)
    typer.echo(f"Stopped `feedmill up` (process {pid}). Its data stays in {folder}.")


@excludes("--flower", "--web", "--celery", "--json")
@excludes("--web", "--celery", "--json")
@needs("--json", "--celery")
@with_settings("data_folder")
def url(
    settings: Settings,
    flower: Annotated[
        bool,
        Option(
            "--flower",
            help=(
                "Print the URL of the Flower of `feedmill up`, with user and password."
            ),
        ),
    ] = False,
    pages: Annotated[
        bool,
        Option(
            "--web",
            help="Print the URL of the pages of `feedmill up`, and below it the password.",
        ),
    ] = False,
    celery: Annotated[
        bool,
        Option(
            "--celery",
            help=(
                "Print Python code: the Celery application with which another program "
                "sends posts to this Redis. It reads passwords from the environment."
            ),
        ),
    ] = False,
    as_json: Annotated[
        bool,
        Option(
            "--json",
            help="With --celery: print Celery's settings as JSON, with passwords.",
        ),
    ] = False,
) -> None:
    """Pass it to other programs in their environment: `FEEDMILL_REDIS_URL=$(feedmill url) python
    app.py`. As an argument, `ps` would show it to everyone on this machine.
    """
    if flower:
        from feedmill.stack.embedded import flower_url  # noqa: PLC0415 - Celery

        typer.echo(flower_url(settings.data_folder))
        return
    if pages:
        from feedmill.stack.embedded import running_addresses  # noqa: PLC0415 - Celery

        addresses = running_addresses(settings.data_folder)
        typer.echo(addresses.web_url)
        note = f"Log in with any name and the password {addresses.web_password}"
        typer.echo(note, err=True)
        return
    if settings.redis_url is None and not is_folder_locked(settings.data_folder):
        raise SettingsError(
            f"No `feedmill up` is running with data in {settings.data_folder}, and "
            f"{PREFIX}REDIS_URL is not set. Start `feedmill up`, or set the variable."
        )
    if as_json:
        typer.echo(json_line(celery_options(settings)))
    elif celery:
        typer.echo(celery_code(settings), nl=False)
    else:
        typer.echo(settings.broker_url)


@with_settings("data_folder", "redis_url")
def redis(
    settings: Settings,
    command: Annotated[
        list[str],
        Argument(metavar="COMMAND...", help=("The command with its arguments.")),
    ],
) -> None:
    """For example `feedmill redis XINFO GROUPS feedmill:results`.

    Needs no redis-cli, and shows the password to nobody.
    Prints a text as it is, a line for each element of a list, and other values as JSON.
    """
    # With Celery, for connections.
    from feedmill.monitoring.redis_command import lines_of, reply_to  # noqa: PLC0415
    from feedmill.shared.broker import connect  # noqa: PLC0415

    connection = connect(settings)
    reply = reply_to(connection, command)
    for line in lines_of(reply):
        typer.echo(line)


@with_settings(
    "model", "queue", "revision", "classifier", "engine", "device", "devices", "dtype",
    "token_budget", "languages", "metrics_port",
    "include", "redis_url", explains_redis=False,
)  # fmt: skip
def worker(
    settings: Settings,
    name: Annotated[
        str | None,
        Option(
            help=(
                "Worker name, unique among the workers of one Redis (default: generated)."
            )
        ),
    ] = None,
) -> None:
    """On SIGTERM, a worker finishes the messages it holds and exits.

    After FEEDMILL_DRAIN seconds (30) it returns the rest to the queue.
    """
    if settings.devices == "auto":
        settings = _fill_gpus(settings, name)
    if settings.devices:
        device_shares = shares(settings.devices)
        if len(device_shares) > 1:
            supervisor = Supervisor(settings, device_shares, name)
            raise typer.Exit(supervisor.run())
        (share,) = device_shares
        # before the import of torch, which reads it once
        os.environ.update(share.environment)
        settings = settings.model_copy(update={"device": share.device})
        name = share.node(name)
    for number in not_ignored(signal.SIGINT, signal.SIGTERM):
        # Until the worker takes messages, it holds nothing. No exception: packages with C code
        # swallow it in imports.
        signal.signal(number, lambda *_: os._exit(0))
    with explain_missing("A worker", "worker"):
        # Needs torch, which only workers have.
        from feedmill.workers.run import run_worker  # noqa: PLC0415
    status = run_worker(settings, name)
    raise typer.Exit(status)


def _fill_gpus(settings: Settings, name: str | None) -> Settings:
    """Run as many workers on each GPU as fill it, and exit. Return the settings of a single
    worker if there is no GPU, or of one worker per GPU if the engine's memory cannot be limited.
    """
    from feedmill.stack import filler  # noqa: PLC0415 - Celery

    gpus = filler.gpus_to_fill()
    if not gpus:
        return settings.model_copy(update={"devices": None})
    if settings.engine in UNLIMITED_ENGINES:
        return settings.model_copy(update={"devices": "all"})
    gpu_filler = filler.Filler(settings, gpus)
    supervisor = Supervisor(
        settings,
        gpu_filler.first_shares(),
        name,
        additions=gpu_filler,
    )
    raise typer.Exit(supervisor.run())


@with_settings("data_folder", "redis_url")
def flower(
    settings: Settings,
    port: Annotated[
        int, Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 5555,
    address: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """The user is feedmill; set the password in FEEDMILL_FLOWER_PASSWORD."""
    with explain_missing("Flower", "monitor"):
        # Needs Flower, an optional package.
        from feedmill.monitoring.dashboard import Dashboard  # noqa: PLC0415
    dashboard = Dashboard(settings, address, port)
    dashboard.run()


@with_settings("answers", "data_folder", "labels", "model", "queue", "redis_url")
def web(
    settings: Settings,
    port: Annotated[
        int, Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 8600,
    address: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Set a password in FEEDMILL_WEB_PASSWORD and tokens in FEEDMILL_WEB_TOKENS; without them it
    listens only on an address that no other machine can reach.
    """
    with explain_missing("the web server", "web"):
        # Needs FastAPI and uvicorn, optional packages.
        from feedmill.web.server import serve  # noqa: PLC0415
    serve(settings, address, port)
