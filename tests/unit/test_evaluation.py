"""feedmill/evaluation: figures equal those computed by hand, and tables are printed."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from feedmill.cli.accuracy import MAX_CONFUSION_LABELS, confusion_lines, show
from feedmill.evaluation.known import matching_label
from feedmill.evaluation.metrics import calibration, metrics
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Outcome, Post, PostError
from feedmill.tables import check_output
from feedmill.tables.predictions import rows_of, write_rows
from tests.support import make_classification

LABELS = ("a", "b", "c", "d")
#: (true label, predicted label). Correct: a 2 of 3, b 1 of 2, c 0 of 1. No true label is d.
PAIRS = [("a", "a"), ("a", "a"), ("a", "b"), ("b", "b"), ("b", "d"), ("c", "a")]


def test_figures_match_hand_computed_values() -> None:
    found = metrics(LABELS, PAIRS)
    assert found["confusion"] == [
        [2, 1, 0, 0],
        [0, 1, 0, 1],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert (found["posts"], found["accuracy"]) == (6, 3 / 6)
    assert [tuple(figures.values()) for figures in found["labels"].values()] == [
        (2 / 3, 2 / 3, 2 / 3, 3),
        (1 / 2, 1 / 2, 1 / 2, 2),
        (0.0, 0.0, 0.0, 1),
        (0.0, 0.0, 0.0, 0),
    ]
    assert found["labels"]["b"] == {
        "precision": 0.5,
        "recall": 0.5,
        "f1": 0.5,
        "support": 2,
    }
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
    [
        ("food", "food"),
        ("FOOD", "food"),
        ("Go", "Go"),
        ("GO", None),
        ("fo", None),
        ("", None),
        (None, None),
    ],
)
def test_truth_matches_topics_to_labels(topic: str | None, label: str | None) -> None:
    assert matching_label(topic, ("food", "go", "Go")) == label


def test_labels_are_escaped_when_printed() -> None:
    console = Console(file=StringIO(), width=100, highlight=False)
    found = metrics(["[red]", "b\x1b"], [("[red]", "b\x1b")]) | calibration(
        [(0.5, False)]
    )
    show(console, found | {"posts_per_s": 1.0})
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "[red]" in shown
    assert "b\\x1b 1" in shown


def test_prints_the_confusion_matrix_of_up_to_twenty_labels() -> None:
    lines = confusion_lines(metrics(LABELS, PAIRS))
    assert [line.split() for line in lines[1:]] == [
        ["1", "2", "3", "4"],
        ["1", "a", "2", "1", "·", "·"],
        ["2", "b", "·", "1", "·", "1"],
        ["3", "c", "1", "·", "·", "·"],
        ["4", "d", "·", "·", "·", "·"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1
    names = [f"label {number}" for number in range(MAX_CONFUSION_LABELS + 1)]
    most = confusion_lines(metrics(names[:-1], [(names[0], names[1])]))
    assert len(most) == MAX_CONFUSION_LABELS + 2
    (line,) = confusion_lines(metrics(names, [(names[0], names[1])]))
    assert "21 labels is in --json" in line


def test_labels_in_the_confusion_matrix_are_escaped_and_cut() -> None:
    label = "red\x1b[31m" + "x" * 100
    lines = confusion_lines(metrics([label, "b"], [(label, "b")]))
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) < 60


def test_the_table_of_predictions_has_each_post(tmp_path: Path) -> None:
    known = [
        (Post(id="1", title="=good"), "a"),
        (Post(id="2", title="x"), "b"),
        (Post(id="3", title="y"), "a"),
    ]
    outcomes: list[Outcome] = [
        make_classification("1", label="a", scores={"a": 0.75, "b": 0.25}),
        make_classification("2", label="a", scores={"a": 0.5, "b": 0.5}),
        PostError(id="3", error="scores that are not finite"),
    ]
    rows = list(rows_of(known, outcomes, "a model", "float32"))
    write_rows(rows, str(tmp_path / "out.csv"), has_mark=True)
    assert (tmp_path / "out.csv").read_text(encoding="utf-8") == (
        "\ufeffid,topic,label,label_score,topic_score,margin,correct,seen,error,model,dtype,"
        "title,body\n"
        "1,a,a,0.75,0.75,0.5,true,,,a model,float32,'=good,\n"
        "2,b,a,0.5,0.5,0,false,,,a model,float32,x,\n"
        "3,a,,,,,,,scores that are not finite,a model,float32,y,\n"
    )


def test_margins_have_no_more_digits_than_scores() -> None:
    outcome = make_classification(
        "1", label="a", scores={"a": 0.0157352, "b": 0.0156932}
    )
    known = [(Post(id="1", title="x"), "a")]
    (row,) = rows_of(known, [outcome], "a model", "float32")
    assert row["margin"] == 0.000042


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("out.txt", "Cannot tell the format"),
        ("posts.csv", "the input file"),
        ("no/out.csv", "there is no folder"),
        ("folder.csv", "is a folder"),
    ],
)
def test_refuses_an_output_before_a_model_is_loaded(
    out: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "posts.csv").write_text("id,title,topic\n1,x,a\n")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserError, match=sentence):
        check_output(tmp_path / out, source=str(tmp_path / "posts.csv"))
