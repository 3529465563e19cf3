"""The flags `--none` and `--precision` of commands, and their default for files."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from feedmill.cli.main import application
from feedmill.cli.none_flag import with_none_value
from feedmill.offline.precision import label_precisely
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, Outcome, Post, PostError
from feedmill.shared.none_of_these import NO_LABEL, precise_threshold
from feedmill.shared.settings import load
from tests.fakes.models import make_model
from tests.support import make_classification

POSTS = [
    {"id": "fits", "title": "The keeper saved two penalties and the crowd went home"},
    {"id": "other", "title": "Which form does the tax office want for a second flat?"},
]
LABELS = ("--labels", "sports,food")


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")  # measuring it takes seconds


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("posts") / "posts.jsonl"
    path.write_text("".join(f"{json.dumps(post)}\n" for post in POSTS))
    return path


def classify(*arguments: str | Path) -> Any:
    words = ["classify", *map(str, arguments)]
    return CliRunner().invoke(application("classify"), words)


def labels_of(done: Any) -> list[str | None]:
    """Return the labels that a command printed as JSON."""
    assert done.exit_code == 0, done.stderr or done.exception
    return [json.loads(line)["label"] for line in done.stdout.splitlines()]


@given(st.lists(st.sampled_from(["a.csv", "--none", "0.5", "off", "--json", "--"])))
def test_only_a_none_without_a_value_changes(arguments: list[str]) -> None:
    completed = with_none_value(arguments)
    for place, (before, after) in enumerate(zip(arguments, completed, strict=True)):
        has_value = arguments[place + 1 : place + 2] in (["0.5"], ["off"])
        is_flag = before == "--none" and "--" not in arguments[:place]
        expected = "--none=on" if is_flag and not has_value else before
        assert after == expected


def test_rows_that_fit_none_of_the_users_labels_have_no_label(file: Path) -> None:
    done = classify(file, *LABELS, "--json")
    assert labels_of(done) == ["sports", None]
    assert "1 of 2 posts" in done.stderr
    assert "--none off" in done.stderr


@pytest.mark.parametrize(
    "flags", [["--none", "off"], ["--none", "false"], ["--none=0"]]
)
def test_none_can_be_switched_off(file: Path, flags: list[str]) -> None:
    done = classify(file, *LABELS, *flags, "--json")
    assert None not in labels_of(done)
    assert "no label" not in done.stderr


def test_the_built_in_labels_give_each_row_one(file: Path) -> None:
    assert None not in labels_of(classify(file, "--json"))


def test_the_flag_without_a_value_selects_the_default(file: Path) -> None:
    assert labels_of(classify("--none", file, *LABELS, "--json")) == ["sports", None]
    assert labels_of(classify(file, *LABELS, "--json", "--none")) == ["sports", None]
    scores = classify(file, *LABELS, "--json", "--none", "1")
    assert labels_of(scores) == [None, None]


def test_the_setting_comes_before_the_default_and_the_flag_before_the_setting(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEEDMILL_NONE", "off")
    assert None not in labels_of(classify(file, *LABELS, "--json"))
    monkeypatch.setenv("FEEDMILL_NONE", "1")
    assert labels_of(classify(file, *LABELS, "--json")) == [None, None]
    assert labels_of(classify(file, *LABELS, "--json", "--none")) == ["sports", None]


@pytest.mark.parametrize(
    ("text", "none"), [("on", True), ("True", True), ("off", False), ("0.4", 0.4)]
)
def test_the_setting_is_a_word_or_a_number(text: str, none: float) -> None:
    loaded = load(none=text).none
    assert loaded == none
    assert type(loaded) is type(none)


@pytest.mark.parametrize("text", ["2", "-0.1", "nan", "some"])
def test_refuses_other_values(
    file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = classify(file, *LABELS, f"--none={text}")
    assert done.exit_code == 2
    assert "number from 0 to 1" in " ".join(done.stderr.replace("│", " ").split())
    monkeypatch.setenv("FEEDMILL_NONE", text)
    with pytest.raises(UserError, match="FEEDMILL_NONE"):
        load()


def test_the_summary_of_a_file_says_how_to_switch_it_off(
    file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    done = classify(file, *LABELS, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "no label: 1 row" in done.stderr
    assert "--none off" in done.stderr
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    assert [row["label"] for row in rows] == ["sports", ""]
    every = classify(file, *LABELS, "--out", out, "--none", "off")
    assert "no label" not in every.stderr


def test_a_models_own_labels_are_not_the_users(file: Path, tmp_path: Path) -> None:
    model = make_model("bert", tmp_path, {0: "sports", 1: "food", 2: "x", 3: "y"})
    named = ("--labels", "sports,food,x,y", "--model", str(model))
    assert None not in labels_of(classify(file, *named, "--json"))
    assert None in labels_of(classify(file, *named, "--json", "--none", "0.99"))


# Precision.


@given(st.lists(st.floats(0.01, 1), max_size=30), st.floats(0.01, 1))
def test_labels_below_the_threshold_of_a_precision_are_left_out(
    scores: list[float], precision: float
) -> None:
    outcomes: list[tuple[Post, Outcome]] = []
    for number, score in enumerate(scores):
        post = Post(id=f"p{number}", title="x")
        classification = make_classification(
            post.id, label="a", scores={"a": score, "b": 0.0}
        )
        outcomes.append((post, classification))
    failed = Post(id="failed", title="x")
    outcomes.append((failed, PostError(id="failed", error="no")))
    labelled = list(label_precisely((pair for pair in outcomes), precision))
    threshold = precise_threshold(scores, precision)
    assert [post for post, _ in labelled] == [post for post, _ in outcomes]
    for (_, before), (_, after) in zip(outcomes, labelled, strict=True):
        if isinstance(before, PostError) or isinstance(after, PostError):
            assert before == after
            continue
        assert isinstance(after, Classification)
        assert after.scores == before.scores
        assert (after.label is None) == (before.label_score < threshold)


def test_a_precision_of_a_file_leaves_out_uncertain_labels(file: Path) -> None:
    scored = classify(file, *LABELS, "--none", "0", "--json").stdout.splitlines()
    score = json.loads(scored[0])["scores"]["sports"]
    precision = f"--precision={score - 0.001}"
    done = classify(file, *LABELS, precision, "--json")
    assert labels_of(done) == ["sports", None]
    assert f"; --none {score:.7g} asks for the same" in done.stderr
    too_precise = classify(file, *LABELS, "--precision=1", "--json")
    assert "no label is that certain" in too_precise.stderr
    all_of_them = classify(file, *LABELS, "--precision", "0.01", "--json")
    assert None not in labels_of(all_of_them)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--none", "0.5"], "--none"),
        (["--multi-label"], "--multi-label"),
    ],
)
def test_refuses_a_precision_that_cannot_be_kept(
    file: Path, flags: list[str], reason: str
) -> None:
    done = classify(file, *LABELS, "--precision", "0.9", *flags)
    assert isinstance(done.exception, UserError)
    assert reason in str(done.exception)


def test_refuses_a_precision_for_a_text_and_for_a_queue(file: Path) -> None:
    done = classify("two words", *LABELS, "--precision", "0.9")
    assert "many posts" in str(done.exception)
    sent = CliRunner().invoke(
        application("enqueue"), ["enqueue", str(file), "--precision", "0.9"]
    )
    assert "classify FILE --precision" in str(sent.exception)


@pytest.mark.parametrize("precision", ["0", "1.5", "-1", "nan"])
def test_refuses_other_precisions(file: Path, precision: str) -> None:
    done = classify(file, *LABELS, f"--precision={precision}")
    assert isinstance(done.exception, UserError)
    assert "above 0 and up to 1" in str(done.exception)


# Evaluation.

TOPICS = [
    {"title": "The keeper saved two penalties, and the team won", "topic": "sports"},
    {"title": "Slow-cooked beans with smoked paprika and bread", "topic": "Food"},
    {"title": "Which form does the tax office want for a flat?", "topic": "taxes"},
    {"title": "A post without a topic that nobody can judge"},
]


def evaluate(folder: Path, *flags: str) -> Any:
    path = folder / "known.jsonl"
    path.write_text("".join(f"{json.dumps(post)}\n" for post in TOPICS))
    words = ["evaluate", str(path), *LABELS, "--json", *flags]
    done = CliRunner().invoke(application("evaluate"), words)
    assert done.exit_code == 0, done.stderr or done.exception
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_posts_of_other_topics_count_as_none_of_the_labels(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    summary, text = evaluate(tmp_path, "--none", "--out", str(out))
    assert summary["posts"] == 3
    assert summary["left_out"] == 1
    assert list(summary["labels"]) == ["sports", "food", NO_LABEL]
    assert summary["labels"][NO_LABEL]["support"] == 1
    assert sum(map(sum, summary["confusion"])) == 3
    labelled = 3 - sum(row[2] for row in summary["confusion"])
    right = summary["confusion"][0][0] + summary["confusion"][1][1]
    assert summary["coverage"] == pytest.approx(labelled / 3)
    assert summary["precision"] == pytest.approx(right / labelled)
    assert summary["accuracy"] > right / 3, "the tax post has rightly no label"
    assert "of the posts have a label" in text
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    assert [row["topic"] for row in rows] == ["sports", "food", ""]
    assert rows[2]["label"] == ""
    assert float(rows[2]["topic_score"]) > float(rows[2]["label_score"])
    assert rows[2]["correct"].lower() == "true"


def test_every_post_has_a_label_at_threshold_0(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    summary, _ = evaluate(tmp_path, "--none", "0", "--page", str(page))
    assert summary["coverage"] == 1
    mistake = rf"instead of <b><bdi>{NO_LABEL}</bdi></b>( [01]\.\d\d)?:"
    assert re.search(mistake, page.read_text("utf-8"))
    assert summary["labels"][NO_LABEL]["recall"] == 0
    hardly_any, _ = evaluate(tmp_path, "--none", "1", "--page", str(page))
    assert f"<b><bdi>{NO_LABEL}</bdi></b> 0." in page.read_text("utf-8")
    assert hardly_any["coverage"] == hardly_any["precision"] == 0
    assert hardly_any["labels"][NO_LABEL]["recall"] == 1


def test_without_none_other_topics_are_left_out(tmp_path: Path) -> None:
    for flags in ([], ["--none", "off"]):
        summary, text = evaluate(tmp_path, *flags)
        assert summary["posts"] == 2
        assert summary["left_out"] == 2
        assert list(summary["labels"]) == ["sports", "food"]
        assert "coverage" not in summary
        assert "have a label" not in text
