"""Recheck sent posts after an hour and after 36 hours.

By then scores have settled, authors have edited their texts, and most deletions have happened. Posts deleted or removed
on Reddit are purged here too, as Reddit's rules require.
"""

import logging
from collections.abc import Callable, Sequence

from redis import Redis

from producers.reddit.client import RedditClient
from producers.reddit.clock import Clock
from producers.reddit.listing import PAGE_SIZE, ListingItem, RequestFailed
from producers.reddit.state import RECHECK_DELAYS_S, Recheck, State
from shared.purge import purge
from shared.results import ResultsStore
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between checks for due posts.
POLL_INTERVAL_S = 60.0
#: From this many posts on, a response that contains none of them is treated as an error.
MIN_POSTS_TO_TRUST_ABSENCE = 3
#: Seconds after which a post missing from a response is requested again, before it counts as deleted.
ABSENT_RETRY_S = 600.0


class Rechecker:
    """Recheck posts that are due. send: sends posts whose text may have changed, then calls its second argument."""

    def __init__(
        self,
        reddit: RedditClient,
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
        #: Posts rechecked, and purged, since the start.
        self.rechecked = self.purged = 0

    def run(self) -> float:
        """Recheck up to a hundred posts; return the seconds until the next run.

        Raises RedditFault and redis.exceptions.RedisError. A later run rechecks the unfinished posts.
        """
        if self._sending or not (looks := self._state.due(self._clock.time(), PAGE_SIZE)):
            return POLL_INTERVAL_S
        found = self._reddit.info([look.fullname for look in looks])
        if not found and len(looks) >= MIN_POSTS_TO_TRUST_ABSENCE:
            raise RequestFailed(f"Reddit returned none of {len(looks)} posts that were requested by id")
        self._store.refresh_scores({name: item.score for name, item in found.items()}, self._clock.time())
        gone = [look for look in looks if (item := found.get(look.fullname)) and item.gone]
        gone += [look for look in looks if look.fullname not in found and look.absent]
        if gone:
            purge(self._redis, self._settings, [look.fullname for look in gone])
            self._state.finish_rechecks(gone, {})
            self.purged += len(gone)
            logger.info("purged %d posts that were deleted or removed on Reddit", len(gone))
        rest = [look for look in looks if look not in gone]
        again = self._again(rest, found)

        def sent() -> None:
            self._state.finish_rechecks(rest, again)
            self._sending = False

        self._sending = True
        # Finished only when edited texts are in the queue: after a crash, the recheck is repeated.
        self._send([found[look.fullname] for look in rest if look.fullname in found], sent)
        self.rechecked += len(looks)
        return 0.0 if len(looks) == PAGE_SIZE else POLL_INTERVAL_S

    def _again(self, looks: Sequence[Recheck], found: dict[str, ListingItem]) -> dict[Recheck, float]:
        """Return the next recheck of each post, with its time."""
        now = self._clock.time()
        again = {}
        for look in looks:
            if look.fullname not in found:
                again[look._replace(absent=True)] = now + ABSENT_RETRY_S
            elif look.stage + 1 < len(RECHECK_DELAYS_S):
                following = Recheck(look.fullname, look.stage + 1, absent=False)
                again[following] = now + RECHECK_DELAYS_S[look.stage + 1] - RECHECK_DELAYS_S[look.stage]
        return again
