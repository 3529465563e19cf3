"""Parse posts in the form of Reddit's API, which archives use, too."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from feedmill.producers.records import BadRecord, parse_post, reddit_body, removal_of
from feedmill.producers.reddit.listing import ListingItem
from feedmill.shared.messages import Post

logger = logging.getLogger(__name__)

#: The end of the year 9999, in seconds since 1970.
MAX_TIMESTAMP = 253_402_300_799.0


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
    fields = {
        "id": fullname,
        "topic": topic_of.get(subreddit.lower()),
        "title": data.get("title"),
        "body": reddit_body(data),
        "subreddit": subreddit,
        "score": data.get("score"),
        "url": data.get("url"),
        "permalink": f"https://www.reddit.com{data['permalink']}" if data.get("permalink") else None,
        "created_utc": created,
        # A time, False, or True for very old posts.
        "edited_utc": data["edited"] if type(data.get("edited")) in (int, float) else None,
        "stickied": bool(data.get("stickied")),
        "nsfw": bool(data.get("over_18")),
        "spoiler": bool(data.get("spoiler")),
    }
    # Drops invalid optional fields: a post is not rejected for its score or a URL.
    *_, read = parse_post(fields, fullname)
    post = read if isinstance(read, Post) else None
    score = data.get("score")
    return ListingItem(
        fullname,
        subreddit,
        created,
        bool(data.get("stickied")),
        removal_of(data),
        score if isinstance(score, int) else 0,
        post,
        read.reason if isinstance(read, BadRecord) else "",
    )
