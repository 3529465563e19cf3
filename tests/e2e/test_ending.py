"""Graceful shutdown: a worker finishes or returns the messages it holds. Uses a stand-in model."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from feedmill.shared.broker import queue_depth
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.settings import Settings
from tests.support import Feedmill, RedisServer, make_posts, push, standing_in, wait_until, wait_until_empty

#: Number of posts to send, 32 per message.
POSTS = 320


@contextmanager
def standin(
    redis: RedisServer, folder: Path, name: str, row_seconds: float = 0.02, **environment: str
) -> Iterator[Feedmill]:
    """Run a worker that holds all messages at once and takes `row_seconds` per post."""
    given = {"BATCH_ROWS": "8", "WINDOW_ROWS": "1024", "TOKEN_BUDGET": "65536"} | environment
    environment = {f"FEEDMILL_{key}": value for key, value in given.items()} | {"STANDIN_ROW_SECONDS": str(row_seconds)}
    with standing_in(redis, folder, name, **environment) as worker:
        wait_until(lambda: worker.says(" ready."), f"{name} is ready")
        yield worker


def stored(redis: RedisServer) -> int:
    return int(redis.client.xlen(RESULTS_STREAM))


def finish(redis: RedisServer, folder: Path) -> None:
    """Let another worker process the remaining messages; check that each result is stored exactly once."""
    with standin(redis, folder, "next", row_seconds=0) as worker:
        wait_until_empty(redis.client)
        assert worker.end() == 0
    assert stored(redis) == POSTS


@pytest.mark.parametrize(("drain", "is_repeated"), [("0.5", False), ("600", True)])
def test_unfinished_messages_are_returned(
    redis: RedisServer, settings: Settings, tmp_path: Path, drain: str, is_repeated: bool
) -> None:
    with standin(redis, tmp_path, "first", DRAIN=drain) as worker:
        push(settings, make_posts(POSTS))
        wait_until(lambda: stored(redis), "the first results are stored")
        if is_repeated:
            worker.process.send_signal(signal.SIGTERM)
            wait_until(lambda: worker.says("Warm shutdown"), "the worker has received SIGTERM")
        assert worker.end() == 0
    waiting, held = queue_depth(redis.client, "feedmill")
    assert waiting > 0
    assert held == 0
    finish(redis, tmp_path)


def test_signals_that_interrupt_each_other_end_the_worker(redis: RedisServer, tmp_path: Path) -> None:
    with standin(redis, tmp_path, "first", INCLUDE="tests.fakes.interrupted_shutdown") as worker:
        assert worker.end() == 0
        assert worker.text().count("Warm shutdown") == 2
