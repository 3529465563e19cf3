"""Posts that kill their worker: what is noted of forward passes, counted, and computed apart. On a real Redis."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from redis import Redis

from shared.broker import connect
from shared.keys import PASSES
from shared.settings import Settings
from tests.support import RedisServer, wait_until
from tests.unit.test_pipeline import Owner, StandIn
from workers.classifiers import Row
from workers.device import Device
from workers.message import Message
from workers.recording import MAX_UNWRITTEN_BATCHES
from workers.suspects import MAX_DEATHS, Quarantine, Suspects

pytestmark = pytest.mark.each_redis


@pytest.fixture
def client(settings: Settings) -> Redis:
    return connect(settings)


def test_what_a_vanished_worker_noted_counts_once(client: Redis) -> None:
    vanished, here = Suspects(client), Suspects(client)
    vanished.note(0, [("a", 3), ("b", 0), ("a", 7), ("a", 7)])
    assert here.deaths("a") == {3: 1, 7: 1}
    assert here.deaths("a") == {3: 1, 7: 1}
    assert here.deaths("another") == {}
    assert here.deaths("b") == {0: 1}
    assert client.hlen(PASSES) == 0


def test_each_pass_takes_the_place_of_its_lanes_last(client: Redis) -> None:
    vanished, here = Suspects(client), Suspects(client)
    vanished.note(0, [("a", 0)])
    vanished.note(1, [("b", 0)])
    vanished.note(0, [("c", 0)])
    assert [here.deaths(message) for message in "abc"] == [{}, {0: 1}, {0: 1}]


def test_deaths_add_up_and_are_forgotten_when_the_message_has_ended(client: Redis) -> None:
    for times in (1, 2, 3):
        Suspects(client).note(0, [("a", 0)])
        assert Suspects(client).deaths("a") == {0: times}
    Suspects(client).clear("a")
    assert Suspects(client).deaths("a") == {}
    assert client.keys("*") == []


def test_a_message_of_ones_own_that_comes_again_is_no_suspect(client: Redis) -> None:
    """Its lease ended while Redis stood still; the pass goes on."""
    here = Suspects(client)
    here.note(0, [("a", 0)])
    assert here.deaths("a") == {}


def test_a_worker_that_ends_in_good_order_leaves_no_suspects(client: Redis) -> None:
    ended = Suspects(client)
    ended.note(0, [("a", 0)])
    ended.note(1, [("b", 0)])
    ended.release(2)
    assert client.hlen(PASSES) == 0


def test_notes_that_nobody_came_for_go(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("workers.suspects.time.time", lambda: 1_000_000.0)
        Suspects(client).note(0, [("a", 0)])
    assert Suspects(client).deaths("b") == {}
    assert client.hlen(PASSES) == 0


def test_without_redis_the_device_does_not_wait(redis: RedisServer) -> None:
    client = Redis.from_url(redis.url.replace(str(redis.port), "1"))
    away = Suspects(client)
    away.note(0, [("a", 0)])
    assert away.deaths("a") == {}
    away.clear("a")
    away.release(1)


def test_any_id_that_a_sender_may_give_is_counted(client: Redis) -> None:
    for message in ("\ud800", "{}", "", None, "a" * 128):
        Suspects(client).note(0, [(message, 0)])
        assert Suspects(client).deaths(message) == {0: 1}


class Length(int):
    @property
    def length(self) -> int:
        return int(self)


def test_suspects_are_computed_one_by_one() -> None:
    quarantine: Quarantine[Length] = Quarantine()
    for rows in ([Length(5)], [Length(6), Length(6)], [Length(5)]):
        quarantine.add(rows)
    assert len(quarantine) == 4
    batches = []
    while quarantine:
        batches.append(quarantine.take(1000, 1000))
    assert batches == [[5], [6, 6], [5]]


def test_no_more_at_once_than_the_device_takes() -> None:
    quarantine: Quarantine[Length] = Quarantine()
    quarantine.add([Length(10)] * 5)
    assert [len(quarantine.take(20, 100)) for _ in range(3)] == [2, 2, 1]
    assert not quarantine


class TwoLanes(Device):
    lanes = 2  # as on a CPU of two cores


class Watched(StandIn):
    """Notes which posts are in each pass, as it begins and as it ends."""

    device = TwoLanes(torch.device("meta"), torch.float32, "for a test")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, ...]] = []

    def forward(self, rows: Sequence[Row]) -> Any:
        posts = tuple(row.owner.post.id if row.owner else "proof" for row in rows)
        self.seen.append(posts)
        time.sleep(0.001)  # a pass takes its time: another lane could begin one
        try:
            return super().forward([row for row in rows if row.owner])
        finally:
            self.seen.append(posts)


@pytest.fixture
def make_owner(client: Redis) -> Iterator[Callable[[], Owner]]:
    owners: list[Owner] = []

    def make() -> Owner:
        owners.append(Owner(Watched(), suspects=Suspects(client), batch_rows=2))
        return owners[-1]

    yield make
    for owner in owners:
        owner.pipeline.stop()


def send(owner: Owner, posts: int, redelivered: bool) -> Message:
    message = Message(
        {"posts": [{"id": str(number), "title": "two words"} for number in range(posts)]},
        None,
        "the message",
        redelivered=redelivered,
    )
    owner.pipeline.submit(message)
    wait_until(lambda: message in owner.finished, "the message has ended", 10)
    return message


def test_suspects_apart_the_deadly_one_a_dead_letter_the_others_as_ever(
    client: Redis, make_owner: Callable[[], Owner]
) -> None:
    owner = make_owner()
    for times, post in ((1, 2), (2, 4), (MAX_DEATHS, 5)):
        for _ in range(times):
            Suspects(client).note(0, [("the message", post)])
            Suspects(client).deaths("the message")
    message = send(owner, posts=50, redelivered=True)
    assert [letter.id for letter in owner.store.dead] == ["5"]
    assert "3 workers died in a forward pass with this post" in owner.store.dead[0].reason
    assert sorted(result.post.id for result in owner.store.written) == sorted(str(n) for n in range(50) if n != 5)
    assert message.result()[5]["error"] == owner.store.dead[0].reason
    seen = owner.classifier.seen  # type: ignore[attr-defined]
    for suspect in ("2", "4"):  # each of them after a proof that the device computes, and with nothing else on it
        at = seen.index((suspect,))
        assert seen[at - 2 : at + 2] == [("proof",), ("proof",), (suspect,), (suspect,)]
        assert not any(seen[:at].count(posts) % 2 for posts in seen[:at])
    assert client.keys("feedmill:suspect:*") == []


def test_a_suspect_that_was_computed_is_none_while_its_result_waits(
    client: Redis, make_owner: Callable[[], Owner]
) -> None:
    """Redis may be away for long, and so a worker that is killed then be killed outside any pass."""
    for _ in range(2):
        Suspects(client).note(0, [("the message", post) for post in range(MAX_UNWRITTEN_BATCHES + 8)])
        Suspects(client).deaths("the message")
    owner = make_owner()
    owner.store.refusals = 1_000_000
    posts = [{"id": str(number), "title": "x"} for number in range(MAX_UNWRITTEN_BATCHES + 8)]
    owner.pipeline.submit(Message({"posts": posts}, None, "the message", redelivered=True))
    alone = (str(MAX_UNWRITTEN_BATCHES + 1),)  # the writer has one, and MAX_UNWRITTEN_BATCHES more fit
    wait_until(lambda: owner.classifier.seen.count(alone) == 2, "the device waits", 10)  # type: ignore[attr-defined]
    wait_until(lambda: not any(json.loads(note)["posts"] for note in client.hvals(PASSES)), "its pass has ended", 10)
    assert set(Suspects(client).deaths("the message").values()) == {2}


def test_what_is_delivered_for_the_first_time_is_never_looked_up(
    client: Redis, make_owner: Callable[[], Owner]
) -> None:
    Suspects(client).note(0, [("the message", 0)])
    owner = make_owner()
    send(owner, posts=1, redelivered=False)
    assert owner.classifier.seen == [("0",), ("0",)]  # type: ignore[attr-defined]


def test_what_is_on_the_device_is_known_outside(client: Redis, make_owner: Callable[[], Owner]) -> None:
    owner = make_owner()
    owner.classifier.gate.clear()
    message = Message(
        {"posts": [{"id": "0", "title": "x"}, {"id": "1"}, {"id": "2", "title": "y"}]}, None, "the message"
    )
    owner.pipeline.submit(message)
    wait_until(lambda: owner.classifier.seen, "it is on the device", 10)  # type: ignore[attr-defined]
    assert Suspects(client).deaths("the message") == {0: 1, 2: 1}
    owner.classifier.gate.set()
    wait_until(lambda: message in owner.finished, "the message has ended", 10)


def test_a_device_that_computes_nothing_is_no_suspects_fault(client: Redis, make_owner: Callable[[], Owner]) -> None:
    """The worker ends before the suspect is in a pass again."""
    Suspects(client).note(0, [("the message", 0)])
    owner = make_owner()
    owner.classifier.forward = Mock(side_effect=ZeroDivisionError)  # type: ignore[method-assign]
    owner.pipeline.submit(Message({"posts": [{"id": "0", "title": "x"}]}, None, "the message", redelivered=True))
    wait_until(lambda: owner.failures, "the worker ends", 10)
    assert Suspects(client).deaths("the message") == {0: 1}
