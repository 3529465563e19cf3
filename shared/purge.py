"""Removes posts by their ids, wherever Feedmill keeps something of them, and remembers that they are gone.

Deleting what is there would not do: a worker may have the post in hand, and a producer may read it again. So a
tombstone is set first, after which nothing is stored or sent of the post (shared/results.py, producers/push.py), and
what was there before is deleted then. A purge that breaks off may be made again, and harms nothing. It works at
`maxmemory` as well: each of its scripts deletes before it writes, and Redis refuses only a script's first write.

What it does not reach: what a worker has in memory, until it is done with it. Nothing is stored of it; but where
another application waits for such a message, it gets the outcome, and Celery keeps that for `celery_result_ttl`, as it
keeps those of a chord's messages until the last is done. And Redis cuts what is deleted from a stream out of its memory
with the last of the entries that lie beside it there: at once where `stream-node-max-entries` is 1, as in
docker/redis.conf. Its append-only file has what was, until `rewrite`.
"""

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE

from shared import queued, serving
from shared.broker import HELD
from shared.errors import UserError, printable
from shared.keys import CELERY_RESULTS, DEAD_LETTERS, RESULTS_STREAM, result_key, sent_key, tombstone_key
from shared.settings import Settings

#: Posts that are looked for in one pass over a stream: each call of the script is told all of them.
IDS_AT_ONCE = 1000
#: Bytes of entries that one call of the script reads: a millisecond or two, in which Redis serves nobody else.
SWEEP_BYTES = 2**19
#: Keys that one SCAN looks at, and of Celery's results those that are fetched together: one may hold 1,000 outcomes.
SCAN_COUNT, RESULTS_AT_ONCE = 1000, 50
#: Characters of an id, at most; shared/messages.py takes no longer ones.
LONGEST_ID = 128

#: Deletes the entries of some posts from a part of a stream, ten entries at a time: they differ in size by far.
#:
#:   KEYS[1]  feedmill:results or feedmill:dead, stream
#:   ARGV[1]  where to begin, as XRANGE takes it        ARGV[2]  bytes of entries after which to end
#:   ARGV[3+] ids of the posts
#:
#: Returns where the next call is to begin, "" after the last entry, and how many entries were deleted. Entries that
#: an earlier version wrote have no field `id`; there it is the first of what their JSON says.
SWEEP = """
local wanted, from, bytes, deleted = {}, ARGV[1], 0, 0
for i = 3, #ARGV do wanted[ARGV[i]] = true end
repeat
  local entries = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 10)
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    local id = fields[1] == 'id' and fields[2]
    for i = 2, #fields, 2 do
      bytes = bytes + #fields[i]
      local quoted = not id and string.match(fields[i], '^{"id":(".-"),"[lr]')
      if quoted then
        local well, decoded = pcall(cjson.decode, '[' .. quoted .. ']')
        id = well and decoded[1]
      end
    end
    if id and wanted[id] then
      deleted = deleted + redis.call('XDEL', KEYS[1], entry[1])
    end
    from = '(' .. entry[1]
  end
  if #entries < 10 then from = '' end
until from == '' or bytes >= tonumber(ARGV[2])
return {from, deleted}
"""
#: Sets tombstones. Deletes first: once a script has written, Redis lets it go on at `maxmemory`.
#:
#:   KEYS  feedmill:gone:<id>, string, of each post    ARGV[1]  when, in seconds since 1970    ARGV[2]  ttl, seconds
BURY = """
for _, key in ipairs(KEYS) do
  redis.call('DEL', key)
  redis.call('SET', key, ARGV[1], 'EX', ARGV[2])
end
"""
#: Puts one text in another's place, where that is still there, and leaves its time to live. Deletes nothing first: once
#: a script has written, Redis lets it go on at `maxmemory`.
#:
#:   KEYS[1] celery-task-meta-<id>, string    ARGV[1] the text expected there    ARGV[2] the new one
#:   KEYS[2] feedmill:reserved, hash
REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[2], '')
redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
return 1
"""

#: What an outcome or an error says where it said something of a purged post.
PURGED = "purged"
#: The fields that tell a classification, and those of a post's error: results of other applications' tasks may lie
#: beside ours.
CLASSIFICATION, POST_ERROR = frozenset({"id", "label", "scores", "fingerprint"}), frozenset({"id", "error"})
#: The id of an outcome in a message's result, as Celery writes it; and what the result of a failed message has.
ID_IN_JSON = re.compile(rb'"id": ?("(?:[^"\\]|\\.)*")')
FAILURE_IN_JSON = b'"exc_type"'
#: What the text of MessageFailed (shared/errors.py) says before it quotes posts' reasons, what stands between two of
#: them, and what ends a post's id.
REASONS, BETWEEN, AFTER_ID = " posts failed: ", "; ", ": "


class Purged(NamedTuple):
    """How much a purge found, and removed."""

    #: Posts that were remembered as sent.
    sent: int = 0
    #: Posts that had results.
    results: int = 0
    #: Entries of the stream of results.
    entries: int = 0
    #: Entries of the dead-letter stream.
    dead_letters: int = 0
    #: Messages whose results, kept by Celery, said something of the posts.
    celery_results: int = 0
    #: Messages, waiting or held by a worker, that had some of the posts.
    messages: int = 0


def purge(redis: Redis, settings: Settings, ids: Iterable[str]) -> Purged:
    """Remove all that is kept of these posts, and leave a tombstone of each.

    A tombstone says when, and nothing else. Neither `Pusher` nor `ResultsStore` takes such a post again, until the
    tombstone expires (`tombstone_ttl`) or is lifted. Raises UserError for what cannot be an id, and
    redis.exceptions.RedisError; the same posts may then be purged again.
    """
    posts = _checked(ids)
    for some in _batches(posts):
        _set_tombstones(redis, settings, some)
    # First: what is in no message any more cannot come out of one afterwards.
    found = Purged(messages=_empty_messages(redis, settings, posts))
    for some in _batches(posts):
        counts = Purged(
            sent=redis.unlink(*map(sent_key, some)),
            results=redis.unlink(*map(result_key, some)),
            entries=_sweep(redis, RESULTS_STREAM, some),
            dead_letters=_sweep(redis, DEAD_LETTERS, some),
        )
        found = Purged(*map(sum, zip(found, counts, strict=True)))
    return found._replace(celery_results=_clean_celery_results(redis, frozenset(posts)) if posts else 0)


def lift(redis: Redis, ids: Iterable[str]) -> int:
    """Remove the tombstones of posts that were purged by mistake, which may then be sent again; returns how many.

    What was purged does not come back. Raises as `purge` does.
    """
    return sum(redis.unlink(*map(tombstone_key, some)) for some in _batches(_checked(ids)))


def rewrite(redis: Redis) -> None:
    """Have Redis begin to write its append-only file anew, as things are now, where it keeps one.

    Raises UserError while it writes one that may have been begun before a purge, and redis.exceptions.RedisError.
    """
    persistence: Any = redis.info("persistence")
    if not persistence["aof_enabled"]:
        return
    if persistence["aof_rewrite_in_progress"]:
        raise UserError(
            "Redis is writing its append-only file anew at this moment, perhaps since before the purge: the posts are "
            "gone, but that file may have them. Ask for --rewrite again when it is done."
        )
    redis.bgrewriteaof()


def _checked(ids: Iterable[str]) -> list[str]:
    """Each once, as posts bear them (`Post.id`)."""
    posts = dict.fromkeys(post_id.encode("utf-8", "replace").decode().strip() for post_id in ids)
    for post_id in posts:
        if not 1 <= len(post_id) <= LONGEST_ID:
            raise UserError(
                f"'{printable(post_id):.40}' is no post's id: it has {len(post_id)} characters, not 1 to {LONGEST_ID}."
            )
    return list(posts)


def _batches(posts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(posts)
    while some := list(islice(remaining, IDS_AT_ONCE)):
        yield some


def _set_tombstones(redis: Redis, settings: Settings, posts: Sequence[str]) -> None:
    bury: Any = redis.register_script(BURY)
    bury(keys=[tombstone_key(post_id) for post_id in posts], args=[int(time.time()), settings.tombstone_ttl])


def _empty_messages(redis: Redis, settings: Settings, posts: Collection[str]) -> int:
    """Take the posts out of messages of all queues; returns how many messages had any."""
    return queued.remove(redis, serving.queues(redis, settings), frozenset(posts)) if posts else 0


def _sweep(redis: Redis, stream: str, posts: Sequence[str]) -> int:
    """Delete the posts' entries from a stream; returns how many there were."""
    sweep: Any = redis.register_script(SWEEP)
    start, deleted = "-", 0
    while start:
        answer: Any = sweep(keys=[stream], args=[start, SWEEP_BYTES, *posts])
        start = answer[0] if isinstance(answer[0], str) else answer[0].decode()
        deleted += answer[1]
    return deleted


# What Celery keeps: the outcomes of messages that another application waits for.


def _clean_celery_results(redis: Redis, posts: Collection[str]) -> int:
    """Take the posts' outcomes out of messages' results; returns how many results were changed."""
    cleaned, cursor = 0, 0
    while True:
        cursor, keys = redis.scan(cursor, match=CELERY_RESULTS, count=SCAN_COUNT)
        for start in range(0, len(keys), RESULTS_AT_ONCE):
            some = keys[start : start + RESULTS_AT_ONCE]
            cleaned += sum(_clean(redis, key, text, posts) for key, text in zip(some, _fetch(redis, some), strict=True))
        if not cursor:
            return cleaned


def _fetch(redis: Any, keys: Sequence[bytes | str]) -> list[bytes | None]:
    """The texts of these keys as they are: where they are not ours they need not be UTF-8."""
    texts: list[bytes | None] = redis.execute_command("MGET", *keys, **{NEVER_DECODE: True})
    return texts


def _clean(redis: Redis, key: bytes | str, text: bytes | None, posts: Collection[str]) -> bool:
    """Clean one result, of which `text` was just read; whether there was anything to clean."""
    replace: Any = redis.register_script(REPLACE)
    while text is not None and (clean := _without(text, posts)) is not None:
        if replace(keys=[key, HELD["reserved_key"]], args=[text, clean]):
            return True
        (text,) = _fetch(redis, [key])  # somebody has changed it meanwhile
    return False


def _without(text: bytes, posts: Collection[str]) -> str | None:
    """A message's result without what it says of these posts; None where it says nothing of them, or is none of ours.

    It stays what Celery's readers expect: an outcome becomes an error, and a failed message's error keeps its type.
    """
    if FAILURE_IN_JSON not in text and not any(_read(found) in posts for found in ID_IN_JSON.findall(text)):
        return None
    try:
        meta = json.loads(text)
        result = meta["result"]
    except (ValueError, RecursionError, KeyError, TypeError):  # no JSON, or nothing of Celery's
        return None
    if isinstance(result, list):
        outcomes = [{"id": item["id"], "error": PURGED} if _is_outcome(item, posts) else item for item in result]
        return None if outcomes == result else json.dumps(meta | {"result": outcomes})
    if isinstance(result, dict) and (quoted := _quoting(result.get("exc_message"), posts)):
        # Reasons may hold somebody's words. Those of the message's other posts go too; they are in the dead letters.
        error = result | {"exc_message": [f"{quoted}{REASONS}{PURGED}"]}
        return json.dumps(meta | {"result": error, "traceback": None})
    return None


def _is_outcome(item: object, posts: Collection[str]) -> bool:
    """Whether this is an outcome of ours, of one of these posts."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return (item.keys() >= CLASSIFICATION or item.keys() == POST_ERROR) and item["id"].strip() in posts


def _quoting(message: object, posts: Collection[str]) -> str:
    """What an error's text says before it quotes the reasons of posts, where these are among them; else ""."""
    said, found, reasons = " ".join(map(str, message if isinstance(message, list) else [])).partition(REASONS)
    if not found:
        return ""
    # Where an id ends is not marked: it may hold what separates it from its reason.
    begins = [0, *(match.end() for match in re.finditer(BETWEEN, reasons))]
    ends = [match.start() for match in re.finditer(AFTER_ID, reasons)]
    named = (reasons[begin:end].strip() for begin in begins for end in ends if begin < end <= begin + LONGEST_ID)
    return said if any(post_id in posts for post_id in named) else ""


def _read(quoted: bytes) -> str:
    """The text of a JSON string, "" where it is none."""
    try:
        return str(json.loads(quoted)).strip()
    except ValueError:
        return ""
