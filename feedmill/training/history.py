"""A training's history: steps, loss, evaluation, time and memory by epoch.

All of it is in the Trainer's log, which its checkpoints contain. A continued training thus knows
what came before.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import EarlyStoppingCallback, TrainerCallback

from feedmill.console import Report
from feedmill.training.distributed import highest
from feedmill.tuning.trials import MemoryMeter

#: Keys of the Trainer's log: a step's loss, the evaluation, and what `EpochLog` adds at the end of
#: an epoch.
LOSS = "loss"
EVALUATION_LOSS = "eval_log_loss"
EVALUATION_ACCURACY = "eval_accuracy"
EPOCH_SECONDS = "train_seconds"
EPOCH_POSTS = "train_posts"
EPOCH_MEMORY = "memory_bytes"

Entry = dict[str, Any]


class EpochSize(NamedTuple):
    """Posts of an epoch and of an optimization step. The last step of an epoch is usually
    incomplete.
    """

    rows: int
    effective_batch: int

    @property
    def steps_per_epoch(self) -> int:
        whole_steps, others = divmod(self.rows, self.effective_batch)
        if others:
            return whole_steps + 1
        return whole_steps

    def posts_until(self, step: int) -> int:
        """Return the posts of the first `step` steps."""
        epochs, other_steps = divmod(step, self.steps_per_epoch)
        posts_of_epochs = epochs * self.rows
        return posts_of_epochs + other_steps * self.effective_batch


class EpochLog(TrainerCallback):
    """Report each optimization step, and log the time, posts and memory of each epoch."""

    def __init__(self, report: Report, meter: MemoryMeter, epoch: EpochSize) -> None:
        self._report = report
        self._meter = meter
        self._epoch = epoch
        self._began_at = 0.0
        self._first_step = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._began_at = time.monotonic()
        self._first_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        losses = _values(LOSS, state.log_history)
        note = ""
        if losses:
            note = f", loss {losses[-1]:.3f}"
        self._report.advance(state.global_step, note)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        seconds = time.monotonic() - self._began_at
        posts_before = self._epoch.posts_until(self._first_step)
        posts = self._epoch.posts_until(state.global_step)
        entry = {
            "epoch": state.epoch,
            "step": state.global_step,
            EPOCH_SECONDS: seconds,
            EPOCH_POSTS: posts - posts_before,
            EPOCH_MEMORY: highest(self._meter.peak()),
        }
        state.log_history.append(entry)
        control.should_log = True  # so that the losses of this epoch are its own

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        metrics = others["metrics"]
        loss = metrics[EVALUATION_LOSS]
        accuracy = metrics[EVALUATION_ACCURACY]
        self._report.print(
            f"epoch {state.epoch:.3g}: evaluation loss {loss:.3f}, accuracy {accuracy:.3f}"
        )


class Patience(EarlyStoppingCallback):
    """Early stopping that counts the epochs before an interruption, too."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        super().on_train_begin(
            args,
            state,
            control,
            **kwargs,
        )  # type: ignore[no-untyped-call]
        self.early_stopping_patience_counter = epochs_without_gain(state.log_history)


def epochs_without_gain(history: Sequence[Entry]) -> int:
    """Return the number of evaluations since the best one."""
    losses = evaluation_losses(history)
    if not losses:
        return 0
    best = losses.index(min(losses))
    last = len(losses) - 1
    return last - best


def evaluation_losses(history: Sequence[Entry]) -> list[float]:
    return _values(EVALUATION_LOSS, history)


def _values(key: str, history: Sequence[Entry]) -> list[Any]:
    return [entry[key] for entry in history if key in entry]


def best_step(history: Sequence[Entry]) -> int | None:
    """Return the step of the best evaluation; None if there was none."""
    evaluations = [entry for entry in history if EVALUATION_LOSS in entry]
    if not evaluations:
        return None
    best = min(
        evaluations,
        key=lambda entry: float(entry[EVALUATION_LOSS]),
    )
    return int(best["step"])


def summary(history: Sequence[Entry]) -> Entry:
    """Return the part of training.json that the log tells: epochs, their sums, and the losses by
    step.
    """
    epochs = _epochs(history)
    seconds = sum(epoch["seconds"] for epoch in epochs)
    posts = sum(epoch["posts"] for epoch in epochs)
    peaks = _values(EPOCH_MEMORY, history)
    measured_peaks = [peak for peak in peaks if peak is not None]
    return {
        "training_seconds": seconds,
        "samples_per_s": posts / seconds if seconds else None,
        "peak_memory_bytes": max(measured_peaks, default=None),
        "epochs": epochs,
        "curve": [entry for entry in history if LOSS in entry],
    }


def _epochs(history: Sequence[Entry]) -> list[Entry]:
    epochs = []
    first_step = 0
    for entry in history:
        if EPOCH_SECONDS not in entry:
            continue
        step = entry["step"]
        seconds = entry[EPOCH_SECONDS]
        posts = entry[EPOCH_POSTS]
        epoch = {
            "epoch": entry["epoch"],
            "step": step,
            "posts": posts,
            "loss": _mean_loss(history, first_step, step),
            "evaluation": _evaluation(history, step),
            "seconds": seconds,
            "posts_per_s": posts / seconds if seconds else None,
        }
        epochs.append(epoch)
        first_step = step
    return epochs


def _mean_loss(
    history: Sequence[Entry], first_step: int, last_step: int
) -> float | None:
    """Return the mean loss of the steps after the first up to the last.

    Each entry is a mean since the one before.
    """
    total = 0.0
    before = first_step
    for entry in history:
        if LOSS not in entry:
            continue
        step = entry["step"]
        if first_step < step <= last_step:
            total += entry[LOSS] * (step - before)
            before = step
    steps = before - first_step
    if steps <= 0:
        return None
    return total / steps


def _evaluation(history: Sequence[Entry], step: int) -> Entry | None:
    for entry in history:
        if EVALUATION_LOSS in entry and entry["step"] == step:
            return {
                "loss": entry[EVALUATION_LOSS],
                "accuracy": entry[EVALUATION_ACCURACY],
            }
    return None
