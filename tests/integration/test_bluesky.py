"""The daemon of `feedmill ingest bluesky` against a loopback Jetstream and a real Redis."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from feedmill.producers.bluesky import OVERLAP_S, BlueskySource
from feedmill.producers.live import daemon, rechecks
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import Clock
from feedmill.producers.live.state import Gaps, LiveState, Position
from feedmill.producers.push import Pusher
from feedmill.shared.backoff import Backoff
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import SettingsError
from feedmill.shared.keys import (
    DEAD_LETTERS,
    LIVE_AUTHORS,
    LIVE_DELETED,
    RESULTS_STREAM,
    TOMBSTONE,
)
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.purge import tombstones
from feedmill.shared.results import ResultsStore, stored_ids
from feedmill.shared.settings import Settings
from tests.fakes.jetstream import FAULTS, Jetstream
from tests.integration.test_results import letter, result
from tests.support import RedisServer, find, queued, wait_until

Make = Callable[..., LiveDaemon]


@pytest.fixture
def jetstream() -> Iterator[Jetstream]:
    with Jetstream() as jetstream:
        yield jetstream


@pytest.fixture
def make(
    redis: RedisServer, jetstream: Jetstream, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Make daemons, each of which stands for a restarted process; with short batches, pauses and
    intervals.
    """
    monkeypatch.setattr(daemon, "MAX_BATCH_S", 0.05)
    monkeypatch.setattr("feedmill.producers.jetstream.IDLE_S", 0.02)
    monkeypatch.setattr("feedmill.producers.jetstream.CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(rechecks, "PURGE_INTERVAL_S", 0.0)
    monkeypatch.setattr(rechecks, "AUTHORS_INTERVAL_S", 0.0)
    monkeypatch.setattr(rechecks, "MAX_SHARE", 1e9)
    for name in ("SOURCE_BACKOFF", "REDIS_BACKOFF"):
        monkeypatch.setattr(daemon, name, Backoff(first_s=0.0, max_s=0.0))
    made: list[LiveDaemon] = []

    def make(
        url: str = jetstream.url, options: ClassifyOptions | None = None, **chosen: Any
    ) -> LiveDaemon:
        settings = Settings.model_validate(
            {"redis_url": redis.url, "bluesky_url": url, **chosen}
        )
        clock = Clock()
        client = connect(settings)
        pusher = Pusher(
            make_app(settings),
            client,
            settings,
            options or ClassifyOptions(),
            wait=clock.wait,
        )
        made.append(
            LiveDaemon(BlueskySource(settings, clock), client, pusher, settings, clock)
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def start(daemon: LiveDaemon, jetstream: Jetstream) -> None:
    """Run the daemon until it is connected, so that later posts are new ones."""
    connected = len(jetstream.queries)
    run(daemon, lambda: len(jetstream.queries) > connected, "the daemon is connected")
    jetstream.account("did:plc:anyone", None)
    run(daemon, lambda: daemon.read > 0, "the daemon reads")


def run(daemon: LiveDaemon, holds: Callable[[], object], description: str) -> None:
    def step() -> object:
        daemon.step()
        return holds()

    wait_until(step, description)


def ids(redis: RedisServer) -> list[str]:
    """Return the ids of the posts in the queue, without purged ones, which are reduced to their
    id.
    """
    return [post["id"] for post in queued(redis) if "body" in post]


def test_sends_new_posts_with_their_fields(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    jetstream.post("written before the first start")
    daemon = make()
    start(daemon, jetstream)
    post_id = jetstream.post(
        "a text about kettles", author="did:plc:bob",
        langs=["en-GB"], embed={"$type": "app.bsky.embed.external", "external": {"uri": "https://example.org/kettle"}},
        labels={"$type": "com.atproto.label.defs#selfLabels", "values": [{"val": "nudity"}]},
    )  # fmt: skip
    run(daemon, lambda: queued(redis), "the post is sent")
    (post,) = queued(redis)
    assert post == {
        "id": post_id, "body": "a text about kettles", "url": "https://example.org/kettle",
        "nsfw": True,
        "permalink": f"https://bsky.app/profile/did:plc:bob/post/{post_id.rpartition('/')[2]}",
        "created_utc": 1793527200.0,
    }  # fmt: skip
    assert jetstream.queries[0]["wantedCollections"] == "app.bsky.feed.post"
    assert "cursor" not in jetstream.queries[0]


def test_filters_by_language_and_length(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make(bluesky_languages="en, PT", bluesky_min_characters=5)
    start(daemon, jetstream)
    wanted = [
        jetstream.post("long enough", langs=["en"]),
        jetstream.post("uma frase", langs=["de", "pt-BR"]),
    ]
    jetstream.post("kurz und gut", langs=["de"])
    jetstream.post("no language")
    jetstream.post("    ab    ", langs=["en"])
    jetstream.post("odd languages", langs=5)
    run(daemon, lambda: daemon.filtered == 4, "four posts are filtered")
    assert ids(redis) == wanted
    assert daemon.status()["filtered"] == 4


def test_filters_by_the_language_of_the_text(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    """Declared languages are often wrong or missing."""
    daemon = make(languages="en")
    start(daemon, jetstream)
    wanted = [
        jetstream.post("The kettle boils much faster since I cleaned it", langs=["de"]),
        jetstream.post("ok", langs=["ja"]),
    ]
    jetstream.post("Der Kessel kocht viel schneller, seit er sauber ist", langs=["en"])
    run(daemon, lambda: daemon.filtered == 1, "the German post is filtered")
    assert ids(redis) == wanted


def test_replies_are_comments(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make()
    start(daemon, jetstream)
    first = jetstream.post("a post", reply="nonsense")
    parent = {"uri": first, "cid": "bafy"}
    jetstream.post("an answer", reply={"root": parent, "parent": parent})
    run(daemon, lambda: len(queued(redis)) == 2, "both are sent")
    assert [post.get("kind") for post in queued(redis)] == [None, "comment"]


def test_restart_resumes_without_loss_or_repetition(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    first = make()
    start(first, jetstream)
    sent = [jetstream.post(f"post {number}") for number in range(20)]
    run(first, lambda: first.status()["sent"] == 20, "all posts are sent")
    first.close()
    sent += [jetstream.post(f"post {number}") for number in range(20, 40)]
    position = LiveState(redis.client, "bluesky").position()
    assert position
    second = make()
    run(
        second,
        lambda: second.status()["sent"] == 20,
        "the posts written meanwhile are sent",
    )
    assert (
        int(jetstream.queries[-1]["cursor"]) == position.cursor - OVERLAP_S * 1_000_000
    )
    assert ids(redis) == sent
    assert second.status()["skipped"] == 20, "the overlap is read again"
    assert second.gaps == 0


def test_deleted_posts_are_purged_and_stay_away(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make()
    start(daemon, jetstream)
    gone, stays = jetstream.post("to be deleted"), jetstream.post("to stay")
    run(daemon, lambda: len(queued(redis)) == 2, "both posts are sent")
    jetstream.delete(gone)
    jetstream.delete("at://did:plc:alice/app.bsky.feed.post/unknown")
    run(daemon, lambda: daemon.status()["purged"], "the post is purged")
    assert ids(redis) == [stays]
    assert set(tombstones(redis.client, [gone])) == {gone}
    assert list(redis.client.scan_iter(TOMBSTONE + "*")) == [TOMBSTONE + gone], (
        "only posts that were sent"
    )
    daemon.close()
    again = make()  # reads the post once more
    run(again, lambda: again.read >= 4, "the overlap is read again")
    assert ids(redis) == [stays]
    assert again.status()["sent"] == 0


def test_posts_of_deleted_accounts_are_purged(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make()
    start(daemon, jetstream)
    authors = {
        name: f"did:plc:{name}"
        for name in ("deleted", "takendown", "suspended", "deactivated")
    }
    posts = {
        name: [jetstream.post(f"{name} {number}", did) for number in (1, 2)]
        for name, did in authors.items()
    }
    run(daemon, lambda: len(queued(redis)) == 8, "all posts are sent")
    for status, author in authors.items():
        jetstream.account(author, status)
    run(
        daemon,
        lambda: daemon.status()["purged"] == 4,
        "posts of two accounts are purged",
    )
    assert ids(redis) == posts["suspended"] + posts["deactivated"]


def test_a_deleted_accounts_posts_are_found_wherever_they_are(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make()
    start(daemon, jetstream)
    waiting, others = (
        jetstream.post("waiting"),
        jetstream.post("another author's", "did:plc:bob"),
    )
    run(daemon, lambda: len(queued(redis)) == 2, "both posts are sent")
    store = ResultsStore(redis.client, Settings(redis_url=redis.url))
    author = "at://did:plc:alice/app.bsky.feed.post/"
    stored, in_flight = (
        [result(f"{author}{number}") for number in range(50)],
        result(f"{author}in flight"),
    )
    stored.append(result("at://did:plc:bob/app.bsky.feed.post/0"))
    store.write(stored, [letter(f"{author}dead")])
    redis.client.xadd(
        RESULTS_STREAM,
        {"id": f"{author}only in the stream", "classification": "{}", "post": "{}"},
    )
    jetstream.account("did:plc:alice", "deleted")
    run(daemon, lambda: daemon.status()["purged"], "the posts are purged")
    assert daemon.status()["purged"] == 53
    assert ids(redis) == [others]
    purged = {waiting, f"{author}49", f"{author}dead"}
    assert set(tombstones(redis.client, list(purged))) == purged
    assert list(stored_ids(redis.client)) == ["at://did:plc:bob/app.bsky.feed.post/0"]
    entries: Any = redis.client.xrange(RESULTS_STREAM)
    assert [entry["id"] for _, entry in entries] == list(stored_ids(redis.client))
    assert redis.client.xlen(DEAD_LETTERS) == 0
    store.write([in_flight])
    run(
        daemon,
        lambda: daemon.status()["purged"] == 54,
        ("a post that was missed is purged by a later search"),
    )
    assert [name for name in redis.client.scan_iter() if not find(name)] == []


def test_a_deleted_accounts_posts_are_searched_for_a_day(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make()
    start(daemon, jetstream)
    key = LIVE_AUTHORS + "bluesky"
    redis.client.zadd(
        key, {"at://did:plc:long ago/": time.time() - rechecks.AUTHOR_KEPT_S - 1}
    )
    jetstream.account("did:plc:alice", "deleted")
    author = "at://did:plc:alice/app.bsky.feed.post/"
    run(
        daemon,
        lambda: redis.client.zrange(key, 0, -1) == [author],
        "the account is remembered",
    )
    back = jetstream.post("back again")
    run(daemon, lambda: queued(redis), "the post is sent")
    run(
        daemon,
        lambda: not redis.client.exists(key),
        "an account that writes again is forgotten",
    )
    daemon.step()
    assert ids(redis) == [back]


def test_a_killed_daemons_deletions_are_purged_by_the_next(
    redis: RedisServer,
    jetstream: Jetstream,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rechecks.Purges, "run_if_due", lambda _: None)
    first = make()
    start(first, jetstream)
    gone = jetstream.post("to be deleted")
    run(first, lambda: queued(redis), "the post is sent")
    jetstream.delete(gone)
    run(
        first,
        lambda: redis.client.exists(LIVE_DELETED + "bluesky"),
        "the deletion is stored",
    )
    first.close()
    monkeypatch.undo()
    second = make()
    second.step()
    assert second.status()["purged"] == 1
    assert ids(redis) == []


def test_full_queue_stops_reading(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make(queue_limit=4, posts_per_message=1)
    start(daemon, jetstream)
    sent = [jetstream.post(f"post {number}") for number in range(30)]
    run(daemon, lambda: daemon.status()["paused"], "the queue is full")
    read = daemon.read
    for _ in range(5):
        assert daemon.step() > 0
    assert (daemon.read, len(queued(redis))) == (read, 4)
    taken: list[str] = []

    def take() -> bool:
        taken.extend(ids(redis))
        redis.client.delete("feedmill")
        return len(taken) == 30

    run(daemon, take, "all posts are sent")
    assert taken == sent
    assert daemon.connections == 1, "the connection stays open meanwhile"


def test_server_that_begins_too_early_repeats_nothing(
    redis: RedisServer, make: Make
) -> None:
    with Jetstream(early=100) as jetstream:
        for number in range(100):
            jetstream.raw(
                {"did": "did:plc:x", "kind": "identity", "identity": {"number": number}}
            )
        first = make(jetstream.url)
        start(first, jetstream)
        sent = [jetstream.post(f"post {number}") for number in range(5)]
        run(first, lambda: first.status()["sent"] == 5, "all posts are sent")
        first.close()
        sent.append(jetstream.post("the last one"))
        second = make(jetstream.url)
        run(second, lambda: second.status()["sent"] == 1, "the last post is sent")
        assert ids(redis) == sent
        assert second.gaps == 0


def test_unreadable_event_is_skipped_after_a_second_attempt(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    daemon = make()
    start(daemon, jetstream)
    for broken in ('{"did": "did:plc:alice", "ki', "[]", '{"time_us": "x"}'):
        jetstream.raw(broken)
    jetstream.post("after it")
    jetstream.raw(json.dumps({"did": "x" * 2_000_000}))
    jetstream.post("after a frame that is too large")
    run(daemon, lambda: len(ids(redis)) == 2, "the next posts are sent")
    assert daemon.connections == 1, "others do not wait"
    run(
        daemon,
        lambda: daemon.unreadable == 4,
        "they are set aside after a second attempt",
    )
    assert daemon.connections == 2
    assert daemon.gaps == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_lose_and_repeat_nothing(
    redis: RedisServer, jetstream: Jetstream, make: Make, fault: str
) -> None:
    daemon = make()
    start(daemon, jetstream)
    jetstream.faults_at({40: fault, 90: fault, 220: fault})
    sent = [jetstream.post(f"post {number}") for number in range(100)]
    run(daemon, lambda: daemon.status()["sent"] == 100, "all posts are sent")
    sent += [jetstream.post(f"post {number}") for number in range(100, 200)]
    run(daemon, lambda: daemon.status()["sent"] == 200, "all posts are sent")
    assert jetstream.fault_counts[fault] >= 2
    assert ids(redis) == sent
    assert daemon.gaps == 0


# Several servers.


@pytest.mark.parametrize("ahead_s", [-3.0, 3.0])
def test_another_server_continues_without_loss_or_repetition(
    redis: RedisServer, make: Make, ahead_s: float
) -> None:
    first = Jetstream()
    second = Jetstream(clock=lambda: time.time() + ahead_s)
    with first, second:
        sent: list[str] = []

        def write(count: int) -> None:
            for _ in range(count):
                text = f"post {len(sent)}"
                (post_id, _) = [server.post(text) for server in (first, second)]
                sent.append(post_id)

        daemon = make(f"{first.url} , {second.url}")
        start(daemon, first)
        assert daemon.status()["server"] == first.url.removeprefix("ws://")
        write(20)
        run(daemon, lambda: daemon.status()["sent"] == 20, "the first posts are sent")
        first.down = True
        write(20)
        run(daemon, lambda: daemon.status()["sent"] == 40, "the second server is read")
        assert daemon.status()["server"] == second.url.removeprefix("ws://")
        first.down, second.down = False, True
        write(20)
        run(
            daemon, lambda: daemon.status()["sent"] == 60, "the first one is read again"
        )
        assert ids(redis) == sent
        assert daemon.status()["switches"] == 2
        assert daemon.gaps == 0


def test_a_restart_on_another_server_loses_and_repeats_nothing(
    redis: RedisServer, make: Make
) -> None:
    with Jetstream() as first, Jetstream() as second:
        sent: list[str] = []
        daemon = make(f"{first.url},{second.url}")
        start(daemon, first)
        for number in range(40):
            (post_id, _) = [server.post(f"post {number}") for server in (first, second)]
            sent.append(post_id)
            if number == 20:
                run(daemon, lambda: daemon.status()["sent"] == 21, "some are sent")
                daemon.close()
        again = make(f"{second.url},{first.url}")
        run(again, lambda: again.status()["sent"] == 19, "the others are sent")
        assert ids(redis) == sent
        assert again.gaps == 0


def test_only_if_all_servers_ask_to_wait_does_the_daemon_wait(make: Make) -> None:
    with Jetstream() as first, Jetstream() as second:
        for server, seconds in ((first, 500), (second, 300)):
            server.refusals = [429] * 9
            server.refusal_headers = {"Retry-After": str(seconds)}
        daemon = make(f"{first.url},{second.url}")
        assert daemon.step() == 0, "the second server did not ask for anything yet"
        assert 290 < daemon.step() <= 300
        assert daemon.status()["server"] == second.url.removeprefix("ws://")
        assert daemon.status()["switches"] == 1
        assert len(first.refusals) == len(second.refusals) == 8


# Chosen accounts.


def test_reads_only_the_chosen_accounts(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    accounts = "did:plc:alice,did:web:bob.example"
    daemon = make(bluesky_accounts=accounts)
    start_quiet(daemon, jetstream)
    wanted = [
        jetstream.post("by Alice"),
        jetstream.post("by Bob", "did:web:bob.example"),
    ]
    jetstream.post("by Carol", "did:plc:carol")
    wanted.append(jetstream.post("by Alice again"))
    run(daemon, lambda: len(queued(redis)) == 3, "their posts are sent")
    assert ids(redis) == wanted
    assert jetstream.hellos[0] == {
        "type": "options_update",
        "payload": {
            "wantedCollections": ["app.bsky.feed.post"],
            "wantedDids": accounts.split(","),
            "maxMessageSizeBytes": 2**20,
        },
    }
    assert daemon.status()["filtered"] == 0, "the server applies the filter"
    assert daemon.status()["accounts"] == 2


def test_filters_accounts_that_the_server_did_not() -> None:
    source = BlueskySource(Settings(bluesky_accounts="did:plc:alice"), Clock())
    with Jetstream() as jetstream:
        for author in ("did:plc:alice", "did:plc:carol"):
            jetstream.post("a text", author)
        alice, carol = (source.parse(text) for text in jetstream.texts())
    assert alice.post
    assert carol.post is None
    assert carol.filtered


def start_quiet(daemon: LiveDaemon, jetstream: Jetstream) -> None:
    """Run the daemon until its first message has arrived, so that later posts are new ones."""
    greeted = len(jetstream.hellos)
    run(daemon, lambda: len(jetstream.hellos) > greeted, "the daemon is connected")
    run(daemon, lambda: len(jetstream.queries) > greeted, "it is being read")


def test_quiet_accounts_move_the_position_and_leave_no_gap(
    redis: RedisServer,
    jetstream: Jetstream,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feedmill.producers.bluesky.PROGRESS_INTERVAL_S", 0.1)
    monkeypatch.setattr("feedmill.producers.jetstream.SILENCE_S", 0.1)
    daemon = make(bluesky_accounts="did:plc:alice")
    start_quiet(daemon, jetstream)
    state = LiveState(redis.client, "bluesky")
    run(daemon, state.position, "the position is stored without an event")
    before = state.position()
    assert before

    def has_moved() -> bool:
        position = state.position()
        return position is not None and position > before

    run(daemon, has_moved, "the position moves")
    daemon.close()
    missed = jetstream.post("while no daemon ran")
    again = make(bluesky_accounts="did:plc:alice")
    run(again, lambda: queued(redis), "the post is sent")
    assert ids(redis) == [missed]
    assert (daemon.gaps, again.gaps) == (0, 0)
    assert daemon.faults == {}


def test_accounts_that_were_away_for_too_long_leave_a_gap(
    redis: RedisServer, jetstream: Jetstream, make: Make
) -> None:
    away_s = 48 * 3600
    at = time.time() - away_s
    LiveState(redis.client, "bluesky").advance(Position(round(at * 1e6), at))
    daemon = make(bluesky_accounts="did:plc:alice")
    start_quiet(daemon, jetstream)
    (gap,) = Gaps(redis.client).all()
    assert gap.since == pytest.approx(at)
    assert gap.until == pytest.approx(at + 12 * 3600, abs=60)
    daemon.close()
    start_quiet(daemon, jetstream)
    assert daemon.gaps == 1, "recorded once"


def test_accounts_may_come_from_a_file(
    redis: RedisServer, jetstream: Jetstream, make: Make, tmp_path: Path
) -> None:
    file = tmp_path / "accounts.txt"
    numbers = range(9_998)
    lines = [f"did:plc:{number:024}" for number in numbers]
    file.write_text("\n".join([*lines, "did:plc:alice", "did:plc:alice", ""]))
    daemon = make(bluesky_accounts=str(file))
    start_quiet(daemon, jetstream)
    post_id = jetstream.post("by Alice")
    run(daemon, lambda: queued(redis), "the post is sent")
    assert ids(redis) == [post_id]
    assert len(jetstream.hellos[0]["payload"]["wantedDids"]) == 9_999


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alice.bsky.social", "'alice.bsky.social' is not an account's DID"),
        ("did:plc:alice did:plc", "'did:plc' is not an account's DID"),
        ("", "'' is not an account's DID"),
        ("\x1b[31m", "is not an account's DID"),
        ("\n".join(f"did:plc:{n}" for n in range(10_001)), "at most 10,000"),
        ("x" * (2**22 + 1), "larger than 4 MiB"),
    ],
)
def test_mistakes_in_an_accounts_file_are_explained(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "accounts.txt"
    file.write_text(text)
    settings = Settings(bluesky_accounts=str(file))
    with pytest.raises(SettingsError) as caught:
        BlueskySource(settings, Clock())
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_missing_accounts_file_is_explained() -> None:
    settings = Settings(bluesky_accounts="nowhere.txt")
    with pytest.raises(
        SettingsError, match=r"nowhere\.txt cannot be read: No such file"
    ):
        BlueskySource(settings, Clock())
