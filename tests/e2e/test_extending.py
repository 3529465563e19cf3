"""docs/examples/extending: a custom source, classifier and engine, as shown in
docs/extending.md.
"""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from feedmill.producers.live.state import Gaps, LiveState, statuses
from feedmill.shared.keys import LIVE_DELETED
from tests.support import (
    ROOT,
    Feedmill,
    RedisServer,
    feedmill,
    queued,
    running,
    wait_until,
)

EXAMPLES = ROOT / "docs" / "examples" / "extending"
OURS = {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{ROOT}"}


def test_custom_live_source_sends_posts_once(
    redis: RedisServer, tmp_path: Path
) -> None:
    posts = tmp_path / "posts.jsonl"
    posts.write_text('{"id": "0", "title": "before the first start"}\n')

    def ingesting() -> AbstractContextManager[Feedmill]:
        command = ("ingest", "live", "json_lines:JsonLines", "--labels", "food,sports")
        return running(
            *command,
            cwd=tmp_path,
            FEEDMILL_REDIS_URL=redis.url,
            POSTS=str(posts),
            **OURS,
        )

    def write(text: str) -> None:
        with posts.open("a") as file:
            file.write(text)

    def sent() -> list[str]:
        return [post["id"] for post in queued(redis)]

    state = LiveState(redis.client, "json_lines")
    with ingesting() as daemon:
        write(
            '{"id": "1", "title": "soup"}\n{"id": "2", "title": "a match"}\n{"id": "3"'
        )
        wait_until(lambda: sent() == ["0", "1", "2"], "whole lines are sent")
        wait_until(lambda: state.position() is not None, "the position is stored")
        assert daemon.end() == 0
    write(', "title": "bread"}\n')
    write('{"id": "2", "deleted": true}\n{"id": "4", "title": "a goal"}\n')
    with ingesting():
        wait_until(lambda: sent()[-1:] == ["4"], "later lines are sent")
        wait_until(
            lambda: (
                queued(redis)[2] == {"id": "2"}
                or redis.client.smembers(LIVE_DELETED + "json_lines") == {"2"}
            ),
            "the deletion is known",
        )
    assert sent() == ["0", "1", "2", "3", "4"]
    assert statuses(redis.client)["json_lines"].running
    assert Gaps(redis.client).all() == []


def test_custom_classifier_classifies(tmp_path: Path) -> None:
    (tmp_path / "posts.jsonl").write_text(
        '{"id": "a", "title": "Soup with beans, and more beans"}\n{"id": "b", "title": "Nothing '
        'of it"}\n'
    )
    labels = json.dumps({"food": "soup beans bread", "sports": "match goal"})
    arguments = (
        "classify",
        "posts.jsonl",
        "--classifier",
        "keywords:Keywords",
        "--labels",
        labels,
        "--json",
    )
    said = feedmill(*arguments, cwd=tmp_path, FEEDMILL_TOKEN_BUDGET="2048", **OURS)
    assert said.returncode == 0, said.stderr
    food, none = (json.loads(line) for line in said.stdout.splitlines())
    assert (food["label"], food["scores"]) == (
        "food",
        pytest.approx({"food": 4 / 5, "sports": 1 / 5}),
    )
    assert none["scores"] == {"food": 0.5, "sports": 0.5}
    said = feedmill(
        "classify",
        "Soup",
        *arguments[2:-1],
        cwd=tmp_path,
        FEEDMILL_TOKEN_BUDGET="2048",
        **OURS,
    )
    assert "keywords:Keywords (" in said.stdout, (
        "the model whose weights are unused is not named"
    )


def test_custom_engine_gives_the_same_scores(tmp_path: Path) -> None:
    found = [
        feedmill(
            "classify",
            "Soup with beans",
            "--dtype",
            "float32",
            "--json",
            *engine,
            cwd=tmp_path,
            **OURS,
        )
        for engine in ((), ("--engine", "logged:LoggedEngine"))
    ]
    usual, ours = (json.loads(each.stdout) for each in found)
    assert ours["scores"] == usual["scores"]
    assert ours["label"] == "food"
