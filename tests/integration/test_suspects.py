"""Poison tracking on a real Redis: forward passes are recorded, worker losses counted, suspect posts isolated."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from redis import Redis

from feedmill.shared.broker import connect
from feedmill.shared.keys import PASSES
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Row
from feedmill.workers.models.device import Device
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.poison import MAX_DEATHS, PoisonTracker
from tests.support import RedisServer, wait_until
from tests.unit.test_pipeline import Owner, StandIn

pytestmark = pytest.mark.each_redis


@pytest.fixture
def client(settings: Settings) -> Redis:
    return connect(settings)


def note(tracker: PoisonTracker, lane: int, posts: list[tuple[str | None, int]]) -> None:
    tracker.note(lane, posts)
    tracker.wait()


@contextmanager
def standing_still(client: Redis) -> Iterator[None]:
    """Stop Redis' process while the block runs. The kernel still receives data for it."""
    server: Any = client.info("server")
    os.kill(server["process_id"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server["process_id"], signal.SIGCONT)


def test_counts_a_lost_workers_record_once(client: Redis) -> None:
    vanished, here = PoisonTracker(client), PoisonTracker(client)
    note(vanished, 0, [("a", 3), ("b", 0), ("a", 7), ("a", 7)])
    assert here.deaths("a") == {3: 1, 7: 1}
    assert here.deaths("a") == {3: 1, 7: 1}
    assert here.deaths("another") == {}
    assert here.deaths("b") == {0: 1}
    assert client.hlen(PASSES) == 0


def test_counts_add_up_until_the_message_is_finished(client: Redis) -> None:
    for times in (1, 2, 3):
        note(PoisonTracker(client), 0, [("a", 0)])
        assert PoisonTracker(client).deaths("a") == {0: times}
    PoisonTracker(client).clear("a")
    assert PoisonTracker(client).deaths("a") == {}
    assert client.keys("*") == []


def test_redelivery_of_a_workers_own_message_is_not_counted(client: Redis) -> None:
    """The message's lease expired while Redis was frozen; its forward pass is still running."""
    here = PoisonTracker(client)
    note(here, 0, [("a", 0)])
    assert here.deaths("a") == {}


def test_orderly_shutdown_leaves_no_records(client: Redis) -> None:
    ended = PoisonTracker(client)
    note(ended, 0, [("a", 0)])
    note(ended, 1, [("b", 0)])
    ended.release(2)
    assert client.hlen(PASSES) == 0


def test_removes_stale_records(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("feedmill.workers.pipeline.poison.time.time", lambda: 1_000_000.0)
        note(PoisonTracker(client), 0, [("a", 0)])
    assert PoisonTracker(client).deaths("b") == {}
    assert client.hlen(PASSES) == 0


def test_continues_while_redis_is_unreachable(redis: RedisServer) -> None:
    client = Redis.from_url(redis.url.replace(str(redis.port), "1"))
    away = PoisonTracker(client)
    note(away, 0, [("a", 0)])
    assert away.deaths("a") == {}
    away.clear("a")
    away.release(1)


def test_a_record_reaches_redis_although_the_worker_is_killed_before_redis_answers(
    client: Redis, redis: RedisServer
) -> None:
    """Answers to earlier records are unread when the process dies, so that its connection is reset."""
    script = f"""
import os, signal, sys
from redis import Redis
from feedmill.workers.pipeline.poison import PoisonTracker
tracker = PoisonTracker(Redis.from_url({redis.url!r}))
tracker.note(0, [("earlier", 0)])
tracker.wait()
print("ready", flush=True)
sys.stdin.readline()
for number in range(4):
    tracker.note(0, [(f"a{{number}}", 1)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    for _ in range(5):
        client.delete(PASSES)
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            with standing_still(client):
                process.communicate("\n")
        wait_until(lambda: PoisonTracker(client).deaths("a3") == {1: 1}, "the last record counts", 10)
        PoisonTracker(client).clear("a3")


def test_records_a_pass_over_a_new_connection(client: Redis) -> None:
    here = PoisonTracker(client)
    for answered in (True, False):
        here.note(0, [("a", 0)])
        if answered:
            here.wait()
        client.client_kill_filter(_type="normal", skipme=True)
        note(here, 0, [("b", 0)])
        assert PoisonTracker(client).deaths("b") == {0: 1}
        PoisonTracker(client).clear("b")


def test_a_rejected_record_does_not_disturb_later_ones(client: Redis) -> None:
    here = PoisonTracker(client)
    client.set(PASSES, "of another type")
    for _ in range(20):
        here.note(0, [("a", 0)])
    here.wait()
    client.delete(PASSES)
    note(here, 0, [("b", 0)])
    assert PoisonTracker(client).deaths("b") == {0: 1}


def test_the_device_does_not_wait_for_a_redis_that_stands_still(client: Redis) -> None:
    here = PoisonTracker(client)
    note(here, 0, [("a", 0)])
    with standing_still(client):
        here.note(0, [("b", 0)])  # a note that waited would drop the record after its timeout
        here.note(0, [("c", 0)])
    here.wait()
    assert [PoisonTracker(client).deaths(message) for message in "abc"] == [{}, {}, {0: 1}]


class TwoLanes(Device):
    lanes = 2  # a CPU with two cores


class Watched(StandIn):
    """A stand-in model that records the posts of each pass twice: when the pass begins and when it ends."""

    device = TwoLanes(torch.device("meta"), torch.float32, "for a test")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, ...]] = []

    def forward(self, rows: Sequence[Row]) -> Any:
        posts = tuple(row.owner.post.id if row.owner else "proof" for row in rows)
        self.seen.append(posts)
        time.sleep(0.001)  # long enough for another lane to start a pass
        try:
            return super().forward([row for row in rows if row.owner])
        finally:
            self.seen.append(posts)


@pytest.fixture
def make_owner(client: Redis) -> Iterator[Callable[[], Owner]]:
    owners: list[Owner] = []

    def make() -> Owner:
        owners.append(Owner(Watched(), poison=PoisonTracker(client), batch_rows=2))
        return owners[-1]

    yield make
    for owner in owners:
        owner.pipeline.stop()


def send(owner: Owner, posts: int, redelivered: bool) -> Message:
    message = Message(
        {"posts": [{"id": str(number), "title": "two words"} for number in range(posts)]},
        None,
        "the message",
        attempts=1 + redelivered,
    )
    owner.pipeline.submit(message)
    wait_until(lambda: message in owner.finished, "the message is finished")
    return message


def test_isolates_suspects_and_dead_letters_the_poison_post(client: Redis, make_owner: Callable[[], Owner]) -> None:
    owner = make_owner()
    for times, post in ((1, 2), (2, 4), (MAX_DEATHS, 5)):
        for _ in range(times):
            note(PoisonTracker(client), 0, [("the message", post)])
            PoisonTracker(client).deaths("the message")
    message = send(owner, posts=50, redelivered=True)
    assert [letter.id for letter in owner.store.dead] == ["5"]
    assert "3 " in owner.store.dead[0].reason
    assert sorted(result.post.id for result in owner.store.written) == sorted(str(n) for n in range(50) if n != 5)
    assert message.result()[5]["error"] == owner.store.dead[0].reason
    seen = owner.classifier.seen  # type: ignore[attr-defined]
    for suspect in ("2", "4"):  # each runs after a test pass on the device, and in isolation
        at = seen.index((suspect,))
        assert seen[at - 2 : at + 2] == [("proof",), ("proof",), (suspect,), (suspect,)]
        assert not any(seen[:at].count(posts) % 2 for posts in seen[:at])
    assert client.keys("feedmill:suspect:*") == []


def test_a_computed_suspect_is_not_counted_while_its_result_waits(
    client: Redis, make_owner: Callable[[], Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results may wait for Redis for long. If the worker is killed then, no forward pass and no post is to blame."""
    monkeypatch.setattr("feedmill.workers.pipeline.recording.MAX_UNWRITTEN_ROWS", 4)
    monkeypatch.setattr("feedmill.workers.pipeline.recording.POSTS_TOGETHER", 1)
    for _ in range(2):
        note(PoisonTracker(client), 0, [("the message", post) for post in range(12)])
        PoisonTracker(client).deaths("the message")
    owner = make_owner()
    owner.store.refusals = 1_000_000
    posts = [{"id": str(number), "title": "x"} for number in range(12)]
    owner.pipeline.submit(Message({"posts": posts}, None, "the message", attempts=2))
    alone = (str(4 + 1),)  # the writer holds one result, and its queue the others
    wait_until(lambda: owner.classifier.seen.count(alone) == 2, "the device waits")  # type: ignore[attr-defined]
    wait_until(lambda: not any(json.loads(note)["posts"] for note in client.hvals(PASSES)), "the pass has ended")
    assert set(PoisonTracker(client).deaths("the message").values()) == {2}


def test_records_posts_on_the_device_in_redis(client: Redis, make_owner: Callable[[], Owner]) -> None:
    owner = make_owner()
    owner.classifier.gate.clear()
    message = Message(
        {"posts": [{"id": "0", "title": "x"}, {"id": "1"}, {"id": "2", "title": "y"}]}, None, "the message"
    )
    owner.pipeline.submit(message)
    wait_until(lambda: owner.classifier.seen, "the message is on the device", 10)  # type: ignore[attr-defined]
    assert PoisonTracker(client).deaths("the message") == {0: 1, 2: 1}
    owner.classifier.gate.set()
    wait_until(lambda: message in owner.finished, "the message is finished")


def test_a_broken_device_is_not_blamed_on_the_post(client: Redis, make_owner: Callable[[], Owner]) -> None:
    """The worker exits before the suspect post enters a forward pass again."""
    note(PoisonTracker(client), 0, [("the message", 0)])
    owner = make_owner()
    owner.classifier.forward = Mock(side_effect=ZeroDivisionError)  # type: ignore[method-assign]
    owner.pipeline.submit(Message({"posts": [{"id": "0", "title": "x"}]}, None, "the message", attempts=2))
    wait_until(lambda: owner.failures, "the worker fails")
    assert PoisonTracker(client).deaths("the message") == {0: 1}
