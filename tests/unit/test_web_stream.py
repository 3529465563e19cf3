"""Tests of the stream's page and of a post's page."""

import asyncio
import html
import re
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import pytest
from starlette.testclient import TestClient

from feedmill.outcomes.rows import Place
from feedmill.shared.messages import Classification, DeadLetter, Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.web.pages.frame import post_address
from feedmill.web.pages.stream import MAX_ROWS
from feedmill.web.streams import Newness, events
from tests.support import make_classification
from tests.unit.test_web_frame import HOSTILE, HTML, client_of

DAY_S = 86_400
WRITTEN = 1_790_000_000.0


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with client_of(settings) as client:
        yield client


@pytest.fixture
def store(settings: Settings, client: TestClient) -> ResultsStore:
    inner: Any = client.app
    return ResultsStore(inner._app.state.resources.redis, settings)


def result_of(post: Post, label: str | None = "food", **more: Any) -> Result:
    digest = blake2b(f"{post.id} {more}".encode(), digest_size=16).hexdigest()
    fields = {"fingerprint": digest, "classified_at": time.time()} | more
    found: Classification = make_classification(post.id, label, **fields)
    return Result(post, found)


def titles(text: str) -> list[str]:
    """Return the texts of the posts in a page, the first one first."""
    return re.findall(r'<li><a href="[^"]*">(.*?)</a>', text)


def test_newest_posts_come_first_and_are_bounded(
    client: TestClient, store: ResultsStore
) -> None:
    posts = [Post(id=f"p{number}", title=f"Post {number}") for number in range(205)]
    store.write([result_of(post) for post in posts])
    shown = titles(client.get("/").text)
    assert shown[0] == "Post 204"
    assert len(shown) == MAX_ROWS


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "abcde"),
        ("label=food", "abd"),
        ("none=1", "e"),
        ("min_score=0.8", "ace"),
        ("max_score=0.5", "bd"),
        ("min_score=0.8&label=food", "a"),
        ("source=Cooking", "a"),
        ("source=r%2Fcooking", "a"),
        ("source=kitchen", "b"),
        ("run=monday", "c"),
        ("words=BEANS+dried", "d"),
        ("words=&label=&min_score=", "abcde"),
        ("label=nothing", ""),
    ],
)
def test_filters_posts(
    client: TestClient, store: ResultsStore, query: str, expected: str
) -> None:
    results = [
        result_of(Post(id="a", title="a", subreddit="cooking")),
        result_of(Post(id="b", title="b", topic="kitchen"), scores={"food": 0.4}),
        result_of(Post(id="c", title="c", run="monday"), "sports"),
        result_of(
            Post(id="d", title="d", body="Dried beans"),
            scores={"food": 0.5, "sports": 0.1},
        ),
        result_of(Post(id="e", title="e"), None, scores={"food": 0.8}),
    ]
    store.write(results)
    page = client.get(f"/?{query}").text
    assert "".join(sorted(titles(page))) == expected
    addresses = re.search(r'data-events="([^"]*)"', page)
    assert addresses is not None
    for part in query.split("&"):
        if part and not part.endswith("="):
            assert part in html.unescape(addresses[1])


@pytest.mark.parametrize("query", ["min_score=x", "min_score=2", "max_score=nan"])
def test_a_wrong_filter_is_explained(client: TestClient, query: str) -> None:
    answer = client.get(f"/?{query}", headers=HTML)
    assert answer.status_code == 422
    assert "number from 0 to 1" in answer.text


def test_nothing_of_a_post_is_html(client: TestClient, store: ResultsStore) -> None:
    post = Post(
        id=HOSTILE,
        title=HOSTILE,
        body=HOSTILE,
        subreddit=HOSTILE,
        topic=HOSTILE,
        url="javascript:alert(1)",
        permalink="data:text/html,<script>alert(1)</script>",
        run="<b>run</b>",
    )
    more = {"model": HOSTILE, "worker": HOSTILE, "device": HOSTILE}
    store.write([result_of(post, HOSTILE, scores={HOSTILE: 0.7}, **more)])
    query = {"label": HOSTILE, "words": "img"}
    for page in (
        client.get("/", params=query),
        client.get("/stream/chart", params=query),
        client.get(post_address(HOSTILE)),
    ):
        assert page.status_code == 200
        assert "alert(1)" in page.text
        assert "<img" not in page.text
        assert "<b>run" not in page.text
        assert 'href="javascript:' not in page.text
        assert 'href="data:' not in page.text


def test_chart_counts_posts_by_their_own_time(
    client: TestClient, store: ResultsStore
) -> None:
    results = []
    for number in range(200):
        day = number % 4
        post = Post(
            id=f"p{number}",
            title="x",
            created_utc=WRITTEN + day * DAY_S,
        )
        results.append(result_of(post, "food" if day else "sports"))
    wrong = Post(id="old", title="x", created_utc=0.0)
    store.write([*results, result_of(wrong)])
    chart = client.get("/stream/chart").text
    captions = re.findall(r"<title>(.*?)</title>", chart)
    assert len(captions) == 4
    assert captions[0].endswith("sports, 50")
    assert captions[0].startswith("2026-09-21")
    assert all(caption.endswith("food, 50") for caption in captions[1:])
    assert "1 much earlier or later" in chart
    assert "at which they were written" in chart


def test_chart_shows_the_newest_of_many_posts(
    client: TestClient, store: ResultsStore
) -> None:
    posts = [Post(id=f"p{number}", title="x") for number in range(300)]
    store.write([result_of(post) for post in posts])
    store.write([result_of(Post(id="newest", title="x"), "sports")])
    chart = client.get("/stream/chart").text
    assert 'data-label="sports"' in chart
    assert "left out" not in chart


def test_chart_says_when_posts_have_no_time(
    client: TestClient, store: ResultsStore
) -> None:
    store.write([result_of(Post(id="a", title="a"))])
    assert "no time of their own" in client.get("/stream/chart").text


def test_post_page_has_the_history_and_the_dead_letters(
    client: TestClient, store: ResultsStore
) -> None:
    post = Post(id="a/b?c", title="A title", url="https://example.org/x?y=1")
    store.write([result_of(post, "food", scores={"food": 0.75, "sports": 0.25})])
    store.write([result_of(post, "sports", model="other", scores={"sports": 1.0})])
    letter = DeadLetter(
        id=post.id,
        reason="too slow",
        post=None,
        options=None,
        message=None,
        worker="w",
        failed_at=time.time(),
    )
    store.write([], [letter])
    page = client.get(post_address(post.id)).text
    assert "newest of 2 results" in page
    assert "0.750" in page
    assert page.index("other") < page.index("0.750")
    assert "too slow" in page
    assert 'href="https://example.org/x?y=1" rel="noopener noreferrer' in page


@pytest.mark.parametrize("post_id", ["..", ".", "a/../b", "ü ?#&"])
def test_every_post_has_an_address(
    client: TestClient, store: ResultsStore, post_id: str
) -> None:
    store.write([result_of(Post(id=post_id, title="The one"))])
    page = client.get(post_address(post_id))
    assert page.status_code == 200
    assert "<h1>The one</h1>" in page.text


def test_an_unknown_post_is_not_found(client: TestClient) -> None:
    assert client.get("/posts/nothing", headers=HTML).status_code == 404


def test_events_of_a_burst_are_its_newest(store: ResultsStore) -> None:
    posts = [Post(id=f"p{number}", title="x") for number in range(30)]
    store.write([result_of(post) for post in posts])

    async def read() -> bytes:
        newness = Newness(store._redis)
        newness.start()
        lines = events(
            store._redis, newness, Place("0-0"), lambda row: row.post["id"], most=10
        )
        text = b""
        async for line in lines:
            text += line
            if b"p29" in line:
                break
        await lines.aclose()  # type: ignore[attr-defined]
        newness.stop()
        return text

    text = asyncio.run(read()).decode()
    assert re.findall(r"^data: \"(p\d+)\"", text, re.MULTILINE) == [
        f"p{number}" for number in range(20, 30)
    ]
    assert 'event: skipped\ndata: {"count":20}' in text


def test_events_end_with_the_session(store: ResultsStore) -> None:
    store.write([result_of(Post(id="p", title="x"))])
    is_logged_in = [True]

    async def read() -> bytes:
        newness = Newness(store._redis)
        newness.start()
        lines = events(
            store._redis,
            newness,
            Place("0-0"),
            lambda row: row.post["id"],
            may_follow=lambda: is_logged_in[0],
        )
        text = b""
        async for line in lines:
            text += line
            is_logged_in[0] = b'"p"' not in text
        newness.stop()
        return text

    assert b'"p"' in asyncio.run(read())
