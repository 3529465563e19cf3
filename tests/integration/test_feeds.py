"""`ingest feeds` against feeds on loopback, with a real Redis and a simulated clock."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest

from feedmill.producers.feeds import client as feeds_client
from feedmill.producers.feeds import parser as feeds_parser
from feedmill.producers.feeds import state as feed_state
from feedmill.producers.feeds.checks import check_all
from feedmill.producers.feeds.client import Answer, FeedClient, is_public
from feedmill.producers.feeds.documents import Document
from feedmill.producers.feeds.parser import Parser
from feedmill.producers.feeds.source import FeedsSource
from feedmill.producers.feeds.subscriptions import Feed
from feedmill.producers.live import http as live_http
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import Clock, RequestFailed, SourceFailed
from feedmill.producers.live.state import Gaps
from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, make_app
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from tests.fakes.clock import SimulatedClock, run
from tests.fakes.dribbling import ANSWERS, Dribbling
from tests.fakes.feeds import Feeds
from tests.support import RedisServer, queued

#: Seconds in which every feed is read at least twice: longer than the longest learnt interval.
LONG_S = 2.5 * feed_state.MAX_LEARNT_S

Start = Callable[..., LiveDaemon]


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(1_800_000_000.0)


@pytest.fixture
def server(clock: SimulatedClock) -> Iterator[Feeds]:
    with Feeds(clock.time) as server:
        yield server


@pytest.fixture
def start(settings: Settings, server: Feeds, clock: SimulatedClock) -> Iterator[Start]:
    """Make daemons, each of which stands for a restarted process."""
    daemons: list[LiveDaemon] = []

    def start(limit: int = 100, **feeds: Any) -> LiveDaemon:
        named = {
            name: Feed.model_validate({"url": f"{server.url}/{name}"} | feed)
            for name, feed in feeds.items()
        }
        if not named:
            named = {
                name: Feed(url=f"{server.url}/{name}")
                for name in server.feeds.keys() | server.replies.keys()
            }
        client = connect(settings)
        source = FeedsSource(named, client, settings, clock, limit)
        pusher = Pusher(
            make_app(settings), client, settings, ClassifyOptions(), wait=clock.wait
        )
        daemon = LiveDaemon(source, client, pusher, settings, clock)
        daemons.append(daemon)
        return daemon

    yield start
    for daemon in daemons:
        daemon.close()


def titles(redis: RedisServer) -> list[str]:
    return [post.get("title", "") for post in queued(redis)]


@pytest.mark.parametrize("form", ["rss", "atom", "json"])
def test_sends_each_entry_once_oldest_first(
    form: str, redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog", form=form)
    for number in range(3):
        feed.publish(f"early {number}", "<p>A text &amp; more</p>")
        clock.wait(60)
    daemon = start()
    run(daemon, clock, 600)
    feed.publish("late", "<p>One</p><p>Two</p><script>hidden()</script>")
    run(daemon, clock, LONG_S)
    daemon.close()
    run(start(), clock, LONG_S)
    posts = queued(redis)
    assert [post["title"] for post in posts] == [
        "early 0",
        "early 1",
        "early 2",
        "late",
    ]
    first, last = posts[0], posts[-1]
    assert first["id"].startswith("feed:blog:")
    assert (first["topic"], first["body"]) == ("blog", "A text & more")
    assert first["permalink"] == "https://example.org/blog/1"
    assert first["created_utc"] == 1_800_000_000.0
    assert last["body"] == "One\n\nTwo"


def test_killed_daemon_sends_nothing_twice_and_misses_nothing(
    redis: RedisServer,
    server: Feeds,
    start: Start,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon ends between sending and storing, which is where entries could be lost."""
    feed = server.add("blog")
    feed.publish("one")

    def fail(*_: object) -> None:
        raise ConnectionAbortedError

    with monkeypatch.context() as broken:
        broken.setattr(feed_state, "store", fail)
        run(start(), clock, 1)
    assert titles(redis) == ["one"]
    feed.publish("two")
    run(start(), clock, 120)
    assert titles(redis) == ["one", "two"]


def test_starts_with_the_newest_entries_and_never_sends_the_others(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog", order="oldest")
    for number in range(10):
        feed.publish(f"{number}")
        clock.wait(60)
    run(start(limit=2), clock, LONG_S)
    feed.publish("10")
    run(start(limit=2), clock, LONG_S)
    assert titles(redis) == ["8", "9", "10"]


@pytest.mark.parametrize("ids", ["own", "links", "none"])
@pytest.mark.parametrize("dates", ["true", "none", "future", "odd"])
def test_reordered_and_undated_entries_are_sent_once(
    ids: str,
    dates: str,
    redis: RedisServer,
    server: Feeds,
    start: Start,
    clock: SimulatedClock,
) -> None:
    feed = server.add(
        "blog", ids=ids, dates=dates, order="random", has_validators=False
    )
    daemon = start()
    expected = []
    for number in range(12):
        feed.publish(f"title {number}", "some text")
        expected.append(f"title {number}")
        run(daemon, clock, 1_800)
    run(daemon, clock, LONG_S)
    assert sorted(titles(redis)) == sorted(expected)
    assert all(post["created_utc"] <= clock.time() for post in queued(redis))
    assert Gaps(redis.client).all() == []


def test_entry_that_returns_is_not_sent_again(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog")
    feed.publish("kept")
    entry = feed.publish("back")
    daemon = start()
    run(daemon, clock, 600)
    feed.entries.remove(entry)
    run(daemon, clock, 86_400)
    feed.entries.append(entry)
    run(daemon, clock, LONG_S)
    assert sorted(titles(redis)) == ["back", "kept"]


def test_ids_that_change_with_each_answer_are_no_new_entries(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog")
    daemon = start()
    for number in range(6):
        feed.publish(f"title {number}")
        for entry in feed.entries:
            entry["id"] = f"{entry['title']} at {clock.time()}"
        run(daemon, clock, LONG_S)
    assert titles(redis) == [f"title {number}" for number in range(6)]


def test_entries_that_share_an_id_are_all_sent(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog")
    daemon = start()
    for number in range(6):
        feed.publish(f"title {number}", id="https://example.org/")
        run(daemon, clock, LONG_S)
    assert titles(redis) == [f"title {number}" for number in range(6)]


def test_edited_entry_is_sent_again_and_one_that_always_changes_is_bounded(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog")
    entry = feed.publish("title", "before")
    counting = feed.publish("counter", "0 views")
    daemon = start()
    run(daemon, clock, 600)
    entry["body"] = "after"
    for views in range(1, 20):
        counting["body"] = f"{views} views"
        run(daemon, clock, LONG_S)
    bodies = [post["body"] for post in queued(redis) if post["title"] == "title"]
    assert bodies == ["before", "after"]
    (first, edited) = [post for post in queued(redis) if post["title"] == "title"]
    assert first["id"] == edited["id"]
    assert "edited_utc" not in first
    assert edited["edited_utc"] > first["created_utc"]
    counted = [post for post in queued(redis) if post["title"] == "counter"]
    assert len(counted) == 1 + feed_state.MAX_EDITS


def test_more_entries_than_the_feed_lists_are_a_gap(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog", capacity=5)
    feed.publish("first")
    daemon = start()
    run(daemon, clock, 60)
    for number in range(8):
        feed.publish(f"title {number}")
    run(daemon, clock, LONG_S)
    (gap,) = Gaps(redis.client).all()
    assert (gap.source, gap.origin) == ("feeds", "feeds blog")
    assert len(titles(redis)) == 6


def test_unchanged_feed_is_asked_for_with_its_validators(
    server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog")
    feed.headers["Last-Modified"] = "Fri, 15 Jan 2027 08:00:00 GMT"
    feed.publish("title")
    run(start(), clock, 60)
    run(start(), clock, LONG_S)
    _, first = server.asked[0]
    _, second = server.asked[1]
    assert "If-None-Match" not in first
    assert second["If-None-Match"].startswith('"')
    assert second["If-Modified-Since"] == "Fri, 15 Jan 2027 08:00:00 GMT"
    assert second["User-Agent"].startswith("feedmill/")


def test_server_that_never_reports_changes_is_asked_without_validators_daily(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog")
    feed.publish("one")
    daemon = start()
    run(daemon, clock, 60)
    server.replies["blog"] = (304, {})
    feed.publish("two")
    run(daemon, clock, 20 * 3_600)
    assert titles(redis) == ["one"]
    unconditional = [
        headers for _, headers in server.asked[1:] if "If-None-Match" not in headers
    ]
    assert unconditional == []
    run(daemon, clock, 10 * 3_600)
    assert [
        headers for _, headers in server.asked[1:] if "If-None-Match" not in headers
    ]


@pytest.mark.parametrize(
    ("head", "headers", "seconds"),
    [
        ("<ttl>120</ttl>", {}, 7_200),
        ("<sy:updatePeriod>daily</sy:updatePeriod>", {}, 86_400),
        (
            "<sy:updatePeriod>daily</sy:updatePeriod>"
            "<sy:updateFrequency>4</sy:updateFrequency>",
            {},
            21_600,
        ),
        ("", {"Cache-Control": "public, max-age=10000"}, 10_000),
        ("<ttl>999999</ttl>", {}, 86_400),
    ],
)
def test_wishes_of_feeds_and_servers_are_respected(
    head: str,
    headers: dict[str, str],
    seconds: float,
    server: Feeds,
    start: Start,
    clock: SimulatedClock,
) -> None:
    feed = server.add("blog", head=head)
    feed.headers |= headers
    feed.publish("title")
    daemon = start()
    run(daemon, clock, seconds - 10)
    assert len(server.asked) == 1
    run(daemon, clock, 20)
    assert len(server.asked) == 2


def test_busy_feed_is_read_before_its_entries_are_replaced(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    """Even if it asks to be read once a day."""
    feed = server.add(
        "news", capacity=30, head="<sy:updatePeriod>daily</sy:updatePeriod>"
    )
    count = 0
    daemon = None
    for minute in range(24 * 60):
        if minute % 4 == 0:
            feed.publish(f"title {count}")
            count += 1
        if minute == 60:
            daemon = start()
        if daemon is not None:
            run(daemon, clock, 60)
        else:
            clock.wait(60)
    assert daemon is not None
    run(daemon, clock, LONG_S)
    assert len(titles(redis)) == count
    assert Gaps(redis.client).all() == []
    assert len(server.asked) < 24 * 12


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_respected(
    status: int,
    form: str,
    redis: RedisServer,
    server: Feeds,
    start: Start,
    clock: SimulatedClock,
) -> None:
    server.add("other").publish("other")
    server.add("blog").publish("title")
    date = datetime.fromtimestamp(clock.time() + 3_000, UTC)
    wait = {"seconds": "3000", "date": format_datetime(date, usegmt=True)}[form]
    server.replies["blog"] = (status, {"Retry-After": wait})
    daemon = start()
    run(daemon, clock, 60)
    del server.replies["blog"]
    run(daemon, clock, 2_800)
    assert titles(redis) == ["other"]
    assert daemon.status()["failing_feeds"] == ["blog"]
    run(daemon, clock, 600)
    assert titles(redis) == ["other", "title"]
    assert daemon.status()["failing_feeds"] == []


def test_permanent_redirect_is_stored_and_temporary_one_is_not(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    server.add("new").publish("title")
    server.replies["old"] = (301, {"Location": "/new"})
    server.replies["other"] = (302, {"Location": "/new"})
    daemon = start(old={}, other={})
    run(daemon, clock, LONG_S)
    paths = [path for path, _ in server.asked]
    assert paths.count("old") == 1
    assert paths.count("other") > 1
    assert sorted(post["topic"] for post in queued(redis)) == ["old", "other"]
    # The new address is given up with its first failure: it may have been a mistake.
    server.feeds["old"] = server.feeds.pop("new")
    del server.replies["old"]
    server.feeds["old"].publish("later")
    run(daemon, clock, LONG_S)
    assert "later" in titles(redis)


@pytest.mark.parametrize("status", [301, 410, 500])
def test_changed_address_in_the_file_is_asked_at_once(
    status: int, redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    """Whatever the former address has answered; and the entries are not sent again."""
    before = server.add("before")
    before.publish("title")
    server.add("parked").publish("advertisement")
    own = {"url": f"{server.url}/before"}
    daemon = start(news=own)
    run(daemon, clock, 60)
    server.replies["before"] = (status, {"Location": "/parked"})
    run(daemon, clock, LONG_S)
    daemon.close()
    server.feeds["after"] = before
    before.publish("later")
    server.asked.clear()
    moved = start(news={"url": f"{server.url}/after"})
    run(moved, clock, 60)
    assert [path for path, _ in server.asked] == ["after"]
    run(moved, clock, LONG_S)
    assert {path for path, _ in server.asked} == {"after"}
    assert [title for title in titles(redis) if title != "advertisement"] == [
        "title",
        "later",
    ]
    assert moved.status()["failing_feeds"] == []


def test_odd_validators_are_not_sent_back(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog", has_validators=False)
    feed.headers |= {"ETag": "a\r\n b", "Last-Modified": "x" * 5_000}
    feed.publish("one")
    daemon = start()
    run(daemon, clock, 60)
    feed.publish("two")
    run(daemon, clock, LONG_S)
    assert titles(redis) == ["one", "two"]
    assert daemon.status()["failing_feeds"] == []


def test_gone_feed_is_left_alone(
    server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    server.add("blog").publish("title")
    server.replies["gone"] = (410, {})
    daemon = start(blog={}, gone={})
    run(daemon, clock, 3 * 86_400)
    assert [path for path, _ in server.asked].count("gone") == 1
    assert daemon.status()["gone_feeds"] == ["gone"]
    assert daemon.status()["hindrance"] == ""


@pytest.mark.parametrize(
    "location",
    [
        "",
        "/loop",
        "ftp://example.org/",
        "http://[",
        "http://",
        "x" * 5_000,
        f"http://{'a' * 70}.example/",
        "http://a..b/",
        "http://\x1b[31m/",
        "http://127.0.0.1:99999/",
    ],
)
def test_impossible_redirect_fails_only_its_feed(
    location: str,
    redis: RedisServer,
    server: Feeds,
    start: Start,
    clock: SimulatedClock,
) -> None:
    server.add("blog").publish("title")
    server.replies["loop"] = (301, {"Location": location})
    daemon = start(blog={}, loop={})
    run(daemon, clock, 600)
    assert titles(redis) == ["title"]
    assert daemon.status()["failing_feeds"] == ["loop"]


def test_unexpected_failure_of_one_feed_does_not_stop_the_others(
    redis: RedisServer,
    server: Feeds,
    start: Start,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.add("blog").publish("title")
    server.add("odd").publish("other")
    get = FeedClient.get

    def fail(client: FeedClient, url: str, **arguments: str) -> Answer:
        if url.endswith("odd"):
            raise KeyError("odd")
        return get(client, url, **arguments)

    monkeypatch.setattr(FeedClient, "get", fail)
    daemon = start()
    run(daemon, clock, 600)
    assert titles(redis) == ["title"]
    assert daemon.status()["failing_feeds"] == ["odd"]


def test_check_goes_on_after_an_unexpected_failure(
    settings: Settings,
    server: Feeds,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feeds = {}
    for name in ("odd", "blog"):
        server.add(name).publish("title")
        feeds[name] = Feed(url=f"{server.url}/{name}")
    parse = Parser.parse

    def fail(parser: Parser, body: bytes) -> Document:
        if b"odd" in body:
            raise KeyError("secret")
        return parse(parser, body)

    monkeypatch.setattr(Parser, "parse", fail)
    (odd, blog) = check_all(feeds, settings, clock)
    assert odd == ("odd   cannot be read: unexpected error (KeyError)", False)
    assert "1 entries" in blog[0]
    assert blog[1]


def test_no_readable_feed_is_a_hindrance(
    server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    server.replies["a"] = (403, {})
    server.replies["b"] = (500, {})
    daemon = start()
    run(daemon, clock, 60)
    assert "no feed can be read" in daemon.status()["hindrance"]
    feed = server.add("a")
    del server.replies["a"]
    feed.publish("title")
    run(daemon, clock, LONG_S)
    assert daemon.status()["hindrance"] == ""


# Private addresses.


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),  # noqa: S104
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
        ("not an address", False),
    ],
)
def test_tells_public_addresses_from_private_ones(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "0x7f.1", "2130706433"])
@pytest.mark.parametrize("status", [301, 302])
def test_redirect_to_a_private_address_is_refused(
    host: str, status: int, clock: SimulatedClock
) -> None:
    with Feeds() as private, Feeds() as public:
        private.add("secret").publish("title")
        url = f"http://{host}:{private.server_port}/secret"
        public.replies["blog"] = (status, {"Location": url})
        source = f"http://localhost:{public.server_port}/blog"
        with closing(FeedClient(clock, None)) as client:
            with pytest.raises(RequestFailed, match="not public|invalid"):
                client.get(source)
            assert private.asked == []
            if host == "127.0.0.1":
                assert client.get(url).body


def test_redirect_to_another_feeds_private_server_is_refused(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    """The file names that server, but for another feed; and another port of the host."""
    with Feeds() as other:
        other.add("secret").publish("secret")
        server.add("blog").publish("title")
        server.replies["curious"] = (302, {"Location": f"{other.url}/secret?delete=1"})
        daemon = start(
            blog={},
            curious={},
            own={"url": f"{other.url}/secret"},
        )
        run(daemon, clock, 60)
        assert sorted(titles(redis)) == ["secret", "title"]
        assert daemon.status()["failing_feeds"] == ["curious"]
        assert [path for path, _ in other.asked] == ["secret"]


def test_stored_redirect_does_not_become_trusted(clock: SimulatedClock) -> None:
    """A permanent redirect is asked for directly later; its name may then be a private one."""
    with Feeds() as private:
        private.add("secret").publish("title")
        with (
            closing(FeedClient(clock, None)) as client,
            pytest.raises(RequestFailed, match="not public"),
        ):
            client.get(f"{private.url}/secret", own_url="https://example.org/feed")
        assert private.asked == []


def test_connection_checks_the_address_that_it_uses(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may resolve to another address when it is asked for again."""
    monkeypatch.setattr(feeds_client, "_check_host", lambda _: None)
    with Feeds() as server:
        server.add("secret").publish("title")
        with (
            closing(FeedClient(clock, None)) as client,
            pytest.raises(RequestFailed, match="not public"),
        ):
            client.get(
                f"http://localhost:{server.server_port}/secret",
                own_url="https://example.org/feed",
            )
        assert server.asked == []


# Hostile servers.


@pytest.mark.parametrize("name", ANSWERS)
def test_endless_answers_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_http, "READ_TIMEOUT_S", 0.1)
    with (
        Dribbling(name) as server,
        closing(FeedClient(Clock(), None)) as client,
        pytest.raises(SourceFailed),
    ):
        client.get(f"http://127.0.0.1:{server.port}/")


def test_large_answer_is_not_read_to_its_end(clock: SimulatedClock) -> None:
    with Feeds() as server:
        server.add("blog").body = b" " * (feeds_client.MAX_FEED_BYTES + 1)
        with (
            closing(FeedClient(clock, None)) as client,
            pytest.raises(RequestFailed, match="larger than 8 MiB"),
        ):
            client.get(f"{server.url}/blog")


def test_cookies_are_not_kept(clock: SimulatedClock) -> None:
    with Feeds() as server:
        feed = server.add("blog")
        feed.headers["Set-Cookie"] = "reader=1; Path=/"
        with closing(FeedClient(clock, None)) as client:
            client.get(f"{server.url}/blog")
            client.get(f"{server.url}/blog")
        assert all("Cookie" not in headers for _, headers in server.asked)


BOMB = b"""<!DOCTYPE r [<!ENTITY a "haha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY f SYSTEM "file:///etc/passwd">]>
<rss version="2.0"><channel><title>t</title><item><title>A&c;&f;B</title></item></channel></rss>"""


def rss(items: bytes) -> bytes:
    return b'<rss version="2.0"><channel>' + items + b"</channel></rss>"


#: Documents, and whether they are feeds.
DOCUMENTS = {
    "empty": (b"", False),
    "page": (b"<!DOCTYPE html><html><body>Log in</body></html>", False),
    "zeros": (b"\0" * 10_000, False),
    "address": (b"http://127.0.0.1/", False),
    "file": (b"/etc/passwd", False),
    "deep JSON": (
        b'{"version": "https://jsonfeed.org/version/1", "items": ' + b"[" * 9**5,
        False,
    ),
    "odd JSON": (
        b'{"version": "https://jsonfeed.org/version/1", "items": [1, null, []]}',
        True,
    ),
    "JSON": (b'{"items": 1}', False),
    "entities": (BOMB, True),
    "deep": (rss(b"<item>" + b"<a>" * 100_000), True),
    "bad bytes": (rss(b"<item><title>caf\xe9 \xff</title></item>"), True),
    "unknown encoding": (b'<?xml version="1.0" encoding="x-odd"?>' + rss(b""), True),
    "no entries": (rss(b""), True),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_any_document_is_parsed_or_refused(name: str) -> None:
    body, is_feed = DOCUMENTS[name]
    with closing(Parser()) as parser:
        if not is_feed:
            with pytest.raises(RequestFailed):
                parser.parse(body)
        else:
            document = parser.parse(body)
            assert "root:" not in str(document)
            assert len(str(document)) < 10_000
        assert parser.parse(rss(b"<item><title>next</title></item>")).entries


def test_document_that_takes_too_long_is_refused_and_the_next_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attributes = b" ".join(b'a%d="1"' % number for number in range(400_000))
    with closing(Parser()) as parser:
        parser.parse(rss(b""))
        with monkeypatch.context() as short:
            short.setattr(feeds_parser, "TIMEOUT_S", 0.5)
            with pytest.raises(RequestFailed, match="takes longer"):
                parser.parse(rss(b"<item " + attributes + b"/>"))
        assert parser.parse(rss(b"<item><title>next</title></item>")).entries


def test_parser_that_was_killed_starts_again() -> None:
    with closing(Parser()) as parser:
        parser.parse(rss(b""))
        assert parser._process is not None
        parser._process.kill()
        with pytest.raises(RequestFailed):
            parser.parse(rss(b""))
        assert parser.parse(rss(b"<item><title>next</title></item>")).entries
    assert threading.active_count() < 50


def test_cut_document_is_read_again_and_its_last_entry_is_not_sent(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog", order="oldest")
    for number in range(5):
        feed.publish(f"title {number}", "a long text " * 20)
    whole = feed.document()
    feed.body = whole[: -len(whole) // 10]
    daemon = start()
    run(daemon, clock, 60)
    assert titles(redis) == [f"title {number}" for number in range(4)]
    feed.body = None
    run(daemon, clock, LONG_S)
    assert titles(redis) == [f"title {number}" for number in range(5)]


def test_long_texts_are_cut_and_markup_in_titles_is_text(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    feed = server.add("blog")
    feed.publish("<b>Bold</b> &amp; a < b", "x" * 300_000)
    feed.publish("", "", link="https://example.org/empty")
    run(start(), clock, 60)
    (post,) = queued(redis)
    assert post["title"] == "Bold & a < b"
    assert len(post["body"]) == 100_000


def test_faults_lose_nothing(
    redis: RedisServer, server: Feeds, start: Start, clock: SimulatedClock
) -> None:
    for form in ("rss", "atom", "json"):
        server.add(form, form=form)
    server.random_faults(0.4)
    daemon = start()
    expected = []
    for number in range(60):
        for feed in server.feeds.values():
            feed.publish(f"{feed.name} {number}")
            expected.append(f"{feed.name} {number}")
        run(daemon, clock, 600)
    server.random_faults(0.0)
    run(daemon, clock, 2 * feed_state.MAX_INTERVAL_S)
    assert sorted(titles(redis)) == sorted(expected)
    assert len(server.fault_counts) == 10, server.fault_counts
