"""Train classifiers: all weights (`finetune.py`), or a head on frozen embeddings (`head.py`, `active.py`).

`examples.py` builds the datasets. No module here reads posts from files or depends on Celery or Redis.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Report:
    """What a training reports. This one ignores it."""

    def phase(self, what: str, total: int | None = None) -> None:
        """Begin a phase. total: number of its posts or steps, if known."""

    def counting(self, what: str, found: Iterable[T], total: int) -> Iterable[T]:
        """Return `found`, and begin a phase that reports how many of `total` were taken."""
        self.phase(what, total)
        return found

    def planned(self, plan: Mapping[str, Any]) -> None:
        """Report the plan, before the first step."""

    def progress(self, step: int, steps: int, loss: float | None) -> None:
        """Report an optimization step. loss: the last one in the training's log."""
