"""Trials: the same posts computed in batches of one size, with every lane of the device.

Two orders are compared. In *arrival order*, a batch is the next posts as they came, as in a loop
over a file. In *length order*, the window cuts micro-batches within a token budget, as a worker
does. Preparing the rows is not timed: the tokenizer works beside the device.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch

from feedmill.shared import linux
from feedmill.shared.errors import DeviceFull
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier, Row
from feedmill.workers.pipeline.calibration import (
    CANDIDATES,
    OTHER_CANDIDATES,
    computes_here,
)
from feedmill.workers.pipeline.window import Window

#: Seconds that a trial takes about, and rounds of all trials. A size's best round counts: other
#: processes on a shared machine can only slow it down.
TRIAL_S = 1.5
ROUNDS = 2
#: Posts of the first estimate of the model's speed.
PILOT_POSTS = 16
MEGABYTE = 2**20
#: Seed of the sample, fixed so that two runs measure the same posts.
SAMPLE_SEED = 7

Order = Literal["arrival", "length"]
Batches = Iterable[Sequence[Row]]


@dataclass(frozen=True)
class Size:
    """A batch size to try: posts a batch in arrival order, or a token budget in length order."""

    order: Order
    number: int

    @property
    def unit(self) -> str:
        return "posts" if self.order == "arrival" else "tokens"

    def __str__(self) -> str:
        return f"{self.number:,} {self.unit} a batch"


@dataclass(frozen=True)
class Trial:
    """The measurement of one size.

    tokens: real ones. padded_tokens: those of padded batches; a packed model computes none of the
    padding.
    """

    size: Size
    posts: int
    batches: int
    tokens: int
    padded_tokens: int
    seconds: float
    #: Batches that the device computes at a time.
    lanes: int
    #: Seconds of CPU time of all lanes, if the CPU computes; else those that passed.
    busy_seconds: float
    #: Highest memory during the trial: of the device on a GPU, resident memory of the process on a
    #: CPU.
    memory_bytes: int | None

    @property
    def seconds_per_batch(self) -> float:
        """Seconds from a batch's start to its end."""
        seconds_of_lanes = self.lanes * self.seconds
        return seconds_of_lanes / self.batches

    @property
    def posts_per_s(self) -> float:
        return self.posts / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def rate(self) -> float:
        """Tokens per second of computing. A busy machine slows it less than `tokens_per_s`."""
        return self.tokens / self.busy_seconds

    @property
    def memory_mb(self) -> float | None:
        return in_megabytes(self.memory_bytes)

    @property
    def padding_efficiency(self) -> float:
        """Share of real tokens in padded batches."""
        return self.tokens / self.padded_tokens


def in_megabytes(count: int | None) -> float | None:
    if count is None:
        return None
    return count / MEGABYTE


@dataclass(frozen=True)
class Unmeasured:
    """A size, a rung or a precision without a measurement, and why."""

    what: str
    reason: str
    size: Size | None = None
    #: True if it ran out of memory.
    is_out_of_memory: bool = False


class Sample:
    """Posts as rows, prepared once: as many as all trials of a size need, in the order of the
    file.

    texts: of all posts that may be used. Raises RequestRefused if the model cannot serve the
    configured labels.
    """

    def __init__(self, classifier: Classifier, texts: Sequence[str]) -> None:
        self._classifier = classifier
        self._texts = texts
        self._label_set = classifier.label_set(ClassifyOptions())
        #: The rows of each post.
        self.posts: list[list[Row]] = []

    def extend(self, count: int) -> None:
        """Prepare posts until there are `count`, or all."""
        texts = self._texts[len(self.posts) : count]
        if texts:
            posts = self._classifier.prepare(texts, self._label_set)
            self.posts.extend(posts)

    @property
    def tokens(self) -> int:
        return sum(row.length for rows in self.posts for row in rows)

    @property
    def tokens_per_post(self) -> float:
        return self.tokens / len(self.posts)

    @property
    def is_whole(self) -> bool:
        """True if there are no more posts in the file."""
        return len(self.posts) == len(self._texts)


def sampled(texts: Sequence[str]) -> list[str]:
    """Return the texts in a random but repeatable order: a file may be sorted by length, topic or
    date.
    """
    shuffled = list(texts)
    random.Random(SAMPLE_SEED).shuffle(shuffled)
    return shuffled


def budgets_of(classifier: Classifier) -> list[Size]:
    """Return the token budgets to try on the classifier's device."""
    device_type = classifier.device.torch.type
    candidates = CANDIDATES.get(device_type, OTHER_CANDIDATES)
    return [Size("length", budget) for budget in candidates]


class Bench:
    """A loaded model, its sample of posts, and its measurements."""

    def __init__(
        self, classifier: Classifier, settings: Settings, texts: Sequence[str]
    ) -> None:
        self.classifier = classifier
        self.settings = settings
        self.lanes = classifier.device.lanes
        self.sample = Sample(classifier, texts)
        self._clock = self._busy_clock()

    def prepare(self, sizes: Sequence[Size]) -> None:
        """Prepare as many posts as the sizes need to fill a batch of each lane and about TRIAL_S
        seconds.
        """
        sample = self.sample
        sample.extend(PILOT_POSTS)
        pilot = Size("arrival", PILOT_POSTS // 2)
        # Warm-up: libraries allocate and choose kernels in the first pass.
        self.measure(pilot)
        rate = self.measure(pilot).posts_per_s
        sample.extend(round(rate * TRIAL_S))
        while not sample.is_whole:
            if all(self.is_enough(size) for size in sizes):
                return
            sample.extend(len(sample.posts) + PILOT_POSTS)

    def posts_needed(self, size: Size) -> int:
        """Return how many posts fill a batch of this size in each lane, about."""
        posts_per_batch = float(size.number)
        if size.order == "length":
            posts_per_batch /= self.sample.tokens_per_post
        posts = round(self.lanes * posts_per_batch)
        return max(1, posts)

    def is_enough(self, size: Size) -> bool:
        """Return whether the sample fills a batch of this size in each lane."""
        if size.order == "length":
            tokens_of_lanes = self.lanes * size.number
            return self.sample.tokens >= tokens_of_lanes
        return len(self.sample.posts) >= size.number

    def measure(self, size: Size) -> Trial:
        """Compute the sample once in batches of a size. Raises DeviceFull."""
        counts = _Counts(self.classifier)
        batches = counts.counted(self.batches(size))
        meter = MemoryMeter(self.classifier.device.torch)
        busy_since = self._clock()
        began = time.perf_counter()
        compute(self.classifier, batches, self.lanes)
        seconds = time.perf_counter() - began
        busy_seconds = self._clock() - busy_since
        return Trial(
            size=size,
            posts=len(self.sample.posts),
            batches=counts.batches,
            tokens=counts.tokens,
            padded_tokens=counts.padded_tokens,
            seconds=seconds,
            lanes=self.lanes,
            busy_seconds=busy_seconds,
            memory_bytes=meter.peak(),
        )

    def batches(self, size: Size) -> Iterator[Sequence[Row]]:
        if size.order == "arrival":
            return in_arrival_order(self.sample.posts, size.number)
        rows = list(chain.from_iterable(self.sample.posts))
        return in_length_order(
            rows,
            size.number,
            self.classifier,
            self.settings,
        )

    def _busy_clock(self) -> Callable[[], float]:
        """Return a clock that a busy machine does not disturb, if there is one: see
        `calibration.computes_here`.
        """
        if computes_here(self.classifier, self.settings):
            return time.process_time
        return time.perf_counter


def in_arrival_order(
    posts: Sequence[Sequence[Row]], number: int
) -> Iterator[Sequence[Row]]:
    """Yield the rows of the next `number` posts, as they came."""
    for start in range(0, len(posts), number):
        batch = posts[start : start + number]
        yield list(chain.from_iterable(batch))


def in_length_order(
    rows: Sequence[Row], budget: int, classifier: Classifier, settings: Settings
) -> Iterator[Sequence[Row]]:
    """Yield micro-batches as a worker's window cuts them, refilled after each."""
    window: Window[Row] = Window(time.monotonic, classifier.device.shapes)
    remaining = iter(rows)
    while True:
        for row in remaining:
            window.add(row)
            if len(window) >= settings.window_rows:
                break
        if not window:
            return
        yield window.take(budget, settings.batch_rows)


def compute(
    classifier: Classifier, batches: Iterator[Sequence[Row]], lanes: int
) -> None:
    """Compute all batches, with a thread for each lane.

    Raises the first error of a lane, such as DeviceFull.

    A batch is finished one batch late, so that a GPU has its next batch before this thread waits
    for the last one.
    """
    taking = threading.Lock()
    is_over = threading.Event()

    def next_batch() -> Sequence[Row] | None:
        with taking:
            if is_over.is_set():
                return None
            return next(batches, None)

    def lane() -> None:
        classifier.device.take_share(lanes)
        unfinished: tuple[Sequence[Row], Any] | None = None
        try:
            while batch := next_batch():
                outputs = classifier.forward(batch)
                if unfinished:
                    classifier.finish(*unfinished)
                unfinished = batch, outputs
            if unfinished:
                classifier.finish(*unfinished)
        finally:
            is_over.set()  # no lane starts a batch after an error, or after the last batch

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(lanes) as pool:
            computations = [pool.submit(lane) for _ in range(lanes)]
    finally:
        torch.set_num_threads(threads)
    for computation in computations:
        error = computation.exception()
        if error is not None:
            raise plain(error)


def plain(error: BaseException) -> BaseException:
    """Return an out-of-memory error without its frames, which keep the tensors of the failed pass
    in memory.
    """
    if isinstance(error, DeviceFull):
        return DeviceFull(str(error))
    return error


class MemoryMeter:
    """The highest memory of a device since the meter was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._is_reset = True
        else:
            linux.return_freed_memory()
            self._is_reset = device.type == "cpu" and linux.reset_peak_memory()

    def peak(self) -> int | None:
        """Return the bytes; None if the system does not tell."""
        if not self._is_reset:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return linux.peak_memory()


class _Counts:
    """Counts of the batches that pass through."""

    def __init__(self, classifier: Classifier) -> None:
        self._shapes = classifier.device.shapes
        self.batches = 0
        self.tokens = 0
        self.padded_tokens = 0

    def counted(self, batches: Batches) -> Iterator[Sequence[Row]]:
        for batch in batches:
            lengths = [row.length for row in batch]
            self.batches += 1
            self.tokens += sum(lengths)
            self.padded_tokens += self._shapes.tokens(len(batch), max(lengths))
            yield batch
