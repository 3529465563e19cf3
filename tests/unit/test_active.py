"""feedmill/training/active.py: picking posts, and heads of few answers and many posts."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import normalize

from feedmill.training.active import (
    FIRST_PER_LABEL,
    RANDOM_EVERY,
    ROUND_POSTS,
    Answer,
    Session,
)
from feedmill.training.picked import FIRST, RANDOM, UNCERTAIN

LABELS, DIMENSIONS, POSTS = 4, 24, 200
#: The true label of each post.
TRUTH = [place % LABELS for place in range(POSTS)]
FIRST_ROUND = FIRST_PER_LABEL * LABELS


def session(blur: float = 0.35, answers: Sequence[Answer] = ()) -> Session:
    """Return a session on posts around a centre for each label, with label sentences near the
    centres.
    """
    source = torch.Generator().manual_seed(3)
    centres = torch.randn(LABELS, DIMENSIONS, generator=source)
    posts = centres[TRUTH] + blur * DIMENSIONS**0.5 * torch.randn(
        POSTS, DIMENSIONS, generator=source
    )
    sentences = centres + 0.3 * DIMENSIONS**0.5 * torch.randn(
        LABELS, DIMENSIONS, generator=source
    )
    return Session(normalize(posts, dim=1), normalize(sentences, dim=1), 7, answers)


def label(asked: Session, count: int) -> list[Answer]:
    picks = []
    for _ in range(count):
        pick = asked.next()
        assert pick is not None
        picks.append(pick)
        asked.answer(TRUTH[pick.place] if pick.place < len(TRUTH) else 0)
    return picks


def test_every_fifth_pick_is_random_and_none_repeats() -> None:
    picks = label(session(), FIRST_ROUND + 2 * ROUND_POSTS)
    assert len({pick.place for pick in picks}) == len(picks)
    assert {pick.why for pick in picks[:FIRST_ROUND]} == {FIRST}
    assert Counter(pick.why for pick in picks[-ROUND_POSTS:]) == {
        UNCERTAIN: 8,
        RANDOM: 2,
    }
    order = torch.randperm(POSTS, generator=torch.Generator().manual_seed(7)).tolist()
    assert not {pick.place for pick in picks if pick.why == UNCERTAIN} & set(
        order[: POSTS // RANDOM_EVERY]
    )


def test_later_picks_are_uncertain() -> None:
    """A post between two labels is picked before those that are clearly of one."""
    ends = normalize(
        torch.eye(2, 8)
        + 0.01 * torch.randn(80, 2, 8, generator=torch.Generator().manual_seed(3)),
        dim=2,
    )
    between = normalize(
        torch.ones(20, 8) * torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), dim=1
    )
    answers = [Answer(place, RANDOM, place % 2) for place in range(20)]
    posts = Session(
        torch.cat([ends.flatten(0, 1), between]), torch.eye(2, 8), 7, answers
    )
    picks = label(posts, ROUND_POSTS)
    assert [pick.place >= 160 for pick in picks if pick.why == UNCERTAIN] == [True] * 8


def test_resuming_picks_the_same_posts() -> None:
    """In the first round, in which each pick depends on the others, and at the start of a later
    one.
    """
    for count in (FIRST_ROUND - 4, FIRST_ROUND + ROUND_POSTS):
        first = session()
        label(first, count)
        assert label(session(answers=first.answers), 4) == label(first, 4)


def test_accuracy_is_measured_on_random_posts() -> None:
    asked = session()
    label(asked, FIRST_ROUND + 2 * ROUND_POSTS)
    asked.next()
    right = [float(right) for right, answer in zip(asked.fit().right, asked.answers, strict=True)
             if answer.why != UNCERTAIN]  # fmt: skip
    assert asked.measured
    assert asked.measured[:2] == (len(right), sum(right) / len(right))


@pytest.mark.parametrize(("blur", "settled"), [(0.15, True), (1.0, False)])
def test_settles_when_answers_change_few_labels(blur: float, settled: bool) -> None:
    asked = session(blur)
    label(asked, FIRST_ROUND + 10 * ROUND_POSTS)
    asked.next()
    assert asked.settled == settled
