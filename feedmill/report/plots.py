"""Draw charts as PNG with matplotlib (the extra `charts`), which is imported only when a chart is drawn."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from feedmill.shared.errors import explain_missing

if TYPE_CHECKING:
    from feedmill.evaluation.measures import Evaluation
    from feedmill.workers.pipeline.tuning import Curve

#: Colours of the main series and of secondary series.
MAIN, OTHER = "#c2571a", "#b9bdc4"
#: Width and height of a label's cell in a confusion matrix, in inches.
CELL_INCHES = 0.42


def require() -> None:
    """Raise UserError if matplotlib is not installed, so that a requested chart fails before anything is written."""
    with explain_missing("A chart", "charts"):
        import matplotlib.figure  # noqa: F401, PLC0415 - an optional package


def save(path: Path, draw: Callable[[Any], None], notes: Console) -> bool:
    """Call `draw` with a new figure and save it as PNG. Without matplotlib, print a note and return False."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError:
        notes.print("A chart requires the package matplotlib: run `pip install 'feedmill\\[charts]'`.")
        return False
    # A Figure made without pyplot opens no window; saving it as PNG uses the Agg backend.
    figure = Figure(layout="constrained")
    draw(figure)
    figure.savefig(path, format="png", dpi=150)
    return True


def draw_curves(figure: Any, curves: Sequence[tuple[str, "Curve"]], title: str) -> None:
    """Draw posts/s over batch size for each (axis name, curve), with peak memory as a lighter line."""
    figure.set_size_inches(5 * len(curves), 3.6)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)
    points = [point for _, curve in curves for point in curve.points]
    fastest = max(point.posts_per_s for point in points)
    most = max(point.peak_mb or 0 for point in points)
    for axes, (name, curve) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        places = range(len(curve.points))  # evenly spaced, because some curves double their sizes
        peaks = [point.peak_mb for point in curve.points]
        axes.set_xticks(places, [str(point.value) for point in curve.points])
        axes.set_xlabel(name)
        axes.set_ylabel("posts/s", color=MAIN)
        axes.set_ylim(0, 1.15 * fastest)
        if None not in peaks:
            memory = axes.twinx()
            memory.plot(places, peaks, color=OTHER, marker=".")
            memory.set_ylabel("peak memory, MB", color="#777777")
            memory.set_ylim(0, 1.4 * most)  # keeps the memory line below the throughput line where both are flat
            memory.spines["top"].set_visible(False)
            axes.set_zorder(memory.get_zorder() + 1)
            axes.patch.set_visible(False)
        axes.plot(places, [point.posts_per_s for point in curve.points], color=MAIN, marker="o")
        knee = curve.knee
        axes.annotate(
            f"{knee.posts_per_s:.0f} posts/s", (curve.points.index(knee), knee.posts_per_s), (0, 7),
            textcoords="offset points", ha="center", color=MAIN, fontsize=8,
        )  # fmt: skip
        axes.spines["top"].set_visible(False)


def draw_training(figure: Any, curve: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw training loss and learning rate over optimization steps, and the validation loss as dots.

    curve: entries of the Trainer's log.
    """
    figure.set_size_inches(9, 3.4)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)
    losses, rates = figure.subplots(1, 2)
    for axes, name in ((losses, "loss"), (rates, "learning_rate")):
        points = [(point["step"], point[name]) for point in curve if name in point]
        axes.plot(*zip(*points, strict=True), color=MAIN, label="training")
        axes.set_xlabel("optimization step")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    held_back = [(point["step"], point["eval_loss"]) for point in curve if "eval_loss" in point]
    if held_back:
        losses.plot(*zip(*held_back, strict=True), color="#777777", marker="o", linestyle="", label="held back")
        losses.legend(frameon=False)
    losses.set_ylabel("loss")
    rates.set_ylabel("learning rate")


def draw_confusion(figure: Any, found: "Evaluation", title: str) -> None:
    """Draw the confusion matrix: counts as numbers, each row's shares as shades."""
    side = CELL_INCHES * len(found.labels) + 2.2
    figure.set_size_inches(side, side)
    axes = figure.subplots()
    shares = found.confusion / found.confusion.sum(1, keepdims=True).clip(1)
    axes.imshow(shares, cmap="Oranges", vmin=0, vmax=1)
    for truth, row in enumerate(found.confusion.tolist()):
        for predicted, count in enumerate(row):
            if count:
                colour = "white" if shares[truth, predicted] > 0.6 else "black"
                axes.text(predicted, truth, count, ha="center", va="center", fontsize=8, color=colour)
    places = range(len(found.labels))
    axes.set_xticks(places, found.labels, rotation=60, ha="right", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(places, found.labels, parse_math=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("truth")
    axes.set_title(title, loc="left", fontsize=9, parse_math=False)
