"""Types independent of PRAW: posts, pages and subreddits as Reddit lists them, and failures."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from feedmill.producers.records import Removal
from feedmill.shared.messages import Post, digest

#: Maximum number of items in a response.
PAGE_SIZE = 100

UnreadableReason = Literal["missing", "banned", "private", "quarantined", "gated", "redirected"]


class RedditFault(Exception):  # noqa: N818 - named after the event, like its subclasses
    """Reddit did not return what was requested."""


class RequestFailed(RedditFault):
    """One request failed, or its result is not available. Other requests may succeed."""


class SubredditUnreadable(RequestFailed):
    """A subreddit cannot be read. why: the reason given by Reddit."""

    def __init__(self, why: UnreadableReason) -> None:
        super().__init__(why)
        self.why: UnreadableReason = why


class Outage(RedditFault):
    """Reddit is unavailable for all requests."""


class Unreachable(Outage):
    """Connecting to Reddit failed."""


class TooManyRequests(Outage):
    """Reddit returned status 429. retry_after: seconds; None if not given."""

    def __init__(self, retry_after: float | None) -> None:
        super().__init__("too many requests (429)")
        self.retry_after = retry_after


class CredentialsRefused(Outage):
    """Reddit rejected the client ID or secret."""


class ListingItem(NamedTuple):
    """A post in a listing or in a response to a request by id.

    problem: reason why `post` is None. gone: whether it was deleted or removed; its text must not be used then.
    """

    fullname: str
    subreddit: str
    created_utc: float
    stickied: bool
    gone: Removal
    score: int
    post: Post | None
    problem: str = ""

    @property
    def text(self) -> str:
        """Return a short digest of the text to classify. It changes when a post is edited, removed or approved."""
        return digest(self.post.text)[:16] if self.post and not self.gone else "gone"


class ListingPage(NamedTuple):
    """A page of a listing. after: anchor of the next page; None on the last."""

    items: list[ListingItem]
    after: str | None


class SubredditInfo(NamedTuple):
    """A subreddit's properties."""

    name: str
    #: Reason why it cannot be read; None if it can.
    why: UnreadableReason | None


class PostSource(Protocol):
    """A client for Reddit's posts. Its methods raise only RedditFault; see `RedditClient`."""

    #: Name in logs.
    name: str
    #: Error message for credentials that the source rejects.
    refused: str

    def page(
        self, names: Sequence[str], listing: str = ..., after: str | None = ..., limit: int = ..., period: str = ...
    ) -> ListingPage: ...

    def info(self, fullnames: Iterable[str]) -> dict[str, ListingItem]: ...

    def about(self, names: Iterable[str]) -> dict[str, SubredditInfo]: ...
