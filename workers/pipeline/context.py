"""Objects that the pipeline's parts share, and the interface to its owner."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from feedmill.shared.results import ResultsStore
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.statistics import Statistics

T = TypeVar("T")


class Owner:
    """The submitter of messages. The pipeline calls these methods on its threads; subclasses override some."""

    def admit(self, message: Message) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether a message is still wanted. Called under the backlog's lock, when its first row is taken."""
        return True

    def started(self, message: Message) -> None:
        """Handle the start of a message: its first row enters a forward pass, or it needs none."""

    def computing(self, message: Message, posts: Sequence[int]) -> None:
        """Record which posts of a message handled in isolation, by index, are being computed now."""

    def finished(self, message: Message) -> None:
        """Handle a finished message: all of its posts have an outcome, and all results are stored."""

    def recorded(self, message: Message) -> None:
        """Handle a finished message whose dead letters are stored, too. Called last."""

    def failed(self) -> None:
        """Handle a thread that died or hangs, because of a defect or a broken device."""


def take(items: "queue.SimpleQueue[T]", limit: int, size: Callable[[T], int], timeout: float | None = None) -> list[T]:
    """Wait for an item, and return it with those behind it, until their sizes add up to `limit` or none is left.

    A round trip to Redis costs more CPU time than the posts of a small message. So a thread that has fallen behind
    handles what has arrived together. It never waits for more items.

    timeout: seconds to wait for the first item. Raises queue.Empty.
    """
    taken = [items.get(timeout=timeout)]
    total = size(taken[0])
    while total < limit and not items.empty():
        taken.append(items.get())
        total += size(taken[-1])
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
    store: ResultsStore
    statistics: Statistics
    watch: Watch
    #: Set when the pipeline stops. Ends every wait.
    stopping: threading.Event
    #: Name recorded in results.
    worker: str
