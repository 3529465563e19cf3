"""Messages that no task can take: each is a dead letter, with its reason, and the worker goes on."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import InvalidTaskError, NotRegistered

from shared.broker import make_app, queue_depth
from shared.dead import DeadLetters, Element
from shared.messages import MAX_DEAD_MESSAGE_BYTES, DeadLetter
from shared.results import ResultsStore
from shared.settings import Settings
from tests.support import Feedmill, RedisServer, wait_until, working

SECRET = "what somebody wrote"
POST: dict[str, Any] = {"id": "x", "title": SECRET, "author": "someone"}


@pytest.fixture(scope="module")
def worker(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feedmill]:
    redis_server.client.flushall()
    with working(redis_server, tmp_path_factory.mktemp("worker")) as it:
        yield it
        assert it.end() == 0, it.text()
        assert "Traceback" not in it.text()
        assert SECRET not in it.text()


@pytest.fixture
def app(worker: Feedmill, redis_server: RedisServer) -> Iterator[Celery]:
    """Of another process. What it sends is served when the test is done, by the same worker as before."""
    app = make_app(Settings.model_validate({"redis_url": redis_server.url}))
    yield app
    (found,) = app.send_task("feedmill.classify", kwargs={"posts": [{"id": "y", "title": "A goal"}]}).get(timeout=30)
    assert found["id"] == "y"
    assert worker.process.poll() is None
    wait_until(lambda: not sum(queue_depth(redis_server.client, "feedmill")), "nothing waits, and nothing is held")
    redis_server.client.delete("feedmill:dead")


def message(body: object = ([[POST]], {}, {}), **changes: Any) -> dict[str, Any]:
    """A message as kombu writes it, with these fields changed."""
    written = body if isinstance(body, bytes) else json.dumps(body).encode()
    properties = {
        "correlation_id": "1",
        "body_encoding": "base64",
        "delivery_tag": "2",
        "delivery_info": {"exchange": "", "routing_key": "feedmill"},
    }
    made = {
        "body": base64.b64encode(written).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": "feedmill.classify", "id": "1"},
        "properties": properties,
    }
    return made | changes


def letters(redis: RedisServer, count: int = 1) -> list[DeadLetter]:
    """The dead letters, once there are so many."""
    store = ResultsStore(redis.client, Settings())
    wait_until(lambda: len(store.dead_letters(100)) >= count, f"{count} dead letters")
    return store.dead_letters(100)


#: The task's name in the headers: Celery's second protocol.
TO_US, TO_NOBODY = ({"task": name, "id": "1"} for name in ("feedmill.classify", "no.such"))
UNKNOWN = "this worker has no task 'no.such'"
ODD = "invalid Celery message: InvalidTaskError: "


@pytest.mark.parametrize(
    ("sent", "reason", "ids"),
    [
        (message(headers=TO_NOBODY), UNKNOWN, ["x"]),
        (message(headers={"task": "no.such"}), f"{ODD}id must be a str, not a NoneType", ["x"]),
        (message([[], {"posts": [POST, {"id": "z"}]}, {}], headers=TO_NOBODY), UNKNOWN, ["x", "z"]),
        (message([[1, 2], {}, {}], headers=TO_NOBODY), UNKNOWN, [None]),
        (message({"task": "no.such", "id": "1", "args": [[POST]], "kwargs": {}}, headers={}), UNKNOWN, ["x"]),
        (message({"no": "task"}, headers={}), "not a Celery message: ", [None]),
        (message(headers={"task": ["list"], "id": "1"}), f"{ODD}task must be a str, not a list", ["x"]),
        (message(headers={"task": "feedmill.classify"}), f"{ODD}id must be a str, not a NoneType", ["x"]),
        (message(headers=TO_US | {"eta": "soon"}), f"{ODD}eta must be a time in ISO 8601, not 'soon'", ["x"]),
        (message([["p", "q"]]), f"{ODD}its body must be a list", [None]),
        (message(headers=TO_US | {"eta": "9999-12-31T23:59:59-12:00"}), f"{ODD}eta is out of range", ["x"]),
        (message(b'[["what'), "cannot decode its body as application/json in utf-8: ", [None]),
        (message(**{"content-type": "application/x-python-serialize"}), "invalid Celery message: Content", [None]),
        (message([[{"id": "x"}], {}, {}]), "posts: expected a list of at least one post", ["x"]),
        (message([[[POST] * 1001], {}, {}]), "posts: 1001 in one message; at most 1000", [None]),
    ],
    ids=[
        "unknown", "no id", "several posts", "no posts", "first protocol", "no task", "odd task", "no id of ours",
        "odd eta", "eta out of range", "no three parts", "no JSON", "pickle", "no list", "too many posts",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("app")
def test_what_no_task_can_take(
    redis_server: RedisServer, sent: dict[str, Any], reason: str, ids: list[str | None]
) -> None:
    redis_server.client.lpush("feedmill", json.dumps(sent))
    found = letters(redis_server, len(ids))
    assert [letter.id for letter in found] == ids
    for letter in found:
        assert letter.reason.startswith(reason), letter.reason
        assert (letter.message, letter.attempts) == ("1", 1)
        assert letter.worker.startswith("worker@")
        assert "author" not in (letter.post or "")


@pytest.mark.parametrize(("posts", "characters"), [(200, 10**6), (50, 25 * 10**6)], ids=["1 MB", "25 MB"])
def test_a_long_label_is_not_copied_for_each_post(
    app: Celery, redis_server: RedisServer, posts: int, characters: int
) -> None:
    """Redis keeps at most MAX_DEAD_MESSAGE_BYTES of the letters, and the sender is told in few words."""
    sent = [{"id": f"p{number}", "title": "t"} for number in range(posts)]
    labels = ["x" * characters] * 2
    before = redis_server.client.info("memory")["used_memory"]
    answer = app.send_task("feedmill.classify", kwargs={"posts": sent, "labels": labels}, compression="gzip")
    with pytest.raises(Exception, match="is named twice") as raised:
        answer.get(timeout=60)
    assert len(str(raised.value)) < 1000
    assert all(len(letter.reason) < 200 for letter in letters(redis_server, min(posts, 100)))
    wait_until(lambda: redis_server.client.xlen("feedmill:dead") == posts, "all are letters")
    wait_until(lambda: not sum(queue_depth(redis_server.client, "feedmill")), "the message has ended")
    kept: Any = redis_server.client.xrange("feedmill:dead")
    assert sum(len(fields["letter"]) for _, fields in kept) < 100_000
    after = redis_server.client.info("memory")["used_memory"]
    assert after - before < MAX_DEAD_MESSAGE_BYTES


@pytest.mark.usefixtures("app")
def test_what_can_be_known_of_it_is_kept(redis_server: RedisServer) -> None:
    sent = message([[[POST]], {"top_k": 1}, {}], headers=TO_US | {"eta": "soon"})
    sent["properties"]["delivery_info"]["delivery_count"] = 2
    redis_server.client.lpush("feedmill", json.dumps(sent), json.dumps(message(b"\xffwhat")))
    (letter,) = (each for each in letters(redis_server, 2) if each.id)
    (other,) = (each for each in letters(redis_server, 2) if not each.id)
    assert (json.loads(letter.post or ""), json.loads(letter.options or "")) == (
        {"id": "x", "title": SECRET},
        {"top_k": 1},
    )
    assert letter.attempts == 3
    assert letter.traceback
    assert letter.traceback.endswith("InvalidTaskError\n")
    assert (other.post, other.payload) == (None, "\ufffdwhat")


def test_who_waits_for_it_is_told_by_celery(app: Celery, redis_server: RedisServer) -> None:
    answer = app.send_task("no.such", kwargs={"posts": [POST]})
    assert isinstance(answer.get(timeout=30, propagate=False), NotRegistered)
    assert letters(redis_server)[0].message == answer.id


def test_the_sender_of_a_refused_message_is_told_by_celery(app: Celery, redis_server: RedisServer) -> None:
    odd = message(headers=TO_US | {"id": "2", "eta": "9999-12-31T23:59:59-12:00"})
    redis_server.client.lpush("feedmill", json.dumps(odd))
    assert isinstance(app.AsyncResult("2").get(timeout=30, propagate=False), InvalidTaskError)
    assert letters(redis_server)[0].message == "2"


@pytest.mark.usefixtures("app")
def test_while_redis_takes_no_letter_the_worker_keeps_the_message(redis_server: RedisServer, worker: Feedmill) -> None:
    redis_server.client.set("feedmill:dead", "in the way")
    redis_server.client.lpush("feedmill", json.dumps(message(headers=TO_NOBODY)))
    wait_until(lambda: worker.says("cannot write a dead letter"), "it was tried")
    assert queue_depth(redis_server.client, "feedmill").held == 1
    redis_server.client.delete("feedmill:dead")
    assert letters(redis_server)[0].id == "x"


@pytest.mark.parametrize(
    "element",
    [b"\xff", b"[]", json.dumps(message() | {"body": "a"}).encode()],
    ids=["bytes", "no object", "no base64"],
)
@pytest.mark.usefixtures("app")
def test_what_is_no_message_at_all_is_set_aside(redis_server: RedisServer, element: bytes) -> None:
    redis_server.client.lpush("feedmill", element)
    dead = DeadLetters(redis_server.client)
    wait_until(dead.count, "it is set aside")
    (found,) = dead.all()
    assert isinstance(found, Element)
    assert found.content == element
    dead.remove(found)
    assert dead.count() == 0
