"""Pauses between attempts."""

from itertools import pairwise

import pytest

from feedmill.shared.backoff import Backoff


@pytest.mark.parametrize(("first_s", "max_s"), [(0.1, 5.0), (1, 60), (5.0, 600.0)])
def test_doubles_pauses_up_to_the_limit(first_s: float, max_s: float) -> None:
    backoff = Backoff(first_s, max_s)
    pauses = [backoff.pause_s(failures) for failures in range(5000)]
    assert pauses[0] == first_s
    assert all(later == min(2 * earlier, max_s) for earlier, later in pairwise(pauses))
    assert pauses[-1] == max_s


@pytest.mark.parametrize("failures", [0, 3, 10_000])
def test_jitter_draws_from_the_second_half_of_a_pause(failures: int) -> None:
    whole = Backoff(2.0, 300.0).pause_s(failures)
    backoff = Backoff(2.0, 300.0, jitter=True)
    pauses = {backoff.pause_s(failures) for _ in range(100)}
    assert all(whole / 2 <= pause <= whole for pause in pauses)
    assert len(pauses) > 1
