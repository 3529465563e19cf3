"""Sending: a full queue, and a kill at any step."""

from typing import Any

import pytest

from feedmill.producers import push
from feedmill.producers.live.state import Gaps
from feedmill.producers.reddit.source import RedditSource
from feedmill.shared import broker
from feedmill.shared.broker import queue_depth
from feedmill.shared.messages import Post
from feedmill.shared.results import ResultsStore
from tests.integration.reddit.house import HOUR, MINUTE, House, result, short_listings
from tests.support import latest


def test_waits_for_a_full_queue_and_loses_nothing(house: House) -> None:
    daemon = house.daemon(queue_limit=4, posts_per_message=2)
    house.run(daemon, 2 * MINUTE)
    expected = set(house.ids())
    for _ in range(10):
        expected |= set(house.publish("cooking", 10))
        house.run(daemon, 3 * MINUTE)
    assert queue_depth(house.redis.client, "feedmill").waiting == 4
    assert daemon.status()["paused"]
    seen: set[str] = set()
    while not expected <= seen:
        seen |= set(house.ids())
        house.redis.client.delete("feedmill")
        house.run(daemon, MINUTE)
        assert queue_depth(house.redis.client, "feedmill").waiting <= 4
    assert not daemon.status()["paused"]


class Killed(BaseException):
    pass


#: The steps of a commit in order, each a method or function.
STEPS: dict[str, tuple[Any, str]] = {
    "note gaps": (Gaps, "record"),
    "publish": (broker, "publish"),
    "mark as sent": (push, "mark_sent"),
    "advance the watermark": (RedditSource, "_store"),
}

ONCE = ("note gaps", "at the third")


@short_listings
@pytest.mark.parametrize(
    ("step", "when"),
    # Gaps are recorded only once in this test.
    [
        (step, when)
        for step in STEPS
        for when in ("before", "at the third")
        if (step, when) != ONCE
    ],
)
def test_a_kill_at_any_step_loses_and_repeats_nothing(
    house: House, step: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    house.clock.wait(HOUR)
    expected = (
        house.publish("cooking", 120)
        + house.publish("baking", 2)
        + house.publish("chess")
    )
    out_of_reach = house.publish("tennis", 80)
    house.clock.wait(HOUR)
    expected += house.publish("tennis", 200)
    owner, name = STEPS[step]
    real = getattr(owner, name)
    calls = []

    def killing(*arguments: Any) -> Any:
        calls.append(1)
        if when == "before" or (when == "at the third" and len(calls) == 3):
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killing)
        with pytest.raises(Killed):
            house.run(house.daemon(), HOUR)
    house.run(house.daemon(), 10 * MINUTE)
    store = ResultsStore(house.redis.client, house.settings)
    for post in house.queued():
        store.write([result(Post.parse(post))])
    stored = [entry.post.id for entry in latest(store, 10_000)]
    assert set(expected) <= set(stored)
    assert len(stored) == len(set(stored))
    assert not set(out_of_reach) & set(stored)
    (gap,) = house.gaps.all()
    published = house.loopback.ledger.published
    assert gap.since < published[out_of_reach[0]].created_utc
    assert gap.until == published[expected[-200]].created_utc + 1


def test_a_kill_during_the_first_walk_loses_nothing_after_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = house.publish("cooking", 20)
    with monkeypatch.context() as patched:
        patched.setattr(broker, "publish", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            house.run(house.daemon(depth=10), HOUR)
    house.clock.wait(HOUR)
    expected += house.publish("cooking", 250)
    house.run(house.daemon(depth=10), 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    assert house.gaps.all() == []
