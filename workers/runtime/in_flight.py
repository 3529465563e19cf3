"""Celery's requests in flight: submit each to the pipeline, and let Celery finish it once its outcomes are stored.

Relies on these internals of Celery 5.7 and kombu 5.7:

- `Hub.call_soon` is thread-safe since kombu 5.7. Callbacks must run on the consumer's thread: on another
  thread, Celery loses events, and Flower shows tasks that never end.
- `state.should_stop` ends the worker with the given exit status.
- A pool calls the Request's `on_accepted`, then one of `on_success`, `on_failure` and `on_timeout`. `on_timeout` fails
  and acknowledges the request. `on_accepted` ends a request that was terminated before it was accepted.
- The tracer's arguments, as in `Request.execute_using_pool`: task name, id, request dict, body, content type, encoding.
  A content type of None marks the body as decoded (celery/app/trace.py).
- The tracer raises only Reject. It stores any other error as the task's result, even one of the result backend. If
  Redis is out of memory when the result is written, but not when the error is, the task has failed.
"""

import logging
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback  # type: ignore[attr-defined]
from celery.app.trace import fast_trace_task, trace_task_ret
from celery.concurrency.base import apply_target
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded, TimeLimitExceeded
from celery.platforms import EX_FAILURE
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import DataError, RedisError

from feedmill.shared.broker import SENT_AT, Application
from feedmill.shared.errors import DeviceFull, RedisUnavailable
from feedmill.shared.redis_errors import WRONG_TYPE, is_replica
from feedmill.workers.pipeline.context import Owner
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.pipeline import Pipeline
from feedmill.workers.runtime.request import MAX_DELIVERIES, announce_withdrawn, withdrawn
from feedmill.workers.runtime.task import CURRENT_MESSAGE, ClassifyTask, arguments_by_name

logger = logging.getLogger(__name__)

#: Seconds between two attempts to finish a message whose result Redis does not accept.
RETRY_INTERVAL_S = 5.0
#: Assumed bytes per post before any message is seen. Low, so that the first reservation is small.
FIRST_POST_BYTES = 300.0
#: Number of posts after which the measured size replaces the assumed one.
POSTS_TO_LEARN = 256
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
                self.message.sent_again = True
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


class InFlight(Owner):
    """Celery's requests between their start and their end.

    limits: the worker's soft and hard time limit, in seconds.
    """

    def __init__(self, app: Application, limits: tuple[float | None, float | None]) -> None:
        self._app = app
        self._limits = limits
        #: Set once the model is loaded, before the first request.
        self.pipeline: Pipeline
        #: Celery's event loop, once it runs.
        self.hub: Any = None
        #: Celery's sender of events, of the current connection.
        self._eventer: Any = None
        #: Average bytes of a post in a compressed message, over recent messages. Used only on the consumer's thread.
        self._post_bytes = FIRST_POST_BYTES
        #: Pending tasks: started and not finished. Used only on the consumer's thread.
        self._held: set[PendingTask] = set()
        #: Pending tasks whose ending failed on Redis, each with the call to retry. Used only on the consumer's thread.
        self._unended: list[tuple[PendingTask, Callable[[], None]]] = []
        #: Messages of this turn of the event loop.
        self._arrived: list[Message] = []
        #: Callbacks for the consumer's thread, in order.
        self._deliveries: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: True if the event loop is going to run them: waking it for each takes longer than the callback.
        self._scheduled = False

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._held)

    # Called on the consumer's thread.

    def run(self, request: Any) -> None:
        """Start a request: submit its posts to the pipeline, or queue a task that is not micro-batched as a job.

        Raises an error for malformed fields that other threads read.
        """
        pending = PendingTask(request)
        withdrawn(request)
        list(pending.limits(*self._limits))
        self._held.add(pending)
        if not isinstance(request.task, ClassifyTask):
            self.pipeline.backlog.run(partial(self._run_whole, pending))
            return
        priority, leased = request.delivery_info["priority"], request.message
        pending.message = Message(
            arguments_by_name(request.args, request.kwargs),
            request.request_dict.get(SENT_AT),
            str(request.id)[:128],
            priority if isinstance(priority, int) else 0,
            pending,
            leased.deliveries,
            leased.queue,
            leased.deaths if leased.needs_isolation else None,
        )
        self._arrived.append(pending.message)
        if len(self._arrived) == 1:
            self._deliver(self._submit)
        if (posts := len(pending.message.raw_posts)) and (size := leased.queued_size):
            self._post_bytes += min(1.0, posts / POSTS_TO_LEARN) * (size / posts - self._post_bytes)

    def _submit(self) -> None:
        """Submit messages together: one by one, each would be prepared by itself."""
        arrived, self._arrived = self._arrived, []
        for message in arrived:
            self.pipeline.submit(message)

    def room(self) -> tuple[int, int]:
        """Return how many messages of one post to prefetch, and their bytes; 0 until a quarter of the maximum is free.

        A message may hold many posts and is only decoded after it is fetched, so the bytes are a limit, too. The
        transport may exceed it by one message.
        """
        most = self.pipeline.max_waiting()
        free = most - self.pipeline.waiting()
        posts = max(1, int(free / self.pipeline.backlog.loaded.rows_each)) if 4 * free >= most else 0
        return posts, max(1, int(posts * self._post_bytes))

    def run_deliveries(self) -> None:
        """Run the callbacks that other threads queued for the consumer's thread."""
        self._scheduled = False  # before the queue is read, so that no later callback stays in it
        try:
            while not self._deliveries.empty():
                self._deliveries.get()()
        finally:
            if not self._deliveries.empty():  # a callback raised an error
                self._schedule()

    def retry_unended(self) -> None:
        """Retry to finish the requests whose ending failed on Redis."""
        unended, self._unended = self._unended, []
        for pending, ending in unended:
            self._finish(pending, ending)

    def adopt(self, eventer: Any) -> None:
        """Send the events of requests in flight over a new connection."""
        self._eventer = eventer
        for pending in self._held:
            pending.request.eventer = eventer

    def flush_events(self) -> None:
        """Publish buffered events."""
        if self._eventer and self._eventer.enabled:
            self._eventer.flush()

    def drain(self, goes_on: Callable[[], bool]) -> None:
        """Finish requests in flight for as long as `goes_on()` is true. Unfinished requests need `return_to_queue`."""
        while len(self._held) > len(self._unended) and goes_on():
            with suppress(queue.Empty):
                self._deliveries.get(timeout=0.1)()
        self.retry_unended()

    def return_to_queue(self) -> None:
        """Unclaim the requests still in flight, so that they return to the queue when the connection closes.

        After a failure that one of them may have caused, such as a hung device, return them now, as lapsed.
        """
        if self._held:
            logger.warning("returning %d unfinished messages to the queue", len(self._held))
        failure = self.pipeline.failure
        innocent = not failure or isinstance(failure, RedisUnavailable) or isinstance(failure.__cause__, DeviceFull)
        for pending in sorted(self._held, key=lambda pending: pending.request.message.delivery_tag, reverse=True):
            with suppress(RedisError):  # its lease expires
                if not innocent:
                    pending.request.message.return_lapsed()
            pending.request.message.unclaim()

    # Called by the pipeline, on its threads.

    def admit(self, message: Message) -> bool:
        """Return whether a message is still wanted: neither revoked nor expired."""
        return self._still_wanted(message.pending)

    def started(self, message: Message) -> None:
        """Have Celery accept the request, which starts its time limits."""
        self._deliver(partial(self._accept, message.pending, time.monotonic()))

    def computing(self, message: Message, posts: Sequence[int]) -> None:
        """Record the posts on the device in Redis, if the message is handled in isolation."""
        with suppress(RedisError):
            message.pending.request.message.suspect(posts)

    def finished(self, message: Message) -> None:
        """Have Celery's tracer finish the message: result backend, links, signals."""
        pending: PendingTask = message.pending
        if isinstance(message.fault, TimeLimitExceeded):
            pending.ending = partial(pending.request.on_timeout, False, message.fault.args[0])
            return

        def trace() -> None:
            try:
                pending.trace()
            except RedisError as fault:
                self._leave_replica(fault)
                raise

        token = CURRENT_MESSAGE.set(message)
        try:
            self.pipeline.recording.retry_write(trace)
        finally:
            CURRENT_MESSAGE.reset(token)

    def recorded(self, message: Message) -> None:
        """Have Celery end the request."""
        self._deliver(partial(self._finish, message.pending, message.pending.ending))

    def failed(self) -> None:
        """End the worker."""
        state.should_stop = EX_FAILURE  # type: ignore[assignment]  # the stub allows only None
        self._deliver(lambda: None)

    def _still_wanted(self, pending: PendingTask) -> bool:
        """Return whether a request is still wanted. If it was revoked or has expired, have Celery end it."""
        if not withdrawn(pending.request):
            return True
        self._deliver(partial(self._finish, pending, partial(announce_withdrawn, pending.request)))
        return False

    def _run_whole(self, pending: PendingTask) -> None:
        """Run a task that is not micro-batched, on the device thread."""
        if not self._still_wanted(pending):
            return
        self._deliver(partial(self._accept, pending, time.monotonic()))
        try:
            pending.trace()
        except RedisError as fault:
            self._leave_replica(fault)
            logger.warning("cannot store the result of %s (%s); the task will run again", pending.request, fault)
            try:
                raise Reject(fault, requeue=True)
            except Reject:
                ending = partial(pending.request.on_failure, ExceptionInfo())
            self._deliver(lambda: self._unended.append((pending, ending)))
        else:
            self._deliver(partial(self._finish, pending, pending.ending))

    def _leave_replica(self, fault: BaseException) -> None:
        """If Redis has become a replica, disconnect Celery's result backend: a new connection may reach the master."""
        if is_replica(fault) and (client := getattr(self._app.backend, "client", None)):
            client.connection_pool.disconnect(inuse_connections=False)

    def _deliver(self, callback: Callable[[], None]) -> None:
        self._deliveries.put(callback)
        self._schedule()

    def _schedule(self) -> None:
        if self.hub is not None and not self._scheduled:
            self._scheduled = True
            self.hub.call_soon(self.run_deliveries)

    # Calls into Celery, on the consumer's thread.

    def _accept(self, pending: PendingTask, when: float) -> None:
        try:
            pending.request.on_accepted(os.getpid(), when)
        except NotImplementedError as refused:  # a terminate request arrived meanwhile
            logger.warning("%s: %s", pending.request, refused)
        if self.hub:
            spent = time.monotonic() - when
            pending.timers = [
                self.hub.call_later(max(0.0, limit - spent), partial(self._time_out, pending, limit, fault))
                for limit, fault in pending.limits(*self._limits)
            ]

    def _time_out(self, pending: PendingTask, limit: float, fault: Exception) -> None:
        soft = isinstance(fault, SoftTimeLimitExceeded)
        if not pending.message:
            if not soft and not pending.traced:
                # A thread cannot be interrupted, so the process exits, as Celery's child processes do.
                self._finish(pending, partial(pending.request.on_timeout, False, limit))
                self.pipeline.fail_as_hung(f"{pending.request} has not ended within its time limit of {limit} s")
            return
        reason = f"{type(fault).__name__}: no result within the message's {'soft ' * soft}time limit of {limit} s"
        if self.pipeline.recording.give_up(pending.message, fault, reason) and soft:
            pending.request.on_timeout(True, limit)  # logs the soft time limit

    def _finish(self, pending: PendingTask, ending: Callable[[], None]) -> None:
        """Finish a request. If Redis fails, retry later. If Celery fails for another reason, requeue the message."""
        for timer in pending.timers:
            timer.cancel()
        try:
            try:
                ending()
            except Exception as error:  # links that the sender attached may raise anything
                if isinstance(error, BACKEND_ERRORS) and not is_permanent(error):
                    raise
                logger.exception("Celery cannot finish %s", pending.request)
                self._give_up(pending.request)
        except BACKEND_ERRORS as fault:
            self._leave_replica(fault)
            logger.warning(
                "cannot finish %s in Redis (%s); retrying in %.0f s", pending.request, fault, RETRY_INTERVAL_S
            )
            self._unended.append((pending, ending))
        else:
            self._held.discard(pending)

    def _give_up(self, request: Any) -> None:
        """Requeue a message that Celery cannot finish, or acknowledge it after MAX_DELIVERIES.

        The message's results and dead letters are already stored.
        """
        if not request.acknowledged:
            message = request.message
            (message.requeue if message.deliveries < MAX_DELIVERIES else message.ack)()
            request.acknowledged = True
