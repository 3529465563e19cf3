"""What the running system says of itself: the queue, the workers, the results."""

from typing import Any, NamedTuple

from celery import Celery

from shared.broker import QueueDepth, connect, make_app, queue_depth
from shared.results import Counters, ResultsStore
from shared.settings import Settings


class Status(NamedTuple):
    """One look at the whole system; `workers` by node name, as `DevicePool` reports them."""

    queue: QueueDepth
    workers: dict[str, dict[str, Any]]
    results: Counters


def status(settings: Settings) -> Status:
    """Ask Redis and every worker, for about a second. Raises redis.exceptions.RedisError."""
    redis = connect(settings)
    depth = queue_depth(redis, settings.queue)
    return Status(depth, worker_statistics(make_app(settings)), ResultsStore(redis, settings).counters())


def worker_statistics(app: Celery) -> dict[str, dict[str, Any]]:
    """What each of our workers' pools says of itself, by node name; other Celery workers may share the Redis."""
    answers = app.control.inspect(timeout=1).stats() or {}
    pools = {node: answer["pool"] for node, answer in sorted(answers.items())}
    return {node: pool for node, pool in pools.items() if pool.get("implementation") == "workers.pool:DevicePool"}
