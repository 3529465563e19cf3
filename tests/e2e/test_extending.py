"""docs/examples/extending: a custom source, classifier and engine, as shown in docs/extending.md."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from shared.broker import queue_depth
from tests.support import RedisServer, feedmill, run

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "docs" / "examples" / "extending"
OURS = {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{ROOT}"}
STORIES = {
    "hits": [
        {
            "objectID": "1",
            "title": "Show HN: A queue",
            "story_text": "<p>It waits.",
            "points": 3,
            "created_at_i": 1700000000,
        },
        {"objectID": "2", "title": "A faster sort", "url": "https://example.org/sort", "points": None},
        {"objectID": "3", "title": ""},
    ]
}


def test_custom_source_sends_posts(redis: RedisServer, tmp_path: Path) -> None:
    def send() -> tuple[str, str]:
        command = [sys.executable, str(EXAMPLES / "hacker_news.py")]
        said = run(command, tmp_path, os.environ | {"FEEDMILL_REDIS_URL": redis.url}, json.dumps(STORIES))
        return said.stdout, said.stderr

    bad = "hn-3: title or body must contain text\n"
    first, second = send(), send()
    assert [(re.findall(r"\d+", said), errors) for said, errors in (first, second)] == [
        (["2", "0"], bad),
        (["0", "2"], bad),
    ]
    assert queue_depth(redis.client, "feedmill").waiting == 1


def test_custom_classifier_classifies(tmp_path: Path) -> None:
    (tmp_path / "posts.jsonl").write_text(
        '{"id": "a", "title": "Soup with beans, and more beans"}\n{"id": "b", "title": "Nothing of it"}\n'
    )
    labels = json.dumps({"food": "soup beans bread", "sports": "match goal"})
    arguments = ("classify", "posts.jsonl", "--classifier", "keywords:Keywords", "--labels", labels, "--json")
    said = feedmill(*arguments, cwd=tmp_path, FEEDMILL_TOKEN_BUDGET="2048", **OURS)
    assert said.returncode == 0, said.stderr
    food, none = (json.loads(line) for line in said.stdout.splitlines())
    assert (food["label"], food["scores"]) == ("food", pytest.approx({"food": 4 / 5, "sports": 1 / 5}))
    assert none["scores"] == {"food": 0.5, "sports": 0.5}
    said = feedmill("classify", "Soup", *arguments[2:-1], cwd=tmp_path, FEEDMILL_TOKEN_BUDGET="2048", **OURS)
    assert "keywords:Keywords (" in said.stdout, "the model whose weights are unused is not named"


def test_custom_engine_gives_the_same_scores(tmp_path: Path) -> None:
    found = [
        feedmill("classify", "Soup with beans", "--dtype", "float32", "--json", *engine, cwd=tmp_path, **OURS)
        for engine in ((), ("--engine", "logged:LoggedEngine"))
    ]
    usual, ours = (json.loads(each.stdout) for each in found)
    assert ours["scores"] == usual["scores"]
    assert ours["label"] == "food"


@pytest.mark.parametrize(
    ("flag", "name", "words"),
    [
        (
            "--classifier",
            "no.such:Thing",
            "no.such.*--classifier or FEEDMILL_CLASSIFIER",
        ),
        ("--engine", "logged:Thing", f"FEEDMILL_ENGINE: .*logged.*{EXAMPLES}/logged.py.*Thing"),
        ("--engine", "tensorflow", "--engine: .*torch, onnx.*'tensorflow'"),
    ],
)
def test_missing_extensions_name_the_setting(tmp_path: Path, flag: str, name: str, words: str) -> None:
    said = feedmill("classify", "a text", flag, name, cwd=tmp_path, **OURS)
    assert (said.returncode, said.stdout) == (2, "")
    assert re.search(words, said.stderr)
