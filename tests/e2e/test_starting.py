"""Ways to start the worker: `celery worker`, `celery multi`, systemd.

For `feedmill worker` see test_worker.py.

Each worker is started, classifies, and is stopped while messages wait. It finishes the messages it
has begun and returns the others. systemd does not run the unit: the test runs the unit's command
in its environment and reads the notifications.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from feedmill.shared.broker import connect, queue_depth
from feedmill.shared.linux import notify
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.stack.supervisor import KILL_GRACE_S
from tests import support
from tests.support import RedisServer, make_posts, wait_until

UNITS = support.ROOT / "docker" / "systemd"
UNIT_OF_WEB = UNITS / "feedmill-web.service"
UNIT, UNIT_OF_ALL = (
    UNITS / "feedmill-worker@.service",
    UNITS / "feedmill-workers.service",
)
BIN = Path(sys.executable).parent
CELERY = [sys.executable, "-P", "-m", "celery", "--app", "feedmill.workers.app"]
MESSAGES = 10


@pytest.fixture
def environment(redis: RedisServer, tmp_path: Path) -> dict[str, str]:
    few = {"FEEDMILL_WINDOW_ROWS": "64", "FEEDMILL_BATCH_ROWS": "8"}
    return support._environment(tmp_path, FEEDMILL_REDIS_URL=redis.url, **few)


def classifies(redis: RedisServer) -> dict[str, Any]:
    """Classify posts; return the worker's pool statistics."""
    app = support.application(redis)
    found = app.send_task("feedmill.classify", [support.POSTS]).get(timeout=120)
    assert [outcome["label"] for outcome in found] == ["sports", "food"]
    stats: Any = app.control.inspect(timeout=30, limit=1).stats()
    (told,) = stats.values()
    return dict(told["pool"])


def is_stopped_while_it_works(
    redis: RedisServer, settings: Settings, stop: Callable[[], int | None]
) -> None:
    """Stop the worker under load: begun messages are finished, the others returned to the queue,
    none is held.
    """
    posts = make_posts(32 * MESSAGES)
    store = ResultsStore(connect(settings), settings)
    before = store.counters().stored
    support.push(settings, posts)
    wait_until(lambda: store.counters().stored > before, "the first results are stored")
    assert not stop()
    waiting, held, _ = queue_depth(redis.client, "feedmill")
    assert held == 0
    assert store.counters().stored - before + 32 * waiting == len(posts)


def test_celery_worker_starts_classifies_and_stops(
    redis: RedisServer, settings: Settings, environment: dict[str, str], tmp_path: Path
) -> None:
    """The worker ignores `--pool prefork` and warns about a concurrency that its device does not
    support.
    """
    command = [
        *CELERY,
        "worker",
        "--loglevel",
        "info",
        "--concurrency",
        "4",
        "--pool",
        "prefork",
    ]
    with support.executing(
        command, tmp_path, environment, tmp_path / "worker.log"
    ) as worker:
        wait_until(lambda: worker.says(" ready."), "the worker is ready")
        pool = classifies(redis)
        assert (pool["implementation"], pool["max-concurrency"]) == (
            "feedmill.workers.runtime.pool:DevicePool",
            1,
        )
        assert re.search(r"WARNING.*\b4\b", worker.text())
        is_stopped_while_it_works(redis, settings, worker.end)


def test_celery_multi_starts_classifies_and_stops(
    redis: RedisServer, settings: Settings, environment: dict[str, str], tmp_path: Path
) -> None:
    """`celery multi` starts the worker in the background, with `--autoscale`, which a device does
    not support.
    """

    def multi(what: str, *flags: str) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "celery",
            "multi",
            what,
            "w1",
            f"--pidfile={tmp_path}/%n.pid",
            *flags,
        ]
        said = support.run(command, tmp_path, environment)
        assert said.returncode == 0, said.stdout + said.stderr

    log, pid = tmp_path / "w1.log", tmp_path / "w1.pid"
    try:
        multi(
            "start",
            "--app=feedmill.workers.app",
            f"--logfile={tmp_path}/%n.log",
            "--loglevel=info",
            "--autoscale=4,1",
        )
        wait_until(
            lambda: log.exists() and " ready." in log.read_text(), "the worker is ready"
        )
        assert classifies(redis)["max-concurrency"] == 1
        is_stopped_while_it_works(redis, settings, lambda: multi("stopwait"))
        assert not pid.exists()
        wait_until(lambda: not support.processes_in(tmp_path), "the process is gone")
        assert "Traceback" not in log.read_text()
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("pool", ["processes", "threads", "solo"])
def test_refuses_other_pools(
    redis: RedisServer, environment: dict[str, str], tmp_path: Path, pool: str
) -> None:
    """There, a killed process would lose posts."""
    redis.client.lpush("feedmill", "untouched")
    said = support.run([*CELERY, "worker", "--pool", pool], tmp_path, environment)
    assert said.returncode == 1
    assert re.search("^feedmill: .*--pool", said.stderr, re.MULTILINE)
    assert "Traceback" not in said.stderr
    assert redis.client.lrange("feedmill", 0, -1) == ["untouched"]


# systemd.


def told_by(unit: Path) -> dict[str, list[str]]:
    """Parse a unit file into the values of each key."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize(
    ("unit", "name"),
    [
        (UNIT, "feedmill-worker@cpu.service"),
        (UNIT_OF_ALL, UNIT_OF_ALL.name),
        (UNIT_OF_WEB, UNIT_OF_WEB.name),
    ],
)
def test_systemd_accepts_the_units(tmp_path: Path, unit: Path, name: str) -> None:
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("needs systemd-analyze: apt install systemd")
    installed = tmp_path / name
    installed.write_text(
        unit.read_text().replace("/opt/feedmill/bin/feedmill", str(BIN / "feedmill"))
    )
    verified = support.run(
        [analyze, "--man=no", "verify", str(installed)], tmp_path, os.environ
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("file", "beyond"), [(UNIT, 5), (UNIT_OF_ALL, KILL_GRACE_S + 5)]
)
def test_unit_settings_suit_the_worker(file: Path, beyond: float) -> None:
    unit = told_by(file)
    assert unit["Type"] == ["notify"]
    assert int(unit["TimeoutStopSec"][0]) > Settings().drain + beyond
    assert unit["RestartPreventExitStatus"] == [
        "2"
    ]  # a user's mistake, see feedmill/cli/main.py
    for variable in re.findall(r"FEEDMILL_[A-Z_]+", file.read_text()):
        assert variable.removeprefix("FEEDMILL_").lower() in Settings.model_fields
    # These settings would hide the GPU, or keep torch from compiling.
    assert not {
        "PrivateDevices",
        "ProtectClock",
        "DevicePolicy",
        "DeviceAllow",
        "MemoryDenyWriteExecute",
    } & set(unit)


def test_web_unit_notifies_once_it_listens(redis: RedisServer, tmp_path: Path) -> None:
    unit = told_by(UNIT_OF_WEB)
    (words,) = unit["ExecStart"]
    for variable in re.findall(r"FEEDMILL_[A-Z_]+", UNIT_OF_WEB.read_text()):
        assert variable.removeprefix("FEEDMILL_").lower() in Settings.model_fields
    command = shlex.split(words.replace("/opt/feedmill/bin", str(BIN)))
    port = str(support.free_port())
    with notified(tmp_path / "notify") as notes:
        given = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "FEEDMILL_REDIS_URL": redis.url,
        }
        with support.executing(
            [*command, "--port", port], tmp_path, os.environ | given, tmp_path / "log"
        ):
            assert notes.recv(100) == b"READY=1"
            status, text, _ = support.fetch(f"http://127.0.0.1:{port}/health")
            assert (status, text) == (200, "ok\n")


def test_unit_command_starts_a_worker(
    redis: RedisServer, settings: Settings, environment: dict[str, str], tmp_path: Path
) -> None:
    unit = told_by(UNIT)
    (words,) = unit["ExecStart"]
    given = dict(
        each.replace("%C", str(tmp_path / "cache")).split("=", 1)
        for each in unit["Environment"]
    )
    command = shlex.split(
        words.replace("%i", "cpu").replace("/opt/feedmill/bin", str(BIN))
    )
    assert command[1:] == ["worker", "--device", "cpu", "--name", "feedmill-cpu"]
    with notified(tmp_path / "notify") as notes:
        address = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with support.executing(
            command, tmp_path, environment | given | address, tmp_path / "worker.log"
        ) as worker:
            assert notes.recv(100) == b"READY=1"
            assert classifies(redis)["device"].startswith("cpu")
            is_stopped_while_it_works(redis, settings, worker.end)
            assert notes.recv(100) == b"STOPPING=1"


def test_notifies_systemd_only_if_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Try NOTIFY_SOCKET unset, naming a missing socket, and naming a socket in Linux's abstract
    namespace.
    """
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
    name = f"feedmill-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with notified(f"\0{name}") as notes:
        notify("READY=1")
        assert notes.recv(100) == b"READY=1"


@contextmanager
def notified(address: Path | str) -> Iterator[socket.socket]:
    """Bind systemd's end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes:
        notes.bind(str(address))
        notes.settimeout(120)
        yield notes
