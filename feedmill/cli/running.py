"""Commands that run the system: `feedmill demo`, `up`, `down`, `url`, `worker` and `flower`."""

import os
import shlex
import signal
from functools import partial
from typing import Annotated

import typer
from rich.text import Text
from typer import Option

from feedmill.cli.options import with_settings
from feedmill.console import notes_console
from feedmill.shared.errors import SettingsError, explain_missing, printable
from feedmill.shared.settings import PREFIX, Settings, is_folder_locked
from feedmill.stack.lock import lock_folder, stop_stack
from feedmill.stack.processes import not_ignored, note_signals
from feedmill.stack.supervisor import Supervisor, shares

#: Seconds that `feedmill down` waits longer than the worker may take to finish its messages.
STOP_MARGIN_S = 30.0


@with_settings()
def demo(
    settings: Settings,
    all_posts: Annotated[bool, Option("--all", help="Show every post instead of a random sample.")] = False,
) -> None:
    """Starts Redis, a worker and Flower in a temporary folder, classifies 160 posts, prints their labels and stops."""
    from feedmill.stack.demo import run  # noqa: PLC0415 - Celery

    run(settings, all_posts)


@with_settings("data_folder")
def up(settings: Settings) -> None:
    """Data, logs, ports and passwords stay in the data folder for the next `feedmill up`. Processes that exit are
    restarted. While it runs, other commands connect to its Redis by default.
    """
    if settings.redis_url is not None:
        raise SettingsError(
            "`feedmill up` starts its own Redis, but FEEDMILL_REDIS_URL is set and sends the other commands "
            "elsewhere. Unset it, or run `feedmill worker` to use that Redis."
        )
    notes, lock = notes_console(), lock_folder(settings.data_folder)
    from feedmill.stack.embedded import Stack, start  # noqa: PLC0415 - Celery, after the lock, which commands look for

    with note_signals() as received:
        stack = Stack(settings, settings.data_folder, durable=True, signals=received, lock=lock)
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
    """Waits until its worker has finished the messages it holds. Data, ports and passwords stay for the next `feedmill
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
    """Pass it to other programs: `FEEDMILL_REDIS_URL=$(feedmill url) python app.py`."""
    if flower:
        from feedmill.stack.embedded import flower_url  # noqa: PLC0415 - Celery

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
    """On SIGTERM, a worker finishes the messages it holds and exits. After FEEDMILL_DRAIN seconds (30) it returns the
    rest to the queue.
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
    """The user is feedmill; set the password in FEEDMILL_FLOWER_PASSWORD."""
    with explain_missing("Flower", "monitor"):
        from feedmill.monitoring.dashboard import Dashboard  # noqa: PLC0415 - needs Flower, an optional package
    Dashboard(settings, address, port).run()
