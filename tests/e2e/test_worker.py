"""A real worker process on a real Redis, used by other applications through plain Celery, by task
name.
"""

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from feedmill.shared.broker import queue_depth
from feedmill.shared.settings import Settings
from tests import support
from tests.fakes import constants
from tests.support import RedisServer, feedmill, make_posts, working
from tests.unit.test_canary import overflowing


@pytest.fixture
def client(served: RedisServer) -> Celery:
    return support.application(served)


def ask(client: Celery, *args: Any, **kwargs: Any) -> Any:
    return client.send_task("feedmill.classify", args, kwargs).get(timeout=120)


def test_ignored_results_emit_a_short_summary_event(client: Celery) -> None:
    sent: set[str] = set()
    told: list[str] = []

    def succeeded(event: dict[str, Any]) -> None:
        if event["uuid"] in sent:  # ignore late events of other tests' messages
            told.append(event["result"])
            receiver.should_stop = True

    # while the receiver listens: a warm worker answers before it has subscribed
    def send() -> None:
        while not told:
            sent.add(
                client.send_task(
                    "feedmill.classify", (support.POSTS,), ignore_result=True
                ).id
            )
            time.sleep(0.5)

    with client.connection() as connection:
        receiver = client.events.Receiver(connection, {"task-succeeded": succeeded})
        threading.Thread(target=send, daemon=True).start()
        receiver.capture(limit=None, timeout=60)
    assert told[0] == "'2 of 2 posts classified'"


def test_every_key_is_registered_and_bounded(
    client: Celery, served: RedisServer
) -> None:
    settings = Settings.model_validate({"redis_url": served.url})
    ask(client, support.POSTS)
    support.push(settings, make_posts(5))
    support.wait_until_empty(served.client)
    for name in map(str, served.client.scan_iter()):
        key = support.find(name)
        assert key, f"{name!r} is not in docs/reference/keys.md"
        both: Any = served.client.pipeline()
        both.type(name)
        both.ttl(name)
        kind, ttl = both.execute()
        assert kind in (key.type, "none") or key.type == "any", (
            f"{name!r} is a {kind!r}"
        )
        if "ttl" in key.bound:
            # "none": it has expired meanwhile
            assert ttl > 0 or kind == "none", f"{name!r} never expires"


BROKEN_WORKER = """
import sys, time
from feedmill.shared import logs
from feedmill.shared.settings import load
from feedmill.workers import run
from feedmill.workers.pipeline.backlog import Backlog
from feedmill.workers.models.classifiers.similarity import Similarity
from feedmill.workers.pipeline.pipeline import Pipeline
from feedmill.workers.pipeline.window import Window

def broken(*_):
    if sys.argv[1] == "hangs":
        time.sleep(3600)
    raise AssertionError("a bug in this test's thread")

start = Pipeline.start

def start_broken(self):
    loop = {"writer": (Similarity, "finish"), "tokenizer": (Window, "add"),
            "device": (Backlog, "next_batch"), "hangs": (Similarity, "forward")}[sys.argv[1]]
    setattr(*loop, broken)
    start(self)

Pipeline.start = start_broken
settings = load()
logs.configure(settings)
sys.exit(run.run_worker(settings, "broken"))
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("tokenizer", "tokenizer"),
        ("device", r"device-\d"),
        ("writer", "writer"),
        ("hangs", r"\b2 s\b.*FEEDMILL_FORWARD_TIMEOUT"),
    ],
)
def test_a_dead_or_hung_thread_stops_the_worker(
    redis: RedisServer, settings: Settings, tmp_path: Path, what: str, words: str
) -> None:
    support.push(settings, make_posts(100))
    given = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_FORWARD_TIMEOUT": "2" if what == "hangs" else "60",
    }
    ended = support.run(
        [sys.executable, "-P", "-c", BROKEN_WORKER, what],
        tmp_path,
        support._environment(tmp_path, **given),
    )
    assert ended.returncode == 1, ended.stderr
    assert re.search(f"CRITICAL.*{words}", ended.stderr), ended.stderr
    assert queue_depth(redis.client, "feedmill") == (4, 0, 0)


def test_first_start_measures_and_stores_the_token_budget(
    redis: RedisServer, tmp_path: Path
) -> None:
    short_trials = {"feedmill.workers.pipeline.calibration.MIN_TRIAL_S": 0.05}
    environment = {
        constants.VARIABLE: json.dumps(short_trials),
        "FEEDMILL_TOKEN_BUDGET": "",  # an empty variable counts as unset
    }
    with working(redis, tmp_path, "first", **environment) as worker:
        assert "measuring the token budget" in worker.text()
        measured = re.search(r"token budget (\d+).* at 512, ", worker.text())
        assert measured, worker.text()
    with working(redis, tmp_path, "second", **environment) as worker:
        assert f"token budget {measured[1]}\n" in worker.text()
        assert "measuring the token budget" not in worker.text()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FEEDMILL_MODEL": "/no/such/model"}, "'/no/such/model'"),
        ({"FEEDMILL_DEVICE": "cuda:99"}, "FEEDMILL_DEVICE: cuda:99"),
        (
            {
                "FEEDMILL_MODEL": "overflowing",
                "FEEDMILL_DEVICE": "cpu",
                "FEEDMILL_DTYPE": "float16",
            },
            "CRITICAL.*float16.*FEEDMILL_DTYPE=(bfloat16|float32)",
        ),
    ],
)
def test_a_worker_that_cannot_start_takes_no_message(
    redis: RedisServer, tmp_path: Path, environment: dict[str, str], words: str
) -> None:
    redis.client.lpush("feedmill", "untouched")
    overflowing(tmp_path / "overflowing")
    ended = feedmill(
        "worker", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, **environment
    )
    assert ended.returncode != 0
    assert re.search(words, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert redis.client.lrange("feedmill", 0, -1) == ["untouched"]
