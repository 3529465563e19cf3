"""A worker's totals, rates and distributions, for `inspect stats`, Prometheus and its log."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from feedmill.workers.models.shapes import EXACT, Shapes
from feedmill.workers.pipeline.window import HasLength

#: Upper bounds, inclusive, of the histogram buckets. Rows and tokens use powers of two.
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKEN_BOUNDS = tuple(2**power for power in range(7, 19))
PADDING_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
#: Seconds per forward pass, from a small batch on a GPU to a large one on a CPU; and seconds from
#: sending to storing, from an idle system to a backlog of a day.
FORWARD_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
LAG_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
    14_400.0, 86_400.0,
)  # fmt: skip

#: Seconds over which recent rates are averaged.
RECENT_S = 10.0

#: Time constant of the exponential decay of passes in the device's speed, in seconds of device
#: time.
SPEED_DECAY_S = 10.0


@dataclass(slots=True)
class Totals:
    """Sums since the worker started.

    Each field has a single writing thread: the submitting thread for messages and queued_seconds,
    the tokenizer thread for answered, and the writer thread for all other fields.
    """

    #: Number of posts classified, and of posts that became dead letters.
    posts: int = 0
    failed: int = 0
    #: Number of posts answered with a stored classification.
    answered: int = 0
    #: Number of messages with a sending time, and the total seconds that these messages waited for
    #: this worker.
    messages: int = 0
    queued_seconds: float = 0.0
    batches: int = 0
    rows: int = 0
    tokens: int = 0
    #: Tokens of all micro-batches if padded: each batch's longest row times its rows, or its shape
    #: on a GPU.
    padded_tokens: int = 0
    #: Seconds that the whole device computed. A lane counts for its share of the device.
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Averages over a period of time."""

    seconds: float
    posts: int
    posts_per_second: float
    rows_per_batch: float
    tokens_per_batch: float
    #: Share of real tokens in padded micro-batches.
    padding_efficiency: float
    #: Share of time that the device computed.
    device_busy: float
    #: Average seconds from sending a message until this worker fetched it.
    queue_wait: float

    def __str__(self) -> str:
        return (
            f"{self.posts_per_second:.1f} posts/s; {self.rows_per_batch:.1f} rows and "
            f"{self.tokens_per_batch:.0f} tokens a batch, padding efficiency "
            f"{self.padding_efficiency:.3f}, device busy {self.device_busy:.2f}, "
            f"{self.queue_wait:.1f} s in the queue"
        )


def rates(earlier: Totals, later: Totals, seconds: float) -> Rates:
    """Return the rates between two states of a worker's totals that are `seconds` apart."""
    posts = later.posts - earlier.posts
    batches = later.batches - earlier.batches
    rows = later.rows - earlier.rows
    tokens = later.tokens - earlier.tokens
    padded_tokens = later.padded_tokens - earlier.padded_tokens
    device_seconds = later.device_seconds - earlier.device_seconds
    messages = later.messages - earlier.messages
    queued_seconds = later.queued_seconds - earlier.queued_seconds
    return Rates(
        seconds=seconds,
        posts=posts,
        posts_per_second=_share(posts, seconds),
        rows_per_batch=_share(rows, batches),
        tokens_per_batch=_share(tokens, batches),
        padding_efficiency=_share(tokens, padded_tokens),
        device_busy=_share(device_seconds, seconds),
        queue_wait=_share(queued_seconds, messages),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class Histogram:
    """Counts of values per bucket, and the sum of the values.

    One thread adds, other threads read.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        buckets = len(bounds) + 1  # the last one is for values above all bounds
        self.counts = [0] * buckets
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value


class Speed:
    """The device's recent speed in rows per second. One thread adds, other threads read."""

    def __init__(self) -> None:
        self._rows = 0.0
        self._seconds = 0.0
        #: None before the first pass.
        self.rows_per_second: float | None = None

    def add(self, rows: int, seconds: float) -> None:
        """Count a pass that took `seconds` of the whole device.

        Older passes decay exponentially.
        """
        fading = math.exp(-seconds / SPEED_DECAY_S)
        self._rows *= fading
        self._rows += rows
        self._seconds *= fading
        self._seconds += seconds
        if self._seconds:
            self.rows_per_second = self._rows / self._seconds
        else:
            self.rows_per_second = math.inf


class _Mark(NamedTuple):
    """The totals at a time, in seconds of a monotonic clock."""

    time: float
    totals: Totals


class Statistics:
    """A worker's totals, its rates in the last RECENT_S seconds, and histograms of its
    micro-batches.

    now (in all methods): seconds of a monotonic clock. shapes: what the device pads micro-batches
    to.
    """

    def __init__(self, now: float, shapes: Shapes = EXACT) -> None:
        self._shapes = shapes
        self.totals = Totals()
        #: Histograms of micro-batches, written only by the writer thread: rows, padded tokens,
        #: share of padding, and seconds per forward pass.
        self.batch_rows = Histogram(ROW_BOUNDS)
        self.batch_tokens = Histogram(TOKEN_BOUNDS)
        self.padding = Histogram(PADDING_BOUNDS)
        self.forward_seconds = Histogram(FORWARD_BOUNDS_S)
        #: Seconds from sending a message until its last result was stored.
        self.lag = Histogram(LAG_BOUNDS_S)
        #: Speed of the active model.
        self.speed = Speed()
        #: Totals at times of the last RECENT_S seconds, and at one time before. Replaced as a
        #: whole, for readers.
        start = _Mark(time=now, totals=Totals())
        self._marks: tuple[_Mark, ...] = (start,)

    def count(self, rows: Sequence[HasLength], seconds: float, share: float) -> None:
        """Count a micro-batch whose forward pass took `seconds` on a share of the device."""
        lengths = [row.length for row in rows]
        number = len(lengths)
        longest = max(lengths)
        tokens = sum(lengths)
        padded_tokens = self._shapes.tokens(number, longest)
        padding = 0.0
        if padded_tokens:
            padding = 1 - tokens / padded_tokens
        device_seconds = seconds * share

        totals = self.totals
        totals.batches += 1
        totals.rows += number
        totals.tokens += tokens
        totals.padded_tokens += padded_tokens
        totals.device_seconds += device_seconds

        self.speed.add(number, device_seconds)
        self.batch_rows.add(number)
        self.batch_tokens.add(padded_tokens)
        self.padding.add(padding)
        self.forward_seconds.add(seconds)

    def mark(self, now: float) -> None:
        """Remember the totals.

        Call this about once a second, by one thread: `recent` is only as current.
        """
        totals = replace(self.totals)
        latest = _Mark(time=now, totals=totals)
        marks: tuple[_Mark, ...] = (*self._marks, latest)
        while len(marks) > 1:
            second = marks[1]
            if now - second.time < RECENT_S:
                break
            marks = marks[1:]
        self._marks = marks

    def recent(self, now: float) -> Rates:
        """Return the rates of the last RECENT_S seconds, or since the worker started."""
        earlier = self._marks[0]
        seconds = now - earlier.time
        return rates(earlier.totals, self.totals, seconds)
