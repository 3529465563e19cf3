"""workers/transport/delays.py and its functions in Redis: messages that are due later."""

import time
from typing import Any

import pytest
from redis.exceptions import ResponseError

from feedmill.shared.broker import PRIORITY_MARK, TRANSPORT_KEYS
from feedmill.shared.redis_errors import is_full
from feedmill.shared.scripts import call
from feedmill.workers.transport.delays import Delays
from tests import support
from tests.support import RedisServer, wait_until

pytestmark = pytest.mark.each_redis

KEYS = tuple(TRANSPORT_KEYS.values())
RESERVED, RESERVED_INDEX, DELAYED, DELAYED_INDEX = KEYS
LATER = 3600.0


@pytest.fixture
def delays(redis: RedisServer) -> Delays:
    return Delays(redis.client, KEYS, interval_s=60.0)


def reserve(redis: RedisServer, *messages: str, queue: str = "feedmill") -> list[str]:
    """Queue messages and reserve them, as a worker does.

    Return their tags, in the order of the messages.
    """
    for message in messages:
        redis.client.lpush(queue, message)
    before = set(redis.client.hkeys(RESERVED))
    support.reserve(redis.client, [queue], f"aa-60-{len(before):012d}")
    tags: Any = sorted(set(redis.client.hkeys(RESERVED)) - before)
    return list(tags)


def make_due(redis: RedisServer, *tags: str) -> None:
    """Make delayed messages due, in this order."""
    redis.client.zadd(DELAYED_INDEX, {tag: place for place, tag in enumerate(tags, 1)})


def test_delays_a_message_until_it_is_due(redis: RedisServer, delays: Delays) -> None:
    (tag,) = reserve(redis, "later")
    delays.add(tag, LATER)
    delays.flush()
    assert redis.client.hgetall(DELAYED) == {tag: "later"}
    assert not redis.client.exists(RESERVED, RESERVED_INDEX)
    assert delays.return_due() is False
    assert redis.client.llen("feedmill") == 0
    due_at: Any = redis.client.zscore(DELAYED_INDEX, tag)
    now, _ = redis.client.time()
    assert now + LATER - 60 < due_at <= now + LATER + 1


def test_returns_due_messages_to_be_delivered_next_in_order_of_time(
    redis: RedisServer, delays: Delays
) -> None:
    tags = reserve(redis, "first", "second", "third")
    for tag in tags:
        delays.add(tag, LATER)
    delays.flush()
    redis.client.lpush("feedmill", "waits")
    make_due(redis, tags[0], tags[1])
    delays.add("nothing", 0.0)  # looks at once
    delays.return_due()
    waiting = [redis.client.rpop("feedmill") for _ in range(3)]
    assert waiting == ["first", "second", "waits"]
    assert redis.client.hvals(DELAYED) == ["third"]


def test_returns_a_message_to_the_list_of_its_priority(
    redis: RedisServer, delays: Delays
) -> None:
    urgent = f"feedmill{PRIORITY_MARK}6"
    (tag,) = reserve(redis, "later", queue=urgent)
    delays.add(tag, 0.0)
    delays.flush()
    delays.return_due()
    assert redis.client.lrange(urgent, 0, -1) == ["later"]


def test_delaying_a_message_twice_or_after_its_end_has_no_effect(
    redis: RedisServer, delays: Delays
) -> None:
    kept, ended = reserve(redis, "kept", "ended")
    redis.client.hdel(RESERVED, ended)
    for _ in range(2):
        delays.add(kept, LATER)
        delays.add(ended, LATER)
        delays.flush()
    assert redis.client.hvals(DELAYED) == ["kept"]
    assert redis.client.zcard(DELAYED_INDEX) == 1


def test_returns_many_due_messages_in_bounded_calls(
    redis: RedisServer, delays: Delays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedmill.workers.transport.delays.DUE_PER_CALL", 10)
    tags = reserve(redis, *(f"message {number}" for number in range(64)))
    for tag in tags:
        delays.add(tag, 0.0)
    delays.flush()
    returned = [redis.client.llen("feedmill")]
    while True:
        more = delays.return_due()
        returned.append(redis.client.llen("feedmill"))
        if not more:
            break
    assert returned == [0, 10, 20, 30, 40, 50, 60, 64]


def test_a_list_that_is_no_list_delays_no_other_message(
    redis: RedisServer, delays: Delays
) -> None:
    (blocked,) = reserve(redis, "blocked", queue="taken")
    (free,) = reserve(redis, "free")
    redis.client.set("taken", "a string")
    for tag in (blocked, free):
        delays.add(tag, 0.0)
    delays.flush()
    delays.return_due()
    assert redis.client.lrange("feedmill", 0, -1) == ["free"]
    assert redis.client.hgetall(DELAYED) == {blocked: "blocked"}
    redis.client.delete("taken")
    make_due(redis, blocked)
    delays.add("nothing", 0.0)
    delays.return_due()
    assert redis.client.lrange("taken", 0, -1) == ["blocked"]


def test_delays_and_returns_messages_at_the_memory_limit(
    redis: RedisServer, delays: Delays
) -> None:
    (tag,) = reserve(redis, "later")
    redis.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(ResponseError) as refused:
            redis.client.set("another", "value")
        assert is_full(refused.value)
        delays.add(tag, 0.0)
        delays.flush()
        delays.return_due()
    finally:
        redis.client.config_set("maxmemory", 0)
    assert redis.client.lrange("feedmill", 0, -1) == ["later"]


def test_a_failed_delay_is_sent_again(
    redis: RedisServer, delays: Delays, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tag,) = reserve(redis, "later")
    delays.add(tag, LATER)
    with monkeypatch.context() as away:
        away.setattr("feedmill.shared.scripts.call", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            delays.flush()
    assert redis.client.hvals(RESERVED) == ["later"]
    delays.flush()
    assert redis.client.hvals(DELAYED) == ["later"]


def test_looks_when_the_next_message_is_due(redis: RedisServer, delays: Delays) -> None:
    (tag,) = reserve(redis, "soon")
    delays.return_due()
    assert delays.seconds_to_look() > 30
    delays.add(tag, 0.2)
    delays.flush()
    assert delays.seconds_to_look() <= 0.2
    wait_until(
        lambda: delays.return_due() or redis.client.llen("feedmill"),
        "the message is due",
        60,
    )
    due_since: Any = redis.client.hlen(DELAYED)
    assert due_since == 0


def test_the_time_of_a_delay_is_counted_from_its_request(
    redis: RedisServer, delays: Delays
) -> None:
    (tag,) = reserve(redis, "soon")
    delays.add(tag, 0.05)
    deadline = time.monotonic() + 0.05
    wait_until(
        lambda: time.monotonic() > deadline, "the delay is over before it is sent"
    )
    delays.flush()
    call(redis.client, "return_due", DELAYED, DELAYED_INDEX, 10, 1000)
    assert redis.client.lrange("feedmill", 0, -1) == ["soon"]
