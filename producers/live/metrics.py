"""Prometheus metrics and health of a daemon that reads a source, from its latest status."""

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
    return MetricSpec(f"feedmill_live_{name}_total", MetricType.COUNTER, description, ("source",))


def _gauge(name: str, description: str) -> MetricSpec:
    return MetricSpec(f"feedmill_live_{name}", MetricType.GAUGE, description, ("source",))


#: Metrics by key of `LiveDaemon.status`. Counters start with the process.
STATUS_FIGURES = {
    "read": _counter("events", "Events read from the source, including deletions and filtered posts."),
    "sent": _counter("posts_sent", "Posts sent to the queue."),
    "skipped": _counter("posts_skipped", "Posts skipped because they were sent before, or purged."),
    "filtered": _counter("posts_filtered", "Posts left out by the source's filters."),
    "refused": _counter("posts_refused", "Posts that cannot be classified."),
    "ahead": _counter("events_ahead", "Events from the future, which are sent but are no positions."),
    "unreadable": _counter("events_unreadable", "Events that could not be read or sent twice, now dead letters."),
    "purged": _counter("posts_purged", "Posts purged because they were deleted at the source."),
    "gaps": _counter("gaps", "Periods whose events the source no longer had."),
    "connections": _counter("connections", "Connections opened to the source."),
    "gaps_recorded": _gauge("gaps_recorded", "Gaps listed by `feedmill ingest gaps`, until they are cleared."),
    "paused": _gauge("paused", "1 while the queue is full, otherwise 0."),
    "hindrance": _gauge("hindered", "1 while the source or Redis is unavailable, otherwise 0."),
    "delay": _gauge("delay_seconds", "Age of the newest event that was processed; absent before the first."),
}
FAULTS = MetricSpec(
    "feedmill_live_faults_total", MetricType.COUNTER, "Failures of the source and of Redis.", ("source", "kind")
)
FIGURES = (*STATUS_FIGURES.values(), FAULTS)


class DaemonMetrics:
    """Metrics of a daemon's latest status.

    figures: metrics by key of the status. faults: the metric of failures by kind. progress: key of the status that is 0
    until the daemon has read something. labels: values of the labels that all metrics share.
    """

    def __init__(
        self,
        settings: Settings,
        figures: Mapping[str, MetricSpec],
        faults: MetricSpec,
        progress: str,
        labels: tuple[str, ...] = (),
    ) -> None:
        self._settings = settings
        self._figures, self._faults, self._progress, self._labels = figures, faults, progress, labels
        self._redis = RedisMetrics(settings)
        #: Latest status. Replaced, never modified, because other threads read it.
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
        for key, figure in self._figures.items():
            if (value := status[key]) is not None:
                yield Sample(figure, _as_number(value), self._labels)
        for kind, count in status["faults"].items():
            yield Sample(self._faults, count, (*self._labels, kind))

    def unhealthy(self) -> list[str]:
        """List failures that need a restart. An unreachable source or Redis is not one of them."""
        quiet = time.monotonic() - self._turned
        return [f"the daemon has not finished a step for {quiet:.0f} s"] if quiet > STUCK_AFTER_S else []

    def unready(self) -> list[str]:
        """List reasons why no posts are being sent."""
        if not self._status.get(self._progress):
            return [self._status.get("hindrance") or "the daemon has not read anything yet"]
        return (
            self.unhealthy() or [self._status["hindrance"]] * bool(self._status["hindrance"]) or self._redis.problems()
        )


class LiveMetrics(DaemonMetrics):
    """Metrics of a live source's daemon."""

    def __init__(self, settings: Settings, source: str) -> None:
        super().__init__(settings, STATUS_FIGURES, FAULTS, progress="read", labels=(source,))


def _as_number(value: Any) -> float:
    """Return a number as it is, the length of a list, and 1 for a text that is not empty."""
    if isinstance(value, list):
        return float(len(value))
    return float(bool(value)) if isinstance(value, str) else float(value)
