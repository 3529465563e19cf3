"""What the running system says of itself (queue, workers, results, Reddit daemon), and whether it is well.

`status` looks once. `Lookout` looks again and again, and knows how fast things go in between. `examine` says of each
thing whether it is as it should be.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import ResponseError

from feedmill import capacity
from feedmill.capacity import CRITICAL_S, WARNING_S, Memory
from producers.reddit.state import STATUS_TTL, State
from shared.broker import HELD, QueueDepth, connect, make_app, queue_depth, told_plainly
from shared.dead import DeadLetters
from shared.errors import RedisError
from shared.keys import REDDIT_BEGINNINGS, REDDIT_GAPS
from shared.metrics import connect_briefly, oldest_seconds
from shared.refusals import takes_no_writes
from shared.results import Counters, ResultsStore
from shared.serving import expected, known
from shared.settings import Settings

#: Seconds over which rates are taken while somebody watches.
PACE = 60.0
#: Seconds without a further answer after which no more workers are waited for: where all are asked, and where it is
#: known who is to answer.
PATIENCE, HEALTH_PATIENCE = 1.0, 3.0

#: What Celery calls the pool of our workers.
OURS = "workers.pool:DevicePool"


class Queue(NamedTuple):
    """One of the queues."""

    #: The model that workers serve it with, or served it last; None where none has said so.
    model: str | None
    #: Messages.
    waiting: int
    #: Age of the message that was sent first; None where none waits.
    oldest_seconds: float | None


class Status(NamedTuple):
    """One look at the whole system; `workers` by node name, as `DevicePool` reports them."""

    #: Of all queues together.
    queue: QueueDepth
    #: By name.
    queues: dict[str, Queue]
    workers: dict[str, dict[str, Any]]
    results: Counters
    #: What the Reddit daemon says of itself; None where none runs.
    reddit: dict[str, Any] | None
    #: Age of the waiting message that was sent first, of all queues; None where none waits.
    oldest_seconds: float | None
    #: Times of which posts were out of reach, that nobody has cleared.
    gaps: int
    #: Dead letters that are there, and what was no message.
    dead_letters: int
    #: Whether workers could be asked: not while Redis takes no writes, since their answers go through it.
    asked: bool
    #: Workers that should have answered and did not, each with the seconds since it was alive last.
    missing: dict[str, float]
    #: None where Redis does not let this user ask.
    memory: Memory | None

    def as_json(self) -> dict[str, Any]:
        queues = {name: queue._asdict() for name, queue in self.queues.items()}
        memory = self.memory and self.memory._asdict()
        said = self._asdict() | {"queue": self.queue._asdict(), "queues": queues, "results": self.results._asdict()}
        return said | {"memory": memory}


def status(settings: Settings) -> Status:
    """Ask Redis and every worker, for about a second at most. Raises redis.exceptions.RedisError."""
    return _look(connect(settings), make_app(settings), settings)


def _look(redis: Redis, app: Celery, settings: Settings) -> Status:
    depth, queues = _queues(redis, settings)
    oldest = max((queue.oldest_seconds for queue in queues.values() if queue.oldest_seconds is not None), default=None)
    results = ResultsStore(redis, settings).counters()
    gaps: Any = redis.hlen(REDDIT_GAPS)
    dead = DeadLetters(redis).count()
    workers = _ask(app)
    missing = _missing(redis, workers)
    memory = capacity.look(redis, settings, _rate(workers))
    told = State(redis).told()
    asked = workers is not None
    return Status(depth, queues, workers or {}, results, told, oldest, gaps, dead, asked, missing, memory)


def _queues(redis: Redis, settings: Settings) -> tuple[QueueDepth, dict[str, Queue]]:
    """What waits and is held of all queues together, and each of them: the known ones, and this process's own."""
    found = {settings.queue: None} | {name: served.model for name, served in known(redis).items()}
    depths = {name: queue_depth(redis, name) for name in found}
    queues = {
        name: Queue(found[name], depth.waiting, oldest_seconds(redis, name)) for name, depth in sorted(depths.items())
    }
    held = depths[settings.queue].held  # of any queue
    return QueueDepth(sum(queue.waiting for queue in queues.values()), held), queues


def worker_statistics(
    app: Celery, nodes: list[str] | None = None, patience: float = PATIENCE
) -> dict[str, dict[str, Any]]:
    """What each of our workers' pools says of itself, by node name; other Celery workers may share the Redis.

    nodes: who is asked, which ends as soon as all have answered; None: everybody, which ends after `patience`, seconds
    without a further answer.
    """
    answers = ask(app, "stats", nodes, patience)
    pools = {node: answer.get("pool") for node, answer in sorted(answers.items()) if isinstance(answer, dict)}
    return {node: pool for node, pool in pools.items() if isinstance(pool, dict) and pool.get("implementation") == OURS}


class _AllAnsweredError(Exception):
    """Ends the wait for answers."""


def ask(app: Celery, command: str, nodes: list[str] | None, patience: float) -> dict[str, Any]:
    """Send a remote command; return the first answer by each node's name. nodes, patience: see worker_statistics.

    Celery's own `limit` counts answers: two workers of one name would end the wait for a third.
    """
    answers: dict[str, Any] = {}

    def hear(answer: dict[str, Any]) -> None:
        answers.update({node: said for node, said in answer.items() if node not in answers})
        if nodes and answers.keys() >= set(nodes):
            raise _AllAnsweredError

    with suppress(_AllAnsweredError):
        # limit=0: none; kombu takes None for the number of nodes.
        app.control.broadcast(command, destination=nodes, reply=True, timeout=patience, limit=0, callback=hear)
    return answers


def _ask(app: Celery, nodes: list[str] | None = None) -> dict[str, dict[str, Any]] | None:
    """Return what these workers, or all, say of themselves; None while Redis takes no writes, and so no answers."""
    try:
        return worker_statistics(app, nodes, HEALTH_PATIENCE if nodes else PATIENCE)
    except (ResponseError, OperationalError) as fault:
        if takes_no_writes(fault):
            return None
        raise


def _missing(redis: Redis, workers: dict[str, dict[str, Any]] | None) -> dict[str, float]:
    """Return the workers that should have answered and did not."""
    return {} if workers is None else {node: age for node, age in expected(redis).items() if node not in workers}


def _rate(workers: dict[str, dict[str, Any]] | None) -> float:
    """Return the posts that workers classify each second, lately."""
    return sum(float(pool["recent"]["posts_per_second"]) for pool in (workers or {}).values())


class Pace:
    """How fast a count grew lately, from looks at it."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque()

    def look(self, count: float, now: float) -> float | None:
        """What it grew by each second, over the last PACE seconds; None at the first look, or after it fell."""
        if self._looks and count < self._looks[-1][1]:
            self._looks.clear()  # another worker bears the name now, or the store is a new one
        self._looks.append((now, count))
        while now - self._looks[0][0] > PACE:
            self._looks.popleft()
        since, before = self._looks[0]
        return (count - before) / (now - since) if now > since else None


class Seen(NamedTuple):
    """A look, with what came of the looks before; None, or a node that is missing: not known yet."""

    status: Status
    #: Results a second.
    results: float | None
    #: By worker: posts a second, and the share of the time in which its device computed.
    posts: dict[str, float]
    busy: dict[str, float]


class Lookout:
    """Looks at one system again and again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_briefly(settings)
        self._app = make_app(settings)
        self._results = Pace()
        self._posts: dict[str, Pace] = {}
        self._busy: dict[str, Pace] = {}

    def look(self) -> Seen:
        """Ask Redis and every worker, for about a second. Raises redis.exceptions.RedisError."""
        found = _look(self._redis, self._app, self._settings)
        now = time.monotonic()
        return Seen(
            found,
            self._results.look(found.results.stored, now),
            _paces(self._posts, {node: pool["posts"] for node, pool in found.workers.items()}, now),
            _paces(self._busy, {node: pool["device_seconds"] for node, pool in found.workers.items()}, now),
        )


def _paces(paces: dict[str, Pace], counts: dict[str, float], now: float) -> dict[str, float]:
    """How fast each of the counts grew; those that are gone are forgotten."""
    for gone in paces.keys() - counts.keys():
        del paces[gone]
    found = {name: paces.setdefault(name, Pace()).look(count, now) for name, count in counts.items()}
    return {name: pace for name, pace in found.items() if pace is not None}


class Part(StrEnum):
    """What can be well or not."""

    REDIS = "redis"
    MEMORY = "memory"
    QUEUE = "queue"
    WORKERS = "workers"
    ROWS = "rows"
    REDDIT = "reddit"


class Finding(NamedTuple):
    """Whether a part is well, and a sentence about it."""

    part: Part
    well: bool
    said: str


def examine(settings: Settings, parts: Collection[Part]) -> Iterator[Finding]:
    """Whether these parts are well. Without Redis nothing is known of the others: then it is the only finding."""
    redis = connect_briefly(settings)
    try:
        with told_plainly(settings):
            redis.ping()
            depth, queues = _queues(redis, settings)
            told, ever = State(redis).told(), bool(redis.exists(REDDIT_BEGINNINGS))
            wanted = not {Part.WORKERS, Part.ROWS, Part.MEMORY}.isdisjoint(parts)
            # By name, where names are known: then nothing is waited for once all have answered.
            workers = _ask(make_app(settings), list(expected(redis)) or None) if wanted else {}
            missing = _missing(redis, workers)
            memory = capacity.look(redis, settings, _rate(workers)) if Part.MEMORY in parts else None
    except RedisError as error:
        yield Finding(Part.REDIS, False, str(error))
        return
    found = {
        Part.REDIS: _writable(redis, settings),
        Part.MEMORY: _lasting(memory),
        Part.QUEUE: _full(depth, queues, settings),
        Part.WORKERS: _workers(workers, missing),
        Part.ROWS: _rows(workers, missing, settings),
        Part.REDDIT: _reddit(told, ever),
    }
    for part, (well, said) in found.items():
        if part in parts:
            yield Finding(part, well, said)


def _writable(redis: Redis, settings: Settings) -> tuple[bool, str]:
    """Try a write that changes nothing: Redis refuses it at its memory limit, and as a replica."""
    try:
        with told_plainly(settings):
            redis.zadd(HELD["reserved_index_key"], {"": 0}, xx=True)
    except RedisError as error:
        return False, str(error)
    return True, f"Redis at {settings.redis_address} answers"


def _lasting(memory: Memory | None) -> tuple[bool, str]:
    """Healthy while it lasts for CRITICAL_S; below WARNING_S with a warning."""
    if memory is None:
        return True, "unknown: Redis does not let this user ask (docs/redis.md)"
    if memory.full_seconds is None or memory.full_seconds >= WARNING_S:
        return True, str(memory)
    advice = "raise maxmemory, or lower FEEDMILL_RESULTS_TTL and FEEDMILL_SENT_TTL"
    return memory.full_seconds >= CRITICAL_S, f"warning: {memory}: {advice}"


def _full(depth: QueueDepth, queues: dict[str, Queue], settings: Settings) -> tuple[bool, str]:
    limit, each = f"{settings.queue_limit:,}", ""
    if len(queues) > 1:
        each = f" ({', '.join(f'{name}: {queue.waiting:,}' for name, queue in queues.items())})"
        limit += " a queue"
    said = f"{depth.waiting:,} messages wait{each}, of at most {limit}; {depth.held:,} are held by workers"
    return all(queue.waiting <= settings.queue_limit for queue in queues.values()), said


def _workers(workers: dict[str, dict[str, Any]] | None, missing: dict[str, float]) -> tuple[bool, str]:
    if workers is None:
        return False, "cannot be asked while Redis takes no writes"
    if missing:
        silent = ", ".join(f"{node} (alive {capacity.span(age)} ago)" for node, age in missing.items())
        answering = ", ".join(workers) or "none"
        return False, f"no answer from {silent}: read its log, or start it again. Answering: {answering}"
    return bool(workers), f"{', '.join(workers)}" or "none answers: `feedmill worker` starts one"


def _rows(workers: dict[str, dict[str, Any]] | None, missing: dict[str, float], settings: Settings) -> tuple[bool, str]:
    """A forward pass that hangs ends its worker after forward_timeout; no row may wait for longer."""
    if workers is None:
        return False, "cannot be told: workers cannot be asked while Redis takes no writes"
    ages = {node: float(pool["oldest_row_seconds"]) for node, pool in workers.items()}
    stuck = [f"{node} ({age:.0f} s)" for node, age in ages.items() if age > settings.forward_timeout]
    if stuck:
        return False, f"rows wait for longer than a forward pass may take: {', '.join(stuck)}"
    if missing:
        return False, f"cannot be told: no answer from {', '.join(missing)}"
    return True, f"the oldest in a worker waits for {max(ages.values()):.1f} s" if ages else "no worker holds any"


def _reddit(told: dict[str, Any] | None, ever: bool) -> tuple[bool, str]:
    if told is not None:
        return True, f"the daemon reads {told['subreddits']} subreddits" + (
            f", but: {told['hindrance']}" if told["hindrance"] else ""
        )
    if ever:
        return False, f"no word of the daemon for {STATUS_TTL} s: `feedmill ingest reddit` starts it"
    return True, "not in use; `feedmill ingest reddit` would read it"
