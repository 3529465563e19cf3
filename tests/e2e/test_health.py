"""How the system tells that it is well: a worker's port, `feedmill health`, `feedmill status --watch`."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any

import pytest

from feedmill.processes import free_port
from producers.push import Pusher
from shared.broker import connect, make_app
from shared.keys import WORKERS
from shared.messages import ClassifyOptions
from shared.settings import Settings
from tests.support import (
    FEEDMILL,
    PASSWORD,
    RedisServer,
    feedmill,
    last_json,
    make_posts,
    running,
    start,
    wait_until,
    working,
)


def ask(port: int, path: str) -> tuple[int, str]:
    """Status and text; (0, "") where nobody answers."""
    with suppress(OSError), closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    return 0, ""


def test_a_worker_tells_prometheus_and_whether_it_is_well(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    port = free_port()
    with working(redis, tmp_path, FEEDMILL_METRICS_PORT=str(port)) as worker:
        assert f"http://127.0.0.1:{port}/metrics" in worker.text()
        wait_until(lambda: ask(port, "/readyz") == (200, "ok\n"), "the worker is ready")
        Pusher(make_app(settings), connect(settings), settings, ClassifyOptions()).push(make_posts(40))
        wait_until(
            lambda: 'feedmill_worker_posts_total{state="classified"} 40.0' in ask(port, "/metrics")[1],
            "the metrics tell that all is done",
        )
        text = ask(port, "/metrics")[1]
        assert "feedmill_redis_up 1.0" in text
        assert "feedmill_worker_batch_rows_sum 40.0" in text
        wait_until(lambda: "feedmill_results_lag_seconds_count 2.0" in ask(port, "/metrics")[1], "the lag is told")
        assert "feedmill_results_stored_total 40.0" in text
        assert 'device="cpu"' in text
        # Every connection is cut, and the worker comes back.
        redis.client.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: ask(port, "/readyz") == (200, "ok\n"), "the worker is ready again")
        assert ask(port, "/healthz") == (200, "ok\n")
        assert PASSWORD not in ask(port, "/metrics")[1]
        assert worker.end() == 0, worker.text()
    assert ask(port, "/metrics") == (0, "")


def test_a_worker_whose_port_is_taken_loads_no_model(redis: RedisServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = feedmill(
            "worker", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, FEEDMILL_METRICS_PORT=port, FEEDMILL_MODEL="/nothere"
        )
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use" in ended.stderr
    assert "/nothere" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_queue_is_told_of_while_no_worker_runs(redis: RedisServer, settings: Settings, tmp_path: Path) -> None:
    port = free_port()
    Pusher(make_app(settings), connect(settings), settings, ClassifyOptions()).push(make_posts(40))
    with running("metrics", "--metrics-port", str(port), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url) as command:
        wait_until(lambda: ask(port, "/readyz") == (200, "ok\n"), "it serves")
        assert 'feedmill_queue_messages{queue="feedmill",state="waiting"} 2.0' in ask(port, "/metrics")[1]
        assert ask(port, "/healthz") == (200, "ok\n")
        assert command.end() == 0, command.text()
    with running("metrics", "--metrics-port", str(port), cwd=tmp_path, FEEDMILL_REDIS_URL="redis://127.0.0.1:1/0"):
        wait_until(lambda: ask(port, "/readyz")[0] == 503, "it says that Redis is away")
        assert ask(port, "/healthz") == (200, "ok\n")
        assert "feedmill_redis_up 0.0" in ask(port, "/metrics")[1]


def test_health_in_words_and_as_json(served: RedisServer, redis: RedisServer, tmp_path: Path) -> None:
    well = feedmill("health", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url)
    assert well.returncode == 0, well.stdout + well.stderr
    assert [line.split()[:2] for line in well.stdout.splitlines()] == [
        ["✓", "redis"], ["✓", "memory"], ["✓", "queue"], ["✓", "workers"], ["✓", "rows"], ["✓", "reddit"],
    ]  # fmt: skip
    alone = feedmill("health", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert alone.returncode == 1
    assert "✗ workers  none answers: start one with `feedmill worker`\n" in alone.stdout
    said = feedmill("health", "--json", "--check", "workers", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 1
    assert json.loads(said.stdout) == {
        "healthy": False,
        "checks": [
            {"check": "workers", "healthy": False, "said": "none answers: start one with `feedmill worker`"},
        ],
    }
    without = feedmill("health", "--check", "queue", "--check", "redis", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert (without.returncode, len(without.stdout.splitlines())) == (0, 2)


def test_health_names_a_worker_that_is_stopped(redis: RedisServer, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    with working(redis, tmp_path, "one") as one, working(redis, tmp_path, "two") as two:
        wait_until(lambda: redis.client.hlen(WORKERS) == 2, "both are registered")
        one.process.send_signal(signal.SIGSTOP)
        said = feedmill("health", "--check", "workers", cwd=tmp_path, **url)
        seen = last_json(feedmill("status", "--json", cwd=tmp_path, **url).stdout)
        one.process.send_signal(signal.SIGCONT)
        assert said.returncode == 1
        assert re.match(r"✗ workers  no answer from one@\S+ \(alive \d+ s ago\).*two@", said.stdout)
        assert [name.partition("@")[0] for name in seen["missing"]] == ["one"]
        assert one.end() == 0
        said = feedmill("health", "--check", "workers", cwd=tmp_path, **url)
        assert said.returncode == 0, "what ended in good order is expected no more"
        assert two.end() == 0


def test_health_without_redis(tmp_path: Path) -> None:
    said = feedmill("health", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL="redis://:hunter2@127.0.0.1:1/0")
    assert (said.returncode, said.stderr) == (1, "")
    found = json.loads(said.stdout)
    assert [check["check"] for check in found["checks"]] == ["redis"]
    assert "is unreachable" in found["checks"][0]["said"]
    assert "hunter2" not in said.stdout


def test_watching_as_json_is_a_line_a_look(served: RedisServer, tmp_path: Path) -> None:
    with running("status", "--watch", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url) as command:
        wait_until(lambda: len(command.text().splitlines()) >= 2, "it has looked twice")
        assert command.end(signal.SIGINT) == 0
    lines = [json.loads(line) for line in command.text().splitlines()]
    assert list(lines[0]["workers"]) == list(lines[1]["workers"]) != []
    assert lines[0]["results_per_second"] is None
    assert lines[1]["results_per_second"] == 0
    assert lines[0]["at"] < lines[1]["at"]
    once = last_json(feedmill("status", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url).stdout)
    assert set(once) == {
        "queue", "queues", "workers", "results", "reddit", "oldest_seconds", "gaps", "dead_letters", "asked", "missing",
        "memory",
    }  # fmt: skip
    assert (once["asked"], once["missing"]) == (True, {})
    assert once["memory"]["limit"] > once["memory"]["used"] > 0


def test_watching_without_a_terminal_is_a_block_a_look(served: RedisServer, tmp_path: Path) -> None:
    with running("status", "--watch", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url) as command:
        wait_until(lambda: command.text().count("Ctrl-C quits") >= 2, "it has looked twice")
        assert command.end(signal.SIGINT) == 0
    assert "\x1b" not in command.text()
    assert "Traceback" not in command.text()
    assert max(map(len, command.text().splitlines())) <= 80


class Terminal:
    """A command in a terminal of 80 columns."""

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        self._master, terminal = pty.openpty()
        os.set_blocking(self._master, False)
        screen = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        with os.fdopen(terminal, "wb") as its:
            self.process = start([FEEDMILL, *arguments], cwd, os.environ | screen | environment, its, stdin=its)
        self._said = b""

    def text(self) -> str:
        """All that it has written so far."""
        with suppress(BlockingIOError, OSError):  # an ended process closes its side
            while part := os.read(self._master, 2**16):
                self._said += part
        return self._said.decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def watching(served: RedisServer, tmp_path: Path) -> Iterator[Terminal]:
    command = Terminal("status", "--watch", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url)
    with closing(command):
        yield command


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_watching_in_a_terminal_ends_quietly(watching: Terminal, how: signal.Signals, status: int) -> None:
    wait_until(lambda: watching.text().count("Ctrl-C quits") >= 2, "the screen was written over")
    watching.process.send_signal(how)
    assert watching.process.wait(30) == status
    text = watching.text()
    assert "worker@" in text
    assert "Traceback" not in text
    assert "Aborted" not in text
    assert "\x1b[?1049h" in text, "a screen of its own"
    assert text.rindex("\x1b[?1049l") > text.rindex("Ctrl-C quits"), "and the old one is back"
    assert "\x1b[?25h" in text, "with its cursor"


def test_watching_what_was_never_there_is_a_mistake(tmp_path: Path) -> None:
    said = feedmill("status", "--watch", cwd=tmp_path, FEEDMILL_REDIS_URL="redis://127.0.0.1:1/0")
    assert said.returncode == 2
    assert "Redis at 127.0.0.1:1/0 is unreachable" in said.stderr


def test_watching_in_a_dumb_terminal_is_a_block_a_look(served: RedisServer, tmp_path: Path) -> None:
    command = Terminal("status", "--watch", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url, TERM="dumb")
    with closing(command):
        wait_until(lambda: command.text().count("Ctrl-C quits") >= 2, "two blocks were printed")
        assert "\x1b[?1049h" not in command.text()


def redirected(output: IO[Any] | int, *arguments: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Run the command as any shell does; returns its status, what it printed into a PIPE, and its errors."""
    said = subprocess.run(
        [FEEDMILL, *arguments],
        cwd=cwd,
        env=os.environ | {"FEEDMILL_REDIS_URL": "redis://127.0.0.1:1/0"} | environment,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    return said.returncode, said.stdout, said.stderr


def test_escapes_characters_that_the_terminal_lacks(tmp_path: Path) -> None:
    status, said, errors = redirected(subprocess.PIPE, "health", cwd=tmp_path, PYTHONIOENCODING="latin-1")
    assert (status, errors) == (1, "")
    assert said.startswith("\\u2717 redis ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["health", "--json"], ["health"], ["--version"], ["--help"]])
def test_output_without_room_is_a_mistake(tmp_path: Path, arguments: list[str], unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        status, _, errors = redirected(full, *arguments, cwd=tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert errors == "feedmill: Cannot write the output: No space left on device.\n"
    assert status == 2


@pytest.mark.parametrize("arguments", [["health"], ["--help"]])
def test_a_closed_pipe_ends_a_command_with_status_0(tmp_path: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        status, _, errors = redirected(pipe, *arguments, cwd=tmp_path)
    assert (status, errors) == (0, "")
