"""shared/results.py on every redis-server of this machine: each result is stored exactly once."""

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.shared import runs
from feedmill.shared.keys import (
    DEAD_LETTER,
    DEAD_LETTERS,
    RESULTS_STREAM,
    STORED,
    TOMBSTONE,
)
from feedmill.shared.messages import DeadLetter, Post, digest
from feedmill.shared.purge import forget
from feedmill.shared.results import (
    CONTEXT_NAME,
    Counters,
    Result,
    ResultsStore,
    Score,
    dead_letter_digest,
)
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    age,
    dead_letters,
    has_results,
    latest,
    make_classification,
    wait_until,
)


@pytest.fixture
def store(server: RedisServer) -> ResultsStore:
    return ResultsStore(
        server.client,
        Settings.model_validate({"stream_body": 10, "results_stream_length": 50}),
    )


def result(
    post_id: str, fingerprint: str = "f", label: str = "food", at: float = 1.0
) -> Result:
    classification = make_classification(
        post_id,
        label=label,
        scores={label: 0.9, "other": 0.1},
        fingerprint=fingerprint,
        classified_at=at,
    )
    return Result(
        Post(id=post_id, title="a title", body="a body that is long"), classification
    )


def letter(post_id: str | None, reason: str = "no text") -> DeadLetter:
    return DeadLetter(
        id=post_id,
        reason=reason,
        post="{}",
        options="{}",
        message="m",
        worker="w",
        failed_at=1.0,
    )


def test_dead_letters_are_trimmed_with_a_warning(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResultsStore(
        server.client, Settings.model_validate({"dead_letters_length": 100})
    )
    assert store.write([result("1")], [letter("2", "odd \ud800"), letter(None)]) == 1
    assert [(found.id, found.reason) for found in dead_letters(store, 5)] == [
        ("2", "odd ?"),
        (None, "no text"),
    ]
    assert dead_letters(store, 1)[0].id is None
    assert dead_letters(store, 0) == []
    for start in range(0, 1000, 100):
        store.write([], [letter(f"{number}") for number in range(start, start + 100)])
    kept = server.client.xlen(DEAD_LETTERS)
    assert kept < 300
    counters = store.counters()
    assert counters.failed - counters.dead_trimmed == kept
    assert "FEEDMILL_DEAD_LETTERS_LENGTH" in caplog.text


def test_writes_and_finds_more_results_than_lua_unpacks(
    store: ResultsStore, server: RedisServer
) -> None:
    results = [result(f"{number}", digest(f"{number}")) for number in range(10_000)]
    assert store.write(results) == 10_000
    assert store.write(results) == 0
    wanted = [(post.id, found.fingerprint) for post, found in results]
    found = store.find([*wanted, ("10000", "0" * 32)])
    assert [each and each.id for each in found] == [
        *(post_id for post_id, _ in wanted),
        None,
    ]
    assert forget(server.client, [post_id for post_id, _ in wanted]) == (0, 10_000)
    server.client.set(TOMBSTONE + "9999", 1)
    assert store.write(results) == 9_999


@pytest.fixture
def one_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no hour end during the test."""
    now = time.time()
    monkeypatch.setattr(
        "feedmill.shared.results.time",
        SimpleNamespace(time=lambda: now, monotonic=time.monotonic),
    )


@pytest.mark.usefixtures("one_hour")
def test_writes_more_labels_than_lua_unpacks(store: ResultsStore) -> None:
    results = [result(f"{number}", label=f"label {number}") for number in range(9_000)]
    assert store.write(results) == 9_000
    (counts,) = store.labels(hours=1).values()
    assert len(counts) == 1000
    assert store.write([result("again", label=label) for label in counts][:1]) == 1


def test_a_dead_letter_is_stored_once_with_its_latest_reason(
    store: ResultsStore, server: RedisServer
) -> None:
    """A post can fail again: in a killed worker's message, which is redelivered, or in a second
    message.
    """
    other = {
        "message": "another",
        "worker": "v",
        "failed_at": 2.0,
        "attempts": 2,
        "traceback": "here",
    }
    again = letter("1").model_copy(update=other)
    for_another_reason = letter("1", "another reason").model_copy(update=other)
    store.write([], [letter("1"), letter("2"), letter("1")])
    store.write([], [again])
    assert [(found.id, found.reason) for found in dead_letters(store, 9)] == [
        ("1", "no text"),
        ("2", "no text"),
    ]
    assert dead_letters(store, 9)[0].message != "another"
    store.write([], [for_another_reason])
    assert dead_letters(store, 9) == [letter("2"), for_another_reason]
    store.write([], [for_another_reason])
    assert dead_letters(store, 9) == [letter("2"), for_another_reason]
    store.write([], [letter("1").model_copy(update={"options": '{"top_k": 1}'})])
    assert (store.counters().failed, store.counters().dead_trimmed) == (3, 0)
    server.client.delete(DEAD_LETTERS)
    store.write([], [again])
    assert [found.reason for found in dead_letters(store, 9)] == ["no text"]


def test_a_letter_with_another_reason_counts_once_in_its_run(
    store: ResultsStore, server: RedisServer
) -> None:
    for reason in ("no text", "another reason", "no text", "no text"):
        store.write([], [letter("1", reason).model_copy(update={"run": "a"})])
    found = runs.progress(server.client, "a")
    assert found
    assert found.failed == 1
    assert [found.reason for found in dead_letters(store, 9)] == ["no text"]


def test_a_retried_dead_letter_may_fail_before_its_removal(
    store: ResultsStore, server: RedisServer
) -> None:
    store.write([], [letter("1")])
    (entry,) = DeadLetterStream(server.client).newest(9)
    server.client.delete(DEAD_LETTER + dead_letter_digest(entry.letter))
    store.write([], [letter("1", "another reason")])
    server.client.xdel(DEAD_LETTERS, entry.name)
    assert [found.reason for found in dead_letters(store, 9)] == ["another reason"]


def test_dead_letters_without_a_post_differ_by_message(store: ResultsStore) -> None:
    too_long = [
        letter(None).model_copy(update={"post": None, "message": message})
        for message in ("m", "n", "m")
    ]
    store.write([], too_long)
    assert [found.message for found in dead_letters(store, 9)] == ["m", "n"]


def test_a_result_is_stored_once(store: ResultsStore, server: RedisServer) -> None:
    assert store.write([result("1"), result("2")]) == 2
    assert store.write([result("1", at=2.0), result("3")]) == 1
    assert [found.post.id for found in latest(store, 10)] == ["1", "2", "3"]
    assert [found.classified_at for found in store.get("1")] == [1.0]
    assert store.counters() == Counters(stored=3, repeated=1, failed=0)
    assert server.client.xlen(RESULTS_STREAM) == 3


def test_stream_entries_carry_the_post_with_a_shortened_body(
    store: ResultsStore,
) -> None:
    store.write([result("1")])
    (found,) = latest(store, 1)
    assert (found.post.title, found.post.body) == ("a title", "a body tha")
    assert found.classification == result("1").classification


def test_results_expire_and_the_stream_is_trimmed(
    store: ResultsStore, server: RedisServer
) -> None:
    for start in range(0, 1000, 50):
        store.write([result(str(number)) for number in range(start, start + 50)])
    ttl = Settings().results_ttl
    assert all(
        0 < server.client.ttl(key) <= 1.25 * ttl
        for key in server.client.scan_iter(f"{STORED}*")
    )
    # Redis trims whole nodes of 100 entries.
    assert server.client.xlen(RESULTS_STREAM) <= 50 + 100
    assert store.counters().stored == 1000


def test_stores_nothing_about_purged_posts(
    store: ResultsStore, server: RedisServer
) -> None:
    for post_id in ("2", "5", "7"):
        server.client.set(TOMBSTONE + post_id, 1)
    results = [
        result("1"),
        result("2"),
        result("3"),
        result("2", "another"),
        result("1"),
    ]
    assert (
        store.write(
            results, [letter("4"), letter("5"), letter(None), letter("6"), letter("7")]
        )
        == 2
    )
    assert [found.post.id for found in latest(store, 10)] == ["1", "3"]
    assert [found.id for found in dead_letters(store, 10)] == ["4", None, "6"]
    assert store.counters() == Counters(stored=2, repeated=1, failed=3, gone=4)
    assert not has_results(server.client, "2")


def test_stores_a_posts_score_with_its_results(
    store: ResultsStore, server: RedisServer
) -> None:
    store.write([result("1"), result("2")])
    age(server.client, STORED, Settings().results_ttl / 2)
    assert store.score("1") is None
    assert store.refresh_scores({"1": 5, "none": 7}, 10.5) == 1
    assert store.refresh_scores({"1": -3}, 11.0) == 1
    assert store.score("1") == Score(-3, 11.0)
    assert store.score("2") is None
    assert [found.classified_at for found in store.get("1")] == [1.0]
    assert not has_results(server.client, "none")
    store.write([result("1", "another", at=2.0)])
    assert (len(store.get("1")), store.score("1")) == (2, Score(-3, 11.0))
    assert store.refresh_scores({"1": 9}, 12.0) == 1
    age(
        server.client, STORED, 0.7 * Settings().results_ttl
    )  # the first result has expired
    assert (len(store.get("1")), store.score("1"), store.get("2")) == (
        1,
        Score(9, 12.0),
        [],
    )


def test_finds_stored_results_and_counts_them_as_answered(store: ResultsStore) -> None:
    store.write([result("1"), result("2")])
    found = store.find([("1", "f"), ("1", "other"), ("3", "f"), ("2", "f")])
    assert [each and each.id for each in found] == ["1", None, None, "2"]
    assert store.find([]) == []
    assert store.counters() == Counters(stored=2, answered=2)


@pytest.mark.usefixtures("one_hour")
def test_new_results_are_counted_by_label_and_hour(
    store: ResultsStore, server: RedisServer
) -> None:
    store.write([result("1"), result("2", label="books"), result("3")])
    store.write([result("3"), result("4")])  # result 3 is not new
    ((_, counts),) = store.labels(hours=2).items()
    assert counts == {"food": 3, "books": 1}
    (key,) = server.client.keys("feedmill:labels:*")
    assert server.client.ttl(key) > 0


def many(count: int) -> list[Result]:
    return [
        result(f"t3_{number:x}", digest(str(number)), label=f"label {number % 3}")
        for number in range(count)
    ]


def test_a_result_of_sixteen_labels_takes_at_most_160_bytes(
    server: RedisServer,
) -> None:
    store = ResultsStore(server.client, Settings())
    scores = {f"label {number}": (16 - number) / 200 for number in range(16)}
    results = [
        Result(
            each.post,
            each.classification.model_copy(
                update={"scores": scores, "label": "label 0"}
            ),
        )
        for each in many(5000)
    ]
    for start in range(0, 5000, 250):
        store.write(results[start : start + 250])
    keys = server.client.scan_iter(f"{STORED}*")
    usage: list[Any] = [server.client.memory_usage(key) for key in keys]
    assert sum(usage) <= 160 * 5000


def test_expired_results_are_unknown_and_can_be_stored_again(
    server: RedisServer,
) -> None:
    store = ResultsStore(server.client, Settings.model_validate({"results_ttl": 1}))
    store.write(many(1))
    wanted = [(each.post.id, each.classification.fingerprint) for each in many(1)]
    wait_until(lambda: store.find(wanted) == [None], "the result has expired")
    assert store.get("t3_0") == []
    assert ResultsStore(server.client, Settings()).write(many(1)) == 1
    assert store.find(wanted) != [None]


def test_a_writers_clock_decides_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose clock is eight days ahead, longer than results live, neither hides nor drops
    others' results.
    """
    first, second = many(200)[:100], many(200)[100:]
    store = ResultsStore(server.client, Settings())
    store.write(first)
    ahead = time.time() + 8 * 86_400
    with monkeypatch.context() as patched:
        patched.setattr(
            "feedmill.shared.results.time",
            SimpleNamespace(time=lambda: ahead, monotonic=time.monotonic),
        )
        store.write(second)
    found = store.find(
        [(each.post.id, each.classification.fingerprint) for each in first + second]
    )
    assert None not in found
    lifetimes = [
        server.client.ttl(key) for key in server.client.scan_iter(f"{STORED}*")
    ]
    assert 0 < max(map(int, lifetimes)) <= 1.25 * Settings().results_ttl + 1
    assert sum(sum(counts.values()) for counts in store.labels(2).values()) == 200


def test_a_lost_context_is_like_a_missing_result(
    store: ResultsStore, server: RedisServer
) -> None:
    store.write(many(1))
    wanted = [(each.post.id, each.classification.fingerprint) for each in many(1)]
    (key,) = server.client.scan_iter(f"{STORED}:*")
    (context,) = (
        name
        for name in server.client.hkeys(key)
        if re.fullmatch(f"{CONTEXT_NAME}[0-9a-f]+", str(name))
    )
    server.client.hdel(key, context)
    other = ResultsStore(server.client, Settings())
    assert (other.find(wanted), other.get("t3_0")) == ([None], [])
