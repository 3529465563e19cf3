"""What a worker has done, and how fast: for `inspect stats`, for Prometheus, and for a line in its log now and then."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workers.window import HasLength

#: Upper bounds of the histograms' buckets, each bound within its bucket. Rows and tokens go by powers of two.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = tuple(2**power for power in range(7, 19))
PADDING = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
#: Seconds: of a forward pass, from a small batch on a GPU to a large one on a CPU; and from sending to storing, from an
#: idle system's milliseconds to a backlog of a day.
FORWARD = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LAG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)

#: Seconds of the device's work after which a pass counts a third of what it did for how fast the device is.
MEMORY = 10.0


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


class Histogram:
    """How many values fell between each two bounds, and above the last; and their sum. One thread adds, others read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Speed:
    """How fast the device computes: rows of its latest passes by their seconds. One thread adds, others read."""

    __slots__ = ("_rows", "_seconds", "rows_per_second")

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0
        #: None before the first pass.
        self.rows_per_second: float | None = None

    def add(self, rows: int, seconds: float) -> None:
        """Count a pass of so many seconds of the whole device; those before count the less the longer ago they are."""
        fading = math.exp(-seconds / MEMORY)
        self._rows = self._rows * fading + rows
        self._seconds = self._seconds * fading + seconds
        self.rows_per_second = self._rows / self._seconds if self._seconds else math.inf


class Statistics:
    """A worker's totals, its rates over the last whole interval, and how its micro-batches are spread.

    interval: seconds. now: seconds of a clock that only goes forward, here and below.
    """

    def __init__(self, interval: float, now: float) -> None:
        self.totals = Totals()
        #: Written by the writer alone. Of micro-batches: their rows, their tokens with the padding, the share of those
        #: that is padding, and the seconds of their forward passes.
        self.batch_rows = Histogram(ROWS)
        self.batch_tokens = Histogram(TOKENS)
        self.padding = Histogram(PADDING)
        self.forward_seconds = Histogram(FORWARD)
        #: Seconds from a message's sending until the last of its results was stored.
        self.lag = Histogram(LAG)
        self.speed = Speed()
        self._interval = interval
        self._since = now
        self._earlier = Totals()
        self._last: Rates | None = None

    def count(self, rows: Sequence[HasLength], seconds: float, share: float) -> None:
        """Count a micro-batch whose forward pass took so many seconds of a share of the device."""
        lengths = [row.length for row in rows]
        tokens, padded = sum(lengths), len(lengths) * max(lengths)
        self.totals.batches += 1
        self.totals.rows += len(lengths)
        self.totals.tokens += tokens
        self.totals.padded_tokens += padded
        self.totals.device_seconds += seconds * share
        self.speed.add(len(lengths), seconds * share)
        self.batch_rows.add(len(lengths))
        self.batch_tokens.add(padded)
        self.padding.add(1 - tokens / padded if padded else 0.0)
        self.forward_seconds.add(seconds)

    def forget_speed(self) -> None:
        """The device computes another model from now on."""
        self.speed = Speed()

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
        earlier, since = self._earlier, self._since  # before `_last`, which `turn` sets first on another thread
        return self._last or rates(earlier, self.totals, now - since)
