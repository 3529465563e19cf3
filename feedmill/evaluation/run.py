"""Run a model on posts with known labels and measure its accuracy, calibration and throughput.

The posts go through the worker's pipeline, so the throughput is a worker's. Needs torch, which only workers have.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from feedmill.evaluation.measures import Bin, Evaluation, bins_of, calibration_error
from feedmill.local_model import explain_refusals
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post, PostError
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import unusable
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.calibration import calibrate

Track = Callable[[Iterable[tuple[Post, Outcome]], int], Iterable[tuple[Post, Outcome]]]


class ModelMeasurement(NamedTuple):
    """The measurements of one model on a set of posts."""

    #: The model's name, as in results.
    model: str
    evaluation: Evaluation
    bins: list[Bin]
    #: Posts per second, including tokenization but not the loading of the model.
    posts_per_s: float
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


def usable_settings(settings: Settings) -> Settings:
    """Return the settings without those that their model cannot use. Raises ModelError."""
    return settings.model_copy(update=dict.fromkeys(unusable(settings)))


def measure(
    known: Sequence[tuple[Post, str]], loaded: Classifier, settings: Settings, track: Track = lambda found, _: found
) -> ModelMeasurement:
    """Classify posts and compare the predicted labels with the true ones.

    known: (post, true label), where the label is one of the model's. track: wraps the iteration over the outcomes to
    show progress; its second argument is their number. Raises UserError if no post can be classified.
    """
    with explain_refusals(settings):
        budget = calibrate(loaded, settings)
        began = time.perf_counter()
        outcomes = offline.classify((post for post, _ in known), loaded, settings, budget)
        found = [outcome for _, outcome in track(outcomes, len(known))]
        seconds = time.perf_counter() - began
    failures = [outcome.error for outcome in found if isinstance(outcome, PostError)]
    if len(failures) == len(known):
        raise UserError(
            f"None of the {len(known):,} posts can be classified: {failures[0]}. "
            "Correct the posts, or use another model."
        )
    results = [
        (outcome, truth)
        for outcome, (_, truth) in zip(found, known, strict=True)
        if isinstance(outcome, Classification)
    ]
    labels = loaded.label_set(ClassifyOptions()).labels
    return ModelMeasurement(
        loaded.weights.name,
        Evaluation.of(labels, ((truth, outcome.label) for outcome, truth in results)),
        bins_of((outcome.scores[outcome.label], outcome.label == truth) for outcome, truth in results),
        len(found) / seconds,
        failures,
    )
