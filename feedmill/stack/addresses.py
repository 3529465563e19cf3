"""Ports and passwords of `feedmill up`, kept in its data folder so that they are the same after a restart.

Applications and commands that are still running then find the same Redis again.
"""

import random
import secrets
import socket
import time
from collections.abc import Set
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.atomic_files import replacing
from shared.errors import StackError, first_problem

#: File in the data folder with the ports and passwords, readable by its owner only.
ADDRESSES_FILE = "addresses.json"
#: Maximum size of that file in bytes.
MAX_FILE_BYTES = 4096
#: Ports to choose from. They lie below those that Linux lends to outgoing connections (32768 and higher), which could
#: otherwise take one of them between two runs.
PORTS = range(20_000, 32_768)
#: Seconds to wait for a port that is taken: the redis-server of a killed run may still be writing its file.
PORT_TIMEOUT_S = 5.0
#: Seconds between attempts.
PORT_POLL_S = 0.1

Port = Annotated[int, Field(ge=1024, le=65535)]
#: Alphabet of secrets.token_urlsafe, safe in a URL and in Redis' configuration.
Password = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,128}$")]


class Addresses(BaseModel):
    """Ports and passwords of one stack. All ports are on 127.0.0.1."""

    model_config = ConfigDict(frozen=True)

    redis_port: Port
    redis_password: Password
    flower_port: Port
    flower_password: Password


def new_addresses() -> Addresses:
    """Choose free ports and generate passwords."""
    redis_port, flower_port = _free_ports(2)
    return Addresses(
        redis_port=redis_port,
        redis_password=secrets.token_urlsafe(24),
        flower_port=flower_port,
        flower_password=secrets.token_urlsafe(18),
    )


def kept_addresses(folder: Path) -> tuple[Addresses, list[str]]:
    """Return the addresses kept in the folder, or new ones, and a line for the user about each change.

    A port that another program has taken is replaced. The caller holds the folder's lock. Raises StackError.
    """
    path = folder / ADDRESSES_FILE
    kept, notes = _read(path)
    current = kept or new_addresses()
    if kept:
        taken = _taken([kept.redis_port, kept.flower_port])
        free = _free_ports(len(taken), besides={kept.redis_port, kept.flower_port})
        replaced = dict(zip(taken, free, strict=True))
        current = kept.model_copy(
            update={
                "redis_port": replaced.get(kept.redis_port, kept.redis_port),
                "flower_port": replaced.get(kept.flower_port, kept.flower_port),
            }
        )
        if kept.redis_port in replaced:
            notes.append(
                f"another program now uses port {kept.redis_port}, which was Redis' port: using {current.redis_port}. "
                "Restart applications that have the old address; `feedmill url` prints the new one."
            )
        if kept.flower_port in replaced:
            notes.append(
                f"another program now uses port {kept.flower_port}, which was Flower's port: using "
                f"{current.flower_port}."
            )
    if current != kept:
        _write(path, current)
    return current, notes


def _read(path: Path) -> tuple[Addresses | None, list[str]]:
    """Return the file's addresses, or None and a line for the user if it is invalid. Raises StackError."""
    try:
        with path.open("rb") as file:
            return Addresses.model_validate_json(file.read(MAX_FILE_BYTES)), []
    except FileNotFoundError:
        return None, []
    except OSError as error:
        raise StackError(f"Cannot read {path}: {error.strerror}. Make it readable, or delete it.") from None
    except ValidationError as error:
        field, reason = first_problem(error)
        return None, [f"{path} is invalid ({field}: {reason}): using new ports and passwords."]


def _write(path: Path, addresses: Addresses) -> None:
    try:
        with replacing(path) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text(addresses.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise StackError(f"Cannot write {path}: {error.strerror}. Set another --data-folder.") from None


def _taken(ports: list[int]) -> list[int]:
    """Return the ports that stay taken for PORT_TIMEOUT_S."""
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while (taken := [port for port in ports if not _is_free(port)]) and time.monotonic() < deadline:
        time.sleep(PORT_POLL_S)
    return taken


def _free_ports(count: int, besides: Set[int] = frozenset()) -> list[int]:
    """Choose free ports at random. besides: ports not to choose. Raises StackError."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        if port not in besides and _is_free(port):
            found.append(port)
    raise StackError(f"Every port from {PORTS[0]} to {PORTS[-1]} is taken. Stop a program that listens on one.")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
