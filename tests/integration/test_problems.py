"""shared/problems.py: what `status`, `health` and metrics say of Redis' settings, messages that
are due later, a Flower that hears nothing, and a script that keeps Redis busy.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from celery import Celery
from redis import Redis
from redis.exceptions import RedisError

from feedmill.monitoring.watch import Finding, HealthPart, check_health, status
from feedmill.shared.broker import CLASSIFY_TASK, queue_depth
from feedmill.shared.keys import FLOWERS
from feedmill.shared.metrics import ProcessMetrics, connect_for_monitoring
from feedmill.shared.problems import (
    MAX_FLOWERS,
    NAMES,
    REPORT_TTL_S,
    flower_reports,
    remove_flower,
    report_flower,
)
from feedmill.shared.settings import Settings
from tests.support import RedisServer, feedmill, standing_in, wait_until

pytestmark = pytest.mark.each_redis


def named_by(settings: Settings) -> tuple[set[str], set[str]]:
    """Return the names of the problems in a snapshot, and those that the metric shows."""
    snapshot = status(connect_for_monitoring(settings), None, settings)
    values = ProcessMetrics(settings).redis_values()["feedmill_problem"]
    assert set(values) == set(NAMES)
    json.dumps(snapshot.as_json())
    in_snapshot = {problem.name for problem in snapshot.problems}
    in_metrics = {name for name, value in values.items() if value}
    return in_snapshot, in_metrics


def finding(settings: Settings, part: HealthPart) -> Finding:
    (found,) = check_health(settings, [part])
    return found


@pytest.fixture
def memory(redis: RedisServer) -> Iterator[Any]:
    """A function that sets Redis' memory limit and policy."""

    def change(limit: int, policy: str) -> None:
        redis.client.config_set("maxmemory", limit)
        redis.client.config_set("maxmemory-policy", policy)

    yield change
    change(0, "noeviction")


def test_names_nothing_while_all_is_well(
    redis: RedisServer, settings: Settings
) -> None:
    assert named_by(settings) == (set(), set())
    assert finding(settings, HealthPart.FLOWER) == (
        HealthPart.FLOWER,
        True,
        "none runs",
    )
    report_flower(redis.client, "host:5555", 1.0)
    assert named_by(settings) == (set(), set())
    assert finding(settings, HealthPart.FLOWER).said == "host:5555 hears events"


def test_names_an_eviction_policy_and_bounds_above_maxmemory(
    settings: Settings, memory: Any
) -> None:
    bound = settings.results_memory + settings.sent_memory
    memory(bound, "noeviction")
    assert named_by(settings) == (set(), set())
    memory(bound - 1, "allkeys-lru")
    assert named_by(settings) == ({"eviction", "bounds"}, {"eviction", "bounds"})
    found = finding(settings, HealthPart.MEMORY)
    assert not found.well
    assert "set maxmemory-policy noeviction" in found.said
    assert "lower FEEDMILL_RESULTS_MEMORY" in found.said


def test_names_bounds_above_the_machines_memory_and_stays_healthy(
    redis: RedisServer, settings: Settings, memory: Any
) -> None:
    """A small machine without maxmemory runs with the default bounds: Redis refuses nothing."""
    machine: Any = redis.client.info("memory")
    large = settings.model_copy(
        update={"results_memory": machine["total_system_memory"]}
    )
    assert named_by(large) == ({"bounds"}, {"bounds"})
    found = finding(large, HealthPart.MEMORY)
    assert found.well
    assert "Lower FEEDMILL_RESULTS_MEMORY" in found.said
    assert "set maxmemory" in found.said
    assert "refuses messages before" not in found.said
    memory(10**9, "noeviction")
    assert not finding(large, HealthPart.MEMORY).well


def test_names_as_many_delayed_messages_as_may_wait(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    few = settings.model_copy(update={"queue_limit": 3})
    with (
        Celery(broker=redis.url, set_as_current=False) as app,
        standing_in(redis, tmp_path),
    ):
        for number in range(3):
            assert named_by(few) == (set(), set())
            app.send_task(
                CLASSIFY_TASK,
                kwargs={"posts": [{"id": f"p{number}", "title": "x"}]},
                queue="feedmill",
                countdown=3600,
            )
            wait_until(
                lambda: (
                    queue_depth(redis.client, "feedmill").delayed == number + 1  # noqa: B023
                ),
                "the message waits in Redis",
            )
    assert named_by(few) == ({"delayed"}, {"delayed"})
    found = finding(few, HealthPart.QUEUE)
    assert not found.well
    assert "3 messages are due later" in found.said
    assert "FEEDMILL_QUEUE_LIMIT" in found.said


def test_names_a_flower_that_hears_nothing_or_does_not_report(
    redis: RedisServer, settings: Settings
) -> None:
    report_flower(redis.client, "deaf:5555", 40.0)
    assert named_by(settings) == ({"flower"}, {"flower"})
    found = finding(settings, HealthPart.FLOWER)
    assert not found.well
    assert "deaf:5555 has heard nothing from Redis for 40 s" in found.said
    remove_flower(redis.client, "deaf:5555")
    assert named_by(settings) == (set(), set())
    seconds: Any = redis.client.time()
    for name, age in (("hung:1", 90), ("ended:2", REPORT_TTL_S + 1)):
        redis.client.hset(FLOWERS, name, f"{seconds[0] - age} 0.0")
    assert "hung:1 last reported" in finding(settings, HealthPart.FLOWER).said
    assert "ended:2" not in finding(settings, HealthPart.FLOWER).said
    report_flower(redis.client, "new:3", 0.0)
    assert set(redis.client.hkeys(FLOWERS)) == {"hung:1", "new:3"}
    assert 0 < int(redis.client.ttl(FLOWERS)) <= REPORT_TTL_S


def test_reports_that_others_wrote_end_nothing(
    redis: RedisServer, settings: Settings
) -> None:
    values = ["", "x", "1 x", "nan 1", "1e999 1", "inf inf", "1 " + "9" * 5000, "{}"]
    for number, value in enumerate(values):
        redis.client.hset(FLOWERS, f"f{number}", value)
    assert flower_reports(redis.client) == {}
    assert named_by(settings) == (set(), set())
    now: Any = redis.client.time()
    for number in range(MAX_FLOWERS * 2):
        redis.client.hset(FLOWERS, f"g{number}\x1b[31m", f"{now[0]} 99")
    assert len(flower_reports(redis.client)) <= MAX_FLOWERS
    assert not finding(settings, HealthPart.FLOWER).well


@contextmanager
def busy(redis: RedisServer) -> Iterator[None]:
    """Run an endless script, as another application may."""
    redis.client.config_set("busy-reply-threshold", 100)
    client = Redis.from_url(redis.url)

    def run() -> None:
        with suppress(RedisError):
            client.eval("while true do end", 0)

    script = Thread(target=run)
    script.start()
    try:
        yield
    finally:
        with suppress(RedisError):
            redis.client.script_kill()
        script.join()
        client.close()


def test_names_a_script_that_keeps_redis_busy(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    metrics = ProcessMetrics(settings)
    with busy(redis):

        def value() -> Any:
            return metrics.redis_values()["feedmill_problem"].get("busy")

        wait_until(lambda: value() == 1, "the metric shows it")
        assert metrics.redis_values()["feedmill_redis_up"] == 0
        found = finding(settings, HealthPart.FLOWER)
        assert (found.part, found.well) == (HealthPart.REDIS, False)
        assert "feedmill redis SCRIPT KILL" in found.said
        shown = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert shown.returncode == 2
        assert "feedmill redis SCRIPT KILL" in shown.stderr
        done = feedmill(
            "redis", "SCRIPT", "KILL", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        assert done.stdout == "OK\n"
        wait_until(lambda: value() == 0, "the metric shows its end")
    assert named_by(settings) == (set(), set())
