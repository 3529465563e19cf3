"""Choosing subreddits: closed, reopened, inactive and missing ones."""

import pytest

from feedmill.producers.reddit.topics import Topics
from tests.integration.reddit.house import (
    DAY,
    HOUR,
    MINUTE,
    TOPICS,
    House,
    short_listings,
)


def test_replaces_missing_and_inactive_subreddits(house: House) -> None:
    house.loopback.add_subreddit("asleep")
    house.loopback.publish(
        "asleep", title="long ago", created_utc=house.clock.time() - 60 * DAY
    )
    house.topics = Topics(
        active=1,
        topics={"food": ("nothere", "asleep", "cooking"), "rest": ("gone1", "gone2")},
    )
    daemon = house.daemon()
    house.run(daemon, 5 * MINUTE)
    reasons = {
        name: (entry.reason, entry.by) for name, entry in house.replaced().items()
    }
    assert reasons == {
        "nothere": ("missing", "cooking"), "asleep": ("asleep", None),
        "gone1": ("missing", None), "gone2": ("missing", None),
    }  # fmt: skip
    assert daemon.status()["subreddits"] == 1
    assert {
        entry["subreddit"]: (entry["reason"], entry["by"])
        for entry in daemon.status()["replaced"]
    } == reasons
    assert {post["subreddit"] for post in house.queued()} == {"cooking"}


def test_replaces_an_unreadable_subreddit_until_it_reopens(house: House) -> None:
    house.loopback.set_kind("cooking", "banned")
    house.loopback.set_kind("tennis", "private")
    daemon = house.daemon(reddit_poll_interval=250.0)
    house.run(daemon, 5 * MINUTE)
    replaced = house.replaced()
    assert {name: (entry.reason, entry.by) for name, entry in replaced.items()} == {
        "cooking": ("banned", "recipes"),
        "tennis": ("private", "golf"),
    }
    assert replaced["cooking"].since == pytest.approx(
        house.clock.time(), abs=5 * MINUTE
    )
    expected = house.publish("recipes") + house.publish("golf")
    house.run(daemon, 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    house.loopback.set_kind("cooking", "public")
    back = house.publish("cooking")
    house.run(daemon, DAY)
    assert set(house.replaced()) == {"tennis"}
    assert back[0] in house.ids()


@pytest.mark.parametrize("before", [0.0, 5 * MINUTE], ids=["at the start", "later"])
def test_retries_a_topic_without_readable_subreddits_soon(
    house: House, before: float
) -> None:
    daemon = house.daemon()
    house.run(daemon, before)
    house.redis.client.delete("feedmill")
    for name in TOPICS["food"]:
        house.loopback.set_kind(name, "private")
    house.run(daemon, 5 * MINUTE)
    house.publish("cooking")
    for name in TOPICS["food"]:
        house.loopback.set_kind(name, "public")
    house.run(daemon, 30 * MINUTE)
    assert "cooking" in {post["subreddit"] for post in house.queued()}


@short_listings
def test_reads_posts_made_while_the_subreddit_was_closed(house: House) -> None:
    """A listing of several subreddits leaves out closed ones, so reading it must not advance their
    positions.
    """
    daemon = house.daemon(reddit_poll_interval=HOUR / 2)
    house.publish("cooking")
    house.run(daemon, 5 * MINUTE)
    house.loopback.set_kind("cooking", "private")
    house.run(daemon, HOUR)
    inside = []
    for _ in range(12):
        inside += house.publish("cooking", 6)
        house.publish("baking")
        house.run(daemon, HOUR)
    house.run(daemon, DAY)
    assert "cooking" in house.replaced()
    house.loopback.set_kind("cooking", "public")
    house.publish("cooking", 100)
    house.run(daemon, DAY)
    assert "cooking" not in house.replaced()
    assert set(inside) <= set(house.ids())


@short_listings
def test_loses_nothing_if_a_subreddit_closes_between_checks(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=HOUR / 2)
    house.publish("cooking")
    house.run(daemon, 20 * MINUTE)
    house.loopback.set_kind("cooking", "private")
    inside = []
    for _ in range(8):
        inside += house.publish("cooking", 5)
        house.publish("baking", 40)
        house.run(daemon, HOUR)
    house.loopback.set_kind("cooking", "public")
    for _ in range(20):
        house.publish("baking", 20)
        house.run(daemon, HOUR)
    assert set(inside) <= set(house.ids())


@short_listings
def test_gap_of_a_closed_subreddit_starts_when_it_closed(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=HOUR / 2)
    house.publish("cooking")
    house.run(daemon, HOUR)
    closed = house.clock.time()
    house.loopback.set_kind("cooking", "private")
    for _ in range(10):
        house.run(daemon, HOUR)
        house.publish("cooking", 28)
        house.publish("baking")
    assert "cooking" in house.replaced()
    house.loopback.set_kind("cooking", "public")
    house.run(daemon, DAY)
    (gap,) = house.gaps.all()
    assert gap.subreddit == "cooking"
    assert gap.since <= closed
