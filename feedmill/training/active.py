"""Active learning: choose the posts whose labels teach most, and make a head of few labels and many posts.

The head is that of `head.py`: zero-shot classification, adapted to all posts, and corrected by the labelled ones.

The first posts are a random sample. Later ones are drawn at random as well, the more likely the closer the scores of
their best two labels: the head is uncertain of them. A fifth is drawn without regard to that. The random posts
measure the accuracy, by cross-validation; on uncertain posts, it would be too low.

Knows neither files nor terminals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot

from feedmill.training.head import Fit, fit, scores_of

#: Posts per label in the first round, and posts in each later round.
FIRST_PER_LABEL, ROUND_POSTS = 3, 10
#: One post in so many is random, and one in so many of the pool is never picked by uncertainty.
RANDOM_EVERY = 5
#: With at least MIN_LABELLED answers, more would hardly help once the last rounds changed the labels of at most this
#: share of the posts: the accuracy cannot have risen by more.
WINDOW_ROUNDS, MIN_LABELLED, MAX_CHANGED = 5, 100, 0.04
#: Least weight of a post when uncertain posts are drawn.
MIN_UNCERTAINTY = 1e-3

#: Why a post was picked: at random for the first round, by uncertainty, or at random to measure accuracy.
FIRST, UNCERTAIN, RANDOM = "first", "uncertain", "random"


class Answer(NamedTuple):
    """A post that was picked to be labelled: its place among the posts, and why it was picked.

    label: the number of its label; None if there is none yet, or if the post was skipped.
    """

    place: int
    why: str
    label: int | None = None


class Measured(NamedTuple):
    """The accuracy by cross-validation, after a round, on the labelled random posts. measured_on: their number."""

    measured_on: int
    #: Share of right labels of the head, its standard error, and the share of zero-shot classification.
    accuracy: float
    accuracy_error: float
    zero_shot_accuracy: float

    def __str__(self) -> str:
        accuracy = f"{self.accuracy:.2f} ± {self.accuracy_error:.2f}"
        return f"expected accuracy {accuracy}, zero-shot {self.zero_shot_accuracy:.2f}"


class Session:
    """A sequence of answers: which post is next, and how accurate the head is so far.

    After each round, the head is fitted to the answers, and the next posts are picked with it.

    vectors: unit vectors of the posts, [posts, dimensions]. label_vectors: those of the labels' sentences, [labels,
    dimensions].
    """

    def __init__(
        self, vectors: torch.Tensor, label_vectors: torch.Tensor, seed: int, answers: Sequence[Answer] = ()
    ) -> None:
        self._vectors, self._label_vectors, self._seed, self.answers = vectors, label_vectors, seed, list(answers)
        self._zero_shot = (vectors @ label_vectors.T).argmax(1)
        self._order: list[int] = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed)).tolist()
        self._next: list[Answer] = []
        #: Best label of each post after each round: [posts].
        self._rounds: list[torch.Tensor] = []
        #: The accuracy after the last round; None if it is unknown.
        self.measured: Measured | None = None
        #: Whether more answers would hardly help; False before WINDOW_ROUNDS of this session.
        self.settled = False

    def next(self) -> Answer | None:
        """Return the post to label now; None if there are no more."""
        if not self._next:
            fitted = self.fit()
            self.measured, self.settled = self._measure(fitted), self._is_settled(fitted)
            self._next = self._first_round() or self._pick(fitted)
        return self._next[0] if self._next else None

    def _first_round(self) -> list[Answer]:
        """Return the posts of the first round without an answer: those that an interrupted one had, too."""
        first = self._order[: max(FIRST_PER_LABEL * len(self._label_vectors), ROUND_POSTS)]
        taken = {answer.place for answer in self.answers} if len(self.answers) < len(first) else set(first)
        return [Answer(place, FIRST) for place in first if place not in taken]

    def answer(self, label: int | None) -> None:
        """Label the post that is next; None skips it."""
        self.answers.append(self._next.pop(0)._replace(label=label))

    def undo(self) -> None:
        """Take back the last answer, if there is one. Its post is next again."""
        if self.answers:
            self._next.insert(0, self.answers.pop()._replace(label=None))

    @property
    def labelled(self) -> list[Answer]:
        """Answers with a label."""
        return [answer for answer in self.answers if answer.label is not None]

    def fit(self) -> Fit:
        """Fit the head. Its `right` is in the order of `labelled`."""
        places, labels = [answer.place for answer in self.labelled], [answer.label for answer in self.labelled]
        others = [place for place in self._order if place not in set(places)]
        targets = one_hot(torch.tensor(labels, dtype=torch.long), len(self._label_vectors))
        return fit(self._vectors[places + others], targets, self._label_vectors, self._seed)

    def _measure(self, fitted: Fit) -> Measured | None:
        """Return the accuracy on the random posts, in the cross-validation of the fit."""
        known = [
            (float(right), float(self._zero_shot[answer.place] == answer.label))
            for right, answer in zip(fitted.right, self.labelled, strict=True)
            if answer.why != UNCERTAIN and not right.isnan()
        ]
        if not known:
            return None
        right, zero_shot = (sum(column) for column in zip(*known, strict=True))
        # A right and a wrong post more, else the error of a few right ones would be 0.
        share = (right + 1) / (len(known) + 2)
        error = (share * (1 - share) / len(known)) ** 0.5
        return Measured(len(known), right / len(known), error, zero_shot / len(known))

    def _is_settled(self, fitted: Fit) -> bool:
        """Note the best label of each post, and return whether the last WINDOW_ROUNDS changed few of them."""
        self._rounds.append(scores_of(fitted.head, self._vectors).argmax(1))
        if len(self.labelled) < MIN_LABELLED or len(self._rounds) <= WINDOW_ROUNDS:
            return False
        return float((self._rounds[-1] != self._rounds[-1 - WINDOW_ROUNDS]).double().mean()) <= MAX_CHANGED

    def _pick(self, fitted: Fit) -> list[Answer]:
        """Pick at most ROUND_POSTS posts without an answer. The same answers and seed give the same picks.

        Random ones come from the start of an order, where none is picked by uncertainty, so they stay a random sample.
        """
        taken = {answer.place for answer in self.answers}
        left = [place for place in self._order if place not in taken]
        count = min(ROUND_POSTS, len(left))
        randoms = count // RANDOM_EVERY
        at_random, left = left[:randoms], left[randoms:]
        if left:
            best = scores_of(fitted.head, self._vectors[left]).softmax(1).topk(2).values
            uncertainty = (1 - best[:, 0] + best[:, 1]).clamp_min(MIN_UNCERTAINTY)
            reserved = torch.tensor(self._order[: len(self._order) // RANDOM_EVERY], dtype=torch.long)
            uncertainty[torch.isin(torch.tensor(left), reserved)] *= 1e-6  # only if no other is left
            generator = torch.Generator().manual_seed(self._seed + len(self.answers))
            chosen = torch.multinomial(uncertainty, count - randoms, generator=generator).tolist()
            left = [left[number] for number in chosen]
        return [*(Answer(place, RANDOM) for place in at_random), *(Answer(place, UNCERTAIN) for place in left)]
