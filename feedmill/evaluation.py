"""How well predicted labels agree with the true ones: figures alone, nothing is read, run or shown here.

The figures are the usual ones, as scikit-learn defines them with zero_division=0; but labels that are nobody's truth
do not count towards the macro-F1.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

#: Bins of a calibration.
BINS = 10

Counts = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class LabelFigures(NamedTuple):
    """One label: shares from 0 to 1, each 0 where it would divide by nothing, and the posts whose truth it is."""

    precision: float
    recall: float
    f1: float
    support: int


class Evaluation:
    """What the confusion matrix of these labels says. confusion: [truth, predicted], posts; not all 0."""

    def __init__(self, labels: Sequence[str], confusion: Counts) -> None:
        self.labels, self.confusion = tuple(labels), confusion

    @classmethod
    def of(cls, labels: Sequence[str], pairs: Iterable[tuple[str, str]]) -> "Evaluation":
        """Of each post's true and predicted label, both among the labels; at least one pair."""
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
        """Share of the posts whose predicted label is the true one."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the labels that are some post's truth."""
        return float(np.mean([figures.f1 for figures in self.by_label().values() if figures.support]))

    def by_label(self) -> dict[str, LabelFigures]:
        """In the labels' order."""
        right, support, predicted = np.diag(self.confusion), self.confusion.sum(1), self.confusion.sum(0)
        precision, recall = right / np.maximum(predicted, 1), right / np.maximum(support, 1)
        f1 = 2 * right / np.maximum(support + predicted, 1)
        columns = (precision.tolist(), recall.tolist(), f1.tolist(), support.tolist())
        return {label: LabelFigures(*figures) for label, *figures in zip(self.labels, *columns, strict=True)}

    def summary(self, left_out: int) -> dict[str, Any]:
        """As JSON. left_out: posts whose truth is not known."""
        return {
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "posts": self.posts,
            "left_out": left_out,
            "labels": {label: figures._asdict() for label, figures in self.by_label().items()},
            "confusion": self.confusion.tolist(),
        }


class Bin(NamedTuple):
    """Posts whose best score lies between two tenths: how sure the model was on average, and how often it was right."""

    least: float
    posts: int
    confidence: float
    accuracy: float


def bins_of(scored: Iterable[tuple[float, bool]]) -> list[Bin]:
    """Of each post's best score, and whether its label is the true one; tenths that no post is in are left out."""
    found: dict[int, list[tuple[float, bool]]] = {}
    for score, right in scored:
        found.setdefault(min(max(int(score * BINS), 0), BINS - 1), []).append((score, right))
    return [
        Bin(tenth / BINS, len(some), *(float(np.mean(column)) for column in zip(*some, strict=True)))
        for tenth, some in sorted(found.items())
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: how far confidence and accuracy of a post's bin are apart, on average over posts.

    Guo et al., "On Calibration of Modern Neural Networks", 2017.
    """
    return sum(each.posts * abs(each.confidence - each.accuracy) for each in bins) / sum(each.posts for each in bins)


def truth_of(topic: str | None, labels: Sequence[str]) -> str | None:
    """The label that a topic means: the same, or the only one that differs in nothing but case. None where none is."""
    if topic is None or topic in labels:
        return topic
    alike = [label for label in labels if label.casefold() == topic.casefold()]
    return alike[0] if len(alike) == 1 else None
