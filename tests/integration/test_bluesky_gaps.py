"""Bluesky's gaps, filled from a loopback archive of Jetstream, which may be hostile."""

import json
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from feedmill.producers import bluesky_gaps
from feedmill.producers.bluesky import (
    COLLECTION,
    KEY_CHARACTERS,
    KEY_LENGTH,
    BlueskySource,
)
from feedmill.producers.bluesky_gaps import BEHIND, ENDLESS, MISSING, TOO_YOUNG
from feedmill.producers.jetstream import MAX_EVENT_BYTES
from feedmill.producers.jetstream_archive import decode_block
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import Clock
from feedmill.producers.live.state import Gap, Gaps, LiveState, Position
from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, make_app
from feedmill.shared.keys import LIVE_AUTHORS
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.purge import tombstones
from feedmill.shared.settings import Settings
from tests.fakes import jetstream_archive
from tests.fakes.jetstream import Jetstream
from tests.fakes.jetstream_archive import (
    JetstreamArchive,
    compress,
    encode_block,
    encode_cbor,
)
from tests.integration.test_bluesky import ids, jetstream, make, run
from tests.support import RedisServer, queued

__all__ = ["jetstream", "make"]  # fixtures
AUTHORS = LIVE_AUTHORS + "bluesky"
pytestmark = pytest.mark.usefixtures("make")  # short batches and pauses


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Iterator[JetstreamArchive]:
    monkeypatch.setattr(bluesky_gaps, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(bluesky_gaps, "MARGIN_S", 0)
    monkeypatch.setattr(bluesky_gaps, "EVENTS_PER_BLOCK", 4)
    monkeypatch.setattr(
        "feedmill.producers.jetstream_archive.REQUESTS_PER_MINUTE", 10**6
    )
    with JetstreamArchive() as archive:
        yield archive


class House:
    """Posts before, in and after a gap, of which the live stream has only the last ones."""

    def __init__(
        self, redis: RedisServer, jetstream: Jetstream, archive: JetstreamArchive
    ) -> None:
        self.redis, self.jetstream, self.archive = redis, jetstream, archive
        self.before = [jetstream.post(f"before {number}") for number in range(9)]
        first = self._last_time()
        self.lost = [jetstream.post(f"lost {number}") for number in range(30)]
        self.first_us = first
        # The daemon read up to here; the server has forgotten the rest.
        LiveState(redis.client, "bluesky").advance(Position(first, first / 1e6))

    def _last_time(self) -> int:
        time_us: int = json.loads(self.jetstream.texts()[-1])["time_us"]
        return time_us

    def end_gap(self) -> None:
        """Let the server forget the gap, and archive everything."""
        self.jetstream.account("did:plc:anyone", None)
        self.archive.seal(self.jetstream.texts())
        self.jetstream.forget(1)
        self.tail()

    def tail(self) -> None:
        """Archive some more events, so that the archive has reached the end of the gap."""
        self.jetstream.account("did:plc:anyone", None)
        self.archive.seal(self.jetstream.texts()[-1:])


@pytest.fixture
def house(redis: RedisServer, jetstream: Jetstream, archive: JetstreamArchive) -> House:
    return House(redis, jetstream, archive)


def start(redis: RedisServer, house: House, **chosen: Any) -> LiveDaemon:
    settings = Settings.model_validate(
        {
            "redis_url": redis.url,
            "bluesky_url": house.jetstream.url,
            "bluesky_archive_url": house.archive.url,
            **chosen,
        }
    )
    clock = Clock()
    client = connect(settings)
    pusher = Pusher(
        make_app(settings), client, settings, ClassifyOptions(), wait=clock.wait
    )
    source = BlueskySource(settings, clock, client)
    return LiveDaemon(source, client, pusher, settings, clock)


def the_gap(redis: RedisServer) -> Gap:
    """Return the gap; before the daemon has noticed it, one without a problem."""
    gaps = Gaps(redis.client).all()
    if not gaps:
        return Gap("bluesky", "", since=0.0, until=0.0, noted=0.0)
    (gap,) = gaps
    return gap


def filled(daemon: LiveDaemon) -> bool:
    return bool(daemon.status()["filled"])


def test_a_gap_is_filled_from_the_archive(redis: RedisServer, house: House) -> None:
    house.end_gap()
    daemon = start(redis, house)
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert sorted(ids(redis)) == sorted([house.before[-1], *house.lost])
    gap = the_gap(redis)
    assert gap.filled
    assert gap.found == 31
    assert (gap.problem, daemon.gaps) == ("", 1)
    bodies = {post["id"]: post["body"] for post in queued(redis)}
    assert bodies[house.lost[0]] == "lost 0"


def test_several_gaps_are_filled_one_after_another(
    redis: RedisServer, house: House
) -> None:
    house.end_gap()
    times = [json.loads(text)["time_us"] for text in texts_of(house.archive)]
    for first, last in ((9, 18), (19, 28)):
        since, until = times[first] / 1e6, times[last] / 1e6
        gap = Gap("bluesky", "", since, until, noted=time.time())
        Gaps(redis.client).record(gap)
    LiveState(redis.client, "bluesky").advance(Position(times[-1], times[-1] / 1e6))
    daemon = start(redis, house)
    run(daemon, lambda: daemon.status()["filled"] == 2, "both gaps are filled")
    daemon.close()
    assert sorted(ids(redis)) == sorted(house.lost[:20])
    assert [gap.found for gap in Gaps(redis.client).all()] == [10, 10]


def test_a_gap_that_cannot_be_filled_does_not_hold_up_others(
    redis: RedisServer, house: House
) -> None:
    """All gaps have a problem; the first one keeps it."""
    house.end_gap()
    times = [json.loads(text)["time_us"] / 1e6 for text in texts_of(house.archive)]
    periods = ((times[0] - 600, times[0] - 300), (times[9], times[18]))
    for since, until in periods:
        gap = Gap("bluesky", "", since, until, noted=time.time(), problem=BEHIND)
        Gaps(redis.client).record(gap)
    LiveState(redis.client, "bluesky").advance(
        Position(round(times[-1] * 1e6), times[-1])
    )
    daemon = start(redis, house)
    run(daemon, lambda: filled(daemon), "the second gap is filled")
    run(
        daemon,
        lambda: Gaps(redis.client).all()[0].problem == TOO_YOUNG,
        "the first gap cannot be filled",
    )
    daemon.close()
    assert sorted(ids(redis)) == sorted(house.lost[:10])


def texts_of(archive: JetstreamArchive) -> list[str]:
    """Return the archived events as the live stream sent them."""
    return [
        json.dumps(event)
        for segment in archive.segments
        for block in segment
        for event in block
    ]


def test_the_first_block_is_searched(redis: RedisServer, house: House) -> None:
    house.archive.blocks_per_segment = 64
    house.end_gap()
    daemon = start(redis, house)
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    asked = [int(path.rpartition("=")[2]) for path in house.archive.asked[1:]]
    assert 0 not in asked
    assert {*house.lost} <= {*ids(redis)}


def test_deletions_in_and_after_the_gap_are_applied(
    redis: RedisServer, house: House
) -> None:
    house.jetstream.delete(house.lost[3])
    house.jetstream.account("did:plc:mallory", "deleted")
    house.end_gap()
    house.archive.answers = [(503, b"", {})] * 3
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem, "the archive does not answer yet")
    house.archive.answers = [(503, b"", {})] * 10_000
    house.jetstream.delete(house.lost[7])
    house.jetstream.delete("at://did:plc:alice/app.bsky.feed.post/3l3qo2vutsw2b")
    run(
        daemon,
        lambda: tombstones(redis.client, [house.lost[7]]),
        "a deleted post of the gap is blocked before it is read",
    )
    house.archive.answers.clear()
    run(daemon, lambda: filled(daemon), "the gap is filled")
    run(
        daemon,
        lambda: house.lost[3] not in ids(redis),
        "the post that was deleted in the gap is purged",
    )
    daemon.close()
    expected = {house.before[-1], *house.lost} - {house.lost[3], house.lost[7]}
    assert set(ids(redis)) == expected
    old = "at://did:plc:alice/app.bsky.feed.post/3l3qo2vutsw2b"
    assert not tombstones(redis.client, [old]), "its key says that it is older"


def test_accounts_that_were_deleted_since_stay_deleted(
    redis: RedisServer, house: House
) -> None:
    gone = [house.jetstream.post(f"gone {n}", "did:plc:mallory") for n in range(3)]
    house.end_gap()
    house.archive.answers = [(503, b"", {})] * 10_000
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem, "the archive does not answer yet")
    read = daemon.read
    house.jetstream.account("did:plc:mallory", "deleted")
    run(daemon, lambda: daemon.read > read, "the deletion is read")
    house.archive.answers.clear()
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert not {*gone} & {*ids(redis)}
    assert {*house.lost} <= {*ids(redis)}


def test_an_edit_after_the_gap_is_newer_than_one_in_the_gap(
    redis: RedisServer, house: House
) -> None:
    edited_twice, edited_once = house.lost[5:7]
    house.jetstream.edit(edited_twice, "edited in the gap")
    house.jetstream.edit(edited_once, "edited in the gap")
    house.end_gap()
    house.archive.answers = [(503, b"", {})] * 10_000
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem, "the archive does not answer yet")
    house.jetstream.edit(edited_twice, "edited after the gap")
    run(daemon, lambda: edited_twice in ids(redis), "the live edit is sent")
    house.archive.answers.clear()
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    bodies: dict[str, list[str]] = {edited_twice: [], edited_once: []}
    for post in queued(redis):
        if post["id"] in bodies:
            bodies[post["id"]].append(post["body"])
    assert bodies[edited_twice] == ["edited after the gap"]
    assert bodies[edited_once][-1] == "edited in the gap"


def key_at(seconds: float) -> str:
    """Return the key of a record that was made then."""
    number = round(seconds * 1e6) << 10
    key = ""
    for _ in range(KEY_LENGTH):
        number, digit = divmod(number, len(KEY_CHARACTERS))
        key = KEY_CHARACTERS[digit] + key
    return key


def test_posts_since_an_account_came_back_stay(
    redis: RedisServer, house: House
) -> None:
    """The account was deleted in a gap two days ago."""
    did = "did:plc:mallory"
    then = time.time() - 2 * 86_400
    events = [
        {"time_us": round((then + second) * 1e6), "did": did, "kind": "identity"}
        for second in (-9, 0, 9)
    ]
    events[1] |= {"kind": "account", "account": {"active": False, "status": "deleted"}}
    house.archive.seal([json.dumps(event) for event in events])
    old, new = (key_at(then - 60), key_at(time.time() - 60))
    for key in (old, new):
        house.jetstream.raw(
            {
                "did": did,
                "kind": "commit",
                "commit": {
                    "operation": "create",
                    "collection": COLLECTION,
                    "rkey": key,
                    "record": {"text": "by Mallory"},
                },
            }
        )
    old_id, new_id = (f"at://{did}/{COLLECTION}/{key}" for key in (old, new))
    daemon = start(redis, house)
    run(daemon, lambda: {old_id, new_id} <= {*ids(redis)}, "both posts are sent")
    gap = Gap("bluesky", "", then - 5, then + 5, noted=time.time())
    Gaps(redis.client).record(gap)
    run(daemon, lambda: filled(daemon), "the gap is filled")
    run(daemon, lambda: old_id not in ids(redis), "the old post is purged")
    run(daemon, lambda: not redis.client.exists(AUTHORS), "the search is over")
    daemon.close()
    assert new_id in ids(redis)


def test_a_killed_daemon_continues_where_it_stopped(
    redis: RedisServer, house: House
) -> None:
    house.end_gap()
    first = start(redis, house)
    run(first, lambda: the_gap(redis).reached, "a part is filled")
    first.close()
    second = start(redis, house)
    run(second, lambda: filled(second), "the gap is filled")
    second.close()
    sent = ids(redis)
    assert sorted(sent) == sorted([house.before[-1], *house.lost])
    assert the_gap(redis).found == 31


def test_a_gap_continues_in_a_later_segment(redis: RedisServer, house: House) -> None:
    house.end_gap()
    daemon = start(redis, house)
    third = house.archive.segments[2][0][0]["time_us"] / 1e6
    run(daemon, lambda: the_gap(redis).reached >= third, "two segments are read")
    house.archive.answers = [(500, b"", {})]
    run(daemon, lambda: the_gap(redis).problem, "a request fails")
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert sorted(ids(redis)) == sorted([house.before[-1], *house.lost])


def test_only_chosen_accounts_are_read_from_the_archive(
    redis: RedisServer, house: House
) -> None:
    bob = house.jetstream.post("by Bob", "did:plc:bob")
    house.end_gap()
    until = json.loads(house.jetstream.texts()[0])["time_us"] / 1e6
    since = house.first_us / 1e6
    gap = Gap("bluesky", "", since, until, noted=time.time())
    Gaps(redis.client).record(gap)
    daemon = start(redis, house, bluesky_accounts="did:plc:bob")
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert ids(redis) == [bob]


def test_the_key_is_sent_and_never_shown(
    redis: RedisServer, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.archive.key = "a secret key"
    house.end_gap()
    daemon = start(redis, house, bluesky_archive_key="a wrong secret")
    run(daemon, lambda: "refused the key" in the_gap(redis).problem, "it is refused")
    daemon.close()
    daemon = start(redis, house, bluesky_archive_key="a secret key")
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert the_gap(redis).problem == ""
    assert "secret" not in caplog.text


def test_an_archive_that_is_behind_is_waited_for(
    redis: RedisServer, house: House
) -> None:
    house.archive.seal(house.jetstream.texts()[:20])
    house.jetstream.forget(0)
    house.jetstream.account("did:plc:anyone", None)
    daemon = start(redis, house)
    run(daemon, lambda: Gaps(redis.client).all(), "the gap is noticed")
    run(daemon, lambda: the_gap(redis).problem == BEHIND, "the archive is behind")
    daemon.close()
    assert not the_gap(redis).filled


def test_an_archive_that_begins_later_is_not_enough(
    redis: RedisServer, house: House
) -> None:
    house.archive.seal(house.jetstream.texts()[20:])
    house.jetstream.forget(0)
    house.tail()
    daemon = start(redis, house)
    run(daemon, lambda: Gaps(redis.client).all(), "the gap is noticed")
    run(daemon, lambda: the_gap(redis).problem == TOO_YOUNG, "the reason is stored")
    daemon.close()


def test_an_archive_without_the_gap_is_not_enough(
    redis: RedisServer, house: House
) -> None:
    house.end_gap()
    del house.archive.segments[:-1]
    house.archive.seal(['{"time_us": 1, "kind": "identity", "did": "did:plc:a"}'])
    house.archive.segments.reverse()
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem == TOO_YOUNG, "the reason is stored")
    daemon.close()
    assert not the_gap(redis).filled


def test_too_many_requests_are_waited_for(redis: RedisServer, house: House) -> None:
    house.end_gap()
    house.archive.answers = [(429, b"", {"Retry-After": "600"})]
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem, "the archive asks to wait")
    asked = len(house.archive.asked)
    for _ in range(5):
        daemon.step()
    assert len(house.archive.asked) == asked
    assert daemon.hindrance == "", "the live stream goes on"
    daemon.close()


def test_a_slow_archive_does_not_hold_up_the_live_stream(
    redis: RedisServer, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would answer before the timeouts of other clients have passed."""
    monkeypatch.setattr(
        "feedmill.producers.jetstream_archive.READ_TIMEOUT_S", 0.1, raising=False
    )
    house.end_gap()
    house.archive.delay_s = 3.0
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem, "the request is given up")
    live = house.jetstream.post("a later one")
    run(daemon, lambda: live in ids(redis), "the live stream goes on")
    daemon.close()
    assert not the_gap(redis).filled


def bomb() -> bytes:
    return compress(bytes(2**28))


def cut() -> bytes:
    return encode_block([(1, 1, "c", "d", "k", b"x" * 100)])[:-4]


def too_many() -> bytes:
    return compress(struct.pack("<I", 2**32 - 1) + bytes(1000))


def wrong_lengths() -> bytes:
    return compress(struct.pack("<I", 1) + b"\xff" * 34)


@pytest.mark.parametrize(
    "body", [bomb(), cut(), too_many(), wrong_lengths(), b"", b"<html>"]
)
def test_a_hostile_block_keeps_the_gap_and_the_daemon(
    redis: RedisServer, house: House, body: bytes
) -> None:
    house.end_gap()
    house.archive.bodies = {1: body}
    daemon = start(redis, house)
    run(daemon, lambda: "is invalid" in the_gap(redis).problem, "the block is refused")
    live = house.jetstream.post("a later one")
    run(daemon, lambda: live in ids(redis), "the live stream goes on")
    assert not the_gap(redis).filled
    house.archive.bodies.clear()
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert {*house.lost} <= {*ids(redis)}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"[]"),
        (200, b"[" * 100_000),
        (200, b'{"segments": [{"name": "../x"}]}'),
        (200, b'{"segments": [{"name": "a", "eventCount": 1e400}]}'),
        (200, b"\xff\xfe"),
        (302, b""),
        (404, b""),
        (500, b""),
    ],
)
def test_a_hostile_list_keeps_the_gap_and_the_daemon(
    redis: RedisServer, house: House, status: int, body: bytes
) -> None:
    house.end_gap()
    house.archive.answers = [(status, body, {"Location": "http://127.0.0.1:1/"})] * 2
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem, "the reason is stored")
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()


def test_a_segment_without_blocks_keeps_the_gap(
    redis: RedisServer, house: House
) -> None:
    house.end_gap()
    house.archive.missing = {1}
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem == MISSING, "the reason is stored")
    assert not the_gap(redis).filled
    house.archive.missing = set()
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert {*house.lost} <= {*ids(redis)}


def test_repeated_pages_end(redis: RedisServer, house: House) -> None:
    house.end_gap()
    page = b'{"segments": [], "cursor": "1"}'
    house.archive.answers = [(200, page, {})] * 2
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem == ENDLESS, "it is given up")
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()


def test_pages_without_an_end_end(
    redis: RedisServer, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bluesky_gaps, "MAX_PAGES", 5)
    house.end_gap()
    for number in range(5):
        page = {"segments": [], "cursor": f"page {number}"}
        house.archive.answers.append((200, json.dumps(page).encode(), {}))
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem == ENDLESS, "it is given up")
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()


def test_a_gap_of_too_many_segments_is_refused(
    redis: RedisServer, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bluesky_gaps, "MAX_SEGMENTS", 1)
    house.end_gap()
    daemon = start(redis, house)
    run(daemon, lambda: the_gap(redis).problem == ENDLESS, "it is given up")
    daemon.close()


def test_segments_in_any_order_are_read_oldest_first(
    redis: RedisServer, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_archive, "PAGE", 100)
    house.end_gap()
    house.archive.segments.reverse()
    daemon = start(redis, house)
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert [post for post in ids(redis) if post in house.lost] == house.lost


def test_rows_that_cannot_be_read_are_left_out(
    redis: RedisServer, house: House
) -> None:
    house.end_gap()
    post = "app.bsky.feed.post"
    at = house.first_us + 1
    rows = [
        (at, 1, post, "did:plc:a", "k", b"\xff"),
        (at, 1, post, "did:plc:a", "k", b""),
        (at, 1, post, "did:plc:a", "k", b"\x81" * 1000),
        (at, 5, "", "did:plc:a", "", b"\x01"),
        (at, 9, post, "did:plc:a", "k", b"\xa0"),
        (at, 4, "", "did:plc:a", "", b""),
    ]
    house.archive.bodies = {1: encode_block(rows)}
    daemon = start(redis, house)
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert daemon.unreadable == 0


def test_larger_events_than_in_the_live_stream_are_left_out(
    redis: RedisServer, house: House
) -> None:
    house.end_gap()
    at = house.first_us + 1
    post = "app.bsky.feed.post"
    large = encode_cbor({"text": "large", "padding": "x" * MAX_EVENT_BYTES})
    small = encode_cbor({"text": "small"})
    rows = [
        (at, 1, post, "did:plc:a", "large", large),
        (at, 1, post, "did:plc:a", "small", small),
    ]
    house.archive.bodies = {1: encode_block(rows)}
    daemon = start(redis, house)
    run(daemon, lambda: filled(daemon), "the gap is filled")
    daemon.close()
    assert f"at://did:plc:a/{post}/small" in ids(redis)
    assert f"at://did:plc:a/{post}/large" not in ids(redis)


def test_blocks_have_the_rows_of_their_columns() -> None:
    rows = [
        (7, 1, "app.bsky.feed.post", "did:plc:a", "key", b"\xa0"),
        (8, 3, "app.bsky.feed.like", "did:plc:bb", "", b""),
    ]
    events = list(decode_block(encode_block(rows)))
    assert [event.at_us for event in events] == [7, 8]
    assert [event.kind for event in events] == [1, 3]
    assert [event.did for event in events] == [b"did:plc:a", b"did:plc:bb"]
    assert [event.payload for event in events] == [b"\xa0", b""]
    assert list(decode_block(encode_block([]))) == []
