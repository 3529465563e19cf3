"""What only Linux or its C library offers, with a fallback for other systems: the only module that calls it."""

import ctypes
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Environment variable with the notification socket's path; see sd_notify(3).
NOTIFY_SOCKET = "NOTIFY_SOCKET"

#: The C library, loaded at import, because loading a library between fork and exec is unsafe.
LIBC: Any = ctypes.CDLL(None)
#: Mount point of the kernel's process information.
PROC = Path("/proc")
#: Option from <sys/prctl.h>: sets the signal that a process receives when its parent dies.
PR_SET_PDEATHSIG = 1


def die_with(parent: int, orphaned: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this child `orphaned` when its parent dies. Call it between fork and exec."""
    with suppress(AttributeError):
        LIBC.prctl(PR_SET_PDEATHSIG, orphaned)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may use."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:
        return set(range(os.cpu_count() or 1))


def run_on(cpus: Iterable[int]) -> None:
    """Run this process on these CPUs only, if the system can, and if they are still available."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(0, cpus)


def process_namespace() -> str:
    """Return an identifier of this boot and PID namespace, within which a PID identifies a process; "" if unknown."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def processor() -> str | None:
    """Return the CPU's name; None if unknown."""
    return _field("cpuinfo", "model name")


def available_memory() -> int:
    """Return the machine's available memory in bytes, or its total memory."""
    if available := _field("meminfo", "MemAvailable:"):
        return int(available.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def set_malloc_options(options: Mapping[int, int]) -> None:
    """Set options of glibc's allocator. Does nothing with another C library."""
    with suppress(AttributeError):
        for option, value in options.items():
            LIBC.mallopt(option, value)


def return_freed_memory() -> None:
    """Return memory that glibc keeps for later to the system. Does nothing with another C library."""
    with suppress(AttributeError):
        LIBC.malloc_trim(0)


def _field(file: str, name: str) -> str | None:
    """Return the first field of this name in a file of /proc, such as "1024 kB"; None if absent."""
    path = PROC / file
    lines = path.read_text().splitlines() if path.is_file() else ()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def notify(state: str) -> None:
    """Send a state, READY=1 or STOPPING=1. Does nothing outside of systemd."""
    address = os.environ.get(NOTIFY_SOCKET)
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection, suppress(OSError):
        connection.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)
