"""A chart of labels over time, by the posts' own time."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from feedmill.outcomes.rows import ResultRow
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.web.pages.frame import MAX_TIME, MIN_TIME, time_text

#: Columns of a chart, at most.
MAX_COLUMNS = 60
#: Labels with a colour of their own.
MAX_COLOURS = 16
OTHERS = "others"
#: Posts of which the earliest and the latest hundredth are left out if they are far away: dates of
#: posts are often wrong, and one of 1970 would squeeze all others into one column.
MIN_TO_TRIM = 100
TRIMMED_SHARE = 0.01
#: Lengths of a column, in seconds: from a second to ten years.
HOUR_S = 3600
DAY_S = 86_400
STEPS = (
    1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, HOUR_S, 2 * HOUR_S, 3 * HOUR_S, 6 * HOUR_S,
    12 * HOUR_S, DAY_S, 2 * DAY_S, 7 * DAY_S, 14 * DAY_S, 30 * DAY_S, 90 * DAY_S, 365 * DAY_S,
    3650 * DAY_S,
)  # fmt: skip
#: Times below the chart.
AXIS_TIMES = 3


class Bar(NamedTuple):
    """A label's part of a column. top, height: percent of the chart. colour: a CSS class."""

    place: int
    top: float
    height: float
    colour: str
    caption: str


@dataclass
class Timeline:
    """Posts by label in columns of equal length."""

    #: Seconds since 1970 at which the first column begins, and the length of each.
    start: float = 0.0
    width: float = 1.0
    columns: list[Counter[str]] = field(default_factory=list)
    #: Posts; those without a time of their own, whose label's time counts; those left out.
    posts: int = 0
    without_time: int = 0
    left_out: int = 0

    @property
    def labels(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for column in self.columns:
            counts.update(column)
        return counts

    @property
    def colours(self) -> dict[str, str]:
        """CSS classes of the most frequent labels, in order of the alphabet, so that a label
        keeps its colour while its frequency changes.
        """
        frequent = [label for label, _ in self.labels.most_common(MAX_COLOURS)]
        return {label: f"c{place}" for place, label in enumerate(sorted(frequent))}

    @property
    def highest(self) -> int:
        """The number of posts of the highest column."""
        totals = map(Counter.total, self.columns)
        return max(totals, default=0)

    def bars(self) -> Iterator[Bar]:
        """Yield the bars: a label's one is below the next one's."""
        colours = self.colours
        highest = self.highest
        for place, counts in enumerate(self.columns):
            top = 100.0
            when = time_text(self.start + place * self.width)
            parts: Counter[str] = Counter()
            for label, count in counts.items():
                name = label
                if label not in colours:
                    name = OTHERS
                parts[name] += count
            for label in [*colours, OTHERS]:
                if not parts[label]:
                    continue
                height = 100 * parts[label] / highest
                top -= height
                yield Bar(
                    place=place,
                    top=top,
                    height=height,
                    colour=colours.get(label, OTHERS),
                    caption=f"{when}: {label}, {parts[label]:,}",
                )

    @property
    def axis(self) -> list[str]:
        """Times to print below the chart: of its beginning, in between, and its end."""
        end = len(self.columns)
        step = math.ceil(end / AXIS_TIMES)
        last = end - step // 2
        texts: list[str] = []
        for place in [*range(0, last, step), end]:
            seconds = self.start + place * self.width
            text = time_text(seconds)
            if self.width >= DAY_S:
                text, _, _ = text.partition(" ")
            texts.append(text)
        return texts


def timeline_of(rows: Sequence[ResultRow]) -> Timeline:
    """Return the chart of some rows."""
    timeline = Timeline(posts=len(rows))
    if not rows:
        return timeline
    times: list[float] = []
    for row in rows:
        own = own_time(row)
        if own is None:
            timeline.without_time += 1
            own = float(row.found.get("classified_at", 0.0))
        times.append(own)
    first, last = _range(times)
    length = last - first
    timeline.width = _column_width(length)
    timeline.start = math.floor(first / timeline.width) * timeline.width
    count = math.floor((last - timeline.start) / timeline.width) + 1
    timeline.columns = [Counter() for _ in range(count)]
    for row, time in zip(rows, times, strict=True):
        if not first <= time <= last:
            timeline.left_out += 1
            continue
        place = math.floor((time - timeline.start) / timeline.width)
        timeline.columns[place][row.found["label"] or NO_LABEL] += 1
    return timeline


def _column_width(length: float) -> float:
    """Return the seconds of a column, for a chart over some seconds."""
    widest = length / (MAX_COLUMNS - 1)
    for step in STEPS:
        if step > widest:
            return step
    return widest


def own_time(row: ResultRow) -> float | None:
    """Return the time at which a post was written; None if it is unknown."""
    value = row.post.get("created_utc")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not MIN_TIME <= value <= MAX_TIME:
        return None
    return float(value)


def _range(times: Sequence[float]) -> tuple[float, float]:
    """Return the earliest and the latest time to show.

    Of many, the outermost hundredth is left out where it is further away than all others span.
    """
    ordered = sorted(times)
    first = ordered[0]
    last = ordered[-1]
    if len(ordered) < MIN_TO_TRIM:
        return first, last
    outermost = int(len(ordered) * TRIMMED_SHARE)
    inner_first = ordered[outermost]
    inner_last = ordered[-1 - outermost]
    far = max(inner_last - inner_first, DAY_S)
    if inner_first - first > far:
        first = inner_first
    if last - inner_last > far:
        last = inner_last
    return first, last
