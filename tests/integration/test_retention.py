"""shared/retention.py on every redis-server of this machine: bounded memory of results and sent records."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from feedmill.cli import status
from feedmill.monitoring.capacity import estimate_memory, span
from feedmill.reading.stream import Follower, Missed
from feedmill.shared import retention
from feedmill.shared.keys import CONTEXTS, COUNTERS, MARKS, RESULTS_STREAM, STORED, STREAM_SIZES, SWEEPER, find
from feedmill.shared.messages import digest
from feedmill.shared.metrics import RedisMetrics
from feedmill.shared.purge import purge
from feedmill.shared.results import Result, ResultsStore, stored_ids
from feedmill.shared.retention import MemoryBounds, check_interval, measure, needs
from feedmill.shared.scripts import queue
from feedmill.shared.scripts.queue import SENT, Mark, lookup
from feedmill.shared.scripts.results import stream_limit
from feedmill.shared.settings import Settings, load
from tests.integration.test_results import result
from tests.support import RedisServer, age_results, sent_checksums, wait_until

HOUR_S = 3600
#: Bytes. Settings accept ten megabytes or more, which would take the tests seconds to fill.
SMALL = 500_000


def settings(**values: Any) -> Settings:
    """Return settings that are not validated."""
    return Settings().model_copy(update={"results_memory": SMALL, "sent_memory": SMALL} | values)


def results(start: int, count: int, **changed: Any) -> list[Result]:
    made = [result(f"{number:05}", digest(f"{number}")) for number in range(start, start + count)]
    return [Result(post, found.model_copy(update=changed)) for post, found in made]


def fill(server: RedisServer, count: int, per_age: int = 500, **values: Any) -> ResultsStore:
    """Store results; the first ones expire first."""
    for start in range(0, count, per_age):
        given = settings(results_ttl=HOUR_S + start, **values)
        ResultsStore(server.client, given).write(results(start, per_age))
    return ResultsStore(server.client, settings())


def memory(server: RedisServer, *patterns: str) -> int:
    """Return the bytes of all keys of these patterns, by MEMORY USAGE."""
    keys = [key for pattern in patterns for key in server.client.scan_iter(pattern, 1000)]
    pipe: Any = server.client.pipeline(transaction=False)
    for key in keys:
        pipe.memory_usage(key, samples=0)
    return sum(pipe.execute())


def test_drops_the_oldest_results(server: RedisServer) -> None:
    count = 5000
    store = fill(server, count)
    server.client.delete(RESULTS_STREAM)
    limit = int(0.7 * memory(server, f"{STORED}:*"))
    MemoryBounds(server.client, settings(results_memory=limit)).check()
    left = {int(post_id) for post_id in stored_ids(server.client)}
    assert memory(server, f"{STORED}:*") < limit
    counters = store.counters()
    assert counters.dropped == count - len(left)
    # Results of one age go in no particular order.
    assert 0 <= min(left) - 500 <= counters.dropped <= min(left) + 500
    assert store.get(f"{count - 1:05}")
    assert not store.get("00000")
    MemoryBounds(server.client, settings(results_memory=limit)).check()
    assert store.counters() == counters


def test_trims_the_stream_to_its_share_and_tells_readers(server: RedisServer) -> None:
    store = ResultsStore(server.client, settings())
    store.write(results(0, 100))
    reader = Follower(server.client, since=0.0)
    assert len(reader.read() or []) == 100
    limit = stream_limit(settings())
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
def test_knows_the_bytes_of_the_stream_when_entries_change_size(server: RedisServer, sizes: tuple[int, int]) -> None:
    given = settings(results_stream_length=800, results_memory=2 * 10**7, stream_body=10_000)
    store = ResultsStore(server.client, given)
    # libc, with which the embedded server is built, and jemalloc round sizes differently.
    tolerance = 0.35 if "jemalloc" in server.client.info("memory")["mem_allocator"] else 0.4
    for size in sizes:
        for start in range(0, 600, 50):
            posts = results(start + 1000 * size, 50)
            store.write([Result(post.model_copy(update={"body": "text " * 20 * size}), each) for post, each in posts])
            found = measure(server.client, given)
            assert found.stream_bytes == pytest.approx(memory(server, RESULTS_STREAM), rel=tolerance)
    assert found.stream_entries < 1200
    assert server.client.llen(STREAM_SIZES) < 80


def test_drops_the_contexts_of_dropped_results(server: RedisServer) -> None:
    for start in range(0, 1000, 100):
        store = ResultsStore(server.client, settings(results_ttl=HOUR_S + start))
        store.write([each for number in range(start, start + 100) for each in results(number, 1, worker=f"w{number}")])
    server.client.delete(RESULTS_STREAM)
    limit = memory(server, f"{STORED}:*", "feedmill:context:*") // 2
    MemoryBounds(server.client, settings(results_memory=limit)).check()
    assert memory(server, f"{STORED}:*", "feedmill:context:*") < limit
    left = {post_id: store.get(post_id) for post_id in stored_ids(server.client)}
    assert len(left) == 1000 - store.counters().dropped > 100
    # Of results that expire at the same second, some were dropped and their contexts kept.
    assert len(left) <= server.client.zcard(CONTEXTS) < len(left) + 100
    assert all(found and found[0].worker == f"w{int(post_id)}" for post_id, found in left.items())


def marks(start: int, count: int) -> list[Mark]:
    return [Mark.of(f"{number:05}", digest(str(number))) for number in range(start, start + count)]


def test_drops_the_oldest_sent_records(server: RedisServer) -> None:
    count = 20_000
    for start in range(0, count, 500):
        queue.mark(server.client, marks(start, 500), HOUR_S * (2 + start // 5000))
    limit = int(measure(server.client, settings()).sent_bytes)
    MemoryBounds(server.client, settings(sent_memory=limit)).check()
    assert memory(server, f"{MARKS}:*") < 0.9 * limit
    dropped = ResultsStore(server.client, settings()).counters().sent_dropped
    assert dropped == count - len(sent_checksums(server.client)) > 0.1 * count
    found = [each for start in range(0, count, 500) for each in lookup(server.client, marks(start, 500))]
    assert set(found[10_000:]) == {SENT}
    # Of one hour, the first records of each bucket go.
    half = 0 if sum(found[:5000]) else 5000
    assert sum(found[half : half + 2500]) < sum(found[half + 2500 : half + 5000])


def test_does_not_count_expired_records_as_dropped(server: RedisServer) -> None:
    store = fill(server, 1000)
    server.client.delete(RESULTS_STREAM)
    age_results(server.client, HOUR_S + 250)
    MemoryBounds(server.client, settings(results_memory=memory(server, f"{STORED}:*") // 4)).check()
    left = len(set(stored_ids(server.client)))
    assert 0 < store.counters().dropped < 500
    assert left < 500


def test_drops_at_maxmemory(server: RedisServer) -> None:
    store = fill(server, 3000)
    queue.mark(server.client, marks(0, 5000), HOUR_S)
    server.client.config_set("maxmemory", 1)
    try:
        bounds = MemoryBounds(server.client, settings(results_memory=100_000, sent_memory=20_000))
        bounds.check()
    finally:
        server.client.config_set("maxmemory", 0)
    assert store.counters().dropped > 1000
    assert store.counters().trimmed > 1000
    assert store.counters().sent_dropped > 1000
    assert memory(server, f"{STORED}:*", RESULTS_STREAM) < 100_000
    bounds.check()


def test_one_of_several_workers_checks_after_an_interval(server: RedisServer) -> None:
    asked: list[int] = []
    given = settings()
    stores = [ResultsStore(server.client, given, lambda number=number: asked.append(number)) for number in range(3)]  # type: ignore[misc]
    interval = check_interval(given)
    for start in range(0, 3 * interval, 10):
        stores[start // 10 % 3].write(results(start, 10))
        stores[start // 10 % 3].write(results(start, 10))
    assert len(asked) == 3


def test_one_worker_sweeps_at_a_time(server: RedisServer) -> None:
    store = fill(server, 2000)
    first, second = (MemoryBounds(server.client, settings(results_memory=100_000)) for _ in range(2))
    assert first._lock(nx=True)
    second.check()
    assert store.counters().dropped == 0
    assert store.counters().trimmed > 0
    server.client.delete(SWEEPER)
    second.check()
    assert store.counters().dropped > 0
    assert not server.client.exists(SWEEPER)


def test_adds_up_with_purged_results(server: RedisServer) -> None:
    store = fill(server, 4000)
    bounds = MemoryBounds(server.client, settings(results_memory=300_000))
    purged = purge(server.client, settings(), [f"{number:05}" for number in range(3500, 3600)]).results
    bounds.check()
    left = len(list(stored_ids(server.client)))
    counters = store.counters()
    assert purged == 100
    assert counters.dropped > 0
    assert counters.stored == left + purged + counters.dropped


@pytest.fixture
def running(server: RedisServer) -> Iterator[MemoryBounds]:
    bounds = MemoryBounds(server.client, settings())
    bounds.start()
    yield bounds
    bounds.stop()


def test_thread_checks_when_told(server: RedisServer, running: MemoryBounds) -> None:
    store = ResultsStore(server.client, settings(), running.check_soon)
    for start in range(0, 6000, 100):
        store.write(results(start, 100))
    wait_until(lambda: store.counters().dropped and store.counters().trimmed, "old results are dropped")
    running._thread.join(0)
    assert running._thread.is_alive()


def test_thread_survives_a_failing_redis(server: RedisServer, running: MemoryBounds) -> None:
    server.client.set(RESULTS_STREAM, "of another application")
    running.check_soon()
    wait_until(lambda: running._warned, "the check has failed")
    server.client.delete(RESULTS_STREAM)
    assert running._thread.is_alive()


def test_measures_what_is_kept(server: RedisServer) -> None:
    assert measure(server.client, settings())[:3] == (0, SMALL, 0)
    fill(server, 2000, results_memory=10**7)
    queue.mark(server.client, marks(0, 3000), HOUR_S)
    kept = measure(server.client, settings())
    assert kept.results == pytest.approx(2000, rel=0.1)
    assert kept.sent == pytest.approx(3000, rel=0.1)
    assert kept.stream_entries == 2000
    keys: Any = server.client.keys()
    assert all(find(key) for key in keys)
    records: list[Any] = [server.client.memory_usage(key) for key in server.client.scan_iter(f"{STORED}:*")]
    assert sum(records) < kept.result_bytes * kept.results < 2 * sum(records)


def test_needs_grow_with_the_rate_and_end_at_the_bounds(server: RedisServer) -> None:
    fill(server, 1000)
    queue.mark(server.client, marks(0, 1000), HOUR_S)
    given = Settings()
    kept = measure(server.client, given)
    slow, fast = needs(kept, given, 1.0), needs(kept, given, 1000.0)
    assert slow.results_kept_s is slow.sent_kept_s is None
    assert fast.results_kept_s
    assert fast.sent_kept_s
    assert fast.results_kept_s < given.results_ttl
    assert 800 * slow.sent < fast.sent < 1200 * slow.sent
    assert fast.of_redis(kept, 10**8) < given.results_memory + given.sent_memory + 10**8 < fast.results
    assert needs(kept, given, 0.0)[2:] == (None, None)


def test_status_and_metrics_say_what_is_kept_and_dropped(server: RedisServer) -> None:
    given = settings(redis_url=SecretStr(server.url), results_memory=10**7)
    store = fill(server, 1000)
    server.client.hset(COUNTERS, "dropped", 1234)
    memory, kept = estimate_memory(server.client, given, 1000.0)
    lines = status._memory(SimpleNamespace(memory=memory, kept=kept, results=store.counters()))  # type: ignore[arg-type]
    text = "\n".join(lines)
    assert "1,234 results dropped" in text
    assert memory
    assert memory.results_kept_seconds
    assert f"results kept for about {span(memory.results_kept_seconds)}" in text
    assert "sent records dropped" not in text
    found = RedisMetrics(given).values()
    assert found["feedmill_results_dropped_total"] == 1234
    assert found["feedmill_memory_limit_bytes"]["results"] == 10**7
    assert 0 < found["feedmill_memory_bytes"]["results"] < 10**6
    assert found["feedmill_memory_kept_seconds"]["sent"] == given.sent_ttl


def test_sizes_have_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_RESULTS_MEMORY", "64MB")
    monkeypatch.setenv("FEEDMILL_SENT_MEMORY", "1GiB")
    assert (load().results_memory, load().sent_memory) == (64 * 10**6, 2**30)


def test_cut_drops_a_share_of_the_bytes() -> None:
    times = {3: 10, 1: 20, 2: 20}
    assert retention._cut(times, 400.0, 1000.0) == (1, 1.0)
    assert retention._cut(times, 450.0, 1000.0) == pytest.approx((2, 2.5 / 20))
    assert retention._cut(times, 9000.0, 1000.0) == pytest.approx((2, 5 / 20))
    assert retention._cut({}, 1.0, 0.0) == (0, 0.0)
