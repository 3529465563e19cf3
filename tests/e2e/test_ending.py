"""Graceful shutdown: a worker finishes or returns the messages it holds. Uses a stand-in model."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from feedmill.shared.broker import queue_depth
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.settings import Settings
from tests.fakes import standin_worker
from tests.support import (
    ROOT,
    Feedmill,
    RedisServer,
    application,
    executing,
    make_posts,
    push,
    standing_in,
    wait_for_replies,
    wait_until,
    wait_until_empty,
    wait_until_registered,
)

#: Number of posts to send, 32 per message.
POSTS = 320


@contextmanager
def standin(
    redis: RedisServer,
    folder: Path,
    name: str,
    row_seconds: float = 0.02,
    **environment: str,
) -> Iterator[Feedmill]:
    """Run a worker that holds all messages at once and takes `row_seconds` per post."""
    given = {
        "BATCH_ROWS": "8",
        "WINDOW_ROWS": "1024",
        "TOKEN_BUDGET": "65536",
    } | environment
    environment = {f"FEEDMILL_{key}": value for key, value in given.items()} | {
        "STANDIN_ROW_SECONDS": str(row_seconds)
    }
    with standing_in(redis, folder, name, **environment) as worker:
        wait_until(lambda: worker.says(" ready."), f"{name} is ready")
        wait_until_registered(redis)
        yield worker


def stored(redis: RedisServer) -> int:
    return int(redis.client.xlen(RESULTS_STREAM))


def finish(redis: RedisServer, folder: Path) -> None:
    """Let another worker process the remaining messages; check that each result is stored exactly
    once.
    """
    with standin(redis, folder, "next", row_seconds=0) as worker:
        wait_until_empty(redis.client)
        assert worker.end() == 0
    assert stored(redis) == POSTS


@pytest.mark.parametrize(("drain", "is_repeated"), [("0.5", False), ("600", True)])
def test_unfinished_messages_are_returned(
    redis: RedisServer,
    settings: Settings,
    tmp_path: Path,
    drain: str,
    is_repeated: bool,
) -> None:
    # Slow enough that messages are left when the signal comes.
    with standin(redis, tmp_path, "first", row_seconds=0.1, DRAIN=drain) as worker:
        push(settings, make_posts(POSTS))
        wait_until(lambda: stored(redis), "the first results are stored")
        if is_repeated:
            worker.process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: worker.says("Warm shutdown"), "the worker has received SIGTERM"
            )
        assert worker.end() == 0
    waiting, held, _ = queue_depth(redis.client, "feedmill")
    assert waiting > 0
    assert held == 0
    finish(redis, tmp_path)


@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGINT],
        [signal.SIGHUP],
        [signal.SIGQUIT],
        [signal.SIGINT, signal.SIGINT],
        [signal.SIGTERM, signal.SIGINT],
        [signal.SIGINT, signal.SIGQUIT],
    ],
    ids=lambda signals: " ".join(number.name for number in signals),
)
def test_every_signal_ends_a_busy_worker_with_0(
    redis: RedisServer,
    settings: Settings,
    tmp_path: Path,
    signals: list[signal.Signals],
) -> None:
    """It finishes its messages, or returns them at once after SIGQUIT and after a second
    signal.
    """
    with standin(redis, tmp_path, "first") as worker:
        push(settings, make_posts(POSTS))
        wait_until(lambda: stored(redis), "the first results are stored")
        *first, last = signals
        for number in first:
            worker.process.send_signal(number)
            wait_until(
                lambda: worker.says("Warm shutdown"),
                "the worker has received the signal",
            )
        assert worker.end(last) == 0
        assert "Traceback" not in worker.text()
    assert queue_depth(redis.client, "feedmill").held == 0
    finish(redis, tmp_path)


def test_a_closed_terminal_does_not_end_a_worker_under_nohup(
    redis: RedisServer, tmp_path: Path
) -> None:
    program = shlex.join([sys.executable, "-m", standin_worker.__name__, "first"])
    command = ["sh", "-c", f"trap '' HUP; exec {program}"]
    environment = os.environ | {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_TOKEN_BUDGET": "2048",
    }
    with executing(command, ROOT, environment, tmp_path / "first.log") as worker:
        wait_until(lambda: worker.says(" ready."), "the worker is ready")
        worker.process.send_signal(signal.SIGHUP)
        app = application(redis)
        wait_for_replies(app)
        app.close()
        assert worker.end() == 0
        assert worker.text().count(" ready.") == 1


def test_signals_that_interrupt_each_other_end_the_worker(
    redis: RedisServer, tmp_path: Path
) -> None:
    with standin(
        redis, tmp_path, "first", INCLUDE="tests.fakes.interrupted_shutdown"
    ) as worker:
        assert worker.end() == 0
        assert worker.text().count("Warm shutdown") == 2
