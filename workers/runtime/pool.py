"""A Celery worker pool with exactly one slot: the device.

A strategy that collects requests and calls a task with all of them (celery-batches) takes the
requests away from Celery: no events, no revokes, no retries, and one exception acknowledges the
whole batch. Here the default strategy, the Request class and the tracer stay Celery's own. The
pool only decides *when* a request's task runs: after its results are stored. Celery sees a busy
pool that holds many messages and finishes them one by one.

The consumer hands requests to `run` (consumer.py). This module loads the model, decides how much
to prefetch, and drains the worker; in_flight.py passes requests to the pipeline and back to
Celery. workers/models and workers/pipeline do not depend on Celery.

Relies on these internals of Celery 5.7, beyond `BasePool`: errors raised by `terminate_job`,
`grow`, `shrink` and `restart` are sent as the reply to the remote command, and a Signal's `lock`
guards its receivers. `_get_info` returns the pool's part of `inspect stats`.
"""

import gc
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import Any

from celery.concurrency.base import BasePool
from celery.exceptions import WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.signals import (
    worker_process_init,
    worker_process_shutdown,
    worker_shutting_down,
)
from celery.worker import state
from redis.exceptions import RedisError

from feedmill.shared import linux, otlp_metrics, tracing, worker_load
from feedmill.shared.broker import connect
from feedmill.shared.errors import DeviceFull, DeviceLost, UserError
from feedmill.shared.language import languages_of
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.model_routing import (
    ANNOUNCE_INTERVAL_S,
    announce,
    deregister,
    register,
)
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.shared.worker_load import WorkerLoad
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.pipeline.context import Observer
from feedmill.workers.pipeline.pipeline import Pipeline
from feedmill.workers.pipeline.rehearsal import Rehearsal, rehearse
from feedmill.workers.runtime import forks, hot_swap
from feedmill.workers.runtime.connections import shut_down_pool
from feedmill.workers.runtime.hot_swap import Deployer
from feedmill.workers.runtime.in_flight import RETRY_INTERVAL_S, InFlight
from feedmill.workers.runtime.metrics import (
    TURN_INTERVAL_S,
    WorkerMetrics,
    pipeline_status,
)

logger = logging.getLogger(__name__)

#: Timeout in seconds of writing results. A connection that is lost without a word is noticed after
#: that time.
RESULTS_TIMEOUT_S = 10.0
#: Seconds between two publications of events.
EVENTS_INTERVAL_S = 0.1
#: Net new objects between two garbage collections. Python's default of 700 is less than one
#: message.
GC_THRESHOLD = 20_000


def _observer() -> Observer | None:
    """Return what records spans; None if tracing is off."""
    exporting = tracing.exporting(tracing.WORKER_SERVICE)
    if exporting is None:
        return None
    with tracing.guarding("record spans"):
        from feedmill.workers.runtime.spans import Spans  # noqa: PLC0415 - imports an extra

        return Spans(exporting)
    return None


class DevicePool(BasePool):
    """Run requests on the device, many at a time, in micro-batches."""

    #: Closing waits for the device, which a signal handler must not do.
    signal_safe = False
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.limit != 1:
            logger.warning(
                "ignoring concurrency %s: a worker has one device", self.limit
            )
        self.limit = 1
        self.settings: Settings = self.app.settings
        self._redis = connect_for_monitoring(self.settings)
        self._results_redis = connect(self.settings, RESULTS_TIMEOUT_S)
        #: None unless FEEDMILL_METRICS_PORT is set, or OTEL_METRICS_EXPORTER is otlp.
        self._metrics: WorkerMetrics | None = None
        #: The cost of a post; None unless a supervisor asks for it.
        self._rehearsal: Rehearsal | None = None
        #: Periodic calls on the event loop, such as announcements and the metrics' heartbeat.
        self._timers: list[Any] = []
        #: Time of the latest registration, by Redis' clock; infinite before the first, and if it
        #: is unknown.
        self._registered_at = math.inf
        #: Rewrites dead letters that Redis may have lost. Set by workers/runtime/consumer.py.
        self.catch_up: Callable[[], None] = lambda: None
        #: Number of signals received that request a shutdown.
        self._shutdown_signals = 0
        # A second SIGTERM can interrupt the handler of the first, which holds this lock. Celery's
        # own lock is not reentrant and would deadlock.
        worker_shutting_down.lock = RLock()  # type: ignore[attr-defined]  # not in the stub
        worker_shutting_down.connect(self._on_shutting_down, weak=False)

    def on_start(self) -> None:
        """Load the model, before the worker takes any message. A UserError ends the worker."""
        _, self._node = self.options["initargs"]
        try:
            if self.settings.metrics_port or otlp_metrics.is_requested():
                # report a taken port before the slow steps
                self._metrics = WorkerMetrics(self.settings, self._node)
                self._metrics.start()
            languages_of(self.settings)  # report unknown ones before the slow steps
            loaded = hot_swap.load(self.settings, self._redis)
            self._rehearsal = self._rehearse(loaded.classifier, loaded.budget)
        except (UserError, DeviceFull, DeviceLost) as error:
            logger.critical("%s", error)
            raise WorkerShutdown(EX_FAILURE) from None
        soft_limit = self.options.get("soft_timeout")
        hard_limit = self.options.get("timeout")
        observer = _observer()
        limits = (soft_limit, hard_limit)
        self.in_flight = InFlight(self.app, limits, observer)
        self._store = ResultsStore(self._results_redis, self.settings)
        self.pipeline = Pipeline(
            loaded.classifier,
            self._store,
            self.settings,
            loaded.budget,
            self._node,
            self.in_flight,
            observer,
        )
        self.in_flight.pipeline = self.pipeline
        self.pipeline.start()
        self._deployer = Deployer(
            self.pipeline,
            self.settings,
            self._redis,
            loaded.deployment,
            self._announce_soon,
        )
        self._deployer.start()
        if self._metrics:
            self._metrics.loaded(self.pipeline, held=self.in_flight.__len__)
        # not the oldest objects, those of the imports: a search of them takes 0.4 s
        gc.collect(1)
        # garbage collections would scan libraries and model, an eighth of a worker's time
        gc.freeze()
        loaded.classifier.device.give_back()
        gc.set_threshold(GC_THRESHOLD)
        forks.restore_signals_in_children()
        # Tasks of the worker's owner may need what a receiver prepares, such as connections.
        worker_process_init.send(sender=None)

    def register_with_event_loop(self, loop: Any) -> None:
        """Schedule the periodic calls.

        Called at each connection; messages in flight survive a reconnect
        (workers/transport/leases.py).
        """
        self.in_flight.hub = loop
        loop.call_soon(self.in_flight.run_deliveries)
        for timer in self._timers:
            timer.cancel()
        self._announce_soon()
        self._timers = [
            loop.call_repeatedly(ANNOUNCE_INTERVAL_S, self._announce_soon),
            loop.call_repeatedly(EVENTS_INTERVAL_S, self.in_flight.flush_events),
            loop.call_repeatedly(RETRY_INTERVAL_S, self.in_flight.retry_unended),
            loop.call_repeatedly(RETRY_INTERVAL_S, self.catch_up),
        ]
        if self._metrics:
            self._timers.append(
                loop.call_repeatedly(TURN_INTERVAL_S, self._metrics.heartbeat)
            )
        if self._rehearsal:
            self._timers.append(
                loop.call_repeatedly(worker_load.INTERVAL_S, self._send_load)
            )

    def _rehearse(self, classifier: Classifier, budget: int) -> Rehearsal | None:
        """Measure the cost of a post, if a supervisor asks for it. Raises DeviceLost.

        A model that cannot be measured still works.
        """
        if not worker_load.is_requested():
            return None
        try:
            return rehearse(classifier, budget, self.settings.batch_rows)
        except DeviceLost:
            raise
        except Exception as error:
            logger.warning(
                "cannot measure what a post costs (%s): this device gets no further workers",
                error,
            )
            return None

    def _send_load(self) -> None:
        """Send this worker's figures to the supervisor that fills the device."""
        rehearsal = self._rehearsal
        if rehearsal is None:
            return
        now = time.monotonic()
        statistics = self.pipeline.statistics
        recent = statistics.recent(now)
        load = WorkerLoad(
            host_us=rehearsal.host_us,
            device_us=rehearsal.device_us,
            memory_bytes=rehearsal.memory_bytes,
            total_memory_bytes=rehearsal.total_memory_bytes,
            posts_per_s=recent.posts_per_second,
            device_busy=recent.device_busy,
        )
        worker_load.send(load)

    def _announce_soon(self) -> None:
        self.pipeline.recording.run(self._announce)

    def _announce(self) -> None:
        """Register the worker, and its model for each served queue (shared/model_routing.py).

        Retry a Redis error after the next interval.
        """
        # micro-batches of varying sizes leave holes: half a gigabyte within minutes
        linux.return_freed_memory()
        self._deployer.request_check()
        try:
            self._register()
        except RedisError as fault:
            logger.warning(
                "cannot register worker %s (%s); retrying in a minute",
                self._node,
                fault,
            )
            return
        for name in self._queues():
            try:
                self._announce_queue(name)
            except RedisError as fault:
                logger.warning(
                    "cannot register queue %s as served (%s); retrying in a minute",
                    name,
                    fault,
                )
                return

    def _register(self) -> None:
        """Register the worker, and warn of another one of its name. Raises RedisError."""
        own = self._registered_at
        self._registered_at = math.inf
        latest, self._registered_at = register(self._redis, self._node)
        if latest > own:
            logger.warning(
                (
                    "another worker is named %s, too: `feedmill status` shows one of them. Give "
                    "another --name"
                ),
                self._node,
            )

    def _announce_queue(self, name: str) -> None:
        """Register the model for a queue, and warn of another model. Raises RedisError."""
        classifier = self.pipeline.classifier
        model = classifier.weights.name
        labels = getattr(classifier, "fixed_labels", None)
        one_label = getattr(classifier, "gives_one_label", False)
        other = announce(self._redis, name, model, labels, one_label)
        if other and not self._deployer.report:  # expected during a deployment
            logger.warning(
                "queue %s was just served with model %s and is now served with %s: while "
                "both serve it, posts go to either model at random. Give each model its own "
                "queue (--queue)",
                name,
                other,
                model,
            )

    def deploy(self) -> dict[str, Any]:
        """Schedule a deployment check and return the latest status."""
        self._deployer.request_check()
        return self._latest_report()

    def _latest_report(self) -> dict[str, Any]:
        report = self._deployer.report
        return report._asdict() if report else {}

    def _queues(self) -> list[str]:
        """Return the queues that this worker consumes."""
        return sorted(self.app.amqp.queues.consume_from)

    # Called on the consumer's thread.

    def run(self, request: Any) -> None:
        """Start a request that was neither revoked nor has expired."""
        if not self.active:
            # fetched while closing; returns to the queue when the connection closes
            request.message.unclaim()
        else:
            self.in_flight.run(request)

    def adopt(self, eventer: Any) -> None:
        """Move the requests in flight to a new connection.

        Rewrites results that Redis may have lost, before acknowledgements are sent. Raises redis'
        errors.
        """
        self.in_flight.adopt(eventer)
        self._store.catch_up()

    def redis_away(self) -> None:
        """Record for the health check that the consumer cannot reach Redis."""
        if self._metrics:
            self._metrics.redis_away()

    def shut_down_connections(self) -> None:
        """Shut down this pool's connections to Redis, which were probably lost with the
        consumer's.
        """
        for client in (self._redis, self._results_redis):
            shut_down_pool(client.connection_pool)

    def _on_shutting_down(self, **_: Any) -> None:
        self._shutdown_signals += 1

    def on_close(self) -> None:
        """Finish the requests in flight within the drain time, while acknowledgements still reach
        Redis.

        A further shutdown signal ends the drain; Celery itself ignores a second SIGTERM.
        """
        deadline = time.monotonic() + self.settings.drain
        signals = min(1, self._shutdown_signals)

        def may_go_on() -> bool:
            return (
                not self.pipeline.failure
                and time.monotonic() < deadline
                and state.should_terminate is None
                and self._shutdown_signals <= signals
            )

        self.in_flight.drain(may_go_on)
        self.in_flight.flush_events()  # the event loop, which sends them, has ended
        self.in_flight.return_to_queue()
        self.pipeline.stop()
        self._deployer.stop()
        tracing.stop()
        worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
        if not self.pipeline.failure:
            with suppress(RedisError):  # the registration then expires by itself
                deregister(self._redis, self._node)

    # Unsupported remote commands, whose sender receives the error's text.

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        raise NotImplementedError(
            "the task has started and cannot be terminated: its posts share micro-batches with "
            "other messages"
        )

    def grow(self, n: int = 1) -> None:
        raise NotImplementedError(
            "the pool is one device: start or stop a worker per device instead"
        )

    shrink = restart = grow

    def on_terminate(self) -> None:
        self.pipeline.stop(seconds=1.0)

    def _get_info(self) -> dict[str, Any]:
        """Return the pool's part of `inspect stats` and `feedmill status`."""
        info: dict[str, Any] = super()._get_info()  # type: ignore[misc]  # not in the stub
        return (
            info
            | {
                "queues": self._queues(),
                "deploy": self._latest_report(),
                "messages_held": len(self.in_flight),
            }
            | pipeline_status(self.pipeline)
        )
