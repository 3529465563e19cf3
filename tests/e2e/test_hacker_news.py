"""`feedmill ingest hacker-news`: real processes against a loopback Hacker News."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from feedmill.producers.live.state import Gaps, LiveState, statuses
from feedmill.shared.keys import LIVE_DELETED
from tests.fakes import constants
from tests.fakes.hacker_news import HackerNews
from tests.support import Feedmill, RedisServer, queued, running, wait_until


@pytest.fixture
def hacker_news() -> Iterator[HackerNews]:
    with HackerNews() as server:
        yield server


def test_stories_are_sent_once_and_deleted_ones_purged(
    redis: RedisServer, hacker_news: HackerNews, tmp_path: Path
) -> None:
    def story(**fields: object) -> dict[str, Any]:
        return {"type": "story", "time": 1700000000, "title": "a story", **fields}

    replaced = constants.hacker_news(hacker_news.url)
    replaced["feedmill.producers.hacker_news.POLL_INTERVAL_S"] = 0.5

    def ingesting() -> AbstractContextManager[Feedmill]:
        command = ("ingest", "hacker-news", "--labels", "software,politics")
        return running(
            *command,
            cwd=tmp_path,
            FEEDMILL_REDIS_URL=redis.url,
            **{constants.VARIABLE: json.dumps(replaced)},
        )

    state = LiveState(redis.client, "hacker_news")
    hacker_news.items[101] = story()
    hacker_news.faults = [503]
    with ingesting() as daemon:
        wait_until(lambda: "/v0/updates.json" in hacker_news.asked, "the first poll")
        assert daemon.end() == 0
    assert (queued(redis), state.position()) == ([], None), (
        "the first start begins with the next story"
    )
    with ingesting():
        asked = hacker_news.asked.count("/v0/maxitem.json")
        wait_until(
            lambda: hacker_news.asked.count("/v0/maxitem.json") >= asked + 2,
            "the first poll",
        )
        hacker_news.items |= {
            102: story(
                title="Show HN: A queue",
                text="<p>It waits.",
                score=3,
                url="https://example.org/queue",
            ),
            103: {"type": "comment", "time": 1700000001, "text": "first"},
            104: None,
            105: story(title="", url="https://example.org/untitled"),
            106: story(title="A faster sort"),
        }
        wait_until(
            lambda: (now := state.position()) and now.cursor == 106,
            "all items are read",
        )
    first, second = queued(redis)
    assert first.pop("body") == "It waits."
    assert first == {
        "id": "hn-102", "title": "Show HN: A queue", "score": 3,
        "url": "https://example.org/queue",
        "permalink": "https://news.ycombinator.com/item?id=102",
        "created_utc": 1700000000.0,
    }  # fmt: skip
    assert second["id"] == "hn-106"
    hacker_news.items |= {
        106: {"type": "story", "time": 1700000000, "deleted": True},
        107: story(title="The last"),
    }
    hacker_news.changed = [106, 103]
    with ingesting():
        wait_until(lambda: queued(redis)[-1]["id"] == "hn-107", "the new story is sent")
        wait_until(
            lambda: (
                queued(redis)[1] == {"id": "hn-106"}
                or redis.client.smembers(LIVE_DELETED + "hacker_news") == {"hn-106"}
            ),
            "the deletion is known",
        )
    assert Gaps(redis.client).all() == []
    assert statuses(redis.client)["hacker_news"].running
