"""Rechecks of a post: its score, its text, and whether it still exists."""

from producers.reddit.state import RECHECK_DELAYS_S
from shared.keys import result_key, sent_key, tombstone_key
from shared.messages import Post
from shared.purge import purge
from shared.results import ResultsStore
from tests.integration.reddit.house import HOUR, MINUTE, House, result


def test_recheck_refreshes_resends_and_purges(house: House) -> None:
    """Scores are refreshed, edited posts sent again, and deleted or removed posts purged."""
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    kept, edited, deleted, removed, vanished = house.publish("cooking", 5, body="before")
    house.run(daemon, 2 * MINUTE)
    store = ResultsStore(house.redis.client, house.settings)
    sent = [Post.parse(post) for post in house.queued()]
    store.write([result(post) for post in sent if post.id in (kept, edited, deleted, removed, vanished)])
    house.loopback.score(kept, 4321)
    house.loopback.edit(edited, "after")
    house.publish("cooking", 250)  # push the five posts off the listing's first pages
    house.loopback.delete(deleted)
    house.loopback.remove(removed)
    house.loopback.vanish(vanished)
    house.run(daemon, RECHECK_DELAYS_S[0] + 30 * MINUTE)
    score = store.score(kept)
    assert score
    assert score.score == 4321
    assert [post["body"] for post in house.queued() if post["id"] == edited] == ["before", "after"]
    for gone in (deleted, removed, vanished):
        assert store.get(gone) == []
        assert not house.redis.client.exists(sent_key(gone), result_key(gone))
        assert house.redis.client.exists(tombstone_key(gone))
    assert {entry.post.id for entry in store.latest(100)} == {kept, edited}
    assert daemon.status()["purged"] == 3


def test_a_post_briefly_unknown_to_reddit_is_kept(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (fullname,) = house.publish("cooking")
    house.run(daemon, RECHECK_DELAYS_S[0] - 5 * MINUTE)
    house.loopback.faults.always("empty_listing", where="/api/info")
    house.run(daemon, 8 * MINUTE)
    assert house.loopback.ledger.faults["empty_listing"] >= 1
    house.loopback.faults.clear()
    house.run(daemon, HOUR)
    assert not house.redis.client.exists(tombstone_key(fullname))
    assert house.redis.client.exists(sent_key(fullname))


def test_purges_nothing_if_reddit_knows_no_post_at_all(house: House) -> None:
    daemon = house.daemon()
    fullnames = house.publish("cooking", 50)
    house.run(daemon, RECHECK_DELAYS_S[0] - MINUTE)
    house.loopback.faults.always("empty_listing", where="/api/info")
    house.run(daemon, 40 * MINUTE)
    assert house.redis.client.exists(*map(tombstone_key, fullnames)) == 0
    house.loopback.faults.clear()
    house.run(daemon, 30 * MINUTE)
    assert daemon.status()["looked"] >= 50


def test_rechecks_end_after_the_last_one(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=HOUR)
    house.run(daemon, 2 * MINUTE)
    house.run(daemon, RECHECK_DELAYS_S[-1] + HOUR)
    assert house.state.due(float("inf"), 10) == []
    asked = [request for request in house.loopback.ledger.requests if "id=t3_" in request.query]
    assert len(asked) == len(RECHECK_DELAYS_S)  # four posts, a hundred a request


def test_a_purged_post_is_not_sent_again(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (fullname,) = house.publish("cooking", body="x")
    purge(house.redis.client, house.settings, [fullname])
    house.run(daemon, 2 * MINUTE)
    assert fullname not in house.ids()


def test_rechecks_wait_for_a_full_queue_without_piling_up(house: House) -> None:
    daemon = house.daemon(queue_limit=3, queue_resume=1, posts_per_message=100)
    house.publish("cooking", 150)
    house.run(daemon, 5 * MINUTE)
    house.redis.client.rpush("feedmill", *["x"] * 10)
    house.clock.wait(RECHECK_DELAYS_S[0])
    begun = house.loopback.ledger.total
    house.run(daemon, 10 * MINUTE)
    asked = list(house.loopback.ledger.requests)[begun - house.loopback.ledger.total :]
    assert len([request for request in asked if "/api/info" in request.path]) == 1
    assert daemon.status()["held"] <= 100
