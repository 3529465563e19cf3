"""Fill a machine's GPUs: add workers to those that idle although messages wait.

`filling` decides; this module reads what it decides on: the notes of the workers, and the length
of the queue.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from redis.exceptions import RedisError

from feedmill.shared import worker_load
from feedmill.shared.broker import queue_depth
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.settings import PREFIX, Settings
from feedmill.shared.worker_load import WorkerLoad
from feedmill.stack import supervisor
from feedmill.stack.filling import (
    USABLE_MEMORY,
    Filling,
    Measurement,
    Observation,
    plan,
)
from feedmill.stack.supervisor import Share, Worker

logger = logging.getLogger(__name__)

#: Files of which a machine has one if it has a GPU and a driver: NVIDIA's, AMD's and Windows'.
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
#: Seconds between two looks at the workers.
CHECK_INTERVAL_S = 2.0
#: Seconds for which messages must have waited at every look.
WAITING_S = 10.0
#: Maximum tokenizer threads of a GPU's first worker, whose number of neighbours is unknown.
FIRST_THREADS = 4


def gpus_to_fill() -> list[str]:
    """Return this machine's GPUs, named as in CUDA_VISIBLE_DEVICES; none without a GPU.

    Raises UserError.
    """
    for path in DRIVERS:
        if path.exists():
            return supervisor.visible_gpus()
    return []  # counting GPUs imports torch, which takes seconds


class GpuWorkers:
    """The workers of one GPU. cpus, cores: CPUs for them, and how many cores these are.
    usable_memory: part of the GPU's memory for all of them.
    """

    def __init__(
        self,
        gpu: str,
        cpus: frozenset[int],
        cores: int,
        usable_memory: float,
    ) -> None:
        self._gpu = gpu
        self._cpus = cpus
        self._cores = cores
        self._usable_memory = usable_memory
        self._started = 0
        #: None until the first worker has reported its measurement.
        self._filling: Filling | None = None

    def first_share(self) -> Share:
        """Return the share of the worker that measures."""
        threads = min(FIRST_THREADS, self._cores)
        return self._share(
            threads=threads,
            variables={},
        )

    def more(
        self,
        workers: Sequence[Worker],
        has_waiting: Callable[[], bool],
        now: float,
    ) -> list[Share]:
        """Return the shares of the workers to add. workers: those of all GPUs."""
        loads: list[WorkerLoad] = []
        for worker in workers:
            if not self._is_own(worker.share):
                continue
            load = worker.load()
            if load is None or not worker.is_up():
                return []
            loads.append(load)
        if self._filling is None:
            first_load = loads[0]
            self._filling = self._begin(first_load, now)
        else:
            observation = _observe(loads, has_waiting)
            self._filling.observe(observation, now)
        missing = self._filling.workers - len(loads)
        if missing > 0:
            logger.info(
                "GPU %s: %d workers from now on (a post takes %.0f µs of the host and %.1f µs of "
                "the device)",
                self._gpu,
                self._filling.workers,
                self._filling.plan.host_us,
                self._filling.plan.device_us,
            )
        added: list[Share] = []
        for _ in range(missing):
            share = self._further_share(self._filling)
            added.append(share)
        return added

    def _is_own(self, share: Share) -> bool:
        variables = share.environment
        gpu = variables[supervisor.VISIBLE_DEVICES]
        return gpu == self._gpu

    def _begin(self, load: WorkerLoad, now: float) -> Filling:
        measurement = Measurement(
            host_us=load.host_us,
            device_us=load.device_us,
            memory_bytes=load.memory_bytes,
            total_memory_bytes=load.total_memory_bytes,
        )
        gpu_plan = plan(measurement, self._cores, self._usable_memory)
        logger.info(
            "GPU %s: at most %d workers, because of %s",
            self._gpu,
            gpu_plan.most,
            gpu_plan.limit,
        )
        return Filling(gpu_plan, now)

    def _further_share(self, filling: Filling) -> Share:
        most = filling.plan.most
        memory = self._usable_memory / most
        name = f"{PREFIX}DEVICE_MEMORY"
        value = f"{memory:.3f}"
        threads = self._cores // filling.workers
        return self._share(
            threads=max(1, threads),
            variables={name: value},
        )

    def _share(self, threads: int, variables: dict[str, str]) -> Share:
        name = f"cuda:{self._gpu}"
        if self._started:
            name += f"-{self._started}"
        self._started += 1
        own_variables = {
            supervisor.VISIBLE_DEVICES: self._gpu,
            worker_load.VARIABLE: "1",
        }
        threads_variables = supervisor.thread_variables(threads)
        environment = own_variables | threads_variables
        environment.update(variables)
        return Share(
            device="cuda",
            name=name,
            environment=environment,
            processors=self._cpus,
        )


def _observe(
    loads: Sequence[WorkerLoad], has_waiting: Callable[[], bool]
) -> Observation:
    """Return what a GPU's workers do together.

    Each counts the time from the start of a pass to its end, in which the GPU may also have
    computed for others: the sum is at least the GPU's own time.
    """
    device_busy = 0.0
    posts_per_s = 0.0
    for load in loads:
        device_busy += load.device_busy
        posts_per_s += load.posts_per_s
    return Observation(
        posts_per_s=posts_per_s,
        device_busy=min(1.0, device_busy),
        messages_wait=has_waiting(),
    )


class Filler:
    """The GPUs of this machine, filled with workers. clock: seconds of a monotonic clock."""

    def __init__(
        self,
        settings: Settings,
        gpus: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = settings.queue
        self._redis = connect_for_monitoring(settings)
        self._clock = clock
        self._checked_at = clock()
        #: Time since which messages wait; None if none waited at the latest look.
        self._waiting_since: float | None = None
        cores = supervisor.cores_by_package()
        gpu_count = len(gpus)
        parts = supervisor.divide(cores, gpu_count)
        # The user's limit is for all workers of a GPU together: others may use the rest.
        usable_memory = min(USABLE_MEMORY, settings.device_memory)
        self._gpus = []
        for gpu, (cpus, core_count) in zip(gpus, parts, strict=True):
            own_cpus = cpus
            if gpu_count == 1:
                own_cpus = frozenset()  # all
            workers = GpuWorkers(
                gpu,
                cpus=own_cpus,
                cores=core_count,
                usable_memory=usable_memory,
            )
            self._gpus.append(workers)

    def first_shares(self) -> list[Share]:
        """Return the share of a worker for each GPU."""
        first_shares: list[Share] = []
        for gpu in self._gpus:
            share = gpu.first_share()
            first_shares.append(share)
        return first_shares

    def more(self, workers: Sequence[Worker]) -> list[Share]:
        """Return the shares of the workers to add now. workers: those that were started.

        Asks Redis, for a second at most, every few seconds.
        """
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return []
        self._checked_at = now
        self._look_at_queue(now)
        added: list[Share] = []
        for gpu in self._gpus:
            added += gpu.more(workers, self._has_waiting, now)
        return added

    def _has_waiting(self) -> bool:
        """Return whether messages have waited for WAITING_S seconds."""
        since = self._waiting_since
        if since is None:
            return False
        waiting_s = self._checked_at - since
        return waiting_s >= WAITING_S

    def _look_at_queue(self, now: float) -> None:
        try:
            depth = queue_depth(self._redis, self._queue)
            is_waiting = depth.waiting > 0
        except RedisError as fault:
            logger.debug("cannot read the length of queue %s: %s", self._queue, fault)
            is_waiting = False
        if not is_waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
