"""Arctic Shift's API: an archive of Reddit, without credentials. Not run or approved by Reddit.

It serves posts in ascending order of creation, so reading can stop and go on at any post, and a busy subreddit leaves
no gap. Its documentation does not say whether bounds are inclusive: requests overlap by a second until an answer shows
that they are, and items outside the bounds are dropped.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import requests

from feedmill.producers.live.budget import RequestBudget
from feedmill.producers.reddit.http import TEMPORARY_STATUSES, fetch, retry_after
from feedmill.producers.reddit.items import parse_items
from feedmill.producers.reddit.listing import (
    PAGE_SIZE,
    ListingItem,
    ListingPage,
    RequestFailed,
    SubredditInfo,
    TooManyRequests,
)
from feedmill.shared.errors import printable
from feedmill.shared.settings import Settings

#: Posts requested per search after the server timed out.
SMALL_PAGE_SIZE = 25
#: Seconds without requests after the server reports that it is overloaded.
OVERLOAD_PAUSE_S = 30.0


class Span(NamedTuple):
    """A part of a subreddit's posts, oldest first.

    reached: all posts created before this time are read, or were in an earlier part. more: false at the end.
    crowded: a second with more posts than the archive returns, some of which may be missing; None if there is none.
    """

    items: list[ListingItem]
    reached: float
    more: bool
    crowded: float | None = None


class ArcticShiftClient:
    """A client for Arctic Shift's API. Not thread-safe. Every method raises only RedditFault.

    topic_of: topic by the subreddit's name in lower case.
    """

    name = "Arctic Shift"
    refused = ""

    def __init__(
        self,
        settings: Settings,
        budget: RequestBudget,
        topic_of: Mapping[str, str],
        session: requests.Session | None = None,
    ) -> None:
        self._session = session or requests.Session()
        self._session.headers["User-Agent"] = settings.reddit_user_agent or "feedmill"
        self._url = settings.arctic_shift_url.rstrip("/")
        self._timeout = settings.reddit_timeout
        self._budget = budget
        self._topic_of = topic_of
        #: Subreddits whose latest search timed out: they are asked for fewer posts.
        self._slow: set[str] = set()
        #: Whether an answer has shown that `after` is inclusive.
        self._inclusive = False

    def close(self) -> None:
        self._session.close()

    def since(self, name: str, since: float, until: float | None = None) -> Span:
        """Return the subreddit's oldest posts created at `since` or later, and before `until`.

        Call again with the span's `reached`; items of that second are returned again.
        """
        since = math.floor(since)  # the archive's times are whole seconds
        size = SMALL_PAGE_SIZE if name.lower() in self._slow else PAGE_SIZE
        after = since if self._inclusive else since - 1
        bounds = {"after": after} | ({} if until is None else {"before": int(until) + 1})
        try:
            found = self._search(name, sort="asc", limit=size, **bounds)
        except RequestFailed:
            self._slow.add(name.lower())
            raise
        self._slow.discard(name.lower())
        if not self._inclusive and any(each.created_utc < since for each in found):
            # The second before `since` may fill the page: ask without it.
            self._inclusive = True
            return self.since(name, since, until)
        wanted = [each for each in found if each.created_utc >= since and (until is None or each.created_utc < until)]
        items = sorted(wanted, key=lambda item: (item.created_utc, item.fullname))
        last = max((item.created_utc for item in found), default=since)
        more = len(found) >= size and (until is None or last < until)
        if more and last <= since:
            return Span(items, since + 1, more, crowded=since)
        return Span(items, max(since, last), more)

    def page(
        self,
        names: Sequence[str],
        listing: str = "new",
        after: str | None = None,
        limit: int = PAGE_SIZE,
        period: str = "",
    ) -> ListingPage:
        """Return the newest posts of a single subreddit. Only the listing `new`, without further pages."""
        if len(names) > 1 or listing != "new" or after or period:
            raise RequestFailed("Arctic Shift lists only the newest posts of one subreddit")
        items = self._search(names[0], sort="desc", limit=limit)
        return ListingPage(sorted(items, key=lambda item: -item.created_utc), None)

    def newest(self, name: str, count: int, found: dict[str, ListingItem]) -> list[ListingItem]:
        """Return about `count` newest posts of a subreddit, oldest first.

        found: posts that are read already, by fullname. New ones are added, so that reading continues after a fault.
        """
        size = min(PAGE_SIZE, count)
        while len(found) < count:
            bounds = {"before": int(min(item.created_utc for item in found.values())) + 1} if found else {}
            page = self._search(name, sort="desc", limit=size, **bounds)
            new = {item.fullname: item for item in page if item.fullname not in found}
            found |= new
            if not new or len(page) < size:
                break
        items = sorted(found.values(), key=lambda item: (item.created_utc, item.fullname))
        return items[-count:]

    def info(self, fullnames: Iterable[str]) -> dict[str, ListingItem]:
        """Return posts by fullname. Posts that the archive does not have are absent."""
        found: dict[str, ListingItem] = {}
        remaining = iter(fullnames)
        while batch := list(islice(remaining, PAGE_SIZE)):
            ids = ",".join(name.removeprefix("t3_") for name in batch)
            found |= {item.fullname: item for item in self._request("/api/posts/ids", {"ids": ids})}
        return found

    def about(self, names: Iterable[str]) -> dict[str, SubredditInfo]:
        """Return all subreddits as readable: the archive keeps closed ones, which then have no new posts."""
        return {name.lower(): SubredditInfo(name, None) for name in names}

    def _search(self, name: str, **parameters: str | int) -> list[ListingItem]:
        items = self._request("/api/posts/search", {"subreddit": name, **parameters})
        return [item for item in items if item.subreddit.lower() == name.lower()]

    def _request(self, path: str, parameters: Mapping[str, str | int]) -> list[ListingItem]:
        response, body = fetch(
            self._session, self._budget, self._timeout, "GET", f"{self._url}{path}", params=dict(parameters)
        )
        return list(parse_items(self._posts(response, body), self._topic_of))

    def _posts(self, response: requests.Response, body: bytes) -> Iterator[dict[str, Any]]:
        status = response.status_code
        if status == 429:
            raise TooManyRequests(retry_after(response.headers))
        if status in TEMPORARY_STATUSES:
            raise RequestFailed(f"Arctic Shift returned status {status}")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestFailed(f"Arctic Shift returned invalid JSON with status {status}") from None
        data = answer.get("data") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(data, list):
            why = printable(str(answer.get("error") if isinstance(answer, dict) else answer))
            if status == 422:
                # "Timeout. Maybe slow down a bit": the archive's answer to searches that are too expensive, and to
                # clients that are too fast.
                self._budget.pause(OVERLOAD_PAUSE_S)
            raise RequestFailed(f"Arctic Shift returned status {status}: {why:.100}")
        return (each for each in data if isinstance(each, dict))
