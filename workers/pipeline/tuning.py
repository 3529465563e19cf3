"""The experiment of `feedmill tune`: measure speed and memory for batches of different token budgets.

All rows are sorted by length, with a new batch wherever the next row would exceed the budget. A worker's window does
the same at best. Budgets are measured as in `calibrate`: one forward pass after the other, with the cores of one lane
of the device, so that the best one is valid for each lane of a worker. Tokenizing is not timed. This module does not
display results.
"""

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

#: Minimum batches for a token budget to be measured. With fewer, the unfilled last batch distorts the result.
MIN_BATCHES = 4


class Measurement(NamedTuple):
    """The measurements of one token budget."""

    budget: int
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
    """Measured speeds by token budget, smallest first.

    full: smallest budget that does not fit in the device's memory; None if all fit.
    unfilled: smallest budget for which there were too few posts; None if there were enough.
    """

    points: Sequence[Measurement]
    full: int | None
    unfilled: int | None

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second by budget."""
        return {point.budget: point.tokens_per_s for point in self.points}

    @property
    def knee(self) -> Measurement:
        """The smallest budget whose rate comes close to the best. Requires at least one point."""
        smallest = best(self.rates)
        return next(point for point in self.points if point.budget == smallest)

    @property
    def settled(self) -> bool:
        """True if more posts could not move the knee to a larger budget."""
        return bool(self.points) and (self.unfilled is None or self.knee != self.points[-1])


class Tuning:
    """Measure each budget once per round, every other round in reverse order, because a machine's speed drifts.

    Use `run`, then `curve`. Raises RequestRefused if the model does not support the configured labels.
    """

    def __init__(self, classifier: Classifier, texts: Sequence[str], settings: Settings, rounds: int) -> None:
        self._classifier, self._texts, self._settings, self._rounds = classifier, texts, settings, rounds
        self._label_set = classifier.label_set(ClassifyOptions())
        by_post = self._prepared()
        smallest, *others = CANDIDATES.get(classifier.device.torch.type, OTHER_CANDIDATES)
        self._unfilled = next((one for one in others if len(self._batches(by_post, one)) < MIN_BATCHES), None)
        self._full: int | None = None
        self.tokens = sum(row.length for rows in by_post for row in rows)
        self.packed = classifier.packed
        shapes = classifier.device.shapes
        #: Padded tokens of all batches, by budget.
        self._padded = {
            budget: sum(shapes.tokens(len(batch), batch[-1].length) for batch in self._batches(by_post, budget))
            for budget in (smallest, *others)
            if self._unfilled is None or budget < self._unfilled
        }
        #: Seconds and peak memory (10^6 bytes) of each round, by budget. Small ones go first, because some allocators
        #: never release memory.
        self._rounds_of: dict[int, list[tuple[float, float | None]]] = {budget: [] for budget in self._padded}

    @property
    def steps(self) -> int:
        """The number of budgets that `run` yields in all rounds."""
        return self._rounds * len(self._rounds_of)

    def run(self) -> Iterator[int]:
        """Yield each budget, then measure it. Raises DeviceLost, or any error that a post causes in the model."""
        self._classifier.device.take_share(self._classifier.device.lanes)
        for number in range(self._rounds):
            for budget in reversed(self._rounds_of) if number % 2 else self._rounds_of:
                yield budget
                if self._full is None or budget < self._full:
                    try:
                        self._rounds_of[budget].append(self._measure(budget))
                    except DeviceFull:
                        self._full = budget

    def curve(self) -> Curve:
        """Return the measurements."""
        points = [
            self._measured(budget, rounds)
            for budget, rounds in self._rounds_of.items()
            if rounds and (self._full is None or budget < self._full)
        ]
        return Curve(points, self._full, self._unfilled)

    def _measured(self, budget: int, rounds: Sequence[tuple[float, float | None]]) -> Measurement:
        seconds = median(seconds for seconds, _ in rounds)
        return Measurement(
            budget,
            seconds,
            len(self._texts) / seconds,
            self.tokens / seconds,
            1.0 if self.packed else self.tokens / self._padded[budget],
            min((peak for _, peak in rounds if peak is not None), default=None),
        )

    def _measure(self, budget: int) -> tuple[float, float | None]:
        # Prepared again for each measurement, because rows keep their outputs.
        batches = self._batches(self._prepared(), budget)
        peak = Peak(self._classifier.device.torch, self._settings.engine)
        began = time.perf_counter()
        for batch in batches:
            self._classifier.finish(batch, self._classifier.forward(batch))
        return time.perf_counter() - began, peak.mb()

    def _prepared(self) -> list[list[Row]]:
        return self._classifier.prepare(self._texts, self._label_set)

    def _batches(self, by_post: Sequence[Sequence[Row]], token_budget: int) -> list[list[Row]]:
        """Cut sorted rows into batches within the token budget. A row that alone exceeds it gets its own batch."""
        batches: list[list[Row]] = []
        limit, shapes = self._settings.batch_rows, self._classifier.device.shapes
        for row in sorted(chain.from_iterable(by_post), key=lambda row: row.length):
            if (
                not batches
                or shapes.tokens(len(batches[-1]) + 1, row.length) > token_budget
                or len(batches[-1]) == limit
            ):
                batches.append([])
            batches[-1].append(row)
        return batches


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
