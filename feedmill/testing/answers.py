"""The answers of a stand-in for a worker: scores of a post's labels, from a function or canned
labels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from feedmill.shared.errors import RequestRefused, UserError, truncate
from feedmill.shared.messages import (
    MIN_LABELS_SCORE,
    ClassifyOptions,
    Labels,
    NoneThreshold,
    Post,
    PostError,
    digest,
    fingerprint,
)
from feedmill.shared.none_of_these import DEFAULT_NONE, DEFAULT_NONE_COSINE
from feedmill.shared.results import Origin
from feedmill.shared.settings import DESCRIBED_TOPICS
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.outcomes import error_of_post, make_outcome

#: A post's label; several, for `multi_label`; the score of each label; or None for a post that
#: fits no label.
Label: TypeAlias = str | Sequence[str] | Mapping[str, float] | None
#: Source of answers: a function of a post and the names of the labels, labels by a post's id,
#: title or text, or the label of every post.
Answer: TypeAlias = Callable[[Post, tuple[str, ...]], Label] | Mapping[str, Label] | str

#: Score of a post's label. The others share the rest.
CHOSEN = 0.9
#: Sum of the scores of a post that fits no label.
UNFIT = 0.1
#: Where the answers come from, as real outcomes have it.
MODEL = "feedmill.testing"
REVISION = "1"
WEIGHTS = "0" * 64
DEVICE = "none"


class Answers:
    """A stand-in for a worker's model.

    answer: None answers with the first label whose name is in the text, else with the first one.
    labels, none: the settings of the worker, for messages that name none.
    """

    def __init__(
        self,
        answer: Answer | None,
        labels: Labels | None,
        none: NoneThreshold,
        worker: str,
    ) -> None:
        self.answer = answer
        self._labels = tuple(labels or DESCRIBED_TOPICS)
        self._none = none
        self._origin = Origin(MODEL, REVISION, WEIGHTS, worker, DEVICE)

    def set_outcomes(self, message: Message) -> None:
        """Set the outcome of each post of a message, or the reason to refuse it."""
        try:
            posts = message.read()
        except RequestRefused as refused:
            message.refused = refused
            return
        options = message.options
        labels = tuple(options.labels or self._labels)
        threshold = self._threshold(options)
        labels_threshold = None
        if options.multi_label:
            labels_threshold = MIN_LABELS_SCORE if threshold is None else threshold
        recipe = digest(MODEL, *labels, str(options.multi_label), str(threshold))
        for index, post in enumerate(posts):
            if isinstance(post, PostError):
                message.set_outcome(index, post)
                continue
            try:
                scores = self._scores(post, labels)
            except Exception as error:  # as of a model that cannot compute a post
                message.set_outcome(index, error_of_post(post.id, error))
                continue
            outcome = make_outcome(
                post.id,
                scores,
                threshold,
                fingerprint(post, recipe),
                message.sent_at,
                self._origin,
                labels_threshold=labels_threshold,
            )
            message.set_outcome(index, outcome)

    def _threshold(self, options: ClassifyOptions) -> float | None:
        none = self._none if options.none is None else options.none
        if none is None or none is False:
            return None
        if none is True:
            return DEFAULT_NONE_COSINE if options.multi_label else DEFAULT_NONE
        return none

    def _scores(self, post: Post, labels: tuple[str, ...]) -> dict[str, float]:
        label = self._label(post, labels)
        if label is None:
            share = UNFIT / len(labels)
            return dict.fromkeys(labels, share)
        if isinstance(label, Mapping):
            _check_labels(label, labels)
            scores = dict.fromkeys(labels, 0.0)
            for name, score in label.items():
                scores[name] = float(score)
            return scores
        chosen = {label} if isinstance(label, str) else set(label)
        _check_labels(chosen, labels)
        others = len(labels) - len(chosen)
        rest = 1 - CHOSEN
        if others:
            rest /= others
        scores = dict.fromkeys(labels, rest)
        for name in chosen:
            scores[name] = CHOSEN
        return scores

    def _label(self, post: Post, labels: tuple[str, ...]) -> Label:
        answer = self.answer
        if answer is None:
            text = post.text.casefold()
            named = [label for label in labels if label.casefold() in text]
            return (named or labels)[0]
        if isinstance(answer, str):
            return answer
        if isinstance(answer, Mapping):
            for key in (post.id, post.title, post.text):
                if key in answer:
                    return answer[key]
            raise UserError(
                f"the answers have no label for the post {truncate(post.id)}: add its id, title "
                "or text"
            )
        return answer(post, labels)


def _check_labels(
    names: Sequence[str] | Mapping[str, float] | set[str], labels: Sequence[str]
) -> None:
    """Raise UserError if an answer names a label that the message does not have."""
    for name in names:
        if name not in labels:
            names_of_labels = truncate(", ".join(labels))
            raise UserError(
                f"the answer {name!r:.80} is none of the message's labels: {names_of_labels}"
            )
