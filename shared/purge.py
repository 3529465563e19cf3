"""Delete all stored data of posts by id or run, with tombstones against reading the posts again;
and empty queues.

Deleting alone is not enough: a worker may be classifying the post, and a producer may read it
again. So a purge first sets a tombstone, which stops all further sending and storing
(shared/results.py, producers/push.py), and then deletes existing data. A purge is idempotent and
can be repeated after a failure. It works at `maxmemory` too.

Limits: Celery keeps outcomes (id, label and scores, or a reason) for the application that waits
for them, for CELERY_RESULT_TTL_S, and those of a chord's messages until the chord is finished.
Redis frees a deleted stream entry when all entries of its stream node are deleted: immediately if
`stream-node-max-entries` is 1, as in docker/redis.conf. The append-only file keeps old data until
it is rewritten.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared import model_routing, runs, stored_messages
from feedmill.shared.batches import batched
from feedmill.shared.broker import TRANSPORT_KEYS, queue_lists
from feedmill.shared.encoding import UnreadableError
from feedmill.shared.errors import UserError, printable
from feedmill.shared.keys import DEAD_LETTERS, PURGES, RESULTS_STREAM, TOMBSTONE
from feedmill.shared.messages import MAX_ID
from feedmill.shared.results import scan_hash
from feedmill.shared.scripts import call
from feedmill.shared.settings import DAY_S, Settings

#: Seconds for which tombstones block purged posts: longer than feeds and dumps repeat them.
TOMBSTONE_TTL_S = 365 * DAY_S
#: Purges that the log keeps, as in shared/scripts/purge.lua; purges per read, each of up to 1,000
#: posts; and the position before the first one.
MAX_PURGES = 4000
PURGES_PER_READ = 20
BEGINNING = "0-0"
#: Ids per pass over a stream; and bytes of entries that one call reads, during which Redis is
#: blocked for a few milliseconds.
IDS_AT_ONCE = 1000
SWEEP_BYTES = 2**18
#: Messages per read, and bytes of messages after which a read ends; its last message may exceed
#: them. Feedmill's are about 20 KB; other applications' can be a thousand times as large.
MESSAGES_AT_ONCE = 10
READ_BYTES = 2**22


#: Numbers of items that were found and removed, as in docs/reference/json.md.
Counts = Counter[str]


class PurgedPosts(NamedTuple):
    """The outcome of a purge of posts."""

    #: Numbers of removed items.
    counts: Counts
    #: Ids about which something was stored, and those about which nothing was.
    matched: list[str]
    unmatched: list[str]
    #: Members of the latter that had been purged before.
    purged_before: set[str]
    #: Messages that no purge can read: workers refuse them.
    unreadable: int


def purge(redis: Redis, settings: Settings, ids: Iterable[str]) -> Counts:
    """Delete everything stored about these posts, and leave a tombstone for each.

    Return the numbers of removed items.

    See `purge_posts`.
    """
    return purge_posts(redis, settings, ids).counts


def purge_posts(
    redis: Redis,
    settings: Settings,
    ids: Iterable[str],
    further_lists: Collection[str] = (),
) -> PurgedPosts:
    """Delete everything stored about these posts, and leave a tombstone for each.

    further_lists: lists of messages beside those of the queues. A tombstone contains only its
    time. `Pusher` and `ResultsStore` reject a post until its tombstone expires (TOMBSTONE_TTL_S)
    or is lifted. Raises UserError for invalid ids, and redis.exceptions.RedisError. A failed purge
    can be repeated.
    """
    counts = Counts(
        sent=0,
        results=0,
        entries=0,
        dead_letters=0,
        messages=0,
    )
    posts = valid_ids(ids)
    matched: set[str] = set()
    purged_before: set[str] = set()
    unreadable = 0
    for batch in batched(posts, IDS_AT_ONCE):
        purged_before.update(tombstones(redis, batch))
        call(
            redis,
            "set_tombstones",
            int(time.time()),
            TOMBSTONE_TTL_S,
            json.dumps(batch),
        )
    # Messages first: afterwards, no worker can receive one of the posts any more.
    if posts:
        queues = model_routing.queues(redis, settings)
        lists = [*_lists_of(queues), *further_lists]
        cleaned = _clean_messages(redis, lists, frozenset(posts))
        counts["messages"] = cleaned.changed
        unreadable = cleaned.unreadable
        matched.update(cleaned.posts)
    for batch in batched(posts, IDS_AT_ONCE):
        forgotten = _forget(redis, batch)
        matched.update(forgotten.sent, forgotten.with_results)
        results = _sweep(redis, RESULTS_STREAM, batch)
        dead_letters = _sweep(redis, DEAD_LETTERS, batch)
        matched.update(results.posts, dead_letters.posts)
        counts.update(
            sent=len(forgotten.sent),
            results=forgotten.results,
            entries=results.entries,
            dead_letters=dead_letters.entries,
        )
    unmatched = [post_id for post_id in posts if post_id not in matched]
    return PurgedPosts(
        counts=counts,
        matched=[post_id for post_id in posts if post_id in matched],
        unmatched=unmatched,
        purged_before=purged_before.intersection(unmatched),
        unreadable=unreadable,
    )


class ForgottenCounts(NamedTuple):
    """The numbers of posts that were sent, and of their results."""

    sent: int
    results: int


def forget(redis: Redis, ids: Iterable[str]) -> ForgottenCounts:
    """Delete all sent records and results of these posts."""
    forgotten = _forget(redis, list(ids))
    return ForgottenCounts(sent=len(forgotten.sent), results=forgotten.results)


class Forgotten(NamedTuple):
    """The posts that were sent, those that had results, and the number of these results."""

    sent: list[str]
    with_results: list[str]
    results: int


def _forget(redis: Redis, ids: Sequence[str]) -> Forgotten:
    """Delete all sent records and results of these posts."""
    requests = json.dumps([[post_id] for post_id in ids])
    sent_digits, stored_digits, results = call(redis, "forget", requests)
    return Forgotten(
        sent=_flagged_ids(ids, sent_digits),
        with_results=_flagged_ids(ids, stored_digits),
        results=results,
    )


def _flagged_ids(ids: Sequence[str], digits: str) -> list[str]:
    """Return the ids whose digit is 1."""
    pairs = zip(ids, digits, strict=True)
    return [post_id for post_id, digit in pairs if digit == "1"]


def lift_tombstones(redis: Redis, ids: Iterable[str]) -> int:
    """Remove the tombstones of these posts, so that they can be sent again.

    Return how many were removed.

    Purged data is not restored. Raises as `purge` does.
    """
    lifted = 0
    for batch in batched(valid_ids(ids), IDS_AT_ONCE):
        keys = [TOMBSTONE + post_id for post_id in batch]
        lifted += redis.unlink(*keys)
    return lifted


def tombstones(redis: Redis, ids: Sequence[str]) -> dict[str, int]:
    """Return the times of the posts' tombstones, in seconds since 1970.

    Posts without one are absent.
    """
    if not ids:
        return {}
    times: Any = redis.mget([TOMBSTONE + post_id for post_id in ids])
    return {
        post_id: int(at)
        for post_id, at in zip(ids, times, strict=True)
        if at is not None
    }


def lift_matching(redis: Redis, times: Mapping[str, int]) -> set[str]:
    """Remove the posts' tombstones if they are of these times, as a later purge of the same post
    must stand.

    Return the posts without a tombstone. times: post id -> time of its tombstone, in seconds since
    1970.
    """
    if not times:
        return set()
    arguments = chain.from_iterable(times.items())
    answers = call(redis, "lift", *arguments)
    return {post_id for post_id, is_free in zip(times, answers, strict=True) if is_free}


def valid_ids(ids: Iterable[str]) -> list[str]:
    """Return the ids in the form of `Post.id`, without duplicates. Raises UserError."""
    texts = (post_id.encode("utf-8", "replace").decode() for post_id in ids)
    posts = dict.fromkeys(text.strip() for text in texts)
    for post_id in posts:
        if not 1 <= len(post_id) <= MAX_ID:
            raise UserError(
                f"'{printable(post_id):.40}' is not a post id: it has {len(post_id)} characters, "
                f"not 1 to {MAX_ID}."
            )
    return list(posts)


class Entry(NamedTuple):
    """An entry of the stream of results or of dead letters: its id, its post's id, and its
    result's fingerprint.
    """

    name: str
    #: One of the ids in the text of a dead letter that has no post.
    post_id: str
    #: "" for a dead letter.
    fingerprint: str


def find_entries(
    redis: Redis, stream: str, field: str, values: Iterable[str]
) -> Iterator[list[Entry]]:
    """Yield the entries of a stream whose field has one of the values, some at a time.

    field: `id`, `run`, or `author`, the beginning of an id up to its last slash. A dead letter
    without a post has the ids in its text, and is yielded for each. Raises
    redis.exceptions.RedisError.
    """
    start = "-"
    choice = json.dumps(dict.fromkeys(values, True))
    while start:
        start, fields = call(
            redis, "find_entries", stream, start, SWEEP_BYTES, field, choice
        )
        names = fields[0::3]
        post_ids = fields[1::3]
        fingerprints = fields[2::3]
        yield list(map(Entry, names, post_ids, fingerprints))


class Swept(NamedTuple):
    """The number of deleted stream entries, and the posts that had any."""

    entries: int
    posts: set[str]


def _sweep(redis: Redis, stream: str, posts: Sequence[str]) -> Swept:
    """Delete the posts' entries from a stream."""
    deleted = 0
    matched: set[str] = set()
    for entries in find_entries(redis, stream, "id", posts):
        if entries:
            names = [entry.name for entry in entries]
            deleted += redis.xdel(stream, *names)
            matched.update(entry.post_id for entry in entries)
    return Swept(deleted, matched)


def sweep_run(redis: Redis, stream: str, run: str) -> int:
    """Delete a run's entries from the stream of results or dead letters, with their results and
    sent records.

    Returns the number of entries. Raises redis.exceptions.RedisError.
    """
    deleted = 0
    for entries in find_entries(redis, stream, "run", [run]):
        if not entries:
            continue
        requests = [[entry.post_id, entry.fingerprint, run] for entry in entries]
        call(redis, "forget", json.dumps(requests))
        names = [entry.name for entry in entries]
        deleted += redis.xdel(stream, *names)
    return deleted


# Messages. A post is reduced to its id (shared/stored_messages.py). Messages that cannot be read
# are never changed: every worker refuses them, and their dead letters leave out the text of purged
# posts (shared/results.py).


class Cleaned(NamedTuple):
    """The numbers of changed and of unreadable messages, and the posts that were removed."""

    changed: int
    unreadable: int
    posts: set[str]


def _clean_messages(
    redis: Redis, lists: Collection[str], posts: Collection[str]
) -> Cleaned:
    """Remove these posts from the messages of these lists, and from held and delayed ones."""
    return _change_messages(redis, lists, lambda message: _without(message, posts))


def _change_messages(
    redis: Redis,
    lists: Collection[str],
    redact: Callable[[bytes], stored_messages.Redacted | None],
) -> Cleaned:
    """Replace the messages of these lists, and held and delayed ones.

    redact: returns the new message, or None to keep it.
    """
    changed = 0
    removed: set[str] = set()
    #: Hashes of messages that cannot be read, and of messages without these posts: most messages
    #: are read twice, and decoding the largest takes seconds.
    unreadable: set[int] = set()
    clean: set[int] = set()
    for name, message, tag in _messages(redis, lists):
        message_hash = hash(message)
        if message_hash in unreadable or message_hash in clean:
            continue
        try:
            redacted = redact(message)
        except UnreadableError:
            unreadable.add(message_hash)
            continue
        if redacted is None:
            clean.add(message_hash)
            continue
        removed.update(redacted.ids)
        # Redis replaces the message only if it is still the one that was read.
        changed += call(redis, "replace", name, message, redacted.message, tag)
    return Cleaned(changed, len(unreadable), removed)


_without = stored_messages.without_posts


def ids_in_messages(redis: Redis, queues: Collection[str]) -> Iterator[str]:
    """Yield the ids of posts in the messages of these queues, without removed posts.

    Ids can be repeated.

    Raises redis.exceptions.RedisError.
    """
    for post_id, _ in records_in_messages(redis, queues):
        yield post_id


def records_in_messages(
    redis: Redis, queues: Collection[str], further_lists: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the fields, as sent, of each post in the messages of these queues, without
    removed posts.

    Posts can be repeated. further_lists: as for `purge_posts`. Raises
    redis.exceptions.RedisError.
    """
    lists = [*_lists_of(queues), *further_lists]
    #: Most messages are read twice.
    read: set[int] = set()
    for _, message, _ in _messages(redis, lists):
        message_hash = hash(message)
        if message_hash in read:
            continue
        read.add(message_hash)
        try:
            yield from stored_messages.records_in(message)
        except UnreadableError:
            continue


def _messages(redis: Any, lists: Collection[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the key of each message of these lists, held or due later, the message, and the tag of
    one that is held or due later, else b"".

    Messages can move meanwhile: from a list to a worker, from there to those that are due later,
    and back to a list. So all places but the worker's are read again.
    """
    held_key = TRANSPORT_KEYS["reserved_key"]
    delayed_key = TRANSPORT_KEYS["delayed_key"]
    yield from _waiting(redis, lists)
    yield from _in_hash(redis, delayed_key)
    yield from _in_hash(redis, held_key)
    yield from _in_hash(redis, delayed_key)
    yield from _waiting(redis, lists)


def _lists_of(queues: Iterable[str]) -> list[str]:
    """Return the lists of all these queues."""
    names: list[str] = []
    for queue in queues:
        names += queue_lists(queue)
    return names


def _in_hash(redis: Any, key: str) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the messages of a hash of the transport."""
    for tag, message in scan_hash(redis, key, MESSAGES_AT_ONCE):
        yield key, message, tag


def _waiting(redis: Any, lists: Iterable[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the messages of lists, newest first: new messages shift the others towards the part
    not yet read.
    """
    for name in lists:
        start = 0
        while messages := read_list(redis, name, start):
            for message in messages:
                yield name, message, b""
            start += len(messages)


def read_list(redis: Any, name: str, start: int) -> list[bytes]:
    """Return the next messages of a list from a position, up to MESSAGES_AT_ONCE. They need not be
    UTF-8.
    """
    messages: list[bytes] = call(
        redis,
        "read_list",
        name,
        start,
        MESSAGES_AT_ONCE,
        READ_BYTES,
        raw=True,
    )
    return messages


# The log of purges, by which copies of results outside of Redis lose the purged posts, too. Redis
# keeps a limited number of purges, so a reader can miss some.


class Purge(NamedTuple):
    """A purge of these posts, or of a run: their results that were stored up to a time are gone.

    until: milliseconds since 1970, by Redis' clock, as in the ids of stream entries.
    """

    ids: Sequence[str]
    run: str | None
    until: int


class PurgePage(NamedTuple):
    """Consecutive purges, oldest first."""

    purges: list[Purge]
    #: Position after these purges.
    position: str
    #: True if earlier purges are no longer in the log. The reader must check all of its posts,
    #: then continue at `position`.
    missed: bool = False


def read_purges(redis: Redis, position: str) -> PurgePage:
    """Return the next purges after a position. Raises redis.exceptions.RedisError."""
    entries: Any = redis.xrange(PURGES, position, count=PURGES_PER_READ + 1)
    if position == BEGINNING:
        missed = len(entries) > PURGES_PER_READ and redis.xlen(PURGES) >= MAX_PURGES
        following = entries[:PURGES_PER_READ]
    else:  # the first entry is the one at the position, unless that has left the log
        missed = not entries or entries[0][0] != position
        following = entries[1:]
    if missed:
        return PurgePage(
            purges=[],
            position=newest_purge(redis),
            missed=True,
        )
    purges = []
    for entry_id, fields in following:
        position = entry_id
        purge = Purge(
            ids=json.loads(fields.get("ids", "[]")),
            run=fields.get("run"),
            until=int(fields["until"]),
        )
        purges.append(purge)
    return PurgePage(
        purges=purges,
        position=position,
    )


def newest_purge(redis: Redis) -> str:
    """Return the position after the newest purge. Raises redis.exceptions.RedisError."""
    newest: Any = redis.xrevrange(PURGES, count=1)
    for entry_id, _ in newest:
        return str(entry_id)
    return BEGINNING


# Waiting messages, all or those of a run. They are removed together with the records that their
# posts were sent: otherwise sending their file again would skip them. Messages that workers hold
# are in flight and stay.


def clear(redis: Redis, settings: Settings) -> Counts:
    """Remove the messages that wait in the queue. Raises redis.exceptions.RedisError."""
    queues = [settings.queue]
    messages, posts = _remove_waiting(redis, queues, lambda _, __: True)
    return Counts(
        messages=messages,
        posts=posts,
    )


def purge_run(redis: Redis, settings: Settings, run: str) -> Counts:
    """Delete everything stored about the posts of one run, without blocking their ids.

    A purge by id deletes and blocks an id in every run. Here, other runs keep their posts, and the
    file can be sent again. Only results that are still in the results stream name their run;
    earlier ones expire after `results_ttl`. Idempotent; a failed purge can be repeated. Raises
    redis.exceptions.RedisError.
    """

    def is_of_run(count: int, readable_runs: Sequence[str]) -> bool:
        are_readable = len(readable_runs) == count
        return are_readable and set(readable_runs) == {run}

    # Before the results, so that no worker receives one of the posts any more.
    queues = model_routing.queues(redis, settings)
    messages, posts = _remove_waiting(redis, queues, is_of_run)
    progress = runs.progress(redis, run)
    results = sweep_run(redis, RESULTS_STREAM, run)
    letters = sweep_run(redis, DEAD_LETTERS, run)
    call(redis, "forget_run", run, TOMBSTONE_TTL_S)
    outside = 0
    if progress:
        outside = max(0, progress.stored - results)
    return Counts(
        results=results,
        dead_letters=letters,
        messages=messages,
        waiting=posts,
        outside=outside,
    )


def clean_run(
    redis: Redis,
    settings: Settings,
    run: str,
    further_lists: Collection[str] = (),
) -> Counts:
    """Delete everything stored about a run, its posts in messages with posts of other runs and in
    messages that workers hold included.

    Workers can still store results of the messages that they hold: see `held_of_run`.
    further_lists: as for `purge_posts`. Raises redis.exceptions.RedisError.
    """
    counts = purge_run(redis, settings, run)
    queues = model_routing.queues(redis, settings)
    lists = [*_lists_of(queues), *further_lists]
    cleaned = _change_messages(
        redis, lists, lambda message: stored_messages.without_run(message, run)
    )
    counts["messages"] += cleaned.changed
    return counts


def held_of_run(redis: Any, run: str) -> set[bytes]:
    """Return the tags of the messages with posts of a run that workers hold now.

    Raises redis.exceptions.RedisError.
    """
    tags = set()
    for _, message, tag in _in_hash(redis, TRANSPORT_KEYS["reserved_key"]):
        try:
            redacted = stored_messages.without_run(message, run)
        except UnreadableError:
            continue
        if redacted is not None:
            tags.add(tag)
    return tags


def are_held(redis: Any, tags: Iterable[bytes]) -> bool:
    """Return whether workers still hold one of these messages. Raises
    redis.exceptions.RedisError.
    """
    key = TRANSPORT_KEYS["reserved_key"]
    return any(redis.hexists(key, tag) for tag in tags)


def _remove_waiting(
    redis: Any, queues: Collection[str], removes: Callable[[int, Sequence[str]], bool]
) -> tuple[int, int]:
    """Remove waiting messages, each together with the sent records of its posts, unless a
    worker has taken it meanwhile.

    removes: decides on a message by the number of its posts and the runs of those that are
    readable. Return the numbers of removed messages and of their posts.
    """
    messages = 0
    posts = 0
    for name in _lists_of(queues):
        start = 0
        while batch := read_list(redis, name, start):
            skipped = 0
            removed = 0
            for message in batch:
                count, readable_posts = _posts_in(message)
                if not removes(count, [run for _, run in readable_posts]):
                    skipped += 1
                    continue
                post_list = json.dumps(readable_posts)
                was_waiting = call(redis, "remove_waiting", name, message, post_list)
                # Other messages were taken or changed meanwhile.
                if was_waiting:
                    removed += 1
                    posts += count
            messages += removed
            start += skipped
            if not skipped and not removed:
                start += len(batch)
    delayed_messages, delayed_posts = _remove_delayed(redis, queues, removes)
    return messages + delayed_messages, posts + delayed_posts


def _remove_delayed(
    redis: Any, queues: Collection[str], removes: Callable[[int, Sequence[str]], bool]
) -> tuple[int, int]:
    """Remove messages of these queues that are due later: see `_remove_waiting`."""
    lists = set(_lists_of(queues))
    messages = 0
    posts = 0
    key = TRANSPORT_KEYS["delayed_key"]
    index_key = TRANSPORT_KEYS["delayed_index_key"]
    for tag, message in list(scan_hash(redis, key, MESSAGES_AT_ONCE)):
        _, _, list_name = tag.decode(errors="replace").partition(" ")
        if list_name not in lists:
            continue
        count, readable_posts = _posts_in(message)
        if not removes(count, [run for _, run in readable_posts]):
            continue
        post_list = json.dumps(readable_posts)
        if call(redis, "remove_delayed", key, index_key, tag, message, post_list):
            messages += 1
            posts += count
    return messages, posts


def _posts_in(message: bytes) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of posts in a message, and id and run of each readable one.

    Other messages have no posts.
    """
    try:
        posts = stored_messages.posts_in(message)
    except UnreadableError:
        return 0, []
    return len(posts), [(post.id, post.run or "") for post in posts if post]
