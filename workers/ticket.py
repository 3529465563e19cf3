"""One request of Celery's while the device has it: how its task is run, what time it has, and how it ends.

What it leans on in Celery 5.7:

- Callbacks are bound methods of the Request. `on_timeout` fails and acknowledges it; a request that has been asked to
  terminate before it was accepted does so in `on_accepted`.
- The tracer keeps the task's own errors to itself; what it raises is Reject, or a broken result backend
  (celery/app/trace.py).
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback  # type: ignore[attr-defined]
from celery.concurrency.base import apply_target
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded, TimeLimitExceeded
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import DataError
from redis.exceptions import RedisError as RedisFault

from shared.refusals import WRONG_TYPE
from workers.message import Message

#: What the result backends redis and rpc raise when they have tried for long enough.
BACKEND_AWAY = (RedisFault, OperationalError)


@dataclass(eq=False, slots=True)
class Ticket:
    """What it takes to finish a request: Celery's tracer with its arguments, and the Request's callbacks."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    accepted: Callable[[int, float], None]
    succeeded: Callable[[Any], None]
    failed: Callable[[Any], None]
    timed_out: Callable[[bool, float], None]
    #: The posts on their way through the pipeline; None for a task that is not micro-batched.
    message: Message | None = None
    #: What the consumer's thread has to do once all that the message left is stored.
    ending: Callable[[], None] = lambda: None
    #: What waits for the time limits.
    timers: list[Any] = field(default_factory=list)
    #: Whether the tracer has run the task.
    traced: bool = False

    @property
    def request(self) -> Any:
        return self.accepted.__self__  # type: ignore[attr-defined]

    def limits(self, worker_soft: float | None, worker_hard: float | None) -> Iterator[tuple[float, Exception]]:
        """Seconds from acceptance to result, with what it fails by then: the message's, the task's, or the worker's.

        The task's as it is now: a stock worker keeps to the one that it started with.
        """
        hard, soft = self.request.time_limits
        soft = soft or self.request.task.soft_time_limit or worker_soft
        hard = hard or self.request.task.time_limit or worker_hard
        for limit, fault in ((soft, SoftTimeLimitExceeded()), (hard, TimeLimitExceeded(hard))):
            # What the sender asked for may be anything: an integer, for one, that no float can hold.
            if isinstance(limit, int | float) and 0 < limit <= sys.float_info.max:
                yield limit, fault

    def trace(self) -> None:
        """Have Celery run the task and say how it ends. Raises redis' errors where the result is not stored.

        Celery's own pools let such a message go, and its result is lost. Here it is not acknowledged: the body of a
        micro-batched task runs once more when Redis is back, another message goes back to the queue after a while.
        """

        def ended(outcome: Any) -> None:
            if isinstance(outcome, ExceptionInfo):  # its body raised what is no Exception
                self.ending = partial(self.failed, outcome)
                return
            failed, value, _ = outcome
            if failed and isinstance(value.exception, ExceptionWithTraceback):
                value.exception = value.exception.exc  # as it comes out of a child: by it Celery tells why it retries
            if self.message and failed:
                self.message.sent_again = _is_sent_again(value.exception)
            self.ending = partial(self.succeeded, outcome)

        try:
            apply_target(self.target, self.args, callback=ended)
        except Exception as error:
            if self.request.task.acks_late and isinstance(error, BACKEND_AWAY) and not is_of_message(error):
                if isinstance(error, RedisFault):
                    raise
                raise ConnectionFault(str(error)) from error
            self.ending = partial(self.failed, ExceptionInfo())
        finally:
            self.traced = True


def is_of_message(error: BaseException) -> bool:
    """Return whether the message itself causes the error, so that every retry, on every worker, fails as well.

    Celery sends a failed message's errbacks with whatever options the sender gave them, and kombu turns most errors of
    sending into OperationalError: a compression that does not exist, a queue whose name is a key of another type.
    """
    causes = [error]
    while (cause := causes[-1].__cause__) and cause not in causes:
        causes.append(cause)
    if faults := [cause for cause in causes if isinstance(cause, RedisFault | OSError)]:
        return any(isinstance(fault, DataError) or WRONG_TYPE in str(fault) for fault in faults)
    return not isinstance(causes[-1], OperationalError)


def _is_sent_again(exception: Any) -> bool:
    """Whether a message that ended with this comes once more: by a retry, or because its body put it back."""
    return isinstance(exception, Retry) or (isinstance(exception, Reject) and exception.requeue)  # type: ignore[attr-defined]
