"""Celery's consumer, adapted to a pool that holds many messages at a time: prefetching, errors and reports.

A message that no task can process becomes a dead letter. Celery alone would discard it.

Relies on these internals of Celery 5.7 and kombu 5.7:

- `Consumer`'s first argument passes each request to the pool, after any delay. It raises the result backend's errors if
  the request was revoked or has expired.
- `Consumer.ensure_connected` waits for the broker. The two `on_connection_error_…` methods receive each error that a
  new connection may solve. `create_task_handler` returns the callback for incoming messages. `on_decode_error`,
  `on_unknown_message`, `on_unknown_task` and `on_invalid_task` receive each message that Celery would log, with the
  start of its body, and discard (celery/worker/consumer/consumer.py).
- `call_soon_ack` calls what acknowledges or rejects a message.
- The `info` of a bootstep goes into `inspect stats` and overrides that of earlier steps (celery/bootsteps.py).
- `Autoscaler` calls `maybe_scale` at each message (celery/worker/autoscale.py).
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery import bootsteps
from celery.app.task import Context
from celery.exceptions import CPendingDeprecationWarning, InvalidTaskError, NotRegistered, WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.states import FAILURE
from celery.worker import consumer
from celery.worker.autoscale import Autoscaler
from celery.worker.control import control_command
from celery.worker.state import maybe_shutdown
from redis.exceptions import RedisError, ResponseError

from feedmill.shared.broker import UNDECODABLE, Application
from feedmill.shared.errors import RequestRefused, printable
from feedmill.shared.messages import DeadLetter
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.redis_errors import is_denied, user_message
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import PREFIX
from feedmill.workers.pipeline.message import MAX_DEATHS, Message, traceback_of
from feedmill.workers.runtime.in_flight import BACKEND_ERRORS
from feedmill.workers.runtime.pool import DevicePool
from feedmill.workers.runtime.request import check, read_arguments, read_task_id
from feedmill.workers.transport.leases import WHOLE

logger = logging.getLogger(__name__)

#: Fields of kombu's connection info that contain passwords: Redis' own, those in Sentinel addresses, and the
#: Sentinels' own.
FIELDS_WITH_PASSWORDS = frozenset({"password", "alternates", "transport_options"})

#: Events after which a publication does not wait. Celery's limit is 24, those of eight messages.
EVENTS_TOGETHER = 1000
#: Errors that a malformed message causes in Celery, as opposed to errors of Redis or its connection.
MALFORMED_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: Maximum characters of an error's text, or of a task's name, quoted in a dead letter.
MAX_QUOTE_CHARS = 200


class Consumer(consumer.Consumer):
    """Celery's consumer with clear Redis errors, fast reconnects, and an exit on permanent errors."""

    app: Application

    #: Seconds between connection attempts, initial and maximum. Celery's own delay grows to 30 s after each error.
    RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.5, 2.0
    #: Retry interval, in seconds, for messages that are not admitted.
    ALONE_INTERVAL_S = 0.1

    def __init__(self, on_task_request: Callable[[Any], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(partial(self._hand_over, on_task_request), *args, **kwargs)
        # Uses a client with short timeouts, because the event loop waits for it.
        self._store = ResultsStore(connect_for_monitoring(self.app.settings), self.app.settings)

    def call_soon_ack(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Acknowledge or reject a message now. All calls are on the event loop's thread (workers/runtime/in_flight.py).

        Celery's method waits for the next turn of the event loop: a tenth of a second, while the worker is idle.
        """
        p(*args, **kwargs)

    def ensure_connected(self, conn: Any) -> Any:
        """Wait until Redis is reachable. Log each distinct error once."""
        logged: set[str] = set()

        def failed(error: Exception, *_: Any) -> None:
            self._end_if_denied(error)
            if (what := user_message(error, self.app.settings) or repr(error)) not in logged:
                logged.add(what)
                logger.error("%s Retrying.", what)

        # kombu has no URL for a transport that is given by class path.
        conn.as_uri = lambda **_: self.app.settings.redis_address
        connected = conn.ensure_connection(
            failed,
            interval_start=self.RETRY_DELAY_S,
            interval_step=self.RETRY_DELAY_S,
            interval_max=self.MAX_RETRY_DELAY_S,
            callback=maybe_shutdown,
        )
        self.first_connection_attempt = False
        return connected

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        self._end_if_denied(exc)
        super().on_connection_error_before_connected(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        self._end_if_denied(exc)
        if isinstance(exc, ResponseError):  # Celery logs only the error's type
            logger.warning("%s", user_message(exc, self.app.settings) or repr(exc))
        with warnings.catch_warnings():  # following the warning would cancel tasks that are on the device
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(exc)

    def _hand_over(self, on_task_request: Callable[[Any], None], request: Any) -> None:
        """Give a claimed request to the pool, which finishes it even if the connection is lost.

        A lost connection returns unclaimed requests (with an ETA, or held back by a rate limit) to the queue.
        """
        if not request.message.is_held:
            return  # the message returned to the queue while the request waited
        if not request.message.claim():
            self.timer.call_after(self.ALONE_INTERVAL_S, self._hand_over, (on_task_request, request))
            return
        try:
            if not isinstance(self.pool, DevicePool):  # the command line selects another pool
                on_task_request(request)
            elif not request.revoked():
                self.pool.run(request)
        except BACKEND_ERRORS as fault:
            again = partial(self._hand_over, on_task_request, request)
            self._retry_later(str(request), fault, request.message, again)
        except MALFORMED_ERRORS as error:
            self.on_invalid_task(None, request.message, error)
        except BaseException:
            request.message.unclaim()
            raise

    def _retry_later(self, what: str, fault: Exception, message: Any, again: Callable[[], None]) -> None:
        """Hold a revoked or expired message until Redis stores its result. again: the call to repeat."""
        message.claim()
        logger.warning("cannot store the result of %s (%s); retrying in %.1f s", what, fault, self.MAX_RETRY_DELAY_S)
        self.timer.call_after(self.MAX_RETRY_DELAY_S, again)

    # Messages that no task can process.

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Any:
        """Return Celery's message handler, guarded against malformed messages, which would end the worker."""
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            if not message.is_held:
                return None  # the message returned to the queue while it waited to be admitted
            if not message.admit():
                return self.timer.call_after(self.ALONE_INTERVAL_S, on_task_received, (message,))
            try:
                if message.deaths[WHOLE] >= MAX_DEATHS:
                    fatal = f"{MAX_DEATHS} workers died while handling the message in isolation"
                    return self._refuse(message, f"delivered {message.deliveries - 1} times; {fatal}", unread=True)
                check(message)
                handle(message)
                message.postpone()
            except (InvalidTaskError, *MALFORMED_ERRORS) as error:
                return self.on_invalid_task(None, message, error)
            except BACKEND_ERRORS as fault:
                named = f"message {_quoted(read_task_id(message))}"
                self._retry_later(named, fault, message, partial(take_again, message))

        def take_again(message: Any) -> None:
            message.unclaim()
            on_task_received(message)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        if message.content_type == UNDECODABLE:
            self._refuse(message, f"not a Celery message: {_quoted(message.content_encoding)}")
            return
        what = f"cannot decode the body as {_quoted(f'{message.content_type} in {message.content_encoding}')}"
        self._refuse(message, what, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002 - Celery's arguments
        self._refuse(message, "not a Celery message: neither its headers nor its body name a task")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        what = f"this worker has no task {_quoted(exc)}; set {PREFIX}INCLUDE to load your own tasks"
        self._refuse(message, what, told=NotRegistered(_quoted(exc)))

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        self._refuse(message, "invalid Celery message", exc)

    def _refuse(
        self,
        message: Any,
        what: str,
        error: Exception | None = None,
        told: Exception | None = None,
        unread: bool = False,
    ) -> None:
        """Write a message's dead letters, store its failure for its sender, and acknowledge it.

        what: the reason. The error's own text may quote a post and stays out of the log.
        told: the sender's result, if not `error` or the reason.
        unread: do not decode the body, because decoding may be what ended other workers.

        While Redis takes no writes, the worker keeps the message and retries. If the connection is lost meanwhile, the
        message is redelivered.
        """
        if message.acknowledged:
            return
        try:
            self._store.write([], _letters(message, what, error, self.hostname, unread))
        except RedisError as fault:
            self._end_if_denied(fault)
            logger.warning("cannot write a dead letter (%s); retrying in %.1f s", fault, self.MAX_RETRY_DELAY_S)
            self.timer.call_after(self.MAX_RETRY_DELAY_S, self._refuse, (message, what, error, told, unread))
            return
        named = _quoted(read_task_id(message))
        logger.error("message %s is a dead letter: %s", named, what)
        try:
            self._tell_failed(message, told or error or RequestRefused(what))
        # The reply address is missing or malformed, or Redis is full.
        except (*MALFORMED_ERRORS, *BACKEND_ERRORS) as fault:
            logger.warning("cannot notify the sender of message %s (%s)", named, type(fault).__name__)
        message.reject_log_error(logger, self.connection_errors)  # type: ignore[attr-defined]  # not in the stub

    def _tell_failed(self, message: Any, error: Exception) -> None:
        task_id, properties = read_task_id(message), message.properties
        if task_id and not message.headers.get("ignore_result"):
            asked = Context(reply_to=properties.get("reply_to"), correlation_id=properties.get("correlation_id"))
            self.app.backend.store_result(task_id, error, FAILURE, request=asked)
        eventer: Any = self.event_dispatcher  # type: ignore[attr-defined]  # not in the stub
        eventer.send("task-failed", uuid=task_id, exception=type(error).__name__)

    def catch_up(self) -> None:
        """Rewrite recent dead letters that Redis may have lost, and forget those that are safe."""
        with suppress(RedisError):  # the next call retries
            self._store.catch_up()

    def _end_if_denied(self, error: Exception) -> None:
        """End the worker if Redis denies it access: no new connection changes its permissions."""
        if is_denied(error):
            logger.critical("%s", user_message(error, self.app.settings))
            raise WorkerShutdown(EX_FAILURE) from None


def _letters(message: Any, what: str, error: Exception | None, worker: str, unread: bool) -> Sequence[DeadLetter]:
    """Return a dead letter for each post found in a kombu message.

    Without posts, or with `unread`, return a single dead letter with the message's body.
    """
    reason = f"{what}: {type(error).__name__}: {_quoted(error)}" if error else what
    traceback = traceback_of(error) if error else None
    attempts, queue = message.deliveries - unread, message.queue
    arguments = {} if unread else read_arguments(message)
    found = Message(arguments, None, read_task_id(message), attempts=attempts, queue=queue)
    if found.raw_posts and all(isinstance(raw, dict) for raw in found.raw_posts):
        found.refused = RequestRefused(reason)
        found.tracebacks = dict.fromkeys(range(len(found.raw_posts)), traceback) if traceback else {}
        return found.dead_letters(worker, time.time())
    return [found.dead_letter_of_body(message.body, reason, traceback, worker, time.time())]


def _quoted(value: object) -> str:
    """Return untrusted text, shortened to one printable line."""
    try:
        text = str(value)
    except MALFORMED_ERRORS:
        return f"<{type(value).__name__}>"
    return printable(text[:MAX_QUOTE_CHARS])


class ConsumerFit(bootsteps.StartStopStep):
    """Bootstep that connects Celery's consumer to the pool, again after each lost connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        if not isinstance(parent.pool, DevicePool):
            return  # the command line selects another pool
        parent.task_consumer.channel.consumer_room = parent.pool.in_flight.room
        # Instead, the pool publishes events periodically: a publication takes as long as a message.
        parent.event_dispatcher.buffer_limit, parent.event_dispatcher.on_send_buffered = EVENTS_TOGETHER, None
        with suppress(ResponseError):  # Redis is full; after a lost connection, this step runs again
            parent._store.catch_up()
        with suppress(ResponseError):
            parent.pool.adopt(parent.event_dispatcher)
        parent.pool.catch_up = parent.catch_up

    def info(self, parent: Any) -> Any:
        """Return how Redis is reached, for `inspect stats` and Flower. Celery masks only two of the three passwords."""
        if not parent.connection:
            return {}
        connection_info = parent.connection.info()
        return {"broker": {name: value for name, value in connection_info.items() if name not in FIELDS_WITH_PASSWORDS}}

    def stop(self, parent: Any) -> None:
        """Flush buffered events to the dispatcher, which passes unsent events to its successor."""
        if isinstance(parent.pool, DevicePool):
            parent.pool.in_flight.flush_events()


@control_command()
def feedmill_deploy(state: Any) -> dict[str, Any]:
    """Schedule a deployment check of this worker's queue and return the latest status."""
    pool = state.consumer.pool
    return pool.deploy() if isinstance(pool, DevicePool) else {}


class Scaler(Autoscaler):
    """Celery's autoscaler, without effect: a worker has one device."""

    def maybe_scale(self, req: Any = None) -> None: ...
