"""Ports and passwords of `feedmill up`, kept in its data folder so that they are the same after a restart.

Applications and commands that are still running then find the same Redis again.
"""

import json
import random
import secrets
import socket
import time
from pathlib import Path
from typing import NamedTuple

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import StackError

#: File in the data folder with the ports and passwords, readable by its owner only.
ADDRESSES_FILE = "addresses.json"
#: Ports to choose from. They lie below those that Linux lends to outgoing connections (32768 and higher), which could
#: otherwise take one of them between two runs.
PORTS = range(20_000, 32_768)
#: Seconds to wait for a port that is taken: the redis-server of a killed run may still be writing its file.
PORT_TIMEOUT_S = 5.0
#: Seconds between attempts.
PORT_POLL_S = 0.1


class Addresses(NamedTuple):
    """Ports and passwords of one stack. All ports are on 127.0.0.1."""

    redis_port: int
    redis_password: str
    flower_port: int
    flower_password: str


def new_addresses() -> Addresses:
    """Choose free ports and generate passwords."""
    redis_port = _free_port()
    return Addresses(
        redis_port=redis_port,
        redis_password=secrets.token_urlsafe(24),
        flower_port=_free_port(besides=redis_port),
        flower_password=secrets.token_urlsafe(18),
    )


def kept_addresses(folder: Path) -> Addresses:
    """Return the addresses kept in the folder, or else new ones. The caller holds the folder's lock.

    Raises StackError if they cannot be kept, or if another program uses one of the ports.
    """
    path = folder / ADDRESSES_FILE
    try:
        if not path.exists():
            with replacing(path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(json.dumps(new_addresses()._asdict(), indent=2) + "\n")
        kept = Addresses(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise StackError(f"Cannot use {path}: {reason}. Delete it to use new ports and passwords.") from None
    for program, port in (("Redis", kept.redis_port), ("Flower", kept.flower_port)):
        if not _is_soon_free(port):
            raise StackError(
                f"Another program uses port {port}, which was {program}'s. Stop it, or delete {path} to use new ports "
                "and passwords."
            )
    return kept


def _is_soon_free(port: int) -> bool:
    """Return whether the port is free, or becomes free within PORT_TIMEOUT_S."""
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while not _is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(PORT_POLL_S)
    return True


def _free_port(besides: int = 0) -> int:
    """Choose a free port at random, other than `besides`."""
    while (port := random.choice(PORTS)) == besides or not _is_free(port):
        pass
    return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
