"""Prometheus metrics and health of a daemon that reads a source, from its latest status."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from feedmill.shared.metrics import Metric, ProcessMetrics, Values
from feedmill.shared.settings import Settings

#: Seconds without a finished step after which the daemon counts as stuck. A step may wait for the end of Reddit's
#: ten-minute rate-limit window; its requests have timeouts.
STUCK_AFTER_S = 900.0

#: Metrics by key of `LiveDaemon.status`: name without prefix, and help text. Counters start with the process.
FIGURES = {
    "read": ("events_total", "Events read from the source, including deletions and filtered posts."),
    "sent": ("posts_sent_total", "Posts sent to the queue."),
    "skipped": ("posts_skipped_total", "Posts skipped because they were sent before, or purged."),
    "filtered": ("posts_filtered_total", "Posts left out by the source's filters."),
    "refused": ("posts_refused_total", "Posts that cannot be classified."),
    "ahead": ("events_ahead_total", "Events from the future, which are sent but are no positions."),
    "unreadable": ("events_unreadable_total", "Events that could not be read or sent twice, now dead letters."),
    "purged": ("posts_purged_total", "Posts purged because they were deleted or removed at the source."),
    "rechecked": ("posts_rechecked_total", "Rechecks of sent posts."),
    "returned": ("posts_returned_total", "Purged posts that came back and were sent again."),
    "polls": ("polls_total", "Polls of a topic's subreddits for new posts. Only Reddit."),
    "requests": ("requests_total", "Requests to Reddit, or to Arctic Shift if that is the source. Only Reddit."),
    "gaps": ("gaps_total", "Periods whose posts could not be read."),
    "filled": ("gaps_filled_total", "Gaps filled from Arctic Shift. Only Reddit."),
    "connections": ("connections_total", "Connections opened to the source."),
    "gaps_recorded": ("gaps_recorded", "Open gaps listed by `feedmill ingest gaps`, until they are filled or cleared."),
    "subreddits": ("subreddits", "Subreddits being read. Only Reddit."),
    "failing": ("subreddits_failing", "Subreddits whose last read failed. Only Reddit."),
    "paused": ("paused", "1 while the queue is full, otherwise 0."),
    "hindrance": ("hindered", "1 while the source or Redis is unavailable, otherwise 0."),
    "delay": ("delay_seconds", "Age of the newest event that was processed; absent before the first, and for Reddit."),
    "budget": (
        "budget_remaining_requests",
        "Requests left in Reddit's rate-limit window, as reported by Reddit; absent once the window has ended.",
    ),
    "faults": ("faults_total", "Failures of the source and of Redis."),
}
#: Labels of all metrics. Faults are also counted by kind.
METRICS = tuple(
    Metric(
        "counter" if name.endswith("_total") else "gauge",
        f"feedmill_live_{name}",
        text,
        ("source", *["kind"] * (key == "faults")),
    )
    for key, (name, text) in FIGURES.items()
)


class LiveMetrics(ProcessMetrics):
    """Metrics of a daemon's latest status."""

    metrics = METRICS

    def __init__(self, settings: Settings, source: str) -> None:
        super().__init__(settings)
        self._source = source
        #: Latest status. Replaced, never modified, because other threads read it.
        self._status: Mapping[str, Any] = {}
        self._turned = time.monotonic()

    def update(self, status: Mapping[str, Any]) -> None:
        """Store the daemon's status after a step."""
        self._status, self._turned = status, time.monotonic()

    def values(self) -> Values:
        status = self._status
        values: Values = {
            f"feedmill_live_{name}": {self._source: _as_number(status[key])}
            for key, (name, _) in FIGURES.items()
            if key in status
        }
        if status:
            faults = {(self._source, kind): count for kind, count in status["faults"].items()}
            values["feedmill_live_faults_total"] = faults
        return values

    def unhealthy(self) -> Sequence[str]:
        quiet = time.monotonic() - self._turned
        return [f"the daemon has not finished a step for {quiet:.0f} s"] if quiet > STUCK_AFTER_S else []

    def unready(self) -> Sequence[str]:
        if not self._status.get("read"):
            return [self._status.get("hindrance") or "the daemon has not read anything yet"]
        return self.unhealthy() or [self._status["hindrance"]] * bool(self._status["hindrance"]) or super().unready()


def _as_number(value: Any) -> float | None:
    """Return a number as it is, the length of a list, and 1 for a text that is not empty."""
    if isinstance(value, list | dict):
        return len(value)
    return bool(value) if isinstance(value, str) else value
