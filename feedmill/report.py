"""What a report says, in figures: read from Redis once, in one pass over the results of some hours.

Knows nothing of how it is shown (report_page.py, report_charts.py).
"""

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import quantiles

from redis import Redis

from feedmill.result_rows import Place, Row, RowReader, just_before, seconds_of
from producers.reddit.state import Gap, State
from shared import keys
from shared.messages import DeadLetter
from shared.results import HOUR, ResultsStore, newest_first
from shared.settings import Settings

#: Labels that are told apart by a colour; the others are one.
COLOURS = 16
OTHERS = "others"
#: Subreddits that are shown, and dead letters, gaps and examples.
SUBREDDITS, DEAD_LETTERS, GAPS = 15, 10, 20
#: Bars of a distribution of scores, from 0 to 1.
BINS = 20
#: Columns of what is shown over time, at most: hours are joined where there are more.
COLUMNS = 72
#: Characters of an example's title.
TITLE = 120


@dataclass
class Column:
    """A span of time: some hours, from `hour` on, counted since 1970."""

    hour: int
    #: New results by label, as the store counted them: also those that are not in the stream any more.
    labels: Counter[str] = field(default_factory=Counter)
    #: Results that were read from the stream.
    read: int = 0
    #: When they were classified: minute since 1970 -> results.
    minutes: Counter[int] = field(default_factory=Counter)
    #: Seconds from sending to the result, where the sender said when.
    waits: list[float] = field(default_factory=list)

    @property
    def busiest(self) -> float:
        """Results a second in its busiest minute."""
        return max(self.minutes.values(), default=0) / 60

    @property
    def posts(self) -> int:
        return self.labels.total()

    def wait(self, percent: int) -> float | None:
        """A percentile of the waits; None where there are none."""
        if len(self.waits) < 2:
            return self.waits[0] if self.waits else None
        return quantiles(self.waits, n=100, method="inclusive")[percent - 1]


@dataclass
class Report:
    """The figures of `hours` hours up to `made_at`, in seconds since 1970."""

    made_at: float
    hours: int
    #: Hours of one column.
    width: int
    columns: list[Column]
    #: Results in the stream, of these hours; fewer than `posts` where older ones were trimmed.
    read: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    #: Subreddit -> label -> results.
    subreddits: dict[str, Counter[str]] = field(default_factory=dict)
    #: Label -> the scores with which it was the best one, counted in `BINS` bars.
    scores: dict[str, list[int]] = field(default_factory=dict)
    #: Label -> the title of the newest post that has it.
    examples: dict[str, str] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)
    gaps: list[Gap] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    #: Dead letters of these hours by their reason.
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def posts(self) -> int:
        return self.labels.total()

    @property
    def is_of_reddit(self) -> bool:
        """Whether there is anything to say of subreddits, and of what was missed of them."""
        return any(self.subreddits) or bool(self.gaps)

    @property
    def shown_labels(self) -> list[str]:
        """Those that have a colour, the most frequent first."""
        return [label for label, _ in self.labels.most_common(COLOURS)]


def gather(redis: Redis, settings: Settings, hours: int) -> Report:
    """Raises redis.exceptions.RedisError. Nothing of posts that were purged is in it."""
    store = ResultsStore(redis, settings)
    now = time.time()
    last = int(now // HOUR)
    width = -(-hours // COLUMNS)
    first = last - hours + 1
    columns = [Column(hour) for hour in range(first, last + 1, width)]
    report = Report(now, hours, width, columns)
    for hour, counts in store.labels(hours).items():
        if hour >= first:  # an hour may have begun since
            columns[min((hour - first) // width, len(columns) - 1)].labels.update(counts)
            report.labels.update(counts)
    for chunk in RowReader(redis).chunks(Place(just_before(first * HOUR))):
        for row in chunk.rows:
            hour = int(seconds_of(row.entry) // HOUR)
            _count(report, row, columns[min((hour - first) // width, len(columns) - 1)])
    report.gaps = [gap for gap in State(redis).gaps() if gap.until >= first * HOUR]
    for _, fields in newest_first(redis, keys.DEAD_LETTERS, since=just_before(first * HOUR)):
        letter = DeadLetter.model_validate_json(fields["letter"])
        if letter.failed_at >= first * HOUR:
            report.reasons[letter.reason] += 1
            if len(report.dead) < DEAD_LETTERS:
                report.dead.append(letter)
    return report


def _count(report: Report, row: Row, column: Column) -> None:
    found, post = row.found, row.post
    label = found["label"]
    report.read += 1
    column.read += 1
    column.minutes[int(found["classified_at"] // 60)] += 1
    report.models[found["model"]] += 1
    report.subreddits.setdefault(post.get("subreddit") or "", Counter())[label] += 1
    bars = report.scores.setdefault(label, [0] * BINS)
    bars[min(max(int(found["scores"][label] * BINS), 0), BINS - 1)] += 1
    report.examples[label] = " ".join((post.get("title") or post.get("body", "")).split())[:TITLE]
    if found["queued_seconds"] is not None:
        column.waits.append(found["queued_seconds"])


def title_of(letter: DeadLetter) -> str:
    """What can be said of a dead letter's post."""
    try:
        post = json.loads(letter.post or "{}")
    except ValueError:
        return ""
    text = str(post.get("title") or post.get("body") or "") if isinstance(post, dict) else ""
    return " ".join(text.split())[:TITLE]
