"""The threshold below which a post has no label, for scores that are probabilities of fitting.

A score is calibrated if, of all labels with about the score 0.7, about 70% are right. Such scores
say what to expect of a threshold, without a single answer: the sum of the scores of some posts is
the number of right labels among them, and the sum of all is the number of posts that fit.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

#: Words for the option `none`, in settings and flags: the model's default threshold, and each post
#: has a label.
NONE_WORDS = {
    "true": True,
    "on": True,
    "false": False,
    "off": False,
}
#: Text in place of a label, for readers, of posts without one.
NO_LABEL = "no label"
#: The default threshold, for posts that come one by one. For 1,600 real posts with 3 to 10 labels,
#: of which 19 to 63% fitted one, `best_f1_threshold` was from 0.33 to 0.38.
DEFAULT_NONE = 0.36
#: The default threshold of cosines, which `multi_label` compares for embedding models. For 800
#: real posts with 3 to 10 described labels, the embedded model's best F1 was at 0.17 to 0.20 on
#: average, with bare names at 0.14 to 0.20. Other models have other cosines.
DEFAULT_NONE_COSINE = 0.2
#: The default threshold of models that score each label by itself, and of fine-tuned models: the
#: post is likelier to fit the label than not. Not measured.
DEFAULT_NONE_ALONE = 0.5


def best_f1_threshold(scores: Sequence[float]) -> float:
    """Return the threshold with the highest expected F1; DEFAULT_NONE without scores.

    F1 is the harmonic mean of precision and recall: twice the number of right labels, divided by
    the number of labels and the number of posts that fit one.
    """
    fitting = math.fsum(scores)
    best_first = sorted(scores, reverse=True)
    threshold = DEFAULT_NONE
    best = 0.0
    for count, right in enumerate(accumulate(best_first), start=1):
        f1 = 2 * right / (count + fitting)
        if f1 > best:
            best = f1
            threshold = best_first[count - 1]
    return threshold


def precise_threshold(scores: Sequence[float], precision: float) -> float:
    """Return the lowest threshold whose labels are expected to be right so often; infinity if
    there is none.

    precision: from 0 to 1.
    """
    best_first = sorted(scores, reverse=True)
    threshold = math.inf
    for count, right in enumerate(accumulate(best_first), start=1):
        score = best_first[count - 1]
        if right < precision * count:
            if score < threshold:
                return threshold
            # Equal scores get a label together, or not at all.
            higher = [other for other in best_first if other > score]
            return min(higher, default=math.inf)
        threshold = score
    return threshold
