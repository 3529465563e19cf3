"""workers/message.py: what becomes of one message, apart from the threads that work on it."""

import json
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
    assert letters({"id": "1"}, labels=["x" * 10**5])[0].options is None
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert letters({"id": "1", "body": deep})[0].model_dump_json()
