"""Active learning: choose the posts whose labels teach most, and make a head of few labels and
many posts.

The head is that of `head.py`: zero-shot classification, adapted to all posts, and corrected by the
labelled ones.

The first posts are a random sample. Later ones are drawn at random as well, the more likely the
closer the scores of their best two labels: the head is uncertain of them. A fifth is drawn without
regard to that. The random posts measure the accuracy, by cross-validation; on uncertain posts, it
would be too low.

Knows neither files nor terminals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot

from feedmill.shared.none_of_these import DEFAULT_NONE
from feedmill.training.head import Fit, fit, logits_of
from feedmill.training.none_class import fit_none, outcomes_of
from feedmill.training.picked import (
    FIRST,
    MEASURING,
    NONE_OF_THESE,
    RANDOM,
    UNCERTAIN,
)
from feedmill.workers.models.classifiers.none_of_these import apart, fitting_scores
from feedmill.workers.models.classifiers.similarity import COSINE_SCALE

#: Posts per label in the first round, and posts in each later round.
FIRST_PER_LABEL = 3
ROUND_POSTS = 10
#: One post in so many is random, and one in so many of the pool is never picked by uncertainty.
RANDOM_EVERY = 5
#: With at least MIN_LABELLED answers, more would hardly help once the last rounds changed the
#: labels of at most this share of the posts: the accuracy cannot have risen by more.
WINDOW_ROUNDS = 5
MIN_LABELLED = 100
MAX_CHANGED = 0.04
#: Least weight of a post when uncertain posts are drawn.
MIN_UNCERTAINTY = 1e-3


class Answer(NamedTuple):
    """A post that was picked to be labelled: its place among the posts, and why it was picked.

    label: the number of its label, or NONE_OF_THESE; None if there is none yet, or if the post was
    skipped.
    """

    place: int
    why: str
    label: int | None = None


class ExpectedAccuracy(NamedTuple):
    """The accuracy by cross-validation, after a round, on the labelled random posts. measured_on:
    their number.
    """

    measured_on: int
    #: Share of right labels of the head, its standard error, and the share of zero-shot
    #: classification.
    accuracy: float
    accuracy_error: float
    zero_shot_accuracy: float

    def __str__(self) -> str:
        accuracy = f"{self.accuracy:.2f}"
        error = f"{self.accuracy_error:.2f}"
        zero_shot = f"{self.zero_shot_accuracy:.2f}"
        return f"expected accuracy {accuracy} ± {error}, zero-shot {zero_shot}"


class Session:
    """A sequence of answers: which post is next, and how accurate the head is so far.

    After each round, the head is fitted to the answers, and the next posts are picked with it.

    Once an answer is NONE_OF_THESE, the head has a none-class, and "none of these" is an outcome
    like any label.

    vectors: unit vectors of the posts, [posts, dimensions]. label_vectors: those of the labels'
    sentences, [labels, dimensions]. subject_vectors: those of everyday subjects, which such
    answers need.
    """

    def __init__(
        self,
        vectors: torch.Tensor,
        label_vectors: torch.Tensor,
        seed: int,
        answers: Sequence[Answer] = (),
        subject_vectors: torch.Tensor | None = None,
    ) -> None:
        self._vectors = vectors
        self._label_vectors = label_vectors
        self._seed = seed
        self.answers = list(answers)
        self._subject_vectors = subject_vectors
        count = len(vectors)
        generator = torch.Generator()
        generator.manual_seed(seed)
        order = torch.randperm(count, generator=generator)
        self._order: list[int] = order.tolist()
        self._next: list[Answer] = []
        #: Best label of each post after each round: [posts].
        self._rounds: list[torch.Tensor] = []
        #: The accuracy after the last round; None if it is unknown.
        self.measured: ExpectedAccuracy | None = None
        #: Whether more answers would hardly help; False before WINDOW_ROUNDS of this session.
        self.settled = False

    def next(self) -> Answer | None:
        """Return the post to label now, after learning from a finished round; None if there are no
        more.
        """
        if not self._next:
            fitted = self.fit()
            self.measured = self.measure(fitted)
            self._note_best_labels(fitted)
            self.settled = self._is_settled()
            self._next = self._first_round()
            if not self._next:
                self._next = self._pick(fitted)
        if self._next:
            return self._next[0]
        return None

    def _first_round(self) -> list[Answer]:
        """Return the posts of the first round without an answer: those that an interrupted one
        had, too.
        """
        label_count = len(self._label_vectors)
        labels_posts = FIRST_PER_LABEL * label_count
        count = max(labels_posts, ROUND_POSTS)
        first_places = self._order[:count]
        first_count = len(first_places)
        if len(self.answers) >= first_count:
            return []
        unanswered = self._unanswered_places(first_places)
        return [Answer(index, FIRST) for index in unanswered]

    def _unanswered_places(self, places: Sequence[int]) -> list[int]:
        """Return the places of the posts without an answer, in order."""
        answered = {answer.place for answer in self.answers}
        return [index for index in places if index not in answered]

    def answer(self, label: int | None) -> None:
        """Label the post that is next. None skips it; NONE_OF_THESE says that it fits no label."""
        pick = self._next.pop(0)
        answer = pick._replace(label=label)
        self.answers.append(answer)

    def undo(self) -> None:
        """Take back the last answer, if there is one. Its post is next again."""
        if self.answers:
            answer = self.answers.pop()
            pick = answer._replace(label=None)
            self._next.insert(0, pick)

    @property
    def labelled(self) -> list[Answer]:
        """Answers that teach: a label, or NONE_OF_THESE."""
        return [answer for answer in self.answers if answer.label is not None]

    def fit(self) -> Fit:
        """Fit the head. Its `right` is in the order of `labelled`."""
        labelled = self.labelled
        numbers = [answer.label for answer in labelled]
        labels = torch.tensor(
            numbers,
            dtype=torch.long,
        )
        label_count = len(self._label_vectors)
        indexes = [answer.place for answer in labelled]
        examples = set(indexes)
        others = [index for index in self._order if index not in examples]
        order = indexes + others
        vectors = self._vectors[order]
        if self._subject_vectors is not None and self._has_none:
            labels[labels == NONE_OF_THESE] = label_count
            return fit_none(
                vectors,
                one_hot(labels, label_count + 1),
                self._label_vectors,
                self._subject_vectors,
                self._seed,
            )
        return fit(
            vectors,
            one_hot(labels, label_count),
            self._label_vectors,
            self._seed,
        )

    @property
    def _has_none(self) -> bool:
        """True if an answer is NONE_OF_THESE."""
        return any(answer.label == NONE_OF_THESE for answer in self.answers)

    def outcomes(self, fitted: Fit, vectors: torch.Tensor) -> torch.Tensor:
        """Return the probability of each outcome, [vectors, outcomes]: of each label and, with a
        none-class, last of "none of these".
        """
        if fitted.none is None:
            return logits_of(fitted.head, vectors).softmax(1)
        return outcomes_of(fitted.head, fitted.none, vectors)

    def _zero_shot_labels(self) -> torch.Tensor:
        """Return the label of each post by zero-shot classification: [posts].

        Once an answer is NONE_OF_THESE, labels are compared with everyday subjects, too.
        """
        logits = COSINE_SCALE * (self._vectors @ self._label_vectors.T)
        if self._subject_vectors is None or not self._has_none:
            return logits.argmax(1)
        subjects = apart(self._label_vectors, self._subject_vectors)
        subject_logits = COSINE_SCALE * (self._vectors @ subjects.T)
        scores, labels = fitting_scores(logits, subject_logits).max(1)
        labels[scores < DEFAULT_NONE] = NONE_OF_THESE
        return labels

    def measure(self, fitted: Fit) -> ExpectedAccuracy | None:
        """Return the accuracy on the random posts, in the cross-validation of the fit."""
        count = 0
        right_count = 0.0
        zero_shot_count = 0
        zero_shot = self._zero_shot_labels()
        for right, answer in zip(fitted.right, self.labelled, strict=True):
            if answer.why not in MEASURING or right.isnan():
                continue
            count += 1
            right_count += float(right)
            zero_shot_label = zero_shot[answer.place]
            if zero_shot_label == answer.label:
                zero_shot_count += 1
        if not count:
            return None
        # A right and a wrong post more, else the error of a few right ones would be 0.
        right_posts = right_count + 1
        posts = count + 2
        share = right_posts / posts
        other_share = 1 - share
        variance = share * other_share / count
        return ExpectedAccuracy(
            measured_on=count,
            accuracy=right_count / count,
            accuracy_error=variance**0.5,
            zero_shot_accuracy=zero_shot_count / count,
        )

    def _note_best_labels(self, fitted: Fit) -> None:
        """Note the best outcome of each post after this round."""
        outcomes = self.outcomes(fitted, self._vectors)
        best_outcomes = outcomes.argmax(1)
        self._rounds.append(best_outcomes)

    def _is_settled(self) -> bool:
        """Return whether the last WINDOW_ROUNDS changed the best labels of few posts."""
        if len(self.labelled) < MIN_LABELLED:
            return False
        rounds = self._rounds
        if len(rounds) <= WINDOW_ROUNDS:
            return False
        before = rounds[-1 - WINDOW_ROUNDS]
        now = rounds[-1]
        changes = now != before
        changed_share = float(changes.double().mean())
        return changed_share <= MAX_CHANGED

    def _pick(self, fitted: Fit) -> list[Answer]:
        """Pick at most ROUND_POSTS posts without an answer.

        The same answers and seed give the same picks.

        Random ones come from the start of an order, where none is picked by uncertainty, so they
        stay a random sample.
        """
        unanswered = self._unanswered_places(self._order)
        count = len(unanswered)
        count = min(ROUND_POSTS, count)
        random_count = count // RANDOM_EVERY
        uncertain_count = count - random_count
        random_places = unanswered[:random_count]
        pool = unanswered[random_count:]
        picks = [Answer(index, RANDOM) for index in random_places]
        if pool:
            uncertain_places = self._draw_uncertain(
                pool,
                uncertain_count,
                fitted,
            )
            picks += [Answer(index, UNCERTAIN) for index in uncertain_places]
        return picks

    def _draw_uncertain(self, pool: list[int], count: int, fitted: Fit) -> list[int]:
        """Draw posts of the pool, the more likely the more uncertain the head is of them."""
        vectors = self._vectors[pool]
        scores = self.outcomes(fitted, vectors)
        best_two = scores.topk(2).values
        best, second = best_two.unbind(1)
        uncertainty = 1 - best
        uncertainty = uncertainty + second
        uncertainty = uncertainty.clamp_min(MIN_UNCERTAINTY)

        order = self._order
        reserved_count = len(order) // RANDOM_EVERY
        reserved_places = order[:reserved_count]
        reserved = torch.tensor(
            reserved_places,
            dtype=torch.long,
        )
        indexes = torch.tensor(pool)
        is_reserved = torch.isin(indexes, reserved)
        uncertainty[is_reserved] *= 1e-6  # only if no other is left

        answer_count = len(self.answers)
        seed = self._seed + answer_count
        generator = torch.Generator()
        generator.manual_seed(seed)
        draws = torch.multinomial(
            uncertainty,
            count,
            generator=generator,
        )
        return [pool[number] for number in draws.tolist()]
