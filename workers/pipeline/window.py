"""The window: waiting rows, sorted by length, from which micro-batches are cut.

The cost of a padded batch is its longest row times its number of rows, so rows of similar length
belong together. But always taking the shortest rows would starve the long ones. So each batch
contains the oldest row. Of all runs of neighbouring lengths that contain this row and fit the
budget, the window takes the one with the least padding for its tokens. The window never delays
rows on purpose: an idle device takes what is waiting. Rows of a more urgent priority go first,
regardless of age, as in the queue; other rows fill the remaining room.

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


class _Oldest(NamedTuple):
    """The arrival number, length and time of arrival of the oldest row."""

    number: int
    length: int
    arrival: float


class _Waiting(NamedTuple, Generic[R]):
    """The rows of one priority, sorted by length and by age."""

    by_length: list[_Entry[R]]
    #: Arrival number -> (length, time of arrival), oldest first.
    by_age: OrderedDict[int, tuple[int, float]]

    def oldest(self) -> "_Oldest":
        number, (length, arrival) = next(iter(self.by_age.items()))
        return _Oldest(
            number=number,
            length=length,
            arrival=arrival,
        )

    def longest_up_to(self, length: int, count: int) -> tuple[int, int]:
        """Return the start and end of the longest rows that do not exceed `length`, at most
        `count`.
        """
        end = bisect_left(self.by_length, (length + 1, 0))
        begin = max(0, end - count)
        return begin, end

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
        number = self._arrivals
        length = row.length
        waiting = self._waiting.get(priority)
        if waiting is None:
            waiting = _Waiting(by_length=[], by_age=OrderedDict())
            self._waiting[priority] = waiting
        insort(waiting.by_length, (length, number, row))
        waiting.by_age[number] = (length, self._clock())
        self._rows += 1

    def oldest_age(self) -> float:
        """Return how long the oldest row has waited, in seconds; 0.0 if there is none."""
        now = self._clock()
        arrivals = []
        for waiting in self._waiting.values():
            arrival = waiting.oldest().arrival
            arrivals.append(arrival)
        return now - min(arrivals, default=now)

    def take(self, token_budget: int, row_limit: int) -> list[R]:
        """Remove and return the next micro-batch, sorted by length; empty if no row waits.

        It contains the oldest row of the most urgent priority, at most `row_limit` rows, and at
        most `token_budget` tokens, padding included. A row that alone exceeds the budget goes by
        itself.
        """
        if not self._waiting:
            return []
        most_urgent, *others = sorted(self._waiting)
        begin, end = _cut(
            self._waiting[most_urgent], self._shapes, token_budget, row_limit
        )
        batch = self._remove(most_urgent, begin, end)
        longest, _, _ = batch[-1]
        most_rows = self._shapes.fit(longest, token_budget, row_limit)
        for priority in others:
            room = most_rows - len(batch)
            if room <= 0:
                break
            begin, end = self._waiting[priority].longest_up_to(longest, room)
            batch = self._remove(priority, begin, end) + batch
        batch.sort(key=_length_of)
        self._rows -= len(batch)
        return [row for _, _, row in batch]

    def _remove(self, priority: int, begin: int, end: int) -> list[_Entry[R]]:
        """Remove and return entries of a priority, as `_Waiting.remove` does."""
        waiting = self._waiting[priority]
        removed = waiting.remove(begin, end)
        if not waiting.by_length:
            del self._waiting[priority]
        return removed


def _length_of(entry: _Entry[R]) -> int:
    return entry[0]


def _cut(
    waiting: _Waiting[R], shapes: Shapes, token_budget: int, row_limit: int
) -> tuple[int, int]:
    """Return the start and end of the best run of neighbouring lengths that contains the oldest
    row.
    """
    entries = waiting.by_length
    oldest = waiting.oldest()
    at = bisect_left(entries, (oldest.length, oldest.number))
    first = max(0, at + 1 - row_limit)
    stop = min(at + row_limit, len(entries))
    lengths = [length for length, _, _ in entries[first:stop]]
    sums = list(accumulate(lengths, initial=0))
    best_gain = 0.0
    best_begin = at
    best_end = at + 1
    fit = 1
    longest = -1
    for last in range(at, stop):
        # With entries[last] as the longest, the entries from `begin` to before `end` fit.
        length = lengths[last - first]
        if length != longest:
            longest = length
            fit = shapes.fit(longest, token_budget, row_limit)
        end = last + 1
        begin = max(0, end - fit)
        if begin > at:
            break
        tokens = sums[end - first] - sums[begin - first]
        padded_tokens = shapes.tokens(end - begin, longest)
        gain = tokens / (padded_tokens + BATCH_COST)
        if gain > best_gain:
            best_gain = gain
            best_begin = begin
            best_end = end
    return best_begin, best_end
