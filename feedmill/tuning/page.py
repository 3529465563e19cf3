"""The page of `feedmill tune`: curves, the ladder's bars and tables, readable on paper."""

from dataclasses import dataclass
from typing import Any

from feedmill.pages import Chart, Point, TitledChart, render
from feedmill.tuning.curve import Curve
from feedmill.tuning.experiment import Findings
from feedmill.tuning.tables import (
    CURVE_COLUMNS,
    OPERATION_COLUMNS,
    PRECISION_COLUMNS,
    curve_cells,
    operation_cells,
    precision_cells,
    rung_note,
)


@dataclass(frozen=True)
class Series:
    """The curves and the table of one order."""

    name: str
    title: str
    unit: str
    curve: Curve
    is_doubling: bool = False

    @property
    def charts(self) -> list[TitledChart]:
        charts = [
            TitledChart("posts/s", self._chart("posts_per_s", "posts/s")),
            TitledChart("seconds a batch", self._chart("seconds_per_batch", "s")),
        ]
        if all(trial.memory_mb is not None for trial in self.curve.trials):
            memory = self._chart("memory_mb", "MB")
            charts.append(TitledChart("memory, MB", memory))
        return charts

    @property
    def rows(self) -> list[list[str]]:
        return [curve_cells(trial) for trial in self.curve.trials]

    def _chart(self, figure: str, unit: str) -> Chart:
        points = []
        for trial in self.curve.trials:
            height = getattr(trial, figure)
            caption = f"{trial.size}: {height:,.4g} {unit}"
            points.append(Point(trial.size.number, height, caption))
        missing = []
        full = self.curve.out_of_memory
        if full is not None and full.size is not None:
            missing.append(full.size.number)
        return Chart(
            points=points,
            is_doubling=self.is_doubling,
            missing=missing,
        )


def page(findings: Findings) -> str:
    """Return the complete HTML page."""
    series = [
        Series(
            name="budgets",
            title="Micro-batches by token budget, sorted by length",
            unit="tokens a batch",
            curve=findings.budgets,
            is_doubling=True,
        ),
        Series(
            name="arrival",
            title="Batches in arrival order",
            unit="posts a batch",
            curve=findings.arrival,
        ),
    ]
    return render(
        "tune.html",
        findings=findings,
        series=[
            order for order in series if order.curve.trials or order.curve.unmeasured
        ],
        columns=CURVE_COLUMNS,
        ladder_bars=_ladder_bars(findings),
        precision_columns=PRECISION_COLUMNS,
        precision_rows=[
            precision_cells(precision) for precision in findings.precisions
        ],
        operation_columns=OPERATION_COLUMNS,
        operation_rows=[
            operation_cells(operation) for operation in findings.operations
        ],
    )


def _ladder_bars(findings: Findings) -> list[dict[str, Any]]:
    ladder = findings.ladder
    if ladder is None:
        return []
    fastest = max(rung.posts_per_s for rung in ladder.rungs)
    bars = []
    for rung in ladder.rungs:
        rate = rung.posts_per_s
        bar = {
            "name": rung.name,
            "rate": f"{rate:,.1f}",
            "share": 100 * rate / fastest,
            "note": rung_note(ladder, rung),
        }
        bars.append(bar)
    return bars
