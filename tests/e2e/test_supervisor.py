"""`feedmill worker --devices`: one process per device, kept running, stopped together."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.settings import Settings
from tests.e2e.test_starting import notified
from tests.support import (
    ROOT,
    Feedmill,
    RedisServer,
    executing,
    make_posts,
    processes_in,
    push,
    running,
    wait_until,
)

needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores, one per worker"
)

STANDIN = [sys.executable, "-m", "tests.fakes.standin_worker"]
#: Workers that do nothing until they receive a signal.
IDLE = """
import signal, sys
from feedmill.shared.linux import notify
print('begun', sys.argv[-1], flush=True)
notify('READY=1')
signal.pause()
"""
#: Workers that ignore SIGTERM.
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + IDLE
#: The first worker fails at once.
ONE_BREAKS = "import sys; 'cpu:0' in sys.argv[-1] and sys.exit('it broke')\n" + IDLE
#: The first worker exits because of a wrong setting; the second would continue.
ONE_REFUSES = (
    "import sys; 'cpu:0' in sys.argv[-1] and (print('feedmill: too many'), sys.exit(2))\n"
) + IDLE


@contextmanager
def supervised(folder: Path, *command: str, **environment: str) -> Iterator[Feedmill]:
    """Run a supervisor of two workers with the given command."""
    given = {
        "FEEDMILL_REDIS_URL": "redis://127.0.0.1:1/0",
        "STANDIN_ROW_SECONDS": "0.01",
    }
    words = [sys.executable, "-m", "tests.fakes.supervised", *command]
    with executing(
        words, ROOT, os.environ | given | environment, folder / "supervisor.log"
    ) as supervisor:
        yield supervisor


def workers_of(supervisor: Feedmill) -> dict[str, int]:
    """Return the worker processes by device name."""
    found = {}
    pid = supervisor.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[:-1]
        if arguments:  # none for a process that has ended
            found[
                arguments[-1].decode().removeprefix("feedmill-").partition("@")[0]
            ] = int(child)
    return found


@needs_two_cores
def test_workers_share_cpus_and_a_killed_one_is_restarted(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    given = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_TOKEN_BUDGET": "512",
        "FEEDMILL_BATCH_ROWS": "8",
    }
    with (
        notified(tmp_path / "notify") as notes,
        supervised(
            tmp_path, *STANDIN, **given, NOTIFY_SOCKET=str(tmp_path / "notify")
        ) as supervisor,
    ):
        assert notes.recv(100) == b"READY=1"
        told_at = datetime.now()
        wait_until(lambda: supervisor.says(" ready.", 2), "both lines are passed on")
        times = re.findall(r"([-\d]+ [:\d]+),\d+ .* ready\.", supervisor.text())
        assert len(times) == 2
        assert max(map(datetime.fromisoformat, times)) <= told_at, (
            "READY=1 is sent once both workers are ready"
        )
        before = workers_of(supervisor)
        first, second = (
            os.sched_getaffinity(before[name]) for name in ("cpu:0", "cpu:1")
        )
        assert first | second == os.sched_getaffinity(0)
        assert not first & second
        told = Path(f"/proc/{before['cpu:0']}/environ").read_bytes().split(b"\0")
        assert (
            f"RAYON_NUM_THREADS={os.environ.get('RAYON_NUM_THREADS', len(first))}".encode()
            in told
        )
        push(settings, make_posts(640))
        wait_until(
            lambda: redis.client.xlen(RESULTS_STREAM) > 0,
            "the first results are stored",
        )
        os.kill(before["cpu:0"], signal.SIGKILL)
        wait_until(lambda: supervisor.says(" ready.", 3), "the replacement is ready")
        assert workers_of(supervisor)["cpu:1"] == before["cpu:1"]
        wait_until(
            lambda: redis.client.xlen(RESULTS_STREAM) == 640,
            ("the killed worker's posts are classified"),
        )
        both_up = re.compile(r"\b2 of 2 workers.* 1 restart")
        wait_until(
            lambda: both_up.search(supervisor.text()), "both workers answer again"
        )
        supervisor.process.send_signal(signal.SIGUSR1)
        wait_until(
            lambda: all(
                supervisor.says(f"{name} | LOCAL VARIABLES") for name in before
            ),
            "both handle SIGUSR1",
        )
        supervisor.process.send_signal(signal.SIGTERM)
        assert notes.recv(100) == b"STOPPING=1"
        assert supervisor.process.wait(120) == 0
    said = supervisor.text()
    assert re.search(r"status -9.* 0\.05 s", said)
    for name in ("cpu:0", "cpu:1"):
        assert f"{name} | worker: Warm shutdown" in said


@needs_two_cores
def test_a_failing_worker_delays_neither_systemd_nor_the_other(tmp_path: Path) -> None:
    with (
        notified(tmp_path / "notify") as notes,
        supervised(
            tmp_path,
            sys.executable,
            "-c",
            ONE_BREAKS,
            NOTIFY_SOCKET=str(tmp_path / "notify"),
        ) as supervisor,
    ):
        assert notes.recv(100) == b"READY=1"
        wait_until(
            lambda: supervisor.says("cpu:0 | it broke", 3),
            "the first worker is restarted",
        )
        supervisor.process.send_signal(signal.SIGINT)
        assert supervisor.process.wait(120) == 0
    assert supervisor.text().count("cpu:1 | begun feedmill-cpu:1@") == 1


@needs_two_cores
def test_a_configuration_error_stops_all(tmp_path: Path) -> None:
    with supervised(tmp_path, sys.executable, "-c", ONE_REFUSES) as supervisor:
        assert supervisor.process.wait(120) == 2
    assert "cpu:0 | feedmill: too many" in supervisor.text()
    assert re.match(
        "feedmill: worker feedmill-cpu:0@", supervisor.text().splitlines()[-1]
    )


@needs_two_cores
def test_kills_workers_that_do_not_stop_in_time(tmp_path: Path) -> None:
    with supervised(
        tmp_path, sys.executable, "-c", DEAF, FEEDMILL_DRAIN="0.1"
    ) as supervisor:
        wait_until(lambda: supervisor.says("| begun", 2), "both workers have started")
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.process.wait(120) == 1
    assert len(re.findall(r"cpu:\d.*kill", supervisor.text())) == 2


@needs_two_cores
def test_workers_exit_if_the_supervisor_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path, sys.executable, "-c", DEAF) as supervisor:
        wait_until(lambda: supervisor.says("| begun", 2), "both workers have started")
        workers = workers_of(supervisor).values()
        supervisor.process.kill()
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers),
            "the workers are gone",
        )


@needs_two_cores
def test_two_cpu_workers_classify_and_stop(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    """Run two real workers on the embedded model."""
    given = {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_TOKEN_BUDGET": "2048"}
    with running(
        "worker", "--devices", "cpu:2", "--name", "mill@here", cwd=tmp_path, **given
    ) as command:
        wait_until(lambda: command.says("2 of 2 workers"), "both workers are up")
        push(settings, make_posts(64))
        wait_until(
            lambda: redis.client.xlen(RESULTS_STREAM) == 64, "all posts are classified"
        )
        assert command.end(signal.SIGINT) == 0, command.text()
        text = command.text()
    for name in ("cpu:0", "cpu:1"):
        assert f"mill-{name}@here ready." in text
        assert f"{name} | worker: Warm shutdown" in text
    assert "Traceback" not in text
    assert not processes_in(tmp_path)
