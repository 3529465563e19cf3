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
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any, NamedTuple

import praw
import pytest
import requests
from praw.exceptions import RedditAPIException
from prawcore.exceptions import (
    BadJSON,
    Forbidden,
    InvalidToken,
    NotFound,
    Redirect,
    RequestException,
    ResponseException,
    ServerError,
    TooManyRequests,
)
from prawcore.sessions import FiniteRetryStrategy

from tests.fakes.reddit import Reddit
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


# The budget.


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


# The ledger.


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
