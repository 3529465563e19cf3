"""`feedmill ingest`: real processes and real PRAW against the loopback Reddit."""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedmill.producers.live.state import Gap, Gaps
from feedmill.shared.broker import queue_depth
from feedmill.testing.fake_arctic_shift import ArcticShift
from feedmill.testing.fake_reddit import Reddit
from tests.fakes import constants
from tests.support import (
    FEEDMILL,
    ROOT,
    Feedmill,
    RedisServer,
    executing,
    feedmill,
    run,
    running,
    sent_count,
    sent_marks,
    wait_until,
)

TOPICS = """
active = 2
[topics]
"food" = ["cooking", "nothere", "baking"]
"sport" = ["tennis", "chess"]
"""
SECRET = "a-very-secret-thing"
#: No Reddit, and short pauses between attempts.
UNREACHABLE = constants.reddit("http://127.0.0.1:9") | {
    "feedmill.producers.live.source.BACKOFF.first_s": 0.01
}


@pytest.fixture
def reddit() -> Iterator[Reddit]:
    with Reddit(client=("id", SECRET)) as reddit:
        for name in ("cooking", "baking", "tennis", "chess"):
            reddit.add_subreddit(name)
            for number in range(8):
                reddit.publish(name, title=f"{name} {number}", score=number)
        reddit.publish("cooking", title="pinned", stickied=True)
        yield reddit


@pytest.fixture
def environment(reddit: Reddit, redis: RedisServer, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "topics.toml").write_text(TOPICS)
    return {
        "FEEDMILL_REDIS_URL": redis.url,
        constants.VARIABLE: json.dumps(constants.reddit(reddit.url)),
        "FEEDMILL_REDDIT_CLIENT_ID": "id",
        "FEEDMILL_REDDIT_CLIENT_SECRET": SECRET,
        "FEEDMILL_REDDIT_USER_AGENT": "linux:test:1 (by /u/nobody)",
        "FEEDMILL_REDDIT_TOPICS": str(tmp_path / "topics.toml"),
        "FEEDMILL_REDDIT_POLL_INTERVAL": "0.2",
        # Hide any praw.ini of the user who runs the tests.
        "XDG_CONFIG_HOME": str(tmp_path),
    }


def test_single_pass_sends_posts_except_pinned_ones(
    redis: RedisServer, tmp_path: Path, environment: dict[str, str]
) -> None:
    said = feedmill(
        "ingest", "reddit", "--once", "--limit", "5", cwd=tmp_path, **environment
    )
    assert said.returncode == 0, said.stderr
    assert re.findall(r"\d+", said.stdout) == ["10", "2", "0"]
    assert re.search("topic food: .*r/nothere .*r/baking", said.stderr)
    assert "5 of 5" in said.stderr
    again = feedmill(
        "ingest", "reddit", "--once", "--listing", "new", cwd=tmp_path, **environment
    )
    assert re.findall(r"\d+", again.stdout) == ["22", "2", "10"]
    assert queue_depth(redis.client, "feedmill").waiting == 4


def test_daemon_sends_new_posts_until_a_signal(
    redis: RedisServer, reddit: Reddit, tmp_path: Path, environment: dict[str, str]
) -> None:
    with running("ingest", "reddit", cwd=tmp_path, **environment) as daemon:
        wait_until(lambda: _sent(daemon, redis) == 33, "all existing posts are sent")
        new = reddit.publish("chess", title="a new opening")
        wait_until(lambda: sent_marks(redis.client, new), "the new post is sent")
        status = feedmill("status", "--json", cwd=tmp_path, **environment)
        assert json.loads(status.stdout)["live"]["reddit"]["topics"] == 2
        assert "2 topics" in feedmill("status", cwd=tmp_path, **environment).stdout
        assert daemon.end(signal.SIGTERM) == 0
    assert "Traceback" not in daemon.text()


def _sent(daemon: Feedmill, redis: RedisServer) -> int:
    assert daemon.process.poll() is None, daemon.text()
    return sent_count(redis.client)


def test_a_signal_interrupts_a_long_wait(
    reddit: Reddit, tmp_path: Path, environment: dict[str, str]
) -> None:
    reddit.faults.always("too_many", seconds=3600)
    with running("ingest", "reddit", cwd=tmp_path, **environment) as daemon:
        wait_until(lambda: daemon.says("3600 s"), "the daemon waits")
        assert daemon.end() == 0


def test_no_secret_is_logged_at_debug_level(
    reddit: Reddit, tmp_path: Path, environment: dict[str, str]
) -> None:
    reddit.faults.next("server_error_500", where="access_token")
    reddit.faults.next("no_data")
    debug = environment | {"FEEDMILL_LOG_LEVEL": "debug"}
    with running("ingest", "reddit", cwd=tmp_path, **debug) as daemon:
        wait_until(lambda: reddit.ledger.served, "posts are read", 120)
        daemon.end()
    assert SECRET not in daemon.text()
    assert "Bearer" not in daemon.text().title()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"FEEDMILL_REDDIT_CLIENT_SECRET": ""},
            "client secret .*FEEDMILL_REDDIT_CLIENT_SECRET",
        ),
        ({"FEEDMILL_REDDIT_CLIENT_SECRET": "wrong"}, "FEEDMILL_REDDIT_CLIENT_SECRET"),
        ({"FEEDMILL_REDDIT_CLIENT_ID": "…"}, "client ID.* ASCII"),
        ({constants.VARIABLE: json.dumps(UNREACHABLE)}, "no connection to Reddit"),
    ],
)
def test_mistakes_name_the_setting_without_a_traceback(
    tmp_path: Path, environment: dict[str, str], changed: dict[str, str], sentence: str
) -> None:
    said = feedmill("ingest", "reddit", "--once", cwd=tmp_path, **environment | changed)
    assert said.returncode == 2
    assert re.search(sentence, said.stderr)
    assert "Traceback" not in said.stderr
    assert SECRET not in said.stderr + said.stdout


def test_praw_ini_supplies_only_credentials(
    reddit: Reddit, tmp_path: Path, environment: dict[str, str]
) -> None:
    """praw.ini is read, but its URLs and its account are not used."""
    for name in ("CLIENT_ID", "CLIENT_SECRET", "USER_AGENT"):
        environment[f"FEEDMILL_REDDIT_{name}"] = ""
    (tmp_path / "praw.ini").write_text(
        f"[mine]\nclient_id=id\nclient_secret={SECRET}\nuser_agent=linux:mine:1 (by /u/me)\n"
        "username=me\npassword=mine\noauth_url=http://127.0.0.1:1\nreddit_url=http://127.0.0.1:1\n"
    )
    said = feedmill(
        "ingest", "reddit", "--once", cwd=tmp_path, praw_site="mine", **environment
    )
    assert said.returncode == 0, said.stderr
    assert {
        request.user_agent.split(" prawcore")[0] for request in reddit.ledger.requests
    } == {"linux:mine:1 (by /u/me)"}


def test_the_archive_needs_no_credentials(
    reddit: Reddit, redis: RedisServer, tmp_path: Path, environment: dict[str, str]
) -> None:
    for name in ("ID", "SECRET"):
        del environment[f"FEEDMILL_REDDIT_CLIENT_{name}"]
    with ArcticShift(reddit) as archive:
        settings = environment | {
            constants.VARIABLE: json.dumps(constants.arctic_shift(archive.url))
        }
        with running(
            "ingest", "reddit", "--source", "arctic-shift", cwd=tmp_path, **settings
        ) as daemon:
            wait_until(
                lambda: queue_depth(redis.client, "feedmill").waiting > 0,
                "posts are sent",
            )
            assert daemon.end(signal.SIGTERM) == 0
    assert reddit.ledger.total == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_without_a_traceback_while_redis_does_not_answer(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = environment | {
            "FEEDMILL_REDIS_URL": f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        }
        with running("ingest", "reddit", cwd=tmp_path, **settings) as daemon:
            silent.settimeout(120)
            connection, _ = silent.accept()
            with connection:
                assert daemon.end(number) == 0
            assert "Traceback" not in daemon.text()


@pytest.mark.parametrize("output", [">/dev/full", "| :"])
def test_gaps_that_could_not_be_printed_stay(
    redis: RedisServer, tmp_path: Path, output: str
) -> None:
    recorded = Gaps(redis.client)
    for number in range(800):  # more than a pipe holds
        recorded.record(Gap("reddit", f"sub{number}".ljust(120, "x"), 1.0, 2.0, 3.0))
    environment = os.environ | {"FEEDMILL_REDIS_URL": redis.url, "F": FEEDMILL}
    for form in ("", "--json"):
        command = f"$F ingest gaps --clear {form} {output}"
        said = run(["/bin/sh", "-c", command], tmp_path, environment)
        assert "Traceback" not in said.stderr
        assert len(recorded.all()) == 800


def test_clear_removes_what_it_printed_and_no_other_gap(redis: RedisServer) -> None:
    """A daemon may record further gaps, and longer ones, while the list is printed."""
    recorded = Gaps(redis.client)
    grown, printed = (
        Gap("bluesky", "", 1.0, 2.0, 3.0),
        Gap("reddit", "tea", 1.0, 2.0, 3.0),
    )
    for gap in (grown, printed):
        recorded.record(gap)
    stored = recorded.stored()
    recorded.record(grown._replace(until=9.0))
    recorded.record(Gap("bluesky", "", 5.0, 6.0, 7.0))
    recorded.remove(stored)
    assert [(gap.since, gap.until) for gap in recorded.all()] == [
        (1.0, 9.0),
        (5.0, 6.0),
    ]


def test_a_daemon_that_hangs_after_a_signal_ends_and_says_where(
    redis: RedisServer, tmp_path: Path
) -> None:
    """Whatever keeps it, such as a library that swallows the exception of the signal."""
    command = [sys.executable, "-m", "tests.fakes.stubborn"]
    environment = os.environ | {"FEEDMILL_REDIS_URL": redis.url}
    with executing(command, ROOT, environment, tmp_path / "log") as daemon:
        wait_until(lambda: daemon.says("reading"), "the source is read")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait() == 1
        assert "asked to stop" in daemon.text()
        assert re.search(r"stubborn\.py\", line \d+ in events", daemon.text())
