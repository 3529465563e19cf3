"""Posts of a Mastodon server's public timeline, or of its tags, as a live source.

Reads the timelines by their ids, which are times: nothing is missed while the daemon is away.
Since version 4.2, servers stream to their own users only, and a stream leaves out what happens
while it is closed; timelines can be read without a token on most servers. Posts of other servers
arrive late, with the ids of the times when they were written, so the latest minutes are read again
now and then. Edits, scores and deletions are found by rechecks.

Needs requests, an optional package. Sources: docs.joinmastodon.org, methods timelines and
statuses; lib/mastodon/snowflake.rb.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from redis import Redis

from feedmill.producers.html_text import text_of
from feedmill.producers.live.http import HttpClient, user_agent
from feedmill.producers.live.source import (
    Clock,
    Event,
    Pause,
    RequestBudget,
    RequestFailed,
    Source,
    SourceFailed,
    seconds_of_date,
)
from feedmill.producers.live.state import LiveState
from feedmill.shared.language import is_foreign, languages_of
from feedmill.shared.messages import MAX_BODY, MAX_TITLE
from feedmill.shared.settings import Settings

#: Servers allow 300 requests in five minutes.
REQUESTS_PER_MINUTE = 50
#: Seconds between polls.
POLL_INTERVAL_S = 10.0
#: Statuses per page, and per look-up: the servers' maximum.
PAGE_SIZE = 40
LOOKUP_SIZE = 20
#: Seconds between two readings of the latest SWEEP_S seconds, for posts that arrived late.
SWEEP_INTERVAL_S = 600.0
SWEEP_S = 1_200.0
#: Bits of an id below its time in milliseconds.
SEQUENCE_BITS = 16
#: Seconds that an id's time may be ahead of this machine's clock. Reading never goes beyond.
MAX_AHEAD_S = 600.0


def id_at(seconds: float) -> int:
    """Return the lowest id of a time in seconds since 1970."""
    milliseconds = max(0, round(seconds * 1000))
    return milliseconds << SEQUENCE_BITS


def time_of_id(number: int) -> float:
    """Return the time of an id, in seconds since 1970."""
    return (number >> SEQUENCE_BITS) / 1000


class MastodonSource(Source):
    """New posts of a server. See `Source`.

    tags: timelines to read instead of the public one. is_local: only posts of the server's own
    users.
    """

    name = "mastodon"
    overlap = id_at(SWEEP_S)
    recheck_delays: Sequence[float] = (3_600.0, 36 * 3_600.0)

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        redis: Redis,
        tags: Sequence[str] = (),
        is_local: bool = False,
    ) -> None:
        self._clock = clock
        self._state = LiveState(redis, self.name)
        self._url = f"{settings.mastodon_url}/api/v1"
        self._host = urlsplit(self._url).netloc
        self._is_local = is_local
        self._languages = languages_of(settings)
        self._timelines = [f"timelines/tag/{quote(tag, safe='')}" for tag in tags]
        if not tags:
            self._timelines = ["timelines/public"]
        budget = RequestBudget(clock, REQUESTS_PER_MINUTE)
        self._http = HttpClient(self._host, budget)
        self._http.session.headers["User-Agent"] = user_agent()
        if settings.mastodon_token is not None:
            token = settings.mastodon_token.get_secret_value()
            self._http.session.headers["Authorization"] = f"Bearer {token}"

    def position_at(self, at: float) -> int | None:
        return id_at(at)

    def events(self, cursor: int | None) -> Iterator[Any]:
        """Yield statuses, which have no positions, and then positions up to which all timelines
        are read.
        """
        if cursor is None:
            start = self._newest()
        else:
            began = self._state.began() or 0
            start = max(began, cursor)
        yield Event(start, time_of_id(start))
        highest = dict.fromkeys(self._timelines, start)
        read_to = dict.fromkeys(self._timelines, start)
        position = start
        sweep_at = self._clock.monotonic() + SWEEP_INTERVAL_S
        while True:
            back = 0
            if self._clock.monotonic() >= sweep_at:
                back = id_at(SWEEP_S)
                sweep_at = self._clock.monotonic() + SWEEP_INTERVAL_S
            for timeline in self._timelines:
                reached = max(start, highest[timeline] - back)
                newest_anywhere = max(highest.values())
                for page in self._pages(timeline, reached):
                    yield from page
                    newest = max(_number(status) for status in page)
                    highest[timeline] = max(highest[timeline], newest)
                    read_to[timeline] = max(read_to[timeline], newest)
                    position = min(read_to.values())
                    yield Event(position, time_of_id(position))
                # A timeline that was read to its end has nothing before a post that another
                # one had already: a quiet tag must not hold the position.
                read_to[timeline] = max(read_to[timeline], newest_anywhere)
            read_by_all = min(read_to.values())
            if read_by_all > position:
                position = read_by_all
                yield Event(position, time_of_id(position))
            yield Pause(POLL_INTERVAL_S)

    def _newest(self) -> int:
        """Return the id to begin after, at the first start: that of the newest post."""
        now = self._clock.time()
        latest = id_at(now + MAX_AHEAD_S)
        numbers: list[int] = []
        for timeline in self._timelines:
            page = self._get(timeline, limit=1)
            numbers += [_number(status) for status in page]
        past = [number for number in numbers if number <= latest]
        return max(past, default=id_at(now))

    def _pages(self, timeline: str, reached: int) -> Iterator[list[Mapping[str, Any]]]:
        """Yield a timeline's pages after an id, each oldest first."""
        while True:
            page = self._get(
                timeline,
                limit=PAGE_SIZE,
                min_id=reached,
            )
            latest = id_at(self._clock.time() + MAX_AHEAD_S)
            after = [status for status in page if reached < _number(status) <= latest]
            if not after:
                return
            after.sort(key=_number)
            yield after
            reached = _number(after[-1])
            if len(page) < PAGE_SIZE:
                return

    def parse(self, raw: Any) -> Event:
        if isinstance(raw, Event):
            return raw
        return self._event(raw)

    def _event(self, status: Mapping[str, Any]) -> Event:
        """Return the event of a status. Raises any exception for an odd one."""
        number = _number(status)
        written = seconds_of_date(status["created_at"]) or time_of_id(number)
        now = self._clock.time()
        progress = Event(None, min(written, now))
        account = status["account"]
        is_public = status.get("visibility") in ("public", "unlisted")
        # Some people ask not to be searched or indexed.
        if not is_public or status.get("reblog") or account.get("noindex"):
            return progress._replace(filtered=True)
        title = str(status.get("spoiler_text") or "").strip()[:MAX_TITLE]
        body = text_of(str(status["content"]))[:MAX_BODY]
        text = f"{title}\n\n{body}".strip()
        if not text or (self._languages and is_foreign(text, self._languages)):
            return progress._replace(filtered=True)
        fields = {
            "id": f"mastodon:{self._host}:{number}",
            "title": title,
            "body": body,
            "permalink": status.get("url") or status.get("uri"),
            "score": status.get("favourites_count"),
            "created_utc": min(written, now),
            "edited_utc": seconds_of_date(status.get("edited_at")),
            "nsfw": bool(status.get("sensitive")),
        }
        return progress._replace(post=fields)

    def look_up(self, ids: Sequence[str]) -> dict[str, Event]:
        events: dict[str, Event] = {}
        own = [post_id for post_id in ids if self._is_own(post_id)]
        for first in range(0, len(own), LOOKUP_SIZE):
            batch = own[first : first + LOOKUP_SIZE]
            numbers = [post_id.rpartition(":")[2] for post_id in batch]
            for status in self._get("statuses", **{"id[]": numbers}):
                post_id = f"mastodon:{self._host}:{_number(status)}"
                try:
                    events[post_id] = self._event(status)
                except Exception:  # of any kind, because a status may be anything
                    events[post_id] = Event(None, self._clock.time())
        return events

    def _is_own(self, post_id: str) -> bool:
        return post_id.startswith(f"mastodon:{self._host}:")

    def pending(self) -> float:
        return self._http.budget.pending()

    def _get(self, path: str, **parameters: Any) -> list[Mapping[str, Any]]:
        if self._is_local and path != "statuses":
            parameters["local"] = "true"
        response = self._http.request("GET", f"{self._url}/{path}", params=parameters)
        status = response.status_code
        if status in (401, 403, 422):
            raise SourceFailed(
                f"{self._host} wants a token (status {status}): set FEEDMILL_MASTODON_TOKEN to "
                "that of an app with the scope read:statuses"
            )
        if status != 200:
            raise RequestFailed(f"{self._host} returned status {status} for {path}")
        page: list[Mapping[str, Any]] = self._http.json(response)
        is_page = isinstance(page, list) and all(
            isinstance(item, dict) for item in page
        )
        if not is_page:
            raise RequestFailed(f"{self._host} returned something else than posts")
        return page

    def status(self) -> dict[str, Any]:
        return {"requests": self._http.budget.spent}


def _number(status: Mapping[str, Any]) -> int:
    """Return a status' id. Raises RequestFailed if it is no number."""
    text = str(status.get("id"))
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise RequestFailed("an id is not a number, so the server is not Mastodon")
    return int(text)
