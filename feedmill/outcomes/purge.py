"""Purge posts, runs and queues: what `feedmill purge` and `feedmill.purge` do.

shared/purge.py deletes; this module chooses what, counts it, and finds the ids that were probably
meant by those that matched nothing.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from redis import Redis

from feedmill.outcomes.post_forms import other_forms
from feedmill.outcomes.rows import unknown_run
from feedmill.producers.push import known_ids
from feedmill.shared import runs
from feedmill.shared.broker import connect, queue_depth
from feedmill.shared.errors import UserError, truncate
from feedmill.shared.messages import parse_run
from feedmill.shared.model_routing import check_queue
from feedmill.shared.purge import (
    PurgedPosts,
    clear,
    lift_tombstones,
    purge_posts,
    purge_run,
    valid_ids,
)
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings, load_arguments

#: Ids that matched nothing for which similar ids are looked up.
MAX_LOOKED_UP = 100


class Purged(NamedTuple):
    """The outcome of a purge.

    Attributes:
        counts: Numbers of removed items by name, as `feedmill purge --json` prints them
            (docs/reference/json.md).
        unmatched: Ids of posts about which nothing was stored. They are blocked as well.
        similar: Ids of stored posts that were probably meant by these.
    """

    counts: dict[str, int]
    unmatched: list[str]
    similar: list[str]


def count_posts(posts: Sequence[str], outcome: PurgedPosts) -> dict[str, int]:
    """Return the numbers of a purge of posts."""
    return {
        "posts": len(posts),
        **outcome.counts,
        "unmatched": len(outcome.unmatched),
        "unreadable": outcome.unreadable,
    }


def similar_ids(redis: Redis, ids: Sequence[str]) -> list[str]:
    """Return the ids of stored posts that were probably meant by ids that matched nothing."""
    candidates: list[str] = []
    for post_id in ids[:MAX_LOOKED_UP]:
        candidates.extend(other_forms(post_id))
    unique_candidates = list(dict.fromkeys(candidates))
    stored_ids = known_ids(redis, unique_candidates)
    return [post_id for post_id in unique_candidates if post_id in stored_ids]


def purge_known_run(redis: Redis, settings: Settings, run: str) -> dict[str, int]:
    """Delete what is stored about a run; return the numbers of removed items.

    Raises UserError if there is no such run.
    """
    progress = runs.progress(redis, run)
    counts = purge_run(redis, settings, run)
    removed = counts.total()
    if progress is None and removed == 0:
        message = unknown_run(redis, run)
        raise UserError(message)
    return counts


def clear_queue(redis: Redis, settings: Settings) -> dict[str, int]:
    """Remove the messages that wait in the queue of the settings; return their numbers, and how
    many messages workers hold.

    Raises UserError if there is no such queue.
    """
    count_waiting(redis, settings)
    counts = clear(redis, settings)
    depth = queue_depth(redis, settings.queue)
    return {**counts, "held": depth.held}


def count_waiting(redis: Redis, settings: Settings) -> int:
    """Return the number of messages that wait in the queue of the settings.

    Raises UserError if there is no such queue.
    """
    queue = settings.queue
    waiting = queue_depth(redis, queue).waiting
    if not waiting:
        check_queue(redis, queue)
    return waiting


def purge(
    *ids: str,
    run: str | None = None,
    queue: str | None = None,
    lift: bool = False,
    redis_url: str | None = None,
) -> Purged:
    """Delete everything stored about posts, and block them from being ingested again for a year;
    or about a run; or remove the messages that wait in a queue. Does not ask.

    A purge can be repeated. docs/messages.md says what is deleted, and what is not.

    Args:
        ids: Ids of posts.
        run: Delete what is stored about this run instead. Its posts can be sent again.
        queue: Remove the messages that no worker has taken from this queue instead. Their posts
            can be sent again.
        lift: Unblock the posts; deletes and restores nothing.
        redis_url: URL of Redis. Default: FEEDMILL_REDIS_URL, else the running `feedmill up`, else
            localhost.

    Returns:
        Purged: the numbers of removed items, and the ids that matched nothing.

    Raises:
        feedmill.UserError: Unless exactly one of ids, run and queue is given; for an invalid id,
            an unknown run or queue; or if Redis cannot be reached.

    Example:
        >>> import feedmill
        >>> feedmill.purge("t3_1abc", "t3_1abd").counts["results"]
        2
    """
    subjects = [
        bool(ids),
        run is not None,
        queue is not None,
    ]
    if subjects.count(True) != 1:
        raise UserError("Give exactly one of: ids of posts, run, queue.")
    if lift and not ids:
        raise UserError("lift needs ids of posts.")
    for post_id in ids:
        if not isinstance(post_id, str):
            raise UserError(
                f"An id must be text, not {truncate(repr(post_id))}. Pass several ids as "
                "arguments of their own, such as purge(*ids)."
            )
    if run is not None:
        run = parse_run(run)
    settings = load_arguments(redis_url=redis_url, queue=queue)
    with user_errors(settings), closing(connect(settings)) as redis:
        if run is not None:
            counts = purge_known_run(redis, settings, run)
            return Purged(counts=dict(counts), unmatched=[], similar=[])
        if queue is not None:
            counts = clear_queue(redis, settings)
            return Purged(counts=counts, unmatched=[], similar=[])
        posts = valid_ids(ids)
        if lift:
            lifted = lift_tombstones(redis, posts)
            counts = {"posts": len(posts), "lifted": lifted}
            return Purged(counts=counts, unmatched=[], similar=[])
        outcome = purge_posts(redis, settings, posts)
        return Purged(
            counts=count_posts(posts, outcome),
            unmatched=outcome.unmatched,
            similar=similar_ids(redis, outcome.unmatched),
        )
