"""The client of Reddit on answers that the real Reddit gave, as PRAW's own tests recorded them.

The recordings hold other people's posts and are no part of the project: see `recordings` in
tests/support.py.
"""

import html
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from feedmill.producers.live.source import RequestBudget, RequestFailed
from feedmill.producers.reddit.client import RedditClient
from feedmill.producers.reddit.listing import ListingPage, SubredditUnreadable
from feedmill.shared.settings import Settings
from feedmill.testing.loopback import Handler, Loopback
from tests.fakes.clock import SimulatedClock
from tests.support import CASSETTES, recordings

pytestmark = pytest.mark.skipif(
    recordings() is None, reason=(f"no recordings: name their folder in {CASSETTES}")
)

TOKEN = {"access_token": "t", "token_type": "bearer", "expires_in": 3600, "scope": "*"}


class Recorded(Loopback):
    """A server that gives the recorded answers to GET requests, in order, the last one again and
    again.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_Answers)
        folder = recordings()
        assert folder
        interactions = json.loads((folder / f"{name}.json").read_text())["interactions"]
        self.answers = [
            interaction["response"]
            for interaction in interactions
            if interaction["request"]["method"] == "GET"
        ]

    def skip(self, count: int) -> None:
        self.answers = self.answers[count:]

    def next(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.answers[0]
        if len(self.answers) > 1:
            self.skip(1)
        return answer

    def posts(self) -> list[dict[str, Any]]:
        """Return the posts of the next answer."""
        children = json.loads(_text(self.answers[0]))["data"]["children"]
        return [child["data"] for child in children if child["kind"] == "t3"]

    def page(self, subreddit: str) -> ListingPage:
        settings = Settings.model_validate(
            {
                "reddit_url": self.url,
                "reddit_client_id": "i",
                "reddit_client_secret": "s",
                "reddit_user_agent": "linux:test:1 (by /u/nobody)",
            }
        )
        topic_of = {"askreddit": "questions"}
        with closing(
            RedditClient(settings, RequestBudget(SimulatedClock(), 90), topic_of)
        ) as client:
            return client.page([subreddit], "hot")


class _Answers(Handler):
    server: Recorded

    def respond(self) -> None:
        if self.path.endswith("access_token"):
            body = json.dumps(TOKEN).encode()
            self.send(200, {"Content-Type": "application/json"}, len(body))
        else:
            answer = self.server.next()
            body = _text(answer).encode()
            # The recorded bodies are neither compressed nor chunked.
            left_out = {
                "content-encoding",
                "transfer-encoding",
                "content-length",
                "connection",
            }
            headers = {
                name: values[0]
                for name, values in answer["headers"].items()
                if name.lower() not in left_out
            }
            self.send(answer["status"]["code"], headers, len(body))
        self.wfile.write(body)


def _text(answer: dict[str, Any]) -> str:
    body = answer["body"]
    return str(body if isinstance(body, str) else body["string"])


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    with Recorded(request.param) as server:
        yield server


@pytest.mark.parametrize(
    ("recorded", "subreddit", "answer"),
    [
        ("TestSubredditListings.test_hot", "askreddit", 0),
        ("TestSubmission.test_hide_multiple_in_batches", "popular", 0),
        ("TestSubredditQuarantine.test_opt_in", "ferguson", 1),
    ],
    indirect=["recorded"],
)
def test_parses_a_listing_into_posts(
    recorded: Recorded, subreddit: str, answer: int
) -> None:
    recorded.skip(answer)
    posts = recorded.posts()
    page = recorded.page(subreddit)
    assert len(page.items) == len(posts) >= 100
    assert page.after is not None
    for item, fields in zip(page.items, posts, strict=True):
        assert item.fullname == fields["name"]
        assert item.stickied == fields["stickied"]
        post = item.post
        assert post is not None
        assert (post.id, post.subreddit, post.score) == (
            fields["name"],
            fields["subreddit"],
            fields["score"],
        )
        assert post.title == fields["title"]
        assert post.body.startswith(fields["selftext"])
        assert (post.url, post.created_utc, post.nsfw) == (
            fields["url"],
            fields["created_utc"],
            fields["over_18"],
        )
        assert (post.spoiler, post.stickied) == (
            fields.get("spoiler", False),
            fields["stickied"],
        )
        assert post.permalink == f"https://www.reddit.com{fields['permalink']}"
        assert post.text.startswith(html.unescape(fields["title"]).strip())


@pytest.mark.parametrize("recorded", ["TestSubredditListings.test_hot"], indirect=True)
def test_a_page_contains_pinned_posts_beyond_a_hundred(recorded: Recorded) -> None:
    page = recorded.page("askreddit")
    assert len(page.items) == 102
    assert sum(item.stickied for item in page.items) == 2
    assert {item.post.topic for item in page.items if item.post} == {"questions"}


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        ("TestSubreddit.test_sticky__not_set", "missing"),
        ("TestSubredditQuarantine.test_opt_in", "private"),
    ],
    indirect=["recorded"],
)
def test_says_why_a_subreddit_is_unreadable(recorded: Recorded, reason: str) -> None:
    with pytest.raises(SubredditUnreadable) as refused:
        recorded.page("one")
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("recorded", "status"),
    [
        ("TestAuthImplicit.test_implicit__with_invalid_token", "401"),
        ("TestReddit.test_bad_request_without_json_text_html_response", "400"),
    ],
    indirect=["recorded"],
)
def test_other_errors_fail_only_the_request(recorded: Recorded, status: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        recorded.page("one")
    assert status in str(failed.value)
    assert not isinstance(failed.value, SubredditUnreadable)


@pytest.mark.parametrize("recorded", ["TestReddit.test_info_sr_names"], indirect=True)
def test_items_that_are_no_posts_are_left_out(recorded: Recorded) -> None:
    """The recorded answer lists subreddits."""
    assert recorded.posts() == []
    assert recorded.page("one").items == []
