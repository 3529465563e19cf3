"""Run a model on posts with known labels and measure its accuracy, calibration and throughput.

The posts go through the worker's pipeline, so the throughput is a worker's. Several models run one after the other on
the same posts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from feedmill.evaluation.measures import Bin, Evaluation, bins_of, calibration_error
from feedmill.local_model import explain_refusals
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post, PostError
from feedmill.shared.settings import Settings

if TYPE_CHECKING:
    from feedmill.workers.models.classifiers import Classifier

Track = Callable[[Iterable[tuple[Post, Outcome]], int], Iterable[tuple[Post, Outcome]]]


class ModelMeasurement(NamedTuple):
    """The measurements of one model on a set of posts."""

    #: The model's name, as in results.
    model: str
    evaluation: Evaluation
    bins: list[Bin]
    #: Posts per second, including tokenization but not the loading of the model.
    posts_per_s: float
    #: Each post's true label and its classification.
    predictions: list[tuple[str, Classification]]
    #: Error messages of the posts that could not be classified.
    failures: list[str]

    @property
    def calibration_error(self) -> float:
        return calibration_error(self.bins)

    def summary(self, left_out: int) -> dict[str, Any]:
        """Return the measurements as a JSON object. left_out: number of posts without a known true label."""
        return self.evaluation.summary(left_out + len(self.failures)) | {
            "calibration_error": self.calibration_error,
            "calibration": [each._asdict() for each in self.bins],
            "posts_per_s": self.posts_per_s,
        }


def settings_for_comparison(settings: Settings) -> Settings:
    """Return the settings for one of several compared models, without those that this model cannot use.

    Raises ModelError.
    """
    from feedmill.workers.models.classifiers.registry import (  # noqa: PLC0415 - needs torch, which only workers have
        USED_BY,
        WITH_FIXED_LABELS,
        classifier_kind,
        unused_settings,
    )
    from feedmill.workers.models.weights import locate  # noqa: PLC0415

    if not any(getattr(settings, name) for name in ("labels", "template", *USED_BY)):
        return settings
    weights = locate(settings.model, settings.revision, settings.offline, settings.trust_remote_code)
    kind = classifier_kind(weights) if settings.classifier == "auto" else settings.classifier
    unused = [*unused_settings(kind), *(("labels", "template") if kind in WITH_FIXED_LABELS else ())]
    return settings.model_copy(update=dict.fromkeys(unused))


def measure(
    known: Sequence[tuple[Post, str]], loaded: "Classifier", settings: Settings, track: Track = lambda found, _: found
) -> ModelMeasurement:
    """Classify posts and compare the predicted labels with the true ones.

    known: (post, true label), where the label is one of the model's. track: wraps the iteration over the outcomes to
    show progress; its second argument is their number. Raises UserError if no post can be classified.
    """
    # Imported late: these need torch, which only workers have.
    from feedmill.workers.pipeline import offline  # noqa: PLC0415
    from feedmill.workers.pipeline.calibration import calibrate  # noqa: PLC0415

    def outcomes() -> Iterator[tuple[Post, Outcome]]:
        return offline.classify((post for post, _ in known), loaded, settings, budget)

    with explain_refusals(settings):
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
        raise UserError(
            f"None of the {len(known):,} posts can be classified: {failures[0]}. "
            "Correct the posts, or use another model."
        )
    labels = loaded.label_set(ClassifyOptions()).labels
    return ModelMeasurement(
        loaded.weights.name,
        Evaluation.of(labels, ((truth, outcome.label) for truth, outcome in predictions)),
        bins_of((outcome.scores[outcome.label], outcome.label == truth) for truth, outcome in predictions),
        len(found) / seconds,
        predictions,
        failures,
    )
