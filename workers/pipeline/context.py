"""Objects that the pipeline's parts share, and the interfaces to its owner and to the results store."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from feedmill.shared.messages import Classification, DeadLetter
from feedmill.shared.results import Result
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.poison import PoisonTracker
from feedmill.workers.pipeline.statistics import Statistics

T = TypeVar("T")


class Owner:
    """The submitter of messages. The pipeline calls these methods on its threads; subclasses override some."""

    def admit(self, message: Message) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether a message is still wanted. Called under the backlog's lock, when its first row is taken."""
        return True

    def started(self, message: Message) -> None:
        """Handle the start of a message: its first row enters a forward pass, or it needs none."""

    def finished(self, message: Message) -> None:
        """Handle a finished message: all of its posts have an outcome, and all results are stored."""

    def recorded(self, message: Message) -> None:
        """Handle a finished message whose dead letters are stored, too. Called last."""

    def failed(self) -> None:
        """Handle a thread that died or hangs, because of a defect or a broken device."""


class Store(Protocol):
    """The results store, as the pipeline uses it."""

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> object:
        """Store the results and dead letters of a micro-batch. Raises redis' errors."""

    def find(self, wanted: Sequence[tuple[str, str]]) -> Sequence[Classification | None]:
        """Return the classification stored under each (post id, fingerprint), or None. Raises redis' errors."""

    def keep(self, found: Sequence[Result]) -> None:
        """Remember found results, so that `catch_up` writes them again if Redis loses them."""

    def catch_up(self) -> None:
        """Rewrite recent results that Redis may have lost. Raises redis' errors."""


class Inbox(Generic[T]):
    """A queue between two threads, whose reader takes several small items at a time. Any thread may put items.

    A round trip to Redis costs more CPU time than the posts of a small message. So a thread that has fallen behind
    handles what has arrived together. It never waits for more items.

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


class Step(NamedTuple):
    """A step, such as a forward pass, that a thread runs now."""

    thread: int
    what: str
    #: Start time, in monotonic seconds.
    began: float


class Watch:
    """The current step of each thread, for the watcher thread."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run the block as a watched step of the calling thread. Steps do not nest."""
        thread = threading.get_ident()
        self._steps[thread] = Step(thread, what, time.monotonic())
        try:
            yield
        finally:
            del self._steps[thread]

    def longer_than(self, seconds: float) -> list[Step]:
        """Return the steps that have run for longer than `seconds`."""
        now = time.monotonic()
        return [step for step in list(self._steps.values()) if now - step.began > seconds]


@dataclass(frozen=True, slots=True)
class Context:
    """Objects that the pipeline's parts share."""

    owner: Owner
    store: Store
    #: None if a crash need not be attributed to posts, because messages are never redelivered.
    poison: PoisonTracker | None
    statistics: Statistics
    watch: Watch
    #: Set when the pipeline stops. Ends every wait.
    stopping: threading.Event
    #: Name recorded in results.
    worker: str
