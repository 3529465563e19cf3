"""Messages that match no task become dead letters with a reason, and the worker continues."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import NotRegistered

from feedmill.shared.broker import make_app, queue_depth
from feedmill.shared.messages import MAX_DEAD_MESSAGE_BYTES, DeadLetter
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    PASSWORD,
    Feedmill,
    RedisServer,
    dead_letters,
    wait_until,
    wait_until_empty,
    working,
)

SECRET = "what somebody wrote"
POST: dict[str, Any] = {"id": "x", "title": SECRET, "author": "someone"}


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Feedmill]:
    redis_server.client.flushall()
    with working(
        redis_server, tmp_path_factory.mktemp("worker"), FEEDMILL_LOG_FORMAT="json"
    ) as it:
        yield it
        assert it.end() == 0, it.text()
        assert "Traceback" not in it.text()
        assert SECRET not in it.text()
        assert PASSWORD not in it.text()
        lines = [
            json.loads(line) for line in it.text().splitlines() if line.startswith("{")
        ]
        assert all(line["level"] for line in lines)
        assert lines[0]["message"].startswith("device cpu in ")


@pytest.fixture
def app(worker: Feedmill, redis_server: RedisServer) -> Iterator[Celery]:
    """A client of the worker.

    After each test, the worker must still be running and answer the client's message.
    """
    app = make_app(Settings.model_validate({"redis_url": redis_server.url}))
    yield app
    (found,) = app.send_task(
        "feedmill.classify", kwargs={"posts": [{"id": "y", "title": "A goal"}]}
    ).get(timeout=120)
    assert found["id"] == "y"
    assert worker.process.poll() is None
    wait_until_empty(redis_server.client)
    redis_server.client.delete("feedmill:dead")


def message(body: object = ([[POST]], {}, {}), **changes: Any) -> dict[str, Any]:
    """Return a message as kombu writes it, with these fields changed."""
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
    """Return the dead letters once there are at least `count`."""
    store = ResultsStore(redis.client, Settings())
    wait_until(lambda: len(dead_letters(store, 100)) >= count, f"{count} dead letters")
    return dead_letters(store, 100)


#: Headers of Celery's message protocol 2, which name the task.
TO_US, TO_NOBODY = (
    {"task": name, "id": "1"} for name in ("feedmill.classify", "no.such")
)
UNKNOWN = "'no.such'"


@pytest.mark.parametrize(
    ("sent", "reason", "ids"),
    [
        (message(headers=TO_NOBODY), UNKNOWN, ["x"]),
        (message(headers={"task": "no.such"}), UNKNOWN, ["x"]),
        (message([[], {"posts": [POST, {"id": "z"}]}, {}], headers=TO_NOBODY), UNKNOWN,
        ["x", "z"]),
        (message([[1, 2], {}, {}], headers=TO_NOBODY), UNKNOWN, [None]),
        (message({"task": "no.such", "id": "1", "args": [[POST]], "kwargs": {}}, headers={}),
        UNKNOWN, ["x"]),
        (message({"no": "task"}, headers={}), "headers", [None]),
        (message(headers={"task": ["list"], "id": "1"}), "task has the wrong type, list", ["x"]),
        (message(headers={"task": "feedmill.classify"}), "KeyError: 'id'", ["x"]),
        (message(headers=TO_US | {"eta": "soon"}), "invalid Celery message: ", ["x"]),
        (message([["p", "q"]]), "invalid Celery message: ", [None]),
        (message(headers=TO_US | {"eta": "9999-12-31T23:59:59-12:00"}), "OverflowError: ", ["x"]),
        (message(b'[["what'), "application/json", [None]),
        (message(**{"content-type": "application/x-python-serialize"}), "Content", [None]),
        (message([[{"id": "x"}], {}, {}]), "posts: expected a list of at least one post", ["x"]),
        (message([[[POST] * 1001], {}, {}]), "posts: 1001 in one message; at most 1000", [None]),
    ],
    ids=[
        "unknown", "no id", "several posts", "no posts", "first protocol", "no task", "odd task",
        "no id of ours",
        "odd eta", "eta out of range", "no three parts", "no JSON", "pickle", "no list",
        "too many posts",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("app")
def test_messages_that_match_no_task_become_dead_letters(
    redis_server: RedisServer, sent: dict[str, Any], reason: str, ids: list[str | None]
) -> None:
    redis_server.client.lpush("feedmill", json.dumps(sent))
    found = letters(redis_server, len(ids))
    assert [letter.id for letter in found] == ids
    for letter in found:
        assert re.search(reason, letter.reason)
        assert (letter.message, letter.attempts) == ("1", 1)
        assert letter.worker.startswith("worker@")
        assert "author" not in (letter.post or "")


@pytest.mark.parametrize(
    ("posts", "characters"), [(200, 10**6), (50, 25 * 10**6)], ids=["1 MB", "25 MB"]
)
def test_long_labels_are_not_copied_for_each_post(
    app: Celery, redis_server: RedisServer, posts: int, characters: int
) -> None:
    """Redis stores at most MAX_DEAD_MESSAGE_BYTES of dead letters, and the sender gets a short
    error.
    """
    sent = [{"id": f"p{number}", "title": "t"} for number in range(posts)]
    labels = ["x" * characters] * 2
    before = redis_server.client.info("memory")["used_memory"]
    answer = app.send_task(
        "feedmill.classify",
        kwargs={"posts": sent, "labels": labels},
        compression="gzip",
    )
    with pytest.raises(Exception, match="labels: ") as raised:
        answer.get(timeout=120)
    assert len(str(raised.value)) < 1000
    assert all(
        len(letter.reason) < 200 for letter in letters(redis_server, min(posts, 100))
    )
    wait_until(
        lambda: redis_server.client.xlen("feedmill:dead") == posts,
        ("every post is a dead letter"),
    )
    wait_until_empty(redis_server.client)
    kept: Any = redis_server.client.xrange("feedmill:dead")
    assert sum(len(fields["letter"]) for _, fields in kept) < 100_000
    after = redis_server.client.info("memory")["used_memory"]
    assert after - before < MAX_DEAD_MESSAGE_BYTES


@pytest.mark.usefixtures("app")
def test_dead_letter_keeps_the_readable_parts_of_a_message(
    redis_server: RedisServer,
) -> None:
    sent = message([[[POST]], {"top_k": 1}, {}], headers=TO_US | {"eta": "soon"})
    sent["properties"]["delivery_info"]["delivery_count"] = 2
    redis_server.client.lpush(
        "feedmill", json.dumps(sent), json.dumps(message(b"\xffwhat"))
    )
    (letter,) = (each for each in letters(redis_server, 2) if each.id)
    (other,) = (each for each in letters(redis_server, 2) if not each.id)
    assert (json.loads(letter.post or ""), json.loads(letter.options or "")) == (
        {"id": "x", "title": SECRET},
        {"top_k": 1},
    )
    assert letter.attempts == 3
    assert letter.traceback
    assert letter.traceback.endswith("Error\n")
    assert (other.post, other.payload) == (None, "\ufffdwhat")


def test_sender_of_an_unknown_task_gets_not_registered(
    app: Celery, redis_server: RedisServer
) -> None:
    answer = app.send_task("no.such", kwargs={"posts": [POST]})
    assert isinstance(answer.get(timeout=120, propagate=False), NotRegistered)
    assert letters(redis_server)[0].message == answer.id


def test_sender_of_an_invalid_message_gets_the_error(
    app: Celery, redis_server: RedisServer
) -> None:
    odd = message(headers=TO_US | {"id": "2", "eta": "9999-12-31T23:59:59-12:00"})
    redis_server.client.lpush("feedmill", json.dumps(odd))
    assert isinstance(
        app.AsyncResult("2").get(timeout=120, propagate=False), OverflowError
    )
    assert letters(redis_server)[0].message == "2"


@pytest.mark.usefixtures("app")
def test_worker_keeps_the_message_until_its_letter_is_stored(
    redis_server: RedisServer, worker: Feedmill
) -> None:
    redis_server.client.set("feedmill:dead", "in the way")
    redis_server.client.lpush("feedmill", json.dumps(message(headers=TO_NOBODY)))
    wait_until(
        lambda: worker.says("WRONGTYPE"),
        "the worker has failed to write the dead letter",
    )
    assert queue_depth(redis_server.client, "feedmill").held == 1
    redis_server.client.delete("feedmill:dead")
    assert letters(redis_server)[0].id == "x"


@pytest.mark.parametrize(
    "element",
    [b"\xff", b"[]", json.dumps(message() | {"body": "a"}).encode()],
    ids=["bytes", "no object", "no base64"],
)
@pytest.mark.usefixtures("app")
def test_elements_that_are_no_messages_become_dead_letters(
    redis_server: RedisServer, element: bytes
) -> None:
    redis_server.client.lpush("feedmill", element)
    (letter,) = letters(redis_server)
    assert (letter.id, letter.payload, letter.queue) == (
        None,
        element.decode("utf-8", "replace"),
        "feedmill",
    )
    assert letter.reason.startswith("not a Celery message: ")
