"""Remove posts from Celery's results, which applications read for an hour: labels and scores by
id, and reasons of failures, which can quote a text.
"""

import json
from collections.abc import Collection, Iterator
from typing import Any

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.monitoring.flower_state import IdSearch

#: Beginnings of keys: results of tasks, and those of a chord that is not finished.
TASK_RESULTS = "celery-task-meta-*"
CHORD_RESULTS = "celery-taskset-meta-*"
#: Keys that one SCAN examines.
SCAN_COUNT = 1000
#: Error of a post in place of its outcome, and of a message that failed.
FORGOTTEN = "the post was deleted"
#: Maximum bytes of a result that is parsed.
MAX_BYTES = 2**25


def remove_from_results(redis: Redis, ids: Collection[str]) -> int:
    """Replace the outcomes of these posts; return the number of changed results.

    Raises redis.exceptions.RedisError.
    """
    untyped: Any = redis
    raw = {NEVER_DECODE: True}
    changed = 0
    search = IdSearch(ids)

    def change_result(transaction: Any) -> int:
        before = transaction.execute_command("GET", key, **raw)
        after = _without(before, ids, search)
        transaction.multi()
        if after is None:
            return 0
        transaction.set(key, after, keepttl=True)
        return 1

    def change_chord(transaction: Any) -> int:
        count = 0
        replaced = []
        for member, score in _members(transaction, key):
            after = _without(member, ids, search)
            if after is not None:
                replaced.append((member, after, score))
        transaction.multi()
        for member, after, score in replaced:
            # first: without a member, the key would lose its expiry, and the chord a part
            transaction.zadd(key, {after: score})
            transaction.zrem(key, member)
            count += 1
        return count

    # Workers store results meanwhile, and expired ones must not return: Redis changes a key only
    # if it is still the one that was read.
    for key in _keys(redis, TASK_RESULTS):
        changed += untyped.transaction(change_result, key, value_from_callable=True)
    for key in _keys(redis, CHORD_RESULTS):
        if untyped.type(key) in ("zset", b"zset"):
            changed += untyped.transaction(change_chord, key, value_from_callable=True)
    return changed


def _keys(redis: Any, pattern: str) -> Iterator[bytes]:
    cursor = None
    while cursor != 0:
        cursor, keys = redis.scan(
            cursor or 0,
            match=pattern,
            count=SCAN_COUNT,
            **{NEVER_DECODE: True},
        )
        yield from keys


def _members(redis: Any, key: bytes) -> list[tuple[bytes, float]]:
    flat = redis.execute_command(
        "ZRANGE",
        key,
        0,
        -1,
        "WITHSCORES",
        **{NEVER_DECODE: True},
    )
    members = []
    for item in flat:
        if isinstance(item, list | tuple):
            member, score = item
            members.append((member, float(score)))
    if not members:
        pairs = zip(flat[::2], flat[1::2], strict=True)
        members = [(member, float(score)) for member, score in pairs]
    return members


def _without(
    text: bytes | None, ids: Collection[str], search: IdSearch
) -> bytes | None:
    """Return a result without these posts; None if it has none of them, or is not JSON."""
    if not text or len(text) > MAX_BYTES:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_changed = _replace_outcomes(value, ids)
    if _fails_by(value, search):
        is_changed = True
    if not is_changed:
        return None
    return json.dumps(value).encode()


def _replace_outcomes(value: Any, ids: Collection[str]) -> bool:
    """Replace the outcomes and posts with these ids anywhere in a value. Uses no recursion,
    because nesting can be deep.
    """
    is_changed = False
    containers = [value]
    while containers:
        container = containers.pop()
        if isinstance(container, dict):
            if str(container.get("id")) in ids and len(container) > 1:
                post_id = container["id"]
                container.clear()
                container.update(id=post_id, error=FORGOTTEN)
                is_changed = True
            containers.extend(container.values())
        elif isinstance(container, list):
            containers.extend(container)
    return is_changed


def _fails_by(value: Any, search: IdSearch) -> bool:
    """Replace the reason of a failure that names one of the posts; return whether it did."""
    if isinstance(value, list):  # of a chord's message
        has_changed = [_fails_by(item, search) for item in value]
        return any(has_changed)
    if not isinstance(value, dict):
        return False
    failure = value
    if "result" in value:
        failure = value["result"]
    if not isinstance(failure, dict) or "exc_message" not in failure:
        return False
    reasons = [failure["exc_message"], value.get("traceback")]
    texts = _texts_in(reasons)
    if not any(map(search.is_named_in, texts)):
        return False
    failure["exc_message"] = [FORGOTTEN]
    if value.get("traceback"):
        value["traceback"] = None
    return True


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts anywhere in a value."""
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            values.extend(part)
        elif isinstance(part, dict):
            values.extend(part.values())
