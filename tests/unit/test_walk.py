"""producers/reddit/walk.py: what a walk down a listing finds, and what it says was missed."""

import math
from collections.abc import Callable, Iterable

import pytest

from producers.reddit.things import PAGE_SIZE, Fault, Item, Page
from producers.reddit.walk import KNOWN, Track, walk
from shared.messages import Post

OVERLAP = 0.0


def item(number: int, subreddit: str = "a", created: float | None = None, stickied: bool = False) -> Item:
    post = Post(id=f"t3_{number}", title=f"number {number}")
    when = float(number) if created is None else created
    return Item(post.id, subreddit, when, stickied, gone=False, score=1, post=post)


class Listing:
    """Items, the newest first, a page at a time; it holds no more than `cap`, and `dead` anchors have nothing after."""

    def __init__(self, items: Iterable[Item], cap: int = 1000, dead: Iterable[str] = ()) -> None:
        self._items = list(items)[:cap]
        self._dead = set(dead)
        self.asked: list[str | None] = []

    def __call__(self, after: str | None) -> Page:
        self.asked.append(after)
        if after in self._dead:
            return Page([], None)
        start = 0 if after is None else 1 + [each.fullname for each in self._items].index(after)
        items = self._items[start : start + PAGE_SIZE]
        return Page(items, items[-1].fullname if start + PAGE_SIZE < len(self._items) else None)


def newest_first(first: int, last: int, subreddit: str = "a") -> list[Item]:
    return [item(number, subreddit) for number in range(last, first - 1, -1)]


def known(first: int, last: int, name: str = "a") -> Track:
    track = Track(name, beginning=float(first), watermark=float(last))
    track.learn(reversed(newest_first(first, last, name)))
    return track


def fullnames(items: Iterable[Item]) -> list[str]:
    return [each.fullname for each in items]


def names(tracks: Iterable[Track]) -> list[str]:
    return [track.name for track in tracks]


def test_it_ends_on_the_page_with_a_known_post_and_gives_the_oldest_first() -> None:
    listing = Listing(newest_first(1, 500))
    found = walk(listing, [known(1, 250)], OVERLAP, depth=100)
    assert found.missed == []
    assert fullnames(found.items) == [f"t3_{number}" for number in range(201, 501)]
    assert len(listing.asked) == 3


def test_any_known_post_will_do() -> None:
    """The newest known ones were deleted on Reddit: where a single anchor would be lost."""
    left = [each for each in newest_first(1, 500) if not 100 < int(each.fullname[3:]) <= 250]
    listing = Listing(left)
    track = known(1, 250)
    track.watermark = 90.0  # the time alone would not end it here
    found = walk(listing, [track], OVERLAP, depth=100)
    assert found.missed == []
    assert "t3_251" in fullnames(found.items)


def test_it_ends_where_time_is_known_though_no_known_post_is_left() -> None:
    listing = Listing(newest_first(1, 500))
    track = Track("a", beginning=1.0, watermark=250.0, known={"t3_deleted": ""})
    found = walk(listing, [track], OVERLAP, depth=100)
    assert found.missed == []
    assert len(listing.asked) == 3


def test_a_listing_that_is_cut_before_known_ground_is_missed() -> None:
    listing = Listing(newest_first(1, 3000))
    found = walk(listing, [known(1, 1500)], OVERLAP, depth=100)
    assert names(found.missed) == ["a"]
    assert (found.oldest, found.newest) == (2001.0, 3000.0)
    assert len(found.items) == 1000


def test_a_walk_that_uses_up_its_pages_is_missed() -> None:
    found = walk(Listing(newest_first(1, 900)), [known(1, 100)], OVERLAP, depth=100, pages=3)
    assert names(found.missed) == ["a"]
    assert found.oldest == 601.0


def test_a_pinned_post_at_the_head_shows_nothing() -> None:
    """It is known and old: where it ended the walk, all between would be lost."""
    pinned = item(5, stickied=True)
    listing = Listing([pinned, *newest_first(6, 500)])
    found = walk(listing, [known(1, 200)], OVERLAP, depth=100)
    assert "t3_201" in fullnames(found.items)
    assert found.missed == []


def test_an_old_post_out_of_its_order_shows_nothing_either() -> None:
    """As above, but not marked as pinned."""
    listing = Listing([item(5), *newest_first(6, 500)])
    found = walk(listing, [known(1, 200)], OVERLAP, depth=100)
    assert "t3_201" in fullnames(found.items)


def test_of_joined_subreddits_each_has_to_be_met() -> None:
    busy = newest_first(1, 800, "busy")
    quiet = [item(10_000 + number, "Quiet", created=float(number)) for number in (700, 650, 300, 20)]
    merged = sorted([*busy, *quiet], key=lambda each: -each.created_utc)
    track = Track("quiet", beginning=0.0, watermark=310.0, known={"t3_10300": ""})
    found = walk(Listing(merged), [known(1, 750, "busy"), track], OVERLAP, depth=100)
    assert {"t3_10700", "t3_10650"} <= set(fullnames(found.items))
    assert found.missed == []


def test_of_joined_subreddits_those_not_met_are_named() -> None:
    busy = newest_first(1, 2000, "busy")
    quiet = [item(10_500, "quiet", created=500.0)]
    merged = sorted([*busy, *quiet], key=lambda each: -each.created_utc)
    track = Track("quiet", beginning=0.0, watermark=400.0, known={"t3_10400": ""})
    found = walk(Listing(merged), [known(1, 1500, "busy"), track], OVERLAP, depth=100)
    assert names(found.missed) == ["quiet"]


def test_it_goes_on_below_the_watermark_for_posts_that_appear_late() -> None:
    found = walk(Listing(newest_first(1, 500)), [known(1, 490)], overlap=250.0, depth=100)
    assert found.oldest <= 240.0


def test_a_deep_walk_goes_to_the_end_of_the_listing() -> None:
    found = walk(Listing(newest_first(1, 700)), [known(1, 690)], overlap=math.inf, depth=100)
    assert len(found.items) == 700
    assert found.missed == []


@pytest.mark.parametrize(("depth", "expected"), [(1, 100), (100, 100), (250, 300), (1000, 500)])
def test_a_first_walk_goes_as_deep_as_it_is_told(depth: int, expected: int) -> None:
    found = walk(Listing(newest_first(1, 500)), [Track("a")], OVERLAP, depth=depth)
    assert len(found.items) == expected
    assert found.missed == []


def test_the_whole_of_a_short_listing_has_no_gap() -> None:
    """All known posts were deleted; the listing shows that nothing is left of them."""
    track = Track("a", beginning=1.0, watermark=3.0, known={"t3_deleted": ""})
    found = walk(Listing(newest_first(10, 40)), [track], OVERLAP, depth=100)
    assert found.missed == []


def test_a_dead_anchor_is_stepped_over() -> None:
    listing = Listing(newest_first(1, 500), dead=["t3_401", "t3_402"])
    found = walk(listing, [known(1, 250)], OVERLAP, depth=100)
    assert fullnames(found.items) == [f"t3_{number}" for number in range(203, 501)]
    assert listing.asked[:4] == [None, "t3_401", "t3_402", "t3_403"]


def test_dead_anchors_do_not_cost_the_end_of_a_listing() -> None:
    """The last of its thousand items is pushed out by the next post: there is no second chance."""
    dead = ["t3_2901", "t3_2502", "t3_2201"]
    found = walk(Listing(newest_first(1, 3000), dead=dead), [known(1, 1500)], OVERLAP, depth=100)
    assert fullnames(found.items) == [f"t3_{number}" for number in range(2001, 3001)]


def test_a_listing_that_breaks_off_is_a_fault_and_no_end() -> None:
    dead = [f"t3_{number}" for number in range(401, 411)]
    with pytest.raises(Fault, match="ended early"):
        walk(Listing(newest_first(1, 500), dead=dead), [known(1, 250)], OVERLAP, depth=100)


def test_an_empty_listing_says_nothing() -> None:
    assert walk(Listing([]), [known(1, 250)], OVERLAP, depth=100).empty


def test_posts_that_come_while_it_walks_do_no_harm() -> None:
    items = newest_first(1, 300)

    def fetch() -> Callable[[str | None], Page]:
        def page(after: str | None) -> Page:
            items.insert(0, item(1000 + len(items)))
            start = 0 if after is None else 1 + fullnames(items).index(after)
            part = items[start : start + PAGE_SIZE]
            return Page(part, part[-1].fullname if start + PAGE_SIZE < len(items) else None)

        return page

    found = walk(fetch(), [known(1, 100)], OVERLAP, depth=100)
    assert set(fullnames(newest_first(101, 300))) <= set(fullnames(found.items))
    assert len(found.items) == len(set(fullnames(found.items)))


def test_what_is_known_is_bounded_and_the_newest_stay() -> None:
    track = Track("a")
    track.learn(reversed(newest_first(1, KNOWN + 500)))
    track.learn([item(501)])
    assert len(track.known) == KNOWN
    assert {"t3_502", f"t3_{KNOWN + 500}"} <= set(track.known)
    assert "t3_500" not in track.known


def test_an_edited_post_has_another_digest() -> None:
    before = item(1)
    after = before._replace(post=Post(id="t3_1", title="another"))
    assert before.text != after.text
    assert before.text == item(1).text
