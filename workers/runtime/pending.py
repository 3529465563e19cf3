"""A pending task: one of Celery's requests while it is in flight, with its time limits and ending.

Relies on these internals of Celery 5.7:

- A pool calls the Request's `on_accepted`, then one of `on_success`, `on_failure` and `on_timeout`. `on_timeout` fails
  and acknowledges the request. `on_accepted` ends a request that was terminated before it was accepted.
- The tracer's arguments, as in `Request.execute_using_pool`: task name, id, request dict, body, content type, encoding.
  A content type of None marks the body as decoded (celery/app/trace.py).
- The tracer raises only Reject. It stores any other error as the task's result, even one of the result backend. If
  Redis is out of memory when the result is written, but not when the error is, the task has failed.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback  # type: ignore[attr-defined]
from celery.app.trace import fast_trace_task, trace_task_ret
from celery.concurrency.base import apply_target
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded, TimeLimitExceeded
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import DataError, RedisError

from shared.redis_errors import WRONG_TYPE
from workers.pipeline.message import Message, State

#: Errors that the redis and rpc result backends raise after their own retries.
BACKEND_ERRORS = (RedisError, OperationalError)


class NotStored(Reject):
    """The result backend did not accept a task's result now, but may accept it later. `reason`: its error."""


def keep_unstored(backend: Any) -> Any:
    """Return the result backend; it now raises NotStored, which passes through the tracer, for a transient error."""
    store = backend.mark_as_done

    @wraps(store)
    def mark_as_done(*args: Any, **kwargs: Any) -> None:
        try:
            store(*args, **kwargs)
        except BACKEND_ERRORS as error:
            if is_permanent(error):
                raise
            raise NotStored(error, requeue=True) from error

    backend.mark_as_done = mark_as_done
    return backend


@dataclass(eq=False, slots=True)
class PendingTask:
    """One of Celery's requests while it is in flight."""

    request: Any
    #: The request's posts in the pipeline; None for a task that is not micro-batched.
    message: Message | None = None
    #: Callback for the consumer's thread, once all results and dead letters are stored.
    ending: Callable[[], None] = lambda: None
    #: Timers of the time limits.
    timers: list[Any] = field(default_factory=list)
    #: True once the tracer has run the task.
    traced: bool = False

    def limits(self, worker_soft: float | None, worker_hard: float | None) -> Iterator[tuple[float, Exception]]:
        """Yield each time limit, in seconds from acceptance, with the error for exceeding it.

        The message's limit takes precedence over the task's, and the task's over the worker's. A stock worker reads the
        task's limit at startup; this method reads the current value.
        """
        hard, soft = self.request.time_limits
        soft = soft or self.request.task.soft_time_limit or worker_soft
        hard = hard or self.request.task.time_limit or worker_hard
        for limit, fault in ((soft, SoftTimeLimitExceeded()), (hard, TimeLimitExceeded(hard))):
            # The sender can set anything, such as an integer too large for a float.
            if isinstance(limit, int | float) and 0 < limit <= sys.float_info.max:
                yield limit, fault

    def trace(self) -> None:
        """Have Celery run the task and set `ending`. Raises redis' errors if the result is not stored.

        Celery's own pools acknowledge such a message and lose its result. Here it is not acknowledged: the body of a
        micro-batched task runs again when Redis is back, and any other message returns to the queue after a while.
        """

        request = self.request

        def ended(outcome: Any) -> None:
            if isinstance(outcome, ExceptionInfo):  # the task's body raised a BaseException
                self.ending = partial(request.on_failure, outcome)
                return
            failed, value, _ = outcome
            if failed and isinstance(value.exception, ExceptionWithTraceback):
                value.exception = value.exception.exc  # as from a child process; Celery logs it as the reason to retry
            if self.message and failed and _is_sent_again(value.exception):
                self.message.enter(State.SENT_AGAIN)
            self.ending = partial(request.on_success, outcome)

        trace = fast_trace_task if request.app.use_fast_trace_task else trace_task_ret
        body = request.body if request.content_type is None else request.message.payload  # decoded in both cases
        try:
            apply_target(trace, (request.type, request.id, request.request_dict, body, None, None), callback=ended)
        except Exception as raised:
            error = raised.reason if isinstance(raised, NotStored) else raised  # type: ignore[attr-defined]
            if request.task.acks_late and isinstance(error, BACKEND_ERRORS) and not is_permanent(error):
                if isinstance(error, RedisError):
                    raise error from error.__cause__
                raise ConnectionFault(str(error)) from error
            self.ending = partial(request.on_failure, ExceptionInfo((type(error), error, error.__traceback__)))
        finally:
            self.traced = True


def is_permanent(error: BaseException) -> bool:
    """Return whether the message itself causes the error, so that every retry on every worker fails too.

    Celery sends a failed message's errbacks with the options that the sender set. kombu turns most errors of sending
    into OperationalError, such as an unknown compression, or a queue whose name is a Redis key of another type.
    """
    causes = [error]
    while (cause := causes[-1].__cause__) and cause not in causes:
        causes.append(cause)
    if faults := [cause for cause in causes if isinstance(cause, RedisError | OSError)]:
        return any(isinstance(fault, DataError) or WRONG_TYPE in str(fault) for fault in faults)
    return not isinstance(causes[-1], OperationalError)


def _is_sent_again(exception: Any) -> bool:
    """Return whether a message that ended with this exception is sent again, by a retry or a requeue."""
    return isinstance(exception, Retry) or (isinstance(exception, Reject) and exception.requeue)  # type: ignore[attr-defined]
