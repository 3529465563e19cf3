"""Start child processes that never outlive this one, wait for them and stop them.

A normal exit stops them with `stop`. After a kill -9, the kernel's parent-death signal ends them.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import StackError

#: Loaded at import, because loading a library between fork and exec is unsafe.
LIBC = ctypes.CDLL(None)
#: Option from <sys/prctl.h>: sets the signal that a process receives when its parent dies.
PR_SET_PDEATHSIG = 1
#: Seconds that a child may take until it answers. Loading torch and a model takes most of the time.
START_TIMEOUT_S = 120.0


class Child:
    """A child process that writes its output to `log` and never outlives this process."""

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
            #: Size of the log before this run, in bytes.
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Keeps packages and a flowerconfig.py in the current directory from being loaded.
                cwd=folder,
                env=environment,
                # Ctrl-C in a terminal reaches only this process, which then stops its children in order.
                start_new_session=True,
                preexec_fn=lambda: die_with(parent, orphaned),  # noqa: PLW1509 - takes no lock: two system calls
            )
        if stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(stdin.encode())
            self.process.stdin.close()

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait until `answers` returns True. Raises StackError if the child exits or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers():
            self.check()
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} did not answer within {START_TIMEOUT_S:.0f} s. {self.log_tail()}")
            time.sleep(0.05)

    def check(self) -> None:
        """Raise StackError if the process has exited."""
        if self.process.poll() is not None:
            raise StackError(f"{self.name} exited with status {self.process.returncode}. {self.log_tail()}")

    def output(self) -> str:
        """Return the output of this run."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def log_tail(self) -> str:
        lines = self.output().splitlines()[-5:]
        return "Its log ends:\n  " + "\n  ".join(lines) if lines else f"Its log {self.log} is empty."

    def stop(self, seconds: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Send SIGTERM and wait up to `seconds`, or until `is_urgent` returns True; then kill the process."""
        self.process.terminate()
        deadline = time.monotonic() + seconds
        # Not `process.wait`, which would not look at `is_urgent`.
        while self.process.poll() is None and time.monotonic() < deadline and not is_urgent():
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def die_with(parent: int, orphaned: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this child `orphaned` when its parent dies. Call it between fork and exec."""
    LIBC.prctl(PR_SET_PDEATHSIG, orphaned)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def python_command() -> list[str]:
    """Return the command that runs `feedmill` with this interpreter; -P keeps the working directory off sys.path."""
    return [sys.executable, "-P", "-m", "feedmill"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
