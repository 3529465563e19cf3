"""`ingest mastodon` against a server on loopback, with a real Redis and a simulated clock."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from feedmill.producers import mastodon
from feedmill.producers.live import rechecks
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.state import Gaps
from feedmill.producers.mastodon import (
    POLL_INTERVAL_S,
    SWEEP_INTERVAL_S,
    MastodonSource,
)
from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, make_app
from feedmill.shared.keys import TOMBSTONE
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from tests.fakes.clock import SimulatedClock, run
from tests.fakes.mastodon import Mastodon
from tests.support import RedisServer, queued

Start = Callable[..., LiveDaemon]


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(1_800_000_000.0)


@pytest.fixture
def server(clock: SimulatedClock) -> Iterator[Mastodon]:
    with Mastodon(clock.time) as server:
        yield server


@pytest.fixture
def start(
    redis: RedisServer, server: Mastodon, clock: SimulatedClock
) -> Iterator[Start]:
    """Make daemons, each of which stands for a restarted process."""
    daemons: list[LiveDaemon] = []

    def start(tags: list[str] | None = None, **chosen: Any) -> LiveDaemon:
        values = {"redis_url": redis.url, "mastodon_url": server.url, **chosen}
        settings = Settings.model_validate(values)
        client = connect(settings)
        pusher = Pusher(
            make_app(settings), client, settings, ClassifyOptions(), wait=clock.wait
        )
        source = MastodonSource(settings, clock, client, tags or ())
        daemon = LiveDaemon(source, client, pusher, settings, clock)
        daemons.append(daemon)
        return daemon

    yield start
    for daemon in daemons:
        daemon.close()


def bodies(redis: RedisServer) -> list[str]:
    return [post["body"] for post in queued(redis)]


def test_reads_on_after_a_restart_without_gaps(
    redis: RedisServer, server: Mastodon, start: Start, clock: SimulatedClock
) -> None:
    server.post("before the first start")
    clock.wait(5)
    daemon = start()
    run(daemon, clock, 20)
    server.post("one &amp; <b>only</b>", spoiler_text="A warning", sensitive=True)
    run(daemon, clock, 20)
    daemon.close()
    expected = []
    for number in range(150):  # several pages
        clock.wait(60)
        server.post(f"away {number}")
        expected.append(f"away {number}")
    run(start(), clock, 60)
    (first, *others) = queued(redis)
    assert first["id"].startswith(f"mastodon:127.0.0.1:{server.server_port}:")
    assert (first["title"], first["body"]) == ("A warning", "one & only")
    assert (first["nsfw"], first["score"]) == (True, 0)
    assert [post["body"] for post in others] == expected
    assert Gaps(redis.client).all() == []


def test_posts_that_arrive_late_are_sent_once(
    redis: RedisServer, server: Mastodon, start: Start, clock: SimulatedClock
) -> None:
    server.post("before")
    daemon = start()
    run(daemon, clock, 900)
    server.post("in time")
    run(daemon, clock, 60)
    server.post("late", late_s=500)
    run(daemon, clock, 2 * SWEEP_INTERVAL_S)
    assert bodies(redis) == ["in time", "late"]
    assert daemon.status()["steps_back"] == 0


def test_tags_are_read_without_losing_one_behind_another(
    redis: RedisServer, server: Mastodon, start: Start, clock: SimulatedClock
) -> None:
    def post(text: str, *tags: str) -> None:
        clock.wait(1)
        server.post(text, tags=[{"name": tag} for tag in tags])

    post("before", "cats", "été")
    daemon = start(tags=["cats", "été"])
    run(daemon, clock, 20)
    for number in range(3):
        post(f"cat {number}", "cats")
        post(f"summer {number}", "été")
        post(f"both {number}", "cats", "été")
        post(f"neither {number}")
    run(daemon, clock, 30)
    names = ("cat", "summer", "both")
    expected = [f"{name} {number}" for name in names for number in range(3)]
    assert sorted(bodies(redis)) == sorted(expected)


def test_a_quiet_tag_does_not_hold_the_position(
    redis: RedisServer, server: Mastodon, start: Start, clock: SimulatedClock
) -> None:
    """After a fault, reading goes back by minutes, however long ago the quiet tag had a post."""
    server.post("before")
    daemon = start(tags=["quiet", "busy", "silent"])
    run(daemon, clock, 20)
    for number in range(20):
        clock.wait(600)
        server.post(f"busy {number}", tags=[{"name": "busy"}])
        run(daemon, clock, 30)
    assert daemon.status()["delay"] < 30 + 2 * POLL_INTERVAL_S
    daemon.close()
    late = "late in the quiet tag"
    server.post(late, late_s=500, tags=[{"name": "quiet"}])
    run(start(tags=["quiet", "busy", "silent"]), clock, 30)
    expected = [f"busy {number}" for number in range(20)]
    assert bodies(redis) == [*expected, late]


def test_edited_posts_are_sent_again_and_deleted_ones_purged(
    redis: RedisServer,
    server: Mastodon,
    start: Start,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mastodon, "POLL_INTERVAL_S", 600.0)
    monkeypatch.setattr(rechecks, "WAITING_RETRY_S", 1_800.0)
    monkeypatch.setattr(rechecks, "MISSING_PATIENCE_S", 3_600.0)
    server.post("before")
    daemon = start()
    run(daemon, clock, 20)
    edited = server.post("first version")
    deleted = server.post("mistake")
    run(daemon, clock, 700)
    (kept_id, deleted_id) = [post["id"] for post in queued(redis)]
    server.statuses[edited] |= {
        "content": "<p>second version</p>",
        "edited_at": "2027-01-15T08:10:00Z",
    }
    del server.statuses[deleted]
    run(daemon, clock, 4 * 3_600)
    assert "second version" in [post.get("body") for post in queued(redis)]
    assert redis.client.exists(TOMBSTONE + deleted_id)
    assert not redis.client.exists(TOMBSTONE + kept_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"visibility": "private"},
        {"reblog": {"id": "1"}},
        {"account": {"noindex": True}},
        {"content": ""},
    ],
)
def test_posts_that_are_not_for_others_are_left_out(
    fields: dict[str, Any],
    redis: RedisServer,
    server: Mastodon,
    start: Start,
    clock: SimulatedClock,
) -> None:
    server.post("before")
    daemon = start()
    run(daemon, clock, 20)
    server.post("not this one", **fields)
    server.post("a good one")
    run(daemon, clock, 20)
    assert bodies(redis) == ["a good one"]


def test_token_is_sent_and_its_absence_explained(
    redis: RedisServer, server: Mastodon, start: Start, clock: SimulatedClock
) -> None:
    server.token = "secret"
    server.post("before")
    daemon = start()
    run(daemon, clock, 5)
    assert "FEEDMILL_MASTODON_TOKEN" in daemon.status()["hindrance"]
    daemon = start(mastodon_token="secret")
    run(daemon, clock, 20)
    server.post("one")
    run(daemon, clock, 20)
    assert bodies(redis) == ["one"]


@pytest.mark.parametrize(
    "odd",
    [
        {"id": "AbCd"},
        {"id": "9" * 400},
        {"id": str(2**63 - 1)},
        {"created_at": None},
        {"account": None},
        {"content": None},
    ],
)
def test_odd_status_does_not_stop_the_source(
    odd: dict[str, Any],
    redis: RedisServer,
    server: Mastodon,
    start: Start,
    clock: SimulatedClock,
) -> None:
    server.post("before")
    daemon = start()
    run(daemon, clock, 20)
    number = server.post("odd", **odd)
    run(daemon, clock, 60)
    if "id" in odd:
        # The server stops sending it.
        del server.statuses[number]
    server.post("a good one")
    run(daemon, clock, 1_200)
    assert "a good one" in bodies(redis)


def test_odd_status_in_a_look_up_does_not_stop_the_source(
    redis: RedisServer,
    server: Mastodon,
    start: Start,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mastodon, "POLL_INTERVAL_S", 600.0)
    server.post("before")
    daemon = start()
    run(daemon, clock, 20)
    number = server.post("one")
    run(daemon, clock, 700)
    server.statuses[number]["account"] = None
    run(daemon, clock, 4_000)
    server.post("two")
    run(daemon, clock, 700)
    assert bodies(redis) == ["one", "two"]
    assert "unexpected" not in daemon.status()["faults"]


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"<html>", b"[[", b'"x"'])
def test_other_answers_than_posts_are_failures(
    body: bytes,
    redis: RedisServer,
    server: Mastodon,
    start: Start,
    clock: SimulatedClock,
) -> None:
    server.post("before")
    daemon = start()
    run(daemon, clock, 20)
    server.body = body
    run(daemon, clock, 20)
    assert daemon.status()["hindrance"]
    server.body = None
    server.faults = [500, 429, 404]
    server.post("one")
    run(daemon, clock, 1_200)
    assert bodies(redis) == ["one"]
