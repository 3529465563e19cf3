"""A Celery worker pool with exactly one slot: the device.

The obvious way to batch with Celery, a strategy that collects requests and calls a task with the lot
(celery-batches), takes the requests away from Celery: no events, no revokes, no retries, and one exception
acknowledges them all. Here the default strategy, the Request class and the tracer stay Celery's own. The pool
only decides *when* a request's task runs: once the device has its answer. Celery sees a pool that is busy with
many messages at a time and finishes them one by one.

Of what happens to a message in between, this file knows `Pipeline` alone. Celery is known here, in consumer.py,
events.py, request.py, ticket.py, delivery.py and task.py beside it, and in shared/broker.py.

What it leans on in Celery 5.7 and kombu 5.7, beyond `BasePool`:

- `on_apply`'s `args` are (task name, id, request dict, body, content type, encoding), and the request dict
  holds the decoded `args` and `kwargs` (celery/worker/request.py). The tracer decodes the body once more, unless
  the content type is None: then the body is taken for decoded (celery/app/trace.py, `trace_task_ret`).
- What `terminate_job`, `grow`, `shrink` and `restart` raise is the answer to the remote command that asked for it.
- `Hub.call_soon` may be called from any thread since kombu 5.7. Callbacks must run on the consumer's thread:
  from another one Celery loses events, and Flower shows tasks that never end.
- `Hub._pop_ready` holds the acknowledgements that a closing worker has yet to send.
- `state.should_stop` ends the worker with that exit status.
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
from redis.exceptions import RedisError as RedisFault

from shared.broker import SENT_AT, connect
from shared.errors import DeviceFull, DeviceLost, UserError
from shared.metrics import connect_briefly
from shared.refusals import is_replica
from shared.results import ResultsStore
from shared.serving import PERIOD, Wanted, announce, deregister, register, wanted
from shared.settings import Settings
from shared.transport import end_alone, is_alone, queued_size, unclaim
from workers import device
from workers.calibration import calibrate
from workers.delivery import came_from, times_delivered
from workers.deploy import Deployer, load_wanted, settle
from workers.message import Message
from workers.metrics import TURN_INTERVAL_S, WorkerMetrics
from workers.pipeline import Pipeline
from workers.request import tell_withdrawn, withdrawn
from workers.suspects import Suspects
from workers.task import IN_HAND, ClassifyTask, named
from workers.ticket import BACKEND_AWAY, Ticket, is_of_message

logger = logging.getLogger(__name__)

#: Objects made, and not freed, between two looks for garbage; Python's 700 are less than one message.
GARBAGE_LOOKS = 20_000
#: Seconds between two tries to end a message whose result Redis does not take.
RETRY_INTERVAL_S = 5.0
#: Bytes of a waiting post until messages have shown their own: few, so that the first reservation is small.
FIRST_POST_BYTES = 300.0
#: Posts after which messages have shown it.
POSTS_LEARNT = 256


class DevicePool(BasePool):
    """Hands the posts of each request to the pipeline and, when their outcomes are there, lets Celery finish it."""

    #: Closing waits for the device: never inside a signal handler.
    signal_safe = False
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.limit != 1:
            logger.warning("the device is one slot: concurrency %s is taken as 1", self.limit)
        self.limit = 1
        self.settings: Settings = self.app.settings
        self._redis = connect_briefly(self.settings)
        self._hub: Any = None
        #: None where no port is set, and then nobody is told anything.
        self._metrics: WorkerMetrics | None = None
        #: What comes round: a turn for the metrics, a word on what is served.
        self._ticking: list[Any] = []
        #: What was fetched and is not yet finished. Touched by the consumer's thread alone.
        self._held: set[Ticket] = set()
        #: Those of them whose ending Redis did not take, each with what is to be done again. Likewise.
        self._unended: list[tuple[Ticket, Callable[[], None]]] = []
        #: Bytes that a post takes in a message, compressed as it comes, by the latest messages. Likewise.
        self._post_bytes = FIRST_POST_BYTES
        #: Names of the micro-batched tasks whose state STARTED is stored.
        self._tracked: set[str] = set()
        #: Sends the task events that still wait for others; workers/consumer.py sets it for each connection.
        self.flush_events: Callable[[], None] = lambda: None
        #: Writes dead letters again that Redis may have lost; workers/consumer.py sets it.
        self.catch_up: Callable[[], None] = lambda: None
        #: How often a signal asked the worker to end.
        self._asked = 0
        worker_shutting_down.connect(self._on_asked, weak=False)
        #: Callbacks for the consumer's thread, in order.
        self._deliveries: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def on_start(self) -> None:
        """Load the model; a worker that cannot classify must not take a message."""
        _, worker = self.options["initargs"]
        self._node: str = worker
        try:
            if self.settings.metrics_port:  # a port that is taken is told before anything takes long
                self._metrics = WorkerMetrics(self.settings, worker)
                self._metrics.serve()
            self._device = device.choose(self.settings.device, self.settings.dtype, self.settings.engine)
            logger.info("device %s", self._device)
            began = time.monotonic()
            asked = self._wanted()
            classifier = load_wanted(asked, self.settings, self._device)
            budget = calibrate(classifier, self.settings)
        except (UserError, DeviceFull, DeviceLost) as error:
            logger.critical("%s", error)
            raise WorkerShutdown(EX_FAILURE) from None
        logger.info(
            "%s classifies by %s, loaded in %.1f s; token budget %d",
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
            suspects=Suspects(connect_briefly(self.settings)),
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
                # It starts long before the tracer runs it: `_on_started` tells.
                task.track_started = False
                self._tracked.add(task.name)
        if self._metrics:
            self._metrics.loaded(self.pipeline, held=lambda: len(self._held))
        settle(self._device)
        gc.set_threshold(GARBAGE_LOOKS)

    def _wanted(self) -> Wanted | None:
        """What the queue is to be served with; where Redis does not tell, the first look will. Raises UserError."""
        try:
            return wanted(self._redis, self.settings.queue)
        except RedisFault:
            return None

    def register_with_event_loop(self, loop: Any) -> None:
        """Called anew after each lost connection, which costs nothing of what is held (shared/transport.py)."""
        self._hub = loop
        loop.call_soon(self._run_deliveries)
        for timer in self._ticking:
            timer.cancel()
        announcing = partial(self.pipeline.run_on_writer_thread, self._announce)
        announcing()
        self._ticking = [
            loop.call_repeatedly(PERIOD, announcing),
            loop.call_repeatedly(RETRY_INTERVAL_S, self._end_again),
            loop.call_repeatedly(RETRY_INTERVAL_S, self.catch_up),
        ]
        if self._metrics:
            self._ticking.append(loop.call_repeatedly(TURN_INTERVAL_S, self._metrics.turn))

    def _announce(self) -> None:
        """Say which queues are served with which model (shared/serving.py); that can wait for Redis, and for rights."""
        self._deployer.look()
        model = self.pipeline.classifier.weights.name
        try:
            register(self._redis, self._node)
        except RedisFault as fault:
            logger.warning("cannot register worker %s as alive: %s", self._node, fault)
            return
        for name in self._queues():
            try:
                other = announce(self._redis, name, model)
            except RedisFault as fault:
                logger.warning("that queue %s is served cannot be noted (%s)", name, fault)
                return
            if other and not self._deployer.report:  # whoever deploys knows that one takes over from another
                logger.warning(
                    "queue %s was served with %s moments ago, and is with %s now: while both serve it, which one a "
                    "post meets is chance. A model has a queue of its own (--queue)",
                    name,
                    other,
                    model,
                )

    def deploy(self) -> dict[str, Any]:
        """Look what is wanted, soon, and say how the latest asking goes: what the remote command answers."""
        self._deployer.look()
        return self._reported()

    def _reported(self) -> dict[str, Any]:
        return self._deployer.report._asdict() if self._deployer.report else {}

    def _queues(self) -> list[str]:
        """The queues that this worker takes messages from."""
        return sorted(self.app.amqp.queues.consume_from)

    # From Celery: a request comes.

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
        ticket = Ticket(target, args, accept_callback, callback, error_callback, timeout_callback)
        if not self.active:
            unclaim(ticket.request.message)  # fetched while closing: it goes back when the connection closes
            return
        self._held.add(ticket)
        name, task_id, request, _, content_type, _ = args
        if content_type is not None:
            ticket.args = (name, task_id, request, ticket.request.message.payload, None, None)
        if isinstance(ticket.request.task, ClassifyTask):
            arguments = named(request["args"], request["kwargs"])
            delivery = ticket.request.delivery_info
            priority = delivery["priority"]
            ticket.message = Message(
                arguments,
                request.get(SENT_AT),
                str(task_id)[:128],
                priority if isinstance(priority, int) else 0,
                bool(delivery.get("redelivered")),
                ticket,
                times_delivered(ticket.request.message),
                came_from(ticket.request.message),
            )
            self._learn_size(len(ticket.message.raw_posts), queued_size(ticket.request.message))
            self.pipeline.submit(ticket.message)
        else:
            self.pipeline.run_on_device_thread(partial(self._run_whole, ticket), f"task {name}[{task_id}]")

    def _learn_size(self, posts: int, size: int) -> None:
        if posts and size:
            self._post_bytes += min(1.0, posts / POSTS_LEARNT) * (size / posts - self._post_bytes)

    # From the pipeline, on its threads.

    def _admits(self, message: Message) -> bool:
        return self._still_wanted(message.ticket)

    def _still_wanted(self, ticket: Ticket) -> bool:
        """Whether a request whose turn has come is to be run; where it is not, Celery is told."""
        if not withdrawn(ticket.request):
            return True
        self._deliver(partial(self._finish, ticket, partial(tell_withdrawn, ticket.request)))
        return False

    def _on_started(self, message: Message) -> None:
        ticket: Ticket = message.ticket
        if message.unsettled:  # a forward pass comes next, and workers/suspects.py watches that
            with suppress(RedisFault):
                end_alone(ticket.request.message)
        self._deliver(partial(self._accept, ticket, time.monotonic()))
        if ticket.request.task.name in self._tracked and not ticket.request.ignore_result:
            self.pipeline.run_on_writer_thread(partial(self._store_started, ticket.request))

    def _store_started(self, request: Any) -> None:
        told = {"pid": os.getpid(), "hostname": request.hostname}
        try:
            request.task.backend.store_result(request.id, told, STARTED, request=request._context)
        except Exception as fault:  # whatever a backend has; the message's result is another matter
            logger.warning("that %s has started cannot be stored (%s)", request.id, fault)

    def _on_finished(self, message: Message) -> None:
        """Let Celery's tracer finish the message: result backend, links, signals."""
        ticket: Ticket = message.ticket
        if isinstance(message.fault, TimeLimitExceeded):
            ticket.ending = partial(ticket.timed_out, False, message.fault.args[0])
            return

        def trace() -> None:
            try:
                ticket.trace()
            except RedisFault as fault:
                self._leave_replica(fault)
                raise

        token = IN_HAND.set(message)
        try:
            self.pipeline.until_taken(trace)
        finally:
            IN_HAND.reset(token)

    def _leave_replica(self, fault: BaseException) -> None:
        """Have Celery's results connect again where Redis said that it is a replica: the master is elsewhere."""
        if is_replica(fault) and (client := getattr(self.app.backend, "client", None)):
            client.connection_pool.disconnect(inuse_connections=False)

    def _on_recorded(self, message: Message) -> None:
        self._deliver(partial(self._finish, message.ticket, message.ticket.ending))

    def _run_whole(self, ticket: Ticket) -> None:
        """A task that is not micro-batched."""
        if self._still_wanted(ticket):
            self._deliver(partial(self._accept, ticket, time.monotonic()))
            try:
                ticket.trace()
            except RedisFault as fault:
                self._leave_replica(fault)
                logger.warning("%s: Redis does not take its result (%s); it will be run again", ticket.request, fault)
                try:
                    raise Reject(fault, requeue=True)
                except Reject:
                    ending = partial(ticket.failed, ExceptionInfo())
                self._deliver(partial(self._finish_later, ticket, ending))
            else:
                self._deliver(partial(self._finish, ticket, ticket.ending))

    def _on_failure(self) -> None:
        state.should_stop = EX_FAILURE  # type: ignore[assignment]  # the stub knows None alone
        self._deliver(lambda: None)

    # To Celery, on the consumer's thread.

    def _deliver(self, callback: Callable[[], None]) -> None:
        self._deliveries.put(callback)
        if self._hub is not None:
            self._hub.call_soon(self._run_deliveries)

    def _run_deliveries(self) -> None:
        while not self._deliveries.empty():
            self._deliveries.get()()

    def _accept(self, ticket: Ticket, when: float) -> None:
        try:
            ticket.accepted(os.getpid(), when)
        except NotImplementedError as refused:  # it was asked to terminate in the meantime
            logger.warning("%s: %s", ticket.request, refused)
        if self._hub:
            spent = time.monotonic() - when
            ticket.timers = [
                self._hub.call_later(max(0.0, limit - spent), partial(self._time_out, ticket, limit, fault))
                for limit, fault in ticket.limits(self.options.get("soft_timeout"), self.options.get("timeout"))
            ]

    def _time_out(self, ticket: Ticket, limit: float, fault: Exception) -> None:
        soft = isinstance(fault, SoftTimeLimitExceeded)
        if not ticket.message:
            if not soft and not ticket.traced:  # no thread can be interrupted: the process ends, as Celery's child does
                self._finish(ticket, partial(ticket.timed_out, False, limit))
                self.pipeline.end_as_hanging(f"{ticket.request} has not ended within its time limit of {limit} s")
            return
        reason = f"{type(fault).__name__}: no result within the message's {'soft ' * soft}time limit of {limit} s"
        if ticket.message and self.pipeline.give_up(ticket.message, fault, reason) and soft:
            ticket.timed_out(True, limit)  # says so in the log

    def _finish(self, ticket: Ticket, ending: Callable[[], None]) -> None:
        """End a message. Where Redis does not take it, again later; where Celery cannot, the message goes back."""
        for timer in ticket.timers:
            timer.cancel()
        alone = is_alone(ticket.request.message)
        try:
            try:
                ending()
            except Exception as error:  # whatever a callback of the sender's brings along
                if isinstance(error, BACKEND_AWAY) and not is_of_message(error):
                    raise
                logger.exception("%s: Celery could not end it", ticket.request)
                self._give_up(ticket.request)
        except BACKEND_AWAY as fault:
            self._leave_replica(fault)
            logger.warning(
                "%s: Redis does not take its end (%s); next try in %.0f s", ticket.request, fault, RETRY_INTERVAL_S
            )
            self._finish_later(ticket, ending)
        else:
            self._held.discard(ticket)
            for todo in self._hub._pop_ready() if alone and self._hub else ():
                todo()  # its acknowledgement, for which the next message waits; the event loop may wait for a timer

    def _give_up(self, request: Any) -> None:
        """Give a message back that Celery could not end, or acknowledge it after a few deliveries: its results and dead
        letters are stored.
        """
        if not request.acknowledged:  # which it is before its message, since that waits for the event loop
            message = request.message
            (message.requeue if times_delivered(message) < self.settings.max_deliveries else message.ack)()
            request.acknowledged = True

    def _finish_later(self, ticket: Ticket, ending: Callable[[], None]) -> None:
        self._unended.append((ticket, ending))

    def _end_again(self) -> None:
        unended, self._unended = self._unended, []
        for ticket, ending in unended:
            self._finish(ticket, ending)

    def room(self) -> int:
        """Return how many messages may be fetched: as many as there is room for posts."""
        most = self.pipeline.most_waiting()
        free = most - self.pipeline.waiting()
        return max(1, int(free / self.pipeline.rows_per_post())) if 4 * free >= most else 0

    def room_bytes(self) -> int:
        """Return how many bytes may be fetched, or a message more.

        A message may hold many posts, and is not read before it is fetched: the room for posts is told in bytes.
        """
        return max(1, int(self.room() * self._post_bytes))

    def adopt(self, eventer: Any) -> None:
        """Continue with the messages that are held over a new connection.

        Write results again that Redis may have lost, before acknowledgements go out. Raises redis' errors.
        """
        for ticket in self._held:
            ticket.request.eventer = eventer
        self._store.catch_up()

    def _on_asked(self, **_: Any) -> None:
        self._asked += 1

    def on_close(self) -> None:
        """Finish what is in hand, for at most the drain time, while acknowledgements still reach Redis.

        Not when asked once more meanwhile: of a second SIGTERM Celery takes no notice.
        """
        deadline, asked = time.monotonic() + self.settings.drain, min(1, self._asked)
        while len(self._held) > len(self._unended) and not self.pipeline.failure and time.monotonic() < deadline:
            if state.should_terminate is not None or self._asked > asked:
                break
            try:
                self._deliveries.get(timeout=0.1)()
            except queue.Empty:
                continue
            for todo in self._hub._pop_ready() if self._hub else ():
                todo()
        self._end_again()
        self.flush_events()
        for ticket in self._held:
            unclaim(ticket.request.message)
        if self._held:
            logger.warning("%d messages go back to the queue unfinished", len(self._held))
        self.pipeline.stop()
        self._deployer.stop()
        if not self.pipeline.failure:
            with suppress(RedisFault):  # then it is expected for a while
                deregister(self._redis, self._node)

    # What a device cannot do: the sender of the remote command gets the sentence.

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        raise NotImplementedError(
            "it has started: its posts are on the device among those of other messages, and are finished with them"
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
        """What `inspect stats` and `feedmill status` show."""
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
