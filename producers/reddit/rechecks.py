"""Recheck sent posts after an hour and after 36 hours.

By then scores have settled, authors have edited their texts, and most deletions have happened. Posts that were deleted
on Reddit are purged here, as Reddit's rules require.

A removal by moderators or filters is not a deletion: many removed posts are approved later, and a subreddit that is
private for a day takes all its posts with it. These posts wait before they are purged, and are rechecked afterwards, so
that a post that comes back is sent again. Every recheck ends with its post's next one, so that posts that Reddit does
not return never hold up the others.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from redis import Redis

from feedmill.producers.live.clock import Clock
from feedmill.producers.reddit.listing import PAGE_SIZE, ListingItem, PostSource, RequestFailed
from feedmill.producers.reddit.state import Recheck, RecheckReason, State
from feedmill.shared.purge import lift_matching, purge, tombstones
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between checks for due posts.
POLL_INTERVAL_S = 60.0
#: From this many posts on, a response that contains none of them is treated as an error.
MIN_POSTS_TO_TRUST_ABSENCE = 3
#: Seconds after which a post missing from a response is requested again, before it counts as deleted.
ABSENT_RETRY_S = 600.0
#: Seconds for which responses without any of the requested posts are treated as errors.
ABSENT_PATIENCE_S = 86_400.0
#: Seconds between rechecks of a post that was removed, or whose subreddit has closed.
WAITING_RETRY_S = 6 * 3600.0
#: Seconds until such a post is purged. Most removed posts that come back do so within a day.
REMOVED_PATIENCE_S, CLOSED_PATIENCE_S = 86_400.0, 3 * 86_400.0
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
    """Recheck posts that are due. send: sends posts whose text may have changed, then calls its second argument."""

    def __init__(
        self,
        reddit: PostSource,
        redis: Redis,
        state: State,
        settings: Settings,
        clock: Clock,
        send: Callable[[Sequence[ListingItem], Callable[[], None]], None],
    ) -> None:
        self._reddit = reddit
        self._redis = redis
        self._state = state
        self._settings = settings
        self._store = ResultsStore(redis, settings)
        self._clock = clock
        self._send = send
        #: True while posts of the latest recheck are not all sent; they are still due.
        self._sending = False
        #: Posts rechecked, purged, and sent again because they came back, since the start.
        self.rechecked = self.purged = self.returned = 0

    def run(self) -> float:
        """Recheck up to a hundred posts; return the seconds until the next run.

        Raises RedditFault and redis.exceptions.RedisError. A later run rechecks the unfinished posts, after the others.
        """
        if self._sending or not (looks := self._state.due(self._clock.time(), PAGE_SIZE)):
            return POLL_INTERVAL_S
        try:
            found = self._reddit.info([look.fullname for look in looks])
            unknown = [look for look in looks if look.fullname not in found]
            closed = self._closed(unknown)
        except RequestFailed:
            self._state.finish_rechecks((), dict.fromkeys(looks, self._clock.time() + ABSENT_RETRY_S))
            raise
        present = {name: item.score for name, item in found.items() if not item.gone}
        self._store.refresh_scores(present, self._clock.time())
        doubtful = [look for look in unknown if look.subreddit.lower() not in closed]
        doubted = not found and len(doubtful) >= MIN_POSTS_TO_TRUST_ABSENCE
        verdicts = self._judge(looks, found, closed, doubted)
        self._purge(verdicts)
        self._finish(looks, found, verdicts)
        self.rechecked += len(looks)
        if doubted:
            raise RequestFailed(f"Reddit returned none of {len(doubtful)} posts that were requested by id")
        return 0.0 if len(looks) == PAGE_SIZE else POLL_INTERVAL_S

    def _closed(self, unknown: Sequence[Recheck]) -> set[str]:
        """Return the names in lower case of those subreddits of unknown posts that cannot be read."""
        names = {look.subreddit.lower() for look in unknown if look.subreddit}
        about = self._reddit.about(names) if names else {}
        return {name for name in names if name not in about or about[name].why}

    def _judge(
        self, looks: Sequence[Recheck], found: Mapping[str, ListingItem], closed: Collection[str], doubted: bool
    ) -> _Verdicts:
        """Decide on each post. doubted: the response contains none of the posts and may be wrong."""
        verdicts = _Verdicts()
        for look in looks:
            item = found.get(look.fullname)
            if item and not item.gone:
                back = look.reason == RecheckReason.PURGED
                (verdicts.returned if back else verdicts.present).append(look)
            elif item and item.gone == "deleted":
                verdicts.deleted.append(look)
            elif look.reason == RecheckReason.PURGED:
                self._await_return(look, verdicts)
            elif item and look.text == "gone":
                continue  # removed before it was read, and still removed: nothing was sent
            elif item:
                self._wait(look, REMOVED_PATIENCE_S, verdicts)
            elif look.subreddit.lower() in closed:
                self._wait(look, CLOSED_PATIENCE_S, verdicts)
            else:
                self._miss(look, doubted, verdicts)
        return verdicts

    def _wait(self, look: Recheck, patience: float, verdicts: _Verdicts) -> None:
        now = self._clock.time()
        since = look.at if look.reason == RecheckReason.WAITING else int(now)
        if now - since >= patience:
            verdicts.removed.append(look)
        else:
            waiting = look._replace(reason=RecheckReason.WAITING, at=since)
            verdicts.again[waiting] = now + WAITING_RETRY_S

    def _miss(self, look: Recheck, doubted: bool, verdicts: _Verdicts) -> None:
        now = self._clock.time()
        absent = look.reason == RecheckReason.ABSENT
        if absent and not (doubted and now - look.at < ABSENT_PATIENCE_S):
            verdicts.removed.append(look)
        else:
            since = look.at if absent else int(now)
            verdicts.again[look._replace(reason=RecheckReason.ABSENT, at=since)] = now + ABSENT_RETRY_S

    def _await_return(self, look: Recheck, verdicts: _Verdicts) -> None:
        if look.stage + 1 < len(RETURN_DELAYS_S):
            pause = RETURN_DELAYS_S[look.stage + 1] - RETURN_DELAYS_S[look.stage]
            verdicts.again[look._replace(stage=look.stage + 1)] = self._clock.time() + pause

    def _purge(self, verdicts: _Verdicts) -> None:
        """Purge posts, and schedule rechecks of those that may come back."""
        if not (gone := verdicts.deleted + verdicts.removed):
            return
        # Somebody else's tombstone must not be lifted later.
        others = tombstones(self._redis, [look.fullname for look in verdicts.removed])
        purge(self._redis, self._settings, [look.fullname for look in gone])
        times = tombstones(self._redis, [look.fullname for look in verdicts.removed])
        again = {
            Recheck(
                look.fullname, 0, RecheckReason.PURGED, look.subreddit, "", times[look.fullname]
            ): self._clock.time() + RETURN_DELAYS_S[0]
            for look in verdicts.removed
            if look.fullname in times and look.fullname not in others
        }
        self._state.finish_rechecks(gone, again)
        self.purged += len(gone)
        logger.info("purged %d posts that were deleted or removed on Reddit", len(gone))

    def _finish(self, looks: Sequence[Recheck], found: Mapping[str, ListingItem], verdicts: _Verdicts) -> None:
        """Send changed and returned posts, and replace the rechecks by the next ones."""
        now, delays = self._clock.time(), self._state.recheck_delays
        back = lift_matching(self._redis, {look.fullname: look.at for look in verdicts.returned})
        items = [found[look.fullname] for look in verdicts.returned if look.fullname in back]
        self.returned += len(items)
        known = self._state.texts(verdicts.present)
        # A text that is unknown, from an earlier version, is left to the pusher.
        changed = [
            found[look.fullname]
            for look, text in zip(verdicts.present, known, strict=True)
            if found[look.fullname].text != text
        ]
        for look in verdicts.present:
            if look.stage + 1 < len(delays):
                following = Recheck(look.fullname, look.stage + 1, subreddit=found[look.fullname].subreddit,
                                    text=found[look.fullname].text)  # fmt: skip
                verdicts.again[following] = now + delays[look.stage + 1] - delays[look.stage]
        for item in items:
            verdicts.again[Recheck(item.fullname, subreddit=item.subreddit, text=item.text)] = now + delays[0]

        def sent() -> None:
            self._state.learn_texts(changed)
            self._state.finish_rechecks(looks, verdicts.again)
            self._sending = False

        self._sending = True
        # Finished only when the posts are in the queue: after a crash, the recheck is repeated.
        self._send(items + changed, sent)
