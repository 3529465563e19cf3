"""Render a report as one self-contained HTML page, without scripts, external fonts or images.

Text from posts, messages and workers is untrusted: the template escapes every value and makes it printable, and the
page's Content-Security-Policy blocks scripts and all external content.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from feedmill.console import counted
from feedmill.report.data import NUM_BINS, Column, Report, percentile
from feedmill.shared.errors import printable, truncate
from feedmill.shared.results import HOUR_S

#: Maximum numbers of subreddits, reasons of dead letters and gaps to show.
SUBREDDITS, REASONS, GAPS = 15, 10, 20
#: Approximate number of times to print below a chart.
AXIS_TIMES = 3
#: Characters of the label set to show.
SHOWN_LABELS = 300
#: Maximum labels with separate colours; all other labels share a name and a colour (in CSS).
MAX_COLOURED_LABELS = 16
OTHERS, OTHERS_COLOUR = "others", "var(--others)"
#: Template of the page, with its style sheet.
TEMPLATE = Path(__file__).with_suffix(".html")


class Bar(NamedTuple):
    """A bar of a chart. place: its column. top, height: in percent of the chart. colour: in CSS."""

    place: int
    top: float
    height: float
    colour: str
    caption: str


class Part(NamedTuple):
    """A label's share of some posts. colour: in CSS."""

    label: str
    posts: int
    colour: str


def page(report: Report) -> str:
    """Return the complete HTML page."""
    templates = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    templates.filters |= {"number": "{:,}".format, "counted": counted, "hour": _hour, "when": _when}
    templates.filters |= {"rate": _rate, "seconds": _seconds}
    columns, colours = report.columns, _colours(report)
    waits = [column.wait for column in columns]
    return templates.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        label_set=truncate(report.label_set, SHOWN_LABELS),
        parts=lambda counts: _parts(report, counts),
        stacked=list(_stacked(report)),
        busiest=max((column.busiest for column in columns), default=0.0),
        throughput=_bars(
            [column.busiest for column in columns],
            "var(--c2)",
            lambda place, rate: f"{_hour(columns[place])}: {_rate(rate)}/s",
        ),
        longest_wait=max((wait for wait in waits if wait is not None), default=0.0),
        waits=_bars(waits, "var(--c1)", lambda place, wait: f"{_hour(columns[place])}: {_seconds(wait)}"),
        median_wait=percentile([wait for column in columns for wait in column.waits], 50),
        histogram=_histogram,
        median_score=_median_score,
        largest_labels=[
            Part(label, count, colours.get(label, OTHERS_COLOUR))
            for label, count in report.labels.most_common(2 * SUBREDDITS)
        ],
        largest_subreddits=sorted(report.subreddits.items(), key=lambda each: -each[1].total())[:SUBREDDITS],
        marked_columns=columns[:: max(-(-len(columns) // AXIS_TIMES), 1)],
        gaps=report.gaps[-GAPS:],
        reasons=report.reasons.most_common(REASONS),
    )


def _printable(value: Any) -> Any:
    """Return what the template writes: text without control characters. Markup comes from the template itself."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _parts(report: Report, counts: Counter[str]) -> list[Part]:
    """Return the parts of the labels with a colour of their own, in its order, and of all others as OTHERS."""
    shown = [Part(label, counts[label], colour) for label, colour in _colours(report).items()]
    others = counts.total() - sum(part.posts for part in shown)
    return [part for part in (*shown, Part(OTHERS, others, OTHERS_COLOUR)) if part.posts]


def _colours(report: Report) -> dict[str, str]:
    """Return the colours, in CSS, of the most frequent labels."""
    largest = report.labels.most_common(MAX_COLOURED_LABELS)
    return {label: f"var(--c{place})" for place, (label, _) in enumerate(largest)}


def _stacked(report: Report) -> Iterator[Bar]:
    """Yield the bars of each column's posts: a label's bar is below the next one's."""
    most = max((column.posts for column in report.columns), default=0)
    for place, column in enumerate(report.columns):
        top = 100.0
        for label, count, colour in _parts(report, column.labels):
            top -= 100 * count / most
            yield Bar(place, top, 100 * count / most, colour, f"{_hour(column)}: {label}, {count:,}")


def _bars(values: Sequence[float | None], colour: str, caption: Callable[[int, float], str]) -> list[Bar]:
    """Return a bar for each value that is not 0 or None, the largest as high as the chart.

    caption: returns the text for a place and its value.
    """
    most = max((value for value in values if value is not None), default=0.0)
    return [
        Bar(place, 100 - 100 * value / most, 100 * value / most, colour, caption(place, value))
        for place, value in enumerate(values)
        if value
    ]


def _histogram(counts: Sequence[int]) -> list[Bar]:
    """Return the bars of a histogram of scores."""
    return _bars(counts, "var(--c0)", lambda place, count: f"{count:,} from {place / NUM_BINS:.2f}")


def _median_score(counts: Sequence[int]) -> float:
    """Return the approximate median score: the middle of the histogram bin that contains it."""
    totals = list(accumulate(counts))
    return (bisect_left(totals, totals[-1] / 2) + 0.5) / NUM_BINS


def _hour(column: Column) -> str:
    return datetime.fromtimestamp(column.hour * HOUR_S, UTC).strftime("%d %b %H:%M")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.1f} s" if value < 120 else f"{value / 60:,.0f} min"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2f}"
