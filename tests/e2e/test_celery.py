"""Check every cell of the table in docs/celery.md: Celery's semantics for each message of a micro-batch.

Each row of the table is a function in this module. It tries a Celery feature on a real worker and returns the cell's
text. Every row runs on two workers: Feedmill's, and a stock prefork worker that runs the same task on one message at a
time.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature
from celery.result import AsyncResult

from tests.support import RedisServer, end, redis_servers, start, wait_for_replies, wait_until

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parent.parent.parent
KINDS = ("Feedmill", "stock prefork")
BAD = {"id": "bad"}
NUMBERS = count()


def post(name: str = "good") -> dict[str, Any]:
    """Return a new post. A post that was sent before would be answered from the store, without the device."""
    return {"id": f"{name}-{next(NUMBERS)}", "title": "The keeper saved two penalties in the final"}


def slow(gate: str) -> dict[str, Any]:
    """Return a post whose forward pass lasts until the gate opens."""
    return {"id": gate, "title": f"slow {gate}"}


class Scene:
    """A worker of one kind on a private Redis, and another application that sends messages and records events."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.redis = RedisServer(next(iter(redis_servers().values())), folder)
        self.app = Celery("elsewhere", broker=self.redis.url, backend=self.redis.url, set_as_current=False)
        self._control: Any = self.app.control  # the stubs declare too narrow types for replies
        self.app.conf.task_default_queue = "feedmill"
        self.app.conf.broker_transport_options = {"visibility_timeout": 600}
        self.events: dict[str, list[dict[str, Any]]] = {}
        self._receiver: Any = None
        self._hears = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FEEDMILL_")}
        ours = {
            "FEEDMILL_REDIS_URL": self.redis.url,
            "FEEDMILL_INCLUDE": "tests.fakes.celery_tasks",
            "FEEDMILL_TRACK_STARTED": "1",
            "FEEDMILL_TOKEN_BUDGET": "2048",
            "FEEDMILL_PREFETCH_SECONDS": "60",  # so that a slow device also takes the next message
            "FEEDMILL_CACHE_FOLDER": str(folder / "cache"),
            "FAKE_REDIS_URL": self.redis.url,
            "OMP_NUM_THREADS": "1",  # one lane, so that one message can keep the device busy
            "PYTHONPATH": str(ROOT),
        }
        celery = [
            sys.executable,
            "-m",
            "celery",
            "--app",
            "feedmill.workers.app",
            "worker",
            "--hostname",
            "worker@test",
        ]
        # "processes" means prefork. Celery treats the name "prefork" as the default and runs the configured pool.
        command = {
            "Feedmill": [*celery],
            "stock prefork": [*celery, "--pool", "processes", "--concurrency", "1"],
        }[kind]
        self.log = folder / "worker.log"
        with self.log.open("wb") as log:
            self.worker = start(command, ROOT, clean | ours, log)

    def wait_for_worker(self) -> None:
        wait_until(self._hears.is_set, f"the {self.kind} worker sends events")
        wait_for_replies(self.app)
        self.send(post()).get(timeout=120)  # the stock worker loads its model with the first message

    def _listen(self) -> None:
        def heard(event: dict[str, Any]) -> None:
            self._hears.set()
            if "uuid" in event:
                self.events.setdefault(event["uuid"], []).append(event)

        with self.app.connection() as connection:
            self._receiver = self.app.events.Receiver(connection, {"*": heard})
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _inspect(self) -> Any:
        return self.app.control.inspect(timeout=30, limit=1)

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return the worker's reply to an inspect command."""
        return next(iter((getattr(self._inspect(), what)(*arguments) or {}).values()), None)

    def order(self, command: str, **arguments: Any) -> str:
        """Return the worker's reply to a control command."""
        (answer,) = self._control.broadcast(command, arguments=arguments, reply=True, timeout=30, limit=1)
        (said,) = answer.values()
        return str(said.get("ok") or said.get("error") if isinstance(said, dict) else said)

    def signature(self, *posts: dict[str, Any], name: str = "feedmill.classify", **kwargs: Any) -> Signature:
        return self.app.signature(name, kwargs={"posts": list(posts), **kwargs})

    def send(self, *posts: dict[str, Any], task: str = "feedmill.classify", kwargs: Any = None, **options: Any) -> Any:
        return self.app.send_task(task, kwargs={"posts": list(posts), **(kwargs or {})}, **options)

    @contextmanager
    def gate(self) -> Iterator[str]:
        """Yield a gate that stays closed during the block."""
        key = f"gate-{next(NUMBERS)}"
        self.redis.client.set(key, "1")
        try:
            yield key
        finally:
            self.redis.client.delete(key)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the worker busy during the block, so that messages sent in it wait."""
        with self.gate() as gate:
            self.app.send_task("own.hold", [gate])
            wait_until(lambda: self.redis.client.get(f"{gate}:begun"), "the worker is busy")
            yield

    def load_model(self) -> None:
        """Make a restarted child of a stock worker load its model, so that loading is not part of a measurement."""
        self.send(post("before")).get(timeout=120)

    def running(self, gate: str, **options: Any) -> AsyncResult[Any]:
        """Send a message whose forward pass lasts until the gate opens. Return once the pass has begun."""
        self.load_model()
        sent: AsyncResult[Any] = self.send(slow(gate), **options)
        wait_until(lambda: self.redis.client.get(f"{gate}:begun"), "the forward pass has begun")
        # The event follows the worker's own record of the start.
        wait_until(lambda: "task-started" in self._types(sent), "task-started is received")
        return sent

    def received(self, *sent: AsyncResult[Any]) -> None:
        """Wait until the worker has received the messages."""
        wait_until(lambda: all("received" in self._signals(each) for each in sent), "the messages are received")

    def prepared(self) -> None:
        """Wait until the rows of all messages received so far wait for the device. Elsewhere than in Feedmill, nothing
        is prepared.
        """
        if self.kind == "Feedmill":  # a malformed post has its outcome once all messages before it are prepared
            self.send(BAD).get(timeout=60, propagate=False)

    def _types(self, sent: AsyncResult[Any]) -> list[str]:
        return [event["type"] for event in self.events.get(sent.id, ())]

    def settled(self, *sent: AsyncResult[Any]) -> None:
        """Wait until the messages have results."""
        wait_until(lambda: all(each.ready() for each in sent), "the messages have results", 60)

    def ended(self, sent: AsyncResult[Any]) -> None:
        """Wait until the task of a message without a result has ended."""
        wait_until(lambda: "postrun" in self._signals(sent), "the task has ended")

    def state(self, *sent: AsyncResult[Any]) -> str:
        """Return the messages' final state, after a later message has been answered."""
        self.settled(*sent)
        self.send(post("other")).get(timeout=60)
        return " and ".join(sorted({each.state for each in sent}))

    def told(self, sent: AsyncResult[Any], last: str) -> str:
        """Return a message's events, once it has an event of type `last`."""
        wait_until(lambda: f"task-{last}" in self._types(sent), f"task-{last} is received")
        return ", ".join(_once(name.removeprefix("task-") for name in self._types(sent)))

    def signals(self, sent: AsyncResult[Any]) -> str:
        """Return a message's signals."""
        self.settled(sent)
        wait_until(lambda: self._signals(sent)[-1] == "postrun", "the last postrun is recorded")
        return ", ".join(_once(self._signals(sent)))

    def _signals(self, sent: AsyncResult[Any]) -> list[str]:
        found: Any = self.redis.client.lrange(f"signals:{sent.id}", 0, -1)
        return list(found)

    def stop(self) -> None:
        self._receiver.should_stop = True
        self._listener.join(10)
        end(self.worker)
        self.redis.stop()


def _once(told: Iterable[str]) -> Iterator[str]:
    """Leave out `received` of retries, which can come before the end of the previous attempt."""
    for number, name in enumerate(told):
        if name != "received" or not number:
            yield name


Row = Callable[[Scene], str]
ROWS: dict[str, Row] = {}


def row(name: str) -> Callable[[Row], Row]:
    def add(function: Row) -> Row:
        ROWS[name] = function
        return function

    return add


def labels(outcomes: Any) -> str:
    return (
        f"{len(outcomes)} outcome{'s' * (len(outcomes) > 1)}"
        if all("label" in outcome for outcome in outcomes)
        else str(outcomes)
    )


@row("`AsyncResult.get()`")
def _(scene: Scene) -> str:
    return labels(scene.send(post(), post("other")).get(timeout=120))


@row("stored states")
def _(scene: Scene) -> str:
    client: Any = scene.redis.client
    with client.pubsub() as heard:
        heard.subscribe("celery-task-meta-of-states")
        scene.send(post(), task_id="of-states").get(timeout=120)
        found: list[str] = []
        while not found or found[-1] != "SUCCESS":
            said = heard.get_message(ignore_subscribe_messages=True, timeout=120)
            if said:
                found.append(json.loads(said["data"])["status"])
    return ", ".join(found)


@row("a failing message; another in its batch")
def _(scene: Scene) -> str:
    with scene.held():
        bad, good = scene.send(BAD), scene.send(post())
        scene.received(bad, good)
    return f"{scene.state(bad)}; {scene.state(good)}"


@row("`ignore_result=True`")
def _(scene: Scene) -> str:
    sent = scene.send(post(), ignore_result=True)
    scene.ended(sent)
    return "no result stored" if not scene.redis.client.exists(f"celery-task-meta-{sent.id}") else "result stored"


@row("`result_expires`")
def _(scene: Scene) -> str:
    sent = scene.send(post())
    sent.get(timeout=120)
    return "applied" if 0 < int(scene.redis.client.ttl(f"celery-task-meta-{sent.id}")) <= 3600 else "not applied"


@row("custom `task_id`")
def _(scene: Scene) -> str:
    scene.send(post(), task_id="chosen").get(timeout=120)
    return "respected" if AsyncResult("chosen", app=scene.app).successful() else "lost"


@row("custom headers")
def _(scene: Scene) -> str:
    found = scene.send(post(), task="own.header", headers={"ticket": "T1"}).get(timeout=120)
    return "visible to the task" if found == ["T1", 1] else str(found)


@row("events on success")
def _(scene: Scene) -> str:
    return scene.told(scene.send(post()), "succeeded")


@row("events on failure")
def _(scene: Scene) -> str:
    return scene.told(scene.send(BAD), "failed")


@row("signals on success")
def _(scene: Scene) -> str:
    return scene.signals(scene.send(post()))


@row("signals on failure")
def _(scene: Scene) -> str:
    return scene.signals(scene.send(BAD))


@row("`link`")
def _(scene: Scene) -> str:
    tell = scene.app.signature("own.tell", task_id="linked")
    scene.settled(scene.send(post(), link=tell))
    return _called(scene, "linked")


@row("`link_error`")
def _(scene: Scene) -> str:
    tell = scene.app.signature("own.told", task_id="linked-error")
    sent = scene.send(BAD, link_error=tell)
    scene.settled(sent)
    found: Any = AsyncResult("linked-error", app=scene.app)
    scene.settled(found)
    return "called with the message's id" if found.ready() and found.result == sent.id else "never called"


def _called(scene: Scene, task_id: str) -> str:
    found: Any = AsyncResult(task_id, app=scene.app)
    scene.settled(found)
    return f"called with {labels(found.result)}" if found.ready() else "never called"


@row("chain")
def _(scene: Scene) -> str:
    tell = scene.app.signature("own.tell", task_id="chained")
    scene.settled(chain(scene.signature(post()), tell, app=scene.app).apply_async())
    return _called(scene, "chained")


@row("group")
def _(scene: Scene) -> str:
    found = (
        group([scene.signature(post()), scene.signature(post("other"))], app=scene.app).apply_async().get(timeout=120)
    )
    return "in order" if [outcomes[0]["id"].split("-")[0] for outcomes in found] == ["good", "other"] else str(found)


@row("chord body")
def _(scene: Scene) -> str:
    body = scene.app.signature("own.tell", task_id="body")
    chord([scene.signature(post()), scene.signature(post("other"))], app=scene.app)(body)
    found: Any = AsyncResult("body", app=scene.app)
    scene.settled(found)
    return "called with both results" if found.ready() and len(found.result) == 2 else "never called"


@row("stamps")
def _(scene: Scene) -> str:
    shown = scene.app.signature("own.stamps", task_id="stamped")
    sent = scene.signature(post())
    sent.link(shown)
    sent.stamp(who="T1")
    scene.settled(sent.apply_async())
    found: Any = AsyncResult("stamped", app=scene.app)
    scene.settled(found)
    return "reach callbacks" if found.ready() and found.result.get("who") in ("T1", ["T1"]) else "lost"


@row("`countdown` and `eta`")
def _(scene: Scene) -> str:
    due = datetime.now(UTC) + timedelta(seconds=1)
    sent = scene.send(post(), eta=due)
    sent.get(timeout=120)
    done = sent.date_done if sent.date_done.tzinfo else sent.date_done.replace(tzinfo=UTC)
    return "on time" if done >= due else "too early"


@row("`expires` in the queue")
def _(scene: Scene) -> str:
    return scene.state(scene.send(post(), expires=datetime.now(UTC) - timedelta(seconds=1)))


@row("`expires` in the worker")
def _(scene: Scene) -> str:
    with scene.held():
        due = datetime.now(UTC) + timedelta(seconds=3)
        sent = scene.send(post(), expires=due)
        scene.received(sent)
        wait_until(lambda: datetime.now(UTC) > due, "it has expired")
    return scene.state(sent)


@row("`revoke` before its start")
def _(scene: Scene) -> str:
    with scene.held():
        sent = scene.send(post())
        scene.received(sent)
        scene.order("revoke", task_id=sent.id)
    return f"{scene.state(sent)}: {scene.told(sent, 'revoked')}"


@row("`revoke` of a postponed message")
def _(scene: Scene) -> str:
    due = datetime.now(UTC) + timedelta(seconds=5)
    sent = scene.send(post(), eta=due)
    scene.received(sent)
    scene.order("revoke", task_id=sent.id)
    wait_until(lambda: datetime.now(UTC) > due, "it is due")
    return scene.state(sent)


@row("`revoke_by_stamped_headers`")
def _(scene: Scene) -> str:
    with scene.held():
        stamped = scene.signature(post())
        stamped.stamp(batch="B1")
        sent, other = stamped.apply_async(), scene.send(post())
        scene.received(sent, other)
        scene.order("revoke_by_stamped_headers", headers={"batch": ["B1"]})
    return f"{scene.state(sent)}; unstamped: {scene.state(other)}"


@row("`revoke(terminate=True)` of a started message")
def _(scene: Scene) -> str:
    with scene.gate() as gate:
        sent = scene.running(gate)
        said = scene.order("revoke", task_id=sent.id, terminate=True)
    said = "refused: " + match[1] if (match := re.match(r"NotImplementedError\(['\"](.*)['\"]\)", said)) else "accepted"
    return f"{said}; {scene.state(sent)}"


@row("`time_limit`; another message in its batch")
def _(scene: Scene) -> str:
    with scene.gate() as gate:
        with scene.held():
            sent, other = scene.send(slow(gate), time_limit=1), scene.send(post())
            scene.received(sent, other)
        scene_state = _failed_in_time(scene, gate, sent)
    return f"{scene_state}; {scene.state(other)}"


@row("`soft_time_limit`")
def _(scene: Scene) -> str:
    with scene.gate() as gate:
        return _failed_in_time(scene, gate, scene.running(gate, soft_time_limit=1))


def _failed_in_time(scene: Scene, gate: str, sent: AsyncResult[Any]) -> str:
    """Wait until the message has failed, and return its state. Its forward pass must still be running."""
    wait_until(sent.ready, "the message has failed")
    assert scene.redis.client.exists(gate)
    return f"{sent.state}: {type(sent.result).__name__}"


@row("`retry`")
def _(scene: Scene) -> str:
    return scene.told(scene.send(post(), task="own.retries"), "succeeded")


@row("`autoretry_for`")
def _(scene: Scene) -> str:
    return scene.told(scene.send(BAD, task="own.autoretries"), "failed")


@row("signals on `retry`")
def _(scene: Scene) -> str:
    return scene.signals(scene.send(BAD, task="own.autoretries"))


@row("priorities in the worker")
def _(scene: Scene) -> str:
    sent = []
    with scene.held():
        for priority in (9, 0):
            # Each message has too many tokens to share a micro-batch with another. The worker must receive the first
            # one before the second is sent, because the queue would sort them by priority.
            sent.append(scene.send(*({**post(), "body": "word " * 300} for _ in range(12)), priority=priority))
            scene.received(sent[-1])
        scene.prepared()
    later, sooner = sent
    scene.settled(later, sooner)
    later.get(timeout=120)
    return "urgent first" if sooner.date_done < later.date_done else "in arrival order"


@row("`rate_limit`")
def _(scene: Scene) -> str:
    scene.load_model()
    scene.order("rate_limit", task_name="feedmill.classify", rate_limit="1/s")
    sent = [scene.send(post()) for _ in range(4)]
    scene.settled(*sent)
    done = sorted(each.date_done for each in sent if each.ready())
    scene.order("rate_limit", task_name="feedmill.classify", rate_limit="")
    apart = (done[-1] - done[0]).total_seconds()
    return "applied" if apart >= 0.5 else "not applied"


@row("`control.time_limit`")
def _(scene: Scene) -> str:
    with scene.gate() as gate:
        scene.load_model()
        scene.order("time_limit", task_name="feedmill.classify", soft=0.5, hard=None)
        sent = scene.send(slow(gate))
        with suppress(AssertionError):
            wait_until(sent.ready, "the message has failed", 5)
        scene.order("time_limit", task_name="feedmill.classify", soft=None, hard=None)
    scene.settled(sent)
    return "applied" if sent.failed() else "not applied before a restart"


@row("`acks_late=True` (default), while running")
def _(scene: Scene) -> str:
    return _held_while_running(scene, "feedmill.classify")


@row("`acks_late=False`, while running")
def _(scene: Scene) -> str:
    return _held_while_running(scene, "own.early")


def _held_while_running(scene: Scene, task: str) -> str:
    key = "feedmill:reserved"
    wait_until(lambda: not scene.redis.client.hlen(key), "nothing is held")
    with scene.gate() as gate:
        sent = scene.running(gate, task=task)
        wait_until(lambda: sent.state == "STARTED", "the state is STARTED")
        wait_until(lambda: "task-started" in scene._types(sent), "the event arrives")
        held = int(scene.redis.client.hlen(key))
    scene.settled(sent)
    return "held" if held else "acknowledged at its start"


@row("`acks_on_failure_or_timeout=False`")
def _(scene: Scene) -> str:
    return scene.told(scene.send(BAD, task="own.unforgiving"), "failed")


@row("`Reject(requeue=False)`")
def _(scene: Scene) -> str:
    sent = scene.send(post(), task="own.rejects")
    return f"{scene.state(sent)}: {scene.told(sent, 'rejected')}"


@row("`Reject(requeue=True)`")
def _(scene: Scene) -> str:
    sent = scene.send(post(), task="own.puts_back")
    return f"{scene.state(sent)}: {scene.told(sent, 'succeeded')}"


@row("`Ignore`")
def _(scene: Scene) -> str:
    sent = scene.send(post(), task="own.ignores")
    scene.ended(sent)
    return str(sent.state)


@row("`inspect active`, `query_task` of a running message")
def _(scene: Scene) -> str:
    with scene.gate() as gate:
        sent = scene.running(gate)
        found = [request["id"] for request in scene.ask("active")]
        asked = (scene.ask("query_task", sent.id) or {}).get(sent.id, ["unknown"])[0]
    scene.settled(sent)
    return f"{'shown' if sent.id in found else 'not shown'}, {asked}"


@row("`inspect reserved` of a waiting message")
def _(scene: Scene) -> str:
    with scene.held():
        sent = scene.send(post())
        scene.received(sent)
        found = [request["id"] for request in scene.ask("reserved")]
    scene.settled(sent)
    return "shown" if sent.id in found else "not shown"


@row("`inspect scheduled` of a postponed message")
def _(scene: Scene) -> str:
    sent = scene.send(post(), countdown=5)
    scene.received(sent)
    found = [scheduled["request"]["id"] for scheduled in scene.ask("scheduled")]
    sent.get(timeout=120)  # leave no scheduled message to the next row
    return "shown" if sent.id in found else "not shown"


@row("`inspect registered`, `stats`, `active_queues`")
def _(scene: Scene) -> str:
    assert any(name.startswith("feedmill.classify") for name in scene.ask("registered"))
    assert [queue["name"] for queue in scene.ask("active_queues")] == ["feedmill"]
    return "answered" if scene.ask("stats")["total"].get("feedmill.classify") else "answered, but `stats` counts none"


@row("`add_consumer`, `cancel_consumer`")
def _(scene: Scene) -> str:
    scene.order("add_consumer", queue="second")
    found = labels(scene.send(post(), queue="second").get(timeout=120))
    scene.order("cancel_consumer", queue="second")
    wait_until(lambda: len(scene.ask("active_queues")) == 1, "the worker serves one queue again")
    left = scene.send(post(), queue="second")
    scene.send(post("other")).get(timeout=120)
    assert scene.redis.client.llen("second") == 1
    left.forget()
    scene.redis.client.delete("second")
    return "starts and stops serving the queue" if found == "1 outcome" else found


def _ordered(scene: Scene, command: str, **arguments: Any) -> str:
    said = scene.order(command, **arguments)
    return "refused: " + match[2] if (match := re.match(r"(\w+)\(['\"](.*)['\"]\)", said)) else said


@row("`pool_grow`")
def _(scene: Scene) -> str:
    said = _ordered(scene, "pool_grow", n=1)
    if said.startswith("pool will"):
        scene.order("pool_shrink", n=1)
    return said


@row("`pool_shrink`")
def _(scene: Scene) -> str:
    if scene.kind != "Feedmill":
        scene.order("pool_grow", n=1)
    return _ordered(scene, "pool_shrink", n=1)


@row("`pool_restart`")
def _(scene: Scene) -> str:
    return _ordered(scene, "pool_restart")


@row("`autoscale`")
def _(scene: Scene) -> str:
    return _ordered(scene, "autoscale", max=2, min=1)


@row("other tasks on the same worker")
def _(scene: Scene) -> str:
    good = scene.app.send_task("own.tell", [7])
    return "run" if good.get(timeout=120) == 7 else "not run"


@row("`shutdown`")
def _(scene: Scene) -> str:
    scene.app.control.shutdown()
    scene.worker.wait(120)
    return f"exit status {scene.worker.returncode}"


def table() -> dict[tuple[str, str], str]:
    """Return the cells of the table in docs/celery.md."""
    cells = {}
    for line in (ROOT / "docs" / "celery.md").read_text().splitlines():
        parts = [part.strip() for part in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and parts[0] in ROWS:
            cells.update({(parts[0], kind): cell for kind, cell in zip(KINDS, parts[1:], strict=True)})
    return cells


class Scenes:
    """Workers of each kind, started on first use."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self._new_folder = new_folder
        self._running: dict[str, Scene] = {}

    def get(self, kind: str) -> Scene:
        if kind not in self._running:
            self._running[kind] = Scene(kind, self._new_folder())
            self._running[kind].wait_for_worker()
        return self._running[kind]

    def stop(self, kind: str) -> None:
        if scene := self._running.pop(kind, None):
            scene.stop()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    scenes = Scenes(lambda: tmp_path_factory.mktemp("worker"))
    yield scenes
    for kind in KINDS:
        scenes.stop(kind)


@pytest.mark.parametrize("name", [name for name in ROWS if name != "`shutdown`"])
def test_each_feedmill_cell(scenes: Scenes, name: str) -> None:
    assert ROWS[name](scenes.get("Feedmill")) == table()[name, "Feedmill"]


# Celery's own workers have races: when a killed child's pipe is reused, a message may reach the new child before it
# is revoked, and torch may refuse a thread pool in a forked child. The table states the usual outcome.
@pytest.mark.parametrize("name", [name for name in ROWS if name != "`shutdown`"])
def test_each_stock_cell_within_three_new_workers(scenes: Scenes, name: str) -> None:
    kind, found = KINDS[1], []
    for _ in range(3):
        try:
            found.append(ROWS[name](scenes.get(kind)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        if found[-1] == table()[name, kind]:
            return
        scenes.stop(kind)
    pytest.fail(f"the table says {table()[name, kind]!r}, found {found}")


def test_the_table_has_no_other_rows() -> None:
    assert set(table()) == {(name, kind) for name in ROWS for kind in KINDS}


def main() -> None:
    """Measure the table and print it."""
    import tempfile  # noqa: PLC0415

    found: dict[str, list[str]] = {name: [name] for name in ROWS}
    for kind in sys.argv[1:] or KINDS:
        scene = Scene(kind, Path(tempfile.mkdtemp()))
        scene.wait_for_worker()
        for name, function in ROWS.items():
            try:
                cell = function(scene)
            except BaseException as error:
                cell = f"!! {type(error).__name__}: {error}"
            found[name].append(cell)
            print(f"{kind}: {name}: {cell}", file=sys.stderr, flush=True)
        scene.stop()
        print(scene.log, file=sys.stderr)
    for cells in found.values():
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
