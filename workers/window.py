"""The window: waiting rows, sorted by length, from which micro-batches are cut.

A padded batch costs its longest row times its number of rows, so rows of nearly one length belong together;
but the shortest rows first would leave the long ones waiting for ever. Each batch is therefore anchored on
the oldest row and grown towards the nearest lengths. Nothing is delayed on purpose: an idle device takes
what is there.

Pure Python: knows nothing of Celery, torch, posts or threads; whoever shares it between threads locks it.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class HasLength(Protocol):
    """What the window needs to know of a row: how many tokens it has."""

    @property
    def length(self) -> int: ...


R = TypeVar("R", bound=HasLength)


class Window(Generic[R]):
    """Rows waiting for the device.

    clock: seconds that only go forward; what `oldest_age` is measured with.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: (length, arrival number, row), sorted; the number makes each entry unique, so rows are never compared.
        self._by_length: list[tuple[int, int, R]] = []
        #: arrival number -> (length, time of arrival), oldest first.
        self._by_age: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, row: R) -> None:
        """Let a row wait."""
        self._arrivals += 1
        insort(self._by_length, (row.length, self._arrivals, row))
        self._by_age[self._arrivals] = (row.length, self._clock())

    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited; 0.0 when none waits."""
        if not self._by_age:
            return 0.0
        _, arrived = next(iter(self._by_age.values()))
        return self._clock() - arrived

    def take(self, token_budget: int, row_limit: int) -> list[R]:
        """Cut the next micro-batch, sorted by length; empty when no row waits.

        It holds the oldest row and at most `row_limit` rows, and its longest row times its rows is at most
        `token_budget`, unless the oldest row alone is longer: then it goes alone.
        """
        if not self._by_age:
            return []
        number, (anchor, _) = next(iter(self._by_age.items()))
        rows = self._by_length
        low = bisect_left(rows, (anchor, number))
        high = low + 1  # rows[low:high] is the batch
        while high - low < row_limit:
            fits_below = low > 0 and (high - low + 1) * rows[high - 1][0] <= token_budget
            fits_above = high < len(rows) and (high - low + 1) * rows[high][0] <= token_budget
            if fits_below and (not fits_above or anchor - rows[low - 1][0] <= rows[high][0] - anchor):
                low -= 1
            elif fits_above:
                high += 1
            else:
                break
        batch = rows[low:high]
        del rows[low:high]
        for _, taken, _ in batch:
            del self._by_age[taken]
        return [row for _, _, row in batch]
