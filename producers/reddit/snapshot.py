"""Read a snapshot: up to a limit of posts per topic, from one of Reddit's listings."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from redis.backoff import EqualJitterBackoff

from feedmill.producers.live.clock import Clock
from feedmill.producers.push import Pusher
from feedmill.producers.reddit.client import RedditClient
from feedmill.producers.reddit.listing import (
    PAGE_SIZE,
    CredentialsRefused,
    ListingItem,
    RedditFault,
    RequestFailed,
    SubredditUnreadable,
    TooManyRequests,
)
from feedmill.producers.reddit.state import State

#: Attempts per request, and pauses in seconds between them, unless Reddit asks for a longer one.
MAX_ATTEMPTS, BACKOFF = 4, EqualJitterBackoff(cap=20, base=5)

Answer = TypeVar("Answer")


class Listing(NamedTuple):
    """A listing to read.

    kind: hot, new, top or rising. limit: posts per topic. period, for top: hour, day, week, month, year or all.
    """

    kind: str
    limit: int
    period: str = ""


class SnapshotCounts(NamedTuple):
    """Progress on a topic: posts read, sent, and skipped because they were sent before.

    problem: reasons why some posts could not be read.
    """

    read: int = 0
    sent: int = 0
    skipped: int = 0
    problem: str = ""


class SnapshotReader:
    """Read topics one after the other. Pinned, deleted and removed posts are neither counted nor sent."""

    def __init__(self, reddit: RedditClient, pusher: Pusher, state: State, clock: Clock) -> None:
        self._reddit = reddit
        self._pusher = pusher
        self._state = state
        self._clock = clock

    def read(self, names: Sequence[str], listing: Listing) -> Iterator[SnapshotCounts]:
        """Read and send the posts of a topic's subreddits, yielding progress after each page.

        Raises Outage, redis.exceptions.RedisError and kombu.exceptions.OperationalError.
        """
        sent, skipped, read = self._pusher.sent, self._pusher.skipped, 0
        problems = [] if names else ["none of its subreddits can be read"]
        # If the joint listing fails, each subreddit is read separately, for its share of the limit.
        share = -(-listing.limit // max(len(names), 1))
        attempts = [(names, listing)] if names else []
        while attempts:
            asked, wanted = attempts.pop(0)
            try:
                for posts in self._pages(asked, wanted):
                    self._pusher.push(item.post for item in posts if item.post)
                    # Not recorded as known: a snapshot would leave holes in the daemon's known posts.
                    self._state.commit((), [item for item in posts if item.post], self._clock.time())
                    read += len(posts)
                    yield SnapshotCounts(read, self._pusher.sent - sent, self._pusher.skipped - skipped)
            except RequestFailed as fault:
                if len(asked) > 1:
                    attempts = [([name], listing._replace(limit=share)) for name in asked]
                else:
                    problems.append(f"r/{asked[0]}: {fault}")
        yield SnapshotCounts(read, self._pusher.sent - sent, self._pusher.skipped - skipped, "; ".join(problems))

    def send(self, items: Sequence[ListingItem], end: Callable[[], None]) -> None:
        """Send rechecked posts whose text has changed, then call `end`."""
        self._pusher.push(item.post for item in items if item.post)
        end()

    def _pages(self, names: Sequence[str], listing: Listing) -> Iterator[list[ListingItem]]:
        remaining, after = listing.limit, None
        seen: set[str] = set()
        while remaining:
            ask = partial(self._reddit.page, names, listing.kind, after, PAGE_SIZE, listing.period)
            page = with_retries(ask, self._clock)
            posts = [item for item in page.items if not (item.stickied or item.gone or item.fullname in seen)]
            posts = posts[:remaining]
            seen |= {item.fullname for item in posts}
            remaining -= len(posts)
            yield posts
            after = page.after
            if after is None or not posts:
                return


def with_retries(ask: Callable[[], Answer], clock: Clock) -> Answer:
    """Call `ask`, and retry temporary failures with backoff. Raises the last RedditFault."""
    for failures in range(MAX_ATTEMPTS - 1):
        try:
            return ask()
        except (SubredditUnreadable, CredentialsRefused):
            raise
        except RedditFault as fault:
            pause = BACKOFF.compute(failures)
            clock.wait(fault.retry_after or pause if isinstance(fault, TooManyRequests) else pause)
    return ask()
