"""Supervise several workers on one machine, one process per device: start, restart and stop them.

Each worker is an ordinary `feedmill worker`. The supervisor sees a worker's exit status and its answers to
`inspect stats`, and forwards its output line by line. The supervisor does not import torch and opens no device.

The main thread starts and stops the workers, one thread for each forwards its output, and one asks for statistics.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from feedmill.monitoring.watch import worker_statistics
from feedmill.shared.broker import make_app
from feedmill.shared.errors import SettingsError, UserError, json_line, printable
from feedmill.shared.linux import NOTIFY_SOCKET, die_with, notify, run_on
from feedmill.shared.settings import PREFIX, Settings
from feedmill.stack.devices import Share
from feedmill.stack.processes import MAX_FAILURES, Failures
from feedmill.stack.signals import handle_signals, not_ignored

logger = logging.getLogger(__name__)

#: Seconds beyond the setting `drain` after which a worker that is shutting down is killed.
KILL_GRACE_S = 10.0
#: Seconds between requests for statistics while a worker does not answer.
REFRESH_INTERVAL_S = 2.0
#: Seconds between checks for signals and exits; seconds for the rest of an ended worker's output to arrive.
POLL_INTERVAL_S, OUTPUT_TIMEOUT_S = 0.1, 5.0
#: Exit status after a user error, and the start of the line that reports it (feedmill/cli/main.py).
USER_ERROR_STATUS, USER_ERROR_PREFIX = 2, b"feedmill: "
#: Last lines of a worker's output to keep for its final report; maximum bytes of a line.
LAST_LINES, MAX_LINE_BYTES = 5, 2**16
#: Signals that stop the workers, and signals that are forwarded to them.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
#: The process of each worker by node name; None while it does not run.
Processes = dict[str, subprocess.Popen[bytes] | None]


class SupervisedWorker:
    """The worker of one device: its current process and its state.

    command: command line to which `--name NODE` is appended. environment: variables in addition to the share's.
    """

    def __init__(
        self, share: Share, node: str, command: Sequence[str], environment: dict[str, str], as_json: bool
    ) -> None:
        self.share = share
        self.node = node
        self._command = [*command, "--name", node]
        self._environment = environment | share.environment
        self._as_json = as_json
        self.process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self.failures = Failures()
        #: Time of the next start, by time.monotonic; None while the worker runs, and once it is no longer restarted.
        self.due: float | None = 0.0
        self.restarts = 0
        #: Latest statistics of the worker's pool; None while the worker does not answer.
        self.statistics: dict[str, Any] | None = None
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def is_over(self) -> bool:
        return self.process is None and self.due is None

    def start(self) -> None:
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent)
            if self.share.processors:
                run_on(self.share.processors)

        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # Ctrl-C in a terminal reaches only this process, which then stops its workers in order.
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - takes no lock: three system calls
        )
        self._reader = threading.Thread(target=self._forward, args=(self.process.stdout,), daemon=True)
        self._reader.start()
        self.due = None
        self.failures.started()

    def _forward(self, output: IO[bytes]) -> None:
        """Write the worker's output to standard error, line by line, until its end."""
        with output:
            for line in iter(partial(output.readline, MAX_LINE_BYTES), b""):
                text = printable(line.removesuffix(b"\n").decode(errors="replace"))
                self.last_lines.append(text)
                # Most user errors affect every worker: `Supervisor.run` reports them once.
                if text and not line.startswith(USER_ERROR_PREFIX):
                    with suppress(OSError):  # the reader of standard error is gone
                        sys.stderr.write(f"{self.marked(text)}\n")

    def marked(self, line: str) -> str:
        """Add the worker's name to an output line: as a prefix in text, as a field in JSON."""
        if not self._as_json:
            return f"{self.share.name} | {line}"
        if line.startswith('{"'):
            return f'{{"worker": {json.dumps(self.node)}, {line[1:]}'
        return json_line({"worker": self.node, "message": line})

    def exited(self) -> int | None:
        """Return the exit status once the process has ended and its output is forwarded; None while it runs."""
        if self.process is None or self.process.poll() is None:
            return None
        if self._reader:
            self._reader.join(OUTPUT_TIMEOUT_S)
        return int(self.process.returncode)

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
            as_json = settings.log_format == "json"
            self._workers.append(SupervisedWorker(share, share.node(name), command, others | given, as_json))
        #: Numbers of the signals that were received and not handled yet.
        self._signals: deque[int] = deque()
        #: Held while a worker's process or statistics change.
        self._lock = threading.Lock()
        #: Set when a worker has exited, so that the next request for statistics is sent at once.
        self._changed = threading.Event()
        #: Checked at the start, because a terminal that was closed later no longer counts as one.
        self._in_terminal = any(os.isatty(file) for file in range(3))
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
        handled = not_ignored(*STOP_SIGNALS, *FORWARDED_SIGNALS)
        with handle_signals(lambda number, _: self._signals.append(number), *handled):
            # A daemon thread, because Redis may take long to answer.
            threading.Thread(target=self._poll_statistics, name="answers", daemon=True).start()
            try:
                while not all(worker.is_over for worker in self._workers):
                    self._turn()
                    time.sleep(POLL_INTERVAL_S)
            finally:
                for worker in self._workers:
                    if worker.process:
                        worker.process.kill()
                        worker.process.wait()
        if self._user_error:
            raise UserError(self._user_error)
        return self._status

    def _turn(self) -> None:
        """Handle signals and exits, start the workers that are due, and kill those that do not stop in time."""
        while self._signals:
            self._handle(self._signals.popleft())
        now = time.monotonic()
        for worker in self._workers:
            if (status := worker.exited()) is not None:
                self._exited(worker, status)
            elif worker.due is not None and worker.due <= now:
                worker.start()  # on the main thread: a worker dies with the thread that started it
        if self._deadline is not None and self._deadline <= now:
            self._kill()

    def _handle(self, number: int) -> None:
        if number == signal.SIGQUIT:
            self._stop(signal.SIGQUIT)
        elif number in STOP_SIGNALS or (number == signal.SIGHUP and self._in_terminal):  # the terminal was closed
            self._stop(signal.SIGTERM)
        else:
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
        """Restart the worker, leave it stopped, or stop all workers."""
        with self._lock:
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

    # The workers' state.

    def _poll_statistics(self) -> None:
        """Request the workers' statistics regularly, on a separate thread because the answers take time."""
        app = make_app(self._settings)
        nodes = [worker.node for worker in self._workers]
        while not self._stopping:
            # Every worker on this Redis receives the request, so it is sent rarely while all workers answer.
            self._changed.wait(self._settings.statistics_interval if self._all_answer() else REFRESH_INTERVAL_S)
            self._changed.clear()
            asked = {worker.node: worker.process for worker in self._workers}
            found: dict[str, dict[str, Any]] = {}
            with suppress(RedisError, OperationalError):
                found = worker_statistics(app, nodes)
            self._update_statistics(asked, found)

    def _all_answer(self) -> bool:
        """Return True if every worker answers, except those that are no longer restarted."""
        return all(worker.statistics or worker.is_over for worker in self._workers)

    def _update_statistics(self, asked: Processes, found: dict[str, dict[str, Any]]) -> None:
        """Store the answers of the processes that still run, log the status, and tell systemd once all are up."""
        with self._lock:
            for worker in self._workers:
                is_same = worker.process is not None and worker.process is asked[worker.node]
                worker.statistics = found.get(worker.node) if is_same else None
        if self._stopping:
            return
        if not self._ready and self._all_answer():
            self._ready = True
            notify("READY=1")
        up = sum(bool(worker.statistics) for worker in self._workers)
        if self._all_answer() or up != self._up:
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
