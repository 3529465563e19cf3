"""Tasks for tests/e2e/test_celery_suite.py.

Arithmetic tasks are micro-batched: a number is encoded as the id of a post. Each classifies its posts, adds `top_k` to
each id and returns posts, so that tasks can be chained. Tasks that collect a group's results or count their calls are
plain Celery tasks.
"""

import os
from typing import Any

from celery import chain, group, shared_task
from redis import Redis

from feedmill.workers.runtime.task import ClassifyTask

Posts = list[dict[str, Any]]
redis = Redis.from_url(os.environ["FEEDMILL_REDIS_URL"], decode_responses=True)


def flat(found: Any) -> Posts:
    """Return the posts in a group's results at any depth."""
    return [found] if isinstance(found, dict) else [post for each in found for post in flat(each)]


def increased(task: ClassifyTask, amount: int) -> Posts:
    """Return the task's classified posts with their numbers increased by `amount`."""
    return [numbered(int(str(outcome["id"])) + amount) for outcome in task.outcomes() if isinstance(outcome, dict)]


def amount(options: dict[str, Any]) -> int:
    return int(options.get("top_k", 1))


def numbered(number: int) -> dict[str, Any]:
    return {"id": str(number), "title": f"number {number}"}


@shared_task(bind=True, base=ClassifyTask, name="suite.add")
def add(self: ClassifyTask, *_: Any, **options: Any) -> Posts:
    return increased(self, amount(options))


@shared_task(name="suite.total")
def total(found: Any, more: int = 0) -> Posts:
    """Plain task: return the sum of a group's results as a post."""
    return [numbered(sum(int(post["id"]) for post in flat(found)) + more)]


@shared_task(name="suite.gather")
def gather(found: Any) -> Posts:
    """Plain task: return a group's results as posts."""
    return flat(found)


@shared_task(name="suite.called")
def called(*_: Any, key: str) -> int:
    """Plain task: count its calls, with any arguments."""
    return int(redis.incr(key))


@shared_task(name="suite.errback_old")
def errback_old(task_id: str) -> str:
    redis.incr("errbacks")
    return task_id


@shared_task(name="suite.errback_new")
def errback_new(failed: Any, error: Exception, traceback: Any) -> str:  # noqa: ARG001
    redis.incr("errbacks")
    return str(failed.id)


@shared_task(bind=True, base=ClassifyTask, name="suite.ids")
def ids(self: ClassifyTask, *_: Any, **__: Any) -> Any:
    self.outcomes()
    return [self.request.root_id, self.request.parent_id]


def seen(task: ClassifyTask) -> dict[str, Any]:
    """Return what the task sees of its message."""
    request: Any = task.request
    return {
        "priority": request.delivery_info["priority"],
        "timelimit": request.timelimit,
        "ticket": request.get("ticket"),
        "stamps": {header: request.stamps[header] for header in request.stamped_headers or ()},
        "retries": request.retries,
    }


@shared_task(bind=True, base=ClassifyTask, name="suite.request")
def request(self: ClassifyTask, *_: Any, **__: Any) -> Any:
    self.outcomes()
    return seen(self)


@shared_task(bind=True, base=ClassifyTask, name="suite.retry_once", max_retries=1)
def retry_once(self: ClassifyTask, *_: Any, **__: Any) -> Any:
    """Return what the task sees of its message after one retry."""
    self.outcomes()
    if not self.request.retries:
        raise self.retry(countdown=0)
    return seen(self)


class Odd(Exception):  # noqa: N818
    """An exception that cannot be recreated from its arguments."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__(one)
        self.two = two


@shared_task(bind=True, base=ClassifyTask, name="suite.fails_oddly")
def fails_oddly(self: ClassifyTask, *_: Any, **__: Any) -> None:
    self.outcomes()
    raise Odd(object(), "two")


@shared_task(bind=True, base=ClassifyTask, name="suite.retries_oddly", max_retries=1)
def retries_oddly(self: ClassifyTask, *_: Any, **__: Any) -> None:
    self.outcomes()
    raise self.retry(exc=Odd(object(), "two"), countdown=0)


class Hooked(ClassifyTask):
    """A task whose handlers record their calls."""

    abstract = True

    def before_start(self, task_id: str, *_: Any) -> None:
        redis.rpush(f"hooks:{task_id}", "before_start")

    def on_retry(self, exc: Any, task_id: str, *_: Any) -> None:  # noqa: ARG002
        redis.rpush(f"hooks:{task_id}", "on_retry")

    def on_success(self, retval: Any, task_id: str, *_: Any) -> None:  # noqa: ARG002
        redis.rpush(f"hooks:{task_id}", "on_success")

    def on_failure(self, exc: Any, task_id: str, *_: Any) -> None:  # noqa: ARG002
        redis.rpush(f"hooks:{task_id}", "on_failure")

    def after_return(self, status: str, retval: Any, task_id: str, *_: Any) -> None:  # noqa: ARG002
        redis.rpush(f"hooks:{task_id}", f"after_return {status}")


@shared_task(bind=True, base=Hooked, name="suite.hooked", max_retries=1)
def hooked(self: ClassifyTask, *_: Any, **__: Any) -> int:
    outcomes = self.outcomes()
    if not self.request.retries:
        raise self.retry(countdown=0)
    return len(outcomes)


# Tasks that replace themselves once their posts are classified.


@shared_task(bind=True, base=ClassifyTask, name="suite.replaced")
def replaced(self: ClassifyTask, *_: Any, **options: Any) -> None:
    raise self.replace(add.s(increased(self, 0), top_k=amount(options)))


@shared_task(bind=True, base=ClassifyTask, name="suite.replaced_twice")
def replaced_twice(self: ClassifyTask, *_: Any, **options: Any) -> None:
    raise self.replace(replaced.s(increased(self, 0), top_k=amount(options)))


@shared_task(bind=True, base=ClassifyTask, name="suite.replaced_by_chain")
def replaced_by_chain(self: ClassifyTask, *_: Any, **options: Any) -> None:
    raise self.replace(chain(add.s(increased(self, 0), top_k=amount(options)), add.s(top_k=amount(options))))


@shared_task(bind=True, base=ClassifyTask, name="suite.replaced_by_chain_with_links")
def replaced_by_chain_with_links(self: ClassifyTask, *_: Any, **options: Any) -> None:
    """Replace the task with a chain that has a callback and an errback. If `top_k` is 13, the chain fails."""
    last = add.s(labels="") if amount(options) == 13 else add.s(top_k=amount(options))
    other = chain(add.s(increased(self, 0), top_k=amount(options)), last)
    other.link(called.s(key="inner"))
    other.link_error(errback_old.s())
    raise self.replace(other)


@shared_task(bind=True, base=ClassifyTask, name="suite.replaced_by_group")
def replaced_by_group(self: ClassifyTask, *_: Any, **options: Any) -> None:
    given = increased(self, 0)
    raise self.replace(group(add.s(given, top_k=amount(options)), add.s(given, top_k=2 * amount(options))))


@shared_task(bind=True, base=ClassifyTask, name="suite.adds_to_chord")
def adds_to_chord(self: ClassifyTask, *_: Any, **options: Any) -> Posts:
    given = increased(self, amount(options))
    self.add_to_chord(add.s(given, top_k=amount(options)))
    return given
