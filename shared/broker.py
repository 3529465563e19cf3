"""Connect to Redis: the Celery application, the Redis client, publishing by task name, and queue depth.

Every connection is opened here, so that passwords, timeouts and errors are handled once. Messages are JSON only;
Feedmill never reads or writes pickle.
"""

import json
import ssl
import time
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice, repeat
from typing import Any, NamedTuple

from celery import Celery, uuid
from redis import Redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel

from feedmill.shared import encoding
from feedmill.shared.errors import printable
from feedmill.shared.messages import MESSAGE_VERSION, ClassifyOptions, Post
from feedmill.shared.redis_errors import is_replica
from feedmill.shared.settings import Settings

#: Name of the classification task. Producers send it by name; only workers contain its code.
CLASSIFY_TASK = "feedmill.classify"
#: Header with the time of sending, in seconds since 1970. Used to measure queueing time.
SENT_AT = "sent_at"
#: Seconds to wait for one Sentinel before the next one is tried.
SENTINEL_TIMEOUT_S = 2.0
#: Priorities that kombu stores in separate lists per queue. Priority 0 is delivered first; its list has no suffix.
PRIORITIES = (0, 3, 6, 9)
PRIORITY_MARK = "\x06\x16"
#: Transport options with the names of its keys: messages under lease, and their leases.
TRANSPORT_KEYS = {f"{name}_key": f"feedmill:{name}" for name in ("reserved", "reserved_index")}
#: Timeouts in seconds of connections that Celery opens: of a command, and of connecting. Workers have their own
#: (workers/transport/redis_transport.py).
APPLICATION_TIMEOUTS = {"socket_timeout": 10, "socket_connect_timeout": 5}
#: Content type of a worker's stand-in for a queue element that is not a message.
UNDECODABLE = "undecodable"
#: Seconds for which Celery keeps results for the application that sent the message.
CELERY_RESULT_TTL_S = 3600
#: Limits on a message's arguments in events, logs and Flower: arguments, ids of posts, and characters of each.
MAX_SHOWN_ARGUMENTS, MAX_SHOWN_ITEMS, MAX_SHOWN_CHARACTERS = 8, 3, 40


class Application(Celery):
    """A Celery application with Feedmill's settings attached."""

    settings: Settings

    @cached_property
    def redis(self) -> Redis:
        """A client for the Redis of the settings. It repeats commands after a lost connection."""
        client = connect(self.settings)
        client.set_retry(Retry(ExponentialBackoff(cap=2.0, base=0.1), 3))
        return client


def make_app(settings: Settings, current: bool = True, kind: type[Application] = Application) -> Application:
    """Create the Celery application used by producers, workers and Flower.

    current: make it the thread's current application. False inside applications, which may have their own.
    """
    backend = settings.broker_url if settings.celery_results == "redis" else "rpc://"
    app = kind("feedmill", broker=settings.broker_url, backend=backend, set_as_current=current)
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
        # Timeouts, because an unresponsive Redis would block forever, and Celery's results for two minutes.
        broker_transport_options=sentinel_options(settings) | APPLICATION_TIMEOUTS,
        redis_socket_timeout=APPLICATION_TIMEOUTS["socket_timeout"],
        redis_socket_connect_timeout=APPLICATION_TIMEOUTS["socket_connect_timeout"],
        result_backend_transport_options=sentinel_options(settings),
    )
    return app


def tls(settings: Settings) -> dict[str, Any] | None:
    """Return the TLS options that make redis-py, kombu and Celery verify a rediss:// server; None for other schemes."""
    if settings.redis.scheme != "rediss":
        return None
    files = {
        "ssl_ca_certs": settings.redis_ca_file,
        "ssl_certfile": settings.redis_certificate_file,
        "ssl_keyfile": settings.redis_key_file,
    }
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED} | {name: str(path) for name, path in files.items() if path}


def sentinel_options(settings: Settings) -> dict[str, Any]:
    """Return the options that kombu and Celery need to find the master through Sentinels."""
    if settings.redis.scheme != "sentinel":
        return {}
    return {"master_name": settings.redis_master, "sentinel_kwargs": _sentinel_connection_options(settings)}


def _sentinel_connection_options(settings: Settings) -> dict[str, Any]:
    password = settings.redis_sentinel_password
    return {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "password": password and password.get_secret_value(),
    }


def connect(settings: Settings) -> Redis:
    """Return a client for the Redis that holds queue and results. It connects on its first command."""
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_connect_timeout": 5,
        "socket_timeout": 30,
        "health_check_interval": 30,
    }
    found = settings.redis
    if found.scheme != "sentinel":
        client = Redis.from_url(settings.broker_url, **options, **(tls(settings) or {}))
        client.connection_pool.connection_class = _disconnecting_from_replicas(client.connection_pool.connection_class)
        return client
    # No retries per Sentinel: the next one may answer at once.
    sentinel_options = _sentinel_connection_options(settings) | {"retry": Retry(NoBackoff(), 0)}
    options |= {"username": found.user, "password": found.password, "db": found.database}
    sentinel: Any = Sentinel
    master: Redis = sentinel(found.hosts, sentinel_kwargs=sentinel_options, **options).master_for(settings.redis_master)
    return master


def _disconnecting_from_replicas(kind: Any) -> Any:
    """Return a connection class that disconnects if Redis reports being a replica, like redis-py's Sentinel client.

    After a failover behind a DNS name or proxy, a new connection reaches the new master; the old one would stay on the
    replica forever.
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


def publish(
    app: Application,
    messages: Sequence[Sequence[Post]],
    options: ClassifyOptions,
    priority: int = 0,
    replies: Sequence[str] | None = None,
) -> None:
    """Publish messages of posts as one batch to the application's queue.

    replies: task id of each message, under which Celery keeps its result. None keeps no results; the classifications
    are stored anyway. Raises redis.exceptions.RedisError: after a lost connection, the messages may be in the queue.
    """
    texts = [
        json.dumps(_message(app, posts, options, priority, task_id))
        for posts, task_id in zip(messages, replies or repeat(None), strict=False)
    ]
    name = queue_lists(app.settings.queue)[bisect_right(PRIORITIES, priority) - 1]
    app.redis.lpush(name, *texts)


def _message(
    app: Application, posts: Sequence[Post], options: ClassifyOptions, priority: int, task_id: str | None
) -> dict[str, Any]:
    """Return Celery's message in the form of kombu's Redis transport. Celery's `send_task` takes ten times as long."""
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
    body, headers = encoding.write(task.body), {**task.headers, SENT_AT: time.time()}
    if sum(len(post.title) + len(post.body) for post in posts) >= encoding.MIN_COMPRESSED_CHARACTERS:
        body, headers["compression"] = encoding.pack(body), encoding.GZIP
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
    """Format a message's arguments for events, logs and Flower: short, printable, and without any post's text."""
    first = islice(arguments.items(), MAX_SHOWN_ARGUMENTS)
    shown = (f"'{_short(name)}': {_format(name, value)}" for name, value in first)
    return f"{{{', '.join(shown)}}}"


def _format(name: object, value: object) -> str:
    """Format one argument. Other values than posts' ids and numbers could contain posts: only their type is shown."""
    if name == "posts" and isinstance(value, list):
        ids = (post.get("id") if isinstance(post, dict) else getattr(post, "id", None) for post in value)
        first = [_short(post_id) for post_id in islice(ids, MAX_SHOWN_ITEMS) if isinstance(post_id, str | int)]
        return f"<{len(value)} post{'s' * (len(value) != 1)}: {', '.join(first)}>"
    return _short(value) if value is None or isinstance(value, bool | int | float) else f"<{type(value).__name__}>"


def _short(value: object) -> str:
    return printable(str(value)[:MAX_SHOWN_CHARACTERS])


class QueueDepth(NamedTuple):
    """Number of messages `waiting` in the queue and `held` by workers."""

    waiting: int
    held: int


def queue_lists(queue: str) -> list[str]:
    """Return the Redis lists of a queue, one per priority, most urgent first."""
    return [f"{queue}{PRIORITY_MARK}{priority}" if priority else queue for priority in PRIORITIES]


def queue_depth(redis: Redis, queue: str) -> QueueDepth:
    """Count the messages waiting in `queue` over all priorities, and those held by workers of any Feedmill queue."""
    pipe: Any = redis.pipeline(transaction=False)
    for name in queue_lists(queue):
        pipe.llen(name)
    pipe.hlen(TRANSPORT_KEYS["reserved_key"])
    *waiting, held = pipe.execute()
    return QueueDepth(sum(waiting), held)
