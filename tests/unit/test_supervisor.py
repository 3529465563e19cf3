"""feedmill/stack/{processes,supervisor}.py: restarting workers, their environment, and forwarding
their log lines.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import StackError
from feedmill.shared.settings import Settings
from feedmill.stack import processes
from feedmill.stack.processes import MAX_LINE_BYTES, Child, Service
from feedmill.stack.supervisor import Share, Supervisor
from tests.support import naming, wait_until

GPUS = [
    Share("cuda", f"cuda:{number}", {"CUDA_VISIBLE_DEVICES": str(number)})
    for number in (4, 7)
]


def supervised(command: str, **settings: Any) -> Supervisor:
    return Supervisor(Settings(**settings), GPUS, "mill@here", ["sh", "-c", command])


def output_of(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> Iterator[str]:
    """Yield the output of each worker."""
    for service in supervisor._services:
        with closing(service):
            service.start()
            process = service.child.process
            wait_until(lambda: process.poll() == 0, "the worker has ended")  # noqa: B023
        yield capsys.readouterr().err


def test_restarts_for_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that fails once a minute has failed a thousand times after a night."""
    monkeypatch.setattr(processes, "STABLE_AFTER_S", math.inf)
    with closing(
        Service(lambda _: Child("worker", ["false"], tmp_path, {}))
    ) as service:
        delays = [service._schedule() for _ in range(2000)]
    assert delays[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(delays[7:]) == {60}


@pytest.mark.parametrize(
    ("stable_after", "delays"), [(60.0, [1, 2, 3, 3]), (0.0, [1, 1, 1, 1])]
)
def test_restarts_after_growing_delays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stable_after: float,
    delays: list[float],
) -> None:
    for name, seconds in (
        ("RESTARTS", Backoff(first_s=1e-6, max_s=3e-6)),
        ("STABLE_AFTER_S", stable_after),
    ):
        monkeypatch.setattr(processes, name, seconds)
    said: list[str] = []
    with closing(
        Service(
            lambda _: Child("worker", ["sh", "-c", "echo why; false"], tmp_path, {})
        )
    ) as service:

        def is_restarted() -> bool:
            service.supervise(said.append)
            return len(said) == len(delays)

        wait_until(is_restarted, "the child is restarted again and again")
        assert service.restarts == len(delays)
    found = [
        re.fullmatch(r"worker .*status 1: .* in (\S+) s\. .*\n  why", line)
        for line in said
    ]
    assert [float(match[1]) for match in found if match] == [
        pytest.approx(delay * 1e-6) for delay in delays
    ]


def test_a_service_whose_folder_is_gone_is_not_restarted(tmp_path: Path) -> None:
    """For example because it was moved."""
    folder = tmp_path / "data"
    folder.mkdir()
    with closing(Service(lambda _: Child("worker", ["true"], folder, {}))) as service:
        service.start()
        folder.rename(tmp_path / "moved")
        with pytest.raises(StackError, match=naming(folder / "worker.log")):
            service.start()


def test_workers_get_settings_and_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("feedmill_devices", "all")
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "7")
    monkeypatch.setenv("FEEDMILL_QUEUE", "mine")
    monkeypatch.setenv("FEEDMILL_LABELS", '["a, b", "c"]')
    given = {
        "metrics_port": 9110,
        "model": "m",
        "token_budget": 9,
        "redis_url": "redis://:p@127.0.0.1/0",
    }
    first, second = output_of(supervised('echo "$0 $@"; env', **given), capsys)
    assert first.startswith("cuda:4 | --name mill-cuda:4@here\n")
    lines = [line.removeprefix("cuda:7 | ") for line in second.splitlines()]
    assert {
        line for line in lines if line.upper().startswith(("FEEDMILL_", "CUDA"))
    } == {
        f"FEEDMILL_DATA_FOLDER={os.environ['FEEDMILL_DATA_FOLDER']}",
        f"FEEDMILL_CACHE_FOLDER={os.environ['FEEDMILL_CACHE_FOLDER']}",
        "FEEDMILL_QUEUE=mine",
        "FEEDMILL_MODEL=m",
        "FEEDMILL_TOKEN_BUDGET=9",
        "FEEDMILL_DEVICE=cuda",
        "FEEDMILL_DEVICES=",
        'FEEDMILL_LABELS={"a, b": ["a, b"], "c": ["c"]}',
        "FEEDMILL_REDIS_URL=redis://:p@127.0.0.1/0",
        "FEEDMILL_METRICS_PORT=9111",
        "CUDA_VISIBLE_DEVICES=7",
    }


def test_forwards_output_in_marked_bounded_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = f"""printf 'one\\n\\n{{"time": 1}}\\n'
        head -c {MAX_LINE_BYTES + 1} /dev/zero | tr '\\0' x"""
    text, _ = output_of(supervised(script), capsys)
    assert text.splitlines() == [
        "cuda:4 | one", 'cuda:4 | {"time": 1}', f"cuda:4 | {'x' * MAX_LINE_BYTES}", "cuda:4 | x"
    ]  # fmt: skip
    text, _ = output_of(supervised(script, log_format="json"), capsys)
    one, time, *_ = map(json.loads, text.splitlines())
    assert (one, time) == (
        {"worker": "mill-cuda:4@here", "message": "one"},
        {"worker": "mill-cuda:4@here", "time": 1},
    )
