"""`feedmill ingest reddit --once`: a single pass over the listings."""

import pytest

from feedmill.producers.live.source import MAX_ATTEMPTS, SourceFailed, with_retries
from feedmill.producers.reddit.snapshot import Listing
from tests.fakes import constants
from tests.integration.reddit.house import MINUTE, House


def test_single_pass_gives_up_after_some_retries(house: House) -> None:
    house.read_from(constants.reddit("http://127.0.0.1:9"))
    source = house.source(house.settings)
    with pytest.raises(SourceFailed):
        with_retries(lambda: source.choose_subreddits("food"), house.clock)
    assert len(house.clock.waits) == MAX_ATTEMPTS - 1
    assert sum(house.clock.waits) < MINUTE


def test_single_pass_skips_a_failing_subreddit(house: House) -> None:
    house.publish("cooking", 30)
    house.publish("baking", 30)
    house.loopback.faults.always("server_error_500", where="cooking")
    problems: list[str] = []
    posts = list(
        house.source(house.settings).snapshot(
            ["cooking", "baking"], Listing("new", 20), problems
        )
    )
    assert {post.subreddit for post in posts} == {"baking"}
    assert len(posts) == 10
    (problem,) = problems
    assert "r/cooking" in problem
    assert "500" in problem
