"""Remove waiting messages, all or those of a run, and forget that their posts were sent.

Otherwise the removed posts would be lost: sending their file again would skip them. Messages that workers hold are in
flight and stay.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.push import mark_of, send_scope
from feedmill.shared import encoding, model_routing, runs
from feedmill.shared.broker import CLASSIFY_TASK, queue_lists
from feedmill.shared.errors import PostRefused, RequestRefused
from feedmill.shared.keys import DEAD_LETTERS, RESULTS_STREAM
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.purge import TOMBSTONE_TTL_S, read_list, sweep_run
from feedmill.shared.scripts import call
from feedmill.shared.scripts.queue import Mark
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
    weights = model_routing.deployed_weights(redis, queue)
    for name in queue_lists(queue):
        start = 0
        # Newest first: new messages shift the others towards the part not yet read.
        while read := read_list(redis, name, start):
            before = start, messages
            for message in read:
                count, marks = marks_in(message, queue, weights)
                if not removes(count, [run for _, run in marks]):
                    start += 1
                elif call(redis, "remove_waiting", name, message, _sent(marks)):  # else it is gone: read again
                    messages, posts = messages + 1, posts + count
            if (start, messages) == before:
                start += len(read)
    return Cleared(messages, posts)


def _sent(marks: Sequence[tuple[Sequence[Mark], str]]) -> str:
    """Return each post's possible marks, of which the first that exists is removed, and its run, as JSON."""
    return json.dumps([([mark.content.hex() for mark in found], run) for found, run in marks])


def marks_in(message: bytes, queue: str, weights: str) -> tuple[int, list[tuple[list[Mark], str]]]:
    """Return the number of posts in a message, and each readable post's possible marks and run.

    A post can have been sent before the weights were deployed, so that it has either of two marks. weights: see
    `send_scope`. Other messages have no posts.
    """
    try:
        arguments = _arguments(message)
        raw = arguments.pop("posts")
        options = ClassifyOptions.parse(arguments)
    except (ValueError, zlib.error, AttributeError, KeyError, TypeError, IndexError, RecursionError, RequestRefused):
        return 0, []
    if not isinstance(raw, list):
        return 0, []
    purposes = [send_scope(queue, options, each) for each in dict.fromkeys((weights, ""))]
    marks = []
    for each in raw:
        try:
            post = Post.parse(each)
        except PostRefused:
            continue
        marks.append(([mark_of(post, purpose) for purpose in purposes], post.run or ""))
    return len(raw), marks


def _arguments(message: bytes) -> dict[str, Any]:
    """Return the keyword arguments of a classification that a producer sent. Raises the errors of a bad message."""
    found = json.loads(message)
    if found["headers"]["task"] != CLASSIFY_TASK:
        raise ValueError(found["headers"]["task"])
    args, kwargs, _ = encoding.stored_body(found)
    return dict(kwargs) | ({"posts": args[0]} if args else {})
