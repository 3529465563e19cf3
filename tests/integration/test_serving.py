"""shared/model_routing.py on a real Redis: models announced by workers, and registered workers."""

import json
import time

import pytest

from feedmill.shared import model_routing
from feedmill.shared.errors import UserError
from feedmill.shared.keys import MODELS, WORKERS
from feedmill.shared.settings import Settings
from tests.support import RedisServer, find

pytestmark = pytest.mark.each_redis

BART = "facebook/bart-large-mnli"


def said(redis: RedisServer, queue: str, model: str, ago: float) -> None:
    """Record that a worker of the queue announced the model `ago` seconds ago."""
    redis.client.hset(
        MODELS, queue, json.dumps({"model": model, "seen": time.time() - ago})
    )


def test_rejects_queues_never_served_except_the_default(redis: RedisServer) -> None:
    model_routing.check_queue(redis.client, "feedmill")
    model_routing.announce(redis.client, "feedmill-bart", BART)
    model_routing.announce(redis.client, "odd", "\x1b[2J")
    model_routing.check_queue(redis.client, "feedmill-bart")
    with pytest.raises(
        UserError,
        match=r"'feedmill-brat'.* FEEDMILL_QUEUE .*feedmill-bart .*odd \(model \\x1b",
    ) as refused:
        model_routing.check_queue(redis.client, "feedmill-brat")
    assert "\x1b" not in str(refused.value)
    assert find(MODELS)


def test_forgets_stale_queues_unless_messages_wait_there(redis: RedisServer) -> None:
    for name in ("stale", "full"):
        said(redis, name, BART, model_routing.QUEUE_TTL_S + 60)
    said(redis, "idle", BART, model_routing.QUEUE_TTL_S - 60)
    redis.client.lpush("full\x06\x163", "a message")
    model_routing.announce(redis.client, "feedmill", "m")
    assert set(model_routing.known_queues(redis.client)) == {"feedmill", "full", "idle"}


def test_announce_detects_another_model_on_the_same_queue(redis: RedisServer) -> None:
    assert model_routing.announce(redis.client, "feedmill", "first") is None
    assert model_routing.announce(redis.client, "feedmill", "first") is None
    assert model_routing.announce(redis.client, "feedmill", "second") == "first"
    assert model_routing.announce(redis.client, "feedmill", "second") is None
    said(redis, "feedmill", "first", 3 * model_routing.ANNOUNCE_INTERVAL_S)
    assert model_routing.announce(redis.client, "feedmill", "second") is None, (
        "the second model has replaced the first"
    )


@pytest.mark.parametrize(
    "text", ["notjson", "nan", "[" * 100_000, "1" * 400, '"text"', "null", "[]", "{}",
    '{"model": 1, "seen": 1}',
             '{"model": "m", "seen": "soon"}', '{"model": "m"}', "", b"\xff",
             '{"seen": 1}'],
    ids=range(14),
)  # fmt: skip
def test_skips_invalid_announcements_and_registrations(
    redis: RedisServer, text: str | bytes
) -> None:
    for key in (MODELS, WORKERS):
        redis.client.hset(key, "odd", text)
        redis.client.hset(key, b"\xff", "1")
    model_routing.announce(redis.client, "q", "m")
    model_routing.register(redis.client, "one@here")
    assert list(model_routing.known_queues(redis.client)) == ["q"]
    assert list(model_routing.expected_workers(redis.client)) == ["one@here"]
    assert model_routing.queues(redis.client, Settings()) == ["feedmill", "q"]


@pytest.mark.parametrize("ahead", [7200, -7200])
def test_registers_by_the_time_of_redis(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    model_routing.register(redis.client, "one@here")
    now = time.time()
    monkeypatch.setattr("feedmill.shared.model_routing.time.time", lambda: now + ahead)
    model_routing.register(redis.client, "two@there")
    assert list(model_routing.expected_workers(redis.client)) == [
        "one@here",
        "two@there",
    ]
    assert all(
        age < model_routing.EXPECTED_S / 2
        for age in model_routing.expected_workers(redis.client).values()
    )
