"""`python -m feedmill.testing.reddit`: the daemon without a key, and the lists of subreddits that
it verified.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import constants
from tests.support import (
    RedisServer,
    feedmill,
    run,
    running,
    sent_count,
    wait_until,
)

TOPICS = """
active = 1
[topics]
"food" = ["nothere", "cooking", "baking"]
"sport" = ["tennis", "chess"]
"""


@pytest.fixture
def trial(tmp_path: Path, redis: RedisServer) -> Iterator[dict[str, str]]:
    """A running trial, and the environment of commands that read it, as it prints it."""
    (tmp_path / "topics.toml").write_text(TOPICS)
    settings = {
        "FEEDMILL_REDDIT_TOPICS": str(tmp_path / "topics.toml"),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    module = [
        sys.executable,
        "-m",
        "feedmill.testing.reddit",
        "--port",
        "0",
        "--interval",
        "0.2",
        "--posts",
        "5",
    ]
    closed = ["--missing", "nothere", "--private", "tennis"]
    process = subprocess.Popen(
        [*module, *closed], env=os.environ | settings, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(4)]
    printed = dict(
        re.findall(r"(FEEDMILL_\w+)='?([^'\n]+?)'?(?= FEEDMILL|\n)", "".join(lines))
    )
    assert len(printed) == 5
    yield (
        settings
        | printed
        | {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_REDDIT_POLL_INTERVAL": "0.2"}
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    process.stdout.close()


def test_the_daemon_reads_the_trial_and_lists_what_it_verified(
    trial: dict[str, str], redis: RedisServer, tmp_path: Path
) -> None:
    def status() -> str:
        return " ".join(feedmill("status", cwd=tmp_path, **trial).stdout.split())

    assert (
        "No subreddit was checked yet"
        in feedmill("ingest", "subreddits", cwd=tmp_path, **trial).stdout
    )
    with running("ingest", "reddit", cwd=tmp_path, **trial) as daemon:
        wait_until(lambda: sent_count(redis.client) > 15, "the daemon sends new posts")
        wait_until(
            lambda: "verified: r/cooking, r/chess" in status(),
            ("the status names what is verified"),
        )
        shown = status()
        assert daemon.end(signal.SIGTERM) == 0
    assert "r/nothere is missing: r/cooking is read instead" in shown
    assert "r/tennis is private: r/chess is read instead" in shown
    listed = feedmill("ingest", "subreddits", cwd=tmp_path, **trial).stdout.splitlines()
    words = [
        re.sub(r"\d{4}-\S+ [\d:+]+", "TIME", " ".join(line.split())) for line in listed
    ]
    assert words == [
        "food r/cooking verified TIME",
        "food r/nothere missing since TIME; r/cooking is read instead",
        "sport r/chess verified TIME",
        "sport r/tennis private since TIME; r/chess is read instead",
    ]


def test_checks_every_subreddit_without_redis(
    trial: dict[str, str], tmp_path: Path
) -> None:
    alone = trial | {"FEEDMILL_REDIS_URL": "redis://127.0.0.1:9"}
    said = feedmill("ingest", "subreddits", "--check", "--json", cwd=tmp_path, **alone)
    assert said.returncode == 0, said.stderr
    states = [json.loads(line) for line in said.stdout.splitlines()]
    assert [
        (state["topic"], state["subreddit"], state["state"], state["by"])
        for state in states
    ] == [
        ("food", "nothere", "missing", "cooking"),
        ("food", "cooking", "verified", None),
        ("food", "baking", "substitute", None),
        ("sport", "tennis", "private", "chess"),
        ("sport", "chess", "verified", None),
    ]


def test_the_trial_has_an_archive(
    trial: dict[str, str], redis: RedisServer, tmp_path: Path
) -> None:
    without_key = {name: value for name, value in trial.items() if "CLIENT" not in name}
    with running(
        "ingest", "reddit", "--source", "arctic-shift", cwd=tmp_path, **without_key
    ) as daemon:
        wait_until(
            lambda: sent_count(redis.client) > 4, "posts of the archive are sent"
        )
        assert daemon.end(signal.SIGTERM) == 0


def test_a_mirror_that_does_not_answer_is_named(
    trial: dict[str, str], tmp_path: Path
) -> None:
    soon = {"feedmill.producers.live.source.BACKOFF.first_s": 0.01}
    gone = trial | {
        "FEEDMILL_REDDIT_URL": "http://127.0.0.1:9",
        constants.VARIABLE: json.dumps(soon),
    }
    said = feedmill("ingest", "subreddits", "--check", cwd=tmp_path, **gone)
    assert said.returncode == 2
    assert "Cannot check r/nothere: no connection to Reddit" in said.stderr
    assert "Traceback" not in said.stderr


def test_a_taken_port_is_an_error_without_a_traceback(
    trial: dict[str, str], tmp_path: Path
) -> None:
    port = trial["FEEDMILL_REDDIT_URL"].rpartition(":")[2]
    command = [sys.executable, "-m", "feedmill.testing.reddit", "--port", port]
    said = run(command, tmp_path, os.environ)
    assert said.returncode == 2
    assert f"cannot listen on port {port}" in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_an_interval_that_never_ends_is_refused(tmp_path: Path, interval: str) -> None:
    command = [
        sys.executable,
        "-m",
        "feedmill.testing.reddit",
        "--port",
        "0",
        "--interval",
        interval,
    ]
    said = run(command, tmp_path, os.environ)
    assert said.returncode == 2
    assert "--interval must be positive" in said.stderr
