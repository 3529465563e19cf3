"""Pair a file's rows with their classifications, and count the outcomes."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

from feedmill.producers.files import NOT_UTF8, Place, Row
from feedmill.producers.records import NO_TEXT, REMOVED
from feedmill.shared.messages import Classification, Outcome, Post

#: A label is uncertain if the second-best label's score is closer than this.
UNCERTAIN_MARGIN = 0.1

#: Function that classifies posts in order, such as feedmill.workers.pipeline.offline.classify.
Classify = Callable[[Iterable[Post]], Generator[tuple[Post, Outcome]]]


class LabelledRow(NamedTuple):
    """A row with its classification, or the reason why it has none."""

    row: Row
    found: Classification | str


def labelled(rows: Iterable[Row], classify: Classify) -> Generator[LabelledRow]:
    """Yield every row with its classification, in order. Close the generator to stop the model."""
    waiting: deque[Row] = deque()

    def posts() -> Iterator[Post]:
        for row in rows:
            waiting.append(row)
            if isinstance(row.post, Post):
                yield row.post

    def without_posts() -> Iterator[LabelledRow]:
        while waiting and isinstance(waiting[0].post, str):
            yield LabelledRow(waiting[0], str(waiting.popleft().post))

    with closing(classify(posts())) as outcomes:
        for _, outcome in outcomes:
            yield from without_posts()
            yield LabelledRow(waiting.popleft(), outcome if isinstance(outcome, Classification) else outcome.error)
            yield from without_posts()
    yield from without_posts()


class Reasons:
    """Rows without a label by reason, each with the place of the first one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Place] = {}

    def add(self, reason: str, place: Place) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, place)


class Tally:
    """Counts of labelled rows. alone: each label is scored by itself, so several may apply and none is uncertain."""

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        #: Rows read.
        self.rows = 0
        self.labels: Counter[str] = Counter()
        self.uncertain = 0
        #: Rows without a label; and rows that the output lacks, because they could not be parsed.
        self.unlabelled, self.left_out = Reasons(), Reasons()

    def add(self, row: Row, found: Classification | str) -> None:
        self.rows += 1
        if isinstance(found, Classification):
            self.labels[found.label] += 1
            self.uncertain += self._is_uncertain(found)
        else:
            (self.left_out if row.values is None else self.unlabelled).add(found, row.place)

    def _is_uncertain(self, found: Classification) -> bool:
        best, *others = islice(found.scores.values(), 2)
        return bool(others) and not self._alone and best - others[0] < UNCERTAIN_MARGIN

    @property
    def written(self) -> int:
        """Rows that the output has."""
        return self.rows - self.left_out.counts.total()

    @property
    def has_failures(self) -> bool:
        """True if a row was left out, or has a text and no label."""
        return bool(self.left_out.counts) or not self.unlabelled.counts.keys() <= {NO_TEXT, REMOVED}

    def summary(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        return {
            "rows": self.rows,
            "labels": dict(self.labels.most_common()),
            "uncertain": self.uncertain,
            "unlabelled": dict(self.unlabelled.counts),
            "left_out": dict(self.left_out.counts),
        }


def is_wrong_encoding(found: Classification | str) -> bool:
    """Return true for the reason that the user should see at once: with it, most rows may lack a label."""
    return found == NOT_UTF8
