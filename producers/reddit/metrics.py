"""The Reddit daemon's figures for Prometheus, and whether it is well: from the last word it gave of itself."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shared.metrics import Figure, Kind, RedisFigures, Sample, Server, serve
from shared.settings import Settings

#: Seconds after which a daemon that has not come round counts as stuck. In the middle of a job it may have to wait for
#: the end of Reddit's window, ten minutes; its requests have time limits.
STUCK = 900.0

Status = Mapping[str, Any]


def _counter(name: str, what: str) -> Figure:
    return Figure(f"feedmill_reddit_{name}_total", Kind.COUNTER, what)


def _gauge(name: str, what: str) -> Figure:
    return Figure(f"feedmill_reddit_{name}", Kind.GAUGE, what)


#: Each with how it is read from `Daemon.status`; None: not known. Counters count from the process's start.
READ: tuple[tuple[Figure, Callable[[Status], float | None]], ...] = (
    (_counter("posts_sent", "Posts put into the queue."), lambda status: status["sent"]),
    (_counter("posts_skipped", "Posts that were sent before."), lambda status: status["skipped"]),
    (_counter("posts_looked_at_again", "Second looks at posts that were sent."), lambda status: status["looked"]),
    (_counter("posts_purged", "Posts purged since they are gone from Reddit."), lambda status: status["purged"]),
    (_counter("polls", "Walks through a topic's new posts."), lambda status: status["polls"]),
    (_counter("gaps", "Times of which a subreddit's posts were out of reach."), lambda status: status["gaps"]),
    (_counter("requests", "Requests made to Reddit."), lambda status: status["requests"]),
    (_gauge("subreddits", "Subreddits that are read."), lambda status: status["subreddits"]),
    (_gauge("subreddits_failing", "Subreddits that failed last time."), lambda status: len(status["failing"])),
    (_gauge("posts_held", "Posts read that wait for room in the queue."), lambda status: status["held"]),
    (_gauge("paused", "1 while the queue is full, else 0."), lambda status: status["paused"]),
    (_gauge("hindered", "1 while Reddit, or Redis, is away, else 0."), lambda status: bool(status["hindrance"])),
    (
        _gauge("budget_remaining_requests", "Requests left in Reddit's window, as it states; absent where it is over."),
        lambda status: status["budget"],
    ),
)
FAULTS = Figure("feedmill_reddit_faults_total", Kind.COUNTER, "Requests that failed.", ("kind",))
FIGURES = (*(figure for figure, _ in READ), FAULTS)


class Metrics:
    """Tells what the daemon said of itself last."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = RedisFigures(settings)
        #: As `Daemon.status` gives it. Replaced, never changed: other threads read it.
        self._status: Status = {}
        self._turned = time.monotonic()

    def serve(self) -> Server:
        """Answer whoever asks, from now on. Raises UserError."""
        return serve(self._settings, [self._redis.samples, self.samples], self.unhealthy, self.unready)

    def tell(self, status: Status) -> None:
        """The daemon has come round, and this is how it fares."""
        self._status, self._turned = status, time.monotonic()

    def samples(self) -> Iterator[Sample]:
        if not (status := self._status):
            return
        for figure, read in READ:
            if (value := read(status)) is not None:
                yield Sample(figure, float(value))
        for kind, count in status["faults"].items():
            yield Sample(FAULTS, count, (kind,))

    def unhealthy(self) -> list[str]:
        """What only a new process can mend. That Reddit or Redis is away is no such thing."""
        quiet = time.monotonic() - self._turned
        return [f"the daemon has not come round for {quiet:.0f} s"] if quiet > STUCK else []

    def unready(self) -> list[str]:
        """Why no post would come now."""
        if not self._status.get("polls"):
            return [self._status.get("hindrance") or "it has not read any topic yet"]
        return self.unhealthy() or [self._status["hindrance"]] * bool(self._status["hindrance"]) or self._redis.away()
