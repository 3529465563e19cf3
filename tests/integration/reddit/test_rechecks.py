"""Rechecks of a post: its score, its text, and whether it still exists."""

from typing import Any

import pytest

from feedmill.producers.live import rechecks
from feedmill.producers.live.rechecks import (
    MISSING_PATIENCE_S,
    REMOVED_PATIENCE_S,
    RETURN_PAUSES_S,
    WAITING_RETRY_S,
)
from feedmill.producers.reddit.source import RedditSource
from feedmill.shared.keys import MARKS, TOMBSTONE
from feedmill.shared.messages import Post
from feedmill.shared.purge import purge
from feedmill.shared.results import ResultsStore
from tests.integration.reddit.house import DAY, HOUR, MINUTE, House, result
from tests.integration.reddit.test_outbox import Killed
from tests.support import has_results, latest, sent_marks

RECHECK_DELAYS_S = RedditSource.recheck_delays
#: Seconds between polls in tests of days.
SELDOM = 6 * HOUR


def test_recheck_refreshes_resends_and_purges(house: House) -> None:
    """Scores are refreshed, edited posts sent again, deleted posts purged at once, removed and
    missing ones later.
    """
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    kept, edited, deleted, removed, vanished = house.publish(
        "cooking", 5, body="before"
    )
    house.run(daemon, 2 * MINUTE)
    store = ResultsStore(house.redis.client, house.settings)
    sent = [Post.parse(post) for post in house.queued()]
    store.write(
        [
            result(post)
            for post in sent
            if post.id in (kept, edited, deleted, removed, vanished)
        ]
    )
    house.loopback.score(kept, 4321)
    house.loopback.edit(edited, "after")
    house.publish("cooking", 250)  # push the five posts off the listing's first pages
    house.loopback.delete(deleted)
    house.loopback.remove(removed)
    house.loopback.vanish(vanished)
    daemon = house.daemon(reddit_poll_interval=SELDOM)
    house.run(daemon, RECHECK_DELAYS_S[0] + 30 * MINUTE)
    score = store.score(kept)
    assert score
    assert score.score == 4321
    assert [post["body"] for post in house.queued() if post["id"] == edited] == [
        "before",
        "after",
    ]
    assert store.get(removed)
    assert store.get(vanished)
    assert daemon.status()["purged"] == 1
    house.run(daemon, REMOVED_PATIENCE_S + WAITING_RETRY_S)
    assert house.redis.client.exists(TOMBSTONE + removed)
    assert store.get(vanished)
    house.run(daemon, MISSING_PATIENCE_S - REMOVED_PATIENCE_S)
    for gone in (deleted, removed, vanished):
        assert store.get(gone) == []
        assert not has_results(house.redis.client, gone)
        assert not sent_marks(house.redis.client, gone)
        assert house.redis.client.exists(TOMBSTONE + gone)
    assert {entry.post.id for entry in latest(store, 100)} == {kept, edited}


def test_purges_nothing_if_reddit_knows_no_post_at_all(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=SELDOM)
    fullnames = house.publish("cooking", 50)
    house.run(daemon, RECHECK_DELAYS_S[0] - MINUTE)
    house.loopback.faults.always("empty_listing", where="/api/info")
    house.run(daemon, 40 * MINUTE)
    assert house.loopback.ledger.faults["empty_listing"] >= 1
    house.loopback.faults.clear()
    house.run(daemon, DAY)
    assert (
        house.redis.client.exists(*(TOMBSTONE + post_id for post_id in fullnames)) == 0
    )
    assert all(sent_marks(house.redis.client, fullname) for fullname in fullnames)
    assert daemon.status()["rechecked"] >= 50


def test_rechecks_get_requests_while_the_source_takes_each_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = house.daemon()
    house.publish("cooking")
    house.run(daemon, MINUTE)
    house.clock.wait(2 * HOUR)
    # as while it catches up, page by page
    monkeypatch.setattr(daemon._source, "pending", lambda: 0.7)
    house.run(daemon, MINUTE)
    assert daemon.status()["rechecked"] == len(house.ids())


def test_failed_requests_do_not_hold_up_later_rechecks(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=SELDOM)
    first = house.publish("cooking", 100)
    house.run(daemon, 5 * MINUTE)
    (deleted,) = house.publish("tennis")
    house.run(house.daemon(reddit_poll_interval=SELDOM), 5 * MINUTE)
    house.loopback.delete(deleted)
    house.loopback.faults.always("html_400", where=f"/api/info.*{first[50]}")
    house.run(house.daemon(reddit_poll_interval=SELDOM), 3 * HOUR)
    assert house.redis.client.exists(TOMBSTONE + deleted)


def test_posts_of_a_subreddit_that_stays_private_are_purged_and_come_back_with_it(
    house: House,
) -> None:
    daemon = house.daemon(reddit_poll_interval=SELDOM)
    posts = house.publish("cooking", 5)
    house.run(daemon, 5 * MINUTE)
    house.loopback.set_kind("cooking", "private")
    house.run(daemon, MISSING_PATIENCE_S + DAY)
    assert house.redis.client.exists(*(TOMBSTONE + post_id for post_id in posts)) == 5
    house.loopback.set_kind("cooking", "public")
    house.run(daemon, sum(RETURN_PAUSES_S[:2]))
    assert house.redis.client.exists(*(TOMBSTONE + post_id for post_id in posts)) == 0
    assert [whole(house).count(post) for post in posts] == [1] * 5
    assert daemon.status()["returned"] == 6  # with the older post of the fixture


def test_a_purged_post_that_is_approved_later_is_sent_again(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=SELDOM)
    (approved, deleted, by_hand) = house.publish("cooking", 3)
    house.run(daemon, 5 * MINUTE)
    for post in (approved, by_hand):
        house.loopback.remove(post)
    house.loopback.delete(deleted)
    purge(house.redis.client, house.settings, [by_hand])
    house.run(daemon, RECHECK_DELAYS_S[0] + REMOVED_PATIENCE_S + 2 * WAITING_RETRY_S)
    assert (
        house.redis.client.exists(
            *(TOMBSTONE + post_id for post_id in (approved, deleted, by_hand))
        )
        == 3
    )
    for post in (approved, deleted, by_hand):
        house.loopback.approve(post)
    house.run(daemon, RETURN_PAUSES_S[0] + HOUR)
    assert whole(house).count(approved) == 1
    assert (
        house.redis.client.exists(
            *(TOMBSTONE + post_id for post_id in (deleted, by_hand))
        )
        == 2
    )
    assert not {deleted, by_hand} & set(whole(house))


def test_a_later_purge_by_hand_stands_if_the_post_comes_back(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=SELDOM)
    (post,) = house.publish("cooking")
    house.run(daemon, 5 * MINUTE)
    house.loopback.remove(post)
    house.run(daemon, RECHECK_DELAYS_S[0] + REMOVED_PATIENCE_S + 2 * WAITING_RETRY_S)
    assert house.redis.client.exists(TOMBSTONE + post)
    house.redis.client.set(TOMBSTONE + post, 1)  # another time, as of another purge
    house.loopback.approve(post)
    house.run(daemon, RETURN_PAUSES_S[0] + HOUR)
    assert house.redis.client.exists(TOMBSTONE + post)
    assert post not in whole(house)


def test_a_post_comes_back_after_a_kill_during_its_purge(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = house.daemon(reddit_poll_interval=SELDOM)
    (post,) = house.publish("cooking")
    house.run(daemon, 5 * MINUTE)
    house.loopback.remove(post)

    def killing(*arguments: Any) -> None:
        purge(*arguments)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(rechecks, "purge", killing)
        with pytest.raises(Killed):
            house.run(
                daemon, RECHECK_DELAYS_S[0] + REMOVED_PATIENCE_S + 2 * WAITING_RETRY_S
            )
    house.loopback.approve(post)
    house.run(house.daemon(reddit_poll_interval=SELDOM), RETURN_PAUSES_S[0] + HOUR)
    assert whole(house).count(post) == 1


def test_expired_marks_send_nothing_twice(house: House) -> None:
    """Posts that are older than the records of sent posts may have been sent; rechecks do not
    depend on them.
    """
    daemon = house.daemon(sent_ttl=HOUR, reddit_poll_interval=SELDOM)
    posts = house.publish("cooking", 5)
    house.run(daemon, RECHECK_DELAYS_S[0] - MINUTE)
    house.loopback.edit(posts[0], "after")
    house.clock.wait(2 * MINUTE)
    forget_marks(house)
    house.run(
        house.daemon(sent_ttl=HOUR, reddit_poll_interval=SELDOM), RECHECK_DELAYS_S[1]
    )
    assert [house.ids().count(post) for post in posts] == [2, 1, 1, 1, 1]


def whole(house: House) -> list[str]:
    """Return the ids of those posts in the queue that no purge has reduced to their ids."""
    return [post["id"] for post in house.queued() if "title" in post]


def forget_marks(house: House) -> None:
    for key in house.redis.client.scan_iter(f"{MARKS}*"):
        house.redis.client.delete(key)
