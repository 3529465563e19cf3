"""Start child processes that never outlive this one, wait for them, restart and stop them.

A normal exit stops them with `stop`. After a kill -9, the kernel's parent-death signal ends them.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from feedmill.shared.errors import StackError
from feedmill.shared.linux import cpu_seconds, die_with

#: Seconds without progress after which a child that does not answer is given up. It makes progress while it uses at
#: least PROGRESS_S of CPU time in them, such as to load torch and a model on a slow machine, for MAX_START_S at most.
START_TIMEOUT_S, PROGRESS_S, MAX_START_S = 120.0, 10.0, 3600.0
#: Consecutive failures after which a process is no longer restarted.
MAX_FAILURES = 5
#: Seconds before the first restart; the pause doubles with each further failure.
FIRST_RESTART_DELAY_S = 1.0
#: Seconds that a process must run for its next failure to count as the first again.
STABLE_AFTER_S = 60.0


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
        """Wait until `answers` returns True. Raises StackError if the child exits or makes no progress."""
        began = checked = time.monotonic()
        used = cpu_seconds(self.process.pid) or 0.0
        while not answers():
            self.check()
            now = time.monotonic()
            if now > checked + START_TIMEOUT_S:
                before, used = used, cpu_seconds(self.process.pid) or 0.0
                if used < before + PROGRESS_S or now > began + MAX_START_S:
                    raise StackError(f"{self.name} did not answer within {now - began:.0f} s. {self.log_tail()}")
                checked = now
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


class Failures:
    """Count a process's consecutive failures and compute the backoff before the next restart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._since = clock()

    def started(self) -> None:
        self._since = self._clock()

    def ended(self) -> float | None:
        """Record an exit. Return the seconds to wait before the restart, or None after MAX_FAILURES."""
        self._count = 1 if self._clock() - self._since >= STABLE_AFTER_S else self._count + 1
        return FIRST_RESTART_DELAY_S * 2 ** (self._count - 1) if self._count < MAX_FAILURES else None


class Service:
    """A process of the embedded stack, and its restarts.

    launch: starts the process. answers: returns True if the process serves requests.
    """

    def __init__(self, launch: Callable[[], Child], answers: Callable[[], bool]) -> None:
        self._launch = launch
        self.answers = answers
        self._failures = Failures()
        self.child = launch()
        #: Time of the next restart, by time.monotonic; None while the process runs.
        self._due: float | None = None
        self._is_restarting = False

    def supervise(self, say: Callable[[str], None]) -> None:
        """Restart the process if it has exited and its backoff is over. Call it regularly; it never waits.

        say: prints a line. Raises StackError after MAX_FAILURES consecutive failures.
        """
        if self._due is not None:
            if self._due <= time.monotonic():
                self._due = None
                try:
                    self.child = self._launch()
                except OSError as error:  # such as a data folder that was moved
                    raise StackError(
                        f"Cannot restart {self.child.name}: {error.strerror} ({error.filename or self.child.log}). "
                        "Correct the cause and run `feedmill up` again."
                    ) from None
                self._failures.started()
        elif self.child.process.poll() is not None:
            self._schedule(say)
        elif self._is_restarting and self.answers():
            self._is_restarting = False
            say(f"{self.child.name} answers again")

    def _schedule(self, say: Callable[[str], None]) -> None:
        name, status = self.child.name, self.child.process.returncode
        delay = self._failures.ended()
        if delay is None:
            raise StackError(
                f"{name} failed {MAX_FAILURES} times in a row, last with status {status}. Correct the cause and run "
                f"`feedmill up` again. {self.child.log_tail()}"
            )
        say(f"{name} exited with status {status}: restarting it in {delay:g} s")
        self._due = time.monotonic() + delay
        self._is_restarting = True


def python_command() -> list[str]:
    """Return the command that runs `feedmill` with this interpreter; -P keeps the working directory off sys.path."""
    return [sys.executable, "-P", "-m", "feedmill"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
