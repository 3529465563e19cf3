"""`feedmill worker --devices auto`: as many processes on a GPU as fill it.

The GPU is a stand-in (tests/fakes/filled.py): one device for all processes, each with a cost of
its own per post.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feedmill.monitoring import watch
from feedmill.shared.broker import make_app
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.settings import Settings
from tests.support import (
    ROOT,
    Feedmill,
    RedisServer,
    executing,
    feedmill,
    make_posts,
    push,
    wait_until,
)


@contextmanager
def filling(
    folder: Path, redis: RedisServer, post_s: str, row_s: str
) -> Iterator[Feedmill]:
    """Run a supervisor that fills the stand-in GPU. post_s: CPU seconds of each post. row_s:
    seconds of the device.
    """
    variables = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_TOKEN_BUDGET": "512",
        "STANDIN_DEVICE": str(folder / "device"),
        "STANDIN_POST_SECONDS": post_s,
        "STANDIN_ROW_SECONDS": row_s,
    }
    command = [sys.executable, "-m", "tests.fakes.filled"]
    environment = os.environ | variables
    with executing(command, ROOT, environment, folder / "filled.log") as supervisor:
        yield supervisor


def stored_ids(redis: RedisServer) -> list[str]:
    """Return the id of each stored result."""
    entries: Any = redis.client.xrange(RESULTS_STREAM)
    return [json.loads(fields["classification"])["id"] for _, fields in entries]


def test_a_device_that_waits_for_its_host_gets_further_workers(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    with filling(tmp_path, redis, post_s="0.001", row_s="0.00001") as supervisor:
        wait_until(lambda: supervisor.says("1 of 1 workers up"), "the first is up")
        posts = make_posts(3000)
        push(settings, posts)
        wait_until(
            lambda: re.search(r"\b[2-9] of [2-9] workers up", supervisor.text()),
            "a further worker is up",
            seconds=120,
        )
        wait_until(
            lambda: redis.client.xlen(RESULTS_STREAM) == len(posts),
            "all posts are classified",
            seconds=240,
        )
        line = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).stdout
        snapshot = watch.status(redis.client, make_app(settings), settings)
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.process.wait(120) == 0, supervisor.text()
    ids = stored_ids(redis)
    assert len(set(ids)) == len(ids)
    (gpu,) = snapshot.gpus
    assert gpu.number == "0"
    assert {"mill-cuda:0@here", "mill-cuda:0-1@here"} <= set(gpu.nodes)
    assert re.search(r"GPU 0: \d workers, device busy \d\.\d\d, host-bound: ", line)


def test_a_device_that_is_the_limit_keeps_its_worker(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    with filling(tmp_path, redis, post_s="0", row_s="0.005") as supervisor:
        wait_until(lambda: supervisor.says("1 of 1 workers up"), "the first is up")
        push(settings, make_posts(600))
        wait_until(
            lambda: redis.client.xlen(RESULTS_STREAM) == 600,
            "all posts are classified",
            seconds=120,
        )
        assert supervisor.says("at most")
        assert not supervisor.says("workers from now on")
