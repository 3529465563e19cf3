"""The Reddit daemon: read the new posts of every topic until it is stopped.

A poll walks down the joint listing of a topic's subreddits (`walk.py`). Its posts wait in the send buffer and are
recorded as known only once they are in the queue, oldest first. So known posts have no holes, and a daemon that is
killed continues where it stopped. While the queue is full, polls slow down and posts wait in the buffer; when the
buffer is full too, polls stop, and Reddit keeps the posts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import uniform
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis
from redis.backoff import EqualJitterBackoff
from redis.exceptions import RedisError

from feedmill.producers.live.budget import RequestBudget
from feedmill.producers.live.clock import Clock
from feedmill.producers.push import FULL_QUEUE_POLL_S, Pusher
from feedmill.producers.reddit.arctic_shift import ArcticShiftClient
from feedmill.producers.reddit.gap_filler import GapFiller
from feedmill.producers.reddit.listing import (
    CredentialsRefused,
    ListingItem,
    ListingPage,
    Outage,
    PostSource,
    RequestFailed,
    SubredditUnreadable,
    TooManyRequests,
)
from feedmill.producers.reddit.rechecks import Rechecker
from feedmill.producers.reddit.send_buffer import PostBatch, SendBuffer
from feedmill.producers.reddit.state import RECHECK_DELAYS_S, Gap, State
from feedmill.producers.reddit.subreddits import Roster
from feedmill.producers.reddit.topics import Topics
from feedmill.producers.reddit.walk import Track, Walk, walk
from feedmill.shared.errors import CredentialsError
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds that each walk continues below the watermark, because posts can appear late.
WALK_OVERLAP_S = 300.0
#: Seconds between full walks to the end of a listing, where posts reappear that a moderator approved hours later.
FULL_WALK_INTERVAL_S = 6 * 3600.0
#: Seconds between checks of a topic's subreddits, and until the next one after a failure.
CHECK_INTERVAL_S = 86_400.0
CHECK_RETRY_S = 600.0
#: Attempts for each page of a walk after the first page.
MAX_PAGE_ATTEMPTS = 3
#: Posts in the send buffer at which polls stop.
MAX_HELD_POSTS = 5_000
#: Factor for the poll interval while the queue is full.
FULL_QUEUE_SLOWDOWN = 4
#: Seconds between updates of the status for `feedmill status`.
STATUS_INTERVAL_S = 10.0
#: Pauses in seconds after failures of Reddit and of Redis. Integers: floats would overflow after 1,024 failures.
REDDIT_BACKOFF, REDIS_BACKOFF = EqualJitterBackoff(cap=600, base=5), EqualJitterBackoff(cap=30, base=5)


@dataclass
class FailingSubreddit:
    """A failing subreddit: its consecutive failures, and the time of its next retry (monotonic seconds)."""

    failures: int = 0
    due: float = 0.0


@dataclass
class Feed:
    """A topic and the state of the subreddits that are read for it."""

    topic: str
    #: Time of the next full walk, in seconds since 1970, so that it holds across restarts.
    full_walk_due: float
    tracks: dict[str, Track] = field(default_factory=dict)
    failing: dict[str, FailingSubreddit] = field(default_factory=dict)


@dataclass
class ScheduledJob:
    """A recurring job. run: runs it and returns the seconds until its next run."""

    run: Callable[[], float]
    due: float = 0.0
    #: True if it sends requests to Reddit, and so needs budget and a reachable Reddit.
    uses_reddit: bool = True


class Daemon:
    """Run one job per `step`: polls, checks of subreddits, rechecks and status updates. Not thread-safe.

    depth: posts per topic to start with. Posts created later are all read. archive: fills gaps, with a budget of its
    own.
    """

    #: Whether a topic's subreddits are read in one request.
    reads_jointly = True

    def __init__(
        self,
        reddit: PostSource,
        budget: RequestBudget,
        redis: Redis,
        pusher: Pusher,
        topics: Topics,
        settings: Settings,
        clock: Clock,
        depth: int,
        archive: tuple[ArcticShiftClient, RequestBudget] | None = None,
        recheck_delays: Sequence[float] = RECHECK_DELAYS_S,
    ) -> None:
        self._reddit = reddit
        self._budget = budget
        self._pusher = pusher
        self._settings = settings
        self._clock = clock
        self._depth = depth
        self._state = State(redis, recheck_delays)
        self._roster = Roster(reddit, topics, self._state, clock)
        self._rechecks = Rechecker(reddit, redis, self._state, settings, clock, self._hold_rechecked)
        walked = self._state.deep_walks(topics.topics, clock.time())
        self._feeds = [Feed(topic, full_walk_due=walked[topic] + FULL_WALK_INTERVAL_S) for topic in topics.topics]
        self._outbox = SendBuffer(pusher, self._state, settings, clock)
        #: Consecutive failures.
        self._reddit_failures = self._redis_failures = 0
        #: Polls and gaps since the start, and failures by kind.
        self.polls = self.gaps = 0
        #: Gaps that are not filled, those of earlier processes included, at the latest status update.
        self._open_gaps = 0
        self.faults: Counter[str] = Counter()
        #: Current failures of Reddit and Redis, for display; "" if there are none.
        self._reddit_trouble = self._redis_trouble = ""
        start = clock.monotonic()
        # The order of the first runs.
        self._jobs = [ScheduledJob(self._store_status, start, uses_reddit=False)]
        for feed in self._feeds:
            self._jobs += [
                ScheduledJob(partial(self._check, feed), start),
                ScheduledJob(partial(self._poll, feed), start),
            ]
        self._jobs.append(ScheduledJob(self._rechecks.run, start))
        self._filler = archive and GapFiller(*archive, self._state, clock, self._hold_filled)
        if self._filler:
            self._jobs.append(ScheduledJob(self._filler.step, start, uses_reddit=False))

    def step(self) -> float:
        """Run one job that is due; return the seconds until the next one.

        Raises Stopped when the process must end, and CredentialsError if Reddit rejects the credentials at the start.
        """
        self._send_held()
        now = self._clock.monotonic()
        job = min(self._jobs, key=lambda job: job.due)
        pause = job.due - now
        if pause <= 0 and job.uses_reddit and (pause := self._budget.pending()) > 0:
            # Run a job that needs no budget instead of waiting for a token.
            job = min((job for job in self._jobs if not job.uses_reddit), key=lambda job: job.due)
            pause = min(pause, max(0.0, job.due - now))
        if pause > 0:
            return min(pause, FULL_QUEUE_POLL_S) if self._outbox.held else pause
        job.due = now + self._guarded(job)
        return 0.0

    def _guarded(self, job: ScheduledJob) -> float:
        """Run a job and handle its failures; an outage delays all jobs. Return the seconds until its next run."""
        asked = self._budget.spent
        try:
            pause = job.run()
        except (RedisError, OperationalError) as error:
            return self._redis_failed(error)
        except Outage as fault:
            return self._reddit_failed(fault)
        except RequestFailed as fault:
            self.faults[type(fault).__name__] += 1
            logger.warning("%s", fault)
            return self._reddit_pause()
        except Exception:
            # A bug in one job must not stop the others; the job is retried with backoff.
            self.faults["unexpected"] += 1
            logger.exception("unexpected error in a job; other jobs continue")
            return self._reddit_pause()
        if self._budget.spent > asked:
            self._reddit_failures = 0
            if self._reddit_trouble:
                logger.info("%s answers again", self._reddit.name)
            self._reddit_trouble = ""
        if not job.uses_reddit:
            self._redis_recovered()  # jobs without requests to Reddit access only Redis
        return pause

    def _redis_recovered(self) -> None:
        self._redis_failures = 0
        if self._redis_trouble:
            logger.info("Redis answers again")
        self._redis_trouble = ""

    def _redis_failed(self, error: Exception) -> float:
        if not self._redis_failures:
            logger.error(
                "Redis at %s is unreachable (%s); retrying until it answers", self._settings.redis_address, error
            )
        self._redis_trouble = "Redis is unreachable"
        self._redis_failures += 1
        return REDIS_BACKOFF.compute(self._redis_failures - 1)

    def _reddit_pause(self) -> float:
        """Count a failure, and return the seconds to pause."""
        self._reddit_failures += 1
        return REDDIT_BACKOFF.compute(self._reddit_failures - 1)

    def _reddit_failed(self, fault: Outage) -> float:
        """Pause all requests after an outage. Raises CredentialsError if Reddit has never accepted the credentials."""
        self.faults[type(fault).__name__] += 1
        if isinstance(fault, CredentialsRefused) and not self.polls:
            raise CredentialsError(self._reddit.refused) from fault
        pause = self._reddit_pause()
        if isinstance(fault, TooManyRequests) and fault.retry_after is not None:
            pause = max(pause, fault.retry_after)
        refused = isinstance(fault, CredentialsRefused)
        self._reddit_trouble = self._reddit.refused if refused else f"{self._reddit.name}: {fault}"
        logger.warning("%s; retrying %s in %.0f s", self._reddit_trouble.rstrip("."), self._reddit.name, pause)
        self._budget.pause(pause)
        return 0.0  # the budget blocks requests until then

    # Jobs.

    def _check(self, feed: Feed) -> float:
        """Choose a topic's subreddits."""
        try:
            self._roster.check(feed.topic)
        except RequestFailed as fault:
            self.faults[type(fault).__name__] += 1
            logger.warning("cannot check the subreddits of topic %s (%s); retrying later", feed.topic, fault)
            return CHECK_RETRY_S
        return CHECK_INTERVAL_S if self._roster.active[feed.topic] else CHECK_RETRY_S

    def _update_tracks(self, feed: Feed) -> None:
        """Follow the subreddits that the roster has chosen."""
        names = self._roster.active[feed.topic]
        if list(feed.tracks) != names:
            feed.tracks = {name: feed.tracks.get(name) or self._state.track(name) for name in names}
            feed.failing = {name: failure for name, failure in feed.failing.items() if name in names}

    def _poll(self, feed: Feed) -> float:
        """Walk a topic's subreddits jointly; if that fails, separately, so that one does not stop the others."""
        if self._outbox.held >= MAX_HELD_POSTS:
            return self._interval()
        self._update_tracks(feed)
        now = self._clock.monotonic()
        full = self._clock.time() >= feed.full_walk_due
        healthy = [track for name, track in feed.tracks.items() if name not in feed.failing]
        separate = [feed.tracks[name] for name, failure in feed.failing.items() if failure.due <= now]
        # A full walk reads each subreddit separately: in a joint listing, a busy one crowds out the others.
        if len(healthy) > 1 and not full and self.reads_jointly:
            try:
                self._walk(feed, healthy, full)
            except RequestFailed as fault:
                self.faults[type(fault).__name__] += 1
                separate += healthy
        else:
            separate += healthy
        for track in separate:
            self._walk_separately(feed, track, full)
        if full:
            feed.full_walk_due = self._clock.time() + FULL_WALK_INTERVAL_S
            self._state.walked_deep(feed.topic, self._clock.time())
        self.polls += 1
        pauses = [failure.due - self._clock.monotonic() for failure in feed.failing.values()]
        return max(0.0, min([self._interval(), *pauses]))

    def _walk_separately(self, feed: Feed, track: Track, full: bool) -> None:
        try:
            self._walk(feed, [track], full)
        except SubredditUnreadable as fault:
            self.faults[type(fault).__name__] += 1
            self._roster.drop(feed.topic, track.name, fault.why)
        except RequestFailed as fault:
            self.faults[type(fault).__name__] += 1
            failure = feed.failing.setdefault(track.name, FailingSubreddit())
            pause = REDDIT_BACKOFF.compute(failure.failures)
            failure.failures += 1
            failure.due = self._clock.monotonic() + pause
            log = logger.warning if failure.failures == 1 else logger.debug
            log("cannot read r/%s: %s; retrying in %.0f s", track.name, fault, pause)
        else:
            if feed.failing.pop(track.name, None):
                logger.info("r/%s can be read again", track.name)

    def _interval(self) -> float:
        # Jitter spreads the topics' polls.
        interval = self._settings.reddit_poll_interval * uniform(0.9, 1.1)
        return interval * (FULL_QUEUE_SLOWDOWN if self._pusher.gate.closed else 1)

    def _walk(self, feed: Feed, tracks: Sequence[Track], full: bool) -> None:
        """Walk the subreddits' joint listing and buffer new posts. Raises RedditFault."""
        fetch = partial(self._page, [track.name for track in tracks])
        found = walk(fetch, tracks, overlap=float("inf") if full else WALK_OVERLAP_S, depth=self._depth)
        if found.missed and len(tracks) > 1 and not found.empty:
            # The joint listing is too short for them: walk each subreddit's own listing of a thousand posts.
            self._hold_walk(feed, found, [track for track in tracks if track not in found.missed])
            for track in found.missed:
                self._walk(feed, [track], full)
        else:
            self._hold_walk(feed, found, tracks)

    def _page(self, names: Sequence[str], after: str | None) -> ListingPage:
        """Fetch a page. Pages after the first are retried, because a failure would repeat the whole walk."""
        for _ in range(0 if after is None else MAX_PAGE_ATTEMPTS - 1):
            try:
                return self._reddit.page(names, after=after)
            except SubredditUnreadable:
                raise
            except RequestFailed as fault:
                self.faults[type(fault).__name__] += 1
                self._clock.wait(uniform(0.5, 1.5))
        return self._reddit.page(names, after=after)

    def _hold_walk(self, feed: Feed, found: Walk, tracks: Sequence[Track], others: Sequence[Gap] = ()) -> None:
        """Buffer the walk's posts of these subreddits that are new or edited, and record gaps. others: further gaps."""
        if found.empty:
            return
        of = {track.name.lower(): track for track in tracks}
        items = [
            item
            for item in found.items
            if (track := of.get(item.subreddit.lower())) and item.created_utc >= (track.beginning or 0.0)
        ]
        changed = [item for item in items if of[item.subreddit.lower()].known.get(item.fullname) != item.text]
        fresh = frozenset(item.fullname for item in changed if item.fullname not in of[item.subreddit.lower()].known)
        now = self._clock.time()
        missed = [track for track in tracks if track in found.missed]
        # Reddit's times are whole seconds: the second of the oldest post may not be complete.
        gaps = [Gap(track.name, since := track.watermark or 0.0, found.frontier(since) + 1, now) for track in missed]
        gaps += others
        # After its first walk, a subreddit is followed from the oldest post found, even if sending is interrupted.
        beginnings = {track.name: found.oldest for track in tracks if track.beginning is None}
        newest = min(found.newest, now)  # a post dated in the future must not advance the watermark beyond now
        ahead = [track for track in tracks if newest > (track.watermark or 0.0)]
        for track in tracks:
            track.learn(item for item in items if item.subreddit.lower() == track.name.lower())
            track.watermark = max(track.watermark or 0.0, newest)
            track.beginning = beginnings.get(track.name, track.beginning)
        if changed or gaps or ahead:
            begin, end = (
                partial(self._record_start, beginnings, gaps),
                partial(self._advance_watermarks, feed, ahead, newest),
            )
            self._outbox.hold(PostBatch(changed, fresh, walked=True, begin=begin, end=end))

    def _record_start(self, beginnings: dict[str, float], gaps: Sequence[Gap]) -> None:
        if not beginnings and not gaps:
            return
        self._state.begin(beginnings, gaps)
        self.gaps += len(gaps)
        for gap in gaps:
            logger.error(
                "gap in r/%s: posts of %.0f minutes may be missing, because the listing ended before the known posts; "
                "fill the gap with `feedmill ingest gaps --fill`",
                gap.subreddit,
                (gap.until - gap.since) / 60,
            )

    def _advance_watermarks(self, feed: Feed, tracks: Sequence[Track], until: float) -> None:
        """Advance the watermarks. Skip subreddits that were dropped since: they restart from their known posts."""
        self._state.advance({track.name: until for track in tracks if feed.tracks.get(track.name) is track})

    def _hold_rechecked(self, items: Sequence[ListingItem], end: Callable[[], None]) -> None:
        """Buffer rechecked posts whose text has changed."""
        tracks = {track.name.lower(): track for feed in self._feeds for track in feed.tracks.values()}
        for item in items:
            if (track := tracks.get(item.subreddit.lower())) and item.fullname in track.known:
                track.known[item.fullname] = item.text
        self._outbox.hold(PostBatch(items, frozenset(), walked=False, begin=lambda: None, end=end))

    def _hold_filled(self, items: Sequence[ListingItem], end: Callable[[], None]) -> None:
        """Buffer posts that fill a gap. Known posts are left out: the archive may have text that was deleted since."""
        tracks = {track.name.lower(): track for feed in self._feeds for track in feed.tracks.values()}
        items = [
            item
            for item in items
            if not (track := tracks.get(item.subreddit.lower())) or item.fullname not in track.known
        ]
        fresh = frozenset(item.fullname for item in items)
        self._outbox.hold(PostBatch(items, fresh, walked=True, begin=lambda: None, end=end))

    def _send_held(self) -> None:
        """Send buffered posts, as far as the queue has room."""
        try:
            if self._outbox.send():
                self._redis_recovered()
        except (RedisError, OperationalError) as error:
            self._clock.wait(self._redis_failed(error))

    # Status.

    @property
    def hindrance(self) -> str:
        """Return the current failure of Redis or Reddit, for display; "" if there is none."""
        return self._redis_trouble or self._reddit_trouble

    def status(self) -> dict[str, Any]:
        """Return counters and state, for `feedmill status` and metrics."""
        return {
            "topics": len(self._feeds),
            "subreddits": sum(map(len, self._roster.active.values())),
            "failing": sorted(name for feed in self._feeds for name in feed.failing),
            "polls": self.polls,
            "sent": self._pusher.sent,
            "skipped": self._pusher.skipped,
            "refused": self._outbox.refused,
            "held": self._outbox.held,
            "paused": self._pusher.gate.closed,
            "looked": self._rechecks.rechecked,
            "purged": self._rechecks.purged,
            "returned": self._rechecks.returned,
            "gaps": self.gaps,
            "gaps_open": self._open_gaps,
            "filled": self._filler.filled if self._filler else 0,
            "source": self._reddit.name,
            "faults": dict(self.faults),
            "requests": self._budget.spent,
            "budget": self._budget.remaining,
            "hindrance": self.hindrance,
        }

    def report_end(self) -> None:
        """Record that the daemon stops on request. Raises redis.exceptions.RedisError."""
        self._state.store_end()

    def _store_status(self) -> float:
        self._open_gaps = len(self._state.open_gaps())
        self._state.store_status(self.status() | {"at": self._clock.time()})
        return STATUS_INTERVAL_S
