"""The embedded stack of `demo` and `up`: starting, reporting, and above all stopping."""

import json
import os
import pty
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from redis import Redis

from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import StackError
from feedmill.shared.settings import STACK_FILE, Settings
from feedmill.stack import embedded as stack_module
from feedmill.stack import processes
from feedmill.stack.embedded import Stack, addresses_in
from tests import support
from tests.forkserver import ForkedChild
from tests.support import Feedmill, RedisServer, feedmill, make_posts, wait_until


@contextmanager
def with_redis(folder: Path) -> Iterator[Stack]:
    """Start the Redis of a durable stack with data in this folder."""
    made = Stack(Settings(), folder, durable=True)
    try:
        next(made.start())
        yield made
    finally:
        made.stop()


def test_rejects_data_that_the_server_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "appendonlydir"
    folder.mkdir(parents=True)
    (folder / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.1.base.rdb seq 1 type b\n"
    )
    (folder / "appendonly.aof.1.base.rdb").write_bytes(b"REDIS0999\xff" + bytes(8))
    with (
        pytest.raises(StackError, match="RDB format version"),
        with_redis(tmp_path / "data"),
    ):
        pass
    assert support.processes_in(tmp_path) == []


@pytest.mark.parametrize("source", support.redis_servers())
def test_reads_the_log_of_redis_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Redis 6.2 wrote a single file, which newer servers move into a folder."""
    monkeypatch.setattr(
        stack_module, "find_redis_server", lambda: support.redis_servers()[source]
    )
    (tmp_path / "data").mkdir()
    commands = [["SELECT", "0"], ["LPUSH", "feedmill", "a message"]]
    log = "".join(
        f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        for words in commands
    )
    (tmp_path / "data" / "appendonly.aof").write_text(log, newline="")
    with with_redis(tmp_path / "data") as made:
        assert made._redis.lrange("feedmill", 0, -1) == ["a message"]


@pytest.mark.parametrize("source", support.redis_servers())
def test_reads_a_snapshot_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """With an append-only file, Redis ignores snapshots and would start empty."""
    monkeypatch.setattr(
        stack_module, "find_redis_server", lambda: support.redis_servers()[source]
    )
    data = tmp_path / "data"
    data.mkdir()
    before = RedisServer(support.redis_servers()[source], data)
    before.client.lpush("feedmill", "a message")
    before.client.save()
    before.stop()
    with with_redis(data) as made:
        wait_until(
            lambda: list(data.glob("appendonlydir/*.manifest")),
            ("the append-only file is complete"),
        )
        made._redis.lpush("feedmill", "another")
    with with_redis(data) as made:
        assert made._redis.lrange("feedmill", 0, -1) == ["another", "a message"]


def test_up_keeps_its_data_and_other_commands_find_it(tmp_path: Path) -> None:
    """After a kill -9, no process survives, and the next `feedmill up` has the data, the ports and
    the passwords.
    """
    posts = support.as_jsonl(make_posts(40))
    data = {"FEEDMILL_DATA_FOLDER": "data"}
    with support.running("up", cwd=tmp_path, **data) as up:
        wait_until(
            lambda: up.says(f"export FEEDMILL_DATA_FOLDER={tmp_path / 'data'}"),
            "the stack is up",
            150,
        )
        second = feedmill("up", cwd=tmp_path, **data)
        assert second.returncode == 2
        assert str(tmp_path / "data") in second.stderr
        sent = feedmill(
            "enqueue", "-", "--run", "posts", cwd=tmp_path, stdin=posts, **data
        )
        assert sent.stdout.startswith("40 ")
        wait_until(lambda: _stored(tmp_path, data) == 40, "all results are stored")
        kept = tmp_path / "data" / "stack.json"
        assert kept.stat().st_mode & 0o777 == 0o600
        assert up.says("feedmill url --flower")
        assert json.loads(kept.read_text())["generated_password"] not in up.text()
        before = json.loads(kept.read_text())
        redis = urlsplit(feedmill("url", cwd=tmp_path, **data).stdout.strip())
        assert redis.username == "default", (
            "redis-cli cannot log in without a user name"
        )
        flower = urlsplit(
            feedmill("url", "--flower", cwd=tmp_path, **data).stdout.strip()
        )
        assert (flower.username, flower.password) == (
            "feedmill",
            before["generated_password"],
        )
        assert before["flower_url"] == f"http://127.0.0.1:{flower.port}"
        pages = feedmill("url", "--web", cwd=tmp_path, **data)
        assert pages.stdout.strip() == before["web_url"]
        assert before["generated_password"] in pages.stderr
        status, text, _ = support.fetch(f"{before['web_url']}/login")
        assert status == 200
        assert 'name="password"' in text
        # The command itself, redis-server, a worker, Flower and the pages.
        assert len(support.processes_in(tmp_path)) == 5, support.processes_in(tmp_path)
        up.end(signal.SIGKILL)
        wait_until(
            lambda: not support.processes_in(tmp_path), "every process has ended"
        )
    with support.running("up", cwd=tmp_path, **data) as up:
        wait_until(lambda: up.says("Ctrl-C"), "the stack is up again", 150)
        assert json.loads(kept.read_text()) == before
        assert f"Flower at {before['flower_url']}; " in up.text()
        assert f"pages at {before['web_url']}; " in up.text()
        assert before["generated_password"] not in up.text()
        sent = feedmill(
            "enqueue", "-", "--run", "posts", cwd=tmp_path, stdin=posts, **data
        )
        assert re.findall(r"\d+", sent.stdout)[:3] == ["0", "0", "40"]
        assert _stored(tmp_path, data) == 40
        assert up.end(signal.SIGINT, 120) == 0
    assert support.processes_in(tmp_path) == []


#: Makes standard input the controlling terminal of `feedmill`.
IN_TERMINAL = """
import fcntl, os, sys, termios
from feedmill.cli.main import run
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(run())
"""


def test_a_closed_terminal_stops_all_in_order(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    environment = os.environ | {
        "FEEDMILL_TOKEN_BUDGET": "2048",
        "FEEDMILL_DATA_FOLDER": "data",
    }
    up = support.forks().start(
        [sys.executable, "-c", IN_TERMINAL, "up"],
        tmp_path,
        environment,
        theirs,
        theirs,
        theirs,
    )
    os.close(theirs)
    shown = b""
    while b"Ctrl-C" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    up.wait(120)
    assert "Warm shutdown" in (tmp_path / "data" / "worker.log").read_text()
    assert "ready to exit" in (tmp_path / "data" / "redis.log").read_text()
    assert support.processes_in(tmp_path) == []


def test_a_second_signal_kills_what_does_not_stop(tmp_path: Path) -> None:
    with support.running(
        "up", cwd=tmp_path, FEEDMILL_DATA_FOLDER="data", FEEDMILL_DRAIN="300"
    ) as up:
        wait_until(lambda: up.says("Ctrl-C"), "the stack is up", 150)
        os.kill(redis_of(tmp_path / "data"), signal.SIGSTOP)
        up.process.send_signal(signal.SIGINT)
        wait_until(lambda: up.says("stopping"), "the stack is stopping")
        assert up.end(signal.SIGTERM) == 143
    # The kernel ends the others after the command.
    wait_until(lambda: support.processes_in(tmp_path) == [], "no process is left")


@pytest.mark.timeout(360)
def test_commands_survive_a_killed_redis_and_a_restart_of_up(tmp_path: Path) -> None:
    """`results --follow` runs throughout; nothing that was sent is lost."""
    data = {"FEEDMILL_DATA_FOLDER": "data"}
    first, second, third = (
        support.as_jsonl(make_posts(30)[start : start + 10]) for start in (0, 10, 20)
    )
    with (
        support.running("up", cwd=tmp_path, **data) as up,
        following(up, "results", "--follow", cwd=tmp_path, **data) as results,
    ):
        assert feedmill(
            "enqueue", "-", "--run", "posts", cwd=tmp_path, stdin=first, **data
        ).stdout.startswith("10 ")
        wait_until(lambda: len(shown_posts(results)) == 10, "the first posts are shown")
        # A slow disk delays the append-only file by up to two seconds; a SIGKILL loses what is not
        # in it.
        with Redis.from_url(
            feedmill("url", cwd=tmp_path, **data).stdout.strip()
        ) as redis:
            wait_until(
                lambda: redis.info("persistence")["aof_buffer_length"] == 0,
                "all writes are in the file",
            )
        os.kill(redis_of(tmp_path / "data"), signal.SIGKILL)
        wait_until(lambda: up.says("redis answers again"), "Redis is restarted")
        assert re.search("redis .*-9", up.text())
        assert feedmill(
            "enqueue", "-", "--run", "posts", cwd=tmp_path, stdin=first, **data
        ).stdout.startswith("0 ")
        assert feedmill(
            "enqueue", "-", "--run", "posts", cwd=tmp_path, stdin=second, **data
        ).stdout.startswith("10 ")
        wait_until(
            lambda: len(shown_posts(results)) == 20, "the second posts are shown"
        )
        assert up.end(signal.SIGINT) == 0
        with support.running("up", cwd=tmp_path, **data) as again:
            wait_until(lambda: again.says("Ctrl-C"), "the stack is up again", 150)
            assert feedmill(
                "enqueue", "-", "--run", "posts", cwd=tmp_path, stdin=third, **data
            ).stdout.startswith("10 ")
            wait_until(
                lambda: len(shown_posts(results)) == 30, "the third posts are shown"
            )
            assert (
                support.last_json(
                    feedmill("status", "--json", cwd=tmp_path, **data).stdout
                )["results"]["stored"]
                == 30
            )


@contextmanager
def following(
    up: Feedmill, *arguments: str, cwd: Path, **environment: str
) -> Iterator[Feedmill]:
    """Run a command that follows a stack, once the stack is up.

    Yields once it waits for results.
    """
    wait_until(lambda: up.says("Ctrl-C"), "the stack is up", 150)
    url = feedmill("url", cwd=cwd, **environment).stdout.strip()
    with Redis.from_url(url, decode_responses=True) as redis:
        before = readers(redis)
        with support.running(*arguments, cwd=cwd, **environment) as command:
            wait_until(lambda: readers(redis) > before, "the command waits for results")
            yield command


def readers(redis: Redis) -> int:
    """Return the number of clients whose last command waited for results."""
    clients: Any = redis.client_list()
    return sum(client["cmd"] == "xread" for client in clients)


def shown_posts(results: Feedmill) -> set[str]:
    assert results.process.poll() is None, results.text()
    return set(re.findall(r"^(p\d+) ", results.text(), re.MULTILINE))


def redis_of(folder: Path) -> int:
    """Return the process ID of the redis-server or valkey-server that runs in the folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink() == folder and b"-server" in (
                entry / "cmdline"
            ).read_bytes():
                return int(entry.name)
    raise AssertionError(f"no redis-server runs in {folder}")


def test_keeps_ports_until_another_program_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "PORT_TIMEOUT_S", 0.0)
    settings = Settings(data_folder=tmp_path)
    kept = addresses_in(settings)
    chosen = settings.model_copy(update={"flower_password": SecretStr("mine")})
    assert addresses_in(chosen).flower_password == "mine"
    assert addresses_in(settings) == kept
    for port in kept.ports.values():
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(
                StackError, match=support.naming(port, tmp_path / STACK_FILE)
            ),
        ):
            addresses_in(settings)


WRONG_PORT = (
    '{"redis_url": "redis://h:99999", "flower_url": "", "generated_password": ""}'
)
WRONG_TYPE = '{"redis_url": 5, "flower_url": "", "generated_password": ""}'


@pytest.mark.parametrize("content", ["{", '{"redis_url": "x"}', WRONG_PORT, WRONG_TYPE])
def test_damaged_addresses_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / STACK_FILE
    path.write_text(content)
    with pytest.raises(StackError, match=f"{re.escape(str(path))}.*Delete it"):
        addresses_in(Settings(data_folder=tmp_path))


def _stored(cwd: Path, environment: dict[str, str]) -> int:
    status = feedmill("status", "--json", cwd=cwd, **environment)
    return int(json.loads(status.stdout)["results"]["stored"])


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")
    # Variables for another Flower must not affect ours.
    monkeypatch.setenv("FLOWER_URL_PREFIX", "elsewhere")
    monkeypatch.setattr(stack_module, "Child", partial(ForkedChild, support.forks()))
    made = Stack(Settings(), tmp_path / "data", durable=False, pages=True)
    try:
        lines = made.start()
        assert "-server " in next(lines)
        # Commands find this Redis before the worker answers.
        assert (
            Settings(data_folder=tmp_path / "data").broker_url
            == made.settings.broker_url
        )
        assert [line.split()[0] for line in lines] == ["worker", "Flower", "pages"]
        yield made
    finally:
        made.stop()


def test_restarts_every_process_and_explains_why_one_keeps_failing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [service.child.process.pid for service in stack._services]
    for service in stack._services:
        service.child.kill()
    said: list[str] = []

    def is_restarted() -> bool:
        stack.supervise(said.append)
        return sum("answers again" in line for line in said) == len(before)

    wait_until(is_restarted, "every process answers again", 150)
    assert not set(before) & {service.child.process.pid for service in stack._services}
    names = {line.split()[0] for line in said}
    assert names == {"redis", "worker", "flower", "web"}
    monkeypatch.setattr(processes, "RESTARTS", Backoff(first_s=0.0, max_s=0.0))
    redis = stack._services[-1].child
    assert redis.name == "redis"
    redis.kill()
    said.clear()

    def says(words: str) -> bool:
        stack.supervise(said.append)
        return any(words in line for line in said)

    # Another program takes the port meanwhile.
    with socket.create_server(("127.0.0.1", stack.settings.redis.hosts[0][1])):
        wait_until(lambda: says("Address already in use"), "the reason is shown")
    wait_until(lambda: says("redis answers again"), "Redis is restarted")
