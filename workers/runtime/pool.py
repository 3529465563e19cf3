"""A Celery worker pool with exactly one slot: the device.

The obvious way to batch with Celery is a strategy that collects requests and calls a task with all of them
(celery-batches). It takes the requests away from Celery: no events, no revokes, no retries, and one exception
acknowledges the whole batch. Here the default strategy, the Request class and the tracer stay Celery's own. The pool
only decides *when* a request's task runs: once the device has its answer. Celery sees a busy pool that holds many
messages and finishes them one by one.

The pool hands messages to `Pipeline` and does not depend on its parts. Only this module, consumer.py, events.py,
request.py, pending.py, message_metadata.py, task.py and shared/broker.py depend on Celery.

Relies on these internals of Celery 5.7 and kombu 5.7, beyond `BasePool`:

- `on_apply`'s `args` are (task name, id, request dict, body, content type, encoding), and the request dict holds the
  decoded `args` and `kwargs` (celery/worker/request.py). The tracer decodes the body again, unless the content type is
  None, which marks it as decoded (celery/app/trace.py, `trace_task_ret`).
- Errors raised by `terminate_job`, `grow`, `shrink` and `restart` are sent as the reply to the remote command.
- `Hub.call_soon` is thread-safe since kombu 5.7. Callbacks must run on the consumer's thread: called elsewhere, Celery
  loses events, and Flower shows tasks that never end.
- `Hub._pop_ready` returns the acknowledgements that a closing worker has yet to send.
- `state.should_stop` ends the worker with the given exit status.
"""

import gc
import logging
import os
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.concurrency.base import BasePool
from celery.exceptions import Reject, SoftTimeLimitExceeded, TimeLimitExceeded, WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.signals import worker_shutting_down
from celery.states import STARTED
from celery.worker import state
from redis.exceptions import RedisError

from shared.broker import SENT_AT, connect
from shared.errors import DeviceFull, DeviceLost, UserError
from shared.metrics import connect_for_monitoring
from shared.model_routing import ANNOUNCE_INTERVAL_S, RequestedModel, announce, deregister, register, requested_model
from shared.redis_errors import is_replica
from shared.results import ResultsStore
from shared.settings import Settings
from workers.models import device
from workers.pipeline.calibration import calibrate
from workers.pipeline.message import Message
from workers.pipeline.pipeline import Pipeline
from workers.pipeline.poison import PoisonTracker
from workers.runtime.hot_swap import Deployer, freeze_heap, load_wanted
from workers.runtime.message_metadata import delivery_count, source_queue
from workers.runtime.metrics import TURN_INTERVAL_S, WorkerMetrics
from workers.runtime.pending import BACKEND_ERRORS, PendingTask, is_permanent
from workers.runtime.request import announce_withdrawn, withdrawn
from workers.runtime.task import CURRENT_MESSAGE, ClassifyTask, arguments_by_name
from workers.transport.held import end_isolation, is_isolated, queued_size, unclaim

logger = logging.getLogger(__name__)

#: Net new objects between two garbage collections. Python's default of 700 is less than one message.
GC_THRESHOLD = 20_000
#: Seconds between two attempts to finish a message whose result Redis does not accept.
RETRY_INTERVAL_S = 5.0
#: Assumed bytes per post before any message is seen. Low, so that the first reservation is small.
FIRST_POST_BYTES = 300.0
#: Number of posts after which the measured size replaces the assumed one.
POSTS_TO_LEARN = 256


class DevicePool(BasePool):
    """Pass each request's posts to the pipeline and, once their outcomes are known, let Celery finish the request."""

    #: Closing waits for the device, which a signal handler must not do.
    signal_safe = False
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.limit != 1:
            logger.warning("ignoring concurrency %s: a worker has one device", self.limit)
        self.limit = 1
        self.settings: Settings = self.app.settings
        self._redis = connect_for_monitoring(self.settings)
        self._hub: Any = None
        #: None unless FEEDMILL_METRICS_PORT is set.
        self._metrics: WorkerMetrics | None = None
        #: Periodic calls on the event loop, such as announcements and the metrics' heartbeat.
        self._timers: list[Any] = []
        #: Pending tasks: fetched and not finished. Used only on the consumer's thread.
        self._held: set[PendingTask] = set()
        #: Pending tasks whose ending failed on Redis, each with the call to repeat. Used only on the consumer's thread.
        self._unended: list[tuple[PendingTask, Callable[[], None]]] = []
        #: Average bytes of a post in a compressed message, over recent messages. Used only on the consumer's thread.
        self._post_bytes = FIRST_POST_BYTES
        #: Names of micro-batched tasks that store the state STARTED.
        self._tracked: set[str] = set()
        #: Sends waiting task events. Set by workers/runtime/consumer.py for each connection.
        self.flush_events: Callable[[], None] = lambda: None
        #: Rewrites dead letters that Redis may have lost. Set by workers/runtime/consumer.py.
        self.catch_up: Callable[[], None] = lambda: None
        #: Number of signals received that request a shutdown.
        self._shutdown_signals = 0
        worker_shutting_down.connect(self._on_shutting_down, weak=False)
        #: Callbacks for the consumer's thread, in order.
        self._deliveries: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def on_start(self) -> None:
        """Load the model, before the worker takes any message. A UserError ends the worker."""
        _, worker = self.options["initargs"]
        self._node: str = worker
        try:
            if self.settings.metrics_port:  # report a taken port before the slow steps
                self._metrics = WorkerMetrics(self.settings, worker)
                self._metrics.serve()
            self._device = device.select_device(self.settings.device, self.settings.dtype, self.settings.engine)
            logger.info("device %s", self._device)
            began = time.monotonic()
            asked = self._wanted()
            classifier = load_wanted(asked, self.settings, self._device)
            budget = calibrate(classifier, self.settings)
        except (UserError, DeviceFull, DeviceLost) as error:
            logger.critical("%s", error)
            raise WorkerShutdown(EX_FAILURE) from None
        logger.info(
            "model %s (%s) loaded in %.1f s; token budget %d",
            classifier.weights.name,
            classifier.kind,
            time.monotonic() - began,
            budget.tokens,
        )
        self._store = ResultsStore(connect(self.settings), self.settings)
        self.pipeline = Pipeline(
            classifier,
            self._store,
            self.settings,
            budget,
            worker,
            poison=PoisonTracker(connect_for_monitoring(self.settings)),
            admits=self._admits,
            on_started=self._on_started,
            on_finished=self._on_finished,
            on_recorded=self._on_recorded,
            on_failure=self._on_failure,
        )
        self.pipeline.start()
        self._deployer = Deployer(
            self.pipeline, self.settings, self._redis, asked, lambda: self.pipeline.run_on_writer_thread(self._announce)
        )
        self._deployer.start()
        for task in self.app.tasks.values():
            if isinstance(task, ClassifyTask) and task.track_started:
                # `_on_started` stores the state: the task starts long before the tracer runs it.
                task.track_started = False
                self._tracked.add(task.name)
        if self._metrics:
            self._metrics.loaded(self.pipeline, held=lambda: len(self._held))
        freeze_heap(self._device)
        gc.set_threshold(GC_THRESHOLD)

    def _wanted(self) -> RequestedModel | None:
        """Return the model wanted for the queue. Raises UserError.

        None while Redis is unreachable; a later check finds it.
        """
        try:
            return requested_model(self._redis, self.settings.queue)
        except RedisError:
            return None

    def register_with_event_loop(self, loop: Any) -> None:
        """Schedule the periodic calls. Called at each connection; messages in flight survive a reconnect
        (workers/transport/redis_transport.py).
        """
        self._hub = loop
        loop.call_soon(self._run_deliveries)
        for timer in self._timers:
            timer.cancel()
        announcing = partial(self.pipeline.run_on_writer_thread, self._announce)
        announcing()
        self._timers = [
            loop.call_repeatedly(ANNOUNCE_INTERVAL_S, announcing),
            loop.call_repeatedly(RETRY_INTERVAL_S, self._end_again),
            loop.call_repeatedly(RETRY_INTERVAL_S, self.catch_up),
        ]
        if self._metrics:
            self._timers.append(loop.call_repeatedly(TURN_INTERVAL_S, self._metrics.heartbeat))

    def _announce(self) -> None:
        """Register the worker and its model with the served queues (model_routing.py). After a Redis error, retry next
        period.
        """
        self._deployer.request_check()
        model = self.pipeline.classifier.weights.name
        try:
            register(self._redis, self._node)
        except RedisError as fault:
            logger.warning("cannot register worker %s (%s); retrying in a minute", self._node, fault)
            return
        for name in self._queues():
            try:
                other = announce(self._redis, name, model)
            except RedisError as fault:
                logger.warning("cannot register queue %s as served (%s); retrying in a minute", name, fault)
                return
            if other and not self._deployer.report:  # expected during a deployment
                logger.warning(
                    "queue %s was just served with model %s and is now served with %s: while both serve it, posts go "
                    "to either model at random. Give each model its own queue (--queue)",
                    name,
                    other,
                    model,
                )

    def deploy(self) -> dict[str, Any]:
        """Schedule a deployment check and return the latest status."""
        self._deployer.request_check()
        return self._reported()

    def _reported(self) -> dict[str, Any]:
        return self._deployer.report._asdict() if self._deployer.report else {}

    def _queues(self) -> list[str]:
        """Return the queues that this worker consumes."""
        return sorted(self.app.amqp.queues.consume_from)

    # Requests, called by Celery.

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],  # noqa: ARG002 - always empty; Celery packs everything into args
        callback: Callable[[Any], None],
        accept_callback: Callable[[int, float], None],
        error_callback: Callable[[Any], None],
        timeout_callback: Callable[[bool, float], None],
        **_: Any,
    ) -> None:
        """Start a request: submit its posts to the pipeline, or queue a task that is not micro-batched as a job."""
        pending = PendingTask(target, args, accept_callback, callback, error_callback, timeout_callback)
        if not self.active:
            unclaim(pending.request.message)  # fetched while closing; returns to the queue when the connection closes
            return
        self._held.add(pending)
        name, task_id, request, _, content_type, _ = args
        if content_type is not None:
            pending.args = (name, task_id, request, pending.request.message.payload, None, None)
        if isinstance(pending.request.task, ClassifyTask):
            arguments = arguments_by_name(request["args"], request["kwargs"])
            delivery = pending.request.delivery_info
            priority = delivery["priority"]
            pending.message = Message(
                arguments,
                request.get(SENT_AT),
                str(task_id)[:128],
                priority if isinstance(priority, int) else 0,
                bool(delivery.get("redelivered")),
                pending,
                delivery_count(pending.request.message),
                source_queue(pending.request.message),
            )
            self._learn_size(len(pending.message.raw_posts), queued_size(pending.request.message))
            self.pipeline.submit(pending.message)
        else:
            self.pipeline.run_on_device_thread(partial(self._run_whole, pending), f"task {name}[{task_id}]")

    def _learn_size(self, posts: int, size: int) -> None:
        if posts and size:
            self._post_bytes += min(1.0, posts / POSTS_TO_LEARN) * (size / posts - self._post_bytes)

    # Called by the pipeline, on its threads.

    def _admits(self, message: Message) -> bool:
        return self._still_wanted(message.pending)

    def _still_wanted(self, pending: PendingTask) -> bool:
        """Return whether a request is still to run. If it was revoked or has expired, have Celery end it."""
        if not withdrawn(pending.request):
            return True
        self._deliver(partial(self._finish, pending, partial(announce_withdrawn, pending.request)))
        return False

    def _on_started(self, message: Message) -> None:
        pending: PendingTask = message.pending
        if message.missing_outcomes:  # workers/pipeline/poison.py tracks the forward pass that follows
            with suppress(RedisError):
                end_isolation(pending.request.message)
        self._deliver(partial(self._accept, pending, time.monotonic()))
        if pending.request.task.name in self._tracked and not pending.request.ignore_result:
            self.pipeline.run_on_writer_thread(partial(self._store_started, pending.request))

    def _store_started(self, request: Any) -> None:
        meta = {"pid": os.getpid(), "hostname": request.hostname}
        try:
            request.task.backend.store_result(request.id, meta, STARTED, request=request._context)
        except Exception as fault:  # a backend may raise anything; the result is unaffected
            logger.warning("cannot store state STARTED of task %s (%s)", request.id, fault)

    def _on_finished(self, message: Message) -> None:
        """Have Celery's tracer finish the message: result backend, links, signals."""
        pending: PendingTask = message.pending
        if isinstance(message.fault, TimeLimitExceeded):
            pending.ending = partial(pending.timed_out, False, message.fault.args[0])
            return

        def trace() -> None:
            try:
                pending.trace()
            except RedisError as fault:
                self._leave_replica(fault)
                raise

        token = CURRENT_MESSAGE.set(message)
        try:
            self.pipeline.retry_write(trace)
        finally:
            CURRENT_MESSAGE.reset(token)

    def _leave_replica(self, fault: BaseException) -> None:
        """Reconnect Celery's result backend if Redis has become a replica, because the master is elsewhere."""
        if is_replica(fault) and (client := getattr(self.app.backend, "client", None)):
            client.connection_pool.disconnect(inuse_connections=False)

    def _on_recorded(self, message: Message) -> None:
        self._deliver(partial(self._finish, message.pending, message.pending.ending))

    def _run_whole(self, pending: PendingTask) -> None:
        """Run a task that is not micro-batched, on the device thread."""
        if self._still_wanted(pending):
            self._deliver(partial(self._accept, pending, time.monotonic()))
            try:
                pending.trace()
            except RedisError as fault:
                self._leave_replica(fault)
                logger.warning("cannot store the result of %s (%s); the task will run again", pending.request, fault)
                try:
                    raise Reject(fault, requeue=True)
                except Reject:
                    ending = partial(pending.failed, ExceptionInfo())
                self._deliver(partial(self._finish_later, pending, ending))
            else:
                self._deliver(partial(self._finish, pending, pending.ending))

    def _on_failure(self) -> None:
        state.should_stop = EX_FAILURE  # type: ignore[assignment]  # the stub allows only None
        self._deliver(lambda: None)

    # Calls into Celery, on the consumer's thread.

    def _deliver(self, callback: Callable[[], None]) -> None:
        self._deliveries.put(callback)
        if self._hub is not None:
            self._hub.call_soon(self._run_deliveries)

    def _run_deliveries(self) -> None:
        while not self._deliveries.empty():
            self._deliveries.get()()

    def _accept(self, pending: PendingTask, when: float) -> None:
        try:
            pending.accepted(os.getpid(), when)
        except NotImplementedError as refused:  # a terminate request arrived meanwhile
            logger.warning("%s: %s", pending.request, refused)
        if self._hub:
            spent = time.monotonic() - when
            pending.timers = [
                self._hub.call_later(max(0.0, limit - spent), partial(self._time_out, pending, limit, fault))
                for limit, fault in pending.limits(self.options.get("soft_timeout"), self.options.get("timeout"))
            ]

    def _time_out(self, pending: PendingTask, limit: float, fault: Exception) -> None:
        soft = isinstance(fault, SoftTimeLimitExceeded)
        if not pending.message:
            if not soft and not pending.traced:
                # A thread cannot be interrupted, so the process exits, as a child process of Celery's does.
                self._finish(pending, partial(pending.timed_out, False, limit))
                self.pipeline.fail_as_hung(f"{pending.request} has not ended within its time limit of {limit} s")
            return
        reason = f"{type(fault).__name__}: no result within the message's {'soft ' * soft}time limit of {limit} s"
        if pending.message and self.pipeline.give_up(pending.message, fault, reason) and soft:
            pending.timed_out(True, limit)  # logs the soft time limit

    def _finish(self, pending: PendingTask, ending: Callable[[], None]) -> None:
        """Finish a request. If Redis rejects a write, retry later. If Celery fails, return the message to the queue."""
        for timer in pending.timers:
            timer.cancel()
        alone = is_isolated(pending.request.message)
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
            self._finish_later(pending, ending)
        else:
            self._held.discard(pending)
            for todo in self._hub._pop_ready() if alone and self._hub else ():
                todo()  # acknowledge at once: the next message waits for it, and the event loop may sleep until a timer

    def _give_up(self, request: Any) -> None:
        """Return a message that Celery cannot finish to the queue. After `max_deliveries`, acknowledge it instead.

        Its results and dead letters are already stored.
        """
        if not request.acknowledged:  # set before the message's own flag, which waits for the event loop
            message = request.message
            (message.requeue if delivery_count(message) < self.settings.max_deliveries else message.ack)()
            request.acknowledged = True

    def _finish_later(self, pending: PendingTask, ending: Callable[[], None]) -> None:
        self._unended.append((pending, ending))

    def _end_again(self) -> None:
        unended, self._unended = self._unended, []
        for pending, ending in unended:
            self._finish(pending, ending)

    def room(self) -> int:
        """Return how many messages to prefetch, so that their posts fit. 0 until a quarter of the room is free."""
        most = self.pipeline.max_waiting()
        free = most - self.pipeline.waiting()
        return max(1, int(free / self.pipeline.rows_per_post())) if 4 * free >= most else 0

    def room_bytes(self) -> int:
        """Return how many bytes to prefetch. The transport may exceed this by one message.

        A message may hold many posts and is only read after it is fetched, so the room for posts is converted into
        bytes.
        """
        return max(1, int(self.room() * self._post_bytes))

    def adopt(self, eventer: Any) -> None:
        """Move the messages in flight to a new connection.

        Rewrites results that Redis may have lost, before acknowledgements are sent. Raises redis' errors.
        """
        for pending in self._held:
            pending.request.eventer = eventer
        self._store.catch_up()

    def _on_shutting_down(self, **_: Any) -> None:
        self._shutdown_signals += 1

    def on_close(self) -> None:
        """Finish the messages in flight within the drain time, while acknowledgements still reach Redis.

        A further shutdown signal ends the drain; Celery itself ignores a second SIGTERM.
        """
        deadline, signals = time.monotonic() + self.settings.drain, min(1, self._shutdown_signals)
        while len(self._held) > len(self._unended) and not self.pipeline.failure and time.monotonic() < deadline:
            if state.should_terminate is not None or self._shutdown_signals > signals:
                break
            try:
                self._deliveries.get(timeout=0.1)()
            except queue.Empty:
                continue
            for todo in self._hub._pop_ready() if self._hub else ():
                todo()
        self._end_again()
        self.flush_events()
        for pending in self._held:
            unclaim(pending.request.message)
        if self._held:
            logger.warning("returning %d unfinished messages to the queue", len(self._held))
        self.pipeline.stop()
        self._deployer.stop()
        if not self.pipeline.failure:
            with suppress(RedisError):  # the registration then expires by itself
                deregister(self._redis, self._node)

    # Unsupported remote commands. The sender receives the error's text.

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        raise NotImplementedError(
            "the task has started and cannot be terminated: its posts share micro-batches with other messages"
        )

    def grow(self, n: int = 1) -> None:
        raise NotImplementedError(f"the pool is one device and cannot grow by {n}: start a worker for another device")

    def shrink(self, n: int = 1) -> None:
        raise NotImplementedError(f"the pool is one device and cannot shrink by {n}: shut the worker down instead")

    def restart(self) -> None:
        raise NotImplementedError("the pool is the worker's own process: restart the worker")

    def on_terminate(self) -> None:
        self.pipeline.stop(seconds=1.0)

    def _get_info(self) -> dict[str, Any]:
        """Return the pool's part of `inspect stats` and `feedmill status`."""
        totals, weights = self.pipeline.statistics.totals, self.pipeline.classifier.weights
        recent = self.pipeline.statistics.recent(time.monotonic())
        info: dict[str, Any] = super()._get_info()  # type: ignore[misc]  # not in the stub
        return (
            info
            | {"device": str(self._device), "model": weights.name, "weights": weights.sha256, "queues": self._queues()}
            | {"deploy": self._reported(), "token_budget": self.pipeline.budget.tokens}
            | asdict(totals)
            | {
                "padding_efficiency": totals.tokens / totals.padded_tokens if totals.padded_tokens else 0.0,
                "recent": asdict(recent),
                "rows_waiting": self.pipeline.waiting(),
                "oldest_row_seconds": self.pipeline.oldest_age(),
                "messages_held": len(self._held),
            }
        )
