"""Measure a model's accuracy, calibration and throughput on posts with known labels; print evaluations and rates.

The metrics follow scikit-learn with zero_division=0, except that the macro-F1 ignores labels without a true example.
Posts go through the worker's pipeline, so the throughput is a worker's. Needs torch, which only workers have.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feedmill.console import Report
from feedmill.shared.errors import UserError, explain_refusals, printable
from feedmill.shared.messages import Classification, ClassifyOptions, Post, PostError
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.calibration import best, calibrate

#: Bins of the calibration curve.
NUM_BINS = 10


class Measured(NamedTuple):
    """The measurements of one model on a set of posts, as `metrics`, `calibration` and its posts per second.

    The posts per second include tokenization, but not the loading of the model. left_out: posts that failed.
    """

    summary: dict[str, Any]
    #: Error messages of the posts that could not be classified.
    failures: list[str]


def metrics(labels: Sequence[str], pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the accuracy, the metrics of each label (0 to 1; 0 instead of a division by zero), and the confusion.

    pairs: (true label, predicted label) of each post, at least one. The confusion matrix has the number of posts by
    [true label, predicted label]; `support` is a label's number of true posts.
    """
    place = {label: number for number, label in enumerate(labels)}
    confusion = np.zeros((len(place), len(place)), np.int64)
    for truth, label in pairs:
        confusion[place[truth], place[label]] += 1
    right, support, predicted = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    f1 = 2 * right / np.maximum(support + predicted, 1)
    columns = (right / np.maximum(predicted, 1), right / np.maximum(support, 1), f1, support)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    names = ("precision", "recall", "f1", "support")
    return {
        "accuracy": float(right.sum() / confusion.sum()),
        "macro_f1": float(f1[support > 0].mean()),
        "posts": int(confusion.sum()),
        "labels": {label: dict(zip(names, row, strict=True)) for label, row in zip(labels, rows, strict=True)},
        "confusion": confusion.tolist(),
    }


def calibration(scored: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Return the expected calibration error, and the bins that it is computed from: tenths of the range of scores.

    scored: (best score, label is correct) of each post, at least one. A bin has its mean score (confidence), the share
    labelled correctly (accuracy), and its lower bound (least). The error is the mean gap between confidence and
    accuracy of a bin, weighted by posts (Guo et al., "On Calibration of Modern Neural Networks", 2017).
    """
    scores, right = np.array([score for score, _ in scored]), np.array([right for _, right in scored])
    tenths = np.clip((scores * NUM_BINS).astype(int), 0, NUM_BINS - 1)
    bins = [
        {
            "least": tenth / NUM_BINS,
            "posts": int((tenths == tenth).sum()),
            "confidence": float(scores[tenths == tenth].mean()),
            "accuracy": float(right[tenths == tenth].mean()),
        }
        for tenth in np.unique(tenths).tolist()
    ]
    gaps = sum(each["posts"] * abs(each["confidence"] - each["accuracy"]) for each in bins)
    return {"calibration_error": gaps / len(scored), "calibration": bins}


def matching_label(topic: str | None, labels: Sequence[str]) -> str | None:
    """Return the label equal to the topic, else the only label that differs in case alone, else None."""
    if topic is None or topic in labels:
        return topic
    alike = [label for label in labels if label.casefold() == topic.casefold()]
    return alike[0] if len(alike) == 1 else None


def measure(known: Sequence[tuple[Post, str]], loaded: Classifier, settings: Settings, report: Report) -> Measured:
    """Classify posts and compare the predicted labels with the true ones.

    known: (post, true label), where the label is one of the model's. Raises UserError if no post can be classified.
    """
    name = loaded.weights.name
    with explain_refusals(settings.model):
        budget = calibrate(loaded, settings)
        began = time.perf_counter()
        outcomes = offline.classify((post for post, _ in known), loaded, settings, budget)
        found = [
            outcome for _, outcome in report.counting(f"testing {name} on {len(known):,} posts", outcomes, len(known))
        ]
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
    summary = metrics(
        loaded.label_set(ClassifyOptions()).labels, ((truth, outcome.label) for outcome, truth in results)
    )
    summary |= calibration([(outcome.scores[outcome.label], outcome.label == truth) for outcome, truth in results])
    summary |= {"posts_per_s": len(found) / seconds, "left_out": len(failures)}
    return Measured(summary, failures)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines, whose columns after the first are numbers."""
    made = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        # In a narrow terminal only the first column wraps: a truncated count would be a wrong number.
        made.add_column(name, justify="right", no_wrap=True) if place else made.add_column(name)
    for row in rows:
        made.add_row(*row)
    return made


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Print a Measured.summary: each label's metrics and most frequent mistake, and the overall metrics."""
    rows = []
    for (label, each), counts in zip(found["labels"].items(), found["confusion"], strict=True):
        wrong = Counter(dict(zip(found["labels"], counts, strict=True)))
        del wrong[label]
        ((other, count),) = wrong.most_common(1) or [("", 0)]
        mistake = f"{escape(printable(other))} {count:,}" if count else ""
        figures = (f"{each[name]:.3f}" for name in ("precision", "recall", "f1"))
        rows.append((escape(printable(label)), *figures, f"{each['support']:,}", mistake))
    console.print(table(("label", "precision", "recall", "F1", "posts", "most mistaken for"), rows))
    confidence = sum(each["posts"] * each["confidence"] for each in found["calibration"]) / found["posts"]
    typer.echo(
        f"Accuracy {found['accuracy']:.3f}, macro-F1 {found['macro_f1']:.3f}, {found['posts']:,} posts.\n"
        f"Mean confidence {confidence:.3f}, calibration error {found['calibration_error']:.3f} (0 means that 80% "
        f"of the posts with a score of 0.8 are labelled correctly), {found['posts_per_s']:,.1f} posts/s."
    )


def models_table(head: str, models: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Table:
    """Return a table with a line per model. models: name and Measured.summary, or None if not measured."""
    rows = [
        (
            escape(printable(name)),
            *(f"{found[key]:.3f}" for key in ("accuracy", "macro_f1", "calibration_error")),
            f"{found['posts_per_s']:,.1f}",
        )
        for name, found in models
        if found
    ]
    return table((head, "accuracy", "macro-F1", "calibration error", "posts/s"), rows)


def show_rates(console: Console, rates: Mapping[int, float], tokens_each: float, lanes: int) -> dict[str, Any]:
    """Print the rate of each token budget and the best budget, and return them.

    rates: tokens per second of a lane. tokens_each: tokens of a post, on average.
    """
    points = [
        {"budget": budget, "posts_per_s": rate / tokens_each, "tokens_per_s": rate}
        for budget, rate in sorted(rates.items())
    ]
    rows = [[f"{figure:,.0f}" for figure in point.values()] for point in points]
    console.print(table(("token budget", "posts/s", "tokens/s"), rows))
    if lanes > 1:
        typer.echo(f"These are the rates of one of {lanes} lanes. A worker runs all in parallel.")
    typer.echo(f"Token budget {best(rates)} is the smallest within 2% of the fastest.")
    return {"knee": best(rates), "points": points}
