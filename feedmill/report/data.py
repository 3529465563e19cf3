"""Gather the figures of a report from the results of the last hours in Redis.

Presentation is in page.py.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import quantiles

from redis import Redis

from feedmill.export.columns import LABEL_SEPARATOR, label_set_of
from feedmill.producers.live.state import Gap, Gaps
from feedmill.reading.rows import Place, ResultRow, RowReader, id_before, seconds_of
from feedmill.shared import keys
from feedmill.shared.messages import DeadLetter
from feedmill.shared.results import HOUR_S, ResultsStore, newest_first
from feedmill.shared.settings import Settings

#: Bins of a score histogram from 0 to 1.
NUM_BINS = 20
#: Maximum number of columns in charts over time. Longer reports merge several hours into a column.
MAX_COLUMNS = 72
#: Maximum length of an example title, in characters.
TITLE_LENGTH = 120


@dataclass
class Column:
    """The figures of one column in charts over time: one or more hours, starting at `hour` (hours since 1970)."""

    hour: int
    #: New results by label. With a single label set, they include results already trimmed from the stream.
    labels: Counter[str] = field(default_factory=Counter)
    #: Number of results by minute of classification (minutes since 1970).
    minutes: Counter[int] = field(default_factory=Counter)
    #: Seconds from enqueuing to the result, for messages that carry their time of sending.
    waits: list[float] = field(default_factory=list)

    @property
    def busiest(self) -> float:
        """Return the results per second in the busiest minute."""
        return max(self.minutes.values(), default=0) / 60

    @property
    def posts(self) -> int:
        return self.labels.total()

    @property
    def wait(self) -> float | None:
        """Return the 95th percentile of the waits in seconds; None without waits."""
        return percentile(self.waits, 95)


def percentile(values: list[float], percent: int) -> float | None:
    """Return a percentile of some values; None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass
class Report:
    """The figures of the `hours` hours before `made_at` (seconds since 1970), of one label set and perhaps one run."""

    made_at: float
    hours: int
    #: Hours per column.
    width: int
    columns: list[Column]
    #: The run, if it was chosen; and the label set, "" without results.
    run: str | None = None
    label_set: str = ""
    #: Numbers of results of the other label sets in this period, which a report never mixes.
    others: dict[str, int] = field(default_factory=dict)
    #: Number of results read from the stream; less than `posts` if older results were trimmed.
    read: int = 0
    labels: Counter[str] = field(default_factory=Counter)
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
    def posts(self) -> int:
        return self.labels.total()

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
    others = Counter(label_set_of(row.found) for row in _rows(redis, first, run))
    ((largest, _),) = others.most_common(1) or [("", 0)]
    chosen = largest if labels is None else labels
    others.pop(chosen, None)
    columns = [Column(hour) for hour in range(first, last + 1, width)]
    report = Report(now, hours, width, columns, run, chosen, dict(others.most_common()))
    for row in _rows(redis, first, run):
        if label_set_of(row.found) == chosen:
            hour = int(seconds_of(row.entry) // HOUR_S)
            _count(report, row, columns[min((hour - first) // width, len(columns) - 1)])
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
    report.labels.clear()
    for column in report.columns:
        column.labels.clear()
    for hour, found in recent.items():
        report.columns[min((hour - first) // report.width, len(report.columns) - 1)].labels.update(found)
        report.labels.update(found)


def _count(report: Report, row: ResultRow, column: Column) -> None:
    found, post = row.found, row.post
    label = found["label"]
    report.labels[label] += 1
    column.labels[label] += 1
    report.read += 1
    column.minutes[int(found["classified_at"] // 60)] += 1
    report.models[found["model"]] += 1
    report.subreddits.setdefault(post.get("subreddit") or "", Counter())[label] += 1
    bars = report.scores.setdefault(label, [0] * NUM_BINS)
    bars[min(max(int(found["scores"][label] * NUM_BINS), 0), NUM_BINS - 1)] += 1
    report.examples[label] = " ".join((post.get("title") or post.get("body", "")).split())[:TITLE_LENGTH]
    if found["queued_seconds"] is not None:
        column.waits.append(found["queued_seconds"])
