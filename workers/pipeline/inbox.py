"""A queue between two of the pipeline's threads, whose reader takes several small items at a time.

A round trip to Redis costs more CPU time than the posts of a small message. So a thread that has fallen behind handles
what has arrived together, with one round trip. It never waits for more items.
"""

import queue
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A first-in, first-out queue. Any thread may put items; one thread takes them.

    size: returns an item's size, or None for an item that is always taken alone.
    """

    def __init__(self, size: Callable[[T], int | None]) -> None:
        self._size = size
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        #: The item that ended the latest group, if any.
        self._next: list[T] = []

    def put(self, item: T) -> None:
        """Append an item."""
        self._items.put(item)

    def take(self, limit: int, timeout: float | None = None) -> list[T]:
        """Wait for an item, and return it with those behind it, as long as their sizes add up to at most `limit`.

        timeout: seconds to wait for the first item. Raises queue.Empty.
        """
        first = self._next.pop() if self._next else self._items.get(timeout=timeout)
        taken, total = [first], self._size(first)
        while total is not None and total < limit and not self._items.empty():
            item = self._items.get()
            size = self._size(item)
            if size is None or total + size > limit:
                self._next.append(item)
                break
            taken.append(item)
            total += size
        return taken
