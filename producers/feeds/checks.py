"""Read each feed of a file once, to see whether it can be read."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing

from feedmill.producers.feeds.client import FeedClient, shown
from feedmill.producers.feeds.parser import Parser
from feedmill.producers.feeds.subscriptions import Feed
from feedmill.producers.live.source import Clock, SourceFailed
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)


def check_all(
    feeds: Mapping[str, Feed], settings: Settings, clock: Clock
) -> Iterator[tuple[str, bool]]:
    """Yield a line for each feed, and whether it can be read. Raises Stopped."""
    client = FeedClient(clock, settings.feeds_user_agent)
    width = max(len(name) for name in feeds)
    with closing(Parser()) as parser, closing(client):
        for name, feed in feeds.items():
            result, is_read = _check(
                name,
                feed,
                client,
                parser,
            )
            yield f"{name:{width}}  {result}", is_read


def _check(
    name: str, feed: Feed, client: FeedClient, parser: Parser
) -> tuple[str, bool]:
    """Return what was read of a feed, or why nothing was; and whether it can be read."""
    try:
        answer = client.get(feed.url)
        document = parser.parse(answer.body or b"")
    except SourceFailed as fault:
        return f"cannot be read: {fault}", False
    except Exception as error:
        # One odd answer must not keep the other feeds from being checked. The error's text is not
        # shown: it may hold the address.
        logger.debug("unexpected error at feed %s", name, exc_info=True)
        kind = type(error).__name__
        return f"cannot be read: unexpected error ({kind})", False
    dates = [entry.published for entry in document.entries]
    newest = max(dates, default="")
    result = f"{len(document.entries):5,} entries"
    if newest:
        result += f", newest {newest}"
    if answer.moved_to:
        result += f"; has moved to {shown(answer.moved_to)}"
    return result, True
