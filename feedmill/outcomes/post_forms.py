"""The forms in which people copy a post's id: bare, with Reddit's prefix, or as an address."""

import re
from collections.abc import Iterator

from feedmill.producers.records import REDDIT_ADDRESS, REDDIT_ID

#: The address of a post in Reddit's short form.
REDDIT_SHORT = re.compile(r"redd\.it/([a-z0-9]+)", re.IGNORECASE)
#: A comment's address on Reddit, behind its post's title or "comment".
REDDIT_COMMENT_ADDRESS = re.compile(
    r"/comments/[a-z0-9]+/[^/?#]*/([a-z0-9]+)", re.IGNORECASE
)
#: Prefixes of the ids of posts and comments on Reddit.
POST_PREFIX = "t3_"
COMMENT_PREFIX = "t1_"
#: Collection of posts on Bluesky.
BLUESKY_POSTS = "app.bsky.feed.post"
#: A post's address on Bluesky, with the account's DID or handle, and the post's key.
BLUESKY_ADDRESS = re.compile(
    r"/profile/([a-z0-9:._-]+)/post/([a-z0-9]+)", re.IGNORECASE
)
#: An account: its DID, the start of its posts' ids, or its page.
BLUESKY_ACCOUNT = re.compile(
    r"(?:at://|https?://[^/]+/profile/)?(did:[a-z0-9]+:[a-zA-Z0-9._:%-]+)/?"
)
#: A post's id with a handle in place of the DID.
HANDLE_ID = re.compile(r"at://([^/:]+)/app\.bsky\.feed\.post/([a-z0-9]+)")


def account_of(text: str) -> str | None:
    """Return the DID of an account that the text names; None for anything else."""
    match = BLUESKY_ACCOUNT.fullmatch(text.strip())
    if match is None:
        return None
    return match[1]


def other_forms(post_id: str) -> Iterator[str]:
    """Yield the ids that posts of Reddit and Bluesky have, for what people copy from there."""
    comment = REDDIT_COMMENT_ADDRESS.search(post_id)
    if comment:
        comment_id = comment[1].lower()
        yield f"{COMMENT_PREFIX}{comment_id}"
        yield comment_id
        return
    address = REDDIT_ADDRESS.search(post_id) or REDDIT_SHORT.search(post_id)
    if address:
        reddit_id = address[1].lower()
        yield f"{POST_PREFIX}{reddit_id}"
        yield reddit_id
        return
    bluesky = BLUESKY_ADDRESS.search(post_id)
    if bluesky:
        account, key = bluesky.groups()
        if account.startswith("did:"):
            yield f"at://{account}/{BLUESKY_POSTS}/{key}"
        return
    lowered = post_id.lower()
    if lowered.startswith((POST_PREFIX, COMMENT_PREFIX)):
        # rows of a file may have the bare id
        yield lowered
        _, _, bare_id = lowered.partition("_")
        yield bare_id
    elif REDDIT_ID.fullmatch(lowered):
        yield f"{POST_PREFIX}{lowered}"
        yield f"{COMMENT_PREFIX}{lowered}"


def key_of_handle(post_id: str) -> str | None:
    """Return the end of the id of a post on Bluesky that is named with its author's handle, which
    is no part of ids; None for anything else.
    """
    address = BLUESKY_ADDRESS.search(post_id)
    if address is None:
        address = HANDLE_ID.fullmatch(post_id)
    if address is None:
        return None
    account, key = address.groups()
    if account.startswith("did:"):
        return None
    return f"/{BLUESKY_POSTS}/{key}"
