"""feedmill/training/active.py: picking posts, and heads of few answers and many posts."""

import pytest
import torch
from torch.nn.functional import normalize

from feedmill.training.active import (
    FIRST_PER_LABEL,
    RANDOM,
    RANDOM_EVERY,
    ROUND_POSTS,
    UNCERTAIN,
    Answer,
    Pool,
    Session,
)

LABELS, DIMENSIONS, POSTS = 4, 24, 200
#: The true label of each post.
TRUTH = [place % LABELS for place in range(POSTS)]
FIRST_ROUND = FIRST_PER_LABEL * LABELS


def pool(blur: float = 0.35, prior_blur: float = 0.3) -> Pool:
    """Return posts around a centre for each label, with label sentences near the centres."""
    source = torch.Generator().manual_seed(3)
    centres = torch.randn(LABELS, DIMENSIONS, generator=source)
    posts = centres[TRUTH] + blur * DIMENSIONS**0.5 * torch.randn(POSTS, DIMENSIONS, generator=source)
    sentences = centres + prior_blur * DIMENSIONS**0.5 * torch.randn(LABELS, DIMENSIONS, generator=source)
    return Pool(normalize(posts, dim=1), normalize(sentences, dim=1))


def label(session: Session, count: int) -> list[Answer]:
    picks = []
    for _ in range(count):
        pick = session.next()
        assert pick is not None
        picks.append(pick)
        session.answer(TRUTH[pick.place])
    return picks


def test_every_fifth_pick_is_random_and_none_repeats() -> None:
    session = Session(pool(), LABELS, seed=7)
    picks = label(session, FIRST_ROUND + 2 * ROUND_POSTS)
    assert len({pick.place for pick in picks}) == len(picks)
    assert all((pick.why == RANDOM) == (number % RANDOM_EVERY == RANDOM_EVERY - 1)
               for number, pick in enumerate(picks[:RANDOM_EVERY * 2]))  # fmt: skip
    assert {pick.why for pick in picks[FIRST_ROUND:]} == {UNCERTAIN, RANDOM}
    order = torch.randperm(POSTS, generator=torch.Generator().manual_seed(7)).tolist()
    assert not {pick.place for pick in picks if pick.why == UNCERTAIN} & set(order[: POSTS // RANDOM_EVERY])


def test_later_picks_are_uncertain() -> None:
    """A post between two labels is picked before those that are clearly of one."""
    ends = normalize(torch.eye(2, 8) + 0.01 * torch.randn(80, 2, 8, generator=torch.Generator().manual_seed(3)), dim=2)
    between = normalize(torch.ones(2, 8) * torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), dim=1)
    posts = Pool(torch.cat([ends.flatten(0, 1), between]), torch.eye(2, 8))
    answers = [Answer(place, RANDOM, place % 2) for place in range(20)]
    (pick,) = posts.pick(answers, 1, seed=7)
    assert pick.place >= 160


def test_resuming_picks_the_same_posts() -> None:
    """In the first round, in which each pick depends on the others, and at the start of a later one."""
    for count in (FIRST_ROUND - 4, FIRST_ROUND + ROUND_POSTS):
        session = Session(pool(), LABELS, seed=7)
        label(session, count)
        resumed = Session(pool(), LABELS, 7, session.answers)
        assert label(resumed, 4) == label(session, 4)


def test_accuracy_is_cross_validated_on_random_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No head predicts a post whose answer it knows, and uncertain posts do not count."""
    session = Session(pool(), LABELS, seed=7)
    label(session, FIRST_ROUND + 2 * ROUND_POSTS)

    def predict(_: Pool, answers: list[Answer], places: list[int]) -> list[int]:
        assert {answer.place for answer in answers} == {answer.place for answer in session.answers} - set(places)
        return [TRUTH[place] for place in places]

    monkeypatch.setattr(Pool, "predict", predict)
    session.next()
    assert session.measured
    assert session.measured[:2] == (sum(answer.why != UNCERTAIN for answer in session.answers), 1)


@pytest.mark.parametrize(("blur", "settled"), [(0.15, True), (1.0, False)])
def test_settles_when_answers_change_few_labels(blur: float, settled: bool) -> None:
    session = Session(pool(blur), LABELS, seed=7)
    label(session, FIRST_ROUND + 10 * ROUND_POSTS)
    session.next()
    assert session.settled == settled
