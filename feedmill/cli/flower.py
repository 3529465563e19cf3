"""The `feedmill flower` command: serve Flower, Celery's dashboard, behind a password."""

import logging
import os
import secrets
import stat
import sys
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Annotated

import typer

from feedmill.cli.options import DataFolder, RedisUrl, settings_of
from feedmill.shared.errors import UserError
from feedmill.shared.settings import FLOWER_USER, PREFIX, Settings

logger = logging.getLogger(__name__)

app = typer.Typer()


@app.command()
def flower(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 5555,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Require no password; needs a loopback address.")] = False,
    data_folder: DataFolder = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run Flower, Celery's dashboard of queues, workers and messages.

    The user is feedmill. Without FEEDMILL_FLOWER_PASSWORD, each start generates a password and prints it once.
    """
    if find_spec("flower") is None:
        raise UserError("Flower requires the package flower: run `pip install 'feedmill[monitor]'`.")
    settings = settings_of(redis_url=redis_url, data_folder=data_folder)
    if no_auth and not is_loopback(address):
        raise UserError(
            f"--no-auth would let anyone who can reach {address} stop workers. Leave out --no-auth, or set --address "
            "127.0.0.1."
        )
    from feedmill.monitoring.dashboard import Dashboard  # noqa: PLC0415 - needs Flower, an optional package

    password = None if no_auth else choose_flower_password(settings)
    terminal = None if no_auth or settings.flower_password else _terminal()
    dashboard = Dashboard(settings, address, port, password)
    if no_auth:
        logger.warning(
            "Flower requires no password: every user of this machine can stop workers; to prevent this, leave out "
            "--no-auth"
        )
    elif not is_loopback(address) and not dashboard.encrypted:
        logger.warning(
            "Flower listens on %s without TLS and receives the password unencrypted: set FLOWER_CERTFILE and "
            "FLOWER_KEYFILE",
            address,
        )
    if terminal:
        line = f"Flower at {dashboard.url}, user {FLOWER_USER}, password {password}"
        terminal.write(f"{line} (generated for this run; {PREFIX}FLOWER_PASSWORD sets one)\n")
        terminal.flush()
    else:
        logger.info("Flower at %s", dashboard.url)
    dashboard.run()


def choose_flower_password(settings: Settings) -> str:
    """Return FEEDMILL_FLOWER_PASSWORD, or generate a password of 24 characters."""
    if settings.flower_password is not None:
        return settings.flower_password.get_secret_value()
    return secrets.token_urlsafe(18)


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach the address. The only host name accepted is "localhost"."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_regular_file(stream: IO[str]) -> bool:
    """Return True if the stream writes to a file, where a password would stay, or has no file descriptor."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return True


def _terminal() -> IO[str]:
    """Return standard error, or the terminal if that is a file. Raises UserError if there is no terminal."""
    if not is_regular_file(sys.stderr):
        return sys.stderr
    try:
        return Path("/dev/tty").open("w")
    except OSError:
        raise UserError(
            "Flower needs a password, and a generated one would be saved in the file to which standard error is "
            f"redirected. Set {PREFIX}FLOWER_PASSWORD."
        ) from None
