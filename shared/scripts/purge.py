"""Functions for purging posts and runs: set tombstones, delete stream entries, and replace unchanged values."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from redis import Redis

from feedmill.shared.scripts import as_text, call
from feedmill.shared.settings import DAY_S

#: Seconds for which tombstones block purged posts: longer than feeds and dumps repeat them.
TOMBSTONE_TTL_S = 365 * DAY_S
#: Bytes of entries that one call reads. Takes a few milliseconds, during which Redis is blocked.
SWEEP_BYTES = 2**18
#: Purges that the log keeps, as in shared/scripts/purge.lua.
MAX_PURGES = 4000


def lift(redis: Redis, times: Mapping[str, int]) -> list[int]:
    """Remove tombstones that are of these times; return 1 for each post that has none then, else 0."""
    found: list[int] = call(redis, "lift", *(part for post in times.items() for part in post))
    return found


def set_tombstones(redis: Redis, posts: Sequence[str], at: int) -> None:
    """Set the tombstones of posts, and log the purge. at: seconds since 1970."""
    call(redis, "set_tombstones", at, TOMBSTONE_TTL_S, json.dumps(posts))


def sweep(redis: Redis, stream: str, posts: Sequence[str]) -> int:
    """Delete the posts' entries from a stream, and return the number of them."""
    return sum(_walk(redis, "purge", stream, json.dumps(posts)))


def sweep_run(redis: Redis, stream: str, run: str) -> int:
    """Delete a run's entries from the stream of results or dead letters, with their results and marks; return their
    number.
    """
    return sum(_walk(redis, "purge_run", stream, run))


def find_authors(redis: Redis, stream: str, authors: Collection[str]) -> set[str]:
    """Return the ids of these authors' posts in a stream. authors: beginnings of ids, up to the last slash."""
    return {
        as_text(post) for posts in _walk(redis, "find_authors", stream, json.dumps(list(authors))) for post in posts
    }


def _walk(redis: Redis, name: str, stream: str, wanted: str) -> Iterator[Any]:
    """Call a function until it has read a whole stream, and yield its answers."""
    start = "-"
    while start:
        following, answer = call(redis, name, stream, start, SWEEP_BYTES, wanted)
        start = as_text(following)
        yield answer


def forget_run(redis: Redis, run: str, queues: Sequence[str]) -> None:
    """Delete the counters of a run, log its purge, and make saved positions void for files sent to these queues."""
    call(redis, "forget_run", run, TOMBSTONE_TTL_S, *queues)


def remove_retried(redis: Redis, entry: str, run: str) -> None:
    """Remove a dead letter whose post was sent again, and subtract it from its run's failures."""
    call(redis, "remove_retried", entry, run)


def replace(redis: Redis, key: str | bytes, before: str | bytes, after: str | bytes, field: str | bytes = b"") -> bool:
    """Replace an item of a list, a string, or the value of a hash's field, if it is unchanged. Keeps the key's TTL."""
    return bool(call(redis, "replace", key, before, after, field))
