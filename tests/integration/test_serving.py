"""shared/model_routing.py on a real Redis: models announced by workers, and the choice of a queue by model."""

import json
import time

import pytest

from feedmill.shared.errors import UserError
from feedmill.shared.keys import MODELS, WORKERS, find
from feedmill.shared.model_routing import (
    ANNOUNCE_INTERVAL_S,
    EXPECTED_S,
    QUEUE_TTL_S,
    announce,
    check_queue,
    expected_workers,
    known_queues,
    queue_for_model,
    queues,
    register,
)
from feedmill.shared.settings import Settings
from tests.support import RedisServer

pytestmark = pytest.mark.each_redis

BART, TUNED = "facebook/bart-large-mnli", "/srv/models/bart-large-mnli"


def said(redis: RedisServer, queue: str, model: str, ago: float) -> None:
    """Record that a worker of the queue announced the model `ago` seconds ago."""
    redis.client.hset(MODELS, queue, json.dumps({"model": model, "seen": time.time() - ago}))


def test_finds_a_queue_by_its_models_full_or_short_name(redis: RedisServer) -> None:
    announce(redis.client, "feedmill-bart", BART)
    announce(redis.client, "feedmill", "sentence-transformers/all-MiniLM-L6-v2")
    assert queue_for_model(redis.client, BART) == queue_for_model(redis.client, "bart-large-mnli") == "feedmill-bart"
    assert known_queues(redis.client)["feedmill-bart"].model == BART
    key = find(MODELS)
    assert key
    assert key.pattern == MODELS


@pytest.mark.parametrize("name", ["bart", "facebook", "", "x\x1b[2J"])
def test_rejects_unknown_models_and_lists_the_known_ones(redis: RedisServer, name: str) -> None:
    announce(redis.client, "feedmill-bart", BART)
    announce(redis.client, "feedmill", "other\x1b[2J")
    with pytest.raises(UserError) as refused:
        queue_for_model(redis.client, name)
    assert f"other\\x1b[2J (queue feedmill), {BART} (queue feedmill-bart)" in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_rejects_ambiguous_models_and_lists_their_queues(redis: RedisServer) -> None:
    announce(redis.client, "one", BART)
    announce(redis.client, "two", TUNED)
    with pytest.raises(UserError, match="--queue") as refused:
        queue_for_model(redis.client, "bart-large-mnli")
    assert f"{BART} (queue one), {TUNED} (queue two)" in str(refused.value)
    assert queue_for_model(redis.client, BART) == "one"
    announce(redis.client, "three", BART)
    with pytest.raises(UserError, match=r"\(queue one\).*\(queue three\)|\(queue three\).*\(queue one\)"):
        queue_for_model(redis.client, BART)


def test_rejects_queues_never_served_except_the_default(redis: RedisServer) -> None:
    check_queue(redis.client, "feedmill")
    announce(redis.client, "feedmill-bart", BART)
    check_queue(redis.client, "feedmill-bart")
    with pytest.raises(UserError, match=r"'feedmill-brat'.* FEEDMILL_QUEUE .*feedmill-bart\)"):
        check_queue(redis.client, "feedmill-brat")


def test_forgets_stale_queues_unless_messages_wait_there(redis: RedisServer) -> None:
    for name in ("stale", "full"):
        said(redis, name, BART, QUEUE_TTL_S + 60)
    said(redis, "idle", BART, QUEUE_TTL_S - 60)
    redis.client.lpush("full\x06\x163", "a message")
    announce(redis.client, "feedmill", "m")
    assert set(known_queues(redis.client)) == {"feedmill", "full", "idle"}


def test_announce_detects_another_model_on_the_same_queue(redis: RedisServer) -> None:
    assert announce(redis.client, "feedmill", "first") is None
    assert announce(redis.client, "feedmill", "first") is None
    assert announce(redis.client, "feedmill", "second") == "first"
    assert announce(redis.client, "feedmill", "second") is None
    said(redis, "feedmill", "first", 3 * ANNOUNCE_INTERVAL_S)
    assert announce(redis.client, "feedmill", "second") is None, "the second model has replaced the first"


@pytest.mark.parametrize(
    "text", ["notjson", "nan", "[" * 100_000, "1" * 400, '"text"', "null", "[]", "{}", '{"model": 1, "seen": 1}',
             '{"model": "m", "seen": "soon"}', '{"model": "m"}', "", b"\xff",
             '{"seen": 1}'],
    ids=range(14),
)  # fmt: skip
def test_skips_invalid_announcements_and_registrations(redis: RedisServer, text: str | bytes) -> None:
    for key in (MODELS, WORKERS):
        redis.client.hset(key, "odd", text)
        redis.client.hset(key, b"\xff", "1")
    announce(redis.client, "q", "m")
    register(redis.client, "one@here")
    assert list(known_queues(redis.client)) == ["q"]
    assert list(expected_workers(redis.client)) == ["one@here"]
    assert queues(redis.client, Settings()) == ["feedmill", "q"]


@pytest.mark.parametrize("ahead", [7200, -7200])
def test_registers_by_the_time_of_redis(redis: RedisServer, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    register(redis.client, "one@here")
    now = time.time()
    with monkeypatch.context() as skewed:
        skewed.setattr("feedmill.shared.model_routing.time.time", lambda: now + ahead)
        register(redis.client, "two@there")
        assert list(expected_workers(redis.client)) == ["one@here", "two@there"]
    assert all(age < EXPECTED_S / 2 for age in expected_workers(redis.client).values())
    register(redis.client, "one@here")
    assert list(expected_workers(redis.client)) == ["one@here", "two@there"]
