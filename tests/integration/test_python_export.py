"""`feedmill.export` on a real Redis. The sinks have tests/integration/test_sinks.py."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import feedmill
from feedmill.exporting.run import Export
from feedmill.producers.push import Pusher
from feedmill.shared.broker import make_app
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.purge import purge_posts
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, free_port, make_classification

YEAR_2100 = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _address(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", redis.url)


def store(
    redis: RedisServer, post_id: str, label: str = "food", run: str | None = None
) -> None:
    result = Result(
        Post(id=post_id, title="x", run=run), make_classification(post_id, label)
    )
    ResultsStore(redis.client, Settings()).write([result])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_exports_a_selection_to_a_file(redis: RedisServer, tmp_path: Path) -> None:
    store(redis, "a")
    store(redis, "b", label="books")
    out = tmp_path / "out.jsonl"
    counts = feedmill.export(out, columns=["label", "id"], label="books", since=0)
    assert rows(out) == [{"label": "books", "id": "b"}]
    assert (counts.rows, counts.missed, counts.complete) == (1, 0, True)
    assert (counts.resumed, counts.can_resume) == (False, False)


def test_exports_a_run_with_its_columns(redis: RedisServer, tmp_path: Path) -> None:
    settings = Settings(redis_url=redis.url)
    pusher = Pusher(
        make_app(settings, current=False),
        redis.client,
        settings,
        ClassifyOptions(),
        run="monday",
    )
    pusher.push([Post(id="a", title="x")])
    store(redis, "a", run="monday")
    store(redis, "b")
    feedmill.export(tmp_path / "out.jsonl", run="monday")
    assert [row["id"] for row in rows(tmp_path / "out.jsonl")] == ["a"]
    with pytest.raises(feedmill.UserError, match="tuesday"):
        feedmill.export(tmp_path / "other.jsonl", run="tuesday")
    assert not (tmp_path / "other.jsonl").exists()


def test_continues_a_folder_and_removes_purged_posts(
    redis: RedisServer, tmp_path: Path
) -> None:
    store(redis, "a")
    out = tmp_path / "parts"
    out.mkdir()
    assert feedmill.export(out, form="jsonl").rows == 1
    store(redis, "b")
    counts = feedmill.export(str(out), form="jsonl")
    assert (counts.rows, counts.resumed, counts.can_resume) == (1, True, True)
    purge_posts(redis.client, Settings(), ["a"])
    counts = feedmill.export(out, purge=True)
    assert (counts.rows, counts.removed) == (0, 1)
    (part,) = out.glob("day=*/part-*.jsonl")
    assert [row["id"] for row in rows(part)] == ["b"]


def test_leaves_an_existing_file_if_no_result_has_the_label(
    redis: RedisServer, tmp_path: Path
) -> None:
    store(redis, "a")
    out = tmp_path / "out.csv"
    out.write_text("before")
    with pytest.raises(feedmill.UserError, match="No result has the label 'Food'"):
        feedmill.export(out, label="Food")
    assert out.read_text() == "before"


@pytest.mark.parametrize(
    ("destination", "arguments", "words"),
    [
        ("out", {}, "Cannot tell the format of .*out. Give form, or a destination"),
        ("-", {}, "destination must be a file or folder"),
        ("mysql://host/x", {}, "destination must be a path"),
        ("out.csv", {"table": "x"}, "table needs a database"),
        ("out.csv", {"form": "xml"}, "Cannot tell the format"),
        ("out.csv", {"follow": True}, "follow needs a folder"),
        (
            "out.csv",
            {"follow": True, "until": 5},
            "follow cannot be combined with until",
        ),
        (
            "out.csv",
            {"latest": True, "label": "x"},
            "latest cannot be combined with label",
        ),
        ("out.csv", {"part_seconds": 5}, "part_seconds needs follow"),
        (
            "out",
            {"follow": True, "form": "csv", "part_seconds": 0},
            "part_seconds must be above",
        ),
        ("out.csv", {"purge": True, "label": "x"}, "purge removes rows of any result"),
        ("out.csv", {"since": float("nan")}, "since must be a time"),
        ("out.csv", {"until": -1}, "until must be a time"),
        ("out.csv", {"since": YEAR_2100, "until": 5}, "since must be before until"),
        ("out.csv", {"columns": ["id", "answers"]}, "unknown column 'answers'"),
        ("out.csv", {"run": 5}, "name of a run must be text"),
        ("postgresql://host/x", {"columns": ["id"]}, "A table has all columns"),
    ],
)
def test_refuses_unsuitable_arguments_by_their_names(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    destination: str,
    arguments: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(feedmill.UserError, match=words) as raised:
        feedmill.export(destination, **arguments)
    assert "OUT" not in str(raised.value)
    assert [*tmp_path.iterdir()] == []


def test_an_unreachable_redis_is_a_user_error(tmp_path: Path) -> None:
    address = f"redis://127.0.0.1:{free_port()}"
    with pytest.raises(UserError):
        feedmill.export(tmp_path / "out.csv", redis_url=address)
    assert [*tmp_path.iterdir()] == []


def test_the_function_is_not_hidden_by_a_package() -> None:
    assert Export.__module__.startswith("feedmill.exporting.")
    assert callable(feedmill.export)
