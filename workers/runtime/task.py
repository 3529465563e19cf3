"""The task `feedmill.classify`, and the base class of tasks whose posts are classified in
micro-batches.

A task's body only returns one outcome per post. In Feedmill's own pool, the device has computed
the outcomes before the body runs. Elsewhere (called directly, with `apply`, with
`task_always_eager` or on a stock worker) the same pipeline computes them in the calling process.

A custom task keeps all of Celery's task features. A worker loads it with the setting `include`:

    @shared_task(bind=True, base=ClassifyTask, autoretry_for=(MessageFailed,), max_retries=3,
    rate_limit="10/s")
    def careful(self, *args, **kwargs):
        return self.outcomes()
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery import Task, shared_task
from celery.exceptions import SoftTimeLimitExceeded
from redis import Redis

from feedmill.shared.broker import (
    CLASSIFY_TASK,
    SENT_AT,
    Application,
    connect,
    make_app,
)
from feedmill.shared.errors import MessageFailed, RequestRefused, UserError
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings, load
from feedmill.workers.pipeline.message import Message

#: The message whose task Celery's tracer runs on this thread, with all of its outcomes.
CURRENT_MESSAGE: ContextVar[Message | None] = ContextVar(
    "CURRENT_MESSAGE", default=None
)
#: The task's positional arguments, in order.
ARGUMENT_NAMES = (
    "posts",
    "labels",
    "template",
    "multi_label",
    "strict",
    "top_k",
    "none",
)


def arguments_by_name(args: object, kwargs: object) -> dict[str, Any]:
    """Return the task's positional and named arguments by name; empty if they are malformed.

    An extra positional argument becomes an unknown option. An argument given twice fails later, in
    the tracer, with Python's own error.
    """
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        return {}
    arguments: dict[str, Any] = {}
    for number, value in enumerate(args, 1):
        if number <= len(ARGUMENT_NAMES):
            name = ARGUMENT_NAMES[number - 1]
        else:
            name = f"argument {number}"
        arguments[name] = value
    arguments.update(kwargs)
    return arguments


class ClassifyTask(Task):  # type: ignore[type-arg]  # generic only in the stubs
    """Base class of tasks whose posts are classified in micro-batches.

    A task's body calls `outcomes`.
    """

    abstract = True
    Request = "feedmill.workers.runtime.request:ClassifyRequest"
    #: Sets the outcomes of a message in place of a model, in tests of applications
    #: (feedmill/testing).
    answer: Callable[[Message], None] | None = None
    # Caused by the sender, not by this worker, so logged without a traceback.
    throws = (MessageFailed, RequestRefused, SoftTimeLimitExceeded)

    @property
    def queue(self) -> str | None:
        """The queue to send to: the setting `queue`.

        None in Feedmill's own applications, whose default queue it is.
        """
        if isinstance(self.app, Application):
            return None
        return load().queue

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """Send the task, as Celery does.

        Without a broker of the application's own, use the settings' Redis.

        Raises RedisUnavailable if that Redis cannot be reached.
        """
        options |= {
            "task_id": task_id,
            "link": link,
            "link_error": link_error,
            "shadow": shadow,
        }
        conf = self.app.conf
        if conf.task_always_eager or conf.broker_url or conf.broker_write_url:
            return super().apply_async(args, kwargs, producer=producer, **options)
        settings = load()
        sender = _sender_for(settings)
        with user_errors(settings):
            # Celery's result backend retries for 20 seconds, and raises a RuntimeError
            sender.redis.ping()
            return sender.app.send_task(self.name, args, kwargs, **options)

    def outcomes(self) -> list[dict[str, Any]]:
        """Return one outcome per post, in order.

        Raises RequestRefused or MessageFailed (see docs/messages.md), or SoftTimeLimitExceeded.
        """
        return self._message().result()

    def reply(self) -> list[dict[str, Any]] | str:
        """Return the outcomes; if no reader waits for them, only a summary for signals, events and
        Flower.
        """
        message = self._message()
        request = self.request
        message.check()
        unread = request.ignore_result and not (
            request.callbacks or request.chain or request.chord
        )
        # Serializing unread outcomes took an eighth of a message's time.
        if unread and not request.is_eager:
            return message.summary()
        return message.result()

    def _message(self) -> Message:
        """Return the message with an outcome for each of its posts."""
        request = self.request
        if not (request.called_directly or request.is_eager):
            message = CURRENT_MESSAGE.get()
            if message:
                return message
        arguments = arguments_by_name(request.args, request.kwargs)
        return self._classify_here(arguments)

    def _classify_here(self, arguments: dict[str, Any]) -> Message:
        """Classify in this process.

        On a stock worker, also store the results, as a Feedmill worker does.
        """
        request = self.request
        if self.answer is not None:
            message = Message(
                arguments, sent_at=request.get(SENT_AT), task_id=request.id
            )
            self.answer(message)
            return message
        try:
            from feedmill.workers.pipeline import offline  # noqa: PLC0415 - torch is optional
        except ImportError as missing:
            name = "feedmill.classify_task" if self.name == CLASSIFY_TASK else self.name
            raise UserError(
                f"Classifying in this process requires the package {missing.name}: run `pip "
                "install 'feedmill[worker]'`. To use a worker instead, send the task with "
                f"{name}.delay(…)."
            ) from None
        settings = self.app.settings if isinstance(self.app, Application) else load()
        by_worker = not (request.called_directly or request.is_eager)
        queue = settings.queue if by_worker else None
        message = Message(
            arguments,
            request.get(SENT_AT),
            task_id=request.id,
            queue=queue,
        )
        worker = request.hostname if by_worker else None
        offline.run(message, settings, worker=worker)
        return message


class Sender(NamedTuple):
    """An application that sends tasks for callers without a broker, and a client of its Redis, of
    one process and its settings.
    """

    app: Application
    redis: Redis
    process: int
    settings: Settings


_latest_sender: Sender | None = None


def _sender_for(settings: Settings) -> Sender:
    """Return this process' sender with these settings."""
    global _latest_sender  # noqa: PLW0603 - one per process
    process = os.getpid()
    sender = _latest_sender
    if sender is None or sender.process != process or sender.settings != settings:
        sender = Sender(
            app=make_app(settings),
            redis=connect(settings),
            process=process,
            settings=settings,
        )
        # The client of the one before closes with the last thread that uses it.
        _latest_sender = sender
    return sender


# The stub wants no `*surplus`.
@shared_task(bind=True, base=ClassifyTask, name=CLASSIFY_TASK)  # type: ignore[arg-type]
def classify_task(
    self: ClassifyTask,
    # Documents the arguments, which the message parses.
    posts: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG001
    labels: Mapping[str, Any] | Sequence[str] | str | None = None,  # noqa: ARG001
    template: str | None = None,  # noqa: ARG001
    multi_label: bool = False,  # noqa: ARG001
    strict: bool = False,  # noqa: ARG001
    top_k: int | None = None,  # noqa: ARG001
    none: float | bool | None = None,  # noqa: ARG001
    *surplus: Any,  # noqa: ARG001 - the message rejects surplus and unknown arguments itself
    version: int = 1,  # noqa: ARG001
    **unknown: Any,  # noqa: ARG001
) -> list[dict[str, Any]] | str:
    """Return one outcome per post, in order.

    See docs/messages.md for the arguments and outcomes.
    """
    return self.reply()
