"""Prometheus metrics and health of a worker, read from its pipeline on request.

The pipeline's threads only add numbers to `Statistics`. Everything else runs on the threads of the
metrics server.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from feedmill.shared.metrics import ProcessMetrics, Values, declare
from feedmill.shared.settings import Settings
from feedmill.shared.tracing import WORKER_SERVICE
from feedmill.workers.models.device import Device

if TYPE_CHECKING:
    from feedmill.workers.pipeline.pipeline import Pipeline

#: Seconds between two recorded iterations of the consumer's event loop.
TURN_INTERVAL_S = 1.0
#: Seconds without an iteration or a failed connection, while Redis answers, after which the
#: consumer counts as stuck. After an outage, Celery waits up to 30 s before it reconnects.
STUCK_AFTER_S = 120.0


METRICS = declare(
    gauge={
        "feedmill_worker_info{node,model,queue,device,dtype,classifier}": (
            "Always 1; the labels describe the worker."
        ),
        "feedmill_worker_device_memory_bytes{state}": "GPU memory by state: allocated (in "
        "tensors), reserved (by torch) or total. Absent on a CPU; see "
        "process_resident_memory_bytes there.",
        "feedmill_worker_token_budget_tokens": "Token budget: maximum tokens of a micro-batch.",
        "feedmill_worker_messages_held{queue}": "Messages in flight: fetched and not finished by "
        "this worker, excluding those with a future ETA.",
        "feedmill_worker_rows_waiting": "Rows waiting for the device in this worker.",
        "feedmill_worker_oldest_row_seconds": (
            "Time that the oldest waiting row has waited for the device."
        ),
    },
    counter={
        "feedmill_worker_posts_total{state}": "Posts by state: classified, answered (with a "
        "stored result) or failed (dead letters).",
        "feedmill_worker_rows_total": "Rows computed in forward passes.",
        "feedmill_worker_tokens_total": "Tokens computed in forward passes, without padding.",
        "feedmill_worker_padded_tokens_total": "Tokens of all micro-batches if padded.",
        "feedmill_worker_device_busy_seconds_total": "Time that the whole device was busy. Its "
        "rate is the device's utilization.",
    },
    histogram={
        "feedmill_worker_batch_rows": "Rows per micro-batch.",
        "feedmill_worker_batch_tokens": (
            "Tokens per micro-batch including padding, as limited by the token budget."
        ),
        "feedmill_worker_batch_padding_ratio": "Share of padding in a padded micro-batch. A CPU "
        "that packs rows does not compute the padding.",
        "feedmill_worker_forward_seconds": (
            "Duration of a forward pass. On a CPU, several run in parallel."
        ),
        "feedmill_results_lag_seconds": "Time from sending a message until all of its results are "
        "stored, for messages that this worker finished.",
    },
    summary={
        "feedmill_worker_queue_wait_seconds": (
            "Time from sending a message until this worker fetched it."
        )
    },
)


class _Loaded(NamedTuple):
    """The pipeline of a loaded model, and a function that counts the messages in flight."""

    pipeline: "Pipeline"
    held: Callable[[], int]


class WorkerMetrics(ProcessMetrics):
    """A worker's metrics and health, from before its model is loaded until it exits.

    node: the worker's node name.
    """

    metrics = METRICS
    service = WORKER_SERVICE

    def __init__(self, settings: Settings, node: str) -> None:
        super().__init__(settings)
        self._node = node
        self._loaded: _Loaded | None = None
        #: Time of the event loop's last iteration, in monotonic seconds; None at first.
        self._last_turn: float | None = None
        #: Time at which the consumer last failed to reach Redis, in monotonic seconds.
        self._last_outage = -math.inf

    def loaded(self, pipeline: "Pipeline", held: Callable[[], int]) -> None:
        """Provide the pipeline once the model is loaded. held: returns the number of messages in
        flight.
        """
        self._loaded = _Loaded(pipeline, held)

    def heartbeat(self) -> None:
        """Record that the consumer's event loop is running."""
        self._last_turn = time.monotonic()

    def redis_away(self) -> None:
        """Record that the consumer cannot reach Redis, for which its event loop waits."""
        self._last_outage = time.monotonic()

    def values(self) -> Values:
        """Return the current value of every metric; nothing until the model is loaded."""
        if self._loaded is None:
            return {}
        pipeline, held = self._loaded
        queue = self._settings.queue
        classifier = pipeline.classifier
        statistics = pipeline.statistics
        totals = pipeline.statistics.totals
        device = classifier.device
        model = classifier.weights.name
        precision = str(device.dtype).removeprefix("torch.")
        return {
            "feedmill_worker_info": {
                (self._node, model, queue, device.name, precision, classifier.kind): 1
            },
            "feedmill_worker_device_memory_bytes": _memory(device),
            "feedmill_worker_token_budget_tokens": pipeline.backlog.loaded.budget,
            "feedmill_worker_messages_held": {queue: held()},
            "feedmill_worker_rows_waiting": pipeline.waiting(),
            "feedmill_worker_oldest_row_seconds": pipeline.backlog.oldest_age(),
            "feedmill_worker_posts_total": {
                "classified": totals.posts,
                "answered": totals.answered,
                "failed": totals.failed,
            },
            "feedmill_worker_rows_total": totals.rows,
            "feedmill_worker_tokens_total": totals.tokens,
            "feedmill_worker_padded_tokens_total": totals.padded_tokens,
            "feedmill_worker_device_busy_seconds_total": totals.device_seconds,
            "feedmill_worker_batch_rows": statistics.batch_rows,
            "feedmill_worker_batch_tokens": statistics.batch_tokens,
            "feedmill_worker_batch_padding_ratio": statistics.padding,
            "feedmill_worker_forward_seconds": statistics.forward_seconds,
            "feedmill_results_lag_seconds": statistics.lag,
            "feedmill_worker_queue_wait_seconds": (
                totals.messages,
                totals.queued_seconds,
            ),
        }

    def unhealthy(self) -> Sequence[str]:
        """List a dead thread, or else a stuck event loop. Waiting for Redis is not stuck."""
        return self._dead_thread() or self._stuck_loop()

    def _dead_thread(self) -> Sequence[str]:
        if self._loaded is None or not self._loaded.pipeline.failure:
            return []
        return [f"a thread died: {self._loaded.pipeline.failure}"]

    def _stuck_loop(self) -> Sequence[str]:
        if self._last_turn is None:
            return []
        last_sign = max(self._last_turn, self._last_outage)
        quiet_s = time.monotonic() - last_sign
        # the loop also stands still while the worker drains
        stuck_after_s = STUCK_AFTER_S + self._settings.drain
        if quiet_s <= stuck_after_s or super().unready():
            return []
        return [f"the consumer's event loop has not run for {quiet_s:.0f} s"]

    def unready(self) -> Sequence[str]:
        if self._loaded is None:
            return ["the model is being loaded"]
        if self._last_turn is None:
            return ["not connected to the queue yet"]
        return self.unhealthy() or super().unready()


def pipeline_status(pipeline: "Pipeline") -> dict[str, Any]:
    """Return the pipeline's part of `inspect stats` and `feedmill status`."""
    totals = pipeline.statistics.totals
    recent = pipeline.statistics.recent(time.monotonic())
    classifier = pipeline.classifier
    padding_efficiency = 0.0
    if totals.padded_tokens:
        padding_efficiency = totals.tokens / totals.padded_tokens
    return asdict(totals) | {
        "device": str(classifier.device),
        "model": classifier.weights.name,
        "weights": classifier.weights.sha256,
        "token_budget": pipeline.backlog.loaded.budget,
        "padding_efficiency": padding_efficiency,
        "recent": asdict(recent),
        "rows_waiting": pipeline.waiting(),
        "oldest_row_seconds": pipeline.backlog.oldest_age(),
    }


def _memory(device: Device) -> dict[str, int]:
    """Return the GPU's memory in bytes, by state.

    Reading torch's allocator does not synchronize with the device.
    """
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
