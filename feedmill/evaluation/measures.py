"""Score predicted labels against the true labels. Only arithmetic: no files, no model, no output.

The metrics follow scikit-learn with zero_division=0, except that the macro-F1 ignores labels without a true example.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

#: Bins of the calibration curve.
NUM_BINS = 10

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
