"""The window: waiting rows, sorted by length, from which micro-batches are cut.

A padded batch costs its longest row times its number of rows, so rows of nearly one length belong together;
but the shortest rows first would leave the long ones waiting for ever. Each batch is therefore anchored on
the oldest row: of all runs of neighbouring lengths that hold it and fit the budget, the one that pads least
for what it computes. Nothing is delayed on purpose: an idle device takes what is there. Rows of a more urgent
priority have their turn first, however old the others are, as they have in the queue.

Pure Python: knows nothing of Celery, torch, posts or threads; whoever shares it between threads locks it.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Generic, Protocol, TypeVar


class HasLength(Protocol):
    """What the window needs to know of a row: how many tokens it has."""

    @property
    def length(self) -> int: ...


#: What starting a batch costs, in tokens: weighs more rows against less padding where few rows wait.
BATCH_COST = 128

R = TypeVar("R", bound=HasLength)


class Window(Generic[R]):
    """Rows waiting for the device.

    clock: seconds that only go forward; what `oldest_age` is measured with.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: (length, arrival number, priority, row), sorted; the number makes each entry unique: rows are never compared.
        self._by_length: list[tuple[int, int, int, R]] = []
        #: priority -> arrival number -> (length, time of arrival), oldest first; no priority without rows.
        self._by_age: dict[int, OrderedDict[int, tuple[int, float]]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, row: R, priority: int = 0) -> None:
        """Let a row wait; priority 0 has its turn before 9."""
        self._arrivals += 1
        insort(self._by_length, (row.length, self._arrivals, priority, row))
        self._by_age.setdefault(priority, OrderedDict())[self._arrivals] = (row.length, self._clock())

    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited; 0.0 when none waits."""
        now = self._clock()
        return now - min((next(iter(waiting.values()))[1] for waiting in self._by_age.values()), default=now)

    def take(self, token_budget: int, row_limit: int) -> list[R]:
        """Cut the next micro-batch, sorted by length; empty when no row waits.

        It holds the oldest row of the most urgent priority and at most `row_limit` rows, and its longest row times its
        rows is at most `token_budget`, unless the oldest row alone is longer: then it goes alone.
        """
        if not self._by_age:
            return []
        number, (anchor, _) = next(iter(self._by_age[min(self._by_age)].items()))
        rows = self._by_length
        at = bisect_left(rows, (anchor, number))
        first = max(0, at + 1 - row_limit)
        sums = list(accumulate((length for length, *_ in rows[first : at + row_limit]), initial=0))
        best, low, high = 0.0, at, at
        for end in range(at, min(at + row_limit, len(rows))):
            # With rows[end] as the longest; down to rows[begin] they fit.
            longest = max(1, rows[end][0])
            begin = max(0, end + 1 - max(1, min(row_limit, token_budget // longest)))
            if begin > at:
                break
            tokens = sums[end + 1 - first] - sums[begin - first]
            gain = tokens / ((end + 1 - begin) * longest + BATCH_COST)
            if gain > best:
                best, low, high = gain, begin, end
        batch = rows[low : high + 1]
        del rows[low : high + 1]
        for _, taken, priority, _ in batch:
            del self._by_age[priority][taken]
            if not self._by_age[priority]:
                del self._by_age[priority]
        return [row for *_, row in batch]
