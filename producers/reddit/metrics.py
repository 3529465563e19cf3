"""Prometheus metrics and health of the Reddit daemon, from its latest status."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from shared.metrics import MetricSpec, MetricsServer, MetricType, RedisMetrics, Sample, serve
from shared.settings import Settings

#: Seconds without a finished step after which the daemon counts as stuck. A step may wait for the end of Reddit's
#: ten-minute rate-limit window; its requests have timeouts.
STUCK_AFTER_S = 900.0

Status = Mapping[str, Any]


def _counter(name: str, description: str) -> MetricSpec:
    return MetricSpec(f"feedmill_reddit_{name}_total", MetricType.COUNTER, description)


def _gauge(name: str, description: str) -> MetricSpec:
    return MetricSpec(f"feedmill_reddit_{name}", MetricType.GAUGE, description)


#: Metrics by key of `Daemon.status`. Counters start with the process.
STATUS_FIGURES = {
    "sent": _counter("posts_sent", "Posts sent to the queue."),
    "skipped": _counter("posts_skipped", "Posts skipped because they were sent before."),
    "looked": _counter("posts_looked_at_again", "Rechecks of sent posts."),
    "purged": _counter("posts_purged", "Posts purged after deletion or removal on Reddit."),
    "returned": _counter("posts_returned", "Purged posts that came back on Reddit and were sent again."),
    "polls": _counter("polls", "Polls of a topic's subreddits for new posts."),
    "gaps": _counter("gaps", "Periods in which a subreddit's posts could not be read."),
    "filled": _counter("gaps_filled", "Gaps filled from Arctic Shift."),
    "requests": _counter("requests", "Requests to Reddit."),
    "subreddits": _gauge("subreddits", "Subreddits being read."),
    "failing": _gauge("subreddits_failing", "Subreddits whose last read failed."),
    "held": _gauge("posts_held", "Posts in the send buffer, waiting for room in the queue."),
    "paused": _gauge("paused", "1 while the queue is full, otherwise 0."),
    "hindrance": _gauge("hindered", "1 while Reddit or Redis is unavailable, otherwise 0."),
    "budget": _gauge(
        "budget_remaining_requests",
        "Requests left in Reddit's rate-limit window, as reported by Reddit; absent once the window has ended.",
    ),
}
FAULTS = MetricSpec(
    "feedmill_reddit_faults_total", MetricType.COUNTER, "Failed requests and unexpected errors.", ("kind",)
)
FIGURES = (*STATUS_FIGURES.values(), FAULTS)


class Metrics:
    """Metrics of the daemon's latest status."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = RedisMetrics(settings)
        #: Latest `Daemon.status`. Replaced, never modified, because other threads read it.
        self._status: Status = {}
        self._turned = time.monotonic()

    def serve(self) -> MetricsServer:
        """Start the metrics server. Raises UserError."""
        return serve(self._settings, [self._redis.samples, self.samples], self.unhealthy, self.unready)

    def update(self, status: Status) -> None:
        """Store the daemon's status after a step."""
        self._status, self._turned = status, time.monotonic()

    def samples(self) -> Iterator[Sample]:
        if not (status := self._status):
            return
        values = {**status, "failing": len(status["failing"]), "hindrance": bool(status["hindrance"])}
        for key, figure in STATUS_FIGURES.items():
            if (value := values[key]) is not None:
                yield Sample(figure, float(value))
        for kind, count in status["faults"].items():
            yield Sample(FAULTS, count, (kind,))

    def unhealthy(self) -> list[str]:
        """List failures that need a restart. An unreachable Reddit or Redis is not one of them."""
        quiet = time.monotonic() - self._turned
        return [f"the daemon has not finished a step for {quiet:.0f} s"] if quiet > STUCK_AFTER_S else []

    def unready(self) -> list[str]:
        """List reasons why no posts are being sent."""
        if not self._status.get("polls"):
            return [self._status.get("hindrance") or "the daemon has not read any topic yet"]
        return (
            self.unhealthy() or [self._status["hindrance"]] * bool(self._status["hindrance"]) or self._redis.problems()
        )
