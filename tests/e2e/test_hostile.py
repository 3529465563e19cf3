"""A real worker, with a stand-in for its model, among hostile messages and on a Redis that takes nothing more."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from producers.push import Pusher
from shared.broker import connect, make_app, queue_depth
from shared.keys import RESULTS_STREAM
from shared.messages import ClassifyOptions
from shared.settings import Settings
from tests import fuzz
from tests.support import Process, RedisServer, make_posts, start, wait_until


def test_no_hostile_message_ends_the_worker_or_vanishes(tmp_path: Path) -> None:
    found = fuzz.run(1500, 1, tmp_path)
    assert not found["vanished"], found
    assert set(found["read"]) >= {"undecodable", "refused", "refused by us", "good"}


def test_at_the_memory_limit_results_wait_and_nothing_accepted_is_lost(
    redis: RedisServer, settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those in the store, and Celery's for who waits for them; the worker goes on when there is memory again."""
    request.addfinalizer(lambda: redis.client.config_set("maxmemory", 0))
    app = make_app(settings)
    Pusher(app, connect(settings), settings, ClassifyOptions()).push(make_posts(400))
    kwargs = {"posts": [{"id": "asked", "title": "Who waits for this?"}]}
    asked = app.send_task("feedmill.classify", kwargs=kwargs)
    redis.client.config_set("maxmemory", 1)
    with standing_in(redis, tmp_path) as (worker, said):
        wait_until(lambda: said().count("results wait for Redis") == 1, "a result waits")
        assert redis.client.xlen(RESULTS_STREAM) == 0
        redis.client.config_set("maxmemory", 0)
        assert asked.get(timeout=60)[0]["id"] == "asked"
        wait_until(lambda: not sum(queue_depth(redis.client, "feedmill")), "the queue is empty")
        waited = said().count("results wait for Redis")
        worker.send_signal(signal.SIGSTOP)
        # Its classification is stored: Celery's result is all that there is to write.
        asked = app.send_task("feedmill.classify", kwargs=kwargs)
        another = app.send_task("celery.accumulate", (5, 7), {"index": 1})
        redis.client.config_set("maxmemory", 1)
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: said().count("results wait for Redis") > waited, "Celery's result waits")
        wait_until(lambda: "it will be run again" in said(), "another task's is given up for now")
        assert queue_depth(redis.client, "feedmill") == (0, 2)
        redis.client.config_set("maxmemory", 0)
        assert asked.get(timeout=60)[0]["id"] == "asked"
        assert another.get(timeout=60) == 7
        wait_until(lambda: not sum(queue_depth(redis.client, "feedmill")), "the queue is empty")
        assert redis.client.xlen(RESULTS_STREAM) == 401


@contextmanager
def standing_in(redis: RedisServer, folder: Path) -> Iterator[tuple[Process, Callable[[], str]]]:
    """A worker that is ready, and what it has said; it must live to the end."""
    log = folder / "worker.log"
    with log.open("wb") as output:
        worker = start(
            [sys.executable, "-m", "tests.fakes.standin_worker", "standin"],
            fuzz.ROOT,
            os.environ
            | {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_TOKEN_BUDGET": "2048", "FEEDMILL_VISIBILITY_TIMEOUT": "3"},
            output,
        )
    try:
        wait_until(lambda: " ready." in log.read_text(), "the worker is ready")
        yield worker, log.read_text
        assert worker.poll() is None, log.read_text()
    finally:
        worker.terminate()
        worker.wait(60)
