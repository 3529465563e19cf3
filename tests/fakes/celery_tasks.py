"""An application's micro-batched and plain tasks, which a worker loads with FEEDMILL_INCLUDE.

The module records each task's Celery signals in Redis. A test can keep the device busy until it deletes a Redis key:
with the task `own.hold`, or with a post whose title is "slow " followed by the key.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

from celery import Task, shared_task, signals
from celery.exceptions import Ignore, Reject
from redis import Redis

from feedmill.shared.errors import MessageFailed
from feedmill.workers.models.classifiers import Outputs, Row
from feedmill.workers.pipeline.backlog import Loaded
from feedmill.workers.pipeline.batch_loop import BatchLoop
from feedmill.workers.runtime.task import ClassifyTask

redis = Redis.from_url(os.environ["FEEDMILL_REDIS_URL"], decode_responses=True)


def wait_while(key: str) -> None:
    """Count the call, then block like a slow device until the test deletes the key."""
    redis.incr(f"{key}:begun")
    while redis.exists(key):
        time.sleep(0.01)


compute = BatchLoop._compute


def compute_slowly(self: BatchLoop, loaded: Loaded, rows: Sequence[Row], lane: int) -> Outputs:
    for row in rows:
        if row.owner.post.title.startswith("slow "):
            wait_while(row.owner.post.title.removeprefix("slow "))
    return compute(self, loaded, rows, lane)


BatchLoop._compute = compute_slowly  # type: ignore[method-assign]


def write_down(name: str) -> Any:
    def receiver(sender: Any = None, request: Any = None, task_id: str | None = None, **_: Any) -> None:
        found = task_id or (request.id if request is not None else None) or sender.request.id
        redis.rpush(f"signals:{found}", name)

    return receiver


for name in ("received", "prerun", "success", "failure", "retry", "revoked", "postrun"):
    getattr(signals, f"task_{name}").connect(write_down(name), weak=False)


@shared_task(name="own.hold")
def hold(key: str) -> None:
    wait_while(key)


@shared_task(name="own.tell")
def tell(*args: Any) -> Any:
    return args[-1] if args else None


@shared_task(name="own.told")
def told(message: str) -> str:
    return message


@shared_task(bind=True, name="own.stamps")
def stamps(self: Task, _: Any) -> Any:  # type: ignore[type-arg]
    return {header: (self.request.stamps or {})[header] for header in self.request.stamped_headers or ()}


@shared_task(name="own.broken")
def broken() -> None:
    raise ValueError("on purpose")


@shared_task(bind=True, base=ClassifyTask, name="own.retries")
def retries(self: ClassifyTask, /, **_: Any) -> Any:
    outcomes = self.outcomes()
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return outcomes


@shared_task(
    bind=True,
    base=ClassifyTask,
    name="own.autoretries",
    autoretry_for=(MessageFailed,),
    max_retries=1,
    default_retry_delay=0,
)
def autoretries(self: ClassifyTask, /, **_: Any) -> Any:
    return self.outcomes()


@shared_task(bind=True, base=ClassifyTask, name="own.header")
def header(self: ClassifyTask, /, **_: Any) -> Any:
    return [self.request.get("ticket"), len(self.outcomes())]


@shared_task(bind=True, base=ClassifyTask, name="own.early", acks_late=False)
def early(self: ClassifyTask, /, **_: Any) -> Any:
    return self.outcomes()


@shared_task(bind=True, base=ClassifyTask, name="own.unforgiving", acks_on_failure_or_timeout=False)
def unforgiving(self: ClassifyTask, /, **_: Any) -> Any:
    return self.outcomes()


@shared_task(base=ClassifyTask, name="own.rejects")
def rejects(**_: Any) -> Any:
    raise Reject("rejected on purpose", requeue=False)


@shared_task(bind=True, base=ClassifyTask, name="own.puts_back")
def puts_back(self: ClassifyTask, /, **_: Any) -> Any:
    if not (self.request.delivery_info or {}).get("redelivered"):
        raise Reject("once more", requeue=True)
    return self.outcomes()


@shared_task(base=ClassifyTask, name="own.ignores")
def ignores(**_: Any) -> Any:
    raise Ignore
