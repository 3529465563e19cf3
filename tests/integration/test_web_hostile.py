"""Damaged and hostile values in Redis fail no page, and places in the stream add no events."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from feedmill.shared.keys import DEAD_LETTERS, LIVE_GAPS, LIVE_STATUS, RESULTS_STREAM
from feedmill.shared.settings import Settings
from feedmill.web import streams
from tests.support import RedisServer
from tests.unit.test_web_frame import HOSTILE, HTML, client_of

PAGES = (
    "/", "/stream/chart", "/runs", "/runs-list", "/system", "/system-state", "/teach", "/review",
    "/posts/p", "/v1/posts/p", "/v1/results", "/v1/runs",
)  # fmt: skip


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with client_of(settings) as client:
        yield client


def check_pages(client: TestClient) -> None:
    for path in PAGES:
        answer = client.get(path, headers=HTML)
        assert answer.status_code in {200, 404}, path
        if answer.headers["content-type"].startswith("text/html"):
            assert "<img" not in answer.text


@pytest.mark.parametrize(
    "value",
    [
        "{",
        "[]",
        '"x"',
        '{"at": 1e999}',
        '{"at": NOW, "sent": "x"}',
        '{"at": NOW, "sent": 1e999, "read": 1}',
        '{"at": NOW, "sent": 1, "hindrance": ["HOSTILE"]}',
        '{"at": NOW, "sent": 1, "hindrance": "HOSTILE", "clock": "HOSTILE"}',
        '{"at": NOW}',
        '["s", "HOSTILE", 1e999, NaN, 1]',
        '["s", 5, 1, 2, 3]',
        '["s", "HOSTILE", 1, 2, 3]',
        '["s", "HOSTILE", -1e300, 1e300, 3]',
    ],
)
def test_pages_survive_values_of_live_sources(
    client: TestClient, redis: RedisServer, value: str
) -> None:
    text = value.replace("NOW", str(time.time())).replace("HOSTILE", HOSTILE)
    for key in (LIVE_STATUS, LIVE_GAPS):
        redis.client.hset(key, HOSTILE, text)
    check_pages(client)


@pytest.mark.parametrize(
    "fields",
    [
        {"other": "x"},
        {"letter": "{"},
        {"letter": '{"id": 5}'},
        {
            "letter": '{"id": "p", "reason": "HOSTILE", "failed_at": NaN, "post": "HOSTILE"}'
        },
    ],
)
def test_pages_show_damaged_dead_letters_so_that_they_can_be_dropped(
    client: TestClient, redis: RedisServer, fields: dict[str, str]
) -> None:
    if "HOSTILE" in fields.get("letter", ""):
        letter = json.loads(fields["letter"].replace("HOSTILE", HOSTILE))
        rest = {"options": HOSTILE, "message": HOSTILE, "worker": HOSTILE}
        fields = {"letter": json.dumps(letter | rest)}
    redis.client.xadd(DEAD_LETTERS, fields)  # type: ignore[arg-type]
    check_pages(client)
    page = client.get("/system").text
    names = re.findall(r'name="entry" value="([^"]+)"', page)
    assert len(names) == 1
    client.post("/system/dead", data={"action": "drop", "entry": names})
    assert not redis.client.xlen(DEAD_LETTERS)


@pytest.mark.parametrize("when", ["NaN", "Infinity", "-Infinity", "1e300", '"x"'])
def test_pages_skip_results_of_no_time(
    client: TestClient, redis: RedisServer, when: str
) -> None:
    classification = (
        '{"id": "p", "label": "a", "scores": {"a": 1}, "classified_at": WHEN}'
    )
    post = {"id": "p", "title": HOSTILE}
    fields: dict[Any, Any] = {
        "id": "p",
        "classification": classification.replace("WHEN", when),
        "post": json.dumps(post),
    }
    redis.client.xadd(RESULTS_STREAM, fields)
    check_pages(client)


@pytest.mark.parametrize(
    "path", ["/v1/results/stream", "/stream/events", "/v1/results"]
)
@pytest.mark.parametrize(
    "place",
    [
        "1-1\ndata: {}",
        "1-1\n\ndata:x",
        "\n1-1",
        "1-1\n",
        f"{2**64}-1",
        f"1-{2**64}",
        "1",
    ],
)
def test_a_place_adds_nothing_to_a_stream(
    client: TestClient, path: str, place: str
) -> None:
    answer = client.get(path, params={"after": place})
    assert answer.status_code == 422


@pytest.mark.parametrize("path", ["/v1/results/stream", "/stream/events"])
def test_one_reader_too_many_gets_an_error(
    client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_READERS", 0)
    answer = client.get(path)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "busy"
    assert answer.headers["retry-after"]
