"""Print the results of `feedmill tune` as bars and sentences, and write them as CSV and JSON."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from feedmill.shared.errors import ModelError
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.pipeline.tuning import BATCH_SIZE, TOKEN_BUDGET, Curve, SizeMeasurement, Tuning

#: Length of the longest bar in characters.
BAR_LENGTH = 24
#: Name, unit and table title of each kind of size.
NAMES = {BATCH_SIZE: "batch size", TOKEN_BUDGET: "token budget"}
UNITS = {BATCH_SIZE: "posts", TOKEN_BUDGET: "tokens"}
TITLES = {
    BATCH_SIZE: "Batches of posts in arrival order",
    TOKEN_BUDGET: "Batches of posts sorted by length, within a token budget",
}


class TuningReport:
    """The tuning curves of a model by kind of size. Raises ModelError if the device had no memory for any size."""

    def __init__(self, tuning: Tuning, classifier: Classifier, posts: int) -> None:
        self.curves = {kind: tuning.curve(kind) for kind in NAMES}
        #: The curves with at least one measured size.
        self.measured = {kind: curve for kind, curve in self.curves.items() if curve.points}
        self._device, self._model = classifier.device, classifier.weights.name
        self._packed = tuning.packed
        self._about = f"{posts:,} posts, {tuning.tokens:,} tokens"
        if not self.measured:
            raise ModelError(
                f"{self._device.name} has too little memory for {self._model} and a batch of "
                f"{self.curves[BATCH_SIZE].full} posts. Use a smaller model, fewer labels, or half precision "
                "(FEEDMILL_DTYPE)."
            )

    @property
    def title(self) -> str:
        """Return a line with the model, hardware, precision and number of posts and tokens."""
        precision = str(self._device.dtype).removeprefix("torch.")
        return f"{self._model} on {self._device.hardware} in {precision}: {self._about}"

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
            if curve.unfilled:
                typer.echo(f"Left out: {NAMES[kind]} {curve.unfilled} and above, which need more posts.")
            if curve.full:
                typer.echo(f"Left out: {NAMES[kind]} {curve.full} and above, which need more device memory.")
        for kind, curve in self.measured.items():
            typer.echo(self._sentence(kind, curve.knee))

    def _sentence(self, kind: str, knee: SizeMeasurement) -> str:
        found = f"{NAMES[kind].capitalize()} {knee.value} is the smallest within 2% of the fastest"
        compared = self._compared(kind)
        if compared is None:
            return f"{found}."
        against = f"{NAMES[BATCH_SIZE]} {compared.value}" + (", in arrival order" if kind == TOKEN_BUDGET else "")
        return f"{found}: {knee.posts_per_s / compared.posts_per_s:.2f} times the posts/s of {against}."

    def _compared(self, kind: str) -> SizeMeasurement | None:
        """Return the baseline of a curve's speed-up: the smallest batch size or, for token budgets, the best one."""
        sizes = self.measured.get(BATCH_SIZE)
        if sizes is None:
            return None
        return sizes.points[0] if kind == BATCH_SIZE else sizes.knee

    def write_csv(self, path: Path) -> None:
        """Write one line per measured size. peak_mb is empty if the device does not report its memory."""
        with path.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(SizeMeasurement._fields)
            for curve in self.measured.values():
                for kind, value, *figures in curve.points:
                    lines.writerow((kind, value, *(None if figure is None else f"{figure:.6g}" for figure in figures)))

    def summary(self) -> Mapping[str, Any]:
        """Return each knee as a JSON object; `gain` is its speed-up over the point it is compared with."""
        found: dict[str, Any] = {}
        for kind, curve in self.measured.items():
            compared = self._compared(kind)
            gain = compared and round(curve.knee.posts_per_s / compared.posts_per_s, 3)
            found[kind] = {"knee": curve.knee.value, "posts_per_s": round(curve.knee.posts_per_s, 1), "gain": gain}
        return found


def _bars(kind: str, curve: Curve, fastest: float) -> Table:
    table = Table(title=TITLES[kind], title_justify="left", title_style="", box=None, header_style="dim")
    for name in (UNITS[kind], "posts/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name in ("tokens/s", "padding\nefficiency", "peak MB"):
        table.add_column(name, justify="right")
    for point in curve.points:
        bar = "█" * round(BAR_LENGTH * point.posts_per_s / fastest)
        peak = "–" if point.peak_mb is None else f"{point.peak_mb:,.0f}"
        figures = (f"{point.tokens_per_s:,.0f}", f"{point.padding_efficiency:.2f}", peak)
        style = "bold" if point == curve.knee else ""
        table.add_row(f"{point.value:,}", f"{point.posts_per_s:,.1f}", bar, *figures, style=style)
    return table
