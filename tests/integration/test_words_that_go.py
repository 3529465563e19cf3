"""After a purge, a post's text is in no key, no message and no file of Redis, not even as deleted
bytes.

Runs on each redis-server of this machine, configured by docker/redis.conf, with an append-only
file.
"""

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery
from redis import Redis

from feedmill.shared import encoding
from feedmill.shared import purge as purging
from feedmill.shared.broker import (
    CLASSIFY_TASK,
    TRANSPORT_KEYS,
    connect,
    make_app,
    publish,
    queue_lists,
)
from feedmill.shared.messages import ClassifyOptions, DeadLetter, Post
from feedmill.shared.model_routing import announce
from feedmill.shared.purge import Counts, purge
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    body_of,
    make_classification,
    mark_sent,
    reserve,
    shapes,
    wait_until,
)

pytestmark = pytest.mark.each_redis

REDIS_CONF = Path(__file__).parent.parent.parent / "docker" / "redis.conf"
WORDS, OTHERS = "Rhubarb and custard, she said", "Nobody asked for these to go"


class Kept(NamedTuple):
    """A Redis with an append-only file."""

    folder: Path
    #: A client that does not decode responses.
    raw: Any
    settings: Settings


@pytest.fixture
def kept(
    redis_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kept]:
    monkeypatch.setattr(encoding, "MIN_COMPRESSED_CHARACTERS", sys.maxsize)
    # Text would be undetectable in compressed files and messages, and late in a file that is
    # written every second.
    configuration = REDIS_CONF.read_text().replace(
        "\nport 6379\n", "\nrdbcompression no\n"
    )
    server = RedisServer(
        redis_path,
        tmp_path,
        configuration.replace("appendfsync everysec", "appendfsync always"),
    )
    try:
        settings = Settings.model_validate({"redis_url": server.url})
        yield Kept(tmp_path, Redis.from_url(server.url), settings)
    finally:
        server.stop()


def post(post_id: str, words: str) -> Post:
    return Post(id=post_id, title=words, body=f"{words}. " * 20)


def fill(kept: Kept) -> None:
    """Write everything that Feedmill stores about two posts, and other applications' messages with
    them.
    """
    redis = connect(kept.settings)
    ours, theirs = (
        make_app(kept.settings),
        Celery(broker=kept.settings.broker_url, set_as_current=False),
    )
    store = ResultsStore(redis, kept.settings)
    for post_id, words in (("gone", WORDS), ("kept", OTHERS)):
        each = post(post_id, words)
        found = make_classification(post_id, scores={"food": 1.0})
        letter = DeadLetter(
            id=post_id,
            reason=words,
            post=each.model_dump_json(),
            options=None,
            message="m",
            worker="w",
            failed_at=1.0,
        )
        store.write([Result(each, found)], [letter])
        mark_sent(redis, post_id)
    publish(
        ours,
        [[post("gone", WORDS), post("kept", OTHERS)], [post("kept", OTHERS)]],
        ClassifyOptions(),
    )
    both = [post("gone", WORDS).model_dump(), post("kept", OTHERS).model_dump()]
    for priority in (0, 3, 6, 9):
        theirs.send_task(CLASSIFY_TASK, [both], queue="feedmill", priority=priority)
        theirs.send_task(
            CLASSIFY_TASK, kwargs={"posts": both}, queue="feedmill", priority=priority
        )
        following = theirs.signature(CLASSIFY_TASK, [both], queue="feedmill")
        theirs.send_task(
            CLASSIFY_TASK,
            [both[1:]],
            queue="feedmill",
            priority=priority,
            link=following,
        )
    theirs.send_task(CLASSIFY_TASK, [both], queue="feedmill-other")
    announce(redis, "feedmill-other", "another model")
    # A worker holds some of the messages.
    assert reserve(redis, queue_lists("feedmill"), "worker-0", limit=4) == 4
    ours.close()
    theirs.close()


def places(kept: Kept, words: str) -> set[str]:
    """Return the keys and files that contain the text, including deleted bytes within keys."""
    found = {str(key): kept.raw.dump(key) or b"" for key in kept.raw.scan_iter()}
    found |= {
        str(path): path.read_bytes()
        for path in kept.folder.rglob("*")
        if path.is_file()
    }
    return {
        place
        for place, content in found.items()
        if any(shape in content for shape in shapes(words))
    }


def rewritten(kept: Kept) -> bool:
    state = kept.raw.info("persistence")
    return not (state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"])


def test_no_copy_of_a_purged_posts_text_remains(kept: Kept) -> None:
    fill(kept)
    full = places(kept, WORDS)
    # Two streams, four lists, another model's list, the held messages, and the append-only file.
    assert len(full) == len(places(kept, OTHERS)) == 2 + 4 + 1 + 1 + 1
    found = purge(connect(kept.settings), kept.settings, ["gone"])
    assert found == Counts(
        sent=1, results=1, entries=1, dead_letters=1, messages=1 + 4 * 3 + 1
    )
    assert all(Path(place).is_file() for place in places(kept, WORDS))
    kept.raw.bgrewriteaof()
    wait_until(lambda: rewritten(kept), "the append-only file is rewritten")
    kept.raw.save()
    assert places(kept, WORDS) == set()
    assert len(places(kept, OTHERS)) > len(full)  # the snapshot holds the text, too


def messages(kept: Kept) -> list[Any]:
    """Return the arguments of all messages in order."""
    found = [
        message
        for name in queue_lists("feedmill")
        for message in kept.raw.lrange(name, 0, -1)
    ]
    found += [
        kept.raw.hget(TRANSPORT_KEYS["reserved_key"], tag)
        for tag in sorted(kept.raw.hkeys(TRANSPORT_KEYS["reserved_key"]))
    ]
    return [body_of(message) for message in found]


def test_purged_messages_keep_their_place_and_other_posts(kept: Kept) -> None:
    fill(kept)
    before = json.dumps(messages(kept))
    purge(connect(kept.settings), kept.settings, ["gone"])
    for shape in (
        post("gone", WORDS).model_dump(),
        post("gone", WORDS).model_dump(mode="json", exclude_defaults=True),
    ):
        before = before.replace(json.dumps(shape), '{"id": "gone"}')
    assert json.dumps(messages(kept)) == before
    # The rewritten message stays readable for workers, and its headers hold none of the text.
    for message in kept.raw.lrange("feedmill", 0, -1):
        assert WORDS not in str(json.loads(message)["headers"])
    assert purge(connect(kept.settings), kept.settings, ["gone"])["messages"] == 0


def test_purged_compressed_messages_stay_compressed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MIN_COMPRESSED_CHARACTERS", 0)
    posts = [post("gone", WORDS * 9), post("kept", OTHERS * 9)]
    publish(make_app(kept.settings), [posts], ClassifyOptions())
    assert purge(connect(kept.settings), kept.settings, ["gone"])["messages"] == 1
    (message,) = kept.raw.lrange("feedmill", 0, -1)
    assert json.loads(message)["headers"]["compression"] == "application/x-gzip"
    sent = posts[1].model_dump(mode="json", exclude_defaults=True)
    assert body_of(message)[1]["posts"] == [{"id": "gone"}, sent]


UNDECODABLE = [
    b"", b"no message", b"\xff", b"[]", b"{}", b'{"body": 7}', b'{"body": "not base64"}',
    b'{"body": "e30="}',
    b"[" * 100_000,
    json.dumps({"body": b64encode(b"[" * 100_000).decode(), "headers": {}}).encode(),
    json.dumps({"body": "eJw=", "headers": {"compression": "application/x-gzip"}}).encode(),
]  # fmt: skip


def test_purge_leaves_undecodable_messages_unchanged(kept: Kept) -> None:
    kept.raw.rpush("feedmill", *UNDECODABLE)
    held = {
        f"{number} feedmill".encode(): element
        for number, element in enumerate(UNDECODABLE)
    }
    kept.raw.hset(TRANSPORT_KEYS["reserved_key"], mapping=held)
    assert purge(connect(kept.settings), kept.settings, ["gone"])["messages"] == 0
    assert kept.raw.lrange("feedmill", 0, -1) == UNDECODABLE
    assert kept.raw.hgetall(TRANSPORT_KEYS["reserved_key"]) == held


def test_purge_finds_ids_of_any_type_in_messages(kept: Kept) -> None:
    odd = {7: "7", 1.5: "1.5", " odd \ud800 ": "odd ?", '"q" é': '"q" é'}
    for post_id, asked in odd.items():
        with make_app(kept.settings) as app:
            posts = [{"id": post_id, "body": WORDS}, {"id": "x", "body": OTHERS}]
            app.send_task(CLASSIFY_TASK, kwargs={"posts": posts})
        assert purge(connect(kept.settings), kept.settings, [asked])["messages"] == 1
        assert messages(kept)[0][1]["posts"] == [
            {"id": post_id},
            {"id": "x", "body": OTHERS},
        ]


def test_purges_messages_with_a_plain_text_body(kept: Kept) -> None:
    with make_app(kept.settings) as app:
        app.send_task(
            CLASSIFY_TASK,
            kwargs={
                "posts": [{"id": "gone", "body": WORDS}, {"id": "x", "body": OTHERS}]
            },
        )
    message = json.loads(kept.raw.rpop("feedmill"))
    del message["properties"]["body_encoding"]
    kept.raw.lpush(
        "feedmill", json.dumps(message | {"body": b64decode(message["body"]).decode()})
    )
    assert purge(connect(kept.settings), kept.settings, ["gone"])["messages"] == 1
    (left,) = kept.raw.lrange("feedmill", 0, -1)
    assert WORDS.encode() not in left
    assert json.loads(json.loads(left)["body"])[1]["posts"] == [
        {"id": "gone"},
        {"id": "x", "body": OTHERS},
    ]


@pytest.mark.parametrize("positional", [False, True])
def test_purge_removes_unknown_fields_of_a_post(kept: Kept, positional: bool) -> None:
    posts = [{"id": "gone", "unknown": WORDS}, {"id": "x", "unknown": OTHERS}]
    with make_app(kept.settings) as app:
        app.send_task(
            CLASSIFY_TASK, *([[posts]] if positional else [[], {"posts": posts}])
        )
    assert purge(connect(kept.settings), kept.settings, ["gone"])["messages"] == 1
    ((args, kwargs, _),) = messages(kept)
    assert (args[0] if positional else kwargs["posts"]) == [{"id": "gone"}, posts[1]]


def test_purge_leaves_messages_of_other_tasks_unchanged(kept: Kept) -> None:
    with make_app(kept.settings) as app:
        app.send_task("own.add", [[{"id": "gone", "amount": 5}]])
    assert purge(connect(kept.settings), kept.settings, ["gone"])["messages"] == 0


def test_purges_a_message_that_moves_during_the_purge(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message moves from the list to a worker between reading and rewriting, and then back."""
    publish(make_app(kept.settings), [[post("gone", WORDS)]], ClassifyOptions())
    redis = connect(kept.settings)
    without, steps = purging._without, ["taken", "back"]

    def moving(message: bytes, posts: Any) -> Any:
        with suppress(IndexError):
            if steps.pop(0) == "taken":
                kept.raw.hset(
                    TRANSPORT_KEYS["reserved_key"],
                    "tag feedmill",
                    kept.raw.rpop("feedmill"),
                )
            else:
                kept.raw.rpush(
                    "feedmill",
                    kept.raw.hget(TRANSPORT_KEYS["reserved_key"], "tag feedmill"),
                )
                kept.raw.hdel(TRANSPORT_KEYS["reserved_key"], "tag feedmill")
        return without(message, posts)

    monkeypatch.setattr(purging, "_without", moving)
    assert purge(redis, kept.settings, ["gone"])["messages"] == 1
    assert steps == []
    assert messages(kept)[0][1]["posts"] == [{"id": "gone"}]
