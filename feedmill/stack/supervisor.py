"""Supervise several workers on one machine, one process per device: start, restart and stop them.

Each worker is an ordinary `feedmill worker`. The supervisor sees a worker's exit status and its answers to
`inspect stats`, and forwards its output line by line. The supervisor does not import torch and opens no device.

The main thread does all the work; a second thread waits for the workers' answers. Signals, exits of workers and answers
wake the main thread through a socket, with one byte: the signal's number, or ANSWERED.
"""

import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from feedmill.monitoring.watch import worker_statistics
from feedmill.stack.devices import Share
from feedmill.stack.restarts import MAX_FAILURES, Failures
from feedmill.stack.signals import handle_signals, not_ignored
from shared import logs
from shared.broker import make_app
from shared.errors import SettingsError, UserError, json_line, printable
from shared.linux import NOTIFY_SOCKET, die_with, notify, run_on
from shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: Seconds beyond the setting `drain` after which a worker that is shutting down is killed.
KILL_GRACE_S = 10.0
#: Seconds between requests for statistics in a terminal, and while a worker does not answer.
REFRESH_INTERVAL_S = 2.0
#: Exit status after a user error, and the start of the line that reports it (feedmill/cli/main.py).
USER_ERROR_STATUS, USER_ERROR_PREFIX = 2, b"feedmill: "
#: Last lines of a worker's output to keep for its final report; maximum bytes of a line.
LAST_LINES, MAX_LINE_BYTES = 5, 2**16
#: Wake-up byte for an answer. Signal numbers start at 1.
ANSWERED = 0
#: Signals that stop the workers, and signals that are forwarded to them.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
#: The process of each worker by node name; None while it does not run.
Processes = dict[str, subprocess.Popen[bytes] | None]


class SupervisedWorker:
    """The worker of one device: its current process and its state.

    command: command line to which `--name NODE` is appended. environment: variables in addition to the share's.
    """

    def __init__(self, share: Share, node: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.share = share
        self.node = node
        self._command = [*command, "--name", node]
        self._environment = environment | share.environment
        self.process: subprocess.Popen[bytes] | None = None
        #: File descriptor of the pipe with the worker's output.
        self.output = -1
        self.failures = Failures()
        #: Time of the next start, by time.monotonic; None while the worker runs, and once it is no longer restarted.
        self.due: float | None = 0.0
        self.restarts = 0
        #: Latest statistics of the worker's pool; None while the worker does not answer.
        self.statistics: dict[str, Any] | None = None
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        #: Start of an output line whose end has not arrived yet.
        self._partial_line = b""

    @property
    def is_over(self) -> bool:
        return self.process is None and self.due is None

    def start(self) -> None:
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent)
            if self.share.processors:
                run_on(self.share.processors)

        self.output, theirs = os.pipe()
        os.set_blocking(self.output, False)
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=self._environment,
            # Ctrl-C in a terminal reaches only this process, which then stops its workers in order.
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - takes no lock: three system calls
        )
        os.close(theirs)
        self.due = None
        self.failures.started()

    def lines(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without line ends."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        if len(self._partial_line) > MAX_LINE_BYTES:
            lines.append(self._partial_line)
            self._partial_line = b""
        return lines

    def signal(self, number: int) -> None:
        if self.process:
            self.process.send_signal(number)


class Supervisor:
    """A supervisor that runs one worker per share until a signal stops them.

    name: value of the flag `--name`. command: command line of a worker. flags: settings from the command line; workers
    receive them as environment variables, because `ps` shows arguments to every user. Raises SettingsError.
    """

    def __init__(
        self,
        settings: Settings,
        shares: Sequence[Share],
        name: str | None,
        command: Sequence[str],
        flags: dict[str, Any],
    ) -> None:
        self._settings = settings
        port = settings.metrics_port or 0
        if port + len(shares) > 2**16:
            raise SettingsError(
                f"{PREFIX}METRICS_PORT: {len(shares)} workers need ports from {port} up, but the last port is 65535. "
                f"Set {2**16 - len(shares)} or less."
            )
        self._workers = []
        for index, share in enumerate(shares):
            ours = flags | {"device": share.device, "devices": "", "log_format": settings.log_format}
            ours["metrics_port"] = port and port + index
            given = {f"{PREFIX}{flag.upper()}": str(value) for flag, value in ours.items() if value is not None}
            others = {
                variable: value
                for variable, value in os.environ.items()
                if variable != NOTIFY_SOCKET and variable.upper() not in given
            }
            self._workers.append(SupervisedWorker(share, share.node(name), command, others | given))
        #: The processes that were asked and the statistics of the workers that answered, by node name.
        self._answers: queue.SimpleQueue[tuple[Processes, dict[str, dict[str, Any]]]] = queue.SimpleQueue()
        #: Set when a worker has exited, so that the next request for statistics is sent at once.
        self._changed = threading.Event()
        #: Checked at the start, because a terminal that was closed later no longer counts as one.
        self._in_terminal = any(os.isatty(file) for file in range(3))
        self._live: Live | None = None
        self._ready = False
        #: Number of answering workers at the last report.
        self._up = 0
        self._stopping = False
        #: Time at which workers that are still shutting down are killed, by time.monotonic.
        self._deadline: float | None = None
        self._user_error: str | None = None
        self._status = 0

    def run(self) -> int:
        """Run until a signal stops the workers or none of them is restarted any more. Return the exit status.

        Raises UserError with a worker's message if a worker exits because of a user error.
        """
        with self._signals_handled(), self._status_line():
            # A daemon thread, because Redis may take long to answer.
            threading.Thread(target=self._poll_statistics, name="answers", daemon=True).start()
            try:
                while not all(worker.is_over for worker in self._workers):
                    self._turn()
            finally:
                for worker in self._workers:
                    if worker.process:
                        worker.process.kill()
                        worker.process.wait()
        if self._user_error:
            raise UserError(self._user_error)
        return self._status

    def _turn(self) -> None:
        """Start the workers that are due, wait for the next event, and handle exits."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.due is not None and worker.due <= now:
                worker.start()
                self._files.register(worker.output, EVENT_READ, partial(self._readable, worker))
        if self._deadline is not None and self._deadline <= now:
            self._kill()
        times = [when for when in (*(worker.due for worker in self._workers), self._deadline) if when is not None]
        for key, _ in self._files.select(max(0.0, min(times) - now) if times else None):
            key.data()
        for worker in self._workers:
            if worker.process and worker.process.poll() is not None:
                self._exited(worker, worker.process.returncode)

    # Signals and shutdown.

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Let signals wake `_turn`."""
        self._awake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        wanted = (*not_ignored(*STOP_SIGNALS, *FORWARDED_SIGNALS), signal.SIGCHLD)
        with handle_signals(lambda *_: None, *wanted):
            try:
                with self._awake, self._waker, DefaultSelector() as self._files:
                    self._files.register(self._awake, EVENT_READ, self._woken)
                    yield
            finally:
                signal.set_wakeup_fd(-1)

    def _woken(self) -> None:
        for number in self._awake.recv(4096):
            if number == ANSWERED:
                self._update_statistics(*self._answers.get())
            elif number == signal.SIGQUIT:
                self._stop(signal.SIGQUIT)
            elif number in STOP_SIGNALS or (number == signal.SIGHUP and self._in_terminal):  # the terminal was closed
                self._stop(signal.SIGTERM)
            elif number in FORWARDED_SIGNALS:
                for worker in self._workers:
                    if worker.statistics:  # the signal would kill a worker that is still loading
                        worker.signal(number)

    def _stop(self, how: signal.Signals) -> None:
        """Send the signal to all workers. A second call sends it again, without moving the deadline."""
        if not self._stopping:
            self._stopping = True
            self._deadline = time.monotonic() + self._settings.drain + KILL_GRACE_S
            notify("STOPPING=1")
        for worker in self._workers:
            worker.due = None
            worker.signal(how)

    def _kill(self) -> None:
        self._deadline = None
        for worker in self._workers:
            if worker.process:
                logger.error(
                    "worker %s is still running %g s after FEEDMILL_DRAIN (%g s): killing it",
                    worker.node,
                    KILL_GRACE_S,
                    self._settings.drain,
                )
                worker.process.kill()

    def _exited(self, worker: SupervisedWorker, status: int) -> None:
        """Forward the remaining output, then restart the worker, leave it stopped, or stop all workers."""
        while self._forward_output(worker):
            pass
        with suppress(KeyError):
            self._files.unregister(worker.output)
        os.close(worker.output)
        worker.process = worker.statistics = None
        self._changed.set()
        if self._stopping:
            if status not in (0, -signal.SIGTERM):  # a worker that has not begun to consume dies of SIGTERM
                self._status = 1
            return
        last_lines = list(worker.last_lines)
        if status == USER_ERROR_STATUS:
            self._user_error = (
                last_lines[-1].removeprefix(USER_ERROR_PREFIX.decode())
                if last_lines
                else f"Worker {worker.node} exited with status 2."
            )
            self._stop(signal.SIGTERM)
            return
        delay = worker.failures.ended()
        if delay is None:
            logger.critical(
                "worker %s failed %d times in a row, last with status %d: not restarting it. Correct the cause and run "
                "`feedmill worker` again; the worker's log ends:\n  %s",
                worker.node,
                MAX_FAILURES,
                status,
                "\n  ".join(last_lines),
            )
            self._status = int(all(other.is_over for other in self._workers))
            return
        logger.error("worker %s exited with status %d: restarting it in %.3g s", worker.node, status, delay)
        worker.restarts += 1
        worker.due = time.monotonic() + delay

    # The workers' output.

    def _readable(self, worker: SupervisedWorker) -> None:
        if not self._forward_output(worker):
            self._files.unregister(worker.output)  # the worker has closed its end

    def _forward_output(self, worker: SupervisedWorker) -> bool:
        """Write the available output of a worker to standard error, line by line. Return False if there was none."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(worker.output, MAX_LINE_BYTES)
        for line in worker.lines(data):
            text = printable(line.decode(errors="replace"))
            worker.last_lines.append(text)
            # Most user errors affect every worker: `run` reports them once.
            if line and not line.startswith(USER_ERROR_PREFIX):
                with suppress(OSError):  # the reader of standard error is gone
                    sys.stderr.write(f"{self._marked(worker, text)}\n")
        return bool(data)

    def _marked(self, worker: SupervisedWorker, line: str) -> str:
        """Add the worker's name to an output line: as a prefix in text, as a field in JSON."""
        if self._settings.log_format != "json":
            return f"{worker.share.name} | {line}"
        if line.startswith('{"'):
            return f'{{"worker": {json.dumps(worker.node)}, {line[1:]}'
        return json_line({"worker": worker.node, "message": line})

    # The workers' state.

    def _poll_statistics(self) -> None:
        """Request the workers' statistics regularly, on a separate thread because the answers take time."""
        app = make_app(self._settings)
        nodes = [worker.node for worker in self._workers]
        while not self._stopping:
            # Every worker on this Redis receives the request, so it is sent rarely while all workers answer.
            frequent = self._live or not self._all_answer()
            self._changed.wait(REFRESH_INTERVAL_S if frequent else self._settings.statistics_interval)
            self._changed.clear()
            asked = {worker.node: worker.process for worker in self._workers}
            found: dict[str, dict[str, Any]] = {}
            with suppress(RedisError, OperationalError):
                found = worker_statistics(app, nodes)
            self._answers.put((asked, found))
            with suppress(OSError):  # the main thread has closed the socket
                self._waker.send(bytes([ANSWERED]))

    def _all_answer(self) -> bool:
        """Return True if every worker answers, except those that are no longer restarted."""
        return all(worker.statistics or worker.is_over for worker in self._workers)

    def _update_statistics(self, asked: Processes, found: dict[str, dict[str, Any]]) -> None:
        """Store the answers of the processes that still run, and print or log the status line.

        Notifies systemd once all workers are up.
        """
        for worker in self._workers:
            is_same = worker.process is not None and worker.process is asked[worker.node]
            worker.statistics = found.get(worker.node) if is_same else None
        if not self._ready and not self._stopping and self._all_answer():
            self._ready = True
            notify("READY=1")
        up = sum(bool(worker.statistics) for worker in self._workers)
        if self._live:
            with suppress(OSError):  # the terminal was closed
                self._live.update(Text(self._status_text(up), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif not self._stopping and (self._all_answer() or up != self._up):
            logger.info("%s", self._status_text(up))
        self._up = up

    def _status_text(self, up: int) -> str:
        rows = sum(worker.statistics["rows_waiting"] for worker in self._workers if worker.statistics)
        restarts = sum(worker.restarts for worker in self._workers)
        parts = [f"{up} of {len(self._workers)} workers up", f"{rows:,} rows waiting", f"{restarts:,} restarts"]
        for worker in self._workers:
            if worker.statistics:
                recent = worker.statistics["recent"]
                how = f"{recent['posts_per_second']:,.0f} posts/s, busy {recent['device_busy']:.2f}"
            else:
                how = "stopped" if worker.is_over else "not answering"
            parts.append(f"{worker.share.name} {how}")
        return " · ".join(parts)

    @contextmanager
    def _status_line(self) -> Iterator[None]:
        """In a terminal, keep a status line below the log lines."""
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        if not console.is_terminal:
            yield
            return
        with Live(console=console, auto_refresh=False, transient=True) as self._live:
            logs.configure(self._settings)  # Live has replaced stderr with a stream that prints above the line
            yield
