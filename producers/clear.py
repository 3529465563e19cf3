"""Empty a queue: remove its waiting messages, and forget that their posts were sent.

Otherwise the removed posts would be lost: sending their file again would skip them. Messages that workers hold are in
flight and stay.
"""

import json
import zlib
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.producers.push import mark_of, send_scope
from feedmill.shared import encoding
from feedmill.shared.broker import CLASSIFY_TASK, queue_lists
from feedmill.shared.errors import PostRefused, RequestRefused
from feedmill.shared.keys import CLEARS
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.model_routing import deployed_weights
from feedmill.shared.queue_redaction import MESSAGES_AT_ONCE
from feedmill.shared.scripts import queue as scripts
from feedmill.shared.settings import Settings


class Cleared(NamedTuple):
    """Numbers of removed messages and of the posts in them."""

    messages: int = 0
    posts: int = 0


def messages_cleared(redis: Redis, queue: str) -> str:
    """Return how many messages were ever cleared from the queue. A change makes saved positions in files void."""
    found: Any = redis.hget(CLEARS, queue)
    return str(found or 0)


def clear(redis: Redis, settings: Settings) -> Cleared:
    """Remove the messages that wait in the queue now. Raises redis.exceptions.RedisError.

    Each message is removed together with the marks of its posts, and only if no worker has taken it meanwhile.
    """
    messages = posts = 0
    weights = deployed_weights(redis, settings.queue)
    for name in queue_lists(settings.queue):
        left: Any = redis.llen(name)
        while left > 0:
            for message in _oldest(redis, name, min(left, MESSAGES_AT_ONCE)):
                found, marks = marks_in(message, settings.queue, weights)
                if scripts.remove_waiting(redis, settings.queue, name, message, marks):
                    messages, posts = messages + 1, posts + found
                left -= 1
            if not redis.llen(name):
                break
    return Cleared(messages, posts)


def _oldest(redis: Any, name: str, count: int) -> list[bytes]:
    """Return the messages that workers would take next."""
    found: list[bytes] = redis.execute_command("LRANGE", name, -count, -1, **{NEVER_DECODE: True})
    return found[::-1]


def marks_in(message: bytes, queue: str, weights: str) -> tuple[int, list[tuple[list[scripts.Mark], str]]]:
    """Return the number of posts in a message, and each readable post's possible marks and run.

    A post can have been sent before the weights were deployed, so that it has either of two marks. weights: see
    `send_scope`. Other messages have no posts.
    """
    try:
        arguments = _arguments(message)
        raw = arguments.pop("posts")
        options = ClassifyOptions.parse(arguments)
    except (ValueError, zlib.error, AttributeError, KeyError, TypeError, IndexError, RecursionError, RequestRefused):
        return 0, []
    if not isinstance(raw, list):
        return 0, []
    purposes = [send_scope(queue, options, each) for each in dict.fromkeys((weights, ""))]
    marks = []
    for each in raw:
        try:
            post = Post.parse(each)
        except PostRefused:
            continue
        marks.append(([mark_of(post, purpose) for purpose in purposes], post.run or ""))
    return len(raw), marks


def _arguments(message: bytes) -> dict[str, Any]:
    """Return the keyword arguments of a classification that a producer sent. Raises the errors of a bad message."""
    found = json.loads(message)
    if found["headers"]["task"] != CLASSIFY_TASK:
        raise ValueError(found["headers"]["task"])
    args, kwargs, _ = encoding.stored_body(found)
    return dict(kwargs) | ({"posts": args[0]} if args else {})
