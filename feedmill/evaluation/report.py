"""Print evaluations and tunings as tables and sentences. Needs torch, which only workers have."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feedmill.evaluation.measures import Evaluation, ModelMeasurement
from feedmill.shared.errors import ModelError, printable
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.pipeline.tuning import BATCH_SIZE, TOKEN_BUDGET, Curve, SizeMeasurement, Tuning

#: Number of labels up to which the confusion matrix is printed; 16 labels fit into 100 columns.
MAX_MATRIX_LABELS = 20
#: Width in characters from which labels wrap in the matrix, on a console of up to 100 columns.
MIN_LABEL_WIDTH = 20
#: Length of the longest bar in characters.
BAR_LENGTH = 24
#: Name, unit and table title of each kind of size.
SIZES = {
    BATCH_SIZE: ("batch size", "posts", "Batches of posts in arrival order"),
    TOKEN_BUDGET: ("token budget", "tokens", "Batches of posts sorted by length, within a token budget"),
}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, padding: int = 2) -> Table:
    """Return a table without lines, whose columns after the first are numbers."""
    made = Table(
        title=title, title_justify="left", title_style="dim", box=None, header_style="dim", padding=(0, padding, 0, 0)
    )
    for place, name in enumerate(columns):
        # In a narrow terminal only the first column wraps: a truncated count would be a wrong number.
        made.add_column(name, justify="right", no_wrap=True) if place else made.add_column(name)
    for row in rows:
        made.add_row(*row)
    return made


def show(console: Console, found: Evaluation) -> None:
    """Print each label's metrics, the confusion matrix and the overall metrics."""
    labels = [escape(printable(label)) for label in found.labels]
    rows = [
        (label, f"{precision:.3f}", f"{recall:.3f}", f"{f1:.3f}", f"{support:,}")
        for label, (precision, recall, f1, support) in zip(labels, found.by_label().values(), strict=True)
    ]
    console.print(table(("label", "precision", "recall", "F1", "support"), rows))
    if len(labels) <= MAX_MATRIX_LABELS:
        title = "Rows: true label. Columns: predicted label, numbered like the rows"
        counts = [
            (f"{truth + 1:>2} {labels[truth]}", *(_count(count, truth == place) for place, count in enumerate(row)))
            for truth, row in enumerate(found.confusion.tolist())
        ]
        matrix = table(("", *(f"{number:>2}" for number in range(1, len(labels) + 1))), counts, title, padding=1)
        matrix.columns[0].max_width = max(MIN_LABEL_WIDTH, console.width // 5)
        console.print(matrix)
    else:
        typer.echo(f"The confusion matrix of {len(labels)} labels is too wide for a table; --json has it.")
    typer.echo(f"Accuracy {found.accuracy:.3f}, macro-F1 {found.macro_f1:.3f}, {found.posts:,} posts.")


def _count(count: int, right: bool) -> str:
    return f"[green]{count}[/]" if right and count else str(count) if count else "[dim]·[/]"


def show_sureness(found: ModelMeasurement) -> None:
    """Print the mean confidence, the calibration error and the throughput."""
    confidence = sum(each.posts * each.confidence for each in found.bins) / found.evaluation.posts
    typer.echo(
        f"Mean confidence {confidence:.3f}, calibration error {found.calibration_error:.3f} (0 means that 80% "
        f"of the posts with a score of 0.8 are labelled correctly), {found.posts_per_s:,.1f} posts/s."
    )


def models_table(head: str, models: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Table:
    """Return a table with a line per model. models: name and ModelMeasurement.summary, or None if not measured."""
    columns = {"accuracy": "accuracy", "macro-F1": "macro_f1", "calibration error": "calibration_error"}
    rows = []
    for name, found in models:
        if found:
            figures = ("-" if found[key] is None else f"{found[key]:.3f}" for key in columns.values())
            rows.append((escape(printable(name)), *figures, f"{found['posts_per_s']:,.1f}"))
    return table((head, *columns, "posts/s"), rows)


class TuningReport:
    """The tuning curves of a model by kind of size. Raises ModelError if the device had no memory for any size."""

    def __init__(self, tuning: Tuning, classifier: Classifier, posts: int) -> None:
        self.curves = {kind: tuning.curve(kind) for kind in SIZES}
        #: The curves with at least one measured size.
        self.measured = {kind: curve for kind, curve in self.curves.items() if curve.points}
        self._device, self._packed = classifier.device, tuning.packed
        device = self._device
        name = classifier.weights.name
        self.title = f"{name} on {device.hardware} in {device.precision}: {posts:,} posts, {tuning.tokens:,} tokens"
        if not self.measured:
            raise ModelError(
                f"{device.name} has too little memory for {name} and a batch of {self.curves[BATCH_SIZE].full} posts. "
                "Use a smaller model, fewer labels, or half precision (FEEDMILL_DTYPE)."
            )

    def show(self, console: Console) -> None:
        """Print both curves as bars, the sizes that were left out, and each curve's knee."""
        typer.echo(self.title)
        fastest = max(point.posts_per_s for curve in self.measured.values() for point in curve.points)
        for kind, curve in self.measured.items():
            console.print(_bars(kind, curve, fastest))
        if self._device.lanes > 1:
            typer.echo(
                f"Both tables measure one forward pass at a time, on one of {self._device.lanes} lanes with its share "
                f"of the cores. A worker runs {self._device.lanes} such lanes in parallel."
            )
        if self._packed:
            typer.echo("Rows are packed, not padded: no time is spent on padding, so sorting gains little.")
        for kind, curve in self.curves.items():
            for size, what in ((curve.unfilled, "posts"), (curve.full, "device memory")):
                if size:
                    typer.echo(f"Left out: {SIZES[kind][0]} {size} and above, which need more {what}.")
        for kind, curve in self.measured.items():
            knee, compared = curve.knee, self._compared(kind)
            line = f"{SIZES[kind][0].capitalize()} {knee.value} is the smallest within 2% of the fastest"
            if compared is not None:
                gain = knee.posts_per_s / compared.posts_per_s
                line += f": {gain:.2f} times the posts/s of batch size {compared.value}"
                line += ", in arrival order" if kind == TOKEN_BUDGET else ""
            typer.echo(f"{line}.")

    def _compared(self, kind: str) -> SizeMeasurement | None:
        """Return the baseline of a curve's speed-up: the smallest batch size or, for token budgets, the best one."""
        sizes = self.measured.get(BATCH_SIZE)
        return sizes and (sizes.points[0] if kind == BATCH_SIZE else sizes.knee)

    def summary(self) -> dict[str, Any]:
        """Return each curve as a JSON object; `gain` is its knee's speed-up over the point it is compared with."""
        found: dict[str, Any] = {}
        for kind, curve in self.measured.items():
            compared = self._compared(kind)
            gain = compared and round(curve.knee.posts_per_s / compared.posts_per_s, 3)
            points = [point._asdict() for point in curve.points]
            knee = {"knee": curve.knee.value, "posts_per_s": round(curve.knee.posts_per_s, 1)}
            found[kind] = knee | {"gain": gain, "points": points}
        return found


def _bars(kind: str, curve: Curve, fastest: float) -> Table:
    _, unit, title = SIZES[kind]
    columns = (unit, "posts/s", "", "tokens/s", "padding efficiency", "peak MB")
    rows = [
        (
            f"[bold]{point.value:,}[/]" if point == curve.knee else f"{point.value:,}",
            f"{point.posts_per_s:,.1f}",
            "█" * round(BAR_LENGTH * point.posts_per_s / fastest),
            f"{point.tokens_per_s:,.0f}",
            f"{point.padding_efficiency:.2f}",
            "–" if point.peak_mb is None else f"{point.peak_mb:,.0f}",
        )
        for point in curve.points
    ]
    made = table(columns, rows, title, padding=1)
    made.columns[2].justify = "left"
    return made
