"""Summarize the workers of each GPU, for `feedmill status` and Flower."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from feedmill.console import counted
from feedmill.stack.filling import is_host_bound

#: Beginning of the name of a GPU as a device.
CUDA = "cuda:"


class Gpu(NamedTuple):
    """The workers of one GPU, or of several that share a model."""

    #: Machine, and number of the GPU there, such as 0, or 2+3.
    host: str
    number: str
    #: Node names of the workers.
    nodes: tuple[str, ...]
    #: Share of the time that the GPU computes, and posts per second of all its workers.
    device_busy: float
    posts_per_second: float
    #: True if the GPU idles although messages wait: its workers' other work is the limit.
    host_bound: bool

    def line(self, names_host: bool) -> str:
        """Return the summary as a line. names_host: say on which machine."""
        name = f"GPU {self.number}"
        if names_host:
            name += f" of {self.host}"
        workers = counted(len(self.nodes), "worker")
        answer = "no"
        if self.host_bound:
            answer = "yes"
        return f"{name}: {workers}, device busy {self.device_busy:.2f}, host-bound: {answer}"


def gpus_of(
    workers: Mapping[str, Mapping[str, Any]], waiting_queues: Collection[str]
) -> list[Gpu]:
    """Return the GPUs of these workers. workers: pool statistics by node name. waiting_queues:
    the queues in which messages wait.
    """
    pools_by_gpu: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for node, pool in workers.items():
        description = str(pool["device"])
        device, _, _ = description.partition(" ")
        name = device.rstrip(":")
        if not name.startswith(CUDA):
            continue
        _, _, host = node.rpartition("@")
        number = name.removeprefix(CUDA)
        pools = pools_by_gpu.setdefault((host, number), {})
        pools[node] = pool
    gpus: list[Gpu] = []
    for (host, number), pools in sorted(pools_by_gpu.items(), key=_host_and_number):
        gpu = _summary(host, number, pools, waiting_queues)
        gpus.append(gpu)
    return gpus


def _host_and_number(
    entry: tuple[tuple[str, str], object],
) -> tuple[str, list[tuple[int, str]]]:
    """Return a key that sorts GPUs by host, then by number: 2, 2+3, 10."""
    (host, number), _ = entry
    # Shorter numbers are smaller.
    parts = [(len(part), part) for part in number.split("+")]
    return host, parts


def _summary(
    host: str,
    number: str,
    pools: Mapping[str, Mapping[str, Any]],
    waiting_queues: Collection[str],
) -> Gpu:
    busy = 0.0
    posts_per_second = 0.0
    messages_wait = False
    for pool in pools.values():
        recent = pool["recent"]
        busy += float(recent["device_busy"])
        posts_per_second += float(recent["posts_per_second"])
        own_queues = set(pool["queues"])
        if not own_queues.isdisjoint(waiting_queues):
            messages_wait = True
    # Passes of several processes may overlap, because the GPU divides its time among them.
    device_busy = min(1.0, busy)
    return Gpu(
        host=host,
        number=number,
        nodes=tuple(pools),
        device_busy=device_busy,
        posts_per_second=posts_per_second,
        host_bound=is_host_bound(device_busy, messages_wait),
    )


def gpu_lines(gpus: Collection[Gpu]) -> list[str]:
    """Return a line for each GPU, with its machine if there are several machines."""
    hosts = {gpu.host for gpu in gpus}
    names_host = len(hosts) > 1
    lines: list[str] = []
    for gpu in gpus:
        line = gpu.line(names_host)
        lines.append(line)
    return lines
