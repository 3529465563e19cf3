"""Figures for Prometheus, and whether a process is well: one small HTTP server, for workers and for the Reddit daemon.

The only file that knows prometheus-client, which is asked for once a port is set. What there is to tell its owners
say: their figures are declared in tables, which docs/reference/metrics.md shows, and are read when somebody asks for
them, not before. The figures of the queue and of the results are here: every process can read them off Redis.
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
from redis.exceptions import RedisError as RedisFault
from redis.retry import Retry

from shared.broker import SENT_AT, connect, queue_depth, queue_lists
from shared.errors import UserError, clause
from shared.results import ResultsStore
from shared.serving import queues
from shared.settings import PREFIX, Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

#: Seconds that Redis may take to answer one command of somebody who only looks. Prometheus waits for 10 in all.
REDIS_TIMEOUT = 1.0
#: Seconds after which a connection that asks for nothing is closed.
HTTP_TIMEOUT = 10.0

#: When the messages that go out next were sent, without fetching a message, which may have megabytes: kombu writes a
#: message's headers behind its body, so its last 32 KiB hold them. No post's text can pass for one: there its quotes
#: are escaped.
#:
#:   KEYS  the lists of one queue      ARGV[1]  the header
#:
#: Returns the header's value in the last message of each list that has one.
OLDEST = """
local found = {}
for i = 1, #KEYS do
  local message = redis.call('LINDEX', KEYS[i], -1)
  if message then
    found[#found + 1] = string.match(string.sub(message, -32768), '"' .. ARGV[1] .. '": *(%d+%.?%d*)')
  end
end
return found
"""


class Kind(StrEnum):
    """Prometheus' kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Figure(NamedTuple):
    """One metric: its name as Prometheus shows it, and what it tells. A counter's name ends with _total."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Spread(Protocol):
    """A histogram: how many values were at most each bound and above the one before, how many above all; their sum."""

    @property
    def bounds(self) -> Sequence[float]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def total(self) -> float: ...


class Sum(NamedTuple):
    """A summary: how many values there were, and their sum."""

    number: int
    total: float


class Sample(NamedTuple):
    """What a figure is now; `labels` in the order of the figure's."""

    figure: Figure
    value: float | Spread | Sum
    labels: tuple[str, ...] = ()


#: Gives what there is to tell, whenever somebody asks. Called on the server's threads.
Source = Callable[[], Iterable[Sample]]
#: Gives a sentence about each thing that is not well. Called on the server's threads.
Verdict = Callable[[], Sequence[str]]

REDIS_UP = Figure("feedmill_redis_up", Kind.GAUGE, "1 where Redis answered this scrape, else 0.")
QUEUE_MESSAGES = Figure(
    "feedmill_queue_messages",
    Kind.GAUGE,
    "Messages in each queue, of all priorities (waiting); and in the queue of this process those that workers have "
    "taken, of any queue (held).",
    ("queue", "state"),
)
QUEUE_LIMIT = Figure(
    "feedmill_queue_limit_messages",
    Kind.GAUGE,
    "Messages that may wait before producers pause: the setting queue_limit of this process.",
    ("queue",),
)
QUEUE_OLDEST = Figure(
    "feedmill_queue_oldest_seconds",
    Kind.GAUGE,
    "Age of the waiting message that was sent first, of those that go out next; absent where none waits.",
    ("queue",),
)
#: By the name of their field in the store's counters.
RESULTS = {
    field: Figure(f"feedmill_results_{field}_total", Kind.COUNTER, what)
    for field, what in {
        "stored": "Results stored since the store was made.",
        "repeated": "Results that were there already: classified again after a redelivery, say.",
        "failed": "Posts that ended as dead letters, since the store was made.",
        "gone": "Results and dead letters that were dropped, since their posts had been purged.",
        "answered": "Posts that were asked for again, and answered with the stored result.",
        "trimmed": "Results trimmed from the old end of their stream; each post's own are still there.",
        "dead_trimmed": "Dead letters trimmed from the old end of their stream: nothing is left of them.",
    }.items()
}
#: What every process reads off Redis: the same whoever is asked, so take the maximum, never the sum.
REDIS_FIGURES = (REDIS_UP, QUEUE_MESSAGES, QUEUE_LIMIT, QUEUE_OLDEST, *RESULTS.values())


def connect_briefly(settings: Settings) -> Redis:
    """A client for whoever only looks: where Redis does not answer it says so soon, and tries once more at most."""
    redis = connect(settings)
    times = {"socket_timeout": REDIS_TIMEOUT, "socket_connect_timeout": REDIS_TIMEOUT}
    redis.connection_pool.connection_kwargs.update(times)
    # Once more, at once: of a Redis that was started again the first command finds the old connection.
    redis.set_retry(Retry(NoBackoff(), 1))
    return redis


def oldest_seconds(redis: Redis, queue: str) -> float | None:
    """The age of the message that was sent first, of those that `queue`'s priorities give out next.

    None where none waits, or none of them bears the time of its sending. Raises redis.exceptions.RedisError.
    """
    keys = queue_lists(queue)
    script: Any = redis.register_script(OLDEST)
    sent: list[str] = script(keys=keys, args=[SENT_AT])
    return max(0.0, time.time() - min(map(float, sent))) if sent else None


class RedisFigures:
    """What every process reads off Redis. Where Redis is away, that is all there is to tell."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_briefly(settings)
        self._store = ResultsStore(self._redis, settings)

    def samples(self) -> Iterator[Sample]:
        own = self._settings.queue
        try:
            depths = {name: queue_depth(self._redis, name) for name in queues(self._redis, self._settings)}
            oldest = {name: oldest_seconds(self._redis, name) for name, depth in depths.items() if depth.waiting}
            counters = self._store.counters()._asdict()
        except RedisFault as fault:
            logger.debug("a scrape without Redis: %s", fault)
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

    def away(self) -> list[str]:
        """A sentence where Redis does not answer."""
        try:
            self._redis.ping()
        except RedisFault as fault:
            return [f"Redis at {self._settings.redis_address} does not answer ({clause(fault)})"]
        return []


def serve(settings: Settings, sources: Sequence[Source], health: Verdict, ready: Verdict) -> "Server":
    """Serve what the sources tell at /metrics, and the verdicts at /healthz and /readyz, 200 or 503 with its reasons.

    From threads that end with the process. Raises UserError when prometheus-client is missing, or the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise UserError("Metrics need prometheus-client: `pip install 'feedmill[monitor]'` brings it.") from None
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(sources))
    address, port = settings.metrics_address, settings.metrics_port or 0
    try:
        server = Server(address, port, registry, {"/healthz": health, "/readyz": ready})
    except OSError as error:
        raise UserError(
            f"Metrics cannot be served on {address}:{port}: {error.strerror}. Choose another {PREFIX}METRICS_PORT, "
            f"or another {PREFIX}METRICS_ADDRESS; each process needs a port of its own."
        ) from None
    logger.info("metrics at http://%s:%d/metrics", address, server.port)
    return server


class _Collector:
    """Turns samples into what prometheus-client prints."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def collect(self) -> "Iterator[Metric]":
        of: dict[Figure, list[Sample]] = {}
        for source in self._sources:
            for sample in source():
                of.setdefault(sample.figure, []).append(sample)
        for figure, samples in of.items():
            yield _family(figure, samples)


def _family(figure: Figure, samples: Iterable[Sample]) -> "Metric":
    from prometheus_client import core  # noqa: PLC0415 - an extra
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    make: Any = {
        Kind.COUNTER: core.CounterMetricFamily,
        Kind.GAUGE: core.GaugeMetricFamily,
        Kind.HISTOGRAM: core.HistogramMetricFamily,
        Kind.SUMMARY: core.SummaryMetricFamily,
    }[figure.kind]
    family = make(figure.name, figure.help, labels=figure.labels)
    for _, value, labels in samples:
        if figure.kind is Kind.HISTOGRAM and not isinstance(value, int | float | Sum):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            counts = accumulate(list(value.counts))  # copied at once: another thread adds to them
            family.add_metric(labels, list(zip(bounds, counts, strict=True)), value.total)
        elif figure.kind is Kind.SUMMARY and isinstance(value, Sum):
            family.add_metric(labels, value.number, value.total)
        else:
            family.add_metric(labels, value)
    metric: Metric = family
    return metric


class Server(ThreadingMixIn, TCPServer):
    """Answers GET, each on a thread of its own. Unlike http.server's it asks no name server who it is.

    port: 0 takes a free one. Raises OSError.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, port: int, registry: "CollectorRegistry", verdicts: dict[str, Verdict]) -> None:
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
        """Who asked has gone, most likely: no reason for a traceback on the terminal."""
        logger.debug("metrics could not be answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "feedmill", ""
    server: Server
    timeout = HTTP_TIMEOUT

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif verdict := self.server.verdicts.get(path):
            problems = verdict()
            self._answer(503 if problems else 200, "".join(f"{problem}\n" for problem in problems) or "ok\n")
        else:
            self._answer(404, "There are /metrics, /healthz and /readyz.\n")

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415 - an extra

        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            text = encode(self.server.registry).decode()
        except Exception:
            logger.exception("the metrics cannot be told")
            self._answer(500, "The metrics cannot be told; the log has the reason.\n")
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
