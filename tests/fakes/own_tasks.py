"""An application's micro-batched and plain tasks, which a worker loads with `--include`.

The module records in Redis each task's Celery signals and, in the list "ran", runs of tasks and
the posts of passes. A test can keep the device busy until it deletes a Redis key: with the task
`own.hold`, or with a post whose title is "slow " followed by the key.

Arithmetic tasks encode a number as the id of a post: they classify their posts, add `top_k` to
each id and return posts, so that tasks can be chained.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery import Task, chain, current_app, group, shared_task, signals
from kombu import Queue
from redis import Redis

import feedmill
from feedmill.shared.errors import MessageFailed
from feedmill.workers.models.classifiers import Row
from feedmill.workers.pipeline.backlog import BatchLoop, Loaded, Part
from feedmill.workers.runtime.task import ClassifyTask

Posts = list[dict[str, Any]]
redis = Redis.from_url(os.environ["FEEDMILL_REDIS_URL"], decode_responses=True)
current_app.conf.task_track_started = True
if "FAKE_TIME_LIMIT" in os.environ:
    current_app.conf.task_time_limit = int(os.environ["FAKE_TIME_LIMIT"])


#: Process ids with which worker_process_init was received.
PREPARED: list[int] = []


def wait_while(key: str) -> None:
    """Count the call, then block like a slow device until the test deletes the key."""
    redis.incr(f"{key}:begun")
    while redis.exists(key):
        time.sleep(0.01)


compute = BatchLoop._forward


def compute_slowly(self: BatchLoop, loaded: Loaded, rows: Sequence[Row]) -> list[Part]:
    redis.rpush("ran", *(f"post {row.owner.post.id}" for row in rows))
    for row in rows:
        if row.owner.post.title.startswith("slow "):
            wait_while(row.owner.post.title.removeprefix("slow "))
    return compute(self, loaded, rows)


BatchLoop._forward = compute_slowly  # type: ignore[method-assign]


def write_down(name: str) -> Any:
    def receiver(
        sender: Any = None, request: Any = None, task_id: str | None = None, **_: Any
    ) -> None:
        found = (
            task_id
            or (request.id if request is not None else None)
            or sender.request.id
        )
        redis.rpush(f"signals:{found}", name)

    return receiver


for name in ("received", "prerun", "success", "failure", "retry", "revoked", "postrun"):
    getattr(signals, f"task_{name}").connect(write_down(name), weak=False)


@shared_task(name="own.hold")
def hold(key: str) -> str:
    redis.rpush("ran", f"hold {key}")
    wait_while(key)
    return key


@shared_task(name="own.called")
def called(*_: Any, key: str) -> int:
    """Count its calls, with any arguments."""
    return int(redis.incr(key))


@shared_task(bind=True, base=ClassifyTask, name="own.early", acks_late=False)
def early(self: ClassifyTask, /, **_: Any) -> Any:
    return self.outcomes()


@shared_task(
    bind=True, base=ClassifyTask, name="own.autoretries", autoretry_for=(MessageFailed,),
    max_retries=1,
    default_retry_delay=0,
)  # fmt: skip
def autoretries(self: ClassifyTask, /, **_: Any) -> Any:
    return self.outcomes()


# Arithmetic.


def flat(found: Any) -> Posts:
    """Return the posts in a group's results at any depth."""
    return (
        [found]
        if isinstance(found, dict)
        else [post for each in found for post in flat(each)]
    )


def amount(options: dict[str, Any]) -> int:
    return int(options.get("top_k", 1))


def numbered(number: int) -> dict[str, Any]:
    return {"id": str(number), "title": f"number {number}"}


def increased(task: ClassifyTask, amount: int) -> Posts:
    """Return the task's classified posts with their numbers increased by `amount`."""
    return [
        numbered(int(str(outcome["id"])) + amount)
        for outcome in task.outcomes()
        if isinstance(outcome, dict)
    ]


@shared_task(bind=True, base=ClassifyTask, name="own.add")
def add(self: ClassifyTask, *_: Any, **options: Any) -> Posts:
    return increased(self, amount(options))


@shared_task(name="own.total")
def total(found: Any) -> Posts:
    """Return the sum of a group's results as a post."""
    return [numbered(sum(int(post["id"]) for post in flat(found)))]


@shared_task(bind=True, base=ClassifyTask, name="own.replaced_by_chain")
def replaced_by_chain(self: ClassifyTask, *_: Any, **options: Any) -> None:
    """Replace the task with a chain that has a callback and an errback.

    If `top_k` is 13, the chain fails.
    """
    last = add.s(labels="") if amount(options) == 13 else add.s(top_k=amount(options))
    other = chain(add.s(increased(self, 0), top_k=amount(options)), last)
    other.link(called.s(key="inner"))
    other.link_error(called.s(key="errbacks"))
    raise self.replace(other)


@shared_task(bind=True, base=ClassifyTask, name="own.replaced_by_group")
def replaced_by_group(self: ClassifyTask, *_: Any, **__: Any) -> None:
    given = increased(self, 0)
    raise self.replace(group(add.s(given, top_k=1), add.s(given, top_k=2)))


@shared_task(bind=True, base=ClassifyTask, name="own.adds_to_chord")
def adds_to_chord(self: ClassifyTask, *_: Any, **options: Any) -> Posts:
    given = increased(self, amount(options))
    self.add_to_chord(add.s(given, top_k=amount(options)))
    return given


# Plain tasks.


@contextmanager
def written_down(what: object) -> Iterator[None]:
    redis.rpush("ran", f"begin {what}")
    yield
    redis.rpush("ran", f"end {what}")


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


@signals.worker_process_init.connect(weak=False)
def prepare_process(**_: Any) -> None:
    PREPARED.append(os.getpid())


@signals.worker_process_shutdown.connect(weak=False)
def clean_process(pid: int, **_: Any) -> None:
    redis.rpush("cleaned", pid)


@shared_task(name="own.preparations")
def preparations() -> list[int]:
    """Return the processes for which receivers of worker_process_init prepared something."""
    return PREPARED


@shared_task(name="own.ends_child")
def ends_child(number: int) -> int | None:
    """Send a signal to a child process and return its exit code; None if it goes on."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=signal.pause)
    child.start()
    assert child.pid
    os.kill(child.pid, number)
    child.join(10)
    code = child.exitcode
    child.kill()
    child.join()
    return code


# Uses of kombu in plain tasks.


def got(queue: Any) -> list[Any]:
    """Return the bodies of a queue's messages, and acknowledge them."""
    bodies = []
    while (message := queue.get()) is not None:
        bodies.append(message.payload)
        message.ack()
    return bodies


def with_queue_get(connection: Any) -> Any:
    queue = Queue("own-queue", channel=connection.default_channel)
    queue.declare()
    with connection.Producer() as producer:
        for number in range(3):
            producer.publish({"number": number}, routing_key=queue.name)
    return got(queue)


def with_simple_queue(connection: Any) -> Any:
    with connection.SimpleQueue("own-simple-queue") as queue:
        queue.put("first")
        queue.put("second")
        queue.get(timeout=10).requeue()
        bodies = []
        for _ in range(2):
            message = queue.get(timeout=10)
            bodies.append(message.payload)
            message.ack()
        return sorted(bodies)


def with_consumer(connection: Any) -> Any:
    bodies: list[Any] = []

    def take(body: Any, message: Any) -> None:
        bodies.append(body)
        message.ack()

    queue = Queue("own-consumed-queue")
    with connection.Producer() as producer:
        producer.publish("one", routing_key=queue.name, declare=[queue])
    with connection.Consumer([queue], callbacks=[take]):
        connection.drain_events(timeout=10)
    return bodies


def with_another_broker(_: Any) -> Any:
    with current_app.connection_for_write("memory://") as other:
        return with_queue_get(other)


@shared_task(name="own.uses_kombu")
def uses_kombu(use: str) -> Any:
    with current_app.connection_for_read() as connection:
        return globals()[f"with_{use}"](connection)
