"""The page of a study: plots over the posts' own time by label, subreddit and language, in the
look of the report.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from feedmill.pages import render
from feedmill.studies.figures import Figures
from feedmill.studies.state import StudyState
from feedmill.timeline import (
    DAY_S,
    Axis,
    Bar,
    Part,
    axis_between,
    colours_of,
    most_posts,
    parts_of,
    stacked_bars,
)

#: Maximum number of labels and subreddits to show.
MAX_LABELS = 30
MAX_SUBREDDITS = 15
#: Names of missing values in charts.
NO_SUBREDDIT = "no subreddit"
NO_LANGUAGE = "uncertain"


class TimeChart(NamedTuple):
    """A chart over time. legend: the names with their colours and numbers."""

    bars: Sequence[Bar]
    columns: int
    most: int
    marks: Sequence[str]
    unit: str
    legend: Sequence[Part]


def page(state: StudyState, figures: Figures) -> str:
    """Return the complete HTML page."""
    axis = _axis(figures)
    subreddits = Counter[str]()
    for name, counts in figures.subreddits.items():
        subreddits[name] = counts.total()
    by_subreddit = None
    if any(figures.subreddits):
        by_subreddit = _chart(
            axis,
            figures.subreddit_days,
            subreddits,
            NO_SUBREDDIT,
        )
    by_language = None
    if figures.languages:
        by_language = _chart(
            axis,
            figures.language_days,
            figures.languages,
            NO_LANGUAGE,
        )
    label_colours = colours_of(figures.labels)
    return render(
        "study.html",
        state=state,
        figures=figures,
        names=[Path(dump.name).name for dump in state.dumps],
        by_label=_chart(axis, figures.label_days, figures.labels, ""),
        by_subreddit=by_subreddit,
        by_language=by_language,
        labels=parts_of(label_colours, figures.labels)[:MAX_LABELS],
        subreddits=_largest(figures, subreddits, label_colours),
        legend=parts_of(label_colours, figures.labels),
    )


def _axis(figures: Figures) -> Axis | None:
    """Return the axis of the rows with a time; None without any."""
    days = [day for day, _ in figures.label_days]
    if not days:
        return None
    first = min(days) * DAY_S
    last = max(days) * DAY_S
    return axis_between(first, last, has_hours=False)  # rows are counted by day


def _chart(
    axis: Axis | None,
    days: Mapping[tuple[int, str], int],
    totals: Counter[str],
    nameless: str,
) -> TimeChart | None:
    """Return a chart of names by day; None without times. nameless: what "" is shown as."""
    if axis is None:
        return None
    columns = [Counter[str]() for _ in axis.columns]
    for day_and_name, count in days.items():
        day, name = day_and_name
        seconds = day * DAY_S
        place = axis.place(seconds)
        column = columns[place]
        column[name or nameless] += count
    shown_totals = Counter[str]()
    for name, count in totals.items():
        shown_totals[name or nameless] += count
    colours = colours_of(shown_totals)
    names = [column.name for column in axis.columns]
    timed = list(zip(names, columns, strict=True))
    bars = list(stacked_bars(timed, colours))
    return TimeChart(
        bars=bars,
        columns=len(columns),
        most=most_posts(columns),
        marks=axis.marks,
        unit=axis.unit,
        legend=parts_of(colours, shown_totals),
    )


def _largest(
    figures: Figures, subreddits: Counter[str], colours: Mapping[str, str]
) -> list[tuple[str, Counter[str], list[Part]]]:
    """Return the largest subreddits with their labels."""
    rows: list[tuple[str, Counter[str], list[Part]]] = []
    for name, _ in subreddits.most_common(MAX_SUBREDDITS):
        counts = figures.subreddits[name]
        parts = parts_of(colours, counts)
        row = (name, counts, parts)
        rows.append(row)
    return rows
