"""Prometheus metrics and health of a daemon that reads a source, from its latest status."""

import time
from collections.abc import Mapping
from typing import Any

from feedmill.shared.metrics import REDIS_METRICS, Metric, MetricsServer, RedisMetrics, Values, serve
from feedmill.shared.settings import Settings

#: Seconds without a finished step after which the daemon counts as stuck. A step may wait for the end of Reddit's
#: ten-minute rate-limit window; its requests have timeouts.
STUCK_AFTER_S = 900.0

#: Metrics by key of `LiveDaemon.status`: name and help text. Counters start with the process.
FIGURES = {
    "read": ("feedmill_live_events_total", "Events read from the source, including deletions and filtered posts."),
    "sent": ("feedmill_live_posts_sent_total", "Posts sent to the queue."),
    "skipped": ("feedmill_live_posts_skipped_total", "Posts skipped because they were sent before, or purged."),
    "filtered": ("feedmill_live_posts_filtered_total", "Posts left out by the source's filters."),
    "refused": ("feedmill_live_posts_refused_total", "Posts that cannot be classified."),
    "ahead": ("feedmill_live_events_ahead_total", "Events from the future, which are sent but are no positions."),
    "unreadable": (
        "feedmill_live_events_unreadable_total", "Events that could not be read or sent twice, now dead letters.",
    ),
    "purged": ("feedmill_live_posts_purged_total", "Posts purged because they were deleted at the source."),
    "gaps": ("feedmill_live_gaps_total", "Periods whose events the source no longer had."),
    "connections": ("feedmill_live_connections_total", "Connections opened to the source."),
    "gaps_recorded": (
        "feedmill_live_gaps_recorded", "Gaps listed by `feedmill ingest gaps`, until they are cleared.",
    ),
    "paused": ("feedmill_live_paused", "1 while the queue is full, otherwise 0."),
    "hindrance": ("feedmill_live_hindered", "1 while the source or Redis is unavailable, otherwise 0."),
    "delay": ("feedmill_live_delay_seconds", "Age of the newest event that was processed; absent before the first."),
    "faults": ("feedmill_live_faults_total", "Failures of the source and of Redis."),
}  # fmt: skip


def metrics_of(figures: Mapping[str, tuple[str, str]], *labels: str) -> tuple[Metric, ...]:
    """Declare the metrics of a daemon's status. labels: shared by all metrics. Faults are also counted by kind."""
    return tuple(
        Metric("counter" if name.endswith("_total") else "gauge", name, text, (*labels, *["kind"] * (key == "faults")))
        for key, (name, text) in figures.items()
    )


METRICS = metrics_of(FIGURES, "source")


class DaemonMetrics:
    """Metrics of a daemon's latest status.

    figures: as FIGURES. progress: key of the status that is 0 until the daemon has read something. labels: names and
    values of the labels that all metrics share.
    """

    def __init__(
        self, settings: Settings, figures: Mapping[str, tuple[str, str]], progress: str, **labels: str
    ) -> None:
        self._settings = settings
        self._figures, self._progress = figures, progress
        self._metrics, self._labels = metrics_of(figures, *labels), tuple(labels.values())
        self._redis = RedisMetrics(settings)
        #: Latest status. Replaced, never modified, because other threads read it.
        self._status: Mapping[str, Any] = {}
        self._turned = time.monotonic()

    def serve(self) -> MetricsServer:
        """Start the metrics server. Raises UserError."""
        return serve(
            self._settings,
            [(REDIS_METRICS, self._redis.values), (self._metrics, self.values)],
            self.unhealthy,
            self.unready,
        )

    def update(self, status: Mapping[str, Any]) -> None:
        """Store the daemon's status after a step."""
        self._status, self._turned = status, time.monotonic()

    def values(self) -> Values:
        if not (status := self._status):
            return {}
        values: Values = {name: {self._labels: _as_number(status[key])} for key, (name, _) in self._figures.items()}
        faults = {(*self._labels, kind): count for kind, count in status["faults"].items()}
        return values | {self._figures["faults"][0]: faults}

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
        super().__init__(settings, FIGURES, progress="read", source=source)


def _as_number(value: Any) -> float | None:
    """Return a number as it is, the length of a list, and 1 for a text that is not empty."""
    if isinstance(value, list | dict):
        return len(value)
    return bool(value) if isinstance(value, str) else value
