"""The window: waiting rows, sorted by length, from which micro-batches are cut.

A padded batch costs its longest row times its number of rows, so rows of nearly one length belong together;
but the shortest rows first would leave the long ones waiting for ever. Each batch is therefore anchored on
the oldest row: of all runs of neighbouring lengths that hold it and fit the budget, the one that pads least
for what it computes. Nothing is delayed on purpose: an idle device takes what is there. Rows of a more urgent
priority have their turn first, however old the others are, as in the queue; the others fill what room they leave.

Pure Python: knows nothing of Celery, torch, posts or threads; whoever shares it between threads locks it.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar


class HasLength(Protocol):
    """What the window needs to know of a row: how many tokens it has."""

    @property
    def length(self) -> int: ...


#: What starting a batch costs, in tokens: weighs more rows against less padding where few rows wait.
BATCH_COST = 128

R = TypeVar("R", bound=HasLength)
#: Length, arrival number, row; the number makes each unique, so rows are never compared.
_Entry: TypeAlias = tuple[int, int, R]


class _Waiting(NamedTuple, Generic[R]):
    """The rows of one priority: sorted by length, and as arrival number -> (length, time of arrival), oldest first."""

    by_length: list[_Entry[R]]
    by_age: OrderedDict[int, tuple[int, float]]

    def remove(self, begin: int, end: int) -> list[_Entry[R]]:
        """Those from place `begin` to before `end`, sorted by length."""
        removed = self.by_length[begin:end]
        del self.by_length[begin:end]
        for _, number, _ in removed:
            del self.by_age[number]
        return removed


class Window(Generic[R]):
    """Rows waiting for the device.

    clock: seconds that only go forward; what `oldest_age` is measured with.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: By priority, none of them without rows.
        self._waiting: dict[int, _Waiting[R]] = {}
        self._arrivals = 0
        #: A count of its own: threads without the lock read it while others change what waits.
        self._rows = 0

    def __len__(self) -> int:
        """Return the number of rows. Needs no lock."""
        return self._rows

    def add(self, row: R, priority: int = 0) -> None:
        """Let a row wait; priority 0 has its turn before 9."""
        self._arrivals += 1
        if (waiting := self._waiting.get(priority)) is None:
            waiting = self._waiting[priority] = _Waiting([], OrderedDict())
        insort(waiting.by_length, (row.length, self._arrivals, row))
        waiting.by_age[self._arrivals] = (row.length, self._clock())
        self._rows += 1

    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited; 0.0 when none waits."""
        now = self._clock()
        return now - min((next(iter(waiting.by_age.values()))[1] for waiting in self._waiting.values()), default=now)

    def take(self, token_budget: int, row_limit: int) -> list[R]:
        """Cut the next micro-batch, sorted by length; empty when no row waits.

        It holds the oldest row of the most urgent priority and at most `row_limit` rows, and its longest row times its
        rows is at most `token_budget`, unless the oldest row alone is longer: then it goes alone.
        """
        batch: list[_Entry[R]] = []
        for priority in sorted(self._waiting):
            waiting = self._waiting[priority]
            if batch:
                room = min(row_limit, token_budget // max(1, batch[-1][0])) - len(batch)
                if room <= 0:
                    break
                fitting = bisect_left(waiting.by_length, (batch[-1][0] + 1, 0))
                batch = waiting.remove(max(0, fitting - room), fitting) + batch
                batch.sort(key=lambda entry: entry[0])
            else:
                batch = waiting.remove(*_cut(waiting, token_budget, row_limit))
            if not waiting.by_length:
                del self._waiting[priority]
        self._rows -= len(batch)
        return [row for _, _, row in batch]


def _cut(waiting: _Waiting[R], token_budget: int, row_limit: int) -> tuple[int, int]:
    """Where the best run of neighbouring lengths that holds the oldest row begins and ends."""
    number, (anchor, _) = next(iter(waiting.by_age.items()))
    rows = waiting.by_length
    at = bisect_left(rows, (anchor, number))
    first = max(0, at + 1 - row_limit)
    sums = list(accumulate((length for length, _, _ in rows[first : at + row_limit]), initial=0))
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
    return low, high + 1
