"""Try each way to read Reddit, to say which works before a daemon starts.

The ways are those of docs/reddit-access.md, without dumps, which need no access.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

from feedmill.producers.live.source import Clock, RequestBudget, SourceFailed
from feedmill.producers.reddit import arctic_shift, client
from feedmill.producers.reddit.listing import ListingItem, SubredditUnreadable
from feedmill.producers.reddit.topics import Topics
from feedmill.shared.errors import UserError, explain_missing
from feedmill.shared.settings import Settings

#: Subreddits that are tried, best ones of the first topics: some may be private or missing.
MAX_SUBREDDITS = 3
#: Page that explains each error, by the way's section.
PAGE = "docs/reddit-access.md"


class Way(NamedTuple):
    """A way to read Reddit.

    works: whether it gave posts. result: what was read, or the reason. command: reads this way.
    section: of the page that explains the reason.
    """

    name: str
    works: bool
    result: str
    command: str
    section: str

    @property
    def explanation(self) -> str:
        """Where the reason is explained."""
        return f"{PAGE}#{self.section}"


class _NoneReadable(Exception):  # noqa: N818 - named after the event
    """None of the subreddits can be read, and why."""


def check_ways(settings: Settings, topics: Topics, clock: Clock) -> Iterator[Way]:
    """Yield each way after trying it once, without retries. Raises Stopped."""
    names = [subreddits[0] for subreddits in topics.topics.values()]
    names = names[:MAX_SUBREDDITS]
    yield _try(
        name="app",
        command="feedmill ingest reddit",
        section="approved-app",
        read=partial(_read_api, settings, clock, names),
    )
    yield _try(
        name="archive",
        command="feedmill ingest reddit --source arctic-shift",
        section="archive-and-dumps",
        read=partial(_read_archive, settings, clock, names),
    )
    yield _try(
        name="feeds",
        command="feedmill ingest feeds feeds.toml",
        section="feeds",
        read=partial(_read_feed, settings, clock, names),
    )


def _try(name: str, command: str, section: str, read: Callable[[], str]) -> Way:
    works = False
    try:
        result = read()
        works = True
    except (SourceFailed, UserError, _NoneReadable) as error:
        result = str(error)
        if not result.endswith("."):
            result += "."
    return Way(
        name=name,
        works=works,
        result=result,
        command=command,
        section=section,
    )


def _read_api(settings: Settings, clock: Clock, names: list[str]) -> str:
    """Read a subreddit with the credentials of an app."""
    budget = RequestBudget(clock, client.REQUESTS_PER_MINUTE)
    with closing(client.RedditClient(settings, budget, {})) as reddit:
        return _read_first(names, reddit.newest)


def _read_archive(settings: Settings, clock: Clock, names: list[str]) -> str:
    budget = RequestBudget(clock, arctic_shift.REQUESTS_PER_MINUTE)
    with closing(arctic_shift.ArcticShiftClient(settings, budget, {})) as archive:
        return _read_first(names, archive.newest)


def _read_feed(settings: Settings, clock: Clock, names: list[str]) -> str:
    """Read a subreddit's feed without a login."""
    with explain_missing("This way", "feeds"):
        # Need fastfeedparser and lxml, optional packages.
        from feedmill.producers.feeds.client import FeedClient  # noqa: PLC0415
        from feedmill.producers.feeds.parser import Parser  # noqa: PLC0415

    url = settings.reddit_url or client.TOKEN_URL
    url = url.rstrip("/")
    name = names[0]
    feeds = FeedClient(clock, settings.feeds_user_agent)
    with closing(feeds), closing(Parser()) as parser:
        answer = feeds.get(f"{url}/r/{name}/new/.rss")
        document = parser.parse(answer.body or b"")
    count = len(document.entries)
    return f"r/{name} without a login (entries: {count:,})"


def _read_first(names: list[str], newest: Callable[[str], list[ListingItem]]) -> str:
    """Read the first of these subreddits that can be read."""
    problems: list[str] = []
    for name in names:
        try:
            items = newest(name)
        except SubredditUnreadable as unreadable:
            problems.append(f"r/{name} is {unreadable}")
            continue
        if items:
            return f"r/{name} (newest posts: {len(items):,})"
        problems.append(f"r/{name} has no posts")
    raise _NoneReadable("; ".join(problems))
