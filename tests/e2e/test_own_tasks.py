"""A user's own Celery tasks on Feedmill's worker (tests/fakes/own_tasks.py), loaded with
`--include`.

The worker runs one task at a time between micro-batches, so that neither tasks nor posts starve.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGQUIT, SIGTERM, SIGUSR1
from typing import Any

import pytest
from celery import Celery, chain, chord
from celery.exceptions import TimeLimitExceeded

from feedmill.shared.broker import queue_depth
from tests.fakes import constants
from tests.support import (
    POSTS,
    Feedmill,
    RedisServer,
    application,
    run,
    wait_until,
    working,
)

COUNT = 50


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Feedmill]:
    """A worker that computes one post at a time on one thread, for a deterministic order."""
    patience = json.dumps({"feedmill.workers.pipeline.pipeline.PREFETCH_S": 1000})
    environment = {
        "FEEDMILL_BATCH_ROWS": "1",
        constants.VARIABLE: patience,
        "OMP_NUM_THREADS": "1",
    }
    flags = ("--include", "json, tests.fakes.own_tasks")
    with working(
        redis_server, tmp_path_factory.mktemp("worker"), "own", *flags, **environment
    ) as it:
        # Until its first forward pass, a worker does not know its throughput and prefetches
        # little.
        application(redis_server).send_task("feedmill.classify", [POSTS]).get(
            timeout=120
        )
        yield it


@pytest.fixture
def app(worker: Feedmill, redis_server: RedisServer) -> Celery:
    """An application in another process, which knows the tasks by name."""
    assert worker.process.poll() is None
    redis_server.client.delete("ran")
    return application(redis_server)


def ran(redis: RedisServer) -> list[str]:
    lines: Any = redis.client.lrange("ran", 0, -1)
    return list(lines)


def held(app: Celery) -> int:
    stats: Any = app.control.inspect(timeout=30, limit=1).stats()
    return sum(
        int(answer["pool"]["messages_held"]) for answer in (stats or {}).values()
    )


def test_tasks_alternate_with_micro_batches(
    app: Celery, redis_server: RedisServer, worker: Feedmill
) -> None:
    redis_server.client.set("gate", "1")
    app.send_task("own.hold", ["gate"])
    wait_until(lambda: "hold gate" in ran(redis_server), "the worker is busy")
    tasks = {7: "own.fails", 11: "own.retries"}
    sent = [
        app.send_task(tasks.get(number, "own.note"), [number])
        for number in range(COUNT)
    ]
    classified = [
        app.send_task("feedmill.classify", [[{**POSTS[0], "id": f"p{number}"}]])
        for number in range(COUNT)
    ]
    wait_until(lambda: held(app) == 2 * COUNT + 1, "the worker holds all messages")
    redis_server.client.delete("gate")
    assert [each.get(timeout=120)[0]["label"] for each in classified] == [
        "sports"
    ] * COUNT
    for number, each in enumerate(sent):
        if number == 7:
            with pytest.raises(ValueError, match="number 7, on purpose"):
                each.get(timeout=120)
        else:
            assert each.get(timeout=120) == number
    told = ran(redis_server)[1:]
    starts = [line for line in told if line.startswith("begin ")]
    # Tasks run in order, the retried one again at the end, and never two at a time.
    assert starts == [f"begin {number}" for number in [*range(COUNT), 11]]
    for at, line in enumerate(told):
        if line.startswith("begin "):
            assert told[at + 1] == line.replace("begin", "end")
    # Micro-batches and tasks alternate as long as there are both.
    kinds = [line.split()[0] for line in told if not line.startswith("end ")]
    assert kinds[: 2 * COUNT] == ["post", "begin"] * COUNT
    assert f"own.fails[{sent[7].id}] raised unexpected: ValueError" in worker.text()


def test_own_tasks_share_a_canvas_with_classify(app: Celery) -> None:
    """A single worker runs every task of the canvas, without a deadlock."""
    classify = app.signature("feedmill.classify", [POSTS])
    note = app.signature("own.note", [5], immutable=True)
    assert chain(classify, note, app=app).apply_async().get(timeout=120) == 5
    assert (
        chord([classify, note, classify], note, app=app).apply_async().get(timeout=120)
        == 5
    )
    sent = chain(
        app.signature("own.sends", [POSTS]), app.signature("own.note"), app=app
    ).apply_async()
    assert [
        each["label"]
        for each in app.AsyncResult(sent.get(timeout=120)).get(timeout=120)
    ] == [
        "sports",
        "food",
    ]


def test_own_tasks_can_call_classify_directly(app: Celery) -> None:
    """The task classifies on the device thread, with a second pipeline in the worker's process."""
    sent = app.send_task("own.classifies", [POSTS])
    other = app.send_task("feedmill.classify", [POSTS])
    assert sent.get(timeout=120) == ["sports", "food"]
    assert len(other.get(timeout=120)) == 2


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("queue_get", [{"number": 0}, {"number": 1}, {"number": 2}]),
        ("simple_queue", ["first", "second"]),
        ("consumer", ["one"]),
        ("another_broker", [{"number": 0}, {"number": 1}, {"number": 2}]),
    ],
)
def test_own_tasks_can_use_kombus_queues(
    app: Celery, redis_server: RedisServer, use: str, expected: object
) -> None:
    """Only the worker's own consumer receives messages under leases."""
    assert app.send_task("own.uses_kombu", [use]).get(timeout=120) == expected
    held = [
        name
        for name in redis_server.client.scan_iter()
        if str(name).startswith(("own-", "unacked"))
    ]
    assert held == []


@pytest.mark.parametrize("number", [SIGTERM, SIGQUIT, SIGUSR1])
def test_signals_end_child_processes_of_tasks(app: Celery, number: int) -> None:
    """Such as `multiprocessing.Process.terminate`."""
    assert app.send_task("own.ends_child", [int(number)]).get(timeout=120) == -number


def test_tasks_find_what_receivers_of_process_signals_prepared(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Libraries open connections on `worker_process_init`."""
    redis_server.client.delete("cleaned")
    environment = {
        "FEEDMILL_INCLUDE": "tests.fakes.own_tasks",
        "FEEDMILL_QUEUE": "processes",
    }
    with working(redis_server, tmp_path, **environment) as worker:
        app = application(redis_server, "processes")
        prepared = app.send_task("own.preparations").get(timeout=120)
        assert prepared == [worker.process.pid]
        worker.process.terminate()
        assert worker.process.wait(timeout=120) == 0
    assert redis_server.client.lrange("cleaned", 0, -1) == [str(worker.process.pid)]


def test_a_time_limit_fails_the_task_and_stops_the_worker(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """A thread cannot be interrupted, so the worker exits.

    Its other messages go back to the queue.
    """
    redis, app = redis_server, application(redis_server, "limits")
    redis.client.delete("ran")
    environment = {
        "FEEDMILL_INCLUDE": "tests.fakes.own_tasks",
        "FEEDMILL_QUEUE": "limits",
        "FEEDMILL_FORWARD_TIMEOUT": "2",
        "FAKE_TIME_LIMIT": "3",
        "OMP_NUM_THREADS": "1",
    }
    with working(redis, tmp_path, **environment) as worker:
        redis.client.set("gate", "1")
        long = app.send_task("own.hold", ["gate"], time_limit=1000)
        wait_until(lambda: len(ran(redis)) == 1, "the task runs")
        time.sleep(3)  # longer than FEEDMILL_FORWARD_TIMEOUT, which does not apply
        redis.client.delete("gate")
        assert long.get(timeout=120) == "gate"
        redis.client.set("gate", "1")
        limited = app.send_task("own.hold", ["gate"], soft_time_limit=1)
        wait_until(lambda: len(ran(redis)) == 2, "the task runs")
        app.send_task("feedmill.classify", [[{**POSTS[0], "id": "not stored yet"}]])
        wait_until(lambda: worker.process.poll() is not None, "the worker exits")
        assert worker.process.poll() == 1
        assert re.search(r"CRITICAL.*\b3 s\b", worker.text())
    with pytest.raises(TimeLimitExceeded):
        limited.get(timeout=120)
    assert queue_depth(redis.client, "limits") == (1, 0, 0), (
        "the posts are returned, the task is not"
    )


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_tasks.py").write_text("1 / 0")
    environment = os.environ | {
        "FEEDMILL_INCLUDE": "broken_tasks",
        "PYTHONPATH": str(tmp_path),
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "celery",
        "--app",
        "feedmill.workers.app",
        "worker",
    ]
    said = run(command, tmp_path, environment)
    assert said.returncode == 1
    reason = (
        rf"ZeroDivisionError: division by zero \({tmp_path}/broken_tasks\.py, line 1\)"
    )
    assert re.fullmatch(
        rf"feedmill: FEEDMILL_INCLUDE: .*\bbroken_tasks\b.*{reason}.*\n", said.stderr
    )
