"""Everything that the pipeline's parts share, and the interfaces to its owner and to the results store."""

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
    """The side that submits messages. The pipeline calls it on its own threads. Subclasses override what they need."""

    def admit(self, message: Message) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether a message is still wanted. Called under the backlog's lock, when its first row is taken."""
        return True

    def started(self, message: Message) -> None:
        """Note that the first row of a message enters a forward pass, or that it needs none."""

    def finished(self, message: Message) -> None:
        """Note that the last post of a message has an outcome and that every result is stored."""

    def recorded(self, message: Message) -> None:
        """Note that the dead letters of a finished message are stored, too. Called last."""

    def failed(self) -> None:
        """Note that a thread died or hangs, because of a defect or a broken device."""


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
    """Everything that the pipeline's parts share."""

    owner: Owner
    store: Store
    #: None if a crash need not be attributed to posts, because messages are never redelivered.
    poison: PoisonTracker | None
    statistics: Statistics
    watch: Watch
    #: Ends every wait.
    stopping: threading.Event
    #: Seconds after which a forward pass or another call of the classifier counts as hung. Waits for Redis or Celery's
    #: result backend have no limit.
    timeout: float
    #: Name recorded in results.
    worker: str
