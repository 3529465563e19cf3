"""The way into Redis: the Celery application, the Redis client, publishing by name, and the queue's depth.

Everything that opens a connection does it here, so that passwords, timeouts and errors are handled once.
JSON only: no process of ours reads or writes pickle.
"""

import re
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import BatchPublishError, OperationalError  # type: ignore[attr-defined]  # the stubs are older
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from shared import encoding
from shared.errors import RedisError, clause, printable
from shared.keys import UNDECODABLE
from shared.leases import MAX_DECODED, MAX_MESSAGE
from shared.messages import MESSAGE_VERSION, ClassifyOptions, Post
from shared.refusals import cannot_save, causes_of, is_denied, is_full, is_replica
from shared.replay import Connections
from shared.settings import PREFIX, Settings
from shared.transport import settings_for

#: The one task. Producers send it by this name; only workers hold its code.
CLASSIFY_TASK = "feedmill.classify"
#: Header with the time of sending, in seconds since 1970: tells how long a post was queued.
SENT_AT = "sent_at"
#: Seconds before a batch of messages is sent again after a lost connection.
RETRY_PAUSES = (0.1, 0.5, 2.0)
#: Seconds that a Sentinel may take: the next one is asked instead.
SENTINEL_PATIENCE = 2.0
#: kombu's lists of one queue, by priority; 0 goes first and bears the queue's own name.
PRIORITIES = (0, 3, 6, 9)
PRIORITY_MARK = "\x06\x16"
#: Where the transport notes what workers hold, and what is no message at all (shared/leases.py).
HELD = {f"{name}_key": f"feedmill:{name}" for name in ("reserved", "reserved_index")} | {"undecodable_key": UNDECODABLE}
#: Of a message's arguments events, logs and Flower show at most so many; of a list's items, so many; of each, so many
#: characters.
SHOWN_ARGUMENTS, SHOWN_ITEMS, SHOWN_CHARACTERS = 8, 3, 40


class Application(Celery):
    """A Celery application that knows our settings."""

    settings: Settings


def make_app(settings: Settings) -> Application:
    """The Celery application that producers, workers and Flower share."""
    backend = settings.broker_url if settings.celery_results == "redis" else "rpc://"
    encoding.register()
    app = Application("feedmill", broker=settings.broker_url, backend=backend)
    app.settings = settings
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        task_default_queue=settings.queue,
        task_acks_late=True,
        result_expires=settings.celery_result_ttl,
        worker_send_task_events=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        # A worker that has lost its connection connects again for as long as it takes.
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_enable_prefetch_count_reduction=False,
        # Said outright: of rediss:// alone kombu makes a connection that verifies nothing.
        broker_use_ssl=tls(settings),
        redis_backend_use_ssl=tls(settings),
        broker_transport_options=_sentinel_options(settings),
        result_backend_transport_options=_sentinel_options(settings),
    )
    return app


def tls(settings: Settings) -> dict[str, Any] | None:
    """How redis-py, kombu and Celery are told to verify a rediss:// server; None for plain text."""
    if settings.redis.scheme != "rediss":
        return None
    files = {
        "ssl_ca_certs": settings.redis_ca_file,
        "ssl_certfile": settings.redis_certificate_file,
        "ssl_keyfile": settings.redis_key_file,
    }
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED} | {name: str(path) for name, path in files.items() if path}


def _sentinel_options(settings: Settings) -> dict[str, Any]:
    """How kombu and Celery find the master that a sentinel:// address means."""
    if settings.redis.scheme != "sentinel":
        return {}
    return {"master_name": settings.redis_master, "sentinel_kwargs": _to_sentinels(settings)}


def _to_sentinels(settings: Settings) -> dict[str, Any]:
    password = settings.redis_sentinel_password
    return {
        "socket_timeout": SENTINEL_PATIENCE,
        "socket_connect_timeout": SENTINEL_PATIENCE,
        "password": password and password.get_secret_value(),
    }


def reserve(app: Application) -> None:
    """Have the application take messages under leases (shared/transport.py): a worker's, since senders take none."""
    settings = app.settings
    encoding.bound(MAX_MESSAGE, MAX_DECODED)
    app.conf.update(
        settings_for(settings.broker_url, tls(settings)),
        broker_transport_options={
            **_sentinel_options(settings),
            **HELD,
            "visibility_timeout": settings.visibility_timeout,
            "unacked_restore_interval": settings.visibility_timeout / 3,
        },
    )


def connect(settings: Settings) -> Redis:
    """A client of the Redis that holds queue and results. Connects with its first command."""
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_connect_timeout": 5,
        "socket_timeout": 30,
        "health_check_interval": 30,
        "redis_connect_func": Connections(),
    }
    found = settings.redis
    if found.scheme != "sentinel":
        client = Redis.from_url(settings.broker_url, **options, **(tls(settings) or {}))
        client.connection_pool.connection_class = _leaving_replicas(client.connection_pool.connection_class)
        return client
    # Once each: while one Sentinel is tried again and again, the next one knows the answer.
    asking = _to_sentinels(settings) | {"retry": Retry(NoBackoff(), 0)}
    options |= {"username": found.user, "password": found.password, "db": found.database}
    sentinel: Any = Sentinel
    master: Redis = sentinel(found.hosts, sentinel_kwargs=asking, **options).master_for(settings.redis_master)
    return master


def _leaving_replicas(kind: Any) -> Any:
    """Return a class of connections that end where Redis says that it is a replica, as redis-py's to Sentinels do.

    Behind a name or a proxy, the next connection leads to the new master, while the old one would live for ever.
    """

    class Connection(kind):  # type: ignore[misc]  # whichever redis-py chose
        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().read_response(*args, **kwargs)
            except ResponseError as error:
                if is_replica(error):
                    self.disconnect()
                raise

    return Connection


@contextmanager
def told_plainly(settings: Settings) -> Iterator[None]:
    """Turns a Redis that cannot be reached or trusted, or refuses, into RedisError, a sentence for people."""
    try:
        yield
    except (ConnectionFault, TimeoutFault, OperationalError, ResponseError, InvalidResponse) as fault:
        if (said := plainly(fault, settings)) is None:
            raise
        raise RedisError(said) from None


def plainly(fault: BaseException, settings: Settings) -> str | None:
    """What Redis does, or does not, and what to do about it, as a sentence; None where that is not known."""
    why = _why(fault, settings)
    return why and f"Redis at {settings.redis_address} {why}"


def _why(fault: BaseException, settings: Settings) -> str | None:
    causes = {type(cause): cause for cause in causes_of(fault)}
    said = _refusal(fault, causes, settings) or _insecurity(causes, settings)
    if said or isinstance(fault, ResponseError):
        return said
    if lost := causes.get(MasterNotFoundError):  # its text shows redis-py's clients whole
        if re.search("AuthenticationError|NOAUTH|WRONGPASS", str(lost)):
            return f"cannot be asked for: its Sentinels want their own password. Set {PREFIX}REDIS_SENTINEL_PASSWORD."
        return f"is not to be found: no Sentinel answers that knows this master. Set {PREFIX}REDIS_MASTER to its name."
    if InvalidResponse in causes:
        return f"answers, but not as Redis does ({clause(fault)}). Is this its port? Set {PREFIX}REDIS_URL."
    hint = f"Start the embedded stack with `feedmill up`, or set {PREFIX}REDIS_URL."
    if settings.redis.scheme == "redis" and re.search("closed|reset", str(fault)):
        hint = f"If it speaks TLS there, {PREFIX}REDIS_URL is to begin with rediss://."
    elif settings.redis.scheme == "rediss" and "Timeout" in str(fault):
        hint = "Does it speak TLS on this port? Nothing is sent to it without."
    return f"does not answer ({clause(fault)}). {hint}"


def _refusal(fault: BaseException, causes: Mapping[type, Any], settings: Settings) -> str | None:
    """Where it answers, and refuses."""
    found = settings.redis
    if is_full(fault):
        return "has reached its memory limit and takes nothing more. Raise its `maxmemory`."
    if is_denied(fault):
        return (
            f"does not let user {found.user or 'default'} do this ({clause(causes.get(NoPermissionError) or fault)}). "
            "docs/redis.md tells which user may do what."
        )
    if is_replica(fault):
        return f"is a replica, and lets nobody write. Set {PREFIX}REDIS_URL to its master, or to the Sentinels."
    if cannot_save(fault):
        return f"cannot save its data, and so takes nothing more ({clause(fault)})"
    if AuthenticationError in causes:
        return (
            f"answers, but {'refuses the password' if found.password else 'wants a password, and none is set'}. "
            f"Set {PREFIX}REDIS_URL with its password, as {found.scheme}://:password@host:6379/0."
        )
    return None


def _insecurity(causes: Mapping[type, Any], settings: Settings) -> str | None:
    """Where no TLS comes about."""
    if untrusted := causes.get(ssl.SSLCertVerificationError):
        return (
            f"shows a certificate that is not to be trusted ({untrusted.verify_message.rstrip('.')}), and was sent "
            f"nothing. It must be valid for {settings.redis.hosts[0][0]}, and be vouched for by {PREFIX}REDIS_CA_FILE."
        )
    broken = next((cause for kind, cause in causes.items() if issubclass(kind, ssl.SSLError)), None)
    if broken:
        return (
            f"cannot be spoken to with TLS ({broken.reason or broken.strerror}). Is this its TLS port? Does it ask for "
            f"a certificate of ours: {PREFIX}REDIS_CERTIFICATE_FILE and {PREFIX}REDIS_KEY_FILE?"
        )
    return None


def publish(app: Application, messages: Sequence[Sequence[Post]], options: ClassifyOptions, priority: int = 0) -> None:
    """Send messages of posts, by task name, in one go, to the application's queue.

    Nobody waits for their Celery results; results are stored. Raises kombu.exceptions.OperationalError; some of the
    messages may then be in the queue all the same.
    """
    for pause in (*RETRY_PAUSES, None):
        try:
            _send(app, messages, options, priority)
        except BatchPublishError as error:
            # kombu tries single messages again by itself, batches not.
            if pause is None or not isinstance(error.__cause__, ConnectionFault | TimeoutFault):
                raise OperationalError(str(error.__cause__ or error)) from error
            time.sleep(pause)
        else:
            return


def _send(app: Application, messages: Sequence[Sequence[Post]], options: ClassifyOptions, priority: int) -> None:
    compressed = app.settings.compression == "gzip"
    with app.producer_or_acquire() as producer, producer.batch():
        for posts in messages:
            kwargs = {"posts": posts, **options.arguments()}
            characters = sum(len(post.title) + len(post.body) for post in posts)
            app.send_task(
                CLASSIFY_TASK,
                kwargs=kwargs | {"version": MESSAGE_VERSION},
                headers={SENT_AT: time.time()},
                ignore_result=True,
                producer=producer,
                serializer=encoding.POSTS,
                compression="gzip" if compressed and characters >= encoding.PACKED_FROM else None,
                priority=priority,
                argsrepr="()",
                kwargsrepr=shown_arguments(kwargs),
            )


def shown_arguments(kwargs: Mapping[str, object]) -> str:
    """Arguments of a message as events, logs and Flower show them: short, printable, and nobody's posts."""
    shown = (f"'{_short(name)}': {shown_argument(name, value)}" for name, value in kwargs.items())
    return f"{{{_first(shown, SHOWN_ARGUMENTS, len(kwargs))}}}"


def shown_argument(name: object, value: object) -> str:
    """One of them. What is not known by its name might hold a post: no more than its type is shown."""
    if value is None or isinstance(value, bool | int | float):
        return _short(value)
    if name == "posts" and isinstance(value, list):
        return _listed(name, (_id_of(post) for post in value), len(value))
    if name == "labels" and isinstance(value, list | dict):
        return _listed(name, value, len(value))
    if name == "template" and isinstance(value, str):
        return f"'{_short(value)}'"
    return f"<{type(value).__name__}>"


def _id_of(post: object) -> object:
    return post.get("id") if isinstance(post, dict) else post.id if isinstance(post, Post) else None


def _listed(what: str, names: Iterable[object], count: int) -> str:
    shown = _first((_short(name) if isinstance(name, str | int) else "?" for name in names), SHOWN_ITEMS, count)
    counted = f"{count} {what.removesuffix('s') if count == 1 else what}"
    return f"<{counted}: {shown}>" if shown else f"<{counted}>"


def _first(shown: Iterable[str], limit: int, count: int) -> str:
    first = list(islice(shown, limit))
    return ", ".join(first if count <= limit else [*first, "…"])


def _short(value: object) -> str:
    try:
        text = str(value)
    except ValueError:  # a number of thousands of digits
        return "…"
    return printable(text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…")


class QueueDepth(NamedTuple):
    """Messages by where they are: `waiting` in the queue, `held` by workers."""

    waiting: int
    held: int


def queue_lists(queue: str) -> list[str]:
    """The lists in which messages of a queue wait, the most urgent first."""
    return [f"{queue}{PRIORITY_MARK}{priority}" if priority else queue for priority in PRIORITIES]


def queue_depth(redis: Redis, queue: str) -> QueueDepth:
    """How many messages wait in `queue` over all priorities, and how many workers hold (of any queue of Feedmill's)."""
    pipe: Any = redis.pipeline(transaction=False)
    for name in queue_lists(queue):
        pipe.llen(name)
    pipe.hlen(HELD["reserved_key"])
    *waiting, held = pipe.execute()
    return QueueDepth(sum(waiting), held)
