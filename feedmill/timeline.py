"""Charts over time for pages: the columns of an axis, and stacked bars of the largest names."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

#: Maximum number of columns of a chart.
MAX_COLUMNS = 72
#: Maximum names with separate colours; all others share a name and a colour (in CSS).
MAX_COLOURED = 16
OTHERS = "others"
OTHERS_COLOUR = "var(--others)"
#: Approximate number of times to print below a chart.
AXIS_TIMES = 3
DAY_S = 86_400
HOUR_S = 3_600


class Bar(NamedTuple):
    """A bar of a chart. place: its column. top, height: in percent of the chart. colour:
    in CSS.
    """

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


class Column(NamedTuple):
    """A column of a chart over time: its beginning, in seconds since 1970, and its name."""

    start: float
    name: str


class Axis(NamedTuple):
    """Consecutive columns, and the word for what one covers."""

    unit: str
    columns: Sequence[Column]

    def place(self, seconds: float) -> int:
        """Return the column of a time. Those before the first one are in it."""
        starts = [column.start for column in self.columns]
        place = bisect_right(starts, seconds) - 1
        return max(0, place)

    @property
    def marks(self) -> Sequence[str]:
        """The times to print below the chart."""
        count = len(self.columns)
        step = math.ceil(count / AXIS_TIMES)
        return [column.name for column in self.columns[::step]]


def axis_between(first: float, last: float, has_hours: bool = True) -> Axis:
    """Return an axis of hours, days, months or years, whichever is the shortest that fits.

    first, last: the times that it covers, in seconds since 1970. has_hours: allow hours.
    """
    hours = _regular(first, last, HOUR_S, "%d %b %Y %H:%M")
    if has_hours and hours is not None:
        return Axis("hour", hours)
    days = _regular(first, last, DAY_S, "%d %b %Y")
    if days is not None:
        return Axis("day", days)
    months = _months(first, last)
    if len(months) <= MAX_COLUMNS:
        return Axis("month", months)
    years = _years(months)
    if len(years) <= MAX_COLUMNS:
        return Axis("year", years)
    # times of a file can be wrong by centuries
    step = math.ceil(len(years) / MAX_COLUMNS)
    return Axis(f"{step} years", years[::step])


def _years(months: Sequence[Column]) -> list[Column]:
    """Return the years that begin in these months, and the one that has begun before."""
    years: list[Column] = []
    for month in months:
        if years and not month.name.startswith("Jan"):
            continue
        name = month.name[-4:]
        year = Column(month.start, name)
        years.append(year)
    return years


def _regular(first: float, last: float, width: int, form: str) -> list[Column] | None:
    """Return columns of equal width; None if there are too many."""
    start = int(first // width)
    end = int(last // width)
    if end - start >= MAX_COLUMNS:
        return None
    columns: list[Column] = []
    for number in range(start, end + 1):
        seconds = number * width
        name = _time(seconds).strftime(form)
        column = Column(seconds, name)
        columns.append(column)
    return columns


def _months(first: float, last: float) -> list[Column]:
    begin = _time(first)
    end = _time(last)
    first_month = begin.year * 12 + begin.month - 1
    last_month = end.year * 12 + end.month - 1
    columns: list[Column] = []
    for month in range(first_month, last_month + 1):
        year = month // 12
        month_of_year = month % 12 + 1
        start = datetime(
            year,
            month_of_year,
            1,
            tzinfo=UTC,
        )
        name = start.strftime("%b %Y")
        column = Column(start.timestamp(), name)
        columns.append(column)
    return columns


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def colours_of(counts: Counter[str]) -> dict[str, str]:
    """Return the colours, in CSS, of the most frequent names."""
    colours: dict[str, str] = {}
    for index, (name, _) in enumerate(counts.most_common(MAX_COLOURED)):
        colours[name] = f"var(--c{index})"
    return colours


def parts_of(colours: Mapping[str, str], counts: Counter[str]) -> list[Part]:
    """Return the parts of the names with a colour of their own, in its order, and of all others
    as OTHERS.
    """
    parts: list[Part] = []
    others = counts.total()
    for name, colour in colours.items():
        posts = counts[name]
        others -= posts
        part = Part(
            name,
            posts,
            colour,
        )
        parts.append(part)
    rest = Part(
        OTHERS,
        others,
        OTHERS_COLOUR,
    )
    parts.append(rest)
    return [part for part in parts if part.posts]


def most_posts(columns: Iterable[Counter[str]]) -> int:
    """Return the number of posts of the highest column."""
    totals = map(Counter.total, columns)
    return max(totals, default=0)


def stacked_bars(
    columns: Sequence[tuple[str, Counter[str]]], colours: Mapping[str, str]
) -> Iterator[Bar]:
    """Yield the bars of each column's posts: a name's bar is below the next one's.

    columns: the time and the counts of each.
    """
    most = most_posts(counts for _, counts in columns)
    for index, (time_of_column, counts) in enumerate(columns):
        top = 100.0
        for part in parts_of(colours, counts):
            height = 100 * part.posts / most
            top -= height
            caption = f"{time_of_column}: {part.label}, {part.posts:,}"
            yield Bar(
                place=index,
                top=top,
                height=height,
                colour=part.colour,
                caption=caption,
            )
