"""A live source: new stories of Hacker News, from its public API (https://github.com/HackerNews/API).

PYTHONPATH=docs/examples/extending feedmill ingest live hacker_news:HackerNews
"""

import os
import re
from collections.abc import Iterator
from typing import Any

from feedmill.producers.live.http import HttpClient
from feedmill.producers.live.source import Clock, Event, Pause, RequestBudget, Source, SourceFailed
from feedmill.shared.settings import Settings

#: Another server with the same API, for tests.
URL = os.environ.get("HACKER_NEWS_URL", "https://hacker-news.firebaseio.com/v0")
#: Seconds between polls, and for an answer.
POLL_INTERVAL_S, TIMEOUT_S = 10.0, 15.0
REQUESTS_PER_MINUTE = 120


class HackerNews(Source):
    """Items have consecutive numbers, so an item's number is its position. Stories are sent; comments are progress."""

    name = "hacker_news"
    #: Items read again after a restart: the newest ones may have been empty when they were read first.
    overlap = 20

    def __init__(self, settings: Settings, clock: Clock) -> None:  # noqa: ARG002 - other sources have settings
        self._clock = clock
        self._http = HttpClient("Hacker News", RequestBudget(clock, REQUESTS_PER_MINUTE))

    def events(self, cursor: int | None) -> Iterator[tuple[int, Any] | Pause]:
        reached = self._get("maxitem") if cursor is None else cursor - 1
        while True:
            for number in range(reached + 1, self._get("maxitem") + 1):
                yield number, self._get(f"item/{number}")
                reached = number
            # Recently changed items: only deletions, because an edited story may be older than the first start.
            for number in self._get("updates")["items"]:
                if number <= reached and _is_gone(item := self._get(f"item/{number}")):
                    yield reached, {**item, "id": number}
            yield Pause(POLL_INTERVAL_S)

    def parse(self, raw: tuple[int, Any]) -> Event:
        number, item = raw
        if not item or item["type"] != "story":
            return Event(number, item["time"] if item else self._clock.time())
        if _is_gone(item):
            return Event(number, self._clock.time(), deleted=f"hn-{item.get('id', number)}")
        story_id = f"hn-{number}"
        fields = {
            "id": story_id,
            "title": item.get("title"),
            "body": re.sub(r"<[^>]*>", " ", item.get("text", "")),
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
