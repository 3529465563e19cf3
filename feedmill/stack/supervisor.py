"""Supervise several workers on one machine, one process per device: start, restart and stop them.

`shares` decides which devices get a worker, and which CPU cores each one uses. Each worker is an ordinary `feedmill
worker`. The supervisor sees a worker's exit status, its output, which it forwards line by line, and its notes that it
is ready, as systemd does. It does not import torch and opens no device.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from feedmill.shared import linux
from feedmill.shared.errors import SettingsError, UserError, json_line
from feedmill.shared.linux import notify
from feedmill.shared.settings import PREFIX, Settings
from feedmill.stack.processes import Child, Service, environment, note_signals, python_command

logger = logging.getLogger(__name__)

#: Seconds beyond the setting `drain` after which a worker that is shutting down is killed.
KILL_GRACE_S = 10.0
#: Seconds between checks for signals and exits.
POLL_INTERVAL_S = 0.1
#: Folder in which the kernel describes each CPU.
PROCESSORS = Path("/sys/devices/system/cpu")
#: Python code that prints the number of GPUs torch sees, for a child process: the supervisor holds no GPU memory.
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
#: Environment variables for the number of compute threads (torch, ONNX Runtime) and of tokenizer threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
#: Part of a GPU's memory that the workers on it divide among themselves. The rest is for their CUDA contexts, which
#: torch's limit does not include.
SHARED_MEMORY = 0.9


class Share(NamedTuple):
    """One worker's share of the machine.

    device: value for the setting `device`. name: part of the node name, such as cuda:2, cpu:0, or cuda:2-1 for the
    second worker on a GPU. environment: variables that must be set before torch is imported. processors: CPU numbers;
    empty if the worker may use any.
    """

    device: str
    name: str
    environment: dict[str, str]
    processors: frozenset[int] = frozenset()

    def node(self, name: str | None) -> str:
        """Return the worker's node name. name: prefix, with or without @host; None means feedmill."""
        given, _, host = (name or "feedmill").partition("@")
        return f"{given}-{self.name}@{host or socket.gethostname()}"


def shares(wanted: str) -> list[Share]:
    """Return a share for each device that the setting `devices` names.

    Raises SettingsError if the machine lacks a device, UserError if the GPUs cannot be counted.
    """
    kind, _, number = wanted.partition(":")
    devices = [] if kind == "cpu" else _gpus(wanted)
    if not devices:
        devices = [Share("cpu", f"cpu:{index}", {}) for index in range(int(number or 1))]
    if len(devices) == 1:
        return devices  # a single worker may use every core
    cores = cores_by_package()
    if kind == "cpu" and len(devices) > len(cores):
        raise SettingsError(
            f"{PREFIX}DEVICES: {wanted} needs one core per worker, but this process may use only {len(cores)}. Set "
            f"cpu:{len(cores)} or fewer."
        )
    return [
        device._replace(environment=device.environment | _threads(threads), processors=processors)
        for device, (processors, threads) in zip(devices, divide(cores, len(devices)), strict=True)
    ]


def _gpus(wanted: str) -> list[Share]:
    """Return a share for each requested GPU; none for `all` on a machine without GPUs. Raises SettingsError."""
    there = _visible()
    if wanted == "all":
        chosen = there
    else:
        indices = [int(index) for index in wanted.split(",")]
        if missing := [index for index in indices if index >= len(there)]:
            raise SettingsError(
                f"{PREFIX}DEVICES: GPU {missing[0]} does not exist; torch sees {len(there)} CUDA devices, "
                "numbered from 0. Set existing ones, or all."
            )
        chosen = [there[index] for index in indices]
    found: list[Share] = []
    for number, gpu in enumerate(chosen):
        environment, before = {VISIBLE_DEVICES: gpu}, chosen[:number].count(gpu)
        if (workers := chosen.count(gpu)) > 1:
            environment[f"{PREFIX}DEVICE_MEMORY"] = f"{SHARED_MEMORY / workers:.3f}"
        found.append(Share("cuda", f"cuda:{gpu}" + (f"-{before}" if before else ""), environment))
    return found


def _visible() -> list[str]:
    """Return the GPUs that torch sees, named by number or UUID as in CUDA_VISIBLE_DEVICES. Raises UserError."""
    if find_spec("torch") is None:
        raise UserError("A worker requires the package torch: run `pip install 'feedmill[worker]'`.")
    counted = subprocess.run([sys.executable, "-P", "-c", COUNT_GPUS], capture_output=True, text=True, check=False)
    if counted.returncode:
        why = counted.stderr.strip().splitlines()[-1:]
        raise UserError(
            f"Cannot count the GPUs, because torch fails: {''.join(why):.300}. "
            "Reinstall torch, or set FEEDMILL_DEVICES=cpu."
        )
    count = int(counted.stdout.split()[-1])
    if VISIBLE_DEVICES in os.environ:
        return [name.strip() for name in os.environ[VISIBLE_DEVICES].split(",")][:count]
    return [str(index) for index in range(count)]


def cores_by_package() -> list[frozenset[int]]:
    """Return the CPUs that this process may use, grouped by core. Cores of one CPU package are adjacent."""
    found: dict[tuple[int, str], set[int]] = {}
    for number in sorted(linux.allowed_cpus()):
        topology = PROCESSORS / f"cpu{number}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            siblings = (topology / "thread_siblings_list").read_text()
        except (OSError, ValueError):  # sandboxes may hide the topology
            package, siblings = 0, str(number)
        found.setdefault((package, siblings), set()).add(number)
    return [frozenset(found[core]) for core in sorted(found, key=lambda core: core[0])]


def divide(cores: Sequence[frozenset[int]], workers: int) -> list[tuple[frozenset[int], int]]:
    """Divide the cores among the workers in adjacent runs; return each worker's CPUs and its number of cores.

    With fewer cores than workers, every worker may use all CPUs, with one thread.
    """
    if len(cores) < workers:
        return [(frozenset(), 1)] * workers
    ends = [len(cores) * index // workers for index in range(workers + 1)]
    return [(frozenset().union(*cores[first:end]), end - first) for first, end in pairwise(ends)]


def _threads(count: int) -> dict[str, str]:
    """Return the thread variables to set to `count`; variables that are already set stay as they are."""
    return {name: str(count) for name in THREAD_VARIABLES if name not in os.environ}


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
