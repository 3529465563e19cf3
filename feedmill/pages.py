"""Render self-contained HTML pages: no scripts, external fonts or images.

Texts from posts, messages and workers are untrusted: the templates escape every value and make it
printable, and the page's Content-Security-Policy blocks scripts and all external content.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from feedmill.console import counted
from feedmill.shared.errors import printable

#: Folder with the templates, and their style sheet.
TEMPLATES = Path(__file__).parent / "templates"
#: Most lines of a chart's grid.
MAX_TICKS = 5


def render(
    template: str,
    filters: Mapping[str, Callable[..., Any]] | None = None,
    **values: Any,
) -> str:
    """Return a template's complete page. filters: see `make_environment`."""
    environment = make_environment(TEMPLATES, filters)
    return environment.get_template(template).render(**values)


def make_environment(
    folder: Path, filters: Mapping[str, Callable[..., Any]] | None = None
) -> Environment:
    """Return what renders the templates of a folder.

    filters: functions that they call with `|`, besides number and counted.
    """
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters["number"] = "{:,}".format
    environment.filters["counted"] = counted
    environment.filters.update(filters or {})
    return environment


def _printable(value: Any) -> Any:
    """Return text without control characters. Markup comes from the template itself."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


class Point(NamedTuple):
    """A point of a curve, and what a reader sees when pointing at it."""

    x: float
    y: float
    caption: str


class Tick(NamedTuple):
    """A line of the grid, in percent from the left or from the top, and its number."""

    place: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A curve over sizes, drawn from zero. is_doubling: each size is about twice the last, so that
    distances are logs.

    missing: sizes that were not measured because memory ran out; drawn as a line from top to
    bottom.
    """

    points: Sequence[Point]
    is_doubling: bool = False
    missing: Sequence[float] = ()

    def placed(self) -> list[Point]:
        """Return the points in percent of the chart, from the left and from the top."""
        return [
            Point(
                x=self._left(point.x),
                y=self._top(point.y),
                caption=point.caption,
            )
            for point in self.points
        ]

    def missing_places(self) -> list[float]:
        return [self._left(size) for size in self.missing]

    @property
    def columns(self) -> list[Tick]:
        """The sizes below the chart."""
        sizes = sorted(set(self._sizes))
        step = math.ceil(len(sizes) / (2 * MAX_TICKS))
        return [
            Tick(
                place=self._left(size),
                text=f"{size:,.0f}",
            )
            for size in sizes[::step]
        ]

    @property
    def rows(self) -> list[Tick]:
        """The lines of the grid, from zero to the highest round number."""
        step = _round_step(self._highest / MAX_TICKS)
        count = math.floor(self._highest / step)
        figures = [number * step for number in range(count + 1)]
        return [
            Tick(
                place=self._top(figure),
                text=_short(figure),
            )
            for figure in figures
        ]

    @property
    def _sizes(self) -> list[float]:
        return [*(point.x for point in self.points), *self.missing]

    @property
    def _highest(self) -> float:
        figures = [point.y for point in self.points]
        return max(figures, default=0.0) or 1.0

    def _left(self, size: float) -> float:
        first = self._scaled(min(self._sizes))
        last = self._scaled(max(self._sizes))
        if first == last:
            return 50.0
        distance = self._scaled(size) - first
        return 100 * distance / (last - first)

    def _top(self, figure: float) -> float:
        height = 100 * figure / self._highest
        return 100 - height

    def _scaled(self, size: float) -> float:
        if self.is_doubling:
            return math.log2(size)
        return size


@dataclass(frozen=True)
class TitledChart:
    """A chart with its title. unit: of the horizontal axis, if the page names it."""

    title: str
    chart: Chart
    unit: str = ""


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    exponent = math.floor(math.log10(least))
    power = 10.0**exponent
    tolerated = least * 0.999
    steps = [power * factor for factor in (1, 2, 5, 10)]
    return next(step for step in steps if step >= tolerated)


def _short(figure: float) -> str:
    """Format a number of a grid: three digits suffice."""
    if figure >= 10:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"
