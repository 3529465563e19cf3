"""Listings of Reddit that are read once: which subreddits of a topic can be read, and their posts.

Needs no Redis.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from feedmill.producers.live.source import Clock, RequestFailed, with_retries
from feedmill.producers.reddit.listing import SubredditUnreadable
from feedmill.producers.reddit.topics import ASLEEP, Choice, Topics, choose
from feedmill.shared.messages import Post

#: Seconds without a new post after which a subreddit counts as asleep.
ASLEEP_AFTER_S = 30 * 86_400.0


class Listing(NamedTuple):
    """A listing to read once.

    kind: hot, new, top or rising. limit: posts per topic. period, for top: hour, day, week, month,
    year or all.
    """

    kind: str
    limit: int
    period: str = ""


def problem_of(
    reddit: Any,
    name: str,
    now: float,
    note: Callable[[RequestFailed], object] = str,
) -> str:
    """Return why a subreddit cannot be read, or ASLEEP; "" if it is to be read.

    Raises SourceFailed.

    note: called with a failure that leaves the answer unclear. The subreddit then counts as
    readable.
    """
    try:
        items = reddit.newest(name)
    except SubredditUnreadable as fault:
        return str(fault)
    except RequestFailed as fault:
        note(fault)
        return ""
    newest = max((item.created_utc for item in items), default=0.0)
    is_asleep = now - newest > ASLEEP_AFTER_S
    return ASLEEP if is_asleep else ""


class Snapshots:
    """Chooses a topic's subreddits, and reads their posts. reddit: a RedditClient."""

    def __init__(self, reddit: Any, topics: Topics, clock: Clock) -> None:
        self._reddit = reddit
        self._topics = topics
        self._clock = clock

    def choose(self, topic: str) -> Choice:
        """Choose a topic's subreddits. Raises SourceFailed."""
        now = self._clock.time()
        problem = partial(problem_of, self._reddit, now=now)
        return choose(
            self._topics,
            topic,
            problem,
            before={},
            now=now,
        )

    def posts(
        self, names: Sequence[str], listing: Listing, problems: list[str]
    ) -> Iterator[Post]:
        """Yield the posts of a topic's subreddits in a listing, except pinned, deleted and removed
        ones.

        Adds to `problems` why posts could not be read. Raises SourceFailed.
        """
        if not names:
            problems.append("none of its subreddits can be read")
            return
        try:
            yield from self._read_listing(names, listing)
        except RequestFailed as fault:
            if len(names) == 1:
                problems.append(f"r/{names[0]}: {fault}")
                return
            # If the joint listing fails, each subreddit is read separately, for its share of the
            # limit.
            limit = math.ceil(listing.limit / len(names))
            share = listing._replace(limit=limit)
            for name in names:
                yield from self.posts([name], share, problems)

    def _read_listing(self, names: Sequence[str], listing: Listing) -> Iterator[Post]:
        fullnames: set[str] = set()
        after = None
        while len(fullnames) < listing.limit:
            ask = partial(
                self._reddit.page,
                names,
                listing.kind,
                after,
                period=listing.period,
            )
            page = with_retries(ask, self._clock)
            available = [
                item for item in page.items if not (item.stickied or item.gone)
            ]
            new = [item for item in available if item.fullname not in fullnames]
            items = new[: listing.limit - len(fullnames)]
            fullnames.update(item.fullname for item in items)
            for item in items:
                if item.post is not None:
                    yield item.post
            after = page.after
            if after is None or not items:
                return
