"""workers/pool.py: how much is fetched. What it does with messages is tried with whole workers, in tests/e2e."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from redis.exceptions import RedisError as RedisFault

from workers.pool import FIRST_POST_BYTES, DevicePool


@pytest.fixture
def pool() -> DevicePool:
    """A pool whose device has room for 64 rows of 256, before anything came."""
    made = DevicePool.__new__(DevicePool)
    made._post_bytes = FIRST_POST_BYTES
    made.pipeline = SimpleNamespace(  # type: ignore[assignment]
        most_waiting=lambda: 256, waiting=lambda: 192, rows_per_post=lambda: 1
    )
    return made


def test_fetches_no_more_than_the_bytes_of_the_posts_that_there_is_room_for(pool: DevicePool) -> None:
    assert (pool.room(), pool.room_bytes()) == (64, 64 * 300)
    for _ in range(1000):
        pool._learn_size(1, 2000)
    assert pool.room_bytes() == pytest.approx(64 * 2000, rel=0.05)


def test_a_large_message_counts_for_all_of_its_posts(pool: DevicePool) -> None:
    """After a million single posts, too."""
    for _ in range(10_000):
        pool._learn_size(1, 2000)
    pool._learn_size(1000, 300_000)
    assert pool.room_bytes() == pytest.approx(64 * 300)


def test_a_message_without_posts_says_nothing_of_their_size(pool: DevicePool) -> None:
    pool._learn_size(0, 10**6)
    pool._learn_size(5, 0)
    assert pool.room_bytes() == 64 * 300


def test_fetches_nothing_while_most_of_the_room_is_taken(pool: DevicePool) -> None:
    pool.pipeline.waiting = lambda: 193  # type: ignore[method-assign]
    assert (pool.room(), pool.room_bytes()) == (0, 1)


def test_results_are_written_again_before_a_new_connection_acknowledges(pool: DevicePool) -> None:
    request = SimpleNamespace(eventer=None)
    pool._held = [SimpleNamespace(request=request)]  # type: ignore[assignment]
    pool._store = SimpleNamespace(catch_up=Mock(side_effect=RedisFault("away")))  # type: ignore[assignment]
    with pytest.raises(RedisFault, match="away"):
        pool.adopt("its events")
    assert request.eventer == "its events"
