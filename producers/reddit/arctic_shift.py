"""Arctic Shift's API: an archive of Reddit, without credentials. Not run or approved by Reddit.

It serves posts in ascending order of creation, so reading can stop and go on at any post, and a busy subreddit leaves
no gap. Its documentation does not say whether bounds are inclusive: requests overlap by a second until an answer shows
that they are, and items outside the bounds are dropped.

`GapFiller` reads the posts of recorded gaps there, and sends them like any other post.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import requests

from feedmill.producers.live.budget import RequestBudget, Retry
from feedmill.producers.live.clock import Clock
from feedmill.producers.live.http import HttpClient
from feedmill.producers.live.source import RequestFailed, SourceFailed
from feedmill.producers.live.state import Gap
from feedmill.producers.reddit.listing import PAGE_SIZE, ListingItem, ListingPage, parse_items
from feedmill.producers.reddit.state import State
from feedmill.shared.errors import printable
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: The archive's address, and maximum requests per minute. The budget in its responses applies if it is lower.
URL, REQUESTS_PER_MINUTE = "https://arctic-shift.photon-reddit.com", 30
#: Posts requested per search after the server timed out.
SMALL_PAGE_SIZE = 25
#: Seconds without requests after the server reports that it is overloaded.
OVERLOAD_PAUSE_S = 30.0
#: Seconds between checks for open gaps.
POLL_INTERVAL_S = 60.0
#: Seconds after the end of a gap from which on the archive counts as complete, even if it has no later post.
COMPLETE_AFTER_S = 86_400.0
#: Start of the reason for keeping a gap with a second that has more posts than a page, which cannot be paged.
CROWDED = "Arctic Shift returns only some of the posts of second"
#: Reason for keeping a gap that the archive has not reached.
BEHIND = "Arctic Shift has no post from the end of the gap yet"


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
    """A client for Arctic Shift's API. Not thread-safe. Methods raise SourceFailed; RequestFailed for one request.

    topic_of: topic by the subreddit's name in lower case.
    """

    name = "Arctic Shift"

    def __init__(
        self,
        settings: Settings,
        budget: RequestBudget,
        topic_of: Mapping[str, str],
        session: requests.Session | None = None,
    ) -> None:
        self.budget = budget
        self._http = HttpClient(self.name, budget, session)
        self._http.session.headers["User-Agent"] = settings.reddit_user_agent or "feedmill"
        self._url = URL
        self._topic_of = topic_of
        #: Subreddits whose latest search timed out: they are asked for fewer posts.
        self._slow: set[str] = set()
        #: Whether an answer has shown that `after` is inclusive.
        self._inclusive = False

    def close(self) -> None:
        self._http.close()

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
        items = sorted(wanted, key=_age)
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

    def newest(self, name: str, count: int) -> list[ListingItem]:
        """Return about `count` newest posts of a subreddit, oldest first."""
        size = min(PAGE_SIZE, count)
        found: dict[str, ListingItem] = {}
        while len(found) < count:
            bounds = {"before": int(min(item.created_utc for item in found.values())) + 1} if found else {}
            page = self._search(name, sort="desc", limit=size, **bounds)
            known = len(found)
            found |= {item.fullname: item for item in page}
            if len(found) == known or len(page) < size:
                break
        return sorted(found.values(), key=_age)[-count:]

    def info(self, fullnames: Sequence[str]) -> dict[str, ListingItem]:
        """Return up to a hundred posts by fullname. Posts that the archive does not have are absent."""
        ids = ",".join(name.removeprefix("t3_") for name in fullnames)
        return {item.fullname: item for item in self._request("/api/posts/ids", {"ids": ids})}

    def _search(self, name: str, **parameters: str | int) -> list[ListingItem]:
        items = self._request("/api/posts/search", {"subreddit": name, **parameters})
        return [item for item in items if item.subreddit.lower() == name.lower()]

    def _request(self, path: str, parameters: Mapping[str, str | int]) -> list[ListingItem]:
        response = self._http.request("GET", self._url + path, params=parameters)
        return list(parse_items(self._posts(response), self._topic_of))

    def _posts(self, response: requests.Response) -> Iterator[dict[str, Any]]:
        answer = self._http.json(response)
        data = answer.get("data") if isinstance(answer, dict) else None
        if response.status_code != 200 or not isinstance(data, list):
            why = printable(str(answer.get("error") if isinstance(answer, dict) else answer))
            if response.status_code == 422:
                # "Timeout. Maybe slow down a bit": the archive's answer to searches that are too expensive, and to
                # clients that are too fast.
                self.budget.pause(OVERLOAD_PAUSE_S)
            raise RequestFailed(f"Arctic Shift returned status {response.status_code}: {why:.100}")
        return (each for each in data if isinstance(each, dict))


def _age(item: ListingItem) -> tuple[float, str]:
    return item.created_utc, item.fullname


class GapFiller:
    """Fill Reddit's gaps one after the other, one request per step. The progress is stored with the gap."""

    def __init__(self, archive: ArcticShiftClient, state: State, clock: Clock) -> None:
        self._archive = archive
        self._state = state
        self._clock = clock
        #: Failures of open gaps.
        self._retries: defaultdict[str, Retry] = defaultdict(Retry)
        #: Filled gaps, and posts found in them, since the start.
        self.filled = self.found = 0

    def run(self) -> Generator[Any, None, float]:
        """Send one request for the first open gap, and yield its posts; return the seconds until the next run.

        Raises redis.exceptions.RedisError.
        """
        gap = min(self._state.gaps.open("reddit"), key=self._due, default=None)
        pause = POLL_INTERVAL_S if gap is None else self._due(gap) - self._clock.monotonic()
        if gap is None or pause > 0:
            return min(pause, POLL_INTERVAL_S)
        yield from self._fill_part(gap)
        return 0.0

    def _due(self, gap: Gap) -> float:
        return self._retries[gap.field].due

    def _fill_part(self, gap: Gap) -> Generator[Any]:
        """Read and send the next part of a gap, and store its progress."""
        try:
            span = self._archive.since(gap.subreddit, gap.reached or gap.since, gap.until)
            behind = not span.more and not self._reaches(gap)
        except SourceFailed as fault:
            self._fail(gap, str(fault))
            if not isinstance(fault, RequestFailed):
                self._archive.budget.pause(max(self._due(gap) - self._clock.monotonic(), fault.retry_after))
            return
        if behind:
            self._fail(gap, BEHIND)
            return
        # Posts of the last second are read again in the next part: count them then.
        counted = [item for item in span.items if not item.gone and (not span.more or item.created_utc < span.reached)]
        # Known posts are left out: the archive may have text that was deleted since.
        known = self._state.track(gap.subreddit).known
        yield from self._state.send([item for item in span.items if item.fullname not in known])
        # A crowded second keeps the gap open: some of its posts may be missing.
        crowded = gap.problem if gap.problem.startswith(CROWDED) else ""
        if span.crowded is not None:
            crowded = f"{CROWDED} {span.crowded:.0f}"
        self.found += len(counted)
        reached = span.reached if span.more else gap.until
        gap = gap._replace(reached=reached, found=gap.found + len(counted), problem=crowded)
        if not span.more and crowded:
            self._fail(gap, crowded)
            return
        self._retries.pop(gap.field)
        if not span.more:
            gap = gap._replace(filled=self._clock.time())
            self.filled += 1
            logger.info("filled the gap in r/%s with %d posts from Arctic Shift", gap.subreddit, gap.found)
        self._state.gaps.record(gap)

    def _reaches(self, gap: Gap) -> bool:
        """Return whether the archive has read the subreddit up to the end of the gap."""
        if self._clock.time() - gap.until > COMPLETE_AFTER_S:
            return True
        return bool(self._archive.since(gap.subreddit, gap.until - 1).items)

    def _fail(self, gap: Gap, reason: str) -> None:
        """Store the reason why a gap remains open. A crowded second stays the reason: other posts of it are missing."""
        pause = self._retries[gap.field].fail(self._clock.monotonic())
        if gap.problem != reason:
            logger.warning("cannot fill the gap in r/%s: %s; retrying in %.0f s", gap.subreddit, reason, pause)
        gap = gap._replace(problem=gap.problem if gap.problem.startswith(CROWDED) else reason)
        self._state.gaps.record(gap)
