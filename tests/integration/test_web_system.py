"""Tests of the system's page: figures, and dead letters that are retried or dropped."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from feedmill.producers.live.state import Gap, Gaps
from feedmill.shared.broker import queue_depth
from feedmill.shared.messages import DeadLetter, Post
from feedmill.shared.problems import report_flower
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, body_of
from tests.unit.test_web_frame import FORM, HOSTILE, HTML, client_of

TOKENS = "reader:read:0123456789abcdef,boss:admin:fedcba9876543210"
OPTIONS = '{"labels": {"a": ["a"], "b": ["b"]}}'


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with client_of(settings) as client:
        yield client


def resources_of(client: TestClient) -> Any:
    inner: Any = client.app
    return inner._app.state.resources


def bury(client: TestClient, *ids: str, **more: Any) -> None:
    """Store dead letters of these posts."""
    shared = resources_of(client)
    letters = []
    for post_id in ids:
        post = Post(id=post_id, title=HOSTILE)
        fields: dict[str, Any] = {
            "id": post_id,
            "reason": f"{HOSTILE} {post_id}",
            "post": post.model_dump_json(),
            "options": OPTIONS,
            "message": None,
            "worker": HOSTILE,
            "failed_at": time.time(),
        }
        letters.append(DeadLetter(**fields | more))
    ResultsStore(shared.redis, shared.settings).write([], letters)


def entries(page: str) -> list[str]:
    return re.findall(r'name="entry" value="([^"]+)"', page)


def act(client: TestClient, action: str, **fields: Any) -> str:
    answer = client.post("/system/dead", data={"action": action} | fields)
    assert answer.status_code in {200, 422}
    text: str = answer.text
    return text


def waiting(client: TestClient) -> int:
    shared = resources_of(client)
    return queue_depth(shared.redis, shared.settings.queue).waiting


def test_shows_the_state_and_escapes_it(client: TestClient) -> None:
    shared = resources_of(client)
    Gaps(shared.redis).record(
        Gap(source="reddit", subreddit=HOSTILE, since=1.0, until=2.0, noted=3.0)
    )
    bury(client, HOSTILE)
    report_flower(shared.redis, HOSTILE, 99.0)
    for path in ("/system", "/system-state"):
        page = client.get(path)
        assert page.status_code == 200
        assert "<img" not in page.text
        assert "r/&lt;img" in page.text
        assert "None answers" in page.text
        assert "has heard nothing from Redis for 99 s" in page.text
    assert "onerror" in client.get("/system").text


def test_retries_chosen_letters(client: TestClient, redis: RedisServer) -> None:
    bury(client, "one", "two", "three")
    names = entries(client.get("/system").text)
    page = act(client, "retry", entry=names[:2])
    assert "2 sent again" in page
    assert entries(page) == names[2:]
    assert waiting(client) == 2
    message: Any = redis.client.lindex(resources_of(client).settings.queue, 0)
    assert body_of(message)[1]["labels"] == {"a": ["a"], "b": ["b"]}


def test_retries_with_other_options(client: TestClient, redis: RedisServer) -> None:
    bury(client, "one", options=None)
    names = entries(client.get("/system").text)
    refused = act(client, "retry", entry=names)
    assert "0 sent again, 1 not sent" in refused
    assert "too long to store" in refused
    wrong = act(client, "retry", entry=names, other="1", labels="x\nx")
    assert "named twice" in wrong
    page = act(client, "retry", entry=names, other="1", labels="x: a text\ny")
    assert "1 sent again" in page
    message: Any = redis.client.lindex(resources_of(client).settings.queue, 0)
    assert body_of(message)[1]["labels"] == {"x": ["a text"], "y": ["y"]}


def test_drops_letters_and_asks_before_dropping_all(client: TestClient) -> None:
    bury(client, "one", "two", "three")
    names = entries(client.get("/system").text)
    assert entries(act(client, "drop", entry=names[:1])) == names[1:]
    assert "I am sure" in act(client, "drop-all")
    assert len(entries(client.get("/system").text)) == 2
    assert not entries(act(client, "drop-all", sure="1"))
    assert waiting(client) == 0


def test_all_are_those_of_the_run_that_is_shown(client: TestClient) -> None:
    bury(client, "one", run="monday")
    bury(client, "two")
    page = client.get("/system?run=monday").text
    assert len(entries(page)) == 1
    act(client, "retry-all", run="monday")
    assert waiting(client) == 1
    assert "two" in client.get("/system").text


def test_mistakes_change_nothing(client: TestClient) -> None:
    bury(client, "one")
    assert "Choose dead letters" in act(client, "retry")
    answer = client.post("/system/dead", data={"action": "drop", "entry": "x"})
    assert answer.status_code == 422
    answer = client.post("/system/dead", data={"action": "explode"})
    assert answer.status_code == 422
    gone = act(client, "retry", entry="1-1")
    assert "Choose dead letters" in gone
    assert len(entries(client.get("/system").text)) == 1


def test_only_an_administrator_changes_dead_letters(redis: RedisServer) -> None:
    fields = {"redis_url": redis.url, "web_tokens": TOKENS}
    with client_of(Settings.model_validate(fields)) as client:
        bury(client, "one")
        reader = {"authorization": "Bearer 0123456789abcdef"} | HTML
        page = client.get("/system", headers=reader)
        assert page.status_code == 200
        assert 'value="drop"' not in page.text
        refused = client.post(
            "/system/dead", content="action=drop-all&sure=1", headers=reader | FORM
        )
        assert refused.status_code == 403
        boss = {"authorization": "Bearer fedcba9876543210"} | HTML
        assert len(entries(client.get("/system", headers=boss).text)) == 1


def test_links_to_flower_and_grafana(redis: RedisServer) -> None:
    fields = {
        "redis_url": redis.url,
        "web_flower_url": "http://127.0.0.1:5555",
        "web_grafana_url": "https://grafana.example.org/d/1",
    }
    with client_of(Settings.model_validate(fields)) as client:
        page = client.get("/system").text
    assert 'href="http://127.0.0.1:5555"' in page
    assert 'href="https://grafana.example.org/d/1"' in page
