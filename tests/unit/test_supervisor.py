"""feedmill/stack/supervisor.py: restarting workers, their environment, and forwarding their log lines."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from feedmill.shared.errors import SettingsError, StackError
from feedmill.shared.settings import Settings
from feedmill.stack.devices import Share
from feedmill.stack.processes import MAX_FAILURES, STABLE_AFTER_S, Child, Failures, Service
from feedmill.stack.supervisor import MAX_LINE_BYTES, SupervisedWorker, Supervisor
from tests.support import naming

GPUS = [Share("cuda", f"cuda:{number}", {"CUDA_VISIBLE_DEVICES": str(number)}) for number in (4, 7)]


def supervised(**settings: Any) -> Supervisor:
    return Supervisor(
        Settings(**settings), GPUS, "mill@here", ["true"], {"model": "m", "token_budget": 9, "dtype": None}
    )


def test_pauses_double_until_giving_up() -> None:
    now = 0.0
    failures = Failures(lambda: now)
    pauses = []
    for _ in range(MAX_FAILURES):
        failures.started()
        now += 5
        pauses.append(failures.ended())
    assert pauses == [1, 2, 4, 8, None]


def test_healthy_run_resets_the_pauses() -> None:
    now = 0.0
    failures = Failures(lambda: now)
    pauses = []
    for seconds in (0, STABLE_AFTER_S - 1, 0, STABLE_AFTER_S, 0):
        failures.started()
        now += seconds
        pauses.append(failures.ended())
    assert pauses == [1, 2, 4, 1, 2]


def test_a_service_whose_folder_is_gone_is_not_restarted(tmp_path: Path) -> None:
    """For example because it was moved."""
    folder = tmp_path / "data"
    folder.mkdir()
    service = Service(lambda: Child("worker", ["false"], folder, {}), lambda: False)
    service.child.process.wait()
    service.supervise(lambda _: None)
    folder.rename(tmp_path / "moved")
    service._due = 0.0
    with pytest.raises(StackError, match=naming("worker", folder / "worker.log")):
        service.supervise(lambda _: None)


def test_an_answer_of_a_killed_worker_is_not_its_successors() -> None:
    """Otherwise a signal that is forwarded to workers that answer would kill one that loads its model."""
    supervisor = supervised()
    first, second = supervisor._workers
    first.process, second.process = Mock(), Mock()
    asked = {worker.node: worker.process for worker in supervisor._workers}
    first.process = Mock()  # restarted
    answer = {"rows_waiting": 0, "recent": {"posts_per_second": 0.0, "device_busy": 0.0}}
    supervisor._update_statistics(asked, {first.node: answer, second.node: answer})
    assert (first.statistics, second.statistics) == (None, answer)


def test_workers_get_settings_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("feedmill_devices", "all")
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "7")
    monkeypatch.setenv("FEEDMILL_QUEUE", "mine")
    first, second = supervised(metrics_port=9110)._workers
    assert (first.node, second.node) == ("mill-cuda:4@here", "mill-cuda:7@here")
    assert first._command == ["true", "--name", "mill-cuda:4@here"]
    environment = second._environment
    assert {name: value for name, value in environment.items() if name.upper().startswith(("FEEDMILL_", "CUDA"))} == {
        "FEEDMILL_DATA_FOLDER": environment["FEEDMILL_DATA_FOLDER"],
        "FEEDMILL_CACHE_FOLDER": environment["FEEDMILL_CACHE_FOLDER"],
        "FEEDMILL_QUEUE": "mine",
        "FEEDMILL_MODEL": "m",
        "FEEDMILL_TOKEN_BUDGET": "9",
        "FEEDMILL_DEVICE": "cuda",
        "FEEDMILL_DEVICES": "",
        "FEEDMILL_LOG_FORMAT": "text",
        "FEEDMILL_METRICS_PORT": "9111",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    assert "NOTIFY_SOCKET" not in environment
    assert environment["PATH"]


def test_rejects_ports_beyond_65535() -> None:
    assert supervised(metrics_port=65534)
    with pytest.raises(SettingsError, match=r"\b65534\b"):
        supervised(metrics_port=65535)


def test_forwards_output_in_marked_bounded_lines(capsys: pytest.CaptureFixture[str]) -> None:
    script = f"""printf 'one\\n\\n{{"time": 1}}\\nfeedmill: too many\\n'
        head -c {MAX_LINE_BYTES + 1} /dev/zero | tr '\\0' x"""
    for as_json in (False, True):
        worker = SupervisedWorker(GPUS[0], "node", ["sh", "-c", script], {}, as_json)
        worker.start()
        assert worker.process
        worker.process.wait(120)
        assert worker.exited() == 0
        one, time, long, rest = capsys.readouterr().err.splitlines()
        if as_json:
            assert json.loads(one) == {"worker": "node", "message": "one"}
            assert json.loads(time) == {"worker": "node", "time": 1}
        else:
            assert (one, time) == ("cuda:4 | one", 'cuda:4 | {"time": 1}')
            assert (long, rest) == (f"cuda:4 | {'x' * MAX_LINE_BYTES}", "cuda:4 | x")
        assert "feedmill: too many" in worker.last_lines


def test_status_line_shows_each_worker() -> None:
    supervisor = supervised()
    first, second = supervisor._workers
    first.statistics = {"recent": {"posts_per_second": 1234.5, "device_busy": 0.987}, "rows_waiting": 1500}
    second.restarts = 2
    workers, rows, restarts, fourth, seventh = supervisor._status_text(1).split(" · ")
    assert "1 of 2" in workers
    assert "1,500" in rows
    assert "2" in restarts
    assert re.search("cuda:4 .*1,234 posts/s.*0.99", fourth)
    assert seventh.startswith("cuda:7 ")
    second.due = None
    *_, given_up = supervisor._status_text(1).split(" · ")
    assert given_up.startswith("cuda:7 ")
    assert given_up != seventh
