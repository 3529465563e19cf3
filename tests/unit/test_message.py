"""workers/message.py: what becomes of one message, apart from the threads that work on it."""

import json
from decimal import Decimal
from typing import Any

from shared.errors import RequestRefused
from shared.messages import MAX_BODY, MAX_TITLE, DeadLetter
from workers.message import Message


def test_a_dead_letter_keeps_any_valid_post_and_no_boundless_one() -> None:
    def letters(post: dict[str, Any], **options: Any) -> list[DeadLetter]:
        message = Message({"posts": [post], **options}, None)
        message.refused = RequestRefused("no")
        return message.dead_letters("worker", 1.0)

    widest = {"id": "1", "title": "🙂" * MAX_TITLE, "body": "🙂" * MAX_BODY, "extra": {"x": "y" * 4000}}
    assert json.loads(letters(widest)[0].post or "") == widest
    assert letters({"id": "1", "body": "x" * 10**6})[0].post is None
    assert json.loads(letters({"id": "1", "author": "someone"})[0].post or "") == {"id": "1"}
    assert letters({"id": "1"}, labels=["x" * 10**5])[0].options is None
    # As kombu reads {"__type__": "decimal", …} and its like.
    assert letters({"id": "1", "extra": {"price": Decimal(1)}})[0].post is None
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert letters({"id": "1", "body": deep})[0].model_dump_json()


def test_the_dead_letters_of_one_message_are_bounded_together() -> None:
    posts = [{"id": str(number), "body": "x" * 100_000} for number in range(1000)]
    message = Message({"posts": posts, "labels": "x" * 15_000}, None)
    message.refused = RequestRefused("no")
    letters = message.dead_letters("worker", 1.0)
    assert [letter.id for letter in letters] == [str(number) for number in range(1000)]
    assert sum(len(letter.model_dump_json()) for letter in letters) < 10 * 2**20


def test_a_message_of_too_many_posts_is_one_dead_letter() -> None:
    message = Message({"posts": [0] * 20_000}, None, "the id")
    message.refused = RequestRefused("posts: 20000 in one message")
    (letter,) = message.dead_letters("worker", 1.0)
    assert (letter.id, letter.reason, letter.message) == (None, "posts: 20000 in one message", "the id")
