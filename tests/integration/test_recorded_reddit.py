"""producers/reddit/client.py on recorded answers of the real Reddit, from PRAW's own tests. Skipped without them.

The recordings contain other people's posts and are not part of the project. The loopback Reddit covers the same cases;
its answers name the recordings that they follow.
"""

import html
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict
from urllib3 import HTTPResponse

from feedmill.producers.live.budget import RequestBudget
from feedmill.producers.reddit.client import RedditClient
from feedmill.producers.reddit.listing import SubredditUnreadable
from feedmill.shared.settings import Settings
from tests.fakes.clock import SimulatedClock
from tests.support import REAL_DATA

RECORDINGS = REAL_DATA / "praw_cassettes"
TOKEN = {"access_token": "t", "token_type": "bearer", "expires_in": 3600, "scope": "*"}


def raw(text: str) -> HTTPResponse:
    """Return a response as it comes from the network."""
    return HTTPResponse(BytesIO(text.encode()), preload_content=False)


class Recorded(BaseAdapter):
    """Replays the recorded answers in order; answers every token request."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._answers = [
            each["response"]
            for each in json.loads(path.read_text())["interactions"]
            if not each["request"]["uri"].endswith("access_token") and each["request"]["method"] == "GET"
        ]
        self.left = len(self._answers)

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        answer = requests.Response()
        answer.request = request
        answer.url = request.url or ""
        if answer.url.endswith("access_token"):
            answer.status_code = 200
            answer.raw = raw(json.dumps(TOKEN))
            return answer
        # Repeat the last answer if PRAW retries, as after a 401.
        recorded = self._answers[min(len(self._answers) - self.left, len(self._answers) - 1)]
        self.left -= 1
        answer.status_code = recorded["status"]["code"]
        answer.headers = CaseInsensitiveDict({name: values[0] for name, values in recorded["headers"].items()})
        body = recorded["body"]
        answer.raw = raw(body if isinstance(body, str) else body["string"])
        return answer

    def close(self) -> None:
        pass


class Replay:
    """A client that is answered from a recording, and the recorded listing items."""

    def __init__(self, name: str) -> None:
        self.adapter = Recorded(RECORDINGS / f"{name}.json")
        session = requests.Session()
        session.mount("https://", self.adapter)
        settings = Settings.model_validate(
            {"reddit_client_id": "i", "reddit_client_secret": "s", "reddit_user_agent": "linux:test:1 (by /u/nobody)"}
        )
        self.budget = RequestBudget(SimulatedClock(), 90)
        self.reddit = RedditClient(settings, self.budget, {"askreddit": "questions"}, session)

    def children(self, number: int) -> list[dict[str, Any]]:
        body = self.adapter._answers[number]["body"]
        listing = json.loads(body if isinstance(body, str) else body["string"])
        return [child["data"] for child in listing["data"]["children"]]


if RECORDINGS.is_dir():

    @pytest.mark.parametrize(
        ("name", "subreddit", "number"),
        [
            ("TestSubredditListings.test_hot", "askreddit", 0),
            ("TestSubmission.test_hide_multiple_in_batches", "popular", 0),
            ("TestSubredditQuarantine.test_opt_in", "ferguson", 1),
        ],
    )
    def test_parses_a_listing_into_posts(name: str, subreddit: str, number: int) -> None:
        replay = Replay(name)
        replay.adapter.left -= number
        page = replay.reddit.page([subreddit], "hot")
        recorded = replay.children(number)
        assert len(page.items) == len(recorded) >= 100
        assert page.after is not None
        for item, said in zip(page.items, recorded, strict=True):
            assert item.fullname == said["name"]
            assert item.stickied == said["stickied"]
            assert item.post is not None
            post = item.post
            assert (post.id, post.subreddit, post.score) == (said["name"], said["subreddit"], said["score"])
            assert (post.title, post.body) == (said["title"], said["selftext"])
            assert (post.url, post.created_utc, post.nsfw) == (said["url"], said["created_utc"], said["over_18"])
            assert (post.spoiler, post.stickied) == (said.get("spoiler", False), said["stickied"])
            assert post.permalink == f"https://www.reddit.com{said['permalink']}"
            assert post.text.startswith(html.unescape(said["title"]).strip())

    def test_a_page_contains_pinned_posts_beyond_a_hundred() -> None:
        page = Replay("TestSubredditListings.test_hot").reddit.page(["askreddit"], "hot")
        assert len(page.items) == 102
        assert sum(item.stickied for item in page.items) == 2
        assert {item.post.topic for item in page.items if item.post} == {"questions"}

    @pytest.mark.parametrize(
        ("name", "why"),
        [("TestSubreddit.test_sticky__not_set", "missing"), ("TestSubredditQuarantine.test_opt_in", "private")],
    )
    def test_reports_why_a_subreddit_is_unreadable(name: str, why: str) -> None:
        with pytest.raises(SubredditUnreadable) as refused:
            Replay(name).reddit.page(["one"])
        assert refused.value.why == why
