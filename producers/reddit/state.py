"""The daemon's persistent state in Redis: known posts, watermarks, gaps, replaced subreddits, due rechecks.

Every method may be repeated after a crash during it. All raise redis.exceptions.RedisError.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.reddit.listing import ListingItem
from feedmill.producers.reddit.walk import MAX_KNOWN_POSTS, Track
from feedmill.shared.keys import (
    REDDIT_BEGINNINGS,
    REDDIT_FULL_READS,
    REDDIT_GAPS,
    REDDIT_RECHECKS,
    REDDIT_STATUS,
    REDDIT_SUBSTITUTES,
    REDDIT_WATERMARKS,
    reddit_known_key,
    reddit_texts_key,
)

#: Seconds after sending at which a post is rechecked. By the first, most deletions have happened and scores begin to
#: settle; by the second, nearly all have, and scores are final.
RECHECK_DELAYS_S = (3_600.0, 36 * 3_600.0)
#: The same for posts from Arctic Shift, which reads posts again about 36 hours after they were written.
ARCHIVE_RECHECK_DELAYS_S = (40 * 3_600.0,)
#: Seconds before the watermark for which posts of a subreddit are read whose known posts have expired.
EXPIRED_OVERLAP_S = 300.0
#: Lifetime of a subreddit's known posts, in seconds, once it is no longer read.
KNOWN_TTL = 90 * 86_400
#: Lifetime of due rechecks, in seconds, while no daemon runs. Longer than the longest delay of a recheck.
RECHECKS_TTL = 30 * 86_400
#: Maximum number of stored gaps; the oldest are deleted first.
MAX_GAPS = 10_000
#: Lifetime of the daemon's status in seconds.
STATUS_TTL = 120
#: Value instead of a status after a daemon was stopped on request.
ENDED = "ended"


class Gap(NamedTuple):
    """A period in which posts of a subreddit could not be read.

    The posts were created after `since` and before `until`, in seconds since 1970.
    """

    subreddit: str
    since: float
    until: float
    #: Time of detection.
    noted: float
    #: Time up to which the gap has been filled so far; 0 at first.
    reached: float = 0.0
    #: Number of posts found there.
    found: int = 0
    #: Time at which the gap was filled; 0 while it is open.
    filled: float = 0.0
    #: Reason why the latest attempt to fill it failed.
    problem: str = ""

    @property
    def field(self) -> str:
        return f"{self.subreddit} {self.since:.0f}"


class ReplacedSubreddit(NamedTuple):
    """A subreddit that is not read, the reason, since when (seconds since 1970), and its substitute."""

    subreddit: str
    topic: str
    reason: str
    since: float
    by: str | None


class RecheckReason(StrEnum):
    """Reasons for rechecking a post."""

    #: Its score and text may have changed.
    ROUTINE = "."
    #: It was missing from the previous response, perhaps only temporarily.
    ABSENT = "?"
    #: It was removed, or its subreddit closed, and may come back before it is purged.
    WAITING = "w"
    #: It was purged after a removal, and may come back.
    PURGED = "x"


class Recheck(NamedTuple):
    """A scheduled recheck of a post.

    stage: index into the delays. text: digest of the text that was sent; "" if unknown.
    at: in seconds since 1970: when the post was first found absent or removed; of a purged post, its tombstone's time.
    """

    fullname: str
    stage: int = 0
    reason: RecheckReason = RecheckReason.ROUTINE
    subreddit: str = ""
    text: str = ""
    at: int = 0

    @property
    def member(self) -> str:
        head = f"{self.stage}{self.reason}{self.fullname}"
        # Entries of earlier versions have no details.
        details = self.subreddit or self.text or self.at
        return f"{head} {self.subreddit} {self.text or '-'} {self.at}" if details else head

    @classmethod
    def of(cls, member: str) -> "Recheck":
        fullname, *details = member[2:].split(" ")
        subreddit, text, at = details or ("", "-", "0")
        return cls(fullname, int(member[0]), RecheckReason(member[1]), subreddit, text.removeprefix("-"), int(at))


class State:
    """Access to the daemon's state in Redis. recheck_delays: seconds after sending at which posts are rechecked."""

    def __init__(self, redis: Redis, recheck_delays: Sequence[float] = RECHECK_DELAYS_S) -> None:
        self._redis = redis
        self.recheck_delays = recheck_delays

    def track(self, name: str) -> Track:
        """Return the state of a subreddit."""
        pipe: Any = self._redis.pipeline()
        pipe.zrange(reddit_known_key(name.lower()), 0, -1)
        pipe.hget(REDDIT_BEGINNINGS, name.lower())
        pipe.hget(REDDIT_WATERMARKS, name.lower())
        pipe.hgetall(reddit_texts_key(name.lower()))
        known, beginning, watermark, texts = pipe.execute()
        if beginning is None:
            return Track(name)
        begun, until = float(beginning), float(watermark or beginning)
        if watermark and not known:
            # The known posts have expired; what came before the watermark was sent.
            begun = max(begun, until - EXPIRED_OVERLAP_S)
        return Track(name, begun, until, {fullname: texts.get(fullname, "") for fullname in known})

    def begin(self, beginnings: Mapping[str, float], gaps: Iterable[Gap]) -> None:
        """Record a walk's gaps, and for each newly followed subreddit the time of its oldest post.

        Call it before the walk's posts are sent.
        """
        pipe: Any = self._redis.pipeline()
        for name, beginning in beginnings.items():
            pipe.hsetnx(REDDIT_BEGINNINGS, name.lower(), beginning)
        for gap in gaps:
            # One field per gap, so that recording it again after a crash has no effect.
            pipe.hsetnx(REDDIT_GAPS, gap.field, json.dumps(gap))
        pipe.execute()
        if int(self._redis.hlen(REDDIT_GAPS)) > MAX_GAPS:
            oldest = sorted(self.gaps(), key=lambda gap: gap.noted)[:-MAX_GAPS]
            self._redis.hdel(REDDIT_GAPS, *(gap.field for gap in oldest))

    def commit(self, items: Iterable[ListingItem], sent: Iterable[ListingItem], now: float) -> None:
        """Record items of a walk as known, and schedule the first recheck of those in `sent`."""
        known: dict[str, list[ListingItem]] = {}
        for item in items:
            known.setdefault(item.subreddit.lower(), []).append(item)
        pipe: Any = self._redis.pipeline()
        for name, found in known.items():
            pipe.zadd(reddit_known_key(name), {item.fullname: item.created_utc for item in found})
            pipe.hset(reddit_texts_key(name), mapping={item.fullname: item.text for item in found})
            for key in (reddit_known_key(name), reddit_texts_key(name)):
                pipe.expire(key, KNOWN_TTL)
        first = (Recheck(item.fullname, subreddit=item.subreddit, text=item.text).member for item in sent)
        if due := dict.fromkeys(first, now + self.recheck_delays[0]):
            pipe.zadd(REDDIT_RECHECKS, due, nx=True)
            pipe.expire(REDDIT_RECHECKS, RECHECKS_TTL)
        for name in known:
            pipe.zrange(reddit_known_key(name), 0, -1 - MAX_KNOWN_POSTS)
        answers = pipe.execute()
        excess = zip(known, answers[len(answers) - len(known) :], strict=True)
        for name, oldest in excess:
            if oldest:
                pipe.zrem(reddit_known_key(name), *oldest)
                pipe.hdel(reddit_texts_key(name), *oldest)
        pipe.execute()

    def advance(self, watermarks: Mapping[str, float]) -> None:
        """Set watermarks: all posts created until then are known."""
        if watermarks:
            self._redis.hset(
                REDDIT_WATERMARKS, mapping={name.lower(): watermark for name, watermark in watermarks.items()}
            )

    def rewind(self, name: str) -> None:
        """Move a subreddit's watermark back to its newest known post, before it is read again.

        Joint listings silently omit a closed subreddit, and the others' posts then advance its watermark.
        """
        newest: Any = self._redis.zrange(reddit_known_key(name.lower()), -1, -1, withscores=True)
        if newest:
            self.advance({name: newest[0][1]})

    def gaps(self) -> list[Gap]:
        """Return the gaps, oldest first."""
        found: Any = self._redis.hvals(REDDIT_GAPS)
        return sorted((Gap(*json.loads(value)) for value in found), key=lambda gap: gap.since)

    def open_gaps(self) -> list[Gap]:
        """Return the gaps that are not filled, oldest first."""
        return [gap for gap in self.gaps() if not gap.filled]

    def update_gap(self, gap: Gap) -> None:
        self._redis.hset(REDDIT_GAPS, gap.field, json.dumps(gap))

    def forget_gaps(self) -> None:
        self._redis.delete(REDDIT_GAPS)

    def replaced(self) -> dict[str, ReplacedSubreddit]:
        """Return the subreddits that are not read, by name in lower case."""
        found: Any = self._redis.hgetall(REDDIT_SUBSTITUTES)
        return {name: ReplacedSubreddit(*json.loads(value)) for name, value in found.items()}

    def replace(self, replaced: Mapping[str, ReplacedSubreddit], again: Iterable[str]) -> None:
        """Store which subreddits are not read, and delete those read `again`; by name in lower case."""
        pipe: Any = self._redis.pipeline()
        if replaced:
            pipe.hset(REDDIT_SUBSTITUTES, mapping={name: json.dumps(entry) for name, entry in replaced.items()})
        if restored := list(again):
            pipe.hdel(REDDIT_SUBSTITUTES, *restored)
        pipe.execute()

    def deep_walks(self, topics: Iterable[str], now: float) -> dict[str, float]:
        """Return the time of each topic's last full walk, in seconds since 1970.

        A topic without one starts counting now, and a restart does not reset that.
        """
        for topic in topics:
            self._redis.hsetnx(REDDIT_FULL_READS, topic, now)
        found: Any = self._redis.hgetall(REDDIT_FULL_READS)
        return {topic: float(when) for topic, when in found.items()}

    def walked_deep(self, topic: str, when: float) -> None:
        self._redis.hset(REDDIT_FULL_READS, topic, when)

    def due(self, now: float, count: int) -> list[Recheck]:
        """Return up to `count` rechecks that are due."""
        members: Any = self._redis.zrange(REDDIT_RECHECKS, "-inf", now, byscore=True, offset=0, num=count)
        return [Recheck.of(member) for member in members]

    def texts(self, looks: Sequence[Recheck]) -> list[str]:
        """Return for each post the digest of the text that was sent last; "" if unknown."""
        pipe: Any = self._redis.pipeline(transaction=False)
        for look in looks:
            pipe.hget(reddit_texts_key(look.subreddit.lower()), look.fullname)
        return [known or look.text for known, look in zip(pipe.execute(), looks, strict=True)]

    def learn_texts(self, items: Sequence[ListingItem]) -> None:
        """Record the new texts of those posts that are known."""
        pipe: Any = self._redis.pipeline(transaction=False)
        for item in items:
            pipe.hexists(reddit_texts_key(item.subreddit.lower()), item.fullname)
        for item, known in zip(items, pipe.execute(), strict=True):
            if known:
                pipe.hset(reddit_texts_key(item.subreddit.lower()), item.fullname, item.text)
        pipe.execute()

    def finish_rechecks(self, done: Iterable[Recheck], again: Mapping[Recheck, float]) -> None:
        """Remove finished rechecks, and schedule those in `again` at their times."""
        pipe: Any = self._redis.pipeline()
        later = {look.member: due for look, due in again.items()}
        if later:
            pipe.zadd(REDDIT_RECHECKS, later)
            pipe.expire(REDDIT_RECHECKS, RECHECKS_TTL)
        if members := [member for look in done if (member := look.member) not in later]:
            pipe.zrem(REDDIT_RECHECKS, *members)
        pipe.execute()

    def store_status(self, status: Mapping[str, Any]) -> None:
        """Store the daemon's status for `feedmill status`."""
        self._redis.set(REDDIT_STATUS, json.dumps(status), ex=STATUS_TTL)

    def store_end(self) -> None:
        """Record that the daemon stops on request, and is not missed."""
        self._redis.set(REDDIT_STATUS, ENDED)

    def load_status(self) -> dict[str, Any] | None:
        """Return the status of a running daemon; None if none is running."""
        found: Any = self._redis.get(REDDIT_STATUS)
        return json.loads(found) if found and found != ENDED else None

    def has_ended(self) -> bool:
        """Return whether the latest daemon was stopped on request."""
        return self._redis.get(REDDIT_STATUS) == ENDED
