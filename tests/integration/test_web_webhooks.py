"""Tests of notices of finished runs: addresses that they may go to, and servers that misbehave."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from redis import Redis

from feedmill.shared import runs
from feedmill.shared.errors import UserError
from feedmill.shared.keys import WEBHOOKS
from feedmill.shared.settings import Settings
from feedmill.web import webhooks
from feedmill.web.webhooks import Webhooks
from tests.support import RedisServer, free_port, wait_until

SECRET = "a long enough secret"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def sender(
    redis: RedisServer, port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Webhooks]:
    monkeypatch.setattr(webhooks, "INTERVAL_S", 0.05)
    fields = {
        "redis_url": redis.url,
        "web_webhook_hosts": f"127.0.0.1:{port}",
        "web_webhook_secret": SECRET,
    }
    made = Webhooks(redis.client, Settings.model_validate(fields))
    made.start()
    yield made
    made.stop()


@contextmanager
def receiving(port: int, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Iterator[Any]:
    """Answer each request with these bytes, and yield the list of the requests."""
    requests: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", port))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    request = b""
                    while not request.endswith(b"}"):
                        request += connection.recv(65536)
                    requests.append(request)
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    with closing(listener):
        yield requests
        listener.shutdown(socket.SHUT_RDWR)


def finish(redis: Redis, run: str) -> None:
    """Store a run of one post that has its result."""
    now = int(time.time() * 1000)
    fields = {"sent": 1, "stored": 1, "began": now, "latest": now, "used": now}
    redis.hset(f"feedmill:run:{run}", mapping={key: str(fields[key]) for key in fields})
    redis.zadd("feedmill:runs", {run: time.time()})
    progress = runs.progress(redis, run)
    assert progress is not None
    assert progress.pending == 0


@pytest.mark.parametrize(
    "address",
    [
        "http://[",
        "http://{host}/ü",
        "http://{host}/a b",
        "http://{host}/a\r\nX: y",
        "http://{host}/" + "a" * 2000,
        "http://{host}@evil.example/",
        "http://user@{host}/",
        "http://evil.example\\@{host}/",
        "http://evil.example#@{host}/",
        "http://[::ffff:127.0.0.1]/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://0.0.0.0/",
        "http://127.0.0.1/",
        "file://{host}/etc/passwd",
        "unix:///var/run/docker.sock",
        "//{host}/",
        "",
    ],
)
def test_refuses_other_addresses(sender: Webhooks, port: int, address: str) -> None:
    with pytest.raises(UserError, match="webhook"):
        sender.add("a run", address.format(host=f"127.0.0.1:{port}"))


@pytest.mark.parametrize(
    "stored",
    [
        "{",
        "[]",
        '{"since": 1, "due": 0}',
        '{"url": "http://127.0.0.1/ü", "since": NOW, "attempts": 0, "due": 0}',
        '{"url": 5, "since": NOW, "attempts": 0, "due": 0}',
        '{"url": "x", "since": NOW, "attempts": 1e999, "due": 0}',
        '{"url": "x", "since": NOW, "attempts": "x", "due": NaN}',
    ],
)
def test_a_damaged_notice_stops_no_other(
    redis: RedisServer, sender: Webhooks, port: int, stored: str
) -> None:
    finish(redis.client, "damaged")
    finish(redis.client, "good")
    text = stored.replace("NOW", str(time.time()))
    redis.client.hset(WEBHOOKS, "damaged", text)
    with receiving(port) as requests:
        wait_until(lambda: text not in redis.client.hvals(WEBHOOKS), "it was looked at")
        sender.add("good", f"http://127.0.0.1:{port}/hook")
        wait_until(lambda: requests, "the notice has come")
    assert b'"run": "good"' in requests[0]


def test_a_notice_waits_for_the_first_post_of_its_run(
    redis: RedisServer, sender: Webhooks, port: int
) -> None:
    """It is stored first; another server may look meanwhile."""
    with receiving(port) as requests:
        sender.add("new", f"http://127.0.0.1:{port}/")
        finish(redis.client, "other")
        sender.add("other", f"http://127.0.0.1:{port}/")
        wait_until(lambda: requests, "all notices were looked at")
        finish(redis.client, "new")
        wait_until(lambda: len(requests) == 2, "the notice has come")
        wait_until(lambda: not redis.client.hlen(WEBHOOKS), "both notices are done")


def test_a_server_that_drips_its_answer_is_cut_off(
    redis: RedisServer,
    sender: Webhooks,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 0.5)
    finish(redis.client, "slow")
    listener = socket.create_server(("127.0.0.1", port))
    with closing(listener):
        sender.add("slow", f"http://127.0.0.1:{port}/")
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")

            def is_cut_off() -> bool:
                try:
                    connection.sendall(b"X-Slow: 1\r\n")
                except OSError:
                    return True
                return False

            wait_until(is_cut_off, "the connection ends")


@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
def test_a_notice_that_comes_while_another_is_sent_is_sent_as_well(
    redis: RedisServer,
    sender: Webhooks,
    port: int,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The former is answered, or has failed for the last time."""
    monkeypatch.setattr(webhooks, "MAX_ATTEMPTS", 1)
    finish(redis.client, "again")
    answer = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()
    listener = socket.create_server(("127.0.0.1", port))
    with closing(listener):
        sender.add("again", f"http://127.0.0.1:{port}/former")
        former, _ = listener.accept()
        with former:
            assert b"/former" in former.recv(65536)
            sender.add("again", f"http://127.0.0.1:{port}/later")
            former.sendall(answer)
        listener.settimeout(120)
        later, _ = listener.accept()
        with later:
            assert b"/later" in later.recv(65536)
            later.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        wait_until(lambda: not redis.client.hlen(WEBHOOKS), "nothing waits")


def test_removes_the_same_notice_while_others_come(redis: RedisServer) -> None:
    redis.client.hset(WEBHOOKS, mapping={"one": "a", "two": "b"})
    webhooks.remove(redis.client, "one", "another")
    assert redis.client.hgetall(WEBHOOKS) == {"one": "a", "two": "b"}
    webhooks.remove(redis.client, "one", "a")
    assert redis.client.hgetall(WEBHOOKS) == {"two": "b"}
