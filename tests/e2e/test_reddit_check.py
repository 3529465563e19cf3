"""`feedmill ingest reddit --check`: real processes against the loopback Reddit and its archive."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedmill.testing.fake_arctic_shift import ArcticShift
from feedmill.testing.fake_reddit import Reddit
from tests.support import feedmill, free_port

TOPICS = """
[topics]
"food" = ["cooking"]
"sport" = ["chess"]
"""
EXPLAINED = "See docs/reddit-access.md#"


@pytest.fixture
def reddit() -> Iterator[Reddit]:
    with Reddit() as reddit:
        for name in ("cooking", "chess"):
            reddit.add_subreddit(name)
            reddit.publish(name, title=f"a post of {name}")
        yield reddit


@pytest.fixture
def environment(reddit: Reddit, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings with which everything works, without Redis."""
    file = tmp_path / "topics.toml"
    file.write_text(TOPICS)
    with ArcticShift(reddit, lag=0.0) as archive:
        yield {
            "FEEDMILL_REDIS_URL": f"redis://127.0.0.1:{free_port()}",
            "FEEDMILL_REDDIT_TOPICS": str(file),
            "FEEDMILL_REDDIT_URL": reddit.url,
            "FEEDMILL_REDDIT_CLIENT_ID": "id",
            "FEEDMILL_REDDIT_CLIENT_SECRET": "secret",
            "FEEDMILL_REDDIT_USER_AGENT": "linux:check:1.0 (by /u/nobody)",
            "FEEDMILL_ARCTIC_SHIFT_URL": archive.url,
            "XDG_CONFIG_HOME": str(tmp_path),
        }


def check(
    folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = feedmill("ingest", "reddit", "--check", cwd=folder, **environment)
    assert "Traceback" not in command.stderr
    return command


def results(command: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return what was printed about each way."""
    lines = [line.partition(" ") for line in command.stdout.splitlines()]
    return {name: rest.strip() for name, _, rest in lines}


def test_says_that_each_way_works(
    reddit: Reddit, environment: dict[str, str], tmp_path: Path
) -> None:
    reddit.has_feeds = True
    command = check(tmp_path, environment)
    assert command.returncode == 0, command.stderr
    assert results(command) == {
        "app": "works: r/cooking (newest posts: 1). Run `feedmill ingest reddit`",
        "archive": "works: r/cooking (newest posts: 1). "
        "Run `feedmill ingest reddit --source arctic-shift`",
        "feeds": "works: r/cooking without a login (entries: 1). "
        "Run `feedmill ingest feeds feeds.toml`",
        "dumps": "need no access. Run `feedmill enqueue RS_2026-10.zst`",
    }


def test_one_way_is_enough(environment: dict[str, str], tmp_path: Path) -> None:
    del environment["FEEDMILL_REDDIT_CLIENT_ID"]
    command = check(tmp_path, environment)
    assert command.returncode == 0
    ways = results(command)
    assert ways["app"].startswith("does not work: Reddit's client id is missing.")
    assert ways["app"].endswith(f"{EXPLAINED}approved-app")
    assert ways["archive"].startswith("works: r/cooking")
    assert ways["feeds"] == f"does not work: too many requests (429). {EXPLAINED}feeds"


def test_wrong_credentials_are_explained_and_not_shown(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["FEEDMILL_REDDIT_CLIENT_SECRET"] = "not-the-password"
    environment["FEEDMILL_ARCTIC_SHIFT_URL"] = f"http://127.0.0.1:{free_port()}"
    command = check(tmp_path, environment)
    assert command.returncode == 1, "no way works"
    ways = results(command)
    assert "Reddit rejected the client ID or secret" in ways["app"]
    assert "no connection to Arctic Shift" in ways["archive"]
    assert ways["archive"].endswith(f"{EXPLAINED}archive-and-dumps")
    assert "not-the-password" not in command.stdout + command.stderr


def test_a_blocked_user_agent_is_named(
    reddit: Reddit, environment: dict[str, str], tmp_path: Path
) -> None:
    reddit.blocked_agents = "nobody"
    ways = results(check(tmp_path, environment))
    assert "status 403; check FEEDMILL_REDDIT_USER_AGENT." in ways["app"]


def test_another_subreddit_is_tried_if_one_is_closed(
    reddit: Reddit, environment: dict[str, str], tmp_path: Path
) -> None:
    reddit.set_kind("cooking", "private")
    ways = results(check(tmp_path, environment))
    assert ways["app"].startswith("works: r/chess")
    reddit.set_kind("chess", "banned")
    ways = results(check(tmp_path, environment))
    assert ways["app"].startswith(
        "does not work: r/cooking is private; r/chess is banned."
    )


def test_the_check_runs_alone(environment: dict[str, str], tmp_path: Path) -> None:
    command = feedmill(
        "ingest", "reddit", "--check", "--once", cwd=tmp_path, **environment
    )
    assert command.returncode == 2
    assert "--check cannot be combined with --once" in command.stderr
