"""Serve Prometheus metrics and health checks over HTTP, for workers and daemons; or send the
metrics to an OpenTelemetry collector (shared/otlp_metrics.py).

Each process declares its metrics, shown in docs/reference/metrics.md, and reads their values on
each scrape. Metrics of the queue and the results are declared here, because every process can read
them from Redis. prometheus-client is imported only when a port is set.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader, RawIOBase
from itertools import accumulate
from socket import AF_INET6, socket
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from feedmill.shared import otlp_metrics
from feedmill.shared.broker import (
    SENT_AT,
    QueueDepth,
    connect,
    queue_depth,
    queue_lists,
)
from feedmill.shared.errors import UserError, clause, explain_missing
from feedmill.shared.model_routing import queues
from feedmill.shared.problems import (
    BUSY,
    NAMES,
    NO_EVICTION,
    Problem,
    find_problems,
)
from feedmill.shared.redis_errors import is_busy, trouble
from feedmill.shared.results import Counters, ResultsStore
from feedmill.shared.scripts import call
from feedmill.shared.settings import PREFIX, Settings
from feedmill.shared.tracing import NAME
from feedmill.shared.unread_lists import find_unread_lists

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client.core import Metric as Family

logger = logging.getLogger(__name__)

#: Timeout of a Redis command during a scrape or health check, in seconds. Prometheus waits 10
#: seconds in total.
REDIS_TIMEOUT_S = 1.0
#: Maximum seconds for reading a request, and for sending a part of the answer.
HTTP_TIMEOUT_S = 10.0


class Metric(NamedTuple):
    """A Prometheus metric. kind: counter, gauge, histogram or summary.

    Names of counters end with _total.
    """

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()


#: Values by metric name. The value of a metric with labels is a dict by label value, or by tuple
#: of label values; None is omitted. A histogram's value has the attributes bounds, counts (one per
#: bound, then those above all bounds; not cumulated) and total. A summary's value is (count, sum).
Values = dict[str, Any]
#: Metrics, and the function that returns their current values, called on the server's threads for
#: each scrape.
Source = tuple[Iterable[Metric], Callable[[], Values]]
#: Returns one sentence per problem; none if healthy. Called on the server's threads.
HealthCheck = Callable[[], Sequence[str]]


def declare(**kinds: Mapping[str, str]) -> tuple[Metric, ...]:
    """Declare metrics by kind: help text by name, with label names as in
    "feedmill_memory_bytes{data}".
    """
    metrics = []
    for kind, texts in kinds.items():
        for declaration, text in texts.items():
            name, _, rest = declaration.partition("{")
            labels = rest.rstrip("}").split(",") if rest else []
            metrics.append(
                Metric(
                    kind=kind,
                    name=name,
                    help=text,
                    labels=tuple(labels),
                )
            )
    return tuple(metrics)


class RedisMemory(NamedTuple):
    """Redis' memory in bytes, and what is kept of posts. is_machine: maxmemory is not set, so the
    machine's counts.
    """

    used: int
    limit: int
    is_machine: bool
    #: Bytes of results, their contexts and their stream included; number of results; bytes of the
    #: stream.
    results_bytes: int
    results: int
    stream_bytes: int
    #: Bytes and estimated number of records of sent posts.
    sent_bytes: int
    sent: int
    #: Redis' `maxmemory-policy`: with any but NO_EVICTION, it may drop queues and leases.
    policy: str = NO_EVICTION


def read_memory(redis: Redis) -> RedisMemory:
    """Measure memory, in less than a millisecond. Raises redis.exceptions.RedisError."""
    info: Any = redis.info("memory")
    limit = info["maxmemory"]
    policy = info.get("maxmemory_policy", NO_EVICTION)
    results_bytes, results, stream_bytes, sent_bytes, sent = call(redis, "measure")
    return RedisMemory(
        used=info["used_memory"],
        limit=limit or info["total_system_memory"],
        is_machine=not limit,
        results_bytes=results_bytes,
        results=results,
        stream_bytes=stream_bytes,
        sent_bytes=sent_bytes,
        sent=sent,
        policy=policy,
    )


#: Help texts of the metrics of the store's counters, by field.
RESULTS = {
    "stored": "Results stored since the store was created.",
    "repeated": "Results that were already stored, for example after a redelivery.",
    "failed": "Posts written as dead letters since the store was created.",
    "gone": "Results and dead letters dropped because their posts were purged.",
    "answered": "Repeated requests answered with the stored result.",
    "trimmed": "Entries trimmed from the results stream. Each post's own results remain.",
    "dead_trimmed": "Dead letters trimmed from their stream and lost.",
    "dropped": "Results dropped because they exceeded results_memory.",
    "sent_dropped": "Sent records dropped because they exceeded half of results_memory.",
}
#: Metrics that every process reads from Redis. All processes report the same values: aggregate
#: with max, not sum.
REDIS_METRICS = declare(
    gauge={
        "feedmill_redis_up": "1 if Redis answered this scrape, else 0.",
        "feedmill_queue_messages{queue,state}": "Messages in each queue over all priorities "
        "(state waiting). Messages that workers hold, and those that are due later, of any "
        "queue, are reported under this process' own queue (states held and delayed).",
        "feedmill_queue_limit_messages{queue}": "The setting queue_limit of this process.",
        "feedmill_queue_oldest_seconds{queue}": "Age of the oldest message to be delivered next; "
        "absent if the queue is empty.",
        "feedmill_memory_bytes{data}": "Memory in Redis of results (with their stream), of sent "
        "records, and of everything (redis).",
        "feedmill_memory_limit_bytes{data}": "The setting results_memory of this process, half of "
        "it, and Redis' maxmemory, or its machine's memory.",
        "feedmill_memory_records{data}": (
            "Number of results in Redis, and of sent records, by estimate."
        ),
        "feedmill_problem{problem}": "1 while `feedmill health` names the problem, else 0: "
        "eviction (maxmemory-policy), bounds (of results, above maxmemory), delayed (messages due "
        "later, as many as queue_limit), flower (it hears nothing), busy (a script keeps Redis "
        "from answering).",
    },
    counter={
        f"feedmill_results_{field}_total": text for field, text in RESULTS.items()
    },
)


def connect_for_monitoring(settings: Settings) -> Redis:
    """Return a client for monitoring, with short timeouts and at most one retry."""
    redis = connect(settings)
    times = {
        "socket_timeout": REDIS_TIMEOUT_S,
        "socket_connect_timeout": REDIS_TIMEOUT_S,
    }
    redis.connection_pool.connection_kwargs.update(times)
    # One immediate retry: after a Redis restart, the first command fails on the old connection.
    redis.set_retry(Retry(NoBackoff(), 1))
    return redis


def oldest_seconds(redis: Redis, queue: str) -> float | None:
    """Return the age in seconds of the oldest message among the next ones of each of the queue's
    priorities.

    None if the queue is empty or no message has a send time. Raises redis.exceptions.RedisError.
    """
    values = call(redis, "next_headers", SENT_AT, *queue_lists(queue))
    times = [float(value) for value in values]
    if not times:
        return None
    age = time.time() - min(times)
    return max(0.0, age)


class ProcessMetrics:
    """A process' metrics and health: those that every process reads from Redis, and its own, which
    subclasses add.
    """

    #: The process' own metrics.
    metrics: Sequence[Metric] = ()
    #: Name of the process' service in OpenTelemetry.
    service = NAME

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_for_monitoring(settings)
        self._store = ResultsStore(self._redis, settings)
        self._sources = [
            (REDIS_METRICS, self.redis_values),
            (self.metrics, self.values),
        ]

    def start(self) -> None:
        """Serve the metrics if a port is set, and send them to a collector if
        OTEL_METRICS_EXPORTER says so. Raises UserError.
        """
        if self._settings.metrics_port:
            self.serve()
        otlp_metrics.start(self._sources, self.service)

    def serve(self) -> "MetricsServer":
        """Start the metrics server. Raises UserError."""
        return serve(
            self._settings,
            self._sources,
            health=self.unhealthy,
            ready=self.unready,
        )

    def values(self) -> Values:
        """Return the values of the process' own metrics."""
        return {}

    def unhealthy(self) -> Sequence[str]:
        """List failures that need a restart. An unreachable Redis is not one of them."""
        return []

    def unready(self) -> Sequence[str]:
        """List reasons why the process cannot work now; by default, that Redis is unreachable."""
        try:
            self._redis.ping()
        except RedisError as fault:
            address = self._settings.redis_address
            return [f"Redis at {address} {trouble(fault)} ({clause(fault)})"]
        return []

    def redis_values(self) -> Values:
        """Return the values of REDIS_METRICS; if Redis does not answer, only that of
        `feedmill_redis_up`, and the problem BUSY if a script keeps it busy.
        """
        try:
            values = self._read_values()
        except RedisError as fault:
            logger.debug("cannot read metrics from Redis: %s", fault)
            return _values_without_redis(fault)
        return {"feedmill_redis_up": 1, **values}

    def _read_values(self) -> Values:
        """Read what Redis knows. Raises redis.exceptions.RedisError."""
        redis = self._redis
        settings = self._settings
        depths = {queue: queue_depth(redis, queue) for queue in queues(redis, settings)}
        memory = read_memory(redis)
        delayed = depths[settings.queue].delayed
        problems = find_problems(redis, settings, memory, delayed)
        counters = self._store.counters()
        return {
            **self._queue_values(depths),
            **self._memory_values(memory),
            **_problem_values(problems),
            **_store_values(counters),
        }

    def _queue_values(self, depths: Mapping[str, QueueDepth]) -> Values:
        """Return the values about queues. Raises redis.exceptions.RedisError."""
        settings = self._settings
        messages: dict[tuple[str, str], int] = {}
        ages: dict[str, float | None] = {}
        for queue, depth in depths.items():
            messages[queue, "waiting"] = depth.waiting
            if depth.waiting:
                ages[queue] = oldest_seconds(self._redis, queue)
        own_queue = depths[settings.queue]
        messages[settings.queue, "held"] = own_queue.held
        messages[settings.queue, "delayed"] = own_queue.delayed
        return {
            "feedmill_queue_messages": messages,
            "feedmill_queue_limit_messages": dict.fromkeys(
                depths, settings.queue_limit
            ),
            "feedmill_queue_oldest_seconds": ages,
        }

    def _memory_values(self, memory: RedisMemory) -> Values:
        return {
            "feedmill_memory_bytes": {
                "results": memory.results_bytes,
                "sent": memory.sent_bytes,
                "redis": memory.used,
            },
            "feedmill_memory_limit_bytes": {
                "results": self._settings.results_memory,
                "sent": self._settings.sent_memory,
                "redis": memory.limit,
            },
            "feedmill_memory_records": {
                "results": memory.results,
                "sent": memory.sent,
            },
        }


def _problem_values(problems: Iterable[Problem]) -> Values:
    values = dict.fromkeys(NAMES, 0)
    for problem in problems:
        values[problem.name] = 1
    return {"feedmill_problem": values}


def _store_values(counters: Counters) -> Values:
    return {
        f"feedmill_results_{field}_total": count
        for field, count in counters._asdict().items()
    }


def _values_without_redis(fault: RedisError) -> Values:
    """Return the values if Redis does not answer."""
    values: Values = {"feedmill_redis_up": 0}
    if is_busy(fault):
        values["feedmill_problem"] = {BUSY: 1}
    return values


#: Metrics of `feedmill metrics` alone, because reading them visits the names of Redis' keys.
SYSTEM_METRICS = declare(
    gauge={
        "feedmill_queue_unread_messages{list}": "Messages in a list beside a queue's own that no "
        "worker reads, because of an option of their sender (docs/messages.md). Absent if there "
        "are none.",
    }
)


class SystemMetrics(ProcessMetrics):
    """The metrics of `feedmill metrics`."""

    metrics = SYSTEM_METRICS

    def values(self) -> Values:
        try:
            unread = find_unread_lists(self._redis, queues(self._redis, self._settings))
        except RedisError as fault:
            logger.debug("cannot search for unread lists: %s", fault)
            return {}
        messages = {unread_list.key: unread_list.messages for unread_list in unread}
        return {"feedmill_queue_unread_messages": messages}


def serve(
    settings: Settings,
    sources: Sequence[Source],
    health: HealthCheck,
    ready: HealthCheck,
) -> "MetricsServer":
    """Start an HTTP server: metrics at /metrics, health checks at /healthz and /readyz (200, or
    503 with the problems).

    It runs on daemon threads. Raises UserError if prometheus-client is missing or the port is in
    use.
    """
    with explain_missing("Serving metrics", "monitor"):
        # An extra.
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app  # noqa: PLC0415
    address = settings.metrics_address
    port = settings.metrics_port or 0
    try:
        server = MetricsServer(address, port)
    except OSError as error:
        raise UserError(
            f"Cannot serve metrics on {address}:{port}: {error.strerror}. Set another "
            f"{PREFIX}METRICS_PORT or {PREFIX}METRICS_ADDRESS; each process needs its own port."
        ) from None
    registry: Any = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(sources))
    checks = {"/healthz": health, "/readyz": ready}
    server.set_app(partial(_answer, checks, make_wsgi_app(registry)))
    Thread(
        target=server.serve_forever,
        name="metrics",
        daemon=True,
    ).start()
    logger.info("serving metrics at http://%s:%d/metrics", address, server.server_port)
    return server


class _Collector:
    """Adapter from sources to prometheus-client's metric families."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def collect(self) -> "Iterator[Family]":
        for metrics, read in self._sources:
            values = read()
            for metric in metrics:
                if metric.name not in values:
                    continue
                family = _family(metric, values[metric.name])
                if family.samples:
                    yield family


def _family(metric: Metric, values: Any) -> "Family":
    from prometheus_client import core  # noqa: PLC0415 - an extra
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    family_class = getattr(core, f"{metric.kind.title()}MetricFamily")
    family = family_class(metric.name, metric.help, labels=metric.labels)
    if not isinstance(values, dict):
        values = {(): values}
    for key, value in values.items():
        labels = (key,) if isinstance(key, str) else key
        if value is None:
            continue
        if metric.kind == "histogram":
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            # a copy, because another thread updates the counts
            counts = accumulate(list(value.counts))
            buckets = list(zip(bounds, counts, strict=True))
            family.add_metric(labels, buckets, value.total)
        elif metric.kind == "summary":
            family.add_metric(labels, *value)
        else:
            family.add_metric(labels, value)
    return family  # type: ignore[no-any-return]


def _answer(
    checks: Mapping[str, HealthCheck],
    metrics: Any,
    environment: "WSGIEnvironment",
    start: "StartResponse",
) -> Iterable[bytes]:
    """Answer a request, as a WSGI application."""
    path = environment["PATH_INFO"]
    if path == "/metrics":
        answer: Iterable[bytes] = metrics(environment, start)
        return answer
    check = checks.get(path)
    if check is None:
        status = "404 Not Found"
        text = "Not found. Available: /metrics, /healthz and /readyz.\n"
    else:
        problems = check()
        status = "503 Service Unavailable" if problems else "200 OK"
        lines = problems or ["ok"]
        text = "".join(f"{line}\n" for line in lines)
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode()]


class _Request(RawIOBase):
    """A request's bytes.

    A client that sends one now and then would keep each read from timing out, for ever.
    """

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + HTTP_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(remaining_s)
        size = self._connection.recv_into(buffer)
        self._connection.settimeout(HTTP_TIMEOUT_S)
        return size


class _Handler(WSGIRequestHandler):
    server_version = "feedmill"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(HTTP_TIMEOUT_S)
        request = _Request(self.connection)
        self.rfile = BufferedReader(request)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        logger.debug(format, *args)


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A WSGI server with one thread per request. port: 0 selects a free one. Raises OSError."""

    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        if ":" in address:
            self.address_family = AF_INET6
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Bind without http.server's DNS lookup of the address."""
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name = str(host)
        self.server_port = int(port)
        self.setup_environ()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    # Socketserver's signature.
    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Log a failed request at debug level.

        Usually the client disconnected, which deserves no traceback.
        """
        logger.debug("cannot answer a metrics request", exc_info=True)
