"""Keep sent posts up to date: purge those whose deletion a source reports, and recheck those of other sources.

Rechecks refresh scores, send edited posts again, and purge deleted ones. A removal by moderators or filters is not a
deletion: many removed posts are approved later. Nor is a missing post: a subreddit that is private for a day takes all
its posts with it. These posts wait before they are purged, and are rechecked afterwards, so that a post that comes back
is sent again. Every recheck ends with its post's next one, so that posts that the source does not return never hold up
the others.

A purge reads the whole results stream and every message in the queue, so reported deletions are collected for half a
minute. Only posts that were sent are purged: a tombstone for every deleted post of a network would fill Redis. Posts of
a deleted account are found by their ids, wherever Redis has posts: in messages, results and streams. The search is
repeated for a day, because it can miss posts that move from one place to another meanwhile.
"""

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from feedmill.producers.live.source import Clock, Event, RequestFailed, Source
from feedmill.producers.push import Pusher, known_ids
from feedmill.shared import model_routing
from feedmill.shared.errors import PostRefused
from feedmill.shared.keys import DEAD_LETTERS, LIVE_AUTHORS, LIVE_DELETED, LIVE_RECHECKS, RESULTS_STREAM
from feedmill.shared.messages import MAX_ID, Post, digest
from feedmill.shared.purge import IDS_AT_ONCE, find_entries, ids_in_messages, lift_matching, purge, tombstones
from feedmill.shared.results import ResultsStore, stored_ids
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Posts per look-up, and seconds between two look-ups: while more posts are due, and otherwise.
POSTS_AT_ONCE, BUSY_INTERVAL_S, POLL_INTERVAL_S = 100, 5.0, 60.0
#: Maximum seconds that a look-up waits for the source's next request. In a longer pause, the daemon does other things.
MAX_REQUEST_WAIT_S = 5.0
#: Seconds until posts are rechecked whose request failed.
FAILED_RETRY_S = 600.0
#: Seconds between rechecks of a post that was removed or is missing.
WAITING_RETRY_S = 6 * 3600.0
#: Seconds until such a post is purged. Most removed posts that come back do so within a day.
REMOVED_PATIENCE_S, MISSING_PATIENCE_S = 86_400.0, 2 * 86_400.0
#: Seconds from the purge of such a post to its next recheck, and between the following ones.
RETURN_PAUSES_S = (86_400.0, 2 * 86_400.0, 4 * 86_400.0, 7 * 86_400.0)
#: Lifetime of due rechecks, in seconds, while no daemon runs. Longer than the longest delay of a recheck.
RECHECKS_TTL = 30 * 86_400


class Recheck(NamedTuple):
    """A scheduled recheck of a post.

    text: digest of the text that was sent; "" if none was. stage: index into the delays. missing_since: when the post
    was first found removed or missing; purged_at: time of its tombstone, if it was purged and may come back; both in
    seconds since 1970, or 0. is_purging: its purge has begun, and the time of its tombstone is not known yet.
    """

    post_id: str
    text: str
    stage: int = 0
    missing_since: int = 0
    purged_at: int = 0
    is_purging: bool = False


class Rechecks:
    """Schedule and run the rechecks of one source."""

    def __init__(self, source: Source, redis: Any, settings: Settings, pusher: Pusher, clock: Clock) -> None:
        self._source = source
        self._redis = redis
        self._settings = settings
        self._store = ResultsStore(redis, settings)
        self._pusher = pusher
        self._clock = clock
        self._key = LIVE_RECHECKS + source.name
        self._due = clock.monotonic()
        #: Posts rechecked, purged, and sent again because they came back, since the start.
        self.rechecked = self.purged = self.returned = 0

    def schedule(self, posts: Iterable[Post], removed: Iterable[str] = ()) -> None:
        """Schedule the first recheck of posts that were never sent, and of posts removed before they could be.

        Call it before sending the posts: after a crash in between, it is called again.
        """
        texts = dict.fromkeys(removed, "") | {post.id: _digest(post) for post in posts}
        if not texts or not self._source.recheck_delays:
            return
        known = known_ids(self._redis, list(texts))
        due = self._clock.time() + self._source.recheck_delays[0]
        self._finish((), {Recheck(*text): due for text in texts.items() if text[0] not in known}, nx=True)

    def pending(self) -> float:
        """Return the seconds until rechecks may run; infinite if the source has none."""
        if not self._source.recheck_delays:
            return math.inf
        asked = self._source.pending()
        # A source that catches up takes each request as soon as it is allowed: rechecks wait for one in turn.
        return max(0.0, self._due - self._clock.monotonic(), asked if asked > MAX_REQUEST_WAIT_S else 0.0)

    def run_if_due(self) -> None:
        """Recheck some posts, if it is time and the source may be asked. Raises as `run`."""
        if not self.pending():
            began = self._clock.monotonic()
            self._due = began + POLL_INTERVAL_S
            if self.run():
                self._due = began + BUSY_INTERVAL_S

    def run(self) -> bool:
        """Recheck up to a hundred due posts; return whether there were so many.

        Raises SourceFailed and redis.exceptions.RedisError. After a failed request, its posts are rechecked after the
        others.
        """
        now = self._clock.time()
        members = self._redis.zrange(self._key, "-inf", now, byscore=True, offset=0, num=POSTS_AT_ONCE)
        found_due = [Recheck(*json.loads(member)) for member in members]
        self._purge((), [recheck for recheck in found_due if recheck.is_purging])
        if rechecks := [recheck for recheck in found_due if not recheck.is_purging]:
            try:
                found = self._source.look_up([recheck.post_id for recheck in rechecks])
            except RequestFailed:
                self._finish(rechecks, dict.fromkeys(rechecks, now + FAILED_RETRY_S))
                raise
            self._settle(rechecks, found)
            self.rechecked += len(rechecks)
        return len(members) == POSTS_AT_ONCE

    def _settle(self, rechecks: Sequence[Recheck], found: Mapping[str, Event]) -> None:
        """Act on the posts that were found, and schedule their next rechecks."""
        posts = {post_id: post for post_id, event in found.items() if (post := _post_of(event))}
        scores = {post_id: post.score for post_id, post in posts.items() if post.score is not None}
        self._store.refresh_scores(scores, self._clock.time())
        deleted = [each for each in rechecks if each.post_id in found and found[each.post_id].deleted]
        hidden = [each for each in rechecks if each.post_id not in found or found[each.post_id].removed]
        shown = [each for each in rechecks if each not in deleted and each not in hidden]
        again: dict[Recheck, float] = {}
        self._purge(deleted, self._wait(hidden, found, again))
        # Finished only when the posts are in the queue: after a crash, the recheck is repeated.
        self._pusher.push(self._resume(shown, posts, again))
        self._finish(rechecks, again)

    def _wait(self, hidden: Iterable[Recheck], found: Collection[str], again: dict[Recheck, float]) -> list[Recheck]:
        """Schedule the next recheck of removed and missing posts. Return those that must be purged now."""
        now = self._clock.time()
        overdue = []
        for recheck in hidden:
            is_removed = recheck.post_id in found
            since = recheck.missing_since or int(now)
            if recheck.purged_at:
                if (stage := recheck.stage + 1) < len(RETURN_PAUSES_S):
                    again[recheck._replace(stage=stage)] = now + RETURN_PAUSES_S[stage]
            elif is_removed and not recheck.text:
                continue  # nothing was sent
            elif now - since >= (REMOVED_PATIENCE_S if is_removed else MISSING_PATIENCE_S):
                overdue.append(recheck)
            else:
                again[recheck._replace(missing_since=since)] = now + WAITING_RETRY_S
        return overdue

    def _purge(self, deleted: Sequence[Recheck], removed: Sequence[Recheck]) -> None:
        """Purge posts, and schedule rechecks of the removed ones, unless somebody purged them by hand."""
        if not (deleted or removed):
            return
        by_hand = tombstones(self._redis, [recheck.post_id for recheck in removed if not recheck.is_purging])
        # Noted first: after a crash during the purge, its tombstones are known to be ours.
        ours = [each._replace(is_purging=True) for each in removed if each.post_id not in by_hand]
        self._finish(removed, dict.fromkeys(ours, 0.0))
        purge(self._redis, self._settings, [recheck.post_id for recheck in (*deleted, *removed)])
        times = tombstones(self._redis, [recheck.post_id for recheck in ours])
        due = self._clock.time() + RETURN_PAUSES_S[0]
        self._finish((*deleted, *ours), {Recheck(post_id, "", purged_at=at): due for post_id, at in times.items()})
        self.purged += len(deleted) + len(removed)
        logger.info("purged %d posts that were deleted or removed at their source", len(deleted) + len(removed))

    def _resume(self, shown: Iterable[Recheck], posts: Mapping[str, Post], again: dict[Recheck, float]) -> list[Post]:
        """Schedule the next recheck of visible posts. Return those with a new text, or back after a purge."""
        now, delays = self._clock.time(), self._source.recheck_delays
        back = lift_matching(self._redis, {each.post_id: each.purged_at for each in shown if each.purged_at})
        self.returned += len(back)
        changed = []
        for recheck in shown:
            if recheck.purged_at and recheck.post_id not in back:
                continue
            post = posts.get(recheck.post_id)
            text = _digest(post) if post else ""
            stage = 0 if recheck.purged_at else recheck.stage + 1
            if stage < len(delays):
                again[Recheck(recheck.post_id, text, stage)] = now + delays[stage] - (delays[stage - 1] if stage else 0)
            if post and text != recheck.text:
                changed.append(post)
        return changed

    def _finish(self, done: Iterable[Recheck], again: Mapping[Recheck, float], nx: bool = False) -> None:
        """Remove finished rechecks, and schedule those in `again` at their times. nx: keep earlier times."""
        pipe: Any = self._redis.pipeline()
        if members := list(map(json.dumps, done)):
            pipe.zrem(self._key, *members)
        if later := {json.dumps(recheck): due for recheck, due in again.items()}:
            pipe.zadd(self._key, later, nx=nx)
            pipe.expire(self._key, RECHECKS_TTL)
        pipe.execute()


def _post_of(event: Event) -> Post | None:
    """Return the event's post; None if it has none, or one that cannot be classified."""
    try:
        return event.post if isinstance(event.post, Post) else Post.parse(dict(event.post)) if event.post else None
    except PostRefused:
        return None


def _digest(post: Post) -> str:
    """Return a short digest of the text to classify."""
    return digest(post.text)[:16]


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
