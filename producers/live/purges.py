"""Purge the posts that were deleted at a live source.

A purge reads the whole results stream and every message in the queue, so deletions are collected for half a minute.
Only posts that were sent are purged: a tombstone for every deleted post of a network would fill Redis.
"""

import logging
from collections.abc import Collection
from typing import Any

from redis import Redis

from producers.live.clock import Clock
from producers.live.state import LiveState
from shared.keys import result_key, sent_key
from shared.purge import IDS_AT_ONCE, SCAN_COUNT, purge
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between purges of deleted posts; and between searches for the posts of deleted accounts, each of which reads
#: the names of all keys in Redis.
PURGE_INTERVAL_S, AUTHORS_INTERVAL_S = 30.0, 600.0
#: Share of the time that purges may take: in a large Redis they become rarer.
MAX_SHARE = 0.1


class Purges:
    """Collect deletions and purge the posts. `purged`: number of posts since the start."""

    def __init__(self, redis: Redis, settings: Settings, state: LiveState, clock: Clock) -> None:
        self._redis = redis
        self._settings = settings
        self._state = state
        self._clock = clock
        self._due = self._authors_due = clock.monotonic()  # a killed daemon may have left some
        self.purged = 0

    def add(self, ids: Collection[str], authors: Collection[str]) -> None:
        """Remember deleted posts and authors. Call it after the posts before their deletion were sent."""
        self._state.add_deletions(self._known(sorted(ids)), authors)

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
            self._purge(sorted(self._state.deleted()))
            took = self._clock.monotonic() - began
            self._due = began + max(PURGE_INTERVAL_S, took / MAX_SHARE)

    def _known(self, ids: list[str]) -> list[str]:
        """Return the ids of posts that were sent or have results."""
        pipe: Any = self._redis.pipeline(transaction=False)
        for post_id in ids:
            pipe.exists(sent_key(post_id), result_key(post_id))
        return [post_id for post_id, count in zip(ids, pipe.execute(), strict=True) if count]

    def _purge(self, ids: list[str]) -> None:
        for start in range(0, len(ids), IDS_AT_ONCE):
            batch = ids[start : start + IDS_AT_ONCE]
            purge(self._redis, self._settings, batch)
            self._state.forget_deleted(batch)
            self.purged += len(batch)
            logger.info("purged %d posts that were deleted at their source", len(batch))

    def _find_posts_of_authors(self) -> None:
        """Add all sent posts of deleted accounts to the posts to purge."""
        if not (authors := self._state.deleted_authors()):
            return
        prefix = sent_key("")
        found = [
            post_id
            for key in self._redis.scan_iter(match=f"{prefix}*", count=SCAN_COUNT)
            if (post_id := str(key).removeprefix(prefix))[: post_id.rfind("/") + 1] in authors
        ]
        self._state.add_deletions(found, ())
        self._state.forget_authors(authors)
