"""The batch-size experiment: how fast, and with how much memory, posts are classified in batches of which size.

Two ways to cut the same posts into batches are compared. Batch sizes: so many posts as they come, all of their rows
in one forward pass. Token budgets: all rows sorted by length and cut where the next would break the budget, which is
what a worker's window does at its best. Either way the rows of a batch are sorted by length, as the engines like them.

Both are measured like `calibrate` does it: one forward pass after the other, with the cores that one of the device's
lanes has. So the two curves are comparable, with either engine (ONNX Runtime's share is fixed when it is loaded), and
the best budget is what each of a worker's lanes needs. Tokenizing is not timed. Knows nothing of how it is shown.
"""

import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from shared.errors import DeviceFull
from shared.messages import ClassifyOptions
from shared.settings import Settings
from workers.calibration import CANDIDATES, OTHER_CANDIDATES, best
from workers.classifiers import Classifier, Row

BATCH_SIZE, TOKEN_BUDGET = "batch_size", "token_budget"
#: Posts of a batch.
SIZES = tuple(range(5, 41, 5))
#: Batches that the rows must give for a token budget to be tried: with fewer, the last one's gap decides.
LEAST_BATCHES = 4
#: Linux: writing RESET_PEAK to the first makes VmHWM in the second begin anew (man 5 proc_pid_clear_refs).
CLEAR_REFS, STATUS, RESET_PEAK = Path("/proc/self/clear_refs"), Path("/proc/self/status"), "5"


class Size(NamedTuple):
    """What is tried: BATCH_SIZE with posts, or TOKEN_BUDGET with tokens."""

    kind: str
    value: int


class Measured(NamedTuple):
    """What was found for one size."""

    kind: str
    value: int
    #: For all posts: the median of the rounds, and what follows from it.
    seconds: float
    posts_per_s: float
    tokens_per_s: float
    #: Real tokens over computed ones: 1 where the engine packs.
    padding_efficiency: float
    #: In 10^6 bytes, weights included; None where it cannot be told. The least of the rounds: what an allocator kept
    #: of batches before only adds to it.
    peak_mb: float | None


class Curve(NamedTuple):
    """The sizes of one kind, smallest first. full, unfilled: the smallest left out, None where none was: the device
    has no memory for it; the posts do not fill it.
    """

    points: Sequence[Measured]
    full: int | None
    unfilled: int | None

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second by size."""
        return {point.value: point.tokens_per_s for point in self.points}

    @property
    def knee(self) -> Measured:
        """The smallest size that comes close to the fastest; there must be points."""
        smallest = best(self.rates)
        return next(point for point in self.points if point.value == smallest)

    @property
    def settled(self) -> bool:
        """Whether more posts could not move the knee to a larger size."""
        return bool(self.points) and (self.unfilled is None or self.knee != self.points[-1])


class Tuning:
    """Measures each size once a round, every other round backwards, since machines drift: `run`, then `curve`.

    texts: of the posts, in their order. Raises RequestRefused where the model cannot serve the labels that are set.
    """

    def __init__(self, classifier: Classifier, texts: Sequence[str], settings: Settings, rounds: int) -> None:
        self._classifier, self._texts, self._settings, self._rounds = classifier, texts, settings, rounds
        self._label_set = classifier.label_set(ClassifyOptions())
        by_post = self._prepared()
        budgets = CANDIDATES.get(classifier.device.torch.type, OTHER_CANDIDATES)
        wanted = {
            BATCH_SIZE: {value: value <= len(texts) for value in SIZES},
            TOKEN_BUDGET: {value: len(self._batches(by_post, value)) >= LEAST_BATCHES for value in budgets},
        }
        self._unfilled = {
            kind: next((value for value in values if value > min(values) and not values[value]), None)
            for kind, values in wanted.items()
        }
        self._full: dict[str, int] = {}
        self.tokens = sum(row.length for rows in by_post for row in rows)
        self.packed = classifier.packed
        #: Tokens of each batch with its padding, by size.
        self._padded = {
            size: [len(batch) * batch[-1].length for batch in self._cut(by_post, size)]
            for size in (Size(kind, value) for kind, values in wanted.items() for value in values)
            if size.value < (self._unfilled[size.kind] or math.inf)
        }
        #: Seconds and peak memory in each round, by size. Small batches go first: some allocators never give back.
        self._rounds_of: dict[Size, list[tuple[float, float | None]]] = {
            size: [] for size in sorted(self._padded, key=lambda size: max(self._padded[size]))
        }

    @property
    def steps(self) -> int:
        """How many sizes `run` yields, all rounds together."""
        return self._rounds * len(self._rounds_of)

    def run(self) -> Iterator[Size]:
        """Each size, before it is measured. Raises DeviceLost, or whatever a post brings about in the model."""
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
        """What was found for BATCH_SIZE or TOKEN_BUDGET."""
        full = self._full.get(kind)
        points = [
            self._measured(size, rounds)
            for size, rounds in sorted(self._rounds_of.items())
            if size.kind == kind and size.value < (full or math.inf) and rounds
        ]
        return Curve(points, full, self._unfilled[kind])

    def _measured(self, size: Size, rounds: Sequence[tuple[float, float | None]]) -> Measured:
        seconds = median(seconds for seconds, _ in rounds)
        return Measured(
            *size,
            seconds,
            len(self._texts) / seconds,
            self.tokens / seconds,
            1.0 if self.packed else self.tokens / sum(self._padded[size]),
            min((peak for _, peak in rounds if peak is not None), default=None),
        )

    def _measure(self, size: Size) -> tuple[float, float | None]:
        # Prepared anew: a post's rows are good for one pass, since they keep what comes of it.
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
        """Of sorted rows, each batch's longest times its rows within the budget, as far as one row alone is."""
        batches: list[list[Row]] = []
        for row in _by_length(by_post):
            if (
                not batches
                or (len(batches[-1]) + 1) * row.length > token_budget
                or len(batches[-1]) == self._settings.batch_rows
            ):
                batches.append([])
            batches[-1].append(row)
        return batches


def _by_length(by_post: Sequence[Sequence[Row]]) -> list[Row]:
    return sorted(chain.from_iterable(by_post), key=lambda row: row.length)


class Peak:
    """The most memory in use since this was made: on a GPU what torch allocated, on Linux all of this process."""

    def __init__(self, device: torch.device, engine: str) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda" and engine == "torch"
        self._on_host = False
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu":
            with suppress(AttributeError):  # not the GNU C library, which else keeps what was freed
                ctypes.CDLL(None).malloc_trim(0)
            with suppress(OSError):  # not Linux, or a container that does not let us
                CLEAR_REFS.write_text(RESET_PEAK)
                self._on_host = True

    def mb(self) -> float | None:
        """In 10^6 bytes."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device) / 1e6
        if self._on_host:
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024 / 1e6
        return None
