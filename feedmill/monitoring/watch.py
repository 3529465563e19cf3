"""Observe the running system (queues, workers, results, ingesting daemons) and check its health.

`status` takes a snapshot. `check_health` checks the health of each part from a snapshot.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import ResponseError
from rich.filesize import decimal

from feedmill.console import span
from feedmill.producers.live.state import Gaps, LiveStatus, statuses
from feedmill.shared.broker import TRANSPORT_KEYS, QueueDepth, make_app, queue_depth
from feedmill.shared.errors import RedisUnavailable
from feedmill.shared.keys import DEAD_LETTERS
from feedmill.shared.metrics import RedisMemory, connect_for_monitoring, oldest_seconds, read_memory
from feedmill.shared.model_routing import expected_workers, known_queues
from feedmill.shared.redis_errors import rejects_writes, user_errors
from feedmill.shared.results import Counters, ResultsStore
from feedmill.shared.runs import Progress, recent
from feedmill.shared.settings import PREFIX, Settings

#: Seconds to wait for a further answer: when no worker is registered, and for each registered one.
ANSWER_TIMEOUT_S, REGISTERED_TIMEOUT_S = 1.0, 3.0

#: Maximum number of runs in a snapshot.
RUNS_SHOWN = 5
#: Celery's name for the pool of Feedmill workers.
FEEDMILL_POOL = "feedmill.workers.runtime.pool:DevicePool"
#: Share of Redis' memory limit from which the health check fails, and how to need less.
FULL_SHARE = 0.95
MEMORY_ADVICE = f"raise maxmemory, or lower {PREFIX}RESULTS_MEMORY"
#: Shown in place of what cannot be read.
WORKERS_UNKNOWN = "unknown: workers cannot answer while Redis refuses writes"


class Queue(NamedTuple):
    """The state of one queue."""

    #: Model of the workers that serve the queue, or served it last; None if no worker has registered for it.
    model: str | None
    #: Number of waiting messages.
    waiting: int
    #: Age of the oldest waiting message in seconds; None if the queue is empty.
    oldest_seconds: float | None


class Status(NamedTuple):
    """A snapshot of the whole system."""

    #: Depth of all queues together.
    queue: QueueDepth
    #: Queues by name.
    queues: dict[str, Queue]
    #: Statistics of `DevicePool` by node name.
    workers: dict[str, dict[str, Any]]
    results: Counters
    #: Recent throughput of all workers together.
    results_per_second: float
    #: Status report of the daemon of each live source that runs, by the source's name.
    live: dict[str, dict[str, Any]]
    #: Age of the oldest waiting message over all queues in seconds; None if all are empty.
    oldest_seconds: float | None
    #: Number of recorded gaps: periods whose posts could not be read from Reddit or a live source.
    gaps: int
    #: Number of dead letters.
    dead_letters: int
    #: False if the workers could not be asked, because Redis refuses the writes of their answers.
    asked: bool
    #: Expected workers that did not answer, each with the seconds since its last sign of life.
    missing: dict[str, float]
    memory: RedisMemory
    #: The most recently active runs, newest first.
    runs: list[Progress]

    def as_json(self) -> dict[str, Any]:
        queues = {name: queue._asdict() for name, queue in self.queues.items()}
        fields = self._asdict() | {"queue": self.queue._asdict(), "queues": queues, "results": self.results._asdict()}
        return fields | {"memory": self.memory._asdict(), "runs": [run.as_json() for run in self.runs]}

    @property
    def memory_use(self) -> str:
        """Redis' memory, for display."""
        note = " (the machine's memory: maxmemory is not set)" if self.memory.is_machine else ""
        return f"{decimal(self.memory.used)} of {decimal(self.memory.limit)}{note}"


def status(redis: Redis, app: Celery | None, settings: Settings) -> Status:
    """Return a snapshot from Redis and all workers. Takes seconds if a registered worker does not answer.

    redis: client of `connect_for_monitoring`. app: None leaves out the workers. Raises redis.exceptions.RedisError.
    """
    redis.ping()  # fails soon if Redis does not answer; Celery's connections are patient
    # First, because it can take seconds: totals read before would be older than the figures of workers and runs.
    workers, asked = {}, True
    try:
        workers = current_workers(app, redis) if app else {}
    except (ResponseError, OperationalError) as fault:
        if not rejects_writes(fault):  # the workers' answers are writes
            raise
        asked = False
    missing = {node: age for node, age in expected_workers(redis).items() if asked and node not in workers}
    results, runs = ResultsStore(redis, settings).counters(), recent(redis, RUNS_SHOWN)
    dead: Any = redis.xlen(DEAD_LETTERS)
    depth, queues = _queues(redis, settings)
    oldest = max((queue.oldest_seconds for queue in queues.values() if queue.oldest_seconds is not None), default=None)
    rate = sum(float(pool["recent"]["posts_per_second"]) for pool in workers.values())
    memory = read_memory(redis)
    gaps = len(Gaps(redis).open())
    live = {name: found.report for name, found in statuses(redis).items() if found.running}
    return Status(depth, queues, workers, results, rate, live, oldest, gaps, dead, asked, missing, memory, runs)


def _queues(redis: Redis, settings: Settings) -> tuple[QueueDepth, dict[str, Queue]]:
    """Return the depth of all queues together, and each queue: those known to Redis and the configured one."""
    found = {settings.queue: None} | {name: served.model for name, served in known_queues(redis).items()}
    depths = {name: queue_depth(redis, name) for name in found}
    queues = {
        name: Queue(found[name], depth.waiting, oldest_seconds(redis, name)) for name, depth in sorted(depths.items())
    }
    held = depths[settings.queue].held  # `held` counts all queues, so it is the same for each
    return QueueDepth(sum(queue.waiting for queue in queues.values()), held), queues


def worker_statistics(
    app: Celery, nodes: list[str] | None = None, patience: float = ANSWER_TIMEOUT_S
) -> dict[str, dict[str, Any]]:
    """Return the pool statistics of Feedmill workers by node name, ignoring other Celery workers on the same Redis.

    nodes: workers to ask; the call returns once all have answered. None asks every worker and waits until no further
    answer has arrived for `patience` seconds.
    """
    answers = ask(app, "stats", nodes, patience)
    pools = {node: answer.get("pool") for node, answer in sorted(answers.items()) if isinstance(answer, dict)}
    return {
        node: pool
        for node, pool in pools.items()
        if isinstance(pool, dict) and pool.get("implementation") == FEEDMILL_POOL
    }


def current_workers(app: Celery, redis: Redis) -> dict[str, dict[str, Any]]:
    """Return the pool statistics of all Feedmill workers by node name, once each registered one has answered.

    One that does not answer within REGISTERED_TIMEOUT_S is missing. Raises redis.exceptions.RedisError.
    """
    nodes = list(expected_workers(redis))
    return worker_statistics(app, nodes or None, REGISTERED_TIMEOUT_S if nodes else ANSWER_TIMEOUT_S)


def ask(app: Celery, command: str, nodes: list[str] | None, patience: float) -> dict[str, Any]:
    """Send a remote-control command and return each node's answer. nodes, patience: see worker_statistics."""
    with app.connection_for_write() as connection:  # of the pool's connections, Redis may have closed some
        answers = app.control.broadcast(command, destination=nodes, reply=True, timeout=patience, connection=connection)
    return {node: reply for answer in answers or [] for node, reply in answer.items()}


class HealthPart(StrEnum):
    """A part of the system with its own health check."""

    REDIS = "redis"
    MEMORY = "memory"
    QUEUE = "queue"
    WORKERS = "workers"
    LIVE = "live"


class Finding(NamedTuple):
    """The result of a health check: the part, True if it is healthy, and a sentence about its state."""

    part: HealthPart
    well: bool
    said: str


def check_health(settings: Settings, parts: Collection[HealthPart]) -> list[Finding]:
    """Check the health of these parts. If Redis is unreachable, that is the only finding."""
    redis = connect_for_monitoring(settings)
    try:
        with user_errors(settings):
            seen = status(redis, make_app(settings) if HealthPart.WORKERS in parts else None, settings)
            live = statuses(redis)
    except RedisUnavailable as error:
        return [Finding(HealthPart.REDIS, False, str(error))]
    found = {
        HealthPart.REDIS: _writable(redis, settings),
        HealthPart.MEMORY: _memory(seen),
        HealthPart.QUEUE: _full(seen, settings),
        HealthPart.WORKERS: _workers(seen, settings),
        HealthPart.LIVE: _live(live),
    }
    return [Finding(part, *found[part]) for part in HealthPart if part in parts]


def _writable(redis: Redis, settings: Settings) -> tuple[bool, str]:
    """Test a write that changes nothing. At its memory limit, or as a replica, Redis refuses it."""
    try:
        with user_errors(settings):
            redis.zadd(TRANSPORT_KEYS["reserved_index_key"], {"": 0}, xx=True)
    except RedisUnavailable as error:
        return False, str(error)
    return True, f"Redis at {settings.redis_address} answers"


def _memory(seen: Status) -> tuple[bool, str]:
    """Check that Redis' memory is not nearly full."""
    is_full = seen.memory.used >= FULL_SHARE * seen.memory.limit
    return not is_full, f"{seen.memory_use}: {MEMORY_ADVICE}" if is_full else seen.memory_use


def _full(seen: Status, settings: Settings) -> tuple[bool, str]:
    """Check that no queue is longer than `queue_limit`."""
    each = ", ".join(f"{name}: {queue.waiting:,}" for name, queue in seen.queues.items())
    limit = f"limit {settings.queue_limit:,} per queue"
    text = f"{seen.queue.waiting:,} messages waiting ({each}), {limit}; {seen.queue.held:,} in flight"
    return all(queue.waiting <= settings.queue_limit for queue in seen.queues.values()), text


def _workers(seen: Status, settings: Settings) -> tuple[bool, str]:
    """Check that at least one worker answers, that all expected ones do, and that none is stuck.

    A worker whose rows wait longer than `forward_timeout` should have exited.
    """
    if not seen.asked:
        return False, WORKERS_UNKNOWN
    problems = [f"{node} does not answer (last report {span(age)} ago)" for node, age in seen.missing.items()]
    for node, pool in seen.workers.items():
        if pool["oldest_row_seconds"] > settings.forward_timeout:
            problems.append(f"{node} is stuck (a row has waited for {pool['oldest_row_seconds']:.0f} s)")
    answering = ", ".join(seen.workers)
    if problems:
        advice = "Check the worker's log, or restart the worker"
        return False, f"{'; '.join(problems)}. {advice}. Answering: {answering or 'none'}"
    return bool(answering), answering or "none answers: start one with `feedmill worker`"


def _live(known: dict[str, LiveStatus]) -> tuple[bool, str]:
    """Check the daemons of live sources that ran in the last week.

    Each still reports its status, unless it was stopped, and has read something, unless nothing has failed yet. A
    source that fails later does not count as a failed daemon.
    """
    if not known:
        return True, "not in use; `feedmill ingest` starts a daemon"
    said = [f"{name}: {_state(status)}" for name, status in known.items()]
    running = [status.report for status in known.values() if status.running]
    well = all(status.running or status.ended for status in known.values())
    return well and all(report["read"] or not report["hindrance"] for report in running), "; ".join(said)


def _state(status: LiveStatus) -> str:
    """Describe the state of a source's daemon."""
    if status.ended:
        return "stopped"
    if not status.running:
        return f"no report for {span(status.age)}; start it again with `feedmill ingest`"
    return str(status.report["hindrance"]) or ("reading" if status.report["read"] else "nothing read yet")
