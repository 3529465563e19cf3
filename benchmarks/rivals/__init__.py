"""Alternatives to Feedmill, each set up as its own documentation recommends, with the settings
that favour it.

A rival classifies the same posts with the same model, precision, labels and token limit, on all
cores, and returns the label and all scores of each post. The benchmark uses rivals only through
`Variant`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from feedmill.shared.errors import UserError
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from feedmill.workers.models.device import Device

#: Maximum number of posts per forward pass of a rival that batches.
BATCH_SIZE = 32


class NotInstalled(UserError):  # noqa: N818 - named after the state
    """A rival's libraries are missing.

    The message names them and the command that installs them.
    """


class BenchmarkJob(NamedTuple):
    """The settings common to all variants of a run.

    `folder` is empty at first and deleted after the run.
    """

    settings: Settings
    device: Device
    folder: Path


class Variant(Protocol):
    """One way to classify posts, started and stopped once per round.

    Its `__init__` may raise NotInstalled.
    """

    def start(self) -> None:
        """Start the processes and load the model. Raises StackError."""

    def run(self, posts: Sequence[Post]) -> None:
        """Classify the posts and return when the last result is readable. This method is timed."""

    def labels(self) -> list[str]:
        """Return the label of each post of the last `run`, in order. This method is not timed."""

    def stop(self) -> None:
        """Stop everything that `start` began, in any state."""
