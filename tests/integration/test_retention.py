"""Bounded memory of results and sent records (shared/metrics.py) on every redis-server of this
machine.
"""

import re
from typing import Any

import pytest
from redis.exceptions import RedisError

from feedmill.outcomes.followers import Follower
from feedmill.outcomes.rows import Missed
from feedmill.producers.push import SENT, Mark, lookup, mark_sent
from feedmill.shared.keys import MARKS, RESULTS_STREAM, STORED
from feedmill.shared.messages import digest
from feedmill.shared.metrics import read_memory
from feedmill.shared.purge import purge
from feedmill.shared.results import (
    CONTEXT_NAME,
    Result,
    ResultsStore,
    memory_limits,
    stored_ids,
)
from feedmill.shared.settings import Settings
from tests.integration.test_results import result
from tests.support import RedisServer, age, find, sent_count

HOUR_S = 3600
#: Bytes. Settings accept ten megabytes or more, which would take the tests seconds to fill.
SMALL = 500_000


def settings(**values: Any) -> Settings:
    """Return settings that are not validated."""
    return Settings().model_copy(update={"results_memory": SMALL} | values)


def results(start: int, count: int, **changed: Any) -> list[Result]:
    made = [
        result(f"{number:05}", digest(f"{number}"))
        for number in range(start, start + count)
    ]
    return [Result(post, found.model_copy(update=changed)) for post, found in made]


def fill(
    server: RedisServer, count: int, per_write: int = 100, **values: Any
) -> ResultsStore:
    """Store results; the first ones expire first."""
    store = ResultsStore(server.client, settings(**values))
    for start in range(0, count, per_write):
        store.write(results(start, per_write))
    return store


def memory(server: RedisServer, *patterns: str) -> int:
    """Return the bytes of all keys of these patterns, by MEMORY USAGE."""
    keys = [
        key for pattern in patterns for key in server.client.scan_iter(pattern, 1000)
    ]
    pipe: Any = server.client.pipeline(transaction=False)
    for key in keys:
        pipe.memory_usage(key, samples=0)
    return sum(pipe.execute())


def test_drops_the_oldest_results(server: RedisServer) -> None:
    store = ResultsStore(server.client, settings())
    for start in range(0, 6000, 100):
        store.write(results(start, 100))
        assert memory(server, f"{STORED}:*", RESULTS_STREAM) < SMALL
    left = {int(post_id) for post_id in stored_ids(server.client)}
    assert left == set(range(6000 - len(left), 6000))
    assert len(left) > 1000
    assert store.counters().dropped == 6000 - len(left)
    assert store.get("05999")
    assert not store.get("00000")


def test_trims_the_stream_to_its_share_and_tells_readers(server: RedisServer) -> None:
    store = ResultsStore(server.client, settings())
    store.write(results(0, 100))
    reader = Follower(server.client, since=0.0)
    assert len(reader.read() or []) == 100
    limit = memory_limits(settings())["stream"]
    for start in range(100, 3000, 50):
        store.write(results(start, 50))
        assert memory(server, RESULTS_STREAM) < 1.3 * limit
    length = server.client.xlen(RESULTS_STREAM)
    assert 0.6 * limit < memory(server, RESULTS_STREAM)
    assert store.counters().trimmed == 3000 - length
    first, *others = reader.read() or []
    assert isinstance(first.item, Missed)
    assert first.item.count == 3000 - 100 - length
    assert len(others) == min(length, 500)


@pytest.mark.parametrize("sizes", [(1, 40), (40, 1)])
def test_knows_the_bytes_of_the_stream_when_entries_change_size(
    server: RedisServer, sizes: tuple[int, int]
) -> None:
    given = settings(
        results_stream_length=800, results_memory=2 * 10**7, stream_body=10_000
    )
    store = ResultsStore(server.client, given)
    for size in sizes:
        for start in range(0, 600, 50):
            posts = results(start + 1000 * size, 50)
            store.write(
                [
                    Result(post.model_copy(update={"body": "text " * 20 * size}), each)
                    for post, each in posts
                ]
            )
            found = read_memory(server.client)
            used = memory(server, RESULTS_STREAM)
            # Each entry counts 200 bytes beside its texts, more than short ones take. jemalloc
            # rounds long ones up.
            assert (
                0.75 * used
                < found.stream_bytes
                < used + 200 * server.client.xlen(RESULTS_STREAM)
            )
    assert server.client.xlen(RESULTS_STREAM) < 1200


def test_drops_the_contexts_of_dropped_results(server: RedisServer) -> None:
    store = ResultsStore(server.client, settings())
    for start in range(0, 2000, 100):
        store.write(
            [
                each
                for number in range(start, start + 100)
                for each in results(number, 1, worker=f"w{number}")
            ]
        )
    reader = ResultsStore(server.client, settings())
    left = {post_id: reader.get(post_id) for post_id in stored_ids(server.client)}
    assert 100 < len(left) < 2000
    fields: Any = [
        name
        for key in server.client.scan_iter(f"{STORED}:*")
        for name in server.client.hkeys(key)
    ]
    contexts = [
        name for name in fields if re.fullmatch(f"{CONTEXT_NAME}[0-9a-f]{{16}}", name)
    ]
    assert len(contexts) == len(left) == read_memory(server.client).results
    assert all(
        found and found[0].worker == f"w{int(post_id)}"
        for post_id, found in left.items()
    )


def marks(start: int, count: int) -> list[Mark]:
    return [
        Mark.of(f"{number:05}", digest(str(number)))
        for number in range(start, start + count)
    ]


def test_drops_the_oldest_sent_records(server: RedisServer) -> None:
    count, store = (
        20_000,
        ResultsStore(server.client, settings(results_memory=2 * SMALL)),
    )
    for start in range(0, count, 500):
        mark_sent(server.client, marks(start, 500), HOUR_S, SMALL)
        store.write(results(start, 1))
        assert memory(server, f"{MARKS}:*") < SMALL
    found = [
        each
        for start in range(0, count, 500)
        for each in lookup(server.client, marks(start, 500))
    ]
    left = found.count(SENT)
    assert found == [0] * (count - left) + [SENT] * left
    assert left == sent_count(server.client) > 0.2 * count
    assert store.counters().sent_dropped > 0


def test_a_mark_takes_few_bytes(server: RedisServer) -> None:
    for start in range(0, 100_000, 20_000):
        mark_sent(server.client, marks(start, 20_000), HOUR_S, 10**9)
    assert memory(server, f"{MARKS}:*") < 60 * 100_000


def test_does_not_count_expired_results_as_dropped(server: RedisServer) -> None:
    fill(server, 1000, results_memory=10**7)
    age(server.client, STORED, 8 * 86_400)
    store = ResultsStore(server.client, settings())
    store.write(results(1000, 1))
    assert list(stored_ids(server.client)) == ["01000"]
    assert store.counters().dropped == 0


def test_drops_at_maxmemory(server: RedisServer) -> None:
    fill(server, 1000, results_memory=10**7)
    mark_sent(server.client, marks(0, 5000), HOUR_S, 10**7)
    low = ResultsStore(server.client, settings(results_memory=60_000))
    server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisError, match="maxmemory"):
            low.write(results(1000, 1))
    finally:
        server.client.config_set("maxmemory", 0)
    counters = low.counters()
    assert counters.dropped >= 1000
    assert counters.trimmed > 500
    assert counters.sent_dropped > 1000
    assert memory(server, f"{STORED}:*", f"{MARKS}:*", RESULTS_STREAM) < 80_000


def test_adds_up_with_purged_results(server: RedisServer) -> None:
    store = fill(server, 2000, results_memory=10**7)
    purged = purge(
        server.client, settings(), [f"{number:05}" for number in range(1500, 1600)]
    )["results"]
    assert purged == 100
    assert (
        store.counters().stored == len(list(stored_ids(server.client))) + purged == 2000
    )


def of_each_model(start: int, count: int, models: int) -> list[Result]:
    """Return results of several models of each post, each with a context of its own."""
    made: list[Result] = []
    for model in range(models):
        for post, found in results(start, count, model=f"model {model}"):
            fingerprint = digest(f"{post.id} {model}")
            made.append(
                Result(post, found.model_copy(update={"fingerprint": fingerprint}))
            )
    return made


def test_counts_results_and_not_posts(server: RedisServer) -> None:
    """160 posts have four results each, with four contexts and refreshed scores beside them."""
    store = ResultsStore(server.client, settings(results_memory=10**7))
    for model_results in (of_each_model(start, 40, 4) for start in range(0, 160, 40)):
        store.write(model_results)
    store.refresh_scores({f"{number:05}": 7 for number in range(160)}, 1.0)
    assert read_memory(server.client).results == 640
    assert purge(server.client, settings(), ["00000", "00001"])["results"] == 8
    assert read_memory(server.client).results == 632
    assert (
        purge(server.client, settings(), [f"{number:05}" for number in range(160)])[
            "results"
        ]
        == 632
    )
    assert read_memory(server.client).results == 0
    assert store.counters().stored == 640


def test_counters_of_results_add_up(server: RedisServer) -> None:
    """Results stored are those kept, dropped and purged, however many a post has."""
    store = ResultsStore(server.client, settings())
    purged = 0
    for start in range(0, 1600, 40):
        store.write(of_each_model(start, 40, 4))
        purged += purge(server.client, settings(), [f"{start:05}"])["results"]
    kept = sum(len(store.get(post_id)) for post_id in set(stored_ids(server.client)))
    counters = store.counters()
    assert counters.dropped > 0
    assert counters.stored == 6400 == kept + counters.dropped + purged


def test_measures_what_is_kept(server: RedisServer) -> None:
    assert read_memory(server.client)[3:8] == (0, 0, 0, 0, 0)
    fill(server, 2000, results_memory=10**7)
    mark_sent(server.client, marks(0, 3000), HOUR_S, 10**7)
    kept = read_memory(server.client)
    assert kept.results == 2000
    assert kept.sent == pytest.approx(3000, rel=0.1)
    keys: Any = server.client.keys()
    assert all(find(key) for key in keys)
    assert kept.results_bytes - kept.stream_bytes == pytest.approx(
        memory(server, f"{STORED}:*"), rel=0.1
    )
