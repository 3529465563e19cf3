"""`feedmill ingest reddit --once --out`: a data set from Reddit without Redis, against the
loopback Reddit.
"""

import csv
import gzip
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from feedmill.console import notes_console
from feedmill.producers.files import FileReading
from feedmill.shared.messages import Post
from feedmill.testing.fake_reddit import Reddit
from tests.support import feedmill, running, wait_until

TOPICS = """
active = 1
[topics]
"food" = ["nothere", "cooking", "baking"]
"sport" = ["tennis"]
"""
#: Longer than results keep of a body by default.
LONG_BODY = "Stir the rice slowly. " * 300
TITLE, BODY = "Salt &amp; pepper", "  Which &lt;b&gt; do you use?\n\nI use = both.  "
FORMULA = "=HYPERLINK(1)"


@pytest.fixture
def reddit() -> Iterator[Reddit]:
    with Reddit() as reddit:
        for name in ("cooking", "baking", "tennis"):
            reddit.add_subreddit(name)
        reddit.publish(
            "cooking", title=TITLE, body=BODY, score=7, url="https://example.org/salt"
        )
        reddit.publish("cooking", title=FORMULA, body=LONG_BODY)
        reddit.publish("cooking", title="pinned", stickied=True)
        reddit.delete(reddit.publish("cooking", title="deleted"))
        for number in range(250):
            reddit.publish("tennis", title=f"match {number}")
        yield reddit


@pytest.fixture
def environment(reddit: Reddit, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "topics.toml").write_text(TOPICS)
    return {
        "FEEDMILL_REDIS_URL": "redis://127.0.0.1:9",
        "FEEDMILL_REDDIT_URL": reddit.url,
        "FEEDMILL_REDDIT_CLIENT_ID": "id",
        "FEEDMILL_REDDIT_CLIENT_SECRET": "secret",
        "FEEDMILL_REDDIT_USER_AGENT": "linux:test:1 (by /u/nobody)",
        "FEEDMILL_REDDIT_TOPICS": str(tmp_path / "topics.toml"),
        "XDG_CONFIG_HOME": str(tmp_path),
    }


def read_back(path: Path, capsys: pytest.CaptureFixture[str]) -> list[Post]:
    """Return the file's posts as other commands read them."""
    reading = FileReading(str(path), notes_console())
    posts = list(reading.posts())
    reading.end()
    assert capsys.readouterr().err == ""
    return posts


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "xlsx", "csv.gz"])
def test_writes_whole_posts_of_each_topic(
    ending: str,
    tmp_path: Path,
    reddit: Reddit,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / f"posts.{ending}"
    said = feedmill(
        "ingest", "reddit", "--once", "--out", str(out), cwd=tmp_path, **environment
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == f"102 posts written to {out}\n"
    assert re.search(
        "topic food: not reading r/nothere .missing.; reading r/cooking instead",
        said.stderr,
    )
    posts = {post.title: post for post in read_back(out, capsys)}
    assert len(posts) == 102
    assert posts[FORMULA].body == LONG_BODY.strip()
    salt = posts["Salt & pepper"]
    assert salt.body == "Which <b> do you use?\n\nI use = both."
    published = reddit.posts[salt.id].data
    assert (salt.topic, salt.subreddit, salt.score) == ("food", "cooking", 7)
    assert (salt.url, salt.created_utc) == (
        "https://example.org/salt",
        published["created_utc"],
    )
    assert salt.permalink == f"https://www.reddit.com{published['permalink']}"


def test_raw_texts_are_as_reddit_returned_them(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "posts.jsonl"
    said = feedmill(
        "ingest",
        "reddit",
        "--once",
        "--raw",
        "--out",
        str(out),
        cwd=tmp_path,
        **environment,
    )
    assert said.returncode == 0, said.stderr
    posts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(post["title"], post["body"]) for post in posts if post["score"] == 7] == [
        (TITLE, BODY)
    ]
    assert len(read_back(out, capsys)) == len(posts)


def test_spreadsheets_run_no_formula_of_a_sender(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "posts.csv"
    assert (
        feedmill(
            "ingest",
            "reddit",
            "--once",
            "--excel",
            "--out",
            str(out),
            cwd=tmp_path,
            **environment,
        ).returncode
        == 0
    )
    content = out.read_bytes()
    assert content.startswith("\ufeff".encode())
    cells = [
        cell
        for row in csv.reader(content.decode("utf-8-sig").splitlines())
        for cell in row
    ]
    assert f"'{FORMULA}" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("ending", ["csv", "parquet", "xlsx", "csv.gz"])
def test_an_interrupted_file_stays_readable(
    ending: str,
    older: bool,
    tmp_path: Path,
    reddit: Reddit,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / f"posts.{ending}"
    if older:
        out.write_text("older")
    reddit.faults.always("too_many", where="tennis.*after", seconds=3600)
    command = ("ingest", "reddit", "--once", "--limit", "200", "--out", str(out))
    with running(*command, cwd=tmp_path, **environment) as process:
        wait_until(lambda: reddit.ledger.faults["too_many"], "Reddit asks for a pause")
        assert process.end(signal.SIGTERM, 20) == 128 + signal.SIGTERM
    partial = tmp_path / f"posts.partial.{ending}"
    written = partial if older else out
    assert len(read_back(written, capsys)) == 102
    assert (
        f"interrupted by SIGTERM. The 102 posts read until then are in {written}"
        in process.text()
    )
    assert partial.exists() == older
    assert out.exists()
    assert not older or out.read_text() == "older"
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_unreachable_reddit_leaves_no_file(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "posts.csv"
    gone = environment | {"FEEDMILL_REDDIT_CLIENT_SECRET": "wrong"}
    said = feedmill(
        "ingest", "reddit", "--once", "--out", str(out), cwd=tmp_path, **gone
    )
    assert said.returncode == 2
    assert "FEEDMILL_REDDIT_CLIENT_SECRET" in said.stderr
    assert "Traceback" not in said.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "posts.txt", "--once"], "Cannot tell the format of posts.txt"),
        (["--out", "missing/posts.csv", "--once"], "there is no folder missing"),
        (["--out", "posts.csv"], "--out needs --once"),
        (
            ["--out", "posts.csv", "--once", "--queue", "q"],
            ("--out cannot be combined with --queue"),
        ),
        (["--once", "--raw"], "--raw needs --out"),
        (["--out", "posts.jsonl", "--once", "--excel"], "--excel marks CSV"),
    ],
)
def test_refuses_mistakes_before_the_first_request(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    reddit: Reddit,
    environment: dict[str, str],
) -> None:
    said = feedmill("ingest", "reddit", *arguments, cwd=tmp_path, **environment)
    assert said.returncode == 2
    assert sentence in " ".join(said.stderr.split())
    assert reddit.ledger.total == 0


def test_a_topic_that_cannot_be_read_fails_the_command_but_not_the_others(
    tmp_path: Path, reddit: Reddit, environment: dict[str, str]
) -> None:
    for name in ("cooking", "baking"):
        reddit.set_kind(name, "private")
    out = tmp_path / "posts.parquet"
    said = feedmill(
        "ingest", "reddit", "--once", "--out", str(out), cwd=tmp_path, **environment
    )
    assert said.returncode == 1
    assert "none of its subreddits can be read" in said.stderr
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    assert {row["topic"] for row in rows} == {"sport"}


def test_compressed_output_is_complete(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "posts.jsonl.gz"
    assert (
        feedmill(
            "ingest", "reddit", "--once", "--out", str(out), cwd=tmp_path, **environment
        ).returncode
        == 0
    )
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 102
