"""The daemon's figures for Prometheus, from the last word it gave of itself."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import UserError
from shared.settings import PREFIX

#: Where they are served: to whoever is on this machine.
ADDRESS = "127.0.0.1"
#: Name without prefix, what it is, and how it is read from `Daemon.status`. Counters count from the process's start.
COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("posts_sent", "Posts put into the queue.", "sent"),
    ("posts_skipped", "Posts that were sent before.", "skipped"),
    ("posts_looked_at_again", "Second looks at posts that were sent.", "looked"),
    ("posts_purged", "Posts purged since they are gone from Reddit.", "purged"),
    ("polls", "Walks through a topic's new posts.", "polls"),
    ("gaps", "Times of which a subreddit's posts were out of reach.", "gaps"),
    ("requests", "Requests made to Reddit.", "requests"),
)
GAUGES: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("subreddits", "Subreddits that are read.", lambda status: status["subreddits"]),
    ("subreddits_failing", "Subreddits that failed last time.", lambda status: len(status["failing"])),
    ("posts_held", "Posts read that wait for room in the queue.", lambda status: status["held"]),
    ("paused", "1 while the queue is full.", lambda status: status["paused"]),
    ("hindered", "1 while Reddit, or Redis, is away.", lambda status: bool(status["hindrance"])),
    ("budget_remaining_requests", "Requests left in Reddit's window, as it states.", lambda status: status["budget"]),
)


class Metrics(Collector):
    """Serves what `status` was set to last."""

    def __init__(self) -> None:
        #: As `Daemon.status` gives it. Replaced, never changed: another thread reads it.
        self.status: Mapping[str, Any] = {}

    def serve(self, port: int) -> None:
        """Serve /metrics on loopback, from a thread that ends with the process. Raises UserError."""
        registry = CollectorRegistry()
        registry.register(self)
        try:
            start_http_server(port, ADDRESS, registry)
        except OSError as error:
            raise UserError(
                f"Metrics cannot be served on {ADDRESS}:{port}: {error.strerror}. Choose another {PREFIX}METRICS_PORT."
            ) from None

    def collect(self) -> Iterator[Metric]:
        if not (status := self.status):
            return
        for name, what, key in COUNTERS:
            yield CounterMetricFamily(f"feedmill_reddit_{name}", what, value=status[key])
        for name, what, value in GAUGES:
            if (found := value(status)) is not None:
                yield GaugeMetricFamily(f"feedmill_reddit_{name}", what, value=float(found))
        faults = CounterMetricFamily("feedmill_reddit_faults", "Requests that failed.", labels=["kind"])
        for kind, count in status["faults"].items():
            faults.add_metric([kind], count)
        yield faults
