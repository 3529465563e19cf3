"""producers/reddit/listing.py: posts found and gaps reported by a walk down a listing."""

from collections.abc import Iterable

import pytest

from feedmill.producers.live.source import RequestFailed
from feedmill.producers.reddit.listing import (
    PAGE_SIZE,
    ListingItem,
    ListingPage,
    Track,
    walk,
)
from feedmill.shared.messages import Post

OVERLAP = 0.0


def item(
    number: int,
    subreddit: str = "a",
    created: float | None = None,
    stickied: bool = False,
) -> ListingItem:
    post = Post(id=f"t3_{number}", title=f"number {number}")
    when = float(number) if created is None else created
    return ListingItem(post.id, subreddit, when, stickied, gone="", post=post)


class Listing:
    """Pages of items, newest first and at most `cap`. The page after a `dead` anchor is empty."""

    def __init__(
        self, items: Iterable[ListingItem], cap: int = 1000, dead: Iterable[str] = ()
    ) -> None:
        self._items = list(items)[:cap]
        self._dead = set(dead)
        #: The `after` anchor of each request.
        self.requests: list[str | None] = []

    def __call__(self, after: str | None) -> ListingPage:
        self.requests.append(after)
        if after in self._dead:
            return ListingPage([], None)
        start = (
            0
            if after is None
            else 1 + [each.fullname for each in self._items].index(after)
        )
        items = self._items[start : start + PAGE_SIZE]
        return ListingPage(
            items, items[-1].fullname if start + PAGE_SIZE < len(self._items) else None
        )


def newest_first(first: int, last: int, subreddit: str = "a") -> list[ListingItem]:
    return [item(number, subreddit) for number in range(last, first - 1, -1)]


def known(first: int, last: int, name: str = "a") -> Track:
    return Track(name, beginning=float(first), watermark=float(last))


def fullnames(items: Iterable[ListingItem]) -> list[str]:
    return [each.fullname for each in items]


def names(tracks: Iterable[Track]) -> list[str]:
    return [track.name for track in tracks]


def test_reports_a_gap_if_the_pages_run_out() -> None:
    found = walk(
        Listing(newest_first(1, 900)), [known(1, 100)], OVERLAP, depth=100, pages=3
    )
    assert names(found.missed) == ["a"]
    assert found.oldest == 601.0


def test_short_listing_above_the_watermark_is_a_gap() -> None:
    """It may be complete, or may have ended early: the latter would lose posts."""
    track = Track("a", beginning=1.0, watermark=3.0)
    found = walk(Listing(newest_first(10, 40)), [track], OVERLAP, depth=100)
    assert names(found.missed) == ["a"]
    assert found.frontier(3.0) == 10.0


@pytest.mark.parametrize("place", [0, 99])
def test_an_old_post_out_of_order_does_not_end_the_walk(place: int) -> None:
    """Reddit does not always mark a pinned post. 99 is the end of a page."""
    listing = newest_first(6, 500)
    listing.insert(place, item(5))
    found = walk(Listing(listing), [known(1, 200)], OVERLAP, depth=100)
    assert found.missed == []
    assert {f"t3_{number}" for number in range(201, 501)} <= set(fullnames(found.items))


def test_reads_on_below_a_listing_that_ends_early() -> None:
    whole = Listing(newest_first(1, 500))

    def fetch(after: str | None) -> ListingPage:
        page = whole(after)
        return ListingPage(page.items[:20], None) if after is None else page

    found = walk(fetch, [known(1, 250)], OVERLAP, depth=100)
    assert found.missed == []
    assert {f"t3_{number}" for number in range(251, 501)} <= set(fullnames(found.items))


def test_gap_ends_before_an_old_post_at_the_end_of_the_listing() -> None:
    listing = newest_first(1001, 3000)[:999]
    found = walk(Listing([*listing, item(5)]), [known(1, 1500)], OVERLAP, depth=100)
    assert names(found.missed) == ["a"]
    assert found.frontier(1500.0) == 2002.0


def test_skips_dead_anchors() -> None:
    listing = Listing(newest_first(1, 500), dead=["t3_401", "t3_402"])
    found = walk(listing, [known(1, 250)], OVERLAP, depth=100)
    assert fullnames(found.items) == [f"t3_{number}" for number in range(203, 501)]
    assert listing.requests[:4] == [None, "t3_401", "t3_402", "t3_403"]


def test_dead_anchors_do_not_lose_the_listings_end() -> None:
    """The next new post pushes the last item out of a full listing, so the walk must reach that
    item now.
    """
    dead = ["t3_2901", "t3_2502", "t3_2201"]
    found = walk(
        Listing(newest_first(1, 3000), dead=dead), [known(1, 1500)], OVERLAP, depth=100
    )
    assert fullnames(found.items) == [f"t3_{number}" for number in range(2001, 3001)]


def test_many_dead_anchors_are_a_fault() -> None:
    dead = [f"t3_{number}" for number in range(401, 411)]
    with pytest.raises(RequestFailed):
        walk(
            Listing(newest_first(1, 500), dead=dead),
            [known(1, 250)],
            OVERLAP,
            depth=100,
        )
