"""feedmill/outcomes on every redis-server of this machine: readers repeat no result and report
every missed one.
"""

import json
import logging
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as ConnectionFault

import feedmill
from feedmill.outcomes import followers, rows
from feedmill.outcomes.followers import (
    NO_FILTER,
    Follower,
    GroupReader,
    Read,
    Reader,
    ResultFilter,
    batches,
    items,
    newest,
    open_reader,
)
from feedmill.outcomes.rows import Missed
from feedmill.shared.errors import UserError
from feedmill.shared.keys import COUNTERS, RESULTS_STREAM
from feedmill.shared.messages import Post
from feedmill.shared.purge import purge
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.scripts import call
from feedmill.shared.settings import Settings
from tests.support import RedisServer, make_classification, wait_until


@pytest.fixture
def store(server: RedisServer) -> ResultsStore:
    """A store whose stream keeps 150 results, or up to a hundred more: Redis trims whole nodes."""
    return ResultsStore(
        server.client, Settings.model_validate({"results_stream_length": 150})
    )


def result(
    post_id: str, label: str = "food", score: float = 0.9, subreddit: str | None = None
) -> Result:
    classification = make_classification(
        post_id,
        label=label,
        scores={label: score, "other": 0.1},
        fingerprint=f"f{post_id}",
    )
    return Result(
        Post(id=post_id, title="a title", subreddit=subreddit), classification
    )


def write(store: ResultsStore, *names: object) -> list[str]:
    """Store a result for each of these posts in batches of ten; return the ids."""
    ids = [str(name) for name in names]
    for start in range(0, len(ids), 10):
        store.write([result(post_id) for post_id in ids[start : start + 10]])
    return ids


def ids_of(reads: Sequence[Read] | None) -> list[str]:
    return [read.item.post.id for read in reads or () if isinstance(read.item, Result)]


def missed_of(reads: Sequence[Read] | None) -> list[Missed]:
    return [read.item for read in reads or () if isinstance(read.item, Missed)]


def read_all(reader: Reader) -> list[Read]:
    """Read and acknowledge until nothing is left."""
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
    """Mark the consumer's pending entries as idle for a long time."""
    found: Any = server.client.xpending_range(
        RESULTS_STREAM, "g", "-", "+", 1000, consumer
    )
    entries = [each["message_id"] for each in found]
    server.client.xclaim(
        RESULTS_STREAM, "g", consumer, 0, entries, idle=1_000_000, justid=True
    )


@pytest.fixture(params=["follower", "group"])
def reader(request: pytest.FixtureRequest, server: RedisServer) -> Reader:
    """A reader of either kind, at the end of the stream."""
    found: Reader = (
        Follower(server.client)
        if request.param == "follower"
        else GroupReader(server.client, "g", "me")
    )
    return found


# Following the stream.


def test_misses_nothing_after_the_end_of_an_emptied_stream(
    store: ResultsStore, server: RedisServer, reader: Reader
) -> None:
    write(store, *range(400))
    purge(server.client, Settings(), list(map(str, range(400))))
    assert entry_ids(server) == []
    assert reader.read() is None
    write(store, "new")
    found = read_all(reader)
    assert (ids_of(found), missed_of(found)) == (["new"], [])


def test_reads_more_results_than_one_fetch_returns(
    store: ResultsStore, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "FETCH_BYTES", 0)
    monkeypatch.setattr(followers, "GIVEN_AT_ONCE", 3)
    reader.read()
    wanted = write(store, *range(120))
    found = read_all(reader)
    assert (ids_of(found), missed_of(found)) == (wanted, [])


def test_follower_goes_back_when_redis_lost_what_it_read(
    store: ResultsStore, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis' clock was ahead, Redis lost the end of its log, and its clock went back."""
    follower = Follower(server.client, since=0.0)
    store.write([result("old")])
    binary: Any = Redis.from_url(server.url)
    log = {key: binary.dump(key) for key in (RESULTS_STREAM, COUNTERS)}
    ((newest, fields),) = binary.xrevrange(RESULTS_STREAM, count=1)
    binary.xadd(
        RESULTS_STREAM, fields, id=f"{int(newest.partition(b'-')[0]) + 600_000}-0"
    )
    binary.hincrby(COUNTERS, "stored", 1)
    assert len(read_all(follower)) == 2
    for key, content in log.items():
        binary.restore(key, 0, content, replace=True)
    binary.close()
    store.write([result("new")])
    found = [read.item for _ in range(3) for read in follower.read() or []]
    assert [each.post.id for each in found if isinstance(each, Result)][-1:] == ["new"]
    assert "its clock went back" in caplog.text


def test_follower_starts_with_the_newest_results(
    store: ResultsStore, server: RedisServer
) -> None:
    write(store, 1, 2, 3)
    follower = Follower(server.client, history=2)
    assert ids_of(follower.read()) == ["2", "3"]
    write(store, 4)
    assert ids_of(follower.read()) == ["4"]


@pytest.mark.parametrize("group", [None, "g"])
def test_reads_from_a_given_time(
    store: ResultsStore, server: RedisServer, group: str | None
) -> None:
    write(store, 1, 2)
    for since, ids in (
        (0.0, ["1", "2"]),
        (now(server) - 100, ["1", "2"]),
        (now(server) + 100, []),
    ):
        if group:
            server.client.xgroup_destroy(RESULTS_STREAM, group)
        found = read_all(open_reader(server.client, group, since=since))
        assert (ids_of(found), missed_of(found)) == (ids, [])


def test_wait_returns_when_a_result_arrives(
    store: ResultsStore, reader: Reader
) -> None:
    reader.read()
    write(store, 1)
    reader.wait(120)  # returns at once; otherwise the test times out
    assert ids_of(read_all(reader)) == ["1"]
    assert next(batches(reader, wait=0.01)) == []


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (NO_FILTER, ["1", "2", "3", "4"]),
        (ResultFilter(label="books"), ["2", "4"]),
        (ResultFilter(label="book"), []),
        (ResultFilter(min_score=0.9), ["1", "2", "3"]),
        (ResultFilter(subreddit=" /R/python/"), ["3", "4"]),
        (ResultFilter("books", 0.3, "PYTHON"), ["4"]),
        (ResultFilter(min_score=1.0), []),
    ],
)
def test_filters_by_label_score_and_subreddit(
    store: ResultsStore, server: RedisServer, wanted: ResultFilter, ids: list[str]
) -> None:
    follower, member = (
        Follower(server.client, wanted),
        GroupReader(server.client, "g", "me", wanted),
    )
    assert (follower.read(), member.read()) == (None, None)
    store.write(
        [
            result("1"),
            result("2", "books"),
            result("3", subreddit="Python"),
            result("4", "books", 0.3, "r/python"),
        ]
    )
    assert (ids_of(read_all(follower)), ids_of(read_all(member))) == (ids, ids)
    assert pending(server) == 0
    assert [found.post.id for found in newest(server.client, 10, wanted)] == ids
    assert [found.post.id for found in newest(server.client, 1, wanted)] == ids[-1:]


def test_skips_and_logs_foreign_stream_entries(
    server: RedisServer,
    store: ResultsStore,
    reader: Reader,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader.read()
    server.client.xadd(RESULTS_STREAM, {"temperature": 21})
    write(store, 1)
    assert ids_of(read_all(reader)) == ["1"]
    assert any(record.levelno >= logging.WARNING for record in caplog.records)


SOUND = {"label": "a", "scores": {"a": 1.0}, "classified_at": 1.0}
A_POST = {"id": "p", "title": "Rain"}
DAMAGED = [
    ([], A_POST),
    (SOUND, []),
    ({"label": "a"}, A_POST),
    (SOUND | {"scores": {}}, A_POST),
    (SOUND | {"label": None, "scores": {}}, A_POST),
    (SOUND | {"label": "b"}, A_POST),
    (SOUND | {"label": 5}, A_POST),
    (SOUND | {"label": []}, A_POST),
    (SOUND | {"scores": [1]}, A_POST),
    (SOUND | {"scores": {"a": None}}, A_POST),
    (SOUND | {"scores": {"a": "1"}}, A_POST),
    (SOUND | {"classified_at": "then"}, A_POST),
    (SOUND, {"title": "Rain"}),
    (SOUND, A_POST | {"id": 7}),
    (SOUND, A_POST | {"title": 7}),
    (SOUND, A_POST | {"created_utc": "then"}),
]


def test_skips_damaged_entries(
    server: RedisServer, store: ResultsStore, reader: Reader
) -> None:
    """Whoever reads rows may compare and format their values."""
    reader.read()
    for classification, post in DAMAGED:
        fields: Any = {
            "classification": json.dumps(classification),
            "post": json.dumps(post),
        }
        server.client.xadd(RESULTS_STREAM, fields)
    write(store, 1)
    assert ids_of(read_all(reader)) == ["1"]


# Missed results.


def test_a_slow_reader_learns_how_many_results_it_missed(
    store: ResultsStore, server: RedisServer, reader: Reader
) -> None:
    write(store, *range(10))
    reader.read()
    (last,) = entry_ids(server)[-1:]
    names = write(store, *range(10, 1000))
    found = read_all(reader)
    (missed,) = missed_of(found)
    assert missed.count
    assert ids_of(found) == names[missed.count :]
    assert isinstance(found[0].item, Missed)
    assert missed == Missed(missed.count, written(last), written(entry_ids(server)[0]))
    write(store, *range(1000, 1010))
    assert missed_of(read_all(reader)) == []


@pytest.mark.parametrize(
    "gone", [["2"], ["1", "2"], ["2", "3", "4"], ["1", "2", "3", "4"], ["3"]]
)
def test_purged_results_are_not_reported_as_missed(
    store: ResultsStore, server: RedisServer, reader: Reader, gone: list[str]
) -> None:
    write(store, 1, 2)
    reader.read()
    names = write(store, 3, 4)
    purge(server.client, Settings(), gone)
    names += write(store, 5)
    found = read_all(reader)
    assert (ids_of(found), missed_of(found)) == (
        [name for name in names if name not in gone],
        [],
    )


def test_missed_count_is_unknown_without_a_stored_cursor(
    store: ResultsStore, server: RedisServer
) -> None:
    """Start at a time whose entries are gone, without a stored cursor."""
    write(store, *range(1000))
    found = read_all(Follower(server.client, since=1.0))
    assert missed_of(found) == [Missed(None, 0.999, written(entry_ids(server)[0]))]
    # 0.0: the oldest existing entry
    assert missed_of(read_all(Follower(server.client, since=0.0))) == []


# Groups.


def test_takes_over_results_of_a_dead_consumer(
    store: ResultsStore, server: RedisServer
) -> None:
    dead = GroupReader(server.client, "g", "dead", since=0.0)
    write(store, 1, 2)
    assert ids_of(dead.read()) == ["1", "2"]
    write(store, 3)
    assert ids_of(read_all(GroupReader(server.client, "g", "early"))) == ["3"]
    silent(server, "dead")
    assert ids_of(read_all(GroupReader(server.client, "g", "late"))) == ["1", "2"]
    assert (pending(server), dead.read()) == (0, None)


def test_a_slow_consumer_skips_results_taken_over_by_others(
    store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "STALE_FRACTION", 0.0)
    slow = items(GroupReader(server.client, "g", "slow", since=0.0), follow=False)
    write(store, 1, 2, 3)
    first = next(slow)
    silent(server, "slow")
    assert ids_of(read_all(GroupReader(server.client, "g", "quick"))) == ["1", "2", "3"]
    write(store, 4)
    assert [item.post.id for item in (first, *slow) if isinstance(item, Result)] == [
        "1",
        "4",
    ]


@pytest.mark.parametrize("member", ["owner", "another"])
def test_pending_results_that_were_trimmed_are_missed(
    store: ResultsStore, server: RedisServer, member: str
) -> None:
    owner = GroupReader(server.client, "g", "owner", since=0.0)
    names = write(store, *range(20))
    assert ids_of(owner.read()) == names
    entries = entry_ids(server)
    silent(server, "owner")
    write(store, *range(20, 420))
    found = read_all(GroupReader(server.client, "g", member))
    pending_ones, trimmed = missed_of(found)
    assert pending_ones == Missed(20, written(entries[0]), written(entries[-1]))
    assert trimmed.count == 400 - len(ids_of(found)) > 0
    assert pending(server) == 0


@pytest.mark.parametrize("member", ["owner", "another"])
def test_pending_results_that_were_purged_are_not_missed(
    store: ResultsStore, server: RedisServer, member: str
) -> None:
    owner = GroupReader(server.client, "g", "owner", since=0.0)
    write(store, 1, 2, 3)
    owner.read()
    silent(server, "owner")
    purge(server.client, Settings(), ["2"])
    found = read_all(GroupReader(server.client, "g", member))
    assert (ids_of(found), missed_of(found), pending(server)) == (["1", "3"], [], 0)


def test_removes_consumers_that_are_gone_and_owe_nothing(
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
    monkeypatch.setattr(followers, "MEMBER_TTL_S", -1)
    read_all(GroupReader(server.client, "g", "me"))
    assert consumers(server) == {"me", "owing"}
    assert pending(server) == 1


def test_reading_survives_deletion_of_the_group_or_stream(
    store: ResultsStore, server: RedisServer
) -> None:
    reader = GroupReader(server.client, "g", "me")
    reader.read()
    write(store, 1)
    read_all(reader)
    write(store, 2)
    server.client.xgroup_destroy(RESULTS_STREAM, "g")
    assert ids_of(read_all(reader)) == ["2"]
    (last,) = entry_ids(server)[-1:]
    server.client.delete(RESULTS_STREAM)
    wait_until(
        lambda: now(server) > written(last) + 0.001,
        ("the next entry's id is later than all before"),
    )
    write(store, 3)
    found = read_all(reader)
    assert (ids_of(found), missed_of(found)) == (["3"], [])


def test_reads_while_redis_is_at_its_memory_limit(
    store: ResultsStore, server: RedisServer, reader: Reader
) -> None:
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
def test_a_lost_connection_loses_and_repeats_nothing(
    store: ResultsStore, server: RedisServer, group: str | None
) -> None:
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
        assert pending(server) == 1  # the result in flight


def test_reports_missed_results_after_a_lost_connection(
    store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = GroupReader(server.client, "g", "owner", since=0.0)
    write(store, *range(20))
    owner.read()
    silent(server, "owner")
    write(store, *range(20, 420))
    late = GroupReader(server.client, "g", "late")

    def failing(redis: Redis, name: str, *args: Any) -> Any:
        if name == "fetch_group":
            raise ConnectionFault("gone")
        return call(redis, name, *args)

    with monkeypatch.context() as patched:
        patched.setattr(followers, "call", failing)
        with pytest.raises(ConnectionFault):
            late.read()
    assert [missed.count for missed in missed_of(late.read())][:1] == [20]


def test_a_group_waits_while_redis_rejects_writes(
    server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    store: ResultsStore,
) -> None:
    accept = partial(server.client.config_set, "min-replicas-to-write", 0)
    clock = SimpleNamespace(sleep=lambda _: accept(), monotonic=time.monotonic)
    monkeypatch.setattr(followers, "time", clock)  # accepts before the first retry
    reader = GroupReader(server.client, "g", "one")
    follow = batches(reader, wait=0.01)
    next(follow)
    write(store, 1, 2)
    ((_, first), (_, second)) = next(follow)
    server.client.config_set("min-replicas-to-write", 1)
    try:
        with caplog.at_level(logging.WARNING):
            reader.acknowledge(first)
            next(follow)
    finally:
        accept()
    assert "rejects writes" in caplog.text
    reader.acknowledge(second)
    write(store, 3)
    assert ids_of(next(follow)) == ["3"]


# The Python API.


def test_reads_results_through_the_python_api(
    store: ResultsStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", server.url)
    store.write([result("1", "books"), result("2"), result("3", "books", 0.2)])
    found = list(feedmill.results(follow=False, label="books", min_score=0.5))
    assert [item.post.id for item in found if isinstance(item, feedmill.Result)] == [
        "1"
    ]
    for since, count in (
        (datetime(2024, 1, 1), 3),
        (datetime(2999, 1, 1, tzinfo=UTC), 0),
    ):
        assert len(list(feedmill.results(follow=False, since=since))) == count
    assert isinstance(found[0], feedmill.Result)
    with pytest.raises(AttributeError, match="nothing"):
        _ = feedmill.nothing
    assert feedmill.Missed is Missed


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("score", [math.nan, math.inf, "0.5"])
def test_rejects_scores_that_no_result_reaches(
    server: RedisServer, group: str | None, score: Any
) -> None:
    """A group would acknowledge every result as one that does not match."""
    with pytest.raises(UserError, match="min_score must be a finite number"):
        open_reader(server.client, group, wanted=ResultFilter(min_score=score))


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"consumer": "me"}, "group"),
        ({"group": "a b"}, "'a b'"),
        ({"group": "g", "consumer": "\x1b"}, r"'\x1b'"),
        ({"subreddit": "r/"}, "'r/'"),
        ({"since": -1.0}, "-1.0"),
    ],
)
def test_rejects_invalid_reader_arguments_before_connecting(
    wishes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as told:
        feedmill.results("redis://127.0.0.1:1/0", **wishes)
    assert words in str(told.value)
