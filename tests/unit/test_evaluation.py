"""feedmill/evaluation/measures.py: figures equal those computed by hand, invariants hold, and tables are printed."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from feedmill.evaluation import report
from feedmill.evaluation.measures import Evaluation, LabelFigures, matching_label
from feedmill.shared.topics import TOPICS

LABELS = ("a", "b", "c", "d")
#: (true label, predicted label). Correct: a 2 of 3, b 1 of 2, c 0 of 1. No true label is d.
PAIRS = [("a", "a"), ("a", "a"), ("a", "b"), ("b", "b"), ("b", "d"), ("c", "a")]


def test_figures_match_hand_computed_values() -> None:
    found = Evaluation.of(LABELS, PAIRS)
    assert found.confusion.tolist() == [[2, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert found.posts == 6
    assert found.accuracy == 3 / 6
    assert found.by_label() == {
        "a": LabelFigures(2 / 3, 2 / 3, 2 / 3, 3),
        "b": LabelFigures(1 / 2, 1 / 2, 1 / 2, 2),
        "c": LabelFigures(0.0, 0.0, 0.0, 1),
        "d": LabelFigures(0.0, 0.0, 0.0, 0),
    }
    assert found.macro_f1 == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)  # without d
    summary = found.summary(left_out=4)
    assert (summary["posts"], summary["left_out"]) == (6, 4)
    assert summary["labels"]["b"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2}


@pytest.mark.parametrize(
    ("topic", "label"),
    [("food", "food"), ("FOOD", "food"), ("Go", "Go"), ("GO", None), ("fo", None), ("", None), (None, None)],
)
def test_truth_matches_topics_to_labels(topic: str | None, label: str | None) -> None:
    assert matching_label(topic, ("food", "go", "Go")) == label


def printed(found: Evaluation, width: int) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    report.show(console, found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_default_topics_matrix_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    confusion = np.full((16, 16), 999, np.int64)
    lines = printed(Evaluation(TOPICS, confusion), 100).splitlines()
    matrix = lines[-16:]
    assert all(line.count("999") == 16 for line in matrix)
    assert matrix[0].startswith(" 1 climate change ")
    assert max(map(len, lines)) <= 100
    printed_line = capsys.readouterr().out
    assert (printed_line.count("0.062"), printed_line.count("255,744")) == (2, 1)


def test_labels_are_escaped_when_printed() -> None:
    shown = printed(Evaluation.of(["[red]", "b\x1b"], [("[red]", "b\x1b")]), 100)
    assert "[red]" in shown
    assert "b\\x1b" in shown
