"""Marks of sent posts (producers/push.py): a table of buckets, in generations."""

import pytest

from feedmill.producers.push import (
    IDS_PER_CALL,
    PURGED,
    SENT,
    Mark,
    known_ids,
    lookup,
    mark_sent,
)
from feedmill.shared.keys import MARKS, RUN, RUNS, TOMBSTONE
from feedmill.shared.messages import digest
from feedmill.shared.purge import forget
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.integration.test_results import result
from tests.support import RedisServer, age, sent_count, sent_marks

pytestmark = pytest.mark.each_redis

DAY_S = 86400


def marks_of(count: int, start: int = 0, what: str = "text") -> list[Mark]:
    return [
        Mark.of(f"t3_{number:x}", digest(what, str(number)))
        for number in range(start, start + count)
    ]


def write(
    server: RedisServer,
    marks: list[Mark],
    ago: int = 0,
    ttl: int = 30 * DAY_S,
    run: str = "",
) -> None:
    mark_sent(server.client, marks, ttl, 10**9, run)
    age(server.client, MARKS, ago)


def test_marks_and_finds_more_posts_than_lua_unpacks(server: RedisServer) -> None:
    marks = marks_of(10_000)
    server.client.set(TOMBSTONE + marks[-1].post_id, 1)
    assert lookup(server.client, marks) == [0] * 9_999 + [PURGED]
    write(server, marks)
    assert lookup(server.client, marks) == [SENT] * 9_999 + [PURGED]
    assert lookup(server.client, marks_of(10_000, what="another text")) == [
        0
    ] * 9_999 + [PURGED]
    assert sent_count(server.client) == 9_999


def test_marking_again_renews_a_mark(server: RedisServer) -> None:
    marks = marks_of(3)
    write(server, marks, ago=DAY_S, ttl=2 * DAY_S, run="a")
    write(server, marks, ttl=2 * DAY_S, run="a")
    write(server, [], ago=2 * DAY_S - 1)
    assert lookup(server.client, marks) == [SENT] * 3
    assert server.client.hget(RUN + "a", "sent") == "3"
    assert server.client.zcard(RUNS) == 1


def test_expired_marks_are_unknown_and_leave_with_a_later_write_of_results(
    server: RedisServer,
) -> None:
    old = marks_of(5, what="old")
    write(server, old, ago=2 * DAY_S, ttl=DAY_S)
    assert lookup(server.client, old) == [0] * 5
    write(server, marks_of(1, what="new"))
    assert sent_count(server.client) == 6
    store = ResultsStore(server.client, Settings())
    store.write([result("1")])
    assert sent_count(server.client) == 1
    assert store.counters().sent_dropped == 0


def test_knows_ids_that_were_sent_or_have_results(server: RedisServer) -> None:
    write(server, marks_of(1000))
    results = [result(f"stored {number}") for number in range(300)]
    ResultsStore(server.client, Settings()).write(results)
    known = ["t3_3e7", "stored 0", "stored 299"]
    unknown = ["t3_3e8", "t3_", "stored 300", "", "sent"]
    assert known_ids(server.client, unknown + known + unknown) == {*known}
    many = [mark.post_id for mark in marks_of(IDS_PER_CALL * 3)]
    assert known_ids(server.client, many) == {*many[:1000]}


@pytest.mark.parametrize("post_id", ["t3_1", "Käse", "x" * 128, "\u6f22\u5b57 🧀"])
def test_forgets_all_marks_of_an_id(server: RedisServer, post_id: str) -> None:
    others = marks_of(500, start=100)
    gone = [Mark.of(post_id, digest(each)) for each in "abc"]
    write(server, gone[:1], ago=20 * DAY_S)
    write(server, others + gone)
    assert sent_marks(server.client, post_id) == 4
    assert forget(server.client, [post_id, "unknown"]) == (1, 0)
    assert lookup(server.client, gone) == [0] * 3
    assert lookup(server.client, others) == [SENT] * 500
    assert forget(server.client, [post_id]) == (0, 0)
