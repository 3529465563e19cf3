"""feedmill/training/report.py: what a training prints, on a terminal and without one."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from feedmill.training import report
from feedmill.training.report import TrainingReport

PLAN = {"batch_size": 16, "accumulation": 1, "devices": 1, "effective_batch": 16, "steps": 4, "epochs": 1.0,
        "precision": "float32: as set", "device": "cpu"}  # fmt: skip


@pytest.fixture(autouse=True)
def _each_line_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PROGRESS_INTERVAL_S", -1.0)


def run(console: Console, as_json: bool = False) -> list[str]:
    """Report a whole training, and return the tested outcomes."""
    training = TrainingReport(console, as_json, quiet=False)
    training.phase("fitting the head")
    training.planned(PLAN)
    for step in range(1, 5):
        training.progress(step, 4, 0.5)
    training.stop()
    tested = list(training.counting("testing the trained model on", ["a", "b"], 2))
    training.stop()
    return tested


def test_every_phase_prints_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    notes = io.StringIO()
    assert run(Console(file=notes, width=200)) == ["a", "b"]
    lines = notes.getvalue().splitlines()
    assert lines[0] == "fitting the head"
    assert [line.partition(" loss")[0] for line in lines[1:5]] == [f"step {step} of 4" for step in range(1, 5)]
    assert all("left" in line for line in lines[1:4])
    assert "left" not in lines[4]
    assert lines[5:] == ["testing the trained model on 2 posts", "1 of 2 posts", "2 of 2 posts"]
    assert "4 optimization steps, 1 epochs" in capsys.readouterr().out


def test_a_terminal_shows_every_phase_in_its_bar() -> None:
    notes = io.StringIO()
    assert run(Console(file=notes, width=200, force_terminal=True)) == ["a", "b"]
    for words in ("fitting the head", "training loss 0.500", "testing the trained model", "2/2"):
        assert words in notes.getvalue()


def test_json_has_the_time_left_and_no_phases(capsys: pytest.CaptureFixture[str]) -> None:
    notes = io.StringIO()
    run(Console(file=notes), as_json=True)
    plan, *steps = map(json.loads, capsys.readouterr().out.splitlines())
    assert (list(plan), notes.getvalue()) == (["plan"], "")
    assert [each["progress"]["step"] for each in steps] == [1, 2, 3, 4]
    assert steps[0]["progress"]["seconds_left"] >= 0
    assert steps[3]["progress"]["seconds_left"] == 0


def finished(capsys: pytest.CaptureFixture[str], accuracy: float, zero_shot: float | None, head: bool) -> str:
    def metrics(accuracy: float) -> dict[str, Any]:
        return {"accuracy": accuracy, "macro_f1": 0.5, "calibration_error": 0.1, "posts_per_s": 9.0, "posts": 40}

    record = {
        "seconds": 1.0, "samples_per_s": 2.0, "curve": [], "options": {"head": head}, "metrics": metrics(accuracy),
        "zero_shot": None if zero_shot is None else metrics(zero_shot),
    }  # fmt: skip
    console = Console(file=io.StringIO())
    TrainingReport(console, as_json=False, quiet=False).finished(console, record, Path("model"))
    return capsys.readouterr().out


@pytest.mark.parametrize("zero_shot", [0.412, 0.685])
def test_a_model_no_better_than_its_base_is_not_to_be_deployed(
    capsys: pytest.CaptureFixture[str], zero_shot: float
) -> None:
    printed = finished(capsys, 0.412, zero_shot, head=True)
    assert f"no more accurate (0.412) than its base zero-shot ({zero_shot}) on the same 40 posts" in printed
    assert "more posts" in printed
    assert "without --head" in printed
    assert "feedmill deploy" not in printed
    assert "--head" not in finished(capsys, 0.412, 0.685, head=False)
    for other in (None, 0.3):
        assert "feedmill deploy " in finished(capsys, 0.412, other, head=True)
