"""Objects that the pipeline's parts share, and the interfaces to its owner and to the results store."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.messages import Classification, DeadLetter
from shared.results import Result
from workers.pipeline.message import Message
from workers.pipeline.poison import PoisonTracker
from workers.pipeline.statistics import Statistics
from workers.pipeline.watch import Watch


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
    #: Seconds after which a forward pass or another call of the classifier counts as hung. Waits for Redis or Celery's
    #: result backend have no limit.
    timeout: float
    #: Name recorded in results.
    worker: str
