"""What people would use instead of Feedmill, each as its own documentation shows it, with the settings that favour it.

A rival classifies the same posts with the same model, precision, labels and token limit, on all cores, and answers
each post with its label and all scores. The benchmark knows nothing more of it than `Variant`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from shared.errors import UserError
from shared.messages import Post
from shared.settings import Settings
from workers.device import Device

#: Posts that a rival which batches puts into one forward pass, at most.
BATCH_SIZE = 32


class NotInstalled(UserError):  # noqa: N818 - named after what is the case
    """A rival's libraries are missing: the sentence says which, and what installs them."""


class Job(NamedTuple):
    """What is the same for every variant of one run. `folder` is empty, and gone after the run."""

    settings: Settings
    device: Device
    folder: Path


class Variant(Protocol):
    """One way to classify posts; its `__init__` raises NotInstalled. Started and stopped once in every round."""

    def start(self) -> None:
        """Start its processes and load its model. Raises StackError."""

    def run(self, posts: Sequence[Post]) -> None:
        """Classify the posts; returns when the last result is where its reader would find it. This is timed."""

    def labels(self) -> list[str]:
        """The label of each post of the last `run`, in order. This is not timed."""

    def stop(self) -> None:
        """End all that `start` began, whatever state it is in."""
