"""Reddit as a live source: the new posts of every topic.

A poll walks down the joint listing of a topic's subreddits (`listing.py`). Its posts are yielded oldest first, and the
watermark of each subreddit follows once they are in the queue: a generator continues after a `yield None` when
everything before is sent. So a daemon that is killed continues where it stopped. While the queue is full, the daemon
does not continue the generator, and Reddit keeps the posts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from random import uniform
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.live.source import Clock, Event, Pause, RequestFailed, Source, SourceFailed, with_retries
from feedmill.producers.live.state import Gap
from feedmill.producers.push import known_ids
from feedmill.producers.reddit.arctic_shift import CROWDED, ArcticShiftClient, GapFiller
from feedmill.producers.reddit.listing import (
    OVERLAP_S,
    ListingItem,
    ListingPage,
    SubredditUnreadable,
    Track,
    Walk,
    walk,
)
from feedmill.producers.reddit.topics import ASLEEP, ReplacedSubreddit, Topics, choose, replaced, store_replaced
from feedmill.shared.keys import REDDIT_TRACK
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between full walks to the end of a listing, where posts reappear that a moderator approved hours later.
FULL_WALK_INTERVAL_S = 6 * 3600.0
#: Seconds between checks of a topic's subreddits, and until the next one if none can be read.
CHECK_INTERVAL_S, CHECK_RETRY_S = 86_400.0, 600.0
#: Seconds until a poll that failed is repeated, at most.
POLL_RETRY_S = 60.0
#: Attempts for each page of a walk after the first page: a failure would repeat the whole walk.
PAGE_ATTEMPTS = 3
#: Seconds without a new post after which a subreddit counts as asleep.
ASLEEP_AFTER_S = 30 * 86_400.0
#: Lifetime of a track, in seconds, once its subreddit is no longer read. After it, reading begins anew.
TRACK_TTL = 365 * 86_400
#: The archive: seconds below the watermark from which each poll reads, because posts can be archived late; and the same
#: for a full read.
ARCHIVE_OVERLAP_S, ARCHIVE_FULL_OVERLAP_S = 900.0, 12 * 3600.0


class Listing(NamedTuple):
    """A listing to read once.

    kind: hot, new, top or rising. limit: posts per topic. period, for top: hour, day, week, month, year or all.
    """

    kind: str
    limit: int
    period: str = ""


class RedditSource(Source):
    """New posts of Reddit. See `Source`.

    reddit: a RedditClient; for ArchiveSource, an ArcticShiftClient. depth: posts per topic to start with. Posts created
    later are all read. archive: fills gaps.
    """

    name = "reddit"
    #: Whether a topic's subreddits are read in one request.
    reads_jointly = True
    #: By the first recheck, most deletions have happened and scores begin to settle; by the second, nearly all have,
    #: and scores are final.
    recheck_delays: Sequence[float] = (3_600.0, 36 * 3_600.0)

    def __init__(
        self,
        reddit: Any,
        redis: Redis,
        topics: Topics,
        settings: Settings,
        clock: Clock,
        depth: int,
        archive: ArcticShiftClient | None = None,
    ) -> None:
        self._reddit = reddit
        self._redis = redis
        self._topics = topics
        self._interval_s = settings.reddit_poll_interval
        self._sent_ttl = settings.sent_ttl
        self._clock = clock
        self._depth = depth
        self._filler = GapFiller(archive, redis, clock) if archive else None
        #: Topic -> its subreddits that are read, best first.
        self.active: dict[str, list[str]] = {topic: [] for topic in topics.topics}
        self._replaced: dict[str, list[ReplacedSubreddit]] = {}
        #: Topic -> times of its next poll, and of the next check of its subreddits (monotonic seconds).
        self._due = dict.fromkeys(topics.topics, clock.monotonic())
        self._checks = dict.fromkeys(topics.topics, clock.monotonic())
        #: Subreddits whose last read failed. They are read separately.
        self._failing: set[str] = set()
        #: Polls since the start, and failures by kind.
        self._polls = 0
        self._faults: Counter[str] = Counter()

    def events(self, cursor: int | None) -> Generator[Any]:  # noqa: ARG002 - each subreddit has a position of its own
        """Poll the topics in turn."""
        while True:
            if self._filler and not self._filler.pending():
                yield from self._filler.step()
            # The topic that has waited longest: else slow answers starve the last ones.
            topic = min(self._due, key=self._due.__getitem__)
            if pause := max(0.0, self._due[topic] - self._clock.monotonic(), self.pending()):
                yield Pause(min(pause, self._filler.pending()) if self._filler else pause)
                continue
            self._due[topic] = self._clock.monotonic() + min(self._interval_s, POLL_RETRY_S)
            yield from self._poll(topic)
            self._polls += 1
            # Jitter spreads the topics' polls.
            self._due[topic] = self._clock.monotonic() + self._interval_s * uniform(0.9, 1.1)
            yield Event(None, self._clock.time())  # progress: the source answers

    def look_up(self, ids: Sequence[str]) -> dict[str, Event]:
        return {fullname: item.event for fullname, item in self._reddit.info(ids).items()}

    def pending(self) -> float:
        return float(self._reddit.budget.pending())

    # The topics' subreddits.

    def check(self, topic: str) -> None:
        """Choose a topic's subreddits; log and store changes. Raises SourceFailed; nothing has changed then."""
        before = {entry.subreddit: entry for entry in replaced(self._redis).get(topic, [])}
        active, entries = choose(self._topics, topic, self._problem, before, self._clock.time())
        for name in before.keys() & set(active):
            self._rewind(name)  # before they are stored as read, so that a crash in between repeats it
            logger.info("topic %s: reading r/%s again", topic, name)
        store_replaced(self._redis, topic, entries)
        self._replaced[topic] = entries
        for entry in entries:
            if entry.subreddit not in before or before[entry.subreddit].reason != entry.reason:
                instead = f"reading r/{entry.by} instead" if entry.by else "no substitute is left"
                logger.warning("topic %s: not reading r/%s (%s); %s", topic, entry.subreddit, entry.reason, instead)
        if not active and self.active[topic]:
            logger.error(
                "topic %s: none of its subreddits can be read; add others to the topics file (--reddit-topics)", topic
            )
        self.active[topic] = active
        if not active:
            self._checks[topic] = self._clock.monotonic() + CHECK_RETRY_S

    def _problem(self, name: str) -> str:
        """Return why a subreddit cannot be read, or ASLEEP; "" if it is to be read."""
        try:
            items = self._reddit.newest(name)
        except SubredditUnreadable as fault:
            return str(fault)
        except RequestFailed as fault:
            self._count(fault)
            return ""  # unclear: read it, and let the poll handle its failures
        newest = max((item.created_utc for item in items), default=0.0)
        return ASLEEP if self._clock.time() - newest > ASLEEP_AFTER_S else ""

    def _rewind(self, name: str) -> None:
        """Move a subreddit's watermark back to its newest post, before it is read again.

        Joint listings silently omit a closed subreddit, and the others' posts then advance its watermark.
        """
        track = self._track(name)
        if track.newest:
            track.watermark = min(track.newest, track.watermark or 0.0)
            self._store(track)

    def _track(self, name: str) -> Track:
        fields: Any = self._redis.hgetall(REDDIT_TRACK + name.lower())
        track = Track(name, **{field: float(value) for field, value in fields.items()})
        if track.beginning is not None and track.watermark is None:
            # A first walk that was interrupted: the next one reads down to the beginning.
            track.watermark = track.beginning
        return track

    def _store(self, track: Track) -> None:
        fields: Any = {name: value for name, value in vars(track).items() if name != "name" and value is not None}
        self._redis.hset(REDDIT_TRACK + track.name.lower(), mapping=fields)
        self._redis.expire(REDDIT_TRACK + track.name.lower(), TRACK_TTL)

    # Reading.

    def _poll(self, topic: str) -> Generator[Any]:
        """Walk a topic's subreddits jointly; if that fails, separately, so that one does not stop the others."""
        if self._clock.monotonic() >= self._checks[topic]:
            self.check(topic)
            if self.active[topic]:  # a check out of turn, of a subreddit that failed, does not postpone this one
                self._checks[topic] = self._clock.monotonic() + CHECK_INTERVAL_S
        tracks = [self._track(name) for name in self.active[topic]]
        # A full walk reads each subreddit separately: in a joint listing, a busy one crowds out the others.
        separate = [track for track in tracks if track.name in self._failing or self._is_full_due(track)]
        joint = [track for track in tracks if track not in separate]
        if len(joint) > 1 and self.reads_jointly:
            try:
                yield from self._read(joint)
                joint = []
            except RequestFailed as fault:
                self._count(fault)
        for track in separate + joint:
            yield from self._read_separately(topic, track)
        if tracks and all(track.name in self._failing for track in tracks):
            raise SourceFailed(f"no subreddit of topic {topic} can be read")

    def _is_full_due(self, track: Track) -> bool:
        return track.full is not None and self._clock.time() >= track.full + FULL_WALK_INTERVAL_S

    def _read_separately(self, topic: str, track: Track) -> Generator[Any]:
        is_full = self._is_full_due(track)
        try:
            yield from self._read([track], is_full)
        except RequestFailed as fault:
            self._count(fault)
            if isinstance(fault, SubredditUnreadable):
                self.check(topic)  # replaces it
            elif track.name not in self._failing:
                self._failing.add(track.name)
                logger.warning("cannot read r/%s: %s; retrying with each poll", track.name, fault)
            return
        if is_full:
            track.full = self._clock.time()
            self._store(track)
        if track.name in self._failing:
            self._failing.remove(track.name)
            logger.info("r/%s can be read again", track.name)

    def _read(self, tracks: Sequence[Track], is_full: bool = False) -> Generator[Any]:
        """Walk the subreddits' joint listing, and send new posts. Raises SourceFailed."""
        fetch = partial(self._page, [track.name for track in tracks])
        found = walk(fetch, tracks, overlap=self._sent_ttl if is_full else OVERLAP_S, depth=self._depth)
        separate = found.missed if len(tracks) > 1 else []
        yield from self._send(found, [track for track in tracks if track not in separate])
        # The joint listing is too short for them: walk each subreddit's own listing of a thousand posts.
        for track in separate:
            yield from self._read([track])

    def _page(self, names: Sequence[str], after: str | None) -> ListingPage:
        attempts = 1 if after is None else PAGE_ATTEMPTS
        ask: Callable[[], ListingPage] = partial(self._reddit.page, names, after=after)
        return with_retries(ask, self._clock, attempts, RequestFailed, self._count)

    def _send(self, found: Walk, tracks: Sequence[Track]) -> Generator[Any]:
        """Yield the walk's posts of these subreddits that are new or edited, and the gaps; then advance watermarks."""
        if found.empty:
            return
        now = self._clock.time()
        for track in tracks:
            if track in found.missed:
                since = track.watermark or 0.0
                # Reddit's times are whole seconds: the second of the oldest post may not be complete.
                yield Gap(self.name, track.name, since, found.frontier(since) + 1, now)
            if track.beginning is None:
                # From now on followed from the oldest post found, even if sending is interrupted.
                track.beginning, track.full = found.oldest, now
                self._store(track)
        yield from self._new(found.items, tracks)
        yield None
        for track in tracks:
            own = [item.created_utc for item in found.items if item.subreddit.lower() == track.name.lower()]
            # A post dated in the future must not advance the watermark beyond now.
            track.watermark = max(track.watermark or 0.0, min(found.newest, now))
            track.newest = min(max([track.newest or 0.0, *own]), now)
            self._store(track)

    def _new(self, items: Iterable[ListingItem], tracks: Sequence[Track]) -> list[Event]:
        """Return the posts that are new or edited, and those that appeared late and were never sent."""
        of = {track.name.lower(): track for track in tracks}
        items = [item for item in items if (own := of.get(item.subreddit.lower())) and own.includes(item)]
        recorded = self._clock.time() - self._sent_ttl
        new = {item.fullname for item in items if of[item.subreddit.lower()].is_new(item, recorded)}
        late = [item.fullname for item in items if item.fullname not in new and item.created_utc >= recorded]
        new |= set(late) - known_ids(self._redis, late)
        return [item.event for item in items if item.fullname in new]

    def _count(self, fault: Exception) -> None:
        self._faults[type(fault).__name__] += 1

    def status(self) -> dict[str, Any]:
        active = {name for names in self.active.values() for name in names}
        return {
            "topics": len(self.active),
            "subreddits": len(active),
            "failing": sorted(active & self._failing),
            "replaced": [entry._asdict() for entries in self._replaced.values() for entry in entries],
            "polls": self._polls,
            "filled": self._filler.filled if self._filler else 0,
            "requests": self._reddit.budget.spent,
            "budget": self._reddit.budget.remaining,
            "faults": self._faults,
        }

    # Snapshots.

    def snapshot(self, names: Sequence[str], listing: Listing, problems: list[str]) -> Iterator[Post]:
        """Yield the posts of a topic's subreddits in a listing, except pinned, deleted and removed ones.

        Adds to `problems` why posts could not be read. Raises SourceFailed.
        """
        if not names:
            problems.append("none of its subreddits can be read")
            return
        try:
            yield from self._listed(names, listing)
        except RequestFailed as fault:
            if len(names) == 1:
                problems.append(f"r/{names[0]}: {fault}")
                return
            # If the joint listing fails, each subreddit is read separately, for its share of the limit.
            share = listing._replace(limit=-(-listing.limit // len(names)))
            for name in names:
                yield from self.snapshot([name], share, problems)

    def _listed(self, names: Sequence[str], listing: Listing) -> Iterator[Post]:
        seen: set[str] = set()
        after = None
        while len(seen) < listing.limit:
            ask = partial(self._reddit.page, names, listing.kind, after, period=listing.period)
            page = with_retries(ask, self._clock)
            posts = [item for item in page.items if not (item.stickied or item.gone or item.fullname in seen)]
            posts = posts[: listing.limit - len(seen)]
            seen |= {item.fullname for item in posts}
            yield from (item.post for item in posts if item.post)
            after = page.after
            if after is None or not posts:
                return


class ArchiveSource(RedditSource):
    """Reddit's posts from Arctic Shift: the same topics, state and rechecks, but another way of reading.

    The archive serves posts from any time onwards, oldest first. A poll therefore reads each subreddit upwards from its
    watermark, a little below it for posts that were archived late. Nothing overflows, so a daemon that was away catches
    up.
    """

    reads_jointly = False
    #: The archive reads posts again about 36 hours after they were written.
    recheck_delays = (40 * 3_600.0,)

    def _read(self, tracks: Sequence[Track], is_full: bool = False) -> Generator[Any]:
        """Read a subreddit's posts from its watermark on, and send new ones. Raises SourceFailed."""
        (track,) = tracks
        if track.watermark is None:
            (active,) = [names for names in self.active.values() if track.name in names]
            items = self._reddit.newest(track.name, -(-self._depth // len(active)))
            yield from self._send(Walk(items, [], items[::-1]), tracks)
            return
        overlap = ARCHIVE_FULL_OVERLAP_S if is_full else ARCHIVE_OVERLAP_S
        since, more = max(track.beginning or 0.0, track.watermark - overlap), True
        while more:
            ask = partial(self._reddit.since, track.name, since)
            span = with_retries(ask, self._clock, PAGE_ATTEMPTS, RequestFailed, self._count)
            if (crowded := span.crowded) is not None:
                yield Gap(self.name, track.name, crowded, crowded + 1, self._clock.time(), problem=CROWDED)
            yield from self._send(Walk(span.items, [], span.items[::-1]), tracks)
            since, more = span.reached, span.more
