"""The queue between two of the pipeline's threads: order, groups and items taken alone."""

import queue

import pytest

from feedmill.workers.pipeline.context import Inbox


def inbox(*items: int | None) -> Inbox[int | None]:
    """Return a queue of numbers, each its own size. None is taken alone."""
    found: Inbox[int | None] = Inbox(lambda item: item)
    for item in items:
        found.put(item)
    return found


def test_takes_what_fits_the_limit_in_order() -> None:
    full = inbox(3, 4, 3, 5, 1)
    assert [full.take(10), full.take(10)] == [[3, 4, 3], [5, 1]]


def test_takes_an_item_beyond_the_limit_alone() -> None:
    full = inbox(11, 2, 20, 1)
    assert [full.take(10) for _ in range(4)] == [[11], [2], [20], [1]]


def test_an_item_without_a_size_keeps_its_place_and_is_taken_alone() -> None:
    full = inbox(1, None, 2, 3, None, None)
    assert [full.take(10) for _ in range(5)] == [[1], [None], [2, 3], [None], [None]]


def test_waits_for_the_first_item_only() -> None:
    with pytest.raises(queue.Empty):
        inbox().take(10, timeout=0)
