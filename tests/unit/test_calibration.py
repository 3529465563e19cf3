"""workers/pipeline/calibration.py: measuring, caching and lowering the token budget."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from feedmill.shared.errors import DeviceFull
from feedmill.shared.settings import Settings
from feedmill.workers.models import device
from feedmill.workers.models.classifiers import Row, Scores
from feedmill.workers.pipeline import calibration
from feedmill.workers.pipeline.backlog import Loaded
from feedmill.workers.pipeline.calibration import best, calibrate, remember, sweep
from tests.fakes.models import FP32
from tests.unit.test_pipeline import Done, StandIn


class Device(StandIn):
    """A classifier on a simulated clock, fastest at one batch size and with limited memory (both
    in tokens).
    """

    def __init__(self, best: int, memory: int = 10**9) -> None:
        super().__init__()
        self.device = FP32
        self.best, self.memory = best, memory
        self.now = 0.0
        #: Seconds of each pass in which other processes have the CPU.
        self.disturbed: Callable[[int], float] = lambda _: 0.0
        self.waited = 0.0
        self.sizes: list[int] = []

    def perf_counter(self) -> float:
        return self.now + self.waited

    def thread_time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def forward(self, rows: Any) -> Done:
        size = len(rows) * max(row.length for row in rows)
        if size > self.memory:
            raise DeviceFull("no memory")
        self.sizes.append(size)
        self.now += size * (1 + abs(size - self.best) / self.best) / 10_000
        self.waited += self.disturbed(size)
        return Done([])

    def finish(self, rows: Any, outputs: Done) -> list[tuple[Row, Scores]]:  # noqa: ARG002
        return []


def on(monkeypatch: pytest.MonkeyPatch, best: int, memory: int = 10**9) -> Device:
    device = Device(best, memory)
    monkeypatch.setattr(calibration, "time", device)
    return device


@pytest.mark.parametrize("optimum", [1024, 4096])
def test_sweep_finds_the_best_budget(
    monkeypatch: pytest.MonkeyPatch, optimum: int
) -> None:
    stand_in = on(monkeypatch, optimum)
    rates = sweep(stand_in, 4096, stand_in.perf_counter)
    assert best(rates) == optimum
    assert max(stand_in.sizes) <= max(rates)


def test_measures_given_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = on(monkeypatch, 1024)
    rates = sweep(
        stand_in,
        4096,
        stand_in.perf_counter,
        lambda chance: chance.choice(["post " * 50, "post " * 60]),
    )
    assert best(rates) == 1024
    assert all(size % 50 == 0 or size % 60 == 0 for size in stand_in.sizes)


def test_memory_for_no_budget_gives_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = on(monkeypatch, 1024, memory=100)
    assert not any(sweep(stand_in, 4096, stand_in.perf_counter).values())


@pytest.mark.parametrize(
    ("kind", "engine", "torch_device", "budget"),
    [
        ("similarity", "torch", "cpu", 4096),
        ("similarity", "torch", "meta", 512),
        ("similarity", "module:Engine", "cpu", 512),
        ("module:Classifier", "torch", "cpu", 512),
    ],
)
def test_other_processes_do_not_affect_calibration_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    engine: str,
    torch_device: str,
    budget: int,
) -> None:
    """A GPU, or a plug-in, may leave its thread idle while it computes."""
    monkeypatch.setattr(calibration, "OTHER_CANDIDATES", calibration.CANDIDATES["cpu"])
    stand_in = on(monkeypatch, 4096)
    stand_in.kind = kind
    stand_in.device = device.Device(
        torch.device(torch_device), torch.float32, "for a test"
    )
    stand_in.disturbed = lambda size: size / 100 if size > 600 else 0.0
    assert calibrate(stand_in, Settings(cache_folder=tmp_path, engine=engine)) == budget


def test_calibrates_once_per_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(cache_folder=tmp_path / "cache")
    stand_in = on(monkeypatch, 1024)
    assert calibrate(stand_in, settings) == 1024
    measured = len(stand_in.sizes)
    assert calibrate(stand_in, settings) == 1024
    assert len(stand_in.sizes) == measured
    assert [
        *json.loads((tmp_path / "cache" / "calibration.json").read_text()).values()
    ] == [1024]
    # Another text length needs a new measurement.
    assert calibrate(stand_in, settings.model_copy(update={"max_tokens": 64})) == 1024
    assert len(stand_in.sizes) > measured


def test_lowering_never_raises_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(cache_folder=tmp_path)
    stand_in = on(monkeypatch, 4096)
    loaded = Loaded(stand_in, calibrate(stand_in, settings))
    loaded.lower_budget(700)
    loaded.lower_budget(900)
    assert loaded.budget == 700
    assert calibrate(stand_in, settings) == 4096, (
        "another model may have taken the memory"
    )


def test_an_unwritable_cache_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert not remember(
        on(monkeypatch, 4096),
        Settings(cache_folder=tmp_path / "file" / "cache"),
        {512: 90.0},
    )
