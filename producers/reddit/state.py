"""What the daemon knows that outlives it, in Redis: known posts, watermarks, gaps, who stands in for whom, what is due.

Every method may be repeated after a crash in the middle of it. Raises redis.exceptions.RedisError.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from redis import Redis

from producers.reddit.things import Item
from producers.reddit.walk import KNOWN, Track
from shared.keys import (
    REDDIT_BEGINNINGS,
    REDDIT_DEEP,
    REDDIT_GAPS,
    REDDIT_LOOKS,
    REDDIT_REPLACED,
    REDDIT_STATUS,
    REDDIT_WATERMARKS,
    reddit_known_key,
)

#: Seconds after it was sent at which a post is looked at again: its score has settled a little, then for good; what
#: its author or a moderator takes back is mostly gone by the first, nearly all by the second.
LOOKS = (3_600.0, 36 * 3_600.0)
#: Seconds for which what is known of a subreddit is kept when it is read no more.
KNOWN_TTL = 90 * 86_400
#: Seconds for which looks that are due wait for a daemon to run.
LOOKS_TTL = 7 * 86_400
#: Gaps that are kept, at most; then the oldest make room.
MAX_GAPS = 10_000
#: Seconds for which the last word of a daemon stands.
STATUS_TTL = 120


class Gap(NamedTuple):
    """Posts of a subreddit that were out of reach: created after `since` and before `until`, seconds since 1970."""

    subreddit: str
    since: float
    until: float
    #: When that was found.
    noted: float


class Replaced(NamedTuple):
    """A subreddit that is not read, and why, since when (seconds since 1970), and who stands in for it."""

    subreddit: str
    topic: str
    reason: str
    since: float
    by: str | None


class Look(NamedTuple):
    """A post that is due to be looked at again. stage: which look it is, from 0.

    absent: Reddit did not know it at the last one; it may have been a hiccup.
    """

    fullname: str
    stage: int
    absent: bool

    @property
    def member(self) -> str:
        return f"{self.stage}{'?' if self.absent else '.'}{self.fullname}"

    @classmethod
    def of(cls, member: str) -> "Look":
        return cls(member[2:], int(member[0]), member[1] == "?")


class State:
    """The daemon's memory in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def track(self, name: str) -> Track:
        """What is known of a subreddit."""
        pipe: Any = self._redis.pipeline()
        pipe.zrange(reddit_known_key(name.lower()), 0, -1)
        pipe.hget(REDDIT_BEGINNINGS, name.lower())
        pipe.hget(REDDIT_WATERMARKS, name.lower())
        known, beginning, watermark = pipe.execute()
        if beginning is None:
            return Track(name)
        return Track(name, float(beginning), float(watermark or beginning), dict.fromkeys(known, ""))

    def begin(self, beginnings: Mapping[str, float], gaps: Iterable[Gap]) -> None:
        """Before the posts of a walk are sent: what it could not reach, and how far it goes where it is the first."""
        pipe: Any = self._redis.pipeline()
        for name, beginning in beginnings.items():
            pipe.hsetnx(REDDIT_BEGINNINGS, name.lower(), beginning)
        for gap in gaps:
            # Found again after a crash, it is the same gap.
            pipe.hset(REDDIT_GAPS, f"{gap.subreddit} {gap.since:.0f}", json.dumps(gap))
        pipe.execute()
        if int(self._redis.hlen(REDDIT_GAPS)) > MAX_GAPS:
            oldest = sorted(self.gaps(), key=lambda gap: gap.noted)[:-MAX_GAPS]
            self._redis.hdel(REDDIT_GAPS, *(f"{gap.subreddit} {gap.since:.0f}" for gap in oldest))

    def commit(self, items: Iterable[Item], sent: Iterable[str], now: float) -> None:
        """These items of a walk are dealt with; of them those `sent` are to be looked at again."""
        known: dict[str, dict[str, float]] = {}
        for item in items:
            known.setdefault(item.subreddit.lower(), {})[item.fullname] = item.created_utc
        pipe: Any = self._redis.pipeline()
        for name, members in known.items():
            key = reddit_known_key(name)
            pipe.zadd(key, members)
            pipe.zremrangebyrank(key, 0, -1 - KNOWN)
            pipe.expire(key, KNOWN_TTL)
        if due := {Look(fullname, 0, absent=False).member: now + LOOKS[0] for fullname in sent}:
            pipe.zadd(REDDIT_LOOKS, due, nx=True)
            pipe.expire(REDDIT_LOOKS, LOOKS_TTL)
        pipe.execute()

    def advance(self, watermarks: Mapping[str, float]) -> None:
        """All that was created until then is dealt with."""
        if watermarks:
            self._redis.hset(
                REDDIT_WATERMARKS, mapping={name.lower(): watermark for name, watermark in watermarks.items()}
            )

    def rewind(self, name: str) -> None:
        """A subreddit is read again: until its newest known post all is dealt with, and no longer.

        Joint listings leave out one that is closed, without a word, and the others' posts then set the watermark.
        """
        newest: Any = self._redis.zrange(reddit_known_key(name.lower()), -1, -1, withscores=True)
        if newest:
            self.advance({name: newest[0][1]})

    def gaps(self) -> list[Gap]:
        """The oldest first."""
        found: Any = self._redis.hvals(REDDIT_GAPS)
        return sorted((Gap(*json.loads(value)) for value in found), key=lambda gap: gap.since)

    def forget_gaps(self) -> None:
        self._redis.delete(REDDIT_GAPS)

    def replaced(self) -> dict[str, Replaced]:
        """The subreddits that are not read, by their names in lower case."""
        found: Any = self._redis.hgetall(REDDIT_REPLACED)
        return {name: Replaced(*json.loads(value)) for name, value in found.items()}

    def replace(self, replaced: Mapping[str, Replaced], again: Iterable[str]) -> None:
        """Write down which subreddits are not read, and which are `again`; by their names in lower case."""
        pipe: Any = self._redis.pipeline()
        if replaced:
            pipe.hset(REDDIT_REPLACED, mapping={name: json.dumps(entry) for name, entry in replaced.items()})
        if back := list(again):
            pipe.hdel(REDDIT_REPLACED, *back)
        pipe.execute()

    def deep_walks(self, topics: Iterable[str], now: float) -> dict[str, float]:
        """When each topic's listings were last walked to their end, in seconds since 1970.

        One that never was counts from now, and does so still when the process is started again.
        """
        for topic in topics:
            self._redis.hsetnx(REDDIT_DEEP, topic, now)
        found: Any = self._redis.hgetall(REDDIT_DEEP)
        return {topic: float(when) for topic, when in found.items()}

    def walked_deep(self, topic: str, when: float) -> None:
        self._redis.hset(REDDIT_DEEP, topic, when)

    def due(self, now: float, count: int) -> list[Look]:
        """Up to `count` posts that are to be looked at again by now."""
        members: Any = self._redis.zrange(REDDIT_LOOKS, "-inf", now, byscore=True, offset=0, num=count)
        return [Look.of(member) for member in members]

    def looked(self, done: Iterable[Look], again: Mapping[Look, float]) -> None:
        """These looks are done; those others are to come, each at its time."""
        pipe: Any = self._redis.pipeline()
        if later := {look.member: due for look, due in again.items()}:
            pipe.zadd(REDDIT_LOOKS, later)
            pipe.expire(REDDIT_LOOKS, LOOKS_TTL)
        if members := [look.member for look in done]:
            pipe.zrem(REDDIT_LOOKS, *members)
        pipe.execute()

    def tell(self, status: Mapping[str, Any]) -> None:
        """Leave word of how the daemon fares, for `feedmill status`."""
        self._redis.set(REDDIT_STATUS, json.dumps(status), ex=STATUS_TTL)

    def told(self) -> dict[str, Any] | None:
        """The last word of a running daemon; None where none runs."""
        found: Any = self._redis.get(REDDIT_STATUS)
        return json.loads(found) if found else None
