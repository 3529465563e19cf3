"""Delete all stored data of posts by id, and leave tombstones that keep the posts from being ingested again.

Deleting alone is not enough: a worker may be classifying the post, and a producer may read it again. So a purge first
sets a tombstone, which stops all further sending and storing (shared/results.py, producers/push.py), and then deletes
existing data. A purge is idempotent and can be repeated after a failure. It works at `maxmemory` too.

Limits: a post stays in a worker's memory until its message is finished. Its result is not stored; but if another
application waits for that message, Celery keeps the outcome for CELERY_RESULT_TTL_S, and results of a chord's messages
until the chord is finished. Redis frees a deleted stream entry when all entries of its stream node are deleted:
immediately if `stream-node-max-entries` is 1, as in docker/redis.conf. The append-only file keeps old data until
`rewrite_append_only_file`.
"""

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.shared import model_routing, queue_redaction
from feedmill.shared.errors import MessageFailed, UserError, printable
from feedmill.shared.keys import CELERY_RESULTS, DEAD_LETTERS, RESULTS_STREAM, tombstone_key
from feedmill.shared.scripts import purge as scripts
from feedmill.shared.scripts import queue as queue_scripts
from feedmill.shared.settings import Settings

#: Ids per pass over a stream. Each call of the script receives all of them.
IDS_AT_ONCE = 1000
#: Keys per SCAN; and Celery results per MGET, one of which can hold 1,000 outcomes.
SCAN_COUNT, RESULTS_AT_ONCE = 1000, 50
#: Maximum characters of an id, as in shared/messages.py.
MAX_ID = 128

#: Text that replaces the purged parts of an outcome or an error.
PURGED = "purged"
#: Fields that identify a classification, and a post's error. Other applications' results match CELERY_RESULTS too.
CLASSIFICATION, POST_ERROR = frozenset({"id", "label", "scores", "fingerprint"}), frozenset({"id", "error"})
#: Matches an outcome's id in a message's result; and text that only the result of a failed message contains.
ID_IN_JSON = re.compile(rb'"id": ?("(?:[^"\\]|\\.)*")')
FAILURE_IN_JSON = b'"exc_type"'


class PurgeCounts(NamedTuple):
    """Number of items that a purge found and removed."""

    #: Posts with a record of having been sent.
    sent: int = 0
    #: Posts with results.
    results: int = 0
    #: Entries of the results stream.
    entries: int = 0
    #: Entries of the dead-letter stream.
    dead_letters: int = 0
    #: Celery results that contained outcomes or errors of the posts.
    celery_results: int = 0
    #: Messages, waiting or held by a worker, that contained any of the posts.
    messages: int = 0


def purge(redis: Redis, settings: Settings, ids: Iterable[str]) -> PurgeCounts:
    """Delete everything stored about these posts, and leave a tombstone for each.

    A tombstone contains only its time. `Pusher` and `ResultsStore` reject a post until its tombstone expires
    (TOMBSTONE_TTL_S) or is lifted. Raises UserError for invalid ids, and redis.exceptions.RedisError. A failed purge
    can be repeated.
    """
    posts = _valid_ids(ids)
    for batch in _batches(posts):
        scripts.set_tombstones(redis, batch, int(time.time()))
    if not posts:
        return PurgeCounts()
    # Messages first: afterwards, no worker can receive one of the posts any more.
    queues = model_routing.queues(redis, settings)
    found = PurgeCounts(messages=queue_redaction.remove(redis, queues, frozenset(posts)))
    for batch in _batches(posts):
        sent, results = queue_scripts.forget(redis, batch)
        counts = PurgeCounts(
            sent=sent,
            results=results,
            entries=scripts.sweep(redis, RESULTS_STREAM, batch),
            dead_letters=scripts.sweep(redis, DEAD_LETTERS, batch),
        )
        found = PurgeCounts(*map(sum, zip(found, counts, strict=True)))
    return found._replace(celery_results=_clean_celery_results(redis, frozenset(posts)))


def lift_tombstones(redis: Redis, ids: Iterable[str]) -> int:
    """Remove the tombstones of these posts, so that they can be sent again. Return how many were removed.

    Purged data is not restored. Raises as `purge` does.
    """
    return sum(redis.unlink(*map(tombstone_key, batch)) for batch in _batches(_valid_ids(ids)))


def tombstones(redis: Redis, ids: Sequence[str]) -> dict[str, int]:
    """Return the times of the posts' tombstones, in seconds since 1970. Posts without one are absent."""
    found: Any = redis.mget([tombstone_key(post_id) for post_id in ids]) if ids else []
    return {post_id: int(at) for post_id, at in zip(ids, found, strict=True) if at is not None}


def lift_matching(redis: Redis, times: Mapping[str, int]) -> set[str]:
    """Remove the posts' tombstones if they are of these times, as a later purge of the same post must stand.

    Return the posts without a tombstone. times: post id -> time of its tombstone, in seconds since 1970.
    """
    lifted = scripts.lift(redis, times) if times else []
    return {post_id for post_id, free in zip(times, lifted, strict=True) if free}


def rewrite_append_only_file(redis: Redis) -> None:
    """Start rewriting Redis' append-only file, so that it no longer contains purged data. Does nothing without one.

    Raises UserError while another rewrite is in progress, which may have started before the purge; and
    redis.exceptions.RedisError.
    """
    persistence: Any = redis.info("persistence")
    if not persistence["aof_enabled"]:
        return
    if persistence["aof_rewrite_in_progress"]:
        raise UserError(
            "Redis is already rewriting its append-only file, possibly since before the purge, so the new file may "
            "still contain the purged posts. Run the command with --rewrite again when Redis is done."
        )
    redis.bgrewriteaof()


def _valid_ids(ids: Iterable[str]) -> list[str]:
    """Return the ids in the form of `Post.id`, without duplicates. Raises UserError."""
    posts = dict.fromkeys(post_id.encode("utf-8", "replace").decode().strip() for post_id in ids)
    for post_id in posts:
        if not 1 <= len(post_id) <= MAX_ID:
            raise UserError(
                f"'{printable(post_id):.40}' is not a post id: it has {len(post_id)} characters, not 1 to {MAX_ID}."
            )
    return list(posts)


def _batches(posts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(posts)
    while batch := list(islice(remaining, IDS_AT_ONCE)):
        yield batch


# Celery results: outcomes of messages that other applications wait for.


def _clean_celery_results(redis: Redis, posts: Collection[str]) -> int:
    """Remove the posts' outcomes from Celery results. Return the number of changed results."""
    cleaned, cursor = 0, 0
    while True:
        cursor, keys = redis.scan(cursor, match=CELERY_RESULTS, count=SCAN_COUNT)
        for start in range(0, len(keys), RESULTS_AT_ONCE):
            batch = keys[start : start + RESULTS_AT_ONCE]
            cleaned += sum(
                _clean(redis, key, text, posts) for key, text in zip(batch, _fetch(redis, batch), strict=True)
            )
        if not cursor:
            return cleaned


def _fetch(redis: Any, keys: Sequence[bytes | str]) -> list[bytes | None]:
    """Return the raw values of these keys. Other applications' results need not be UTF-8."""
    texts: list[bytes | None] = redis.execute_command("MGET", *keys, **{NEVER_DECODE: True})
    return texts


def _clean(redis: Redis, key: bytes | str, text: bytes | None, posts: Collection[str]) -> bool:
    """Remove the posts from one result, last read as `text`. Return whether it was changed."""
    while text is not None and (clean := _without(text, posts)) is not None:
        if scripts.replace(redis, key, text, clean):
            return True
        (text,) = _fetch(redis, [key])  # another client changed the result meanwhile
    return False


def _without(text: bytes, posts: Collection[str]) -> str | None:
    """Return a Celery result without these posts; None if it does not contain them, or is not Feedmill's.

    The result stays valid for Celery's readers: outcomes become errors, and a failed message's error keeps its type.
    """
    if FAILURE_IN_JSON not in text and not any(_decode_id(found) in posts for found in ID_IN_JSON.findall(text)):
        return None
    try:
        meta = json.loads(text)
        result = meta["result"]
    except (ValueError, RecursionError, KeyError, TypeError):  # not JSON, or not a Celery result
        return None
    if isinstance(result, list):
        outcomes = [{"id": item["id"], "error": PURGED} if _is_outcome(item, posts) else item for item in result]
        return None if outcomes == result else json.dumps(meta | {"result": outcomes})
    said = result.get("exc_message") if isinstance(result, dict) else None
    before, named = MessageFailed.parse(" ".join(map(str, said)) if isinstance(said, list) else "", MAX_ID)
    if named.isdisjoint(posts):
        return None
    # Reasons can quote posts. Remove the reasons of all posts: dead letters still contain those of the other posts.
    return json.dumps(meta | {"result": result | {"exc_message": [f"{before}{PURGED}"]}, "traceback": None})


def _is_outcome(item: object, posts: Collection[str]) -> bool:
    """Return whether the item is a Feedmill outcome of one of these posts."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return (item.keys() >= CLASSIFICATION or item.keys() == POST_ERROR) and item["id"].strip() in posts


def _decode_id(quoted: bytes) -> str:
    """Decode a JSON string; "" if it is invalid."""
    try:
        return str(json.loads(quoted)).strip()
    except ValueError:
        return ""
