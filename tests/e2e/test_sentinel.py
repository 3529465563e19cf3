"""sentinel:// addresses: connecting to the current master, and failing over without restarting
workers.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from feedmill.producers.push import Pusher
from feedmill.shared.broker import TRANSPORT_KEYS, connect, make_app, queue_depth
from feedmill.shared.errors import RedisUnavailable
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings, load
from feedmill.stack.processes import Child
from tests import support
from tests.support import RedisServer, feedmill, make_posts, wait_until, working

pytestmark = pytest.mark.each_redis

#: Password of the Sentinels themselves.
SENTINELS_PASSWORD = "sentinels-password"
MASTER = "posts"
DOWN_AFTER_MS = 1000


class Watched:
    """A master and a replica, monitored by three Sentinels."""

    def __init__(self, path: str, folder: Path, stack: ExitStack) -> None:
        self._path = path
        self._folder = folder
        self.first = self._redis("first", stack)
        self.second = self._redis(
            "second", stack, f"replicaof 127.0.0.1 {self.first.port}\n"
        )
        wait_until(
            lambda: (
                self.second.client.info("replication")["master_link_status"] == "up"
            ),
            "the replica is in sync",
        )
        self.sentinels = [self._sentinel(number, stack) for number in range(3)]
        wait_until(
            lambda: all(map(self._knows_all, self.sentinels)),
            ("the Sentinels know each other"),
            90,
        )
        self.url = ";".join(
            f"sentinel://:{support.PASSWORD}@127.0.0.1:{port}/0"
            for port in self.sentinels
        )

    @property
    def flags(self) -> dict[str, str]:
        return {
            "redis_url": self.url,
            "redis_master": MASTER,
            "redis_sentinel_password": SENTINELS_PASSWORD,
        }

    def settings(self) -> Settings:
        return load(**self.flags)

    def masters(self) -> set[int]:
        """Return the ports of all masters named by a Sentinel.

        Once the Sentinels agree, there is only one.
        """
        found: list[Any] = []
        for port in self.sentinels:
            with Redis(
                port=port, password=SENTINELS_PASSWORD, decode_responses=True
            ) as client:
                found.append(client.sentinel_get_master_addr_by_name(MASTER))
        return {int(address[1]) for address in found}

    def _redis(
        self, name: str, stack: ExitStack, configuration: str = ""
    ) -> RedisServer:
        folder = self._folder / name
        folder.mkdir()
        more = f"masterauth {support.PASSWORD}\nrepl-diskless-sync-delay 0\n"
        server = RedisServer(self._path, folder, more + configuration)
        stack.callback(server.stop)
        return server

    def _sentinel(self, number: int, stack: ExitStack) -> int:
        port, folder = support.free_port(), self._folder / f"sentinel-{number}"
        folder.mkdir()
        configuration = folder / "sentinel.conf"
        configuration.write_text(
            f"port {port}\nbind 127.0.0.1\nrequirepass {SENTINELS_PASSWORD}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {self.first.port} 2\nsentinel auth-pass "
            f"{MASTER} {support.PASSWORD}\n"
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\nsentinel "
            f"failover-timeout {MASTER} 5000\n"
        )
        child = Child(
            "sentinel",
            [self._path, str(configuration), "--sentinel"],
            folder,
            dict(os.environ),
        )
        stack.callback(child.stop, 10)
        return port

    def _knows_all(self, port: int) -> bool:
        with (
            suppress(RedisError),
            Redis(
                port=port, password=SENTINELS_PASSWORD, decode_responses=True
            ) as client,
        ):
            found: Any = client.sentinel_master(MASTER)
            return bool(found["num-other-sentinels"] == 2 and found["num-slaves"] == 1)
        return False


@pytest.fixture(scope="module")
def watched(
    redis_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(redis_path, tmp_path_factory.mktemp("watched"), stack)


def test_failover_under_load_loses_only_unreplicated_posts(
    watched: Watched, tmp_path: Path
) -> None:
    """One worker continues with the new master; every post known to it is stored exactly once."""
    settings = watched.settings()
    posts = make_posts(300)
    pusher = Pusher(make_app(settings), connect(settings), settings, ClassifyOptions())
    old, new = watched.first.client, watched.second.client
    way = {f"FEEDMILL_{name.upper()}": value for name, value in watched.flags.items()}
    with working(watched.first, tmp_path, **way) as worker:
        sent = feedmill(
            "enqueue", "-", cwd=tmp_path, stdin=support.as_jsonl(posts[:40]), **way
        )
        assert sent.returncode == 0, sent.stderr
        wait_until(lambda: old.xlen(RESULTS_STREAM) == 40, "the first posts are stored")
        found = feedmill("results", "--limit", "100", cwd=tmp_path, **way)
        assert len(found.stdout.splitlines()) == 40, found.stderr
        assert feedmill("health", cwd=tmp_path, **way).returncode == 0
        told = str(make_app(settings).control.inspect(timeout=30, limit=1).stats())
        assert "broker" in told
        assert not any(
            secret in told for secret in (support.PASSWORD, SENTINELS_PASSWORD)
        )

        pusher.push(posts[40:220])
        wait_until(lambda: old.xlen(RESULTS_STREAM) > 60, "the worker is busy")
        watched.first.kill()
        wait_until(
            lambda: watched.masters() == {watched.second.port},
            ("the Sentinels agree on the new master"),
            60,
        )
        known = known_posts(new)
        pusher.push(posts[220:])  # the existing producer must find the new master
        known |= {post.id for post in posts[220:]}
        wait_until(
            lambda: not sum(queue_depth(new, settings.queue)), "the queue is empty", 120
        )
        wait_until(
            lambda: stored(new) >= known, "every post known to the new master is stored"
        )
        assert worker.process.poll() is None
        assert worker.end() == 0
    ids = [
        result.post.id
        for result in support.latest(ResultsStore(new, settings), len(posts) + 1)
    ]
    assert len(ids) == len(set(ids))
    # Posts acknowledged by the old master but not yet replicated are lost, and only those.
    lost = {post.id for post in posts} - set(ids)
    assert lost == {post.id for post in posts} - known
    assert len(lost) < len(posts) / 2


def known_posts(redis: Redis) -> set[str]:
    """Return the ids of posts that are stored, waiting or held, read atomically."""
    pipe: Any = redis.pipeline(transaction=True)
    pipe.xrange(RESULTS_STREAM)
    pipe.lrange("feedmill", 0, -1)
    pipe.hvals(TRANSPORT_KEYS["reserved_key"])
    entries, waiting, held = pipe.execute()
    bodies = map(support.body_of, waiting + held)
    return {entry["id"] for _, entry in entries} | {
        post["id"] for _, kwargs, _ in bodies for post in kwargs["posts"]
    }


def stored(redis: Any) -> set[str]:
    return {entry["id"] for _, entry in redis.xrange(RESULTS_STREAM)}


def test_one_reachable_sentinel_is_enough(watched: Watched) -> None:
    """Sentinels that do not answer are skipped."""
    settings = watched.settings()
    gone = f"sentinel://:{support.PASSWORD}@127.0.0.1:{support.free_port()}/0"
    settings = load(
        **watched.flags | {"redis_url": f"{gone};{watched.url.split(';')[0]}"}
    )
    assert connect(settings).ping()
    make_app(settings).connection_for_write().connect()
    app: Any = make_app(settings)
    assert app.backend.client.ping()


#: Sends a message with the application that `feedmill url --celery` printed.
SENDS = """
app.backend.client.ping()
app.send_task("feedmill.classify", kwargs={"posts": []}, queue="printed")
"""


def test_printed_application_finds_the_master(watched: Watched, tmp_path: Path) -> None:
    way = {f"FEEDMILL_{name.upper()}": value for name, value in watched.flags.items()}
    printed = feedmill("url", "--celery", cwd=tmp_path, **way)
    assert printed.returncode == 0, printed.stderr
    program = [sys.executable, "-c", printed.stdout + SENDS]
    sent = support.run(program, tmp_path, os.environ | way)
    assert sent.returncode == 0, sent.stderr
    assert connect(watched.settings()).llen("printed") == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"redis_master": "other"}, "other.*FEEDMILL_REDIS_MASTER"),
        ({"redis_sentinel_password": "wrong"}, "FEEDMILL_REDIS_SENTINEL_PASSWORD"),
        ({"redis_sentinel_password": None}, "FEEDMILL_REDIS_SENTINEL_PASSWORD"),
    ],
    ids=str,
)
def test_errors_name_the_setting(
    watched: Watched, changed: dict[str, str], words: str
) -> None:
    settings = load(**watched.flags | changed)
    with pytest.raises(RedisUnavailable, match=words) as told, user_errors(settings):
        connect(settings).ping()
    assert support.PASSWORD not in str(told.value)
    assert len(str(told.value)) < 300
