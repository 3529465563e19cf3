"""Prometheus metrics and health of a worker, read from its pipeline on request.

The pipeline's threads only add numbers to `Statistics`. Everything else runs on the threads of the metrics server.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from shared.metrics import MetricSpec, MetricsServer, MetricType, RedisMetrics, Sample, Sum, serve
from shared.settings import Settings
from workers.models.device import Device

if TYPE_CHECKING:
    from workers.pipeline.pipeline import Pipeline

#: Seconds between two recorded iterations of the consumer's event loop.
TURN_INTERVAL_S = 1.0
#: Seconds without an iteration after which the health check tests whether the consumer is waiting for Redis.
REDIS_CHECK_AFTER_S = 10.0
#: Seconds without an iteration, while Redis answers, after which the consumer counts as stuck. After an outage, Celery
#: waits up to 30 s before it reconnects.
STUCK_AFTER_S = 120.0

INFO = MetricSpec(
    "feedmill_worker_info",
    MetricType.GAUGE,
    "Always 1; the labels describe the worker.",
    ("node", "model", "queue", "device", "dtype", "classifier"),
)
POSTS = MetricSpec(
    "feedmill_worker_posts_total",
    MetricType.COUNTER,
    "Posts by state: classified, answered (with a stored result) or failed (dead letters).",
    ("state",),
)
BATCH_ROWS = MetricSpec("feedmill_worker_batch_rows", MetricType.HISTOGRAM, "Rows per micro-batch.")
BATCH_TOKENS = MetricSpec(
    "feedmill_worker_batch_tokens",
    MetricType.HISTOGRAM,
    "Tokens per micro-batch including padding, as limited by the token budget.",
)
BATCH_PADDING = MetricSpec(
    "feedmill_worker_batch_padding_ratio",
    MetricType.HISTOGRAM,
    "Share of padding in a padded micro-batch. A CPU that packs rows does not compute the padding.",
)
FORWARD = MetricSpec(
    "feedmill_worker_forward_seconds",
    MetricType.HISTOGRAM,
    "Duration of a forward pass. On a CPU, several run in parallel.",
)
ROWS = MetricSpec("feedmill_worker_rows_total", MetricType.COUNTER, "Rows computed in forward passes.")
TOKENS = MetricSpec(
    "feedmill_worker_tokens_total", MetricType.COUNTER, "Tokens computed in forward passes, without padding."
)
PADDED_TOKENS = MetricSpec(
    "feedmill_worker_padded_tokens_total", MetricType.COUNTER, "Tokens of all micro-batches if padded."
)
BUSY = MetricSpec(
    "feedmill_worker_device_busy_seconds_total",
    MetricType.COUNTER,
    "Time that the whole device was busy. Its rate is the device's utilization.",
)
MEMORY = MetricSpec(
    "feedmill_worker_device_memory_bytes",
    MetricType.GAUGE,
    "GPU memory by state: allocated (in tensors), reserved (by torch) or total. Absent on a CPU; see "
    "process_resident_memory_bytes there.",
    ("state",),
)
QUEUE_WAIT = MetricSpec(
    "feedmill_worker_queue_wait_seconds",
    MetricType.SUMMARY,
    "Time from sending a message until this worker fetched it.",
)
LAG = MetricSpec(
    "feedmill_results_lag_seconds",
    MetricType.HISTOGRAM,
    "Time from sending a message until all of its results are stored, for messages that this worker finished.",
)
HELD = MetricSpec(
    "feedmill_worker_messages_held",
    MetricType.GAUGE,
    "Messages in flight: fetched and not finished by this worker, excluding those with a future ETA.",
    ("queue",),
)
WAITING = MetricSpec("feedmill_worker_rows_waiting", MetricType.GAUGE, "Rows waiting for the device in this worker.")
OLDEST_ROW = MetricSpec(
    "feedmill_worker_oldest_row_seconds",
    MetricType.GAUGE,
    "Time that the oldest waiting row has waited for the device.",
)
BUDGET = MetricSpec(
    "feedmill_worker_token_budget_tokens", MetricType.GAUGE, "Token budget: maximum tokens of a micro-batch."
)

FIGURES = (
    INFO, POSTS, ROWS, TOKENS, PADDED_TOKENS, BATCH_ROWS, BATCH_TOKENS, BATCH_PADDING, FORWARD, BUSY, MEMORY, BUDGET,
    HELD, WAITING, OLDEST_ROW, QUEUE_WAIT, LAG,
)  # fmt: skip


class WorkerMetrics:
    """A worker's metrics and health, from before its model is loaded until it exits.

    node: the worker's node name.
    """

    def __init__(self, settings: Settings, node: str) -> None:
        self._settings = settings
        self._node = node
        self._redis = RedisMetrics(settings)
        self._loaded: tuple[Pipeline, Callable[[], int]] | None = None
        #: Time of the event loop's last iteration or of a wait for Redis, in monotonic seconds; None at first.
        self._turned: float | None = None

    def serve(self) -> MetricsServer:
        """Start the metrics server. Raises UserError."""
        return serve(self._settings, [self._redis.samples, self.samples], self.unhealthy, self.unready)

    def loaded(self, pipeline: "Pipeline", held: Callable[[], int]) -> None:
        """Provide the pipeline once the model is loaded. held: returns the number of messages in flight."""
        self._loaded = pipeline, held

    def heartbeat(self) -> None:
        """Record that the consumer's event loop is running, or waits for an unreachable Redis."""
        self._turned = time.monotonic()

    def samples(self) -> Iterator[Sample]:
        """Yield the current value of every metric. Yields nothing until the model is loaded."""
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
        """Return failures that need a restart. An unreachable Redis is not one of them."""
        if self._loaded and (failure := self._loaded[0].failure):
            return [f"a thread died: {failure}"]
        quiet = 0.0 if self._turned is None else time.monotonic() - self._turned
        if quiet > REDIS_CHECK_AFTER_S and self._redis.problems():
            self.heartbeat()
        elif quiet > STUCK_AFTER_S + self._settings.drain:  # the loop also stands still while the worker drains
            return [f"the consumer's event loop has not run for {quiet:.0f} s"]
        return []

    def unready(self) -> list[str]:
        """Return why the worker cannot take messages now; empty if it can."""
        if self._loaded is None:
            return ["the model is being loaded"]
        if self._turned is None:
            return ["not connected to the queue yet"]
        return self.unhealthy() or self._redis.problems()


def pipeline_status(pipeline: "Pipeline") -> dict[str, Any]:
    """Return the pipeline's part of `inspect stats` and `feedmill status`."""
    totals, classifier = pipeline.statistics.totals, pipeline.classifier
    return asdict(totals) | {
        "device": str(classifier.device),
        "model": classifier.weights.name,
        "weights": classifier.weights.sha256,
        "token_budget": pipeline.budget.tokens,
        "padding_efficiency": totals.tokens / totals.padded_tokens if totals.padded_tokens else 0.0,
        "recent": asdict(pipeline.statistics.recent(time.monotonic())),
        "rows_waiting": pipeline.waiting(),
        "oldest_row_seconds": pipeline.oldest_age(),
    }


def _memory(device: Device) -> dict[str, int]:
    """Return the GPU's memory in bytes, by state. Reading torch's allocator does not synchronize with the device."""
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
