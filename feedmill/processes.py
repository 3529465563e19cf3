"""Processes of our own: started so that they never outlive this one, waited for, and ended.

Whatever ends this process ends them: `stop` on the way out, and where there is no way out (kill -9), the kernel's
parent-death signal. Knows nothing of what they do.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import StackError

#: Loaded here, not between fork and exec.
LIBC = ctypes.CDLL(None)
#: From <sys/prctl.h>: the signal that this process gets when its parent dies.
PR_SET_PDEATHSIG = 1
#: Seconds that a child may take to answer after its start; loading torch and a model takes most of them.
START_LIMIT = 120.0


class Child:
    """A process of ours. Its output goes to `log`; it never outlives this process."""

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        environment: dict[str, str],
        orphaned: signal.Signals = signal.SIGKILL,
        stdin: str | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        parent = os.getpid()
        with self.log.open("ab") as log:
            #: Bytes in the log that are of earlier runs.
            self._earlier = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Of the working directory nothing is read: not its packages, not its flowerconfig.py.
                cwd=folder,
                env=environment,
                # Ctrl-C in a terminal goes to this process alone, which then stops its children in order.
                start_new_session=True,
                preexec_fn=lambda: die_with(parent, orphaned),  # noqa: PLW1509 - it takes no lock: two system calls
            )
        if stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(stdin.encode())
            self.process.stdin.close()

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait for the child to answer. Raises StackError when it ends, or takes too long."""
        deadline = time.monotonic() + START_LIMIT
        while not answers():
            if self.process.poll() is not None:
                raise StackError(f"{self.name} ended with status {self.process.returncode}. {self.last_words()}")
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} did not answer within {START_LIMIT:.0f} s. {self.last_words()}")
            time.sleep(0.05)

    def said(self) -> str:
        """What it has written into its log."""
        with self.log.open("rb") as log:
            log.seek(self._earlier)
            return log.read().decode(errors="replace")

    def last_words(self) -> str:
        lines = self.said().splitlines()[-5:]
        return "Its log ends:\n  " + "\n  ".join(lines) if lines else "It said nothing."

    def stop(self, seconds: float) -> None:
        """End it in order, and by force after so many seconds."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP leave by the same way as Ctrl-C, so that `finally` runs."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # What is ignored stays ignored: under nohup a closed terminal is no reason to end.
    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with(parent: int, orphaned: signal.Signals = signal.SIGKILL) -> None:
    """In a child, between fork and exec: from now on the kernel sends it this signal when its parent dies."""
    LIBC.prctl(PR_SET_PDEATHSIG, orphaned)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def python_command() -> list[str]:
    """How a child runs `feedmill` with this very Python; -P keeps the working directory off its path."""
    return [sys.executable, "-P", "-m", "feedmill"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
