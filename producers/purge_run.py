"""Delete everything stored about the posts of one run, without blocking their ids.

A purge by id (shared/purge.py) deletes and blocks an id in every run. Here, other runs keep their posts, and the file
can be sent again. Messages that a worker holds are in flight and stay.

Limits: only results that are still in the results stream name their run. Earlier ones expire after `results_ttl`.
"""

from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.producers.clear import marks_in
from feedmill.shared import model_routing, runs
from feedmill.shared.broker import queue_lists
from feedmill.shared.keys import DEAD_LETTERS, RESULTS_STREAM
from feedmill.shared.queue_redaction import MESSAGES_AT_ONCE
from feedmill.shared.scripts import purge as scripts
from feedmill.shared.scripts import queue as queue_scripts
from feedmill.shared.settings import Settings


class RunPurged(NamedTuple):
    """Numbers of what a purge of a run removed."""

    results: int = 0
    dead_letters: int = 0
    #: Removed messages, and the posts that waited in them.
    messages: int = 0
    waiting: int = 0
    #: Results that were counted but are no longer in the stream: they remain until they expire.
    outside: int = 0


def purge_run(redis: Redis, settings: Settings, run: str) -> RunPurged:
    """Delete a run's waiting posts, results, dead letters, marks and progress. Raises redis.exceptions.RedisError.

    Idempotent; a failed purge can be repeated.
    """
    queues = model_routing.queues(redis, settings)
    messages = posts = 0
    for queue in queues:  # before the results, so that no worker receives one of the posts any more
        more, fewer = _remove_waiting(redis, settings.model_copy(update={"queue": queue}), run)
        messages, posts = messages + more, posts + fewer
    known = runs.progress(redis, run)
    results = scripts.sweep_run(redis, RESULTS_STREAM, run)
    letters = scripts.sweep_run(redis, DEAD_LETTERS, run)
    scripts.forget_run(redis, run, queues, settings.tombstone_ttl)
    return RunPurged(results, letters, messages, posts, max(0, known.stored - results) if known else 0)


def _remove_waiting(redis: Any, settings: Settings, run: str) -> tuple[int, int]:
    """Remove the waiting messages whose posts are all of this run. Return the numbers of messages and posts."""
    messages = posts = 0
    weights = model_routing.deployed_weights(redis, settings.queue)
    for name in queue_lists(settings.queue):
        start = 0
        # Newest first: new messages shift the others towards the part not yet read.
        while read := redis.execute_command(
            "LRANGE", name, start, start + MESSAGES_AT_ONCE - 1, **{NEVER_DECODE: True}
        ):
            for message in read:
                count, marks = marks_in(message, settings.queue, weights)
                is_of_run = 0 < count == len(marks) and all(of == run for _, of in marks)
                if is_of_run and queue_scripts.remove_waiting(redis, settings.queue, name, message, marks):
                    messages, posts = messages + 1, posts + count
                else:
                    start += 1
    return messages, posts
