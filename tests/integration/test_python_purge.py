"""`feedmill.purge` from Python, on a real Redis."""

from collections.abc import Sequence
from typing import Any

import pytest

import feedmill
from feedmill.producers.push import Pusher
from feedmill.shared import runs
from feedmill.shared.broker import make_app, queue_depth
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    free_port,
    has_results,
    make_classification,
    sent_count,
)


@pytest.fixture(autouse=True)
def _address(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", redis.url)


def send(redis: RedisServer, ids: Sequence[str], run: str | None = None) -> Pusher:
    settings = Settings(redis_url=redis.url)
    app = make_app(settings, current=False)
    pusher = Pusher(app, redis.client, settings, ClassifyOptions(), run=run)
    pusher.push([Post(id=post_id, title="x") for post_id in ids])
    return pusher


def classify(redis: RedisServer, post_id: str, run: str | None = None) -> None:
    result = Result(Post(id=post_id, title="x", run=run), make_classification(post_id))
    ResultsStore(redis.client, Settings()).write([result])


def test_purges_and_blocks_posts_until_lifted(redis: RedisServer) -> None:
    send(redis, ["t3_a", "t3_b"])
    classify(redis, "t3_a")
    purged = feedmill.purge("t3_a", "a", "other")
    assert purged.counts["posts"] == 3
    assert (purged.counts["sent"], purged.counts["results"]) == (1, 1)
    assert purged.counts["unmatched"] == 2
    assert purged.unmatched == ["a", "other"]
    assert not has_results(redis.client, "t3_a")
    assert send(redis, ["t3_a"]).gone == 1
    assert feedmill.purge("t3_a", lift=True).counts == {"posts": 1, "lifted": 1}
    assert send(redis, ["t3_a"]).gone == 0


def test_names_the_posts_that_were_probably_meant(redis: RedisServer) -> None:
    send(redis, ["t3_1abcde"])
    address = "https://www.reddit.com/r/python/comments/1abcde/a_title/"
    purged = feedmill.purge(address)
    assert (purged.unmatched, purged.similar) == ([address], ["t3_1abcde"])


def test_purges_a_run(redis: RedisServer) -> None:
    send(redis, ["a"], run="monday")
    classify(redis, "a", run="monday")
    classify(redis, "b")
    assert feedmill.purge(run="monday").counts["results"] == 1
    assert runs.progress(redis.client, "monday") is None
    assert has_results(redis.client, "b")
    with pytest.raises(feedmill.UserError, match="tuesday"):
        feedmill.purge(run="tuesday")


def test_empties_a_queue(redis: RedisServer) -> None:
    send(redis, ["a", "b"])
    assert feedmill.purge(queue="feedmill").counts == {
        "messages": 1,
        "posts": 2,
        "held": 0,
    }
    assert queue_depth(redis.client, "feedmill").waiting == 0
    assert sent_count(redis.client) == 0
    with pytest.raises(feedmill.UserError, match="nowhere"):
        feedmill.purge(queue="nowhere")


@pytest.mark.parametrize(
    ("ids", "arguments", "words"),
    [
        ((), {}, "Give exactly one of"),
        ((), {"lift": True}, "Give exactly one of"),
        (("a",), {"run": "monday"}, "Give exactly one of"),
        ((), {"run": "monday", "queue": "feedmill"}, "Give exactly one of"),
        ((), {"run": "monday", "lift": True}, "lift needs ids"),
        ((["a"],), {}, r"must be text, not \['a'\]"),
        (("",), {}, "not a post id"),
        ((), {"run": 5}, "name of a run must be text"),
    ],
)
def test_refuses_unclear_calls(
    redis: RedisServer, ids: tuple[Any, ...], arguments: dict[str, Any], words: str
) -> None:
    send(redis, ["a"])
    with pytest.raises(feedmill.UserError, match=words):
        feedmill.purge(*ids, **arguments)
    assert queue_depth(redis.client, "feedmill").waiting == 1


def test_an_unreachable_redis_is_a_user_error() -> None:
    with pytest.raises(feedmill.UserError):
        feedmill.purge("a", redis_url=f"redis://127.0.0.1:{free_port()}")
