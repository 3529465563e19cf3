"""feedmill/training/report.py: what a training prints at its end."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from feedmill.training.report import show_trained


def finished(capsys: pytest.CaptureFixture[str], accuracy: float, zero_shot: float | None, head: bool) -> str:
    def metrics(accuracy: float) -> dict[str, Any]:
        return {"accuracy": accuracy, "macro_f1": 0.5, "calibration_error": 0.1, "posts_per_s": 9.0, "posts": 40}

    record = {
        "seconds": 1.0, "samples_per_s": 2.0, "curve": [], "options": {"head": head}, "metrics": metrics(accuracy),
        "zero_shot": None if zero_shot is None else metrics(zero_shot),
    }  # fmt: skip
    show_trained(Console(file=io.StringIO()), record, Path("model"))
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
