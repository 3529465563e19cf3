"""Connect to Redis: the Celery application, the Redis client, publishing by task name, and queue
depth.

Every connection is opened here, so that passwords, timeouts and errors are handled once. Messages
are JSON only; Feedmill never reads or writes pickle.
"""

import json
import logging
import ssl
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

import kombu
from celery import Celery, uuid
from celery.app.amqp import AMQP
from redis import ConnectionPool, Redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from feedmill.shared import encoding
from feedmill.shared.bindings import tolerant
from feedmill.shared.errors import printable
from feedmill.shared.messages import MESSAGE_VERSION, ClassifyOptions, Post
from feedmill.shared.redis_errors import is_replica, is_starting, user_message
from feedmill.shared.settings import Settings
from feedmill.shared.trace_context import TraceContext
from feedmill.shared.tracing import publishing

logger = logging.getLogger(__name__)

#: Name of the classification task. Producers send it by name; only workers contain its code.
CLASSIFY_TASK = "feedmill.classify"
#: Header with the time of sending, in seconds since 1970. Used to measure queueing time.
SENT_AT = "sent_at"
#: Seconds to wait for one Sentinel before the next one is tried.
SENTINEL_TIMEOUT_S = 2.0
#: Seconds between attempts to reach a Redis that is still starting or busy.
STARTING_POLL_S = 0.5
#: Priority steps, each with a list of its own per queue: those that kombu's senders use by
#: default, and all that they can be configured to use, which workers read. Step 0 is delivered
#: first; its list has no suffix.
SENT_STEPS = (0, 3, 6, 9)
READ_STEPS = tuple(range(10))
PRIORITY_MARK = "\x06\x16"
#: Transport options with the names of its keys: messages under lease and their leases; messages
#: that are due later, and when.
TRANSPORT_KEYS = {
    "reserved_key": "feedmill:reserved",
    "reserved_index_key": "feedmill:reserved_index",
    "delayed_key": "feedmill:delayed",
    "delayed_index_key": "feedmill:delayed_index",
}
#: Start of the names of all of Feedmill's keys but its queues.
OWN_KEYS = "feedmill:"
#: Timeouts in seconds of connections that Celery opens: of a command, and of connecting. Workers
#: have their own (workers/transport/redis_transport.py).
APPLICATION_TIMEOUTS = {"socket_timeout": 10, "socket_connect_timeout": 5}
#: Seconds between two checks of a connection that only receives, of events or remote commands; the
#: third finds that two were not answered.
CHECK_INTERVAL_S = 4.0
#: Pool of Feedmill's workers, which Celery loads by this path and names in its statistics.
DEVICE_POOL = "feedmill.workers.runtime.pool:DevicePool"
#: Content type of a worker's stand-in for a queue element that is not a message.
UNDECODABLE = "undecodable"
#: Seconds for which Celery keeps results for the application that sent the message.
CELERY_RESULT_TTL_S = 3600
#: Limits on a message's arguments in events, logs and Flower: arguments, ids of posts, and
#: characters of each.
MAX_SHOWN_ARGUMENTS = 8
MAX_SHOWN_ITEMS = 3
MAX_SHOWN_CHARACTERS = 40


class Connection(kombu.Connection):
    """kombu's connection, which tolerates odd bindings (shared/bindings.py).

    Publications without a retry policy fail after a second attempt on a new connection. kombu and
    Celery publish commands, their answers and heartbeats without a policy, and would repeat them
    until Redis
    takes them: `feedmill
    status` would never end, and a worker would not notice SIGTERM.
    """

    def ensure(
        self,
        obj: Any,
        fun: Any,
        errback: Any = None,
        max_retries: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if max_retries is None:
            max_retries = 1
        return super().ensure(
            obj,
            fun,
            errback,
            max_retries,
            *args,
            **kwargs,
        )

    def get_transport_cls(self) -> Any:
        return tolerant(super().get_transport_cls())


class Amqp(AMQP):
    """Celery's factory of connections and messages."""

    Connection = Connection


class Application(Celery):
    """A Celery application with Feedmill's settings attached."""

    amqp_cls = f"{Amqp.__module__}:{Amqp.__name__}"
    settings: Settings

    @cached_property
    def redis(self) -> Redis:
        """A client for the Redis of the settings. It repeats commands after a lost connection."""
        client = connect(self.settings)
        backoff = ExponentialBackoff(
            cap=2.0,
            base=0.1,
        )
        client.set_retry(Retry(backoff, retries=3))
        return client


def make_app(
    settings: Settings, current: bool = False, kind: type[Application] = Application
) -> Application:
    """Create the Celery application used by producers, workers and Flower.

    current: make it the thread's current application, to which `@shared_task` sends. Only for
    processes of Feedmill's own: others have their own application.
    """
    broker = settings.broker_url
    backend = broker if settings.celery_results == "redis" else "rpc://"
    app = kind(
        "feedmill",
        broker=broker,
        backend=backend,
        set_as_current=current,
    )
    app.settings = settings
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        task_default_queue=settings.queue,
        task_acks_late=True,
        result_expires=CELERY_RESULT_TTL_S,
        worker_send_task_events=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        # Workers reconnect for as long as it takes.
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_enable_prefetch_count_reduction=False,
        # Set explicitly: for a rediss:// URL alone, kombu does not verify certificates.
        broker_use_ssl=tls(settings),
        redis_backend_use_ssl=tls(settings),
        # Timeouts, because an unresponsive Redis would block forever, and Celery's results for two
        # minutes.
        broker_transport_options=sentinel_options(settings) | APPLICATION_TIMEOUTS,
        redis_socket_timeout=APPLICATION_TIMEOUTS["socket_timeout"],
        redis_socket_connect_timeout=APPLICATION_TIMEOUTS["socket_connect_timeout"],
        result_backend_transport_options=sentinel_options(settings),
    )
    return app


def tls(settings: Settings) -> dict[str, Any] | None:
    """Return the TLS options that make redis-py, kombu and Celery verify a rediss:// server; None
    for other schemes.
    """
    if settings.redis.scheme != "rediss":
        return None
    files = {
        "ssl_ca_certs": settings.redis_ca_file,
        "ssl_certfile": settings.redis_certificate_file,
        "ssl_keyfile": settings.redis_key_file,
    }
    options: dict[str, Any] = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    for name, path in files.items():
        if path:
            options[name] = str(path)
    return options


def sentinel_options(settings: Settings) -> dict[str, Any]:
    """Return the options that kombu and Celery need to find the master through Sentinels."""
    if settings.redis.scheme != "sentinel":
        return {}
    return {
        "master_name": settings.redis_master,
        "sentinel_kwargs": _sentinel_connection_options(settings),
    }


def _sentinel_connection_options(settings: Settings) -> dict[str, Any]:
    password = settings.redis_sentinel_password
    return {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "password": password and password.get_secret_value(),
    }


def connect(settings: Settings, timeout_s: float = 30.0) -> Redis:
    """Return a client for the Redis that holds queue and results.

    It connects on its first command.

    timeout_s: timeout of a command.
    """
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_connect_timeout": 5,
        "socket_timeout": timeout_s,
        "health_check_interval": 30,
    }
    address = settings.redis
    if address.scheme != "sentinel":
        tls_options = tls(settings) or {}
        pool = _Pool.from_url(
            settings.broker_url,
            **options,
            **tls_options,
        )
        pool.connection_class = _disconnecting_from_replicas(pool.connection_class)
        return Redis.from_pool(pool)
    sentinel_options = _sentinel_connection_options(settings)
    # No retries per Sentinel: the next one may answer at once.
    sentinel_options["retry"] = Retry(NoBackoff(), retries=0)
    options["username"] = address.user
    options["password"] = address.password
    options["db"] = address.database
    sentinel: Any = Sentinel
    sentinels = sentinel(
        address.hosts,
        sentinel_kwargs=sentinel_options,
        **options,
    )
    master: Redis = sentinels.master_for(
        settings.redis_master, connection_pool_class=_SentinelPool
    )
    return master


class _Interruptible:
    """A connection pool that closes a connection whose command was interrupted.

    Ctrl-C or another signal can raise between sending a command and reading its reply. The next
    command on this connection would receive that reply.
    """

    def release(self, connection: Any) -> None:
        _, error, _ = sys.exc_info()
        is_interrupt = error is not None and not isinstance(error, Exception)
        if is_interrupt:
            connection.disconnect()
        # Of the pool that this class is combined with.
        super().release(connection)  # type: ignore[misc]


class _Pool(_Interruptible, ConnectionPool): ...


class _SentinelPool(_Interruptible, SentinelConnectionPool): ...


def _disconnecting_from_replicas(kind: Any) -> Any:
    """Return a connection class that disconnects if Redis reports being a replica, like redis-py's
    Sentinel client.

    After a failover behind a DNS name or proxy, a new connection reaches the new master; the old
    one would stay on the replica forever.
    """

    class Connection(kind):  # type: ignore[misc]  # the base class depends on the URL
        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().read_response(*args, **kwargs)
            except ResponseError as error:
                if is_replica(error):
                    self.disconnect()
                raise

    return Connection


def wait_while_starting(
    redis: Redis, settings: Settings, wait: Callable[[float], object] = time.sleep
) -> None:
    """Wait until Redis answers, if it is only starting, busy or out of connections.

    For services, before they begin.

    A service that starts together with Redis must not end. Raises redis.exceptions.RedisError for
    any other failure, such as a wrong address.
    """
    has_warned = False
    while True:
        try:
            redis.ping()
            return
        except RedisError as fault:
            if not is_starting(fault):
                raise
            if not has_warned:
                logger.warning("%s Retrying.", user_message(fault, settings))
                has_warned = True
        wait(STARTING_POLL_S)


def publish(
    app: Application,
    messages: Sequence[Sequence[Post]],
    options: ClassifyOptions,
    priority: int = 0,
    replies: Sequence[str] | None = None,
    parents: Sequence[TraceContext | None] | None = None,
) -> None:
    """Publish messages of posts as one batch to the application's queue.

    replies: task id of each message, under which Celery keeps its result. None keeps no results;
    the classifications are stored anyway. parents: the span of each message that its trace
    continues; None for the current one. Raises redis.exceptions.RedisError: after a lost
    connection, the messages may be in the queue.
    """
    if not messages:
        return
    task_ids: Sequence[str | None] = [None] * len(messages)
    if replies is not None:
        task_ids = replies
    if parents is None:
        parents = [None] * len(messages)
    step = max(step for step in SENT_STEPS if step <= priority)
    key = queue_list(app.settings.queue, step)
    texts = []
    with publishing(app.settings.queue) as publication:
        for posts, task_id, parent in zip(messages, task_ids, parents, strict=True):
            message = _message(app, posts, options, priority, task_id)
            if publication is not None:
                publication.add(message, len(posts), parent)
            elif parent is not None:
                message["headers"].update(parent.headers())
            texts.append(json.dumps(message))
        app.redis.lpush(key, *texts)


def _message(
    app: Application,
    posts: Sequence[Post],
    options: ClassifyOptions,
    priority: int,
    task_id: str | None,
) -> dict[str, Any]:
    """Return Celery's message in the form of kombu's Redis transport.

    Celery's `send_task` takes ten times as long.
    """
    kwargs = {"posts": posts, **options.arguments()}
    amqp: Any = app.amqp
    task = amqp.as_task_v2(
        task_id or uuid(),
        CLASSIFY_TASK,
        kwargs=kwargs | {"version": MESSAGE_VERSION},
        reply_to=app.thread_oid,
        ignore_result=task_id is None,
        argsrepr="()",
        kwargsrepr=format_arguments(kwargs),
    )
    body = encoding.write(task.body)
    headers = {**task.headers, SENT_AT: time.time()}
    characters = sum(len(post.title) + len(post.body) for post in posts)
    if characters >= encoding.MIN_COMPRESSED_CHARACTERS:
        body = encoding.pack(body)
        headers["compression"] = encoding.GZIP
    properties = {
        "priority": priority,
        "delivery_mode": 2,
        "delivery_tag": uuid(),
        "delivery_info": {"exchange": "", "routing_key": app.settings.queue},
        "body_encoding": encoding.BASE64,
    }
    return {
        "body": b64encode(body).decode(),
        "content-type": encoding.JSON[0],
        "content-encoding": encoding.JSON[1],
        "headers": headers,
        "properties": task.properties | properties,
    }


def format_arguments(arguments: Mapping[str, object]) -> str:
    """Format a message's arguments for events, logs and Flower: short, printable, and without any
    post's text.
    """
    texts = []
    for name, value in islice(arguments.items(), MAX_SHOWN_ARGUMENTS):
        text = _format(name, value)
        texts.append(f"'{_short(name)}': {text}")
    joined = ", ".join(texts)
    return f"{{{joined}}}"


def _format(name: object, value: object) -> str:
    """Format one argument.

    Other values than posts' ids and numbers could contain posts: only their type is shown.
    """
    if name == "posts" and isinstance(value, list):
        return _format_posts(value)
    if value is None or isinstance(value, bool | int | float):
        return _short(value)
    return f"<{type(value).__name__}>"


def _format_posts(posts: list[object]) -> str:
    """Format posts as their number and the first ids."""
    ids = []
    for post in posts[:MAX_SHOWN_ITEMS]:
        post_id = (
            post.get("id") if isinstance(post, dict) else getattr(post, "id", None)
        )
        if isinstance(post_id, str | int | UUID):
            ids.append(_short(post_id))
    unit = "post" if len(posts) == 1 else "posts"
    return f"<{len(posts)} {unit}: {', '.join(ids)}>"


def _short(value: object) -> str:
    text = str(value)
    return printable(text[:MAX_SHOWN_CHARACTERS])


class QueueDepth(NamedTuple):
    """Number of messages `waiting` in the queue, `held` by workers, and `delayed` until they are
    due.
    """

    waiting: int
    held: int
    delayed: int = 0


def queue_list(queue: str, step: int) -> str:
    """Return the Redis list of a queue's priority step."""
    if step == 0:
        return queue
    return f"{queue}{PRIORITY_MARK}{step}"


def queue_lists(queue: str) -> list[str]:
    """Return the Redis lists of a queue that workers read, one per priority step, most urgent
    first.
    """
    return [queue_list(queue, step) for step in READ_STEPS]


def queue_depth(redis: Redis, queue: str) -> QueueDepth:
    """Count the messages waiting in `queue` over all priorities, and those of any queue that are
    held or delayed.
    """
    pipe: Any = redis.pipeline(transaction=False)
    for name in queue_lists(queue):
        pipe.llen(name)
    pipe.hlen(TRANSPORT_KEYS["reserved_key"])
    pipe.hlen(TRANSPORT_KEYS["delayed_key"])
    *waiting, held, delayed = pipe.execute()
    return QueueDepth(
        waiting=sum(waiting),
        held=held,
        delayed=delayed,
    )
