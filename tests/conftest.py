"""Fixtures for redis-servers and settings, the order of tests, and skipped tests."""

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from redis.connection import Connection, SSLConnection

from feedmill.shared.settings import Settings
from tests import forkserver
from tests.support import RedisServer, redis_servers, working

#: Test files that take the most time, the longest first.
LONGEST = (
    "test_hostile", "test_chaos", "test_differential", "test_redis_goes_away", "test_stack", "test_worker",
    "test_documentation", "test_starting", "test_supervisor", "test_python_api", "test_onnx_engine", "test_training",
    "test_arctic_shift", "test_deploy", "test_secrets", "test_export_commands", "test_benchmarks", "test_models",
    "test_celery", "test_ending", "test_sentinel", "test_transport_faults", "test_postgres", "test_push", "test_demo",
    "test_extending", "test_own_tasks", "test_health", "test_tls", "test_calling", "test_live", "test_head",
    "test_typing",
)  # fmt: skip

#: Test files that run on every redis-server of this machine, like the tests with the mark each_redis.
ON_EACH_REDIS = ("test_demo", "test_stack", "test_tour", "test_worker")

# `nohup` and background jobs ignore these signals, and so would the processes that tests end with them.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A garbage-collected AsyncResult unsubscribes, possibly during another test, and blocks for 20 s if its Redis is gone.
del AsyncResult.__del__
gc.set_threshold(20_000)  # by default, searches for garbage take a fifth of the imports' time

#: Open sockets of redis-py's connections. Connections close their socket when they are collected. In Celery's reference
#: cycles, Python may finalize the socket first and warn that it is unclosed. A reference here prevents that.
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
    parser.addoption("--strict-skips", action="store_true", help="fail the run if a test is skipped (CI)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with `server` or marked each_redis on every redis-server, because responses differ by version."""
    is_marked = {"server"} & set(metafunc.fixturenames) or metafunc.definition.get_closest_marker("each_redis")
    if "redis_path" in metafunc.fixturenames and is_marked:
        metafunc.parametrize("redis_path", redis_servers() or [None], indirect=True, scope="module")


# Tests assert no timings, and on a busy machine an example can take long.
hypothesis_settings.register_profile("feedmill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("feedmill")


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server shared by all test processes. The server's imports run while the tests are collected."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        server = forkserver.ForkServer()
        os.environ[forkserver.FORK_SERVER] = server.address
        config.add_cleanup(server.stop)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork the test processes, too: each would import torch and transformers for ten seconds.

    Under `make coverage` they are new interpreters, so that the lines that run in an import count.
    """
    if "COVERAGE_PROCESS_CONFIG" not in os.environ:
        for spec in specs:
            spec.python = f"{sys.executable} {forkserver.__file__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use every redis-server. Run the longest files first and unit tests last."""
    for item in items:
        if {"server", "redis_path"} <= set(getattr(item, "fixturenames", ())) or item.path.stem in ON_EACH_REDIS:
            item.add_marker(pytest.mark.each_redis)
    places = {stem: place for place, stem in enumerate(LONGEST)}
    gc.freeze()  # pytest's last searches for garbage would take seconds
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), "unit" in item.path.parts))


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and session.config.getoption("--strict-skips"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the machine's settings and any running stack from tests."""
    for name in list(os.environ):
        if name.startswith("FEEDMILL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FEEDMILL_DATA_FOLDER", str(tmp_path / "no-stack"))
    monkeypatch.setenv("FEEDMILL_CACHE_FOLDER", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_log_handlers_of_others() -> Iterator[None]:
    """Remove log handlers added by commands run in this process, which would write to a closed standard error."""
    before = logging.root.handlers[:]
    yield
    for handler in logging.root.handlers[:]:
        if handler not in before:
            logging.root.removeHandler(handler)


@pytest.fixture(scope="module")
def redis_path(request: pytest.FixtureRequest) -> str:
    """The path of the test's redis-server, by default of the first available one."""
    servers = redis_servers()
    if not servers:
        pytest.skip("needs a redis-server of the system: apt install redis-server")
    return servers[getattr(request, "param", None) or next(iter(servers))]


@pytest.fixture(scope="module")
def redis_server(redis_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server for the tests of one module."""
    server = RedisServer(redis_path, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def served(redis_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server with a worker, separate from the server that tests empty."""
    server = RedisServer(redis_path, tmp_path_factory.mktemp("redis"))
    with working(server, tmp_path_factory.mktemp("worker")):
        yield server
    server.stop()


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The module's redis-server, emptied."""
    redis_server.client.flushall()
    return redis_server


@pytest.fixture
def server(redis: RedisServer) -> RedisServer:
    """The same, on each redis-server of this machine in turn."""
    return redis


@pytest.fixture
def settings(redis: RedisServer) -> Settings:
    """Settings with the address of the emptied redis-server."""
    return Settings.model_validate({"redis_url": redis.url})
