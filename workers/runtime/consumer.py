"""Celery's consumer, adapted to a pool that holds many messages at a time: prefetching, errors and
reports.

A message that no task can process becomes a dead letter. Celery alone would discard it.

Relies on these internals of Celery 5.7 and kombu 5.7:

- `Consumer`'s first argument passes each request to the pool, after any delay. It raises the
  result backend's errors if the request was revoked or has expired.
- `Consumer.connection_for_read` opens the connection for messages and remote commands, and
  `conninfo` describes it; `connection_for_write` opens the one for events, which the event loop
  sends.
- `Consumer.ensure_connected` waits for the broker. The two `on_connection_error_…` methods receive
  each error that a new connection may solve. `create_task_handler` returns the callback for
  incoming messages. `on_decode_error`, `on_unknown_message`, `on_unknown_task` and
  `on_invalid_task` receive each message that Celery would log, with the start of its body, and
  discard (celery/worker/consumer/consumer.py).
- A cold shutdown calls `cancel_active_requests`, in a signal handler (celery/apps/worker.py).
- `call_soon_ack` calls what acknowledges or rejects a message.
- The `info` of a bootstep goes into `inspect stats` and overrides that of earlier steps
  (celery/bootsteps.py).
- `rate_limit` changes the task's attribute and calls `reset_rate_limits`, which makes new buckets
  of `task_buckets`.
  `_limit_task` holds a request in one, `_schedule_bucket_request` starts those that have a token
  by
  `_limit_move_to_pool`, and a lost connection empties the buckets.
- `Autoscaler` calls `maybe_scale` at each message (celery/worker/autoscale.py).
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from celery import bootsteps
from celery.exceptions import (
    CPendingDeprecationWarning,
    InvalidTaskError,
    NotRegistered,
    WorkerShutdown,
)
from celery.platforms import EX_FAILURE
from celery.utils.functional import maybe_list
from celery.worker import consumer
from celery.worker.autoscale import Autoscaler
from celery.worker.control import Panel, control_command, inspect_command
from celery.worker.state import maybe_shutdown
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from feedmill.shared import encoding
from feedmill.shared.broker import (
    OWN_KEYS,
    UNDECODABLE,
    Application,
    format_arguments,
    queue_lists,
)
from feedmill.shared.encoding import UnreadableError
from feedmill.shared.errors import RequestRefused, printable
from feedmill.shared.logs import fields_of
from feedmill.shared.messages import DeadLetter
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.redis_errors import is_denied, user_message
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import PREFIX
from feedmill.shared.trace_context import read_context
from feedmill.workers.pipeline.message import MAX_DEATHS, Message, traceback_of
from feedmill.workers.runtime.connections import (
    shut_down_backends,
    shut_down_pool,
    shut_down_publishers,
)
from feedmill.workers.runtime.in_flight import BACKEND_ERRORS
from feedmill.workers.runtime.pool import DevicePool
from feedmill.workers.runtime.refusals import MALFORMED_ERRORS, tell_failed
from feedmill.workers.runtime.request import (
    arguments_in,
    check,
    due_in,
    ends_wait_in,
    is_own_key,
    is_withdrawn,
    read_arguments,
    read_name,
    read_task_id,
    take_eta,
)
from feedmill.workers.transport.delays import MAX_SEARCHED, SEARCHED_BYTES
from feedmill.workers.transport.leases import WHOLE
from feedmill.workers.transport.redis_transport import lease_options

logger = logging.getLogger(__name__)

#: Fields of kombu's connection info that contain passwords: Redis' own, those in Sentinel
#: addresses, and the Sentinels' own.
FIELDS_WITH_PASSWORDS = frozenset({"password", "alternates", "transport_options"})

#: Timeout in seconds of sending events, because the event loop waits for it. Unsent events are
#: kept.
EVENTS_TIMEOUT_S = 2.0
#: Events after which a publication does not wait. Celery's limit is 24, those of eight messages.
EVENTS_TOGETHER = 1000
#: Maximum characters of an error's text, or of a task's name, quoted in a dead letter.
MAX_QUOTE_CHARS = 200


class RateLimit(NamedTuple):
    """The rate limit of a task, and the messages that this worker holds because of it."""

    messages_per_second: float
    messages_held: int


class Consumer(consumer.Consumer):
    """Celery's consumer with clear Redis errors, fast reconnects, and an exit on permanent
    errors.
    """

    app: Application
    pool: DevicePool

    #: Seconds between connection attempts, initial and maximum. Celery's own delay grows to 30 s
    #: after each error.
    RETRY_DELAY_S = 0.5
    MAX_RETRY_DELAY_S = 2.0
    #: Retry interval, in seconds, for messages that cannot start yet.
    ALONE_INTERVAL_S = 0.1

    def __init__(self, _: Callable[[Any], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(self._hand_over, *args, **kwargs)
        # Other pools lose posts, when a child process is killed for example: Celery then
        # acknowledges its message.
        if not isinstance(self.pool, DevicePool):
            # The `celery` command prints the traceback of an Exception.
            raise SystemExit(
                "feedmill: feedmill.workers.app runs on its own pool, the device: omit --pool. "
                "Start tasks that need another pool with a Celery application of your own."
            )
        #: Buckets whose next request waits for a timer.
        self._limit_timers = set[Any]()
        self._lease_options = lease_options(self.app.settings)
        self.conninfo = self.app.connection_for_read(**self._lease_options)
        self.connection_errors = self.conninfo.connection_errors
        self.channel_errors = self.conninfo.channel_errors
        # Uses a client with short timeouts, because the event loop waits for it.
        self._redis = connect_for_monitoring(self.app.settings)
        self._store = ResultsStore(self._redis, self.app.settings)
        # Answers to remote commands then use the channel of the commands, which tolerates what
        # producers write to kombu's bindings (shared/bindings.py).
        control: Any = self.app.control  # the stubs lack `mailbox`
        control.mailbox.producer_pool = None

    def call_soon_ack(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Acknowledge or reject a message now.

        All calls are on the event loop's thread (workers/runtime/in_flight.py).

        Celery's method waits for the next turn of the event loop: a tenth of a second, while the
        worker is idle.
        """
        p(*args, **kwargs)

    def connection_for_read(self, heartbeat: Any = None) -> Any:
        """Return the connection for messages and remote commands, the only one with leases."""
        connection = self.app.connection_for_read(
            heartbeat=heartbeat,
            **self._lease_options,
        )
        return self.ensure_connected(connection)

    def connection_for_write(
        self, url: str | None = None, heartbeat: Any = None
    ) -> Any:
        """Return the connection for events."""
        connection = self.app.connection_for_write(
            url,
            heartbeat=heartbeat,
            transport_options={"socket_timeout": EVENTS_TIMEOUT_S},
        )
        return self.ensure_connected(connection)

    def ensure_connected(self, conn: Any) -> Any:
        """Wait until Redis is reachable. Log each distinct error once."""
        logged: set[str] = set()

        def failed(error: Exception, *_: Any) -> None:
            self.pool.redis_away()
            self._end_if_denied(error)
            what = user_message(error, self.app.settings)
            if what not in logged:
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
        self.pool.redis_away()
        self._end_if_denied(exc)
        super().on_connection_error_before_connected(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        self.pool.redis_away()
        self._end_if_denied(exc)
        if isinstance(exc, ResponseError | InvalidResponse):
            # Celery logs only the error's type
            what = user_message(exc, self.app.settings)
            logger.warning("%s", what)
        # following the warning would cancel tasks that are on the device
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(exc)
        if not isinstance(exc, ResponseError):
            self._shut_down_connections()

    def _shut_down_connections(self) -> None:
        """Shut down the other connections of this process to Redis, which were probably lost as
        well.
        """
        shut_down_pool(self._redis.connection_pool)
        shut_down_backends(getattr(self.app, "backends", ()))
        shut_down_publishers(self.app)
        self.pool.shut_down_connections()

    def cancel_active_requests(self) -> None:
        """Do nothing during a cold shutdown (SIGQUIT): the pool returns the messages that it has
        started to the queue.

        Celery's method terminates the child processes that run them, which this pool does not
        have.
        """

    def _hand_over(self, request: Any) -> None:
        """Give a claimed request to the pool, which finishes it even if the connection is lost.

        A lost connection returns unclaimed requests (held back by a rate limit) to the queue.
        """
        if not request.message.is_held:
            return  # the message returned to the queue while the request waited
        if not request.message.claim():
            self.timer.call_after(self.ALONE_INTERVAL_S, self._hand_over, (request,))
            return
        if request.message.eta:
            # as the sender gave it, for the task
            request.request_dict["eta"] = request.message.eta
        try:
            if not request.revoked():
                self.pool.run(request)
        except BACKEND_ERRORS as fault:
            name = str(request)
            again = partial(self._hand_over, request)
            self._retry_later(name, fault, request.message, again)
        except MALFORMED_ERRORS as error:
            self.on_invalid_task(None, request.message, error)
        except BaseException:
            request.message.unclaim()
            raise

    def _retry_later(
        self, what: str, fault: Exception, message: Any, again: Callable[[], None]
    ) -> None:
        """Hold a revoked or expired message until Redis stores its result. again: the call to
        repeat.
        """
        message.claim()
        logger.warning(
            "cannot store the result of %s (%s); retrying in %.1f s",
            what,
            fault,
            self.MAX_RETRY_DELAY_S,
        )
        self.timer.call_after(self.MAX_RETRY_DELAY_S, again)

    # Rate limits.

    def reset_rate_limits(self) -> None:
        """Apply the tasks' rate limits, also to the requests that wait for an earlier one.

        Celery leaves those to the earlier limit: after a limit of one a minute was lifted, they
        take hours.
        """
        buckets: Any = self.task_buckets  # type: ignore[attr-defined]  # not in the stub
        earlier_buckets = dict(buckets)
        super().reset_rate_limits()
        for name, bucket in earlier_buckets.items():
            if bucket:
                successor = buckets[name]
                self._move_limited(bucket, successor)

    def _move_limited(self, bucket: Any, successor: Any) -> None:
        """Move the requests in a bucket to its successor; start them if there is none."""
        waiting = list(bucket.contents)
        bucket.clear_pending()
        for request, tokens in waiting:
            if successor is None:
                self._limit_move_to_pool(request)  # type: ignore[attr-defined]  # not in the stub
            else:
                self._limit_task(request, successor, tokens)

    def _limit_task(self, request: Any, bucket: Any, tokens: int) -> None:
        """Hold a request until the bucket has tokens.

        Celery starts a timer for each request. Hundreds of them would end together, again and
        again, and kombu's event loop fires about twenty a second. One timer per bucket suffices.
        """
        bucket.add((request, tokens))
        if bucket not in self._limit_timers:
            self._schedule_bucket_request(bucket)

    def _schedule_bucket_request(self, bucket: Any) -> None:
        """Start requests for which the bucket has tokens, and wait for the next token if others
        are left.
        """
        self._limit_timers.discard(bucket)
        try:
            while bucket.contents and bucket.can_consume(_first_tokens(bucket)):
                request, _ = bucket.pop()
                self._limit_move_to_pool(request)  # type: ignore[attr-defined]  # as above
        finally:
            if bucket.contents:
                self._limit_timers.add(bucket)
                tokens = _first_tokens(bucket)
                self.timer.call_after(
                    bucket.expected_time(tokens),
                    self._schedule_bucket_request,
                    (bucket,),
                )

    def on_close(self) -> None:
        super().on_close()
        # The buckets are empty now. Timers that are still set start what is in them then.
        self._limit_timers.clear()

    def rate_limits(self) -> dict[str, RateLimit]:
        """Return the rate limits in force by the task's name."""
        buckets: Any = self.task_buckets  # type: ignore[attr-defined]  # not in the stub
        limits: dict[str, RateLimit] = {}
        for name, bucket in buckets.items():
            if bucket:
                limits[name] = RateLimit(
                    messages_per_second=bucket.fill_rate,
                    messages_held=len(bucket.contents),
                )
        return limits

    # Messages that no task can process.

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Any:
        """Return Celery's message handler, guarded against malformed messages, which would end the
        worker.
        """
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            if not message.is_held:
                return (
                    None  # the message returned to the queue while it waited to start
                )
            if not message.try_start():
                return self.timer.call_after(
                    self.ALONE_INTERVAL_S, on_task_received, (message,)
                )
            try:
                if message.deaths[WHOLE] >= MAX_DEATHS:
                    deliveries = message.deliveries - 1
                    reason = (
                        f"delivered {deliveries} times; {MAX_DEATHS} workers died while handling "
                        "the message in isolation"
                    )
                    return self._refuse(message, reason, unread=True)
                check(message)
                if self._is_due_later(message):
                    message.postpone()
                    self._delay(message)
                    return None
                message.eta = take_eta(message)
                handle(message)
                message.postpone()
            except (InvalidTaskError, *MALFORMED_ERRORS) as error:
                return self.on_invalid_task(None, message, error)
            except BACKEND_ERRORS as fault:
                task_id = read_task_id(message)
                name = f"message {_quote(task_id)}"
                again = partial(take_again, message)
                self._retry_later(name, fault, message, again)

        def take_again(message: Any) -> None:
            message.unclaim()
            on_task_received(message)

        return on_task_received

    def _is_due_later(self, message: Any) -> bool:
        """Return whether a message has to wait for its ETA. Celery ends unknown tasks and revoked
        messages at once.
        """
        if due_in(message) <= 0:
            return False
        strategies: Any = self.strategies  # type: ignore[attr-defined]  # not in the stub
        if read_name(message) not in strategies:
            return False
        return not is_withdrawn(message)

    def _delay(self, message: Any) -> None:
        """Give a message that is due later back to Redis, and send the event that Celery sends for
        it.
        """
        fields = message.headers if "task" in message.headers else message.payload
        eventer: Any = self.event_dispatcher  # type: ignore[attr-defined]  # not in the stub
        eventer.send(
            "task-received",
            uuid=read_task_id(message),
            name=read_name(message),
            args="()",
            kwargs=format_arguments(read_arguments(message)),
            root_id=fields.get("root_id"),
            parent_id=fields.get("parent_id"),
            retries=fields.get("retries") or 0,
            eta=str(fields.get("eta")),
            expires=fields.get("expires") and str(fields["expires"]),
        )
        message.delay(ends_wait_in(message))

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        if message.content_type == UNDECODABLE:
            self._refuse(
                message, f"not a Celery message: {_quote(message.content_encoding)}"
            )
            return
        body_format = f"{message.content_type} in {message.content_encoding}"
        what = f"cannot decode the body as {_quote(body_format)}"
        self._refuse(message, what, exc)

    # Celery's arguments.
    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002
        self._refuse(
            message,
            "not a Celery message: neither its headers nor its body name a task",
        )

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        task = _quote(exc)
        what = f"this worker has no task {task}; set {PREFIX}INCLUDE to load your own tasks"
        self._refuse(message, what, sender_error=NotRegistered(task))

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        self._refuse(message, "invalid Celery message", exc)

    def _refuse(
        self,
        message: Any,
        what: str,
        error: Exception | None = None,
        sender_error: Exception | None = None,
        unread: bool = False,
    ) -> None:
        """Write a message's dead letters, store its failure for its sender, and acknowledge it.

        what: the reason. The error's own text may quote a post and stays out of the log.
        sender_error: the sender's result, if not `error` or the reason.
        unread: do not decode the body, because decoding may be what ended other workers.

        While Redis takes no writes, the worker keeps the message and retries. If the connection is
        lost meanwhile, the message is redelivered.
        """
        if message.acknowledged:
            return
        try:
            self._write_letters(message, what, error, unread)
        except RedisError as fault:
            self._end_if_denied(fault)
            logger.warning(
                "cannot write a dead letter (%s); retrying in %.1f s",
                fault,
                self.MAX_RETRY_DELAY_S,
            )
            self.timer.call_after(
                self.MAX_RETRY_DELAY_S,
                self._refuse,
                (message, what, error, sender_error, unread),
            )
            return
        task_id = read_task_id(message, unread)
        name = _quote(task_id)
        trace = read_context(message.headers)
        fields = fields_of(task_id, None, trace)
        logger.error("message %s is a dead letter: %s", name, what, extra=fields)
        result = sender_error or error or RequestRefused(what)
        try:
            self._tell_failed(message, result, unread)
        # The reply address is missing or malformed, or Redis is full.
        except (*MALFORMED_ERRORS, *BACKEND_ERRORS) as fault:
            logger.warning(
                "cannot notify the sender of message %s (%s)",
                name,
                type(fault).__name__,
                extra=fields,
            )
        message.reject_log_error(logger, self.connection_errors)

    def _write_letters(
        self, message: Any, what: str, error: Exception | None, unread: bool
    ) -> None:
        """Write a refused message's dead letters. Raises redis.exceptions.RedisError."""
        if unread:
            letter = _letter_of_unread(message, what, self.hostname)
            self._store.write([], [letter])
            return
        reason = what
        traceback = None
        if error:
            reason = f"{what}: {type(error).__name__}: {_quote(error)}"
            traceback = traceback_of(error)
        letters = _letters(message, reason, traceback, self.hostname)
        self._store.write([], letters)

    def _tell_failed(self, message: Any, error: Exception, unread: bool) -> None:
        task_id = tell_failed(self.app.backend, message, error, unread)
        eventer: Any = self.event_dispatcher  # type: ignore[attr-defined]  # not in the stub
        eventer.send(
            "task-failed",
            uuid=task_id,
            exception=type(error).__name__,
        )

    def catch_up(self) -> None:
        """Rewrite recent dead letters that Redis may have lost, and forget those that are safe."""
        with suppress(RedisError):  # the next call retries
            self._store.catch_up()

    def _end_if_denied(self, error: Exception) -> None:
        """End the worker if Redis denies it access: no new connection changes its permissions."""
        if is_denied(error):
            what = user_message(error, self.app.settings)
            logger.critical("%s", what)
            raise WorkerShutdown(EX_FAILURE) from None


def _first_tokens(bucket: Any) -> Any:
    """Return the number of tokens that the first request in a bucket needs."""
    _, tokens = bucket.contents[0]
    return tokens


def _letters(
    message: Any, reason: str, traceback: str | None, worker: str
) -> Sequence[DeadLetter]:
    """Return a dead letter for each post found in a kombu message.

    Without posts, return a single dead letter with the message's body.
    """
    content = Message(
        arguments=read_arguments(message),
        sent_at=None,
        task_id=read_task_id(message),
        attempts=message.deliveries,
        queue=message.queue,
    )
    now = time.time()
    raw_posts = content.raw_posts
    if raw_posts and all(isinstance(raw, dict) for raw in raw_posts):
        return content.refused_letters(reason, traceback, worker, now)
    letter = content.dead_letter_of_body(
        message.body,
        reason,
        traceback,
        worker,
        now,
    )
    return [letter]


def _letter_of_unread(message: Any, reason: str, worker: str) -> DeadLetter:
    """Return a dead letter with the body of a kombu message that must not be decoded."""
    content = Message(
        arguments={},
        sent_at=None,
        task_id=read_task_id(message, unread=True),
        attempts=message.deliveries - 1,  # this delivery only refuses the message
        queue=message.queue,
    )
    return content.dead_letter_of_body(
        message.body,
        reason,
        None,
        worker,
        time.time(),
    )


def _quote(value: object) -> str:
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
        parent.task_consumer.channel.consumer_room = parent.pool.in_flight.room
        # Instead, the pool publishes events periodically: a publication takes as long as a
        # message.
        parent.event_dispatcher.buffer_limit = EVENTS_TOGETHER
        parent.event_dispatcher.on_send_buffered = None
        # Redis is full; after a lost connection, this step runs again
        with suppress(ResponseError):
            parent._store.catch_up()
        with suppress(ResponseError):
            parent.pool.adopt(parent.event_dispatcher)
        parent.pool.catch_up = parent.catch_up

    def info(self, parent: Any) -> Any:
        """Return the rate limits, and how Redis is reached, for `inspect stats` and Flower.

        Celery masks only two of the three passwords.
        """
        limits = parent.rate_limits()
        info: dict[str, Any] = {
            "rate_limits": {name: limit._asdict() for name, limit in limits.items()}
        }
        if parent.connection:
            connection_info = parent.connection.info()
            info["broker"] = {
                name: value
                for name, value in connection_info.items()
                if name not in FIELDS_WITH_PASSWORDS
            }
        return info

    def stop(self, parent: Any) -> None:
        """Flush buffered events to the dispatcher, which passes unsent events to its successor."""
        parent.pool.in_flight.flush_events()


@control_command()
def feedmill_deploy(state: Any) -> dict[str, Any]:
    """Schedule a deployment check of this worker's queue and return the latest status."""
    deployed: dict[str, Any] = state.consumer.pool.deploy()
    return deployed


@inspect_command(alias="dump_schedule")
def scheduled(state: Any) -> list[dict[str, Any]]:
    """List the messages that are due next, of all queues: Redis keeps them, and no worker holds
    them.
    """
    leases = state.consumer.task_consumer.channel.leases
    return [
        {"eta": next_due.eta, "priority": 6, "request": _info(next_due.message)}
        for next_due in leases.delays.next_due()
    ]


#: Celery's command of this name, which finds the messages that the worker holds.
_query_held: Any = Panel.data["query_task"]


@inspect_command(variadic="ids", signature="[id1 [id2 [... [idN]]]]")
def query_task(state: Any, ids: Any) -> dict[str, Any]:
    """Query for task information by id, also of messages that are due later, among the next
    thousand.
    """
    answer: dict[str, Any] = _query_held(state, ids)
    task_ids = {str(task_id) for task_id in maybe_list(ids) or ()}
    missing_ids = task_ids.difference(answer)
    if not missing_ids:
        return answer
    leases = state.consumer.task_consumer.channel.leases
    messages = leases.delays.next_due(MAX_SEARCHED, SEARCHED_BYTES)
    for next_due in messages:
        info = _info(next_due.message)
        task_id = info["id"]
        if task_id in missing_ids:
            answer[task_id] = ("scheduled", info)
    return answer


#: Celery's command of this name.
_add_consumer: Any = Panel.data["add_consumer"]


@control_command(
    args=[
        ("queue", str),
        ("exchange", str),
        ("exchange_type", str),
        ("routing_key", str),
    ],
    signature="<queue> [exchange [type [routing_key]]]",
)
def add_consumer(state: Any, queue: str, **options: Any) -> Any:
    """Tell worker(s) to consume from task queue by name.

    Refuse a name whose Redis key is no list: the worker could not read any queue then.
    """
    if is_own_key(queue):
        problem = f"{OWN_KEYS} is the prefix of Feedmill's own keys"
        return {"error": f"{problem}: name another queue"}
    redis = state.consumer._redis
    for name in queue_lists(queue):
        kind = redis.type(name)
        if kind not in ("list", "none"):
            problem = f"Redis holds a {kind} under this name"
            return {"error": f"{problem}: name another queue"}
    return _add_consumer(state, queue, **options)


def _info(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message's description, as Celery's `Request.info` has it, without its arguments."""
    headers = encoding.headers_of(message)
    body = _stored_body(message)
    is_protocol_1 = isinstance(body, dict) and "task" not in headers
    fields: Any = body if is_protocol_1 else headers
    return {
        "id": fields.get("id"),
        "name": fields.get("task"),
        "args": "()",
        "kwargs": format_arguments(arguments_in(body)),
        "type": fields.get("task"),
        "hostname": None,
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {},
        "worker_pid": None,
    }


def _stored_body(message: dict[str, Any]) -> object:
    """Return the body of a message in Redis, decoded; None for a compressed one, whose size is
    unknown.
    """
    if encoding.headers_of(message).get("compression"):
        return None
    try:
        return encoding.parse(encoding.body_text(message))
    except UnreadableError:
        return None


class Scaler(Autoscaler):
    """Celery's autoscaler, without effect: a worker has one device."""

    def maybe_scale(self, req: Any = None) -> None: ...
