"""Fits Celery's consumer to a pool that holds many messages at a time: what it fetches, and what it tells.

What it leans on in Celery 5.7 and kombu 5.7:

- `QoS.room` says how much the transport fetches (shared/transport.py); `can_consume`, whether it fetches at all:
  Celery's own worker_disable_prefetch replaces it too.
- `EventDispatcher.on_send_buffered` is told of each task event that waits to be sent.
- `Channel._create_client` makes the Redis client of each command (kombu/transport/redis.py).
- `Consumer.ensure_connected` waits for the broker; the two `on_connection_error_…` are told of each error that the next
  connection may mend (celery/worker/consumer/consumer.py).
- What a step's `info` returns goes into `inspect stats`, in place of what an earlier step's did (celery/bootsteps.py).
- `Autoscaler.maybe_scale` is asked at each message, and `update` by the remote command (celery/worker/autoscale.py).
"""

import logging
import warnings
from typing import Any

from celery import bootsteps
from celery.exceptions import CPendingDeprecationWarning, WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.worker import consumer
from celery.worker.autoscale import Autoscaler
from celery.worker.state import maybe_shutdown
from redis.exceptions import ResponseError

from shared.broker import Application, is_denied, plainly
from workers.pool import DevicePool

logger = logging.getLogger(__name__)

#: Of what kombu tells of a connection, what has passwords in it: Redis' own, Sentinels' addresses, the Sentinels' own.
WITH_PASSWORDS = frozenset({"password", "alternates", "transport_options"})


class Consumer(consumer.Consumer):
    """Celery's, which says what is wrong with Redis, knocks again soon, and ends where no waiting helps."""

    app: Application

    #: Seconds between two tries to connect, at first and at most. Celery's go up to 30, after each fault.
    PAUSE, LONGEST_PAUSE = 0.5, 2.0

    def ensure_connected(self, conn: Any) -> Any:
        """Wait for Redis, for as long as it takes; each thing that is wrong is said once."""
        said: set[str] = set()

        def failed(error: Exception, *_: Any) -> None:
            self._end_if_denied(error)
            if (what := plainly(error, self.app.settings) or repr(error)) not in said:
                said.add(what)
                logger.error("%s Trying again.", what)

        conn.as_uri = lambda **_: self.app.settings.redis_address  # of a transport by class path it knows no URL
        connected = conn.ensure_connection(
            failed,
            interval_start=self.PAUSE,
            interval_step=self.PAUSE,
            interval_max=self.LONGEST_PAUSE,
            callback=maybe_shutdown,
        )
        self.first_connection_attempt = False
        return connected

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        self._end_if_denied(exc)
        super().on_connection_error_before_connected(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        self._end_if_denied(exc)
        if isinstance(exc, ResponseError):  # Celery names no more than its kind
            logger.warning("%s", plainly(exc, self.app.settings) or repr(exc))
        with warnings.catch_warnings():  # what it advises would cancel what the device is busy with
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(exc)

    def _end_if_denied(self, error: Exception) -> None:
        """A user's rights do not come back by themselves, and another connection has no others."""
        if is_denied(error):
            logger.critical("%s", plainly(error, self.app.settings))
            raise WorkerShutdown(EX_FAILURE) from None


class ConsumerFit(bootsteps.StartStopStep):
    """Fits Celery's consumer to a pool that holds many messages at a time; anew after each lost connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        # Celery dropped what was for later with the lost connection; its list of timers would keep those alive.
        parent.timer_entries_before_start = {
            entry for entry in parent.timer_entries_before_start or () if not entry.canceled
        }
        if not isinstance(parent.pool, DevicePool):
            return  # another pool was asked for on the command line
        qos = parent.task_consumer.channel.qos
        credit = qos.room
        qos.room = lambda: min(parent.pool.room(), room) if (room := credit()) is not None else parent.pool.room()
        parent.pool.adopt(parent.event_dispatcher)
        if parent.event_dispatcher.enabled:
            _keep_client(parent.event_dispatcher.producer.channel)
        parent.pool.flush_events = EventBatches(parent.event_dispatcher, parent.hub).flush

    def info(self, parent: Any) -> Any:
        """How Redis is reached, for `inspect stats` and Flower: of three passwords Celery leaves out but two."""
        if not parent.connection:
            return {}
        told = parent.connection.info()
        return {"broker": {name: value for name, value in told.items() if name not in WITH_PASSWORDS}}

    def stop(self, parent: Any) -> None:
        """What waits goes to the dispatcher, which hands what it cannot send to its successor."""
        if isinstance(parent.pool, DevicePool):
            parent.pool.flush_events()


class Scaler(Autoscaler):
    """Celery's, for another pool. The device stays one slot: what `--autoscale` asks of it is said, not done."""

    def __init__(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(pool, *args, **kwargs)
        self._fixed = isinstance(pool, DevicePool)
        if self._fixed:
            logger.warning("the device is one slot: --autoscale has no effect")

    def maybe_scale(self, req: Any = None) -> None:
        if not self._fixed:
            super().maybe_scale(req)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        if self._fixed:
            raise NotImplementedError("the pool is one device, which cannot be scaled: start a worker for another one")
        return super().update(*args, **kwargs)


class EventBatches:
    """Sends task events some at a time: Celery alone sends them at each turn of its loop, one or two at once."""

    #: Seconds that an event may wait for others; Flower shows whole seconds.
    DELAY = 0.1
    #: Events that are sent at once however few seconds they waited.
    LIMIT = 256

    def __init__(self, dispatcher: Any, hub: Any) -> None:
        self._dispatcher = dispatcher
        self._hub = hub
        self._due = False
        dispatcher.buffer_limit = self.LIMIT
        if hub is not None:
            dispatcher.on_send_buffered = self._buffered

    def _buffered(self) -> None:
        if not self._due:
            self._due = True
            self._hub.call_later(self.DELAY, self.flush)

    def flush(self) -> None:
        self._due = False
        if self._dispatcher.enabled:
            self._dispatcher.flush()


def _keep_client(channel: Any) -> None:
    """One client for all of a channel's commands. kombu makes one for each, and 8% of a worker's time went there."""
    client, make_client = channel._create_client(), channel._create_client
    channel._create_client = lambda asynchronous=False: make_client(True) if asynchronous else client
