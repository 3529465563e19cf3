"""New stories of Hacker News as a live source, from its public API
(https://github.com/HackerNews/API). Needs no key.

Needs requests, an optional package.
"""

from collections.abc import Iterator
from typing import Any

from feedmill.producers.html_text import text_of
from feedmill.producers.live.http import HttpClient
from feedmill.producers.live.source import (
    Clock,
    Event,
    Pause,
    RequestBudget,
    Source,
    SourceFailed,
)
from feedmill.shared.settings import Settings

#: The API's address.
URL = "https://hacker-news.firebaseio.com/v0"
#: Seconds between polls.
POLL_INTERVAL_S = 10.0
REQUESTS_PER_MINUTE = 120


class HackerNews(Source):
    """Items have consecutive numbers, so an item's number is its position.

    Stories are sent; comments are progress.
    """

    name = "hacker_news"
    #: Items read again after a restart: the newest ones may have been empty when they were read
    #: first.
    overlap = 20

    def __init__(self, settings: Settings, clock: Clock) -> None:  # noqa: ARG002 - other sources have settings
        self._clock = clock
        self._http = HttpClient(
            "Hacker News", RequestBudget(clock, REQUESTS_PER_MINUTE)
        )

    def events(self, cursor: int | None) -> Iterator[tuple[int, Any] | Pause]:
        reached = self._get("maxitem") if cursor is None else cursor - 1
        while True:
            newest = self._get("maxitem")
            if newest < reached:
                # The numbers went back. Which items are new is unknown; the daemon skips those
                # that were sent.
                reached = max(0, newest - self.overlap)
            for number in range(reached + 1, newest + 1):
                item = self._get(f"item/{number}")
                yield number, item
                reached = number
            # Recently changed items: only deletions, because an edited story may be older than the
            # first start.
            changed = self._get("updates")
            for number in changed["items"]:
                if number > reached:
                    continue
                item = self._get(f"item/{number}")
                if _is_gone(item):
                    yield reached, {**item, "id": number}
            yield Pause(POLL_INTERVAL_S)

    def parse(self, raw: tuple[int, Any]) -> Event:
        number, item = raw
        if not item:
            return Event(number, self._clock.time())
        if item["type"] != "story":
            return Event(number, item["time"])
        if _is_gone(item):
            gone_number = item.get("id", number)
            return Event(number, self._clock.time(), deleted=f"hn-{gone_number}")
        fields = {
            "id": f"hn-{number}",
            "title": item.get("title"),
            "body": text_of(item.get("text", "")),
            "url": item.get("url"),
            "permalink": f"https://news.ycombinator.com/item?id={number}",
            "score": item.get("score"),
            "created_utc": item["time"],
        }
        return Event(number, item["time"], post=fields)

    def _get(self, path: str) -> Any:
        response = self._http.request("GET", f"{URL}/{path}.json")
        if response.status_code != 200:
            raise SourceFailed(f"{path} cannot be read (status {response.status_code})")
        return self._http.json(response)


def _is_gone(item: Any) -> bool:
    return bool(item and (item.get("deleted") or item.get("dead")))
