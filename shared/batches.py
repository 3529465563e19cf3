"""Items in batches."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of `size`; the last one may have fewer.

    The standard library has this from Python 3.12 on.
    """
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
