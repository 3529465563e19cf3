"""Processes that train together: what their parent does when one of them fails, without starting
any.
"""

import json
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feedmill.console import Report
from feedmill.shared.errors import DeviceFull, ModelError, UserError
from feedmill.shared.settings import Settings
from feedmill.stack.supervisor import Share
from feedmill.training import distributed
from feedmill.training.batches import BatchSize, Order
from feedmill.training.data import Dataset
from feedmill.training.distributed import Job, PeerLost, devices_of, launch
from feedmill.training.options import TrainOptions

DATASET = Dataset(("a", "b"), [], [], {})
OPTIONS = TrainOptions(source="posts", out="out", batch_size=8)
SHARES = [Share("cpu", f"cpu:{number}", {}) for number in range(2)]


def test_processes_start_again_with_half_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[BatchSize] = []
    lines: list[str] = []

    class Lines(Report):
        def print(self, line: str) -> None:
            lines.append(line)

    def attempt(*arguments: Any) -> dict[str, Any]:
        batch = arguments[-1]
        tried.append(batch)
        if batch.rows > 2:
            raise DeviceFull("CUDA out of memory")
        return {"plan": {}}

    monkeypatch.setattr(distributed, "_attempt", attempt)
    monkeypatch.setattr(distributed, "devices_of", lambda _: SHARES)
    record = launch(
        DATASET, OPTIONS, Settings.model_validate({"devices": "cpu:2"}), Lines()
    )
    assert [(batch.rows, batch.accumulation) for batch in tried] == [
        (8, 1),
        (4, 2),
        (2, 4),
    ]
    assert {batch.effective for batch in tried} == {16}
    assert record["plan"]["out_of_memory"] == [8, 4]
    assert "8 rows ran out of memory" in lines[0]


def failed(
    folder: Path, codes: list[int | None], failures: dict[int, Exception]
) -> Exception:
    """Return the error of processes that ended with these codes and left these failures."""
    job = Job(DATASET, OPTIONS, Settings(), SHARES, BatchSize(8, 1, 2), folder)
    for number, error in failures.items():
        text = json.dumps({"kind": type(error).__name__, "text": str(error)})
        (folder / distributed.FAILURE.format(number)).write_text(text)
    ended, _ = Pipe()
    processes = [SimpleNamespace(exitcode=code, sentinel=ended) for code in codes]
    traces = [str(folder / f"trace-{number}") for number in range(2)]
    return distributed._cause(
        SimpleNamespace(processes=processes, error_files=traces), job
    )


@pytest.mark.parametrize(
    ("codes", "failures", "kind", "words"),
    [
        (
            [1, -9],
            {0: PeerLost("ended")},
            UserError,
            ("Process 2 of 2 (cpu:1) was ended by signal 9"),
        ),
        (
            [1, 1],
            {0: PeerLost("ended"), 1: DeviceFull("no memory")},
            DeviceFull,
            "no memory",
        ),
        (
            [1, 1],
            {0: UserError("other"), 1: DeviceFull("no memory")},
            DeviceFull,
            "no memory",
        ),
        ([None, 1], {1: ModelError("no weights")}, ModelError, "no weights"),
        ([None, 3], {}, UserError, "Process 2 of 2 (cpu:1) ended with status 3"),
    ],
)
def test_names_the_process_that_failed_first(
    tmp_path: Path,
    codes: list[int | None],
    failures: dict[int, Exception],
    kind: type[Exception],
    words: str,
) -> None:
    error = failed(tmp_path, codes, failures)
    assert type(error) is kind
    assert words in str(error)


def test_gpus_of_the_processes(tmp_path: Path) -> None:
    """Each process sees all chosen GPUs, and its rank is the number of its own among them."""
    shares = [
        Share("cuda", f"cuda:{gpu}", {"CUDA_VISIBLE_DEVICES": gpu})
        for gpu in ("2", "5")
    ]
    job = Job(DATASET, OPTIONS, Settings(), shares, BatchSize(8, 1, 2), tmp_path)
    assert job.environment(1)["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert job.environment(1)["RANK"] == job.environment(1)["LOCAL_RANK"] == "1"
    assert job.settings_of(1).device == "cuda:1"


def test_refuses_a_gpu_twice_and_a_model_over_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twice = [
        Share("cuda", f"cuda:0-{number}", {"CUDA_VISIBLE_DEVICES": "0"})
        for number in range(2)
    ]
    monkeypatch.setattr(distributed, "shares", lambda _: twice)
    with pytest.raises(UserError, match="twice"):
        devices_of("0,0")
    with pytest.raises(UserError, match="whole model"):
        devices_of("0+1")


def test_order_fills_up_the_batches_of_all_processes() -> None:
    order = Order([3, 5, 4, 2, 6], batch=8, seed=1, multiple=4)
    places = list(order)
    assert len(order) == len(places) == 8
    assert sorted(places) == [0, 1, 2, 3, 4, 5, 5, 5], (
        "place 5 is the row that is ignored"
    )
    assert places[-3:] == [5, 5, 5]
