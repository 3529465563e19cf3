"""Celery workers on the reserving transport, beside stock workers and through Redis failures."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from tests.support import (
    Feedmill,
    RedisServer,
    Restartable,
    executing,
    wait_for_replies,
    wait_until,
)

pytestmark = pytest.mark.each_redis

#: A worker's application. Its tasks count their runs in Redis.
APPLICATION = """
import os, time, uuid
from celery import Celery
from celery.worker.consumer import Consumer as StockConsumer
from redis import Redis, RedisError

class Consumer(StockConsumer):
    def __init__(self, on_task_request, *args, **kwargs):
        def claimed(request):
            if "redis_transport" in os.environ["TRANSPORT"]:
                request.message.claim()
            on_task_request(request)
        super().__init__(claimed, *args, **kwargs)

app = Celery("counting", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.update(
    broker_transport=os.environ["TRANSPORT"],
    broker_transport_options={
        "visibility_timeout": 4, "unacked_restore_interval": 0.3, "socket_timeout": 1}
    if "redis_transport" in os.environ["TRANSPORT"] else {},
    broker_connection_retry_on_startup=True, broker_connection_max_retries=None,
    worker_enable_prefetch_count_reduction=False, worker_prefetch_multiplier=16,
    task_acks_late=True,
    worker_consumer="counting:Consumer",
)
redis = Redis.from_url(os.environ["BROKER"], socket_timeout=None)

def note(key, run):
    # A set of runs, so that a command repeated after a lost reply does not count a run twice.
    while True:
        try:
            redis.sadd(key, run)
            return redis.scard(key)
        except (OSError, RedisError):
            time.sleep(0.1)

def held():
    try:
        return redis.exists("hold")
    except (OSError, RedisError):
        return True

@app.task(name="count")
def count(name, seconds=0.0):
    run = uuid.uuid4().hex
    note("began:" + name, run)
    while held():
        time.sleep(0.1)
    time.sleep(seconds)
    note("ended:" + name, run)
    return name

@app.task(name="again", bind=True)
def again(self, name):
    if note("began:" + name, uuid.uuid4().hex) < 3:
        raise self.retry(countdown=0.1)
    return self.request.retries
"""

OURS = "feedmill.workers.transport.redis_transport:Transport"
STOCK = "redis"


@contextmanager
def working(
    url: str,
    folder: Path,
    name: str = "ours",
    through: str = OURS,
    mingle: bool = False,
) -> Iterator[Feedmill]:
    """Run a `celery worker`, which must survive the test."""
    (folder / "counting.py").write_text(APPLICATION)
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "counting",
        "worker",
        "-n",
        name,
        "-P",
        "threads",
        "-c",
        "4",
    ]
    command += [
        "-l",
        "INFO",
        "-E",
        *([] if mingle else ["--without-mingle", "--without-gossip"]),
    ]
    environment = os.environ | {"BROKER": url, "TRANSPORT": through}
    with executing(command, folder, environment, folder / f"{name}.log") as worker:
        wait_until(lambda: worker.says(" ready."), f"{name} is ready")
        yield worker
        assert worker.end() == 0


def application(url: str, through: str = STOCK) -> Any:
    app = Celery("client", broker=url, backend=url)
    app.conf.update(broker_transport=through)
    return app


def ran(client: Redis, *names: str) -> list[tuple[int, int]]:
    """Return how many runs of each task began, and how many ended."""
    count: Any = client.scard
    return [(count(f"began:{name}"), count(f"ended:{name}")) for name in names]


def idle(client: Redis) -> bool:
    held = [client.hlen(key) for key in ("reserved", "unacked")] + [
        client.zcard("reserved_index")
    ]
    return not client.llen("celery") and not any(held)


def send(app: Any, names: list[str], seconds: float = 0.0) -> None:
    for name in names:
        app.send_task("count", (name, seconds), ignore_result=True)


# Interoperation with stock clients and workers.


def test_stock_clients_and_workers_interoperate(
    redis: RedisServer, tmp_path: Path
) -> None:
    app, through_ours = application(redis.url), application(redis.url, OURS)
    events: list[dict[str, Any]] = []
    with (
        working(redis.url, tmp_path, "stock", STOCK, mingle=True) as stock,
        working(redis.url, tmp_path, "ours", mingle=True) as ours,
        app.connection() as connection,
    ):
        # the stock worker has one second to answer
        assert re.search("sync with 1 nodes|all alone", ours.text())
        receiver = app.events.Receiver(
            connection, handlers={"task-succeeded": events.append}
        )
        listener = Thread(target=receiver.capture)
        listener.start()
        wait_for_replies(app, workers=2)
        assert len(through_ours.control.inspect(timeout=60, limit=2).stats()) == 2
        assert len(app.control.inspect(timeout=60, limit=2).active_queues()) == 2
        # in one batch: sent one by one, the stock worker would take every task
        for sender in (app, through_ours):
            with sender.producer_or_acquire() as producer, producer.batch():
                results = [
                    sender.send_task("count", (str(n), 0.05), producer=producer)
                    for n in range(40)
                ]
            assert [result.get(timeout=120) for result in results] == [
                str(n) for n in range(40)
            ]
        wait_until(lambda: idle(redis.client), "all tasks are done")
        assert ran(redis.client, *map(str, range(40))) == [(2, 2)] * 40
        assert "count[" in stock.text()
        assert "count[" in ours.text()
        assert app.send_task("again", ("thrice",)).get(timeout=120) == 2
        assert (
            app.send_task("count", ("later",), countdown=2).get(timeout=120) == "later"
        )
        app.control.revoke("never", reply=True, timeout=60, limit=2)
        app.send_task("count", ("never",), task_id="never")
        wait_until(
            lambda: "Discarding revoked task" in stock.text() + ours.text(),
            "the revoked task is discarded",
        )
        wait_until(lambda: idle(redis.client), "all tasks are done")
        assert ran(redis.client, "never") == [(0, 0)]
        wait_until(lambda: len(events) == 82, "all events are received")
        receiver.should_stop = True
        listener.join()


# Redis failures. On kombu's own transport, the first ends the worker, and the second runs each
# task in flight twice.


@pytest.fixture
def durable(redis_path: str, tmp_path: Path) -> Iterator[Restartable]:
    server = Restartable(redis_path, tmp_path)
    yield server
    server.stop()


def test_cut_connections_do_not_rerun_tasks_in_flight(
    durable: Restartable, tmp_path: Path
) -> None:
    names = [str(number) for number in range(12)]
    with working(durable.url, tmp_path):
        durable.client.set("hold", 1)
        send(application(durable.url), names, 0.5)
        wait_until(
            lambda: durable.client.hlen("reserved") == 12,
            ("the worker has reserved all tasks"),
        )
        durable.client.delete("hold")
        for kind in ("normal", "pubsub"):
            durable.client.client_kill_filter(_type=kind, skipme=True)
        wait_until(lambda: idle(durable.client), "all tasks are done")
    assert ran(durable.client, *names) == [(1, 1)] * 12


def test_redis_frozen_past_the_leases_does_not_rerun_tasks(
    durable: Restartable, tmp_path: Path
) -> None:
    names = [str(number) for number in range(12)]
    with working(durable.url, tmp_path), working(durable.url, tmp_path, "beside"):
        durable.client.set("hold", 1)
        send(application(durable.url), names, 0.7)
        wait_until(
            lambda: durable.client.hlen("reserved") == 12,
            ("the workers have reserved all tasks"),
        )
        durable.client.delete("hold")
        durable.signal(signal.SIGSTOP)
        until = time.monotonic() + 8
        wait_until(lambda: time.monotonic() > until, "every lease has expired")
        durable.signal(signal.SIGCONT)
        wait_until(lambda: idle(durable.client), "all tasks are done")
    assert ran(durable.client, *names) == [(1, 1)] * 12


def test_worker_survives_redis_becoming_a_replica(
    durable: Restartable, tmp_path: Path
) -> None:
    with working(durable.url, tmp_path) as worker:
        durable.client.config_set("replica-serve-stale-data", "yes")
        durable.client.replicaof("127.0.0.1", 1)
        durable.client.client_kill_filter(_type="normal", skipme=True)
        wait_until(
            lambda: worker.says("Cannot connect") and worker.says("read only replica"),
            "Redis rejects writes",
        )
        assert "Frequent restarts" not in worker.text()
        durable.client.replicaof("NO", "ONE")
        send(application(durable.url), ["after"])
        wait_until(
            lambda: ran(durable.client, "after") == [(1, 1)],
            "the worker runs new tasks",
        )
