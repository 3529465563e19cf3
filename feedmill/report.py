"""Write an HTML report of recent results: gather its figures from Redis, and render one self-contained page.

The page has no scripts, external fonts or images. Text from posts, messages and workers is untrusted: the template
escapes every value and makes it printable, and the page's Content-Security-Policy blocks scripts and all external
content.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from redis import Redis

from feedmill.console import counted
from feedmill.export.columns import LABEL_SEPARATOR, label_set
from feedmill.producers.live.state import Gap, Gaps
from feedmill.reading import Place, ResultRow, RowReader, id_before, seconds_of
from feedmill.shared import keys
from feedmill.shared.errors import printable, truncate
from feedmill.shared.messages import DeadLetter
from feedmill.shared.results import HOUR_S, ResultsStore, newest_first
from feedmill.shared.settings import Settings

#: Bins of a score histogram from 0 to 1.
NUM_BINS = 20
#: Maximum number of columns in charts over time. Longer reports merge several hours into a column.
MAX_COLUMNS = 72
#: Maximum length of an example title, in characters.
TITLE_LENGTH = 120
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


@dataclass
class Report:
    """The figures of the `hours` hours before `made_at` (seconds since 1970), of one label set and perhaps one run."""

    made_at: float
    hours: int
    #: Hours per column.
    width: int
    #: New results by label in each column: one or more hours, starting at this one (hours since 1970). With a single
    #: label set, they include results already trimmed from the stream.
    columns: dict[int, Counter[str]]
    #: The run, if it was chosen; and the label set, "" without results.
    run: str | None = None
    label_set: str = ""
    #: Numbers of results of the other label sets in this period, which a report never mixes.
    others: dict[str, int] = field(default_factory=dict)
    #: Number of results read from the stream; less than `posts` if older results were trimmed.
    read: int = 0
    #: Number of results by subreddit and label.
    subreddits: dict[str, Counter[str]] = field(default_factory=dict)
    #: Histogram (NUM_BINS bins) of each label's scores, over the results in which it was the best label.
    scores: dict[str, list[int]] = field(default_factory=dict)
    #: Title of the newest post of each label.
    examples: dict[str, str] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)
    gaps: list[Gap] = field(default_factory=list)
    #: Number of dead letters by reason.
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def labels(self) -> Counter[str]:
        """Number of results by label."""
        return sum(self.columns.values(), Counter[str]())

    @property
    def posts(self) -> int:
        return self.labels.total()

    def column(self, hour: int) -> Counter[str]:
        """Return the counts of the column with an hour since 1970. Those after the last hour are in the last column."""
        first, last = next(iter(self.columns)), next(reversed(self.columns))
        return self.columns[min(first + (hour - first) // self.width * self.width, last)]

    @property
    def is_of_reddit(self) -> bool:
        """Return True if there are posts with a subreddit, or gaps in reading one."""
        return any(self.subreddits) or bool(self.gaps)


def gather(redis: Redis, settings: Settings, hours: int, run: str | None = None, labels: str | None = None) -> Report:
    """Gather the report of the last `hours` hours. Purged posts appear only in the hourly counts.

    run: only results of this run. labels: the label set, as feedmill.export.columns.label_set names it; None selects
    that of the most results. Raises redis.exceptions.RedisError.
    """
    now = time.time()
    width = -(-hours // MAX_COLUMNS)
    last = int(now // HOUR_S)
    first = last - hours + 1
    others = Counter(label_set(row.found["scores"]) for row in _rows(redis, first, run))
    ((largest, _),) = others.most_common(1) or [("", 0)]
    chosen = largest if labels is None else labels
    others.pop(chosen, None)
    columns = {hour: Counter[str]() for hour in range(first, last + 1, width)}
    report = Report(now, hours, width, columns, run, chosen, dict(others.most_common()))
    for row in _rows(redis, first, run):
        if label_set(row.found["scores"]) == chosen:
            _count(report, row)
    if run is None and labels is None:
        _count_trimmed(report, ResultsStore(redis, settings).labels(hours), first)
    if run is None:
        report.gaps = [gap for gap in Gaps(redis).open("reddit") if gap.until >= first * HOUR_S]
    for _, fields in newest_first(redis, keys.DEAD_LETTERS, since=id_before(first * HOUR_S)):
        letter = DeadLetter.model_validate_json(fields["letter"])
        if letter.failed_at >= first * HOUR_S and (run is None or letter.run == run):
            report.reasons[letter.reason] += 1
    return report


def _rows(redis: Redis, first: int, run: str | None) -> Iterator[ResultRow]:
    """Yield the results since an hour, of the run if one is given. first: hours since 1970."""
    for chunk in RowReader(redis).chunks(Place(id_before(first * HOUR_S))):
        yield from (row for row in chunk.rows if run is None or row.post.get("run") == run)


def _count_trimmed(report: Report, counts: dict[int, dict[str, int]], first: int) -> None:
    """Replace the counts by label with the hourly counters, which include results that were trimmed from the stream.

    The counters do not tell label sets apart, so they are used only if there is no other one. counts: hour -> label.
    first: the report's first hour.
    """
    recent = {hour: found for hour, found in counts.items() if hour >= first}  # the hour may have changed meanwhile
    known = set(report.label_set.split(LABEL_SEPARATOR))
    if report.others or any(report.label_set and label not in known for found in recent.values() for label in found):
        return
    for column in report.columns.values():
        column.clear()
    for hour, found in recent.items():
        report.column(hour).update(found)


def _count(report: Report, row: ResultRow) -> None:
    found, post = row.found, row.post
    label = found["label"]
    report.column(int(seconds_of(row.entry) // HOUR_S))[label] += 1
    report.read += 1
    report.models[found["model"]] += 1
    report.subreddits.setdefault(post.get("subreddit") or "", Counter())[label] += 1
    bars = report.scores.setdefault(label, [0] * NUM_BINS)
    bars[min(max(int(found["scores"][label] * NUM_BINS), 0), NUM_BINS - 1)] += 1
    report.examples[label] = " ".join((post.get("title") or post.get("body", "")).split())[:TITLE_LENGTH]


# The page.


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
    hours, colours = list(report.columns), _colours(report)
    return templates.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        label_set=truncate(report.label_set, SHOWN_LABELS),
        parts=lambda counts: _parts(report, counts),
        stacked=list(_stacked(report)),
        most=max(counts.total() for counts in report.columns.values()),
        histogram=_histogram,
        median_score=_median_score,
        largest_labels=[
            Part(label, count, colours.get(label, OTHERS_COLOUR))
            for label, count in report.labels.most_common(2 * SUBREDDITS)
        ],
        largest_subreddits=sorted(report.subreddits.items(), key=lambda each: -each[1].total())[:SUBREDDITS],
        marked_hours=hours[:: -(-len(hours) // AXIS_TIMES)],
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
    most = max(counts.total() for counts in report.columns.values())
    for place, (hour, counts) in enumerate(report.columns.items()):
        top = 100.0
        for label, count, colour in _parts(report, counts):
            top -= 100 * count / most
            yield Bar(place, top, 100 * count / most, colour, f"{_hour(hour)}: {label}, {count:,}")


def _histogram(counts: Sequence[int]) -> list[Bar]:
    """Return the bars of a histogram of scores, the largest as high as the chart."""
    shares = [100 * count / max(counts) for count in counts]
    return [
        Bar(place, 100 - share, share, "var(--c0)", f"{counts[place]:,} from {place / NUM_BINS:.2f}")
        for place, share in enumerate(shares)
        if share
    ]


def _median_score(counts: Sequence[int]) -> float:
    """Return the approximate median score: the middle of the histogram bin that contains it."""
    totals = list(accumulate(counts))
    return (bisect_left(totals, totals[-1] / 2) + 0.5) / NUM_BINS


def _hour(hour: int) -> str:
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%d %b %H:%M")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
