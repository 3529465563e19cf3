"""Decide how many workers a GPU gets, from measured figures. Starts and reads nothing.

One worker process is limited by Python's global interpreter lock: a small model's GPU waits for
it. `plan` says how many workers a GPU may get, and with how many it begins, from what the first
worker measured at its start. `Filling` adds more while the device idles although messages wait,
for as long as each addition raises the throughput. It never removes one: an idle worker costs
memory alone.
"""

import math
from typing import NamedTuple

#: Microseconds of a worker's CPU time per post beside what it measures at its start: to reserve,
#: read, look up, store and acknowledge it, at 32 posts per message (docs/scaling.md).
MESSAGE_US = 67.0
#: Cores that workers leave to Redis, the driver and everything else.
OTHER_CORES = 1
#: Maximum workers on one GPU, and at first. Redis' core is the limit for a small model, and each
#: further worker has to show a gain.
MAX_WORKERS = 16
FIRST_WORKERS = 4
#: Bytes of GPU memory that a worker takes beside torch's: its CUDA context.
CONTEXT_BYTES = 600_000_000
#: Factor on measured memory, for micro-batches of other shapes.
MEMORY_MARGIN = 1.5
#: Maximum part of a GPU's memory that workers divide among themselves. The rest is for their CUDA
#: contexts, which torch's limit does not include.
USABLE_MEMORY = 0.9
#: Share of the time from which a device counts as busy.
BUSY = 0.95
#: Share of the time below which the host limits a device while messages wait.
HOST_BOUND_BUSY = 0.9
#: Factor by which further workers must raise the throughput. Otherwise no more are tried for
#: PAUSE_S seconds.
MIN_GAIN = 1.05
PAUSE_S = 600.0
#: Seconds between a change and the next decision: longer than the workers' rates look back.
STEADY_S = 15.0


class Measurement(NamedTuple):
    """Figures of a GPU's first worker, measured before it takes messages."""

    #: Microseconds per post: of the worker's CPU time without messages, and of device time.
    host_us: float
    device_us: float
    #: Bytes of the GPU's memory: those that the worker takes, and all; 0 if unknown.
    memory_bytes: float
    total_memory_bytes: float


class Plan(NamedTuple):
    """A GPU's number of workers."""

    #: Number to begin with.
    first: int
    #: Maximum, and what limits it: the device, the cores, the memory or MAX_WORKERS.
    most: int
    limit: str
    #: Microseconds of a post on the host and on the device, for the log.
    host_us: float
    device_us: float


def plan(
    measurement: Measurement, cores: int, usable_memory: float = USABLE_MEMORY
) -> Plan:
    """Return how many workers a GPU gets. cores: those for this GPU's workers, with OTHER_CORES.
    usable_memory: part of the GPU's memory that they divide among themselves.

    A device that a single worker's host can fill may get more later, up to the limits of cores and
    memory: the cost of messages is estimated.
    """
    host_us = measurement.host_us + MESSAGE_US
    limits = {
        "at most": MAX_WORKERS,
        "cores": max(1, cores - OTHER_CORES),
        "memory": _fitting(measurement, usable_memory),
    }
    limit = min(limits, key=limits.__getitem__)
    most = limits[limit]
    needed = MAX_WORKERS
    if measurement.device_us > 0:
        share = host_us / measurement.device_us
        needed = math.ceil(min(share, MAX_WORKERS))
    return Plan(
        first=max(1, min(needed, FIRST_WORKERS, most)),
        most=most,
        limit=limit,
        host_us=host_us,
        device_us=measurement.device_us,
    )


def _fitting(measurement: Measurement, usable_memory: float) -> int:
    """Return how many workers fit into the GPU's memory; at least the one that runs."""
    if not measurement.total_memory_bytes:
        return MAX_WORKERS
    usable = usable_memory * measurement.total_memory_bytes
    for_torch = MEMORY_MARGIN * measurement.memory_bytes
    per_worker = for_torch + CONTEXT_BYTES
    count = usable / per_worker
    fitting = min(count, MAX_WORKERS)
    return max(1, int(fitting))


class Observation(NamedTuple):
    """The rates of a GPU's workers together."""

    #: Recent posts per second, and share of the time that the device computed.
    posts_per_s: float
    device_busy: float
    #: True if messages have waited in the queue for a while.
    messages_wait: bool


def is_host_bound(device_busy: float, messages_wait: bool) -> bool:
    """Return whether the host keeps a device from computing more."""
    return messages_wait and device_busy < HOST_BOUND_BUSY


class Filling:
    """The number of workers of one GPU over time. now: seconds of a monotonic clock."""

    def __init__(self, plan: Plan, now: float) -> None:
        self.plan = plan
        #: Number of workers to run.
        self.workers = plan.first
        self._changed_at = now
        #: Posts per second before the latest addition; None if it was judged.
        self._rate_before: float | None = None
        self._paused_until = now

    def observe(self, observation: Observation, now: float) -> int:
        """Return how many workers to run, given what all of them do together.

        Call it only while all of them are ready.
        """
        steady_s = now - self._changed_at
        if steady_s < STEADY_S:
            return self.workers
        if not observation.messages_wait:
            return self.workers
        if observation.device_busy >= BUSY:
            return self.workers
        if not self._has_gained(observation):
            self._paused_until = now + PAUSE_S
        if now < self._paused_until:
            return self.workers
        if self.workers >= self.plan.most:
            return self.workers
        self._rate_before = observation.posts_per_s
        self._changed_at = now
        self.workers = self._next(observation.device_busy)
        return self.workers

    def _has_gained(self, observation: Observation) -> bool:
        """Return False if the latest addition has not raised the throughput. Judge it once."""
        before = self._rate_before
        self._rate_before = None
        if before is None:
            return True
        expected = MIN_GAIN * before
        return observation.posts_per_s >= expected

    def _next(self, device_busy: float) -> int:
        """Return the next number of workers: in proportion to the idle time, at most twice as
        many.
        """
        twice = 2 * self.workers
        proportional = twice
        if device_busy > 0:
            needed = self.workers * BUSY / device_busy
            proportional = math.ceil(min(needed, twice))
        more = max(self.workers + 1, proportional)
        return min(more, twice, self.plan.most)
