"""Posts and pages as Reddit and its archives list them, and walks from the newest post down to a
watermark.

A watermark is a time up to which all posts are known. The obvious approach, remembering the newest
post and requesting everything before it, silently loses posts once that post is deleted. A walk
therefore reads page by page until it passes the watermark of each subreddit, and continues a
little below, because posts can appear late.
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
    """A subreddit is missing, banned, private, quarantined, gated or redirected.

    The text is that word.
    """


class ListingItem(NamedTuple):
    """A post in a listing or in a response to a request by id.

    post: None if it cannot be classified. gone: whether it was deleted or removed; its text must
    not be used then.
    """

    fullname: str
    subreddit: str
    created_utc: float
    stickied: bool
    gone: Removal
    post: Post | None

    @property
    def event(self) -> Event:
        """The event of the item.

        A post that cannot be classified has no text, and so counts as refused.
        """
        progress = Event(None, self.created_utc)
        if self.gone == "deleted":
            return progress._replace(deleted=self.fullname)
        if self.gone == "removed":
            return progress._replace(removed=self.fullname)
        post: Post | dict[str, str] = {"id": self.fullname}
        if self.post is not None:
            post = self.post
        return progress._replace(post=post)


class ListingPage(NamedTuple):
    """A page of a listing. after: anchor of the next page; None on the last."""

    items: list[ListingItem]
    after: str | None


def parse_items(
    posts: Iterable[Mapping[str, Any]], topic_of: Mapping[str, str]
) -> Iterator[ListingItem]:
    """Yield the valid posts. topic_of: see `parse_item`."""
    for data in posts:
        try:
            if not data.get("promoted"):  # an advertisement
                yield parse_item(data, topic_of)
        except Exception as error:
            # Whatever an invalid post raises must not fail its page: strangers write it.
            name: object = data
            if isinstance(data, Mapping):
                name = data.get("name") or data.get("id")
            logger.warning(
                "skipped an invalid post (%.80s, %.40r)",
                error,
                name,
            )


def parse_item(data: Mapping[str, Any], topic_of: Mapping[str, str]) -> ListingItem:
    """Parse a post in the form of Reddit's API. May raise any exception if it is invalid.

    topic_of: topic by the subreddit's name in lower case.
    """
    fullname = data.get("name")
    if not fullname:
        fullname = f"t3_{data['id']}"
    if not re.fullmatch(r"t3_[0-9a-z]{1,20}", fullname):
        raise ValueError("invalid fullname")
    created = float(data["created_utc"])
    if not 0 <= created < MAX_TIMESTAMP:
        raise ValueError("invalid created_utc")
    subreddit = data["subreddit"]
    subreddit.encode()  # a lone surrogate could not be part of a key
    topic = topic_of.get(subreddit.lower())
    fields = {
        **data,
        "name": fullname,
        "topic": topic,
    }
    # Drops invalid optional fields: a post is not rejected for its score or a URL.
    *_, outcome = parse_post(fields, fullname)
    post: Post | None = None
    if isinstance(outcome, Post):
        post = outcome
    return ListingItem(
        fullname=fullname,
        subreddit=subreddit,
        created_utc=created,
        stickied=bool(data.get("stickied")),
        gone=removal_of(data),
        post=post,
    )


#: Seconds that each walk continues below the watermark, because posts can appear late.
OVERLAP_S = 300.0
#: Maximum pages per walk. Reddit's listings end after a thousand items, ten pages; pages requested
#: from an earlier anchor repeat items, so a walk may need more.
MAX_PAGES = 15
#: Last items of a page that must all be old before the walk counts as having read that far: single
#: old posts can be out of order, also at the end of a page.
TAIL_ITEMS = 10
#: Items from which on the end of a listing may be Reddit's limit of a thousand, removed ones
#: included.
COMPLETE_ITEMS = 500
#: Earlier items of a page tried as anchors when no page follows the last one.
MAX_EARLIER_ANCHORS = 3


@dataclass
class Track:
    """The state of one subreddit. Times are seconds since 1970."""

    name: str
    #: Creation time of the oldest post to send; older posts are ignored. None before the first
    #: walk.
    beginning: float | None = None
    #: All posts created until this time were sent.
    watermark: float | None = None
    #: Creation time of its own newest post: a joint listing's posts advance the watermark beyond
    #: it. None until the first walk ends; 0 without posts.
    newest: float | None = None
    #: Time of the last walk to the end of the listing.
    full: float | None = None

    def includes(self, item: ListingItem) -> bool:
        beginning = self.beginning or 0.0
        return item.created_utc >= beginning

    def is_new(self, item: ListingItem, recorded: float) -> bool:
        """Return whether an item is newer than the watermark, or was changed lately.

        recorded: time since when records of sent posts are kept; earlier changes may have been
        sent.
        """
        if self.newest is None:  # the first walk did not end
            return True
        watermark = self.watermark or 0.0
        if item.created_utc > watermark:
            return True
        changed = item.created_utc
        post = item.post
        if post is not None and post.edited_utc is not None:
            changed = max(changed, post.edited_utc)
        below_watermark = watermark - OVERLAP_S
        return changed > max(below_watermark, recorded)


class Walk(NamedTuple):
    """Result of a walk. items: oldest first. missed: subreddits whose watermark was not reached.

    order: the items in the listing's order, pinned ones excluded. oldest: creation time of the
    last of them.
    """

    items: list[ListingItem]
    missed: list[Track]
    order: list[ListingItem]

    @property
    def oldest(self) -> float:
        if not self.order:
            return 0.0
        return self.order[-1].created_utc

    def frontier(self, watermark: float) -> float:
        """Return the creation time of the last item that is newer than a watermark, which the walk
        did not reach.
        """
        for item in reversed(self.order):
            if item.created_utc > watermark:
                return item.created_utc
        return watermark

    @property
    def newest(self) -> float:
        times = [item.created_utc for item in self.items if not item.stickied]
        return max(times)

    @property
    def empty(self) -> bool:
        posts = [item for item in self.items if not item.stickied]
        return not posts


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
    unmet: dict[str, Track] = {}
    for track in tracks:
        key = track.name.lower()
        unmet[key] = track
    end = _end_of_walk(unmet.values(), overlap)
    items: dict[str, ListingItem] = {}
    after: str | None = None
    in_doubt = False
    for _ in range(pages):
        if in_doubt:
            page = fetch(after)
        else:
            fullnames = list(items)
            page = _page(fetch, after, fullnames)
        new = {item.fullname: item for item in page.items if item.fullname not in items}
        if in_doubt and not new:
            break
        items |= new
        count = len(items)
        is_complete = page.after is None and count < COMPLETE_ITEMS
        reached = _reached_time(page, is_complete)
        has_depth = count >= depth
        for name, track in list(unmet.items()):
            if _is_met(track, reached, has_depth):
                del unmet[name]
        # Listings can end early. In doubt, the walk asks for the posts after the last one.
        in_doubt = page.after is None
        if in_doubt:
            has_ended = not page.items or not _missed_tracks(unmet)
        else:
            is_below_end = end is None or (reached is not None and reached < end)
            has_ended = not unmet and is_below_end
        if has_ended:
            break
        after = page.after
        if not after:
            last_item = page.items[-1]
            after = last_item.fullname
    missed = _missed_tracks(unmet)
    oldest_first = sorted(
        items.values(),
        key=lambda item: (item.created_utc, item.fullname),
    )
    order = [item for item in items.values() if not item.stickied]
    return Walk(
        items=oldest_first,
        missed=missed,
        order=order,
    )


def _end_of_walk(tracks: Iterable[Track], overlap: float) -> float | None:
    """Return the creation time down to which a walk reads; None if no track has a watermark."""
    watermarks = [track.watermark for track in tracks if track.watermark is not None]
    if not watermarks:
        return None
    return min(watermarks) - overlap


def _is_met(track: Track, reached: float | None, has_depth: bool) -> bool:
    """Return whether a walk has read enough of a subreddit.

    reached: see `_reached_time`. has_depth: it has read enough for a subreddit without a
    watermark.
    """
    if track.watermark is None:
        return has_depth
    return reached is not None and reached <= track.watermark


def _missed_tracks(unmet: Mapping[str, Track]) -> list[Track]:
    """Return the subreddits with posts that a walk has not read yet.

    A subreddit's first walk has no watermark to reach, and so misses nothing.
    """
    tracks = unmet.values()
    return [track for track in tracks if track.watermark is not None]


def _reached_time(page: ListingPage, complete: bool) -> float | None:
    """Return the creation time down to which the listing has been read; None if the page does not
    tell.

    complete: the page ends a listing that is too short to have been cut off.
    """
    if page.items and page.items[-1].stickied:
        return None
    times = [item.created_utc for item in page.items if not item.stickied]
    tail = 1
    if not complete:
        half = len(times) // 2
        tail = max(1, min(TAIL_ITEMS, half))
    return max(times[-tail:], default=None)


def _page(
    fetch: Callable[[str | None], ListingPage], after: str | None, fullnames: list[str]
) -> ListingPage:
    """Return the page after an anchor.

    An anchor deleted in the meantime has an empty page: earlier ones are tried.
    """
    page = fetch(after)
    if page.items or after is None:
        return page
    earlier_anchors = fullnames[-1 - MAX_EARLIER_ANCHORS : -1]
    for anchor in reversed(earlier_anchors):
        page = fetch(anchor)
        if page.items:
            return page
    raise RequestFailed("the listing ended early: no page follows its last posts")
