"""Feedmill's worker and another application's stock worker on one Redis database; and results by
`rpc`.

Each worker restores abandoned messages after its own timeout; the stock worker's is a second.
Feedmill's worker holds messages for longer than that while the other one sweeps. The test knows
that a sweep has run once an abandoned message, which it put into Redis, is restored. For the other
direction, see tests/integration/test_transport.py.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery, group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from feedmill.shared.broker import TRANSPORT_KEYS
from feedmill.stack.processes import Child
from tests.support import (
    POSTS,
    ROOT,
    RedisServer,
    _environment,
    run,
    wait_for_replies,
    wait_until,
    working,
)

#: Seconds after which the stock worker restores an abandoned message.
THEIR_TIMEOUT = 1

THEIRS = """
import os
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
        "visibility_timeout": 1,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
)

@app.task(name="theirs.note")
def note(word):
    redis.rpush("ran", f"note {word}")
    return word
"""


@dataclass
class Neighbours:
    """Two workers on one database, and an application that sends to both."""

    redis: RedisServer
    ours: Celery
    theirs: Celery

    def ran(self) -> list[str]:
        lines: Any = self.redis.client.lrange("ran", 0, -1)
        return list(lines)

    def hold(self) -> AsyncResult[Any]:
        """Keep Feedmill's worker busy until `let_go`."""
        self.redis.client.set("gate", "1")
        sent = self.ours.send_task("own.hold", ["gate"])
        wait_until(lambda: "hold gate" in self.ran(), "the worker is busy")
        return sent

    def let_go(self) -> None:
        self.redis.client.delete("gate")

    def held(self) -> int:
        """Return the number of messages that Feedmill's worker holds."""
        return int(self.redis.client.hlen(TRANSPORT_KEYS["reserved_key"]))

    def classify(self, post_id: str) -> AsyncResult[Any]:
        return self.ours.send_task("feedmill.classify", [[{**POSTS[0], "id": post_id}]])

    def abandon(self, word: str) -> AsyncResult[Any]:
        """Add a message that a stock worker took long ago and never returned."""
        sent = self.theirs.send_task("theirs.note", [word], queue="aside")
        message = json.loads(str(self.redis.client.rpop("aside")))
        message["properties"]["delivery_info"]["routing_key"] = "theirs"
        tag = f"gone-0-{sent.id} theirs"
        self.redis.client.hset("unacked", tag, json.dumps([message, "", "theirs"]))
        self.redis.client.zadd("unacked_index", {tag: time.time() - 600})
        return sent


def wait_ages() -> None:
    """Wait until everything held now has been held for longer than the short timeout."""
    began = time.monotonic()
    wait_until(
        lambda: time.monotonic() - began > THEIR_TIMEOUT + 0.5,
        ("the short timeout has passed"),
    )


@pytest.fixture(scope="module")
def both(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Neighbours]:
    """Run both workers. Feedmill's sends its results by rpc."""
    folder = tmp_path_factory.mktemp("neighbours")
    (folder / "theirs.py").write_text(THEIRS)
    ours = {
        "FEEDMILL_INCLUDE": "tests.fakes.own_tasks",
        "FEEDMILL_CELERY_RESULTS": "rpc",
        "OMP_NUM_THREADS": "1",  # a single device thread, so that one task blocks everything
    }
    environment = _environment(folder, FEEDMILL_REDIS_URL=redis_server.url)
    command = [
        sys.executable,
        "-m",
        "celery",
        "--app",
        "theirs",
        "worker",
        "--concurrency",
        "1",
    ]
    stock = Child(
        "stock",
        [*command, "--hostname", "theirs@test", "--loglevel", "info"],
        folder,
        environment,
    )
    try:
        with working(redis_server, folder, "ours@test", **ours) as worker:
            wait_until(
                lambda: " ready." in (folder / "stock.log").read_text(),
                "the stock worker is ready",
            )
            clients = [
                Celery(
                    "elsewhere",
                    broker=redis_server.url,
                    backend="rpc://",
                    set_as_current=False,
                ),
                Celery(
                    "theirs",
                    broker=redis_server.url,
                    backend=redis_server.url,
                    set_as_current=False,
                ),
            ]
            for client, queue in zip(clients, ("feedmill", "theirs"), strict=True):
                client.conf.task_default_queue = queue
            wait_for_replies(clients[0], workers=2)
            yield Neighbours(redis_server, *clients)
            redis_server.client.delete("gate")
            assert worker.end() == 0, worker.text()
    finally:
        stock.stop(20)


@pytest.fixture
def neighbours(both: Neighbours) -> Neighbours:
    both.redis.client.delete("ran")
    return both


def test_sweeps_do_not_restore_the_other_workers_messages(
    neighbours: Neighbours,
) -> None:
    """Feedmill's worker holds four messages while the other sweeps twice."""
    sent = [neighbours.hold(), *(neighbours.classify(f"held-{word}") for word in "abc")]
    wait_until(lambda: neighbours.held() == 4, "the messages are held")
    wait_ages()
    for word in ("lost-0", "lost-1"):
        assert neighbours.abandon(word).get(timeout=120) == word
    neighbours.let_go()
    for each in sent:
        each.get(timeout=120)
    told = [line for line in neighbours.ran() if "lost" not in line]
    assert sorted(told) == ["hold gate", "post held-a", "post held-b", "post held-c"]
    wait_until(
        lambda: not neighbours.held() + neighbours.redis.client.hlen("unacked"),
        "no message is held",
    )


def test_revoking_a_message_does_not_affect_the_other_worker(
    neighbours: Neighbours,
) -> None:
    """The remote command reaches both workers; Feedmill's holds the revoked message."""
    busy = neighbours.hold()
    gone, stays = neighbours.classify("revoked-a"), neighbours.classify("revoked-b")
    wait_until(lambda: neighbours.held() == 3, "the messages are held")
    neighbours.ours.control.revoke(gone.id)
    wait_until(
        lambda: _all_know(neighbours.ours, gone.id), "both workers know the revoked id"
    )
    assert (
        neighbours.theirs.send_task("theirs.note", ["other"]).get(timeout=120)
        == "other"
    )
    neighbours.let_go()
    assert busy.get(timeout=120) == "gate"
    stays.get(timeout=120)
    with pytest.raises(TaskRevokedError):
        gone.get(timeout=120)
    assert [line.split()[1] for line in neighbours.ran() if "revoked" in line] == [
        "revoked-b"
    ]


def _all_know(app: Celery, task_id: str) -> bool:
    told: Any = app.control.inspect(timeout=1).revoked() or {}
    return len(told) == 2 and all(task_id in revoked for revoked in told.values())


# Results by rpc, sent directly to the sender's reply queue.


def test_rpc_results(neighbours: Neighbours) -> None:
    ours = neighbours.ours
    assert (
        ours.conf.result_backend is None
        or type(ours.backend).__module__ == "celery.backends.rpc"
    )
    sent = ours.send_task("feedmill.classify", [POSTS])
    assert [outcome["label"] for outcome in sent.get(timeout=120)] == ["sports", "food"]
    assert sent.state == "SUCCESS"
    several = group(
        [ours.signature("feedmill.classify", [[post]]) for post in POSTS], app=ours
    ).apply_async()
    assert [outcomes[0]["label"] for outcomes in several.get(timeout=120)] == [
        "sports",
        "food",
    ]
    with pytest.raises(Exception, match="posts: expected a list of at least one post"):
        ours.send_task("feedmill.classify").get(timeout=120)
    assert not list(neighbours.redis.client.scan_iter(f"celery-task-meta-{sent.id}"))


def test_rpc_sends_nothing_with_ignore_result(neighbours: Neighbours) -> None:
    """With `ignore_result`, nothing accumulates in the reply queue, which has no limit."""
    ours = neighbours.ours
    ours.send_task(
        "feedmill.classify", [[{**POSTS[0], "id": "unread"}]], ignore_result=True
    )
    wait_until(lambda: "post unread" in neighbours.ran(), "the post is classified")
    wait_until(lambda: not neighbours.held(), "the message is acknowledged")
    assert neighbours.redis.client.llen(ours.thread_oid) == 0


# What clients leave behind that are killed before they read an answer.

#: Sends a post to Feedmill's worker and ends. Its result is a reply to a list that nobody reads.
KILLED_SENDER = """
import os, sys
from celery import Celery
app = Celery("elsewhere", broker=sys.argv[1], backend="rpc://")
post = {"id": sys.argv[2], "title": "The keeper saved two penalties"}
app.send_task("feedmill.classify", [[post]], queue="feedmill")
print(app.thread_oid, flush=True)
os._exit(9)
"""
#: Asks Feedmill's worker for its tasks and ends.
KILLED_ASKER = """
import os, sys
from celery import Celery
from kombu.pidbox import Mailbox
app = Celery("elsewhere", broker=sys.argv[1])
def leave(mailbox, *_, **__):
    print(mailbox.oid, flush=True)
    os._exit(9)
Mailbox._collect = leave
app.control.inspect(["ours@test"]).registered()
"""


#: Beginnings of keys of kombu, of Feedmill and of the tests' own tasks. Other keys are clients'.
NOT_OF_CLIENTS = ("_kombu.binding", "feedmill", "ran", "signals:")


def lasting_keys(neighbours: Neighbours) -> set[str]:
    """Return the keys of clients without a time to live."""
    client = neighbours.redis.client
    keys = [key for key in client.scan_iter() if not key.startswith(NOT_OF_CLIENTS)]
    return {key for key in keys if client.ttl(key) == -1}


def test_replies_to_killed_clients_expire(neighbours: Neighbours) -> None:
    client = neighbours.redis.client
    before = lasting_keys(neighbours)
    environment = dict(os.environ)
    sender = run(
        [sys.executable, "-c", KILLED_SENDER, neighbours.redis.url, "unread-reply"],
        ROOT,
        environment,
    )
    reply_list = sender.stdout.strip()
    wait_until(lambda: client.ttl(reply_list) > 0, "the reply expires")
    assert client.ttl(reply_list) <= 3600
    asker = run(
        [sys.executable, "-c", KILLED_ASKER, neighbours.redis.url], ROOT, environment
    )
    assert asker.returncode == 9, asker.stderr
    answers = f"{asker.stdout.strip()}.reply.celery.pidbox"
    wait_until(lambda: client.ttl(answers) > 0, "the answers expire")
    wait_until(lambda: not neighbours.held(), "the message is acknowledged")
    assert lasting_keys(neighbours) <= before


def test_queues_named_as_reply_lists_do_not_expire(neighbours: Neighbours) -> None:
    """A sender may name any list for its replies. Messages that wait there must not be lost."""
    client = neighbours.redis.client
    sent = neighbours.ours.send_task(
        "feedmill.classify", [POSTS], reply_to="theirs-waiting"
    )
    wait_until(lambda: client.llen("theirs-waiting"), "the reply is sent")
    assert sent.id in str(client.lindex("theirs-waiting", 0))
    wait_until(lambda: not neighbours.held(), "the message is acknowledged")
    assert client.ttl("theirs-waiting") == -1
    client.delete("theirs-waiting")
