"""The page of an evaluation: confusion tables, calibration and the most confident mistakes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feedmill.evaluation.measure import Evaluation
from feedmill.evaluation.posts import wrong
from feedmill.pages import render

MODEL_COLUMNS = ("model", "accuracy", "macro-F1", "calibration error", "posts/s")
BIN_COLUMNS = ("score", "posts", "mean score", "right")
#: Maximum number of mistakes that are shown.
MAX_MISTAKES = 50


@dataclass(frozen=True)
class Cell:
    """A cell of a confusion table. share: of the posts with the row's true label, 0 to 1."""

    posts: int
    share: float
    is_right: bool
    caption: str


@dataclass(frozen=True)
class ConfusionRow:
    """The predictions for the posts of a true label. right: the share that is labelled right."""

    label: str
    cells: list[Cell]
    right: str


@dataclass(frozen=True)
class ModelSection:
    """A model on the page."""

    name: str
    labels: list[str]
    rows: list[ConfusionRow]
    bins: list[list[str]]


def page(evaluation: Evaluation) -> str:
    """Return the complete HTML page of an evaluation."""
    summaries = evaluation.summaries
    sections = [_section(name, summary) for name, summary in summaries.items()]
    seen = 0 if evaluation.counts_seen else len(evaluation.seen)
    return render(
        "evaluation.html",
        posts=len(evaluation.counted_places),
        seen=seen,
        model_columns=MODEL_COLUMNS,
        model_rows=[_figures(name, summary) for name, summary in summaries.items()],
        models=sections,
        bin_columns=BIN_COLUMNS,
        mistakes=wrong(evaluation)[:MAX_MISTAKES],
        several=len(sections) > 1,
    )


def _figures(name: str, summary: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{summary['accuracy']:.3f}",
        f"{summary['macro_f1']:.3f}",
        f"{summary['calibration_error']:.3f}",
        f"{summary['posts_per_s']:,.1f}",
    ]


def _section(name: str, summary: Mapping[str, Any]) -> ModelSection:
    labels = list(summary["labels"])
    rows = []
    for number, counts in enumerate(summary["confusion"]):
        rows.append(_row(labels, number, counts))
    bins = []
    for part in summary["calibration"]:
        cells = [
            f"from {part['least']:.1f}",
            f"{part['posts']:,}",
            f"{part['confidence']:.2f}",
            f"{part['accuracy']:.2f}",
        ]
        bins.append(cells)
    return ModelSection(
        name=name,
        labels=labels,
        rows=rows,
        bins=bins,
    )


def _row(labels: list[str], number: int, counts: list[int]) -> ConfusionRow:
    truth = labels[number]
    posts_of_label = sum(counts)
    cells = []
    for index, posts in enumerate(counts):
        cell = Cell(
            posts=posts,
            share=posts / max(posts_of_label, 1),
            is_right=index == number,
            caption=f"{truth} labelled {labels[index]}: {posts:,}",
        )
        cells.append(cell)
    right = "–"
    if posts_of_label:
        right = f"{counts[number] / posts_of_label:.0%}"
    return ConfusionRow(
        label=truth,
        cells=cells,
        right=right,
    )
