"""Draw the charts of a report as PNG images (plots.py)."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from feedmill.report import plots
from feedmill.report.data import NUM_BINS, OTHERS, SUBREDDITS, Report
from feedmill.report.page import LIGHT
from shared.results import HOUR_S


def save(report: Report, folder: Path, notes: Console) -> list[Path]:
    """Save the charts in a folder and return their paths. Needs matplotlib (`plots.require`)."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"posts.png": _draw_posts, "scores.png": _draw_scores, "waits.png": _draw_waits}
    if report.is_of_reddit:
        drawings["subreddits.png"] = _draw_subreddits
    saved = []
    for name, draw in drawings.items():
        plots.save(folder / name, lambda figure, draw=draw: draw(figure, report), notes)  # type: ignore[misc]
        saved.append(folder / name)
    return saved


def _title(figure: Any, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)


def _hours(axes: Any, report: Report) -> None:
    every = max(len(report.columns) // 8, 1)
    names = [datetime.fromtimestamp(column.hour * HOUR_S, UTC).strftime("%d %b\n%H:%M") for column in report.columns]
    axes.set_xticks(range(0, len(names), every), names[::every], fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        legend = axes.legend(handles, names, fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        for text in legend.get_texts():
            text.set_parse_math(False)


def _draw_posts(figure: Any, report: Report) -> None:
    figure.set_size_inches(8, 3.6)
    _title(figure, "Posts over time, by label")
    axes = figure.subplots()
    base = [0] * len(report.columns)
    shown = report.shown_labels
    for label, colour in zip([*shown, OTHERS], LIGHT[: len(shown)] + LIGHT[-1:], strict=True):
        counts = [
            column.labels[label] if label != OTHERS else column.posts - sum(column.labels[each] for each in shown)
            for column in report.columns
        ]
        if any(counts):
            axes.bar(range(len(counts)), counts, bottom=base, color=colour, label=_name(label))
        base = [below + count for below, count in zip(base, counts, strict=True)]
    _hours(axes, report)
    _legend(axes)


def _draw_subreddits(figure: Any, report: Report) -> None:
    found = sorted(report.subreddits.items(), key=lambda each: -each[1].total())[:SUBREDDITS]
    labels = [label for label, _ in report.labels.most_common(16)]
    figure.set_size_inches(2.5 + plots.CELL_INCHES * max(len(labels), 4), 1.8 + plots.CELL_INCHES * max(len(found), 3))
    _title(figure, "Labels by subreddit: posts")
    axes = figure.subplots()
    if not found:
        return
    shares = [[counts[label] / counts.total() for label in labels] for _, counts in found]
    axes.imshow(shares, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    for row, (_, counts) in enumerate(found):
        for place, label in enumerate(labels):
            if counts[label]:
                dark = shares[row][place] > 0.6
                axes.text(
                    place, row, counts[label], ha="center", va="center", fontsize=7, color="white" if dark else "black"
                )
    axes.set_xticks(
        range(len(labels)), list(map(_name, labels)), rotation=60, ha="right", rotation_mode="anchor", parse_math=False
    )
    axes.set_yticks(range(len(found)), [_name(f"r/{name}" if name else "–") for name, _ in found], parse_math=False)


def _draw_scores(figure: Any, report: Report) -> None:
    labels = [label for label, _ in report.labels.most_common(16) if label in report.scores]
    rows = max(-(-len(labels) // 4), 1)
    figure.set_size_inches(8, 1.5 * rows + 0.4)
    _title(figure, "Scores of each label, where it is the best one")
    for number, axes in enumerate(figure.subplots(rows, 4, squeeze=False, sharex=True).flat):
        if number >= len(labels):
            axes.set_visible(False)
            continue
        axes.bar(
            [(place + 0.5) / NUM_BINS for place in range(NUM_BINS)],
            report.scores[labels[number]],
            1 / NUM_BINS,
            color=LIGHT[0],
        )
        axes.set_title(_name(labels[number]), fontsize=8, loc="left", parse_math=False)
        axes.set_xlim(0, 1)
        axes.tick_params(labelsize=6)


def _draw_waits(figure: Any, report: Report) -> None:
    figure.set_size_inches(8, 4.4)
    _title(figure, "Throughput in the busiest minute, and queue wait")
    above, below = figure.subplots(2, 1, sharex=True)
    places = range(len(report.columns))
    above.bar(places, [column.busiest for column in report.columns], color=LIGHT[2])
    above.set_ylabel("posts/s")
    for percent, colour in ((50, LIGHT[0]), (95, LIGHT[1])):
        _line(below, [column.wait(percent) for column in report.columns], colour, f"{percent}th percentile")
    below.set_ylabel("seconds")
    _hours(above, report)
    _hours(below, report)
    _legend(below)


def _line(axes: Any, values: Sequence[float | None], colour: str, name: str) -> None:
    points = [(place, value) for place, value in enumerate(values) if value is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, marker=".", label=name)


def _name(label: str) -> str:
    """Return the label for a legend, without control characters.

    A space precedes a leading underscore, because matplotlib hides such labels.
    """
    shown = "".join(character if character.isprintable() else "?" for character in label[:40])
    return f" {shown}" if shown.startswith("_") else shown
