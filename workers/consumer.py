"""Fits Celery's consumer to a pool that holds many messages at a time: what it fetches, and what it tells.

A message that no task can take, whatever is wrong with it, becomes a dead letter; Celery alone throws it away.

What it leans on in Celery 5.7 and kombu 5.7:

- `QoS.room` and `Channel.room_bytes` say how much the transport fetches (shared/transport.py); `can_consume`, whether
  it fetches at all: Celery's own worker_disable_prefetch replaces it too.
- `Consumer`'s first argument takes each request to the pool, whatever held it up before; it raises what the result
  backend does where the request was revoked or has expired.
- `Consumer.ensure_connected` waits for the broker; the two `on_connection_error_…` are told of each error that the next
  connection may mend. `create_task_handler` makes what each message is handed to; `on_decode_error`,
  `on_unknown_message`, `on_unknown_task` and `on_invalid_task` are told of one that it throws away, and what they log
  of it begins with UNKNOWN_FORMAT and its like (celery/worker/consumer/consumer.py).
- `Mingle.send_hello` asks every worker, and leaves out who answers by our own name, which before Control has started is
  another worker (celery/worker/consumer/mingle.py).
- What a step's `info` returns goes into `inspect stats`, in place of what an earlier step's did (celery/bootsteps.py).
- `Autoscaler.maybe_scale` is asked at each message, and `update` by the remote command (celery/worker/autoscale.py).
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
from celery.exceptions import CPendingDeprecationWarning, InvalidTaskError, WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.states import FAILURE
from celery.worker import consumer, state
from celery.worker.autoscale import Autoscaler
from celery.worker.consumer import consumer as _celery_consumer
from celery.worker.consumer.mingle import Mingle
from celery.worker.control import control_command
from celery.worker.state import maybe_shutdown
from redis.exceptions import RedisError as RedisFault
from redis.exceptions import ResponseError

from shared.broker import Application, plainly
from shared.errors import RequestRefused, printable
from shared.messages import DeadLetter
from shared.metrics import connect_briefly
from shared.refusals import is_denied
from shared.results import ResultsStore
from shared.settings import PREFIX
from shared.transport import LAPSES_BEFORE_ALONE, claim, is_held, put_off, unclaim
from workers import wellformed
from workers.delivery import arguments_of, came_from, id_of, times_delivered, times_fatal
from workers.events import EventBatches, keep_client
from workers.message import Message, traced, without_posts
from workers.pool import DevicePool
from workers.ticket import BACKEND_AWAY

logger = logging.getLogger(__name__)

#: Of what kombu tells of a connection, what has passwords in it: Redis' own, Sentinels' addresses, the Sentinels' own.
WITH_PASSWORDS = frozenset({"password", "alternates", "transport_options"})
#: The stubs hold little of what is inside.
celery_consumer: Any = _celery_consumer

#: What a message can bring about in Celery that expects another one: not what Redis, or its connection, can.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: What Celery logs of a message that it throws away, each with the beginning of its body: somebody's post.
TELLS_TOO_MUCH = frozenset(
    {
        celery_consumer.UNKNOWN_FORMAT,
        celery_consumer.UNKNOWN_TASK_ERROR,
        celery_consumer.INVALID_TASK_ERROR,
        celery_consumer.MESSAGE_DECODE_ERROR,
    }
)
#: Bytes of memory that messages for later may take in a worker.
MAX_LATER = 128 * 2**20
#: Characters of an error's text, or of a task's name, that a dead letter quotes.
LONGEST_QUOTE = 200


class Consumer(consumer.Consumer):
    """Celery's, which says what is wrong with Redis, knocks again soon, and ends where no waiting helps."""

    app: Application

    #: Seconds between two tries to connect, at first and at most. Celery's go up to 30, after each fault.
    PAUSE, LONGEST_PAUSE = 0.5, 2.0
    #: Seconds between two looks whether a message for later that has to be handled alone can be.
    ALONE_INTERVAL_S = 0.1

    def __init__(self, on_task_request: Callable[[Any], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(partial(self._hand_over, on_task_request), *args, **kwargs)
        # Briefly: the event loop waits for it.
        self._store = ResultsStore(connect_briefly(self.app.settings), self.app.settings)
        celery_consumer.logger.addFilter(_tells_not_too_much)
        for step in self.steps:  # type: ignore[attr-defined]  # not in the stub
            if isinstance(step, Mingle):
                step.send_hello = self._hellos  # type: ignore[method-assign, assignment]  # the stub's returns nothing

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

    def _hellos(self, _: Any) -> dict[str, Any]:
        """What other workers answer to each connection. At the first, one that bears this one's name ends this one."""
        asking = self.app.control.inspect(timeout=1.0, connection=self.connection)
        answers: dict[str, Any] = asking.hello(self.hostname, list(state.revoked)) or {}
        if self.hostname in answers and not self.restart_count:
            logger.critical(
                "another worker of this Redis is called %s, and remote control and Flower would take the two for one: "
                "end that one, or give this one another --name",
                self.hostname,
            )
            raise WorkerShutdown(EX_FAILURE)
        return answers

    def _hand_over(self, on_task_request: Callable[[Any], None], request: Any) -> None:
        """Give a request to the pool, which ends it even if the connection is lost meanwhile.

        Celery drops the other requests that it has (those for later, and those that a rate limit holds up) with the
        connection: they are not claimed, and go back to the queue.
        """
        if not is_held(request.message):
            return  # it went back while it waited
        if not claim(request.message):
            self.timer.call_after(self.ALONE_INTERVAL_S, self._hand_over, (on_task_request, request))
            return
        try:
            on_task_request(request)
        except BACKEND_AWAY as fault:
            again = partial(self._hand_over, on_task_request, request)
            self._retry_later(str(request), fault, request.message, again)
        except BaseException:
            unclaim(request.message)
            raise

    def _retry_later(self, what: str, fault: Exception, message: Any, again: Callable[[], None]) -> None:
        """Hold a message that was revoked or has expired until Redis takes that as its result."""
        claim(message)
        logger.warning("%s: Redis does not take its result (%s); next try in %.1f s", what, fault, self.LONGEST_PAUSE)
        self.timer.call_after(self.LONGEST_PAUSE, again)

    # What no task takes.

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's, which a message of odd types alone cannot end the worker with."""
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            try:
                if LAPSES_BEFORE_ALONE + times_fatal(message) >= self.app.settings.max_deliveries:
                    return self._refuse_fatal(message)
                wellformed.check(message)
                self._bound_later(message)
                handle(message)
                put_off(message)  # unless the pool has it
            except (InvalidTaskError, *MALFORMED) as error:
                return self.on_invalid_task(None, message, error)
            except BACKEND_AWAY as fault:
                self._retry_later(f"message {_quoted(id_of(message))}", fault, message, partial(take_again, message))

        def take_again(message: Any) -> None:
            unclaim(message)
            on_task_received(message)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        what = f"its body cannot be read as {_quoted(f'{message.content_type} in {message.content_encoding}')}"
        self._refuse(message, what, message.ack, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        what = "neither its headers nor its body name a task: it is no message of Celery's"
        self._refuse(message, what, partial(super().on_unknown_message, body, message))

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        what = f"this worker knows no task of the name {_quoted(exc)}; one of your own is loaded with {PREFIX}INCLUDE"
        self._refuse(message, what, partial(super().on_unknown_task, body, message, exc))

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        def let_go() -> None:
            super(Consumer, self).on_invalid_task(body, message, exc)
            task_id, properties = message.headers.get("id"), message.properties
            if isinstance(task_id, str) and not message.headers.get("ignore_result"):  # as for an unknown task
                asked = Context(reply_to=properties.get("reply_to"), correlation_id=properties.get("correlation_id"))
                self.app.backend.store_result(task_id, exc, FAILURE, request=asked)

        self._refuse(message, "Celery cannot take it", let_go, exc)

    def _bound_later(self, message: Any) -> None:
        """Raise InvalidTaskError where messages for later would take the memory of those that are due."""
        leases = getattr(message.channel, "leases", None)
        if leases and leases.bytes_later > MAX_LATER:
            fields = message.payload if isinstance(message.payload, dict) else {}  # of protocol 1
            if message.headers.get("eta") or fields.get("eta"):
                raise InvalidTaskError(f"messages for later would take more than {MAX_LATER:,} bytes of this worker")

    def _refuse_fatal(self, message: Any) -> None:
        """Refuse, unread, a message that one worker after the other vanished with."""
        fatal = f"{times_fatal(message)} workers vanished while they handled nothing else"
        what = f"delivered {times_delivered(message) - 1} times; {fatal} ({PREFIX}MAX_DELIVERIES)"
        self._refuse(message, what, partial(self._tell_failed, message, what), unread=True)

    def _tell_failed(self, message: Any, what: str) -> None:
        task_id = id_of(message)
        if task_id and not message.headers.get("ignore_result"):
            self.app.backend.mark_as_failure(task_id, RequestRefused(what))

    def _refuse(
        self,
        message: Any,
        what: str,
        let_go: Callable[[], None],
        error: Exception | None = None,
        unread: bool = False,
    ) -> None:
        """Keep a message as dead letters, then have Celery tell who waits for it, and let it go.

        what: is wrong with it; the error's own words may be a post's, and are kept out of the log. While Redis takes
        nothing the message stays with this worker. Should the connection be lost meanwhile, nobody refers to it any
        more, and it comes again.

        unread: its body is not decoded, which may be what ended other workers.
        """
        if message.acknowledged:
            return
        try:
            self._store.write([], _letters(message, what, error, self.hostname, unread))
        except RedisFault as fault:
            self._end_if_denied(fault)
            logger.warning("a dead letter waits for Redis (%s); next try in %.1f s", fault, self.LONGEST_PAUSE)
            self.timer.call_after(self.LONGEST_PAUSE, self._refuse, (message, what, let_go, error, unread))
            return
        logger.error("message %s is a dead letter: %s", _quoted(id_of(message)), what)
        try:
            let_go()
        except (*MALFORMED, *BACKEND_AWAY) as fault:  # its sender is not named, or in odd types, or Redis is full
            logger.warning(
                "the sender of message %s cannot be told (%s)", _quoted(id_of(message)), type(fault).__name__
            )
        if not message.acknowledged:
            message.reject_log_error(logger, self.connection_errors)  # type: ignore[attr-defined]  # not in the stub

    def catch_up(self) -> None:
        """Write dead letters again that Redis may have lost, and let go of those that it cannot lose any more."""
        with suppress(RedisFault):  # the next look tries again
            self._store.catch_up()

    def _end_if_denied(self, error: Exception) -> None:
        """A user's rights do not come back by themselves, and another connection has no others."""
        if is_denied(error):
            logger.critical("%s", plainly(error, self.app.settings))
            raise WorkerShutdown(EX_FAILURE) from None


def _tells_not_too_much(record: logging.LogRecord) -> bool:
    return record.msg not in TELLS_TOO_MUCH


def _letters(message: Any, what: str, error: Exception | None, worker: str, unread: bool) -> Sequence[DeadLetter]:
    """One for each post that can be made out in a message of kombu's; else, or if unread, one in all with its body."""
    reason = f"{what}: {type(error).__name__}: {_quoted(error)}" if error else what
    traceback = traced(error) if error else None
    now, task_id = time.time(), id_of(message)
    attempts, queue = times_delivered(message) - unread, came_from(message)
    arguments = {} if unread else arguments_of(message)
    found = Message(arguments, None, task_id, attempts=attempts, queue=queue)
    if found.raw_posts and all(isinstance(raw, dict) for raw in found.raw_posts):
        found.refused = RequestRefused(reason)
        found.tracebacks = dict.fromkeys(range(len(found.raw_posts)), traceback) if traceback else {}
        return found.dead_letters(worker, now)
    return [without_posts(message.body, reason, task_id, worker, now, traceback, attempts, queue)]


def _quoted(value: object) -> str:
    """Somebody else's words, short, on one line."""
    try:
        text = str(value)
    except MALFORMED:
        return f"<{type(value).__name__}>"
    return printable(text[:LONGEST_QUOTE])


class ConsumerFit(bootsteps.StartStopStep):
    """Fits Celery's consumer to a pool that holds many messages at a time; anew after each lost connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        if not isinstance(parent.pool, DevicePool):
            return  # another pool was asked for on the command line
        channel = parent.task_consumer.channel
        credit, most = channel.qos.room, channel.room_bytes
        channel.qos.room = lambda: (
            min(parent.pool.room(), room) if (room := credit()) is not None else parent.pool.room()
        )
        channel.room_bytes = lambda: min(parent.pool.room_bytes(), most())
        with suppress(ResponseError):  # a Redis that is full takes nothing again; a lost connection starts this again
            parent._store.catch_up()
        with suppress(ResponseError):
            parent.pool.adopt(parent.event_dispatcher)
        parent.pool.catch_up = parent.catch_up
        if parent.event_dispatcher.enabled:
            keep_client(parent.event_dispatcher.producer.channel)
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


@control_command()
def feedmill_deploy(state: Any) -> dict[str, Any]:
    """Look which model is wanted for this worker's queue, and say how the latest asking goes."""
    pool = state.consumer.pool
    return pool.deploy() if isinstance(pool, DevicePool) else {}


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
