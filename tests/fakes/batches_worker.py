"""A worker that uses celery-batches as its documentation shows, for tests/e2e/test_celery.py.

    FAKE_REDIS_URL=redis://… PYTHONPATH=.venv/celery-batches:. python -m tests.fakes.batches_worker

celery-batches requires an older Celery, which is installed beside it. No module imported here may require Feedmill's
Celery version.
"""

import os
import time
from typing import Any

from celery import Celery, signals
from celery_batches import Batches
from redis import Redis

url = os.environ["FAKE_REDIS_URL"]
redis = Redis.from_url(url, decode_responses=True)
app = Celery("batches", broker=url, backend=url)
app.conf.update(
    task_default_queue="feedmill",
    task_acks_late=True,
    task_track_started=True,
    worker_send_task_events=True,
    worker_concurrency=1,
    worker_prefetch_multiplier=100,
    result_expires=3600,
)


def wait_while(key: str) -> None:
    redis.incr(f"{key}:begun")
    while redis.exists(key):
        time.sleep(0.01)


def write_down(name: str) -> Any:
    def receiver(sender: Any = None, request: Any = None, task_id: str | None = None, **_: Any) -> None:
        found = task_id or (request.id if request is not None else None) or sender.request.id
        redis.rpush(f"signals:{found}", name)

    return receiver


for signal in ("received", "prerun", "success", "failure", "retry", "revoked", "postrun"):
    getattr(signals, f"task_{signal}").connect(write_down(signal), weak=False)


@app.task(name="own.hold")
def hold(key: str) -> None:
    wait_while(key)


@app.task(name="own.tell")
def tell(*args: Any) -> Any:
    return args[-1] if args else None


@app.task(name="own.told")
def told(message: str) -> str:
    return message


@app.task(bind=True, name="own.stamps")
def stamps(self: Any, _: Any) -> Any:
    return {header: self.request.stamps[header] for header in self.request.stamped_headers or ()}


@app.task(name="feedmill.classify", base=Batches, flush_every=32, flush_interval=0.1)
def classify(requests: list[Any]) -> None:
    redis.mset({f"batch:{request.id}": requests[0].id for request in requests})
    batch = [post for request in requests for post in request.kwargs["posts"]]
    for post in batch:
        if post.get("title", "").startswith("slow "):
            wait_while(post["title"].removeprefix("slow "))
    labels = {post["id"]: len(post["title"]) for post in batch}  # a post without a title fails the whole batch
    for request in requests:
        answer = [{"id": post["id"], "label": labels[post["id"]]} for post in request.kwargs["posts"]]
        app.backend.mark_as_done(request.id, answer, request=request)


if __name__ == "__main__":
    app.worker_main(["worker", "--pool", "prefork", "--loglevel", "INFO", "--hostname", "worker@test"])
