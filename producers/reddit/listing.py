"""Posts, pages and subreddits as Reddit and its archives list them."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from feedmill.producers.live.source import Event, RequestFailed
from feedmill.producers.records import Removal, parse_post, removal_of
from feedmill.shared.messages import Post

logger = logging.getLogger(__name__)

#: Maximum number of items in a response.
PAGE_SIZE = 100
#: The end of the year 9999, in seconds since 1970.
MAX_TIMESTAMP = 253_402_300_799.0

UnreadableReason = Literal["missing", "banned", "private", "quarantined", "gated", "redirected"]


class SubredditUnreadable(RequestFailed):
    """A subreddit cannot be read. why: the reason given by Reddit."""

    def __init__(self, why: UnreadableReason) -> None:
        super().__init__(why)
        self.why: UnreadableReason = why


class ListingItem(NamedTuple):
    """A post in a listing or in a response to a request by id.

    post: None if it cannot be classified. gone: whether it was deleted or removed; its text must not be used then.
    """

    fullname: str
    subreddit: str
    created_utc: float
    stickied: bool
    gone: Removal
    post: Post | None

    @property
    def event(self) -> Event:
        """The event of the item. A post that cannot be classified has no text, and so counts as refused."""
        progress = Event(None, self.created_utc)
        if self.gone == "deleted":
            return progress._replace(deleted=self.fullname)
        if self.gone == "removed":
            return progress._replace(removed=self.fullname)
        return progress._replace(post=self.post or {"id": self.fullname})


class ListingPage(NamedTuple):
    """A page of a listing. after: anchor of the next page; None on the last."""

    items: list[ListingItem]
    after: str | None


def parse_items(posts: Iterable[Mapping[str, Any]], topic_of: Mapping[str, str]) -> Iterator[ListingItem]:
    """Yield the valid posts. topic_of: see `parse_item`."""
    for data in posts:
        try:
            if not data.get("promoted"):  # an advertisement
                yield parse_item(data, topic_of)
        except Exception as error:
            # Whatever an invalid post raises must not fail its page: strangers write it.
            name = (data.get("name") or data.get("id")) if isinstance(data, Mapping) else data
            logger.warning("skipped an invalid post (%.80s, %.40r)", error, name)


def parse_item(data: Mapping[str, Any], topic_of: Mapping[str, str]) -> ListingItem:
    """Parse a post in the form of Reddit's API. May raise any exception if it is invalid.

    topic_of: topic by the subreddit's name in lower case.
    """
    fullname = data.get("name") or f"t3_{data['id']}"
    if not re.fullmatch(r"t3_[0-9a-z]{1,20}", fullname):
        raise ValueError("invalid fullname")
    created = float(data["created_utc"])
    if not 0 <= created < MAX_TIMESTAMP:
        raise ValueError("invalid created_utc")
    subreddit = data["subreddit"]
    subreddit.encode()  # a lone surrogate could not be part of a key
    # Drops invalid optional fields: a post is not rejected for its score or a URL.
    *_, read = parse_post({**data, "name": fullname, "topic": topic_of.get(subreddit.lower())}, fullname)
    post = read if isinstance(read, Post) else None
    return ListingItem(fullname, subreddit, created, bool(data.get("stickied")), removal_of(data), post)
