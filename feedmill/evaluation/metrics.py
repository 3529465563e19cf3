"""Accuracy, precision, recall, F1 and calibration.

The metrics follow scikit-learn with zero_division=0, except that the macro-F1 ignores labels
without a true example.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from feedmill.shared.none_of_these import NO_LABEL

#: Bins of the calibration curve.
NUM_BINS = 10


def metrics(labels: Sequence[str], pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the accuracy, the metrics of each label (0 to 1; 0 instead of a division by zero),
    and the confusion.

    pairs: (true label, predicted label) of each post, at least one. The confusion matrix has the
    number of posts by [true label, predicted label]; `support` is a label's number of true posts.
    """
    index_of = {label: index for index, label in enumerate(labels)}
    count = len(index_of)
    confusion = np.zeros((count, count), np.int64)
    for truth, label in pairs:
        confusion[index_of[truth], index_of[label]] += 1
    posts = confusion.sum()
    right = np.diag(confusion)
    support = confusion.sum(1)
    predicted = confusion.sum(0)
    precision = right / np.maximum(predicted, 1)
    recall = right / np.maximum(support, 1)
    f1 = 2 * right / np.maximum(support + predicted, 1)
    macro_f1 = f1[support > 0].mean()
    metrics_of_labels = {}
    for number, label in enumerate(labels):
        metrics_of_labels[label] = {
            "precision": float(precision[number]),
            "recall": float(recall[number]),
            "f1": float(f1[number]),
            "support": int(support[number]),
        }
    return {
        "accuracy": float(right.sum() / posts),
        "macro_f1": float(macro_f1),
        "posts": int(posts),
        "labels": metrics_of_labels,
        "confusion": confusion.tolist(),
    }


def coverage(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return the share of posts with a label, and the share of these labels that are right; 0
    without any.

    pairs: (true label, predicted label) of each post, at least one; NO_LABEL for none.
    """
    posts = 0
    labelled = 0
    right = 0
    for truth, label in pairs:
        posts += 1
        if label != NO_LABEL:
            labelled += 1
            right += label == truth
    return {
        "coverage": labelled / posts,
        "precision": right / max(labelled, 1),
    }


def calibration(scored: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Return the expected calibration error, and the bins that it is computed from: tenths of the
    range of scores.

    scored: (best score, label is correct) of each post, at least one. A bin has its mean score
    (confidence), the share labelled correctly (accuracy), and its lower bound (least). The error
    is the mean gap between confidence and accuracy of a bin, weighted by posts (Guo et al., "On
    Calibration of Modern Neural Networks", 2017).
    """
    scores = np.array([score for score, _ in scored])
    right = np.array([is_right for _, is_right in scored])
    numbers = (scores * NUM_BINS).astype(int)
    tenths = np.clip(numbers, 0, NUM_BINS - 1)
    bins = []
    weighted_gaps = []
    for tenth in np.unique(tenths).tolist():
        is_inside = tenths == tenth
        posts = int(is_inside.sum())
        confidence = float(scores[is_inside].mean())
        accuracy = float(right[is_inside].mean())
        gap = abs(confidence - accuracy)
        weighted_gaps.append(posts * gap)
        part = {
            "least": tenth / NUM_BINS,
            "posts": posts,
            "confidence": confidence,
            "accuracy": accuracy,
        }
        bins.append(part)
    error = sum(weighted_gaps) / len(scored)
    return {"calibration_error": error, "calibration": bins}
