"""feedmill/evaluation.py: figures equal those computed by hand, and tables are printed."""

from io import StringIO

import pytest
from rich.console import Console

from feedmill.evaluation import calibration, matching_label, metrics, show

LABELS = ("a", "b", "c", "d")
#: (true label, predicted label). Correct: a 2 of 3, b 1 of 2, c 0 of 1. No true label is d.
PAIRS = [("a", "a"), ("a", "a"), ("a", "b"), ("b", "b"), ("b", "d"), ("c", "a")]


def test_figures_match_hand_computed_values() -> None:
    found = metrics(LABELS, PAIRS)
    assert found["confusion"] == [[2, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert (found["posts"], found["accuracy"]) == (6, 3 / 6)
    assert [tuple(figures.values()) for figures in found["labels"].values()] == [
        (2 / 3, 2 / 3, 2 / 3, 3),
        (1 / 2, 1 / 2, 1 / 2, 2),
        (0.0, 0.0, 0.0, 1),
        (0.0, 0.0, 0.0, 0),
    ]
    assert found["labels"]["b"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2}
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)  # without d


def test_calibration_error_of_known_bins() -> None:
    found = calibration([(0.95, True), (0.95, False), (0.55, True), (1.0, True)])
    bins = found["calibration"]
    assert [(each["least"], each["posts"]) for each in bins] == [(0.5, 1), (0.9, 3)]
    assert bins[1]["confidence"] == pytest.approx(2.9 / 3)
    assert bins[1]["accuracy"] == pytest.approx(2 / 3)
    assert found["calibration_error"] == pytest.approx((0.45 + 3 * 0.3) / 4)


@pytest.mark.parametrize(
    ("topic", "label"),
    [("food", "food"), ("FOOD", "food"), ("Go", "Go"), ("GO", None), ("fo", None), ("", None), (None, None)],
)
def test_truth_matches_topics_to_labels(topic: str | None, label: str | None) -> None:
    assert matching_label(topic, ("food", "go", "Go")) == label


def test_labels_are_escaped_when_printed() -> None:
    console = Console(file=StringIO(), width=100, highlight=False)
    found = metrics(["[red]", "b\x1b"], [("[red]", "b\x1b")]) | calibration([(0.5, False)])
    show(console, found | {"posts_per_s": 1.0})
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "[red]" in shown
    assert "b\\x1b 1" in shown
