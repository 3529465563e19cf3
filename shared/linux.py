"""Functions of Linux and its C library, with a fallback for other systems: the only module that
calls it.
"""

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
    """Ask the kernel to send this child `orphaned` when its parent dies.

    Call it between fork and exec.
    """
    with suppress(AttributeError):
        LIBC.prctl(PR_SET_PDEATHSIG, orphaned)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may use."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:
        count = os.cpu_count() or 1
        return set(range(count))


def run_on(cpus: Iterable[int]) -> None:
    """Run this process on these CPUs only, if the system can, and if they are still available."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(0, cpus)


def process_namespace() -> str:
    """Return an identifier of this boot and PID namespace, within which a PID identifies a
    process; "" if unknown.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text("utf-8")
        namespace = (PROC / "self/ns/pid").stat()
    except OSError:
        return ""
    return f"{boot.strip()}/{namespace.st_ino}"


def processor() -> str | None:
    """Return the CPU's name; None if unknown."""
    return _field("cpuinfo", "model name")


def available_memory() -> int:
    """Return the machine's available memory in bytes, or its total memory."""
    available = _field("meminfo", "MemAvailable:")
    if available:
        return _bytes_of(available)
    pages = os.sysconf("SC_PHYS_PAGES")
    page_size = os.sysconf("SC_PAGE_SIZE")
    return pages * page_size


def set_malloc_options(options: Mapping[int, int]) -> None:
    """Set options of glibc's allocator. Does nothing with another C library."""
    with suppress(AttributeError):
        for option, value in options.items():
            LIBC.mallopt(option, value)


def return_freed_memory() -> None:
    """Return memory that glibc keeps for later to the system.

    Does nothing with another C library.
    """
    with suppress(AttributeError):
        LIBC.malloc_trim(0)


def reset_peak_memory() -> bool:
    """Begin a new measurement of `peak_memory`. Return False if the system does not support it."""
    try:
        (PROC / "self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return False
    return True


def peak_memory() -> int | None:
    """Return the highest resident memory of this process in bytes since `reset_peak_memory`; None
    if unknown.
    """
    peak = _field("self/status", "VmHWM:")
    return _bytes_of(peak) if peak else None


def _bytes_of(field: str) -> int:
    """Return the bytes in a field such as "1024 kB"."""
    kilobytes, _, _ = field.partition(" ")
    return int(kilobytes) * 1024


def _field(file: str, name: str) -> str | None:
    """Return the first field of this name in a file of /proc, such as "1024 kB"; None if
    absent.
    """
    path = PROC / file
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(name):
            _, _, field = line.partition(":")
            return field.strip()
    return None


def notify(state: str, waits: bool = True) -> None:
    """Send a state, READY=1 or STOPPING=1. Does nothing outside of systemd.

    waits: False drops the state if the receiver's queue is full.
    """
    address = os.environ.get(NOTIFY_SOCKET)
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = address.replace("@", "\0", 1)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
        suppress(OSError),
    ):
        connection.setblocking(waits)
        connection.sendto(state.encode(), address)
