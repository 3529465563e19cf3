"""Active learning: choose the posts whose labels teach most, and make a head of few labels and many posts.

The head is a mixture of Gaussians with equal variances, one per label, whose posterior is a softmax of a linear
function of the embedding. A label's mean starts at its sentences (zero-shot), which count as some posts, and moves
towards the posts of that label; posts without a label count a little, by their probabilities (expectation maximization
as in Nigam et al., "Text Classification from Labeled and Unlabeled Documents using EM", 2000). With few labels, this is
far more accurate than a logistic regression, which ignores the other posts.

The first posts are a random sample. Later ones are drawn at random as well, the more likely the closer the scores of
their best two labels: the head is uncertain of them. Every fifth post is drawn without regard to that. The random posts
measure the accuracy, by cross-validation; on uncertain posts, it would be too low.

Knows neither files nor terminals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot

from feedmill.training.head import Fitted, one_thread

#: Posts that a label's sentences count as.
PRIOR_POSTS = 2.0
#: Weight of a post without a label.
UNLABELLED_WEIGHT = 0.5
#: Inverse variance of each label's Gaussian, where the mean square distance of the posts from their centre is 1.
SHARPNESS = 40.0
#: Iterations of expectation maximization.
ITERATIONS = 10
#: Posts per label in the first round, and posts in each later round.
FIRST_PER_LABEL, ROUND_POSTS = 3, 10
#: One post in so many is random, and one in so many of the pool is never picked by uncertainty.
RANDOM_EVERY = 5
#: Parts of the random posts in cross-validation.
FOLDS = 5
#: More answers would hardly help once the last WINDOW of them, of at least MIN_LABELLED, changed the labels of at most
#: this share of the posts: the accuracy cannot have risen by more.
WINDOW, MIN_LABELLED, MAX_CHANGED = 50, 100, 0.04
#: Least weight of a post when uncertain posts are drawn.
MIN_UNCERTAINTY = 1e-3

#: Why a post was picked: for the first round, by uncertainty, or at random to measure accuracy.
FIRST, UNCERTAIN, RANDOM = "first", "uncertain", "random"


class Answer(NamedTuple):
    """A post that was picked to be labelled: its place in the pool, and why it was picked.

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


class Pool:
    """Embedded posts, of which some get labels.

    vectors: [posts, dimensions]. label_vectors: [labels, dimensions], the embeddings of the labels' sentences.
    """

    def __init__(self, vectors: torch.Tensor, label_vectors: torch.Tensor) -> None:
        self._centre = vectors.mean(0)
        self._scale = (vectors - self._centre).square().sum(1).mean().sqrt().clamp_min(1e-6)
        self._points = (vectors - self._centre) / self._scale
        self._priors = (label_vectors - label_vectors.mean(0)) / self._scale
        #: Number of the label that zero-shot classification gives each post.
        self.zero_shot: list[int] = (vectors @ label_vectors.T).argmax(1).tolist()

    def __len__(self) -> int:
        return len(self._points)

    def head(self, answers: Sequence[Answer]) -> Fitted:
        """Return the head of these answers: weight [labels, dimensions] and bias [labels], for embeddings."""
        means = self._means(answers)
        weight = SHARPNESS / self._scale * means
        return weight, -SHARPNESS / 2 * means.square().sum(1) - weight @ self._centre

    def predict(self, answers: Sequence[Answer], places: Sequence[int]) -> list[int]:
        """Return the number of the best label of some posts, by the head of these answers."""
        best: list[int] = self._scores(self._means(answers), self._points[list(places)]).argmax(1).tolist()
        return best

    def _means(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Return the mean of each label: [labels, dimensions]."""
        labelled = [(answer.place, answer.label) for answer in answers if answer.label is not None]
        places, labels = torch.tensor(labelled, dtype=torch.long).reshape(-1, 2).T
        known = one_hot(labels, len(self._priors)).to(self._points)
        sums = known.T @ self._points[places] + PRIOR_POSTS * self._priors
        counts = known.sum(0) + PRIOR_POSTS
        means = sums / counts[:, None]
        is_other = torch.ones(len(self), dtype=torch.bool)
        is_other[places] = False
        others = self._points[is_other]
        for _ in range(ITERATIONS):
            shares = UNLABELLED_WEIGHT * self._scores(means, others).softmax(1)
            means = (sums + shares.T @ others) / (counts + shares.sum(0))[:, None]
        return means

    @staticmethod
    def _scores(means: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Return the logits of points: [points, labels]."""
        return SHARPNESS * (points @ means.T - means.square().sum(1) / 2)

    def pick(self, answers: Sequence[Answer], count: int, seed: int) -> list[Answer]:
        """Pick at most `count` posts without an answer. The same answers and seed give the same picks.

        Random ones come from the start of an order, where none is picked by uncertainty, so they stay a random sample.
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        taken = {answer.place for answer in answers}
        left = [place for place in order if place not in taken]
        count = min(count, len(left))
        randoms = count // RANDOM_EVERY
        at_random, left, why = left[:randoms], left[randoms:], FIRST
        if answers and left:
            best = self._scores(self._means(answers), self._points[left]).softmax(1).topk(2).values
            uncertainty = (1 - best[:, 0] + best[:, 1]).clamp_min(MIN_UNCERTAINTY)
            reserved = torch.tensor(order[: len(order) // RANDOM_EVERY], dtype=torch.long)
            uncertainty[torch.isin(torch.tensor(left), reserved)] *= 1e-6  # only if no other is left
            generator = torch.Generator().manual_seed(seed + len(answers))
            chosen = torch.multinomial(uncertainty, count - randoms, generator=generator).tolist()
            left, why = [left[number] for number in chosen], UNCERTAIN
        picks = [Answer(place, why) for place in left[: count - randoms]]
        for number, place in enumerate(at_random):
            picks.insert(number * RANDOM_EVERY + RANDOM_EVERY - 1, Answer(place, RANDOM))
        return picks


class Session:
    """A sequence of answers: which post is next, and how accurate the head is so far.

    After each round, the head is fitted to the answers, and the next posts are picked with it.
    """

    def __init__(self, pool: Pool, labels: int, seed: int, answers: Sequence[Answer] = ()) -> None:
        self._pool, self._labels, self._seed = pool, labels, seed
        self.answers = list(answers)
        self._next: list[Answer] = []
        self._labelled_before = self.labelled
        #: The accuracy after the last round; None if no random post is labelled yet.
        self.measured: Measured | None = None
        #: Whether more answers would hardly help; False before WINDOW answers of this session.
        self.settled = False

    def next(self) -> Answer | None:
        """Return the post to label now; None if there are no more."""
        if not self._next:
            first = max(FIRST_PER_LABEL * self._labels, ROUND_POSTS)
            taken = {answer.place for answer in self.answers}
            with one_thread():
                self.measured, self.settled = self._measure(), self._is_settled()
                # A resumed first round goes on with the posts that it had.
                sample = self._pool.pick((), first, self._seed) if len(self.answers) < first else []
                self._next = [pick for pick in sample if pick.place not in taken]
                self._next = self._next or self._pool.pick(self.answers, ROUND_POSTS, self._seed)
        return self._next[0] if self._next else None

    def answer(self, label: int | None) -> None:
        """Label the post that is next; None skips it."""
        self.answers.append(self._next.pop(0)._replace(label=label))

    def undo(self) -> None:
        """Take back the last answer, if there is one. Its post is next again."""
        if self.answers:
            self._next.insert(0, self.answers.pop()._replace(label=None))

    @property
    def labelled(self) -> int:
        """Number of labelled posts."""
        return sum(answer.label is not None for answer in self.answers)

    def _measure(self) -> Measured | None:
        """Measure the accuracy on each fold of the random posts, of the head of all other answers."""
        sample = [answer for answer in self.answers if answer.why != UNCERTAIN and answer.label is not None]
        if not sample:
            return None
        right = sum(self._right(sample[fold::FOLDS]) for fold in range(FOLDS))
        zero_shot = sum(self._pool.zero_shot[answer.place] == answer.label for answer in sample)
        # A right and a wrong post more, else the error of a few right ones would be 0.
        share = (right + 1) / (len(sample) + 2)
        error = (share * (1 - share) / len(sample)) ** 0.5
        return Measured(len(sample), right / len(sample), error, zero_shot / len(sample))

    def _right(self, fold: Sequence[Answer]) -> int:
        """Return how many of these posts the head of all other answers labels right."""
        others = [answer for answer in self.answers if answer not in fold]
        found = self._pool.predict(others, [answer.place for answer in fold])
        return sum(best == answer.label for best, answer in zip(found, fold, strict=True))

    def _is_settled(self) -> bool:
        if self.labelled < max(MIN_LABELLED, self._labelled_before + WINDOW):
            return False
        labelled = [answer for answer in self.answers if answer.label is not None]
        posts = range(len(self._pool))
        before, now = self._pool.predict(labelled[:-WINDOW], posts), self._pool.predict(labelled, posts)
        return sum(old != new for old, new in zip(before, now, strict=True)) <= MAX_CHANGED * len(posts)

    def head(self) -> Fitted:
        """Return the head of all answers."""
        with one_thread():
            return self._pool.head(self.answers)
