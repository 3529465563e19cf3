"""workers/pipeline/tuning.py: forming batches, combining rounds, and skipping sizes that do not fit."""

from collections.abc import Sequence
from typing import Any

import pytest

from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import LabelSet, Row
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.pipeline import tuning
from feedmill.workers.pipeline.tuning import Tuning
from tests.unit.test_calibration import Device
from tests.unit.test_pipeline import Done


class TwoRows(Device):
    """A device with two rows per post, like entailment with two labels. It records the row lengths of each batch."""

    def __init__(self) -> None:
        super().__init__(best=1024)
        self.batches_of: list[list[int]] = []

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        lengths = [len(text.split()) for text in texts]
        return [[Row(Tokens([0] * (length + more)), label_set) for more in (0, 1)] for length in lengths]

    def forward(self, rows: Any) -> Done:
        self.batches_of.append([row.length for row in rows])
        return super().forward(rows)


def texts(*words: int) -> list[str]:
    return ["post " * count for count in words]


def measured(
    monkeypatch: pytest.MonkeyPatch, device: Device, posts: Sequence[str], rounds: int = 1, **settings: Any
) -> Tuning:
    monkeypatch.setattr(tuning, "time", device)
    found = Tuning(device, posts, Settings(**settings), rounds)
    list(found.run())
    return found


def test_token_budgets_cut_sorted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CANDIDATES", {"cpu": (12,)})
    device = TwoRows()
    found = measured(monkeypatch, device, texts(20, 1, 5, 2, 2, 1), batch_rows=4)
    # At most four rows; a row longer than the budget is a batch by itself.
    assert device.batches_of[:5] == [[1, 1, 2, 2], [2, 2, 3, 3], [5, 6], [20], [21]]
    (point,) = found.curve().points
    assert point.padding_efficiency == found.tokens / (8 + 12 + 12 + 20 + 21)
    assert found.curve().unfilled is None


def test_knee_is_the_fastest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, Device(best=2048), texts(*[50] * 1000), rounds=3, batch_rows=4096)
    curve = found.curve()
    assert [point.budget for point in curve.points] == [512, 1024, 2048, 4096, 8192]
    assert curve.knee.budget == 2048
    assert curve.knee.tokens_per_s == pytest.approx(50 * curve.knee.posts_per_s)
    assert curve.settled
