"""Prometheus metrics of the Reddit daemon."""

from feedmill.producers.live.metrics import DaemonMetrics, metrics_of
from feedmill.shared.settings import Settings

#: Metrics by key of `Daemon.status`: name and help text. Counters start with the process.
FIGURES = {
    "sent": ("feedmill_reddit_posts_sent_total", "Posts sent to the queue."),
    "skipped": ("feedmill_reddit_posts_skipped_total", "Posts skipped because they were sent before."),
    "looked": ("feedmill_reddit_posts_looked_at_again_total", "Rechecks of sent posts."),
    "purged": ("feedmill_reddit_posts_purged_total", "Posts purged after deletion or removal on Reddit."),
    "returned": ("feedmill_reddit_posts_returned_total", "Purged posts that came back on Reddit and were sent again."),
    "polls": ("feedmill_reddit_polls_total", "Polls of a topic's subreddits for new posts."),
    "gaps": ("feedmill_reddit_gaps_total", "Periods in which a subreddit's posts could not be read."),
    "filled": ("feedmill_reddit_gaps_filled_total", "Gaps filled from Arctic Shift."),
    "requests": ("feedmill_reddit_requests_total", "Requests to Reddit, or to Arctic Shift if that is the source."),
    "gaps_open": ("feedmill_reddit_gaps_open", "Recorded gaps that are not filled."),
    "subreddits": ("feedmill_reddit_subreddits", "Subreddits being read."),
    "failing": ("feedmill_reddit_subreddits_failing", "Subreddits whose last read failed."),
    "held": ("feedmill_reddit_posts_held", "Posts in the send buffer, waiting for room in the queue."),
    "paused": ("feedmill_reddit_paused", "1 while the queue is full, otherwise 0."),
    "hindrance": ("feedmill_reddit_hindered", "1 while Reddit or Redis is unavailable, otherwise 0."),
    "budget": (
        "feedmill_reddit_budget_remaining_requests",
        "Requests left in Reddit's rate-limit window, as reported by Reddit; absent once the window has ended.",
    ),
    "faults": ("feedmill_reddit_faults_total", "Failed requests and unexpected errors."),
}
METRICS = metrics_of(FIGURES)


class Metrics(DaemonMetrics):
    """Metrics of the Reddit daemon's latest status."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, FIGURES, progress="polls")
