"""Train a head with a none-class: for posts that fit none of the labels.

Such posts are about anything, so a few answers "none of these" cannot say what they are like.
Everyday subjects can, as in zero-shot classification (none_of_these.py of the classifiers):
labels and the subjects apart from them are adapted to all posts together (`head.adapt`), and the
labelled posts, if there are any, correct both. An answer "none of these" counts for the subjects
that its post resembles. The probability of the none-class is the sum of the subjects'.
"""

import math
from itertools import product
from typing import NamedTuple

import torch

from feedmill.shared.none_of_these import best_f1_threshold
from feedmill.training.head import (
    ADAPTED,
    FOLDS,
    Fit,
    Fitted,
    adapt,
    centre_of,
    fit_logistic,
    held_out_logits,
    logits_of,
    loss_of_rows,
    one_thread,
    sum_of_layers,
    validation_order,
)
from feedmill.workers.models.classifiers.fixed_labels import NoneClass
from feedmill.workers.models.classifiers.none_of_these import apart

#: Factors of all logits to choose from, and logarithms of the subjects' weight; the likeliest of
#: each, and their usual deviation in logarithms. The likeliest have the lowest log loss without
#: any answer, for 3 to 10 of sixteen topics.
SHARPNESSES = tuple(0.7 * 2 ** (step / 8) for step in range(-8, 13))
SHIFTS = tuple(-1.4 + step / 5 for step in range(-10, 11))
USUAL_SHARPNESS = 0.7
USUAL_SHIFT = -1.4
SHARPNESS_DEVIATION = 0.15
#: Factor of the labels' logits without an answer, where `none` is not asked for. With 0.7, labels
#: alone are too uncertain: calibration errors of 0.015, 0.038 and 0.055 (3, 6 and 10 labels),
#: instead of 0.010, 0.009 and 0.015. With `none`, 0.7 keeps an asked precision of 0.9 better: 86%,
#: 89% and 91% right, instead of 81%, 85% and 87%.
LABELS_SHARPNESS = 0.85
SHIFT_DEVIATION = 0.5


def fit_none(
    vectors: torch.Tensor,
    targets: torch.Tensor,
    label_vectors: torch.Tensor,
    subject_vectors: torch.Tensor,
    seed: int,
) -> Fit:
    """Fit a head with a none-class.

    vectors: unit vectors of posts, [posts, dimensions], of which the first are the examples.
    targets: the examples' distributions, [examples, labels + 1], with "none of these" last; there
    may be no examples.
    label_vectors, subject_vectors: those of the sentences of labels and of everyday subjects.
    """
    labels = len(label_vectors)
    subjects = apart(label_vectors, subject_vectors)
    if not len(subjects):
        # All are near a label: the mean of the labels is about nothing in particular.
        subjects = label_vectors.mean(0, keepdim=True)
    start, unseen = adapt(vectors, torch.cat([label_vectors, subjects]))
    fit = _fit_correction(
        vectors,
        targets,
        labels,
        start,
        unseen,
        seed,
    )
    head_sharpness = fit.sharpness if len(targets) else LABELS_SHARPNESS
    weight, bias = sum_of_layers(
        start,
        fit.layer,
        fit.centre,
        fit.scale,
        head_sharpness,
    )
    none_sharpness = fit.sharpness / head_sharpness
    none_bias = bias[labels:] + fit.shift / none_sharpness
    outcomes = outcome_scores(fit.sharpness * fit.logits, fit.shift, labels)
    best_scores, best = outcomes[:, :labels].max(1)
    none = _none_class(weight[labels:], none_bias, none_sharpness, best_scores)
    predicted = torch.where(best_scores >= none.threshold, best, labels)
    choice = {
        "start": ADAPTED,
        "sharpness": head_sharpness,
        "accuracies": {},
        "none": none.promise | {"subjects": len(subjects), "shift": fit.shift},
    }
    return Fit(
        head=(weight[:labels], bias[:labels]),
        choice=choice,
        right=_is_right(predicted, targets, fit.validated),
        none=none,
        best_right=_is_right(best, targets, fit.validated),
    )


class _Correction(NamedTuple):
    """A correction of the start's logits, fitted to the examples."""

    #: Weight and bias, for features that are centred and scaled.
    layer: tuple[torch.Tensor, torch.Tensor]
    centre: torch.Tensor
    scale: torch.Tensor
    #: Corrected logits of all posts, [posts, labels + subjects]; those of validated examples by a
    #: correction that has not seen them.
    logits: torch.Tensor
    #: Places of the validated examples; none of too few.
    validated: torch.Tensor
    sharpness: float
    shift: float


def _fit_correction(
    vectors: torch.Tensor,
    targets: torch.Tensor,
    labels: int,
    start: Fitted,
    unseen: torch.Tensor,
    seed: int,
) -> _Correction:
    """Fit the correction. start, unseen: see `adapt`. Others: see `fit_none`."""
    count = len(targets)
    examples = vectors[:count]
    shares = unseen[:count, labels:].softmax(1)
    none_targets = targets[:, labels:] * shares
    all_targets = torch.cat([targets[:, :labels], none_targets], dim=1)
    offset = logits_of(start, examples)
    centre, scale = centre_of(vectors)
    # In float64, the fit converges to the same result despite rounding.
    features = ((examples - centre) / scale).double()
    directions = _directions(features)
    features = features @ directions  # [examples, directions]
    sharpness = USUAL_SHARPNESS
    shift = USUAL_SHIFT
    validated = torch.empty(0, dtype=torch.long)
    with one_thread():
        in_directions, correction_bias = fit_logistic(features, all_targets, offset)
        correction = in_directions @ directions.T
        corrected = unseen + _scores_at(
            correction, correction_bias, vectors, centre, scale
        )
        if count >= FOLDS:
            validated = validation_order(count, seed)
            corrected[validated] = held_out_logits(
                features[validated],
                all_targets[validated],
                offset[validated],
                unseen[validated],
            )
            sharpness, shift = _calibrate(
                corrected[validated], targets[validated], labels
            )

    return _Correction(
        layer=(correction, correction_bias),
        centre=centre,
        scale=scale,
        logits=corrected,
        validated=validated,
        sharpness=sharpness,
        shift=shift,
    )


def _is_right(
    predicted: torch.Tensor, targets: torch.Tensor, validated: torch.Tensor
) -> torch.Tensor:
    """Return 1 for each example with its label predicted, 0 for others, nan for those that were
    not validated: [examples].
    """
    right = torch.full([len(targets)], torch.nan)
    is_right = predicted[validated] == targets[validated].argmax(1)
    right[validated] = is_right.float()
    return right


def _directions(features: torch.Tensor) -> torch.Tensor:
    """Return orthogonal unit vectors that span the features: [dimensions, directions].

    A few examples span few dimensions, in which the fit is the same, and several times as fast.
    """
    count, dimensions = features.shape
    if count == 0 or count >= dimensions:
        return torch.eye(dimensions, dtype=features.dtype)
    directions: torch.Tensor
    directions, _ = torch.linalg.qr(features.T)
    return directions


def _none_class(
    weight: torch.Tensor,
    bias: torch.Tensor,
    sharpness: float,
    best_scores: torch.Tensor,
) -> NoneClass:
    """Return the none-class with the threshold of best expected F1.

    best_scores: the score of each post's best label, by a head that has not seen it: [posts].
    """
    promise = promise_of(best_scores)
    return NoneClass(
        weight=weight,
        bias=bias,
        **promise._asdict(),
        sharpness=sharpness,
    )


class Promise(NamedTuple):
    """A threshold, and the shares of right labels and of posts with a label to expect of it; None
    if there were too few posts to tell.
    """

    threshold: float
    precision: float | None = None
    coverage: float | None = None


def promise_of(best_scores: torch.Tensor) -> Promise:
    """Return the threshold of best expected F1.

    best_scores: the score of the best label of each post that was not learnt from: [posts].
    """
    threshold = best_f1_threshold(best_scores.tolist())
    scores = best_scores[best_scores >= threshold]
    precision = 0.0
    if len(scores):
        precision = float(scores.mean())
    return Promise(
        threshold=threshold,
        precision=precision,
        coverage=len(scores) / len(best_scores),
    )


def outcomes_of(head: Fitted, none: NoneClass, vectors: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of each label and of "none of these": [vectors, labels + 1]."""
    label_logits = logits_of(head, vectors)
    none_logits = logits_of((none.weight, none.bias), vectors)
    logits = none.sharpness * torch.cat([label_logits, none_logits], dim=1)
    return outcome_scores(logits, 0.0, label_logits.shape[1])


def outcome_scores(logits: torch.Tensor, shift: float, labels: int) -> torch.Tensor:
    """Return the probabilities of each label and, last, of "none of these": [rows, labels + 1].

    logits: of labels and subjects, [rows, labels + subjects]. shift: what to add to those of
    subjects.
    """
    return _outcome_logits(logits, shift, labels).softmax(1)


def _outcome_logits(logits: torch.Tensor, shift: float, labels: int) -> torch.Tensor:
    none_logits = logits[:, labels:].logsumexp(1, keepdim=True) + shift
    return torch.cat([logits[:, :labels], none_logits], dim=1)


def _scores_at(
    weight: torch.Tensor,
    bias: torch.Tensor,
    vectors: torch.Tensor,
    centre: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Return the correction's logits of all posts, [posts, labels + subjects]."""
    features = (vectors - centre) / scale
    return features @ weight.float().T + bias.float()


def _calibrate(
    logits: torch.Tensor, targets: torch.Tensor, labels: int
) -> tuple[float, float]:
    """Return the sharpness and the shift with the lowest log loss on held-out examples, if the
    sharpness' logarithm and the shift have normal distributions around the usual ones.

    The shift is a logarithm already: it is added to logits.
    """

    def penalized_loss(choice: tuple[float, float]) -> float:
        sharpness, shift = choice
        log_losses = loss_of_rows(
            _outcome_logits(sharpness * logits, shift, labels), targets
        )
        sharpness_deviations = (
            math.log(sharpness / USUAL_SHARPNESS) / SHARPNESS_DEVIATION
        )
        shift_deviations = (shift - USUAL_SHIFT) / SHIFT_DEVIATION
        negative_log_prior = (sharpness_deviations**2 + shift_deviations**2) / 2
        return float(log_losses.sum()) + negative_log_prior

    return min(product(SHARPNESSES, SHIFTS), key=penalized_loss)
