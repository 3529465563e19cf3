"""Child processes that never outlive this one, services (children that are restarted when they
exit), and signals.

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
from pathlib import Path
from typing import IO, Any

from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import StackError, UserError, printable
from feedmill.shared.linux import NOTIFY_SOCKET, die_with, run_on
from feedmill.shared.settings import PREFIX, Settings, variables
from feedmill.shared.worker_load import WorkerLoad, read_note

#: Seconds after which a child that does not answer is given up. Loading a model from the hub can
#: take many minutes.
START_TIMEOUT_S = 1800.0
#: Pauses before a restart.
RESTARTS = Backoff(first_s=1.0, max_s=60.0)
#: Seconds that a process must run for its next failure to count as the first again.
STABLE_AFTER_S = 60.0
#: Exit status of a command after a user error (feedmill/cli/main.py).
USER_ERROR_STATUS = 2
#: Last lines of a child's log that errors show; maximum bytes of a forwarded line.
LAST_LINES = 5
MAX_LINE_BYTES = 2**16
#: Maximum bytes of a child's note.
MAX_NOTE_BYTES = 1000
#: Seconds for the rest of an ended child's output to arrive.
OUTPUT_TIMEOUT_S = 5.0
#: Signals that ask a command to end.
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that are not ignored: under nohup, closing the terminal must not end the
    process.
    """
    handlers = {number: signal.getsignal(number) for number in numbers}
    return [number for number, handler in handlers.items() if handler != signal.SIG_IGN]


@contextmanager
def handle_signals(
    handler: Callable[[int, Any], None], *numbers: signal.Signals
) -> Iterator[None]:
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

    For code that starts processes. Python drops an exception that a handler raises during a fork,
    and at other moments such an exception can leave a lock of `subprocess` locked for good.
    """
    received: list[int] = []
    numbers = not_ignored(*EXIT_SIGNALS, *others)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def note(raw_number: int, _: object) -> None:
        received.append(raw_number)
        if once:
            number = signal.Signals(raw_number)
            signal.signal(number, handlers[number])

    with handle_signals(note, *numbers):
        yield received


def open_log(path: Path) -> IO[bytes]:
    """Open a log to append to it.

    Only its owner may read a new one: logs name posts and folders.
    """

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags, mode=0o600)

    return open(path, "ab", opener=open_private)


class Child:
    """A child process that never outlives this process.

    Its output goes to `log`, a file in the folder; or, line by line, to `forward`. orphaned: the
    signal that it receives if this process dies. cpus: CPUs that it may use; none: all. umask: its
    file mode creation mask; -1: this process'. Only the owner may read a new log.
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
        umask: int = -1,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        if forward is not None:
            self.log = Path(os.devnull)
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent, orphaned)
            if cpus:
                run_on(cpus)

        with open_log(self.log) as log:
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
                umask=umask,
                # Ctrl-C in a terminal reaches only this process, which then stops its children in
                # order.
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - takes no lock: three system calls
            )
        if stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(stdin.encode())
            self.process.stdin.close()
        if forward:
            self._reader = threading.Thread(
                target=self._forward,
                args=(forward,),
                daemon=True,
            )
            self._reader.start()

    def _forward(self, forward: Callable[[str], None]) -> None:
        output: IO[bytes] = self.process.stdout  # type: ignore[assignment]  # a pipe
        with output:
            while line := output.readline(MAX_LINE_BYTES):
                text = line.removesuffix(b"\n").decode(errors="replace")
                forward(printable(text))

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait until `answers` returns True.

        Raises StackError if the child exits or takes START_TIMEOUT_S.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers():
            self.check()
            if time.monotonic() > deadline:
                raise StackError(
                    f"{self.name} did not answer within {START_TIMEOUT_S:.0f} s. {self.log_tail()}"
                )
            time.sleep(0.05)

    def check(self) -> None:
        """Raise StackError if the process has exited."""
        status = self.process.poll()
        if status is not None:
            raise StackError(
                f"{self.name} exited with status {status}. {self.log_tail()}"
            )

    def log_tail(self) -> str:
        """Return a sentence with the last lines of this run in the log; "" without any."""
        with self.log.open(errors="replace") as log:
            log.seek(self._log_start)
            lines = log.read().splitlines()
        if not lines:
            return ""
        last_lines = [f"  {printable(line)}" for line in lines[-LAST_LINES:]]
        return "\n".join(["Its log ends:", *last_lines])

    def stop(
        self, seconds: float, is_urgent: Callable[[], bool] = lambda: False
    ) -> None:
        """Send SIGTERM and wait up to `seconds`, or until `is_urgent` returns True; then kill the
        process.
        """
        self.process.terminate()
        deadline = time.monotonic() + seconds
        # Not `process.wait`, which would not look at `is_urgent`.
        while self.process.poll() is None:
            if time.monotonic() >= deadline or is_urgent():
                break
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
    """A child that is restarted whenever it exits, after a pause that doubles with each failure in
    a row.

    launch: starts the child with these additional environment variables. answers: returns True if
    the child serves requests; default: if it has reported that it is ready, as to systemd
    (sd_notify(3)).
    """

    child: Child

    def __init__(
        self,
        launch: Callable[[dict[str, str]], Child],
        answers: Callable[[], bool] | None = None,
    ) -> None:
        self._launch = launch
        self.answers = answers or self.is_ready
        self._notes = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        )
        self._notes.bind("")  # Linux chooses an address
        self._is_ready = False
        self._load: WorkerLoad | None = None
        self._started = 0.0
        #: Failures in a row, each soon after a start.
        self._failures = 0
        #: Time of the next start, by time.monotonic; None while the child runs.
        self._due: float | None = 0.0
        #: Number of restarts, and whether the latest start has not been answered yet.
        self.restarts = 0
        self._is_restarting = False

    def start(self) -> None:
        """Start the child. Raises StackError, for example because the data folder was moved."""
        self._read_notes()  # the previous child's
        self._is_ready = False
        self._load = None
        address = self._notes.getsockname()
        abstract_name = address[1:].decode()
        try:
            self.child = self._launch({NOTIFY_SOCKET: f"@{abstract_name}"})
        except OSError as error:
            raise StackError(
                f"Cannot start a process: {error}. Correct the cause and start it again."
            ) from None
        self._started = time.monotonic()
        self._due = None

    def is_ready(self) -> bool:
        """Return whether the child has reported that it is ready, and not that it stops."""
        self._read_notes()
        return self._is_ready

    def _read_notes(self) -> None:
        """Read the child's reports that have arrived."""
        with suppress(BlockingIOError):
            while True:
                note = self._notes.recv(MAX_NOTE_BYTES)
                load = read_note(note.decode(errors="replace"))
                if load is not None:
                    self._load = load
                else:
                    self._is_ready = note == b"READY=1"

    def load(self) -> WorkerLoad | None:
        """Return the child's latest figures, if it is a worker that was asked for them."""
        self._read_notes()
        return self._load

    @property
    def is_running(self) -> bool:
        if self._started == 0:
            return False
        return self.child.process.poll() is None

    def supervise(self, say: Callable[[str], None]) -> None:
        """Start the child if it is due, or schedule its restart if it has exited.

        Call it regularly; it never waits.

        say: prints a line. Raises UserError if the child exits because of a user error.
        """
        if self._due is not None:
            if self._due <= time.monotonic():
                self.start()
            return
        name = self.child.name
        status = self.child.process.poll()
        if status is None:
            if self._is_restarting and self.answers():
                self._is_restarting = False
                say(f"{name} answers again")
            return
        if status == USER_ERROR_STATUS:
            plan = "correct the mistake that its output names"
        else:
            delay = self._schedule()
            plan = f"restarting it in {delay:g} s"
        text = f"{name} exited with status {status}: {plan}. {self.child.log_tail()}".rstrip()
        if status == USER_ERROR_STATUS:
            raise UserError(text)
        say(text)

    def _schedule(self) -> float:
        """Schedule the next start and return the seconds until then."""
        now = time.monotonic()
        if now - self._started >= STABLE_AFTER_S:
            self._failures = 0
        delay = RESTARTS.pause_s(self._failures)
        self._failures += 1
        self._due = now + delay
        self.restarts += 1
        self._is_restarting = True
        return delay

    def close(self) -> None:
        """Kill the child."""
        if self._started:
            self.child.kill()
        self._notes.close()


def python_command() -> list[str]:
    """Return the command that runs `feedmill` with this interpreter; -P keeps the working
    directory off sys.path.
    """
    return [sys.executable, "-P", "-m", "feedmill"]


def environment(settings: Settings | None = None) -> dict[str, str]:
    """Return this process' environment with these settings instead of its own, including how to
    connect to Redis.

    Children get settings as variables, because `ps` shows command lines. None: without any
    settings.
    """
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(PREFIX)
    }
    if settings is None:
        return others
    secrets: dict[str, str] = {}
    if settings.redis_url:
        secrets[f"{PREFIX}REDIS_URL"] = settings.redis_url.get_secret_value()
    if settings.redis_sentinel_password:
        password = settings.redis_sentinel_password.get_secret_value()
        secrets[f"{PREFIX}REDIS_SENTINEL_PASSWORD"] = password
    return others | variables(settings) | secrets
