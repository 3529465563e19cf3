"""Run a benchmark in a temporary folder, with clean exits on signals and one-line messages for
user errors.
"""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from feedmill.shared.errors import UserError
from feedmill.stack.processes import handle_signals, not_ignored


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_megabytes(pid: int) -> float:
    """Return the resident memory of a process, shared memory included."""
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 2**20
    )


def family(pid: int) -> Iterator[int]:
    """Yield a process and all processes that it, or one of them, started.

    Those of an ended parent are not found.
    """
    yield pid
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))


def family_cpu_seconds() -> dict[int, float]:
    """Return the CPU time so far of this process and of each one that it started, by
    process id.
    """
    found = {}
    for pid in family(os.getpid()):
        with suppress(OSError):
            found[pid] = cpu_seconds(pid)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _exit_on_signals() -> AbstractContextManager[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside the block, so that `finally` clauses run as
    after Ctrl-C.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return handle_signals(leave, *not_ignored(signal.SIGTERM, signal.SIGHUP))


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a temporary folder. Its path is short enough for Unix sockets."""
    try:
        with tempfile.TemporaryDirectory(prefix="mill-") as folder, _exit_on_signals():
            yield Path(folder)
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
