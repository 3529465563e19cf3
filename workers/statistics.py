"""What a worker has done, and how fast: for `inspect stats`, and for a line in its log now and then."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workers.window import HasLength


@dataclass(slots=True)
class Totals:
    """Sums since the worker started. Each field is written by one thread alone: messages and queued_seconds by the
    one that submits, answered by the tokenizer, all others by the writer.
    """

    #: Posts that were classified, and posts that ended as dead letters.
    posts: int = 0
    failed: int = 0
    #: Posts whose classification was stored already.
    answered: int = 0
    #: Messages that bore the time of their sending, and the seconds that those waited for this worker.
    messages: int = 0
    queued_seconds: float = 0.0
    batches: int = 0
    rows: int = 0
    tokens: int = 0
    #: What padded micro-batches would hold: each batch's longest row times its rows.
    padded_tokens: int = 0
    #: For how long the whole device was at it: where it has lanes, each counts for its share.
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What came to pass between two moments, per second, per batch, or as a share."""

    seconds: float
    posts: int
    posts_per_second: float
    rows_per_batch: float
    tokens_per_batch: float
    #: Share of a padded micro-batch that are real tokens.
    padding_efficiency: float
    #: Share of the time in which the device computed.
    device_busy: float
    #: Seconds from a message's sending until this worker took it, on average.
    queue_wait: float

    def __str__(self) -> str:
        return (
            f"{self.posts_per_second:.1f} posts/s; {self.rows_per_batch:.1f} rows and {self.tokens_per_batch:.0f} "
            f"tokens a batch, padding efficiency {self.padding_efficiency:.3f}, device busy {self.device_busy:.2f}, "
            f"{self.queue_wait:.1f} s in the queue"
        )


def rates(earlier: Totals, later: Totals, seconds: float) -> Rates:
    """The rates between two states of one worker's totals that lie `seconds` apart."""
    batches = later.batches - earlier.batches
    posts = later.posts - earlier.posts
    tokens = later.tokens - earlier.tokens
    return Rates(
        seconds=seconds,
        posts=posts,
        posts_per_second=_share(posts, seconds),
        rows_per_batch=_share(later.rows - earlier.rows, batches),
        tokens_per_batch=_share(tokens, batches),
        padding_efficiency=_share(tokens, later.padded_tokens - earlier.padded_tokens),
        device_busy=_share(later.device_seconds - earlier.device_seconds, seconds),
        queue_wait=_share(later.queued_seconds - earlier.queued_seconds, later.messages - earlier.messages),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class Statistics:
    """A worker's totals, and its rates over the last whole interval.

    interval: seconds. now: seconds of a clock that only goes forward, here and below.
    """

    def __init__(self, interval: float, now: float) -> None:
        self.totals = Totals()
        self._interval = interval
        self._since = now
        self._earlier = Totals()
        self._last: Rates | None = None

    def count(self, rows: Sequence[HasLength], device_seconds: float) -> None:
        """Count a micro-batch that was computed."""
        lengths = [row.length for row in rows]
        self.totals.batches += 1
        self.totals.rows += len(lengths)
        self.totals.tokens += sum(lengths)
        self.totals.padded_tokens += len(lengths) * max(lengths)
        self.totals.device_seconds += device_seconds

    def turn(self, now: float) -> Rates | None:
        """Begin a new interval where the last is over; its rates, if anything was classified in it."""
        if now - self._since < self._interval:
            return None
        totals = replace(self.totals)
        self._last = rates(self._earlier, totals, now - self._since)
        self._earlier, self._since = totals, now
        return self._last if self._last.posts else None

    def recent(self, now: float) -> Rates:
        """The rates of the last whole interval; of what there is, before there is one."""
        return self._last or rates(self._earlier, self.totals, now - self._since)
