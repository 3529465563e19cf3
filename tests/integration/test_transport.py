"""The reserving transport: no message is lost or duplicated, and stock Celery clients and workers
interoperate.

Tests marked each_redis run on every redis-server of this machine, or on the one that PYTEST_REDIS
names.
"""

import gc
import hashlib
import importlib
import inspect
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import ContentDisallowed
from redis import Redis, RedisError

from feedmill.shared import encoding
from feedmill.shared.scripts import call
from feedmill.workers.transport import leases, redis_transport
from feedmill.workers.transport.leases import (
    WHOLE,
    LeasedMessage,
    Leases,
    count_delivery,
    deaths_in,
)
from tests.support import RedisServer, reserve, wait_until

pytestmark = pytest.mark.each_redis

OURS = "feedmill.workers.transport.redis_transport:Transport"
STOCK = "redis"
QUEUE = Queue("posts", Exchange("posts"), routing_key="posts")
KEYS = ("reserved", "reserved_index")
LISTS = ("posts", "posts\x06\x163", "posts\x06\x166", "posts\x06\x169")
#: Leases that expire soon, and are swept often.
SHORT = {"visibility_timeout": 0.6, "unacked_restore_interval": 0.1}
#: Leases that outlast pauses of a busy machine, and are swept often.
STEADY = {"visibility_timeout": 6, "unacked_restore_interval": 0.1}


class Consuming:
    """A consumer of one or more queues that collects messages without acknowledging them."""

    def __init__(
        self, connection: Connection, queues: list[Queue], prefetch: int, no_ack: bool
    ) -> None:
        self.connection = connection
        channel: Any = connection.channel()
        channel.basic_qos(0, prefetch, False)
        self.channel = channel
        self.got: list[LeasedMessage] = []
        self.claiming = False
        #: Messages that may not be handled yet.
        self.refused: list[LeasedMessage] = []
        take: Any = self._take
        self.consumer = Consumer(
            self.channel,
            queues,
            on_message=take,
            accept=["json"],
            no_ack=no_ack,
            auto_declare=True,
        )
        self.consumer.consume()

    def _take(self, message: LeasedMessage) -> None:
        if self.claiming and not message.claim():
            self.refused.append(message)
        else:
            self.got.append(message)

    def until(self, count: int) -> list[LeasedMessage]:
        """Drain events until `count` messages have been received in total."""
        wait_until(
            lambda: self.drain() and len(self.got) >= count,
            (f"{count} messages are received"),
        )
        return self.got

    def drain(self) -> bool:
        refused, self.refused = self.refused, []
        for message in refused:
            self._take(message)
        with suppress(TimeoutError):
            self.connection.drain_events(timeout=0.05)
        return True

    def waits(self) -> bool:
        return self.drain() and self.channel._armed_at is not None

    def acknowledge(self) -> None:
        while self.got:
            self.got.pop(0).ack()


@contextmanager
def consuming(
    server: RedisServer,
    *queues: Queue,
    through: str = OURS,
    prefetch: int = 64,
    no_ack: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Consuming]:
    with Connection(
        server.url, transport=through, transport_options=dict(options or {})
    ) as connection:
        yield Consuming(connection, list(queues) or [QUEUE], prefetch, no_ack)


def publish(
    server: RedisServer,
    *bodies: Any,
    through: str = STOCK,
    queue: Queue = QUEUE,
    priority: int = 0,
) -> None:
    with Connection(server.url, transport=through) as connection:
        producer = Producer(connection.channel())
        for body in bodies:
            producer.publish(
                body,
                exchange=queue.exchange,
                routing_key=queue.routing_key,
                declare=[queue],
                priority=priority,
                serializer="json",
            )


def bodies(messages: list[LeasedMessage]) -> list[Any]:
    return [message.payload for message in messages]


def held(server: RedisServer) -> tuple[int, int]:
    return server.client.hlen("reserved"), server.client.zcard("reserved_index")


def ends(server: RedisServer, tag: str) -> float:
    """Return the time at which a lease expires; 0.0 if there is no such lease."""
    return server.client.zscore("reserved_index", tag) or 0.0


def waiting(server: RedisServer) -> int:
    return sum(server.client.llen(name) for name in LISTS)


def reserve_and_die(server: RedisServer, count: int = 64, seconds: float = 0.05) -> int:
    """Reserve messages, like a worker that is killed before it acknowledges any.

    Return their number.
    """
    return reserve(
        server.client, LISTS, f"{uuid4().hex}-000000000000", KEYS, seconds, count
    )


# Reserve, hold, acknowledge.


def test_reserves_stock_clients_messages_by_priority(server: RedisServer) -> None:
    for priority in (9, 0, 6, 3):
        publish(server, f"{priority}a", f"{priority}b", priority=priority)
    with consuming(server) as consumer:
        got = consumer.until(8)
        assert bodies(got) == ["0a", "0b", "3a", "3b", "6a", "6b", "9a", "9b"]
        assert held(server) == (8, 8)
        assert waiting(server) == 0
        assert got[0].delivery_info["routing_key"] == "posts"
        consumer.acknowledge()
        assert held(server) == (0, 0)


def test_every_queue_and_priority_wakes_a_waiting_consumer(server: RedisServer) -> None:
    other = Queue("other", Exchange("other"), routing_key="other")
    with consuming(server, QUEUE, other) as consumer:
        wait_until(consumer.waits, "the consumer is waiting")
        # no polling: only a notification from Redis can wake it
        consumer.channel._armed_at += 10**6
        for number, (queue, priority) in enumerate(
            [(QUEUE, 9), (other, 0), (QUEUE, 0), (other, 6)], 1
        ):
            publish(server, number, queue=queue, priority=priority)
            assert len(consumer.until(number)) == number
            wait_until(consumer.waits, "the consumer is waiting again")
            consumer.channel._armed_at += 10**6
        assert bodies(consumer.got) == [1, 2, 3, 4]
        consumer.acknowledge()


def test_polls_when_client_tracking_is_not_permitted(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.client.acl_setuser(
        "plain",
        enabled=True,
        nopass=True,
        keys=["*"],
        channels=["*"],
        commands=["+@all", "-client"],
    )
    monkeypatch.setattr(redis, "url", redis.url.replace("redis://:", "redis://plain:"))
    with consuming(redis) as consumer:
        wait_until(consumer.waits, "the consumer is waiting")
        assert not consumer.channel._tracking
        publish(redis, 1)
        assert bodies(consumer.until(1)) == [1]
        consumer.acknowledge()


def test_reserves_at_most_the_prefetch_count(redis: RedisServer) -> None:
    publish(redis, *range(10))
    with consuming(redis, prefetch=4) as consumer:
        consumer.until(4)
        consumer.drain()
        assert (len(consumer.got), held(redis), waiting(redis)) == (4, (4, 4), 6)
        for message in consumer.got:
            message.ack()
        assert bodies(consumer.until(8)) == [*range(8)]


def test_reserves_no_more_bytes_than_the_consumer_has_room_for(
    redis: RedisServer,
) -> None:
    publish(redis, *("x" * 1000 for _ in range(10)))
    with consuming(redis) as consumer:
        consumer.channel.consumer_room = lambda: (64, 1500)
        assert len(consumer.until(2)) == 2
        assert waiting(redis) == 8
        consumer.acknowledge()


def test_basic_get_needs_no_acknowledgement(redis: RedisServer) -> None:
    publish(redis, 1)
    with Connection(redis.url, transport=OURS) as connection:
        queue = QUEUE(connection.channel())
        with pytest.raises(NotImplementedError):
            queue.get(accept=["json"])
        assert (message := queue.get(no_ack=True, accept=["json"])) is not None
        assert (message.payload, held(redis), queue.get(no_ack=True)) == (
            1,
            (0, 0),
            None,
        )


def test_applies_the_global_key_prefix(redis: RedisServer) -> None:
    options: dict[str, Any] = {"global_keyprefix": "mine:"}
    with Connection(redis.url, transport_options=options) as connection:
        Producer(connection.channel()).publish(
            1,
            exchange=QUEUE.exchange,
            routing_key="posts",
            declare=[QUEUE],
            serializer="json",
        )
    with consuming(redis, options=options) as consumer:
        assert bodies(consumer.until(1)) == [1]
        assert all(str(name).startswith("mine:") for name in redis.client.scan_iter())
        assert redis.client.hlen("mine:reserved") == 1
        consumer.acknowledge()
        assert redis.client.hlen("mine:reserved") == 0


def test_delivers_stand_ins_for_undecodable_messages(redis: RedisServer) -> None:
    properties = '"properties": {"delivery_info": {}, "body_encoding": "base64"}'
    broken = [
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 50_000,
        f'{{"body": "a", {properties}}}'.encode(),
        f'{{"body": [], {properties}}}'.encode(),
        f'{{"body": "", "headers": [], {properties}}}'.encode(),
        f'{{"body": "", "x": {{"__type__": "decimal", "__value__": "x"}}, {properties}}}'.encode(),
    ]
    publish(redis, 1)
    binary = Redis.from_url(redis.url)
    binary.rpush("posts", *broken)
    publish(redis, 2)
    with consuming(redis) as consumer:
        *found, first, last = consumer.until(2 + len(broken))
        assert bodies([first, last]) == [1, 2]
        contents: list[Any] = [message.body for message in found]
        assert contents == broken[::-1]
        for message in found:
            with pytest.raises(ContentDisallowed):
                message.decode()
        assert held(redis) == (len(broken) + 2,) * 2
        consumer.acknowledge()
        assert held(redis) == (0, 0)
    binary.close()


def test_oversized_messages_are_truncated_and_unread(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MAX_MESSAGE", 10_000)
    monkeypatch.setattr(leases, "MAX_UNDECODABLE_BYTES", 100)
    publish(redis, "x" * 10_000)
    publish(redis, 2)
    with consuming(redis) as consumer:
        large: Any
        large, small = consumer.until(2)
        assert (small.payload, len(large.body)) == (2, 100)
        assert "10,000" in large.content_encoding
        assert "xxx" not in large.content_encoding
        consumer.acknowledge()


def test_reserves_no_more_while_held_messages_fill_the_memory_limit(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_transport, "HELD_BYTES", 9000)
    monkeypatch.setattr(redis_transport, "RESERVE_BYTES", 6000)
    publish(redis, *(list(range(1000)) for _ in range(10)))
    with consuming(redis) as consumer:
        consumer.claiming = True
        consumer.until(2)
        consumer.drain()
        assert (len(consumer.got), waiting(redis), held(redis)) == (2, 8, (2, 2))
        consumer.acknowledge()
        consumer.until(2)
        for message in consumer.got:
            message.unclaim()
    assert (waiting(redis), held(redis)) == (8, (0, 0))
    with consuming(redis) as consumer:
        again: list[int] = []
        while len(again) < 8:
            again += [
                message.delivery_info.get("delivery_count", 0)
                for message in consumer.until(1)
            ]
            consumer.acknowledge()
        assert sorted(again) == [0] * 6 + [1] * 2


# Redelivery.


def test_a_dead_workers_messages_return_to_their_place(server: RedisServer) -> None:
    publish(server, "b", "c", "d")
    publish(server, "low", priority=9)
    assert reserve_and_die(server, 2, seconds=3600) == 2
    assert reserve_and_die(server, seconds=3600) == 2
    publish(server, "e")
    # End all leases at once: a later one's messages would be put before those that an earlier one
    # returned.
    tags: Any = server.client.zrange("reserved_index", 0, -1)
    server.client.zadd(
        "reserved_index", {tag: place for place, tag in enumerate(tags, 1)}
    )
    with consuming(server, prefetch=1, options=SHORT) as consumer:
        wait_until(lambda: waiting(server) == 5, "all messages are back in the queue")
        assert not consumer.got
    with consuming(server) as consumer:
        got = consumer.until(5)
        assert bodies(got) == ["b", "c", "d", "e", "low"]
        again = {
            message.payload: message.delivery_info.get("redelivered") for message in got
        }
        assert {name for name, redelivered in again.items() if redelivered} >= {
            "b",
            "c",
            "d",
            "low",
        }
        assert got[1].delivery_info["delivery_count"] == 1
        consumer.acknowledge()


def test_leases_end_soon_after_the_clock_is_set_back(redis: RedisServer) -> None:
    publish(redis, 1)
    (taken,) = reserve_and_die_with_tag(redis, f"{uuid4().hex}-0.6-000000000000", 3600)
    older = f"{uuid4().hex}-7200-000000000000-0001 posts"
    redis.client.hset("reserved", older, "{}")
    redis.client.zadd("reserved_index", {older: redis.client.time()[0] + 3600})
    with consuming(redis, prefetch=1, options=SHORT) as consumer:
        leases = consumer.channel.leases
        wait_until(lambda: leases._contact, "the lease thread has read Redis' clock")
        # the clock before it was set back
        leases._contact = leases._since = leases._contact + 3600
        assert consumer.until(1)[0].delivery_info["redelivered"]
        assert ends(redis, older) > redis.client.time()[0] + 3000, (
            "a lease that was taken for longer is left alone"
        )
        assert not ends(redis, taken)
        consumer.acknowledge()


def reserve_and_die_with_tag(
    server: RedisServer, prefix: str, seconds: float
) -> list[str]:
    reserve(server.client, LISTS, prefix, KEYS, seconds)
    return [str(tag) for tag in server.client.hkeys("reserved")]


def test_an_unclaimed_message_does_not_lapse_while_redis_is_unreachable(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(redis, "postponed", "rejected")
    with consuming(redis, options=SHORT) as consumer:
        postponed, rejected = consumer.until(2)
        with monkeypatch.context() as away:
            away.setattr(Leases, "_restore", Mock(side_effect=RedisError))
            rejected.reject(requeue=True)
            consumer.channel.close()
            assert not postponed.is_held
            assert not rejected.is_held
            time.sleep(2 * SHORT["visibility_timeout"])
            assert held(redis) == (2, 2), "no other worker has taken them"
        wait_until(lambda: held(redis) == (0, 0), "they are back in the queue")
    with consuming(redis, options=STEADY) as consumer:
        assert bodies(consumer.until(2)) == ["postponed", "rejected"]
        assert not any(
            "lapse_count" in message.delivery_info for message in consumer.got
        )
        consumer.acknowledge()


# Poison messages: workers vanish while processing them.


def lapse(server: RedisServer, times: int) -> None:
    """Reserve all waiting messages and vanish, `times` times."""
    for _ in range(times):
        reserve_and_die(server)
        with consuming(server, Queue("none"), options=SHORT):
            wait_until(
                lambda: held(server) == (0, 0), "the messages are back in the queue"
            )


def test_messages_with_lost_workers_are_handled_in_isolation(
    redis: RedisServer,
) -> None:
    publish(redis, "a", "b")
    lapse(redis, 2)
    publish(redis, "new")
    with consuming(redis, options=STEADY) as consumer:
        consumer.claiming = True
        for body in ("a", "b", "new"):
            assert bodies(consumer.until(1)) == [body]
            consumer.drain()
            assert bodies(consumer.got) == [body]
            if body != "new":
                consumer.acknowledge()
        publish(redis, "c")
        lapsed_once = count_delivery(
            str(redis.client.lindex("posts", 0)).encode(), lapse=True
        )
        lapsed_twice = count_delivery(str(lapsed_once).encode(), lapse=True)
        redis.client.lset("posts", 0, str(lapsed_twice))
        wait_until(
            lambda: consumer.drain() and consumer.refused,
            "it waits for the other message",
        )
        publish(redis, "later")
        consumer.drain()
        assert (bodies(consumer.got), waiting(redis)) == (["new"], 1), (
            "nothing is reserved meanwhile"
        )
        consumer.acknowledge()
        assert bodies(consumer.until(1)) == ["c"]
        consumer.acknowledge()
        assert bodies(consumer.until(1)) == ["later"]
        consumer.acknowledge()


def test_counts_workers_lost_with_an_isolated_message(redis: RedisServer) -> None:
    publish(redis, "a")
    lapse(redis, 2)
    with consuming(redis) as consumer:
        consumer.claiming = True
        tag = consumer.until(1)[0].delivery_tag or ""

        def counted(lapse: bool = True) -> dict[str, Any]:
            noted = str(redis.client.hget("reserved", tag))
            info: dict[str, Any] = json.loads(
                count_delivery(noted.encode(), lapse=lapse)
            )["properties"]["delivery_info"]
            return info

        assert (counted()["lapse_count"], deaths_in(counted())) == (3, {WHOLE: 1})
        assert not deaths_in(counted(lapse=False))
        consumer.got[0].suspect(())
        assert (counted()["lapse_count"], deaths_in(counted())) == (3, {})
        consumer.got[0].suspect((3, 5))
        consumer.got[0].return_lapsed()
        consumer.until(2)[1].suspect((5,))
        tag = consumer.got[1].delivery_tag or ""
        assert (counted()["lapse_count"], deaths_in(counted())) == (4, {3: 1, 5: 2})
        consumer.acknowledge()


def test_postponed_message_is_isolated_once_it_starts(redis: RedisServer) -> None:
    publish(redis, "later", "other")
    lapse(redis, 2)
    with consuming(redis, options=STEADY) as consumer:
        later, other = consumer.until(2)

        def is_alone() -> bool:
            noted = json.loads(
                str(redis.client.hget("reserved", later.delivery_tag or ""))
            )
            return bool(noted["properties"]["delivery_info"].get("suspects"))

        assert later.try_start()
        assert is_alone()
        later.postpone()
        assert not is_alone()
        assert other.claim(), "it may start while the first one is postponed"
        assert not later.claim()
        other.ack()
        assert later.claim()
        assert is_alone()
        later.ack()


def test_renews_leases_while_the_consumer_is_busy(redis: RedisServer) -> None:
    publish(redis, 1)
    with (
        consuming(redis, options=STEADY) as consumer,
        consuming(redis, options=STEADY) as other,
    ):
        tag = consumer.until(1)[0].delivery_tag or ""
        first = ends(redis, tag)
        wait_until(lambda: ends(redis, tag) > first + 1, "the lease is renewed")
        other.drain()
        assert not other.got
        consumer.acknowledge()


def test_late_acknowledgement_does_not_remove_a_redelivery(redis: RedisServer) -> None:
    publish(redis, 1)
    with consuming(redis) as consumer:
        late = consumer.until(1).pop()
        late.return_lapsed()
        again = consumer.until(1).pop()
        late.ack()
        assert held(redis) == (1, 1)
        again.ack()
        assert held(redis) == (0, 0)


def test_closing_returns_unclaimed_messages(redis: RedisServer) -> None:
    publish(redis, *range(4))
    with consuming(redis) as consumer:
        kept = consumer.until(4)[1]
        kept.claim()
    assert (waiting(redis), held(redis)) == (3, (1, 1))
    # the channel is closed: the next connection or the lease thread sends the acknowledgement
    kept.ack()
    wait_until(lambda: held(redis) == (0, 0), "the acknowledgement arrives")
    with consuming(redis) as consumer:
        assert bodies(consumer.until(3)) == [0, 2, 3]
        consumer.acknowledge()


def test_orderly_close_sends_pending_acknowledgements(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an event loop, the loop sends acknowledgements instead of the lease thread, and it ends
    before the close.
    """
    publish(redis, 1)
    with consuming(redis) as consumer:
        consumer.until(1)
        monkeypatch.setattr(consumer.channel.connection.cycle, "evented", True)
        monkeypatch.setattr(consumer.channel.leases, "evented", True)
        consumer.acknowledge()
        assert held(redis) == (1, 1)
    assert held(redis) == (0, 0)


def test_renews_leases_until_acknowledgements_are_sent(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose device thread hangs ends its threads first, which takes seconds."""
    publish(redis, 1)
    with (
        consuming(redis, options=STEADY) as consumer,
        consuming(redis, options=STEADY) as other,
    ):
        tag = consumer.until(1)[0].delivery_tag or ""
        monkeypatch.setattr(consumer.channel.connection.cycle, "evented", True)
        monkeypatch.setattr(consumer.channel.leases, "evented", True)
        consumer.acknowledge()
        first = ends(redis, tag)
        wait_until(
            lambda: held(redis) == (1, 1) and ends(redis, tag) > first + 1,
            "the lease is renewed",
        )
        other.drain()
        assert not other.got


def test_returns_unclaimed_messages_after_a_lost_connection(redis: RedisServer) -> None:
    publish(redis, "for later", "begun")
    with consuming(redis, options=STEADY) as consumer:
        later, begun = consumer.until(2)
        begun.claim()
        gc.freeze()
        try:
            redis.client.client_kill_filter(_type="normal", skipme=True)
            consumer.channel.close()
        finally:
            gc.unfreeze()
        wait_until(
            lambda: waiting(redis) == 1, "the unclaimed message is back in the queue"
        )
        assert not later.acknowledged
        assert held(redis) == (1, 1)
        begun.ack()


def test_reservation_for_a_cancelled_consumer_is_returned_in_order(
    redis: RedisServer,
) -> None:
    for no_ack in (False, True):
        publish(redis, *range(3))
        with consuming(redis, no_ack=no_ack) as consumer:
            consumer.channel.connection.cycle.on_poll_start()  # the reservation has been sent
            consumer.consumer.cancel()
        assert (waiting(redis), held(redis)) == (3, (0, 0))
        with consuming(redis) as consumer:
            assert bodies(consumer.until(3)) == [0, 1, 2]
            consumer.acknowledge()


def test_reject_requeues_to_the_end_or_drops(redis: RedisServer) -> None:
    publish(redis, 1, 2, 3)
    with consuming(redis, prefetch=1) as consumer:
        consumer.until(1).pop().requeue()
        consumer.until(1).pop().reject()
        assert bodies(consumer.until(1)) == [3]
        consumer.acknowledge()
        assert bodies(consumer.until(1)) == [1]
        consumer.acknowledge()
    assert (waiting(redis), held(redis)) == (0, (0, 0))


def test_stock_sweeps_and_ours_do_not_interfere(redis: RedisServer) -> None:
    publish(redis, "theirs")
    at_once: dict[str, Any] = {
        "visibility_timeout": 0,
        "unacked_restore_interval": 0.1,
        "unacked_restore_throttle": 1,
    }
    with consuming(redis, through=STOCK, options=at_once) as stock:
        stock.until(1)
        publish(redis, "ours")
        with consuming(redis, options=STEADY) as ours:
            ours.until(1)
            publish(redis, "dead")
            wait_until(
                lambda: reserve_and_die(redis),
                ("a worker that then dies has reserved the message"),
            )
            wait_until(
                lambda: ours.drain() and len(ours.got) == 2,
                ("our sweep has restored the message"),
            )
            assert redis.client.hlen("unacked") == 1
            # a stock sweep drops this entry, and none of our tags
            redis.client.zadd("unacked_index", {"never": 1})
            stock.channel.qos.restore_visible(num=10, interval=1)
            assert held(redis) == (2, 2)
            assert bodies(ours.got) == ["ours", "dead"]
            ours.acknowledge()


def test_consumes_and_acknowledges_at_redis_memory_limit(server: RedisServer) -> None:
    publish(server, *range(6))
    with consuming(server, prefetch=1, options=SHORT) as consumer:
        consumer.until(1)  # bind the queue before memory is full
        consumer.acknowledge()
        server.client.config_set("maxmemory", 1)
        try:
            assert reserve_and_die(server, 1) == 1
            consumer.channel.leases.client.ping()
            for _ in range(5):
                consumer.until(1)
                tag = consumer.got[0].delivery_tag or ""
                before = ends(server, tag)
                consumer.channel.leases._renew([tag], 0)
                assert ends(server, tag) > before
                consumer.acknowledge()
            assert held(server) == (0, 0)
        finally:
            server.client.config_set("maxmemory", 0)


def test_no_sweep_right_after_redis_was_unreachable(redis: RedisServer) -> None:
    redis.client.zadd("leases", {"one that ended": 1.0})

    def ended(seconds_ago: float) -> Any:
        contact: Any = redis.client.time()
        return call(
            redis.client,
            "renew",
            "messages",
            "leases",
            10,
            100,
            contact[0] - seconds_ago,
            4,
            1,
        )[1]

    assert ended(1) == ["one that ended"]
    assert ended(5) == []


# Dependencies on kombu's internals.

#: SHA-256 prefixes of the modules of kombu 5.7.0 whose internals we override or rely on.
KOMBU = {
    "kombu.transport.redis": "757357ceac81",
    "kombu.transport.virtual.base": "89b378b95840",
}


def test_kombu_internals_are_unchanged() -> None:
    """If this fails: read kombu's changes, adapt workers/transport/, then update the digests."""
    sources = {name: inspect.getsource(importlib.import_module(name)) for name in KOMBU}
    assert {
        name: hashlib.sha256(source.encode()).hexdigest()[:12]
        for name, source in sources.items()
    } == KOMBU
