"""shared/stored_messages.py: posts in the messages of any client, and their removal."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from feedmill.shared import encoding
from feedmill.shared.encoding import UnreadableError
from feedmill.shared.mentions import mentioned_ids
from feedmill.shared.messages import MAX_POSTS_PER_MESSAGE
from feedmill.shared.stored_messages import ids_in, posts_in, without_posts
from tests.fakes.clients import CLIENTS, UNREADABLE, message_of, unreadable
from tests.fakes.hostile_messages import HOSTILE, Hostile

GONE = {"id": "gone", "title": "Rhubarb and custard"}
KEPT = {
    "id": "kept",
    "title": "Nobody asked ☃ for these",
    "extra": {"row": 7},
    "run": "monday",
}


def body_of(message: bytes | str) -> Any:
    raw = message if isinstance(message, bytes) else message.encode()
    return encoding.read(encoding.body_text(encoding.open_message(raw)))


def without_body(message: bytes | str) -> Any:
    return {
        name: value for name, value in json.loads(message).items() if name != "body"
    }


@pytest.mark.parametrize("client", CLIENTS)
def test_reads_the_messages_of_every_client(client: str) -> None:
    message = message_of(client, {"posts": [GONE, KEPT]})
    assert [post and (post.id, post.run) for post in posts_in(message)] == [
        ("gone", None),
        ("kept", "monday"),
    ]
    assert sorted(ids_in(message)) == ["gone", "kept"]


@pytest.mark.parametrize("client", CLIENTS)
def test_does_not_change_a_message_without_the_post(client: str) -> None:
    message = message_of(client, {"posts": [GONE, KEPT]}, task_id="a-task")
    assert (
        without_posts(message, {"another", "monday", "a-task", "feedmill.classify"})
        is None
    )
    assert (
        without_posts(message_of(client, {"posts": [{"id": "gone"}, KEPT]}), {"gone"})
        is None
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_removes_a_post_and_nothing_else(client: str) -> None:
    message = message_of(
        client, {"posts": [GONE, KEPT], "labels": ["a", "b"]}, task_id="gone"
    )
    redacted = without_posts(message, {"gone", "other"})
    assert redacted
    assert redacted.ids == {"gone"}
    before, after = body_of(message), body_of(redacted.message)
    assert "Rhubarb" not in json.dumps(after)
    assert "Rhubarb" not in redacted.message
    expected = json.loads(
        json.dumps(before).replace(json.dumps(GONE), '{"id": "gone"}')
    )
    for body in (after, expected):
        if isinstance(body, dict):
            body.pop("argsrepr", None)
            body.pop("kwargsrepr", None)
    assert after == expected
    envelope, cleaned = without_body(message), without_body(redacted.message)
    for name in ("argsrepr", "kwargsrepr"):
        envelope.get("headers", {}).pop(name, None)
        cleaned.get("headers", {}).pop(name, None)
    assert cleaned == envelope


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("task", ["own.add", None], ids=str)
def test_other_tasks_have_no_posts_of_a_classification(client: str, task: Any) -> None:
    message = message_of(client, {"posts": [{"id": "gone", "amount": 5}]}, task=task)
    assert posts_in(message) == []
    assert without_posts(message, {"gone"}) is None


def test_finds_posts_in_callbacks_headers_and_bodies_of_no_task() -> None:
    link = {
        "task": "feedmill.classify",
        "args": [[{"id": "gone", "odd": 1}]],
        "kwargs": {},
        "options": {},
    }
    for place in ("callbacks", "errbacks", "chord"):
        body: Any = {
            "task": "own.add",
            "id": "gone",
            "args": [],
            "kwargs": {},
            place: [link],
        }
        message = json.dumps(
            {
                "body": json.dumps(body),
                "headers": {"post": GONE, "id": "gone", "title": "t"},
            }
        ).encode()
        redacted = without_posts(message, {"gone"})
        assert redacted
        assert body_of(redacted.message)[place][0]["args"] == [[{"id": "gone"}]]
        assert json.loads(redacted.message)["headers"] == {
            "post": {"id": "gone"},
            "id": "gone",
            "title": "t",
        }
    redacted = without_posts(json.dumps({"body": json.dumps(GONE)}).encode(), {"gone"})
    assert redacted
    assert body_of(redacted.message) == {"id": "gone"}


UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.mark.parametrize(
    ("sent", "post_id"),
    [
        (7, "7"),
        (1.5, "1.5"),
        (" odd \ud800 ", "odd ?"),
        ({"__type__": "uuid", "__value__": {"hex": UUID.replace("-", "")}}, UUID),
        ({"__type__": "decimal", "__value__": "1.50"}, "1.50"),
        (
            {"__type__": "datetime", "__value__": "2026-01-01T00:00:00"},
            "2026-01-01T00:00:00",
        ),
        ({"__type__": "bytes", "__value__": "gone"}, "gone"),
    ],
    ids=str,
)
def test_knows_ids_of_any_type(sent: Any, post_id: str) -> None:
    other = {"id": {"__type__": "no such", "__value__": 1}, "title": "kept"}
    message = message_of("celery", {"posts": [{"id": sent, "title": "x"}, other]})
    assert list(ids_in(message)) == [post_id]
    redacted = without_posts(message, {post_id})
    assert redacted
    raw = encoding.parse(
        encoding.body_text(encoding.open_message(redacted.message.encode()))
    )
    assert raw[1]["posts"] == [{"id": sent}, other]
    valid = message_of("celery", {"posts": [{"id": sent, "title": "x"}]})
    assert [post and post.id for post in posts_in(valid)] == [post_id]


@pytest.mark.parametrize("kind", UNREADABLE)
def test_leaves_unreadable_messages_alone(kind: str) -> None:
    message = unreadable(kind, [GONE])
    for read in (
        lambda: without_posts(message, {"gone"}),
        lambda: posts_in(message),
        lambda: list(ids_in(message)),
    ):
        with pytest.raises(UnreadableError):
            read()


@pytest.mark.parametrize("damage", ["`", "\u023c", " \n", "\ud800"])
@pytest.mark.parametrize("place", [0, 9, 18, 30])
def test_reads_what_a_worker_reads_of_a_damaged_body(damage: str, place: int) -> None:
    """kombu skips characters that are not Base64's. A purge that did not would leave the post."""
    envelope = json.loads(message_of("celery", {"posts": [GONE, KEPT]}))
    body = envelope["body"]
    envelope["body"] = body[:place] + damage + body[place:]
    message = json.dumps(envelope).encode()
    assert sorted(ids_in(message)) == ["gone", "kept"]
    assert {"gone", "kept"} <= (mentioned_ids(message.decode()[:-1]) or set())
    redacted = without_posts(message, {"gone"})
    assert redacted
    assert list(ids_in(redacted.message.encode())) == ["kept"]


def test_reads_no_posts_beyond_the_limit_of_a_message() -> None:
    posts = [
        {"id": str(number), "title": "x"} for number in range(MAX_POSTS_PER_MESSAGE + 1)
    ]
    assert posts_in(message_of("celery", {"posts": posts})) == []
    assert (
        len(posts_in(message_of("celery", {"posts": posts[1:]})))
        == MAX_POSTS_PER_MESSAGE
    )


def test_removes_posts_below_any_nesting_that_can_be_read() -> None:
    deep: Any = GONE
    for _ in range(600):
        deep = [deep]
    redacted = without_posts(
        message_of("celery", {"posts": [KEPT], "more": deep}), {"gone"}
    )
    assert redacted
    assert "Rhubarb" not in json.dumps(body_of(redacted.message))


@settings(max_examples=100)
@given(HOSTILE)
def test_hostile_messages_are_read_or_refused(hostile: Hostile) -> None:
    message = hostile.element("h000000000")
    try:
        posts_in(message)
        list(ids_in(message))
        assert without_posts(message, {"unrelated"}) is None
        redacted = without_posts(message, {"h000000000"})
    except UnreadableError:
        return
    if redacted:
        assert without_posts(redacted.message.encode(), {"h000000000"}) is None
