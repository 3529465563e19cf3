"""`feedmill status` and `health` on every redis-server of this machine: what the current rate of posts needs."""

from typing import Any

from feedmill.monitoring import watch
from feedmill.shared.metrics import needs, read_memory
from feedmill.shared.results import HOUR_S, ResultsStore
from feedmill.shared.settings import Settings
from tests.integration.test_results import result
from tests.support import RedisServer, mark_sent

SETTINGS = Settings.model_validate({"results_stream_length": 1})
#: Posts per second that would need terabytes.
RATE = 100_000.0


def seen(server: RedisServer, room: float) -> watch.Status:
    """Return a snapshot of a Redis with 20 results that has `room` bytes left."""
    store = ResultsStore(server.client, SETTINGS)
    store.write([result(str(number)) for number in range(20)])
    for number in range(20):
        mark_sent(server.client, str(number))
    info: Any = server.client.info("memory")
    server.client.config_set("maxmemory", int(info["used_memory"] + room))
    try:
        found = watch.status(server.client, None, SETTINGS)
        memory = read_memory(server.client, SETTINGS)
    finally:
        server.client.config_set("maxmemory", 0)
    assert memory
    return found._replace(memory=memory, needs=needs(memory.kept, SETTINGS, RATE), results_per_second=RATE)


def test_memory_within_the_bounds_never_fills(server: RedisServer) -> None:
    """At a rate that would need terabytes, results and sent records are dropped instead."""
    found = seen(server, 1.1 * (SETTINGS.results_memory + SETTINGS.sent_memory))
    assert found.needs
    assert found.needs.results > 10**12
    assert len(found.memory_lines()) == 1
    assert found.needs.results_kept_s
    assert found.needs.results_kept_s < HOUR_S


def test_warns_if_the_rate_needs_more_than_the_limit(server: RedisServer) -> None:
    found = seen(server, 10**9)
    well, said = watch._lasting(found)
    assert well
    assert said.startswith("warning: 100,000.0 posts/s need ")
    assert "FEEDMILL_RESULTS_MEMORY" in said


def test_health_fails_if_memory_is_nearly_full(server: RedisServer) -> None:
    found = seen(server, 2 * 10**9)
    assert found.memory
    for used, well in ((940_000_000, True), (950_000_000, False)):
        full = found._replace(memory=found.memory._replace(used=used, limit=10**9), results_per_second=0.0)
        is_well, said = watch._lasting(full)
        assert is_well == well
        assert "of 1.0 GB" in said
        assert ("maxmemory" in said) == (not well)
