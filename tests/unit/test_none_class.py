"""feedmill/training/none_class.py: heads that learn from posts that fit none of the labels."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import normalize, one_hot

from feedmill.shared.errors import ModelError
from feedmill.training.active import Answer, Session
from feedmill.training.head import Fit
from feedmill.training.none_class import fit_none, outcomes_of
from feedmill.training.picked import NONE_OF_THESE, RANDOM, read_picked, with_none
from feedmill.workers.models.classifiers.fixed_labels import (
    NoneClass,
    read_none_class,
    write_head,
)
from feedmill.workers.models.files import HEAD_FILE
from feedmill.workers.models.weights import Weights
from tests.support import naming

LABELS, SUBJECTS, DIMENSIONS, POSTS = 3, 12, 32, 300
#: True label of each post, LABELS if it fits none: as many as fit one.
TRUTH = [place % (2 * LABELS) for place in range(POSTS)]
OUTCOMES = torch.tensor([min(number, LABELS) for number in TRUTH])


class Posts:
    """Posts around the centre of a label, or around that of one of some subjects."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(5)

        def around(centres: torch.Tensor, blur: float) -> torch.Tensor:
            noise = torch.randn(centres.shape, generator=source)
            return normalize(centres + blur * noise, dim=1)

        centres = torch.randn(LABELS + SUBJECTS, DIMENSIONS, generator=source)
        self.vectors = around(centres[TRUTH], 0.9)
        self.labels = around(centres[:LABELS], 0.4)
        self.subjects = around(centres[LABELS:], 0.4)

    def fit(self, count: int, subjects: torch.Tensor | None = None) -> Fit:
        """Return the head of the first posts' outcomes."""
        if subjects is None:
            subjects = self.subjects
        targets = one_hot(OUTCOMES[:count], LABELS + 1).float()
        return fit_none(self.vectors, targets, self.labels, subjects, 7)


@pytest.fixture(scope="module")
def posts() -> Posts:
    return Posts()


@pytest.mark.parametrize("count", [0, 4, 40])
def test_tells_posts_that_fit_from_others(posts: Posts, count: int) -> None:
    fitted = posts.fit(count)
    assert fitted.none is not None
    outcomes = outcomes_of(fitted.head, fitted.none, posts.vectors)
    assert outcomes.sum(1) == pytest.approx(torch.ones(POSTS), abs=1e-5)
    best = outcomes[:, :LABELS].amax(1)
    predicted = outcomes.argmax(1)
    predicted[best < fitted.none.threshold] = LABELS
    assert (predicted == OUTCOMES)[count:].double().mean() > 0.8
    assert fitted.right.isnan().all() == (count < 5)


def test_each_post_that_fits_none_is_wrong_if_all_get_a_label(posts: Posts) -> None:
    fitted = posts.fit(60)
    assert fitted.best_right is not None
    fits_none = OUTCOMES[:60] == LABELS
    assert fitted.best_right[fits_none].sum() == 0
    # Without the outcome none, no label is lost that was right.
    others = ~fits_none
    assert (fitted.best_right[others] >= fitted.right[others]).all()
    assert fitted.right[fits_none].mean() > 0.5


def test_promises_what_is_right(posts: Posts) -> None:
    fitted = posts.fit(60)
    assert fitted.none is not None
    outcomes = outcomes_of(fitted.head, fitted.none, posts.vectors)
    scores, labels = outcomes[:, :LABELS].max(1)
    has_label = scores >= fitted.none.threshold
    right = (labels == OUTCOMES)[has_label].double().mean()
    assert fitted.none.precision == pytest.approx(float(right), abs=0.15)
    assert fitted.none.coverage == pytest.approx(
        float(has_label.double().mean()), abs=0.05
    )


def test_learns_without_a_subject_apart_from_the_labels(posts: Posts) -> None:
    fitted = posts.fit(40, subjects=posts.labels)
    assert fitted.none is not None
    assert len(fitted.none.bias) >= 1
    assert 0 <= fitted.none.threshold <= 1


def test_a_mistake_about_none_is_a_mistake(posts: Posts) -> None:
    """The accuracy that a session shows counts "none of these" as an outcome."""
    answers = []
    for place in range(60):
        outcome = int(OUTCOMES[place])
        is_wrong = place % 10 == 0
        label = NONE_OF_THESE if outcome == LABELS or is_wrong else outcome
        answers.append(Answer(place, RANDOM, label))
    session = Session(posts.vectors, posts.labels, 7, answers, posts.subjects)
    session.next()
    assert session.measured is not None
    assert session.measured.measured_on == 60
    expected = float(session.fit().right.mean())
    assert session.measured.accuracy == pytest.approx(expected)
    assert 0.6 < expected < 1  # four answers are wrong

    fitting = [answer for answer in answers if answer.label != NONE_OF_THESE]
    without = Session(posts.vectors, posts.labels, 7, fitting, posts.subjects)
    before = Session(posts.vectors, posts.labels, 7, fitting)
    assert without.fit().none is None
    assert torch.equal(without.fit().head[0], before.fit().head[0])


@pytest.mark.parametrize("why", ["first", "uncertain", "random", ""])
def test_reads_what_it_writes_of_picks(why: str) -> None:
    assert read_picked(with_none(why)) == (why, True)
    assert read_picked(why) == (why, False)
    assert read_picked(f" {with_none(why).upper()} ")[1]


@pytest.mark.parametrize("value", ["nonesuch", "no", "random none", "none of it"])
def test_other_values_do_not_say_none(value: str) -> None:
    assert not read_picked(value)[1]


@pytest.mark.parametrize(
    ("shape", "threshold"), [((2, 5), 0.4), ((3, 4), 0.4), ((2, 4), 1.5)]
)
def test_names_a_damaged_none_class(
    shape: tuple[int, int], threshold: float, tmp_path: Path
) -> None:
    weights = Mock(spec=Weights, folder=tmp_path)
    none = NoneClass(torch.zeros(2, 4), torch.zeros(2), 0.4, 0.8, 0.5)
    labels = ("a", "b", "c")
    layer = (torch.zeros(3, 4), torch.zeros(3))
    write_head(tmp_path / HEAD_FILE, labels, *layer, none)
    read = read_none_class(weights)
    assert read is not None
    assert read.promise == none.promise
    damaged = none._replace(weight=torch.zeros(shape), threshold=threshold)
    write_head(tmp_path / HEAD_FILE, labels, *layer, damaged)
    with pytest.raises(ModelError, match=naming(HEAD_FILE, "none-class")):
        read_none_class(weights)
    write_head(tmp_path / HEAD_FILE, labels, *layer)
    assert read_none_class(weights) is None


def test_names_a_bias_without_dimensions(tmp_path: Path) -> None:
    weights = Mock(spec=Weights, folder=tmp_path)
    none = NoneClass(torch.zeros(2, 4), torch.tensor(0.0), 0.4, 0.8, 0.5)
    layer = (torch.zeros(3, 4), torch.zeros(3))
    write_head(tmp_path / HEAD_FILE, ("a", "b", "c"), *layer, none)
    with pytest.raises(ModelError, match=re.escape("bias of the none-class is []")):
        read_none_class(weights)
