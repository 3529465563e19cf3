"""Redis failures and worker failures lose no message."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as TimeoutFault

from feedmill.shared import broker
from feedmill.shared.broker import connect, make_app, queue_depth
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.transport.redis_transport import Channel
from tests.fakes import constants
from tests.fakes.proxy import Proxy
from tests.support import (
    Restartable,
    application,
    feedmill,
    make_posts,
    push,
    wait_for_replies,
    wait_until,
    working,
)

pytestmark = pytest.mark.each_redis

#: Early first results.
QUICK = {"FEEDMILL_BATCH_ROWS": "8"}


@pytest.fixture
def durable(redis_path: str, tmp_path: Path) -> Iterator[Restartable]:
    server = Restartable(redis_path, tmp_path)
    yield server
    server.stop()


def kill(server: Restartable) -> None:
    server.kill()
    server.start()


def pause(server: Restartable) -> None:
    """Freeze Redis for longer than the leases last."""
    server.signal(signal.SIGSTOP)
    began = time.monotonic()
    wait_until(
        lambda: time.monotonic() - began > 2 * Channel.visibility_timeout,
        "every lease would have expired",
    )
    server.signal(signal.SIGCONT)


def cut(server: Restartable) -> None:
    for kind in ("normal", "pubsub"):
        server.client.client_kill_filter(_type=kind, skipme=True)


def test_worker_survives_redis_failures(durable: Restartable, tmp_path: Path) -> None:
    """The same process continues; every post is stored exactly once."""
    posts = make_posts(600)
    settings = Settings.model_validate({"redis_url": durable.url})
    store = ResultsStore(connect(settings), settings)

    def survives(befalls: Callable[[Restartable], None], first: int) -> None:
        push(settings, posts[first : first + 200])
        wait_until(
            lambda: store.counters().stored > first, "the first results are stored"
        )
        befalls(durable)
        wait_until(
            lambda: _quietly(lambda: store.counters().stored == first + 200),
            "all results are stored",
            90,
        )
        wait_until(
            lambda: _quietly(lambda: not sum(queue_depth(durable.client, "feedmill"))),
            "the queue is empty",
        )

    with working(durable, tmp_path, **QUICK) as worker:
        for number, befalls in enumerate((kill, pause, cut)):
            survives(befalls, 200 * number)
        assert worker.end(signal.SIGTERM) == 0, worker.text()
    assert durable.client.xlen(RESULTS_STREAM) == len(posts)
    assert "Traceback" not in worker.text()


#: The timeouts of a worker's connections, except of the one for events. None is needed to notice
#: that all are lost.
TIMEOUTS = (
    "workers.transport.redis_transport.Channel.socket_timeout",
    "workers.runtime.pool.RESULTS_TIMEOUT_S",
    "shared.metrics.REDIS_TIMEOUT_S",
)


def test_worker_reconnects_when_connections_are_lost_in_silence(
    durable: Restartable, tmp_path: Path
) -> None:
    """A firewall that has forgotten connections drops what is sent, and nothing else tells either
    side.
    """
    proxy = Proxy(durable.port)
    app = application(durable)
    names = count()

    def classify() -> Any:
        post = {
            "id": f"p{next(names)}",
            "title": "The keeper saved two penalties in the final",
        }
        # The worker sends the callback over another connection. It fails, because outcomes are no
        # posts.
        callback = app.signature("feedmill.classify", task_id=f"link of {post['id']}")
        return app.send_task("feedmill.classify", [[post]], link=callback)

    long: dict[str, Any] = {f"feedmill.{name}": 1000 for name in TIMEOUTS}
    long["feedmill.shared.broker.APPLICATION_TIMEOUTS"] = dict.fromkeys(
        broker.APPLICATION_TIMEOUTS, 1000
    )
    given = {
        "FEEDMILL_REDIS_URL": f"redis://127.0.0.1:{proxy.port}/0",
        constants.VARIABLE: json.dumps(long),
    }
    try:
        with working(durable, tmp_path, **given) as worker:
            wait_for_replies(app)
            for _ in range(2):
                assert classify().get(timeout=120)
                proxy.silence()
                assert classify().get(timeout=120)
                wait_for_replies(app)
            ids = [f"link of p{number}" for number in range(next(names))]
            wait_until(
                lambda: all(app.AsyncResult(name).ready() for name in ids),
                "the callbacks have run",
            )
            assert worker.end() == 0
    finally:
        proxy.stop()
        app.close()


def _quietly(holds: Callable[[], bool]) -> bool:
    with suppress(RedisError):
        return holds()
    return False


def test_an_unresponsive_redis_is_reported(
    durable: Restartable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and never answers.

    Without timeouts and limits on retries, commands would hang.
    """
    settings = Settings.model_validate({"redis_url": durable.url})
    monkeypatch.setattr(
        broker,
        "APPLICATION_TIMEOUTS",
        {"socket_timeout": 0.2, "socket_connect_timeout": 0.2},
    )
    app: Any = make_app(settings, current=False)
    durable.signal(signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutFault):
            connect_for_monitoring(settings).ping()
        with pytest.raises(OperationalError, match="[Tt]im"):
            app.control.ping()
        with pytest.raises(TimeoutFault):
            app.backend.client.ping()
        said = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=durable.url)
    finally:
        durable.signal(signal.SIGCONT)
    assert said.returncode == 2
    assert "is unreachable" in said.stderr


def test_losing_a_permission_stops_the_worker_naming_the_user(
    durable: Restartable, tmp_path: Path
) -> None:
    durable.client.acl_setuser(
        "worker",
        enabled=True,
        passwords=["+x"],
        keys=["*"],
        channels=["*"],
        commands=["+@all"],
    )
    url = durable.url.replace("redis://", "redis://worker:x@")
    with working(durable, tmp_path, FEEDMILL_REDIS_URL=url) as worker:
        durable.client.acl_setuser(
            "worker",
            enabled=True,
            keys=["*"],
            channels=["*"],
            commands=["+@all", "-hdel"],
        )
        assert worker.process.wait(120) == 1
    assert "user worker " in worker.text()
    assert "Traceback" not in worker.text()
