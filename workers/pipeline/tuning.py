"""The batch-size experiment: measure speed and memory for batches of different sizes.

The experiment compares two ways to form batches from the same posts. By batch size: a fixed number of posts in order of
arrival, with all of their rows in one forward pass. By token budget: all rows sorted by length, with a new batch
wherever the next row would exceed the budget. A worker's window does the same at best. In both cases, the rows within a
batch are sorted by length, as the engines prefer.

Both ways are measured as in `calibrate`: one forward pass after the other, with the cores of one lane of the device. So
the two curves are comparable with either engine (ONNX Runtime fixes its number of cores on loading), and the best
budget is valid for each lane of a worker. Tokenizing is not timed. This module does not display results.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

import torch

from feedmill.shared import linux
from feedmill.shared.errors import DeviceFull
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier, Row
from feedmill.workers.pipeline.calibration import CANDIDATES, OTHER_CANDIDATES, best

BATCH_SIZE, TOKEN_BUDGET = "batch_size", "token_budget"
#: Batch sizes to measure, in posts.
BATCH_SIZES = tuple(range(5, 41, 5))
#: Minimum batches for a token budget to be measured. With fewer, the unfilled last batch distorts the result.
MIN_BATCHES = 4


class Size(NamedTuple):
    """A size to measure: BATCH_SIZE in posts, or TOKEN_BUDGET in tokens."""

    kind: str
    value: int


class SizeMeasurement(NamedTuple):
    """The measurements of one size."""

    kind: str
    value: int
    #: Time for all posts (median of the rounds), and the rates that follow from it.
    seconds: float
    posts_per_s: float
    tokens_per_s: float
    #: Real tokens divided by computed tokens; 1 if the engine packs rows.
    padding_efficiency: float
    #: Peak memory in 10^6 bytes, weights included; None if unknown. The lowest of the rounds, because memory that an
    #: allocator kept from earlier batches only adds to it.
    peak_mb: float | None


class Curve(NamedTuple):
    """Measured speeds by batch size or token budget, smallest first.

    full: smallest size that does not fit in the device's memory; None if all fit.
    unfilled: smallest size for which there were too few posts; None if there were enough.
    """

    points: Sequence[SizeMeasurement]
    full: int | None
    unfilled: int | None

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second by size."""
        return {point.value: point.tokens_per_s for point in self.points}

    @property
    def knee(self) -> SizeMeasurement:
        """The smallest size whose rate comes close to the best. Requires at least one point."""
        smallest = best(self.rates)
        return next(point for point in self.points if point.value == smallest)

    @property
    def settled(self) -> bool:
        """True if more posts could not move the knee to a larger size."""
        return bool(self.points) and (self.unfilled is None or self.knee != self.points[-1])


class Tuning:
    """Measure each size once per round, every other round in reverse order, because a machine's speed drifts.

    Use `run`, then `curve`. Raises RequestRefused if the model does not support the configured labels.
    """

    def __init__(self, classifier: Classifier, texts: Sequence[str], settings: Settings, rounds: int) -> None:
        self._classifier, self._texts, self._settings, self._rounds = classifier, texts, settings, rounds
        self._label_set = classifier.label_set(ClassifyOptions())
        by_post = self._prepared()
        budgets = CANDIDATES.get(classifier.device.torch.type, OTHER_CANDIDATES)
        wanted = {
            BATCH_SIZE: {value: value <= len(texts) for value in BATCH_SIZES},
            TOKEN_BUDGET: {value: len(self._batches(by_post, value)) >= MIN_BATCHES for value in budgets},
        }
        self._unfilled = {
            kind: next((value for value in values if value > min(values) and not values[value]), None)
            for kind, values in wanted.items()
        }
        self._full: dict[str, int] = {}
        self.tokens = sum(row.length for rows in by_post for row in rows)
        self.packed = classifier.packed
        shapes = classifier.device.shapes
        #: Padded tokens of each batch, by size.
        self._padded = {
            size: [shapes.tokens(len(batch), batch[-1].length) for batch in self._cut(by_post, size)]
            for size in (Size(kind, value) for kind, values in wanted.items() for value in values)
            if size.value < (self._unfilled[size.kind] or math.inf)
        }
        #: Seconds and peak memory (10^6 bytes) of each round, by size. Small batches go first, because some allocators
        #: never release memory.
        self._rounds_of: dict[Size, list[tuple[float, float | None]]] = {
            size: [] for size in sorted(self._padded, key=lambda size: max(self._padded[size]))
        }

    @property
    def steps(self) -> int:
        """The number of sizes that `run` yields in all rounds."""
        return self._rounds * len(self._rounds_of)

    def run(self) -> Iterator[Size]:
        """Yield each size, then measure it. Raises DeviceLost, or any error that a post causes in the model."""
        self._classifier.device.take_share(self._classifier.device.lanes)
        for number in range(self._rounds):
            for size in reversed(self._rounds_of) if number % 2 else self._rounds_of:
                yield size
                if size.value < self._full.get(size.kind, math.inf):
                    try:
                        self._rounds_of[size].append(self._measure(size))
                    except DeviceFull:
                        self._full[size.kind] = size.value

    def curve(self, kind: str) -> Curve:
        """Return the measurements for BATCH_SIZE or TOKEN_BUDGET."""
        full = self._full.get(kind)
        points = [
            self._measured(size, rounds)
            for size, rounds in sorted(self._rounds_of.items())
            if size.kind == kind and size.value < (full or math.inf) and rounds
        ]
        return Curve(points, full, self._unfilled[kind])

    def _measured(self, size: Size, rounds: Sequence[tuple[float, float | None]]) -> SizeMeasurement:
        seconds = median(seconds for seconds, _ in rounds)
        return SizeMeasurement(
            *size,
            seconds,
            len(self._texts) / seconds,
            self.tokens / seconds,
            1.0 if self.packed else self.tokens / sum(self._padded[size]),
            min((peak for _, peak in rounds if peak is not None), default=None),
        )

    def _measure(self, size: Size) -> tuple[float, float | None]:
        # Prepared again for each measurement, because rows keep their outputs.
        batches = self._cut(self._prepared(), size)
        peak = Peak(self._classifier.device.torch, self._settings.engine)
        began = time.perf_counter()
        for batch in batches:
            self._classifier.finish(batch, self._classifier.forward(batch))
        return time.perf_counter() - began, peak.mb()

    def _prepared(self) -> list[list[Row]]:
        return self._classifier.prepare(self._texts, self._label_set)

    def _cut(self, by_post: Sequence[Sequence[Row]], size: Size) -> list[list[Row]]:
        if size.kind == TOKEN_BUDGET:
            return self._batches(by_post, size.value)
        some = (by_post[at : at + size.value] for at in range(0, len(by_post), size.value))
        return [_by_length(posts) for posts in some]

    def _batches(self, by_post: Sequence[Sequence[Row]], token_budget: int) -> list[list[Row]]:
        """Cut sorted rows into batches within the token budget. A row that alone exceeds it gets its own batch."""
        batches: list[list[Row]] = []
        limit, shapes = self._settings.batch_rows, self._classifier.device.shapes
        for row in _by_length(by_post):
            if (
                not batches
                or shapes.tokens(len(batches[-1]) + 1, row.length) > token_budget
                or len(batches[-1]) == limit
            ):
                batches.append([])
            batches[-1].append(row)
        return batches


def _by_length(by_post: Sequence[Sequence[Row]]) -> list[Row]:
    return sorted(chain.from_iterable(by_post), key=lambda row: row.length)


class Peak:
    """Peak memory since this object was created: torch's allocations on a GPU, the whole process on Linux."""

    def __init__(self, device: torch.device, engine: str) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda" and engine == "torch"
        self._on_host = False
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu":
            self._on_host = linux.reset_peak_memory()

    def mb(self) -> float | None:
        """Return the peak in 10^6 bytes, or None if unknown."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device) / 1e6
        if self._on_host and (peak := linux.peak_memory()):
            return peak / 1e6
        return None
