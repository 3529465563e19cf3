"""Find posts in waiting and held messages, and remove them. The messages keep their place.

A post is reduced to its id, so the message still has one outcome per post, in order, and its other posts are classified
as usual. A message is replaced atomically, and only if it has not changed. Messages can move during a scan, so lists
are scanned first, then held messages, then lists again.

Limits: posts stay in a worker's memory until their message is finished. Messages that are not JSON, or compressed with
anything but gzip, are not changed.
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Collection, Iterator
from typing import Any

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.shared import encoding
from feedmill.shared.broker import CLASSIFY_TASK, TRANSPORT_KEYS, queue_lists
from feedmill.shared.messages import Post
from feedmill.shared.scripts import purge as scripts

#: Messages per read. Feedmill's are about 20 KB; other applications' can be a thousand times as large.
MESSAGES_AT_ONCE = 10
#: Fields that distinguish a post from other objects with an id.
OTHER_FIELDS = Post.model_fields.keys() - {"id"}
#: Replacement for the argument previews in a message's headers.
PURGED = "purged"


def remove(redis: Redis, queues: Collection[str], posts: Collection[str]) -> int:
    """Remove these posts from the messages of these queues. Return the number of changed messages.

    Idempotent. Raises redis.exceptions.RedisError.
    """
    changed = 0
    for name, message, tag in _messages(redis, queues):
        if (clean := _without(message, posts)) is None:
            continue
        changed += scripts.replace(redis, name, message, clean, tag)
    return changed


def ids_in_messages(redis: Redis, queues: Collection[str]) -> Iterator[str]:
    """Yield the ids of posts in the messages of these queues, without removed posts. Ids can be repeated.

    Raises redis.exceptions.RedisError.
    """
    for _, message, _ in _messages(redis, queues):
        try:
            yield from _ids_in(encoding.stored_body(json.loads(message)))
        except (ValueError, zlib.error, AttributeError, KeyError, TypeError, RecursionError):
            continue


def _ids_in(value: Any) -> Iterator[str]:
    """Yield the ids of posts in a JSON value, at any depth."""
    if isinstance(value, dict):
        if value.keys() & OTHER_FIELDS and (post_id := _post_id(value.get("id"))):
            yield post_id
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _ids_in(item)


def _messages(redis: Redis, queues: Collection[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the key of each message, the message, and the tag of one that a worker holds, else b""."""
    lists, reserved = [name for queue in queues for name in queue_lists(queue)], TRANSPORT_KEYS["reserved_key"]
    for name in (*lists, reserved, *lists):
        for message, tag in _held(redis, name) if name == reserved else _waiting(redis, name):
            yield name, message, tag


def _waiting(redis: Any, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the messages of a list, newest first: new messages shift the others towards the part not yet read."""
    start = 0
    while messages := redis.execute_command(
        "LRANGE", name, start, start + MESSAGES_AT_ONCE - 1, **{NEVER_DECODE: True}
    ):
        yield from ((message, b"") for message in messages)
        start += len(messages)


def _held(redis: Any, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the messages that workers hold, each with its tag."""
    cursor = 0
    while True:
        cursor, messages = redis.execute_command(
            "HSCAN", name, cursor, "COUNT", MESSAGES_AT_ONCE, **{NEVER_DECODE: True}
        )
        yield from ((message, tag) for tag, message in messages.items())
        if not int(cursor):
            return


def _without(message: bytes, posts: Collection[str]) -> str | None:
    """Return a stored message without these posts; None if it does not contain them or cannot be read."""
    try:
        found = json.loads(message)
        body = encoding.stored_body(found)
        clean = _redact(body, posts)
        if found["headers"].get("task") == CLASSIFY_TASK and isinstance(clean, list) and clean:
            clean[0] = _redact_arguments(clean[0], posts)
        if clean == body:
            return None
        # Senders that do not set their own previews send the start of the arguments.
        found["headers"] |= {"argsrepr": PURGED, "kwargsrepr": PURGED}
        data = json.dumps(clean).encode()
        data = encoding.pack(data) if found["headers"].get("compression") == encoding.GZIP else data
        return json.dumps(found | {"body": (b64encode(data) if encoding.is_base64(found) else data).decode()})
    except (ValueError, zlib.error, AttributeError, KeyError, TypeError, RecursionError):
        return None


def _redact(value: Any, posts: Collection[str]) -> Any:
    """Reduce each of these posts in a JSON value to its id, at any depth: callbacks can contain posts too."""
    if isinstance(value, list):
        return [_redact(item, posts) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() & OTHER_FIELDS and _post_id(value.get("id")) in posts:
        return {"id": value["id"]}
    clean = {
        name: _redact_list(item, posts) if name == "posts" and isinstance(item, list) else _redact(item, posts)
        for name, item in value.items()
    }
    if clean.get("task") == CLASSIFY_TASK and "args" in clean:  # a callback's signature
        clean["args"] = _redact_arguments(clean["args"], posts)
    return clean


def _redact_arguments(args: Any, posts: Collection[str]) -> Any:
    """Reduce the posts in the positional arguments of a classification, whose first item is the list of posts."""
    if isinstance(args, list) and args and isinstance(args[0], list):
        return [_redact_list(args[0], posts), *args[1:]]
    return args


def _redact_list(items: list[Any], posts: Collection[str]) -> list[Any]:
    """Reduce these posts in a list of posts, even if they have only unknown fields."""
    return [
        {"id": item["id"]} if isinstance(item, dict) and _post_id(item.get("id")) in posts else _redact(item, posts)
        for item in items
    ]


def _post_id(value: object) -> str | None:
    """Return an id in the form of `Post.id`; None for other types."""
    return str(value).encode("utf-8", "replace").decode().strip() if isinstance(value, str | int | float) else None
