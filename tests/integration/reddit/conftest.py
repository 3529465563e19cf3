"""Fixtures: a loopback Reddit, and a House around it."""

from collections.abc import Iterator

import pytest

from feedmill.producers.live import daemon, http
from feedmill.testing.fake_reddit import Reddit as LoopbackReddit
from tests.fakes.clock import SimulatedClock
from tests.integration.reddit.house import DAY, TOPICS, House
from tests.support import RedisServer


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def loopback(
    request: pytest.FixtureRequest, clock: SimulatedClock
) -> Iterator[LoopbackReddit]:
    """A Reddit with all subreddits of TOPICS, each with a post from yesterday."""
    with LoopbackReddit(
        clock=clock.time, window=None, listing_cap=getattr(request, "param", 1000)
    ) as reddit:
        for names in TOPICS.values():
            for name in names:
                reddit.add_subreddit(name)
                reddit.publish(
                    name, title=f"an old post of {name}", created_utc=clock.time() - DAY
                )
        yield reddit


@pytest.fixture
def house(
    redis: RedisServer,
    clock: SimulatedClock,
    loopback: LoopbackReddit,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[House]:
    # Tests simulate days: reporting the status every ten seconds would be most of the daemon's
    # work.
    monkeypatch.setattr(daemon, "STATUS_INTERVAL_S", 300.0)
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 2.0)
    house = House(redis, clock, loopback, monkeypatch)
    yield house
    house.close()
