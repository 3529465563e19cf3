"""What Reddit gives, in words of our own: posts, pages of them, subreddits, and faults."""

from typing import Literal, NamedTuple

from shared.messages import Post, digest

#: Items that Reddit gives in one answer, at most.
PAGE = 100

Why = Literal["missing", "banned", "private", "quarantined", "gated"]


class RedditFault(Exception):  # noqa: N818 - named after what happened, as its kinds are
    """Reddit did not give what was asked for."""


class Fault(RedditFault):
    """This request failed, or what was asked for cannot be had: others may go on."""


class Unreadable(Fault):
    """A subreddit cannot be read. why: as Reddit says it."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why: Why = why


class Outage(RedditFault):
    """Reddit as a whole gives us nothing now, whatever is asked for."""


class Unreachable(Outage):
    """There is no connection."""


class TooMany(Outage):
    """429. retry_after: seconds; None where Reddit names none."""

    def __init__(self, retry_after: float | None) -> None:
        super().__init__("too many requests (429)")
        self.retry_after = retry_after


class CredentialsRefused(Outage):
    """Reddit does not take the client id or its secret."""


class Item(NamedTuple):
    """One post of a listing, or of an answer about ids.

    problem: why there is no `post`. gone: deleted by its author, or removed; its text is not to be read.
    """

    fullname: str
    subreddit: str
    created_utc: float
    stickied: bool
    gone: bool
    score: int
    post: Post | None
    problem: str = ""

    @property
    def text(self) -> str:
        """Short digest of what would be classified: differs once the post was edited, or let in again."""
        return digest(self.post.text)[:16] if self.post and not self.gone else "gone"


class Page(NamedTuple):
    """Part of a listing; `after` is where the next begins, None at its end."""

    items: list[Item]
    after: str | None


class About(NamedTuple):
    """What Reddit says of a subreddit."""

    name: str
    #: Why it cannot be read; None where it can.
    why: Why | None
