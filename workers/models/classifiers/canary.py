"""Canary posts: score known posts with a model that was just loaded, so that a broken one never takes a message.

Half precision can overflow. The scores are then not finite, or the same for every post.
"""

import logging
import math
from collections.abc import Callable

import torch

from shared.errors import DeviceFull, ModelError
from shared.messages import ClassifyOptions
from workers.models.classifiers import Classifier, Scores
from workers.models.device import Device, has_bfloat16

logger = logging.getLogger(__name__)

#: Short and long, plain and unusual posts. A model must score every label of each.
CANARY_POSTS = (
    "A first post.",
    "The keeper saved two penalties\n\nand nobody in the stadium could believe it",
    "¿Qué? 🙂 <b>&amp;</b> https://example.org/?a=b " + "x" * 200,
    "no",
)
#: Labels to score if each label is a row, so that a large label set does not delay the start.
CANARY_LABELS = 2
#: Decimal places in which scores of different posts must differ.
PLACES = 6


def check_scores(classifier: Classifier) -> list[Scores]:
    """Return the scores of the canary posts. Raises ModelError unless every label has a finite score.

    Other errors of the classifier propagate: RequestRefused if it cannot serve the configured labels.
    """
    label_set = classifier.label_set(ClassifyOptions())
    each_a_row = label_set.rows > 1 and not hasattr(classifier, "fixed_labels")
    if each_a_row and len(label_set.labels) > CANARY_LABELS:
        label_set = classifier.label_set(ClassifyOptions.parse({"labels": list(label_set.labels[:CANARY_LABELS])}))
    rows = [row for of_post in classifier.prepare(CANARY_POSTS, label_set) for row in of_post]
    found = [scores for _, scores in classifier.finish(rows, classifier.forward(rows))]
    name, device = classifier.weights.name, classifier.device
    for scores in found:
        if set(scores) != set(label_set.labels):
            raise ModelError(f"{name} gives no scores for some labels: {scores!r:.200}. Use another model.")
        if not all(map(math.isfinite, scores.values())):
            raise ModelError(f"{name} gives scores that are not finite in {device.precision}. {_advice(device)}")
    return found


def check_differences(found: list[Scores], classifier: Classifier, in_float32: Callable[[], Classifier]) -> None:
    """Raise ModelError if all posts have the same scores in half precision, but not in float32.

    A model may have the same scores for posts as different as these: one that was trained to find something rare, for
    example. in_float32: load the model in float32; called only if all scores are the same.
    """
    if not _all_alike(found):
        return
    name, device = classifier.weights.name, classifier.device
    if device.dtype != torch.float32:
        try:
            precise = check_scores(in_float32())
        except (ModelError, DeviceFull):  # for example without memory for it
            precise = None
        if precise is None or not _all_alike(precise):
            raise ModelError(f"{name} gives all posts the same scores in {device.precision}. {_advice(device)}")
    logger.warning("%s gives all test posts the same scores, in float32, too: evaluate it before you use it", name)


def _all_alike(found: list[Scores]) -> bool:
    return len({tuple(round(score, PLACES) for score in scores.values()) for scores in found}) == 1


def _advice(device: Device) -> str:
    """Return a sentence that names the precision to try."""
    if device.dtype == torch.float32:
        return "Use another model."
    wider = "bfloat16" if device.dtype == torch.float16 and has_bfloat16(device.torch) else "float32"
    return f"Set FEEDMILL_DTYPE={wider}."
