"""Resolve `--devices` on this machine: which devices get a worker, and which CPU cores each worker uses.

This module does not import torch. It counts the GPUs in a child process, so that the supervisor stays small and holds
no GPU memory.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from feedmill.shared import linux
from feedmill.shared.errors import SettingsError, UserError
from feedmill.shared.settings import PREFIX

#: Folder in which the kernel describes each CPU.
PROCESSORS = Path("/sys/devices/system/cpu")
#: Python code that prints the number of GPUs torch sees.
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
    cores = cores_by_package(PROCESSORS)
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


def cores_by_package(folder: Path) -> list[frozenset[int]]:
    """Return the CPUs that this process may use, grouped by core. Cores of one CPU package are adjacent.

    folder: the kernel's CPU folder, PROCESSORS outside of tests.
    """
    found: dict[tuple[int, str], set[int]] = {}
    for number in sorted(linux.allowed_cpus()):
        topology = folder / f"cpu{number}" / "topology"
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
