"""The outcome of one post: its classification, from scores.

Needs no model: a stand-in for a worker (feedmill/testing) gives its posts the same outcomes.
"""

import math
import time
from operator import itemgetter

from feedmill.shared.messages import Classification, Outcome, PostError
from feedmill.shared.results import Origin


def make_outcome(
    post_id: str,
    scores: dict[str, float],
    none: float | None,
    fingerprint: str,
    sent_at: float | None,
    origin: Origin,
    *,
    language: str | None = None,
    is_foreign: bool = False,
    labels_threshold: float | None = None,
) -> Outcome:
    """Return the outcome of a post: its classification, unless scores are not finite.

    none: score below which the post has no label; None if each post has one. sent_at: time of
    sending in seconds since 1970, None if unknown. is_foreign: the language is one that the model
    was not made for, so the post has no label. labels_threshold: see `Classification`.
    """
    total = sum(scores.values())
    if not math.isfinite(total):
        return PostError(
            id=post_id,
            error=(
                "the scores are not finite, because the precision overflowed; set "
                "FEEDMILL_DTYPE=float32"
            ),
        )
    ranking = sorted(
        scores.items(),
        key=itemgetter(1),
        reverse=True,
    )
    best_first = dict(ranking)
    best, best_score = ranking[0]
    fits = none is None or best_score >= none
    now = time.time()
    queued_seconds = None
    if sent_at is not None:
        queued_seconds = max(0.0, now - sent_at)
    # Validated, since scores of plug-ins can be of other types. It takes less time than
    # `model_construct`, which is not compiled.
    return Classification(
        id=post_id,
        label=best if fits and not is_foreign else None,
        scores=best_first,
        model=origin.model,
        revision=origin.revision,
        weights=origin.weights,
        fingerprint=fingerprint,
        classified_at=now,
        worker=origin.worker,
        device=origin.device,
        queued_seconds=queued_seconds,
        language=language,
        labels_threshold=labels_threshold,
    )


def error_of_post(post_id: str, error: Exception) -> PostError:
    """Return the outcome of a post that cannot be computed."""
    kind = type(error).__name__
    return PostError(id=post_id, error=f"{kind}: {error}")
