"""The outcome of checking a topics file's subreddits: which can be read, and which are read
instead of others.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.reddit.topics import ReplacedSubreddit, Topics, choose, replaced
from feedmill.shared.keys import REDDIT_CHECKED

#: States of a subreddit that can be read: it is read, or waits as a substitute.
VERIFIED = "verified"
SUBSTITUTE = "substitute"


class SubredditState(NamedTuple):
    """A subreddit of a topic.

    state: VERIFIED, SUBSTITUTE, or why it is not read: missing, private, banned, asleep and
    others. by: its substitute. since: time of the check, or since when it is not read (seconds
    since 1970).
    """

    topic: str
    subreddit: str
    state: str
    by: str | None
    since: float


def store_checked(redis: Redis, topic: str, names: Sequence[str], now: float) -> None:
    """Store which of a topic's subreddits are read. Raises redis.exceptions.RedisError."""
    check = json.dumps([now, list(names)])
    redis.hset(REDDIT_CHECKED, topic, check)


def stored_states(redis: Redis) -> list[SubredditState]:
    """Return what the latest check of each topic found. Raises redis.exceptions.RedisError."""
    checked: Any = redis.hgetall(REDDIT_CHECKED)
    entries = replaced(redis)
    states: list[SubredditState] = []
    for topic in sorted(checked.keys() | entries.keys()):
        if topic in checked:
            at, names = json.loads(checked[topic])
            for name in names:
                state = SubredditState(
                    topic=topic,
                    subreddit=name,
                    state=VERIFIED,
                    by=None,
                    since=at,
                )
                states.append(state)
        states += _not_read(topic, entries.get(topic, []))
    return states


def _not_read(topic: str, entries: Sequence[ReplacedSubreddit]) -> list[SubredditState]:
    return [
        SubredditState(
            topic=topic,
            subreddit=entry.subreddit,
            state=entry.reason,
            by=entry.by,
            since=entry.since,
        )
        for entry in entries
    ]


def states_of(
    topics: Topics, topic: str, reasons: Mapping[str, str], now: float
) -> Iterator[SubredditState]:
    """Yield the state of each of a topic's subreddits, in the order of the topics file.

    reasons: subreddit -> why it cannot be read, or "". now: time of the check.
    """
    choice = choose(
        topics,
        topic,
        problem=reasons.__getitem__,
        before={},
        now=now,
    )
    states = _not_read(topic, choice.replaced)
    state_of = {state.subreddit: state for state in states}
    for name in choice.active:
        state_of[name] = SubredditState(
            topic=topic,
            subreddit=name,
            state=VERIFIED,
            by=None,
            since=now,
        )
    for name in topics.topics[topic]:
        if name in state_of:
            yield state_of[name]
            continue
        # the choice was complete before this name
        yield SubredditState(
            topic=topic,
            subreddit=name,
            state=reasons[name] or SUBSTITUTE,
            by=None,
            since=now,
        )
