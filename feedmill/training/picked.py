"""The column `picked` of `feedmill label`'s answers: why a post was picked, and whether it fits
none of the labels. Does not import torch.

An empty label alone cannot say that: it stands for a skipped post.
"""

import re

from feedmill.shared.messages import Post

#: Why a post was picked: at random for the first round, by uncertainty, or at random to measure
#: accuracy.
FIRST = "first"
UNCERTAIN = "uncertain"
RANDOM = "random"
#: Reasons of posts that measure the accuracy: those at random, and rows that were added by hand.
MEASURING = frozenset({FIRST, RANDOM, ""})
#: In place of a label's number: the post fits none of the labels.
NONE_OF_THESE = -1
#: Column of the answers, and its values for posts that fit none: "none (random)".
PICKED_COLUMN = "picked"
NONE = "none"
PATTERN = re.compile(rf"\s*{NONE}\s*(?:\((.*)\))?\s*", re.IGNORECASE)


def with_none(why: str) -> str:
    """Return the value of a post that fits none, and was picked for this reason."""
    return f"{NONE} ({why})" if why else NONE


def read_picked(value: str) -> tuple[str, bool]:
    """Return why a post was picked, and whether the value says that it fits none."""
    match = PATTERN.fullmatch(value)
    if match is None:
        return value, False
    why = match[1] or ""
    return why.strip(), True


def fits_none(post: Post) -> bool:
    """Return whether a post has no topic because it fits none of the labels, as its column
    `picked` says.
    """
    if post.topic or not post.text:
        return False
    extra = post.extra or {}
    picked = extra.get(PICKED_COLUMN)
    if not isinstance(picked, str):
        return False
    _, is_none = read_picked(picked)
    return is_none
