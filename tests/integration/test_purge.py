"""shared/purge.py on every redis-server of this machine: a purge removes a post completely and
permanently.
"""

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import ConnectionError as ConnectionFault

from feedmill.shared import purge as purging
from feedmill.shared.broker import make_app, publish
from feedmill.shared.errors import UserError
from feedmill.shared.keys import PURGES, TOMBSTONE
from feedmill.shared.messages import Classification, ClassifyOptions, DeadLetter, Post
from feedmill.shared.purge import (
    BEGINNING,
    TOMBSTONE_TTL_S,
    Counts,
    PurgePage,
    lift_tombstones,
    newest_purge,
    purge,
    read_purges,
)
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    dead_letters,
    has_results,
    latest,
    make_classification,
    mark_sent,
    sent_marks,
)

pytestmark = pytest.mark.each_redis

#: Text in everything that is stored about a post.
WORDS = "words of somebody"


@pytest.fixture
def client(server: RedisServer) -> Redis:
    return server.client


@pytest.fixture
def store(client: Redis, settings: Settings) -> ResultsStore:
    return ResultsStore(client, settings)


@pytest.fixture
def app(settings: Settings) -> Iterator[Any]:
    with make_app(settings) as app:
        yield app


def classification(post_id: str, fingerprint: str = "f") -> Classification:
    return make_classification(post_id, fingerprint=fingerprint)


def result(post_id: str, fingerprint: str = "f") -> Result:
    return Result(
        Post(id=post_id, title=f"{WORDS} {post_id}"),
        classification(post_id, fingerprint),
    )


def letter(post_id: str | None) -> DeadLetter:
    post = json.dumps({"id": post_id, "title": WORDS})
    return DeadLetter(
        id=post_id,
        reason=WORDS,
        post=post,
        options=None,
        message="m",
        worker="w",
        failed_at=1.0,
    )


def everything(client: Redis) -> str:
    """Return everything in Redis except the tombstones and the log of purges, which contain only
    ids.
    """

    untyped: Any = client

    read = {
        "string": ("GET",), "hash": ("HGETALL",), "stream": ("XRANGE", "-",
        "+"), "list": ("LRANGE", 0, -1),
        "zset": ("ZRANGE", 0, -1),
    }  # fmt: skip
    names = sorted(
        str(name)
        for name in client.scan_iter()
        if not str(name).startswith((TOMBSTONE, PURGES))
    )
    commands = [(name, *read[str(client.type(name))]) for name in names]
    return str(
        [
            untyped.execute_command(which, name, *end, **{NEVER_DECODE: True})
            for name, which, *end in commands
        ]
    )


def test_removes_everything_about_a_post_and_keeps_the_others(
    client: Redis, settings: Settings, store: ResultsStore
) -> None:
    posts = ["gone", "kept", 'odd "id", with: all; é\\ of it']
    for post_id in posts:
        store.write([result(post_id), result(post_id, "another")], [letter(post_id)])
        mark_sent(client, post_id)
    store.write([], [letter(None)])
    store.refresh_scores(dict.fromkeys(posts, 7), 1.0)
    client.hset("another:key", "f", "v")
    assert purge(client, settings, [posts[0], posts[2]]) == Counts(
        sent=2, results=4, entries=4, dead_letters=2
    )
    assert [found.post.id for found in latest(store, 10)] == ["kept"] * 2
    assert [found.id for found in dead_letters(store, 10)] == ["kept", None]
    assert len(store.get("kept")) == 2
    assert (sent_marks(client, "kept"), client.exists("another:key")) == (1, 1)
    for post_id in (posts[0], posts[2]):
        assert not has_results(client, post_id)
        assert sent_marks(client, post_id) == 0
        assert int(str(client.get(TOMBSTONE + post_id))) > 1_700_000_000
        assert 0 < client.ttl(TOMBSTONE + post_id) <= TOMBSTONE_TTL_S
    assert client.exists(TOMBSTONE + "kept") == 0
    assert purge(client, settings, [posts[0], posts[2]]) == Counts()


def test_purges_at_redis_memory_limit(
    client: Redis, settings: Settings, store: ResultsStore, app: Any
) -> None:
    store.write([result("gone"), result("kept")], [letter("gone")])
    mark_sent(client, "gone")
    pushed = [Post(id="gone", title=WORDS), Post(id="kept", title="another")]
    for _ in range(2):
        publish(app, [pushed], ClassifyOptions())
    held = client.rpop("feedmill")
    client.hset("feedmill:reserved", "tag feedmill", str(held))
    client.config_set("maxmemory", 1)
    try:
        found = purge(client, settings, ["gone", "never there"])
        assert store.find([("gone", "f")]) == [None]
    finally:
        client.config_set("maxmemory", 0)
    assert found == Counts(sent=1, results=1, entries=1, dead_letters=1, messages=2)
    assert client.exists(TOMBSTONE + "gone", TOMBSTONE + "never there") == 2
    waiting, taken = (
        client.lindex("feedmill", 0),
        client.hget("feedmill:reserved", "tag feedmill"),
    )
    assert [arguments(str(message)) for message in (waiting, taken)] == 2 * [
        [{"id": "gone"}, {"id": "kept", "title": "another"}]
    ]


def arguments(message: str) -> Any:
    """Return the posts of a queued message."""
    return json.loads(b64decode(json.loads(message)["body"]))[1]["posts"]


@pytest.mark.parametrize("step", ["_sweep", "call"])
def test_an_interrupted_purge_can_be_repeated(
    client: Redis,
    settings: Settings,
    store: ResultsStore,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    store.write([result("gone")], [letter("gone")])

    def cut(*_: object, **__: object) -> None:
        raise ConnectionFault("cut")

    with monkeypatch.context() as patched:
        patched.setattr(purging, step, cut)
        with pytest.raises(ConnectionFault):
            purge(client, settings, ["gone"])
    if step != "call":  # this step also sets the tombstone
        store.write([result("gone", "another")], [letter("gone")])
        assert store.counters().gone == 2
    assert purge(client, settings, ["gone"])["dead_letters"] == 1
    assert WORDS not in everything(client)


@pytest.mark.parametrize("size", [1, 4000, 2**19])
def test_sweeps_streams_in_bounded_parts(
    client: Redis,
    settings: Settings,
    store: ResultsStore,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    monkeypatch.setattr(purging, "SWEEP_BYTES", size)
    monkeypatch.setattr(purging, "IDS_AT_ONCE", 7)
    store.write([result(str(number)) for number in range(100)])
    gone = [0, 8, 9, 10, 11, 19, 20, *range(40, 60), 99]
    assert purge(client, settings, map(str, gone))["entries"] == len(gone)
    assert [found.post.id for found in latest(store, 100)] == [
        str(n) for n in range(100) if n not in gone
    ]


@pytest.mark.parametrize("post_id", ["", " ", "x" * 129])
def test_rejects_invalid_post_ids(
    client: Redis, settings: Settings, post_id: str
) -> None:
    for refused in (
        lambda: purge(client, settings, ["fine", post_id]),
        lambda: lift_tombstones(client, [post_id]),
    ):
        with pytest.raises(UserError, match=rf"\b{len(post_id.strip())}\b.*\b128\b"):
            refused()
    assert client.exists(TOMBSTONE + "fine") == 0


def test_normalizes_ids_as_posts_do(
    client: Redis, settings: Settings, store: ResultsStore
) -> None:
    odd = Post(id=" a\ud800 ", title="t")
    store.write([Result(odd, classification(odd.id))])
    assert purge(client, settings, [" a\ud800 ", odd.id]) == Counts(
        results=1, entries=1
    )
    assert purge(client, settings, []) == Counts()


def test_log_of_purges_is_read_in_order(
    client: Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedmill.shared.purge.PURGES_PER_READ", 2)
    monkeypatch.setattr("feedmill.shared.purge.MAX_PURGES", 4)
    assert read_purges(client, BEGINNING) == PurgePage([], BEGINNING)
    for post_id in ("a", "b", "c"):
        purge(client, settings, [post_id])
    first = read_purges(client, BEGINNING)
    assert [each.ids for each in first.purges] == [["a"], ["b"]]
    second = read_purges(client, first.position)
    assert ([each.ids for each in second.purges], second.position) == (
        [["c"]],
        newest_purge(client),
    )
    assert read_purges(client, second.position) == PurgePage([], second.position)
    purge(client, settings, ["d"])
    # the log may be longer
    assert read_purges(client, BEGINNING) == PurgePage(
        [], newest_purge(client), missed=True
    )
    client.xdel(PURGES, second.position)
    assert read_purges(client, second.position).missed
