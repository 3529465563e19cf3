"""shared/readers.py on every redis-server of this machine: nothing twice, nothing skipped without a word."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionFault

import feedmill
from shared import readers
from shared.errors import RedisError, UserError
from shared.keys import GROUPS, RESULTS_STREAM, find
from shared.messages import Classification, Post
from shared.purge import purge
from shared.readers import ALL, Follower, GroupReader, Missed, Read, Reader, Wanted, batches, items, newest, open_reader
from shared.results import Result, ResultsStore
from shared.settings import Settings
from tests.support import RedisServer, wait_until


@pytest.fixture
def store(server: RedisServer) -> ResultsStore:
    """Keeps 150 results in its stream, or up to a hundred more: Redis trims by whole nodes."""
    return ResultsStore(server.client, Settings.model_validate({"results_stream_length": 150}))


def result(post_id: str, label: str = "food", score: float = 0.9, subreddit: str | None = None) -> Result:
    classification = Classification(
        id=post_id, label=label, scores={label: score, "other": 0.1}, model="m", revision=None, weights="00",
        fingerprint=f"f{post_id}", classified_at=1.0, worker="w", device="cpu", queued_seconds=None,
    )  # fmt: skip
    return Result(Post(id=post_id, title="a title", subreddit=subreddit), classification)


def write(store: ResultsStore, *names: object) -> list[str]:
    """Store a result of each of these posts, some at a time, as workers do."""
    ids = [str(name) for name in names]
    for start in range(0, len(ids), 10):
        store.write([result(post_id) for post_id in ids[start : start + 10]])
    return ids


def ids_of(reads: Sequence[Read] | None) -> list[str]:
    return [read.item.post.id for read in reads or () if isinstance(read.item, Result)]


def missed_of(reads: Sequence[Read] | None) -> list[Missed]:
    return [read.item for read in reads or () if isinstance(read.item, Missed)]


def read_all(reader: Reader) -> list[Read]:
    """Read, and acknowledge, until nothing is left."""
    found: list[Read] = []
    for batch in batches(reader, follow=False):
        found += batch
        reader.acknowledge([entry_id for _, ids in batch for entry_id in ids])
    return found


def entry_ids(server: RedisServer) -> list[str]:
    entries: Any = server.client.xrange(RESULTS_STREAM)
    return [entry_id for entry_id, _ in entries]


def written(entry_id: str) -> float:
    return int(entry_id.partition("-")[0]) / 1000


def now(server: RedisServer) -> float:
    seconds, microseconds = server.client.time()
    return float(seconds + microseconds / 1e6)


def pending(server: RedisServer, group: str = "g") -> int:
    found: Any = server.client.xpending(RESULTS_STREAM, group)
    return int(found["pending"])


def consumers(server: RedisServer, group: str = "g") -> set[str]:
    found: Any = server.client.xinfo_consumers(RESULTS_STREAM, group)
    return {each["name"] for each in found}


def silent(server: RedisServer, consumer: str) -> None:
    """Make it look as if the consumer had not been heard of for long."""
    found: Any = server.client.xpending_range(RESULTS_STREAM, "g", "-", "+", 1000, consumer)
    entries = [each["message_id"] for each in found]
    server.client.xclaim(RESULTS_STREAM, "g", consumer, 0, entries, idle=1_000_000, justid=True)


@pytest.fixture(params=["follower", "group"])
def reader(request: pytest.FixtureRequest, server: RedisServer) -> Reader:
    """Either kind of reader, at the stream's end."""
    found: Reader = Follower(server.client) if request.param == "follower" else GroupReader(server.client, "g", "me")
    return found


# Reading on.


def test_each_result_comes_once_from_now_on(store: ResultsStore, reader: Reader) -> None:
    write(store, "before")
    assert reader.read() is None
    write(store, 1, 2)
    assert ids_of(read_all(reader)) == ["1", "2"]
    write(store, 3)
    assert ids_of(read_all(reader)) == ["3"]
    assert reader.read() is None


def test_more_than_is_fetched_at_once(store: ResultsStore, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "FOLLOWED_AT_ONCE", 3)
    monkeypatch.setattr(readers, "GIVEN_AT_ONCE", 3)
    reader.read()
    wanted = write(store, *range(50))
    found = read_all(reader)
    assert (ids_of(found), missed_of(found)) == (wanted, [])


def test_following_begins_with_the_newest(store: ResultsStore, server: RedisServer) -> None:
    write(store, 1, 2, 3)
    follower = Follower(server.client, history=2)
    assert ids_of(follower.read()) == ["2", "3"]
    write(store, 4)
    assert ids_of(follower.read()) == ["4"]


@pytest.mark.parametrize("group", [None, "g"])
def test_from_a_time_on(store: ResultsStore, server: RedisServer, group: str | None) -> None:
    write(store, 1, 2)
    for since, ids in ((0.0, ["1", "2"]), (now(server) - 100, ["1", "2"]), (now(server) + 100, [])):
        if group:
            server.client.xgroup_destroy(RESULTS_STREAM, group)
        found = read_all(open_reader(server.client, group, since=since))
        assert (ids_of(found), missed_of(found)) == (ids, [])


def test_a_wait_ends_with_the_next_result(store: ResultsStore, reader: Reader) -> None:
    reader.read()
    write(store, 1)
    reader.wait(60)  # returns at once, or the test runs into its time limit
    assert ids_of(read_all(reader)) == ["1"]
    assert next(batches(reader, wait=0.01)) == []


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (ALL, ["1", "2", "3", "4"]),
        (Wanted(label="books"), ["2", "4"]),
        (Wanted(label="book"), []),
        (Wanted(min_score=0.9), ["1", "2", "3"]),
        (Wanted(subreddit=" /R/python/"), ["3", "4"]),
        (Wanted("books", 0.3, "PYTHON"), ["4"]),
        (Wanted(min_score=1.0), []),
    ],
)
def test_only_what_is_wanted(store: ResultsStore, server: RedisServer, wanted: Wanted, ids: list[str]) -> None:
    follower, member = Follower(server.client, wanted), GroupReader(server.client, "g", "me", wanted)
    assert (follower.read(), member.read()) == (None, None)
    store.write(
        [result("1"), result("2", "books"), result("3", subreddit="Python"), result("4", "books", 0.3, "r/python")]
    )
    assert (ids_of(read_all(follower)), ids_of(read_all(member))) == (ids, ids)
    assert pending(server) == 0
    assert [found.post.id for found in newest(server.client, 10, wanted)] == ids
    assert [found.post.id for found in newest(server.client, 1, wanted)] == ids[-1:]


def test_entries_of_somebody_else_are_skipped(
    server: RedisServer, store: ResultsStore, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    reader.read()
    server.client.xadd(RESULTS_STREAM, {"temperature": 21})
    write(store, 1)
    assert ids_of(read_all(reader)) == ["1"]
    assert "skipping unreadable entry" in caplog.text


# What was missed.


def test_a_slow_reader_is_told_how_many_it_missed(store: ResultsStore, server: RedisServer, reader: Reader) -> None:
    write(store, *range(10))
    reader.read()
    (last,) = entry_ids(server)[-1:]
    names = write(store, *range(10, 1000))
    found = read_all(reader)
    (missed,) = missed_of(found)
    assert missed.count
    assert ids_of(found) == names[missed.count :]
    assert isinstance(found[0].item, Missed)
    assert missed == Missed(missed.count, written(last), written(entry_ids(server)[0]), missed.count)
    write(store, *range(1000, 1010))
    assert missed_of(read_all(reader)) == []


def test_a_reader_in_time_missed_nothing(store: ResultsStore, reader: Reader) -> None:
    reader.read()
    for start in range(0, 1000, 50):
        names = write(store, *range(start, start + 50))
        found = read_all(reader)
        assert (ids_of(found), missed_of(found)) == (names, [])


def test_a_slow_reader_that_is_told_more_than_once(
    store: ResultsStore, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FOLLOWED_AT_ONCE", "GIVEN_AT_ONCE"):
        monkeypatch.setattr(readers, name, 7)
    reader.read()
    seen: list[str] = []
    missed = 0
    for start in range(0, 2000, 400):
        names = write(store, *range(start, start + 400))
        batch = reader.read() or []
        reader.acknowledge([entry_id for _, ids in batch for entry_id in ids])
        seen += ids_of(batch)
        missed += sum(each.count or 0 for each in missed_of(batch))
    found = read_all(reader)
    assert missed_of(found) == []
    assert len(seen) + missed + len(ids_of(found)) == 2000
    assert names[-1] in ids_of(found)


@pytest.mark.parametrize("gone", [["2"], ["1", "2"], ["2", "3", "4"], ["1", "2", "3", "4"], ["3"]])
def test_what_was_purged_was_not_missed(
    store: ResultsStore, server: RedisServer, reader: Reader, gone: list[str]
) -> None:
    write(store, 1, 2)
    reader.read()
    names = write(store, 3, 4)
    purge(server.client, Settings(), gone)
    names += write(store, 5)
    found = read_all(reader)
    assert (ids_of(found), missed_of(found)) == ([name for name in names if name not in gone], [])


def test_what_was_purged_is_not_counted_as_missed(store: ResultsStore, server: RedisServer, reader: Reader) -> None:
    write(store, *range(10))
    reader.read()
    names = write(store, *range(10, 110))
    purge(server.client, Settings(), names[10:40])
    names += write(store, *range(110, 1000))
    found = read_all(reader)
    (missed,) = missed_of(found)
    # Which of them were purged is not known any more.
    assert (missed.count, missed.at_most) == (None, len(names) - len(ids_of(found)))


def test_what_is_trimmed_is_counted(store: ResultsStore, server: RedisServer) -> None:
    write(store, *range(1000))
    purge(server.client, Settings(), ["999"])
    counters = store.counters()
    assert counters.trimmed > 0
    assert counters.stored - counters.trimmed - 1 == server.client.xlen(RESULTS_STREAM)


def test_nobody_knows_how_many(store: ResultsStore, server: RedisServer) -> None:
    """Where reading is to begin at a time from which nothing is left, and no place was noted."""
    write(store, *range(1000))
    found = read_all(Follower(server.client, since=1.0))
    assert missed_of(found) == [Missed(None, 0.999, written(entry_ids(server)[0]))]
    assert missed_of(read_all(Follower(server.client, since=0.0))) == []  # all that is there


def test_a_group_is_told_after_a_pause(store: ResultsStore, server: RedisServer) -> None:
    first = GroupReader(server.client, "g", "first")
    assert first.read() is None
    names = write(store, *range(30))
    assert ids_of(read_all(first)) == names
    names = write(store, *range(30, 1000))
    second, third = (read_all(GroupReader(server.client, "g", name)) for name in ("second", "third"))
    (missed,) = missed_of(second)
    assert missed.count == len(names) - len(ids_of(second)) > 0
    assert third == []


def test_a_group_that_was_set_elsewhere_by_hand(store: ResultsStore, server: RedisServer) -> None:
    reader = GroupReader(server.client, "g", "me")
    reader.read()
    write(store, 0)
    server.client.xgroup_setid(RESULTS_STREAM, "g", "1-1")
    write(store, *range(1, 1000))
    (missed,) = missed_of(read_all(reader))
    assert (missed.count, missed.at_most, missed.since) == (None, None, 0.001)


# Groups.


def test_two_members_share(store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "GIVEN_AT_ONCE", 2)
    members = [GroupReader(server.client, "g", name) for name in "ab"]
    for member in members:
        member.read()
    write(store, 1, 2, 3, 4)
    assert [ids_of(member.read()) for member in members] == [["1", "2"], ["3", "4"]]


def test_what_was_not_acknowledged_comes_again(store: ResultsStore, server: RedisServer) -> None:
    first = items(GroupReader(server.client, "g", "me", since=0.0), follow=False)
    write(store, 1, 2, 3)
    taken = [next(first), next(first)]  # the first is acknowledged, the second not yet
    assert [item.post.id for item in taken if isinstance(item, Result)] == ["1", "2"]
    write(store, 4)
    again = GroupReader(server.client, "g", "me")
    assert ids_of(read_all(again)) == ["2", "3", "4"]
    assert pending(server) == 0


def test_what_a_dead_member_owed_is_taken_over(store: ResultsStore, server: RedisServer) -> None:
    dead = GroupReader(server.client, "g", "dead", since=0.0)
    write(store, 1, 2)
    assert ids_of(dead.read()) == ["1", "2"]
    write(store, 3)
    assert ids_of(read_all(GroupReader(server.client, "g", "early"))) == ["3"]
    silent(server, "dead")
    assert ids_of(read_all(GroupReader(server.client, "g", "late"))) == ["1", "2"]
    assert (pending(server), dead.read()) == (0, None)


def test_more_is_taken_over_than_is_fetched_at_once(
    store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = GroupReader(server.client, "g", "dead", since=0.0)
    names = write(store, *range(20))
    dead.read()
    silent(server, "dead")
    monkeypatch.setattr(readers, "GIVEN_AT_ONCE", 3)
    assert ids_of(read_all(GroupReader(server.client, "g", "late"))) == names


def test_a_slow_member_leaves_what_others_took(
    store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "STALE_FRACTION", 0.0)
    slow = items(GroupReader(server.client, "g", "slow", since=0.0), follow=False)
    write(store, 1, 2, 3)
    first = next(slow)
    silent(server, "slow")
    assert ids_of(read_all(GroupReader(server.client, "g", "quick"))) == ["1", "2", "3"]
    write(store, 4)
    assert [item.post.id for item in (first, *slow) if isinstance(item, Result)] == ["1", "4"]


@pytest.mark.parametrize("member", ["owner", "another"])
def test_what_was_trimmed_while_pending_was_missed(store: ResultsStore, server: RedisServer, member: str) -> None:
    owner = GroupReader(server.client, "g", "owner", since=0.0)
    names = write(store, *range(20))
    assert ids_of(owner.read()) == names
    entries = entry_ids(server)
    silent(server, "owner")
    write(store, *range(20, 420))
    found = read_all(GroupReader(server.client, "g", member))
    pending_ones, trimmed = missed_of(found)
    assert pending_ones == Missed(20, written(entries[0]), written(entries[-1]), 20)
    assert trimmed.count == 400 - len(ids_of(found)) > 0
    assert pending(server) == 0


@pytest.mark.parametrize("member", ["owner", "another"])
def test_what_was_purged_while_pending_was_not_missed(store: ResultsStore, server: RedisServer, member: str) -> None:
    owner = GroupReader(server.client, "g", "owner", since=0.0)
    write(store, 1, 2, 3)
    owner.read()
    silent(server, "owner")
    purge(server.client, Settings(), ["2"])
    found = read_all(GroupReader(server.client, "g", member))
    assert (ids_of(found), missed_of(found), pending(server)) == (["1", "3"], [], 0)


def test_members_that_are_gone_are_forgotten(
    store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 1)
    for name in ("gone", "me"):
        read_all(GroupReader(server.client, "g", name, since=0.0))
    owing = GroupReader(server.client, "g", "owing")
    write(store, 2)
    owing.read()
    read_all(GroupReader(server.client, "g", "me"))
    assert consumers(server) == {"gone", "me", "owing"}
    monkeypatch.setattr(readers, "MEMBER_TTL_S", -1)
    read_all(GroupReader(server.client, "g", "me"))
    assert consumers(server) == {"me", "owing"}
    assert pending(server) == 1


def test_a_group_or_stream_that_is_deleted_meanwhile(store: ResultsStore, server: RedisServer) -> None:
    reader = GroupReader(server.client, "g", "me")
    reader.read()
    write(store, 1)
    read_all(reader)
    write(store, 2)
    server.client.xgroup_destroy(RESULTS_STREAM, "g")
    assert ids_of(read_all(reader)) == ["2"]
    (last,) = entry_ids(server)[-1:]
    server.client.delete(RESULTS_STREAM)
    wait_until(lambda: now(server) > written(last) + 0.001, "the next entry's id is later than those before")
    write(store, 3)
    found = read_all(reader)
    assert (ids_of(found), missed_of(found)) == (["3"], [])


def test_places_of_groups_are_bounded(store: ResultsStore, server: RedisServer) -> None:
    write(store, 1)
    for number in range(5):
        read_all(GroupReader(server.client, f"g{number}", "me"))
        if number:
            server.client.xgroup_destroy(RESULTS_STREAM, f"g{number}")
    read_all(GroupReader(server.client, "last", "me"))
    assert set(server.client.hgetall(GROUPS)) == {"g0", "last"}
    names: Any = server.client.keys("*")
    assert all(find(name) for name in names)


def test_a_full_redis_is_read_all_the_same(store: ResultsStore, server: RedisServer, reader: Reader) -> None:
    reader.read()
    write(store, 1)
    server.client.config_set("maxmemory", 1)
    try:
        assert ids_of(read_all(reader)) == ["1"]
    finally:
        server.client.config_set("maxmemory", 0)


# Lost connections.


def kill_connections(server: RedisServer) -> None:
    server.client.client_kill_filter(_type="normal", skipme=True)


@pytest.mark.parametrize("group", [None, "g"])
def test_a_lost_connection_costs_nothing(store: ResultsStore, server: RedisServer, group: str | None) -> None:
    followed = feedmill.results(server.url, group=group, since=0.0)
    names = write(store, 1, 2, 3)
    found = []
    for item in followed:
        assert isinstance(item, Result)
        found.append(item.post.id)
        if found == ["1"]:
            kill_connections(server)
        if found == ["1", "2", "3"]:
            names += write(store, 4)
            kill_connections(server)
        if len(found) == 4:
            break
    followed.close()
    assert found == names
    if group:
        assert ids_of(read_all(GroupReader(server.client, "g", "other"))) == []
        assert pending(server) == 1  # the one that was in hand


def test_what_is_known_is_told_after_a_lost_connection(
    store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = GroupReader(server.client, "g", "owner", since=0.0)
    write(store, *range(20))
    owner.read()
    silent(server, "owner")
    write(store, *range(20, 420))
    late = GroupReader(server.client, "g", "late")
    fetch = late._fetch

    def failing(**_: Any) -> None:
        monkeypatch.setattr(late, "_fetch", fetch)
        raise ConnectionFault("gone")

    monkeypatch.setattr(late, "_fetch", failing)
    with pytest.raises(ConnectionFault):
        late.read()
    assert [missed.count for missed in missed_of(late.read())][:1] == [20]


def test_a_connection_that_stays_lost_is_told_once(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: ResultsStore
) -> None:
    monkeypatch.setattr(readers, "PAUSES", (0.0, 0.001))
    follow = batches(reader, wait=0.01)
    next(follow)
    faults = iter([ConnectionFault("gone")] * 5)
    read = reader.read

    def failing() -> list[Read] | None:
        for fault in faults:
            raise fault
        return read()

    monkeypatch.setattr(reader, "read", failing)
    write(store, 1)
    with caplog.at_level(logging.WARNING):
        assert ids_of(next(follow)) == ["1"]
    assert [record.getMessage() for record in caplog.records] == [
        "Redis is unreachable (gone); retrying until it answers",
        "Redis answers again; continuing at the same position",
    ]


# From Python.


def test_results_from_python(store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", server.url)
    store.write([result("1", "books"), result("2"), result("3", "books", 0.2)])
    found = list(feedmill.results(follow=False, label="books", min_score=0.5))
    assert [item.post.id for item in found if isinstance(item, feedmill.Result)] == ["1"]
    assert isinstance(found[0], feedmill.Result)
    with pytest.raises(AttributeError, match="'feedmill' has no attribute 'nothing'"):
        _ = feedmill.nothing
    assert feedmill.Missed is Missed


def test_members_in_python_have_names_of_their_own(store: ResultsStore, server: RedisServer) -> None:
    write(store, 1)
    for item in feedmill.results(server.url, group="g", since=0.0, follow=False):
        assert isinstance(item, Result)
    (name,) = consumers(server)
    assert readers.NAME.fullmatch(name)
    assert pending(server) == 0


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"consumer": "me"}, "consumer requires a group"),
        ({"group": "a b"}, "'a b' is not a valid group name"),
        ({"group": ""}, "'' is not a valid group name"),
        ({"group": "g", "consumer": "\x1b"}, r"'\x1b' is not a valid consumer name"),
        ({"min_score": float("nan")}, "min_score must be a finite number, not nan"),
        ({"subreddit": "r/"}, "'r/' is not a subreddit"),
        ({"since": -1.0}, "not -1.0."),
        ({"group": "g", "claim_after": 0.0}, "claim_after must be a positive number of seconds, not 0.0"),
    ],
)
def test_mistakes_are_told_at_once(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as told:
        feedmill.results("redis://127.0.0.1:1/0", **wishes)
    assert words in str(told.value)


def test_without_a_redis_or_with_a_stranger() -> None:
    with pytest.raises(RedisError, match="127.0.0.1:1/0 .*`feedmill up`"):
        next(feedmill.results("redis://127.0.0.1:1/0"))


@pytest.mark.parametrize("group", [None, "g"])
def test_a_name_that_another_application_uses(server: RedisServer, group: str | None) -> None:
    server.client.set(RESULTS_STREAM, "mine")
    with pytest.raises(RedisError, match="feedmill:results"):
        next(feedmill.results(server.url, group=group))


def test_importing_feedmill_is_cheap() -> None:
    code = "import sys, feedmill; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(said.stdout.split()) & {"torch", "praw", "redis", "celery", "pydantic", "shared", "typer"}
