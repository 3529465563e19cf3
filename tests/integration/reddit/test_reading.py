"""Reading listings: finding new posts, sending them once, and detecting gaps."""

from typing import Any

import pytest

from feedmill.producers.records import parse_post
from feedmill.producers.reddit import listing
from feedmill.producers.reddit.client import RedditClient
from feedmill.producers.reddit.listing import ListingPage
from feedmill.producers.reddit.topics import Topics
from feedmill.shared.keys import REDDIT_TRACK
from feedmill.shared.messages import Post
from feedmill.testing import fake_reddit as reddit
from tests.integration.reddit.house import DAY, HOUR, MINUTE, House, short_listings


def test_sends_new_posts_once_in_order(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    old = house.ids()
    assert len(old) == 4  # two active subreddits in each topic
    new = []
    for name in ("cooking", "tennis", "baking"):
        new += house.publish(name)
        house.run(daemon, 2 * MINUTE)
    assert house.ids() == old + new
    house.run(daemon, HOUR / 2)
    assert house.ids() == old + new


def test_posts_carry_reddits_fields(house: House) -> None:
    daemon = house.daemon()
    fullname = house.loopback.publish(
        "Cooking",
        title="Fish & chips <3",
        body="a > b",
        url=None,
        score=7,
        over_18=True,
        spoiler=True,
    )
    house.run(daemon, 2 * MINUTE)
    (post,) = [post for post in house.queued() if post["id"] == fullname]
    assert post["title"] == "Fish & chips <3"
    assert post["body"] == "a > b"
    assert (post["topic"], post["subreddit"], post["score"]) == ("food", "cooking", 7)
    assert (post["nsfw"], post["spoiler"], post.get("stickied", False)) == (
        True,
        True,
        False,
    )
    assert post["permalink"].startswith("https://www.reddit.com/r/")
    assert post["created_utc"] == house.loopback.ledger.published[fullname].created_utc
    assert not {"author", "author_fullname"} & set(post)


def test_a_restart_continues_where_it_stopped(house: House) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    before = house.ids()
    missed = house.publish("cooking", 150) + house.publish("tennis", 3)
    house.clock.wait(3 * HOUR)
    house.run(house.daemon(depth=1), 2 * MINUTE)
    assert sorted(house.ids()) == sorted(before + missed)
    assert house.gaps.all() == []


def test_reads_a_topics_subreddits_in_one_request(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    begun = house.loopback.ledger.total
    house.run(daemon, 10 * MINUTE)
    assert (
        18 <= house.loopback.ledger.total - begun <= 23
    )  # two topics, one request a minute each
    paths = [request.path for request in list(house.loopback.ledger.requests)[begun:]]
    assert set(paths) == {"/r/cooking+baking/new", "/r/tennis+chess/new"}


def test_slow_answers_starve_no_topic(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer takes longer than the interval between two polls of a topic."""
    page = RedditClient.page

    def slow(*arguments: Any, **options: Any) -> ListingPage:
        house.clock.wait(100.0)
        return page(*arguments, **options)

    monkeypatch.setattr(RedditClient, "page", slow)
    house.topics = Topics(
        active=1,
        topics={"food": ("cooking",), "tennis": ("tennis",), "golf": ("golf",)},
    )
    daemon = house.daemon()
    house.run(daemon, HOUR)
    posts = [house.publish(name)[0] for name in ("cooking", "tennis", "golf")]
    house.run(daemon, HOUR / 2)
    assert set(posts) <= set(house.ids())


def test_first_read_is_limited_in_depth(house: House) -> None:
    for second in range(300):
        for name in ("cooking", "baking"):
            house.publish(name, created_utc=house.clock.time() - HOUR + second)
    daemon = house.daemon(depth=100, reddit_poll_interval=HOUR)
    house.run(daemon, 8 * HOUR)  # includes a full walk of the listing
    assert sum(post["topic"] == "food" for post in house.queued()) == 100


def test_sends_an_edited_post_again(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (fullname,) = house.publish("cooking", body="before")
    house.run(daemon, 2 * MINUTE)
    house.loopback.edit(fullname, "after")
    house.loopback.score(fullname, 99)
    house.run(daemon, 2 * MINUTE)
    found = [post for post in house.queued() if post["id"] == fullname]
    assert [post["body"] for post in found] == ["before", "after"]
    assert "edited_utc" in found[1]
    house.run(house.daemon(), 2 * MINUTE)
    assert house.ids().count(fullname) == 2


def test_finds_a_post_that_appears_minutes_late(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (late,) = house.publish("cooking", visible_from=house.clock.time() + 240)
    newer: list[str] = []
    for _ in range(100):
        house.clock.wait(1)
        newer += house.publish("cooking", 3)
    house.run(daemon, 2 * MINUTE)
    assert newer[-1] in house.ids()
    assert late not in house.ids()
    house.run(daemon, 2 * MINUTE)
    assert late in house.ids()


def test_reddits_clock_an_hour_back_loses_nothing(house: House) -> None:
    """Old times put new posts below those that are known; a walk to the end finds them."""
    now = house.clock.time()
    for minute in range(200):
        house.publish("cooking", created_utc=now - minute * MINUTE)
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    posts = [
        house.publish(name, created_utc=now - 2.5 * HOUR)[0]
        for name in ("cooking", "tennis") * 10
    ]
    house.run(daemon, 7 * HOUR)
    assert sorted(set(house.ids()) & set(posts)) == sorted(posts)
    assert len(house.ids()) == len(set(house.ids()))
    assert daemon.status()["earlier"] == 10, (
        "the watermark of the quiet subreddit is older"
    )


def test_a_full_walk_dated_in_the_future_is_repeated(house: House) -> None:
    """This machine's clock was wrong."""
    now = house.clock.time()
    for minute in range(200):
        house.publish("cooking", created_utc=now - minute * MINUTE)
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.redis.client.hset(REDDIT_TRACK + "cooking", "full", now + 30 * DAY)
    (late,) = house.publish("cooking", created_utc=now - 2.5 * HOUR)
    house.run(daemon, 2 * MINUTE)
    assert house.ids().count(late) == 1


@short_listings
def test_finds_a_held_back_post_beside_a_busy_subreddit(house: House) -> None:
    """In the listing of both subreddits, the post is beyond the maximum length."""
    daemon = house.daemon(reddit_poll_interval=900.0)
    house.publish("cooking", 5)
    house.run(daemon, 20 * MINUTE)
    (late,) = house.publish("cooking", visible_from=house.clock.time() + 2 * HOUR)
    for _ in range(14):
        house.publish("baking", 50)
        house.run(daemon, HOUR)
    assert house.ids().count(late) == 1


def test_records_a_gap_if_a_listing_overflows(house: House) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    known = house.publish("cooking", 5)
    house.run(house.daemon(), 2 * MINUTE)
    until = house.clock.time()
    house.clock.wait(HOUR)
    begins = house.clock.time()
    for minute in range(12):
        house.publish("cooking", 100, created_utc=begins + minute)
    quiet = house.publish("baking", 2)
    house.clock.wait(HOUR)
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (gap,) = house.gaps.all()
    assert gap.subreddit == "cooking"
    assert gap.since <= until
    # the first 200 are out of reach, and so may be some of the third second
    assert int(gap.until) == begins + 2 + 1
    assert set(house.ids()) >= {*known, *quiet}
    assert len(
        [post for post in house.queued() if post["created_utc"] >= begins]
    ) == 1000 + len(quiet)
    assert daemon.status()["gaps"] == 1
    house.run(house.daemon(), 10 * MINUTE)
    assert house.gaps.all() == [gap]


def test_splits_a_joint_listing_that_overflows(house: House) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    expected = set(house.publish("cooking", 700) + house.publish("baking", 700))
    house.clock.wait(HOUR)
    house.run(house.daemon(), 2 * MINUTE)
    assert set(house.ids()) >= expected
    assert house.gaps.all() == []


def test_a_post_dated_in_the_future_does_not_hide_later_ones(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (odd,) = house.publish("cooking")
    real = listing.parse_item
    future = house.clock.time() + 30 * DAY
    monkeypatch.setattr(
        listing,
        "parse_item",
        lambda said, topics: real(
            {**said, "created_utc": future} if said["name"] == odd else said, topics
        ),
    )
    house.run(daemon, 5 * MINUTE)
    later = house.publish("cooking", 250)
    house.run(daemon, 5 * MINUTE)
    assert set(later) <= set(house.ids())
    assert (
        float(str(house.redis.client.hget(REDDIT_TRACK + "cooking", "watermark")))
        <= house.clock.time()
    )


def test_sends_unusual_posts_and_counts_empty_ones_as_refused(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.publish("cooking", title="far", url="http://x/" + "y" * 5000)
    house.loopback.publish("cooking", title=" ")
    house.run(daemon, 5 * MINUTE)
    assert "far" in [post["title"] for post in house.queued()]
    assert daemon.status()["refused"] == 1


def test_a_stale_listing_loses_nothing(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.always("stale", seconds=20 * MINUTE)
    posts = house.publish("cooking", 30)
    house.run(daemon, 10 * MINUTE)
    assert not set(posts) & set(house.ids())
    house.loopback.faults.clear()
    house.run(daemon, 2 * MINUTE)
    assert [house.ids().count(post) for post in posts] == [1] * 30


def test_advertisements_are_not_sent(house: House) -> None:
    (promoted,) = house.publish("cooking", promoted=True)
    (post,) = house.publish("cooking")
    house.run(house.daemon(), 2 * MINUTE)
    assert post in house.ids()
    assert promoted not in house.ids()


def test_a_redirect_to_another_subreddit_replaces_the_first(house: House) -> None:
    house.loopback.add_subreddit("research")
    house.loopback.redirect("cooking", "research")
    house.topics = Topics(active=1, topics={"food": ("cooking", "baking")})
    house.run(house.daemon(), 5 * MINUTE)
    entry = house.replaced()["cooking"]
    assert (entry.reason, entry.by) == ("redirected", "baking")


def test_a_blocked_user_agent_closes_no_subreddit(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.loopback.blocked_agents = "nobody"
    house.run(house.daemon(), 5 * MINUTE)
    assert house.replaced() == {}
    assert "FEEDMILL_REDDIT_USER_AGENT" in caplog.text


def test_a_dump_of_the_same_posts_sends_nothing_again(house: House) -> None:
    """Dumps escape HTML where the API does not, and carry the same texts of crossposts, polls and
    galleries.
    """
    (original,) = house.publish("tennis", body="An original &amp; its entity")
    house.loopback.publish(
        "cooking", title="Fish &amp; chips <3", body="&#x200B; a > b &lt;"
    )
    house.publish("cooking", crosspost_of=original)
    house.publish("cooking", options=["Tea & milk", "Coffee"])
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    for post in list(house.loopback.posts.values()):
        record = reddit.escaped(reddit.post_thing(post))["data"]
        *_, read = parse_post(record, "dump:1")
        assert isinstance(read, Post)
        if record["name"] in house.ids():
            (sent,) = [
                Post.parse(each)
                for each in house.queued()
                if each["id"] == record["name"]
            ]
            assert read.text == sent.text
