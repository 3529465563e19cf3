"""Delete all stored data of posts by id, and leave tombstones that keep the posts from being ingested again.

Deleting alone is not enough: a worker may be classifying the post, and a producer may read it again. So a purge first
sets a tombstone, which stops all further sending and storing (shared/results.py, producers/push.py), and then deletes
existing data. A purge is idempotent and can be repeated after a failure. It works at `maxmemory` too: each script
starts with a deletion, because Redis rejects only a script's first write.

Limits: a post stays in a worker's memory until its message is finished. Its result is not stored; but if another
application waits for that message, Celery keeps the outcome for `celery_result_ttl`, and results of a chord's messages
until the chord is finished. Redis frees a deleted stream entry when all entries of its stream node are deleted:
immediately if `stream-node-max-entries` is 1, as in docker/redis.conf. The append-only file keeps old data until
`rewrite_append_only_file`.
"""

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE

from shared import model_routing, queue_redaction
from shared.broker import TRANSPORT_KEYS
from shared.errors import UserError, printable
from shared.keys import CELERY_RESULTS, DEAD_LETTERS, RESULTS_STREAM, result_key, sent_key, tombstone_key
from shared.settings import Settings

#: Ids per pass over a stream. Each call of the script receives all of them.
IDS_AT_ONCE = 1000
#: Bytes of entries that one call of the script reads. Takes one or two milliseconds, during which Redis is blocked.
SWEEP_BYTES = 2**19
#: Keys per SCAN; and Celery results per MGET, one of which can hold 1,000 outcomes.
SCAN_COUNT, RESULTS_AT_ONCE = 1000, 50
#: Maximum characters of an id, as in shared/messages.py.
MAX_ID = 128

#: Deletes entries of the given posts from a part of a stream. Reads ten entries at a time, because sizes vary widely.
#:
#:   KEYS[1]  feedmill:results or feedmill:dead, stream
#:   ARGV[1]  first id, as XRANGE takes it              ARGV[2]  bytes of entries after which to stop
#:   ARGV[3+] ids of the posts
#:
#: Returns the first id of the next call, "" after the last entry, and the number of deleted entries.
SWEEP = """
local wanted, from, bytes, deleted = {}, ARGV[1], 0, 0
for i = 3, #ARGV do wanted[ARGV[i]] = true end
repeat
  local entries = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 10)
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    local id = fields[1] == 'id' and fields[2]
    for i = 2, #fields, 2 do bytes = bytes + #fields[i] end
    if id and wanted[id] then
      deleted = deleted + redis.call('XDEL', KEYS[1], entry[1])
    end
    from = '(' .. entry[1]
  end
  if #entries < 10 then from = '' end
until from == '' or bytes >= tonumber(ARGV[2])
return {from, deleted}
"""
#: Sets tombstones. DEL comes first: after one write, Redis lets a script continue at `maxmemory`.
#:
#:   KEYS  feedmill:gone:<id>, string, of each post    ARGV[1]  when, in seconds since 1970    ARGV[2]  ttl, seconds
SET_TOMBSTONES = """
for _, key in ipairs(KEYS) do
  redis.call('DEL', key)
  redis.call('SET', key, ARGV[1], 'EX', ARGV[2])
end
"""
#: Replaces a text if it is unchanged, and keeps its TTL. The HDEL deletes nothing, but comes first: after one write,
#: Redis lets a script continue at `maxmemory`.
#:
#:   KEYS[1] celery-task-meta-<id>, string    ARGV[1] the expected text    ARGV[2] the new text
#:   KEYS[2] feedmill:reserved, hash
REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[2], '')
redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
return 1
"""

#: Text that replaces the purged parts of an outcome or an error.
PURGED = "purged"
#: Fields that identify a classification, and a post's error. Other applications' results match CELERY_RESULTS too.
CLASSIFICATION, POST_ERROR = frozenset({"id", "label", "scores", "fingerprint"}), frozenset({"id", "error"})
#: Matches an outcome's id in a message's result; and text that only the result of a failed message contains.
ID_IN_JSON = re.compile(rb'"id": ?("(?:[^"\\]|\\.)*")')
FAILURE_IN_JSON = b'"exc_type"'
#: Parts of MessageFailed's text (shared/errors.py): before the reasons, between two reasons, and after a post's id.
REASONS_PREFIX, REASON_SEPARATOR, ID_SUFFIX = " posts failed: ", "; ", ": "


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
    (`tombstone_ttl`) or is lifted. Raises UserError for invalid ids, and redis.exceptions.RedisError. A failed purge
    can be repeated.
    """
    posts = _valid_ids(ids)
    for batch in _batches(posts):
        _set_tombstones(redis, settings, batch)
    # Messages first: afterwards, no worker can receive one of the posts any more.
    found = PurgeCounts(messages=_remove_from_messages(redis, settings, posts))
    for batch in _batches(posts):
        counts = PurgeCounts(
            sent=redis.unlink(*map(sent_key, batch)),
            results=redis.unlink(*map(result_key, batch)),
            entries=_sweep(redis, RESULTS_STREAM, batch),
            dead_letters=_sweep(redis, DEAD_LETTERS, batch),
        )
        found = PurgeCounts(*map(sum, zip(found, counts, strict=True)))
    return found._replace(celery_results=_clean_celery_results(redis, frozenset(posts)) if posts else 0)


def lift_tombstones(redis: Redis, ids: Iterable[str]) -> int:
    """Remove the tombstones of these posts, so that they can be sent again. Return how many were removed.

    Purged data is not restored. Raises as `purge` does.
    """
    return sum(redis.unlink(*map(tombstone_key, batch)) for batch in _batches(_valid_ids(ids)))


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


def _set_tombstones(redis: Redis, settings: Settings, posts: Sequence[str]) -> None:
    bury: Any = redis.register_script(SET_TOMBSTONES)
    bury(keys=[tombstone_key(post_id) for post_id in posts], args=[int(time.time()), settings.tombstone_ttl])


def _remove_from_messages(redis: Redis, settings: Settings, posts: Collection[str]) -> int:
    """Remove the posts from messages in all queues. Return the number of changed messages."""
    return queue_redaction.remove(redis, model_routing.queues(redis, settings), frozenset(posts)) if posts else 0


def _sweep(redis: Redis, stream: str, posts: Sequence[str]) -> int:
    """Delete the posts' entries from a stream. Return the number of deleted entries."""
    sweep: Any = redis.register_script(SWEEP)
    start, deleted = "-", 0
    while start:
        answer: Any = sweep(keys=[stream], args=[start, SWEEP_BYTES, *posts])
        start = answer[0] if isinstance(answer[0], str) else answer[0].decode()
        deleted += answer[1]
    return deleted


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
    replace: Any = redis.register_script(REPLACE)
    while text is not None and (clean := _without(text, posts)) is not None:
        if replace(keys=[key, TRANSPORT_KEYS["reserved_key"]], args=[text, clean]):
            return True
        (text,) = _fetch(redis, [key])  # another client has changed it meanwhile
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
    if isinstance(result, dict) and (quoted := _text_before_reasons(result.get("exc_message"), posts)):
        # Reasons can quote posts. The reasons of all posts are removed; dead letters still contain the other posts'.
        error = result | {"exc_message": [f"{quoted}{REASONS_PREFIX}{PURGED}"]}
        return json.dumps(meta | {"result": error, "traceback": None})
    return None


def _is_outcome(item: object, posts: Collection[str]) -> bool:
    """Return whether the item is a Feedmill outcome of one of these posts."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return (item.keys() >= CLASSIFICATION or item.keys() == POST_ERROR) and item["id"].strip() in posts


def _text_before_reasons(message: object, posts: Collection[str]) -> str:
    """Return the part of a failed message's error text before its list of reasons.

    Return "" unless a reason names one of `posts`.
    """
    text, found, reasons = " ".join(map(str, message if isinstance(message, list) else [])).partition(REASONS_PREFIX)
    if not found:
        return ""
    # Try every possible end of an id, because an id can itself contain the separator.
    begins = [0, *(match.end() for match in re.finditer(REASON_SEPARATOR, reasons))]
    ends = [match.start() for match in re.finditer(ID_SUFFIX, reasons)]
    named = (reasons[begin:end].strip() for begin in begins for end in ends if begin < end <= begin + MAX_ID)
    return text if any(post_id in posts for post_id in named) else ""


def _decode_id(quoted: bytes) -> str:
    """Decode a JSON string; "" if it is invalid."""
    try:
        return str(json.loads(quoted)).strip()
    except ValueError:
        return ""
