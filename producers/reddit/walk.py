"""From the newest post of a listing down to those that are known: how no post is missed.

The obvious way, to remember the newest post and ask for what came before it, loses posts without a word once that one
post is deleted. So a walk goes down page by page until it has met one of *many* known posts of each subreddit, or has
come to the time until which everything is known; and a little below that time, since posts can appear late. Knows
neither Reddit nor Redis: pages come from a function.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from producers.reddit.things import PAGE, Fault, Item, Page

#: Pages of a walk, at most. Reddit's listings end after a thousand items, ten pages; one that had to be asked for after
#: an earlier anchor brings fewer that are new.
PAGES = 15
#: Posts of one subreddit that are remembered: more than a listing holds, so that all of it is known ground.
KNOWN = 1500
#: Items before the last one of a page that are tried as anchors, when nothing comes after the last.
ANCHORS = 3


@dataclass
class Track:
    """What is known of one subreddit. Times are seconds since 1970."""

    name: str
    #: When the oldest post was created that is to be sent; what is older was there before. None before the first walk.
    beginning: float | None = None
    #: Everything that was created until then is dealt with.
    watermark: float | None = None
    #: Posts that are dealt with, the oldest first: fullname -> digest of the text, "" where that is not known.
    known: dict[str, str] = field(default_factory=dict)

    def learn(self, items: Iterable[Item]) -> None:
        """These are dealt with, and come from the oldest to the newest."""
        for item in items:
            self.known.pop(item.fullname, None)
            self.known[item.fullname] = item.text
        while len(self.known) > KNOWN:
            del self.known[next(iter(self.known))]


class Walk(NamedTuple):
    """What a walk found. items: from the oldest to the newest. missed: subreddits whose known posts it did not meet.

    oldest: when the last item of the listing was created that is not pinned, which is how far the walk came.
    """

    items: list[Item]
    missed: list[Track]
    oldest: float

    @property
    def newest(self) -> float:
        return max(item.created_utc for item in self.items if not item.stickied)

    @property
    def empty(self) -> bool:
        return all(item.stickied for item in self.items)


def walk(
    fetch: Callable[[str | None], Page], tracks: Iterable[Track], overlap: float, depth: int, pages: int = PAGES
) -> Walk:
    """Walk down the joint listing of some subreddits, which `fetch` gives a page of after an anchor.

    overlap: seconds before the watermark to which the walk goes on, for posts that appear late.
    depth: posts to begin with, where nothing is known of a subreddit yet.
    Raises Fault: nothing of the walk counts then.
    """
    unmet = {track.name.lower(): track for track in tracks}
    lowest = min((track.watermark for track in unmet.values() if track.watermark is not None), default=None)
    found: dict[str, Item] = {}
    after: str | None = None
    for _ in range(pages):
        page = _page(fetch, after, list(found))
        found |= {item.fullname: item for item in page.items if item.fullname not in found}
        reached = min((item.created_utc for item in page.items[-1:] if not item.stickied), default=None)
        for name in _met(page, unmet, reached, len(found) >= depth):
            del unmet[name]
        after = page.after
        if after is None:
            # The end of a short listing is its beginning in time; that of a long one is where Reddit cuts it.
            if len(found) < PAGE:
                unmet.clear()
            break
        if not unmet and (lowest is None or (reached is not None and reached < lowest - overlap)):
            break
    # Nothing was promised of a subreddit that is new.
    missed = [track for track in unmet.values() if track.watermark is not None]
    oldest = next((item.created_utc for item in reversed(found.values()) if not item.stickied), 0.0)
    return Walk(sorted(found.values(), key=lambda item: (item.created_utc, item.fullname)), missed, oldest)


def _met(page: Page, unmet: dict[str, Track], reached: float | None, deep: bool) -> set[str]:
    """The subreddits whose known ground this page touches. reached: when its last item was created.

    A known post that is older than the page's end is out of its order (pinned to the top), and shows nothing.
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


def _page(fetch: Callable[[str | None], Page], after: str | None, found: list[str]) -> Page:
    """The page after an anchor. One that was deleted meanwhile has nothing after it: those before it are tried."""
    page = fetch(after)
    if page.items or after is None:
        return page
    for anchor in reversed(found[-1 - ANCHORS : -1]):
        page = fetch(anchor)
        if page.items:
            return page
    raise Fault("the listing breaks off")
