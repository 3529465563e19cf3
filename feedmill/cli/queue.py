"""The `feedmill queue` commands: empty a queue."""

import json
import sys
from typing import Annotated

import typer

from feedmill.cli.options import AsJson, RedisUrl, ToQueue, settings_of
from feedmill.producers import clear as clearing
from feedmill.shared.broker import connect, queue_depth, user_errors
from feedmill.shared.errors import UserError
from feedmill.shared.model_routing import check_queue

app = typer.Typer(name="queue", help="Empty a queue.", no_args_is_help=True)


@app.command()
def clear(
    queue: ToQueue = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Remove the messages that wait in a queue.

    The removed posts count as not sent: sending their file again sends them. Messages that workers hold are finished as
    usual. Applications that wait for a removed message get no answer.
    """
    settings = settings_of(redis_url=redis_url, queue=queue)
    redis = connect(settings)
    with user_errors(settings):
        waiting = queue_depth(redis, settings.queue).waiting
        if queue is not None and not waiting:
            check_queue(redis, queue)
        if waiting and not yes:
            _confirm(settings.queue, waiting)
        removed = clearing.clear(redis, settings)
        held = queue_depth(redis, settings.queue).held
    if as_json:
        typer.echo(json.dumps(removed._asdict() | {"held": held}))
        return
    typer.echo(
        f"{removed.posts:,} post{'' if removed.posts == 1 else 's'} in {removed.messages:,} "
        f"message{'' if removed.messages == 1 else 's'} removed from queue {settings.queue}"
        + (f"; workers finish the {held:,} that they hold" if held else "")
    )


def _confirm(queue: str, waiting: int) -> None:
    """Ask for confirmation and abort on "no". Raises UserError if standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise UserError(f"This removes all messages that wait in queue {queue}: {waiting:,}. Add --yes to confirm.")
    typer.confirm(f"Remove all messages that wait in queue {queue} ({waiting:,})?", abort=True)
