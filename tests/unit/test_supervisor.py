"""feedmill/supervisor.py: when a worker is started again, what it is told, and how its lines are passed on."""

import json
from typing import Any

import pytest

from feedmill.devices import Share
from feedmill.supervisor import MAX_FAILURES, MAX_LINE_BYTES, STABLE_AFTER_S, Failures, Supervisor, Worker
from shared.errors import SettingsError
from shared.settings import Settings

GPUS = [Share("cuda", f"cuda:{number}", {"CUDA_VISIBLE_DEVICES": str(number)}) for number in (4, 7)]


def supervised(**settings: Any) -> Supervisor:
    return Supervisor(
        Settings(**settings), GPUS, "mill@here", ["true"], {"model": "m", "token_budget": 9, "dtype": None}
    )


def test_pauses_double_until_the_device_is_given_up() -> None:
    now = 0.0
    failures = Failures(lambda: now)
    pauses = []
    for _ in range(MAX_FAILURES):
        failures.started()
        now += 5
        pauses.append(failures.ended())
    assert pauses == [1, 2, 4, 8, None]


def test_after_a_minute_all_is_forgotten() -> None:
    now = 0.0
    failures = Failures(lambda: now)
    pauses = []
    for seconds in (0, STABLE_AFTER_S - 1, 0, STABLE_AFTER_S, 0):
        failures.started()
        now += seconds
        pauses.append(failures.ended())
    assert pauses == [1, 2, 4, 1, 2]


def test_what_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("feedmill_devices", "all")
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "7")
    monkeypatch.setenv("FEEDMILL_QUEUE", "mine")
    first, second = supervised(metrics_port=9110)._workers
    assert (first.node, second.node) == ("mill-cuda:4@here", "mill-cuda:7@here")
    assert first._command == ["true", "--name", "mill-cuda:4@here"]
    told = second._environment
    assert {name: value for name, value in told.items() if name.upper().startswith(("FEEDMILL_", "CUDA"))} == {
        "FEEDMILL_DATA_FOLDER": told["FEEDMILL_DATA_FOLDER"],
        "FEEDMILL_CACHE_FOLDER": told["FEEDMILL_CACHE_FOLDER"],
        "FEEDMILL_QUEUE": "mine",
        "FEEDMILL_MODEL": "m",
        "FEEDMILL_TOKEN_BUDGET": "9",
        "FEEDMILL_DEVICE": "cuda",
        "FEEDMILL_DEVICES": "",
        "FEEDMILL_LOG_FORMAT": "text",
        "FEEDMILL_METRICS_PORT": "9111",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    assert "NOTIFY_SOCKET" not in told
    assert told["PATH"]


def test_ports_that_there_are_not() -> None:
    assert supervised(metrics_port=65534)
    with pytest.raises(SettingsError, match=r"FEEDMILL_METRICS_PORT: .* from 65535 up.* Set 65534"):
        supervised(metrics_port=65535)


def test_lines_stay_whole_and_bounded() -> None:
    worker = Worker(GPUS[0], "node", [], {})
    assert worker.lines(b"one\ntw") == [b"one"]
    assert worker.lines(b"o\n\nthr") == [b"two", b""]
    assert worker.lines(b"x" * MAX_LINE_BYTES) == [b"thr" + b"x" * MAX_LINE_BYTES]
    assert worker.lines(b"\n") == [b""]


def test_lines_say_whose_they_are() -> None:
    text, as_json = supervised(), supervised(log_format="json")
    (worker, _) = text._workers
    assert text._marked(worker, "a line") == "cuda:4 | a line"
    assert json.loads(as_json._marked(worker, '{"time": 1}')) == {"worker": "mill-cuda:4@here", "time": 1}
    assert json.loads(as_json._marked(worker, "{no JSON")) == {"worker": "mill-cuda:4@here", "message": "{no JSON"}


def test_the_status_line() -> None:
    supervisor = supervised()
    first, second = supervisor._workers
    first.statistics = {"recent": {"posts_per_second": 1234.5, "device_busy": 0.987}, "rows_waiting": 1500}
    second.restarts = 2
    said = (
        "1 of 2 workers up · 1,500 rows waiting · 2 restarts · cuda:4 1,234 posts/s, busy 0.99 · cuda:7 not answering"
    )
    assert supervisor._status_text(1) == said
    second.due = None
    assert "cuda:7 given up" in supervisor._status_text(1)
