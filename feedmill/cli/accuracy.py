"""Print evaluations: a model's metrics by label, its confusion matrix, and tables of models."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feedmill.console import table
from feedmill.shared.errors import printable, truncate
from feedmill.shared.none_of_these import NO_LABEL

#: Maximum labels of a confusion matrix that is printed, and characters of a label in it.
MAX_CONFUSION_LABELS = 20
MAX_LABEL_WIDTH = 24


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Print a Measurements.summary: each label's metrics and most frequent mistake, and the
    overall metrics.
    """
    labels = found["labels"]
    rows = []
    for label, counts in zip(labels, found["confusion"], strict=True):
        label_metrics = labels[label]
        mistakes = Counter(dict(zip(labels, counts, strict=True)))
        del mistakes[label]
        mistake = ""
        if mistakes.total():
            [(other, count)] = mistakes.most_common(1)
            mistake = f"{escape(printable(other))} {count:,}"
        cells = (
            escape(printable(label)),
            f"{label_metrics['precision']:.3f}",
            f"{label_metrics['recall']:.3f}",
            f"{label_metrics['f1']:.3f}",
            f"{label_metrics['support']:,}",
            mistake,
        )
        rows.append(cells)
    columns = ("label", "precision", "recall", "F1", "posts", "most mistaken for")
    console.print(table(columns, rows))
    if "coverage" in found:
        typer.echo(
            f"{found['coverage']:.0%} of the posts have a label, and {found['precision']:.3f} of "
            f"these labels are right. {NO_LABEL!r} counts as a label in the other figures."
        )
    confidences = [part["posts"] * part["confidence"] for part in found["calibration"]]
    confidence = sum(confidences) / found["posts"]
    typer.echo(
        f"Accuracy {found['accuracy']:.3f}, macro-F1 {found['macro_f1']:.3f}, "
        f"{found['posts']:,} posts.\n"
        f"Mean confidence {confidence:.3f}, calibration error {found['calibration_error']:.3f} "
        "(0 means that 80% of the posts with a score of 0.8 are labelled correctly), "
        f"{found['posts_per_s']:,.1f} posts/s."
    )


def confusion_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of a confusion matrix: a row for each true label, a column for each
    predicted one.

    summary: a Measurements.summary. Columns have the numbers of the labels.
    """
    labels = [
        truncate(printable(label), MAX_LABEL_WIDTH) for label in summary["labels"]
    ]
    if len(labels) > MAX_CONFUSION_LABELS:
        hint = (
            f"The confusion matrix of {len(labels)} labels is in --json; up to "
            f"{MAX_CONFUSION_LABELS} are printed."
        )
        return [hint]
    numbers = [str(number) for number in range(1, len(labels) + 1)]
    rows = []
    for counts in summary["confusion"]:
        texts = [f"{count:,}" if count else "·" for count in counts]
        rows.append(texts)
    widths = [len(text) for text in chain(numbers, *rows)]
    cell_width = max(widths) + 2
    label_width = max(len(label) for label in labels)
    indent = " " * (label_width + 3)
    head = [number.rjust(cell_width) for number in numbers]
    lines = [
        "Posts by true label (row) and predicted label (column):",
        indent + "".join(head),
    ]
    for number, label, row in zip(
        numbers,
        labels,
        rows,
        strict=True,
    ):
        cells = [text.rjust(cell_width) for text in row]
        lines.append(f"{number:>2} {label:<{label_width}}{''.join(cells)}")
    return lines


def models_table(
    head: str, models: Iterable[tuple[str, Mapping[str, Any] | None]]
) -> Table:
    """Return a table with a line per model. models: name and Measurements.summary, or None if not
    measured.
    """
    rows = []
    for name, summary in models:
        if not summary:
            continue
        cells = (
            escape(printable(name)),
            f"{summary['accuracy']:.3f}",
            f"{summary['macro_f1']:.3f}",
            f"{summary['calibration_error']:.3f}",
            f"{summary['posts_per_s']:,.1f}",
        )
        rows.append(cells)
    columns = (head, "accuracy", "macro-F1", "calibration error", "posts/s")
    return table(columns, rows)
