"""Delete all stored data of posts by id or run, with tombstones against reading the posts again; and empty queues.

Deleting alone is not enough: a worker may be classifying the post, and a producer may read it again. So a purge first
sets a tombstone, which stops all further sending and storing (shared/results.py, producers/push.py), and then deletes
existing data. A purge is idempotent and can be repeated after a failure. It works at `maxmemory` too.

Limits: Celery keeps outcomes (id, label and scores, or a reason) for the application that waits for them, for
CELERY_RESULT_TTL_S, and those of a chord's messages until the chord is finished. Redis frees a deleted stream entry
when all entries of its stream node are deleted: immediately if `stream-node-max-entries` is 1, as in docker/redis.conf.
The append-only file keeps old data until it is rewritten.
"""

import json
import time
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.shared import encoding, model_routing, runs
from feedmill.shared.broker import CLASSIFY_TASK, TRANSPORT_KEYS, queue_lists
from feedmill.shared.errors import UserError, printable
from feedmill.shared.keys import DEAD_LETTERS, PURGES, RESULTS_STREAM, TOMBSTONE
from feedmill.shared.messages import MAX_ID, Post, parse_posts
from feedmill.shared.results import scan_hash
from feedmill.shared.scripts import call
from feedmill.shared.settings import DAY_S, Settings

#: Seconds for which tombstones block purged posts: longer than feeds and dumps repeat them.
TOMBSTONE_TTL_S = 365 * DAY_S
#: Purges that the log keeps, as in shared/scripts/purge.lua; purges per read, each of up to 1,000 posts; and the
#: position before the first one.
MAX_PURGES, PURGES_PER_READ, BEGINNING = 4000, 20, "0-0"
#: Ids per pass over a stream; and bytes of entries that one call reads, during which Redis is blocked for a few
#: milliseconds.
IDS_AT_ONCE, SWEEP_BYTES = 1000, 2**18
#: Messages per read. Feedmill's are about 20 KB; other applications' can be a thousand times as large.
MESSAGES_AT_ONCE = 10
#: Fields that distinguish a post from other objects with an id.
OTHER_FIELDS = Post.model_fields.keys() - {"id"}
#: Errors of a message that is not a Celery message, or not JSON.
UNREADABLE = (ValueError, zlib.error, AttributeError, LookupError, TypeError, RecursionError)
#: Text that replaces the argument previews in a message's headers.
PURGED = "purged"


#: Numbers of items that were found and removed, as in docs/reference/json.md.
Counts = Counter[str]


def purge(redis: Redis, settings: Settings, ids: Iterable[str]) -> Counts:
    """Delete everything stored about these posts, and leave a tombstone for each.

    A tombstone contains only its time. `Pusher` and `ResultsStore` reject a post until its tombstone expires
    (TOMBSTONE_TTL_S) or is lifted. Raises UserError for invalid ids, and redis.exceptions.RedisError. A failed purge
    can be repeated.
    """
    found = Counts(sent=0, results=0, entries=0, dead_letters=0, messages=0)
    posts = _valid_ids(ids)
    for batch in _batches(posts, IDS_AT_ONCE):
        call(redis, "set_tombstones", int(time.time()), TOMBSTONE_TTL_S, json.dumps(batch))
    if posts:  # messages first: afterwards, no worker can receive one of the posts any more
        found["messages"] = _clean_messages(redis, model_routing.queues(redis, settings), frozenset(posts))
    for batch in _batches(posts, IDS_AT_ONCE):
        sent, results = forget(redis, batch)
        entries, dead_letters = (_sweep(redis, stream, batch) for stream in (RESULTS_STREAM, DEAD_LETTERS))
        found.update(sent=sent, results=results, entries=entries, dead_letters=dead_letters)
    return found


def forget(redis: Redis, ids: Iterable[str]) -> tuple[int, int]:
    """Delete all marks and results of these posts. Return the numbers of posts that were sent, and that had results."""
    sent, stored = call(redis, "forget", json.dumps([[post_id] for post_id in ids]))
    return sent, stored


def lift_tombstones(redis: Redis, ids: Iterable[str]) -> int:
    """Remove the tombstones of these posts, so that they can be sent again. Return how many were removed.

    Purged data is not restored. Raises as `purge` does.
    """
    keys = (TOMBSTONE + post_id for post_id in _valid_ids(ids))
    return sum(redis.unlink(*batch) for batch in _batches(keys, IDS_AT_ONCE))


def tombstones(redis: Redis, ids: Sequence[str]) -> dict[str, int]:
    """Return the times of the posts' tombstones, in seconds since 1970. Posts without one are absent."""
    found: Any = redis.mget([TOMBSTONE + post_id for post_id in ids]) if ids else []
    return {post_id: int(at) for post_id, at in zip(ids, found, strict=True) if at is not None}


def lift_matching(redis: Redis, times: Mapping[str, int]) -> set[str]:
    """Remove the posts' tombstones if they are of these times, as a later purge of the same post must stand.

    Return the posts without a tombstone. times: post id -> time of its tombstone, in seconds since 1970.
    """
    lifted = call(redis, "lift", *(part for post in times.items() for part in post)) if times else []
    return {post_id for post_id, free in zip(times, lifted, strict=True) if free}


def _valid_ids(ids: Iterable[str]) -> list[str]:
    """Return the ids in the form of `Post.id`, without duplicates. Raises UserError."""
    posts = dict.fromkeys(post_id.encode("utf-8", "replace").decode().strip() for post_id in ids)
    for post_id in posts:
        if not 1 <= len(post_id) <= MAX_ID:
            raise UserError(
                f"'{printable(post_id):.40}' is not a post id: it has {len(post_id)} characters, not 1 to {MAX_ID}."
            )
    return list(posts)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


class Entry(NamedTuple):
    """An entry of the stream of results or of dead letters: its id, its post's id, and its result's fingerprint."""

    name: str
    post_id: str
    #: "" for a dead letter.
    fingerprint: str


def find_entries(redis: Redis, stream: str, field: str, values: Iterable[str]) -> Iterator[list[Entry]]:
    """Yield the entries of a stream whose field has one of the values, some at a time.

    field: `id`, `run`, or `author`, the beginning of an id up to its last slash. Raises redis.exceptions.RedisError.
    """
    start, wanted = "-", json.dumps(dict.fromkeys(values, True))
    while start:
        start, found = call(redis, "find_entries", stream, start, SWEEP_BYTES, field, wanted)
        yield [Entry(*found[at : at + 3]) for at in range(0, len(found), 3)]


def _sweep(redis: Redis, stream: str, posts: Sequence[str]) -> int:
    """Delete the posts' entries from a stream, and return the number of them."""
    parts = find_entries(redis, stream, "id", posts)
    return sum(redis.xdel(stream, *(entry.name for entry in part)) for part in parts if part)


def sweep_run(redis: Redis, stream: str, run: str) -> int:
    """Delete a run's entries from the stream of results or dead letters, with their results and marks.

    Returns the number of entries. Raises redis.exceptions.RedisError.
    """
    deleted = 0
    for part in filter(None, find_entries(redis, stream, "run", [run])):
        call(redis, "forget", json.dumps([[entry.post_id, entry.fingerprint, run] for entry in part]))
        deleted += redis.xdel(stream, *(entry.name for entry in part))
    return deleted


# Messages. A post is reduced to its id, so the message still has one outcome per post, in order, and its other posts
# are classified as usual. Messages that are not JSON, or compressed with anything but gzip, are not changed.


def _clean_messages(redis: Redis, queues: Collection[str], posts: Collection[str]) -> int:
    """Remove these posts from the messages of these queues. Return the number of changed messages."""
    changed = 0
    for name, message, tag in _messages(redis, queues):
        if (clean := _without(message, posts)) is not None:
            changed += call(redis, "replace", name, message, clean, tag)  # unless it has changed
    return changed


def ids_in_messages(redis: Redis, queues: Collection[str]) -> Iterator[str]:
    """Yield the ids of posts in the messages of these queues, without removed posts. Ids can be repeated.

    Raises redis.exceptions.RedisError.
    """
    for _, message, _ in _messages(redis, queues):
        try:
            yield from _ids_in(encoding.stored_body(json.loads(message)))
        except UNREADABLE:
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


def _messages(redis: Any, queues: Collection[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the key of each message, the message, and the tag of one that a worker holds, else b"".

    Messages can move meanwhile, so lists are read first, then held messages, then lists again.
    """
    lists, reserved = [name for queue in queues for name in queue_lists(queue)], TRANSPORT_KEYS["reserved_key"]
    yield from _waiting(redis, lists)
    yield from ((reserved, message, tag) for tag, message in scan_hash(redis, reserved, MESSAGES_AT_ONCE))
    yield from _waiting(redis, lists)


def _waiting(redis: Any, lists: Iterable[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the messages of lists, newest first: new messages shift the others towards the part not yet read."""
    for name in lists:
        start = 0
        while messages := read_list(redis, name, start):
            yield from ((name, message, b"") for message in messages)
            start += len(messages)


def read_list(redis: Any, name: str, start: int) -> list[bytes]:
    """Return the next MESSAGES_AT_ONCE messages of a list from a position. They need not be UTF-8."""
    command = ("LRANGE", name, start, start + MESSAGES_AT_ONCE - 1)
    found: list[bytes] = redis.execute_command(*command, **{NEVER_DECODE: True})
    return found


def _without(message: bytes, posts: Collection[str]) -> str | None:
    """Return a stored message without these posts; None if it does not contain them or cannot be read."""
    try:
        found = json.loads(message)
        body = encoding.stored_body(found)
        is_request = found["headers"].get("task") == CLASSIFY_TASK
        clean = [_redact(part, posts, is_request and place < 2) for place, part in enumerate(body)]
        if clean == body:
            return None
        # Senders that do not set their own previews send the start of the arguments.
        found["headers"] |= {"argsrepr": PURGED, "kwargsrepr": PURGED}
        data = json.dumps(clean).encode()
        data = encoding.pack(data) if found["headers"].get("compression") == encoding.GZIP else data
        return json.dumps(found | {"body": (b64encode(data) if encoding.is_base64(found) else data).decode()})
    except UNREADABLE:
        return None


def _redact(value: Any, posts: Collection[str], is_request: bool) -> Any:
    """Reduce each of these posts in a JSON value to its id, at any depth: callbacks can contain posts too.

    is_request: whether the value is from a classification's own arguments, where a post may have unknown fields only.
    """
    if isinstance(value, list):
        return [_redact(item, posts, is_request) for item in value]
    if not isinstance(value, dict):
        return value
    if (is_request or value.keys() & OTHER_FIELDS) and _post_id(value.get("id")) in posts:
        return {"id": value["id"]}
    return {name: _redact(item, posts, is_request) for name, item in value.items()}


def _post_id(value: object) -> str | None:
    """Return an id in the form of `Post.id`; None for other types."""
    return str(value).encode("utf-8", "replace").decode().strip() if isinstance(value, str | int | float) else None


# The log of purges, by which copies of results outside of Redis lose the purged posts, too. Redis keeps a limited
# number of purges, so a reader can miss some.


class Purge(NamedTuple):
    """A purge of these posts, or of a run: their results that were stored up to a time are gone.

    until: milliseconds since 1970, by Redis' clock, as in the ids of stream entries.
    """

    ids: Sequence[str]
    run: str | None
    until: int


class Purges(NamedTuple):
    """Consecutive purges, oldest first."""

    purges: list[Purge]
    #: Position after these purges.
    position: str
    #: True if earlier purges are no longer in the log. The reader must check all of its posts, then continue at
    #: `position`.
    missed: bool = False


def read_purges(redis: Redis, position: str) -> Purges:
    """Return the next purges after a position. Raises redis.exceptions.RedisError."""
    entries: Any = redis.xrange(PURGES, position, count=PURGES_PER_READ + 1)
    if position == BEGINNING:
        missed = len(entries) > PURGES_PER_READ and redis.xlen(PURGES) >= MAX_PURGES
    else:
        missed = not entries or entries.pop(0)[0] != position
    del entries[PURGES_PER_READ:]
    if missed:
        return Purges([], newest_purge(redis), missed=True)
    purges = [
        Purge(json.loads(fields.get("ids", "[]")), fields.get("run"), int(fields["until"])) for _, fields in entries
    ]
    return Purges(purges, entries[-1][0] if entries else position)


def newest_purge(redis: Redis) -> str:
    """Return the position after the newest purge. Raises redis.exceptions.RedisError."""
    newest: Any = redis.xrevrange(PURGES, count=1)
    return str(newest[0][0]) if newest else BEGINNING


# Waiting messages, all or those of a run. They are removed together with the records that their posts were sent:
# otherwise sending their file again would skip them. Messages that workers hold are in flight and stay.


def clear(redis: Redis, settings: Settings) -> Counts:
    """Remove the messages that wait in the queue. Raises redis.exceptions.RedisError."""
    messages, posts = _remove_waiting(redis, [settings.queue], lambda _, __: True)
    return Counts(messages=messages, posts=posts)


def purge_run(redis: Redis, settings: Settings, run: str) -> Counts:
    """Delete everything stored about the posts of one run, without blocking their ids.

    A purge by id deletes and blocks an id in every run. Here, other runs keep their posts, and the file can be sent
    again. Only results that are still in the results stream name their run; earlier ones expire after
    `results_ttl`. Idempotent; a failed purge can be repeated. Raises redis.exceptions.RedisError.
    """
    # Before the results, so that no worker receives one of the posts any more.
    messages, posts = _remove_waiting(
        redis,
        model_routing.queues(redis, settings),
        lambda count, named: 0 < count == len(named) and {*named} == {run},
    )
    known = runs.progress(redis, run)
    results = sweep_run(redis, RESULTS_STREAM, run)
    letters = sweep_run(redis, DEAD_LETTERS, run)
    call(redis, "forget_run", run, TOMBSTONE_TTL_S)
    outside = max(0, known.stored - results) if known else 0
    return Counts(results=results, dead_letters=letters, messages=messages, waiting=posts, outside=outside)


def _remove_waiting(
    redis: Any, queues: Collection[str], removes: Callable[[int, Sequence[str]], bool]
) -> tuple[int, int]:
    """Remove waiting messages, each together with the marks of its posts, unless a worker has taken it meanwhile.

    removes: decides on a message by the number of its posts and the runs of those that are readable. Return the numbers
    of removed messages and of their posts.
    """
    messages = posts = 0
    for name in (name for queue in queues for name in queue_lists(queue)):
        start = 0
        while read := read_list(redis, name, start):
            before = start, messages
            for message in read:
                count, found = _posts_in(message)
                if not removes(count, [run for _, run in found]):
                    start += 1
                elif call(redis, "remove_waiting", name, message, json.dumps(found)):  # else taken or changed
                    messages, posts = messages + 1, posts + count
            if (start, messages) == before:
                start += len(read)
    return messages, posts


def _posts_in(message: bytes) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of posts in a message, and id and run of each readable one. Other messages have no posts."""
    try:
        found = json.loads(message)
        args, kwargs, _ = encoding.stored_body(found)
        raw = args[0] if args else kwargs["posts"]
        posts = parse_posts(raw) if found["headers"]["task"] == CLASSIFY_TASK and isinstance(raw, list) else []
    except UNREADABLE:
        return 0, []
    return len(posts), [(post.id, post.run or "") for post in posts if isinstance(post, Post)]
