"""producers/reddit on a real Redis, with real PRAW, against the loopback Reddit; only time is simulated."""

from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from pydantic import SecretStr

from producers.push import Pusher
from producers.reddit import daemon as daemon_module
from producers.reddit.budget import Budget
from producers.reddit.client import Reddit, told_plainly
from producers.reddit.daemon import Daemon
from producers.reddit.once import TRIES, Listing, Once, patiently
from producers.reddit.state import LOOKS, State
from producers.reddit.things import Fault, Unreachable
from producers.reddit.topics import Topics
from shared import broker
from shared.broker import connect, make_app, queue_depth
from shared.errors import CredentialsError, UserError
from shared.keys import result_key, sent_key, tombstone_key
from shared.messages import Classification, ClassifyOptions, Post, fingerprint
from shared.purge import purge
from shared.results import Result, ResultsStore
from shared.settings import Settings
from tests.fakes.clock import SimulatedClock
from tests.fakes.reddit import Reddit as LoopbackReddit
from tests.support import RedisServer, body_of

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
TOPICS = {"food": ("cooking", "baking", "recipes"), "sport": ("tennis", "chess", "golf")}


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


#: For tests that fill listings: they end after 200 items instead of 1,000, and cost a fifth.
short_listings = pytest.mark.parametrize("loopback", [200], indirect=True, ids=["short"])


@pytest.fixture
def loopback(request: pytest.FixtureRequest, clock: SimulatedClock) -> Iterator[LoopbackReddit]:
    """With all subreddits of TOPICS, each with a post of yesterday."""
    with LoopbackReddit(clock=clock.time, window=None, listing_cap=getattr(request, "param", 1000)) as reddit:
        for names in TOPICS.values():
            for name in names:
                reddit.add_subreddit(name)
                reddit.publish(name, title=f"an old post of {name}", created_utc=clock.time() - DAY)
        yield reddit


class House:
    """All that a daemon stands on, and daemons one after the other: a new one is the process started again."""

    def __init__(self, redis: RedisServer, clock: SimulatedClock, loopback: LoopbackReddit) -> None:
        credentials = {
            "reddit_client_id": "id",
            "reddit_client_secret": "secret",
            "reddit_user_agent": "linux:test:1 (by /u/nobody)",
            "reddit_url": loopback.url,
            "reddit_timeout": 2.0,
        }
        self.settings = Settings.model_validate({"redis_url": redis.url} | credentials)
        self.redis = redis
        self.clock = clock
        self.loopback = loopback
        self.topics = Topics(active=2, topics=TOPICS)
        self.state = State(redis.client)
        self._open: list[Reddit] = []

    def reddit(self) -> Reddit:
        reddit = Reddit(self.settings, Budget(self.clock, 90), self.topics.topic_of)
        self._open.append(reddit)
        return reddit

    def daemon(self, depth: int = 1000, **settings: Any) -> Daemon:
        chosen = self.settings.model_copy(update=settings)
        budget = Budget(self.clock, chosen.reddit_requests_per_minute)
        client = connect(chosen)
        pusher = Pusher(make_app(chosen), client, chosen, ClassifyOptions(), wait=self.clock.wait)
        reddit = Reddit(chosen, budget, self.topics.topic_of)
        self._open.append(reddit)
        return Daemon(reddit, budget, client, pusher, self.topics, chosen, self.clock, depth)

    def run(self, daemon: Daemon, seconds: float) -> None:
        """Let simulated time pass."""
        until = self.clock.monotonic() + seconds
        while (left := until - self.clock.monotonic()) > 0:
            self.clock.wait(min(daemon.step(), left))

    def publish(self, name: str, count: int = 1, **fields: Any) -> list[str]:
        number = len(self.loopback.ledger.published)
        return [self.loopback.publish(name, title=f"post {number + each}", **fields) for each in range(count)]

    def queued(self) -> list[dict[str, Any]]:
        """The posts in the queue, in the order in which they were sent."""
        messages: list[Any] = self.redis.client.lrange("feedmill", 0, -1)
        return [post for message in reversed(messages) for post in body_of(message)[1]["posts"]]

    def ids(self) -> list[str]:
        return [post["id"] for post in self.queued()]

    def close(self) -> None:
        for reddit in self._open:
            reddit.close()


@pytest.fixture
def house(redis: RedisServer, clock: SimulatedClock, loopback: LoopbackReddit) -> Iterator[House]:
    house = House(redis, clock, loopback)
    yield house
    house.close()


# What is sent.


def test_new_posts_are_sent_once_and_in_order(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    old = house.ids()
    assert len(old) == 4  # of the two subreddits of each topic that are read
    new = []
    for name in ("cooking", "tennis", "baking"):
        new += house.publish(name)
        house.run(daemon, 2 * MINUTE)
    assert house.ids() == old + new
    house.run(daemon, HOUR / 2)
    assert house.ids() == old + new


def test_a_post_carries_what_reddit_says_of_it(house: House) -> None:
    daemon = house.daemon()
    fullname = house.loopback.publish(
        "Cooking", title="Fish & chips <3", body="a > b", url=None, score=7, over_18=True, spoiler=True
    )
    house.run(daemon, 2 * MINUTE)
    (post,) = [post for post in house.queued() if post["id"] == fullname]
    assert post["title"] == "Fish & chips <3"
    assert post["body"] == "a > b"
    assert (post["topic"], post["subreddit"], post["score"]) == ("food", "cooking", 7)
    assert (post["nsfw"], post["spoiler"], post.get("stickied", False)) == (True, True, False)
    assert post["permalink"].startswith("https://www.reddit.com/r/")
    assert post["created_utc"] == house.loopback.ledger.published[fullname].created_utc
    assert not {"author", "author_fullname"} & set(post)


def test_it_goes_on_where_it_stopped(house: House) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    before = house.ids()
    missed = house.publish("cooking", 150) + house.publish("tennis", 3)
    house.clock.wait(3 * HOUR)
    house.run(house.daemon(depth=1), 2 * MINUTE)
    assert sorted(house.ids()) == sorted(before + missed)
    assert house.state.gaps() == []


def test_several_subreddits_are_one_request(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    begun = house.loopback.ledger.total
    house.run(daemon, 10 * MINUTE)
    assert 18 <= house.loopback.ledger.total - begun <= 23  # two topics, ten minutes
    paths = [request.path for request in list(house.loopback.ledger.requests)[begun:]]
    assert set(paths) == {"/r/cooking+baking/new", "/r/tennis+chess/new"}


def test_only_so_many_posts_are_read_to_begin_with(house: House) -> None:
    for second in range(300):
        for name in ("cooking", "baking"):
            house.publish(name, created_utc=house.clock.time() - HOUR + second)
    daemon = house.daemon(depth=100, reddit_poll_interval=600.0)
    house.run(daemon, 8 * HOUR)  # also through a walk of the whole listing
    assert sum(post["topic"] == "food" for post in house.queued()) == 100


def test_a_post_that_was_held_back_for_hours_is_found(house: House) -> None:
    """By a spam filter, until a moderator let it in; it then stands where it would have stood."""
    daemon = house.daemon(reddit_poll_interval=300.0)
    house.run(daemon, 2 * MINUTE)
    late = house.publish("cooking", visible_from=house.clock.time() + 3 * HOUR)
    for _ in range(12):
        house.publish("cooking", 20)
        house.run(daemon, HOUR)
    assert house.ids().count(late[0]) == 1


def test_an_edited_post_is_sent_again_as_such(house: House) -> None:
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


# What is out of reach.


def test_more_posts_than_a_listing_holds_are_a_gap(house: House) -> None:
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
    (gap,) = house.state.gaps()
    assert gap.subreddit == "cooking"
    assert gap.since <= until
    assert int(gap.until) == begins + 2 + 1  # the first two hundred are pushed out; of the third hundred's second all
    assert set(house.ids()) >= {*known, *quiet}
    assert len([post for post in house.queued() if post["created_utc"] >= begins]) == 1000 + len(quiet)
    assert daemon.gaps == 1
    house.run(house.daemon(), 10 * MINUTE)
    assert house.state.gaps() == [gap]


def test_what_is_too_much_for_one_listing_is_read_from_each(house: House) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    expected = set(house.publish("cooking", 700) + house.publish("baking", 700))
    house.clock.wait(HOUR)
    house.run(house.daemon(), 2 * MINUTE)
    assert set(house.ids()) >= expected
    assert house.state.gaps() == []


# What goes wrong.


@pytest.mark.parametrize(
    "fault",
    [
        "too_many", "too_many_bare", "too_many_word", "too_many_date", "server_error_500", "server_error_503", "html",
        "html_403", "redirect_nowhere", "token_expired", "cut", "cut_body", "reset_fractional", "remaining_nan",
        "used_missing", "empty_listing", "no_data", "truncated_json", "sticky_head", "slow_body",
    ],
)  # fmt: skip
def test_a_fault_costs_no_post(house: House, fault: str) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.next(fault, times=2, where="/r/", seconds=3)
    expected = house.publish("cooking", 3) + house.publish("tennis", 250)
    house.run(daemon, 20 * MINUTE)
    assert house.loopback.ledger.faults[fault] == 2
    assert set(house.ids()) >= set(expected)
    assert len(house.ids()) == len(set(house.ids()))
    assert daemon.status()["failing"] == []
    assert daemon.hindrance == ""


def test_a_dead_anchor_costs_no_post(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.next("dead_anchor", times=2)
    expected = house.publish("tennis", 450)
    house.run(daemon, 20 * MINUTE)
    assert house.loopback.ledger.faults["dead_anchor"] == 2
    assert set(house.ids()) >= set(expected)


def test_one_subreddit_that_fails_stops_no_other(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.always("server_error_500", where="cooking")
    kept = house.publish("cooking", 2)
    others = house.publish("baking", 2) + house.publish("tennis", 2)
    house.run(daemon, 5 * MINUTE)
    assert set(others) <= set(house.ids())
    assert daemon.status()["failing"] == ["cooking"]
    house.loopback.faults.clear()
    house.run(daemon, 20 * MINUTE)
    assert set(kept) <= set(house.ids())
    assert daemon.status()["failing"] == []


def test_a_429_is_waited_for_as_long_as_it_says(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.next("too_many", seconds=300)
    begun = house.loopback.ledger.total
    house.run(daemon, 400)
    times = [request.at for request in list(house.loopback.ledger.requests)[begun:]]
    assert times[1] - times[0] >= 300
    assert times[1] - times[0] < 320


def test_the_budget_that_reddit_states_is_kept_to(house: House, clock: SimulatedClock) -> None:
    with LoopbackReddit(clock=clock.time, window=600, budget=25) as strict:
        for names in TOPICS.values():
            for name in names:
                strict.add_subreddit(name)
                strict.publish(name, title="one")
        daemon = house.daemon(reddit_url=strict.url, reddit_poll_interval=5.0)
        house.run(daemon, HOUR)
        assert strict.ledger.over_budget == 0
        assert strict.ledger.total > 6 * 15


def test_while_reddit_is_away_it_waits_longer_and_longer(house: House, caplog: pytest.LogCaptureFixture) -> None:
    daemon = house.daemon(reddit_url="http://127.0.0.1:9")  # the port "discard", where nothing listens
    house.run(daemon, HOUR)
    assert "no connection" in daemon.hindrance
    assert 5 <= len([record for record in caplog.records if "no connection" in record.message]) <= 20


def test_while_redis_is_away_nothing_is_lost(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    expected = house.publish("cooking", 3)
    house.redis.client.config_set("maxmemory", 1)
    try:
        house.run(daemon, 5 * MINUTE)
        assert "Redis" in daemon.hindrance
    finally:
        house.redis.client.config_set("maxmemory", 0)
    house.run(daemon, 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    assert daemon.hindrance == ""


def test_a_mistake_of_ours_in_one_job_ends_no_other(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    expected = house.publish("cooking")
    with monkeypatch.context() as patched:
        patched.setattr(State, "due", lambda *_: 1 / 0)
        house.run(daemon, 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    assert daemon.faults["unexpected"] > 1


# A full queue.


def test_a_full_queue_is_waited_for_and_nothing_is_lost(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "MAX_HELD", 40)
    daemon = house.daemon(queue_limit=4, queue_resume=2, posts_per_message=2)
    house.run(daemon, 2 * MINUTE)
    expected = set(house.ids())
    for _ in range(10):
        expected |= set(house.publish("cooking", 10))
        house.run(daemon, 3 * MINUTE)
    assert queue_depth(house.redis.client, "feedmill").waiting == 4
    assert daemon.status()["paused"]
    assert 40 <= daemon.status()["held"] <= 60
    seen: set[str] = set()
    while not expected <= seen:
        seen |= set(house.ids())
        house.redis.client.delete("feedmill")
        house.run(daemon, MINUTE)
        assert queue_depth(house.redis.client, "feedmill").waiting <= 4
    assert daemon.status()["held"] == 0
    assert not daemon.status()["paused"]


def test_polls_come_more_rarely_while_the_queue_is_full(house: House) -> None:
    daemon = house.daemon(queue_limit=1, posts_per_message=1)
    house.run(daemon, 2 * MINUTE)
    begun = house.loopback.ledger.total
    house.run(daemon, 20 * MINUTE)
    assert 8 <= house.loopback.ledger.total - begun <= 14


def test_what_is_held_when_it_is_killed_is_read_again(house: House) -> None:
    daemon = house.daemon(queue_limit=1, posts_per_message=2)
    expected = house.publish("cooking", 30)
    house.run(daemon, 5 * MINUTE)
    assert daemon.status()["held"] > 0
    house.run(house.daemon(queue_limit=1000), 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    assert len(house.ids()) == len(set(house.ids()))


# Subreddits.


def test_one_that_cannot_be_read_is_replaced_and_comes_back(house: House) -> None:
    house.loopback.set_kind("cooking", "banned")
    house.loopback.set_kind("tennis", "private")
    daemon = house.daemon(reddit_poll_interval=100.0)
    house.run(daemon, 5 * MINUTE)
    replaced = house.state.replaced()
    assert {name: (entry.reason, entry.by) for name, entry in replaced.items()} == {
        "cooking": ("banned", "recipes"),
        "tennis": ("private", "golf"),
    }
    assert replaced["cooking"].since == pytest.approx(house.clock.time(), abs=5 * MINUTE)
    expected = house.publish("recipes") + house.publish("golf")
    house.run(daemon, 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    house.loopback.set_kind("cooking", "public")
    back = house.publish("cooking")
    house.run(daemon, DAY)
    assert set(house.state.replaced()) == {"tennis"}
    assert back[0] in house.ids()


@pytest.mark.parametrize("kind", ["banned", "private", "quarantined", "gated"])
def test_one_that_closes_while_it_is_read_is_replaced(house: House, kind: str) -> None:
    daemon = house.daemon(reddit_poll_interval=600.0)
    house.run(daemon, 5 * MINUTE)
    house.loopback.set_kind("cooking", kind)
    house.run(daemon, DAY + HOUR)
    entry = house.state.replaced()["cooking"]
    assert (entry.reason, entry.by) == (kind, "recipes")


def test_what_was_posted_while_it_was_closed_is_read_when_it_opens(house: House) -> None:
    """Joint listings say nothing of a subreddit that closes; what they say of the others must not count for it."""
    daemon = house.daemon(reddit_poll_interval=600.0)
    house.publish("cooking")
    house.run(daemon, 5 * MINUTE)
    house.loopback.set_kind("cooking", "private")
    house.run(daemon, HOUR)
    inside = []
    for _ in range(12):
        inside += house.publish("cooking", 20)
        house.publish("baking")
        house.run(daemon, HOUR)
    house.run(daemon, DAY)
    assert "cooking" in house.state.replaced()
    house.loopback.set_kind("cooking", "public")
    house.publish("cooking", 400)
    house.run(daemon, DAY)
    assert "cooking" not in house.state.replaced()
    assert set(inside) <= set(house.ids())


def test_a_missing_name_and_a_sleeping_one(house: House) -> None:
    house.loopback.add_subreddit("asleep")
    house.loopback.publish("asleep", title="long ago", created_utc=house.clock.time() - 60 * DAY)
    house.topics = Topics(active=1, topics={"food": ("nothere", "asleep", "cooking"), "rest": ("gone1", "gone2")})
    daemon = house.daemon()
    house.run(daemon, 5 * MINUTE)
    reasons = {name: (entry.reason, entry.by) for name, entry in house.state.replaced().items()}
    assert reasons == {
        "nothere": ("missing", "cooking"), "asleep": ("asleep", None),
        "gone1": ("missing", None), "gone2": ("missing", None),
    }  # fmt: skip
    assert daemon.status()["subreddits"] == 1
    assert {post["subreddit"] for post in house.queued()} == {"cooking"}


def test_all_names_are_checked_with_one_request(house: House) -> None:
    house.run(house.daemon(), MINUTE)
    asked = [request for request in house.loopback.ledger.requests if request.path.rstrip("/") == "/api/info"]
    assert len([request for request in asked if "sr_name" in request.query]) == 1


# The second look.


def result(post: Post, label: str = "x") -> Result:
    found = Classification(
        id=post.id, label=label, scores={label: 1.0}, model="m", revision=None, weights="w",
        fingerprint=fingerprint(post, "r"), classified_at=1.0, worker="w", device="cpu", queued_seconds=None,
    )  # fmt: skip
    return Result(post, found)


def test_the_second_look(house: House) -> None:
    """Scores are refreshed, edited texts sent again, and what is gone is purged."""
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    kept, edited, deleted, removed, vanished = house.publish("cooking", 5, body="before")
    house.run(daemon, 2 * MINUTE)
    store = ResultsStore(house.redis.client, house.settings)
    sent = [Post.parse(post) for post in house.queued()]
    store.write([result(post) for post in sent if post.id in (kept, edited, deleted, removed, vanished)])
    house.loopback.score(kept, 4321)
    house.loopback.edit(edited, "after")
    house.publish("cooking", 250)  # the listing's first pages show none of them now
    house.loopback.delete(deleted)
    house.loopback.remove(removed)
    house.loopback.vanish(vanished)
    house.run(daemon, LOOKS[0] + 30 * MINUTE)
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


def test_a_post_that_reddit_does_not_know_for_a_moment_is_kept(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (fullname,) = house.publish("cooking")
    house.run(daemon, LOOKS[0] - 5 * MINUTE)
    house.loopback.faults.always("empty_listing", where="/api/info")
    house.run(daemon, 8 * MINUTE)
    assert house.loopback.ledger.faults["empty_listing"] >= 1
    house.loopback.faults.clear()
    house.run(daemon, HOUR)
    assert not house.redis.client.exists(tombstone_key(fullname))
    assert house.redis.client.exists(sent_key(fullname))


def test_after_the_last_look_nothing_is_due(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=600.0)
    house.run(daemon, 2 * MINUTE)
    house.run(daemon, LOOKS[-1] + HOUR)
    assert house.state.due(float("inf"), 10) == []
    asked = [request for request in house.loopback.ledger.requests if "id=t3_" in request.query]
    assert len(asked) == len(LOOKS)  # four posts, a hundred a request


def test_a_post_that_was_purged_is_not_sent_again(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (fullname,) = house.publish("cooking", body="x")
    purge(house.redis.client, house.settings, [fullname])
    house.run(daemon, 2 * MINUTE)
    assert fullname not in house.ids()


# One pass.


def test_one_pass_asks_some_times_and_then_gives_up(house: House) -> None:
    house.settings = house.settings.model_copy(update={"reddit_url": "http://127.0.0.1:9"})
    reddit = house.reddit()
    with pytest.raises(Unreachable):
        patiently(lambda: reddit.page(["cooking"]), house.clock)
    assert len(house.clock.waits) == TRIES - 1
    assert sum(house.clock.waits) < MINUTE
    with (
        pytest.raises(UserError, match=r"http://127.0.0.1:9 gives no posts now: no connection"),
        told_plainly(house.settings),
    ):
        reddit.page(["cooking"])


def test_one_pass_reads_past_a_subreddit_that_fails(house: House) -> None:
    house.publish("cooking", 30)
    house.publish("baking", 30)
    house.loopback.faults.always("server_error_500", where="cooking")
    pusher = Pusher(make_app(house.settings), house.redis.client, house.settings, ClassifyOptions())
    once = Once(house.reddit(), pusher, house.state, house.clock)
    *_, last = once.read(["cooking", "baking"], Listing("new", 20))
    assert (last.read, last.sent) == (10, 10)
    assert last.problem == "r/cooking: Reddit answered 500"
    assert {post["subreddit"] for post in house.queued()} == {"baking"}


def test_one_pass_marks_nothing_as_known(house: House) -> None:
    """Else the daemon would take what lies between the hot posts for known."""
    house.publish("cooking", 5)
    pusher = Pusher(make_app(house.settings), house.redis.client, house.settings, ClassifyOptions())
    list(Once(house.reddit(), pusher, house.state, house.clock).read(["cooking"], Listing("hot", 100)))
    assert len(house.ids()) == 6
    assert house.state.track("cooking").known == {}
    assert len(house.state.due(float("inf"), 10)) == 6  # they are looked at again all the same


# The process.


class Killed(BaseException):
    pass


#: The order of commits, step by step: each a method or function.
STEPS: dict[str, tuple[Any, str]] = {
    "note gaps": (State, "begin"),
    "publish": (broker, "publish"),
    "mark as sent": (Pusher, "_remember"),
    "mark as known": (State, "commit"),
    "advance the watermark": (State, "advance"),
}


ONCE = ("note gaps", "at the third")


@short_listings
@pytest.mark.parametrize(
    ("step", "when"),
    # Gaps are noted once in this story.
    [(step, when) for step in STEPS for when in ("before", "after", "at the third") if (step, when) != ONCE],
)
def test_killed_at_any_step_nothing_is_lost_or_stored_twice(
    house: House, step: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    house.clock.wait(HOUR)
    expected = house.publish("cooking", 120) + house.publish("baking", 2)
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
        done = real(*arguments)
        if when == "after":
            raise Killed
        return done

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killing)
        with pytest.raises(Killed):
            house.run(house.daemon(), HOUR)
    house.run(house.daemon(), 10 * MINUTE)
    store = ResultsStore(house.redis.client, house.settings)
    for post in house.queued():
        store.write([result(Post.parse(post))])
    stored = [entry.post.id for entry in store.latest(10_000)]
    assert set(expected) <= set(stored)
    assert len(stored) == len(set(stored))
    assert not set(out_of_reach) & set(stored)
    (gap,) = house.state.gaps()
    published = house.loopback.ledger.published
    assert gap.since < published[out_of_reach[0]].created_utc
    assert gap.until == published[expected[-200]].created_utc + 1


@pytest.mark.parametrize("client", [("id", "wrong"), ("wrong", "secret")])
def test_credentials_that_reddit_refuses(house: House, client: tuple[str, str]) -> None:
    client_id, client_secret = map(SecretStr, client)
    daemon = house.daemon(reddit_client_id=client_id, reddit_client_secret=client_secret)
    with pytest.raises(CredentialsError, match="refuses the client id or its secret") as refused:
        house.run(daemon, MINUTE)
    assert "wrong" not in str(refused.value)


def test_only_reading_is_asked_for(house: House) -> None:
    house.run(house.daemon(), MINUTE)
    assert {request.path for request in house.loopback.ledger.requests if request.path.startswith("/api/v1")} == {
        "/api/v1/access_token"
    }
    assert {request.user_agent.split(" PRAW")[0] for request in house.loopback.ledger.requests} == {
        "linux:test:1 (by /u/nobody)"
    }


# What goes wrong rarely.


def test_looks_wait_for_a_full_queue_and_do_not_pile_up(house: House) -> None:
    daemon = house.daemon(queue_limit=3, queue_resume=1, posts_per_message=100)
    house.publish("cooking", 150)
    house.run(daemon, 5 * MINUTE)
    house.redis.client.rpush("feedmill", *["x"] * 10)
    house.clock.wait(LOOKS[0])
    begun = house.loopback.ledger.total
    house.run(daemon, 10 * MINUTE)
    asked = list(house.loopback.ledger.requests)[begun - house.loopback.ledger.total :]
    assert len([request for request in asked if "/api/info" in request.path]) == 1
    assert daemon.status()["held"] <= 100


@short_listings
def test_a_post_held_back_beside_a_busy_neighbour_is_found(house: House) -> None:
    """In the joint listing it lies deeper than the places that Reddit gives."""
    daemon = house.daemon(reddit_poll_interval=900.0)
    house.publish("cooking", 5)
    house.run(daemon, 20 * MINUTE)
    (late,) = house.publish("cooking", visible_from=house.clock.time() + 2 * HOUR)
    for _ in range(14):
        house.publish("baking", 50)
        house.run(daemon, HOUR)
    assert house.ids().count(late) == 1


def test_deep_walks_come_in_time_when_the_process_is_started_again_and_again(house: House) -> None:
    house.run(house.daemon(reddit_poll_interval=600.0), HOUR)
    (late,) = house.publish("cooking", visible_from=house.clock.time() + 2 * HOUR)
    house.clock.wait(MINUTE)
    house.publish("cooking", 250)
    for _ in range(3):
        house.run(house.daemon(reddit_poll_interval=600.0), 3 * HOUR)
    assert house.ids().count(late) == 1


@short_listings
def test_while_it_was_closed_between_two_checks_nothing_is_lost(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=600.0)
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


def test_a_reddit_that_knows_no_post_at_all_purges_none(house: House) -> None:
    daemon = house.daemon()
    fullnames = house.publish("cooking", 50)
    house.run(daemon, LOOKS[0] - MINUTE)
    house.loopback.faults.always("empty_listing", where="/api/info")
    house.run(daemon, 40 * MINUTE)
    assert house.redis.client.exists(*map(tombstone_key, fullnames)) == 0
    house.loopback.faults.clear()
    house.run(daemon, 30 * MINUTE)
    assert daemon.status()["looked"] >= 50


@pytest.mark.parametrize(
    "broken",
    [
        {"created_utc": None}, {"created_utc": 1e300}, {"name": ["t3_x"]}, {"name": "t3_\ud800"}, {"selftext": 5},
        {"name": None, "id": None}, {"subreddit": None},
    ],
)  # fmt: skip
def test_a_broken_post_costs_no_other(house: House, broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    others = house.publish("cooking", 3)
    (odd,) = house.publish("cooking")
    real = Reddit._item
    monkeypatch.setattr(
        Reddit, "_item", lambda self, said: real(self, {**said, **broken} if said["name"] == odd else said)
    )
    house.run(daemon, 5 * MINUTE)
    assert set(others) <= set(house.ids())
    assert daemon.status()["failing"] == []
    later = house.publish("baking")
    house.run(daemon, 2 * LOOKS[0])
    assert later[0] in house.ids()
    assert daemon.status()["looked"] >= 3


def test_a_post_is_not_refused_for_its_score_and_one_without_text_is_counted(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.publish("cooking", title="far", url="http://x/" + "y" * 5000)
    house.loopback.publish("cooking", title=" ")
    house.run(daemon, 5 * MINUTE)
    assert "far" in [post["title"] for post in house.queued()]
    assert daemon.status()["refused"] == 1


def test_a_post_of_the_future_does_not_stand_for_what_comes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    (odd,) = house.publish("cooking")
    real = Reddit._item
    future = house.clock.time() + 30 * DAY
    monkeypatch.setattr(
        Reddit, "_item", lambda self, said: real(self, {**said, "created_utc": future} if said["name"] == odd else said)
    )
    house.run(daemon, 5 * MINUTE)
    later = house.publish("cooking", 250)
    house.run(daemon, 5 * MINUTE)
    assert set(later) <= set(house.ids())
    assert (house.state.track("cooking").watermark or 0) <= house.clock.time()


@pytest.mark.parametrize(
    "headers", [{"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1e9"}, {"retry-after": "1e9"}]
)
def test_reddit_cannot_have_us_wait_for_ever(house: House, headers: dict[str, str]) -> None:
    budget = Budget(house.clock, 60)
    budget.learn(headers)
    if "retry-after" in headers:
        budget.pause(1e9)
    assert 0 < budget.pending() <= HOUR


def test_retry_after_nothing_is_no_invitation(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.always("too_many", seconds=0)
    begun = house.loopback.ledger.total
    house.run(daemon, 10 * MINUTE)
    assert house.loopback.ledger.total - begun < 15


def test_a_redis_that_is_away_is_told_once(house: House, caplog: pytest.LogCaptureFixture) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.redis.client.config_set("maxmemory", 1)
    try:
        house.publish("cooking")
        house.run(daemon, HOUR / 2)
    finally:
        house.redis.client.config_set("maxmemory", 0)
    assert len([record for record in caplog.records if "does not answer" in record.message]) == 1
    house.run(daemon, 5 * MINUTE)
    assert daemon.hindrance == ""


def test_a_topic_with_none_left_is_tried_again_soon(house: House) -> None:
    for name in TOPICS["food"]:
        house.loopback.set_kind(name, "private")
    daemon = house.daemon()
    house.run(daemon, 5 * MINUTE)
    for name in TOPICS["food"]:
        house.loopback.set_kind(name, "public")
    house.run(daemon, 30 * MINUTE)
    assert "cooking" in {post["subreddit"] for post in house.queued()}


def test_the_last_word_is_fresh_while_reddit_is_waited_for(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.always("too_many", seconds=1800)
    house.run(daemon, 20 * MINUTE)
    told = house.state.told()
    assert told
    assert house.clock.time() - told["at"] < MINUTE


def test_an_answer_that_drips_is_cut_off(house: House) -> None:
    """A byte now and then keeps every single read from timing out."""
    asked: list[str] = []

    class Dripping(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    Event().wait(0.05)

        def log_message(self, *_: object) -> None:
            """Not to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    server.daemon_threads = True
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    house.settings = house.settings.model_copy(
        update={"reddit_url": f"http://127.0.0.1:{server.server_port}", "reddit_timeout": 0.3}
    )
    try:
        with pytest.raises(Fault, match="does not end"):
            house.reddit().page(["cooking"])
    finally:
        server.shutdown()
        server.server_close()
    assert len(asked) == 1


def test_a_post_that_appears_minutes_late_is_found_at_once(house: House) -> None:
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


@short_listings
def test_of_what_came_while_it_was_closed_the_gap_begins_when_it_closed(house: House) -> None:
    daemon = house.daemon(reddit_poll_interval=600.0)
    house.publish("cooking")
    house.run(daemon, HOUR)
    closed = house.clock.time()
    house.loopback.set_kind("cooking", "private")
    for _ in range(10):
        house.run(daemon, HOUR)
        house.publish("cooking", 28)
        house.publish("baking")
    assert "cooking" in house.state.replaced()
    house.loopback.set_kind("cooking", "public")
    house.run(daemon, DAY)
    (gap,) = house.state.gaps()
    assert gap.subreddit == "cooking"
    assert gap.since <= closed
