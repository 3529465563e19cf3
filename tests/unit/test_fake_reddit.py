"""The loopback Reddit (tests/fakes/reddit.py), tested with PRAW, and with requests where PRAW waits or hides errors."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection, create_server
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any, NamedTuple

import praw
import prawcore
import pytest
import requests
from praw.exceptions import RedditAPIException
from prawcore.exceptions import (
    BadJSON,
    Forbidden,
    InvalidToken,
    NotFound,
    OAuthException,
    Redirect,
    RequestException,
    ResponseException,
    ServerError,
    TooManyRequests,
)
from prawcore.sessions import FiniteRetryStrategy

from tests.fakes.reddit import Reddit
from tests.fakes.reddit_content import FIRST_POST, base36
from tests.fakes.reddit_faults import FAULTS, TOKEN_PATH
from tests.support import wait_until

HOUR, DAY = 3600.0, 86400.0
#: A whole number of windows of 600 seconds.
NOW = 1_800_000_000.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reddit(clock: Clock) -> Iterator[Reddit]:
    """A server without a rate limit, because PRAW would sleep for it."""
    with Reddit(clock=clock, window=None) as server:
        server.add_subreddit("python")
        yield server


def core_of(client: praw.Reddit) -> Any:
    """Return prawcore's session. PRAW has no public way to close it or to renew a token."""
    return client._core


@contextmanager
def reading(reddit: Reddit, credentials: tuple[str, str] = ("id", "secret")) -> Iterator[praw.Reddit]:
    client = praw.Reddit(
        client_id=credentials[0],
        client_secret=credentials[1],
        user_agent="test:feedmill:1.0 (by /u/test)",
        reddit_url=reddit.url,
        oauth_url=reddit.url,
        check_for_updates=False,
        check_for_async=False,
    )
    try:
        yield client
    finally:
        core_of(client).requestor.close()


@pytest.fixture
def client(reddit: Reddit) -> Iterator[praw.Reddit]:
    with reading(reddit) as client:
        yield client


class Plain:
    """A client without PRAW."""

    def __init__(self, reddit: Reddit, **form: str) -> None:
        self.url = reddit.url
        self.session = requests.Session()
        self.token = self.session.post(
            reddit.url + TOKEN_PATH, auth=("id", "secret"), data={"grant_type": "client_credentials"} | form
        ).json()
        self.session.headers["Authorization"] = f"bearer {self.token['access_token']}"

    def get(self, path: str, timeout: float = 30, **query: Any) -> requests.Response:
        return self.session.get(self.url + path, params=query, allow_redirects=False, timeout=timeout)

    def listing(self, path: str, **query: Any) -> tuple[list[str], str | None]:
        """Return a page's fullnames and its `after` anchor."""
        answer = self.get(path, **query)
        assert answer.status_code == 200, answer.text
        data = answer.json()["data"]
        assert data["dist"] == len(data["children"])
        return [child["data"]["name"] for child in data["children"]], data["after"]


@pytest.fixture
def plain(reddit: Reddit) -> Iterator[Plain]:
    plain = Plain(reddit)
    with plain.session:
        yield plain


def publish(reddit: Reddit, count: int, subreddit: str = "python", **fields: Any) -> list[str]:
    """Publish `count` posts, one per second, the newest created now. Return their fullnames, oldest first."""
    first = reddit.clock() - count + 1
    return [
        reddit.publish(subreddit, title=f"{subreddit} {number}", created_utc=first + number, **fields)
        for number in range(count)
    ]


def names(listing: Any) -> list[str]:
    return [post.name for post in listing]


# Listings.


def test_new_lists_all_pages_newest_first(reddit: Reddit, client: praw.Reddit) -> None:
    published = publish(reddit, 250)
    assert names(client.subreddit("python").new(limit=None)) == published[::-1]
    assert [request.path for request in reddit.ledger.requests] == [TOKEN_PATH] + ["/r/python/new"] * 3


@pytest.mark.parametrize(("count", "pages"), [(99, 1), (100, 1), (101, 2), (200, 2)])
def test_last_page_has_no_after_anchor(reddit: Reddit, plain: Plain, count: int, pages: int) -> None:
    publish(reddit, count)
    after: str | None = ""
    for _ in range(pages):
        assert after is not None
        _, after = plain.listing("/r/python/new", limit=100, after=after)
    assert after is None


@pytest.mark.parametrize(("query", "size"), [({}, 25), ({"limit": 7}, 7), ({"limit": 1024}, 100), ({"limit": "x"}, 25)])
def test_page_size_defaults_to_25_and_is_at_most_100(
    reddit: Reddit, plain: Plain, query: dict[str, Any], size: int
) -> None:
    published = publish(reddit, 150)
    assert plain.listing("/r/python/new", **query) == (published[: -size - 1 : -1], published[-size])


def test_joined_listing_is_sorted_by_time(reddit: Reddit, client: praw.Reddit) -> None:
    reddit.add_subreddit("Rust")
    ours = publish(reddit, 3, "python")
    theirs = publish(reddit, 3, "rust")  # created in the same seconds: the higher number is newer
    expected = [theirs[2], ours[2], theirs[1], ours[1], theirs[0], ours[0]]
    assert names(client.subreddit("RUST+Python+python").new()) == expected
    assert {post.subreddit.display_name for post in client.subreddit("rust").new()} == {"Rust"}


def test_listing_ends_at_its_cap(clock: Clock) -> None:
    with Reddit(clock=clock, window=None, listing_cap=120) as reddit, reading(reddit) as client:
        reddit.add_subreddit("python")
        published = publish(reddit, 130)
        assert names(client.subreddit("python").new(limit=None)) == published[:9:-1]


def test_new_posts_do_not_shift_later_pages(reddit: Reddit, plain: Plain, clock: Clock) -> None:
    published = publish(reddit, 6)
    first, after = plain.listing("/r/python/new", limit=3)
    clock.now += 60
    publish(reddit, 10)
    assert after is not None
    assert (first, plain.listing("/r/python/new", limit=3, after=after)) == (published[:2:-1], (published[2::-1], None))


@pytest.mark.parametrize("gone", [Reddit.delete, Reddit.remove, Reddit.vanish])
def test_page_after_a_removed_anchor_is_empty(
    reddit: Reddit, plain: Plain, gone: Callable[[Reddit, str], None]
) -> None:
    published = publish(reddit, 6)
    assert plain.listing("/r/python/new", after=published[3]) == (published[2::-1], None)
    gone(reddit, published[3])
    assert plain.listing("/r/python/new", after=published[3]) == ([], None)
    assert plain.listing("/r/python/new", after=published[4]) == (published[2::-1], None)
    assert plain.listing("/r/python/new") == (published[:3:-1] + published[2::-1], None)


def test_listing_sorts_an_older_post_by_creation(reddit: Reddit, client: praw.Reddit) -> None:
    newer, older = publish(reddit, 1), reddit.publish("python", title="older", created_utc=NOW - 60)
    assert names(client.subreddit("python").new()) == [*newer, older]


def test_delayed_post_appears_at_its_creation_time(reddit: Reddit, client: praw.Reddit, clock: Clock) -> None:
    held = reddit.publish("python", title="held", created_utc=NOW - 60, visible_from=NOW + 10)
    newer = reddit.publish("python", title="newer")
    coming = reddit.publish("python", title="not created yet", created_utc=NOW + 20)
    subreddit = client.subreddit("python")
    assert names(subreddit.new()) == names(subreddit.hot()) == names(subreddit.top()) == [newer]
    assert names(client.info(fullnames=[held, coming])) == []
    clock.now += 10
    assert (names(subreddit.new()), names(client.info(fullnames=[held, coming]))) == ([newer, held], [held])
    clock.now += 10
    assert names(subreddit.new()) == [coming, newer, held]


def test_ids_are_sequential_and_times_whole_seconds(reddit: Reddit, client: praw.Reddit, clock: Clock) -> None:
    clock.now += 0.75
    published = [reddit.publish("python", title="now") for _ in range(40)]
    assert [int(name.removeprefix("t3_"), 36) - FIRST_POST for name in published] == list(range(40))
    assert (base36(35), base36(36), base36(1296)) == ("z", "10", "100")
    assert {post.created_utc for post in client.subreddit("python").new()} == {NOW}


def test_hot_adds_two_pinned_posts_to_the_first_page(reddit: Reddit, plain: Plain) -> None:
    pinned = publish(reddit, 3, stickied=True, score=-50)
    others = publish(reddit, 150)
    first, after = plain.listing("/r/python/hot", limit=100)
    assert first == [pinned[2], pinned[1], *others[:49:-1]]
    assert after is not None
    assert plain.listing("/r/python/hot", limit=100, after=after) == ([*others[49::-1], pinned[0]], None)


def test_joined_hot_listing_pins_nothing(reddit: Reddit, plain: Plain) -> None:
    reddit.add_subreddit("rust")
    pinned, others = publish(reddit, 1, stickied=True, score=-50), publish(reddit, 4, "rust")
    assert plain.listing("/r/python+rust/hot") == ([*others[::-1], *pinned], None)


def test_hot_sorts_by_votes_and_age(reddit: Reddit, client: praw.Reddit) -> None:
    new = reddit.publish("python", title="new", score=1)
    loved = reddit.publish("python", title="a hundred votes, a day", score=100, created_utc=NOW - DAY)
    old = reddit.publish("python", title="a hundred votes, two days", score=100, created_utc=NOW - 2 * DAY)
    hated = reddit.publish("python", title="hated", score=-100)
    assert names(client.subreddit("python").hot()) == [loved, new, old, hated]


def test_top_sorts_by_score_within_a_period(reddit: Reddit, client: praw.Reddit) -> None:
    ages = {"hour": 60.0, "day": 2 * HOUR, "week": 2 * DAY, "month": 8 * DAY, "year": 40 * DAY, "all": 400 * DAY}
    posts = [
        reddit.publish("python", title=period, score=score, created_utc=NOW - age)
        for score, (period, age) in enumerate(ages.items())
    ]
    for count, period in enumerate(ages, 1):
        assert names(client.subreddit("python").top(time_filter=period)) == posts[:count][::-1], period


def test_rising_sorts_by_votes_per_age(reddit: Reddit, client: praw.Reddit) -> None:
    slow = reddit.publish("python", title="slow", score=100, created_utc=NOW - 10 * HOUR)
    fast = reddit.publish("python", title="fast", score=50, created_utc=NOW - HOUR)
    reddit.publish("python", title="of the day before", score=10_000, created_utc=NOW - DAY)
    assert names(client.subreddit("python").rising()) == [fast, slow]


def test_refuses_backward_paging(clock: Clock) -> None:
    def ask() -> None:
        with Reddit(clock=clock) as reddit:
            reddit.add_subreddit("python")
            plain = Plain(reddit)
            with plain.session, pytest.raises(requests.ConnectionError):
                plain.get("/r/python/new", before="t3_1")

    with pytest.raises(NotImplementedError, match="after"):
        ask()


# Subreddits.


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        ("private", Forbidden, 403),
        ("gold_only", Forbidden, 403),
        ("gated", Forbidden, 403),
        ("quarantined", Forbidden, 403),
        ("banned", NotFound, 404),
    ],
)
def test_inaccessible_subreddit_gives_the_reason(
    reddit: Reddit, client: praw.Reddit, kind: str, error: type[ResponseException], status: int
) -> None:
    reddit.add_subreddit("closed", kind)
    post = publish(reddit, 1, "closed")
    for ask in (lambda: names(client.subreddit("closed").new()), lambda: client.subreddit("closed").subscribers):
        with pytest.raises(error) as raised:
            ask()
        message = {403: "Forbidden", 404: "Not Found"}[status]
        assert raised.value.response.json() == {"reason": kind, "message": message, "error": status}
    assert names(client.info(fullnames=post)) == []
    reddit.set_kind("closed", "restricted")
    assert names(client.subreddit("closed").new()) == names(client.info(fullnames=post)) == post


def test_missing_subreddit_redirects_to_search(reddit: Reddit, client: praw.Reddit, plain: Plain) -> None:
    with pytest.raises(Redirect) as raised:
        names(client.subreddit("nowhere").new())
    assert raised.value.path == "/subreddits/search"
    answer = plain.get("/r/nowhere/about")
    assert (answer.status_code, answer.headers["Location"]) == (302, f"{reddit.url}/subreddits/search?q=nowhere")


def test_joined_listing_skips_inaccessible_subreddits(reddit: Reddit, client: praw.Reddit) -> None:
    for name in ("private", "banned", "quarantined"):
        reddit.add_subreddit(name, name)
        publish(reddit, 2, name)
    ours = publish(reddit, 2)
    assert names(client.subreddit("banned+nowhere+private+python+quarantined").new()) == ours[::-1]
    for first, error in {"private": Forbidden, "banned": NotFound, "nowhere": Redirect}.items():
        with pytest.raises(error):
            names(client.subreddit(f"{first}+quarantined+private+banned").new())


def test_info_finds_subreddits_by_name(reddit: Reddit, client: praw.Reddit) -> None:
    for name in ("private", "quarantined", "banned", "restricted"):
        reddit.add_subreddit(f"{name.title()}One", name)
    wanted = ["PYTHON", "nowhere", "privateone", "quarantinedone", "bannedone", "restrictedone"]
    found = {about.display_name: (about.subreddit_type, about.quarantine) for about in client.info(subreddits=wanted)}
    assert found == {
        "python": ("public", False),
        "PrivateOne": ("private", False),
        "QuarantinedOne": ("public", True),
        "RestrictedOne": ("restricted", False),
    }


def test_info_returns_at_most_100_items(reddit: Reddit, plain: Plain) -> None:
    many = [f"sub{number}" for number in range(100)]
    for name in many:
        reddit.add_subreddit(name)
    posts = publish(reddit, 101)
    assert len(plain.get("/api/info", sr_name=",".join([*many, "python"])).json()["data"]["children"]) == 100
    assert plain.listing("/api/info", id=",".join(posts)) == (posts[:100], None)


def test_about_describes_a_subreddit(client: praw.Reddit) -> None:
    about = client.subreddit("PYTHON")
    about._fetch()
    fields = (about.display_name, about.name[:3], about.subreddit_type, about.quarantine, about.url)
    assert fields == ("python", "t5_", "public", False, "/r/python/")


# Posts.


def test_praw_reads_text_and_link_posts(reddit: Reddit, client: praw.Reddit) -> None:
    text = reddit.publish("python", title="Ünï & <b>", body="a < b &amp; c", score=7, over_18=True)
    link = reddit.publish("python", title="x", body="with a text", url="https://example.org:8/a", spoiler=True)
    posts = {post.name: vars(post) for post in client.subreddit("python").new()}
    assert posts[text] | {
        "id": text[3:], "title": "Ünï & <b>", "selftext": "a < b &amp; c", "score": 7, "ups": 7, "is_self": True,
        "over_18": True, "spoiler": False, "stickied": False, "edited": False, "created_utc": NOW, "created": NOW,
        "permalink": f"/r/python/comments/{text[3:]}/ünï_b/", "domain": "self.python", "removed_by_category": None,
        "url": f"https://www.reddit.com/r/python/comments/{text[3:]}/ünï_b/", "subreddit_type": "public",
        "quarantine": False, "locked": False, "num_comments": 0,
    } == posts[text]  # fmt: skip
    assert posts[text]["author"].name
    assert (posts[text]["author_fullname"][:3], posts[text]["subreddit_id"][:3]) == ("t2_", "t5_")
    assert posts[link] | {
        "is_self": False, "url": "https://example.org:8/a", "domain": "example.org:8", "selftext": "with a text",
        "over_18": False, "spoiler": True,
    } == posts[link]  # fmt: skip


@pytest.mark.parametrize(("query", "title"), [({"raw_json": 1}, "&amp; < >"), ({}, "&amp;amp; &lt; &gt;")])
def test_escapes_text_unless_raw_json_is_set(reddit: Reddit, plain: Plain, query: dict[str, Any], title: str) -> None:
    post = reddit.publish("python", title="&amp; < >", body="&amp; < >")
    reddit.faults.next("sticky_head", where="/new")
    for answer in (plain.get("/api/info", id=post, **query), plain.get("/r/python/new", **query)):
        (child,) = answer.json()["data"]["children"]
        assert (child["data"]["title"], child["data"]["selftext"]) == (title, title)


def test_info_shows_deleted_removed_and_edited_posts(reddit: Reddit, client: praw.Reddit) -> None:
    deleted, removed, vanished, edited, stands = published = publish(reddit, 5, body="text")
    reddit.delete(deleted)
    reddit.remove(removed)
    reddit.remove(removed)
    reddit.vanish(vanished)
    reddit.edit(edited, "another text")
    reddit.score(stands, -3)
    assert names(client.subreddit("python").new()) == [stands, edited]
    posts = {post.name: vars(post) for post in client.info(fullnames=[*published, "t3_nosuch"])}
    assert list(posts) == [deleted, removed, edited, stands]
    fields = ("title", "selftext", "removed_by_category", "edited", "score")
    assert [tuple(posts[name][field] for field in fields) for name in posts] == [
        ("python 0", "[deleted]", "deleted", False, 1),
        ("python 1", "[removed]", "moderator", False, 1),
        ("python 3", "another text", None, NOW, 1),
        ("python 4", "text", None, False, -3),
    ]
    assert posts[deleted]["author"] is None
    assert "author_fullname" not in posts[deleted]
    assert posts[removed]["author"] is not None


# Tokens.


def test_rejects_wrong_credentials(reddit: Reddit) -> None:
    with reading(reddit, ("id", "wrong")) as client, pytest.raises(ResponseException) as raised:
        names(client.subreddit("python").new())
    assert raised.value.response.status_code == 401
    assert raised.value.response.json() == {"message": "Unauthorized", "error": 401}
    assert reddit.ledger.tokens == 0


def test_accepts_only_issued_tokens(reddit: Reddit, plain: Plain) -> None:
    for headers in ({}, {"Authorization": "bearer nonsense"}, {"Authorization": "bearer"}):
        answer = requests.get(f"{reddit.url}/r/python/new", headers=headers, timeout=120)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == 'Bearer realm="reddit", error="invalid_token"'
        assert answer.json() == {"message": "Unauthorized", "error": 401}
    assert plain.get("/r/python/new").status_code == 200


def test_token_has_scope_and_lifetime(reddit: Reddit) -> None:
    plain, narrow = Plain(reddit), Plain(reddit, scope="read")
    assert plain.token | {"token_type": "bearer", "expires_in": 86400, "scope": "*"} == plain.token
    assert narrow.token["scope"] == "read"
    assert plain.token["access_token"] != narrow.token["access_token"]
    assert reddit.ledger.tokens == 2
    with plain.session, narrow.session:
        assert plain.get("/r/python/new").status_code == narrow.get("/r/python/new").status_code == 200


def test_refuses_password_grants(reddit: Reddit) -> None:
    with reading(reddit) as client:
        authenticator = core_of(client)._authorizer.authenticator
        authorizer = prawcore.ScriptAuthorizer(authenticator=authenticator, username="a", password="b")
        with pytest.raises(OAuthException, match="unsupported_grant_type"):
            authorizer.refresh()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prawcore retry without a delay."""
    monkeypatch.setattr(FiniteRetryStrategy, "sleep", lambda _self: None)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["clock", "fault"])
def test_praw_renews_an_expired_token(reddit: Reddit, client: praw.Reddit, clock: Clock, how: str) -> None:
    post = publish(reddit, 1)
    assert names(client.subreddit("python").new()) == post
    if how == "clock":
        clock.now += DAY
    else:
        reddit.faults.next("token_expired")
    assert names(client.subreddit("python").new()) == post
    assert [request.status for request in reddit.ledger.requests] == [200, 200, 401, 200, 200]
    assert reddit.ledger.tokens == 2


def test_expired_token_stays_invalid(reddit: Reddit, plain: Plain) -> None:
    reddit.faults.next("token_expired")
    assert [plain.get("/r/python/new").status_code for _ in range(2)] == [401, 401]
    reddit.faults.next("unauthorized")
    other = Plain(reddit)
    with other.session:
        assert [other.get("/r/python/new").status_code for _ in range(2)] == [401, 200]


def test_echoes_the_connection_header(reddit: Reddit) -> None:
    answers = [
        requests.post(reddit.url + TOKEN_PATH, headers={"Connection": wish}, timeout=120)
        for wish in ("close", "keep-alive")
    ]
    assert [answer.headers["Connection"] for answer in answers] == ["close", "keep-alive"]


# The budget.


def limits(answer: requests.Response) -> tuple[str | None, ...]:
    return tuple(answer.headers.get(f"x-ratelimit-{name}") for name in ("used", "remaining", "reset"))


def test_counts_requests_per_window(clock: Clock) -> None:
    clock.now = NOW + 584.5
    with Reddit(clock=clock, window=600, budget=3) as reddit:
        reddit.add_subreddit("python")
        reddit.add_subreddit("private", "private")
        plain = Plain(reddit)
        with plain.session:
            assert limits(plain.get("/r/python/new")) == ("1", "2.0", "16")
            # The request counts, but its response lacks the headers, like Reddit's recorded responses with this status.
            assert limits(plain.get("/r/private/new")) == (None, None, None)
            assert limits(plain.get("/api/info", id="t3_x")) == ("3", "0.0", "16")
            refused = plain.get("/r/python/new")
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "16")
            assert limits(refused) == ("3", "0.0", "16")
            assert reddit.ledger.over_budget == 1
            clock.now = NOW + 599.9
            assert plain.get("/r/python/new").headers["Retry-After"] == "1"
            clock.now = NOW + 600
            assert limits(plain.get("/r/python/new")) == ("1", "2.0", "600")
            assert reddit.ledger.over_budget == 2


def test_rate_limit_sends_retry_after(clock: Clock) -> None:
    clock.now = NOW + 570
    with Reddit(clock=clock, window=600, budget=2) as reddit, reading(reddit) as client:
        reddit.add_subreddit("python")
        plain = Plain(reddit)
        with plain.session:
            for _ in range(2):
                assert plain.get("/r/python/new").status_code == 200
        with pytest.raises(TooManyRequests) as raised:
            names(client.subreddit("python").new())
        assert raised.value.retry_after == "30"
        assert (reddit.ledger.over_budget, reddit.ledger.tokens) == (1, 2)


def test_no_window_means_no_rate_limit(plain: Plain) -> None:
    assert limits(plain.get("/r/python/new")) == (None, None, None)


# Faults.


class Expected(NamedTuple):
    """A fault's effect. result: the exception that PRAW raises, or the number of posts; requests: PRAW's requests."""

    result: type[Exception] | int
    requests: int = 1


#: PRAW reads all 150 posts, in two pages.
TWO_PAGES = Expected(150, 2)
EXPECTED = {
    "too_many": Expected(TooManyRequests),
    "too_many_bare": Expected(TooManyRequests),
    "too_many_word": Expected(ValueError),
    "too_many_date": Expected(ValueError),
    **{f"server_error_{status}": Expected(ServerError, 3) for status in (500, 502, 503, 504, 520, 522)},
    "html": Expected(BadJSON),
    "html_400": Expected(RedditAPIException),
    "html_403": Expected(Forbidden),
    "forbidden": Expected(Forbidden),
    "not_found": Expected(NotFound),
    "redirect_search": Expected(Redirect),
    "redirect_nowhere": Expected(KeyError),
    "token_expired": Expected(InvalidToken, 3),
    "unauthorized": Expected(InvalidToken, 3),
    "unauthorized_bare": Expected(KeyError, 3),
    "slow": TWO_PAGES,
    "slow_body": TWO_PAGES,
    "cut": Expected(RequestException, 3),
    "cut_body": Expected(RequestException, 3),
    "reset_fractional": Expected(ValueError),
    "reset_negative": TWO_PAGES,
    "remaining_nan": Expected(ValueError),
    "used_missing": Expected(KeyError),
    "empty_listing": Expected(0),
    "dead_anchor": Expected(100, 2),
    "no_data": Expected(ValueError),
    "truncated_json": Expected(BadJSON),
    "sticky_head": TWO_PAGES,
    "stale": Expected(149, 2),
    "ends_early": Expected(20),
    "old_last": TWO_PAGES,
}


def test_every_fault_has_an_expected_effect() -> None:
    assert list(EXPECTED) == list(FAULTS)
    assert all(
        fault.source.startswith(("FACTS.md: ", "recorded: ", "praw: ", "prawcore: ", "seen: "))
        for fault in FAULTS.values()
    )


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", FAULTS)
def test_praw_reacts_to_each_fault(reddit: Reddit, client: praw.Reddit, name: str) -> None:
    published = publish(reddit, 150)
    reddit.faults.always(name, seconds=0.01)
    expected = EXPECTED[name]
    if isinstance(expected.result, int):
        posts = names(client.subreddit("python").new(limit=None))
        if name == "sticky_head":
            # The pinned post is the oldest one, so it is listed again at the end.
            assert posts.pop(0) == published[0]
        if name == "old_last":
            assert posts.pop(100) == published[0]
        newest_first = published[::-1][name == "stale" :]
        assert posts == newest_first[: expected.result]
    else:
        with pytest.raises(expected.result) as raised:
            names(client.subreddit("python").new(limit=None))
        # Exactly this class: another fault may raise a subclass.
        assert type(raised.value) is expected.result
    sent = [request for request in reddit.ledger.requests if request.path != TOKEN_PATH]
    assert len(sent) == expected.requests
    # Some faults affect only one of the two pages.
    happened = 1 if name in ("dead_anchor", "sticky_head", "stale", "old_last") else expected.requests
    assert reddit.ledger.faults == {name: happened}
    assert [request.fault for request in sent].count(name) == happened


@pytest.mark.parametrize(
    ("name", "status", "header", "value"),
    [
        ("too_many", 429, "Retry-After", "7.5"),
        ("too_many_bare", 429, "Retry-After", None),
        ("too_many_word", 429, "Retry-After", "soon"),
        ("too_many_date", 429, "Retry-After", "Fri, 15 Jan 2027 08:00:07 GMT"),
        ("redirect_nowhere", 302, "Location", None),
        ("unauthorized_bare", 401, "www-authenticate", None),
        ("html", 200, "Content-Type", "text/html; charset=UTF-8"),
        ("html_403", 403, "Content-Type", "text/html; charset=UTF-8"),
        ("forbidden", 403, "Content-Type", "application/json; charset=UTF-8"),
        ("reset_fractional", 200, "x-ratelimit-reset", "15.5"),
        ("reset_negative", 200, "x-ratelimit-reset", "-5"),
        ("remaining_nan", 200, "x-ratelimit-remaining", "nan"),
        ("used_missing", 200, "x-ratelimit-used", None),
    ],
)
def test_fault_sends_status_and_headers(
    reddit: Reddit, plain: Plain, name: str, status: int, header: str, value: str | None
) -> None:
    reddit.faults.next(name, seconds=7.5)
    answer = plain.get("/r/python/new")
    assert (answer.status_code, answer.headers.get(header)) == (status, value)
    if status == 200 and header.startswith("x-"):
        others = [limit for limit in limits(answer) if limit != value]
        assert len(others) == 2
        assert None not in others


def test_limit_faults_replace_one_header(clock: Clock) -> None:
    with Reddit(clock=clock, budget=10) as reddit:
        reddit.add_subreddit("python")
        plain = Plain(reddit)
        with plain.session:
            for name, limit in {
                "used_missing": (None, "9.0", "600"),
                "remaining_nan": ("2", "nan", "600"),
                "reset_fractional": ("3", "7.0", "15.5"),
                "reset_negative": ("4", "6.0", "-5"),
            }.items():
                reddit.faults.next(name)
                assert limits(plain.get("/r/python/new")) == limit


def test_closing_the_server_ends_slow_responses() -> None:
    with Reddit() as reddit:
        plain = Plain(reddit)
        with plain.session:
            reddit.faults.next("slow", seconds=1000)
            with pytest.raises(requests.ReadTimeout):
                plain.get("/r/python/new", timeout=0.1)
    wait_until(
        lambda: not any("process_request_thread" in thread.name for thread in enumerate_threads()),
        "no request is in progress",
    )


def test_slow_faults_delay_the_headers_or_the_body(reddit: Reddit, plain: Plain) -> None:
    publish(reddit, 3)
    reddit.faults.next("slow", seconds=1000)
    with pytest.raises(requests.ReadTimeout):
        plain.get("/r/python/new", timeout=1)
    wait_until(lambda: reddit.ledger.faults["slow"], "the server has read the request")
    reddit.faults.next("slow_body", seconds=1000)
    url = f"{reddit.url}/r/python/new"
    with plain.session.get(url, stream=True, timeout=3) as answer:
        body = answer.iter_content(1)
        assert (answer.status_code, next(body)) == (200, b"{")
        with pytest.raises(requests.ConnectionError):
            list(body)
    assert plain.listing("/r/python/new")[0] == list(reddit.ledger.published)[::-1]


def test_cut_faults_close_the_connection(reddit: Reddit, plain: Plain) -> None:
    published = publish(reddit, 3)
    for name, error in {"cut": requests.ConnectionError, "cut_body": requests.exceptions.ChunkedEncodingError}.items():
        reddit.faults.next(name)
        with pytest.raises(requests.RequestException) as raised:
            plain.get("/r/python/new")
        # The connection is closed, not left open until the timeout.
        assert type(raised.value) is error
    assert plain.listing("/r/python/new")[0] == published[::-1]


def test_sticky_head_marks_the_pinned_post(reddit: Reddit, client: praw.Reddit) -> None:
    pinned, *_ = published = publish(reddit, 1, stickied=True) + publish(reddit, 3)
    older = reddit.publish("python", title="older, not pinned", created_utc=NOW - DAY)
    reddit.faults.next("sticky_head")
    posts = list(client.subreddit("python").new())
    assert names(posts) == [pinned, *published[:0:-1], older]
    assert [post.stickied for post in posts] == [True, False, False, False, False]
    reddit.add_subreddit("rust")
    oldest, newest = publish(reddit, 2, "rust")
    reddit.faults.next("sticky_head")
    assert [(post.name, post.stickied) for post in client.subreddit("rust").new()] == [(oldest, True), (newest, False)]


def test_next_applies_to_matching_requests(reddit: Reddit, plain: Plain) -> None:
    reddit.faults.next("server_error_503", times=2, where=r"/new\?.*limit=9")
    reddit.faults.next("not_found", where="^/api/info")
    requested: list[tuple[str, dict[str, Any]]] = [
        ("/r/python/new", {"limit": 8}),
        ("/r/python/hot", {"limit": 9}),
        ("/r/python/new", {"limit": 9}),
        ("/api/info", {"id": "t3_x"}),
        ("/r/python/new", {"raw_json": 1, "limit": 9}),
        ("/r/python/new", {"limit": 9}),
        ("/api/info", {"id": "t3_x"}),
    ]
    assert [plain.get(path, **query).status_code for path, query in requested] == [200, 200, 503, 404, 503, 200, 200]
    assert reddit.ledger.faults == {"server_error_503": 2, "not_found": 1}


def test_always_applies_until_cleared(reddit: Reddit, plain: Plain) -> None:
    reddit.faults.always("server_error_500", where="/new")
    statuses = [plain.get("/r/python/new").status_code for _ in range(3)] + [plain.get("/r/python/hot").status_code]
    reddit.faults.clear()
    assert [*statuses, plain.get("/r/python/new").status_code] == [500, 500, 500, 200, 200]


def test_scripted_faults_precede_random_ones(reddit: Reddit, plain: Plain) -> None:
    reddit.faults.random(1.0, among=["server_error_500"])
    reddit.faults.next("server_error_502")
    reddit.faults.next("server_error_503")
    assert [plain.get("/r/python/new").status_code for _ in range(4)] == [502, 503, 500, 500]


def test_fault_waits_for_a_request_it_can_affect(reddit: Reddit, plain: Plain) -> None:
    published = publish(reddit, 4)
    reddit.faults.next("dead_anchor")
    first, after = plain.listing("/r/python/new", limit=2)
    assert after is not None
    assert (first, after) == ([published[3], published[2]], published[2])
    assert plain.listing("/r/python/new", limit=2, after=after) == ([], None)
    assert plain.listing("/r/python/new", limit=2, after=after) == ([published[1], published[0]], None)


def test_unauthorized_requests_do_not_use_up_faults(reddit: Reddit, plain: Plain) -> None:
    reddit.faults.next("server_error_500")
    assert requests.get(f"{reddit.url}/r/python/new", timeout=120).status_code == 401
    assert plain.get("/r/python/new").status_code == 500


def test_faults_skip_the_token_endpoint_by_default(reddit: Reddit) -> None:
    reddit.faults.always("server_error_500")
    reddit.faults.random(1.0)
    with reading(reddit) as client:
        core_of(client)._authorizer.refresh()
        reddit.faults.next("server_error_502", where=TOKEN_PATH)
        with pytest.raises(ResponseException) as raised:
            core_of(client)._authorizer.refresh()
    assert raised.value.response.status_code == 502
    assert (reddit.ledger.tokens, reddit.ledger.faults) == (1, {"server_error_502": 1})


def _faults(seed: int) -> list[str]:
    """Return the faults of a hundred requests."""
    with Reddit(window=None, seed=seed) as reddit:
        reddit.add_subreddit("python")
        reddit.faults.random(0.3, among=["html", "server_error_503", "too_many"])
        plain = Plain(reddit)
        with plain.session:
            for _ in range(100):
                plain.get("/r/python/new")
        assert reddit.ledger.faults.keys() == {"html", "server_error_503", "too_many"}
        return [request.fault for request in reddit.ledger.requests]


def test_random_faults_follow_rate_and_seed() -> None:
    faults = _faults(seed=1)
    assert faults == _faults(seed=1) != _faults(seed=2)
    assert 50 < faults.count("") < 90


def test_rejects_unknown_faults_and_subreddit_kinds(reddit: Reddit) -> None:
    for ask in (reddit.faults.next, reddit.faults.always, lambda name: reddit.faults.random(0.5, among=[name])):
        with pytest.raises(ValueError, match="'slwo'.*too_many"):
            ask("slwo")
    with pytest.raises(ValueError, match="'publik'.*public"):
        reddit.add_subreddit("other", "publik")


# The ledger.


def test_ledger_records_posts_and_requests(reddit: Reddit, client: praw.Reddit, clock: Clock) -> None:
    first, second, third = publish(reddit, 3)
    clock.now += 5
    assert names(client.subreddit("Python").new(limit=2)) == [third, second]
    reddit.faults.next("truncated_json")
    with pytest.raises(BadJSON):
        names(client.subreddit("python").new())
    assert names(client.info(fullnames=[third])) == [third]
    ledger = reddit.ledger
    assert list(ledger.published.items()) == [
        (first, ("python", NOW - 2)),
        (second, ("python", NOW - 1)),
        (third, ("python", NOW)),
    ]
    assert ledger.served == {third: 2, second: 1}
    assert [(request.path, request.query, request.status, request.fault) for request in ledger.requests] == [
        (TOKEN_PATH, "", 200, ""),
        ("/r/Python/new", "limit=2&raw_json=1", 200, ""),
        ("/r/python/new", "limit=100&raw_json=1", 200, "truncated_json"),
        ("/api/info/", f"id={third}&raw_json=1", 200, ""),
    ]
    assert {request.at for request in ledger.requests} == {NOW + 5}
    assert all(request.user_agent.startswith("test:feedmill:1.0 (by /u/test)") for request in ledger.requests)
    assert (ledger.total, ledger.statuses, ledger.tokens, ledger.over_budget) == (4, {200: 4}, 1, 0)


def test_undelivered_responses_do_not_count_as_served(reddit: Reddit, plain: Plain) -> None:
    posts = publish(reddit, 100, body="x" * 100_000)  # more than the socket buffers hold
    with create_connection(("127.0.0.1", int(plain.url.rpartition(":")[2]))) as connection:
        authorization = f"Authorization: {plain.session.headers['Authorization']}"
        connection.sendall(f"GET /r/python/new?limit=100 HTTP/1.1\r\n{authorization}\r\n\r\n".encode())
        assert connection.recv(5) == b"HTTP/"
        assert reddit.ledger.served == dict.fromkeys(posts, 1)
    wait_until(lambda: reddit.ledger.served.total() == 0, "the server notices the lost response")
    reddit.faults.next("empty_listing")
    plain.get("/r/python/new")
    assert plain.listing("/api/info", id=posts[0]) == ([posts[0]], None)
    assert +reddit.ledger.served == {posts[0]: 1}


def test_concurrent_readers_see_no_gaps_or_duplicates(clock: Clock) -> None:
    ended = Event()
    walks: list[list[str]] = []

    def read(reddit: Reddit) -> None:
        plain = Plain(reddit)
        with plain.session:
            while not ended.is_set():
                walk, after = plain.listing("/r/a+b/new", limit=50)
                while after is not None:
                    page, after = plain.listing("/r/a+b/new", limit=50, after=after)
                    walk += page
                walks.append(walk)

    with Reddit(clock=clock, window=None) as reddit:
        for name in "ab":
            reddit.add_subreddit(name)
        readers = [Thread(target=read, args=(reddit,)) for _ in range(4)]
        for reader in readers:
            reader.start()
        published = [reddit.publish("ab"[number % 2], title=str(number)) for number in range(400)]
        wait_until(lambda: len(walks) > 0 and len(walks[-1]) == 400, "a reader sees all posts")
        ended.set()
        for reader in readers:
            reader.join()
    for walk in walks:
        # The posts published when the walk began, without gaps or duplicates.
        assert walk == published[: len(walk)][::-1]


def test_closed_server_releases_its_port(clock: Clock) -> None:
    with Reddit(clock=clock) as reddit:
        plain = Plain(reddit)
    with plain.session, pytest.raises(requests.ConnectionError):
        plain.get("/r/python/new")
    with Reddit(clock=clock, port=int(reddit.url.rpartition(":")[2])) as again:
        assert again.url == reddit.url


# The command line.


def _start_command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.reddit", *arguments],
        cwd=Path(__file__).parents[2], env=dict(os.environ), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _posts(folder: Path) -> str:
    posts = [
        {"id": str(number), "title": f"post {number}", "subreddit": name, "topic": topic, "score": number}
        for number, (name, topic) in enumerate(
            [("Rust", "code"), ("python", "code"), ("rust", "code")] * 3 + [("nba", "sports")]
        )
    ]
    path = folder / "posts.jsonl"
    path.write_text("".join(json.dumps(post) + "\n" for post in [*posts, {"id": "x", "title": "without a subreddit"}]))
    return str(path)


def test_command_publishes_a_file_and_prints_settings(tmp_path: Path) -> None:
    topics = tmp_path / "topics.toml"
    with _start_command("--posts", _posts(tmp_path), "--rate", "60000", "--write-topics", str(topics)) as process:
        assert process.stdout
        lines: list[str] = []
        while not lines or not lines[-1].startswith("feedmill ingest reddit"):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr and process.stderr.read()
        assert any("5 of 10 posts" in line and "2 subreddits" in line for line in lines)
        exported = dict(re.findall(r"export (\w+)=(.*)", "".join(lines)))
        url = exported["FEEDMILL_REDDIT_URL"]
        assert (
            exported
            | {
                "FEEDMILL_REDDIT_CLIENT_ID": "id",
                "FEEDMILL_REDDIT_CLIENT_SECRET": "secret",
                "FEEDMILL_REDDIT_USER_AGENT": "'linux:feedmill-by-hand:1.0 (by /u/somebody)'",
                "FEEDMILL_REDDIT_TOPICS": str(topics),
            }
            == exported
        )
        token = requests.post(
            url + TOKEN_PATH, auth=("id", "secret"), data={"grant_type": "client_credentials"}, timeout=120
        ).json()["access_token"]

        def titles() -> list[str]:
            answer = requests.get(
                f"{url}/r/rust+python+nba/new", headers={"Authorization": f"bearer {token}"}, timeout=120
            ).json()
            return [child["data"]["title"] for child in answer["data"]["children"]]

        # The ten posts are published in order: five at once, the others over time.
        wait_until(lambda: titles() == [f"post {number}" for number in range(9, -1, -1)], "all posts are published")
        process.send_signal(signal.SIGTERM)
        rest, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert "10 of 10 posts" in rest
    assert tomllib.loads(topics.read_text()) == {
        "active": 2,
        "topics": {"code": ["Rust", "python"], "sports": ["nba"]},
    }


def test_command_reports_mistakes_in_one_line(tmp_path: Path) -> None:
    posts = _posts(tmp_path)
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text('{"id": "x", "title": "without a subreddit"}\n')
    with create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        commands = {
            f"{tmp_path}/missing.jsonl": ["--posts", f"{tmp_path}/missing.jsonl"],
            str(nothing): ["--posts", str(nothing)],
            port: ["--posts", posts, "--port", port],
            f"{tmp_path}/no/topics": ["--posts", posts, "--write-topics", f"{tmp_path}/no/topics"],
        }
        started = {named: _start_command(*arguments) for named, arguments in commands.items()}
        for named, process in started.items():
            with process:
                _, error = process.communicate(timeout=120)
            assert named in error
            assert (process.returncode, error.count("\n")) == (1, 1)
