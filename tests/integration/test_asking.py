"""feedmill/monitoring/watch.py queries workers over a real Redis that workers of other applications share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Semaphore, Thread
from typing import Any

import pytest
from celery import Celery

from feedmill.monitoring.watch import FEEDMILL_POOL, worker_statistics
from feedmill.shared.broker import make_app
from feedmill.shared.settings import Settings
from tests.support import RedisServer, wait_until

STATS = {"pool": {"implementation": FEEDMILL_POOL}}


@pytest.fixture
def app(redis: RedisServer) -> Iterator[Celery]:
    app = make_app(Settings.model_validate({"redis_url": redis.url}))
    yield app
    app.close()


@contextmanager
def answering(
    redis: RedisServer,
    app: Celery,
    name: str,
    stats: object,
    before: Callable[[], object] = bool,
    after: Callable[[], object] = bool,
) -> Iterator[None]:
    """Answer remote control commands like a worker. before, after: called before and after each reply."""
    ended = Event()

    def handler(_: object) -> object:
        before()
        return stats

    control: Any = app.control  # kombu's type stubs lack the mailbox

    def serve() -> None:
        with app.connection() as connection:
            node = control.mailbox.Node(name, handlers={"stats": handler}, channel=connection.channel())

            def hear(body: Any, message: Any) -> None:
                node.handle_message(body, message)
                after()

            node.listen(callback=hear)
            while not ended.is_set():
                try:
                    connection.drain_events(timeout=0.05)
                except TimeoutError:
                    continue

    def listening() -> int:
        clients: Any = redis.client.client_list()
        return sum(int(each["sub"]) + int(each["psub"]) for each in clients)

    before_it = listening()
    thread = Thread(target=serve, daemon=True)
    thread.start()
    try:
        wait_until(lambda: listening() > before_it, f"{name} is listening")
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "stats", [{"error": "no statistics"}, "none", None, {"pool": "solo"}, {"pool": {}}, {"pool": None}], ids=range(6)
)
def test_ignores_replies_of_other_applications(redis: RedisServer, app: Celery, stats: object) -> None:
    with answering(redis, app, "theirs@here", stats), answering(redis, app, "ours@here", STATS):
        assert worker_statistics(app, ["ours@here", "theirs@here"], 20) == {"ours@here": STATS["pool"]}


def test_waits_for_every_name_when_two_workers_share_one(redis: RedisServer, app: Celery) -> None:
    answered = Semaphore(0)

    def two_have() -> None:
        for _ in range(2):
            assert answered.acquire(timeout=120)

    with ExitStack() as workers:
        for _ in range(2):
            workers.enter_context(answering(redis, app, "same@here", STATS, after=answered.release))
        workers.enter_context(answering(redis, app, "third@here", STATS, before=two_have))
        assert list(worker_statistics(app, ["same@here", "third@here"], 20)) == ["same@here", "third@here"]
        for _ in range(2):
            answered.release()  # lets the connection serve the next query
        assert len(worker_statistics(app, ["same@here", "third@here"], 20)) == 2
