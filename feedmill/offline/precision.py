"""Labels with a given precision, for posts that come one after another."""

from collections.abc import Callable, Generator
from contextlib import closing
from itertools import chain, islice

from feedmill.shared.messages import Classification, Outcome, Post
from feedmill.shared.none_of_these import precise_threshold

#: Posts whose scores choose the threshold, the first ones. They wait in memory, about a kilobyte
#: each.
THRESHOLD_POSTS = 20_000


def label_precisely(
    outcomes: Generator[tuple[Post, Outcome]],
    precision: float,
    note: Callable[[float], None] | None = None,
) -> Generator[tuple[Post, Outcome]]:
    """Yield the outcomes, in order, without the labels that are too uncertain for a precision.

    Reads the first THRESHOLD_POSTS before it yields one. Their scores must be probabilities of
    being right. precision: the share of the labels that shall be right, above 0 and up to 1. note:
    is called with the threshold; infinity if no label is that certain.
    """
    with closing(outcomes):
        first = list(islice(outcomes, THRESHOLD_POSTS))
        scores = []
        for _, outcome in first:
            if isinstance(outcome, Classification):
                scores.append(outcome.label_score)
        threshold = precise_threshold(scores, precision)
        if note is not None:
            note(threshold)
        for post, outcome in chain(first, outcomes):
            if isinstance(outcome, Classification) and outcome.label_score < threshold:
                yield post, outcome.model_copy(update={"label": None})
            else:
                yield post, outcome
