"""Prometheus metrics of the Reddit daemon."""

from producers.live.metrics import DaemonMetrics
from shared.metrics import MetricSpec, MetricType
from shared.settings import Settings


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
    "requests": _counter("requests", "Requests to Reddit, or to Arctic Shift if that is the source."),
    "gaps_open": _gauge("gaps_open", "Recorded gaps that are not filled."),
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


class Metrics(DaemonMetrics):
    """Metrics of the Reddit daemon's latest status."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, STATUS_FIGURES, FAULTS, progress="polls")
