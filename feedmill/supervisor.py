"""Several workers on one machine, a process for each device: started, kept running, ended together.

Each is a `feedmill worker` as it is. Of what it does this process knows how it ends, what it writes, which is passed on
line by line, and what it answers to `inspect stats`. It imports no torch and opens no device.

One thread does everything; another one waits for the workers' answers. Signals, ends of workers and answers wake the
first through a socket: by a byte with the signal's number, or ANSWERED.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError as RedisFault
from rich.console import Console
from rich.live import Live
from rich.text import Text

from feedmill.devices import Share
from feedmill.processes import die_with
from feedmill.watch import worker_statistics
from shared import logs
from shared.broker import make_app
from shared.errors import SettingsError, UserError, json_line, printable
from shared.service import NOTIFY_SOCKET, tell
from shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: A worker that ends so often in a row is given up.
FAILURES = 5
#: Seconds of the first pause in between; each further is twice as long.
PAUSE = 1.0
#: Seconds after which a worker counts as well, and what befell its predecessors is forgotten.
WELL = 60.0
#: Seconds beyond the setting `drain` after which a worker that was asked to end is killed.
GRACE = 10.0
#: Seconds between two questions to the workers, in a terminal, and while one of them does not answer.
REFRESH = 2.0
#: Exit status of a mistake that a person has to mend, and how the line with its sentence begins (feedmill/cli.py).
MISTAKE, SAID = 2, b"feedmill: "
#: Lines that are kept of each worker, to be told when it is given up; bytes of a line, at most.
LAST_WORDS, LONGEST_LINE = 5, 2**16
#: What wakes this process besides signals, whose numbers begin with 1.
ANSWERED = 0
#: Signals that end the workers, and those of which a worker takes notice otherwise.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
PASSED_ON = (signal.SIGHUP, signal.SIGUSR1)


class Failures:
    """How often the workers of a device ended in a row, and what follows from that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._since = clock()

    def started(self) -> None:
        self._since = self._clock()

    def ended(self) -> float | None:
        """Seconds until the next one is to be started; None: the device is given up."""
        self._count = 1 if self._clock() - self._since >= WELL else self._count + 1
        return PAUSE * 2 ** (self._count - 1) if self._count < FAILURES else None


class Worker:
    """The worker of one device: the process that is it now, and how it fares.

    command: what `--name NODE` is added to; environment: all of it but what the share says.
    """

    def __init__(self, share: Share, node: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.share = share
        self.node = node
        self._command = [*command, "--name", node]
        self._environment = environment | share.environment
        self.process: subprocess.Popen[bytes] | None = None
        #: Where its output is read from.
        self.output = -1
        self.failures = Failures()
        #: When it is to be started, by time.monotonic; None while it runs, and for ever when it is given up.
        self.due: float | None = 0.0
        self.restarts = 0
        #: What its pool said of itself lately; None while it does not answer.
        self.told: dict[str, Any] | None = None
        self.last_words: deque[str] = deque(maxlen=LAST_WORDS)
        #: What was read of a line that has no end yet.
        self._begun = b""

    @property
    def is_over(self) -> bool:
        return self.process is None and self.due is None

    def start(self) -> None:
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent)
            if self.share.processors:
                with suppress(OSError):  # they may have been taken away since
                    os.sched_setaffinity(0, self.share.processors)

        self.output, theirs = os.pipe()
        os.set_blocking(self.output, False)
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=self._environment,
            # Ctrl-C in a terminal goes to this process alone, which then ends its workers in order.
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - it takes no lock: three system calls
        )
        os.close(theirs)
        self.due = None
        self.failures.started()

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that are complete with this."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST_LINE:
            lines.append(self._begun)
            self._begun = b""
        return lines

    def signal(self, number: int) -> None:
        if self.process:
            self.process.send_signal(number)


class Supervisor:
    """Runs a worker for each share until a signal ends them.

    name: as the flag; command: what runs a worker; flags: what the command line set, which workers get as variables,
    since arguments are shown to everybody by `ps`. Raises SettingsError.
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
                f"{PREFIX}METRICS_PORT: {len(shares)} workers serve on ports from {port} on, but there is none beyond "
                f"65535: set {2**16 - len(shares)} or less."
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
            self._workers.append(Worker(share, share.node(name), command, others | given))
        #: What workers answered, by node name.
        self._answers: queue.SimpleQueue[dict[str, dict[str, Any]]] = queue.SimpleQueue()
        #: A worker has ended: whoever waits to ask again asks now.
        self._changed = threading.Event()
        #: Asked at the start: one that was closed is none.
        self._in_terminal = any(os.isatty(file) for file in range(3))
        self._live: Live | None = None
        self._ready = False
        #: Workers that answered when it was last said.
        self._up = 0
        self._ending = False
        #: When those that were asked to end are killed.
        self._deadline: float | None = None
        self._mistake: str | None = None
        self._status = 0

    def run(self) -> int:
        """Until a signal ends them, or all are given up; returns the exit status. Raises UserError: a worker's."""
        with self._heard(), self._status_line():
            # Nobody waits for it: Redis may not answer for long.
            threading.Thread(target=self._ask, name="answers", daemon=True).start()
            try:
                while not all(worker.is_over for worker in self._workers):
                    self._turn()
            finally:
                for worker in self._workers:
                    if worker.process:
                        worker.process.kill()
                        worker.process.wait()
        if self._mistake:
            raise UserError(self._mistake)
        return self._status

    def _turn(self) -> None:
        """Start whose time has come, wait for what comes next, and see who has ended."""
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
                self._ended(worker, worker.process.returncode)

    # Signals, and the end.

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Signals wake `_turn`. What is ignored stays ignored: under nohup a closed terminal is no reason to end."""
        self._awake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        wanted = [number for number in (*ENDING, *PASSED_ON) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, lambda *_: None) for number in (*wanted, signal.SIGCHLD)}
        try:
            with self._awake, self._waker, DefaultSelector() as self._files:
                self._files.register(self._awake, EVENT_READ, self._woken)
                yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _woken(self) -> None:
        for number in self._awake.recv(4096):
            if number == ANSWERED:
                self._hear(self._answers.get())
            elif number == signal.SIGQUIT:
                self._end(signal.SIGQUIT)
            elif number in ENDING or (number == signal.SIGHUP and self._in_terminal):  # which was closed
                self._end(signal.SIGTERM)
            elif number in PASSED_ON:
                for worker in self._workers:
                    if worker.told:  # one that is loading would die of it
                        worker.signal(number)

    def _end(self, how: signal.Signals) -> None:
        """Have all of them end, side by side. Asked again, each is asked again."""
        if not self._ending:
            self._ending = True
            self._deadline = time.monotonic() + self._settings.drain + GRACE
            tell("STOPPING=1")
        for worker in self._workers:
            worker.due = None
            worker.signal(how)

    def _kill(self) -> None:
        self._deadline = None
        for worker in self._workers:
            if worker.process:
                logger.error("%s has not ended in time: it is killed", worker.node)
                worker.process.kill()

    def _ended(self, worker: Worker, status: int) -> None:
        while self._pass_on(worker):
            pass
        with suppress(KeyError):
            self._files.unregister(worker.output)
        os.close(worker.output)
        worker.process = worker.told = None
        self._changed.set()
        if self._ending:
            if status not in (0, -signal.SIGTERM):  # of the signal dies who has not begun to take messages
                self._status = 1
            return
        said = list(worker.last_words)
        if status == MISTAKE:
            self._mistake = said[-1].removeprefix(SAID.decode()) if said else f"{worker.node} ended with status 2."
            self._end(signal.SIGTERM)
            return
        pause = worker.failures.ended()
        if pause is None:
            logger.critical(
                "%s is given up: it ended %d times in a row, at last with status %d. Its log ends:\n  %s",
                worker.node,
                FAILURES,
                status,
                "\n  ".join(said),
            )
            self._status = int(all(other.is_over for other in self._workers))
            return
        logger.error("%s ended with status %d; a new one starts in %.3g s", worker.node, status, pause)
        worker.restarts += 1
        worker.due = time.monotonic() + pause

    # What the workers write.

    def _readable(self, worker: Worker) -> None:
        if not self._pass_on(worker):
            self._files.unregister(worker.output)  # it has closed its end

    def _pass_on(self, worker: Worker) -> bool:
        """Write what it wrote, line by line; False where there is nothing, for now or for ever."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(worker.output, LONGEST_LINE)
        for line in worker.lines(data):
            text = printable(line.decode(errors="replace"))
            worker.last_words.append(text)
            # A mistake is most often every worker's: it is told once, at the end.
            if line and not line.startswith(SAID):
                with suppress(OSError):  # nobody reads any more
                    sys.stderr.write(f"{self._marked(worker, text)}\n")
        return bool(data)

    def _marked(self, worker: Worker, line: str) -> str:
        """A line with whose it is, in text before it, in JSON inside it."""
        if self._settings.log_format != "json":
            return f"{worker.share.name} | {line}"
        if line.startswith('{"'):
            return f'{{"worker": {json.dumps(worker.node)}, {line[1:]}'
        return json_line({"worker": worker.node, "message": line})

    # How they fare.

    def _ask(self) -> None:
        """On a thread of its own, since it waits for the answers."""
        app = make_app(self._settings)
        nodes = [worker.node for worker in self._workers]
        while not self._ending:
            # Every worker of this Redis hears the question: where all is well it is rare.
            self._changed.wait(REFRESH if self._live or not self._settled() else self._settings.statistics_interval)
            self._changed.clear()
            found: dict[str, dict[str, Any]] = {}
            with suppress(RedisFault, OperationalError):
                found = worker_statistics(app, nodes)
            self._answers.put(found)
            with suppress(OSError):  # it has ended
                self._waker.send(bytes([ANSWERED]))

    def _settled(self) -> bool:
        """Whether every worker answers that has not been given up."""
        return all(worker.told or worker.is_over for worker in self._workers)

    def _hear(self, found: dict[str, dict[str, Any]]) -> None:
        for worker in self._workers:
            worker.told = found.get(worker.node) if worker.process else None
        if not self._ready and not self._ending and self._settled():
            self._ready = True
            tell("READY=1")
        up = sum(bool(worker.told) for worker in self._workers)
        if self._live:
            with suppress(OSError):  # the terminal was closed
                self._live.update(Text(self._said(up), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif not self._ending and (self._settled() or up != self._up):
            logger.info("%s", self._said(up))
        self._up = up

    def _said(self, up: int) -> str:
        """The status line."""
        rows = sum(worker.told["rows_waiting"] for worker in self._workers if worker.told)
        restarts = sum(worker.restarts for worker in self._workers)
        parts = [f"{up} of {len(self._workers)} workers up", f"{rows:,} rows wait", f"{restarts:,} restarts"]
        for worker in self._workers:
            if worker.told:
                recent = worker.told["recent"]
                how = f"{recent['posts_per_second']:,.0f} posts/s, busy {recent['device_busy']:.2f}"
            else:
                how = "given up" if worker.is_over else "away"
            parts.append(f"{worker.share.name} {how}")
        return " · ".join(parts)

    @contextmanager
    def _status_line(self) -> Iterator[None]:
        """In a terminal, a line below all others that is written over."""
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        if not console.is_terminal:
            yield
            return
        with Live(console=console, auto_refresh=False, transient=True) as self._live:
            logs.configure(self._settings)  # to the stream that keeps lines above it
            yield
