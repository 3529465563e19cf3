"""shared/purge.py on every redis-server of this machine: a purge removes a post completely and permanently."""

import json
import pickle
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import ChordError
from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import ConnectionError as ConnectionFault

from feedmill.shared import purge as purging
from feedmill.shared.broker import make_app, publish
from feedmill.shared.errors import MessageFailed, RequestRefused, UserError
from feedmill.shared.keys import PURGES, tombstone_key
from feedmill.shared.messages import Classification, ClassifyOptions, DeadLetter, Post
from feedmill.shared.purge import (
    BEGINNING,
    TOMBSTONE_TTL_S,
    PurgeCounts,
    Purges,
    lift_tombstones,
    newest_purge,
    purge,
    read_purges,
)
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, dead_letters, has_results, latest, make_classification, mark_sent, sent_marks

# A warning of Celery's backend, which stores results in this process.
pytestmark = [
    pytest.mark.each_redis,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]

#: Text in everything that is stored about a post.
WORDS = "words of somebody"


@pytest.fixture
def client(server: RedisServer) -> Redis:
    return server.client


@pytest.fixture
def settings(server: RedisServer) -> Settings:
    return Settings.model_validate({"redis_url": server.url})


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
    return Result(Post(id=post_id, title=f"{WORDS} {post_id}"), classification(post_id, fingerprint))


def letter(post_id: str | None) -> DeadLetter:
    post = json.dumps({"id": post_id, "title": WORDS})
    return DeadLetter(id=post_id, reason=WORDS, post=post, options=None, message="m", worker="w", failed_at=1.0)


def everything(client: Redis) -> str:
    """Return everything in Redis except the tombstones and the log of purges, which contain only ids."""

    untyped: Any = client

    read = {
        "string": ("GET",), "hash": ("HGETALL",), "stream": ("XRANGE", "-", "+"), "list": ("LRANGE", 0, -1),
        "zset": ("ZRANGE", 0, -1),
    }  # fmt: skip
    names = sorted(str(name) for name in client.scan_iter() if not str(name).startswith((tombstone_key(""), PURGES)))
    commands = [(name, *read[str(client.type(name))]) for name in names]
    return str([untyped.execute_command(which, name, *end, **{NEVER_DECODE: True}) for name, which, *end in commands])


def test_removes_everything_about_a_post_and_keeps_the_others(
    client: Redis, settings: Settings, store: ResultsStore, app: Any
) -> None:
    posts = ["gone", "kept", 'odd "id", with: all; é\\ of it']
    for post_id in posts:
        store.write([result(post_id), result(post_id, "another")], [letter(post_id)])
        mark_sent(client, post_id)
        app.backend.mark_as_done(f"of-{post_id}", [classification(post_id).model_dump()])
    store.write([], [letter(None)])
    store.refresh_scores(dict.fromkeys(posts, 7), 1.0)
    client.hset("another:key", "f", "v")
    assert purge(client, settings, [posts[0], posts[2]]) == PurgeCounts(
        sent=2, results=2, entries=4, dead_letters=2, celery_results=2
    )
    assert [found.post.id for found in latest(store, 10)] == ["kept"] * 2
    assert [found.id for found in dead_letters(store, 10)] == ["kept", None]
    assert len(store.get("kept")) == 2
    assert (sent_marks(client, "kept"), client.exists("another:key")) == (1, 1)
    assert app.AsyncResult("of-kept").get() == [classification("kept").model_dump()]
    for post_id in (posts[0], posts[2]):
        assert not has_results(client, post_id)
        assert sent_marks(client, post_id) == 0
        assert app.AsyncResult(f"of-{post_id}").get() == [{"id": post_id, "error": "purged"}]
        assert int(str(client.get(tombstone_key(post_id)))) > 1_700_000_000
        assert 0 < client.ttl(tombstone_key(post_id)) <= TOMBSTONE_TTL_S
    assert client.exists(tombstone_key("kept")) == 0
    assert purge(client, settings, [posts[0], posts[2]]) == PurgeCounts()


def test_purges_at_redis_memory_limit(client: Redis, settings: Settings, store: ResultsStore, app: Any) -> None:
    store.write([result("gone"), result("kept")], [letter("gone")])
    mark_sent(client, "gone")
    app.backend.mark_as_done("of-gone", [classification("gone").model_dump()])
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
    assert found == PurgeCounts(sent=1, results=1, entries=1, dead_letters=1, celery_results=1, messages=2)
    assert client.exists(tombstone_key("gone"), tombstone_key("never there")) == 2
    waiting, taken = client.lindex("feedmill", 0), client.hget("feedmill:reserved", "tag feedmill")
    assert [arguments(str(message)) for message in (waiting, taken)] == 2 * [
        [{"id": "gone"}, {"id": "kept", "title": "another"}]
    ]


def arguments(message: str) -> Any:
    """Return the posts of a queued message."""
    return json.loads(b64decode(json.loads(message)["body"]))[1]["posts"]


@pytest.mark.parametrize("step", ["_sweep", "_clean_celery_results", "call"])
def test_an_interrupted_purge_can_be_repeated(
    client: Redis, settings: Settings, store: ResultsStore, app: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store.write([result("gone")], [letter("gone")])
    app.backend.mark_as_done("m", [classification("gone").model_dump()])

    def cut(*_: object, **__: object) -> None:
        raise ConnectionFault("cut")

    with monkeypatch.context() as patched:
        patched.setattr(purging, step, cut)
        with pytest.raises(ConnectionFault):
            purge(client, settings, ["gone"])
    if step != "call":  # this step also sets the tombstone
        store.write([result("gone", "another")], [letter("gone")])
        assert store.counters().gone == 2
    assert purge(client, settings, ["gone"]).celery_results == 1
    assert WORDS not in everything(client)


@pytest.mark.parametrize("size", [1, 4000, 2**19])
def test_sweeps_streams_in_bounded_parts(
    client: Redis, settings: Settings, store: ResultsStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(purging, "SWEEP_BYTES", size)
    monkeypatch.setattr(purging, "IDS_AT_ONCE", 7)
    store.write([result(str(number)) for number in range(100)])
    gone = [0, 8, 9, 10, 11, 19, 20, *range(40, 60), 99]
    assert purge(client, settings, map(str, gone)).entries == len(gone)
    assert [found.post.id for found in latest(store, 100)] == [str(n) for n in range(100) if n not in gone]


def test_purged_celery_results_keep_their_format(client: Redis, settings: Settings, app: Any) -> None:
    kept, gone = classification("kept").model_dump(), classification("gone").model_dump()
    refused = {"id": " bad ", "error": WORDS}
    app.backend.mark_as_done("m", [kept, gone, refused, {"id": None, "error": "no id"}])
    client.expire("celery-task-meta-m", 100)
    before = json.loads(str(client.get("celery-task-meta-m")))
    assert purge(client, settings, ["gone", "bad", "None"]).celery_results == 1
    assert 0 < client.ttl("celery-task-meta-m") <= 100
    after = json.loads(str(client.get("celery-task-meta-m")))
    assert after.pop("result") == [
        kept,
        {"id": "gone", "error": "purged"},
        {"id": " bad ", "error": "purged"},
        {"id": None, "error": "no id"},
    ]
    assert after == {name: value for name, value in before.items() if name != "result"}


def failure(reasons: list[str]) -> MessageFailed:
    return MessageFailed.of(reasons, 9)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (failure(["gone: " + WORDS]), "1 of 9 posts failed: purged"),
        (failure(["kept: no text", f"gone: {WORDS}", "b: c"]), "3 of 9 posts failed: purged"),
        (failure(["a; b: c: " + WORDS]), "1 of 9 posts failed: purged"),
        (
            ChordError(f"Dependency 1-2 raised {failure(['gone: ' + WORDS])!r}"),
            "MessageFailed('1 of 9 posts failed: purged",
        ),
        (failure(["kept: gone is no text"]), None),
        (failure(["gone.b: no text"]), None),
        (RequestRefused("labels: gone: name at least one label"), None),
        (ValueError("another task's; gone: yes"), None),
    ],
)
def test_purge_redacts_errors_of_failed_messages(
    client: Redis, settings: Settings, app: Any, error: Exception, said: str | None
) -> None:
    app.backend.mark_as_failure("m", error)
    app.backend.mark_as_failure("other", failure(["x: fine"]))
    client.set(
        "celery-task-meta-m", str(client.get("celery-task-meta-m")).replace('"traceback": null', '"traceback": "t"')
    )
    before = everything(client)
    assert purge(client, settings, ["gone", "a; b: c"]).celery_results == (said is not None)
    found: Any = app.AsyncResult("m")
    assert found.failed()
    assert type(found.result).__name__ == type(error).__name__
    if said is None:
        assert everything(client) == before
    else:
        assert str(found.result).endswith(said)
        assert found.traceback is None
        assert WORDS not in everything(client)
        assert "x: fine" in everything(client)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\x00",
        b'"id": "gone"',
        b'["id", {"id": "gone"}]',
        b'{"result": {"id": "gone"}}',
        b'{"result": [{"id": "gone", "price": 7}, "exc_type", null]}',
        b'{"result": {"exc_type": "X", "exc_message": " posts failed: gone: "}}',
        b'{"result": {"exc_type": "X"}}',
        b'{"result": [{"id": "\\udead\\q"}]}',
        b"[" * 100_000 + b'"id": "gone"',
        pickle.dumps({"result": [{"id": "gone", "error": "x"}]}),
    ],
)
def test_keeps_results_of_other_tasks(client: Redis, settings: Settings, value: bytes) -> None:
    client.set("celery-task-meta-other", value)
    client.hset("celery-task-meta-odd", "id", "gone")
    before = client.dump("celery-task-meta-other") if value.isascii() else None
    assert purge(client, settings, ["gone"]) == PurgeCounts()
    assert before is None or client.dump("celery-task-meta-other") == before


def test_purges_many_celery_results(
    client: Redis, settings: Settings, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "SCAN_COUNT", 10)
    monkeypatch.setattr(purging, "RESULTS_AT_ONCE", 3)
    for number in range(50):
        app.backend.mark_as_done(str(number), [classification(str(number)).model_dump()])
    assert purge(client, settings, map(str, range(0, 50, 2))).celery_results == 25
    assert ["label" in app.AsyncResult(str(number)).get()[0] for number in range(4)] == [False, True, False, True]


def test_rereads_results_changed_by_a_concurrent_purge(
    client: Redis, settings: Settings, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two purges that change one result at the same time do not restore each other's removed outcomes."""
    app.backend.mark_as_done("m", [classification(name).model_dump() for name in ("one", "two", "kept")])
    fetch = purging._fetch
    others = [["two"], []]

    def slow_fetch(redis: Redis, keys: list[str]) -> list[bytes | None]:
        texts = fetch(redis, keys)
        if others and (other := others.pop(0)):
            purge(redis, settings, other)
        return texts

    monkeypatch.setattr(purging, "_fetch", slow_fetch)
    assert purge(client, settings, ["one"]).celery_results == 1
    assert ["error" in outcome for outcome in app.AsyncResult("m").get()] == [True, True, False]


def test_lift_allows_a_post_again(client: Redis, settings: Settings, store: ResultsStore) -> None:
    purge(client, settings, ["a", "b"])
    assert lift_tombstones(client, ["a", "never purged"]) == 1
    store.write([result("a"), result("b")])
    assert [found.post.id for found in latest(store, 10)] == ["a"]


@pytest.mark.parametrize("post_id", ["", " ", "x" * 129])
def test_rejects_invalid_post_ids(client: Redis, settings: Settings, post_id: str) -> None:
    for refused in (lambda: purge(client, settings, ["fine", post_id]), lambda: lift_tombstones(client, [post_id])):
        with pytest.raises(UserError, match=rf"\b{len(post_id.strip())}\b.*\b128\b"):
            refused()
    assert client.exists(tombstone_key("fine")) == 0


def test_normalizes_ids_as_posts_do(client: Redis, settings: Settings, store: ResultsStore) -> None:
    odd = Post(id=" a\ud800 ", title="t")
    store.write([Result(odd, classification(odd.id))])
    assert purge(client, settings, [" a\ud800 ", odd.id]) == PurgeCounts(results=1, entries=1)
    assert purge(client, settings, []) == PurgeCounts()


def test_log_of_purges_is_read_in_order(client: Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedmill.shared.purge.PURGES_PER_READ", 2)
    monkeypatch.setattr("feedmill.shared.purge.MAX_PURGES", 4)
    assert read_purges(client, BEGINNING) == Purges([], BEGINNING)
    for post_id in ("a", "b", "c"):
        purge(client, settings, [post_id])
    first = read_purges(client, BEGINNING)
    assert [each.ids for each in first.purges] == [["a"], ["b"]]
    second = read_purges(client, first.position)
    assert ([each.ids for each in second.purges], second.position) == ([["c"]], newest_purge(client))
    assert read_purges(client, second.position) == Purges([], second.position)
    purge(client, settings, ["d"])
    assert read_purges(client, BEGINNING) == Purges([], newest_purge(client), missed=True)  # the log may be longer
    client.xdel(PURGES, second.position)
    assert read_purges(client, second.position).missed
