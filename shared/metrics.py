"""Serve Prometheus metrics and health checks over HTTP, for workers and the Reddit daemon.

Only this module imports prometheus-client, and only when a port is set. Each process declares its metrics in a table,
shown in docs/reference/metrics.md, and collects their values on each scrape. Metrics of the queue and the results are
declared here, because every process can read them from Redis.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from socket import AF_INET6
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from shared.broker import SENT_AT, connect, queue_depth, queue_lists
from shared.errors import UserError, clause
from shared.model_routing import queues
from shared.redis_errors import is_denied
from shared.results import ResultsStore
from shared.retention import measure, needs
from shared.scripts.queue import next_header_values
from shared.settings import PREFIX, Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

#: Timeout of a Redis command during a scrape or health check, in seconds. Prometheus waits 10 seconds in total.
REDIS_TIMEOUT_S = 1.0
#: Seconds before an idle HTTP connection is closed.
HTTP_TIMEOUT_S = 10.0


class MetricType(StrEnum):
    """Prometheus' metric types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class MetricSpec(NamedTuple):
    """Declaration of a metric: name, type, help text and label names. Names of counters end with _total."""

    name: str
    kind: MetricType
    help: str
    labels: tuple[str, ...] = ()


class Spread(Protocol):
    """A histogram's data.

    `counts` holds the number of values in each bucket, not cumulated: one per upper bound, then those above all bounds.
    `total` is the sum of all values.
    """

    @property
    def bounds(self) -> Sequence[float]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def total(self) -> float: ...


class Sum(NamedTuple):
    """A summary's data: the number of values, and their sum."""

    number: int
    total: float


class Sample(NamedTuple):
    """The current value of a metric. `labels` are in the order of `figure.labels`."""

    figure: MetricSpec
    value: float | Spread | Sum
    labels: tuple[str, ...] = ()


#: Returns current samples. Called on the server's threads for each scrape.
SampleSource = Callable[[], Iterable[Sample]]
#: Returns one sentence per problem; none if healthy. Called on the server's threads.
HealthCheck = Callable[[], Sequence[str]]

REDIS_UP = MetricSpec("feedmill_redis_up", MetricType.GAUGE, "1 if Redis answered this scrape, else 0.")
QUEUE_MESSAGES = MetricSpec(
    "feedmill_queue_messages",
    MetricType.GAUGE,
    "Messages in each queue over all priorities (state waiting). Messages that workers hold, from any queue, are "
    "reported under this process' own queue (state held).",
    ("queue", "state"),
)
QUEUE_LIMIT = MetricSpec(
    "feedmill_queue_limit_messages",
    MetricType.GAUGE,
    "Number of waiting messages at which producers pause: the setting queue_limit of this process.",
    ("queue",),
)
QUEUE_OLDEST = MetricSpec(
    "feedmill_queue_oldest_seconds",
    MetricType.GAUGE,
    "Age of the oldest message among the next ones to be delivered; absent if the queue is empty.",
    ("queue",),
)
#: Metrics by field of the store's counters.
RESULTS = {
    field: MetricSpec(f"feedmill_results_{field}_total", MetricType.COUNTER, text)
    for field, text in {
        "stored": "Results stored since the store was created.",
        "repeated": "Results that were already stored, for example after a redelivery.",
        "failed": "Posts written as dead letters since the store was created.",
        "gone": "Results and dead letters dropped because their posts were purged.",
        "answered": "Repeated requests answered with the stored result.",
        "trimmed": "Results trimmed from the start of the results stream. Each post's own results remain.",
        "dead_trimmed": "Dead letters trimmed from the start of their stream and lost.",
        "dropped": "Results dropped before they expired, because they exceeded results_memory.",
        "sent_dropped": "Records of sent posts dropped before they expired, because they exceeded sent_memory.",
    }.items()
}
MEMORY = MetricSpec(
    "feedmill_memory_bytes",
    MetricType.GAUGE,
    "Memory in Redis of results (with their stream) and of sent records, estimated, and of everything (redis).",
    ("data",),
)
MEMORY_LIMIT = MetricSpec(
    "feedmill_memory_limit_bytes",
    MetricType.GAUGE,
    "The settings results_memory and sent_memory of this process, and Redis' maxmemory, or its machine's memory.",
    ("data",),
)
MEMORY_NEEDED = MetricSpec(
    "feedmill_memory_needed_bytes",
    MetricType.GAUGE,
    "Memory needed until results and sent records expire, at the mean rate of this hour and the last one. For redis, "
    "both count at most with their limits.",
    ("data",),
)
POST_BYTES = MetricSpec(
    "feedmill_memory_post_bytes",
    MetricType.GAUGE,
    "Mean memory of a result, of an entry of the results stream, and of a sent record, in Redis.",
    ("data",),
)
KEPT = MetricSpec(
    "feedmill_memory_kept_seconds",
    MetricType.GAUGE,
    "Time for which results and sent records are kept at that rate, before they are dropped or expire.",
    ("data",),
)
#: Metrics that every process reads from Redis. All processes report the same values: aggregate with max, not sum.
REDIS_METRICS = (
    REDIS_UP,
    QUEUE_MESSAGES,
    QUEUE_LIMIT,
    QUEUE_OLDEST,
    *RESULTS.values(),
    MEMORY,
    MEMORY_LIMIT,
    MEMORY_NEEDED,
    POST_BYTES,
    KEPT,
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
    sent = next_header_values(redis, queue_lists(queue), SENT_AT)
    return max(0.0, time.time() - min(sent)) if sent else None


class RedisMetrics:
    """Metrics that every process reads from Redis. If Redis is unreachable, only `feedmill_redis_up` is reported."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_for_monitoring(settings)
        self._store = ResultsStore(self._redis, settings)

    def samples(self) -> Iterator[Sample]:
        own = self._settings.queue
        try:
            depths = {name: queue_depth(self._redis, name) for name in queues(self._redis, self._settings)}
            oldest = {name: oldest_seconds(self._redis, name) for name, depth in depths.items() if depth.waiting}
            counters = self._store.counters()._asdict()
            memory = self._memory()
        except RedisError as fault:
            logger.debug("cannot read metrics from Redis: %s", fault)
            yield Sample(REDIS_UP, 0.0)
            return
        yield Sample(REDIS_UP, 1.0)
        for name, depth in depths.items():
            yield Sample(QUEUE_MESSAGES, depth.waiting, (name, "waiting"))
            yield Sample(QUEUE_LIMIT, self._settings.queue_limit, (name,))
            if (seconds := oldest.get(name)) is not None:
                yield Sample(QUEUE_OLDEST, seconds, (name,))
        yield Sample(QUEUE_MESSAGES, depths[own].held, (own, "held"))
        for field, figure in RESULTS.items():
            yield Sample(figure, counters[field])
        yield from memory

    def _memory(self) -> list[Sample]:
        """Return samples of Redis' memory; none if this Redis user may not read it."""
        try:
            info: Any = self._redis.info("memory")
            kept = measure(self._redis, self._settings)
        except ResponseError as fault:
            if not is_denied(fault):
                raise
            return []
        needed = needs(kept, self._settings, self._store.rate())
        used, limit = info["used_memory"], info["maxmemory"] or info["total_system_memory"]
        values: dict[MetricSpec, dict[str, float]] = {
            MEMORY: {"results": kept.results_bytes, "sent": kept.sent_bytes, "redis": used},
            MEMORY_LIMIT: {"results": kept.results_limit, "sent": kept.sent_limit, "redis": limit},
            MEMORY_NEEDED: {"results": needed.results, "sent": needed.sent, "redis": needed.of_redis(kept, used)},
            POST_BYTES: {
                "results": kept.result_bytes,
                "stream": kept.stream_entry_bytes,
                "sent": kept.sent_record_bytes,
            },
            KEPT: {
                "results": needed.results_kept_s or self._settings.results_ttl,
                "sent": needed.sent_kept_s or self._settings.sent_ttl,
            },
        }
        return [Sample(figure, value, (data,)) for figure, found in values.items() for data, value in found.items()]

    def problems(self) -> list[str]:
        """Return a sentence if Redis is unreachable, else an empty list."""
        try:
            self._redis.ping()
        except RedisError as fault:
            return [f"Redis at {self._settings.redis_address} is unreachable ({clause(fault)})"]
        return []


def serve(
    settings: Settings, sources: Sequence[SampleSource], health: HealthCheck, ready: HealthCheck
) -> "MetricsServer":
    """Start an HTTP server: metrics at /metrics, health checks at /healthz and /readyz (200, or 503 with the problems).

    It runs on daemon threads. Raises UserError if prometheus-client is missing or the port is in use.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise UserError(
            "Serving metrics requires the package prometheus-client: run `pip install 'feedmill[monitor]'`."
        ) from None
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(sources))
    address, port = settings.metrics_address, settings.metrics_port or 0
    try:
        server = MetricsServer(address, port, registry, {"/healthz": health, "/readyz": ready})
    except OSError as error:
        raise UserError(
            f"Cannot serve metrics on {address}:{port}: {error.strerror}. Set another {PREFIX}METRICS_PORT or "
            f"{PREFIX}METRICS_ADDRESS; each process needs its own port."
        ) from None
    logger.info("serving metrics at http://%s:%d/metrics", address, server.port)
    return server


class _Collector:
    """Adapter from samples to prometheus-client's metric families."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = sources

    def collect(self) -> "Iterator[Metric]":
        of: dict[MetricSpec, list[Sample]] = {}
        for source in self._sources:
            for sample in source():
                of.setdefault(sample.figure, []).append(sample)
        for figure, samples in of.items():
            yield _family(figure, samples)


def _family(figure: MetricSpec, samples: Iterable[Sample]) -> "Metric":
    from prometheus_client import core  # noqa: PLC0415 - an extra
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    make: Any = {
        MetricType.COUNTER: core.CounterMetricFamily,
        MetricType.GAUGE: core.GaugeMetricFamily,
        MetricType.HISTOGRAM: core.HistogramMetricFamily,
        MetricType.SUMMARY: core.SummaryMetricFamily,
    }[figure.kind]
    family = make(figure.name, figure.help, labels=figure.labels)
    for _, value, labels in samples:
        if figure.kind is MetricType.HISTOGRAM and not isinstance(value, int | float | Sum):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            counts = accumulate(list(value.counts))  # a copy, because another thread updates the counts
            family.add_metric(labels, list(zip(bounds, counts, strict=True)), value.total)
        elif figure.kind is MetricType.SUMMARY and isinstance(value, Sum):
            family.add_metric(labels, value.number, value.total)
        else:
            family.add_metric(labels, value)
    metric: Metric = family
    return metric


class MetricsServer(ThreadingMixIn, TCPServer):
    """An HTTP server with one thread per request. Unlike http.server's, it makes no DNS lookup at startup.

    port: 0 selects a free one. Raises OSError.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, address: str, port: int, registry: "CollectorRegistry", verdicts: dict[str, HealthCheck]
    ) -> None:
        if ":" in address:
            self.address_family = AF_INET6
        self.registry = registry
        self.verdicts = verdicts
        super().__init__((address, port), _Handler)
        self.port = int(self.server_address[1])
        Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's signature
        """Log a failed request at debug level. Usually the client disconnected, which deserves no traceback."""
        logger.debug("cannot answer a metrics request", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "feedmill", ""
    server: MetricsServer
    timeout = HTTP_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif verdict := self.server.verdicts.get(path):
            problems = verdict()
            self._answer(503 if problems else 200, "".join(f"{problem}\n" for problem in problems) or "ok\n")
        else:
            self._answer(404, "Not found. Available: /metrics, /healthz and /readyz.\n")

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415 - an extra

        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            text = encode(self.server.registry).decode()
        except Exception:
            logger.exception("cannot collect metrics")
            self._answer(500, "Cannot collect metrics; see the log for the reason.\n")
        else:
            self._answer(200, text, content_type)

    def _answer(self, status: int, text: str, content_type: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        logger.debug(format, *args)
