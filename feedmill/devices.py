"""What `--devices` means on this machine: which devices get a worker each, and which of its cores.

It knows nothing of torch, which alone can say how many GPUs there are: that is asked in a process of its own, so that
the one that keeps the workers stays small, and holds nothing on any GPU.
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

from shared.errors import SettingsError, UserError
from shared.settings import PREFIX

#: What the kernel tells of each of its processors.
PROCESSORS = Path("/sys/devices/system/cpu")
#: Prints how many GPUs torch sees.
COUNT = "import torch; print(torch.cuda.device_count())"
#: How many threads torch and ONNX Runtime compute with, and tokenizers.
THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Share(NamedTuple):
    """What one worker gets of the machine.

    device: as the setting takes it; name: as node names bear it, cuda:2 or cpu:0; environment: what has to be set
    before torch is imported; processors: by the kernel's numbers, none where the worker may use any.
    """

    device: str
    name: str
    environment: dict[str, str]
    processors: frozenset[int] = frozenset()

    def node(self, name: str | None) -> str:
        """The node name of its worker. name: with or without @host; None: feedmill."""
        given, _, host = (name or "feedmill").partition("@")
        return f"{given}-{self.name}@{host or socket.gethostname()}"


def shares(wanted: str) -> list[Share]:
    """A share for each device that the setting `devices` names.

    Raises SettingsError where the machine does not have them, UserError where it cannot be told.
    """
    kind, _, number = wanted.partition(":")
    devices = [] if kind == "cpu" else _gpus(wanted)
    if not devices:
        devices = [Share("cpu", f"cpu:{index}", {}) for index in range(int(number or 1))]
    if len(devices) == 1:
        return devices  # it has the machine to itself
    cores = find_cores(PROCESSORS)
    if kind == "cpu" and len(devices) > len(cores):
        raise SettingsError(
            f"{PREFIX}DEVICES: {wanted} is wanted, but this process may use no more than {len(cores)} cores; workers "
            "that share one only wait for each other."
        )
    return [
        device._replace(environment=device.environment | _threads(threads), processors=processors)
        for device, (processors, threads) in zip(devices, divide(cores, len(devices)), strict=True)
    ]


def _gpus(wanted: str) -> list[Share]:
    """Those that are wanted, among those that torch sees."""
    there = _visible()
    if wanted == "all":
        chosen = there
    else:
        indices = [int(index) for index in wanted.split(",")]
        if missing := [index for index in indices if index >= len(there)]:
            raise SettingsError(
                f"{PREFIX}DEVICES: the GPU {missing[0]} is wanted, but torch sees {len(there)} CUDA devices here."
            )
        chosen = [there[index] for index in indices]
    return [Share("cuda", f"cuda:{gpu}", {VISIBLE: gpu}) for gpu in chosen]


def _visible() -> list[str]:
    """The GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them: by number, or by UUID."""
    if find_spec("torch") is None:
        raise UserError("A worker needs torch, which `pip install 'feedmill[worker]'` brings.")
    asked = subprocess.run([sys.executable, "-P", "-c", COUNT], capture_output=True, text=True, check=False)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:]
        raise UserError(f"How many GPUs there are cannot be told, since torch fails: {''.join(why):.300}")
    count = int(asked.stdout.split()[-1])
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",")][:count]
    return [str(index) for index in range(count)]


def find_cores(folder: Path) -> list[frozenset[int]]:
    """The processors that this process may use, by core; the cores of one package stand together."""
    found: dict[tuple[int, str], set[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        topology = folder / f"cpu{number}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            siblings = (topology / "thread_siblings_list").read_text()
        except (OSError, ValueError):  # a sandbox need not show them
            package, siblings = 0, str(number)
        found.setdefault((package, siblings), set()).add(number)
    return [frozenset(found[core]) for core in sorted(found, key=lambda core: core[0])]


def divide(cores: Sequence[frozenset[int]], workers: int) -> list[tuple[frozenset[int], int]]:
    """Each worker's processors, neighbours all, and of how many cores they are.

    Where there are fewer cores than workers, every worker may use them all, with one thread.
    """
    if len(cores) < workers:
        return [(frozenset(), 1)] * workers
    ends = [len(cores) * index // workers for index in range(workers + 1)]
    return [(frozenset().union(*cores[first:end]), end - first) for first, end in pairwise(ends)]


def _threads(count: int) -> dict[str, str]:
    """As many as cores, where nobody has set another number."""
    return {name: str(count) for name in THREADS if name not in os.environ}
