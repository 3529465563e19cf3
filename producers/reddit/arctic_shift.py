"""Arctic Shift's API: an archive of Reddit, without credentials. Not run or approved by Reddit.

It serves posts in ascending order of creation, so reading can stop and go on at any post, and a busy subreddit leaves
no gap. Its documentation does not say whether bounds are inclusive: requests overlap by a second until an answer shows
that they are, and items outside the bounds are dropped.

`GapFiller` reads the posts of recorded gaps there, and sends them like any other post.
"""

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from random import choice
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.live.http import HttpClient
from feedmill.producers.live.source import Clock, RequestBudget, RequestFailed, SourceFailed
from feedmill.producers.live.state import Gap, Gaps
from feedmill.producers.push import known_ids
from feedmill.producers.reddit.listing import PAGE_SIZE, ListingItem, parse_items
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
#: Reason for keeping a gap with a second that has more posts than a page, which cannot be paged.
CROWDED = "Arctic Shift returns only some of the posts of a busy second"
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


class ArcticShiftClient(HttpClient):
    """A client for Arctic Shift's API. Not thread-safe. Methods raise SourceFailed; RequestFailed for one request.

    topic_of: topic by the subreddit's name in lower case.
    """

    def __init__(self, settings: Settings, budget: RequestBudget, topic_of: Mapping[str, str]) -> None:
        super().__init__("Arctic Shift", budget)
        self.session.headers["User-Agent"] = settings.reddit_user_agent or "feedmill"
        self._url = URL
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
        size = SMALL_PAGE_SIZE if name.lower() in self._slow else PAGE_SIZE
        after = since if self._inclusive else since - 1
        bounds = {"after": after} | ({} if until is None else {"before": int(until) + 1})
        try:
            found, is_full = self._search(name, size, sort="asc", **bounds)
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
        more = is_full and (until is None or last < until)
        if more and last <= since:
            if size < PAGE_SIZE:  # a whole page may hold that second's posts
                with suppress(RequestFailed):
                    return self.since(name, since, until)
            return Span(items, since + 1, more, crowded=since)
        return Span(items, max(since, last), more)

    def newest(self, name: str, count: int = 1) -> list[ListingItem]:
        """Return about `count` newest posts of a subreddit, oldest first."""
        size = min(PAGE_SIZE, count)
        found: dict[str, ListingItem] = {}
        while len(found) < count:
            bounds = {"before": int(min(item.created_utc for item in found.values())) + 1} if found else {}
            page, is_full = self._search(name, size, sort="desc", **bounds)
            known = len(found)
            found |= {item.fullname: item for item in page}
            if len(found) == known or not is_full:
                break
        return sorted(found.values(), key=_age)[-count:]

    def info(self, fullnames: Sequence[str]) -> dict[str, ListingItem]:
        """Return up to a hundred posts by fullname. Posts that the archive does not have are absent."""
        ids = ",".join(name.removeprefix("t3_") for name in fullnames)
        posts = self._request("/api/posts/ids", {"ids": ids})
        return {item.fullname: item for item in parse_items(posts, self._topic_of)}

    def _search(self, name: str, limit: int, **parameters: str | int) -> tuple[list[ListingItem], bool]:
        """Return the valid posts of a page, and whether the page is full, with the invalid ones."""
        posts = self._request("/api/posts/search", {"subreddit": name, "limit": limit, **parameters})
        items = parse_items(posts, self._topic_of)
        return [item for item in items if item.subreddit.lower() == name.lower()], len(posts) >= limit

    def _request(self, path: str, parameters: Mapping[str, str | int]) -> list[Any]:
        response = self.request("GET", self._url + path, params=parameters)
        answer = self.json(response)
        data = answer.get("data") if isinstance(answer, dict) else None
        if response.status_code != 200 or not isinstance(data, list):
            why = printable(str(answer.get("error") if isinstance(answer, dict) else answer))
            if response.status_code == 422:
                # "Timeout. Maybe slow down a bit": the archive's answer to searches that are too expensive, and to
                # clients that are too fast.
                self.budget.pause(OVERLOAD_PAUSE_S)
            raise RequestFailed(f"Arctic Shift returned status {response.status_code}: {why:.100}")
        return data


def _age(item: ListingItem) -> tuple[float, str]:
    return item.created_utc, item.fullname


class GapFiller:
    """Fill Reddit's gaps from the archive, one request per step. The progress is stored with the gap."""

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
        return max(0.0, self._due - self._clock.monotonic(), self._archive.budget.pending())

    def step(self) -> Generator[Any]:
        """Read the next part of a gap and yield its posts, if it is time. Raises redis.exceptions.RedisError."""
        gaps = [gap for gap in self._gaps.open("reddit") if gap.reached < gap.until]
        self._due = self._clock.monotonic() + POLL_INTERVAL_S
        if not gaps:
            return
        # Gaps that failed come last, in any order, so that none holds up the others.
        gap = choice([gap for gap in gaps if gap.problem in ("", CROWDED)] or gaps)
        try:
            span = self._archive.since(gap.subreddit, gap.reached or gap.since, gap.until)
            problem = "" if span.more or self._reaches(gap) else BEHIND
        except SourceFailed as fault:
            self._archive.budget.pause(fault.retry_after)
            problem = str(fault)
        if not problem:
            yield from self._send(gap, span)
            self._due = self._clock.monotonic()
        elif gap.problem not in (problem, CROWDED):  # posts of a crowded second stay missing
            logger.warning("cannot fill the gap in r/%s: %s; retrying each minute", gap.subreddit, problem)
            self._gaps.record(gap._replace(problem=problem))

    def _send(self, gap: Gap, span: Span) -> Generator[Any]:
        """Yield the posts of a part of a gap, and store the progress."""
        # Posts of the last second are read again in the next part.
        items = [item for item in span.items if not span.more or item.created_utc < span.reached]
        # Sent posts are left out: the archive may have text that was deleted since.
        known = known_ids(self._redis, [item.fullname for item in items])
        yield from (item.event for item in items if item.fullname not in known)
        yield None
        gap = gap._replace(
            reached=span.reached if span.more else gap.until,
            found=gap.found + sum(not item.gone for item in items),
            problem=CROWDED if gap.problem == CROWDED or span.crowded is not None else "",
        )
        if not span.more and not gap.problem:
            gap = gap._replace(filled=self._clock.time())
            self.filled += 1
            logger.info("filled the gap in r/%s with %d posts from Arctic Shift", gap.subreddit, gap.found)
        self._gaps.record(gap)

    def _reaches(self, gap: Gap) -> bool:
        """Return whether the archive has read the subreddit up to the end of the gap."""
        if self._clock.time() - gap.until > COMPLETE_AFTER_S:
            return True
        return bool(self._archive.since(gap.subreddit, gap.until - 1).items)
