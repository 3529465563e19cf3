"""Serve Prometheus metrics and health checks over HTTP, for workers and daemons.

Each process declares its metrics, shown in docs/reference/metrics.md, and reads their values on each scrape. Metrics of
the queue and the results are declared here, because every process can read them from Redis. prometheus-client is
imported only when a port is set.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from socket import AF_INET6
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from feedmill.shared.broker import SENT_AT, connect, queue_depth, queue_lists
from feedmill.shared.errors import UserError, clause, explain_missing
from feedmill.shared.model_routing import queues
from feedmill.shared.results import ResultsStore
from feedmill.shared.scripts import call
from feedmill.shared.settings import PREFIX, Settings

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client.core import Metric as Family

logger = logging.getLogger(__name__)

#: Timeout of a Redis command during a scrape or health check, in seconds. Prometheus waits 10 seconds in total.
REDIS_TIMEOUT_S = 1.0
#: Seconds before an idle HTTP connection is closed.
HTTP_TIMEOUT_S = 10.0


class Metric(NamedTuple):
    """A Prometheus metric. kind: counter, gauge, histogram or summary. Names of counters end with _total."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()


#: Values by metric name. The value of a metric with labels is a dict by label value, or by tuple of label values; None
#: is omitted. A histogram's value has the attributes bounds, counts (one per bound, then those above all bounds; not
#: cumulated) and total. A summary's value is (count, sum).
Values = dict[str, Any]
#: Metrics, and the function that returns their current values, called on the server's threads for each scrape.
Source = tuple[Iterable[Metric], Callable[[], Values]]
#: Returns one sentence per problem; none if healthy. Called on the server's threads.
HealthCheck = Callable[[], Sequence[str]]


def declare(**kinds: Mapping[str, str]) -> tuple[Metric, ...]:
    """Declare metrics by kind: help text by name, with label names as in "feedmill_memory_bytes{data}"."""
    return tuple(
        Metric(kind, name, text, tuple(labels.rstrip("}").split(",")) if labels else ())
        for kind, texts in kinds.items()
        for (name, _, labels), text in ((declared.partition("{"), text) for declared, text in texts.items())
    )


class RedisMemory(NamedTuple):
    """Redis' memory in bytes, and what is kept of posts. is_machine: maxmemory is not set, so the machine's counts."""

    used: int
    limit: int
    is_machine: bool
    #: Bytes of results, their contexts and their stream included; estimated number of results; bytes of the stream.
    results_bytes: int
    results: int
    stream_bytes: int
    #: Bytes and estimated number of records of sent posts.
    sent_bytes: int
    sent: int


def read_memory(redis: Redis) -> RedisMemory:
    """Measure memory, in less than a millisecond. Raises redis.exceptions.RedisError."""
    info: Any = redis.info("memory")
    limit = info["maxmemory"]
    return RedisMemory(info["used_memory"], limit or info["total_system_memory"], not limit, *call(redis, "measure"))


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
#: Metrics that every process reads from Redis. All processes report the same values: aggregate with max, not sum.
REDIS_METRICS = declare(
    gauge={
        "feedmill_redis_up": "1 if Redis answered this scrape, else 0.",
        "feedmill_queue_messages{queue,state}": "Messages in each queue over all priorities (state waiting). Messages "
        "that workers hold, from any queue, are reported under this process' own queue (state held).",
        "feedmill_queue_limit_messages{queue}": "The setting queue_limit of this process.",
        "feedmill_queue_oldest_seconds{queue}": "Age of the oldest message to be delivered next; absent if the queue "
        "is empty.",
        "feedmill_memory_bytes{data}": "Memory in Redis of results (with their stream), of sent records, and of "
        "everything (redis).",
        "feedmill_memory_limit_bytes{data}": "The setting results_memory of this process, half of it, and Redis' "
        "maxmemory, or its machine's memory.",
        "feedmill_memory_records{data}": "Number of results and of sent records in Redis, by estimate.",
    },
    counter={f"feedmill_results_{field}_total": text for field, text in RESULTS.items()},
)


def connect_for_monitoring(settings: Settings) -> Redis:
    """Return a client for monitoring, with short timeouts and at most one retry."""
    redis = connect(settings)
    times = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
    redis.connection_pool.connection_kwargs.update(times)
    # One immediate retry: after a Redis restart, the first command fails on the old connection.
    redis.set_retry(Retry(NoBackoff(), 1))
    return redis


def oldest_seconds(redis: Redis, queue: str) -> float | None:
    """Return the age in seconds of the oldest message among the next ones of each of the queue's priorities.

    None if the queue is empty or no message has a send time. Raises redis.exceptions.RedisError.
    """
    sent = [float(value) for value in call(redis, "next_headers", SENT_AT, *queue_lists(queue))]
    return max(0.0, time.time() - min(sent)) if sent else None


class ProcessMetrics:
    """A process' metrics and health: those that every process reads from Redis, and its own, which subclasses add."""

    #: The process' own metrics.
    metrics: Sequence[Metric] = ()

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_for_monitoring(settings)
        self._store = ResultsStore(self._redis, settings)

    def serve(self) -> "MetricsServer":
        """Start the metrics server. Raises UserError."""
        sources = [(REDIS_METRICS, self.redis_values), (self.metrics, self.values)]
        return serve(self._settings, sources, self.unhealthy, self.unready)

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
            return [f"Redis at {self._settings.redis_address} is unreachable ({clause(fault)})"]
        return []

    def redis_values(self) -> Values:
        """Return the values of REDIS_METRICS; if Redis is unreachable, only that of `feedmill_redis_up`."""
        redis, settings = self._redis, self._settings
        try:
            depths = {name: queue_depth(redis, name) for name in queues(redis, settings)}
            messages = {(name, "waiting"): depth.waiting for name, depth in depths.items()}
            memory = read_memory(redis)
            return {
                "feedmill_redis_up": 1,
                "feedmill_queue_messages": messages | {(settings.queue, "held"): depths[settings.queue].held},
                "feedmill_queue_limit_messages": dict.fromkeys(depths, settings.queue_limit),
                "feedmill_queue_oldest_seconds": {
                    name: oldest_seconds(redis, name) for name, depth in depths.items() if depth.waiting
                },
                **{f"feedmill_results_{name}_total": n for name, n in self._store.counters()._asdict().items()},
                "feedmill_memory_bytes": {
                    "results": memory.results_bytes, "sent": memory.sent_bytes, "redis": memory.used,
                },
                "feedmill_memory_limit_bytes": {
                    "results": settings.results_memory, "sent": settings.sent_memory, "redis": memory.limit,
                },
                "feedmill_memory_records": {"results": memory.results, "sent": memory.sent},
            }  # fmt: skip
        except RedisError as fault:
            logger.debug("cannot read metrics from Redis: %s", fault)
            return {"feedmill_redis_up": 0}


def serve(settings: Settings, sources: Sequence[Source], health: HealthCheck, ready: HealthCheck) -> "MetricsServer":
    """Start an HTTP server: metrics at /metrics, health checks at /healthz and /readyz (200, or 503 with the problems).

    It runs on daemon threads. Raises UserError if prometheus-client is missing or the port is in use.
    """
    with explain_missing("Serving metrics", "monitor"):
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app  # noqa: PLC0415 - an extra
    address, port = settings.metrics_address, settings.metrics_port or 0
    try:
        server = MetricsServer(address, port)
    except OSError as error:
        raise UserError(
            f"Cannot serve metrics on {address}:{port}: {error.strerror}. Set another {PREFIX}METRICS_PORT or "
            f"{PREFIX}METRICS_ADDRESS; each process needs its own port."
        ) from None
    registry: Any = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(sources))
    server.set_app(partial(_answer, {"/healthz": health, "/readyz": ready}, make_wsgi_app(registry)))
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    logger.info("serving metrics at http://%s:%d/metrics", address, server.server_port)
    return server


class _Collector:
    """Adapter from sources to prometheus-client's metric families."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def collect(self) -> "Iterator[Family]":
        for metrics, read in self._sources:
            values = read()
            families = (_family(metric, values[metric.name]) for metric in metrics if metric.name in values)
            yield from (family for family in families if family.samples)


def _family(metric: Metric, values: Any) -> "Family":
    from prometheus_client import core  # noqa: PLC0415 - an extra
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    family = getattr(core, f"{metric.kind.title()}MetricFamily")(metric.name, metric.help, labels=metric.labels)
    for key, value in (values if isinstance(values, dict) else {(): values}).items():
        labels = (key,) if isinstance(key, str) else key
        if value is None:
            continue
        if metric.kind == "histogram":
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            counts = accumulate(list(value.counts))  # a copy, because another thread updates the counts
            family.add_metric(labels, list(zip(bounds, counts, strict=True)), value.total)
        elif metric.kind == "summary":
            family.add_metric(labels, *value)
        else:
            family.add_metric(labels, value)
    return family  # type: ignore[no-any-return]


def _answer(
    checks: Mapping[str, HealthCheck], metrics: Any, environment: "WSGIEnvironment", start: "StartResponse"
) -> Iterable[bytes]:
    """Answer a request, as a WSGI application."""
    path = environment["PATH_INFO"]
    if path == "/metrics":
        answer: Iterable[bytes] = metrics(environment, start)
        return answer
    status, text = "404 Not Found", "Not found. Available: /metrics, /healthz and /readyz.\n"
    if check := checks.get(path):
        problems = check()
        status = "503 Service Unavailable" if problems else "200 OK"
        text = "".join(f"{problem}\n" for problem in problems) or "ok\n"
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode()]


class _Handler(WSGIRequestHandler):
    server_version = "feedmill"
    timeout = HTTP_TIMEOUT_S

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
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's signature
        """Log a failed request at debug level. Usually the client disconnected, which deserves no traceback."""
        logger.debug("cannot answer a metrics request", exc_info=True)
