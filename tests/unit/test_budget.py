"""producers/reddit/budget.py: when a request may go."""

import pytest

from producers.reddit.budget import BURST, RESERVE, Budget
from producers.reddit.clock import Stopped
from tests.fakes.clock import SimulatedClock


def headers(remaining: object, reset: object) -> dict[str, str]:
    return {"x-ratelimit-remaining": str(remaining), "x-ratelimit-reset": str(reset), "x-ratelimit-used": "3"}


def spend(budget: Budget, clock: SimulatedClock, seconds: float) -> int:
    """Requests that go within so many seconds."""
    began = clock.monotonic()
    before = budget.spent
    while clock.monotonic() + budget.pending() <= began + seconds:
        budget.take()
    return budget.spent - before


def test_a_burst_and_then_the_rate() -> None:
    clock = SimulatedClock()
    budget = Budget(clock, per_minute=60)
    assert spend(budget, clock, 0) == BURST
    assert spend(budget, clock, 120) == pytest.approx(120, abs=1)


def test_what_reddit_has_left_lasts_to_the_end_of_its_window() -> None:
    clock = SimulatedClock()
    budget = Budget(clock, per_minute=600)
    budget.learn(headers(100 + RESERVE, 600))
    assert 95 <= spend(budget, clock, 599) <= 100
    assert spend(budget, clock, 60) >= 500  # a new window, of which nothing is known yet


def test_some_of_it_is_left_over() -> None:
    clock = SimulatedClock()
    budget = Budget(clock, per_minute=60)
    budget.learn(headers(RESERVE, 42))
    assert budget.pending() == 42


def test_reddits_word_never_makes_it_faster() -> None:
    clock = SimulatedClock()
    budget = Budget(clock, per_minute=60)
    spend(budget, clock, 0)
    budget.learn(headers(100_000, 600))
    assert spend(budget, clock, 60) == pytest.approx(60, abs=1)


@pytest.mark.parametrize("odd", ["", "nan", "inf", "-1", "soon", "1e999"])
def test_odd_headers_say_nothing(odd: str) -> None:
    budget = Budget(SimulatedClock(), per_minute=60)
    budget.learn(headers(odd, 10))
    budget.learn(headers(10, odd))
    assert budget.remaining is None


def test_fractions_are_read() -> None:
    budget = Budget(SimulatedClock(), per_minute=60)
    budget.learn(headers("997.0", "15.5"))
    assert budget.remaining == 997


def test_after_a_429_nothing_goes_until_its_time() -> None:
    clock = SimulatedClock()
    budget = Budget(clock, per_minute=60)
    budget.pause(17)
    budget.pause(5)  # a shorter one takes nothing away
    budget.take()
    assert clock.monotonic() == 17


def test_a_wait_ends_when_the_process_is_to_end() -> None:
    clock = SimulatedClock(ends=30)
    budget = Budget(clock, per_minute=60)
    budget.pause(3600)
    with pytest.raises(Stopped):
        budget.take()
    assert clock.monotonic() == 30
