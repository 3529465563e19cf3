"""Takes posts out of messages that wait in the queue, or that a worker holds, and leaves the messages where they are.

A post becomes its bare id: the message keeps one outcome per post, in its order, and the others of it are classified as
if nothing had happened. A message is exchanged in one step, and only where it still lies as it was read; where it has
moved on meanwhile, it is met again in the place that it moved to: lists, what is held, and lists once more.

Not reached is what a worker has in memory, until it is done with it; nor what is no JSON, or is packed by anything but
gzip.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator
from typing import Any

from redis import Redis
from redis.client import NEVER_DECODE

from shared import encoding
from shared.broker import CLASSIFY_TASK, HELD, queue_lists
from shared.leases import MAX_MESSAGE
from shared.messages import Post

#: Messages fetched together: one of ours has some 20 KB, but a stranger's may have a thousand times as many.
MESSAGES_AT_ONCE = 10
#: What makes an object with an id a post.
OTHER_FIELDS = Post.model_fields.keys() - {"id"}
#: The value of `body_encoding` with which kombu writes bodies; without it a body lies there as text.
BASE64 = "base64"
#: What a sender's headers say in place of the beginning of the arguments.
PURGED = "purged"

#: Puts one message in another's place. Deletes nothing first: once a script has written, Redis lets it go on at
#: `maxmemory`.
#:
#:   KEYS[1] list    KEYS[2] feedmill:reserved, hash    ARGV[1] the message expected there    ARGV[2] the new one
EXCHANGE_WAITING = """
local at = redis.call('LPOS', KEYS[1], ARGV[1])
if not at then return 0 end
redis.call('HDEL', KEYS[2], '')
redis.call('LSET', KEYS[1], at, ARGV[2])
return 1
"""
#: The same where a worker holds it.
#:
#:   KEYS[1] feedmill:reserved, hash    ARGV[1] the message expected there    ARGV[2] the new one    ARGV[3] its tag
EXCHANGE_HELD = """
if redis.call('HGET', KEYS[1], ARGV[3]) ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[3], ARGV[2])
return 1
"""


def remove(redis: Redis, queues: Collection[str], posts: Collection[str]) -> int:
    """Take these posts out of the messages of these queues; returns how many messages had any.

    Raises redis.exceptions.RedisError; it may then be called again.
    """
    waiting: Any = redis.register_script(EXCHANGE_WAITING)
    held: Any = redis.register_script(EXCHANGE_HELD)
    lists, reserved = [name for queue in queues for name in queue_lists(queue)], HELD["reserved_key"]
    changed = 0
    for name in (*lists, reserved, *lists):
        exchange, found = (held, _held(redis, name)) if name == reserved else (waiting, _waiting(redis, name))
        for message, *tag in found:
            if (clean := _without(message, posts)) is not None:
                changed += exchange(keys=[name, reserved], args=[message, clean, *tag])
    return changed


def _waiting(redis: Any, name: str) -> Iterator[tuple[bytes]]:
    """The messages of a list, the newest first: what is added meanwhile moves the others on, and hides none."""
    start = 0
    while messages := redis.execute_command(
        "LRANGE", name, start, start + MESSAGES_AT_ONCE - 1, **{NEVER_DECODE: True}
    ):
        yield from ((message,) for message in messages)
        start += len(messages)


def _held(redis: Any, name: str) -> Iterator[tuple[bytes, bytes]]:
    """The messages that workers hold, each with its tag."""
    cursor = 0
    while True:
        cursor, messages = redis.execute_command(
            "HSCAN", name, cursor, "COUNT", MESSAGES_AT_ONCE, **{NEVER_DECODE: True}
        )
        yield from ((message, tag) for tag, message in messages.items())
        if not int(cursor):
            return


def _without(message: bytes, posts: Collection[str]) -> str | None:
    """A message, as it lies in Redis, without these posts; None where it has none of them, or cannot be read."""
    try:
        found = json.loads(message)
        packed = found["headers"].get("compression") == encoding.GZIP
        declared = (found.get("properties") or {}).get("body_encoding")
        in_base64 = declared == BASE64 or not found["body"].startswith("[")
        data = b64decode(found["body"]) if in_base64 else found["body"].encode()
        body = json.loads(encoding.unpack(encoding.GZIP, MAX_MESSAGE, data) if packed else data)
        clean = _reduced(body, posts)
        if found["headers"].get("task") == CLASSIFY_TASK and isinstance(clean, list) and clean:
            clean[0] = _bare_first(clean[0], posts)
        if clean == body:
            return None
        # A sender that lets Celery describe the arguments sends their beginning.
        found["headers"] |= {"argsrepr": PURGED, "kwargsrepr": PURGED}
        data = json.dumps(clean).encode()
        data = encoding.pack(data) if packed else data
        return json.dumps(found | {"body": (b64encode(data) if in_base64 else data).decode()})
    except (ValueError, zlib.error, AttributeError, KeyError, TypeError, RecursionError):
        return None


def _reduced(value: Any, posts: Collection[str]) -> Any:
    """The value with each of these posts reduced to its id, however deep: callbacks have posts as well."""
    if isinstance(value, list):
        return [_reduced(item, posts) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() & OTHER_FIELDS and _id(value.get("id")) in posts:
        return {"id": value["id"]}
    clean = {
        name: _bare(item, posts) if name == "posts" and isinstance(item, list) else _reduced(item, posts)
        for name, item in value.items()
    }
    if clean.get("task") == CLASSIFY_TASK and "args" in clean:  # a callback
        clean["args"] = _bare_first(clean["args"], posts)
    return clean


def _bare_first(args: Any, posts: Collection[str]) -> Any:
    """Positional arguments of a classification, of which the first is its list of posts."""
    if isinstance(args, list) and args and isinstance(args[0], list):
        return [_bare(args[0], posts), *args[1:]]
    return args


def _bare(items: list[Any], posts: Collection[str]) -> list[Any]:
    """The items of a list of posts, reduced whatever fields they have: a sender may add unknown ones."""
    return [
        {"id": item["id"]} if isinstance(item, dict) and _id(item.get("id")) in posts else _reduced(item, posts)
        for item in items
    ]


def _id(value: object) -> str | None:
    """As `Post` takes it."""
    return str(value).encode("utf-8", "replace").decode().strip() if isinstance(value, str | int | float) else None
