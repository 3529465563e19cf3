"""Supervise several workers on one machine, one process per device: start, restart and stop them.

Each worker is an ordinary `feedmill worker`. The supervisor sees a worker's exit status, its output, which it forwards
line by line, and its notes that it is ready, as systemd does. It does not import torch and opens no device.
"""

import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from feedmill.shared.errors import SettingsError, StackError, UserError, json_line
from feedmill.shared.linux import notify
from feedmill.shared.settings import PREFIX, Settings
from feedmill.stack.devices import Share
from feedmill.stack.processes import USER_ERROR_PREFIX, Child, Service
from feedmill.stack.signals import handle_signals, not_ignored

logger = logging.getLogger(__name__)

#: Seconds beyond the setting `drain` after which a worker that is shutting down is killed.
KILL_GRACE_S = 10.0
#: Seconds between checks for signals and exits.
POLL_INTERVAL_S = 0.1
#: Signals that stop the workers, and signals that are forwarded to them.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)


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
        port = settings.metrics_port or 0
        if port + len(shares) > 2**16:
            raise SettingsError(
                f"{PREFIX}METRICS_PORT: {len(shares)} workers need ports from {port} up, but the last port is 65535. "
                f"Set {2**16 - len(shares)} or less."
            )
        self._settings = settings
        self._services = []
        for index, share in enumerate(shares):
            ours = flags | {"device": share.device, "devices": "", "log_format": settings.log_format}
            ours["metrics_port"] = port and port + index
            given = {f"{PREFIX}{flag.upper()}": str(value) for flag, value in ours.items() if value is not None}
            others = {variable: value for variable, value in os.environ.items() if variable.upper() not in given}
            environment = others | given | share.environment
            self._services.append(Service(partial(self._launch, share, share.node(name), command, environment)))
        #: Numbers of the signals that were received and not handled yet.
        self._signals: deque[int] = deque()
        #: Checked at the start, because a terminal that was closed later no longer counts as one.
        self._in_terminal = any(os.isatty(file) for file in range(3))
        #: Number of workers that were ready at the last report; and whether all were, once.
        self._up, self._ready = 0, False
        #: Time at which workers that are still shutting down are killed, by time.monotonic; None before a stop.
        self._deadline: float | None = None
        #: The workers that ran when the stop began.
        self._stopping: list[Child] = []
        self._user_error: str | None = None

    def _launch(
        self, share: Share, node: str, command: Sequence[str], environment: dict[str, str], more: dict[str, str]
    ) -> Child:
        forward = partial(self._forward, share.name, node)
        words = [*command, "--name", node]
        return Child(f"worker {node}", words, Path.cwd(), environment | more, forward=forward, cpus=share.processors)

    def _forward(self, device: str, node: str, line: str) -> None:
        """Write a line of a worker's output to standard error: after the device's name, or as JSON with the node's."""
        if not line or line.startswith(USER_ERROR_PREFIX):
            return  # most user errors affect every worker: `run` reports one
        if self._settings.log_format != "json":
            line = f"{device} | {line}"
        elif line.startswith('{"'):
            line = f'{{"worker": {json.dumps(node)}, {line[1:]}'
        else:
            line = json_line({"worker": node, "message": line})
        with suppress(OSError):  # the reader of standard error is gone
            sys.stderr.write(f"{line}\n")

    def run(self) -> int:
        """Run until a signal stops the workers or none of them is restarted any more. Return the exit status.

        Raises UserError with a worker's message if a worker exits because of a user error.
        """
        handled = not_ignored(*STOP_SIGNALS, *FORWARDED_SIGNALS)
        with handle_signals(lambda number, _: self._signals.append(number), *handled):
            try:
                while self._deadline is None and not all(service.is_over for service in self._services):
                    self._supervise()
                    time.sleep(POLL_INTERVAL_S)
                    self._handle_signals()
                status = 1 if self._deadline is None else self._drain(self._deadline)
            finally:
                for service in self._services:
                    service.close()
        if self._user_error:
            raise UserError(self._user_error)
        return status

    def _supervise(self) -> None:
        """Start and restart workers, and report when all are ready. Called on the main thread: a worker dies with the
        thread that started it.
        """
        for service in self._services:
            try:
                service.supervise(logger.error)
            except StackError as error:
                logger.critical("%s", error)
            except UserError as error:
                self._user_error = str(error)
                self._stop(signal.SIGTERM)
        ready = [service.is_running and service.is_ready() for service in self._services]
        if not self._ready and all(up or service.is_over for up, service in zip(ready, self._services, strict=True)):
            self._ready = True
            notify("READY=1")
        if sum(ready) != self._up:
            self._up = sum(ready)
            restarts = sum(service.restarts for service in self._services)
            logger.info("%d of %d workers up · %d restarts", self._up, len(ready), restarts)

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number == signal.SIGQUIT:
                self._stop(signal.SIGQUIT)
            elif number in STOP_SIGNALS or (number == signal.SIGHUP and self._in_terminal):  # the terminal was closed
                self._stop(signal.SIGTERM)
            else:
                for service in self._services:
                    if service.is_ready():  # the signal would kill a worker that is still loading
                        service.child.process.send_signal(number)

    def _stop(self, how: signal.Signals) -> None:
        """Send the signal to all workers. A second call sends it again, without moving the deadline."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._settings.drain + KILL_GRACE_S
            self._stopping = [service.child for service in self._services if service.is_running]
            notify("STOPPING=1")
        for child in self._stopping:
            child.process.send_signal(how)

    def _drain(self, deadline: float) -> int:
        """Wait until the workers have ended, and kill those that have not at the deadline. Return the exit status."""
        while any(child.exited() is None for child in self._stopping) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
            self._handle_signals()
        for child in self._stopping:
            if child.exited() is None:
                logger.error("%s still runs %g s after FEEDMILL_DRAIN: killing it", child.name, KILL_GRACE_S)
                child.kill()
        # A worker that has not begun to consume dies of SIGTERM.
        return int(any(child.exited() not in (0, -signal.SIGTERM) for child in self._stopping))
