"""producers/live/source.py: rate limiting of requests."""

import pytest

from feedmill.producers.live.source import (
    BURST_REQUESTS,
    RESERVED_REQUESTS,
    RequestBudget,
)
from tests.fakes.clock import SimulatedClock


def headers(remaining: object, reset: object) -> dict[str, str]:
    return {
        "x-ratelimit-remaining": str(remaining),
        "x-ratelimit-reset": str(reset),
        "x-ratelimit-used": "3",
    }


def spend(budget: RequestBudget, clock: SimulatedClock, seconds: float) -> int:
    """Send requests for the given seconds and return their number."""
    began = clock.monotonic()
    before = budget.spent
    while clock.monotonic() + budget.pending() <= began + seconds:
        budget.take()
    return budget.spent - before


def test_allows_a_burst_and_then_the_rate() -> None:
    clock = SimulatedClock()
    budget = RequestBudget(clock, per_minute=60)
    assert spend(budget, clock, 0) == BURST_REQUESTS
    assert spend(budget, clock, 120) == pytest.approx(120, abs=1)
    budget.learn(headers(100_000, 600))  # which never raise it
    assert spend(budget, clock, 60) == pytest.approx(60, abs=1)


def test_spreads_remaining_requests_over_reddits_window() -> None:
    clock = SimulatedClock()
    budget = RequestBudget(clock, per_minute=600)
    budget.learn(headers(100 + RESERVED_REQUESTS, 600))
    assert 95 <= spend(budget, clock, 599) <= 100
    assert spend(budget, clock, 60) >= 500  # a new window, without headers yet


@pytest.mark.parametrize("odd", ["", "nan", "inf", "-1", "soon", "1e999"])
def test_ignores_invalid_headers(odd: str) -> None:
    budget = RequestBudget(SimulatedClock(), per_minute=60)
    budget.learn(headers(odd, 10))
    budget.learn(headers(10, odd))
    assert budget.remaining is None


def test_pause_delays_the_next_request() -> None:
    clock = SimulatedClock()
    budget = RequestBudget(clock, per_minute=60)
    budget.pause(17)
    budget.pause(5)  # a shorter pause does not end the longer one
    budget.take()
    assert clock.monotonic() == 17
