"""Keep sent posts up to date: purge those whose deletion a source reports, and recheck those of
other sources.

Rechecks refresh scores, send edited posts again, and purge deleted ones. A removal by moderators
or filters is not a deletion: many removed posts are approved later. Nor is a missing post: a
subreddit that is private for a day takes all its posts with it. These posts wait before they are
purged, and are rechecked afterwards, so that a post that comes back is sent again. Every recheck
ends with its post's next one, so that posts that the source does not return never hold up the
others.

A purge reads the whole results stream and every message in the queue, so reported deletions are
collected for half a minute. Only posts that were sent are purged: a tombstone for every deleted
post of a network would fill Redis. Posts of a deleted account are found by their ids, wherever
Redis has posts: in messages, results and streams. The search is repeated for a day, because it can
miss posts that move from one place to another meanwhile.
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from feedmill.producers.live.source import Clock, Event, RequestFailed, Source
from feedmill.producers.push import Pusher, known_ids
from feedmill.shared import model_routing
from feedmill.shared.errors import PostRefused
from feedmill.shared.keys import (
    DEAD_LETTERS,
    LIVE_AUTHORS,
    LIVE_DELETED,
    LIVE_RECHECKS,
    RESULTS_STREAM,
)
from feedmill.shared.messages import MAX_ID, Post, digest
from feedmill.shared.purge import (
    IDS_AT_ONCE,
    find_entries,
    ids_in_messages,
    lift_matching,
    purge,
    tombstones,
)
from feedmill.shared.results import ResultsStore, stored_ids
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Posts per look-up, and seconds between two look-ups: while more posts are due, and otherwise.
POSTS_AT_ONCE = 100
BUSY_INTERVAL_S = 5.0
POLL_INTERVAL_S = 60.0
#: Maximum seconds that a look-up waits for the source's next request. In a longer pause, the
#: daemon does other things.
MAX_REQUEST_WAIT_S = 5.0
#: Seconds until posts are rechecked whose request failed.
FAILED_RETRY_S = 600.0
#: Seconds between rechecks of a post that was removed or is missing.
WAITING_RETRY_S = 6 * 3600.0
#: Seconds until such a post is purged. Most removed posts that come back do so within a day.
REMOVED_PATIENCE_S = 86_400.0
MISSING_PATIENCE_S = 2 * 86_400.0
#: Seconds from the purge of such a post to its next recheck, and between the following ones.
RETURN_PAUSES_S = (86_400.0, 2 * 86_400.0, 4 * 86_400.0, 7 * 86_400.0)
#: Lifetime of due rechecks, in seconds, while no daemon runs. Longer than the longest delay of a
#: recheck.
RECHECKS_TTL = 30 * 86_400


class Recheck(NamedTuple):
    """A scheduled recheck of a post.

    text: digest of the text that was sent; "" if none was. stage: index into the delays.
    missing_since: when the post was first found removed or missing; purged_at: time of its
    tombstone, if it was purged and may come back; both in seconds since 1970, or 0. is_purging:
    its purge has begun, and the time of its tombstone is not known yet.
    """

    post_id: str
    text: str
    stage: int = 0
    missing_since: int = 0
    purged_at: int = 0
    is_purging: bool = False


#: Rechecks, and when each is due, in seconds since 1970.
Schedule: TypeAlias = dict[Recheck, float]


class Rechecks:
    """Schedule and run the rechecks of one source."""

    def __init__(
        self,
        source: Source,
        redis: Any,
        settings: Settings,
        pusher: Pusher,
        clock: Clock,
    ) -> None:
        self._source = source
        self._redis = redis
        self._settings = settings
        self._store = ResultsStore(
            redis,
            settings,
        )
        self._pusher = pusher
        self._clock = clock
        self._key = LIVE_RECHECKS + source.name
        self._due = clock.monotonic()
        #: Posts rechecked, purged, and sent again because they came back, since the start.
        self.rechecked = self.purged = self.returned = 0

    def schedule(self, posts: Iterable[Post], removed: Iterable[str] = ()) -> None:
        """Schedule the first recheck of posts that were never sent, and of posts removed before
        they could be.

        Call it before sending the posts: after a crash in between, it is called again.
        """
        texts = dict.fromkeys(removed, "")
        for post in posts:
            texts[post.id] = _digest(post)
        delays = self._source.recheck_delays
        if not texts or not delays:
            return
        ids = list(texts)
        sent_before = known_ids(self._redis, ids)
        now = self._clock.time()
        due = now + delays[0]
        first_rechecks: Schedule = {}
        for post_id, text in texts.items():
            if post_id in sent_before:
                continue
            recheck = Recheck(post_id, text)
            first_rechecks[recheck] = due
        self._reschedule((), first_rechecks, nx=True)

    def pending(self) -> float:
        """Return the seconds until rechecks may run; infinite if the source has none."""
        if not self._source.recheck_delays:
            return math.inf
        now = self._clock.monotonic()
        until_due = self._due - now
        until_request = self._source.pending()
        # A source that catches up takes each request as soon as it is allowed: rechecks wait for
        # one in turn.
        if until_request <= MAX_REQUEST_WAIT_S:
            until_request = 0.0
        return max(0.0, until_due, until_request)

    def run_if_due(self) -> None:
        """Recheck some posts, if it is time and the source may be asked. Raises as `run`."""
        if self.pending() > 0:
            return
        began = self._clock.monotonic()
        self._due = began + POLL_INTERVAL_S
        more_are_due = self.run()
        if more_are_due:
            self._due = began + BUSY_INTERVAL_S

    def run(self) -> bool:
        """Recheck up to a hundred due posts; return whether there were so many.

        Raises SourceFailed and redis.exceptions.RedisError. After a failed request, its posts are
        rechecked after the others.
        """
        now = self._clock.time()
        members = self._redis.zrange(
            self._key,
            "-inf",
            now,
            byscore=True,
            offset=0,
            num=POSTS_AT_ONCE,
        )
        due_rechecks: list[Recheck] = []
        for member in members:
            fields = json.loads(member)
            recheck = Recheck(*fields)
            due_rechecks.append(recheck)
        unfinished_purges: list[Recheck] = []
        rechecks: list[Recheck] = []
        for recheck in due_rechecks:
            if recheck.is_purging:
                unfinished_purges.append(recheck)
            else:
                rechecks.append(recheck)
        self._purge((), unfinished_purges)
        if rechecks:
            ids = [recheck.post_id for recheck in rechecks]
            try:
                events = self._source.look_up(ids)
            except RequestFailed:
                retry_at = now + FAILED_RETRY_S
                retries = dict.fromkeys(rechecks, retry_at)
                self._reschedule(rechecks, retries)
                raise
            self._act_on(rechecks, events)
            self.rechecked += len(rechecks)
        return len(members) == POSTS_AT_ONCE

    def _act_on(self, rechecks: Sequence[Recheck], events: Mapping[str, Event]) -> None:
        """Purge, wait for or resend the posts, and schedule their next rechecks.

        events: what the source returned, by post id.
        """
        posts = _posts_of(events)
        self._refresh_scores(posts)
        deleted: list[Recheck] = []
        hidden: list[Recheck] = []  # removed or missing
        visible: list[Recheck] = []
        for recheck in rechecks:
            event = events.get(recheck.post_id)
            if event is None:
                hidden.append(recheck)
            elif event.deleted:
                deleted.append(recheck)
            elif event.removed:
                hidden.append(recheck)
            else:
                visible.append(recheck)
        waiting, overdue = self._wait(hidden, events)
        self._purge(deleted, overdue)
        resumed, changed = self._resume(visible, posts)
        self._pusher.push(changed)
        # Finished only when the posts are in the queue: after a crash, the recheck is repeated.
        self._reschedule(rechecks, waiting | resumed)

    def _refresh_scores(self, posts: Mapping[str, Post]) -> None:
        """Store the posts' current scores beside their results."""
        scores: dict[str, int] = {}
        for post_id, post in posts.items():
            if post.score is not None:
                scores[post_id] = post.score
        now = self._clock.time()
        self._store.refresh_scores(scores, now)

    def _wait(
        self, hidden: Iterable[Recheck], events: Collection[str]
    ) -> tuple[Schedule, list[Recheck]]:
        """Return the next rechecks of removed and missing posts, and those that must be purged
        now.
        """
        now = self._clock.time()
        schedule: Schedule = {}
        overdue: list[Recheck] = []
        for recheck in hidden:
            is_removed = recheck.post_id in events
            patience = MISSING_PATIENCE_S
            if is_removed:
                patience = REMOVED_PATIENCE_S
            since = recheck.missing_since
            if not since:
                since = int(now)
            if recheck.purged_at:
                stage = recheck.stage + 1
                if stage < len(RETURN_PAUSES_S):
                    pause = RETURN_PAUSES_S[stage]
                    next_recheck = recheck._replace(stage=stage)
                    schedule[next_recheck] = now + pause
            elif is_removed and not recheck.text:
                continue  # nothing was sent
            elif now - since >= patience:
                overdue.append(recheck)
            else:
                due = now + WAITING_RETRY_S
                next_recheck = recheck._replace(missing_since=since)
                schedule[next_recheck] = due
        return schedule, overdue

    def _purge(self, deleted: Sequence[Recheck], removed: Sequence[Recheck]) -> None:
        """Purge posts, and schedule rechecks of the removed ones, unless somebody purged them by
        hand.
        """
        if not (deleted or removed):
            return
        new_ids = [recheck.post_id for recheck in removed if not recheck.is_purging]
        by_hand = tombstones(self._redis, new_ids)
        ours: list[Recheck] = []
        for recheck in removed:
            if recheck.post_id in by_hand:
                continue
            purge_begun = recheck._replace(is_purging=True)
            ours.append(purge_begun)
        # Noted first: after a crash during the purge, its tombstones are known to be ours.
        unfinished_purges = dict.fromkeys(ours, 0.0)
        self._reschedule(removed, unfinished_purges)
        rechecks = (*deleted, *removed)
        ids = [recheck.post_id for recheck in rechecks]
        purge(self._redis, self._settings, ids)
        self._schedule_returns(deleted, ours)
        self.purged += len(ids)
        logger.info(
            "purged %d posts that were deleted or removed at their source", len(ids)
        )

    def _schedule_returns(
        self, deleted: Sequence[Recheck], ours: Sequence[Recheck]
    ) -> None:
        """End the rechecks of purged posts, and schedule those of posts that may come back.

        ours: the posts that may, with a tombstone of this daemon.
        """
        our_ids = [recheck.post_id for recheck in ours]
        first_pause = RETURN_PAUSES_S[0]
        now = self._clock.time()
        due = now + first_pause
        purge_times = tombstones(self._redis, our_ids)
        return_rechecks: Schedule = {}
        for post_id, purged_at in purge_times.items():
            recheck = Recheck(
                post_id,
                text="",
                purged_at=purged_at,
            )
            return_rechecks[recheck] = due
        rechecks = (*deleted, *ours)
        self._reschedule(rechecks, return_rechecks)

    def _resume(
        self, visible: Iterable[Recheck], posts: Mapping[str, Post]
    ) -> tuple[Schedule, list[Post]]:
        """Return the next rechecks of visible posts, and the posts with a new text or back after a
        purge.
        """
        now = self._clock.time()
        delays = self._source.recheck_delays
        purge_times: dict[str, int] = {}
        for recheck in visible:
            if recheck.purged_at:
                purge_times[recheck.post_id] = recheck.purged_at
        returned_ids = lift_matching(self._redis, purge_times)
        self.returned += len(returned_ids)
        schedule: Schedule = {}
        changed: list[Post] = []
        for recheck in visible:
            if recheck.purged_at and recheck.post_id not in returned_ids:
                continue
            post = posts.get(recheck.post_id)
            text = ""
            if post is not None:
                text = _digest(post)
            stage = 0
            if not recheck.purged_at:
                stage = recheck.stage + 1
            if stage < len(delays):
                delay = delays[stage]
                if stage > 0:
                    delay -= delays[stage - 1]
                next_recheck = Recheck(
                    recheck.post_id,
                    text,
                    stage,
                )
                schedule[next_recheck] = now + delay
            if post is not None and text != recheck.text:
                changed.append(post)
        return schedule, changed

    def _reschedule(
        self, done: Iterable[Recheck], schedule: Schedule, nx: bool = False
    ) -> None:
        """Remove finished rechecks, and store the schedule of the next ones. nx: keep earlier
        times.
        """
        key = self._key
        pipe: Any = self._redis.pipeline()
        members = [json.dumps(recheck) for recheck in done]
        if members:
            pipe.zrem(key, *members)
        next_members: dict[str, float] = {}
        for recheck, due in schedule.items():
            member = json.dumps(recheck)
            next_members[member] = due
        if next_members:
            pipe.zadd(key, next_members, nx=nx)
            pipe.expire(key, RECHECKS_TTL)
        pipe.execute()


def _posts_of(events: Mapping[str, Event]) -> dict[str, Post]:
    """Return the posts that can be classified, by the ids of their events."""
    posts: dict[str, Post] = {}
    for post_id, event in events.items():
        post = _post_of(event)
        if post is not None:
            posts[post_id] = post
    return posts


def _post_of(event: Event) -> Post | None:
    """Return the event's post; None if it has none, or one that cannot be classified."""
    try:
        if isinstance(event.post, Post):
            return event.post
        if event.post:
            fields = dict(event.post)
            return Post.parse(fields)
        return None
    except PostRefused:
        return None


def _digest(post: Post) -> str:
    """Return a short digest of the text to classify."""
    return digest(post.text)[:16]


#: Seconds between purges of deleted posts; and between searches for the posts of deleted accounts,
#: each of which reads everything that Redis stores about posts.
PURGE_INTERVAL_S = 30.0
AUTHORS_INTERVAL_S = 600.0
#: Seconds by which the time in a post's id, of its author's clock, may be wrong.
WRITTEN_MARGIN_S = 3600.0
#: Seconds for which the posts of a deleted account are searched for.
AUTHOR_KEPT_S = 86_400.0
#: Share of the time that purges may take: in a large Redis they become rarer.
MAX_SHARE = 0.1


def _pause_after(seconds: float, interval_s: float) -> float:
    """Return the pause after a purge. seconds: the time that it took."""
    pause_s = seconds / MAX_SHARE
    return max(interval_s, pause_s)


class Purges:
    """Collect deletions and purge the posts. `purged`: number of posts since the start.

    written_at: see `Source.written_at`.
    """

    def __init__(
        self,
        redis: Any,
        settings: Settings,
        source: str,
        clock: Clock,
        written_at: Callable[[str], float | None] | None = None,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._written_at = written_at
        #: Keys of the posts that are not purged yet, and of the accounts, scored by the time of
        #: deletion.
        self._deleted = LIVE_DELETED + source
        self._authors = LIVE_AUTHORS + source
        self._clock = clock
        now = clock.monotonic()
        # at once: a killed daemon may have left some
        self._due = now
        self._authors_due = now
        self.purged = 0

    def add(
        self,
        ids: Collection[str],
        authors: Mapping[str, float],
        written: Collection[str],
        needed_later: Collection[str] = (),
    ) -> None:
        """Remember deleted posts and accounts.

        Call it after the posts before their deletion were sent.

        authors: deleted accounts, and when each was deleted, in seconds since 1970. written: ids
        of posts that were sent since; they stay. needed_later: deleted posts that are blocked
        although they were not sent.
        """
        redis = self._redis
        if written:
            redis.srem(self._deleted, *written)
        if ids:
            sorted_ids = sorted(ids)
            to_purge = {*known_ids(redis, sorted_ids), *needed_later}
            if to_purge:
                redis.sadd(self._deleted, *to_purge)
        writers = {author_of(post_id) for post_id in written}
        returned_authors = writers.difference(authors)
        if returned_authors:
            redis.zrem(self._authors, *returned_authors)
        if authors:
            redis.zadd(self._authors, authors, gt=True)

    def run_if_due(self) -> None:
        """Purge what has been collected, if it is time.

        Raises redis.exceptions.RedisError; nothing is lost then.
        """
        clock = self._clock
        began = clock.monotonic()
        if began >= self._authors_due:
            self._find_posts_of_authors()
            ended = clock.monotonic()
            search_s = ended - began
            pause = _pause_after(search_s, AUTHORS_INTERVAL_S)
            self._authors_due = began + pause
            self._due = min(self._due, ended)
        began = clock.monotonic()
        if began >= self._due:
            ids = self._redis.smembers(self._deleted)
            sorted_ids = sorted(ids)
            self._purge(sorted_ids)
            ended = clock.monotonic()
            purge_s = ended - began
            pause = _pause_after(purge_s, PURGE_INTERVAL_S)
            self._due = began + pause

    def _purge(self, ids: list[str]) -> None:
        starts = range(0, len(ids), IDS_AT_ONCE)
        for start in starts:
            end = start + IDS_AT_ONCE
            batch = ids[start:end]
            purge(self._redis, self._settings, batch)
            self._redis.srem(self._deleted, *batch)
            number = len(batch)
            self.purged += number
            logger.info("purged %d posts that were deleted at their source", number)

    def _find_posts_of_authors(self) -> None:
        """Add all posts of deleted accounts to the posts to purge."""
        now = self._clock.time()
        before = now - AUTHOR_KEPT_S
        redis = self._redis
        stored_authors = redis.zrange(self._authors, 0, -1, withscores=True)
        deletion_times = dict(stored_authors)
        authors = set(deletion_times)
        if not authors:
            return
        matches: set[str] = set()
        for post_id in self._posts_of(authors):
            deleted_at = deletion_times.get(author_of(post_id), math.inf)
            if not self._is_newer(post_id, deleted_at):
                matches.add(post_id)
        if matches:
            redis.sadd(self._deleted, *matches)
        # Last, so that each account is searched for once at least, also if the clock was wrong
        # when it was added.
        old_authors = redis.zrange(
            self._authors,
            "-inf",
            f"({before}",
            byscore=True,
        )
        finished = authors.intersection(old_authors)
        if finished:
            redis.zrem(self._authors, *finished)

    def _is_newer(self, post_id: str, deleted_at: float) -> bool:
        """Return whether a post was written after its account was deleted: it came back since."""
        if self._written_at is None:
            return False
        written = self._written_at(post_id)
        now = self._clock.time()
        # A time from the future says nothing.
        if written is None or written > now:
            return False
        return written > deleted_at + WRITTEN_MARGIN_S

    def _posts_of(self, authors: set[str]) -> set[str]:
        """Return the ids of all posts of these accounts, in messages, results and streams."""
        # Messages first: their posts move to the results.
        redis = self._redis
        queues = model_routing.queues(redis, self._settings)
        queued_ids = ids_in_messages(redis, queues)
        matches: set[str] = set()
        for post_id in chain(queued_ids, stored_ids(redis)):
            # Another application's message may have an id that no post has.
            if len(post_id) > MAX_ID:
                continue
            if author_of(post_id) in authors:
                matches.add(post_id)
        for stream in (RESULTS_STREAM, DEAD_LETTERS):
            pages = find_entries(
                redis,
                stream,
                "author",
                authors,
            )
            for entries in pages:
                ids = [entry.post_id for entry in entries]
                matches.update(ids)
        return matches


def author_of(post_id: str) -> str:
    """Return the beginning of an id that names the post's author; "" if there is none."""
    end = post_id.rfind("/") + 1
    return post_id[:end]
