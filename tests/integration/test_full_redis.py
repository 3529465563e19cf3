"""Operator commands on a Redis that rejects writes: at its memory limit, and as a read-only
replica.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedmill.monitoring import watch
from feedmill.monitoring.watch import HealthPart
from feedmill.shared.broker import make_app, publish
from feedmill.shared.keys import COUNTERS, DEAD_LETTERS, LIVE_GAPS, WORKERS
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.model_routing import EXPECTED_S, announce, deregister, register
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.integration.test_results import letter, result
from tests.support import RedisServer, feedmill


@pytest.fixture
def filled(server: RedisServer, settings: Settings) -> RedisServer:
    """A Redis that holds a result, dead letters, a waiting message, a model and a Reddit gap."""
    ResultsStore(server.client, settings).write(
        [result("1")], [letter("2"), letter("3")]
    )
    with make_app(settings) as app:
        publish(app, [[Post(id="4", title="waits")]], ClassifyOptions())
    announce(server.client, "feedmill", "m")
    server.client.hset(LIVE_GAPS, "tea 1", json.dumps(["reddit", "tea", 1.0, 2.0, 3.0]))
    return server


@pytest.fixture
def full(filled: RedisServer) -> Iterator[RedisServer]:
    filled.client.config_set("maxmemory", 1)
    yield filled
    filled.client.config_set("maxmemory", 0)


@pytest.fixture
def replica(filled: RedisServer) -> Iterator[RedisServer]:
    filled.client.replicaof("127.0.0.1", "1")
    yield filled
    filled.client.replicaof("NO", "ONE")


def test_status_reads_a_full_redis(full: RedisServer, settings: Settings) -> None:
    seen = watch.status(connect_for_monitoring(settings), make_app(settings), settings)
    assert seen.queue.waiting == 1
    assert (seen.results.stored, seen.dead_letters, seen.gaps) == (1, 2, 1)
    assert (seen.asked, seen.workers) == (False, {})
    assert seen.memory
    assert seen.memory.used >= watch.FULL_SHARE * seen.memory.limit
    assert full.client.exists(WORKERS) == 0


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["status"], 0, "workers"),
        (["health"], 1, "Redis at {address} "),
        (["health", "--check", "memory"], 1, "maxmemory"),
        (["results"], 0, "a title"),
        (["export", "out.jsonl"], 0, "1 row"),
        (["ingest", "gaps", "--clear"], 0, "r/tea"),
        (["dead", "list"], 0, "no text"),
        (["dead", "drop", "--all", "--yes"], 0, "2 "),
        (["dead", "retry", "2"], 1, "feedmill: "),
        (["purge", "1", "2"], 0, "results: 1, entries: 1, dead letters: 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_work_at_the_memory_limit(
    full: RedisServer,
    settings: Settings,
    tmp_path: Path,
    command: list[str],
    status: int,
    said: str,
) -> None:
    ended = feedmill(*command, cwd=tmp_path, FEEDMILL_REDIS_URL=full.url)
    assert ended.returncode == status, ended.stderr
    assert said.format(address=settings.redis_address) in ended.stdout + ended.stderr


def test_a_failed_retry_keeps_the_dead_letter(
    full: RedisServer, tmp_path: Path
) -> None:
    post = json.dumps({"id": "2", "title": "a title"})
    full.client.config_set("maxmemory", 0)
    ResultsStore(full.client, Settings()).write(
        [], [letter("5").model_copy(update={"post": post})]
    )
    full.client.config_set("maxmemory", 1)
    ended = feedmill("dead", "retry", "5", cwd=tmp_path, FEEDMILL_REDIS_URL=full.url)
    assert ended.returncode == 2
    assert f"Redis at 127.0.0.1:{full.port}/0" in ended.stderr
    assert full.client.xlen(DEAD_LETTERS) == 3


def test_health_reports_a_read_only_replica(
    replica: RedisServer, settings: Settings
) -> None:
    found = {
        finding.part: finding
        for finding in watch.check_health(settings, tuple(HealthPart))
    }
    assert not found[HealthPart.REDIS].well
    assert "replica" in found[HealthPart.REDIS].said
    assert not found[HealthPart.WORKERS].well
    assert found[HealthPart.QUEUE].said.startswith("1 ")
    assert replica.client.hget(COUNTERS, "stored") == "1"


def test_healths_test_write_changes_nothing(
    server: RedisServer, settings: Settings
) -> None:
    (found,) = watch.check_health(settings, (HealthPart.REDIS,))
    assert found.well
    assert server.client.dbsize() == 0


def test_health_queries_registered_workers_by_name(
    server: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query ends as soon as the last registered worker has answered."""
    asked: list[Any] = []

    def answers(_: object, nodes: list[str] | None, __: float) -> dict[str, Any]:
        asked.append(nodes)
        return {}

    monkeypatch.setattr(watch, "worker_statistics", answers)
    assert (
        "`feedmill worker`"
        in watch.check_health(settings, (HealthPart.WORKERS,))[0].said
    )
    register(server.client, "b@host")
    register(server.client, "a@host")
    said = watch.check_health(settings, (HealthPart.WORKERS,))[0].said
    assert asked == [None, ["a@host", "b@host"]]
    assert re.match(r"a@host .* \d+ s ago.*b@host .* \d+ s ago", said)
    deregister(server.client, "a@host")
    server.client.hset(WORKERS, "b@host", time.time() - EXPECTED_S - 60)
    assert (
        "`feedmill worker`"
        in watch.check_health(settings, (HealthPart.WORKERS,))[0].said
    )
    register(server.client, "c@host")
    assert server.client.hkeys(WORKERS) == ["c@host"]
