"""Arctic Shift's API: an archive of Reddit, without credentials. Not run or approved by Reddit.

It serves posts in ascending order of creation, so reading can stop and go on at any post, and a
busy subreddit leaves no gap. Its documentation does not say whether bounds are inclusive: requests
overlap by a second until an answer shows that they are, and items outside the bounds are dropped.

`GapFiller` reads the posts of recorded gaps there, and sends them like any other post.
"""

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from random import choice
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.live.http import HttpClient
from feedmill.producers.live.source import (
    Clock,
    RequestBudget,
    RequestFailed,
    SourceFailed,
)
from feedmill.producers.live.state import Gap, Gaps
from feedmill.producers.push import known_ids
from feedmill.producers.reddit.listing import PAGE_SIZE, ListingItem, parse_items
from feedmill.shared.errors import printable
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: The archive's address, and maximum requests per minute. The budget in its responses applies if
#: it is lower.
URL = "https://arctic-shift.photon-reddit.com"
REQUESTS_PER_MINUTE = 30
#: Posts requested per search after the server timed out.
SMALL_PAGE_SIZE = 25
#: Seconds without requests after the server reports that it is overloaded.
OVERLOAD_PAUSE_S = 30.0
#: Seconds between checks for open gaps.
POLL_INTERVAL_S = 60.0
#: Seconds after the end of a gap from which on the archive counts as complete, even if it has no
#: later post.
COMPLETE_AFTER_S = 86_400.0
#: Reason for keeping a gap with a second that has more posts than a page, which cannot be paged.
CROWDED = "Arctic Shift returns only some of the posts of a busy second"
#: Reason for keeping a gap that the archive has not reached.
BEHIND = "Arctic Shift has no post from the end of the gap yet"


class Span(NamedTuple):
    """A part of a subreddit's posts, oldest first.

    reached: all posts created before this time are read, or were in an earlier part. more: false
    at the end.
    crowded: a second with more posts than the archive returns, some of which may be missing; None
    if there is none.
    """

    items: list[ListingItem]
    reached: float
    more: bool
    crowded: float | None = None


class ArcticShiftClient(HttpClient):
    """A client for Arctic Shift's API. Not thread-safe.

    Methods raise SourceFailed; RequestFailed for one request.

    topic_of: topic by the subreddit's name in lower case.
    """

    def __init__(
        self, settings: Settings, budget: RequestBudget, topic_of: Mapping[str, str]
    ) -> None:
        super().__init__("Arctic Shift", budget)
        user_agent = settings.reddit_user_agent or "feedmill"
        self.session.headers["User-Agent"] = user_agent
        url = settings.arctic_shift_url or URL
        self._url = url.rstrip("/")
        self._topic_of = topic_of
        #: Subreddits whose latest search timed out: they are asked for fewer posts.
        self._slow: set[str] = set()
        #: Whether an answer has shown that `after` is inclusive.
        self._inclusive = False

    def since(self, name: str, since: float, until: float | None = None) -> Span:
        """Return the subreddit's oldest posts created at `since` or later, and before `until`.

        Call again with the span's `reached`; items of that second are returned again.
        """
        since = math.floor(since)  # the archive's times are whole seconds
        size = PAGE_SIZE
        if name.lower() in self._slow:
            size = SMALL_PAGE_SIZE
        page, is_full = self._page_since(
            name,
            since,
            until,
            size,
        )
        items = [item for item in page if item.created_utc >= since]
        has_earlier = len(items) < len(page)
        if has_earlier and not self._inclusive:
            # The second before `since` may fill the page: ask without it.
            self._inclusive = True
            return self.since(name, since, until)
        times = [item.created_utc for item in page]
        last = max(times, default=since)
        more = is_full
        if until is not None:
            items = [item for item in items if item.created_utc < until]
            if last >= until:
                more = False
        items.sort(key=_age)
        if more and last <= since:
            if size < PAGE_SIZE:  # a whole page may hold that second's posts
                try:
                    return self.since(name, since, until)
                except RequestFailed:
                    pass  # this page's posts are used
            return Span(
                items,
                reached=since + 1,
                more=more,
                crowded=since,
            )
        return Span(
            items,
            reached=max(since, last),
            more=more,
        )

    def _page_since(
        self, name: str, since: int, until: float | None, size: int
    ) -> tuple[list[ListingItem], bool]:
        """Return the page of the oldest posts since a second, and whether it is full. Remembers
        whether the search failed.
        """
        after = since
        if not self._inclusive:
            after -= 1
        bounds = {"after": after}
        if until is not None:
            last_second = int(until)
            bounds["before"] = last_second + 1
        key = name.lower()
        try:
            page, is_full = self._search(
                name,
                size,
                sort="asc",
                **bounds,
            )
        except RequestFailed:
            self._slow.add(key)
            raise
        self._slow.discard(key)
        return page, is_full

    def newest(self, name: str, count: int = 1) -> list[ListingItem]:
        """Return about `count` newest posts of a subreddit, oldest first."""
        size = min(PAGE_SIZE, count)
        items: dict[str, ListingItem] = {}
        bounds: dict[str, int] = {}
        while len(items) < count:
            page, is_full = self._search(
                name,
                size,
                sort="desc",
                **bounds,
            )
            count_before = len(items)
            for item in page:
                items[item.fullname] = item
            has_new = len(items) > count_before
            if not has_new or not is_full:
                break
            times = [item.created_utc for item in items.values()]
            oldest_second = int(min(times))
            bounds = {"before": oldest_second + 1}
        oldest_first = sorted(items.values(), key=_age)
        return oldest_first[-count:]

    def info(self, fullnames: Sequence[str]) -> dict[str, ListingItem]:
        """Return up to a hundred posts by fullname.

        Posts that the archive does not have are absent.
        """
        ids = [name.removeprefix("t3_") for name in fullnames]
        joined_ids = ",".join(ids)
        query = {"ids": joined_ids}
        posts = self._request("/api/posts/ids", query)
        items: dict[str, ListingItem] = {}
        for item in parse_items(posts, self._topic_of):
            items[item.fullname] = item
        return items

    def _search(
        self, name: str, limit: int, **parameters: str | int
    ) -> tuple[list[ListingItem], bool]:
        """Return the valid posts of a page, and whether the page is full, with the invalid
        ones.
        """
        query = {
            "subreddit": name,
            "limit": limit,
            **parameters,
        }
        posts = self._request("/api/posts/search", query)
        key = name.lower()
        own_items: list[ListingItem] = []
        for item in parse_items(posts, self._topic_of):
            subreddit = item.subreddit.lower()
            if subreddit == key:
                own_items.append(item)
        is_full = len(posts) >= limit
        return own_items, is_full

    def _request(self, path: str, parameters: Mapping[str, str | int]) -> list[Any]:
        url = self._url + path
        response = self.request("GET", url, params=parameters)
        status = response.status_code
        answer = self.json(response)
        data = None
        error = answer
        if isinstance(answer, dict):
            data = answer.get("data")
            error = answer.get("error")
        if status == 200 and isinstance(data, list):
            return data
        if status == 422:
            # "Timeout. Maybe slow down a bit": the archive's answer to searches that are too
            # expensive, and to clients that are too fast.
            self.budget.pause(OVERLOAD_PAUSE_S)
        reason = printable(str(error))
        raise RequestFailed(f"Arctic Shift returned status {status}: {reason:.100}")


def _age(item: ListingItem) -> tuple[float, str]:
    return item.created_utc, item.fullname


class GapFiller:
    """Fill Reddit's gaps from the archive, one request per step.

    The progress is stored with the gap.
    """

    def __init__(self, archive: ArcticShiftClient, redis: Redis, clock: Clock) -> None:
        self._archive = archive
        self._redis = redis
        self._gaps = Gaps(redis)
        self._clock = clock
        #: Time of the next step (monotonic seconds).
        self._due = clock.monotonic()
        #: Filled gaps since the start.
        self.filled = 0

    def pending(self) -> float:
        """Return the seconds until the next step."""
        now = self._clock.monotonic()
        until_due = self._due - now
        until_request = self._archive.budget.pending()
        return max(0.0, until_due, until_request)

    def step(self) -> Generator[Any]:
        """Read the next part of a gap and yield its posts, if it is time.

        Raises redis.exceptions.RedisError.
        """
        archive = self._archive
        open_gaps = self._gaps.open("reddit")
        gaps = [gap for gap in open_gaps if gap.reached < gap.until]
        now = self._clock.monotonic()
        self._due = now + POLL_INTERVAL_S
        if not gaps:
            return
        # Gaps that failed come last, in any order, so that none holds up the others.
        fillable = [gap for gap in gaps if gap.problem in ("", CROWDED)]
        if fillable:
            gaps = fillable
        gap = choice(gaps)
        since = gap.reached or gap.since
        problem = ""
        try:
            span = archive.since(
                gap.subreddit,
                since,
                gap.until,
            )
            if not span.more and not self._reaches(gap):
                problem = BEHIND
        except SourceFailed as fault:
            archive.budget.pause(fault.retry_after)
            problem = str(fault)
        if not problem:
            yield from self._send(gap, span)
            self._due = self._clock.monotonic()
            return
        # Posts of a crowded second stay missing.
        if gap.problem in (problem, CROWDED):
            return
        logger.warning(
            "cannot fill the gap in r/%s: %s; retrying each minute",
            gap.subreddit,
            problem,
        )
        gap = gap._replace(problem=problem)
        self._gaps.record(gap)

    def _send(self, gap: Gap, span: Span) -> Generator[Any]:
        """Yield the posts of a part of a gap, and store the progress."""
        items = span.items
        reached = gap.until
        if span.more:
            # Posts of the last second are read again in the next part.
            items = [item for item in span.items if item.created_utc < span.reached]
            reached = span.reached
        # Sent posts are left out: the archive may have text that was deleted since.
        ids = [item.fullname for item in items]
        sent_ids = known_ids(self._redis, ids)
        for item in items:
            if item.fullname not in sent_ids:
                yield item.event
        yield None
        readable = [item for item in items if not item.gone]
        was_crowded = gap.problem == CROWDED
        is_crowded = was_crowded or span.crowded is not None
        problem = ""
        if is_crowded:
            problem = CROWDED
        gap = gap._replace(
            reached=reached,
            found=gap.found + len(readable),
            problem=problem,
        )
        if not span.more and not is_crowded:
            now = self._clock.time()
            gap = gap._replace(filled=now)
            self.filled += 1
            logger.info(
                "filled the gap in r/%s with %d posts from Arctic Shift",
                gap.subreddit,
                gap.found,
            )
        self._gaps.record(gap)

    def _reaches(self, gap: Gap) -> bool:
        """Return whether the archive has read the subreddit up to the end of the gap."""
        now = self._clock.time()
        since_end_s = now - gap.until
        if since_end_s > COMPLETE_AFTER_S:
            return True
        last_second = gap.until - 1
        span = self._archive.since(gap.subreddit, last_second)
        return bool(span.items)
