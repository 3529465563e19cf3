"""feedmill/monitoring/capacity.py on every redis-server of this machine: what the current rate of posts needs."""

from typing import Any

import pytest

from feedmill.monitoring import watch
from feedmill.monitoring.capacity import Memory, estimate_memory
from feedmill.shared.results import HOUR_S, ResultsStore
from feedmill.shared.settings import Settings
from tests.integration.test_results import result
from tests.support import RedisServer, mark_sent

#: Posts per second.
RATE = 200.0


@pytest.fixture
def store(server: RedisServer) -> ResultsStore:
    """A store of 20 results whose stream is at its maximum length."""
    settings = Settings.model_validate({"results_stream_length": 1})
    store = ResultsStore(server.client, settings)
    store.write([result(str(number)) for number in range(20)])
    for number in range(20):
        mark_sent(server.client, str(number))
    return store


def seen(server: RedisServer, room: float, rate: float = RATE) -> Memory:
    """Forecast for a Redis that has `room` bytes left."""
    info: Any = server.client.info("memory")
    server.client.config_set("maxmemory", int(info["used_memory"] + room))
    try:
        found, _ = estimate_memory(server.client, Settings.model_validate({"results_stream_length": 1}), rate)
    finally:
        server.client.config_set("maxmemory", 0)
    assert found
    return found


@pytest.mark.usefixtures("store")
def test_memory_within_the_bounds_never_fills(server: RedisServer) -> None:
    """At a rate that would need terabytes, results and sent records are dropped instead."""
    bounds = Settings()
    found = seen(server, 1.1 * (bounds.results_memory + bounds.sent_memory), rate=100_000.0)
    assert found.results_needed > 10**12
    assert found.needed < found.limit
    assert not found.warning
    assert found.results_kept_seconds
    assert found.results_kept_seconds < HOUR_S


@pytest.mark.usefixtures("store")
def test_warns_if_the_rate_needs_more_than_the_limit(server: RedisServer) -> None:
    found = seen(server, 10**9, rate=100_000.0)
    assert found.needed > found.limit
    assert "100,000.0 posts/s" in found.warning
    assert "FEEDMILL_RESULTS_MEMORY" in found.warning
    assert watch._lasting(found) == (True, found.warning)


def test_health_fails_if_memory_is_nearly_full() -> None:
    for used, well in ((940_000_000, True), (950_000_000, False)):
        found = watch._lasting(Memory(used, 10**9, False, RATE))
        assert found[0] == well
        assert "of 1.0 GB" in found[1]
        assert ("maxmemory" in found[1]) == (not well)
