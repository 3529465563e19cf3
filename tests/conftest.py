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
from tests.fakes.graphs import ExportedModel, export_once
from tests.support import RedisServer, recordings, redis_servers, working

#: Test files that take the most time, the longest first.
LONGEST = (
    "test_distributed_training", "test_documentation", "test_hostile", "test_source_clocks",
    "test_host_application", "test_teaching", "test_web_pages", "test_none_of_these",
    "test_web_endpoint", "test_redis_errors", "test_refused_rows",
    "test_parquet", "test_hostile_values", "test_families", "test_reading", "test_rechecks",
    "test_onnx_engine", "test_torch_engine", "test_arctic_shift", "test_delayed",
    "test_labelling", "test_faults", "test_commands", "test_push", "test_training",
    "test_tensorrt", "test_calling", "test_spreading", "test_subreddits",
    "test_live", "test_nli", "test_other_clients", "test_flower", "test_training_commands",
    "test_similarity", "test_outbox", "test_reddit_trial", "test_worker", "test_ingest",
    "test_benchmarks", "test_models", "test_endings", "test_rerank", "test_offline_commands",
    "test_export_commands", "test_postgres", "test_redis_goes_away", "test_active",
    "test_retention", "test_acl", "test_data_folder", "test_python_api", "test_model_files",
    "test_results_commands", "test_gliclass", "test_ending", "test_differential", "test_typing",
    "test_demo", "test_stack", "test_starting", "test_sentinel", "test_tls", "test_chaos",
    "test_health", "test_own_tasks", "test_celery", "test_extending", "test_transport_faults",
    "test_deploy", "test_head", "test_secrets", "test_supervisor", "test_tracing",
    "test_tracing_away",
)  # fmt: skip

#: Test files that run on every redis-server of this machine, like the tests with the mark
#: each_redis.
ON_EACH_REDIS = ("test_demo", "test_stack", "test_tour", "test_worker")
#: Tests of these files that start several real workers, and in which no server answers otherwise.
ON_ONE_REDIS = (
    "test_a_dead_or_hung_thread_stops_the_worker", "test_interrupted_demo_leaves_no_folder",
    "test_first_start_measures_and_stores_the_token_budget",
)  # fmt: skip

# `nohup` and background jobs ignore these signals, and so would the processes that tests end with
# them.
for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A garbage-collected AsyncResult unsubscribes, possibly during another test, and blocks for 20 s
# if its Redis is gone.
del AsyncResult.__del__
gc.set_threshold(
    20_000
)  # by default, searches for garbage take a fifth of the imports' time

#: Open sockets of redis-py's connections. Connections close their socket when they are collected.
#: In Celery's reference cycles, Python may finalize the socket first and warn that it is unclosed.
#: A reference here prevents that.
SOCKETS: set[socket.socket] = set()


def _keep_sockets(kind: Any) -> None:
    connect = kind._connect

    def connect_and_keep(self: Any) -> socket.socket:
        made: socket.socket = connect(self)
        SOCKETS.difference_update(
            [each for each in list(SOCKETS) if each.fileno() == -1]
        )
        SOCKETS.add(made)
        return made

    kind._connect = connect_and_keep


for kind in (Connection, SSLConnection):
    _keep_sockets(kind)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help=("fail the run if a test is skipped (CI)"),
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --strict-skips, leave out tests of data that is no part of the project, where it is
    missing.
    """
    is_left_out = (
        collection_path.name == "test_recorded_reddit.py" and recordings() is None
    )
    return True if is_left_out and config.getoption("--strict-skips") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with `server` or marked each_redis on every redis-server, because responses differ
    by version.
    """
    is_marked = {"server"} & set(
        metafunc.fixturenames
    ) or metafunc.definition.get_closest_marker("each_redis")
    if "redis_path" in metafunc.fixturenames and is_marked:
        metafunc.parametrize(
            "redis_path", redis_servers() or [None], indirect=True, scope="module"
        )


# Tests assert no timings, and on a busy machine an example can take long.
hypothesis_settings.register_profile(
    "feedmill", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("feedmill")


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server shared by all test processes.

    The server's imports run while the tests are collected.
    """
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
        has_server = {"server", "redis_path"} <= set(getattr(item, "fixturenames", ()))
        name = item.name.partition("[")[0]
        is_of_a_file = item.path.stem in ON_EACH_REDIS and name not in ON_ONE_REDIS
        if has_server or is_of_a_file:
            item.add_marker(pytest.mark.each_redis)
    places = {stem: place for place, stem in enumerate(LONGEST)}
    gc.freeze()  # pytest's last searches for garbage would take seconds
    items.sort(
        key=lambda item: (
            places.get(item.path.stem, len(places)),
            "unit" in item.path.parts,
        )
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        reporter
        and reporter.stats.get("skipped")
        and session.config.getoption("--strict-skips")
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the machine's settings and any running stack from tests."""
    for name in list(os.environ):
        if name.startswith(("FEEDMILL_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FEEDMILL_DATA_FOLDER", str(tmp_path / "no-stack"))
    monkeypatch.setenv("FEEDMILL_CACHE_FOLDER", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_log_handlers_of_others() -> Iterator[None]:
    """Remove log handlers added by commands run in this process, which would write to a closed
    standard error.
    """
    before = logging.root.handlers[:]
    yield
    for handler in logging.root.handlers[:]:
        if handler not in before:
            logging.root.removeHandler(handler)


@pytest.fixture(scope="session")
def exported_bert(tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    """A BERT of one layer for NLI and its ONNX graph.

    All test processes share them, because an export takes ten seconds.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return export_once(folder / "exported")


@pytest.fixture(scope="module")
def redis_path(request: pytest.FixtureRequest) -> str:
    """The path of the test's redis-server, by default of the first available one."""
    servers = redis_servers()
    if not servers:
        pytest.skip("needs a redis-server of the system: apt install redis-server")
    return servers[getattr(request, "param", None) or next(iter(servers))]


@pytest.fixture(scope="module")
def redis_server(
    redis_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """A redis-server for the tests of one module."""
    server = RedisServer(redis_path, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def served(
    redis_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
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
