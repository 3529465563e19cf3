"""Fill recorded gaps from Arctic Shift: read each gap's posts there, and send them the way of all others.

A step sends one request, so that a daemon goes on between steps. The progress is stored with the gap.
"""

import logging
from collections.abc import Callable, Sequence

from redis.backoff import EqualJitterBackoff

from feedmill.producers.live.budget import RequestBudget
from feedmill.producers.live.clock import Clock
from feedmill.producers.reddit.arctic_shift import ArcticShiftClient
from feedmill.producers.reddit.listing import ListingItem, Outage, RedditFault, TooManyRequests
from feedmill.producers.reddit.state import Gap, State

logger = logging.getLogger(__name__)

#: Seconds between looks for open gaps.
POLL_INTERVAL_S = 60.0
#: Seconds until a gap is tried again after a failure, and at most after repeated ones.
MIN_RETRY_S, MAX_RETRY_S = 60.0, 6 * 3600.0
#: Failures in a row after which an attempt to fill a gap at once ends, and pauses in seconds between them.
MAX_ATTEMPTS, BACKOFF = 4, EqualJitterBackoff(cap=20, base=5)
#: Seconds after the end of a gap from which on the archive counts as complete, even if it has no later post.
COMPLETE_AFTER_S = 86_400.0
#: Start of the reason for keeping a gap with a second that has more posts than a page, which cannot be paged.
CROWDED = "Arctic Shift returns only some of the posts of second"
#: Reason for keeping a gap that the archive has not reached.
BEHIND = "Arctic Shift has no post from the end of the gap yet"


class GapFiller:
    """Fill gaps one after the other. send: sends posts, then calls its second argument."""

    def __init__(
        self,
        archive: ArcticShiftClient,
        budget: RequestBudget,
        state: State,
        clock: Clock,
        send: Callable[[Sequence[ListingItem], Callable[[], None]], None],
    ) -> None:
        self._archive = archive
        self._budget = budget
        self._state = state
        self._clock = clock
        self._send = send
        self._sending = False
        #: Gap -> number of failures and time of the next try (monotonic seconds).
        self._failures: dict[str, tuple[int, float]] = {}
        #: Filled gaps, and posts found in them, since the start.
        self.filled = self.found = 0

    def step(self) -> float:
        """Send one request for the first open gap; return the seconds until the next step.

        Raises redis.exceptions.RedisError.
        """
        if self._sending:
            return 1.0
        now = self._clock.monotonic()
        due = [gap for gap in self._state.open_gaps() if self._failures.get(gap.field, (0, now))[1] <= now]
        if not due:
            return POLL_INTERVAL_S
        if (pause := self._budget.pending()) > 0:
            return pause
        self._fill_part(due[0])
        return 0.0

    def fill(self, gap: Gap) -> bool:
        """Fill a gap now. Return false if it remains open, after several failures without progress."""
        failures = 0
        while failures < MAX_ATTEMPTS:
            if failures:
                self._clock.wait(BACKOFF.compute(failures - 1))
            if not self._fill_part(gap):
                failures += 1
                continue
            failures = 0
            (gap,) = [each for each in self._state.gaps() if each.field == gap.field]
            if gap.filled or gap.field in self._failures:
                return bool(gap.filled)
        return False

    def _fill_part(self, gap: Gap) -> bool:
        """Read and send the next part of a gap. Return false if that failed; the gap then has the reason."""
        try:
            span = self._archive.since(gap.subreddit, gap.reached or gap.since, gap.until)
            behind = not span.more and not self._reaches(gap)
        except RedditFault as fault:
            if isinstance(fault, Outage):
                longest = fault.retry_after if isinstance(fault, TooManyRequests) else None
                self._budget.pause(max(MIN_RETRY_S, longest or 0.0))
            self._fail(gap, str(fault))
            return False
        if behind:
            self._fail(gap, BEHIND)
            return False
        # Posts of the last second are read again in the next part: count them then.
        counted = [item for item in span.items if not item.gone and (not span.more or item.created_utc < span.reached)]
        crowded = gap.problem if gap.problem.startswith(CROWDED) else ""
        if span.crowded is not None:
            crowded = f"{CROWDED} {span.crowded:.0f}"
        # A crowded second keeps the gap open: some of its posts may be missing.
        filled = not span.more and not crowded
        after = gap._replace(
            reached=span.reached,
            found=gap.found + len(counted),
            problem=crowded,
            filled=self._clock.time() if filled else 0.0,
        )

        def sent() -> None:
            self._state.update_gap(after)
            self._sending = False
            self._failures.pop(gap.field, None)
            if not span.more and not after.filled:
                self._fail(after, crowded)
            if after.filled:
                self.filled += 1
                logger.info("filled the gap in r/%s with %d posts from Arctic Shift", gap.subreddit, after.found)

        self.found += len(counted)
        self._sending = True
        self._send(span.items, sent)
        return True

    def _reaches(self, gap: Gap) -> bool:
        """Return whether the archive has read the subreddit up to the end of the gap."""
        if self._clock.time() - gap.until > COMPLETE_AFTER_S:
            return True
        return bool(self._archive.since(gap.subreddit, gap.until - 1).items)

    def _fail(self, gap: Gap, reason: str) -> None:
        failures = self._failures.get(gap.field, (0, 0.0))[0]
        retry = min(MIN_RETRY_S * 2 ** min(failures, 16), MAX_RETRY_S)
        self._failures[gap.field] = failures + 1, self._clock.monotonic() + retry
        # A crowded second remains the reason: without it, the gap would count as filled later.
        if gap.problem != reason and not gap.problem.startswith(CROWDED):
            logger.warning("cannot fill the gap in r/%s: %s; retrying in %.0f s", gap.subreddit, reason, retry)
            self._state.update_gap(gap._replace(problem=reason))
