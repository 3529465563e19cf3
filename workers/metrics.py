"""A worker's figures for Prometheus, and whether it is well: read off its pipeline when somebody asks.

On the hot path `Statistics` adds up numbers; all else happens here, on the threads of the server that answers.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from shared.metrics import Figure, Kind, RedisFigures, Sample, Server, Sum, serve
from shared.settings import Settings
from workers.device import Device

if TYPE_CHECKING:
    from workers.pipeline import Pipeline

#: Seconds between two turns of the consumer's loop that are noted.
TURN = 1.0
#: Seconds without a turn after which Redis is asked whether it is what the consumer waits for.
QUIET = 10.0
#: Seconds after which a consumer that has not turned, while Redis answers, counts as stuck. After an outage Celery
#: waits for up to 30 s before it connects again.
STUCK = 120.0

INFO = Figure(
    "feedmill_worker_info",
    Kind.GAUGE,
    "1, with what the worker is.",
    ("node", "model", "queue", "device", "dtype", "classifier"),
)
POSTS = Figure(
    "feedmill_worker_posts_total",
    Kind.COUNTER,
    "Posts that this worker classified, answered with the stored result, or failed (dead letters).",
    ("state",),
)
BATCH_ROWS = Figure("feedmill_worker_batch_rows", Kind.HISTOGRAM, "Rows of a micro-batch.")
BATCH_TOKENS = Figure(
    "feedmill_worker_batch_tokens",
    Kind.HISTOGRAM,
    "Tokens of a micro-batch, padding included: what the token budget bounds.",
)
BATCH_PADDING = Figure(
    "feedmill_worker_batch_padding_ratio",
    Kind.HISTOGRAM,
    "Share of a padded micro-batch that is padding. (A CPU that packs its rows computes nothing for it.)",
)
FORWARD = Figure(
    "feedmill_worker_forward_seconds",
    Kind.HISTOGRAM,
    "Duration of a forward pass. On a CPU several run side by side.",
)
ROWS = Figure("feedmill_worker_rows_total", Kind.COUNTER, "Rows that went through a forward pass.")
TOKENS = Figure("feedmill_worker_tokens_total", Kind.COUNTER, "Tokens that went through a forward pass, no padding.")
PADDED_TOKENS = Figure(
    "feedmill_worker_padded_tokens_total", Kind.COUNTER, "Tokens that padded micro-batches would have held."
)
BUSY = Figure(
    "feedmill_worker_device_busy_seconds_total",
    Kind.COUNTER,
    "Time in which the whole device computed: its rate is the share of the time that the device is busy.",
)
MEMORY = Figure(
    "feedmill_worker_device_memory_bytes",
    Kind.GAUGE,
    "Memory of the GPU: in tensors (allocated), held by torch (reserved), the device's (total); absent on a CPU, "
    "where process_resident_memory_bytes tells what is used.",
    ("state",),
)
QUEUE_WAIT = Figure(
    "feedmill_worker_queue_wait_seconds",
    Kind.SUMMARY,
    "Time from a message's sending until this worker fetched it.",
)
LAG = Figure(
    "feedmill_results_lag_seconds",
    Kind.HISTOGRAM,
    "Time from a message's sending until all of its results are stored, by message that this worker finished.",
)
HELD = Figure(
    "feedmill_worker_messages_held",
    Kind.GAUGE,
    "Messages that this worker has taken from its queue and not finished, without those for later.",
    ("queue",),
)
WAITING = Figure("feedmill_worker_rows_waiting", Kind.GAUGE, "Rows in this worker that wait for the device.")
OLDEST_ROW = Figure(
    "feedmill_worker_oldest_row_seconds", Kind.GAUGE, "Time that the oldest of those rows has waited for the device."
)
BUDGET = Figure("feedmill_worker_token_budget_tokens", Kind.GAUGE, "Tokens that a micro-batch may hold.")

FIGURES = (
    INFO, POSTS, ROWS, TOKENS, PADDED_TOKENS, BATCH_ROWS, BATCH_TOKENS, BATCH_PADDING, FORWARD, BUSY, MEMORY, BUDGET,
    HELD, WAITING, OLDEST_ROW, QUEUE_WAIT, LAG,
)  # fmt: skip


class WorkerMetrics:
    """Tells how a worker fares, from before its model is loaded until it ends.

    node: the worker's name.
    """

    def __init__(self, settings: Settings, node: str) -> None:
        self._settings = settings
        self._node = node
        self._redis = RedisFigures(settings)
        self._loaded: tuple[Pipeline, Callable[[], int]] | None = None
        #: When the consumer's loop last turned, or was seen to wait for Redis (monotonic seconds); None before it runs.
        self._turned: float | None = None

    def serve(self) -> Server:
        """Answer whoever asks, from now on. Raises UserError."""
        return serve(self._settings, [self._redis.samples, self.samples], self.unhealthy, self.unready)

    def loaded(self, pipeline: "Pipeline", held: Callable[[], int]) -> None:
        """The model is loaded: from now on there is something to tell. held: messages that the worker has in hand."""
        self._loaded = pipeline, held

    def turn(self) -> None:
        """The consumer's loop has turned, or can do nothing about it."""
        self._turned = time.monotonic()

    def samples(self) -> Iterator[Sample]:
        if self._loaded is None:
            return
        pipeline, held = self._loaded
        classifier, settings = pipeline.classifier, self._settings
        device, model = classifier.device, classifier.weights.name
        precision = str(device.dtype).removeprefix("torch.")
        yield Sample(INFO, 1.0, (self._node, model, settings.queue, device.name, precision, classifier.kind))
        statistics = pipeline.statistics
        totals = statistics.totals
        for state, count in (("classified", totals.posts), ("answered", totals.answered), ("failed", totals.failed)):
            yield Sample(POSTS, count, (state,))
        yield Sample(ROWS, totals.rows)
        yield Sample(TOKENS, totals.tokens)
        yield Sample(PADDED_TOKENS, totals.padded_tokens)
        yield Sample(BATCH_ROWS, statistics.batch_rows)
        yield Sample(BATCH_TOKENS, statistics.batch_tokens)
        yield Sample(BATCH_PADDING, statistics.padding)
        yield Sample(FORWARD, statistics.forward_seconds)
        yield Sample(BUSY, totals.device_seconds)
        for state, size in _memory(device).items():
            yield Sample(MEMORY, size, (state,))
        yield Sample(BUDGET, pipeline.budget.tokens)
        yield Sample(HELD, held(), (settings.queue,))
        yield Sample(WAITING, pipeline.waiting())
        yield Sample(OLDEST_ROW, pipeline.oldest_age())
        yield Sample(QUEUE_WAIT, Sum(totals.messages, totals.queued_seconds))
        yield Sample(LAG, statistics.lag)

    def unhealthy(self) -> list[str]:
        """What only a new process can mend. That Redis is away is no such thing."""
        if self._loaded and (failure := self._loaded[0].failure):
            return [f"a thread died: {failure}"]
        quiet = 0.0 if self._turned is None else time.monotonic() - self._turned
        if quiet > QUIET and self._redis.away():
            self.turn()
        elif quiet > STUCK + self._settings.drain:  # nor does the loop turn while the worker drains
            return [f"the consumer has not come round for {quiet:.0f} s"]
        return []

    def unready(self) -> list[str]:
        """Why it would take no message now."""
        if self._loaded is None:
            return ["the model is being loaded"]
        if self._turned is None:
            return ["it is not connected to the queue yet"]
        return self.unhealthy() or self._redis.away()


def _memory(device: Device) -> dict[str, int]:
    """Bytes, as torch knows them: asking its allocator makes no stream wait."""
    if device.torch.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device.torch),
            "reserved": torch.cuda.memory_reserved(device.torch),
            "total": torch.cuda.get_device_properties(device.torch).total_memory,
        }
    if device.torch.type == "mps":
        return {
            "allocated": torch.mps.current_allocated_memory(),
            "total": torch.mps.recommended_max_memory(),
        }
    return {}
