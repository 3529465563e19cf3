"""One pass over the topics: up to so many posts of each, from a listing as people see it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from producers.push import Pusher
from producers.reddit.backoff import Backoff
from producers.reddit.client import Reddit
from producers.reddit.clock import Clock
from producers.reddit.state import State
from producers.reddit.things import PAGE, CredentialsRefused, Fault, Item, RedditFault, TooMany, Unreadable

#: Something is asked for so many times before it is given up.
TRIES = 4
#: Seconds between two of them, at most, unless Reddit asks for more.
LONGEST = 20.0

Answer = TypeVar("Answer")


class Listing(NamedTuple):
    """kind: hot, new, top or rising; limit: posts of a topic; period: hour to year, or all, for top."""

    kind: str
    limit: int
    period: str = ""


class Reading(NamedTuple):
    """How far a topic is: posts read, sent, and skipped as sent before; why some of it could not be read."""

    read: int = 0
    sent: int = 0
    skipped: int = 0
    problem: str = ""


class Once:
    """Reads topics one after the other. Pinned posts, and those that are gone, are neither counted nor sent."""

    def __init__(self, reddit: Reddit, pusher: Pusher, state: State, clock: Clock) -> None:
        self._reddit = reddit
        self._pusher = pusher
        self._state = state
        self._clock = clock

    def read(self, names: Sequence[str], listing: Listing) -> Iterator[Reading]:
        """Read and send the posts of a topic's subreddits; yields how far it is, after each page.

        Raises Outage, redis.exceptions.RedisError and kombu.exceptions.OperationalError.
        """
        sent, skipped, read = self._pusher.sent, self._pusher.skipped, 0
        problems = [] if names else ["none of its subreddits can be read"]
        # One that fails must not cost the others: then each is asked for its share.
        share = -(-listing.limit // max(len(names), 1))
        attempts = [(names, listing)] if names else []
        while attempts:
            asked, wanted = attempts.pop(0)
            try:
                for posts in self._pages(asked, wanted):
                    self._pusher.push(item.post for item in posts if item.post)
                    # Not written down as known: that would make holes in what the daemon knows.
                    self._state.commit((), [item.fullname for item in posts if item.post], self._clock.time())
                    read += len(posts)
                    yield Reading(read, self._pusher.sent - sent, self._pusher.skipped - skipped)
            except Fault as fault:
                if len(asked) > 1:
                    attempts = [([name], listing._replace(limit=share)) for name in asked]
                else:
                    problems.append(f"r/{asked[0]}: {fault}")
        yield Reading(read, self._pusher.sent - sent, self._pusher.skipped - skipped, "; ".join(problems))

    def send(self, items: Sequence[Item], end: Callable[[], None]) -> None:
        """Send posts that were looked at again where their text has changed, then call `end`."""
        self._pusher.push(item.post for item in items if item.post)
        end()

    def _pages(self, names: Sequence[str], listing: Listing) -> Iterator[list[Item]]:
        left, after = listing.limit, None
        seen: set[str] = set()
        while left:
            ask = partial(self._reddit.page, names, listing.kind, after, PAGE, listing.period)
            page = patiently(ask, self._clock)
            posts = [item for item in page.items if not (item.stickied or item.gone or item.fullname in seen)][:left]
            seen |= {item.fullname for item in posts}
            left -= len(posts)
            yield posts
            after = page.after
            if after is None or not posts:
                return


def patiently(ask: Callable[[], Answer], clock: Clock) -> Answer:
    """Ask some times, with pauses. Raises the last RedditFault, and at once one that asking again does not mend."""
    backoff = Backoff(LONGEST)
    for _ in range(TRIES - 1):
        try:
            return ask()
        except (Unreadable, CredentialsRefused):
            raise
        except RedditFault as fault:
            pause = backoff.next()
            clock.wait(fault.retry_after or pause if isinstance(fault, TooMany) else pause)
    return ask()
