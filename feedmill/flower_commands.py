"""`feedmill flower`: Flower, the dashboard of queue, workers and messages, behind a password."""

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

from feedmill.flags import DataFolder, RedisUrl, settings_of
from shared.errors import UserError
from shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

app = typer.Typer()


@app.command()
def flower(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 5555,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Ask for no password; on a loopback address alone.")
    ] = False,
    data_folder: DataFolder = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run Flower, the dashboard of queue, workers and messages. Its password is shown once, at the start."""
    if find_spec("flower") is None:
        raise UserError("Flower is not installed: `pip install 'feedmill[monitor]'` brings it.")
    settings = settings_of(redis_url=redis_url, data_folder=data_folder)
    if no_auth and not is_loopback(address):
        raise UserError(
            f"--no-auth would open Flower, which can stop workers, to whoever reaches {address}. "
            "Leave it out, or listen on 127.0.0.1."
        )
    from feedmill.dashboard import Dashboard  # noqa: PLC0415 - Flower, which an extra brings

    password = None if no_auth else password_of(settings)
    terminal = None if no_auth or settings.flower_password else _terminal()
    dashboard = Dashboard(settings, address, port, password)
    if no_auth:
        logger.warning("Flower asks for no password: whoever has an account on this machine can stop workers")
    elif not is_loopback(address) and not dashboard.encrypted:
        logger.warning("Flower listens on %s without TLS: its password can be read on the way there", address)
    if terminal:
        line = f"Flower at {dashboard.url}, user {settings.flower_user}, password {password}"
        terminal.write(f"{line} (made for this run; {PREFIX}FLOWER_PASSWORD sets one)\n")
        terminal.flush()
    else:
        logger.info("Flower at %s", dashboard.url)
    dashboard.run()


def password_of(settings: Settings) -> str:
    """The password that is set, or else a new one."""
    if settings.flower_password is not None:
        return settings.flower_password.get_secret_value()
    return secrets.token_urlsafe(18)


def is_loopback(address: str) -> bool:
    """Whether nobody but this machine reaches the address; of names, "localhost" alone is believed."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_file(stream: IO[str]) -> bool:
    """Whether what is written there stays: a password does not belong there."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return True


def _terminal() -> IO[str]:
    """Where a password may be shown. Raises UserError."""
    if not is_file(sys.stderr):
        return sys.stderr
    try:
        return Path("/dev/tty").open("w")
    except OSError:
        raise UserError(
            "Flower's password is made anew at each start and shown once, but there is only a file to show it in, "
            f"which would keep it. Set {PREFIX}FLOWER_PASSWORD."
        ) from None
