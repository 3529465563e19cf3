"""feedmill/evaluation.py, against figures computed by hand, and what must hold of any; and the tables made of them."""

import csv
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console

from feedmill import charts, evaluation_report
from feedmill.evaluation import Evaluation, LabelFigures, truth_of
from shared.messages import Classification
from shared.topics import TOPICS

LABELS = ("a", "b", "c", "d")
#: (truth, predicted): a is right twice of three, b once of two; c is never predicted rightly, d nobody's truth.
PAIRS = [("a", "a"), ("a", "a"), ("a", "b"), ("b", "b"), ("b", "d"), ("c", "a")]


def test_figures_by_hand() -> None:
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


@given(some.lists(some.tuples(some.sampled_from(LABELS), some.sampled_from(LABELS)), min_size=1))
def test_figures_of_anything(pairs: list[tuple[str, str]]) -> None:
    found = Evaluation.of(LABELS, pairs)
    figures = found.by_label()
    assert found.accuracy == np.trace(found.confusion) / found.confusion.sum()
    assert found.accuracy == pytest.approx(sum(truth == predicted for truth, predicted in pairs) / len(pairs))
    assert [label.support for label in figures.values()] == found.confusion.sum(1).tolist()
    assert found.accuracy == pytest.approx(sum(label.recall * label.support for label in figures.values()) / len(pairs))
    for precision, recall, f1, _ in figures.values():
        harmonic = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        assert f1 == pytest.approx(harmonic)
    assert 0 <= found.macro_f1 <= 1


@pytest.mark.parametrize(
    ("topic", "label"),
    [("food", "food"), ("FOOD", "food"), ("Go", "Go"), ("GO", None), ("fo", None), ("", None), (None, None)],
)
def test_topics_that_are_labels(topic: str | None, label: str | None) -> None:
    assert truth_of(topic, ("food", "go", "Go")) == label


def printed(found: Evaluation, width: int) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    evaluation_report.show(console, found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_matrix_of_the_default_topics_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    confusion = np.full((16, 16), 999, np.int64)
    lines = printed(Evaluation(TOPICS, confusion), 100).splitlines()
    matrix = lines[-16:]
    assert all(line.count("999") == 16 for line in matrix)
    assert matrix[0].startswith(" 1 climate change ")
    assert max(map(len, lines)) <= 100
    assert capsys.readouterr().out == "Accuracy 0.062, macro-F1 0.062, 255,744 posts.\n"


def test_a_matrix_that_is_too_wide_is_left_to_the_chart(capsys: pytest.CaptureFixture[str]) -> None:
    labels = [f"label {number}" for number in range(21)]
    assert "Rows: true label" not in printed(Evaluation(labels, np.eye(21, dtype=np.int64)), 100)
    assert "--png" in capsys.readouterr().out


def test_labels_are_shown_as_they_are() -> None:
    shown = printed(Evaluation.of(["[red]", "b\x1b"], [("[red]", "b\x1b")]), 100)
    assert "[red]" in shown
    assert "b\\x1b" in shown


def test_predictions_as_csv(tmp_path: Path) -> None:
    found = Classification(
        id="1", label="food", scores={"food": 0.75, "music": 0.25}, model="m", revision=None, weights="",
        fingerprint="", classified_at=0.0, worker="w", device="cpu", queued_seconds=None,
    )  # fmt: skip
    evaluation_report.write_csv(tmp_path / "p.csv", [("music, or so", found)])
    with (tmp_path / "p.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["id", "topic", "label", "score"], ["1", "music, or so", "food", "0.750000"]]


def test_a_chart_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    notes = Console(file=StringIO(), width=200)
    assert not charts.save(tmp_path / "x.png", lambda _: None, notes)
    assert isinstance(notes.file, StringIO)
    assert "pip install 'feedmill[charts]'" in notes.file.getvalue()
    assert not (tmp_path / "x.png").exists()
