"""Print an evaluation as two tables and a summary line, and write each post's prediction as CSV."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feedmill.evaluation.measures import Evaluation
from feedmill.evaluation.run import ModelMeasurement
from feedmill.shared.errors import printable
from feedmill.shared.messages import Classification

#: Number of labels up to which the confusion matrix is printed; 16 labels fit into 100 columns.
MAX_MATRIX_LABELS = 20
#: Width in characters from which labels wrap in the matrix, on a console of up to 100 columns.
MIN_LABEL_WIDTH = 20


def show(console: Console, found: Evaluation) -> None:
    """Print each label's metrics, the confusion matrix and the overall metrics."""
    console.print(_figures(found))
    if len(found.labels) <= MAX_MATRIX_LABELS:
        console.print(_matrix(found, max(MIN_LABEL_WIDTH, console.width // 5)))
    else:
        typer.echo(f"The confusion matrix of {len(found.labels)} labels is too wide for a table. Draw it with --png.")
    typer.echo(f"Accuracy {found.accuracy:.3f}, macro-F1 {found.macro_f1:.3f}, {found.posts:,} posts.")


def models_table(head: str, models: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Table:
    """Return a table with a line per model. models: name and ModelMeasurement.summary, or None if not measured."""
    columns = {"accuracy": "accuracy", "macro-F1": "macro_f1", "calibration error": "calibration_error"}
    table = _table(head, *columns, "posts/s")
    for name, found in models:
        if found:
            figures = ("-" if found[key] is None else f"{found[key]:.3f}" for key in columns.values())
            table.add_row(escape(printable(name)), *figures, f"{found['posts_per_s']:,.1f}")
    return table


def show_sureness(found: ModelMeasurement) -> None:
    """Print the mean confidence, the calibration error and the throughput."""
    confidence = sum(each.posts * each.confidence for each in found.bins) / found.evaluation.posts
    typer.echo(
        f"Mean confidence {confidence:.3f}, calibration error {found.calibration_error:.3f} (0 means that 80% "
        f"of the posts with a score of 0.8 are labelled correctly), {found.posts_per_s:,.1f} posts/s."
    )


def _figures(found: Evaluation) -> Table:
    table = _table("label", "precision", "recall", "F1", "support")
    for label, (precision, recall, f1, support) in found.by_label().items():
        table.add_row(escape(printable(label)), f"{precision:.3f}", f"{recall:.3f}", f"{f1:.3f}", f"{support:,}")
    return table


def _table(head: str, *figures: str) -> Table:
    """Return an empty table whose columns after the first are numbers."""
    table = Table(head, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in figures:
        table.add_column(name, justify="right")
    return table


def _matrix(found: Evaluation, label_width: int) -> Table:
    title = "Rows: true label. Columns: predicted label, numbered like the rows"
    table = Table(
        title=title, title_justify="left", title_style="dim", box=None, header_style="dim", padding=(0, 1, 0, 0)
    )
    # In a narrow terminal only the labels wrap: a truncated count would be a wrong number.
    table.add_column("", max_width=label_width)
    for number in range(1, len(found.labels) + 1):
        table.add_column(str(number), justify="right", no_wrap=True, min_width=2)
    for truth, row in enumerate(found.confusion.tolist()):
        counts = [_count(count, truth == predicted) for predicted, count in enumerate(row)]
        table.add_row(f"{truth + 1:>2} {escape(printable(found.labels[truth]))}", *counts)
    return table


def _count(count: int, right: bool) -> str:
    return f"[green]{count}[/]" if right and count else str(count) if count else "[dim]·[/]"


def write_csv(path: Path, predictions: Iterable[tuple[str, Classification]]) -> None:
    """Write each post's id, true label, predicted label and its score. predictions: (true label, classification)."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("id", "topic", "label", "score"))
        lines.writerows(
            (found.id, truth, found.label, f"{found.scores[found.label]:.6f}") for truth, found in predictions
        )
