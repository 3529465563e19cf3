"""The archive as a source: reading upwards, catching up, faults, rechecks, and filling gaps."""

from collections.abc import Iterator
from typing import Any

import pytest

from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import RequestBudget, RequestFailed
from feedmill.producers.live.state import Gap
from feedmill.producers.push import Pusher
from feedmill.producers.reddit.arctic_shift import BEHIND, CROWDED, ArcticShiftClient
from feedmill.producers.reddit.source import ArchiveSource
from feedmill.shared.broker import connect, make_app
from feedmill.shared.keys import TOMBSTONE
from feedmill.shared.messages import ClassifyOptions
from feedmill.testing.fake_arctic_shift import ArcticShift
from feedmill.testing.fake_reddit import Reddit as LoopbackReddit
from tests.fakes import constants
from tests.fakes.clock import SimulatedClock
from tests.integration.reddit.house import DAY, HOUR, MINUTE, House, short_listings
from tests.support import long_cases

#: Both readings of the archive's bounds, because its documentation does not tell.
both_bounds = pytest.mark.parametrize(
    "archive", [False, True], ids=["exclusive", "inclusive"], indirect=True
)


@pytest.fixture
def archive(
    request: pytest.FixtureRequest, loopback: LoopbackReddit
) -> Iterator[ArcticShift]:
    with ArcticShift(loopback, inclusive=getattr(request, "param", True)) as archive:
        yield archive


class Archived:
    """Daemons that read the archive."""

    def __init__(self, house: House, archive: ArcticShift) -> None:
        self.house = house
        self.settings = house.settings
        house.read_from(constants.arctic_shift(archive.url))

    def client(self) -> ArcticShiftClient:
        budget = RequestBudget(self.house.clock, 600)
        client = ArcticShiftClient(self.settings, budget, self.house.topics.topic_of)
        self.house._open.append(client)
        return client

    def daemon(self, depth: int = 1000, **settings: Any) -> LiveDaemon:
        chosen = self.settings.model_copy(update=settings)
        redis = connect(chosen)
        pusher = Pusher(
            make_app(chosen),
            redis,
            chosen,
            ClassifyOptions(),
            wait=self.house.clock.wait,
        )
        source = ArchiveSource(
            self.client(), redis, self.house.topics, chosen, self.house.clock, depth
        )
        return LiveDaemon(source, redis, pusher, chosen, self.house.clock)


@pytest.fixture
def archived(house: House, archive: ArcticShift) -> Archived:
    return Archived(house, archive)


def fresh(house: House, name: str, count: int, seconds: float = 1.0) -> list[str]:
    """Publish posts, each some seconds after the one before."""
    found = []
    for _ in range(count):
        house.clock.wait(seconds)
        found += house.publish(name)
    return found


@pytest.mark.parametrize("archive", [True, *long_cases(False)], indirect=True)
def test_catches_up_without_gaps(house: House, archived: Archived) -> None:
    house.run(archived.daemon(), 2 * MINUTE)
    house.clock.wait(HOUR)
    now = house.clock.time()
    posts = [
        house.publish("cooking", 1, created_utc=now + number // 3)[0]
        for number in range(1300)
    ]
    house.clock.wait(HOUR)
    house.run(archived.daemon(), 10 * MINUTE)
    assert set(posts) <= set(house.ids())
    assert len(house.ids()) == len(set(house.ids()))
    assert house.gaps.all() == []


def test_first_read_takes_the_newest_posts(house: House, archived: Archived) -> None:
    posts = fresh(house, "cooking", 300)
    house.run(archived.daemon(depth=200), 5 * MINUTE)
    sent = [post for post in house.ids() if post in posts]
    assert sent == posts[-100:]  # the share of one of two subreddits


@both_bounds
def test_a_second_with_more_posts_than_a_page_is_a_gap(
    house: House, archived: Archived
) -> None:
    house.run(archived.daemon(), 2 * MINUTE)
    house.clock.wait(HOUR)
    at = float(int(house.clock.time()))
    house.publish("cooking", 150, created_utc=at)
    later = fresh(house, "cooking", 2)
    house.run(archived.daemon(), 10 * MINUTE)
    assert set(later) <= set(house.ids())
    assert [(gap.subreddit, gap.since, gap.until) for gap in house.gaps.all()] == [
        ("cooking", at, at + 1)
    ]


@pytest.mark.parametrize(
    "fault", ["too_many", "truncated_json", *long_cases("server_error_502", "overload")]
)
def test_faults_lose_and_repeat_nothing(
    house: House, archived: Archived, archive: ArcticShift, fault: str
) -> None:
    daemon = archived.daemon()
    house.run(daemon, 2 * MINUTE)
    if fault == "overload":
        archive.overload = 0.3
    else:
        archive.faults.random(0.3, [fault])
    posts = fresh(house, "cooking", 120)
    house.run(daemon, 5 * MINUTE)
    archive.faults.clear()
    archive.overload = 0.0
    house.run(daemon, 20 * MINUTE)
    assert set(posts) <= set(house.ids())
    assert len(house.ids()) == len(set(house.ids()))


def test_finds_posts_that_are_archived_late(
    house: House, loopback: LoopbackReddit
) -> None:
    with ArcticShift(loopback, lag=20.0, late=0.3, latest=4 * HOUR) as archive:
        daemon = Archived(house, archive).daemon(reddit_poll_interval=600.0)
        house.run(daemon, 2 * MINUTE)
        posts = fresh(house, "cooking", 60, 60.0)
        house.run(daemon, 12 * HOUR)
        sent = house.ids()
        assert [sent.count(post) for post in posts] == [1] * 60


def test_rechecks_scores_and_deletions_after_the_second_read(
    house: House, archived: Archived, archive: ArcticShift
) -> None:
    daemon = archived.daemon(reddit_poll_interval=6 * HOUR)
    house.run(daemon, 2 * MINUTE)
    kept, deleted, removed, lost = fresh(house, "cooking", 4)
    house.run(daemon, 12 * HOUR)
    house.loopback.delete(deleted)
    house.loopback.remove(removed)
    archive.missing.add(lost)
    house.run(daemon, 2 * DAY)
    assert house.redis.client.exists(TOMBSTONE + deleted)
    house.run(daemon, 2 * DAY)
    assert (
        house.redis.client.exists(*(TOMBSTONE + post_id for post_id in (removed, lost)))
        == 2
    )
    assert not house.redis.client.exists(TOMBSTONE + kept)


# Gaps.


@short_listings
def test_the_daemon_fills_its_gaps(house: House, archived: Archived) -> None:
    def daemon() -> LiveDaemon:
        return house.daemon(archive=archived.client(), reddit_fill_gaps="arctic-shift")

    house.run(daemon(), 2 * MINUTE)
    house.clock.wait(HOUR)
    house.publish("cooking", 1, promoted=True)  # makes a full page one post shorter
    posts = fresh(house, "cooking", 500)
    running = daemon()
    house.run(running, 30 * MINUTE)
    sent = house.ids()
    assert [sent.count(post) for post in posts] == [1] * 500
    (gap,) = house.gaps.all()
    assert gap.filled
    assert gap.found >= 300
    status = running.status()
    assert (status["gaps"], status["filled"], status["gaps_recorded"]) == (1, 1, 0)


@short_listings
def test_an_archive_that_is_down_or_behind_keeps_the_gap(
    house: House, archived: Archived, archive: ArcticShift
) -> None:
    house.run(house.daemon(), 2 * MINUTE)
    house.clock.wait(HOUR)
    posts = fresh(house, "cooking", 300)
    archive.lag = HOUR
    archive.faults.next("server_error_503", times=2)
    running = house.daemon(archive=archived.client(), reddit_poll_interval=10 * MINUTE)
    house.run(running, 40 * MINUTE)
    assert [gap.problem for gap in house.gaps.open()] == [BEHIND]
    assert running.status()["gaps_recorded"] == 1
    assert running.hindrance == ""  # Reddit itself answers
    house.run(running, 5 * HOUR)
    assert set(posts) <= set(house.ids())
    assert house.gaps.open() == []


def test_a_deleted_post_that_is_still_archived_is_not_sent_to_fill_a_gap(
    house: House, archived: Archived, clock: SimulatedClock
) -> None:
    running = house.daemon(archive=archived.client())
    house.run(running, 2 * MINUTE)
    deleted, kept = fresh(house, "cooking", 2)
    house.run(running, 2 * MINUTE)
    house.loopback.delete(deleted)
    running = house.daemon(archive=archived.client(), reddit_poll_interval=6 * HOUR)
    house.run(running, 2 * HOUR)
    assert house.redis.client.exists(TOMBSTONE + deleted)
    house.gaps.record(
        Gap("reddit", "cooking", clock.time() - DAY, clock.time() - HOUR, clock.time())
    )
    house.run(running, 2 * DAY)
    assert house.gaps.open() == []
    assert [post["id"] for post in house.queued() if "title" in post].count(kept) == 1
    assert deleted not in [post["id"] for post in house.queued() if "title" in post]


@both_bounds
def test_a_crowded_second_keeps_the_gap_open(house: House, archived: Archived) -> None:
    running = house.daemon(archive=archived.client())
    house.run(running, 2 * MINUTE)
    at = float(int(house.clock.time()))
    house.publish("chess", 150, created_utc=at)
    fresh(house, "chess", 2)
    house.gaps.record(Gap("reddit", "chess", at - HOUR, at + 2, at))
    house.run(running, 10 * MINUTE)
    (gap,) = house.gaps.open()
    assert gap.problem.startswith(CROWDED)


@both_bounds
def test_a_span_from_a_fraction_of_a_second_is_complete(
    house: House, archived: Archived, archive: ArcticShift
) -> None:
    client = archived.client()
    at = float(int(house.clock.time()))
    crowd = house.publish("chess", 150, created_utc=at)
    (later,) = house.publish("chess", 1, created_utc=at + 1)
    house.clock.wait(5)
    archive.faults.next("server_error_503")
    with pytest.raises(RequestFailed):
        client.since("chess", at)
    span = client.since("chess", at + 0.5)
    assert len(span.items) == 100, "although less is asked for after a failure"
    assert {item.fullname for item in span.items} <= set(crowd)
    assert span.crowded == at
    assert [item.fullname for item in client.since("chess", span.reached).items] == [
        later
    ]
