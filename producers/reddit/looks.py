"""The second look: posts that were sent, an hour and a day and a half later.

Scores have settled by then, authors have mended their texts, and much of what is to go has gone: what was deleted or
removed on Reddit is purged here as well, as Reddit's rules ask.
"""

import logging
from collections.abc import Callable, Sequence

from redis import Redis

from producers.reddit.client import Reddit
from producers.reddit.clock import Clock
from producers.reddit.state import LOOKS, Look, State
from producers.reddit.things import PAGE, Fault, Item
from shared.purge import purge
from shared.results import ResultsStore
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between two looks for what is due.
PAUSE = 60.0
#: Of so many posts Reddit knows at least one: else its answer is at fault.
SEVERAL = 3
#: Seconds after which a post that Reddit did not know is asked for again, before it counts as gone.
DOUBT = 600.0


class Looks:
    """Looks again at what is due. send: takes posts whose text may have changed, and what to do once they are sent."""

    def __init__(
        self,
        reddit: Reddit,
        redis: Redis,
        state: State,
        settings: Settings,
        clock: Clock,
        send: Callable[[Sequence[Item], Callable[[], None]], None],
    ) -> None:
        self._reddit = reddit
        self._redis = redis
        self._state = state
        self._settings = settings
        self._store = ResultsStore(redis, settings)
        self._clock = clock
        self._send = send
        #: What was looked at last is not all sent yet: it is still due.
        self._sending = False
        #: Posts looked at, and purged, since the start.
        self.looked = self.purged = 0

    def run(self) -> float:
        """Look at up to a hundred posts; returns the seconds until the next time.

        Raises Fault and redis.exceptions.RedisError. What was not done then comes again.
        """
        if self._sending or not (looks := self._state.due(self._clock.time(), PAGE)):
            return PAUSE
        found = self._reddit.info([look.fullname for look in looks])
        if not found and len(looks) >= SEVERAL:
            raise Fault(f"Reddit knows none of {len(looks)} posts, which cannot be")
        self._store.refresh_scores({name: item.score for name, item in found.items()}, self._clock.time())
        gone = [look for look in looks if (item := found.get(look.fullname)) and item.gone]
        gone += [look for look in looks if look.fullname not in found and look.absent]
        if gone:
            purge(self._redis, self._settings, [look.fullname for look in gone])
            self._state.looked(gone, {})
            self.purged += len(gone)
            logger.info("purged %d posts that were deleted or removed on Reddit", len(gone))
        rest = [look for look in looks if look not in gone]
        again = self._again(rest, found)

        def sent() -> None:
            self._state.looked(rest, again)
            self._sending = False

        self._sending = True
        # Done only once edited texts are in the queue: a crash before repeats the look.
        self._send([found[look.fullname] for look in rest if look.fullname in found], sent)
        self.looked += len(looks)
        return 0.0 if len(looks) == PAGE else PAUSE

    def _again(self, looks: Sequence[Look], found: dict[str, Item]) -> dict[Look, float]:
        """The looks that follow these, and when."""
        now = self._clock.time()
        again = {}
        for look in looks:
            if look.fullname not in found:
                again[look._replace(absent=True)] = now + DOUBT
            elif look.stage + 1 < len(LOOKS):
                following = Look(look.fullname, look.stage + 1, absent=False)
                again[following] = now + LOOKS[look.stage + 1] - LOOKS[look.stage]
        return again
