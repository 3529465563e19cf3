"""A model on posts whose true labels are known: what it says of each, how sure it is, and how fast.

The posts go through the worker's own pipeline, so that figures are those of a worker. Several models are measured one
after the other, on the same posts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from feedmill.evaluation import Bin, Evaluation, bins_of, calibration_error
from feedmill.offline_commands import refusals_told
from shared.errors import UserError
from shared.messages import Classification, ClassifyOptions, Outcome, Post, PostError
from shared.settings import Settings

if TYPE_CHECKING:
    from workers.classifiers import Classifier

Track = Callable[[Iterable[tuple[Post, Outcome]], int], Iterable[tuple[Post, Outcome]]]


class Measured(NamedTuple):
    """One model on some posts."""

    #: As results bear it.
    model: str
    evaluation: Evaluation
    bins: list[Bin]
    #: Tokenizing included, loading not.
    posts_per_s: float
    #: The true label and what was found of each post.
    predictions: list[tuple[str, Classification]]
    #: Why posts could not be classified.
    failures: list[str]

    @property
    def calibration_error(self) -> float:
        return calibration_error(self.bins)

    def summary(self, left_out: int) -> dict[str, Any]:
        """As JSON. left_out: posts whose truth is not known."""
        return self.evaluation.summary(left_out + len(self.failures)) | {
            "calibration_error": self.calibration_error,
            "calibration": [each._asdict() for each in self.bins],
            "posts_per_s": self.posts_per_s,
        }


def of_one_kind(settings: Settings) -> Settings:
    """The settings for a model among others: one that has labels of its own is not told any. Raises ModelError."""
    from workers.classifiers.choose import kind_of  # noqa: PLC0415 - torch, which only workers have
    from workers.weights import locate  # noqa: PLC0415

    if not settings.labels and not settings.template:
        return settings
    weights = locate(settings.model, settings.revision, settings.offline, settings.trust_remote_code)
    own = (kind_of(weights) if settings.classifier == "auto" else settings.classifier) == "sequence"
    return settings.model_copy(update={"labels": None, "template": None}) if own else settings


def measure(
    known: Sequence[tuple[Post, str]], loaded: "Classifier", settings: Settings, track: Track = lambda found, _: found
) -> Measured:
    """Classify posts, each with its true label, one of the model's. track: shows how far it is, of how many.

    Raises UserError where none of them can be classified.
    """
    # Imported late: torch, which only workers have.
    from workers import offline  # noqa: PLC0415
    from workers.calibration import calibrate  # noqa: PLC0415

    def outcomes() -> Iterator[tuple[Post, Outcome]]:
        return offline.classify((post for post, _ in known), loaded, settings, budget)

    with refusals_told(settings):
        budget = calibrate(loaded, settings)
        began = time.perf_counter()
        found = [outcome for _, outcome in track(outcomes(), len(known))]
        seconds = time.perf_counter() - began
    predictions = [
        (truth, outcome)
        for outcome, (_, truth) in zip(found, known, strict=True)
        if isinstance(outcome, Classification)
    ]
    failures = [outcome.error for outcome in found if isinstance(outcome, PostError)]
    if not predictions:
        raise UserError(f"None of {len(known):,} posts can be classified; the first: {failures[0]}")
    labels = loaded.label_set(ClassifyOptions()).labels
    return Measured(
        loaded.weights.name,
        Evaluation.of(labels, ((truth, outcome.label) for truth, outcome in predictions)),
        bins_of((outcome.scores[outcome.label], outcome.label == truth) for truth, outcome in predictions),
        len(found) / seconds,
        predictions,
        failures,
    )
