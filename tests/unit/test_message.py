"""workers/pipeline/message.py: a message's outcomes and dead letters, without threads."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from feedmill.shared.errors import RequestRefused
from feedmill.shared.messages import (
    MAX_BODY,
    MAX_DEAD_MESSAGE_BYTES,
    MAX_DEAD_POST_BYTES,
    MAX_DEAD_TRACEBACK,
    MAX_POSTS_PER_MESSAGE,
    MAX_TITLE,
    DeadLetter,
    Post,
    PostError,
)
from feedmill.workers.pipeline.message import Message, traceback_of
from tests.support import long_cases


def test_dead_letter_keeps_valid_posts_only() -> None:
    def letters(post: dict[str, Any], **options: Any) -> list[DeadLetter]:
        message = Message({"posts": [post], **options}, None)
        message.refused = RequestRefused("no")
        return message.dead_letters("worker", 1.0)

    widest = {
        "id": "1",
        "title": "🙂" * MAX_TITLE,
        "body": "🙂" * MAX_BODY,
        "extra": {"x": "y" * 4000},
    }
    assert json.loads(letters(widest)[0].post or "") == widest
    assert letters({"id": "1", "body": "x" * 10**6})[0].post is None
    assert json.loads(letters({"id": "1", "author": "someone"})[0].post or "") == {
        "id": "1"
    }
    assert letters({"id": "1"}, labels=["x" * 10**5])[0].options is None
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert letters({"id": "1", "body": deep})[0].model_dump_json()


def test_dead_letter_keeps_posts_with_values_of_celerys_json() -> None:
    """kombu decodes {"__type__": "uuid", …} and its like to such objects.

    A retry must read them again.
    """
    post_id, at = UUID(int=7), datetime(2026, 1, 2, tzinfo=UTC)
    post = {
        "id": post_id,
        "title": "x",
        "created_utc": at,
        "edited_utc": at.date(),
        "extra": {"price": Decimal("9.90"), "at": [at]},
    }
    message = Message({"posts": [post], "labels": [post_id]}, None)
    message.refused = RequestRefused("no")
    (letter,) = message.dead_letters("worker", 1.0)
    assert letter.id == str(post_id)
    assert Post.parse(json.loads(letter.post or "")) == Post.parse(post)
    assert json.loads(letter.options or "") == {"labels": [str(post_id)]}


#: The character that takes the most bytes in JSON.
WIDEST = "\x01"


@pytest.mark.parametrize(
    "text",
    [WIDEST, "🙂", *long_cases("x", '"')],
    ids=["control", "emoji", "ascii", "quote"],
)
@pytest.mark.parametrize("refused", [True, False], ids=["message", "each post"])
def test_bounds_every_field_of_dead_letters(text: str, refused: bool) -> None:
    posts = [
        {"id": f"{number}{text * 500}", "title": text * 9_000}
        for number in range(MAX_POSTS_PER_MESSAGE)
    ]
    arguments = {"posts": posts, "template": text * 2_000}
    message = Message(arguments, None, text * 500, queue="feedmill-" + "q" * 100)
    if refused:
        message.refused = RequestRefused(text * 10**5)
    for index, post in enumerate(posts):
        message.tracebacks[index] = text * MAX_DEAD_TRACEBACK
        message.set_outcome(index, PostError(id=post["id"], error=text * 10**5))
    letters = message.dead_letters("worker@host", 1.0)
    assert len(letters) == MAX_POSTS_PER_MESSAGE
    assert (
        sum(len(letter.model_dump_json().encode()) for letter in letters)
        <= MAX_DEAD_MESSAGE_BYTES
    )
    assert letters[0].post
    assert letters[0].reason.startswith(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"labels": ["x" * 10**6] * 2}, "labels: .*'xxx"),
        ({"labels": "x" * 10**6}, r"labels\.xxx"),
        ({"labels": {"x" * 10**6: []}}, r"labels\.xxx"),
        ({"template": "x" * 400}, "template: "),
        ({"x" * 10**6: 1}, "xxx"),
    ],
    ids=["label", "long label", "described label", "template", "unknown option"],
)
def test_rejection_quotes_little_of_the_message(
    arguments: dict[str, Any], reason: str
) -> None:
    message = Message({"posts": [{"id": "1", "title": "t"}], **arguments}, None)
    with pytest.raises(RequestRefused, match=reason) as raised:
        message.read()
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("posts", "post_id", "kept"),
    [
        ({"id": "1"}, "1", '{"id": "1"}'),
        (7, None, "7"),
        ([], None, "[]"),
        (None, None, None),
    ],
)
def test_invalid_posts_argument_becomes_one_dead_letter(
    posts: Any, post_id: str | None, kept: str | None
) -> None:
    message = Message({"posts": posts, "top_k": 1}, None, attempts=3)
    message.refused = RequestRefused("posts: expected a list of at least one post")
    (letter,) = message.dead_letters("worker", 1.0)
    assert (letter.id, letter.post, letter.options, letter.attempts) == (
        post_id,
        kept,
        '{"top_k": 1}',
        3,
    )


def test_unreadable_body_is_kept_truncated() -> None:
    def payload(body: object) -> str | None:
        return (
            Message({}, None)
            .dead_letter_of_body(body, "no", None, "worker", 1.0)
            .payload
        )

    assert payload(b"\xff{") == "\ufffd{"
    assert payload("\ud800") == "?"
    assert payload(None) == "null"
    assert payload(["x"]) == '["x"]'
    assert payload(b"x" * 10**6) == "x" * MAX_DEAD_POST_BYTES


def test_traceback_leaves_out_error_messages() -> None:
    def fail(times: int) -> None:
        if times:
            fail(times - 1)
        try:
            raise KeyError("private text")
        except KeyError as error:
            raise ValueError("more private text") from error

    with pytest.raises(ValueError, match="more private text") as raised:
        fail(100)
    text = traceback_of(raised.value)
    assert "private" not in text.replace('raise KeyError("private text")', "").replace(
        'raise ValueError("more private text")', ""
    )
    assert f'File "{__file__}"' in text
    assert text.index("KeyError\n") < text.index("\nValueError\n")
    assert len(text) <= MAX_DEAD_TRACEBACK
