"""docs/examples/extending: a custom source, classifier and engine, as shown in docs/extending.md."""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from feedmill.producers.live.state import Gaps, LiveState, statuses
from feedmill.shared.keys import LIVE_DELETED
from tests.fakes.hacker_news import HackerNews
from tests.support import ROOT, Feedmill, RedisServer, feedmill, queued, running, wait_until

EXAMPLES = ROOT / "docs" / "examples" / "extending"
OURS = {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{ROOT}"}


@pytest.fixture
def hacker_news() -> Iterator[HackerNews]:
    with HackerNews() as server:
        yield server


def test_custom_live_source_sends_posts_once(redis: RedisServer, hacker_news: HackerNews, tmp_path: Path) -> None:
    def story(**fields: object) -> dict[str, Any]:
        return {"type": "story", "time": 1700000000, "title": "a story", **fields}

    def ingesting() -> AbstractContextManager[Feedmill]:
        command = ("ingest", "live", "hacker_news:HackerNews", "--labels", "software,politics")
        return running(*command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, HACKER_NEWS_URL=hacker_news.url, **OURS)

    state = LiveState(redis.client, "hacker_news")
    hacker_news.items[101] = story()
    hacker_news.faults = [503]
    with ingesting() as daemon:
        wait_until(lambda: "/v0/updates.json" in hacker_news.asked, "the first poll")
        assert daemon.end() == 0
    assert (queued(redis), state.position()) == ([], None), "the first start begins with the next story"
    with ingesting():
        asked = hacker_news.asked.count("/v0/maxitem.json")
        wait_until(lambda: hacker_news.asked.count("/v0/maxitem.json") >= asked + 2, "the first poll")
        hacker_news.items |= {
            102: story(title="Show HN: A queue", text="<p>It waits.", score=3, url="https://example.org/queue"),
            103: {"type": "comment", "time": 1700000001, "text": "first"},
            104: None,
            105: story(title="", url="https://example.org/untitled"),
            106: story(title="A faster sort"),
        }
        wait_until(lambda: (now := state.position()) and now.cursor == 106, "all items are read")
    first, second = queued(redis)
    assert first.pop("body").strip() == "It waits."
    assert first == {
        "id": "hn-102", "title": "Show HN: A queue", "score": 3,
        "url": "https://example.org/queue", "permalink": "https://news.ycombinator.com/item?id=102",
        "created_utc": 1700000000.0,
    }  # fmt: skip
    assert second["id"] == "hn-106"
    hacker_news.items |= {106: {"type": "story", "time": 1700000000, "deleted": True}, 107: story(title="The last")}
    hacker_news.changed = [106, 103]
    with ingesting():
        wait_until(lambda: queued(redis)[-1]["id"] == "hn-107", "the new story is sent")
        wait_until(
            lambda: (
                queued(redis)[1] == {"id": "hn-106"}
                or redis.client.smembers(LIVE_DELETED + "hacker_news") == {"hn-106"}
            ),
            "the deletion is known",
        )
    assert Gaps(redis.client).all() == []
    assert statuses(redis.client)["hacker_news"].running


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
