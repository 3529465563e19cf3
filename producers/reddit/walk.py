"""Walk a listing from its newest post down to known posts, without missing any.

The obvious approach, remembering the newest post and requesting everything before it, silently loses posts once that
post is deleted. A walk therefore reads page by page until, for each subreddit, it meets one of *many* known posts or
passes the watermark, and continues a little below the watermark, because posts can appear late. Pages come from a
function: this module depends neither on Reddit nor on Redis.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from producers.reddit.listing import PAGE_SIZE, ListingItem, ListingPage, RequestFailed

#: Maximum pages per walk. Reddit's listings end after a thousand items, ten pages; pages requested from an earlier
#: anchor repeat items, so a walk may need more.
MAX_PAGES = 15
#: Known posts kept per subreddit: more than a listing holds, so that a full walk meets only known posts.
MAX_KNOWN_POSTS = 1500
#: Earlier items of a page tried as anchors when no page follows the last one.
MAX_EARLIER_ANCHORS = 3


@dataclass
class Track:
    """The state of one subreddit. Times are seconds since 1970."""

    name: str
    #: Creation time of the oldest post to send; older posts are ignored. None before the first walk.
    beginning: float | None = None
    #: All posts created until this time are known.
    watermark: float | None = None
    #: Known posts, oldest first: fullname -> digest of the text, "" if unknown.
    known: dict[str, str] = field(default_factory=dict)

    def learn(self, items: Iterable[ListingItem]) -> None:
        """Add items to the known posts. They must be sorted from oldest to newest."""
        for item in items:
            self.known.pop(item.fullname, None)
            self.known[item.fullname] = item.text
        while len(self.known) > MAX_KNOWN_POSTS:
            del self.known[next(iter(self.known))]


class Walk(NamedTuple):
    """Result of a walk. items: oldest first. missed: subreddits whose known posts were not met.

    oldest: creation time of the last item read, pinned ones excluded.
    """

    items: list[ListingItem]
    missed: list[Track]
    oldest: float

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
    Raises RedditFault; the walk has no effect then.
    """
    unmet = {track.name.lower(): track for track in tracks}
    lowest = min((track.watermark for track in unmet.values() if track.watermark is not None), default=None)
    found: dict[str, ListingItem] = {}
    after: str | None = None
    for _ in range(pages):
        page = _page(fetch, after, list(found))
        found |= {item.fullname: item for item in page.items if item.fullname not in found}
        reached = min((item.created_utc for item in page.items[-1:] if not item.stickied), default=None)
        for name in _met(page, unmet, reached, len(found) >= depth):
            del unmet[name]
        after = page.after
        if after is None:
            # A short listing ends at its first post ever; a long one ends at Reddit's limit.
            if len(found) < PAGE_SIZE:
                unmet.clear()
            break
        if not unmet and (lowest is None or (reached is not None and reached < lowest - overlap)):
            break
    # A subreddit's first walk has no watermark to reach, and so misses nothing.
    missed = [track for track in unmet.values() if track.watermark is not None]
    oldest = next((item.created_utc for item in reversed(found.values()) if not item.stickied), 0.0)
    return Walk(sorted(found.values(), key=lambda item: (item.created_utc, item.fullname)), missed, oldest)


def _met(page: ListingPage, unmet: dict[str, Track], reached: float | None, deep: bool) -> set[str]:
    """Return the subreddits whose known posts or watermark this page reaches. reached: time of the page's last item.

    A known post older than that is out of order, for example pinned, and proves nothing.
    """
    met = {
        item.subreddit.lower()
        for item in page.items
        if (track := unmet.get(item.subreddit.lower()))
        and item.fullname in track.known
        and not item.stickied
        and (reached is None or item.created_utc >= reached)
    }
    for name, track in unmet.items():
        passed = deep if track.watermark is None else reached is not None and reached < track.watermark
        if passed:
            met.add(name)
    return met


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
