"""The task `feedmill.classify`, and what makes a task one whose posts are classified in micro-batches.

Its body is plain: it returns one outcome per post. Where they come from depends on who runs it. In Feedmill's own pool
the device has done the work before the body runs. Anywhere else, called directly, by `apply`, with `task_always_eager`
or on a stock worker, the same pipeline classifies there and then, in the calling process.

    @shared_task(bind=True, base=ClassifyTask, autoretry_for=(MessageFailed,), max_retries=3, rate_limit="10/s")
    def careful(self, *args, **kwargs):
        return self.outcomes()

is a task of one's own with all that Celery has for tasks; a worker loads it with the setting `include`.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from celery import Task, shared_task
from celery.exceptions import SoftTimeLimitExceeded

from shared.broker import CLASSIFY_TASK, SENT_AT, Application
from shared.errors import MessageFailed, RequestRefused, UserError
from shared.settings import load
from workers.message import Message

#: The message that the pool has finished and whose task Celery's tracer now runs, on the same thread.
IN_HAND: ContextVar[Message | None] = ContextVar("IN_HAND", default=None)
#: The arguments of the task by position.
POSITIONS = ("posts", "labels", "template", "multi_label", "strict", "top_k")


def named(args: object, kwargs: object) -> dict[str, Any]:
    """The task's arguments by name, however they were sent; none where they are no arguments at all.

    One position too many becomes an option that nobody knows. What is named twice fails later, in the tracer, with
    Python's own words.
    """
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        return {}
    surplus = {f"argument {number}": value for number, value in enumerate(args[len(POSITIONS) :], len(POSITIONS) + 1)}
    return dict(zip(POSITIONS, args, strict=False)) | surplus | dict(kwargs)


class ClassifyTask(Task):  # type: ignore[type-arg]  # generic in the stubs alone
    """Base of the tasks whose posts are classified in micro-batches. Its body calls `outcomes`."""

    abstract = True
    Request = "workers.request:ClassifyRequest"
    # What its sender got wrong, or wanted sooner, is no fault of this worker: no traceback for it.
    throws = (MessageFailed, RequestRefused, SoftTimeLimitExceeded)

    @property
    def queue(self) -> str | None:
        """Where an application of one's own sends it; in Feedmill's own it is the default."""
        return None if isinstance(self.app, Application) else load().queue

    def outcomes(self) -> list[dict[str, Any]]:
        """One outcome per post, in order.

        Raises RequestRefused or MessageFailed, as docs/messages.md says, and SoftTimeLimitExceeded.
        """
        return self._message().result()

    def reply(self) -> list[dict[str, Any]] | str:
        """As `outcomes`; where nobody gets them, how many there are: what signals, events and Flower are told."""
        message, request = self._message(), self.request
        message.check()
        unread = request.ignore_result and not (request.callbacks or request.chain or request.chord)
        # An eighth of a message's cost was spelling out what nobody reads.
        return message.summary() if unread and not request.is_eager else message.result()

    def _message(self) -> Message:
        """With the outcome of each of its posts."""
        request = self.request
        message = None if request.called_directly or request.is_eager else IN_HAND.get()
        return message or self._classify_here(named(request.args, request.kwargs))

    def _classify_here(self, arguments: dict[str, Any]) -> Message:
        """Classify in this process. On a stock worker results are stored as a worker of Feedmill's stores them."""
        request = self.request
        try:
            from workers.in_process import InProcess  # noqa: PLC0415 - torch, which only some have
        except ImportError as missing:
            raise UserError(
                f"Classifying in this process needs {missing.name}, which `pip install 'feedmill[worker]'` brings. "
                f"To have a worker do it, send the task instead: {self.name}.delay(…)."
            ) from None
        settings = self.app.settings if isinstance(self.app, Application) else load()
        by_worker = not (request.called_directly or request.is_eager)
        queue = settings.queue if by_worker else None
        message = Message(arguments, request.get(SENT_AT), task_id=request.id, queue=queue)
        InProcess.classify(message, settings, worker=request.hostname if by_worker else None)
        return message


@shared_task(bind=True, base=ClassifyTask, name=CLASSIFY_TASK)  # type: ignore[arg-type]  # the stub wants no `*surplus`
def classify(
    self: ClassifyTask,
    posts: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG001 - the signature is the contract; the message has read them
    labels: Mapping[str, Any] | Sequence[str] | str | None = None,  # noqa: ARG001
    template: str | None = None,  # noqa: ARG001
    multi_label: bool = False,  # noqa: ARG001
    strict: bool = False,  # noqa: ARG001
    top_k: int | None = None,  # noqa: ARG001
    *surplus: Any,  # noqa: ARG001 - refused by the message itself, in its own words, and so is what is unknown
    version: int = 1,  # noqa: ARG001
    **unknown: Any,  # noqa: ARG001
) -> list[dict[str, Any]] | str:
    """One outcome per post, in order: docs/messages.md has the arguments and the outcomes."""
    return self.reply()
