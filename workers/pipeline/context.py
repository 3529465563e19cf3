"""Objects that the pipeline's parts share, and the interface to its owner."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from feedmill.shared.results import ResultsStore
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.statistics import Statistics

if TYPE_CHECKING:
    from feedmill.workers.pipeline.backlog import Computed

T = TypeVar("T")


class Owner:
    """The submitter of messages.

    The pipeline calls these methods on its threads; subclasses override some.
    """

    def admit(self, message: Message) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether a message is still wanted.

        Called under the backlog's lock, when its first row is taken.
        """
        return True

    def started(self, message: Message) -> None:
        """Handle the start of a message: its first row enters a forward pass, or it needs none."""

    def computing(self, message: Message, posts: Sequence[int]) -> None:
        """Record which posts of a message handled in isolation, by index, are being
        computed now.
        """

    def finished(self, message: Message) -> None:
        """Handle a finished message: all of its posts have an outcome, and all results are
        stored.
        """

    def recorded(self, message: Message) -> None:
        """Handle a finished message whose dead letters are stored, too. Called last."""

    def failed(self) -> None:
        """Handle a thread that died or hangs, because of a defect or a broken device."""


class Observer:
    """Follow messages from step to step: the time of a call is the time of the step.

    This class does nothing; workers/runtime/spans.py records spans. Methods are called on the
    thread of their step, and never raise.
    """

    def reserved(self, message: Message, at_ns: int) -> None:
        """Handle the start of a message. at_ns: time of its reservation, in nanoseconds since
        1970.
        """

    def preparing(self, messages: Sequence[Message]) -> None:
        """Handle the start of the preparation of messages."""

    def prepared(self, messages: Sequence[Message]) -> None:
        """Handle messages whose rows are ready for the device."""

    def computed(self, computed: "Computed") -> None:
        """Handle a micro-batch that the device has computed, or failed to compute."""

    def storing(self, messages: Sequence[Message]) -> None:
        """Handle messages that have all of their outcomes, before these are stored."""

    def stored(self, messages: Sequence[Message]) -> None:
        """Handle messages of which everything is stored."""

    def ended(self, message: Message) -> None:
        """Handle a message that is acknowledged, or with which the worker is otherwise done."""

    def running(self, message: Message) -> AbstractContextManager[object]:  # noqa: ARG002
        """Run the block as a message's task."""
        return nullcontext()


class WorkQueue(Generic[T]):
    """The work of one thread, in order of arrival: items, and jobs to run between them.

    handle: handles items together. posts: returns an item's number of posts. limit: returns at how
    many posts no more items are handled together.
    """

    def __init__(
        self,
        handle: Callable[[list[T]], None],
        posts: Callable[[T], int],
        limit: Callable[[], int],
    ) -> None:
        self._handle = handle
        self._posts = posts
        self._limit = limit
        self._waiting: queue.SimpleQueue[T | Callable[[], None]] = queue.SimpleQueue()

    def put(self, work: T | Callable[[], None]) -> None:
        """Add an item or a job. Thread-safe."""
        self._waiting.put(work)

    def work(self, timeout: float | None = None) -> None:
        """Wait for work, and do it together with the work behind it, up to the limit.

        A round trip to Redis costs more CPU time than the posts of a small message. So a thread
        that has fallen behind handles what has arrived together. It never waits for more items.

        timeout: seconds to wait for the first one. Raises queue.Empty.
        """
        arrivals: list[Any] = []
        posts = 0
        while True:
            item_or_job: Any = self._waiting.get(timeout=timeout)
            arrivals.append(item_or_job)
            if not callable(item_or_job):
                posts += self._posts(item_or_job)
            if posts >= self._limit() or self._waiting.empty():
                break
        for are_jobs, group in groupby(arrivals, callable):
            if are_jobs:
                for job in group:
                    job()
            else:
                self._handle(list(group))


class Watch:
    """The current step of each thread, for the watcher thread."""

    def __init__(self) -> None:
        #: Thread -> the name of its step, and its start, in monotonic seconds.
        self._steps: dict[int, tuple[str, float]] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run the block as a watched step of the calling thread. Steps do not nest."""
        thread = threading.get_ident()
        self._steps[thread] = (what, time.monotonic())
        try:
            yield
        finally:
            del self._steps[thread]

    def longer_than(self, seconds: float) -> list[tuple[int, str]]:
        """Return the thread and the name of each step that has run for longer than `seconds`."""
        now = time.monotonic()
        steps = list(self._steps.items())  # a copy: other threads change it
        long_steps = []
        for thread, (what, start) in steps:
            if now - start > seconds:
                long_steps.append((thread, what))
        return long_steps


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
    #: The option `none` of messages that do not name it.
    none: bool | float | None = None
    #: The languages that the model was made for; empty if they do not matter.
    languages: frozenset[str] = frozenset()
    observer: Observer = field(default_factory=Observer)
