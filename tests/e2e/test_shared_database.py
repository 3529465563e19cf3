"""Feedmill's worker and another application's stock worker on one Redis database; and results by `rpc`.

Each worker restores abandoned messages after its own timeout. In each scene, one worker has a timeout of a second, and
the other of ten minutes. The worker with the long timeout holds messages for longer than a second while the other one
sweeps. The test knows that a sweep has run once an abandoned message, which it put into Redis, is restored.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from feedmill.shared.broker import TRANSPORT_KEYS
from feedmill.stack.processes import Child
from tests.support import Feedmill, RedisServer, redis_servers, running, wait_for_replies, wait_until

ROOT = Path(__file__).parent.parent.parent
POSTS: list[dict[str, Any]] = [
    {"id": "1", "title": "The keeper saved two penalties in the final"},
    {"id": "2", "title": "How long do dried beans keep?"},
]
SHORT, LONG = 1, 600
#: Keys where each worker records the messages that it holds, and their times.
OURS, KOMBUS = (TRANSPORT_KEYS["reserved_key"], TRANSPORT_KEYS["reserved_index_key"]), ("unacked", "unacked_index")

THEIRS = """
import os, time
from celery import Celery
from redis import Redis

URL = os.environ["FEEDMILL_REDIS_URL"]
redis = Redis.from_url(URL, decode_responses=True)
app = Celery("theirs", broker=URL, backend=URL)
app.conf.update(
    task_default_queue="theirs",
    task_acks_late=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": float(os.environ["THEIR_TIMEOUT"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
)

@app.task(name="theirs.hold")
def hold(key):
    redis.rpush("ran", f"hold {key}")
    while redis.exists(key):
        time.sleep(0.01)
    return key

@app.task(name="theirs.note")
def note(word):
    redis.rpush("ran", f"note {word}")
    return word
"""


@dataclass
class Neighbours:
    """Two workers on one database, and an application that sends to both."""

    redis: RedisServer
    worker: Feedmill
    ours: Celery
    theirs: Celery
    #: The worker with the short timeout.
    short: str

    def ran(self) -> list[str]:
        lines: Any = self.redis.client.lrange("ran", 0, -1)
        return list(lines)

    def hold(self, app: Celery) -> AsyncResult[Any]:
        """Keep this application's worker busy until `let_go`."""
        self.redis.client.set("gate", "1")
        sent = app.send_task("own.hold" if app is self.ours else "theirs.hold", ["gate"])
        wait_until(lambda: "hold gate" in self.ran(), "the worker is busy")
        return sent

    def let_go(self) -> None:
        self.redis.client.delete("gate")

    def held(self, keys: tuple[str, str]) -> int:
        return int(self.redis.client.hlen(keys[0]))

    def abandon(self, app: Celery, name: str, *args: Any) -> AsyncResult[Any]:
        """Add a message that a worker took long ago and never returned."""
        (held, index), queue = (OURS, "feedmill") if app is self.ours else (KOMBUS, "theirs")
        sent = app.send_task(name, args, queue="aside")
        message = json.loads(str(self.redis.client.rpop("aside")))
        message["properties"]["delivery_info"]["routing_key"] = queue
        tag = f"gone-0-{sent.id} {queue}"
        noted = message if app is self.ours else [message, "", queue]
        self.redis.client.hset(held, tag, json.dumps(noted))
        self.redis.client.zadd(index, {tag: time.time() - LONG - 1})
        return sent


def wait_ages() -> None:
    """Wait until everything held now has been held for longer than the short timeout."""
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > SHORT + 0.5, "the short timeout has passed")


@contextmanager
def working_side_by_side(short: str, folder: Path) -> Iterator[Neighbours]:
    """Run both workers. Feedmill's stores results in Redis in one scene, and sends them by rpc in the other."""
    redis_server = RedisServer(next(iter(redis_servers().values())), folder)
    (folder / "theirs.py").write_text(THEIRS)
    ours = {
        "FEEDMILL_REDIS_URL": redis_server.url,
        "FEEDMILL_CELERY_RESULTS": "rpc" if short == "theirs" else "redis",
        "FAKE_VISIBILITY_TIMEOUT": str(SHORT if short == "ours" else LONG),
        "OMP_NUM_THREADS": "1",  # a single device thread, so that one task blocks everything
        "PYTHONPATH": str(ROOT),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEEDMILL_")} | {
        "FEEDMILL_REDIS_URL": redis_server.url,
        "THEIR_TIMEOUT": str(SHORT if short == "theirs" else LONG),
    }
    command = [sys.executable, "-m", "celery", "--app", "theirs", "worker", "--concurrency", "1"]
    stock = Child("stock", [*command, "--hostname", "theirs@test", "--loglevel", "info"], folder, environment)
    flags = ("--name", "ours@test", "--include", "tests.fakes.own_tasks")
    try:
        with running("worker", *flags, cwd=folder, **ours) as worker:
            wait_until(lambda: worker.says(" ready."), "Feedmill's worker is ready")
            wait_until(lambda: " ready." in (folder / "stock.log").read_text(), "the stock worker is ready")
            backend = "rpc://" if short == "theirs" else redis_server.url
            clients = [
                Celery("elsewhere", broker=redis_server.url, backend=backend, set_as_current=False),
                Celery("theirs", broker=redis_server.url, backend=redis_server.url, set_as_current=False),
            ]
            for client, queue in zip(clients, ("feedmill", "theirs"), strict=True):
                client.conf.task_default_queue = queue
                client.conf.broker_transport_options = {"visibility_timeout": LONG}
            wait_for_replies(clients[0], workers=2)
            yield Neighbours(redis_server, worker, clients[0], clients[1], short)
            redis_server.client.delete("gate")
            assert worker.end() == 0, worker.text()
    finally:
        stock.stop(20)
        redis_server.stop()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Neighbours]]:
    """Create each scene on first use, with its own Redis."""
    made: dict[str, Neighbours] = {}
    with ExitStack() as all_of_them:

        def scene(short: str) -> Neighbours:
            if short not in made:
                folder = tmp_path_factory.mktemp("neighbours")
                made[short] = all_of_them.enter_context(working_side_by_side(short, folder))
            return made[short]

        yield scene


@pytest.fixture(params=["ours", "theirs"])
def neighbours(request: pytest.FixtureRequest, scenes: Callable[[str], Neighbours]) -> Neighbours:
    found = scenes(request.param)
    found.redis.client.delete("ran")
    return found


def test_sweeps_do_not_restore_the_other_workers_messages(neighbours: Neighbours) -> None:
    """The worker with the long timeout holds four messages while the other sweeps twice."""
    ours, theirs = neighbours.ours, neighbours.theirs
    sent: list[AsyncResult[Any]]
    if neighbours.short == "ours":
        sent = [neighbours.hold(theirs), *(theirs.send_task("theirs.note", [word]) for word in "abc")]
        wait_until(lambda: neighbours.held(KOMBUS) == 4, "the messages are held")
    else:
        sent = [neighbours.hold(ours)]
        sent += [ours.send_task("feedmill.classify", [[{**POSTS[0], "id": f"held-{word}"}]]) for word in "abc"]
        wait_until(lambda: neighbours.held(OURS) == 4, "the messages are held")
    wait_ages()
    for turn in range(2):
        if neighbours.short == "ours":
            found = neighbours.abandon(ours, "feedmill.classify", [{**POSTS[1], "id": f"lost-{turn}"}])
            assert found.get(timeout=120)[0]["label"] == "food"
        else:
            assert neighbours.abandon(theirs, "theirs.note", f"lost-{turn}").get(timeout=120) == f"lost-{turn}"
    neighbours.let_go()
    for each in sent:
        each.get(timeout=120)
    told = [line for line in neighbours.ran() if "lost" not in line]
    if neighbours.short == "ours":
        assert told == ["hold gate", "note a", "note b", "note c"]
    else:
        assert sorted(told) == ["hold gate", "post held-a", "post held-b", "post held-c"]
    wait_until(lambda: not neighbours.held(KOMBUS) + neighbours.held(OURS), "no message is held")


def test_revoking_a_message_does_not_affect_the_other_worker(neighbours: Neighbours) -> None:
    """The remote command reaches both workers; the one with the long timeout holds the revoked message."""
    ours, theirs = neighbours.ours, neighbours.theirs
    holds_ours = neighbours.short == "theirs"
    holder = ours if holds_ours else theirs
    busy = neighbours.hold(holder)

    def send(word: str) -> AsyncResult[Any]:
        if holds_ours:
            return ours.send_task("feedmill.classify", [[{**POSTS[0], "id": f"revoked-{word}"}]])
        return theirs.send_task("theirs.note", [f"revoked-{word}"])

    gone, stays = send("a"), send("b")
    wait_until(lambda: neighbours.held(OURS) + neighbours.held(KOMBUS) == 3, "the messages are held")
    holder.control.revoke(gone.id)
    wait_until(lambda: _all_know(holder, gone.id), "both workers know the revoked id")
    if holds_ours:
        assert theirs.send_task("theirs.note", ["other"]).get(timeout=120) == "other"
    else:
        assert ours.send_task("feedmill.classify", [POSTS]).get(timeout=120)[0]["label"] == "sports"
    neighbours.let_go()
    assert busy.get(timeout=120) == "gate"
    stays.get(timeout=120)
    with pytest.raises(TaskRevokedError):
        gone.get(timeout=120)
    assert [line.split()[1] for line in neighbours.ran() if "revoked" in line] == ["revoked-b"]


def _all_know(app: Celery, task_id: str) -> bool:
    told: Any = app.control.inspect(timeout=1).revoked() or {}
    return len(told) == 2 and all(task_id in revoked for revoked in told.values())


# Results by rpc, sent directly to the sender's reply queue.

by_rpc = pytest.mark.parametrize("neighbours", ["theirs"], indirect=True)


@by_rpc
def test_rpc_results(neighbours: Neighbours) -> None:
    ours = neighbours.ours
    assert ours.conf.result_backend is None or type(ours.backend).__module__ == "celery.backends.rpc"
    sent = ours.send_task("feedmill.classify", [POSTS])
    assert [outcome["label"] for outcome in sent.get(timeout=120)] == ["sports", "food"]
    assert sent.state == "SUCCESS"
    several = group([ours.signature("feedmill.classify", [[post]]) for post in POSTS], app=ours).apply_async()
    assert [outcomes[0]["label"] for outcomes in several.get(timeout=120)] == ["sports", "food"]
    with pytest.raises(Exception, match="posts: expected a list of at least one post"):
        ours.send_task("feedmill.classify").get(timeout=120)
    assert not list(neighbours.redis.client.scan_iter(f"celery-task-meta-{sent.id}"))


@by_rpc
def test_rpc_sends_nothing_with_ignore_result(neighbours: Neighbours) -> None:
    """With `ignore_result`, nothing accumulates in the reply queue, which has no limit."""
    ours = neighbours.ours
    ours.send_task("feedmill.classify", [[{**POSTS[0], "id": "unread"}]], ignore_result=True)
    wait_until(lambda: "post unread" in neighbours.ran(), "the post is classified")
    wait_until(lambda: not neighbours.held(OURS), "the message is acknowledged")
    assert neighbours.redis.client.llen(ours.thread_oid) == 0
