"""Posts and pages as Reddit and its archives list them, and walks from the newest post down to a watermark.

A watermark is a time up to which all posts are known. The obvious approach, remembering the newest post and requesting
everything before it, silently loses posts once that post is deleted. A walk therefore reads page by page until it
passes the watermark of each subreddit, and continues a little below, because posts can appear late.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from feedmill.producers.live.source import Event, RequestFailed
from feedmill.producers.records import Removal, parse_post, removal_of
from feedmill.shared.messages import Post

logger = logging.getLogger(__name__)

#: Maximum number of items in a response.
PAGE_SIZE = 100
#: The end of the year 9999, in seconds since 1970.
MAX_TIMESTAMP = 253_402_300_799.0


class SubredditUnreadable(RequestFailed):
    """A subreddit is missing, banned, private, quarantined, gated or redirected. The text is that word."""


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


#: Seconds that each walk continues below the watermark, because posts can appear late.
OVERLAP_S = 300.0
#: Maximum pages per walk. Reddit's listings end after a thousand items, ten pages; pages requested from an earlier
#: anchor repeat items, so a walk may need more.
MAX_PAGES = 15
#: Last items of a page that must all be old before the walk counts as having read that far: single old posts can be
#: out of order, also at the end of a page.
TAIL_ITEMS = 10
#: Items from which on the end of a listing may be Reddit's limit of a thousand, removed ones included.
COMPLETE_ITEMS = 500
#: Earlier items of a page tried as anchors when no page follows the last one.
MAX_EARLIER_ANCHORS = 3


@dataclass
class Track:
    """The state of one subreddit. Times are seconds since 1970."""

    name: str
    #: Creation time of the oldest post to send; older posts are ignored. None before the first walk.
    beginning: float | None = None
    #: All posts created until this time were sent.
    watermark: float | None = None
    #: Creation time of its own newest post: a joint listing's posts advance the watermark beyond it. None until the
    #: first walk ends; 0 without posts.
    newest: float | None = None
    #: Time of the last walk to the end of the listing.
    full: float | None = None

    def includes(self, item: ListingItem) -> bool:
        return item.created_utc >= (self.beginning or 0.0)

    def is_new(self, item: ListingItem, recorded: float) -> bool:
        """Return whether an item is newer than the watermark, or was changed lately.

        recorded: time since when records of sent posts are kept; earlier changes may have been sent.
        """
        if self.newest is None:  # the first walk did not end
            return True
        edited = (item.post.edited_utc if item.post else None) or 0.0
        since = self.watermark or 0.0
        return item.created_utc > since or max(item.created_utc, edited) > max(since - OVERLAP_S, recorded)


class Walk(NamedTuple):
    """Result of a walk. items: oldest first. missed: subreddits whose watermark was not reached.

    order: the items in the listing's order, pinned ones excluded. oldest: creation time of the last of them.
    """

    items: list[ListingItem]
    missed: list[Track]
    order: list[ListingItem]

    @property
    def oldest(self) -> float:
        return self.order[-1].created_utc if self.order else 0.0

    def frontier(self, watermark: float) -> float:
        """Return the creation time of the last item that is newer than a watermark, which the walk did not reach."""
        newer = (item.created_utc for item in reversed(self.order) if item.created_utc > watermark)
        return next(newer, watermark)

    @property
    def newest(self) -> float:
        return max(item.created_utc for item in self.items if not item.stickied)

    @property
    def empty(self) -> bool:
        return all(item.stickied for item in self.items)


def walk(
    fetch: Callable[[str | None], ListingPage],
    tracks: Iterable[Track],
    overlap: float,
    depth: int,
    pages: int = MAX_PAGES,
) -> Walk:
    """Walk down the joint listing of some subreddits. fetch: returns the page after an anchor.

    overlap: seconds to continue below the lowest watermark, for posts that appear late.
    depth: number of posts after which a subreddit without a watermark counts as met.
    Raises SourceFailed; the walk has no effect then.
    """
    unmet = {track.name.lower(): track for track in tracks}
    lowest = min((track.watermark for track in unmet.values() if track.watermark is not None), default=None)
    found: dict[str, ListingItem] = {}
    after: str | None = None
    in_doubt = False
    for _ in range(pages):
        page = fetch(after) if in_doubt else _page(fetch, after, list(found))
        new = {item.fullname: item for item in page.items if item.fullname not in found}
        if in_doubt and not new:
            break
        found |= new
        reached = _reached(page, page.after is None and len(found) < COMPLETE_ITEMS)
        for name, track in list(unmet.items()):
            if len(found) >= depth if track.watermark is None else reached is not None and reached <= track.watermark:
                del unmet[name]
        # Listings can end early. In doubt, the walk asks for the posts after the last one.
        in_doubt = page.after is None
        if in_doubt and (not page.items or all(track.watermark is None for track in unmet.values())):
            break
        if not in_doubt and not unmet and (lowest is None or (reached is not None and reached < lowest - overlap)):
            break
        after = page.after or page.items[-1].fullname
    # A subreddit's first walk has no watermark to reach, and so misses nothing.
    missed = [track for track in unmet.values() if track.watermark is not None]
    order = [item for item in found.values() if not item.stickied]
    return Walk(sorted(found.values(), key=lambda item: (item.created_utc, item.fullname)), missed, order)


def _reached(page: ListingPage, complete: bool) -> float | None:
    """Return the creation time down to which the listing has been read; None if the page does not tell.

    complete: the page ends a listing that is too short to have been cut off.
    """
    times = [item.created_utc for item in page.items if not item.stickied]
    if page.items and page.items[-1].stickied:
        return None
    tail = 1 if complete else max(1, min(TAIL_ITEMS, len(times) // 2))
    return max(times[-tail:], default=None)


def _page(fetch: Callable[[str | None], ListingPage], after: str | None, found: list[str]) -> ListingPage:
    """Return the page after an anchor. An anchor deleted in the meantime has an empty page: earlier ones are tried."""
    page = fetch(after)
    if page.items or after is None:
        return page
    for anchor in reversed(found[-1 - MAX_EARLIER_ANCHORS : -1]):
        page = fetch(anchor)
        if page.items:
            return page
    raise RequestFailed("the listing ended early: no page follows its last posts")
