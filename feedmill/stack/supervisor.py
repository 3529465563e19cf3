"""Supervise several workers on one machine, one process per device: start, restart and stop them.

`shares` decides which devices get a worker, and which CPU cores each one uses. Each worker is an
ordinary `feedmill worker`. The supervisor sees a worker's exit status, its output, which it
forwards line by line, and its notes that it is ready, as systemd does. It does not import torch
and opens no device.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from feedmill.shared import linux
from feedmill.shared.errors import SettingsError, UserError, json_line
from feedmill.shared.linux import notify
from feedmill.shared.settings import PREFIX, Settings
from feedmill.shared.worker_load import WorkerLoad
from feedmill.stack.filling import USABLE_MEMORY
from feedmill.stack.processes import (
    Child,
    Service,
    environment,
    note_signals,
    python_command,
)

logger = logging.getLogger(__name__)

#: Seconds beyond the setting `drain` after which a worker that is shutting down is killed.
KILL_GRACE_S = 10.0
#: Seconds between checks for signals and exits.
POLL_INTERVAL_S = 0.1
#: Folder in which the kernel describes each CPU.
PROCESSORS = Path("/sys/devices/system/cpu")
#: Python code that prints the number of GPUs torch sees, for a child process: the supervisor holds
#: no GPU memory.
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
#: Environment variables for the number of compute threads (torch, ONNX Runtime) and of tokenizer
#: threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class Share(NamedTuple):
    """One worker's share of the machine.

    device: value for the setting `device`. name: part of the node name, such as cuda:2, cpu:0,
    cuda:2+3 for a worker on two GPUs, or cuda:2-1 for the second worker on a GPU. environment:
    variables that must be set before torch is imported. processors: CPU numbers; empty if the
    worker may use any.
    """

    device: str
    name: str
    environment: dict[str, str]
    processors: frozenset[int] = frozenset()

    def node(self, name: str | None) -> str:
        """Return the worker's node name. name: prefix, with or without @host; None means
        feedmill.
        """
        prefix, _, host = (name or "feedmill").partition("@")
        if not host:
            host = socket.gethostname()
        return f"{prefix}-{self.name}@{host}"


def shares(devices: str) -> list[Share]:
    """Return a share for each device that the setting `devices` names.

    Raises SettingsError if the machine lacks a device, UserError if the GPUs cannot be counted.
    """
    kind, _, number = devices.partition(":")
    parts: list[Share] = []
    if kind != "cpu":
        parts = _gpus(devices)
    if not parts:
        parts = _cpus(int(number or 1))
    worker_count = len(parts)
    # A single worker may use every core.
    if worker_count == 1:
        return parts
    cores = cores_by_package()
    core_count = len(cores)
    if kind == "cpu" and worker_count > core_count:
        raise SettingsError(
            f"{PREFIX}DEVICES: {devices} needs one core per worker, but this process may use only "
            f"{core_count}. Set cpu:{core_count} or fewer."
        )
    return _with_cores(parts, cores)


def _with_cores(parts: Sequence[Share], cores: Sequence[frozenset[int]]) -> list[Share]:
    """Return the shares, each with its part of the cores."""
    parts_with_cores = []
    cores_of_workers = divide(cores, len(parts))
    for part, (processors, threads) in zip(parts, cores_of_workers, strict=True):
        variables = thread_variables(threads)
        part_with_cores = part._replace(
            environment=part.environment | variables,
            processors=processors,
        )
        parts_with_cores.append(part_with_cores)
    return parts_with_cores


def _cpus(count: int) -> list[Share]:
    """Return a share for each of `count` workers on the CPU."""
    parts = []
    for index in range(count):
        part = Share(
            device="cpu",
            name=f"cpu:{index}",
            environment={},
        )
        parts.append(part)
    return parts


def _gpus(devices: str) -> list[Share]:
    """Return a share for each requested GPU or group of GPUs; none for `all` on a machine without
    GPUs.

    Raises SettingsError if a GPU does not exist.
    """
    visible = visible_gpus()
    if devices == "all":
        groups = [[gpu] for gpu in visible]
    else:
        groups = [_group(numbers, visible) for numbers in devices.split(",")]
    workers_on = Counter(chain.from_iterable(groups))
    parts: list[Share] = []
    for number, group in enumerate(groups):
        visible_devices = ",".join(group)
        environment = {VISIBLE_DEVICES: visible_devices}
        most_workers = max(workers_on[gpu] for gpu in group)
        if most_workers > 1:
            memory = USABLE_MEMORY / most_workers
            environment[f"{PREFIX}DEVICE_MEMORY"] = f"{memory:.3f}"
        numbers = "+".join(group)
        name = f"cuda:{numbers}"
        earlier = groups[:number].count(group)
        if earlier:
            name += f"-{earlier}"
        # The worker sees only its GPUs, so that they are 0, 1 and so on there.
        device = "cuda"
        gpu_count = len(group)
        if gpu_count > 1:
            own_numbers = "+".join(map(str, range(gpu_count)))
            device = f"cuda:{own_numbers}"
        part = Share(
            device=device,
            name=name,
            environment=environment,
        )
        parts.append(part)
    return parts


def _group(numbers: str, visible: Sequence[str]) -> list[str]:
    """Return the names of GPUs that share a model. numbers: such as 0, or 0+1.

    Raises SettingsError.
    """
    indices = [int(index) for index in numbers.split("+")]
    gpu_count = len(visible)
    missing = [index for index in indices if index >= gpu_count]
    if missing:
        raise SettingsError(
            f"{PREFIX}DEVICES: GPU {missing[0]} does not exist; torch sees {gpu_count} CUDA "
            "devices, numbered from 0. Set existing ones, or all."
        )
    distinct = set(indices)
    if len(distinct) < len(indices):
        raise SettingsError(
            f"{PREFIX}DEVICES: {numbers} names a GPU twice. Name each once."
        )
    return [visible[index] for index in indices]


def visible_gpus() -> list[str]:
    """Return the GPUs that torch sees, named by number or UUID as in CUDA_VISIBLE_DEVICES. Raises
    UserError.
    """
    if find_spec("torch") is None:
        raise UserError(
            "A worker requires the package torch: run `pip install 'feedmill[worker]'`."
        )
    counted = subprocess.run(
        [sys.executable, "-P", "-c", COUNT_GPUS],
        capture_output=True,
        text=True,
        check=False,
    )
    if counted.returncode:
        lines = counted.stderr.strip().splitlines()
        last_line = ""
        if lines:
            last_line = lines[-1]
        raise UserError(
            f"Cannot count the GPUs, because torch fails: {last_line:.300}. "
            "Reinstall torch, or set FEEDMILL_DEVICES=cpu."
        )
    words = counted.stdout.split()
    count = int(words[-1])
    if VISIBLE_DEVICES in os.environ:
        names = os.environ[VISIBLE_DEVICES].split(",")
        return [name.strip() for name in names[:count]]
    return [str(index) for index in range(count)]


def cores_by_package() -> list[frozenset[int]]:
    """Return the CPUs that this process may use, grouped by core.

    Cores of one CPU package are adjacent.
    """
    cores: dict[tuple[int, str], set[int]] = {}
    for number in sorted(linux.allowed_cpus()):
        topology = PROCESSORS / f"cpu{number}" / "topology"
        package_file = topology / "physical_package_id"
        siblings_file = topology / "thread_siblings_list"
        try:
            package = int(package_file.read_text())
            siblings = siblings_file.read_text()
        except (OSError, ValueError):  # sandboxes may hide the topology
            package = 0
            siblings = str(number)
        core = cores.setdefault((package, siblings), set())
        core.add(number)

    def package_of(core: tuple[int, str]) -> int:
        package, _ = core
        return package

    return [frozenset(cores[core]) for core in sorted(cores, key=package_of)]


def divide(
    cores: Sequence[frozenset[int]], workers: int
) -> list[tuple[frozenset[int], int]]:
    """Divide the cores among the workers in adjacent runs; return each worker's CPUs and its
    number of cores.

    With fewer cores than workers, every worker may use all CPUs, with one thread.
    """
    core_count = len(cores)
    if core_count < workers:
        return [(frozenset(), 1)] * workers
    bounds = [core_count * index // workers for index in range(workers + 1)]
    parts = []
    for first, end in pairwise(bounds):
        own_cores = cores[first:end]
        cpus: frozenset[int] = frozenset().union(*own_cores)
        part = (cpus, len(own_cores))
        parts.append(part)
    return parts


def thread_variables(count: int) -> dict[str, str]:
    """Return the thread variables to set to `count`; variables that are already set stay as they
    are.
    """
    unset = [name for name in THREAD_VARIABLES if name not in os.environ]
    return dict.fromkeys(unset, str(count))


class Worker(NamedTuple):
    """A worker's share of the machine, and the service that runs it."""

    share: Share
    service: Service

    def is_up(self) -> bool:
        """Return whether it runs and has reported that it is ready."""
        if not self.service.is_running:
            return False
        return self.service.is_ready()

    def load(self) -> WorkerLoad | None:
        """Return the figures of its latest note; None if it has sent none."""
        return self.service.load()


class Additions(Protocol):
    """The source of workers that are added while the others run."""

    def more(self, workers: Sequence[Worker]) -> list[Share]:
        """Return the shares of the workers to add now. workers: those that were started."""


def _signal_for(number: int) -> int:
    """Return the signal that the workers get for one of the supervisor: itself, or SIGTERM."""
    if number in (signal.SIGUSR1, signal.SIGQUIT):
        return number
    return signal.SIGTERM


class Supervisor:
    """A supervisor that runs one worker per share until a signal stops them.

    name: value of the flag `--name`. command: command line of a worker. additions: adds workers.
    """

    def __init__(
        self,
        settings: Settings,
        shares: Sequence[Share],
        name: str | None,
        command: Sequence[str] | None = None,
        additions: Additions | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._command = command or [*python_command(), "worker"]
        self._additions = additions
        self._workers: list[Worker] = []
        for share in shares:
            self._add(share)
        #: Number of workers that were ready at the last report; and whether systemd was notified.
        self._up = 0
        self._has_notified = False

    @property
    def _services(self) -> list[Service]:
        return [worker.service for worker in self._workers]

    def _add(self, share: Share) -> None:
        """Add a worker, which `_supervise` starts."""
        port = self._settings.metrics_port or 0
        if port:
            port += len(self._workers)
        changes = {
            "device": share.device,
            "devices": None,
            "metrics_port": port,
        }
        own_settings = self._settings.model_copy(update=changes)
        variables = environment(own_settings) | share.environment
        node = share.node(self._name)
        launch = partial(
            self._launch,
            share,
            node,
            variables,
        )
        worker = Worker(share=share, service=Service(launch))
        self._workers.append(worker)

    def _launch(
        self,
        share: Share,
        node: str,
        variables: dict[str, str],
        service_variables: dict[str, str],
    ) -> Child:
        """Start a worker. service_variables: those by which it notifies its `Service`."""
        forward = partial(self._forward, share.name, node)
        command = [*self._command, "--name", node]
        return Child(
            f"worker {node}",
            command,
            Path.cwd(),
            variables | service_variables,
            forward=forward,
            cpus=share.processors,
        )

    def _forward(self, device: str, node: str, line: str) -> None:
        """Write a line of a worker's output to standard error: after the device's name, or as JSON
        with the node's.
        """
        if not line:
            return
        if self._settings.log_format != "json":
            line = f"{device} | {line}"
        elif line.startswith('{"'):
            quoted_node = json.dumps(node)
            line = f'{{"worker": {quoted_node}, {line[1:]}'
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
                while True:
                    stops = self._pass_on(received)
                    if stops:
                        return self._drain(received)
                    self._supervise()
                    time.sleep(POLL_INTERVAL_S)
            except UserError:
                received.append(signal.SIGTERM)
                self._drain(received)
                raise
            finally:
                for service in self._services:
                    service.close()

    def _supervise(self) -> None:
        """Start and restart workers, and report when all are ready.

        Called on the main thread: a worker dies with the thread that started it.
        """
        if self._additions is not None:
            for share in self._additions.more(self._workers):
                self._add(share)
        for service in self._services:
            service.supervise(logger.error)
        self._report_readiness()

    def _report_readiness(self) -> None:
        """Tell systemd once that no worker is starting for the first time, and log how many are
        up when that changes.
        """
        up = 0
        restarts = 0
        has_starting = False
        for service in self._services:
            restarts += service.restarts
            if service.is_running and service.is_ready():
                up += 1
            elif not service.restarts:
                has_starting = True
        # A worker that fails must not keep systemd waiting for the others.
        if not self._has_notified and not has_starting:
            self._has_notified = True
            notify("READY=1")
        if up != self._up:
            self._up = up
            workers = len(self._services)
            logger.info(
                "%d of %d workers up · %d restarts",
                up,
                workers,
                restarts,
            )

    def _pass_on(self, received: list[int]) -> bool:
        """Send received signals to the workers. Return whether one of them stops the workers."""
        stops = False
        while received:
            number = received.pop(0)
            if number != signal.SIGUSR1:
                stops = True
            self._send(_signal_for(number))
        return stops

    def _send(self, number: int) -> None:
        """Send a signal to the workers that run."""
        for service in self._services:
            if not service.is_running:
                continue
            if number == signal.SIGUSR1 and not service.is_ready():
                continue  # it would kill a worker that is still loading
            service.child.process.send_signal(number)

    def _drain(self, received: list[int]) -> int:
        """Stop the workers and wait until they have ended; kill those that have not in time.

        Return the exit status.
        """
        patience_s = self._settings.drain + KILL_GRACE_S
        deadline = time.monotonic() + patience_s
        children = [service.child for service in self._services if service.is_running]
        notify("STOPPING=1")
        while time.monotonic() < deadline:
            if all(child.process.poll() is not None for child in children):
                break
            self._pass_on(received)
            time.sleep(POLL_INTERVAL_S)
        for child in children:
            if child.process.poll() is None:
                logger.error(
                    "%s still runs %g s after FEEDMILL_DRAIN: killing it",
                    child.name,
                    KILL_GRACE_S,
                )
                child.kill()
        # A worker that has not begun to consume dies of SIGTERM.
        statuses = [child.process.returncode for child in children]
        if any(status not in (0, -signal.SIGTERM) for status in statuses):
            return 1
        return 0
