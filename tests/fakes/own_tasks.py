"""An application's plain and micro-batched tasks, which a Feedmill worker loads with `--include`.

Tasks and forward passes record their runs in the Redis list "ran". `own.hold` keeps the worker busy until the test
deletes the given Redis key.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery import Task, current_app, shared_task
from redis import Redis

import feedmill
from feedmill.workers.models.classifiers import Row
from feedmill.workers.pipeline.backlog import BatchLoop, Loaded, Part
from feedmill.workers.runtime.task import ClassifyTask

redis = Redis.from_url(os.environ["FEEDMILL_REDIS_URL"], decode_responses=True)
compute = BatchLoop._forward
if "FAKE_TIME_LIMIT" in os.environ:
    current_app.conf.task_time_limit = int(os.environ["FAKE_TIME_LIMIT"])


@contextmanager
def written_down(what: object) -> Iterator[None]:
    redis.rpush("ran", f"begin {what}")
    yield
    redis.rpush("ran", f"end {what}")


def compute_and_tell(self: BatchLoop, loaded: Loaded, rows: Sequence[Row]) -> list[Part]:
    redis.rpush("ran", *(f"post {row.owner.post.id}" for row in rows))
    return compute(self, loaded, rows)


BatchLoop._forward = compute_and_tell  # type: ignore[method-assign]


@shared_task(name="own.hold")
def hold(key: str) -> str:
    redis.rpush("ran", f"hold {key}")
    while redis.exists(key):
        time.sleep(0.01)
    return key


@shared_task(name="own.note")
def note(number: int) -> int:
    with written_down(number):
        return number


@shared_task(name="own.fails")
def fails(number: int) -> None:
    with written_down(number):
        pass
    raise ValueError(f"number {number}, on purpose")


@shared_task(bind=True, name="own.retries")
def retries(self: Task, number: int) -> int:  # type: ignore[type-arg]
    with written_down(number):
        pass
    if self.request.retries < 1:
        raise self.retry(countdown=0)
    return number


@shared_task(name="own.classifies")
def classifies(posts: list[dict[str, Any]]) -> list[str]:
    """Call Feedmill's task in this process, without a message."""
    return [outcome["label"] for outcome in feedmill.classify_task(posts)]


@shared_task(name="own.sends")
def sends(posts: list[dict[str, Any]]) -> str:
    """Send Feedmill's task to the queue."""
    return str(feedmill.classify_task.delay(posts).id)


@shared_task(bind=True, base=ClassifyTask, name="own.once_more", max_retries=1)
def once_more(self: ClassifyTask, *_: Any, **__: Any) -> Any:
    """Retry once, then return the outcomes."""
    outcomes = self.outcomes()
    request = self.request
    redis.rpush("ran", f"attempt {request.retries} {request.correlation_id} {request.reply_to}")
    if request.retries < 1:
        raise self.retry(countdown=0)
    return outcomes
