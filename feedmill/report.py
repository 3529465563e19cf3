"""Write an HTML report of recent results: gather its figures from Redis, and render one
self-contained page.

The page has no scripts, external fonts or images. Text from posts, messages and workers is
untrusted: the template escapes every value and makes it printable, and the page's
Content-Security-Policy blocks scripts and all external content.
"""

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

from redis import Redis

from feedmill.exporting.columns import LABEL_SEPARATOR, label_set
from feedmill.outcomes.dead_letters import read_letter
from feedmill.outcomes.rows import (
    Place,
    ResultRow,
    RowReader,
    id_before,
    label_score,
    seconds_of,
)
from feedmill.pages import render
from feedmill.producers.live.state import Gap, Gaps
from feedmill.shared import keys
from feedmill.shared.errors import truncate
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.results import HOUR_S, ResultsStore, newest_first
from feedmill.shared.settings import Settings
from feedmill.timeline import (
    AXIS_TIMES,
    MAX_COLUMNS,
    OTHERS_COLOUR,
    Axis,
    Bar,
    Part,
    axis_between,
    colours_of,
    most_posts,
    parts_of,
    stacked_bars,
)

#: Bins of a score histogram from 0 to 1.
NUM_BINS = 20
#: Maximum length of an example title, in characters.
TITLE_LENGTH = 120
#: Maximum numbers of subreddits, reasons of dead letters and gaps to show.
SUBREDDITS = 15
REASONS = 10
GAPS = 20
#: Characters of the label set to show.
SHOWN_LABELS = 300
#: Characters of a model's digest, where two models have one name.
SHOWN_WEIGHTS = 12


@dataclass
class ResultsReport:
    """The figures of the `hours` hours before `made_at` (seconds since 1970), of one label set,
    one model and perhaps one run.
    """

    made_at: float
    hours: int
    #: Hours per column.
    width: int
    #: Posts by label in each column: one or more hours, starting at this one (hours since 1970);
    #: with an axis, the number of its column. A post counts once, with its newest result. Hours
    #: whose results were trimmed from the stream have the numbers of new results.
    columns: dict[int, Counter[str]]
    #: The columns of posts of files, which are placed by their own time; None for posts that are
    #: placed by the time of their result. undated: posts of files without a time, by label.
    axis: Axis | None = None
    undated: Counter[str] = field(default_factory=Counter)
    #: The run, if it was chosen; and the label set, "" without results.
    run: str | None = None
    label_set: str = ""
    #: Numbers of posts of the other label sets in this period, which a report never mixes; and of
    #: the other models of this label set.
    others: dict[str, int] = field(default_factory=dict)
    other_models: dict[str, int] = field(default_factory=dict)
    #: Number of posts read from the stream; less than `posts` if older results were trimmed.
    read: int = 0
    #: Number of earlier results of these posts, of an earlier text, which are left out.
    earlier: int = 0
    #: The hour (since 1970) before which results are left out because they were trimmed from the
    #: stream; None if none are.
    cut_before: int | None = None
    #: Number of posts by subreddit and label. Names that differ in case are one: spellings has the
    #: one to show of each name in lower case.
    subreddits: dict[str, Counter[str]] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    #: Histogram (NUM_BINS bins) of each label's scores, over the posts whose best label it is.
    scores: dict[str, list[int]] = field(default_factory=dict)
    #: Title of the newest post of each label.
    examples: dict[str, str] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)
    gaps: list[Gap] = field(default_factory=list)
    #: Number of dead letters by reason.
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def labels(self) -> Counter[str]:
        """Number of posts by label."""
        counts = Counter[str]()
        for column in self.columns.values():
            counts += column
        return counts + self.undated

    @property
    def posts(self) -> int:
        return self.labels.total()

    def column(self, hour: int) -> Counter[str]:
        """Return the counts of the column with an hour since 1970.

        Those after the last hour are in the last column.
        """
        first = next(iter(self.columns))
        last = next(reversed(self.columns))
        hours_since = hour - first
        hours_into_column = hours_since % self.width
        start = hour - hours_into_column
        start = min(start, last)
        return self.columns[start]

    @property
    def is_of_reddit(self) -> bool:
        """Return True if there are posts with a subreddit, or gaps in reading one."""
        if self.gaps:
            return True
        return any(self.subreddits)


@dataclass
class ModelPosts:
    """The posts of a label set and a model in the stream."""

    model: str
    weights: str
    #: Stream entry of each post's newest result, by the post's id and run: ids belong to their
    #: run.
    newest: dict[tuple[str, str | None], str] = field(default_factory=dict)
    #: Number of the posts' earlier results; and of the posts that came from files.
    earlier: int = 0
    of_files: int = 0
    #: The times of the first and the last post, in seconds since 1970.
    first_created: float = math.inf
    last_created: float = -math.inf

    def add(self, row: ResultRow) -> None:
        """Add a result that is newer than those before."""
        post_id = row.post["id"]
        run = row.post.get("run")
        post = (post_id, run)
        if post in self.newest:
            self.earlier += 1
        elif run is not None:
            self.of_files += 1
        self.newest[post] = row.entry
        created = row.post.get("created_utc")
        if created is not None:
            self.first_created = min(self.first_created, created)
            self.last_created = max(self.last_created, created)

    def axis(self) -> Axis | None:
        """Return the axis of the posts' own times, if most of them come from files: they may be
        years older than their results. None for other posts, and without times.
        """
        if self.first_created > self.last_created:
            return None
        if 2 * self.of_files <= len(self.newest):
            return None
        return axis_between(self.first_created, self.last_created)


class Contents(NamedTuple):
    """The results of a period: by label set, and then by model and weights."""

    sets: dict[str, dict[tuple[str, str], ModelPosts]]

    def sizes(self) -> Counter[str]:
        """Return the number of posts of each label set."""
        sizes = Counter[str]()
        for name, models in self.sets.items():
            posts: set[tuple[str, str | None]] = set()
            for of_model in models.values():
                posts.update(of_model.newest)
            sizes[name] = len(posts)
        return sizes

    def choose(self, label_set: str, model: str | None) -> ModelPosts:
        """Return the posts of a model: the named one, else that of the most posts, of several the
        newest one.

        model: its name, or the beginning of its weights' digest.
        """
        choice = ModelPosts("", "")
        for of_model in self.sets.get(label_set, {}).values():
            if model is not None and not _is_named(of_model, model):
                continue
            if len(of_model.newest) >= len(choice.newest):
                choice = of_model
        return choice

    def has_one_model(self) -> bool:
        count = sum(len(models) for models in self.sets.values())
        return count <= 1


def _is_named(posts: ModelPosts, name: str) -> bool:
    """Return whether posts are of a model with this name or these weights."""
    if posts.model == name:
        return True
    return len(name) >= SHOWN_WEIGHTS and posts.weights.startswith(name)


def gather(
    redis: Redis,
    settings: Settings,
    hours: int,
    run: str | None = None,
    labels: str | None = None,
    model: str | None = None,
) -> ResultsReport:
    """Gather the report of the last `hours` hours. Purged posts appear only in the hourly counts.

    run: only results of this run. labels: the label set, as feedmill.exporting.columns.label_set
    names it; None selects that of the most posts. model: its name, or the beginning of its
    weights' digest; None selects that of the most posts. Raises redis.exceptions.RedisError.
    """
    now = time.time()
    last = int(now // HOUR_S)
    first = last - hours + 1
    since = first * HOUR_S
    trimmed = _trimmed_counts(
        redis,
        settings,
        hours,
        first,
    )
    contents = _contents(redis, since, run)
    sizes = contents.sizes()
    name = ""
    if labels is not None:
        name = labels
    elif sizes:
        [(name, _)] = sizes.most_common(1)
    posts = contents.choose(name, model)
    sizes.pop(name, None)

    width = math.ceil(hours / MAX_COLUMNS)
    axis = posts.axis()
    if axis is None:
        starts: Sequence[int] = range(first, last + 1, width)
    else:
        starts = range(len(axis.columns))
    report = ResultsReport(
        made_at=now,
        hours=hours,
        width=width,
        columns={start: Counter() for start in starts},
        axis=axis,
        run=run,
        label_set=name,
        others=dict(sizes.most_common()),
        other_models=_other_models(contents, name, posts),
        earlier=posts.earlier,
    )
    # The hourly counts tell neither runs, label sets, models nor the posts' own times apart.
    is_whole = run is None and labels is None and model is None and axis is None
    is_usable = is_whole and _are_comparable(trimmed, name, contents)
    if trimmed and not is_usable:
        report.cut_before = max(trimmed)
        trimmed = {}
    for hour, counts in trimmed.items():
        column = report.column(hour)
        column.update(counts)
    entries = set(posts.newest.values())
    for row in _rows(redis, since, run):
        if row.entry in entries:
            _count(report, row, trimmed)
    if run is None:
        gaps = Gaps(redis).open("reddit")
        report.gaps = [gap for gap in gaps if gap.until >= since]
    _count_dead_letters(report, redis, since)
    return report


def _contents(redis: Redis, since: int, run: str | None) -> Contents:
    """Return the posts with results of each label set and model. since: seconds since 1970."""
    contents = Contents({})
    for row in _rows(redis, since, run):
        name = label_set(row.found["scores"])
        models = contents.sets.setdefault(name, {})
        model = row.found["model"]
        weights = row.found["weights"]
        key = (model, weights)
        if key not in models:
            models[key] = ModelPosts(model, weights)
        models[key].add(row)
    return contents


def _other_models(
    contents: Contents, label_set: str, chosen: ModelPosts
) -> dict[str, int]:
    """Return the numbers of posts of the other models of a label set, by name."""
    numbers: dict[str, int] = {}
    models = contents.sets.get(label_set, {})
    names = [model for model, _ in models]
    for posts in models.values():
        if posts is chosen:
            continue
        name = posts.model
        if names.count(name) > 1:
            digest = posts.weights[:SHOWN_WEIGHTS]
            name = f"{name} ({digest})"
        numbers[name] = len(posts.newest)
    return numbers


def _rows(redis: Redis, since: int, run: str | None) -> Iterator[ResultRow]:
    """Yield the results since a time, of the run if one is given. since: seconds since 1970."""
    start = Place(id_before(since))
    reader = RowReader(redis)
    for chunk in reader.chunks(start):
        for row in chunk.rows:
            run_of_row = row.post.get("run")
            if run is None or run_of_row == run:
                yield row


def _count_dead_letters(report: ResultsReport, redis: Redis, since: int) -> None:
    """Count the dead letters since a time, of the report's run if it has one.

    since: seconds since 1970.
    """
    letters = newest_first(
        redis,
        keys.DEAD_LETTERS,
        since=id_before(since),
    )
    for name, fields in letters:
        letter = read_letter(name, fields)
        if letter.failed_at < since:
            continue
        if report.run is None or letter.run == report.run:
            report.reasons[letter.reason] += 1


def _trimmed_counts(
    redis: Redis, settings: Settings, hours: int, first: int
) -> dict[int, dict[str, int]]:
    """Return the hourly counts of new results for the hours that the stream no longer holds as a
    whole: hour -> label.

    first: the report's first hour.
    """
    entries: Any = redis.xrange(keys.RESULTS_STREAM, count=1)
    oldest = math.inf
    for entry_id, fields in entries:
        is_first_ever = fields.get("number") == "1"
        seconds = seconds_of(entry_id)
        oldest = seconds // HOUR_S
        if is_first_ever:
            oldest = -1
    store = ResultsStore(redis, settings)
    counts = store.labels(hours)
    # the hour may have changed
    return {hour: count for hour, count in counts.items() if first <= hour <= oldest}


def _are_comparable(
    counts: dict[int, dict[str, int]], name: str, contents: Contents
) -> bool:
    """Return whether hourly counts are of the posts of one label set. counts: hour -> label.

    The counters tell neither label sets nor models apart. So the stream must have only this one,
    of one model: each result of a second one would count. name: of the label set.
    """
    if not contents.has_one_model():
        return False
    if any(other != name for other in contents.sets):
        return False
    if not name:
        return True
    names = name.split(LABEL_SEPARATOR)
    labels = {NO_LABEL, *names}
    counted_labels: set[str] = set()
    for labels_of_hour in counts.values():
        counted_labels.update(labels_of_hour)
    return counted_labels <= labels


def _count(
    report: ResultsReport, row: ResultRow, counted_hours: Container[int]
) -> None:
    """Count a post. counted_hours: hours whose column has it already."""
    result = row.found
    post = row.post
    label = result["label"] or NO_LABEL
    model = result["model"]
    _place(report, row, label, counted_hours)
    report.read += 1
    report.models[model] += 1
    subreddit = post.get("subreddit") or ""
    lower_name = subreddit.lower()
    spelling = report.spellings.setdefault(lower_name, subreddit)
    counts = report.subreddits.setdefault(spelling, Counter())
    counts[label] += 1
    no_scores = [0] * NUM_BINS
    bins = report.scores.setdefault(label, no_scores)
    score = label_score(result)
    index = int(score * NUM_BINS)
    index = max(0, index)
    index = min(index, NUM_BINS - 1)
    bins[index] += 1
    text = post.get("title")
    if not text:
        text = post.get("body", "")
    words = text.split()
    title = " ".join(words)
    report.examples[label] = title[:TITLE_LENGTH]


def _place(
    report: ResultsReport,
    row: ResultRow,
    label: str,
    counted_hours: Container[int],
) -> None:
    """Count a post in the column of its time. counted_hours: see `_count`."""
    axis = report.axis
    if axis is not None:
        created = row.post.get("created_utc")
        if created is None:
            report.undated[label] += 1
        else:
            place = axis.place(created)
            report.columns[place][label] += 1
        return
    seconds = seconds_of(row.entry)
    hour = int(seconds // HOUR_S)
    if hour not in counted_hours:
        column = report.column(hour)
        column[label] += 1


# The page.


def page(report: ResultsReport) -> str:
    """Return the complete HTML page."""
    colours = colours_of(report.labels)
    largest_labels = []
    for label, count in report.labels.most_common(2 * SUBREDDITS):
        colour = colours.get(label, OTHERS_COLOUR)
        part = Part(
            label=label,
            posts=count,
            colour=colour,
        )
        largest_labels.append(part)
    subreddits = sorted(
        report.subreddits.items(),
        key=lambda subreddit: subreddit[1].total(),
        reverse=True,
    )
    names = _column_names(report)
    columns = list(zip(names, report.columns.values(), strict=True))
    names_per_mark = math.ceil(len(names) / AXIS_TIMES)
    return render(
        "report.html",
        {"hour": _hour, "when": _when},
        report=report,
        label_set=truncate(report.label_set, SHOWN_LABELS),
        parts=lambda counts: parts_of(colours, counts),
        stacked=list(stacked_bars(columns, colours)),
        most=most_posts(report.columns.values()),
        rate=_rate(report),
        histogram=_histogram,
        median_score=_median_score,
        largest_labels=largest_labels,
        largest_subreddits=subreddits[:SUBREDDITS],
        marks=names[::names_per_mark],
        gaps=report.gaps[-GAPS:],
        reasons=report.reasons.most_common(REASONS),
    )


def _column_names(report: ResultsReport) -> list[str]:
    """Return the time of each column."""
    if report.axis is not None:
        return [column.name for column in report.axis.columns]
    return [_hour(hour) for hour in report.columns]


def _rate(report: ResultsReport) -> str:
    """Return the words for what a column covers."""
    if report.axis is not None:
        return f"per {report.axis.unit}"
    if report.width == 1:
        return "per hour"
    return f"per {report.width} hours"


def _histogram(counts: Sequence[int]) -> list[Bar]:
    """Return the bars of a histogram of scores, the largest as high as the chart."""
    most = max(counts)
    bars = []
    for index, count in enumerate(counts):
        if not count:
            continue
        height = 100 * count / most
        top = 100 - height
        least_score = index / NUM_BINS
        bar = Bar(
            place=index,
            top=top,
            height=height,
            colour="var(--c0)",
            caption=f"{count:,} from {least_score:.2f}",
        )
        bars.append(bar)
    return bars


def _median_score(counts: Sequence[int]) -> float:
    """Return the approximate median score: the middle of the histogram bin that contains it."""
    totals = list(accumulate(counts))
    half = totals[-1] / 2
    index = bisect_left(totals, half)
    middle = index + 0.5
    return middle / NUM_BINS


def _hour(hour: int) -> str:
    seconds = hour * HOUR_S
    time_of_hour = datetime.fromtimestamp(seconds, UTC)
    return time_of_hour.strftime("%d %b %H:%M")


def _when(seconds: float) -> str:
    time_of_day = datetime.fromtimestamp(seconds, UTC)
    return time_of_day.strftime("%Y-%m-%d %H:%M")
