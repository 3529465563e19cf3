"""Child processes that never outlive this one, and services: children that are restarted when they exit.

A normal exit stops them with `stop`. After a kill -9, the kernel's parent-death signal ends them.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from feedmill.shared.errors import StackError, UserError, printable
from feedmill.shared.linux import NOTIFY_SOCKET, die_with, run_on

#: Seconds after which a child that does not answer is given up. Loading a model from the hub can take many minutes.
START_TIMEOUT_S = 1800.0
#: Consecutive failures after which a process is no longer restarted.
MAX_FAILURES = 5
#: Seconds before the first restart; the pause doubles with each further failure.
FIRST_RESTART_DELAY_S = 1.0
#: Seconds that a process must run for its next failure to count as the first again.
STABLE_AFTER_S = 60.0
#: Exit status after a user error, and the start of the line that reports it (feedmill/cli/main.py).
USER_ERROR_STATUS, USER_ERROR_PREFIX = 2, "feedmill: "
#: Last lines of a child's output that errors show; maximum bytes of a forwarded line.
LAST_LINES, MAX_LINE_BYTES = 5, 2**16
#: Seconds for the rest of an ended child's output to arrive.
OUTPUT_TIMEOUT_S = 5.0


class Child:
    """A child process that never outlives this process.

    Its output goes to `log`, a file in the folder; or, line by line, to `forward`. orphaned: the signal that it
    receives if this process dies. cpus: CPUs that it may use; none: all.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        environment: dict[str, str],
        orphaned: signal.Signals = signal.SIGKILL,
        stdin: str | None = None,
        *,
        forward: Callable[[str], None] | None = None,
        cpus: Collection[int] = (),
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent, orphaned)
            if cpus:
                run_on(cpus)

        with (self.log if forward is None else Path(os.devnull)).open("ab") as log:
            #: Size of the log before this run, in bytes.
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=log if forward is None else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Keeps packages and a flowerconfig.py in the current directory from being loaded.
                cwd=folder,
                env=environment,
                # Ctrl-C in a terminal reaches only this process, which then stops its children in order.
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - takes no lock: three system calls
            )
        if stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(stdin.encode())
            self.process.stdin.close()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reader = forward and threading.Thread(target=self._forward, args=(forward,), daemon=True)
        if self._reader:
            self._reader.start()

    def _forward(self, forward: Callable[[str], None]) -> None:
        output: IO[bytes] = self.process.stdout  # type: ignore[assignment]  # a pipe
        with output:
            for line in iter(partial(output.readline, MAX_LINE_BYTES), b""):
                text = printable(line.removesuffix(b"\n").decode(errors="replace"))
                self._last_lines.append(text)
                forward(text)

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait until `answers` returns True. Raises StackError if the child exits or takes START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers():
            self.check()
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} did not answer within {START_TIMEOUT_S:.0f} s. {self.log_tail()}")
            time.sleep(0.05)

    def exited(self) -> int | None:
        """Return the exit status once the process has ended and its output is forwarded; None while it runs."""
        if self.process.poll() is not None and self._reader:
            self._reader.join(OUTPUT_TIMEOUT_S)
        return self.process.returncode

    def check(self) -> None:
        """Raise StackError if the process has exited."""
        if (status := self.exited()) is not None:
            raise StackError(f"{self.name} exited with status {status}. {self.log_tail()}")

    def output(self) -> str:
        """Return the output of this run in the log."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def last_lines(self) -> list[str]:
        return list(self._last_lines) if self._reader else self.output().splitlines()[-LAST_LINES:]

    def log_tail(self) -> str:
        lines = "".join(f"\n  {line}" for line in self.last_lines())
        return f"Its log ends:{lines}" if lines else "It logged nothing."

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


class Service:
    """A child that is restarted when it exits, after a pause that doubles with each failure in a row.

    launch: starts the child with these additional environment variables. answers: returns True if the child serves
    requests; default: if it has reported that it is ready, as to systemd (sd_notify(3)).
    """

    child: Child

    def __init__(self, launch: Callable[[dict[str, str]], Child], answers: Callable[[], bool] | None = None) -> None:
        self._launch = launch
        self.answers = answers or self.is_ready
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notes.bind("")  # Linux chooses an address
        self._is_ready = False
        self._started, self._failures = 0.0, 0
        #: Time of the next start, by time.monotonic; None while the child runs.
        self._due: float | None = 0.0
        #: Number of restarts, and whether the latest start has not been answered yet.
        self.restarts, self._is_restarting = 0, False
        #: True once the child has exited for good.
        self.is_over = False

    def start(self) -> None:
        """Start the child. Raises StackError, for example because the data folder was moved."""
        self.is_ready()  # the previous child's notes
        self._is_ready = False
        self._started, self._due = time.monotonic(), None
        try:
            self.child = self._launch({NOTIFY_SOCKET: f"@{self._notes.getsockname()[1:].decode()}"})
        except OSError as error:
            raise StackError(f"Cannot start a process: {error}. Correct the cause and start it again.") from None

    def is_ready(self) -> bool:
        """Return whether the child has reported that it is ready, and not that it stops."""
        with suppress(BlockingIOError):
            while True:
                self._is_ready = self._notes.recv(100) == b"READY=1"
        return self._is_ready

    @property
    def is_running(self) -> bool:
        return self._started > 0 and self.child.process.poll() is None

    def supervise(self, say: Callable[[str], None]) -> None:
        """Start the child if it is due, or schedule its restart if it has exited. Call it regularly; it never waits.

        say: prints a line. Raises StackError after MAX_FAILURES failures in a row, UserError if the child exits because
        of a user error. The child is then not restarted.
        """
        if self._due is not None and self._due <= time.monotonic():
            self.start()
        elif self._due is None and not self.is_over and (status := self.child.exited()) is not None:
            self.is_over = True
            say(f"{self.child.name} exited with status {status}: restarting it in {self._schedule(status):g} s")
            self.is_over = False
        elif self._is_restarting and self.answers():
            self._is_restarting = False
            say(f"{self.child.name} answers again")

    def _schedule(self, status: int) -> float:
        """Schedule the next start and return the seconds until then."""
        lines = self.child.last_lines()
        if status == USER_ERROR_STATUS and lines and lines[-1].startswith(USER_ERROR_PREFIX):
            raise UserError(lines[-1].removeprefix(USER_ERROR_PREFIX))
        is_stable = time.monotonic() - self._started >= STABLE_AFTER_S
        self._failures = 1 if is_stable else self._failures + 1
        if self._failures >= MAX_FAILURES:
            raise StackError(
                f"{self.child.name} failed {MAX_FAILURES} times in a row, last with status {status}. Correct the cause "
                f"and start it again. {self.child.log_tail()}"
            )
        delay: float = FIRST_RESTART_DELAY_S * 2 ** (self._failures - 1)
        self._due = time.monotonic() + delay
        self.restarts, self._is_restarting = self.restarts + 1, True
        return delay

    def close(self) -> None:
        """Kill the child."""
        if self._started:
            self.child.kill()
        self._notes.close()


def python_command() -> list[str]:
    """Return the command that runs `feedmill` with this interpreter; -P keeps the working directory off sys.path."""
    return [sys.executable, "-P", "-m", "feedmill"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
