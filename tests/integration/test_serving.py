"""shared/serving.py on a real Redis: what workers say they serve, and what senders choose by."""

import json
import re
import subprocess
import sys
import time

import pytest

from shared import serving
from shared.broker import connect
from shared.errors import UserError
from shared.keys import MODELS, WORKERS, find
from shared.serving import (
    EXPECTED_S,
    KEPT,
    MOST,
    PERIOD,
    announce,
    check_queue,
    expected,
    known,
    queue_of,
    queues,
    register,
)
from shared.settings import Settings
from tests.support import RedisServer

pytestmark = pytest.mark.each_redis

#: A worker that registers, and waits to be killed.
REGISTERS = """
import sys
from redis import Redis
from shared.serving import register
register(Redis.from_url(sys.argv[1], decode_responses=True), sys.argv[2])
print("registered", flush=True)
sys.stdin.read()
"""
BART, TUNED = "facebook/bart-large-mnli", "/srv/models/bart-large-mnli"


def said(redis: RedisServer, queue: str, model: str, ago: float) -> None:
    """A worker has said so that many seconds ago."""
    redis.client.hset(MODELS, queue, json.dumps({"model": model, "seen": time.time() - ago}))


def test_a_queue_is_found_by_its_models_name_or_the_last_part_of_it(redis: RedisServer) -> None:
    announce(redis.client, "feedmill-bart", BART)
    announce(redis.client, "feedmill", "sentence-transformers/all-MiniLM-L6-v2")
    assert queue_of(redis.client, BART) == queue_of(redis.client, "bart-large-mnli") == "feedmill-bart"
    assert known(redis.client)["feedmill-bart"].model == BART
    key = find(MODELS)
    assert key
    assert key.pattern == MODELS


@pytest.mark.parametrize("name", ["bart", "facebook", "", "x\x1b[2J"])
def test_an_unknown_name_is_refused_with_those_that_are_known(redis: RedisServer, name: str) -> None:
    announce(redis.client, "feedmill-bart", BART)
    announce(redis.client, "feedmill", "other\x1b[2J")
    with pytest.raises(UserError, match=re.escape(repr(name))) as refused:
        queue_of(redis.client, name)
    assert f"other\\x1b[2J (queue feedmill), {BART} (queue feedmill-bart)." in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_where_nothing_is_known_that_is_said(redis: RedisServer) -> None:
    with pytest.raises(UserError, match="No queue is known yet"):
        queue_of(redis.client, BART)


def test_what_may_mean_several_queues_is_refused_with_them(redis: RedisServer) -> None:
    announce(redis.client, "one", BART)
    announce(redis.client, "two", TUNED)
    with pytest.raises(UserError, match="--queue") as refused:
        queue_of(redis.client, "bart-large-mnli")
    assert str(refused.value).endswith(f"{BART} (queue one), {TUNED} (queue two).")
    assert queue_of(redis.client, BART) == "one"
    announce(redis.client, "three", BART)
    with pytest.raises(UserError, match="--queue"):
        queue_of(redis.client, BART)


def test_a_queue_that_nobody_ever_served_is_refused_but_the_default_one(redis: RedisServer) -> None:
    check_queue(redis.client, "feedmill")
    announce(redis.client, "feedmill-bart", BART)
    check_queue(redis.client, "feedmill-bart")
    with pytest.raises(UserError, match=r"'feedmill-brat' .* FEEDMILL_QUEUE .*feedmill-bart\)"):
        check_queue(redis.client, "feedmill-brat")


def test_stale_queues_are_forgotten_unless_something_waits_there(redis: RedisServer) -> None:
    for name in ("stale", "full"):
        said(redis, name, BART, KEPT + 60)
    said(redis, "idle", BART, KEPT - 60)
    redis.client.lpush("full\x06\x163", "a message")
    announce(redis.client, "feedmill", "m")
    assert set(known(redis.client)) == {"feedmill", "full", "idle"}


def test_so_many_queues_are_known_and_no_more(redis: RedisServer) -> None:
    for number in range(MOST + 5):
        said(redis, f"q{number}", BART, number)
    announce(redis.client, "feedmill", "m")
    assert set(known(redis.client)) == {"feedmill", *(f"q{number}" for number in range(MOST - 1))}


def test_another_model_on_the_same_queue_is_noticed_moments_later(redis: RedisServer) -> None:
    assert announce(redis.client, "feedmill", "first") is None
    assert announce(redis.client, "feedmill", "first") is None
    assert announce(redis.client, "feedmill", "second") == "first"
    assert announce(redis.client, "feedmill", "second") is None
    said(redis, "feedmill", "first", 3 * PERIOD)
    assert announce(redis.client, "feedmill", "second") is None, "the one has taken over from the other"


def test_a_process_knows_its_own_queue_in_any_case(settings: Settings) -> None:
    redis = connect(settings)
    assert queues(redis, settings) == ["feedmill"]
    announce(redis, "b", "m")
    assert queues(redis, settings.model_copy(update={"queue": "a"})) == ["a", "b"]


def test_what_a_later_version_says_besides_is_no_matter(redis: RedisServer) -> None:
    redis.client.hset(MODELS, "q", '{"model": "m", "seen": 1, "device": "cuda"}')
    assert serving.known(redis.client) == {"q": serving.Served("m", 1)}


@pytest.mark.parametrize(
    "text", ["notjson", "nan", "[" * 100_000, "1" * 400, '"text"', "null", "[]", "{}", '{"model": 1, "seen": 1}',
             '{"model": "m", "seen": "soon"}', '{"model": "m"}', "", b"\xff",
             '{"seen": 1}', '{"seen": 1, "place": "", "pid": "x"}'],
    ids=range(15),
)  # fmt: skip
def test_skips_fields_that_no_worker_wrote(redis: RedisServer, text: str | bytes) -> None:
    for key in (MODELS, WORKERS):
        redis.client.hset(key, "odd", text)
        redis.client.hset(key, b"\xff", "1")
    announce(redis.client, "q", "m")
    register(redis.client, "one@here")
    assert list(known(redis.client)) == ["q"]
    assert list(expected(redis.client)) == ["one@here"]
    assert queues(redis.client, Settings()) == ["feedmill", "q"]


@pytest.mark.parametrize("ahead", [7200, -7200])
def test_registers_by_the_time_of_redis(redis: RedisServer, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    register(redis.client, "one@here")
    now = time.time()
    with monkeypatch.context() as skewed:
        skewed.setattr("shared.serving.time.time", lambda: now + ahead)
        register(redis.client, "two@there")
        assert list(expected(redis.client)) == ["one@here", "two@there"]
    assert all(age < EXPECTED_S / 2 for age in expected(redis.client).values())
    register(redis.client, "one@here")
    assert list(expected(redis.client)) == ["one@here", "two@there"]


def test_registering_removes_workers_whose_process_is_gone(redis: RedisServer) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", REGISTERS, redis.url, "killed@here"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert killed.stdout
    assert killed.stdout.readline() == b"registered\n"
    register(redis.client, "one@here")
    assert list(expected(redis.client)) == ["killed@here", "one@here"]
    elsewhere = json.loads(str(redis.client.hget(WORKERS, "killed@here"))) | {"place": "another boot/1"}
    redis.client.hset(WORKERS, "killed@elsewhere", json.dumps(elsewhere))
    killed.kill()
    killed.communicate()
    assert "killed@here" in expected(redis.client), "health names it until another worker registers"
    register(redis.client, "one@here")
    assert list(expected(redis.client)) == ["killed@elsewhere", "one@here"]
