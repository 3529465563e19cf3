"""Fill recorded gaps from Arctic Shift: read each gap's posts there, and send them like any other post.

A step sends one request, so that the daemon stays responsive. The progress is stored with the gap.
"""

import logging
from collections.abc import Generator
from typing import Any

from redis.backoff import EqualJitterBackoff

from feedmill.producers.live.clock import Clock
from feedmill.producers.live.source import RequestFailed, SourceFailed
from feedmill.producers.live.state import Gap
from feedmill.producers.reddit.arctic_shift import ArcticShiftClient
from feedmill.producers.reddit.state import State

logger = logging.getLogger(__name__)

#: Seconds between checks for open gaps.
POLL_INTERVAL_S = 60.0
#: Seconds until a gap is tried again after a failure.
RETRY_S = 600.0
#: Failures in a row after which an attempt to fill a gap at once ends, and pauses in seconds between them.
MAX_ATTEMPTS, BACKOFF = 4, EqualJitterBackoff(cap=20, base=5)
#: Seconds after the end of a gap from which on the archive counts as complete, even if it has no later post.
COMPLETE_AFTER_S = 86_400.0
#: Start of the reason for keeping a gap with a second that has more posts than a page, which cannot be paged.
CROWDED = "Arctic Shift returns only some of the posts of second"
#: Reason for keeping a gap that the archive has not reached.
BEHIND = "Arctic Shift has no post from the end of the gap yet"


class GapFiller:
    """Fill Reddit's gaps one after the other."""

    def __init__(self, archive: ArcticShiftClient, state: State, clock: Clock) -> None:
        self._archive = archive
        self._state = state
        self._clock = clock
        #: Gap that could not be filled -> time of the next attempt (monotonic seconds).
        self._retries: dict[str, float] = {}
        #: Filled gaps, and posts found in them, since the start.
        self.filled = self.found = 0

    def run(self) -> Generator[Any, None, float]:
        """Send one request for the first open gap, and yield its posts; return the seconds until the next run.

        Raises redis.exceptions.RedisError.
        """
        now = self._clock.monotonic()
        due = [gap for gap in self._state.gaps.open("reddit") if self._retries.get(gap.field, now) <= now]
        if not due:
            return POLL_INTERVAL_S
        yield from self._fill_part(due[0])
        return 0.0

    def fill(self, gap: Gap) -> Generator[Any]:
        """Fill a gap now, until several failures in a row."""
        failures = 0
        while failures < MAX_ATTEMPTS and not gap.filled:
            if failures:
                self._clock.wait(BACKOFF.compute(failures - 1))
            reached = gap.reached
            gap = yield from self._fill_part(gap)
            failures = 0 if gap.reached > reached else failures + 1

    def _fill_part(self, gap: Gap) -> Generator[Any, None, Gap]:
        """Read and send the next part of a gap. Return the gap as it is stored now."""
        try:
            span = self._archive.since(gap.subreddit, gap.reached or gap.since, gap.until)
            behind = not span.more and not self._reaches(gap)
        except SourceFailed as fault:
            if not isinstance(fault, RequestFailed):
                self._archive.budget.pause(max(RETRY_S, fault.retry_after))
            return self._fail(gap, str(fault))
        if behind:
            return self._fail(gap, BEHIND)
        # Posts of the last second are read again in the next part: count them then.
        counted = [item for item in span.items if not item.gone and (not span.more or item.created_utc < span.reached)]
        # Known posts are left out: the archive may have text that was deleted since.
        known = self._state.track(gap.subreddit).known
        yield from self._state.send([item for item in span.items if item.fullname not in known])
        # A crowded second keeps the gap open: some of its posts may be missing.
        crowded = gap.problem if gap.problem.startswith(CROWDED) else ""
        if span.crowded is not None:
            crowded = f"{CROWDED} {span.crowded:.0f}"
        self.found += len(counted)
        reached = span.reached if span.more else gap.until
        gap = gap._replace(reached=reached, found=gap.found + len(counted), problem=crowded)
        if not span.more and crowded:
            return self._fail(gap, crowded)
        if not span.more:
            gap = gap._replace(filled=self._clock.time())
            self.filled += 1
            logger.info("filled the gap in r/%s with %d posts from Arctic Shift", gap.subreddit, gap.found)
        self._state.gaps.record(gap)
        return gap

    def _reaches(self, gap: Gap) -> bool:
        """Return whether the archive has read the subreddit up to the end of the gap."""
        if self._clock.time() - gap.until > COMPLETE_AFTER_S:
            return True
        return bool(self._archive.since(gap.subreddit, gap.until - 1).items)

    def _fail(self, gap: Gap, reason: str) -> Gap:
        """Store the reason why a gap remains open. A crowded second stays the reason: other posts of it are missing."""
        self._retries[gap.field] = self._clock.monotonic() + RETRY_S
        if gap.problem != reason:
            logger.warning("cannot fill the gap in r/%s: %s; retrying in %.0f s", gap.subreddit, reason, RETRY_S)
        gap = gap._replace(problem=gap.problem if gap.problem.startswith(CROWDED) else reason)
        self._state.gaps.record(gap)
        return gap
