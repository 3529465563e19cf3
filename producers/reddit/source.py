"""Reddit as a live source: the new posts of every topic.

A poll walks down the joint listing of a topic's subreddits (`listing.py`). Its posts are yielded
oldest first, and the watermark of each subreddit follows once they are in the queue: a generator
continues after a `yield None` when everything before is sent. So a daemon that is killed continues
where it stopped. While the queue is full, the daemon does not continue the generator, and Reddit
keeps the posts.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from random import uniform
from typing import Any

from redis import Redis

from feedmill.producers.live.source import (
    Clock,
    Event,
    Pause,
    RequestFailed,
    Source,
    SourceFailed,
    with_retries,
)
from feedmill.producers.live.state import Gap
from feedmill.producers.push import known_ids
from feedmill.producers.reddit.arctic_shift import CROWDED, ArcticShiftClient, GapFiller
from feedmill.producers.reddit.checks import store_checked
from feedmill.producers.reddit.listing import (
    OVERLAP_S,
    ListingItem,
    ListingPage,
    SubredditUnreadable,
    Track,
    Walk,
    walk,
)
from feedmill.producers.reddit.snapshot import Listing, Snapshots, problem_of
from feedmill.producers.reddit.topics import (
    ReplacedSubreddit,
    Topics,
    choose,
    describe_replaced,
    replaced,
    store_replaced,
)
from feedmill.shared.keys import REDDIT_TRACK
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between full walks to the end of a listing, where posts reappear that a moderator
#: approved hours later.
FULL_WALK_INTERVAL_S = 6 * 3600.0
#: Seconds between checks of a topic's subreddits, and until the next one if none can be read.
CHECK_INTERVAL_S = 86_400.0
CHECK_RETRY_S = 600.0
#: Seconds until a poll that failed is repeated, at most.
POLL_RETRY_S = 60.0
#: Attempts for each page of a walk after the first page: a failure would repeat the whole walk.
PAGE_ATTEMPTS = 3
#: Lifetime of a track, in seconds, once its subreddit is no longer read. After it, reading begins
#: anew.
TRACK_TTL = 365 * 86_400
#: The archive: seconds below the watermark from which each poll reads, because posts can be
#: archived late; and the same for a full read.
ARCHIVE_OVERLAP_S = 900.0
ARCHIVE_FULL_OVERLAP_S = 12 * 3600.0


class RedditSource(Source):
    """New posts of Reddit. See `Source`.

    reddit: a RedditClient; for ArchiveSource, an ArcticShiftClient. depth: posts per topic to
    start with. Posts created later are all read. archive: fills gaps.
    """

    name = "reddit"
    #: Whether a topic's subreddits are read in one request.
    reads_jointly = True
    #: By the first recheck, most deletions have happened and scores begin to settle; by the
    #: second, nearly all have, and scores are final.
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
        self._snapshots = Snapshots(reddit, topics, clock)
        self._interval_s = settings.reddit_poll_interval
        self._sent_ttl = settings.sent_ttl
        self._clock = clock
        self._depth = depth
        self._filler: GapFiller | None = None
        if archive:
            self._filler = GapFiller(archive, redis, clock)
        #: Topic -> its subreddits that are read, best first.
        self.active: dict[str, list[str]] = {}
        for topic in topics.topics:
            self.active[topic] = []
        self._replaced: dict[str, list[ReplacedSubreddit]] = {}
        #: Topic -> times of its next poll, and of the next check of its subreddits (monotonic
        #: seconds).
        now = clock.monotonic()
        self._due = dict.fromkeys(topics.topics, now)
        self._checks = dict.fromkeys(topics.topics, now)
        #: Subreddits whose last read failed. They are read separately.
        self._failing: set[str] = set()
        #: Polls and posts that appeared late since the start, and failures by kind.
        self._polls = 0
        self._late = 0
        self._faults: Counter[str] = Counter()

    # Each subreddit has a position of its own.
    def events(self, cursor: int | None) -> Generator[Any]:  # noqa: ARG002
        """Poll the topics in turn."""
        clock = self._clock
        filler = self._filler
        due_times = self._due
        while True:
            if filler and not filler.pending():
                yield from filler.step()
            # The topic that has waited longest: else slow answers starve the last ones.
            topic = min(due_times, key=due_times.__getitem__)
            until_due = due_times[topic] - clock.monotonic()
            until_request = self.pending()
            pause = max(0.0, until_due, until_request)
            if pause > 0:
                if filler:
                    until_filling = filler.pending()
                    pause = min(pause, until_filling)
                yield Pause(pause)
                continue
            retry_s = min(self._interval_s, POLL_RETRY_S)
            due_times[topic] = clock.monotonic() + retry_s
            yield from self._poll(topic)
            self._polls += 1
            # Jitter spreads the topics' polls.
            jitter = uniform(0.9, 1.1)
            interval_s = self._interval_s * jitter
            due_times[topic] = clock.monotonic() + interval_s
            now = clock.time()
            yield Event(None, now)  # progress: the source answers

    def look_up(self, ids: Sequence[str]) -> dict[str, Event]:
        items = self._reddit.info(ids)
        events: dict[str, Event] = {}
        for fullname, item in items.items():
            events[fullname] = item.event
        return events

    def pending(self) -> float:
        budget = self._reddit.budget
        return float(budget.pending())

    # The topics' subreddits.

    def choose_subreddits(self, topic: str) -> None:
        """Choose a topic's subreddits; log and store changes.

        Raises SourceFailed; nothing has changed then.
        """
        replaced_of = replaced(self._redis)
        stored_entries = replaced_of.get(topic, [])
        before = {entry.subreddit: entry for entry in stored_entries}
        choice = choose(
            self._topics,
            topic,
            problem=self._problem,
            before=before,
            now=self._clock.time(),
        )
        active = choice.active
        entries = choice.replaced
        returning = before.keys() & set(active)
        for name in returning:
            # before they are stored as read, so that a crash in between repeats it
            self._rewind(name)
            logger.info("topic %s: reading r/%s again", topic, name)
        store_replaced(self._redis, topic, entries)
        checked_at = self._clock.time()
        store_checked(self._redis, topic, active, checked_at)
        self._replaced[topic] = entries
        for entry in entries:
            previous = before.get(entry.subreddit)
            if previous is None or previous.reason != entry.reason:
                description = describe_replaced(topic, entry)
                logger.warning("%s", description)
        if not active and self.active[topic]:
            logger.error(
                (
                    "topic %s: none of its subreddits can be read; add others to the topics file "
                    "(--reddit-topics)"
                ),
                topic,
            )
        self.active[topic] = active
        if not active:
            now = self._clock.monotonic()
            self._checks[topic] = now + CHECK_RETRY_S

    def _problem(self, name: str) -> str:
        """Return why a subreddit cannot be read, or ASLEEP; "" if it is to be read."""
        # What is unclear is read, and the poll handles its failures.
        now = self._clock.time()
        return problem_of(
            self._reddit,
            name,
            now,
            self._count,
        )

    def _rewind(self, name: str) -> None:
        """Move a subreddit's watermark back to its newest post, before it is read again.

        Joint listings silently omit a closed subreddit, and the others' posts then advance its
        watermark.
        """
        track = self._track(name)
        if track.newest:
            watermark = track.watermark or 0.0
            track.watermark = min(track.newest, watermark)
            self._store(track)

    def _track(self, name: str) -> Track:
        key = REDDIT_TRACK + name.lower()
        fields: Any = self._redis.hgetall(key)
        times: dict[str, float] = {}
        for field, value in fields.items():
            times[field] = float(value)
        track = Track(name, **times)
        has_begun = track.beginning is not None
        if has_begun and track.watermark is None:
            # A first walk that was interrupted: the next one reads down to the beginning.
            track.watermark = track.beginning
        return track

    def _store(self, track: Track) -> None:
        times: Any = vars(track)
        fields = times.copy()
        del fields["name"]
        for name, time in times.items():
            if time is None:
                del fields[name]
        key = REDDIT_TRACK + track.name.lower()
        self._redis.hset(key, mapping=fields)
        self._redis.expire(key, TRACK_TTL)

    # Reading.

    def _poll(self, topic: str) -> Generator[Any]:
        """Walk a topic's subreddits jointly; if that fails, separately, so that one does not stop
        the others.
        """
        began = self._clock.monotonic()
        if began >= self._checks[topic]:
            self.choose_subreddits(topic)
            # a check out of turn, of a subreddit that failed, does not postpone this one
            if self.active[topic]:
                ended = self._clock.monotonic()
                self._checks[topic] = ended + CHECK_INTERVAL_S
        active = self.active[topic]
        tracks = [self._track(name) for name in active]
        separate: list[Track] = []
        joint: list[Track] = []
        for track in tracks:
            # A full walk reads each subreddit separately: in a joint listing, a busy one crowds
            # out the others.
            is_failing = track.name in self._failing
            if is_failing or self._is_full_due(track):
                separate.append(track)
            else:
                joint.append(track)
        if len(joint) > 1 and self.reads_jointly:
            try:
                yield from self._read(joint)
                joint = []
            except RequestFailed as fault:
                self._count(fault)
        separate += joint
        for track in separate:
            yield from self._read_separately(topic, track)
        names = {track.name for track in tracks}
        if names and names <= self._failing:
            raise SourceFailed(f"no subreddit of topic {topic} can be read")

    def _is_full_due(self, track: Track) -> bool:
        """Return whether a walk to the end of the listing is due."""
        if track.full is None:
            return False
        now = self._clock.time()
        since_full_s = now - track.full
        # A time in the future was noted while the clock was wrong.
        return not 0 <= since_full_s < FULL_WALK_INTERVAL_S

    def _read_separately(self, topic: str, track: Track) -> Generator[Any]:
        is_full = self._is_full_due(track)
        try:
            yield from self._read([track], is_full)
        except RequestFailed as fault:
            self._count(fault)
            if isinstance(fault, SubredditUnreadable):
                self.choose_subreddits(topic)  # replaces it
            elif track.name not in self._failing:
                self._failing.add(track.name)
                logger.warning(
                    "cannot read r/%s: %s; retrying with each poll", track.name, fault
                )
            return
        if is_full:
            track.full = self._clock.time()
            self._store(track)
        if track.name in self._failing:
            self._failing.remove(track.name)
            logger.info("r/%s can be read again", track.name)

    def _read(self, tracks: Sequence[Track], is_full: bool = False) -> Generator[Any]:
        """Walk the subreddits' joint listing, and send new posts. Raises SourceFailed."""
        names = [track.name for track in tracks]
        fetch = partial(self._page, names)
        overlap = self._sent_ttl if is_full else OVERLAP_S
        result = walk(
            fetch,
            tracks,
            overlap=overlap,
            depth=self._depth,
        )
        separate: list[Track] = []
        if len(tracks) > 1:
            separate = result.missed
        joint = [track for track in tracks if track not in separate]
        yield from self._send(result, joint)
        # The joint listing is too short for them: walk each subreddit's own listing of a thousand
        # posts.
        for track in separate:
            yield from self._read([track])

    def _page(self, names: Sequence[str], after: str | None) -> ListingPage:
        attempts = 1 if after is None else PAGE_ATTEMPTS
        fetch: Callable[[], ListingPage] = partial(
            self._reddit.page,
            names,
            after=after,
        )
        return with_retries(
            fetch,
            self._clock,
            attempts,
            RequestFailed,
            self._count,
        )

    def _send(self, result: Walk, tracks: Sequence[Track]) -> Generator[Any]:
        """Yield the walk's posts of these subreddits that are new or edited, and the gaps; then
        advance watermarks.
        """
        if result.empty:
            return
        now = self._clock.time()
        for track in tracks:
            if track in result.missed:
                since = track.watermark or 0.0
                yield Gap(
                    source=self.name,
                    subreddit=track.name,
                    since=since,
                    # Reddit's times are whole seconds: the second of the oldest post may not be
                    # complete.
                    until=result.frontier(since) + 1,
                    noted=now,
                )
            if track.beginning is None:
                # From now on followed from the oldest post found, even if sending is interrupted.
                track.beginning = result.oldest
                track.full = now
                self._store(track)
        yield from self._new(result.items, tracks)
        yield None
        for track in tracks:
            name = track.name.lower()
            own_items = [
                item for item in result.items if item.subreddit.lower() == name
            ]
            own_times = [item.created_utc for item in own_items]
            newest_before = track.newest or 0.0
            own_newest = max([newest_before, *own_times])
            # A post dated in the future must not advance the watermark beyond now.
            watermark = min(result.newest, now)
            watermark_before = track.watermark or 0.0
            track.watermark = max(watermark_before, watermark)
            track.newest = min(own_newest, now)
            self._store(track)

    def _new(
        self, items: Iterable[ListingItem], tracks: Sequence[Track]
    ) -> list[Event]:
        """Return the posts that are new or edited, and those that appeared late and were never
        sent, which are counted.
        """
        track_of: dict[str, Track] = {}
        for track in tracks:
            key = track.name.lower()
            track_of[key] = track
        now = self._clock.time()
        recorded = now - self._sent_ttl
        included: list[ListingItem] = []
        new: set[str] = set()
        for item in items:
            key = item.subreddit.lower()
            if key not in track_of:
                continue
            track = track_of[key]
            if not track.includes(item):
                continue
            included.append(item)
            if track.is_new(item, recorded):
                new.add(item.fullname)
        late: list[str] = []
        for item in included:
            is_old = item.fullname not in new
            if is_old and item.created_utc >= recorded:
                late.append(item.fullname)
        sent_ids = known_ids(self._redis, late)
        never_sent = set(late) - sent_ids
        self._late += len(never_sent)
        new |= never_sent
        to_send = [item for item in included if item.fullname in new]
        return [item.event for item in to_send]

    def _count(self, fault: Exception) -> None:
        kind = type(fault).__name__
        self._faults[kind] += 1

    def status(self) -> dict[str, Any]:
        active = set(chain.from_iterable(self.active.values()))
        entries = chain.from_iterable(self._replaced.values())
        filled = 0
        if self._filler:
            filled = self._filler.filled
        return {
            "topics": len(self.active),
            "subreddits": len(active),
            "verified": self.active,
            "failing": sorted(active & self._failing),
            "replaced": [entry._asdict() for entry in entries],
            "polls": self._polls,
            "earlier": self._late,
            "filled": filled,
            "requests": self._reddit.budget.spent,
            "budget": self._reddit.budget.remaining,
            "faults": self._faults,
        }

    # Snapshots.

    def snapshot(
        self, names: Sequence[str], listing: Listing, problems: list[str]
    ) -> Iterator[Post]:
        """Yield the posts of a topic's subreddits in a listing, except pinned, deleted and removed
        ones.

        Adds to `problems` why posts could not be read. Raises SourceFailed.
        """
        yield from self._snapshots.posts(
            names,
            listing,
            problems,
        )


class ArchiveSource(RedditSource):
    """Reddit's posts from Arctic Shift: the same topics, state and rechecks, but another way of
    reading.

    The archive serves posts from any time onwards, oldest first. A poll therefore reads each
    subreddit upwards from its watermark, a little below it for posts that were archived late.
    Nothing overflows, so a daemon that was away catches up.
    """

    reads_jointly = False
    #: The archive reads posts again about 36 hours after they were written.
    recheck_delays = (40 * 3_600.0,)

    def _read(self, tracks: Sequence[Track], is_full: bool = False) -> Generator[Any]:
        """Read a subreddit's posts from its watermark on, and send new ones.

        Raises SourceFailed.
        """
        (track,) = tracks
        if track.watermark is None:
            topics = self.active.values()
            (active,) = [names for names in topics if track.name in names]
            share = math.ceil(self._depth / len(active))
            items = self._reddit.newest(track.name, share)
            result = Walk(
                items=items,
                missed=[],
                order=items[::-1],
            )
            yield from self._send(result, tracks)
            return
        overlap = ARCHIVE_FULL_OVERLAP_S if is_full else ARCHIVE_OVERLAP_S
        beginning = track.beginning or 0.0
        below_watermark = track.watermark - overlap
        since = max(beginning, below_watermark)
        more = True
        while more:
            fetch = partial(
                self._reddit.since,
                track.name,
                since,
            )
            span = with_retries(
                fetch,
                self._clock,
                PAGE_ATTEMPTS,
                RequestFailed,
                self._count,
            )
            crowded = span.crowded
            if crowded is not None:
                yield Gap(
                    source=self.name,
                    subreddit=track.name,
                    since=crowded,
                    until=crowded + 1,
                    noted=self._clock.time(),
                    problem=CROWDED,
                )
            result = Walk(
                items=span.items,
                missed=[],
                order=span.items[::-1],
            )
            yield from self._send(result, tracks)
            since = span.reached
            more = span.more
