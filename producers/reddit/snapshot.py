"""Read a snapshot: up to a limit of posts per topic, from one of Reddit's listings."""

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

from feedmill.producers.live.budget import with_retries
from feedmill.producers.live.clock import Clock
from feedmill.producers.live.source import RequestFailed
from feedmill.producers.reddit.listing import PostSource
from feedmill.producers.reddit.state import State


class Listing(NamedTuple):
    """A listing to read.

    kind: hot, new, top or rising. limit: posts per topic. period, for top: hour, day, week, month, year or all.
    """

    kind: str
    limit: int
    period: str = ""


class Snapshot:
    """Read topics one after the other. Pinned, deleted and removed posts are neither counted nor sent."""

    def __init__(self, reddit: PostSource, state: State, clock: Clock) -> None:
        self._reddit = reddit
        self._state = state
        self._clock = clock
        #: Posts read, and reasons why some posts could not be read.
        self.read = 0
        self.problems: list[str] = []

    def events(self, names: Sequence[str], listing: Listing) -> Generator[Any]:
        """Yield the posts of a topic's subreddits. Raises SourceFailed."""
        if not names:
            self.problems.append("none of its subreddits can be read")
            return
        try:
            yield from self._pages(names, listing)
        except RequestFailed as fault:
            if len(names) == 1:
                self.problems.append(f"r/{names[0]}: {fault}")
                return
            # If the joint listing fails, each subreddit is read separately, for its share of the limit.
            share = listing._replace(limit=-(-listing.limit // len(names)))
            for name in names:
                yield from self.events([name], share)

    def _pages(self, names: Sequence[str], listing: Listing) -> Generator[Any]:
        remaining, after = listing.limit, None
        seen: set[str] = set()
        while remaining:
            ask = partial(self._reddit.page, names, listing.kind, after, period=listing.period)
            page = with_retries(ask, self._clock)
            posts = [item for item in page.items if not (item.stickied or item.gone or item.fullname in seen)]
            posts = posts[:remaining]
            seen |= {item.fullname for item in posts}
            remaining -= len(posts)
            # Not recorded as known: a snapshot would leave holes in the daemon's known posts.
            yield from self._state.send(posts, known=False)
            self.read += len(posts)
            after = page.after
            if after is None or not posts:
                return
