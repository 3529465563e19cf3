"""feedmill.Client against `feedmill web` with a real worker."""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedmill import (
    AsyncClient,
    Classification,
    Client,
    PostError,
    RequestRefused,
    Result,
)
from feedmill.shared.errors import AccessRefused, NoAnswerInTime, NotFound
from tests.e2e.test_documentation import blocks
from tests.e2e.test_web_endpoint import CAKE, GOAL, LABELS, TOKENS, serving
from tests.support import RedisServer, run, standing_in, wait_until


@pytest.fixture(scope="module")
def web(served: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(served, tmp_path_factory.mktemp("web")) as url:
        yield url


@pytest.fixture
def client(web: str) -> Iterator[Client]:
    with Client(web) as client:
        yield client


def test_classifies_long_lists_in_order(client: Client) -> None:
    texts = [GOAL, CAKE, " ", *[f"{GOAL} {n}" for n in range(1200)], CAKE]
    outcomes = client.classify(texts, LABELS, timeout=300)
    first, second, empty, *others, last = outcomes
    assert isinstance(first, Classification)
    assert isinstance(empty, PostError)
    assert "text" in empty.error
    labels = [getattr(outcome, "label", None) for outcome in (first, second, last)]
    assert labels == ["sports", "cooking", "cooking"]
    assert {getattr(outcome, "label", None) for outcome in others} == {"sports"}


def test_a_post_that_fits_no_label_has_none(client: Client) -> None:
    (outcome,) = client.classify(["The senate passed the budget"], LABELS, none=1.0)
    assert isinstance(outcome, Classification)
    assert outcome.label is None
    assert outcome.best_label in LABELS


def test_refusals_are_the_projects(client: Client) -> None:
    with pytest.raises(RequestRefused, match="labels"):
        client.classify([GOAL], ["a", "a"])
    with pytest.raises(RequestRefused, match="template"):
        client.classify([GOAL], LABELS, template="no place")
    with pytest.raises(NotFound):
        client.run("no such run")
    with pytest.raises(NotFound):
        client.post("no such post")


def test_a_run_is_sent_followed_read_and_deleted(client: Client) -> None:
    posts = [{"id": f"run/{n}", "title": f"{GOAL} {n}"} for n in range(1100)]
    posts.append({"id": "bad", "title": " "})
    sent = client.start_run(posts, LABELS, run="of the client")
    assert (sent.run, sent.sent) == ("of the client", 1100)
    assert [refused.id for refused in sent.refused] == ["bad"]
    wait_until(lambda: client.run(sent.run).settled == 1100, "the run is classified")
    results = [
        item for item in client.results(run=sent.run) if isinstance(item, Result)
    ]
    assert {result.post.id for result in results} == {f"run/{n}" for n in range(1100)}
    page = client.results_page(run=sent.run, limit=10)
    following = client.follow(run=sent.run, after=page.cursor)
    followed = next(following).item
    following.close()
    assert isinstance(followed, Result)
    assert followed.post.id == results[10].post.id
    again = client.start_run(posts, LABELS, run=sent.run)
    assert (again.sent, again.skipped) == (0, 1100)
    (stored,) = client.post("run/7")
    assert stored.post.title == f"{GOAL} 7"
    assert client.delete_post("run/7").counts["results"] == 1
    with pytest.raises(NotFound):
        client.post("run/7")


def test_follows_new_results_with_asyncio(web: str) -> None:
    async def follow() -> None:
        async with AsyncClient(web) as client:
            following = client.follow(run="awaited")
            waiting = asyncio.ensure_future(anext(following))
            numbers = iter(range(1000))
            while not waiting.done():
                posts = [{"id": f"new-{next(numbers)}", "title": GOAL}]
                await client.start_run(posts, LABELS, run="awaited")
                await asyncio.wait([waiting], timeout=0.2)
            item = waiting.result().item
            await following.aclose()
            assert isinstance(item, Result)
            assert item.post.run == "awaited"

    asyncio.run(follow())


def test_page_examples_run(web: str, tmp_path: Path) -> None:
    """docs/client.md prints what it shows."""
    code = "".join(blocks("docs/client.md", "python"))
    said = run(
        [sys.executable, "-c", code], tmp_path, os.environ | {"FEEDMILL_URL": web}
    )
    assert said.stdout == "".join(blocks("docs/client.md", "")), said.stderr


def test_tokens_need_their_scope(served: RedisServer, tmp_path: Path) -> None:
    reader, sender = (part.rpartition(":")[2] for part in TOKENS.split(","))
    with serving(served, tmp_path, FEEDMILL_WEB_TOKENS=TOKENS) as url:
        with Client(url, sender) as client:
            client.classify([GOAL], LABELS)
            with pytest.raises(AccessRefused, match="read"):
                client.run("mine")
        with Client(url, reader) as client, pytest.raises(AccessRefused):
            client.classify([GOAL], LABELS)
        with Client(url) as client, pytest.raises(AccessRefused):
            client.classify([GOAL], LABELS)


def test_a_cancelled_call_withdraws_its_posts(
    redis: RedisServer, tmp_path: Path
) -> None:
    async def cancel(url: str) -> None:
        async with AsyncClient(url) as client:
            post = {"id": "cancelled", "title": GOAL}
            call = asyncio.create_task(client.classify([post]))
            while not redis.client.llen("feedmill"):
                await asyncio.sleep(0.02)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    with serving(redis, tmp_path) as url:
        with Client(url) as client, pytest.raises(NoAnswerInTime, match="worker"):
            client.classify([GOAL], timeout=0.5)
        asyncio.run(cancel(url))
        with standing_in(redis, tmp_path), Client(url) as client:
            (answered,) = client.classify([{"id": "later", "title": GOAL}], timeout=120)
            assert answered.id == "later"
            with pytest.raises(NotFound):
                client.post("cancelled")
