"""Observe the running system (queues, workers, results, ingesting daemons) and check its health.

`status` takes a snapshot. `check_health` checks the health of each part from a snapshot.

Relies on this internal of kombu 5.7: `Mailbox.call` publishes on the mailbox' own connection if it
has no `producer_pool` (kombu/pidbox.py).
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
from feedmill.monitoring.gpus import Gpu, gpus_of
from feedmill.producers.live.state import Gaps, LiveStatus, statuses
from feedmill.shared.broker import (
    DEVICE_POOL,
    TRANSPORT_KEYS,
    QueueDepth,
    make_app,
    queue_depth,
)
from feedmill.shared.errors import RedisUnavailable
from feedmill.shared.keys import DEAD_LETTERS
from feedmill.shared.metrics import (
    RedisMemory,
    connect_for_monitoring,
    oldest_seconds,
    read_memory,
)
from feedmill.shared.model_routing import expected_workers, known_queues
from feedmill.shared.problems import (
    BOUNDS,
    DELAYED,
    EVICTION,
    FLOWER,
    FlowerReport,
    Problem,
    find_problems,
    flower_reports,
)
from feedmill.shared.redis_errors import rejects_writes, user_errors
from feedmill.shared.results import Counters, ResultsStore
from feedmill.shared.runs import Progress, recent
from feedmill.shared.settings import PREFIX, Settings
from feedmill.shared.unread_lists import UnreadList, find_unread_lists

#: Seconds to wait for a further answer: when no worker is registered, and for each registered one.
ANSWER_TIMEOUT_S = 1.0
REGISTERED_TIMEOUT_S = 3.0

#: kombu's attempts to connect before a remote-control command fails; by default, they take several
#: seconds.
CONNECTION_ATTEMPTS = {"max_retries": 1, "interval_start": 0.1}
#: Maximum number of runs in a snapshot.
RUNS_SHOWN = 5
#: Share of Redis' memory limit from which the health check fails, and how to need less.
FULL_SHARE = 0.95
MEMORY_ADVICE = f"raise maxmemory, or lower {PREFIX}RESULTS_MEMORY"
#: Shown in place of what cannot be read.
WORKERS_UNKNOWN = "unknown: workers cannot answer while Redis refuses writes"


class Queue(NamedTuple):
    """The state of one queue."""

    #: Model of the workers that serve the queue, or served it last; None if no worker has
    #: registered for it.
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
    #: Statistics of `DevicePool`, and the rate limits in force, by node name.
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
    #: Lists of messages that no worker reads, because of their sender's options.
    unread: list[UnreadList]
    #: Problems of Redis and of Flower.
    problems: list[Problem]
    #: The latest report of each Flower.
    flowers: dict[str, FlowerReport]

    def as_json(self) -> dict[str, Any]:
        queues: dict[str, dict[str, Any]] = {}
        for name, queue in self.queues.items():
            queues[name] = queue._asdict()
        runs = [run.to_dict() for run in self.runs]
        unread = [unread_list._asdict() for unread_list in self.unread]
        gpus: list[dict[str, Any]] = []
        for gpu in self.gpus:
            fields = gpu._asdict()
            gpus.append(fields)
        problems = [problem._asdict() for problem in self.problems]
        flowers = {name: report._asdict() for name, report in self.flowers.items()}
        return self._asdict() | {
            "gpus": gpus,
            "queue": self.queue._asdict(),
            "queues": queues,
            "results": self.results._asdict(),
            "memory": self.memory._asdict(),
            "runs": runs,
            "unread": unread,
            "problems": problems,
            "flowers": flowers,
        }

    @property
    def gpus(self) -> list[Gpu]:
        """The workers of each GPU together."""
        waiting_queues: list[str] = []
        for name, queue in self.queues.items():
            if queue.waiting:
                waiting_queues.append(name)
        return gpus_of(self.workers, waiting_queues)

    def problem_texts(self, *names: str) -> list[str]:
        """Return the texts of the problems with these names."""
        return [problem.text for problem in self.problems if problem.name in names]

    @property
    def memory_use(self) -> str:
        """Redis' memory, for display."""
        memory = self.memory
        used = decimal(memory.used)
        limit = decimal(memory.limit)
        text = f"{used} of {limit}"
        if memory.is_machine:
            return f"{text} (the machine's memory: maxmemory is not set)"
        return text


def status(redis: Redis, app: Celery | None, settings: Settings) -> Status:
    """Return a snapshot from Redis and all workers.

    Takes seconds if a registered worker does not answer.

    redis: client of `connect_for_monitoring`. app: None leaves out the workers. Raises
    redis.exceptions.RedisError.
    """
    redis.ping()  # fails soon if Redis does not answer; Celery's connections are patient
    # First, because it can take seconds: totals read before would be older than the figures of
    # workers and runs.
    workers: dict[str, dict[str, Any]] = {}
    can_ask = True
    try:
        if app:
            workers = current_workers(app, redis)
    except (ResponseError, OperationalError) as fault:
        if not rejects_writes(fault):  # the workers' answers are writes
            raise
        can_ask = False
    ages: dict[str, float] = {}
    if can_ask:
        ages = expected_workers(redis)
    missing = {node: age for node, age in ages.items() if node not in workers}
    store = ResultsStore(redis, settings)
    results = store.counters()
    runs = recent(redis, RUNS_SHOWN)
    dead_letters: Any = redis.xlen(DEAD_LETTERS)
    depth, queues = _queues(redis, settings)
    ages_of_oldest = [queue.oldest_seconds for queue in queues.values()]
    known_ages = [age for age in ages_of_oldest if age is not None]
    rates: list[float] = []
    for pool in workers.values():
        rate = pool["recent"]["posts_per_second"]
        rates.append(float(rate))
    memory = read_memory(redis)
    all_gaps = Gaps(redis)
    gaps = all_gaps.open()
    daemons = statuses(redis)
    live = {name: daemon.report for name, daemon in daemons.items() if daemon.running}
    return Status(
        queue=depth,
        queues=queues,
        workers=workers,
        results=results,
        results_per_second=sum(rates),
        live=live,
        oldest_seconds=max(known_ages, default=None),
        gaps=len(gaps),
        dead_letters=dead_letters,
        asked=can_ask,
        missing=missing,
        memory=memory,
        runs=runs,
        unread=find_unread_lists(redis, queues),
        problems=find_problems(redis, settings, memory, depth.delayed),
        flowers=flower_reports(redis),
    )


def _queues(redis: Redis, settings: Settings) -> tuple[QueueDepth, dict[str, Queue]]:
    """Return the depth of all queues together, and each queue: those known to Redis and the
    configured one.
    """
    models: dict[str, str | None] = {settings.queue: None}
    for name, served in known_queues(redis).items():
        models[name] = served.model
    depths = {name: queue_depth(redis, name) for name in models}
    queues: dict[str, Queue] = {}
    waiting = 0
    for name, depth in sorted(depths.items()):
        oldest = oldest_seconds(redis, name)
        queues[name] = Queue(
            model=models[name],
            waiting=depth.waiting,
            oldest_seconds=oldest,
        )
        waiting += depth.waiting
    # The other two count all queues, so they are the same for each.
    total = depths[settings.queue]._replace(waiting=waiting)
    return total, queues


def worker_statistics(
    app: Celery, nodes: list[str] | None = None, patience: float = ANSWER_TIMEOUT_S
) -> dict[str, dict[str, Any]]:
    """Return pool statistics and rate limits of Feedmill workers by node name, without other
    workers on the same Redis.

    nodes: workers to ask; the call returns once all have answered. None asks every worker and
    waits until no further answer has arrived for `patience` seconds.
    """
    answers = ask(app, "stats", nodes, patience)
    workers: dict[str, dict[str, Any]] = {}
    for node, answer in sorted(answers.items()):
        if not isinstance(answer, dict):
            continue
        pool = answer.get("pool")
        if not isinstance(pool, dict):
            continue
        if pool.get("implementation") != DEVICE_POOL:
            continue
        rate_limits = answer.get("rate_limits")
        if not isinstance(rate_limits, dict):  # absent in answers of earlier versions
            rate_limits = {}
        workers[node] = pool | {"rate_limits": rate_limits}
    return workers


def current_workers(app: Celery, redis: Redis) -> dict[str, dict[str, Any]]:
    """Return the pool statistics of all Feedmill workers by node name, once each registered one
    has answered.

    One that does not answer within REGISTERED_TIMEOUT_S is missing. Raises
    redis.exceptions.RedisError.
    """
    nodes = list(expected_workers(redis))
    if not nodes:
        return worker_statistics(app, None, ANSWER_TIMEOUT_S)
    return worker_statistics(app, nodes, REGISTERED_TIMEOUT_S)


def ask(
    app: Celery, command: str, nodes: list[str] | None, patience: float
) -> dict[str, Any]:
    """Send a remote-control command and return each node's answer. nodes, patience: see
    worker_statistics.
    """
    with app.connection_for_write(transport_options=CONNECTION_ATTEMPTS) as connection:
        control: Any = app.control
        mailbox = control.mailbox(connection)
        # Of the pool's connections, Redis may have closed some.
        mailbox.producer_pool = None
        answers = mailbox.call(nodes, command, timeout=patience)
    replies: dict[str, Any] = {}
    for answer in answers or []:
        replies.update(answer)
    return replies


class HealthPart(StrEnum):
    """A part of the system with its own health check."""

    REDIS = "redis"
    MEMORY = "memory"
    QUEUE = "queue"
    WORKERS = "workers"
    LIVE = "live"
    FLOWER = "flower"


class Condition(NamedTuple):
    """The condition of a part: True if it is healthy, and a sentence about its state."""

    well: bool
    said: str


class Finding(NamedTuple):
    """The result of a health check: the part, True if it is healthy, and a sentence about its
    state.
    """

    part: HealthPart
    well: bool
    said: str


def check_health(settings: Settings, parts: Collection[HealthPart]) -> list[Finding]:
    """Check the health of these parts. If Redis is unreachable, that is the only finding."""
    redis = connect_for_monitoring(settings)
    app: Celery | None = None
    if HealthPart.WORKERS in parts:
        app = make_app(settings)
    try:
        with user_errors(settings):
            snapshot = status(redis, app, settings)
            live = statuses(redis)
    except RedisUnavailable as error:
        return [
            Finding(
                part=HealthPart.REDIS,
                well=False,
                said=str(error),
            )
        ]
    answers = {
        HealthPart.REDIS: _writable(redis, settings),
        HealthPart.MEMORY: _memory(snapshot),
        HealthPart.QUEUE: _full(snapshot, settings),
        HealthPart.WORKERS: _workers(snapshot, settings),
        HealthPart.LIVE: _live(live),
        HealthPart.FLOWER: _flower(snapshot),
    }
    findings = []
    for part, condition in answers.items():
        if part not in parts:
            continue
        finding = Finding(
            part=part,
            well=condition.well,
            said=condition.said,
        )
        findings.append(finding)
    return findings


def _writable(redis: Redis, settings: Settings) -> Condition:
    """Test a write that changes nothing.

    At its memory limit, or as a replica, Redis refuses it.
    """
    try:
        with user_errors(settings):
            key = TRANSPORT_KEYS["reserved_index_key"]
            redis.zadd(key, {"": 0}, xx=True)
    except RedisUnavailable as error:
        return Condition(False, str(error))
    return Condition(True, f"Redis at {settings.redis_address} answers")


def _memory(snapshot: Status) -> Condition:
    """Check that Redis' memory is not nearly full, that it has room for the bounds of results, and
    that Redis evicts nothing.
    """
    problems = []
    memory = snapshot.memory
    full = FULL_SHARE * memory.limit
    if memory.used >= full:
        problems.append(MEMORY_ADVICE)
    problems += snapshot.problem_texts(EVICTION)
    bounds = snapshot.problem_texts(BOUNDS)
    if not memory.is_machine:
        problems += bounds
    if not problems:
        # Without maxmemory, nothing is refused yet; a small machine has too little for the default
        # bounds, whether it ever reaches them or not.
        notes = "; ".join([snapshot.memory_use, *bounds])
        return Condition(True, notes)
    listed = "; ".join(problems)
    return Condition(False, f"{snapshot.memory_use}: {listed}")


def _full(snapshot: Status, settings: Settings) -> Condition:
    """Check that no queue is longer than `queue_limit`, that workers read all messages, and that
    not too many are due later.
    """
    problems = [*map(str, snapshot.unread), *snapshot.problem_texts(DELAYED)]
    if problems:
        return Condition(False, "; ".join(problems))
    limit = settings.queue_limit
    are_short = True
    counts: list[str] = []
    for name, queue in snapshot.queues.items():
        counts.append(f"{name}: {queue.waiting:,}")
        if queue.waiting > limit:
            are_short = False
    listed = ", ".join(counts)
    total = snapshot.queue
    text = (
        f"{total.waiting:,} messages waiting ({listed}), limit {limit:,} per queue; "
        f"{total.held:,} in flight"
    )
    return Condition(are_short, text)


def _workers(snapshot: Status, settings: Settings) -> Condition:
    """Check that at least one worker answers, that all expected ones do, and that none is stuck.

    A worker whose rows wait longer than `forward_timeout` should have exited.
    """
    if not snapshot.asked:
        return Condition(False, WORKERS_UNKNOWN)
    problems = []
    for node, age in snapshot.missing.items():
        since_report = span(age)
        problems.append(f"{node} does not answer (last report {since_report} ago)")
    for node, pool in snapshot.workers.items():
        row_age = pool["oldest_row_seconds"]
        if row_age > settings.forward_timeout:
            problems.append(f"{node} is stuck (a row has waited for {row_age:.0f} s)")
    answering = ", ".join(snapshot.workers)
    if problems:
        listed = "; ".join(problems)
        advice = "Check the worker's log, or restart the worker"
        return Condition(False, f"{listed}. {advice}. Answering: {answering or 'none'}")
    if not answering:
        return Condition(False, "none answers: start one with `feedmill worker`")
    return Condition(True, answering)


def _flower(snapshot: Status) -> Condition:
    """Check that each Flower that runs hears events."""
    problems = snapshot.problem_texts(FLOWER)
    if problems:
        return Condition(False, "; ".join(problems))
    if not snapshot.flowers:
        return Condition(True, "none runs")
    names = ", ".join(snapshot.flowers)
    return Condition(True, f"{names} hears events")


def _live(daemons: dict[str, LiveStatus]) -> Condition:
    """Check the daemons of live sources that ran in the last week.

    Each still reports its status, unless it was stopped, and has read something, unless nothing
    has failed yet. A source that fails later does not count as a failed daemon.
    """
    if not daemons:
        return Condition(True, "not in use; `feedmill ingest` starts a daemon")
    states = []
    are_well = True
    for name, daemon in daemons.items():
        state = _state(daemon)
        states.append(f"{name}: {state}")
        are_well = are_well and _is_well(daemon)
    return Condition(are_well, "; ".join(states))


def _is_well(daemon: LiveStatus) -> bool:
    if not daemon.running:
        return daemon.ended
    if daemon.report["read"]:
        return True
    return not daemon.report["hindrance"]


def _state(status: LiveStatus) -> str:
    """Describe the state of a source's daemon."""
    if status.ended:
        return "stopped"
    if not status.running:
        since_report = span(status.age)
        return f"no report for {since_report}; start it again with `feedmill ingest`"
    report = status.report
    state = str(report["hindrance"])
    if not state:
        state = "nothing read yet"
        if report["read"]:
            state = "reading"
    clock = report.get("clock")
    if not clock:
        return state
    return f"{state} ({clock})"
