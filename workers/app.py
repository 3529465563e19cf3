"""The worker's Celery application: the one task, and the pool that runs it.

`feedmill worker` starts it; `celery -A workers.app worker` does too, since the pool is named in its configuration.
"""

from contextvars import ContextVar
from typing import Any

from celery import current_task

from shared.broker import CLASSIFY_TASK, Application, make_app
from shared.errors import MessageFailed, RequestRefused
from shared.settings import Settings, load
from workers.message import Message

#: The message that the pool has finished and whose task Celery's tracer now runs, on the same thread.
IN_HAND: ContextVar[Message | None] = ContextVar("IN_HAND", default=None)


def classify(
    posts: list[dict[str, Any]] | None = None,  # noqa: ARG001 - the signature is the contract; the pool has read the arguments
    labels: list[str] | str | None = None,  # noqa: ARG001
    template: str | None = None,  # noqa: ARG001
    multi_label: bool = False,  # noqa: ARG001
    strict: bool = False,  # noqa: ARG001
    top_k: int | None = None,  # noqa: ARG001
    *surplus: Any,  # noqa: ARG001 - refused by the message itself, in its own words, and so is what is unknown
    version: int = 1,  # noqa: ARG001
    **unknown: Any,  # noqa: ARG001
) -> list[dict[str, Any]] | str:
    """The body of `feedmill.classify`: one outcome per post, in order; where nobody gets them, how many there are.

    The device has done the work by the time it runs; it picks up what the pool made ready, or raises the
    message's own error, and Celery's tracer does the rest. Raises RequestRefused or MessageFailed.
    """
    message = IN_HAND.get()
    if message is None:
        raise RuntimeError("feedmill.classify runs in Feedmill's own worker pool: start it with `feedmill worker`.")
    message.check()
    request = current_task.request
    if request.ignore_result and not (request.callbacks or request.chain or request.chord):
        return message.summary()  # for events and Flower: an eighth of a message's cost was spelling out the rest
    return message.result()


def make_worker_app(settings: Settings) -> Application:
    """The application with the task and the pool, for one worker on one device."""
    app = make_app(settings)
    app.conf.update(
        worker_pool="workers.pool:DevicePool",
        worker_concurrency=1,
        # In messages, as if each held one row; the pool's gate counts rows, and closes before this does.
        worker_prefetch_multiplier=settings.window_rows,
        # Messages for later are fetched and kept besides; without a limit a worker would take the whole queue.
        worker_eta_task_limit=2 * settings.window_rows,
    )
    app.steps["consumer"].add("workers.consumer:ConsumerFit")
    # A refused message is its sender's mistake, not a fault of this worker: no traceback for it.
    declared = app.task(
        name=CLASSIFY_TASK, throws=(MessageFailed, RequestRefused), Request="workers.request:ClassifyRequest"
    )
    declared(classify)
    app.finalize()
    return app


def __getattr__(name: str) -> Any:
    """`app`, for `celery -A workers.app`: made when asked for, so that importing reads no settings."""
    if name == "app":
        return make_worker_app(load())
    raise AttributeError(name)
