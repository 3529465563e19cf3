"""Celery's requests in flight: submit each to the pipeline, and let Celery finish it once its
outcomes are stored.

Relies on these internals of Celery 5.7 and kombu 5.7:

- `Hub.call_soon` is thread-safe since kombu 5.7. Callbacks must run on the consumer's thread: on
  another
  thread, Celery loses events, and Flower shows tasks that never end.
- `state.should_stop` ends the worker with the given exit status.
- A pool calls the Request's `on_accepted`, then one of `on_success`, `on_failure` and
  `on_timeout`. `on_timeout` fails and acknowledges the request. `on_accepted` ends a request that
  was terminated before it was accepted.
- The tracer's arguments, as in `Request.execute_using_pool`: task name, id, request dict, body,
  content type, encoding. A content type of None marks the body as decoded (celery/app/trace.py).
- The tracer raises only Reject. It stores any other error as the task's result, even one of the
  result backend. If Redis is out of memory when the result is written, but not when the error is,
  the task has failed.
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
from typing import Any, TypeAlias

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
from feedmill.shared.logs import CURRENT_FIELDS, fields_of
from feedmill.shared.redis_errors import WRONG_TYPE, is_replica
from feedmill.shared.trace_context import read_context
from feedmill.workers.pipeline.context import Observer, Owner
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.pipeline import Pipeline
from feedmill.workers.runtime.request import (
    MAX_DELIVERIES,
    announce_withdrawn,
    withdrawn,
)
from feedmill.workers.runtime.task import (
    CURRENT_MESSAGE,
    ClassifyTask,
    arguments_by_name,
)

logger = logging.getLogger(__name__)

#: Seconds between two attempts to finish a message whose result Redis does not accept.
RETRY_INTERVAL_S = 5.0
#: Assumed bytes per post before any message is seen. Low, so that the first reservation is small.
FIRST_POST_BYTES = 300.0
#: Number of posts after which the measured size replaces the assumed one.
POSTS_TO_LEARN = 256
#: Errors that the redis and rpc result backends raise after their own retries.
BACKEND_ERRORS = (RedisError, OperationalError)

Callback: TypeAlias = Callable[[], None]


class NotStored(Reject):
    """The result backend did not accept a task's result now, but may accept it later.

    `reason`: its error.
    """


def keep_unstored(backend: Any) -> Any:
    """Let a result backend raise NotStored for a transient error, and return it.

    NotStored passes through the tracer.
    """
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
    ending: Callback = lambda: None
    #: Timers of the time limits.
    timers: list[Any] = field(default_factory=list)
    #: True once the tracer has run the task.
    traced: bool = False

    def limits(
        self, worker_soft: float | None, worker_hard: float | None
    ) -> Iterator[tuple[float, Exception]]:
        """Yield each time limit, in seconds from acceptance, with the error for exceeding it.

        The message's limit takes precedence over the task's, and the task's over the worker's. A
        stock worker reads the task's limit at startup; this method reads the current value.
        """
        task = self.request.task
        hard, soft = self.request.time_limits
        soft = soft or task.soft_time_limit or worker_soft
        hard = hard or task.time_limit or worker_hard
        limits = (
            (soft, SoftTimeLimitExceeded()),
            (hard, TimeLimitExceeded(hard)),
        )
        for limit, fault in limits:
            # The sender can set anything, such as an integer too large for a float.
            if isinstance(limit, int | float) and 0 < limit <= sys.float_info.max:
                yield limit, fault

    def log_fields(self) -> dict[str, Any]:
        """Return the argument `extra` of a log record about the request."""
        if self.message is not None:
            return self.message.log_fields()
        return fields_of(str(self.request.id), None, None)

    def validate(self, worker_soft: float | None, worker_hard: float | None) -> None:
        """Raise an error for malformed fields that other threads read, where it would end the
        worker.

        Reads the fields as those threads do.
        """
        withdrawn(self.request)
        for _ in self.limits(worker_soft, worker_hard):
            pass

    def trace(self) -> None:
        """Have Celery run the task and set `ending`.

        Raises redis' errors if the result is not stored.

        Celery's own pools acknowledge such a message and lose its result. Here it is not
        acknowledged: the body of a micro-batched task runs again when Redis is back, and any other
        message returns to the queue after a while.
        """

        request = self.request

        def ended(outcome: Any) -> None:
            if isinstance(outcome, ExceptionInfo):
                # the task's body raised a BaseException
                self.ending = partial(request.on_failure, outcome)
                return
            failed, value, _ = outcome
            if failed and isinstance(value.exception, ExceptionWithTraceback):
                # as from a child process; Celery logs it as the reason to retry
                value.exception = value.exception.exc
            if self.message and failed and _is_sent_again(value.exception):
                self.message.sent_again = True
            self.ending = partial(request.on_success, outcome)

        trace = fast_trace_task if request.app.use_fast_trace_task else trace_task_ret
        # decoded in both cases
        if request.content_type is None:
            body = request.body
        else:
            body = request.message.payload
        arguments = (
            request.type,
            request.id,
            request.request_dict,
            body,
            None,
            None,
        )
        try:
            apply_target(trace, arguments, callback=ended)
        except Exception as raised:
            error = raised.reason if isinstance(raised, NotStored) else raised  # type: ignore[attr-defined]
            if request.task.acks_late and is_transient(error):
                if isinstance(error, RedisError):
                    raise error from error.__cause__
                raise ConnectionFault(str(error)) from error
            exc_info = (type(error), error, error.__traceback__)
            failure = ExceptionInfo(exc_info)
            self.ending = partial(request.on_failure, failure)
        finally:
            self.traced = True


def is_transient(error: BaseException) -> bool:
    """Return whether a result backend raised the error, and a later try may succeed."""
    if not isinstance(error, BACKEND_ERRORS):
        return False
    return not is_permanent(error)


def is_permanent(error: BaseException) -> bool:
    """Return whether the message itself causes the error, so that every retry on every worker
    fails too.

    Celery sends a failed message's errbacks with the options that the sender set. kombu turns most
    errors of sending into OperationalError, such as an unknown compression, or a queue whose name
    is a Redis key of another type.
    """
    causes = [error]
    cause = error.__cause__
    while cause and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    faults = [cause for cause in causes if isinstance(cause, RedisError | OSError)]
    if not faults:
        first_cause = causes[-1]
        return not isinstance(first_cause, OperationalError)
    return any(
        isinstance(fault, DataError) or WRONG_TYPE in str(fault) for fault in faults
    )


def _is_sent_again(exception: Any) -> bool:
    """Return whether a message that ended with this exception is sent again, by a retry or a
    requeue.
    """
    if isinstance(exception, Reject):
        return bool(exception.requeue)  # type: ignore[attr-defined]
    return isinstance(exception, Retry)


class InFlight(Owner):
    """Celery's requests between their start and their end.

    limits: the worker's soft and hard time limit, in seconds. observer: told of each message's
    begin and end.
    """

    def __init__(
        self,
        app: Application,
        limits: tuple[float | None, float | None],
        observer: Observer | None = None,
    ) -> None:
        self._app = app
        self._limits = limits
        self._observer = observer or Observer()
        #: Set once the model is loaded, before the first request.
        self.pipeline: Pipeline
        #: Celery's event loop, once it runs.
        self.hub: Any = None
        #: Celery's sender of events, of the current connection.
        self._eventer: Any = None
        #: Average bytes of a post in a compressed message, over recent messages. Used only on the
        #: consumer's thread.
        self._post_bytes = FIRST_POST_BYTES
        #: Pending tasks: started and not finished. Used only on the consumer's thread.
        self._held = set[PendingTask]()
        #: Pending tasks whose ending failed on Redis, each with the call to retry. Used only on
        #: the consumer's thread.
        self._unended: list[tuple[PendingTask, Callback]] = []
        #: Messages of this turn of the event loop.
        self._arrived: list[Message] = []
        #: Callbacks for the consumer's thread, in order.
        self._deliveries: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        #: True if the event loop is going to run them: waking it for each takes longer than the
        #: callback.
        self._scheduled = False

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._held)

    # Called on the consumer's thread.

    def run(self, request: Any) -> None:
        """Start a request: submit its posts to the pipeline, or queue a task that is not
        micro-batched as a job.

        Raises an error for malformed fields. The request is not in flight then.
        """
        pending = PendingTask(request)
        pending.validate(*self._limits)
        if not isinstance(request.task, ClassifyTask):
            self._held.add(pending)
            job = partial(self._run_whole, pending)
            self.pipeline.backlog.run(job)
            return
        message = self._message_of(pending)
        pending.message = message
        self._held.add(pending)
        self._submit_soon(message)
        self._learn_post_bytes(message, request.message.queued_size)

    def _message_of(self, pending: PendingTask) -> Message:
        """Return the message for the pipeline."""
        request = pending.request
        priority = request.delivery_info["priority"]
        leased = request.message
        message = Message(
            arguments_by_name(request.args, request.kwargs),
            sent_at=request.request_dict.get(SENT_AT),
            task_id=str(request.id)[:128],
            priority=priority if isinstance(priority, int) else 0,
            pending=pending,
            attempts=leased.deliveries,
            queue=leased.queue,
            deaths=leased.deaths if leased.needs_isolation else None,
            trace=read_context(leased.headers),
        )
        self._observer.reserved(message, leased.reserved_at_ns)
        return message

    def _submit_soon(self, message: Message) -> None:
        """Submit a message together with others of this turn of the event loop."""
        self._arrived.append(message)
        if len(self._arrived) == 1:
            self._deliver(self._submit)

    def _learn_post_bytes(self, message: Message, size: int) -> None:
        """Update the average size of a post. size: the message's bytes in the queue; 0 if
        unknown.
        """
        posts = len(message.raw_posts)
        if not posts or not size:
            return
        weight = min(1.0, posts / POSTS_TO_LEARN)
        post_bytes = size / posts
        self._post_bytes += weight * (post_bytes - self._post_bytes)

    def _submit(self) -> None:
        """Submit messages together: one by one, each would be prepared by itself."""
        arrived = self._arrived
        self._arrived = []
        for message in arrived:
            self.pipeline.submit(message)

    def room(self) -> tuple[int, int]:
        """Return how many messages of one post to prefetch, and their bytes; 0 until a quarter of
        the maximum is free.

        A message may hold many posts and is only decoded after it is fetched, so the bytes are a
        limit, too. The transport may exceed it by one message.
        """
        most = self.pipeline.max_waiting()
        free = most - self.pipeline.waiting()
        posts = 0
        if 4 * free >= most:
            rows_each = self.pipeline.backlog.loaded.rows_each
            posts = int(free / rows_each)
            posts = max(1, posts)
        size = int(posts * self._post_bytes)
        return posts, max(1, size)

    def run_deliveries(self) -> None:
        """Run the callbacks that other threads queued for the consumer's thread."""
        # before the queue is read, so that no later callback stays in it
        self._scheduled = False
        try:
            while not self._deliveries.empty():
                callback = self._deliveries.get()
                callback()
        finally:
            if not self._deliveries.empty():  # a callback raised an error
                self._schedule()

    def retry_unended(self) -> None:
        """Retry to finish the requests whose ending failed on Redis."""
        unended = self._unended
        self._unended = []
        for pending, ending in unended:
            self._end(pending, ending)

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
        """Finish requests in flight for as long as `goes_on()` is true.

        Unfinished requests need `return_to_queue`.
        """
        while len(self._held) > len(self._unended) and goes_on():
            with suppress(queue.Empty):
                callback = self._deliveries.get(timeout=0.1)
                callback()
        self.retry_unended()

    def return_to_queue(self) -> None:
        """Unclaim the requests still in flight, so that they return to the queue when the
        connection closes.

        After a failure that one of them may have caused, such as a hung device, return them now,
        as lapsed.
        """
        if self._held:
            logger.warning(
                "returning %d unfinished messages to the queue", len(self._held)
            )
        failure = self.pipeline.failure
        innocent = (
            not failure
            or isinstance(failure, RedisUnavailable)
            or isinstance(failure.__cause__, DeviceFull)
        )
        messages = [pending.request.message for pending in self._held]
        messages.sort(key=lambda message: message.delivery_tag, reverse=True)
        for message in messages:
            with suppress(RedisError):  # its lease expires
                if not innocent:
                    message.return_lapsed()
            message.unclaim()

    # Called by the pipeline, on its threads.

    def admit(self, message: Message) -> bool:
        """Return whether a message is still wanted: neither revoked nor expired."""
        return self._still_wanted(message.pending)

    def started(self, message: Message) -> None:
        """Have Celery accept the request, which starts its time limits."""
        self._deliver_acceptance(message.pending)

    def computing(self, message: Message, posts: Sequence[int]) -> None:
        """Record the posts on the device in Redis, if the message is handled in isolation."""
        with suppress(RedisError):
            message.pending.request.message.suspect(posts)

    def finished(self, message: Message) -> None:
        """Have Celery's tracer finish the message: result backend, links, signals."""
        pending: PendingTask = message.pending
        if isinstance(message.fault, TimeLimitExceeded):
            limit = message.fault.args[0]
            pending.ending = partial(pending.request.on_timeout, False, limit)
            return

        def trace() -> None:
            try:
                pending.trace()
            except RedisError as fault:
                self._leave_replica(fault)
                raise

        token = CURRENT_MESSAGE.set(message)
        fields = CURRENT_FIELDS.set(message.log_fields)
        try:
            with self._observer.running(message):
                self.pipeline.recording.retry_write(trace)
        finally:
            CURRENT_FIELDS.reset(fields)
            CURRENT_MESSAGE.reset(token)

    def recorded(self, message: Message) -> None:
        """Have Celery end the request."""
        pending: PendingTask = message.pending
        self._deliver_ending(pending, pending.ending)

    def failed(self) -> None:
        """End the worker."""
        state.should_stop = EX_FAILURE  # type: ignore[assignment]  # the stub allows only None
        self._deliver(lambda: None)

    def _still_wanted(self, pending: PendingTask) -> bool:
        """Return whether a request is still wanted.

        If it was revoked or has expired, have Celery end it.
        """
        if not withdrawn(pending.request):
            return True
        announce = partial(announce_withdrawn, pending.request)
        self._deliver_ending(pending, announce)
        return False

    def _run_whole(self, pending: PendingTask) -> None:
        """Run a task that is not micro-batched, on the device thread."""
        if not self._still_wanted(pending):
            return
        self._deliver_acceptance(pending)
        try:
            pending.trace()
        except RedisError as fault:
            self._leave_replica(fault)
            logger.warning(
                "cannot store the result of %s (%s); the task will run again",
                pending.request,
                fault,
                extra=pending.log_fields(),
            )
            try:
                raise Reject(fault, requeue=True)
            except Reject:
                ending = partial(pending.request.on_failure, ExceptionInfo())
            self._deliver(lambda: self._unended.append((pending, ending)))
        else:
            self._deliver_ending(pending, pending.ending)

    def _leave_replica(self, fault: BaseException) -> None:
        """If Redis has become a replica, disconnect Celery's result backend: a new connection may
        reach the master.
        """
        if not is_replica(fault):
            return
        client = getattr(self._app.backend, "client", None)
        if client:
            client.connection_pool.disconnect(inuse_connections=False)

    def _deliver_acceptance(self, pending: PendingTask) -> None:
        now = time.monotonic()
        accept = partial(self._accept, pending, now)
        self._deliver(accept)

    def _deliver_ending(self, pending: PendingTask, ending: Callback) -> None:
        end = partial(self._end, pending, ending)
        self._deliver(end)

    def _deliver(self, callback: Callback) -> None:
        self._deliveries.put(callback)
        self._schedule()

    def _schedule(self) -> None:
        if self.hub is not None and not self._scheduled:
            self._scheduled = True
            self.hub.call_soon(self.run_deliveries)

    # Calls into Celery, on the consumer's thread.

    def _accept(self, pending: PendingTask, when: float) -> None:
        request = pending.request
        try:
            request.on_accepted(os.getpid(), when)
        except NotImplementedError as error:  # a terminate request arrived meanwhile
            logger.warning("%s: %s", request, error, extra=pending.log_fields())
        if not self.hub:
            return
        spent = time.monotonic() - when
        timers = []
        for limit, fault in pending.limits(*self._limits):
            seconds = max(0.0, limit - spent)
            time_out = partial(self._time_out, pending, limit, fault)
            timer = self.hub.call_later(seconds, time_out)
            timers.append(timer)
        pending.timers = timers

    def _time_out(self, pending: PendingTask, limit: float, fault: Exception) -> None:
        request = pending.request
        is_soft = isinstance(fault, SoftTimeLimitExceeded)
        if not pending.message:
            if not is_soft and not pending.traced:
                # A thread cannot be interrupted, so the process exits, as Celery's child processes
                # do.
                ending = partial(request.on_timeout, False, limit)
                self._end(pending, ending)
                self.pipeline.fail_as_hung(
                    f"{request} has not ended within its time limit of {limit} s"
                )
            return
        kind = "soft time limit" if is_soft else "time limit"
        error = type(fault).__name__
        reason = f"{error}: no result within the message's {kind} of {limit} s"
        gave_up = self.pipeline.recording.give_up(pending.message, fault, reason)
        if gave_up and is_soft:
            request.on_timeout(True, limit)  # logs the soft time limit

    def _end(self, pending: PendingTask, ending: Callback) -> None:
        """End a request. If Redis fails, retry later."""
        for timer in pending.timers:
            timer.cancel()
        try:
            self._end_or_give_up(pending, ending)
        except BACKEND_ERRORS as fault:
            self._leave_replica(fault)
            logger.warning(
                "cannot finish %s in Redis (%s); retrying in %.0f s",
                pending.request,
                fault,
                RETRY_INTERVAL_S,
                extra=pending.log_fields(),
            )
            self._unended.append((pending, ending))
        else:
            self._held.discard(pending)
            if pending.message is not None:
                self._observer.ended(pending.message)

    def _end_or_give_up(self, pending: PendingTask, ending: Callback) -> None:
        """Have Celery end a request. If Celery fails, requeue the message.

        Raises transient errors of Redis.
        """
        try:
            ending()
        except Exception as error:
            # links that the sender attached may raise anything
            if is_transient(error):
                raise
            request = pending.request
            logger.exception(
                "Celery cannot finish %s", request, extra=pending.log_fields()
            )
            self._give_up(request)

    def _give_up(self, request: Any) -> None:
        """Requeue a message that Celery cannot finish, or acknowledge it after MAX_DELIVERIES.

        The message's results and dead letters are already stored.
        """
        if request.acknowledged:
            return
        message = request.message
        if message.deliveries < MAX_DELIVERIES:
            message.requeue()
        else:
            message.ack()
        request.acknowledged = True
