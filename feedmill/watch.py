"""What the running system says of itself: the queue, the workers, the results, the Reddit daemon."""

from typing import Any, NamedTuple

from celery import Celery

from producers.reddit.state import State
from shared.broker import QueueDepth, connect, make_app, queue_depth
from shared.results import Counters, ResultsStore
from shared.settings import Settings


class Status(NamedTuple):
    """One look at the whole system; `workers` by node name, as `DevicePool` reports them."""

    queue: QueueDepth
    workers: dict[str, dict[str, Any]]
    results: Counters
    #: What the Reddit daemon says of itself; None where none runs.
    reddit: dict[str, Any] | None


def status(settings: Settings) -> Status:
    """Ask Redis and every worker, for about a second. Raises redis.exceptions.RedisError."""
    redis = connect(settings)
    depth = queue_depth(redis, settings.queue)
    results = ResultsStore(redis, settings).counters()
    return Status(depth, worker_statistics(make_app(settings)), results, State(redis).told())


def worker_statistics(app: Celery) -> dict[str, dict[str, Any]]:
    """What each of our workers' pools says of itself, by node name; other Celery workers may share the Redis."""
    answers = app.control.inspect(timeout=1).stats() or {}
    pools = {node: answer["pool"] for node, answer in sorted(answers.items())}
    return {node: pool for node, pool in pools.items() if pool.get("implementation") == "workers.pool:DevicePool"}
