"""Compare data types: speed, memory, and what they cost in scores, labels and accuracy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from feedmill.evaluation.known import matching_label
from feedmill.local_model import load_model
from feedmill.shared.errors import DeviceFull, DeviceLost, UserError, clause
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post
from feedmill.shared.settings import Settings
from feedmill.tuning.trials import MemoryMeter, Unmeasured
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.backlog import Loaded
from feedmill.workers.pipeline.calibration import calibrate

#: The precision that the others are compared with.
EXACT = "float32"
#: Seconds that a precision takes about, and the fewest posts.
TRIAL_S = 10.0
MIN_POSTS = 32
PILOT_POSTS = 16
#: Errors of a device or an engine that lacks a precision, or room for it.
FAILURES = (UserError, DeviceFull, DeviceLost, RuntimeError)


@dataclass(frozen=True)
class Precision:
    """The measurement of one data type."""

    name: str
    posts: int
    seconds: float
    memory_bytes: int | None
    #: Largest difference of a score from that in float32; share of posts with another best label.
    #: None for float32.
    largest_difference: float | None
    changed_labels: float | None
    #: Share of posts with a topic whose best label it is; None without topics.
    accuracy: float | None

    @property
    def posts_per_s(self) -> float:
        return self.posts / self.seconds


class Comparison(Protocol):
    """The figures of a comparison."""

    precisions: list[Precision]
    unmeasured_precisions: list[Unmeasured]


def compare(
    settings: Settings,
    names: Sequence[str],
    posts: Sequence[Post],
    say: Callable[[str], None],
    comparison: Comparison,
) -> None:
    """Measure each precision on the same posts, and add it to the comparison. float32 is computed
    first, as what the others are compared with.

    A precision that fails leaves those before it as they are.
    """
    exact: list[Outcome] | None = None
    sample: Sequence[Post] = ()
    for name in dict.fromkeys([EXACT, *names]):
        say(name)
        try:
            run = _Run(settings, name)
            if not sample:
                sample = run.enough(posts)
            precision, outcomes = run.measure(sample, exact)
        except FAILURES as error:
            comparison.unmeasured_precisions.append(Unmeasured(name, clause(error)))
            continue
        if exact is None:
            exact = outcomes
        if name in names:
            comparison.precisions.append(precision)


class _Run:
    """A model in one precision; int8 exists in ONNX Runtime alone.

    Raises UserError if the device does not support it.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        changes: dict[str, object] = {"dtype": name}
        if name == "int8":
            changes["engine"] = "onnx"
        self._name = name
        self._settings = settings.model_copy(update=changes)
        self._classifier = load_model(self._settings)
        self._budget = calibrate(self._classifier, self._settings)

    def enough(self, posts: Sequence[Post]) -> Sequence[Post]:
        """Return as many posts as take about TRIAL_S seconds in this precision."""
        pilot = posts[:PILOT_POSTS]
        self._outcomes(pilot)
        began = time.perf_counter()
        self._outcomes(pilot)
        seconds = time.perf_counter() - began
        seconds_per_post = seconds / len(pilot)
        count = round(TRIAL_S / seconds_per_post)
        return posts[: max(MIN_POSTS, count)]

    def measure(
        self, posts: Sequence[Post], exact: Sequence[Outcome] | None
    ) -> tuple[Precision, list[Outcome]]:
        self._outcomes(posts[:PILOT_POSTS])  # warm-up
        meter = MemoryMeter(self._classifier.device.torch)
        began = time.perf_counter()
        outcomes = self._outcomes(posts)
        seconds = time.perf_counter() - began
        label_set = self._classifier.label_set(ClassifyOptions())
        precision = Precision(
            name=self._name,
            posts=len(posts),
            seconds=seconds,
            memory_bytes=meter.peak(),
            largest_difference=None,
            changed_labels=None,
            accuracy=accuracy(posts, outcomes, label_set.labels),
        )
        if exact is not None:
            precision = replace(
                precision,
                largest_difference=largest_difference(outcomes, exact),
                changed_labels=changed_labels(outcomes, exact),
            )
        return precision, outcomes

    def _outcomes(self, posts: Sequence[Post]) -> list[Outcome]:
        model = Loaded(self._classifier, self._budget)
        classified = offline.classify(posts, [model], self._settings)
        return [outcome for _, outcome in classified]


def _pairs(
    outcomes: Sequence[Outcome], exact: Sequence[Outcome]
) -> list[tuple[Classification, Classification]]:
    """Return the posts' classifications in both precisions, of those that have both."""
    pairs = []
    for outcome, reference in zip(outcomes, exact, strict=True):
        if isinstance(outcome, Classification) and isinstance(
            reference, Classification
        ):
            pairs.append((outcome, reference))
    return pairs


def largest_difference(outcomes: Sequence[Outcome], exact: Sequence[Outcome]) -> float:
    """Return the largest difference of a score from that in float32."""
    differences = []
    for outcome, reference in _pairs(outcomes, exact):
        for label, score in reference.scores.items():
            difference = outcome.scores[label] - score
            differences.append(abs(difference))
    return max(differences, default=0.0)


def changed_labels(outcomes: Sequence[Outcome], exact: Sequence[Outcome]) -> float:
    """Return the share of posts whose best label is another one than in float32."""
    pairs = _pairs(outcomes, exact)
    changed = [
        outcome
        for outcome, reference in pairs
        if outcome.best_label != reference.best_label
    ]
    return len(changed) / max(1, len(pairs))


def accuracy(
    posts: Sequence[Post], outcomes: Sequence[Outcome], labels: Sequence[str]
) -> float | None:
    """Return the share of posts whose best label is their topic, of those whose topic is a label;
    None without any.
    """
    count = 0
    right_count = 0
    for post, outcome in zip(posts, outcomes, strict=True):
        truth = matching_label(post.topic, labels)
        if truth not in labels or not isinstance(outcome, Classification):
            continue
        count += 1
        if outcome.best_label == truth:
            right_count += 1
    if not count:
        return None
    return right_count / count
