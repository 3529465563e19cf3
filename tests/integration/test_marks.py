"""Marks of sent posts: records in buckets (shared/scripts/buckets.py)."""

from typing import Any

import pytest

from feedmill.shared.keys import MARKS, RUNS, run_key, tombstone_key
from feedmill.shared.messages import digest
from feedmill.shared.results import ResultsStore
from feedmill.shared.scripts import buckets as layout
from feedmill.shared.scripts import queue as scripts
from feedmill.shared.scripts.queue import PURGED, SENT, Mark, lookup, mark
from feedmill.shared.settings import Settings
from tests.integration.test_results import result
from tests.support import RedisServer, age_marks, sent_checksums, sent_marks

pytestmark = pytest.mark.each_redis

DAY_S = 86400


def marks_of(count: int, start: int = 0, what: str = "text") -> list[Mark]:
    return [Mark.of(f"t3_{number:x}", digest(what, str(number))) for number in range(start, start + count)]


def write(server: RedisServer, marks: list[Mark], ago: int = 0, ttl: int = 30 * DAY_S, run: str = "") -> None:
    for start in range(0, len(marks), 250):
        mark(server.client, marks[start : start + 250], ttl, run, 10)
    age_marks(server.client, ago)


def statuses(server: RedisServer, marks: list[Mark]) -> list[int]:
    return [each for start in range(0, len(marks), 250) for each in lookup(server.client, marks[start : start + 250])]


def test_finds_every_mark_while_the_table_grows(server: RedisServer) -> None:
    marks = marks_of(5000)
    for start in (0, 100, 2000):
        until = {0: 100, 100: 2000, 2000: 5000}[start]
        write(server, marks[start:until])
        assert statuses(server, marks) == [SENT] * until + [0] * (5000 - until)
    assert statuses(server, marks_of(5000, what="another text")) == [0] * 5000
    assert len(sent_checksums(server.client)) == 5000
    assert int(server.client.get(MARKS) or 0) > 100


def test_marks_and_finds_more_posts_than_lua_unpacks(server: RedisServer) -> None:
    marks = marks_of(10_000)
    server.client.set(tombstone_key(marks[-1].post_id), 1)
    assert lookup(server.client, marks) == [0] * 9_999 + [PURGED]
    mark(server.client, marks, DAY_S)
    assert lookup(server.client, marks) == [SENT] * 9_999 + [PURGED]


def test_a_mark_takes_at_most_24_bytes(server: RedisServer) -> None:
    write(server, marks_of(20_000))
    usage: list[Any] = [server.client.memory_usage(key) for key in server.client.scan_iter()]
    assert sum(usage) <= 24 * 20_000


def test_marking_again_renews_a_mark(server: RedisServer) -> None:
    marks = marks_of(3)
    write(server, marks, ago=DAY_S, ttl=2 * DAY_S, run="a")
    write(server, marks, ttl=2 * DAY_S, run="a")
    assert len(sent_checksums(server.client)) == 3
    assert server.client.hget(run_key("a"), "sent") == "3"
    assert server.client.zcard(RUNS) == 1


def test_expired_marks_are_unknown_and_leave_with_the_next_write(server: RedisServer) -> None:
    old = [Mark.of("0", digest("old", str(number))) for number in range(5)]
    write(server, old, ago=2 * DAY_S, ttl=DAY_S)
    assert statuses(server, old) == [0] * 5
    assert sent_marks(server.client, "0") == 5
    write(server, [Mark.of("0", digest("new"))])
    assert sent_marks(server.client, "0") == 1


def test_an_id_has_a_bounded_number_of_marks(server: RedisServer) -> None:
    marks = [Mark.of("0", digest(str(number))) for number in range(layout.MAX_BUCKET_MARKS + 100)]
    write(server, marks)
    assert sent_marks(server.client, "0") == layout.MAX_BUCKET_MARKS
    assert statuses(server, marks) == [0] * 100 + [SENT] * layout.MAX_BUCKET_MARKS


def test_knows_ids_that_were_sent_or_have_results(server: RedisServer) -> None:
    write(server, marks_of(1000))
    results = [result(f"stored {number}") for number in range(300)]
    ResultsStore(server.client, Settings()).write(results)
    known = ["t3_3e7", "stored 0", "stored 299"]
    unknown = ["t3_3e8", "t3_", "stored 300", "", "sent"]
    assert scripts.known(server.client, unknown + known + unknown) == known
    many = [mark.post_id for mark in marks_of(scripts.IDS_PER_CALL * 3)]
    assert scripts.known(server.client, many) == many[:1000]


@pytest.mark.parametrize("post_id", ["t3_1", "Käse", "0", "x" * 128, "\u6f22\u5b57 🧀"])
def test_forgets_all_marks_of_an_id(server: RedisServer, post_id: str) -> None:
    others = marks_of(500, start=100)
    gone = [Mark.of(post_id, digest(each)) for each in "abc"]
    write(server, others + gone)
    assert scripts.forget(server.client, [post_id, "unknown"]) == 1
    assert statuses(server, gone) == [0] * 3
    assert statuses(server, others) == [SENT] * 500
    assert scripts.forget(server.client, [post_id]) == 0
