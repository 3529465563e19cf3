"""feedmill/monitoring/watch.py queries workers over a real Redis that workers of other applications share."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
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
) -> Iterator[None]:
    """Answer remote control commands like a worker."""
    ended = Event()
    control: Any = app.control  # kombu's type stubs lack the mailbox

    def serve() -> None:
        with app.connection() as connection:
            node = control.mailbox.Node(name, handlers={"stats": lambda _: stats}, channel=connection.channel())
            node.listen(callback=node.handle_message)
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
