"""Load models, classify posts with known labels, and compare the predictions.

Posts go through the worker's pipeline, so the throughput is a worker's. Needs torch, which only
workers have.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from feedmill.console import Report, counted
from feedmill.evaluation.known import known_posts
from feedmill.evaluation.metrics import calibration, coverage, metrics
from feedmill.local_model import load_model
from feedmill.shared.errors import InputError, UserError, explain_refusals, printable
from feedmill.shared.messages import (
    ClassifyOptions,
    Outcome,
    Post,
    PostError,
)
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.settings import Settings
from feedmill.training import learnt
from feedmill.training.picked import fits_none
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import usable_settings
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.backlog import Loaded
from feedmill.workers.pipeline.calibration import calibrate

NOTHING_SEEN: frozenset[int] = frozenset()


class Measurements(NamedTuple):
    """The measurements of one model on a set of posts, as `metrics`, `calibration` and its posts
    per second.

    The posts per second include tokenization, but not the loading of the model. left_out: posts
    that failed. seen: number and accuracy of the posts that the model has learnt from, which do
    not count; absent without any.
    """

    summary: dict[str, Any]
    #: Error messages of the posts that could not be classified.
    failures: list[str]
    #: The outcome of each post, in order.
    outcomes: list[Outcome]


class ModelEvaluation(NamedTuple):
    """The evaluation of one model. name: with its data type if several are compared. path: as the
    user named the model.
    """

    name: str
    model: str
    dtype: str
    path: str
    measured: Measurements


class Evaluation(NamedTuple):
    """The evaluation of models on the same posts."""

    models: list[ModelEvaluation]
    #: The posts whose topic is a label of every model, each with that label.
    known: list[tuple[Post, str]]
    #: Number of the other posts.
    left_out: int
    #: Places in `known` of posts that a model has learnt from, and whether they count all the
    #: same.
    seen: frozenset[int]
    counts_seen: bool

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """The metrics of each model, by its name."""
        return {model.name: model.measured.summary for model in self.models}

    @property
    def failures(self) -> list[str]:
        """Error messages of the posts that could not be classified, for a single model; for
        several, none.
        """
        if len(self.models) > 1:
            return []
        return self.models[0].measured.failures

    @property
    def counted_places(self) -> list[int]:
        """Places in `known` of the posts that count."""
        indexes = range(len(self.known))
        if self.counts_seen:
            return list(indexes)
        return [index for index in indexes if index not in self.seen]


def evaluate_models(
    posts: Sequence[Post],
    candidates: Sequence[Settings],
    report: Report,
    counts_seen: bool = False,
) -> Evaluation:
    """Load the models and measure each on the posts whose topic is a label of every model.

    Posts that any of the models has learnt from are measured apart, because a model remembers
    them.

    candidates: the settings of each model. counts_seen: count the posts that were learnt from as
    all others. Raises InputError without such posts or if all were learnt from, and UserError if a
    model cannot be loaded.
    """
    has_dtypes = len({candidate.dtype for candidate in candidates}) > 1
    if len(candidates) > 1:
        candidates = [usable_settings(candidate) for candidate in candidates]
    loaded = [load_model(candidate) for candidate in candidates]
    label_sets = [model.label_set(ClassifyOptions()).labels for model in loaded]
    none = candidates[0].none
    asks_none = none is not None and none is not False
    has_answers = none is not False and any(fits_none(post) for post in posts)
    if asks_none or has_answers:
        _check_names(label_sets)
    known = known_posts(
        posts,
        label_sets,
        others_fit_none=asks_none,
        answers_fit_none=has_answers,
    )
    seen = _seen_places(known, candidates, report)
    if len(seen) == len(known) and not counts_seen:
        raise InputError(
            f"The model has learnt from all of these {counted(len(known), 'post')}, so their "
            "accuracy says nothing about others. Give posts that it has not seen, or --seen to "
            "measure these."
        )
    apart = NOTHING_SEEN if counts_seen else seen
    left_out = len(posts) - len(known)
    models: list[ModelEvaluation] = []
    for model, candidate in zip(loaded, candidates, strict=True):
        measured = measure(known, model, candidate, report, apart, none)
        measured.summary["left_out"] += left_out
        name = model.weights.name
        precision = model.device.precision
        models.append(
            ModelEvaluation(
                name=f"{name} in {precision}" if has_dtypes else name,
                model=name,
                dtype=precision,
                path=candidate.model,
                measured=measured,
            )
        )
    return Evaluation(
        models=models,
        known=known,
        left_out=left_out,
        seen=seen,
        counts_seen=counts_seen,
    )


def _check_names(label_sets: Sequence[Sequence[str]]) -> None:
    """Raise UserError if a label has the name of posts without one."""
    for labels in label_sets:
        if NO_LABEL in labels:
            raise UserError(
                f"A label is called {NO_LABEL!r}, as posts that fit no label are. Rename it, or "
                "give --none off."
            )


def _seen_places(
    known: Sequence[tuple[Post, str]], candidates: Sequence[Settings], report: Report
) -> frozenset[int]:
    """Return the places of the posts that any of the models has learnt from. Raises UserError."""
    digests = _learnt_digests(candidates, report)
    if not digests:
        return NOTHING_SEEN
    places: set[int] = set()
    for place, (post, _) in enumerate(known):
        if learnt.digest_of(post) in digests:
            places.add(place)
    return frozenset(places)


def _learnt_digests(candidates: Sequence[Settings], report: Report) -> set[int]:
    """Return the digests of the texts that any of the models has learnt from."""
    digests: set[int] = set()
    models = {candidate.model for candidate in candidates}
    for model in models:
        digests_of_model = learnt.digests_of(model)
        if digests_of_model is not None:
            digests.update(digests_of_model)
        elif learnt.was_trained(model):
            report.print(
                f"{printable(model)} does not record the texts that it has learnt from: it was "
                "trained by an earlier version. If they are among these posts, the figures are "
                "too high."
            )
    return digests


class _Comparison(NamedTuple):
    """Outcomes beside the true labels."""

    #: Reasons of the posts without a classification.
    failures: list[str]
    #: True and predicted label of each post that counts.
    pairs: list[tuple[str, str]]
    #: Score of the best label of each post that counts, and whether this label is right.
    scored: list[tuple[float, bool]]
    #: Whether the label is right, of each post that was in the model's training.
    are_seen_right: list[bool]


def _compare(
    outcomes: Sequence[Outcome],
    truths: Sequence[str],
    apart: Collection[int],
    has_none: bool,
) -> _Comparison:
    """Compare outcomes with the true labels. apart, has_none: see `measure`."""
    comparison = _Comparison(
        failures=[],
        pairs=[],
        scored=[],
        are_seen_right=[],
    )
    for index, (outcome, truth) in enumerate(zip(outcomes, truths, strict=True)):
        if isinstance(outcome, PostError):
            comparison.failures.append(outcome.error)
            continue
        label = outcome.best_label
        if has_none:
            label = outcome.label or NO_LABEL
        if index in apart:
            comparison.are_seen_right.append(label == truth)
            continue
        comparison.pairs.append((truth, label))
        # A score is how likely the best label is right, also if it is too low.
        is_best_right = outcome.best_label == truth
        comparison.scored.append((outcome.label_score, is_best_right))
    return comparison


def measure(
    known: Sequence[tuple[Post, str]],
    loaded: Classifier,
    settings: Settings,
    report: Report,
    apart: Collection[int] = NOTHING_SEEN,
    none: float | bool | None = None,
) -> Measurements:
    """Classify posts and compare the predicted labels with the true ones.

    known: (post, true label), where the label is one of the model's, or NO_LABEL for posts that
    fit none. If there are such posts, or `none` asks for it, "none of these" is an outcome as any
    label. apart: places of posts that are classified, but count only in `seen`. none: the option
    `none`. Raises UserError if no post can be classified.
    """
    asks_none = none is not None and none is not False
    has_none = asks_none or any(truth == NO_LABEL for _, truth in known)
    options = ClassifyOptions(none=False)
    if has_none:
        options = ClassifyOptions(none=none if asks_none else True)
    count = len(known)
    phase = f"testing {loaded.weights.name} on {count:,} posts"
    with explain_refusals(settings.model):
        model = Loaded(loaded, calibrate(loaded, settings))
        began = time.perf_counter()
        posts = (post for post, _ in known)
        classified = offline.classify(posts, [model], settings, options)
        counted_posts = report.counting(phase, classified, count)
        outcomes = [outcome for _, outcome in counted_posts]
        seconds = time.perf_counter() - began
    truths = [truth for _, truth in known]
    comparison = _compare(outcomes, truths, apart, has_none)
    failures = comparison.failures
    pairs = comparison.pairs
    if not pairs:
        raise UserError(
            f"None of the {count - len(apart):,} posts can be classified: {failures[0]}. "
            "Correct the posts, or use another model."
        )
    label_set = loaded.label_set(ClassifyOptions())
    labels = list(label_set.labels)
    if has_none:
        labels.append(NO_LABEL)
    summary = metrics(labels, pairs)
    if has_none:
        summary |= coverage(pairs)
    summary |= calibration(comparison.scored)
    summary["posts_per_s"] = count / seconds
    summary["left_out"] = len(failures)
    seen_posts = len(comparison.are_seen_right)
    if seen_posts:
        accuracy = sum(comparison.are_seen_right) / seen_posts
        summary["seen"] = {"posts": seen_posts, "accuracy": accuracy}
    return Measurements(
        summary=summary,
        failures=failures,
        outcomes=outcomes,
    )
