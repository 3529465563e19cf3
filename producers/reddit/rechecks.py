"""Recheck sent posts after an hour and after 36 hours.

By then scores have settled, authors have edited their texts, and most deletions have happened. Posts that were deleted
on Reddit are purged here, as Reddit's rules require.

A removal by moderators or filters is not a deletion: many removed posts are approved later. Nor is a missing post: a
subreddit that is private for a day takes all its posts with it. These posts wait before they are purged, and are
rechecked afterwards, so that a post that comes back is sent again. Every recheck ends with its post's next one, so that
posts that Reddit does not return never hold up the others.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from feedmill.producers.live.clock import Clock
from feedmill.producers.live.source import RequestFailed
from feedmill.producers.reddit.listing import PAGE_SIZE, ListingItem, PostSource, events_of
from feedmill.producers.reddit.state import Recheck, RecheckReason, State
from feedmill.shared.purge import lift_matching, purge, tombstones
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between checks for due posts.
POLL_INTERVAL_S = 60.0
#: Seconds until posts are rechecked whose request failed.
FAILED_RETRY_S = 600.0
#: Seconds between rechecks of a post that was removed or is missing.
WAITING_RETRY_S = 6 * 3600.0
#: Seconds until such a post is purged. Most removed posts that come back do so within a day.
REMOVED_PATIENCE_S, MISSING_PATIENCE_S = 86_400.0, 2 * 86_400.0
#: Seconds after the purge of such a post at which it is rechecked.
RETURN_DELAYS_S = (86_400.0, 3 * 86_400.0, 7 * 86_400.0, 14 * 86_400.0)


@dataclass
class _Verdicts:
    """Decisions on a batch of rechecked posts."""

    #: Posts to purge for good, and posts to purge that may come back.
    deleted: list[Recheck] = field(default_factory=list)
    removed: list[Recheck] = field(default_factory=list)
    #: Purged posts that are back.
    returned: list[Recheck] = field(default_factory=list)
    #: Posts that exist.
    present: list[Recheck] = field(default_factory=list)
    #: Next rechecks, with their times.
    again: dict[Recheck, float] = field(default_factory=dict)


class Rechecker:
    """Recheck posts that are due."""

    def __init__(self, reddit: PostSource, redis: Redis, state: State, settings: Settings, clock: Clock) -> None:
        self._reddit = reddit
        self._redis = redis
        self._state = state
        self._settings = settings
        self._store = ResultsStore(redis, settings)
        self._clock = clock
        #: Posts rechecked, purged, and sent again because they came back, since the start.
        self.rechecked = self.purged = self.returned = 0

    def run(self) -> Generator[Any, None, float]:
        """Recheck up to a hundred posts, yielding changed ones; return the seconds until the next run.

        Raises SourceFailed and redis.exceptions.RedisError. Unfinished posts are rechecked later, after the others.
        """
        if not (rechecks := self._state.due(self._clock.time(), PAGE_SIZE)):
            return POLL_INTERVAL_S
        try:
            found = self._reddit.info([recheck.fullname for recheck in rechecks])
        except RequestFailed:
            self._state.finish_rechecks((), dict.fromkeys(rechecks, self._clock.time() + FAILED_RETRY_S))
            raise
        scores = {name: item.score for name, item in found.items() if not item.gone}
        self._store.refresh_scores(scores, self._clock.time())
        verdicts = self._judge(rechecks, found)
        self._purge(verdicts)
        yield from self._send(found, verdicts)
        self._state.finish_rechecks(rechecks, verdicts.again)
        self.rechecked += len(rechecks)
        return 0.0 if len(rechecks) == PAGE_SIZE else POLL_INTERVAL_S

    def run_all(self) -> Generator[Any]:
        """Recheck all posts that are due."""
        while not (yield from self.run()):
            pass

    def _judge(self, rechecks: Sequence[Recheck], found: Mapping[str, ListingItem]) -> _Verdicts:
        """Decide on each post."""
        verdicts = _Verdicts()
        for recheck in rechecks:
            item = found.get(recheck.fullname)
            if item and not item.gone:
                back = recheck.reason == RecheckReason.PURGED
                (verdicts.returned if back else verdicts.present).append(recheck)
            elif item and item.gone == "deleted":
                verdicts.deleted.append(recheck)
            elif recheck.reason == RecheckReason.PURGED:
                self._await_return(recheck, verdicts)
            elif item and recheck.text == "gone":
                continue  # removed before it was read, and still removed: nothing was sent
            else:
                self._wait(recheck, REMOVED_PATIENCE_S if item else MISSING_PATIENCE_S, verdicts)
        return verdicts

    def _wait(self, recheck: Recheck, patience: float, verdicts: _Verdicts) -> None:
        now = self._clock.time()
        since = recheck.at if recheck.reason == RecheckReason.WAITING else int(now)
        if now - since >= patience:
            verdicts.removed.append(recheck)
        else:
            waiting = recheck._replace(reason=RecheckReason.WAITING, at=since)
            verdicts.again[waiting] = now + WAITING_RETRY_S

    def _await_return(self, recheck: Recheck, verdicts: _Verdicts) -> None:
        if recheck.stage + 1 < len(RETURN_DELAYS_S):
            pause = RETURN_DELAYS_S[recheck.stage + 1] - RETURN_DELAYS_S[recheck.stage]
            verdicts.again[recheck._replace(stage=recheck.stage + 1)] = self._clock.time() + pause

    def _purge(self, verdicts: _Verdicts) -> None:
        """Purge posts, and schedule rechecks of those that may come back."""
        if not (gone := verdicts.deleted + verdicts.removed):
            return
        # Somebody else's tombstone must not be lifted later.
        others = tombstones(self._redis, [recheck.fullname for recheck in verdicts.removed])
        purge(self._redis, self._settings, [recheck.fullname for recheck in gone])
        times = tombstones(self._redis, [recheck.fullname for recheck in verdicts.removed])
        again = {
            recheck._replace(
                text="", stage=0, reason=RecheckReason.PURGED, at=times[recheck.fullname]
            ): self._clock.time() + RETURN_DELAYS_S[0]
            for recheck in verdicts.removed
            if recheck.fullname in times and recheck.fullname not in others
        }
        self._state.finish_rechecks(gone, again)
        self.purged += len(gone)
        logger.info("purged %d posts that were deleted or removed on Reddit", len(gone))

    def _send(self, found: Mapping[str, ListingItem], verdicts: _Verdicts) -> Generator[Any]:
        """Send returned posts and those with a new text, and choose the next rechecks."""
        now, delays = self._clock.time(), self._state.recheck_delays
        back = lift_matching(self._redis, {recheck.fullname: recheck.at for recheck in verdicts.returned})
        returned = [found[recheck.fullname] for recheck in verdicts.returned if recheck.fullname in back]
        for item in returned:
            verdicts.again[Recheck(item.fullname, item.subreddit, item.text)] = now + delays[0]
        changed, known = [], []
        for recheck in verdicts.present:
            item, stage = found[recheck.fullname], recheck.stage + 1
            if stage < len(delays):
                following = Recheck(item.fullname, item.subreddit, item.text, stage)
                verdicts.again[following] = now + delays[stage] - delays[stage - 1]
            track = self._state.track(item.subreddit)
            is_known = item.fullname in track.known
            if not track.knows_text(item) if is_known else recheck.text != item.text:
                changed.append(item)
                known += [item] if is_known else []
        # Finished only when the posts are in the queue: after a crash, the recheck is repeated.
        yield from events_of(returned + changed)
        self._state.commit(known)
        self.returned += len(returned)
