"""Child processes that never outlive this one, services (children that are restarted when they exit), and signals.

A normal exit stops them with `stop`. After a kill -9, the kernel's parent-death signal ends them.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from feedmill.shared.errors import StackError, UserError, printable
from feedmill.shared.linux import NOTIFY_SOCKET, die_with, run_on
from feedmill.shared.settings import PREFIX, Settings, variables

#: Seconds after which a child that does not answer is given up. Loading a model from the hub can take many minutes.
START_TIMEOUT_S = 1800.0
#: Seconds before the first restart; the pause doubles with each further failure, up to the second number.
RESTART_DELAY_S, MAX_RESTART_DELAY_S = 1.0, 60.0
#: Seconds that a process must run for its next failure to count as the first again.
STABLE_AFTER_S = 60.0
#: Exit status of a command after a user error (feedmill/cli/main.py).
USER_ERROR_STATUS = 2
#: Last lines of a child's log that errors show; maximum bytes of a forwarded line.
LAST_LINES, MAX_LINE_BYTES = 5, 2**16
#: Seconds for the rest of an ended child's output to arrive.
OUTPUT_TIMEOUT_S = 5.0
#: Signals that ask a command to end.
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that are not ignored: under nohup, closing the terminal must not end the process."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def handle_signals(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals inside the block, and restore their previous handlers after it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def note_signals(*others: signal.Signals, once: bool = False) -> Iterator[list[int]]:
    """Note EXIT_SIGNALS and others inside the block, and yield the list of their numbers so far.

    once: a second signal has its usual effect.

    For code that starts processes. Python drops an exception that a handler raises during a fork, and at other moments
    such an exception can leave a lock of `subprocess` locked for good.
    """
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in not_ignored(*EXIT_SIGNALS, *others)}

    def note(number: int, _: object) -> None:
        received.append(number)
        if once:
            signal.signal(number, before[signal.Signals(number)])

    with handle_signals(note, *before):
        yield received


class Child:
    """A child process that never outlives this process.

    Its output goes to `log`, a file in the folder; or, line by line, to `forward`. orphaned: the signal that it
    receives if this process dies. cpus: CPUs that it may use; none: all.
    """

    _reader: threading.Thread | None = None

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
        self.log = folder / f"{name}.log" if forward is None else Path(os.devnull)
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent, orphaned)
            if cpus:
                run_on(cpus)

        with self.log.open("ab") as log:
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
        if forward:
            self._reader = threading.Thread(target=self._forward, args=(forward,), daemon=True)
            self._reader.start()

    def _forward(self, forward: Callable[[str], None]) -> None:
        output: IO[bytes] = self.process.stdout  # type: ignore[assignment]  # a pipe
        with output:
            for line in iter(partial(output.readline, MAX_LINE_BYTES), b""):
                forward(printable(line.removesuffix(b"\n").decode(errors="replace")))

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait until `answers` returns True. Raises StackError if the child exits or takes START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers():
            self.check()
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} did not answer within {START_TIMEOUT_S:.0f} s. {self.log_tail()}")
            time.sleep(0.05)

    def check(self) -> None:
        """Raise StackError if the process has exited."""
        if (status := self.process.poll()) is not None:
            raise StackError(f"{self.name} exited with status {status}. {self.log_tail()}")

    def log_tail(self) -> str:
        """Return a sentence with the last lines of this run in the log; "" without any."""
        with self.log.open(errors="replace") as log:
            log.seek(self._log_start)
            lines = "".join(f"\n  {printable(line)}" for line in log.read().splitlines()[-LAST_LINES:])
        return f"Its log ends:{lines}" if lines else ""

    def stop(self, seconds: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Send SIGTERM and wait up to `seconds`, or until `is_urgent` returns True; then kill the process."""
        self.process.terminate()
        deadline = time.monotonic() + seconds
        # Not `process.wait`, which would not look at `is_urgent`.
        while self.process.poll() is None and time.monotonic() < deadline and not is_urgent():
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Kill the process if it still runs, and forward the rest of its output."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._reader:
            self._reader.join(OUTPUT_TIMEOUT_S)


class Service:
    """A child that is restarted whenever it exits, after a pause that doubles with each failure in a row.

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

    def start(self) -> None:
        """Start the child. Raises StackError, for example because the data folder was moved."""
        self.is_ready()  # the previous child's notes
        self._is_ready = False
        try:
            self.child = self._launch({NOTIFY_SOCKET: f"@{self._notes.getsockname()[1:].decode()}"})
        except OSError as error:
            raise StackError(f"Cannot start a process: {error}. Correct the cause and start it again.") from None
        self._started, self._due = time.monotonic(), None

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

        say: prints a line. Raises UserError if the child exits because of a user error.
        """
        if self._due is not None:
            if self._due <= time.monotonic():
                self.start()
        elif (status := self.child.process.poll()) is not None:
            failed = f"{self.child.name} exited with status {status}"
            if status == USER_ERROR_STATUS:
                raise UserError(
                    f"{failed}: correct the mistake that its output names. {self.child.log_tail()}".rstrip()
                )
            say(f"{failed}: restarting it in {self._schedule():g} s. {self.child.log_tail()}".rstrip())
        elif self._is_restarting and self.answers():
            self._is_restarting = False
            say(f"{self.child.name} answers again")

    def _schedule(self) -> float:
        """Schedule the next start and return the seconds until then."""
        is_stable = time.monotonic() - self._started >= STABLE_AFTER_S
        self._failures = 1 if is_stable else self._failures + 1
        delay = min(RESTART_DELAY_S * 2.0 ** (self._failures - 1), MAX_RESTART_DELAY_S)
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


def environment(settings: Settings | None = None) -> dict[str, str]:
    """Return this process' environment with these settings instead of its own, including how to connect to Redis.

    Children get settings as variables, because `ps` shows command lines. None: without any settings.
    """
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    if settings is None:
        return others
    secrets = {"REDIS_URL": settings.redis_url, "REDIS_SENTINEL_PASSWORD": settings.redis_sentinel_password}
    given = {f"{PREFIX}{name}": value.get_secret_value() for name, value in secrets.items() if value}
    return others | variables(settings) | given
