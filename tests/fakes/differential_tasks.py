"""Tasks for the differential test (tests/differential.py).

Both workers load them with FEEDMILL_INCLUDE.

The ClassifyTasks cover every way in which a Celery task can end. Each requests its outcomes first:
Feedmill's pool classifies posts before the body runs, but a stock worker classifies only on
request. The plain tasks are callbacks that return their arguments, so that the stored result shows
them.
"""

import json
from functools import cache
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject
from redis import Redis

from feedmill.shared.broker import connect
from feedmill.shared.errors import MessageFailed
from feedmill.shared.settings import load
from feedmill.workers.runtime.task import ClassifyTask

#: Prefix of the Redis lists that record the arguments of callbacks and handlers, which have no
#: stored result.
TOLD = "differential:told:"
#: Attributes of `self.request` that tasks may rely on and that do not depend on the worker.
REQUEST = (
    "id", "root_id", "parent_id", "retries", "group", "group_index", "headers", "stamps",
    "stamped_headers",
    "timelimit", "time_limit", "soft_time_limit", "ignore_result", "correlation_id", "shadow",
    "called_directly",
    "is_eager", "argsrepr", "kwargsrepr", "replaced_task_nesting",
)  # fmt: skip


class Unlucky(Exception):  # noqa: N818
    """An error that cannot be unpickled: it takes two arguments, but `args` has one."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what)
        self.number = number


@cache
def _redis() -> Redis:
    """Create the client on first use, in the process that uses it."""
    return connect(load())


def _tell(about: str, *words: object) -> None:
    _redis().rpush(TOLD + about, json.dumps(words))


@shared_task(bind=True, base=ClassifyTask, name="differential.early", acks_late=False)
def early(self: ClassifyTask, *_: Any, **__: Any) -> object:
    return self.outcomes()


@shared_task(
    bind=True,
    base=ClassifyTask,
    name="differential.unacked",
    acks_on_failure_or_timeout=False,
)
def unacked(self: ClassifyTask, *_: Any, **__: Any) -> object:
    return self.outcomes()


@shared_task(
    bind=True,
    base=ClassifyTask,
    name="differential.autoretry",
    autoretry_for=(MessageFailed,),
    max_retries=2,
    default_retry_delay=0,
)
def autoretry(self: ClassifyTask, *_: Any, **__: Any) -> object:
    return self.outcomes()


@shared_task(bind=True, base=ClassifyTask, name="differential.retry", max_retries=3)
def retry(self: ClassifyTask, *_: Any, **__: Any) -> object:
    """Retry as often as the header `wanted_retries` says.

    A fourth retry exceeds the limit and fails.
    """
    outcomes = self.outcomes()
    if self.request.retries < self.request.get("wanted_retries", 1):
        raise self.retry(countdown=self.request.get("pause", 0))
    return outcomes


@shared_task(bind=True, base=ClassifyTask, name="differential.reject")
def reject(self: ClassifyTask, *_: Any, **__: Any) -> object:
    self.outcomes()
    raise Reject("rejected on purpose", requeue=False)


@shared_task(
    bind=True, base=ClassifyTask, name="differential.early_reject", acks_late=False
)
def early_reject(self: ClassifyTask, *_: Any, **__: Any) -> object:
    self.outcomes()
    raise Reject("rejected after the acknowledgement", requeue=False)


@shared_task(bind=True, base=ClassifyTask, name="differential.requeue")
def requeue(self: ClassifyTask, *_: Any, **__: Any) -> object:
    """Requeue the message on its first delivery; return its outcomes on the second."""
    outcomes = self.outcomes()
    if not (self.request.delivery_info or {}).get("redelivered"):
        raise Reject("later", requeue=True)
    return outcomes


@shared_task(bind=True, base=ClassifyTask, name="differential.ignore")
def ignore(self: ClassifyTask, *_: Any, **__: Any) -> object:
    self.outcomes()
    raise Ignore


@shared_task(bind=True, base=ClassifyTask, name="differential.unlucky")
def unlucky(self: ClassifyTask, *_: Any, **__: Any) -> object:
    raise Unlucky("failed on purpose", len(self.outcomes()))


@shared_task(bind=True, base=ClassifyTask, name="differential.unserializable")
def unserializable(self: ClassifyTask, *_: Any, **__: Any) -> object:
    """Return a value that JSON cannot represent, so that storing the result fails."""
    self.outcomes()
    return object


@shared_task(bind=True, base=ClassifyTask, name="differential.own_state")
def own_state(self: ClassifyTask, *_: Any, **__: Any) -> object:
    """Store a custom state. `Ignore` keeps Celery from overwriting it."""
    outcomes = self.outcomes()
    self.update_state(state="CLASSIFIED", meta={"posts": len(outcomes)})
    raise Ignore


@shared_task(bind=True, base=ClassifyTask, name="differential.request")
def request(self: ClassifyTask, *_: Any, **__: Any) -> object:
    """Return the outcomes, and the attributes of `self.request` that the body sees."""
    told = {name: self.request.get(name) for name in REQUEST}
    told["delivery_info"] = dict(self.request.delivery_info or {})
    for name in ("callbacks", "errbacks", "chain", "chord", "eta", "expires"):
        told[f"has_{name}"] = bool(self.request.get(name))
    return {"outcomes": self.outcomes(), "request": told}


@shared_task(bind=True, base=ClassifyTask, name="differential.sends", trail=True)
def sends(self: ClassifyTask, *_: Any, **__: Any) -> object:
    """Send another task as a child."""
    outcomes = self.outcomes()
    record.apply_async((len(outcomes),), task_id=f"{self.request.id}-sent")
    return outcomes


class Handlers(ClassifyTask):
    """A task whose handlers record their calls."""

    abstract = True

    def before_start(self, task_id: str, _args: Any, _kwargs: Any) -> None:
        _tell(task_id, "before_start", self.request.retries)

    def on_success(self, retval: Any, task_id: str, _args: Any, _kwargs: Any) -> None:
        _tell(task_id, "on_success", retval)

    def on_retry(
        self, exc: Exception, task_id: str, _args: Any, _kwargs: Any, einfo: Any
    ) -> None:
        _tell(task_id, "on_retry", repr(exc), str(einfo))

    def on_failure(
        self, exc: Exception, task_id: str, _args: Any, _kwargs: Any, einfo: Any
    ) -> None:
        _tell(task_id, "on_failure", repr(exc), str(einfo))

    def after_return(
        self,
        status: str,
        retval: Any,
        task_id: str,
        _args: Any,
        _kwargs: Any,
        _einfo: Any,
    ) -> None:
        _tell(
            task_id,
            "after_return",
            status,
            repr(retval) if isinstance(retval, Exception) else retval,
        )


@shared_task(
    bind=True,
    base=Handlers,
    name="differential.handlers",
    autoretry_for=(MessageFailed,),
    max_retries=1,
)
def handlers(self: ClassifyTask, *_: Any, **__: Any) -> object:
    return self.outcomes()


handlers.default_retry_delay = 0


@shared_task(name="differential.record")
def record(*received: object, **named: object) -> object:
    return {"received": received, "named": named}


@shared_task(name="differential.failed")
def failed(task_id: str) -> object:
    """An errback that Celery sends as a task, with the message's id."""
    return {"failed": task_id}


@shared_task(name="differential.failed_here")
def failed_here(request: Any, exc: object, traceback: object, about: str) -> None:
    """An errback that Celery calls directly, because it is not bound and takes more than one
    argument.
    """
    _tell(about, request.id, repr(exc), bool(traceback))


@shared_task(name="differential.posts")
def posts(first: int, count: int) -> object:
    return [
        {"id": f"made{number}", "title": f"The match number {number} ended"}
        for number in range(first, first + count)
    ]


@shared_task(name="differential.breaks")
def breaks(*_: object) -> None:
    raise ValueError("a callback that breaks")
