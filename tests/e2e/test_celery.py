"""Celery's features on a real worker, where Feedmill overrides what Celery does: docs/celery.md.

tests/differential.py compares what messages leave behind with a stock worker. These tests cover
what depends on time and on the worker's state: signals, revoking, limits, priorities,
acknowledgements, remote control, and canvas shapes. The client is plain Celery and calls tasks by
name.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from celery import chord, group
from celery.canvas import Signature
from celery.result import AsyncResult

from tests.fakes import constants
from tests.support import (
    Feedmill,
    RedisServer,
    application,
    wait_for_replies,
    wait_until,
    working,
)

# Celery itself causes these warnings: about a default that may change, and about a Redis command.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:task_allow_error_cb_on_chord_header:PendingDeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]

SECONDS = 120
BAD = {"id": "bad"}
NUMBERS = count()


def post(name: str = "good") -> dict[str, Any]:
    """Return a new post.

    A post that was sent before would be answered from the store, without the device.
    """
    return {
        "id": f"{name}-{next(NUMBERS)}",
        "title": ("The keeper saved two penalties in the final"),
    }


def slow(gate: str) -> dict[str, Any]:
    """Return a post whose forward pass lasts until the gate opens."""
    return {"id": gate, "title": f"slow {gate}"}


class Scene:
    """A worker, and another application that sends messages and records events."""

    def __init__(self, redis: RedisServer, worker: Feedmill) -> None:
        self.redis: Any = redis.client
        self.worker = worker
        self.app = application(redis)
        self._control: Any = (
            self.app.control
        )  # the stubs declare too narrow types for replies
        self.events: dict[str, list[str]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        heard = threading.Event()

        def hear(event: dict[str, Any]) -> None:
            heard.set()
            if "uuid" in event:
                self.events.setdefault(event["uuid"], []).append(
                    event["type"].removeprefix("task-")
                )

        with self.app.connection() as connection:
            receiver: Any = self.app.events.Receiver(connection, {"*": hear})
            thread = threading.Thread(
                target=receiver.capture,
                kwargs={"limit": None, "timeout": None, "wakeup": False},
            )
            thread.start()
            wait_until(heard.is_set, "the worker sends events")
            yield
            receiver.should_stop = True
            thread.join(30)

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return the worker's reply to an inspect command."""
        inspect: Any = self.app.control.inspect(timeout=30, limit=1)
        return next(iter((getattr(inspect, what)(*arguments) or {}).values()), None)

    def order(self, command: str, **arguments: Any) -> str:
        """Return the worker's reply to a control command."""
        (answer,) = self._control.broadcast(
            command, arguments=arguments, reply=True, timeout=30, limit=1
        )
        (said,) = answer.values()
        return str(said.get("ok") or said.get("error"))

    def send(
        self, *posts: dict[str, Any], task: str = "feedmill.classify", **options: Any
    ) -> Any:
        return self.app.send_task(task, kwargs={"posts": list(posts)}, **options)

    @contextmanager
    def gate(self) -> Iterator[str]:
        """Yield a gate that stays closed during the block."""
        key = f"gate-{next(NUMBERS)}"
        self.redis.set(key, "1")
        try:
            yield key
        finally:
            self.redis.delete(key)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the worker busy during the block, so that messages sent in it wait."""
        with self.gate() as gate:
            self.app.send_task("own.hold", [gate])
            wait_until(lambda: self.redis.get(f"{gate}:begun"), "the worker is busy")
            yield

    def running(self, gate: str, **options: Any) -> Any:
        """Send a message whose forward pass lasts until the gate opens.

        Return once the pass has begun.
        """
        sent = self.send(slow(gate), **options)
        wait_until(
            lambda: self.redis.get(f"{gate}:begun"), "the forward pass has begun"
        )
        # The event follows the worker's own record of the start.
        wait_until(
            lambda: "started" in self.events.get(sent.id, ()), "the start is announced"
        )
        return sent

    def signals(self, sent: AsyncResult[Any]) -> list[str]:
        found: list[str] = self.redis.lrange(f"signals:{sent.id}", 0, -1)
        return found

    def received(self, *sent: AsyncResult[Any]) -> None:
        """Wait until the worker has received the messages."""
        wait_until(
            lambda: all("received" in self.signals(each) for each in sent),
            "the messages are received",
        )

    def state(self, sent: AsyncResult[Any]) -> str:
        """Return the message's final state, after a later message has been answered."""
        wait_until(sent.ready, "the message has a result", SECONDS)
        self.send(post("other")).get(timeout=SECONDS)
        return str(sent.state)

    # Arithmetic: the signatures of tasks that add to posts' numbers.

    def si(self, name: str, *args: Any, **kwargs: Any) -> Signature:
        return self.app.signature(
            f"own.{name}", args=args, kwargs=kwargs, immutable=True
        )

    def add(self, value: int, more: int = 1) -> Signature:
        """Return a signature that adds `more` to `value` and ignores the previous result."""
        return self.si("add", number(value), top_k=more)

    def plus(self, more: int = 1) -> Signature:
        return self.app.signature("own.add", kwargs={"top_k": more})

    def fail(self) -> Signature:
        """Return a signature that always fails, because its labels are empty."""
        return self.si("add", number(1), labels="")

    def total(self) -> Signature:
        return self.app.signature("own.total")

    def group(self, *parts: Signature) -> Any:
        return group(parts, app=self.app)

    def chord(self, header: Any, body: Any) -> Any:
        return chord(header, body, app=self.app)

    def settle(self) -> None:
        """Wait until the worker is done with everything sent so far, by sending two messages one
        after the other.
        """
        for _ in range(2):
            assert numbers(self.add(1).apply_async().get(timeout=SECONDS)) == 2


def number(value: int) -> list[dict[str, Any]]:
    return [{"id": str(value), "title": f"number {value}"}]


def numbers(found: Any) -> Any:
    """Decode posts into numbers."""
    if isinstance(found, dict):
        return int(found["id"])
    read = [numbers(each) for each in found]
    return read[0] if found and isinstance(found[0], dict) and len(found) == 1 else read


@pytest.fixture(scope="module")
def whole(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    environment = {
        "FEEDMILL_INCLUDE": "tests.fakes.own_tasks",
        "FEEDMILL_TOKEN_BUDGET": "512",
        # So that a slow device also takes the next message.
        constants.VARIABLE: json.dumps(
            {"feedmill.workers.pipeline.pipeline.PREFETCH_S": 60}
        ),
        "OMP_NUM_THREADS": "1",  # one lane, so that one message can keep the device busy
    }
    with working(
        redis_server, tmp_path_factory.mktemp("worker"), **environment
    ) as worker:
        scene = Scene(redis_server, worker)
        with scene.listening():
            wait_for_replies(scene.app)
            scene.send(post()).get(timeout=120)
            yield scene
            scene.app.control.shutdown()
            assert worker.process.wait(SECONDS) == 0
        scene.app.close()


@pytest.fixture
def scene(whole: Scene) -> Scene:
    assert whole.worker.process.poll() is None
    whole.redis.delete("errbacks", "calls", "inner")
    return whole


# States, signals, expiry and revoking.


@pytest.mark.parametrize(
    ("task", "bad", "expected"),
    [
        ("feedmill.classify", False, "received prerun success postrun"),
        ("feedmill.classify", True, "received prerun failure postrun"),
        (
            "own.autoretries",
            True,
            "received prerun retry postrun prerun failure postrun",
        ),
    ],
)
def test_signals(scene: Scene, task: str, bad: bool, expected: str) -> None:
    sent = scene.send(BAD if bad else post(), task=task)
    scene.state(sent)
    wait_until(
        lambda: scene.signals(sent)[-1] == "postrun", "the last postrun is recorded"
    )
    # The second `received` of a retry can come before the end of the first attempt.
    assert [
        "received",
        *(each for each in scene.signals(sent) if each != "received"),
    ] == expected.split()


def test_expires_in_the_worker(scene: Scene) -> None:
    with scene.held():
        due = datetime.now(UTC) + timedelta(seconds=8)
        sent = scene.send(post(), expires=due)
        scene.received(sent)
        wait_until(lambda: datetime.now(UTC) > due, "it has expired")
    assert scene.state(sent) == "REVOKED"


def test_revokes_messages_that_wait_for_the_device(scene: Scene) -> None:
    with scene.held():
        stamped: Any = scene.app.signature(
            "feedmill.classify", kwargs={"posts": [post()]}
        )
        stamped.stamp(batch="B1")
        sent, stamp, other = (
            scene.send(post()),
            stamped.apply_async(),
            scene.send(post()),
        )
        scene.received(sent, stamp, other)
        scene.order("revoke", task_id=sent.id)
        scene.order("revoke_by_stamped_headers", headers={"batch": ["B1"]})
    assert [scene.state(each) for each in (sent, stamp, other)] == [
        "REVOKED",
        "REVOKED",
        "SUCCESS",
    ]
    wait_until(
        lambda: scene.events.get(sent.id) == ["received", "revoked"],
        ("the revocation is announced"),
    )


def test_a_started_message_cannot_be_terminated(scene: Scene) -> None:
    with scene.gate() as gate:
        sent = scene.running(gate)
        assert "cannot be terminated" in scene.order(
            "revoke", task_id=sent.id, terminate=True
        )
    assert scene.state(sent) == "SUCCESS"


# Limits, priorities and acknowledgements.


@pytest.mark.parametrize(
    ("limit", "error"),
    [("time_limit", "TimeLimit"), ("soft_time_limit", "SoftTimeLimit")],
)
def test_time_limits_fail_one_message_of_a_batch(
    scene: Scene, limit: str, error: str
) -> None:
    limits: dict[str, Any] = {limit: 1}
    with scene.gate() as gate:
        with scene.held():
            sent, other = scene.send(slow(gate), **limits), scene.send(post())
            scene.received(sent, other)
        wait_until(sent.ready, "the message has failed")
        assert scene.redis.exists(gate), "its forward pass is still running"
        assert (sent.state, type(sent.result).__name__.startswith(error)) == (
            "FAILURE",
            True,
        )
    assert scene.state(other) == "SUCCESS"


def test_urgent_messages_first(scene: Scene) -> None:
    sent = []
    with scene.held():
        for priority in (9, 0):
            # Each message has too many tokens to share a micro-batch with another. The worker must
            # receive the first one before the second is sent, because the queue would sort them by
            # priority.
            sent.append(
                scene.send(
                    *({**post(), "body": "word " * 100} for _ in range(6)),
                    priority=priority,
                )
            )
            scene.received(sent[-1])
        # A malformed post has its outcome once all messages before it are prepared.
        scene.send(BAD).get(timeout=SECONDS, propagate=False)
    later, sooner = sent
    assert len(later.get(timeout=SECONDS)) == len(sooner.get(timeout=SECONDS)) == 6
    assert sooner.date_done < later.date_done


@pytest.mark.parametrize(("task", "held"), [("feedmill.classify", 1), ("own.early", 0)])
def test_acknowledges_at_the_start_or_at_the_end(
    scene: Scene, task: str, held: int
) -> None:
    wait_until(lambda: not scene.redis.hlen("feedmill:reserved"), "nothing is held")
    with scene.gate() as gate:
        sent = scene.running(gate, task=task)
        wait_until(
            lambda: scene.redis.hlen("feedmill:reserved") == held,
            "it is held, or acknowledged",
        )
    assert scene.state(sent) == "SUCCESS"
    wait_until(lambda: not scene.redis.hlen("feedmill:reserved"), "nothing is held")


# Remote control.


def test_inspects_running_waiting_and_scheduled_messages(scene: Scene) -> None:
    with scene.gate() as gate:
        active = scene.running(gate)
        assert active.id in [request["id"] for request in scene.ask("active")]
        assert scene.ask("query_task", active.id)[active.id][0] == "active"
        postponed = scene.send(post(), countdown=15)
        wait_until(
            lambda: scene.redis.hlen("feedmill:delayed"), "the message waits in Redis"
        )
        assert postponed.id in [
            each["request"]["id"] for each in scene.ask("scheduled")
        ]
    with scene.held():
        reserved = scene.send(post())
        scene.received(reserved)
        assert reserved.id in [request["id"] for request in scene.ask("reserved")]
    assert [scene.state(each) for each in (active, postponed, reserved)] == [
        "SUCCESS"
    ] * 3
    assert any(name.startswith("feedmill.classify") for name in scene.ask("registered"))
    assert [queue["name"] for queue in scene.ask("active_queues")] == ["feedmill"]
    assert scene.ask("stats")["total"]["feedmill.classify"]


@pytest.mark.parametrize(
    "name", ["feedmill:results", "feedmill:new", "a-hash", "steps"]
)
def test_serves_no_queue_that_it_cannot_read(scene: Scene, name: str) -> None:
    """Otherwise it could not read its other queues either, and would reconnect for ever."""
    scene.redis.hset("a-hash", "field", "value")
    scene.redis.set("steps\x06\x163", "value")
    answer = scene.order("add_consumer", queue=name)
    assert answer.endswith("name another queue")
    assert len(scene.send(post()).get(timeout=SECONDS)) == 1
    assert [queue["name"] for queue in scene.ask("active_queues")] == ["feedmill"]
    scene.redis.delete("a-hash", "steps\x06\x163")


def test_starts_and_stops_serving_a_queue(scene: Scene) -> None:
    scene.order("add_consumer", queue="second")
    assert len(scene.send(post(), queue="second").get(timeout=SECONDS)) == 1
    scene.order("cancel_consumer", queue="second")
    wait_until(
        lambda: len(scene.ask("active_queues")) == 1,
        "the worker serves one queue again",
    )
    scene.send(post(), queue="second")
    scene.settle()
    assert scene.redis.llen("second") == 1
    scene.redis.delete("second")


def test_refuses_to_change_the_pool(scene: Scene) -> None:
    for command in ("pool_grow", "pool_shrink", "pool_restart"):
        for _ in range(4):
            assert "Error" in scene.order(command, n=1)
    assert "Error" in scene.order("autoscale", max=2, min=1)
    scene.settle()


# Canvas.

Shape = Callable[[Scene], tuple[Any, Any]]
SHAPES: dict[str, Shape] = {
    "chords in chords with chains": lambda s: (
        s.chord(
            [
                s.add(1) | s.chord([s.add(2), s.add(3)], s.total() | s.plus()),
                s.chord([s.add(4) | s.plus(), s.add(5)], s.total()),
            ],
            s.total() | s.plus(),
        ),
        8 + 12 + 1,
    ),
    # Tasks that are replaced after their posts are classified.
    "first of a chain, replaced by a chain": lambda s: (s.si("replaced_by_chain",
    number(42)) | s.plus(), 45),
    "replaced by a group": lambda s: (s.group(s.si("replaced_by_group",
    number(1)), s.add(3)), [[2, 3], 4]),
    "a task adds to its chord": lambda s: (
        s.chord([s.si("adds_to_chord", number(4), top_k=2)], s.app.signature("own.total")), 6 + 8
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shape(scene: Scene, shape: str) -> None:
    canvas, expected = SHAPES[shape](scene)
    assert numbers(canvas.apply_async().get(timeout=SECONDS)) == expected


def test_finished_chords_leave_no_keys(scene: Scene) -> None:
    scene.chord([scene.add(1), scene.add(2)], scene.total()).apply_async().get(
        timeout=SECONDS
    )
    scene.settle()
    assert [
        key for key in scene.redis.scan_iter("chord-*") if scene.redis.ttl(key) < 0
    ] == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_replaced_task_keeps_its_callbacks(scene: Scene, fails: bool) -> None:
    """Callbacks, or errbacks, of the replacing chain and of the replaced task both run."""
    sent = scene.si("replaced_by_chain", number(1), top_k=13 if fails else 2)
    callback: dict[str, Any] = {
        "link_error" if fails else "link": scene.si("called", key="calls")
    }
    result = sent.apply_async(**callback)
    inner = "errbacks" if fails else "inner"
    wait_until(
        lambda: scene.redis.mget(inner, "calls") == ["1", "1"], "both were called"
    )
    scene.settle()
    assert scene.redis.mget(inner, "calls", "inner" if fails else "errbacks") == [
        "1",
        "1",
        None,
    ]
    assert result.state == ("FAILURE" if fails else "SUCCESS")
