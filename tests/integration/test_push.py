"""producers/push.py on a real Redis: what is sent, what is skipped, and how a full queue is waited for."""

import json
import threading
from base64 import b64decode
from typing import Any

import pytest
from kombu.exceptions import BatchPublishError, OperationalError  # type: ignore[attr-defined]  # the stubs are older
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import OutOfMemoryError

from producers import push
from producers.push import Pusher
from shared import broker
from shared.broker import connect, make_app, queue_depth
from shared.keys import sent_key
from shared.messages import ClassifyOptions, Post
from shared.settings import Settings
from tests.support import RedisServer, make_posts, wait_until


def pusher(settings: Settings, again: bool = False, **options: Any) -> Pusher:
    return Pusher(make_app(settings), connect(settings), settings, ClassifyOptions.parse(options), again)


def messages(redis: RedisServer) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in redis.client.lrange("feedmill", 0, -1)]


def test_posts_are_packed_and_counted(settings: Settings, redis: RedisServer) -> None:
    pushing = pusher(settings)
    pushing.push(make_posts(70))
    assert (pushing.sent, pushing.messages, pushing.skipped) == (70, 3, 0)
    assert queue_depth(redis.client, "feedmill") == (3, 0)


def test_what_was_sent_is_skipped(settings: Settings) -> None:
    pusher(settings).push(make_posts(40))
    second = pusher(settings)
    second.push(make_posts(50))
    assert (second.sent, second.skipped) == (10, 40)


def test_the_same_post_twice_in_one_go(settings: Settings) -> None:
    pushing = pusher(settings)
    post = make_posts(1)[0]
    pushing.push([post, post, *make_posts(100)])
    assert (pushing.sent, pushing.skipped) == (100, 2)


def test_the_same_post_again_when_its_message_has_just_gone(settings: Settings) -> None:
    """Redis was asked about a chunk before the message that the chunk completes was sent."""
    small = settings.model_copy(update={"posts_per_message": 4})
    pusher(small).push(make_posts(1))
    pushing = pusher(small)
    known, *new = make_posts(8)
    pushing.push([known, *new[:3], new[3], new[0], new[3], new[4]])
    assert (pushing.sent, pushing.skipped) == (5, 3)


@pytest.mark.parametrize("what", ["text", "labels", "again"])
def test_another_text_or_other_labels_are_sent(settings: Settings, what: str) -> None:
    post = Post(id="1", title="one")
    pusher(settings).push([post])
    second = pusher(settings, again=what == "again", **({"labels": "a,b"} if what == "labels" else {}))
    second.push([Post(id="1", title="two") if what == "text" else post])
    assert second.sent == 1


def test_a_new_score_alone_is_not_sent_again(settings: Settings) -> None:
    pusher(settings).push([Post(id="1", title="one", score=1)])
    second = pusher(settings)
    second.push([Post(id="1", title="one", score=2)])
    assert second.sent == 0


def test_marks_expire(settings: Settings, redis: RedisServer) -> None:
    pusher(settings).push(make_posts(1))
    assert 0 < redis.client.ttl(sent_key("p0")) <= settings.sent_ttl


def test_the_message_is_the_contract_and_hides_the_posts(settings: Settings, redis: RedisServer) -> None:
    pusher(settings, labels="a,b").push([Post(id="1", title="secret words")])
    (message,) = messages(redis)
    headers = message["headers"]
    assert headers["task"] == "feedmill.classify"
    assert headers["ignore_result"] is True
    assert headers["sent_at"] > 1e9
    assert "secret" not in json.dumps(headers)
    assert message["content-type"] == "application/json"


def test_a_full_queue_is_waited_for(settings: Settings, redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "FULL_QUEUE_PAUSE", 0.01)
    small = settings.model_copy(update={"queue_limit": 2, "posts_per_message": 10})
    pushing = pusher(small)
    thread = threading.Thread(target=pushing.push, args=(make_posts(40),))
    thread.start()
    wait_until(lambda: pushing.waiting, "the queue is full")
    assert queue_depth(redis.client, "feedmill").waiting == 2
    while thread.is_alive():
        redis.client.rpop("feedmill")
        thread.join(0.01)
    assert pushing.sent == 40


def test_nothing_is_marked_that_was_not_published(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("cut")

    with monkeypatch.context() as patched:
        patched.setattr(broker, "publish", fail)
        with pytest.raises(ConnectionError):
            pusher(settings).push(make_posts(3))
    again = pusher(settings)
    again.push(make_posts(3))
    assert again.sent == 3


def test_a_redis_that_fills_up_is_told_and_nothing_is_skipped_later(settings: Settings, redis: RedisServer) -> None:
    posts = [Post(id=str(number), title="t", body="x" * 20_000) for number in range(200)]
    pushing = pusher(settings)
    pushing.push(posts[:10])
    redis.client.config_set("maxmemory", "3mb")
    try:
        with pytest.raises((OperationalError, OutOfMemoryError), match="maxmemory"):
            pushing.push(posts)
    finally:
        redis.client.config_set("maxmemory", "0")
    pushing.push(posts)
    sent = {post["id"] for message in messages(redis) for post in json.loads(b64decode(message["body"]))[1]["posts"]}
    assert sent == {post.id for post in posts}


def test_a_batch_is_sent_again_after_a_lost_connection(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "RETRY_PAUSES", (0.01,))
    tries: list[int] = []

    def send(*_: object) -> None:
        tries.append(1)
        if len(tries) < 2:
            raise BatchPublishError("cut") from ConnectionFault("cut")

    with monkeypatch.context() as patched:
        patched.setattr(broker, "_send", send)
        pusher(settings).push(make_posts(1))
        assert len(tries) == 2
        tries.clear()
        patched.setattr(broker, "RETRY_PAUSES", ())
        with pytest.raises(OperationalError, match="cut"):
            pusher(settings, labels="a").push(make_posts(1))
