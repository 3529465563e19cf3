"""Reddit's persistent state in Redis: tracks of subreddits, replaced subreddits, due rechecks.

Tracks are cached. Every method may be repeated after a crash during it. All raise redis.exceptions.RedisError.
"""

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.live.clock import Clock
from feedmill.producers.live.state import Gaps
from feedmill.producers.reddit.listing import ListingItem, events_of
from feedmill.producers.reddit.walk import Track
from feedmill.shared.keys import REDDIT_RECHECKS, REDDIT_SUBSTITUTES, reddit_track_key

#: Seconds after sending at which a post is rechecked. By the first, most deletions have happened and scores begin to
#: settle; by the second, nearly all have, and scores are final.
RECHECK_DELAYS_S = (3_600.0, 36 * 3_600.0)
#: The same for posts from Arctic Shift, which reads posts again about 36 hours after they were written.
ARCHIVE_RECHECK_DELAYS_S = (40 * 3_600.0,)
#: Posts sent and recorded at a time.
POSTS_AT_ONCE = 256
#: Lifetime of a track, in seconds, once its subreddit is no longer read. After it, reading begins anew.
TRACK_TTL = 365 * 86_400
#: Lifetime of due rechecks, in seconds, while no daemon runs. Longer than the longest delay of a recheck.
RECHECKS_TTL = 30 * 86_400


class ReplacedSubreddit(NamedTuple):
    """A subreddit that is not read, the reason, since when (seconds since 1970), and its substitute."""

    subreddit: str
    reason: str
    since: float
    by: str | None


class RecheckReason(StrEnum):
    """Reasons for rechecking a post."""

    #: Its score and text may have changed.
    ROUTINE = "."
    #: It was removed, or missing from the response, and may come back before it is purged.
    WAITING = "w"
    #: It was purged after a removal, and may come back.
    PURGED = "x"


class Recheck(NamedTuple):
    """A scheduled recheck of a post.

    stage: index into the delays. text: digest of the text that was sent.
    at: in seconds since 1970: when the post was first found removed or missing; of a purged post, its tombstone's time.
    """

    fullname: str
    subreddit: str
    text: str
    stage: int = 0
    reason: RecheckReason = RecheckReason.ROUTINE
    at: int = 0

    @property
    def member(self) -> str:
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def of(cls, member: str) -> "Recheck":
        fullname, subreddit, text, stage, reason, at = json.loads(member)
        return cls(fullname, subreddit, text, stage, RecheckReason(reason), at)


class State:
    """Access to Reddit's state. recheck_delays: seconds after sending at which posts are rechecked."""

    def __init__(
        self, redis: Redis, clock: Clock | None = None, recheck_delays: Sequence[float] = RECHECK_DELAYS_S
    ) -> None:
        self._redis = redis
        self._clock = clock or Clock()
        self._tracks: dict[str, Track] = {}
        self.recheck_delays = recheck_delays
        self.gaps = Gaps(redis)

    def forget_cached(self) -> None:
        """Read tracks from Redis again, after a failure."""
        self._tracks.clear()

    def track(self, name: str) -> Track:
        """Return the track of a subreddit."""
        if name.lower() not in self._tracks:
            fields: Any = self._redis.hgetall(reddit_track_key(name.lower()))
            times = {key: float(fields.pop(key)) for key in ("beginning", "watermark", "full") if key in fields}
            if "beginning" in times:
                # A first walk that was interrupted: the next one reads down to the beginning.
                times.setdefault("watermark", times["beginning"] + 1)
            known = {fullname: (float(at), text) for fullname, (at, text) in _split(fields)}
            self._tracks[name.lower()] = Track(name, **times, known=known)
        return self._tracks[name.lower()]

    def advance(self, track: Track, watermark: float) -> None:
        """Store a track, and its watermark: all posts created until then are known."""
        track.watermark = watermark
        self.store(track)

    def store(self, track: Track) -> None:
        times = {"beginning": track.beginning, "watermark": track.watermark, "full": track.full}
        key = reddit_track_key(track.name.lower())
        self._redis.hset(key, mapping={name: time for name, time in times.items() if time is not None})
        self._redis.expire(key, TRACK_TTL)

    def send(self, items: Sequence[ListingItem], known: bool = True) -> Generator[Any]:
        """Yield posts. Once they are in the queue, record them as known, and schedule rechecks of new ones."""
        for start in range(0, len(items), POSTS_AT_ONCE):
            part = items[start : start + POSTS_AT_ONCE]
            yield from events_of(part)
            # Posts that were removed before they could be read may be approved later.
            self.schedule(
                item
                for item in part
                if item.fullname not in self.track(item.subreddit).known
                and (item.gone == "removed" or (item.post and not item.gone))
            )
            if known:
                self.commit(part)

    def commit(self, items: Iterable[ListingItem]) -> None:
        """Record items that are in the queue as known, or that need not be sent."""
        by_name: dict[str, list[ListingItem]] = {}
        for item in items:
            by_name.setdefault(item.subreddit, []).append(item)
        pipe: Any = self._redis.pipeline()
        for name, learned in by_name.items():
            evicted = self.track(name).learn(learned)
            key = reddit_track_key(name.lower())
            pipe.hset(key, mapping={item.fullname: f"{item.created_utc} {item.text}" for item in learned})
            if evicted:
                pipe.hdel(key, *evicted)
            pipe.expire(key, TRACK_TTL)
        pipe.execute()

    def schedule(self, items: Iterable[ListingItem]) -> None:
        """Schedule the first recheck of posts."""
        members = (Recheck(item.fullname, item.subreddit, item.text).member for item in items)
        if due := dict.fromkeys(members, self._clock.time() + self.recheck_delays[0]):
            self._redis.zadd(REDDIT_RECHECKS, due, nx=True)
            self._redis.expire(REDDIT_RECHECKS, RECHECKS_TTL)

    def rewind(self, name: str) -> None:
        """Move a subreddit's watermark back to its newest known post, before it is read again.

        Joint listings silently omit a closed subreddit, and the others' posts then advance its watermark.
        """
        if (track := self.track(name)).known:
            self.advance(track, max(created for created, _ in track.known.values()))

    def replaced(self) -> dict[str, list[ReplacedSubreddit]]:
        """Return the subreddits that are not read, by topic."""
        found: Any = self._redis.hgetall(REDDIT_SUBSTITUTES)
        return {topic: [ReplacedSubreddit(*entry) for entry in json.loads(value)] for topic, value in found.items()}

    def replace(self, topic: str, replaced: Sequence[ReplacedSubreddit]) -> None:
        """Store which of a topic's subreddits are not read."""
        self._redis.hset(REDDIT_SUBSTITUTES, topic, json.dumps(replaced))

    def due(self, now: float, count: int) -> list[Recheck]:
        """Return up to `count` rechecks that are due."""
        members: Any = self._redis.zrange(REDDIT_RECHECKS, "-inf", now, byscore=True, offset=0, num=count)
        return [Recheck.of(member) for member in members]

    def finish_rechecks(self, done: Iterable[Recheck], again: Mapping[Recheck, float]) -> None:
        """Remove finished rechecks, and schedule those in `again` at their times."""
        pipe: Any = self._redis.pipeline()
        later = {recheck.member: due for recheck, due in again.items()}
        if later:
            pipe.zadd(REDDIT_RECHECKS, later)
            pipe.expire(REDDIT_RECHECKS, RECHECKS_TTL)
        if members := [member for recheck in done if (member := recheck.member) not in later]:
            pipe.zrem(REDDIT_RECHECKS, *members)
        pipe.execute()


def _split(fields: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    return ((fullname, value.split(" ")) for fullname, value in fields.items())
