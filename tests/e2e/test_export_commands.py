"""`feedmill export`: complete files after any interruption, following, and reading exports back
in.
"""

import re
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from feedmill.exporting.columns import BATCH_ROWS
from feedmill.exporting.files import STATE_FILE, parts, post_ids
from feedmill.shared.messages import Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests import support
from tests.support import RedisServer, feedmill, wait_until

FORMATS = ["parquet", "csv", "jsonl"]


def fill(
    redis: RedisServer, *post_ids: str, fingerprint: str = "f", **fields: Any
) -> list[Post]:
    posts = [
        Post(id=post_id, title=f"title of {post_id}", body="=a body\r\n", **fields)
        for post_id in post_ids
    ]
    scores = {"food": 0.9, "books": 0.1}
    results = [
        Result(
            post,
            support.make_classification(
                post.id, scores=scores, fingerprint=fingerprint, queued_seconds=1.0
            ),
        )
        for post in posts
    ]
    store = ResultsStore(redis.client, Settings())
    for start in range(0, len(results), 500):
        store.write(results[start : start + 500])
    return posts


def exported(out: Path, name: str) -> list[str]:
    paths = [out] if out.is_file() else [path for path, _ in parts(out)]
    return [post_id for path in paths for post_id in post_ids(path, name)]


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_an_export_can_be_enqueued_again(
    redis: RedisServer, tmp_path: Path, name: str
) -> None:
    posts = fill(
        redis, "1", "t3_abc", score=-3, topic="travel", created_utc=5.0, extra={"a": 1}
    )
    out = tmp_path / f"out.{name}"
    said = feedmill(
        "export", "--format", name, str(out), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    )
    assert (said.returncode, said.stdout[:2], said.stderr) == (0, "2 ", "")
    again = feedmill("enqueue", str(out), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert re.findall(r"\d+", again.stdout) == ["2", "1", "0", "0"], again.stderr
    (message,) = redis.client.lrange("feedmill", 0, -1)
    sent = support.body_of(message)[1]["posts"]
    assert [Post.model_validate(post | {"run": None}) for post in sent] == posts


@pytest.mark.parametrize("name", FORMATS)
def test_kill_at_any_time_leaves_each_result_once(
    redis: RedisServer, tmp_path: Path, name: str
) -> None:
    posts = [f"p{number}" for number in range(8_000)]
    out = tmp_path / "out"
    command = (
        "export",
        "--format",
        name,
        "--follow",
        "--part-seconds",
        "0.02",
        str(out),
    )
    for kill in range(4):
        fill(redis, *posts[2000 * kill : 2000 * (kill + 1)])
        before = len(parts(out))
        with support.running(
            *command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        ) as process:
            wait_until(
                lambda before=before: len(parts(out)) > before,  # type: ignore[misc]
                "the export has published a part",
            )
            process.end(signal.SIGKILL)
        found = exported(out, name)
        assert found == posts[: len(found)]
    said = feedmill(
        "export", "--format", name, str(out), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert exported(out, name) == posts
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["parquet", "csv"])
def test_kill_leaves_no_half_file(
    redis: RedisServer, tmp_path: Path, name: str
) -> None:
    posts = [f"p{number}" for number in range(8_000)]
    fill(redis, *posts)
    command = ("export", f"out.{name}")
    with support.running(
        *command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    ) as process:
        wait_until(
            lambda: list(tmp_path.glob("*out*")), "the export is running or done"
        )
        process.end(signal.SIGKILL)
    assert (
        not (tmp_path / f"out.{name}").exists()
        or exported(tmp_path / f"out.{name}", name) == posts
    )
    assert (
        feedmill(*command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).returncode == 0
    )
    assert exported(tmp_path / f"out.{name}", name) == posts
    assert [
        path.name for path in tmp_path.iterdir() if not path.name.endswith(".log")
    ] == [f"out.{name}"]


def test_follow_exports_new_results(redis: RedisServer, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "jsonl"
    command = (
        "export",
        "--format",
        name,
        "--follow",
        "--part-seconds",
        "0.1",
        str(out),
    )
    fill(redis, "1", "2")
    with support.running(
        *command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    ) as following:
        wait_until(
            lambda: exported(out, name) == ["1", "2"], "existing results are in a part"
        )
        fill(redis, "3")
        wait_until(
            lambda: exported(out, name) == ["1", "2", "3"],
            "the new result is in a part",
        )
        redis.client.client_kill_filter(_type="normal", skipme=True)
        fill(redis, "4")
        wait_until(
            lambda: exported(out, name) == ["1", "2", "3", "4"],
            ("the export continues after a lost connection"),
        )
        assert (
            feedmill(*command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).returncode
            == 2
        )
        assert following.end(signal.SIGTERM) == 0
        assert str(out) in following.text()
    fill(redis, "5")
    said = feedmill(
        "export",
        "--format",
        name,
        "--json",
        str(out),
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert support.last_json(said.stdout) == {
        "rows": 1,
        "removed": 0,
        "complete": True,
        "missed": 0,
    }
    assert exported(out, name) == ["1", "2", "3", "4", "5"]
    assert not support.processes_in(tmp_path)


def calls(redis: RedisServer) -> int:
    """Return how many functions were called in Redis."""
    found: Any = redis.client.info("commandstats")
    return sum(
        stats["calls"]
        for name, stats in found.items()
        if name.startswith("cmdstat_fcall")
    )


def test_interrupting_follow_completes_the_part(
    redis: RedisServer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with support.running(
        "export",
        "--format",
        "jsonl",
        "--follow",
        str(out),
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
    ) as following:
        wait_until((out / STATE_FILE).exists, "the export has started")
        posts = [str(number) for number in range(3 * BATCH_ROWS // 2)]
        fill(redis, *posts)
        before = calls(redis)
        wait_until(lambda: calls(redis) > before, "the export has fetched results")
        assert following.end(signal.SIGINT) == 0
    found = exported(out, "jsonl")
    assert found
    assert found == posts[: len(found)]


def test_exports_chosen_columns_and_latest_results(
    redis: RedisServer, tmp_path: Path
) -> None:
    """Chosen columns, each post's latest result, and the format from the file name."""
    fill(redis, "1", "2")
    fill(redis, "1", fingerprint="with other labels")
    url = {"FEEDMILL_REDIS_URL": redis.url}
    said = feedmill(
        "export",
        "--columns",
        "id,label, TITLE,run",
        "--latest",
        "food.CSV",
        cwd=tmp_path,
        **url,
    )
    assert (said.returncode, said.stdout[:2]) == (0, "2 "), said.stderr
    assert (
        (tmp_path / "food.CSV").read_bytes()
        == b"id,label,title,run\r\n2,food,title of 2,\r\n1,food,title of 1,\r\n"
    )
    assert (
        feedmill(
            "export", "--columns", "id,scores", "food.parquet", cwd=tmp_path, **url
        ).returncode
        == 0
    )
    assert pq.read_schema(tmp_path / "food.parquet").names == ["id", "scores"]
    assert {path.name for path in tmp_path.iterdir()} == {"food.CSV", "food.parquet"}


def test_only_an_unknown_label_is_an_error(redis: RedisServer, tmp_path: Path) -> None:
    """A known one without results in the period replaces an earlier file."""
    fill(redis, "1")
    url, out = {"FEEDMILL_REDIS_URL": redis.url}, tmp_path / "food.csv"
    arguments = (
        "export",
        "food.csv",
        "--columns",
        "id",
        "--since",
        "2100-01-01",
        "--label",
    )
    out.write_text("earlier")
    said = feedmill(*arguments, "fod", cwd=tmp_path, **url)
    assert (said.returncode, out.read_text()) == (2, "earlier")
    assert "'fod'" in said.stderr
    said = feedmill(*arguments, "food", cwd=tmp_path, **url)
    assert (said.returncode, out.read_bytes()) == (1, b"id\r\n"), said.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("out",), r"--format.*\.parquet"),
        (
            ("--columns", "id,titel", "out.csv"),
            "--columns: .*'titel'.* id, topic, title, ",
        ),
        (("--latest", "--format", "parquet", "out"), "--latest .*single file"),
        (("--follow", "out.csv"), r"--follow needs a folder.*--format csv out/"),
        (("-", "--format", "csv"), "results --json"),
        (("x" * 300 + ".csv",), "File name too long"),
        (("POSTGRESQL://u:secret@host/db.csv",), "begin with postgresql://"),
        (("postgresql:/u:secret@host/db.csv",), "begin with postgresql://"),
        (("postgresql://u@host/db", "--table", "caf\udce9"), "--table"),
        (
            (
                "--format",
                "csv",
                "--since",
                "2026-01-02",
                "--until",
                "2026-01-01",
                "out",
            ),
            "2026-01-02.*2026-01-01",
        ),
        (("--format", "csv", "/proc/out"), "/proc|Permission|No such file"),
    ],
)
def test_mistakes_are_one_line_that_names_the_flag(
    redis: RedisServer, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    found = feedmill("export", *arguments, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert found.returncode == 2
    assert re.search(said, found.stderr)
    assert len(found.stderr.splitlines()) == 1, found.stderr
    assert list(tmp_path.iterdir()) == []
