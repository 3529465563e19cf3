"""`feedmill ingest reddit --once`: a single pass over the listings."""

import pytest

from feedmill.producers.live.budget import MAX_ATTEMPTS, with_retries
from feedmill.producers.live.daemon import send_events
from feedmill.producers.live.source import SourceFailed
from feedmill.producers.push import Pusher
from feedmill.producers.reddit.snapshot import Listing, Snapshot
from feedmill.shared.broker import make_app
from feedmill.shared.messages import ClassifyOptions
from tests.fakes import constants
from tests.integration.reddit.house import MINUTE, House


def test_single_pass_gives_up_after_some_retries(house: House) -> None:
    house.read_from(constants.reddit("http://127.0.0.1:9"))
    reddit = house.reddit()
    with pytest.raises(SourceFailed):
        with_retries(lambda: reddit.page(["cooking"]), house.clock)
    assert len(house.clock.waits) == MAX_ATTEMPTS - 1
    assert sum(house.clock.waits) < MINUTE


def test_single_pass_skips_a_failing_subreddit(house: House) -> None:
    house.publish("cooking", 30)
    house.publish("baking", 30)
    house.loopback.faults.always("server_error_500", where="cooking")
    pusher = Pusher(make_app(house.settings), house.redis.client, house.settings, ClassifyOptions())
    snapshot = Snapshot(house.reddit(), house.state, house.clock)
    send_events(snapshot.events(["cooking", "baking"], Listing("new", 20)), pusher)
    assert (snapshot.read, pusher.sent) == (10, 10)
    (problem,) = snapshot.problems
    assert "r/cooking" in problem
    assert "500" in problem
    assert {post["subreddit"] for post in house.queued()} == {"baking"}


def test_single_pass_marks_nothing_as_known(house: House) -> None:
    """A post marked as known would end the daemon's next walk, which would miss the unread posts after it."""
    house.publish("cooking", 5)
    pusher = Pusher(make_app(house.settings), house.redis.client, house.settings, ClassifyOptions())
    snapshot = Snapshot(house.reddit(), house.state, house.clock)
    send_events(snapshot.events(["cooking"], Listing("hot", 100)), pusher)
    assert len(house.ids()) == 6
    assert house.state.track("cooking").known == {}
    assert len(house.state.due(float("inf"), 10)) == 6  # the posts are rechecked nevertheless
