"""Supervise several workers on one machine, one process per device: start, restart and stop them.

Each worker is an ordinary `feedmill worker`. The supervisor sees a worker's exit status, its output, which it forwards
line by line, and its notes that it is ready, as systemd does. It does not import torch and opens no device.
"""

import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from feedmill.shared.errors import UserError, json_line
from feedmill.shared.linux import notify
from feedmill.shared.settings import Settings
from feedmill.stack.devices import Share
from feedmill.stack.processes import Child, Service, environment, python_command
from feedmill.stack.signals import note_signals

logger = logging.getLogger(__name__)

#: Seconds beyond the setting `drain` after which a worker that is shutting down is killed.
KILL_GRACE_S = 10.0
#: Seconds between checks for signals and exits.
POLL_INTERVAL_S = 0.1


class Supervisor:
    """A supervisor that runs one worker per share until a signal stops them.

    name: value of the flag `--name`. command: command line of a worker.
    """

    def __init__(
        self, settings: Settings, shares: Sequence[Share], name: str | None, command: Sequence[str] | None = None
    ) -> None:
        port = settings.metrics_port or 0
        self._settings, self._command = settings, command or [*python_command(), "worker"]
        self._services = []
        for index, share in enumerate(shares):
            ours = {"device": share.device, "devices": None, "metrics_port": port and port + index}
            given = environment(settings.model_copy(update=ours)) | share.environment
            self._services.append(Service(partial(self._launch, share, share.node(name), given)))
        #: Number of workers that were ready at the last report; and whether systemd was notified.
        self._up, self._has_notified = 0, False

    def _launch(self, share: Share, node: str, given: dict[str, str], more: dict[str, str]) -> Child:
        forward = partial(self._forward, share.name, node)
        command = [*self._command, "--name", node]
        return Child(f"worker {node}", command, Path.cwd(), given | more, forward=forward, cpus=share.processors)

    def _forward(self, device: str, node: str, line: str) -> None:
        """Write a line of a worker's output to standard error: after the device's name, or as JSON with the node's."""
        if not line:
            return
        if self._settings.log_format != "json":
            line = f"{device} | {line}"
        elif line.startswith('{"'):
            line = f'{{"worker": {json.dumps(node)}, {line[1:]}'
        else:
            line = json_line({"worker": node, "message": line})
        with suppress(OSError):  # the reader of standard error is gone
            sys.stderr.write(f"{line}\n")

    def run(self) -> int:
        """Run until a signal stops the workers. Return the exit status.

        Raises UserError if a worker exits because of a user error, after stopping the others.
        """
        with note_signals(signal.SIGQUIT, signal.SIGUSR1) as received:
            try:
                while not self._pass_on(received):
                    self._supervise()
                    time.sleep(POLL_INTERVAL_S)
                return self._drain(received)
            except UserError:
                received.append(signal.SIGTERM)
                self._drain(received)
                raise
            finally:
                for service in self._services:
                    service.close()

    def _supervise(self) -> None:
        """Start and restart workers, and report when all are ready. Called on the main thread: a worker dies with the
        thread that started it.
        """
        for service in self._services:
            service.supervise(logger.error)
        ready = [service.is_running and service.is_ready() for service in self._services]
        # A worker that fails must not keep systemd waiting for the others.
        if not self._has_notified and all(up or one.restarts for up, one in zip(ready, self._services, strict=True)):
            self._has_notified = True
            notify("READY=1")
        if sum(ready) != self._up:
            self._up = sum(ready)
            restarts = sum(service.restarts for service in self._services)
            logger.info("%d of %d workers up · %d restarts", self._up, len(ready), restarts)

    def _pass_on(self, received: list[int]) -> bool:
        """Send received signals to the workers: SIGUSR1 and SIGQUIT as they are, others as SIGTERM.

        Return whether one of them stops the workers.
        """
        stops = False
        while received:
            number = received.pop(0)
            stops = stops or number != signal.SIGUSR1
            how = number if number in (signal.SIGUSR1, signal.SIGQUIT) else signal.SIGTERM
            for service in self._services:
                # SIGUSR1 would kill a worker that is still loading.
                if service.is_running and (number != signal.SIGUSR1 or service.is_ready()):
                    service.child.process.send_signal(how)
        return stops

    def _drain(self, received: list[int]) -> int:
        """Stop the workers and wait until they have ended; kill those that have not in time. Return the exit status."""
        deadline = time.monotonic() + self._settings.drain + KILL_GRACE_S
        running = [service.child for service in self._services if service.is_running]
        notify("STOPPING=1")
        while any(child.process.poll() is None for child in running) and time.monotonic() < deadline:
            self._pass_on(received)
            time.sleep(POLL_INTERVAL_S)
        for child in running:
            if child.process.poll() is None:
                logger.error("%s still runs %g s after FEEDMILL_DRAIN: killing it", child.name, KILL_GRACE_S)
                child.kill()
        # A worker that has not begun to consume dies of SIGTERM.
        return int(any(child.process.returncode not in (0, -signal.SIGTERM) for child in running))
