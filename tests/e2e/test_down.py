"""`feedmill down`: ends the `feedmill up` of its data folder, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from feedmill.shared.linux import process_namespace
from feedmill.shared.settings import LOCK_FILE
from tests.support import RedisServer, feedmill, processes_in, running, wait_until

WAITING = "waiting for the worker to finish its messages …\n"
#: Uses a data folder like `feedmill up`, until SIGTERM.
HOLDER = """
import signal, sys, pathlib
from feedmill.stack.lock import lock_folder
lock = lock_folder(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
signal.pause()
"""


#: Stops for good where `feedmill up` begins its long imports.
STOPS_IMPORT = """
import pathlib, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "celery":
            pathlib.Path("importing").touch()
            signal.pause()
sys.meta_path.insert(0, Finder())
"""


@contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "locked\n"
            yield holder
        finally:
            holder.kill()


def test_ends_the_stack_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with holding(tmp_path / "a") as first, holding(tmp_path / "b") as second:
        said = feedmill("down", "--data-folder", "a", cwd=tmp_path)
        assert (said.returncode, said.stderr) == (0, WAITING)
        assert f"process {first.pid}" in said.stdout
        assert str(tmp_path / "a") in said.stdout
        assert first.wait(timeout=120) == -15
        assert second.poll() is None
    again = feedmill("down", "--data-folder", "a", cwd=tmp_path)
    assert again.returncode == 1
    assert f"No `feedmill up` is running with data in {tmp_path / 'a'}" in again.stderr


def test_commands_find_an_up_that_still_imports(tmp_path: Path) -> None:
    """Otherwise they would send their posts to another Redis on localhost."""
    (tmp_path / "imports").mkdir()
    (tmp_path / "imports" / "sitecustomize.py").write_text(STOPS_IMPORT)
    slow = {"PYTHONPATH": str(tmp_path / "imports"), "NEW_INTERPRETER": "1"}
    with running("up", "--data-folder", "data", cwd=tmp_path, **slow) as up:
        wait_until((tmp_path / "importing").exists, "the imports have begun")
        data = {"FEEDMILL_DATA_FOLDER": str(tmp_path / "data")}
        said = feedmill(
            "enqueue", "-", cwd=tmp_path, stdin='{"title": "A penalty"}\n', **data
        )
        assert (said.returncode, said.stdout) == (2, "")
        assert "`feedmill up` is starting or stopping" in said.stderr
        assert str(tmp_path / "data") in said.stderr
        assert feedmill("down", cwd=tmp_path, **data).returncode == 0
        assert up.process.wait(120) == -signal.SIGTERM


def test_ctrl_c_while_up_starts_is_a_clean_stop(tmp_path: Path) -> None:
    """While the worker loads its model."""
    with running("up", cwd=tmp_path, FEEDMILL_DATA_FOLDER="data") as up:
        wait_until(lambda: up.says(" on port "), "the stack is starting", 150)
        assert up.end(signal.SIGINT) == 0
        assert "Traceback" not in up.text()
    # A process that was just being started ends with its parent, by the kernel's signal.
    wait_until(lambda: processes_in(tmp_path) == [], "no process is left")


@pytest.mark.parametrize(
    ("command", "how", "status"),
    [("up", signal.SIGTERM, 0), ("demo", signal.SIGINT, 130)],
)
def test_a_signal_during_a_fork_is_not_lost(
    tmp_path: Path, command: str, how: signal.Signals, status: int
) -> None:
    """Python drops exceptions of signal handlers there."""
    (tmp_path / "imports").mkdir()
    code = (
        "import os, signal\nos.register_at_fork(after_in_parent=lambda: "
        f"signal.raise_signal({how:d}))\n"
    )
    (tmp_path / "imports" / "sitecustomize.py").write_text(code)
    first = {"PYTHONPATH": str(tmp_path / "imports"), "NEW_INTERPRETER": "1"}
    with running(command, cwd=tmp_path, FEEDMILL_DATA_FOLDER="data", **first) as stack:
        assert stack.process.wait(120) == status, stack.text()
    assert "ignored" not in stack.text()
    assert processes_in(tmp_path) == []


def test_a_worker_that_loads_its_model_stops_cleanly(
    redis: RedisServer, tmp_path: Path
) -> None:
    with running(
        "worker", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, FEEDMILL_LOG_LEVEL="debug"
    ) as worker:
        wait_until(worker.text, "the worker logs its start")
        assert worker.end() == 0
        assert "Traceback" not in worker.text()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '{"pid": OURS, "namespace": "elsewhere"}',
        '{"pid": -1, "namespace": ""}',
    ]
    + [
        f'{{"pid": {pid}, "namespace": "HERE"}}'
        for pid in ("1e400", "1" + "0" * 30, "true", "OURS.5", '"1"', "[1]")
    ],
)
def test_ends_no_process_that_it_does_not_know(tmp_path: Path, text: str) -> None:
    """A PID from a container names another process here."""
    with holding(tmp_path) as holder:
        content = text.replace("OURS", str(os.getpid())).replace(
            "HERE", process_namespace()
        )
        (tmp_path / LOCK_FILE).write_text(content)
        said = feedmill("down", "--data-folder", ".", cwd=tmp_path)
        assert said.returncode == 2
        assert "Stop it there" in said.stderr
        assert holder.poll() is None
