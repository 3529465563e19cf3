"""Messages that leave a queue into which others send without a pause."""

import json
import time
from collections.abc import Callable

import pytest

from feedmill.monitoring.departures import MAX_CLOCK_DIFFERENCE_S, Departures
from feedmill.shared.broker import SENT_AT, TRANSPORT_KEYS
from tests.support import RedisServer

QUEUE = "feedmill"
LATER = 2 * MAX_CLOCK_DIFFERENCE_S


def send(redis: RedisServer, sent_at: float | None) -> None:
    """Send a message to the queue. sent_at: None for a sender that does not say."""
    headers = {} if sent_at is None else {SENT_AT: sent_at}
    redis.client.lpush(QUEUE, json.dumps({"headers": headers}))


def hold(redis: RedisServer, index: str, tag: str) -> Callable[[], object]:
    """Store a message under lease or due later; return what ends that."""
    key = TRANSPORT_KEYS[index]
    redis.client.zadd(key, {tag: time.time()})
    return lambda: redis.client.zrem(key, tag)


@pytest.mark.parametrize("index", ["reserved_index_key", "delayed_index_key"])
def test_later_messages_do_not_count(redis: RedisServer, index: str) -> None:
    now = time.time()
    send(redis, now)
    send(redis, now + LATER)
    departures = Departures(redis.client, QUEUE)
    assert not departures.are_complete()
    redis.client.rpop(QUEUE)
    end = hold(redis, index, f"1-60-1-0001 {QUEUE}")
    assert not departures.are_complete()
    hold(redis, index, f"1-60-2-0001 {QUEUE}")
    hold(redis, index, "1-60-2-0002 other")
    assert not departures.are_complete()
    end()
    assert departures.are_complete()


def test_a_message_that_returns_counts(redis: RedisServer) -> None:
    now = time.time()
    departures = Departures(redis.client, QUEUE)
    end = hold(redis, "reserved_index_key", f"1-60-1-0001 {QUEUE}")
    assert not departures.are_complete()
    end()
    send(redis, now)
    assert not departures.are_complete()
    redis.client.rpop(QUEUE)
    assert departures.are_complete()


def test_a_message_without_a_time_of_sending_counts(redis: RedisServer) -> None:
    departures = Departures(redis.client, QUEUE)
    send(redis, None)
    assert not departures.are_complete()
    redis.client.delete(QUEUE)
    assert departures.are_complete()
