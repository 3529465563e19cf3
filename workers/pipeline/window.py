"""The window: waiting rows, sorted by length, from which micro-batches are cut.

The cost of a padded batch is its longest row times its number of rows, so rows of similar length belong together. But
always taking the shortest rows would starve the long ones. So each batch contains the oldest row. Of all runs of
neighbouring lengths that contain this row and fit the budget, the window takes the one with the least padding for its
tokens. The window never delays rows on purpose: an idle device takes what is waiting. Rows of a more urgent priority go
first, regardless of age, as in the queue; other rows fill the remaining room.

Pure Python, independent of Celery, torch and posts. Not thread-safe: callers lock it.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from feedmill.workers.models.shapes import EXACT, Shapes


class HasLength(Protocol):
    """A row as the window sees it: its number of tokens."""

    @property
    def length(self) -> int: ...


#: Cost of starting a batch, in tokens. Favours more rows over less padding while few rows wait.
BATCH_COST = 128

R = TypeVar("R", bound=HasLength)
#: Length, arrival number, row. The number is unique, so rows are never compared.
_Entry: TypeAlias = tuple[int, int, R]


class _Waiting(NamedTuple, Generic[R]):
    """The rows of one priority, sorted by length and by age."""

    by_length: list[_Entry[R]]
    #: Arrival number -> (length, time of arrival), oldest first.
    by_age: OrderedDict[int, tuple[int, float]]

    def remove(self, begin: int, end: int) -> list[_Entry[R]]:
        """Remove and return the entries from index `begin` to before `end`, sorted by length."""
        removed = self.by_length[begin:end]
        del self.by_length[begin:end]
        for _, number, _ in removed:
            del self.by_age[number]
        return removed


class Window(Generic[R]):
    """Rows that wait for the device.

    clock: returns monotonic seconds, for `oldest_age`.
    shapes: what the device pads micro-batches to.
    """

    def __init__(self, clock: Callable[[], float], shapes: Shapes = EXACT) -> None:
        self._clock = clock
        self._shapes = shapes
        #: Waiting rows by priority. A priority without rows is absent.
        self._waiting: dict[int, _Waiting[R]] = {}
        self._arrivals = 0
        #: A separate count, which threads read without the lock.
        self._rows = 0

    def __len__(self) -> int:
        """Return the number of rows. Needs no lock."""
        return self._rows

    def add(self, row: R, priority: int = 0) -> None:
        """Add a row. Priority 0 goes first, 9 last."""
        self._arrivals += 1
        if (waiting := self._waiting.get(priority)) is None:
            waiting = self._waiting[priority] = _Waiting([], OrderedDict())
        insort(waiting.by_length, (row.length, self._arrivals, row))
        waiting.by_age[self._arrivals] = (row.length, self._clock())
        self._rows += 1

    def oldest_age(self) -> float:
        """Return how long the oldest row has waited, in seconds; 0.0 if there is none."""
        now = self._clock()
        return now - min((next(iter(waiting.by_age.values()))[1] for waiting in self._waiting.values()), default=now)

    def take(self, token_budget: int, row_limit: int) -> list[R]:
        """Remove and return the next micro-batch, sorted by length; empty if no row waits.

        It contains the oldest row of the most urgent priority, at most `row_limit` rows, and at most `token_budget`
        tokens, padding included. A row that alone exceeds the budget goes by itself.
        """
        batch: list[_Entry[R]] = []
        for priority in sorted(self._waiting):
            waiting = self._waiting[priority]
            if batch:
                room = self._shapes.fit(batch[-1][0], token_budget, row_limit) - len(batch)
                if room <= 0:
                    break
                fitting = bisect_left(waiting.by_length, (batch[-1][0] + 1, 0))
                batch = waiting.remove(max(0, fitting - room), fitting) + batch
                batch.sort(key=lambda entry: entry[0])
            else:
                batch = waiting.remove(*_cut(waiting, self._shapes, token_budget, row_limit))
            if not waiting.by_length:
                del self._waiting[priority]
        self._rows -= len(batch)
        return [row for _, _, row in batch]


def _cut(waiting: _Waiting[R], shapes: Shapes, token_budget: int, row_limit: int) -> tuple[int, int]:
    """Return the start and end of the best run of neighbouring lengths that contains the oldest row."""
    number, (anchor, _) = next(iter(waiting.by_age.items()))
    rows = waiting.by_length
    at = bisect_left(rows, (anchor, number))
    first = max(0, at + 1 - row_limit)
    sums = list(accumulate((length for length, _, _ in rows[first : at + row_limit]), initial=0))
    best, low, high = 0.0, at, at
    fit, longest = 1, -1
    for end in range(at, min(at + row_limit, len(rows))):
        # With rows[end] as the longest row, the rows down to rows[begin] fit.
        if rows[end][0] != longest:
            longest = rows[end][0]
            fit = shapes.fit(longest, token_budget, row_limit)
        begin = max(0, end + 1 - fit)
        if begin > at:
            break
        tokens = sums[end + 1 - first] - sums[begin - first]
        gain = tokens / (shapes.tokens(end + 1 - begin, longest) + BATCH_COST)
        if gain > best:
            best, low, high = gain, begin, end
    return low, high + 1
