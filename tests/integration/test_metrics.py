"""Metrics, `feedmill health` and `feedmill status` on a real Redis."""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from rich.console import Console

from feedmill.cli import status
from feedmill.monitoring import watch
from feedmill.monitoring.watch import HealthPart, Status, check_health
from feedmill.producers.live.state import Gap, Gaps, LiveState
from feedmill.producers.push import Pusher
from feedmill.shared import encoding
from feedmill.shared.broker import make_app
from feedmill.shared.keys import COUNTERS, DEAD_LETTERS, LIVE_STATUS, RUN, RUNS
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.metrics import (
    REDIS_METRICS,
    ProcessMetrics,
    connect_for_monitoring,
    oldest_seconds,
)
from feedmill.shared.model_routing import announce
from feedmill.shared.settings import Settings
from tests.support import RedisServer, Restartable, announced, make_posts

pytestmark = pytest.mark.each_redis

POOL: dict[str, Any] = {
    "device": "cpu in bfloat16: as set", "model": "a model", "queues": ["feedmill"], "posts": 100,
    "device_seconds": 3.0, "rows_waiting": 1021, "oldest_row_seconds": 1.5,
    "padding_efficiency": 0.9,
    "recent": {"posts_per_second": 12.5, "device_busy": 0.97, "seconds": 10.4},
}  # fmt: skip
LIVE_REPORT: dict[str, Any] = {
    "read": 21, "sent": 1, "filtered": 20, "paused": True, "delay": 3.5, "gaps": 1, "purged": 3,
    "ahead": 0, "unreadable": 0, "hindrance": "",
}  # fmt: skip


def told(settings: Settings) -> dict[str, float]:
    """Return Redis' metrics by name and labels."""
    found: dict[str, float] = {}
    for name, value in ProcessMetrics(settings).redis_values().items():
        by_labels = value if isinstance(value, dict) else {(): value}
        found |= {
            " ".join((name, *([key] if isinstance(key, str) else key))): of
            for key, of in by_labels.items()
        }
    return found


def send(
    app: Celery,
    count: int = 1,
    priority: int = 0,
    queue: str | None = None,
    **headers: Any,
) -> None:
    for _ in range(count):
        app.send_task(
            "feedmill.classify",
            kwargs={"posts": []},
            priority=priority,
            queue=queue,
            headers=headers,
        )


def test_asks_workers_again_after_a_restart_of_redis(
    redis_path: str, tmp_path: Path
) -> None:
    server = Restartable(redis_path, tmp_path)
    app = make_app(Settings(redis_url=server.url))
    for _ in range(2):
        assert watch.ask(app, "ping", None, 0.1) == {}
        server.kill()
        server.start()
    server.stop()


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    app = make_app(settings)
    yield app
    app.close()


def test_counts_waiting_messages_of_all_priorities_and_held_ones(
    redis: RedisServer, settings: Settings, app: Celery
) -> None:
    send(app, 2)
    send(app, 3, priority=9)
    redis.client.hset("feedmill:reserved", "tag", "a message held by a worker")
    redis.client.hset(COUNTERS, mapping={"stored": 5, "failed": 2})
    found = told(settings)
    assert found["feedmill_redis_up"] == 1
    assert found["feedmill_queue_messages feedmill waiting"] == 5
    assert found["feedmill_queue_messages feedmill held"] == 1
    assert found["feedmill_queue_limit_messages feedmill"] == settings.queue_limit
    assert (
        found["feedmill_results_stored_total"],
        found["feedmill_results_failed_total"],
    ) == (
        5,
        2,
    )
    assert found["feedmill_results_answered_total"] == 0
    assert {name.partition(" ")[0] for name in found} == {
        metric.name for metric in REDIS_METRICS
    }


def test_reports_every_known_queue(
    redis: RedisServer, settings: Settings, app: Celery
) -> None:
    announce(redis.client, "other", "a model")
    send(app, queue="other", sent_at=time.time() - 50)
    redis.client.hset("feedmill:reserved", "tag", "a message held by a worker")
    found = told(settings)
    waiting = [
        found[f"feedmill_queue_messages {name} waiting"]
        for name in ("feedmill", "other")
    ]
    assert waiting == [0, 1]
    assert found["feedmill_queue_limit_messages other"] == settings.queue_limit
    assert found["feedmill_queue_oldest_seconds other"] >= 50
    assert "feedmill_queue_oldest_seconds feedmill" not in found
    assert found["feedmill_queue_messages feedmill held"] == 1
    assert "feedmill_queue_messages other held" not in found, (
        "held messages are counted once, for all queues"
    )


def test_age_is_that_of_the_message_sent_first(settings: Settings, app: Celery) -> None:
    redis, now = connect_for_monitoring(settings), time.time()
    assert oldest_seconds(redis, settings.queue) is None
    assert "feedmill_queue_oldest_seconds feedmill" not in told(settings)
    send(app)
    assert oldest_seconds(redis, settings.queue) is None, "the message has no sent_at"
    send(app, priority=3, sent_at=now - 100)
    send(app, priority=3, sent_at=now - 50)
    send(app, priority=9, sent_at=now - 1000)
    found = oldest_seconds(redis, settings.queue)
    assert found
    assert 1000 <= found < 1060
    assert found <= told(settings)["feedmill_queue_oldest_seconds feedmill"]


def test_reading_the_age_does_not_fetch_messages(
    redis: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the age fetches a small part of a large message, and ignores "sent_at" in the
    message's posts.
    """
    posts = [
        post.model_copy(update={"body": '"sent_at": 1.0 ' * 2_000})
        for post in make_posts(100)
    ]
    monkeypatch.setattr(encoding, "MIN_COMPRESSED_CHARACTERS", sys.maxsize)
    Pusher(
        make_app(settings),
        connect_for_monitoring(settings),
        settings,
        ClassifyOptions(),
    ).push(posts)
    (message,) = redis.client.lrange(settings.queue, -1, -1)
    before = int(redis.client.info("stats")["total_net_output_bytes"])
    age = oldest_seconds(connect_for_monitoring(settings), settings.queue)
    fetched = int(redis.client.info("stats")["total_net_output_bytes"]) - before
    assert age is not None
    assert age < 600
    assert fetched < 20_000 < len(message)


def test_ignores_foreign_list_elements_for_the_age(
    redis: RedisServer, settings: Settings
) -> None:
    redis.client.lpush(
        settings.queue, "\xff\xfe{", "", '{"headers": {"sent_at": "soon"}}'
    )
    assert oldest_seconds(connect_for_monitoring(settings), settings.queue) is None


def test_unreachable_redis_reports_only_redis_up_zero() -> None:
    away = Settings.model_validate({"redis_url": "redis://:hunter2@127.0.0.1:1/0"})
    assert told(away) == {"feedmill_redis_up": 0}
    (sentence,) = ProcessMetrics(away).unready()
    assert "127.0.0.1:1/0" in sentence
    assert "hunter2" not in sentence


# Health.


def test_health_fails_if_memory_is_nearly_full(
    redis: RedisServer, settings: Settings
) -> None:
    found = watch.status(redis.client, None, settings)
    assert found.memory
    for used, well in ((940_000_000, True), (950_000_000, False)):
        full = found._replace(memory=found.memory._replace(used=used, limit=10**9))
        is_well, said = watch._memory(full)
        assert is_well == well
        assert "of 1.0 GB" in said
        assert ("raise maxmemory" in said) == (not well)


def numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\b\d+\b", text)]


def findings(
    settings: Settings, *parts: HealthPart
) -> dict[HealthPart, tuple[bool, str]]:
    return {
        finding.part: (finding.well, finding.said)
        for finding in check_health(settings, parts or tuple(HealthPart))
    }


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The workers' answers, by node name."""
    workers = {"one@here": dict(POOL)}
    monkeypatch.setattr(watch, "worker_statistics", lambda *_: workers)
    return workers


@pytest.mark.usefixtures("workers")
def test_health_passes_when_all_is_well(settings: Settings) -> None:
    found = findings(settings)
    assert list(found) == list(HealthPart)
    assert all(well for well, _ in found.values())
    assert found[HealthPart.WORKERS][1] == "one@here"
    assert "`feedmill ingest`" in found[HealthPart.LIVE][1]


def test_health_fails_without_workers(
    settings: Settings, workers: dict[str, Any]
) -> None:
    workers.clear()
    seen = look(settings)
    assert "`feedmill worker`" in screen(seen, settings)
    with announced(
        settings.data_folder, "{}"
    ):  # `feedmill up` restarts a worker that exits
        assert "`feedmill worker`" in screen(seen, settings)
        assert "`feedmill worker`" not in screen(
            seen, settings.model_copy(update={"redis_url": None})
        )
    found = findings(settings)
    assert not found[HealthPart.WORKERS][0]
    assert "`feedmill worker`" in found[HealthPart.WORKERS][1]


def test_health_fails_for_a_stuck_worker(
    settings: Settings, workers: dict[str, Any]
) -> None:
    workers["two@here"] = POOL | {"oldest_row_seconds": 301.0}
    well, said = findings(settings)[HealthPart.WORKERS]
    assert not well
    assert re.match("two@here .*301 s", said)


@pytest.mark.usefixtures("workers")
def test_health_checks_each_queues_limit(
    redis: RedisServer, settings: Settings, app: Celery
) -> None:
    announce(redis.client, "other", "a model")
    send(app, 3)
    send(app, 2, queue="other")
    for count, well in ((3, True), (4, False)):
        send(app, queue="other")
        found, said = findings(
            settings.model_copy(update={"queue_limit": 3}), HealthPart.QUEUE
        )[HealthPart.QUEUE]
        assert (found, numbers(said)) == (well, [3 + count, 3, count, 3, 0])
        assert f"other: {count}" in said


def test_health_reports_live_sources(redis: RedisServer, settings: Settings) -> None:
    assert findings(settings, HealthPart.LIVE)[HealthPart.LIVE][0]
    for name, hindrance in (
        ("bluesky", ""),
        ("hacker_news", ("hacker_news: the connection failed")),
    ):
        LiveState(redis.client, name).store_status(
            LIVE_REPORT | {"hindrance": hindrance}
        )
    well, said = findings(settings, HealthPart.LIVE)[HealthPart.LIVE]
    assert well, "failures at a source do not make its daemon unhealthy"
    assert "bluesky: reading; hacker_news: hacker_news: the connection failed" in said
    report = json.loads(str(redis.client.hget(LIVE_STATUS, "bluesky")))
    redis.client.hset(
        LIVE_STATUS, "bluesky", json.dumps(report | {"at": report["at"] - 300})
    )
    well, said = findings(settings, HealthPart.LIVE)[HealthPart.LIVE]
    assert (well, numbers(said)) == (False, [5])
    assert re.search("bluesky: no report .*; hacker_news: ", said)


def test_health_does_not_miss_a_daemon_that_was_stopped(
    redis: RedisServer, settings: Settings
) -> None:
    LiveState(redis.client, "bluesky").store_status(LIVE_REPORT, ended=True)
    well, said = findings(settings, HealthPart.LIVE)[HealthPart.LIVE]
    assert well
    assert said == "bluesky: stopped"
    assert look(settings).live == {}


@pytest.mark.parametrize(
    ("url", "words"),
    [("redis://127.0.0.1:1/0", "127.0.0.1:1/0"), ("redis://:wrong@", "password")],
)
def test_health_reports_only_redis_while_it_is_unusable(
    redis: RedisServer, url: str, words: str
) -> None:
    url = f"{url}{redis.url.partition('@')[2]}" if url.endswith("@") else url
    found = findings(Settings.model_validate({"redis_url": url}), HealthPart.QUEUE)
    assert list(found) == [HealthPart.REDIS]
    assert not found[HealthPart.REDIS][0]
    assert words in found[HealthPart.REDIS][1]


# Watching.


def look(settings: Settings) -> Status:
    return watch.status(connect_for_monitoring(settings), make_app(settings), settings)


def screen(seen: Any, settings: Settings) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(status._table(seen, settings))
    return captured.get()


def test_screen_fits_80_columns(
    redis: RedisServer, settings: Settings, workers: dict[str, Any]
) -> None:
    for number in range(20):
        workers[f"feedmill-{number}@a-machine-with-quite-a-long-name.example.org"] = (
            POOL
        )
    redis.client.hset(
        COUNTERS,
        mapping={
            "stored": 12_345_678,
            "dead_trimmed": 12_345,
            "answered": 90,
            "repeated": 9,
        },
    )
    redis.client.xadd(DEAD_LETTERS, {"letter": "{}"})
    LiveState(redis.client, "reddit").store_status(LIVE_REPORT | {
        "subreddits": 48, "topics": 16, "sent": 1_234_567, "paused": True, "failing": ["x"],
        "gaps": 3, "delay": None,
        "hindrance": "Reddit answered 500", "purged": 12, "requests": 34_567, "budget": 861.0,
    })  # fmt: skip
    LiveState(redis.client, "bluesky").store_status(LIVE_REPORT | {"sent": 7_654_321})
    for gap in (
        Gap("reddit", "cooking", 1.0, 2.0, 3.0),
        Gap("bluesky", "", 1.0, 2.0, 3.0),
    ):
        Gaps(redis.client).record(gap)
    shown = screen(look(settings), settings)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 18 + len(workers)
    assert look(settings).gaps == 2
    for words in ("0 messages waiting", "12,345,678 stored", "99 ", "12,345 ",
    "`feedmill dead list`",
                  "`feedmill ingest gaps`",
                  "PAUSED", "7,654,321 sent", "1,021", "0.97", "12.5"):  # fmt: skip
        assert words in shown
    workers.clear()
    assert "`feedmill worker`" in screen(look(settings), settings)


def test_a_snapshot_reads_totals_and_runs_after_the_workers_answered(
    redis: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers take a second to answer, in which a run can end."""

    def answer(*_: object) -> dict[str, Any]:
        redis.client.hset(COUNTERS, "stored", 500)
        redis.client.hset(RUN + "monday", mapping={"sent": 500, "stored": 500})
        redis.client.zadd(RUNS, {"monday": 1})
        redis.client.delete("feedmill")
        redis.client.xadd(DEAD_LETTERS, {"letter": "{}"})
        return {"one@here": POOL | {"posts": 500}}

    send(make_app(settings))
    monkeypatch.setattr(watch, "worker_statistics", answer)
    found = look(settings)
    assert (
        found.results.stored,
        found.runs[0].stored,
        found.workers["one@here"]["posts"],
    ) == (
        500,
        500,
        500,
    )
    assert (found.queue.waiting, found.dead_letters) == (0, 1)


def test_a_run_without_workers_is_waiting(
    redis: RedisServer, settings: Settings, workers: dict[str, Any]
) -> None:
    """Its rate was that of the time in which workers served it, and says nothing about its end."""
    now = int(time.time() * 1000)
    counts: dict[Any, Any] = {
        "sent": 500,
        "stored": 357,
        "began": now - 11_000,
        "latest": now - 1000,
        "used": 10_000,
    }
    redis.client.hset(RUN + "monday", mapping=counts)
    redis.client.zadd(RUNS, {"monday": now})

    def lines(found: Status) -> list[str]:
        return [
            line for line in screen(found, settings).splitlines() if "monday" in line
        ]

    served = look(settings)
    assert all(
        "monday: 357 of 500 done · 35.7 posts/s · about 4 s left" in line
        for line in lines(served)
    )
    workers.clear()
    for line in lines(look(settings)):
        assert "monday: 357 of 500 done · waiting for " in line
        assert "posts/s" not in line


@pytest.mark.usefixtures("workers")
def test_screen_lists_each_queue_with_its_model(
    redis: RedisServer, settings: Settings, app: Celery
) -> None:
    announce(redis.client, "other", "a model \x1b")
    send(app, queue="other", sent_at=time.time() - 90)
    send(app, 2, sent_at=time.time())
    seen = look(settings)
    assert seen.queue.waiting == 3
    assert seen.oldest_seconds
    assert seen.oldest_seconds >= 90
    assert json.loads(json.dumps(seen.as_json()))["queues"]["other"]["waiting"] == 1
    shown = screen(seen, settings)
    assert re.search("feedmill: 2 ", shown)
    assert re.search(r"other: 1 .*a model \\x1b \(no worker\)", shown)
