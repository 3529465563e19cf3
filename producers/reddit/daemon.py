"""The daemon's loop: each topic's new posts, again and again, for months.

A poll walks down the joint listing of a topic's subreddits (`walk.py`). What it finds is held until it is in the queue,
the oldest first, and only then written down as known: so what is known has no holes, and a process that is killed at
any moment goes on where its predecessor stopped. While the queue is full, polls come more rarely and what they find is
held; when too much is, they stop, and Reddit keeps the posts.
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
from redis.exceptions import RedisError as RedisFault

from producers.push import FULL_QUEUE_PAUSE, Pusher
from producers.reddit.backoff import Backoff
from producers.reddit.budget import Budget
from producers.reddit.client import Reddit, refused_credentials
from producers.reddit.clock import Clock
from producers.reddit.looks import Looks
from producers.reddit.outbox import Batch, Outbox
from producers.reddit.state import Gap, State
from producers.reddit.subreddits import Roster
from producers.reddit.things import CredentialsRefused, Fault, Item, Outage, Page, TooMany, Unreadable
from producers.reddit.topics import Topics
from producers.reddit.walk import Track, Walk, walk
from shared.errors import CredentialsError
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds before the watermark to which every walk goes on: posts can appear that late.
OVERLAP = 300.0
#: Seconds between two walks through all that a listing holds: posts that a moderator has let in hours later lie deep.
DEEP = 6 * 3600.0
#: Seconds between two checks of a topic's subreddits, and until the next one when one failed.
CHECK = 86_400.0
CHECK_AGAIN = 600.0
#: A page that is not the first of a walk is asked for so many times.
PAGE_TRIES = 3
#: Posts that are held for a full queue, at most, before polls stop.
MAX_HELD = 5_000
#: While the queue is full, polls come this much more rarely.
SLOWER = 4
#: Seconds between two words on how it goes, for `feedmill status`.
TELL = 10.0


@dataclass
class Trouble:
    """A subreddit that fails, and when it is tried again (monotonic seconds)."""

    backoff: Backoff = field(default_factory=Backoff)
    due: float = 0.0


@dataclass
class Feed:
    """A topic, and what is known of the subreddits that are read for it."""

    topic: str
    #: When its listings are next walked to their end (seconds since 1970: a new process goes by it, too).
    deep: float
    tracks: dict[str, Track] = field(default_factory=dict)
    trouble: dict[str, Trouble] = field(default_factory=dict)


@dataclass
class Job:
    """Something that is done again and again. run: does it, and returns the seconds until the next time."""

    run: Callable[[], float]
    due: float = 0.0
    #: It asks Reddit: waits for tokens, and while Reddit is away.
    asks: bool = True


class Daemon:
    """Reads topics for as long as `step` is called. For one thread.

    depth: posts of a topic that are read to begin with; all that come later are.
    """

    def __init__(
        self,
        reddit: Reddit,
        budget: Budget,
        redis: Redis,
        pusher: Pusher,
        topics: Topics,
        settings: Settings,
        clock: Clock,
        depth: int,
    ) -> None:
        self._reddit = reddit
        self._budget = budget
        self._pusher = pusher
        self._settings = settings
        self._clock = clock
        self._depth = depth
        self._state = State(redis)
        self._roster = Roster(reddit, topics, self._state, clock)
        self._looks = Looks(reddit, redis, self._state, settings, clock, self._hold_seen)
        walked = self._state.deep_walks(topics.topics, clock.time())
        self._feeds = [Feed(topic, deep=walked[topic] + DEEP) for topic in topics.topics]
        self._outbox = Outbox(pusher, self._state, settings, clock)
        self._resting = Backoff()
        self._redis_resting = Backoff(longest=30.0)
        #: Walks and gaps since the start, and faults by their kind.
        self.polls = self.gaps = 0
        self.faults: Counter[str] = Counter()
        #: What Reddit, and Redis, do to keep it from working; "" while they do nothing.
        self._reddit_trouble = self._redis_trouble = ""
        start = clock.monotonic()
        # The first time in this order.
        self._jobs = [Job(self._tell, start, asks=False)]
        for feed in self._feeds:
            self._jobs += [Job(partial(self._check, feed), start), Job(partial(self._poll, feed), start)]
        self._jobs.append(Job(self._looks.run, start))

    def step(self) -> float:
        """Do one thing that is due; returns the seconds until there is another.

        Raises Stopped when the process is asked to end, and CredentialsError when Reddit refuses them at first.
        """
        self._publish()
        now = self._clock.monotonic()
        job = min(self._jobs, key=lambda job: job.due)
        pause = job.due - now
        if pause <= 0 and job.asks and (pause := self._budget.pending()) > 0:
            # Waiting for a token in the middle of a job would keep the others from their work.
            job = min((job for job in self._jobs if not job.asks), key=lambda job: job.due)
            pause = min(pause, max(0.0, job.due - now))
        if pause > 0:
            return min(pause, FULL_QUEUE_PAUSE) if self._outbox.held else pause
        job.due = now + self._guarded(job)
        return 0.0

    def _guarded(self, job: Job) -> float:
        """Run a job; what keeps every job from working makes all of them wait. Returns seconds until its next time."""
        asked = self._budget.spent
        try:
            pause = job.run()
        except (RedisFault, OperationalError) as error:
            return self._without_redis(error)
        except Outage as fault:
            return self._without_reddit(fault)
        except Fault as fault:
            self.faults[type(fault).__name__] += 1
            logger.warning("%s", fault)
            return self._resting.next()
        except Exception:
            # A mistake of ours in one job must not end the others; it is tried again, more and more rarely.
            self.faults["unexpected"] += 1
            logger.exception("unexpected; the other jobs go on")
            return self._resting.next()
        if self._budget.spent > asked:
            self._resting.failures = 0
            if self._reddit_trouble:
                logger.info("Reddit answers again")
            self._reddit_trouble = ""
        if not job.asks:
            self._redis_answers()  # that is whom the others ask
        return pause

    def _redis_answers(self) -> None:
        self._redis_resting.failures = 0
        if self._redis_trouble:
            logger.info("Redis answers again")
        self._redis_trouble = ""

    def _without_redis(self, error: Exception) -> float:
        if not self._redis_resting.failures:
            logger.error("Redis at %s does not answer (%s); waiting for it", self._settings.redis_address, error)
        self._redis_trouble = "Redis does not answer"
        return self._redis_resting.next()

    def _without_reddit(self, fault: Outage) -> float:
        """Nothing is asked of Reddit for a while."""
        self.faults[type(fault).__name__] += 1
        if isinstance(fault, CredentialsRefused) and not self.polls:
            raise CredentialsError(refused_credentials(self._settings)) from fault
        pause = self._resting.next()
        if isinstance(fault, TooMany) and fault.retry_after is not None:
            pause = max(pause, fault.retry_after)
        refused = isinstance(fault, CredentialsRefused)
        self._reddit_trouble = refused_credentials(self._settings) if refused else str(fault)
        logger.warning("%s; Reddit is asked again in %.0f s", self._reddit_trouble.rstrip("."), pause)
        self._budget.pause(pause)
        return 0.0  # the budget lets nothing pass until then

    # What is read.

    def _check(self, feed: Feed) -> float:
        """Which of a topic's subreddits are read."""
        try:
            self._roster.check(feed.topic)
        except Fault as fault:
            self.faults[type(fault).__name__] += 1
            logger.warning("%s: the subreddits could not be checked (%s); that is tried again", feed.topic, fault)
            return CHECK_AGAIN
        return CHECK if self._roster.active[feed.topic] else CHECK_AGAIN

    def _follow(self, feed: Feed) -> None:
        """Read what the roster says."""
        names = self._roster.active[feed.topic]
        if list(feed.tracks) != names:
            feed.tracks = {name: feed.tracks.get(name) or self._state.track(name) for name in names}
            feed.trouble = {name: trouble for name, trouble in feed.trouble.items() if name in names}

    def _poll(self, feed: Feed) -> float:
        """Walk a topic's subreddits together; each alone where that fails, so that the others go on."""
        if self._outbox.held >= MAX_HELD:
            return self._interval()
        self._follow(feed)
        now = self._clock.monotonic()
        deep = self._clock.time() >= feed.deep
        well = [track for name, track in feed.tracks.items() if name not in feed.trouble]
        alone = [feed.tracks[name] for name, trouble in feed.trouble.items() if trouble.due <= now]
        # To the end of a listing each is walked alone: in a joint one a busy one leaves the others no place.
        if len(well) > 1 and not deep:
            try:
                self._walk(feed, well, deep)
            except Fault as fault:
                self.faults[type(fault).__name__] += 1
                alone += well
        else:
            alone += well
        for track in alone:
            self._walk_alone(feed, track, deep)
        if deep:
            feed.deep = self._clock.time() + DEEP
            self._state.walked_deep(feed.topic, self._clock.time())
        self.polls += 1
        pauses = [trouble.due - self._clock.monotonic() for trouble in feed.trouble.values()]
        return max(0.0, min([self._interval(), *pauses]))

    def _walk_alone(self, feed: Feed, track: Track, deep: bool) -> None:
        try:
            self._walk(feed, [track], deep)
        except Unreadable as fault:
            self.faults[type(fault).__name__] += 1
            self._roster.drop(feed.topic, track.name, fault.why)
        except Fault as fault:
            self.faults[type(fault).__name__] += 1
            trouble = feed.trouble.setdefault(track.name, Trouble())
            pause = trouble.backoff.next()
            trouble.due = self._clock.monotonic() + pause
            log = logger.warning if trouble.backoff.failures == 1 else logger.debug
            log("r/%s: %s; tried again in %.0f s, the others go on", track.name, fault, pause)
        else:
            if feed.trouble.pop(track.name, None):
                logger.info("r/%s: it goes on", track.name)

    def _interval(self) -> float:
        # A little different each time: the topics then do not all come at once.
        interval = self._settings.reddit_poll_interval * uniform(0.9, 1.1)
        return interval * (SLOWER if self._pusher.gate.closed else 1)

    def _walk(self, feed: Feed, tracks: Sequence[Track], deep: bool) -> None:
        """Walk these subreddits' joint listing, and hold what is new. Raises Fault."""
        fetch = partial(self._page, [track.name for track in tracks])
        found = walk(fetch, tracks, overlap=float("inf") if deep else OVERLAP, depth=self._depth)
        if found.missed and len(tracks) > 1:
            # Together they are too much for one listing; each alone has as many places as all had.
            self._hold_walk(feed, found, [track for track in tracks if track not in found.missed])
            for track in found.missed:
                self._walk(feed, [track], deep)
        else:
            self._hold_walk(feed, found, tracks)

    def _page(self, names: Sequence[str], after: str | None) -> Page:
        """One page. Deep in a walk a fault is not yet the end of it: the pages before would be read once more."""
        for _ in range(0 if after is None else PAGE_TRIES - 1):
            try:
                return self._reddit.page(names, after=after)
            except Unreadable:
                raise
            except Fault as fault:
                self.faults[type(fault).__name__] += 1
                self._clock.wait(uniform(0.5, 1.5))
        return self._reddit.page(names, after=after)

    def _hold_walk(self, feed: Feed, found: Walk, tracks: Sequence[Track]) -> None:
        """Hold what a walk found that is new of these subreddits, or edited, with what it says of gaps."""
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
        # Reddit tells whole seconds: of the last one there may be others.
        gaps = [Gap(track.name, track.watermark or 0.0, found.oldest + 1, now) for track in missed]
        # A first walk promises all that comes after its oldest post, even when it is interrupted.
        beginnings = {track.name: found.oldest for track in tracks if track.beginning is None}
        newest = min(found.newest, now)  # a post of the future must not stand for all that comes until then
        ahead = [track for track in tracks if newest > (track.watermark or 0.0)]
        for track in tracks:
            track.learn(item for item in items if item.subreddit.lower() == track.name.lower())
            track.watermark = max(track.watermark or 0.0, newest)
            track.beginning = beginnings.get(track.name, track.beginning)
        if changed or gaps or ahead:
            begin, end = partial(self._begin, beginnings, gaps), partial(self._advance, feed, ahead, newest)
            self._outbox.hold(Batch(changed, fresh, walked=True, begin=begin, end=end))

    def _begin(self, beginnings: dict[str, float], gaps: Sequence[Gap]) -> None:
        if not beginnings and not gaps:
            return
        self._state.begin(beginnings, gaps)
        self.gaps += len(gaps)
        for gap in gaps:
            logger.error(
                "r/%s: posts of %.0f minutes are out of reach, since Reddit lists no more than a thousand; "
                "`feedmill ingest gaps` lists such gaps",
                gap.subreddit,
                (gap.until - gap.since) / 60,
            )

    def _advance(self, feed: Feed, tracks: Sequence[Track], until: float) -> None:
        """All of these subreddits is dealt with until then. Not of one that was closed meanwhile: it begins anew."""
        self._state.advance({track.name: until for track in tracks if feed.tracks.get(track.name) is track})

    def _hold_seen(self, items: Sequence[Item], end: Callable[[], None]) -> None:
        """Hold posts that were looked at again: the pusher knows whose text has changed."""
        self._outbox.hold(Batch(items, frozenset(), walked=False, begin=lambda: None, end=end))

    def _publish(self) -> None:
        """Send what is held, as far as the queue has room."""
        try:
            if self._outbox.send():
                self._redis_answers()
        except (RedisFault, OperationalError) as error:
            self._clock.wait(self._without_redis(error))

    # What is told.

    @property
    def hindrance(self) -> str:
        """What keeps it from working, for people; "" while nothing does."""
        return self._redis_trouble or self._reddit_trouble

    def status(self) -> dict[str, Any]:
        """How it goes, in figures."""
        return {
            "topics": len(self._feeds),
            "subreddits": sum(map(len, self._roster.active.values())),
            "failing": sorted(name for feed in self._feeds for name in feed.trouble),
            "polls": self.polls,
            "sent": self._pusher.sent,
            "skipped": self._pusher.skipped,
            "refused": self._outbox.refused,
            "held": self._outbox.held,
            "paused": self._pusher.gate.closed,
            "looked": self._looks.looked,
            "purged": self._looks.purged,
            "gaps": self.gaps,
            "faults": dict(self.faults),
            "requests": self._budget.spent,
            "budget": self._budget.remaining,
            "hindrance": self.hindrance,
        }

    def _tell(self) -> float:
        self._state.tell(self.status() | {"at": self._clock.time()})
        return TELL
