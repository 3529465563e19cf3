"""Purge the posts whose deletion a live source reports.

A purge reads the whole results stream and every message in the queue, so deletions are collected for half a minute.
Only posts that were sent are purged: a tombstone for every deleted post of a network would fill Redis.

Posts of a deleted account are found by their ids, wherever Redis has posts: in messages, results and streams. The
search is repeated for a day, because it can miss posts that move from one place to another meanwhile.
"""

import logging
from collections.abc import Collection
from itertools import chain
from typing import Any

from feedmill.producers.live.source import Clock
from feedmill.producers.push import known_ids
from feedmill.shared import model_routing
from feedmill.shared.keys import DEAD_LETTERS, LIVE_AUTHORS, LIVE_DELETED, RESULTS_STREAM
from feedmill.shared.messages import MAX_ID
from feedmill.shared.purge import IDS_AT_ONCE, find_entries, ids_in_messages, purge
from feedmill.shared.results import stored_ids
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between purges of deleted posts; and between searches for the posts of deleted accounts, each of which reads
#: everything that Redis stores about posts.
PURGE_INTERVAL_S, AUTHORS_INTERVAL_S = 30.0, 600.0
#: Seconds for which the posts of a deleted account are searched for.
AUTHOR_KEPT_S = 86_400.0
#: Share of the time that purges may take: in a large Redis they become rarer.
MAX_SHARE = 0.1


class Purges:
    """Collect deletions and purge the posts. `purged`: number of posts since the start."""

    def __init__(self, redis: Any, settings: Settings, source: str, clock: Clock) -> None:
        self._redis = redis
        self._settings = settings
        #: Keys of the posts that are not purged yet, and of the accounts, scored by the time of deletion.
        self._deleted, self._authors = LIVE_DELETED + source, LIVE_AUTHORS + source
        self._clock = clock
        self._due = self._authors_due = clock.monotonic()  # a killed daemon may have left some
        self.purged = 0

    def add(self, ids: Collection[str], authors: set[str], written: Collection[str]) -> None:
        """Remember deleted posts and accounts. Call it after the posts before their deletion were sent.

        authors: deleted accounts. written: ids of posts that were sent since; they stay.
        """
        if written:
            self._redis.srem(self._deleted, *written)
        if ids and (known := known_ids(self._redis, sorted(ids))):
            self._redis.sadd(self._deleted, *known)
        if writers := {author_of(post_id) for post_id in written} - authors:
            self._redis.zrem(self._authors, *writers)
        if authors:
            self._redis.zadd(self._authors, dict.fromkeys(authors, self._clock.time()))

    def run_if_due(self) -> None:
        """Purge what has been collected, if it is time. Raises redis.exceptions.RedisError; nothing is lost then."""
        began = self._clock.monotonic()
        if began >= self._authors_due:
            self._find_posts_of_authors()
            took = self._clock.monotonic() - began
            self._authors_due = began + max(AUTHORS_INTERVAL_S, took / MAX_SHARE)
            self._due = min(self._due, self._clock.monotonic())
        began = self._clock.monotonic()
        if began >= self._due:
            self._purge(sorted(self._redis.smembers(self._deleted)))
            took = self._clock.monotonic() - began
            self._due = began + max(PURGE_INTERVAL_S, took / MAX_SHARE)

    def _purge(self, ids: list[str]) -> None:
        for start in range(0, len(ids), IDS_AT_ONCE):
            batch = ids[start : start + IDS_AT_ONCE]
            purge(self._redis, self._settings, batch)
            self._redis.srem(self._deleted, *batch)
            self.purged += len(batch)
            logger.info("purged %d posts that were deleted at their source", len(batch))

    def _find_posts_of_authors(self) -> None:
        """Add all posts of deleted accounts to the posts to purge."""
        self._redis.zremrangebyscore(self._authors, "-inf", f"({self._clock.time() - AUTHOR_KEPT_S}")
        if not (authors := set(self._redis.zrange(self._authors, 0, -1))):
            return
        # Messages first: their posts move to the results.
        queues = model_routing.queues(self._redis, self._settings)
        ids = chain(ids_in_messages(self._redis, queues), stored_ids(self._redis))
        # Another application's message may have an id that no post has.
        found = {post_id for post_id in ids if len(post_id) <= MAX_ID and author_of(post_id) in authors}
        for stream in (RESULTS_STREAM, DEAD_LETTERS):
            parts = find_entries(self._redis, stream, "author", authors)
            found.update(entry.post_id for part in parts for entry in part)
        if found:
            self._redis.sadd(self._deleted, *found)


def author_of(post_id: str) -> str:
    """Return the beginning of an id that names the post's author; "" if there is none."""
    return post_id[: post_id.rfind("/") + 1]
