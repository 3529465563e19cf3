"""Reddit as a live source: the new posts of every topic.

A poll walks down the joint listing of a topic's subreddits (`walk.py`). Its posts are yielded oldest first, and
recorded as known only once they are in the queue: a generator continues after a `yield None` when everything before is
sent. So known posts have no holes, and a daemon that is killed continues where it stopped. While the queue is full, the
daemon does not continue the generator, and Reddit keeps the posts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import itemgetter
from random import uniform
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import RedisError

from feedmill.producers.live.budget import Retry, with_retries
from feedmill.producers.live.clock import Clock
from feedmill.producers.live.source import Event, Pause, RequestFailed, Source, SourceFailed
from feedmill.producers.live.state import Gap
from feedmill.producers.reddit.arctic_shift import ArcticShiftClient, GapFiller
from feedmill.producers.reddit.listing import (
    CredentialsRefused,
    ListingPage,
    PostSource,
    SubredditUnreadable,
)
from feedmill.producers.reddit.rechecks import Rechecker
from feedmill.producers.reddit.state import ARCHIVE_RECHECK_DELAYS_S, RECHECK_DELAYS_S, State
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
#: Attempts for each page of a walk after the first page: a failure would repeat the whole walk.
PAGE_ATTEMPTS = 3
#: The archive: seconds below the watermark from which each poll reads, because posts can be archived late; the same for
#: a full read; and maximum requests per subreddit and poll. A subreddit with more new posts continues in the next poll.
ARCHIVE_OVERLAP_S, ARCHIVE_FULL_OVERLAP_S, ARCHIVE_MAX_PAGES = 900.0, 12 * 3600.0, 10

#: A generator of events that returns the seconds until its next run.
Run = Generator[Any, None, float]


@dataclass
class Job(Retry):
    """A recurring job. reddit: the client whose requests it sends."""

    _: KW_ONLY
    run: Callable[[], Run]
    reddit: PostSource


class RedditSource(Source):
    """New posts of Reddit. See `Source`.

    depth: posts per topic to start with. Posts created later are all read. archive: fills gaps.
    """

    name = "reddit"
    #: Whether a topic's subreddits are read in one request.
    reads_jointly = True
    recheck_delays: Sequence[float] = RECHECK_DELAYS_S

    def __init__(
        self,
        reddit: PostSource,
        redis: Redis,
        topics: Topics,
        settings: Settings,
        clock: Clock,
        depth: int,
        archive: ArcticShiftClient | None = None,
    ) -> None:
        self._reddit = reddit
        self._interval_s = settings.reddit_poll_interval
        self._clock = clock
        self._depth = depth
        self._state = State(redis, clock, self.recheck_delays)
        self._roster = Roster(reddit, topics, self._state, clock)
        self._rechecks = Rechecker(reddit, redis, self._state, settings, clock)
        self._filler = GapFiller(archive, self._state, clock) if archive else None
        #: Topic -> time of the next check of its subreddits (monotonic seconds).
        self._checks = dict.fromkeys(topics.topics, clock.monotonic())
        self._failing: dict[str, Retry] = {}
        #: Polls and gaps since the start, and failures by kind.
        self._polls = self._gaps = 0
        self._faults: Counter[str] = Counter()
        now = clock.monotonic()
        # The order of the first runs.
        self._jobs = [Job(now, run=partial(self._poll, topic), reddit=reddit) for topic in topics.topics]
        self._jobs.append(Job(now, run=self._rechecks.run, reddit=reddit))
        if archive and self._filler:
            self._jobs.append(Job(now, run=self._filler.run, reddit=archive))

    def events(self, cursor: int | None) -> Generator[Any]:  # noqa: ARG002 - each subreddit has a position of its own
        """Run the jobs in turn. Raises CredentialsError if Reddit rejects the credentials at the start."""
        self._state.forget_cached()  # what was not sent is read again
        while True:
            now = self._clock.monotonic()
            # Of those that are ready, the one that has waited longest: else slow answers starve the last topics.
            ready_at, _, job = min(
                ((self._ready_at(job, now), job.due, job) for job in self._jobs), key=itemgetter(0, 1)
            )
            pause = ready_at - now
            if pause > 0:
                yield Pause(pause)
                continue
            spent = job.reddit.budget.spent
            yield from self._guarded(job)
            if job.reddit.budget.spent > spent:
                yield Event(None, self._clock.time())  # progress: the source answers

    def _ready_at(self, job: Job, now: float) -> float:
        return max(job.due, now + job.reddit.budget.pending())

    def _guarded(self, job: Job) -> Generator[Any]:
        """Run a job. Its failure does not stop the others, unless Reddit or Redis fails for all."""
        try:
            pause = yield from job.run()
        except (RedisError, OperationalError):
            raise
        except RequestFailed as fault:
            self._count(fault)
            logger.warning("%s", fault)
        except CredentialsRefused as fault:
            if not self._polls:
                raise CredentialsError(str(fault)) from fault
            raise
        except SourceFailed:
            raise
        except Exception:
            self._faults["unexpected"] += 1
            logger.exception("unexpected error in a job; other jobs continue")
        else:
            job.failures, job.due = 0, self._clock.monotonic() + pause
            return
        job.fail(self._clock.monotonic())

    def _count(self, fault: Exception) -> None:
        self._faults[type(fault).__name__] += 1

    def _check(self, topic: str) -> float:
        """Choose a topic's subreddits; return the seconds until the next check."""
        try:
            self._roster.check(topic)
        except RequestFailed as fault:
            self._count(fault)
            logger.warning("cannot check the subreddits of topic %s (%s); retrying later", topic, fault)
            return CHECK_RETRY_S
        active = {name for names in self._roster.active.values() for name in names}
        self._failing = {name: failing for name, failing in self._failing.items() if name in active}
        return CHECK_INTERVAL_S if self._roster.active[topic] else CHECK_RETRY_S

    def _poll(self, topic: str) -> Run:
        """Walk a topic's subreddits jointly; if that fails, separately, so that one does not stop the others."""
        if self._clock.monotonic() >= self._checks[topic]:
            self._checks[topic] = self._clock.monotonic() + self._check(topic)
        names = self._roster.active[topic]
        tracks = [self._track(name) for name in names]
        # A full walk reads each subreddit separately: in a joint listing, a busy one crowds out the others.
        joint = [track for track in tracks if track.name not in self._failing and not self._is_full_due(track)]
        separate = [track for track in tracks if track not in joint and self._is_due(track.name)]
        if len(joint) > 1 and self.reads_jointly:
            try:
                yield from self._walk(joint, is_full=False)
            except RequestFailed as fault:
                self._count(fault)
                separate += joint
        else:
            separate += joint
        for track in separate:
            yield from self._walk_separately(topic, track)
        self._polls += 1
        retries = [failing.due for name, failing in self._failing.items() if name in names]
        pause = self._interval_s * uniform(0.9, 1.1)  # jitter spreads the topics' polls
        return max(0.0, min([pause, *(due - self._clock.monotonic() for due in retries)]))

    def _track(self, name: str) -> Track:
        track = self._state.track(name)
        track.name = name  # as the topics file spells it
        return track

    def _is_due(self, name: str) -> bool:
        return name not in self._failing or self._failing[name].due <= self._clock.monotonic()

    def _is_full_due(self, track: Track) -> bool:
        return track.full is not None and self._clock.time() >= track.full + FULL_WALK_INTERVAL_S

    def _walk_separately(self, topic: str, track: Track) -> Generator[Any]:
        is_full = self._is_full_due(track)
        try:
            yield from self._walk([track], is_full)
        except SubredditUnreadable as fault:
            self._count(fault)
            self._failing.pop(track.name, None)
            self._roster.drop(topic, track.name, fault.why)
        except RequestFailed as fault:
            self._count(fault)
            failing = self._failing.setdefault(track.name, Retry())
            pause = failing.fail(self._clock.monotonic())
            log = logger.warning if failing.failures == 1 else logger.debug
            log("cannot read r/%s: %s; retrying in %.0f s", track.name, fault, pause)
        else:
            if is_full:
                track.full = self._clock.time()
                self._state.store(track)
            if self._failing.pop(track.name, None):
                logger.info("r/%s can be read again", track.name)

    def _walk(self, tracks: Sequence[Track], is_full: bool) -> Generator[Any]:
        """Walk the subreddits' joint listing, and send new posts. Raises SourceFailed."""
        fetch = partial(self._page, [track.name for track in tracks])
        found = walk(fetch, tracks, overlap=float("inf") if is_full else WALK_OVERLAP_S, depth=self._depth)
        if found.missed and len(tracks) > 1 and not found.empty:
            # The joint listing is too short for them: walk each subreddit's own listing of a thousand posts.
            yield from self._send_walk(found, [track for track in tracks if track not in found.missed])
            for track in found.missed:
                yield from self._walk([track], is_full)
        else:
            yield from self._send_walk(found, tracks)

    def _page(self, names: Sequence[str], after: str | None) -> ListingPage:
        attempts = 1 if after is None else PAGE_ATTEMPTS
        return with_retries(partial(self._reddit.page, names, after=after), self._clock, attempts, RequestFailed)

    def _send_walk(self, found: Walk, tracks: Sequence[Track], others: Iterable[Gap] = ()) -> Generator[Any]:
        """Send the walk's posts of these subreddits that are new or edited, and record gaps. others: further gaps."""
        if found.empty:
            return
        now = self._clock.time()
        # Reddit's times are whole seconds: the second of the oldest post may not be complete.
        gaps = [
            Gap(self.name, track.name, since := track.watermark or 0.0, found.frontier(since) + 1, now)
            for track in tracks
            if track in found.missed
        ]
        self._record(gaps := [*gaps, *others])
        for track in tracks:
            if track.beginning is None:
                # From now on followed from the oldest post found, even if sending is interrupted.
                track.beginning, track.full = found.oldest, now
                self._state.store(track)
        of = {track.name.lower(): track for track in tracks}
        yield from self._state.send(
            [
                item
                for item in found.items
                if (own := of.get(item.subreddit.lower()))
                and item.created_utc >= (own.beginning or 0.0)
                and not own.knows_text(item)
            ]
        )
        newest = min(found.newest, now)  # a post dated in the future must not advance the watermark beyond now
        for track in tracks:
            if newest > (track.watermark or 0.0):
                self._state.advance(track, newest)

    def _record(self, gaps: Iterable[Gap]) -> None:
        for gap in gaps:
            self._state.gaps.record(gap)
            self._gaps += 1
            logger.error(
                "gap in r/%s: posts of %.0f minutes may be missing, because the listing ended before the known posts; "
                "set FEEDMILL_REDDIT_FILL_GAPS to fill it",
                gap.subreddit,
                (gap.until - gap.since) / 60,
            )

    def status(self) -> dict[str, Any]:
        return {
            "topics": len(self._checks),
            "subreddits": sum(map(len, self._roster.active.values())),
            "failing": sorted(self._failing),
            "polls": self._polls,
            "rechecked": self._rechecks.rechecked,
            "purged": self._rechecks.purged,
            "returned": self._rechecks.returned,
            "gaps": self._gaps,
            "filled": self._filler.filled if self._filler else 0,
            "requests": self._reddit.budget.spent,
            "budget": self._reddit.budget.remaining,
            "faults": self._faults,
        }


class ArchiveSource(RedditSource):
    """Reddit's posts from Arctic Shift: the same topics, state and rechecks, but another way of reading.

    The archive serves posts from any time onwards, oldest first. A poll therefore reads each subreddit upwards from its
    watermark, a little below it for posts that were archived late. Nothing overflows, so a daemon that was away catches
    up.
    """

    reads_jointly = False
    recheck_delays = ARCHIVE_RECHECK_DELAYS_S

    def __init__(self, archive: ArcticShiftClient, *arguments: Any) -> None:
        super().__init__(archive, *arguments)
        self._archive = archive
        #: Subreddits not read to their end yet: name -> time from which to continue, and whether the read is full.
        self._behind: dict[str, tuple[float, bool]] = {}

    def _poll(self, topic: str) -> Run:
        pause = yield from super()._poll(topic)
        # Failing subreddits wait for their retry.
        behind = any(name in self._behind and name not in self._failing for name in self._roster.active[topic])
        return 0.0 if behind else pause

    def _walk(self, tracks: Sequence[Track], is_full: bool) -> Generator[Any]:
        """Read a subreddit's posts from its watermark on, and send new ones. Raises SourceFailed."""
        (track,) = tracks
        if track.watermark is None:
            (active,) = [names for names in self._roster.active.values() if track.name in names]
            items = self._archive.newest(track.name, -(-self._depth // len(active)))
            yield from self._send_walk(Walk(items, [], items[::-1]), tracks)
            return
        since, was_full = self._behind.get(track.name, (None, False))
        if since is None or is_full > was_full:
            overlap = ARCHIVE_FULL_OVERLAP_S if is_full else ARCHIVE_OVERLAP_S
            since = max(track.beginning or 0.0, track.watermark - overlap)
        for _ in range(ARCHIVE_MAX_PAGES):
            span = self._archive.since(track.name, since)
            crowded = span.crowded
            gaps = [] if crowded is None else [Gap(self.name, track.name, crowded, crowded + 1, self._clock.time())]
            yield from self._send_walk(Walk(span.items, [], span.items[::-1]), tracks, gaps)
            since = span.reached
            self._behind[track.name] = since, is_full or was_full
            if not span.more:
                del self._behind[track.name]
                return
