"""Remove waiting messages, all or those of a run, and forget that their posts were sent.

Otherwise the removed posts would be lost: sending their file again would skip them. Messages that workers hold are in
flight and stay.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared import encoding, model_routing, runs
from feedmill.shared.broker import CLASSIFY_TASK, queue_lists
from feedmill.shared.keys import DEAD_LETTERS, RESULTS_STREAM
from feedmill.shared.messages import Post, parse_posts
from feedmill.shared.purge import TOMBSTONE_TTL_S, read_list, sweep_run
from feedmill.shared.scripts import call
from feedmill.shared.settings import Settings


class Cleared(NamedTuple):
    """Numbers of removed messages and of the posts in them."""

    messages: int = 0
    posts: int = 0


class RunPurged(NamedTuple):
    """Numbers of what a purge of a run removed."""

    results: int = 0
    dead_letters: int = 0
    #: Removed messages, and the posts that waited in them.
    messages: int = 0
    waiting: int = 0
    #: Results that were counted but are no longer in the stream: they remain until they expire.
    outside: int = 0


def clear(redis: Redis, settings: Settings) -> Cleared:
    """Remove the messages that wait in the queue. Raises redis.exceptions.RedisError."""
    return _remove_waiting(redis, settings.queue, lambda _, __: True)


def purge_run(redis: Redis, settings: Settings, run: str) -> RunPurged:
    """Delete everything stored about the posts of one run, without blocking their ids.

    A purge by id (shared/purge.py) deletes and blocks an id in every run. Here, other runs keep their posts, and the
    file can be sent again. Only results that are still in the results stream name their run; earlier ones expire after
    `results_ttl`. Idempotent; a failed purge can be repeated. Raises redis.exceptions.RedisError.
    """
    queues = model_routing.queues(redis, settings)
    # Before the results, so that no worker receives one of the posts any more.
    removed = [
        _remove_waiting(redis, queue, lambda count, named: 0 < count == len(named) and {*named} == {run})
        for queue in queues
    ]
    known = runs.progress(redis, run)
    results = sweep_run(redis, RESULTS_STREAM, run)
    letters = sweep_run(redis, DEAD_LETTERS, run)
    call(redis, "forget_run", run, TOMBSTONE_TTL_S)
    messages, posts = map(sum, zip(*removed, strict=True))
    return RunPurged(results, letters, messages, posts, max(0, known.stored - results) if known else 0)


def _remove_waiting(redis: Any, queue: str, removes: Callable[[int, Sequence[str]], bool]) -> Cleared:
    """Remove waiting messages, each together with the marks of its posts, and only if no worker has taken it meanwhile.

    removes: decides on a message by the number of its posts and the runs of those that are readable.
    """
    messages = posts = 0
    for name in queue_lists(queue):
        start = 0
        # Newest first: new messages shift the others towards the part not yet read.
        while read := read_list(redis, name, start):
            before = start, messages
            for message in read:
                count, found = _posts_in(message)
                if not removes(count, [run for _, run in found]):
                    start += 1
                elif call(redis, "remove_waiting", name, message, json.dumps(found)):  # else it is gone: read again
                    messages, posts = messages + 1, posts + count
            if (start, messages) == before:
                start += len(read)
    return Cleared(messages, posts)


def _posts_in(message: bytes) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of posts in a message, and id and run of each readable one. Other messages have no posts."""
    try:
        raw = _arguments(message)["posts"]
        posts = parse_posts(raw) if isinstance(raw, list) else []
    except (ValueError, zlib.error, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        return 0, []
    return len(posts), [(post.id, post.run or "") for post in posts if isinstance(post, Post)]


def _arguments(message: bytes) -> dict[str, Any]:
    """Return the keyword arguments of a classification that a producer sent. Raises the errors of a bad message."""
    found = json.loads(message)
    if found["headers"]["task"] != CLASSIFY_TASK:
        raise ValueError(found["headers"]["task"])
    args, kwargs, _ = encoding.stored_body(found)
    return dict(kwargs) | ({"posts": args[0]} if args else {})
