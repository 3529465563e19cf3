"""`feedmill ingest reddit --once`: a single pass over the listings."""

from functools import partial

import pytest

from feedmill.producers.push import Pusher
from feedmill.producers.reddit.client import outage_error
from feedmill.producers.reddit.listing import Outage, Unreachable
from feedmill.producers.reddit.snapshot import MAX_ATTEMPTS, Listing, SnapshotReader, with_retries
from feedmill.shared.broker import make_app
from feedmill.shared.errors import UserError, convert_errors
from feedmill.shared.messages import ClassifyOptions
from tests.integration.reddit.house import MINUTE, House


def test_single_pass_gives_up_after_some_retries(house: House) -> None:
    house.settings = house.settings.model_copy(update={"reddit_url": "http://127.0.0.1:9"})
    reddit = house.reddit()
    with pytest.raises(Unreachable):
        with_retries(lambda: reddit.page(["cooking"]), house.clock)
    assert len(house.clock.waits) == MAX_ATTEMPTS - 1
    assert sum(house.clock.waits) < MINUTE
    with (
        pytest.raises(UserError, match="http://127.0.0.1:9"),
        convert_errors(partial(outage_error, house.settings), Outage),
    ):
        reddit.page(["cooking"])


def test_single_pass_skips_a_failing_subreddit(house: House) -> None:
    house.publish("cooking", 30)
    house.publish("baking", 30)
    house.loopback.faults.always("server_error_500", where="cooking")
    pusher = Pusher(make_app(house.settings), house.redis.client, house.settings, ClassifyOptions())
    once = SnapshotReader(house.reddit(), pusher, house.state, house.clock)
    *_, last = once.read(["cooking", "baking"], Listing("new", 20))
    assert (last.read, last.sent) == (10, 10)
    assert "r/cooking" in last.problem
    assert "500" in last.problem
    assert {post["subreddit"] for post in house.queued()} == {"baking"}


def test_single_pass_marks_nothing_as_known(house: House) -> None:
    """A post marked as known would end the daemon's next walk, which would miss the unread posts after it."""
    house.publish("cooking", 5)
    pusher = Pusher(make_app(house.settings), house.redis.client, house.settings, ClassifyOptions())
    list(SnapshotReader(house.reddit(), pusher, house.state, house.clock).read(["cooking"], Listing("hot", 100)))
    assert len(house.ids()) == 6
    assert house.state.track("cooking").known == {}
    assert len(house.state.due(float("inf"), 10)) == 6  # the posts are rechecked nevertheless
