"""Measure a model's accuracy, calibration and throughput on posts with known labels.

The metrics follow scikit-learn with zero_division=0, except that the macro-F1 ignores labels without a true example.
Posts go through the worker's pipeline, so the throughput is a worker's. Needs torch, which only workers have.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from feedmill.local_model import explain_refusals
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post, PostError
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import unusable
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.calibration import calibrate

#: Bins of the calibration curve.
NUM_BINS = 10

Track = Callable[[Iterable[tuple[Post, Outcome]], int], Iterable[tuple[Post, Outcome]]]
Counts = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class LabelFigures(NamedTuple):
    """Precision, recall and F1 of one label (0 to 1; 0 instead of a division by zero), and its number of true posts."""

    precision: float
    recall: float
    f1: float
    support: int


class Evaluation:
    """Metrics of a confusion matrix. confusion: number of posts by [true label, predicted label], not all 0."""

    def __init__(self, labels: Sequence[str], confusion: Counts) -> None:
        self.labels, self.confusion = tuple(labels), confusion

    @classmethod
    def of(cls, labels: Sequence[str], pairs: Iterable[tuple[str, str]]) -> "Evaluation":
        """Count pairs of true and predicted label, one per post; at least one, with labels that are in `labels`."""
        place = {label: number for number, label in enumerate(labels)}
        confusion = np.zeros((len(place), len(place)), np.int64)
        for truth, predicted in pairs:
            confusion[place[truth], place[predicted]] += 1
        return cls(labels, confusion)

    @property
    def posts(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Return the share of posts whose predicted label is the true one."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def macro_f1(self) -> float:
        """Return the mean F1 of the labels that have a true example."""
        return float(np.mean([figures.f1 for figures in self.by_label().values() if figures.support]))

    def by_label(self) -> dict[str, LabelFigures]:
        """Return each label's metrics, in the order of `labels`."""
        right, support, predicted = np.diag(self.confusion), self.confusion.sum(1), self.confusion.sum(0)
        precision, recall = right / np.maximum(predicted, 1), right / np.maximum(support, 1)
        f1 = 2 * right / np.maximum(support + predicted, 1)
        columns = (precision.tolist(), recall.tolist(), f1.tolist(), support.tolist())
        return {label: LabelFigures(*figures) for label, *figures in zip(self.labels, *columns, strict=True)}

    def summary(self, left_out: int) -> dict[str, Any]:
        """Return the metrics as a JSON object. left_out: number of posts without a known true label."""
        return {
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "posts": self.posts,
            "left_out": left_out,
            "labels": {label: figures._asdict() for label, figures in self.by_label().items()},
            "confusion": self.confusion.tolist(),
        }


class Bin(NamedTuple):
    """A calibration bin: the posts whose best score lies in the same tenth of the range 0 to 1.

    Holds their mean score (confidence) and the share labelled correctly.
    """

    #: Lower bound of the scores.
    least: float
    posts: int
    confidence: float
    accuracy: float


def bins_of(scored: Iterable[tuple[float, bool]]) -> list[Bin]:
    """Group posts into tenths by their best score, without empty tenths. scored: (best score, label is correct)."""
    found: dict[int, list[tuple[float, bool]]] = {}
    for score, right in scored:
        found.setdefault(min(max(int(score * NUM_BINS), 0), NUM_BINS - 1), []).append((score, right))
    return [
        Bin(tenth / NUM_BINS, len(some), *(float(np.mean(column)) for column in zip(*some, strict=True)))
        for tenth, some in sorted(found.items())
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy of a bin, weighted by posts.

    Guo et al., "On Calibration of Modern Neural Networks", 2017.
    """
    return sum(each.posts * abs(each.confidence - each.accuracy) for each in bins) / sum(each.posts for each in bins)


def matching_label(topic: str | None, labels: Sequence[str]) -> str | None:
    """Return the label equal to the topic, else the only label that differs in case alone, else None."""
    if topic is None or topic in labels:
        return topic
    alike = [label for label in labels if label.casefold() == topic.casefold()]
    return alike[0] if len(alike) == 1 else None


class ModelMeasurement(NamedTuple):
    """The measurements of one model on a set of posts."""

    #: The model's name, as in results.
    model: str
    evaluation: Evaluation
    bins: list[Bin]
    #: Posts per second, including tokenization but not the loading of the model.
    posts_per_s: float
    #: Error messages of the posts that could not be classified.
    failures: list[str]

    @property
    def calibration_error(self) -> float:
        return calibration_error(self.bins)

    def summary(self, left_out: int) -> dict[str, Any]:
        """Return the measurements as a JSON object. left_out: number of posts without a known true label."""
        return self.evaluation.summary(left_out + len(self.failures)) | {
            "calibration_error": self.calibration_error,
            "calibration": [each._asdict() for each in self.bins],
            "posts_per_s": self.posts_per_s,
        }


def usable_settings(settings: Settings) -> Settings:
    """Return the settings without those that their model cannot use. Raises ModelError."""
    return settings.model_copy(update=dict.fromkeys(unusable(settings)))


def measure(
    known: Sequence[tuple[Post, str]], loaded: Classifier, settings: Settings, track: Track = lambda found, _: found
) -> ModelMeasurement:
    """Classify posts and compare the predicted labels with the true ones.

    known: (post, true label), where the label is one of the model's. track: wraps the iteration over the outcomes to
    show progress; its second argument is their number. Raises UserError if no post can be classified.
    """
    with explain_refusals(settings):
        budget = calibrate(loaded, settings)
        began = time.perf_counter()
        outcomes = offline.classify((post for post, _ in known), loaded, settings, budget)
        found = [outcome for _, outcome in track(outcomes, len(known))]
        seconds = time.perf_counter() - began
    failures = [outcome.error for outcome in found if isinstance(outcome, PostError)]
    if len(failures) == len(known):
        raise UserError(
            f"None of the {len(known):,} posts can be classified: {failures[0]}. "
            "Correct the posts, or use another model."
        )
    results = [
        (outcome, truth)
        for outcome, (_, truth) in zip(found, known, strict=True)
        if isinstance(outcome, Classification)
    ]
    labels = loaded.label_set(ClassifyOptions()).labels
    return ModelMeasurement(
        loaded.weights.name,
        Evaluation.of(labels, ((truth, outcome.label) for outcome, truth in results)),
        bins_of((outcome.scores[outcome.label], outcome.label == truth) for outcome, truth in results),
        len(found) / seconds,
        failures,
    )
