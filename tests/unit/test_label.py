"""`feedmill label`: answers from a pipe and from a terminal, saved after each, and the model made
of them.
"""

import csv
import json
import os
import re
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from feedmill import Classifier
from feedmill.cli import train as label_command
from feedmill.cli.main import application
from feedmill.cli.options import FileFlags
from feedmill.shared import logs
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.teaching.answer_file import AnsweredPost, AnswerFile
from feedmill.training import learnt
from feedmill.training.data import collect
from feedmill.training.options import TrainOptions
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import select_device
from tests.fakes.models import make_sentence_model
from tests.support import naming, wait_until

Label = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")  # measuring it takes seconds


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentence_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def label(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Label:
    """Run the command on many posts with these piped answers."""
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    monkeypatch.setenv("FEEDMILL_DTYPE", "float32")
    rows = [
        {"id": f"p{number}", "title": f"bread {number}", "body": "a\x1b[31mb"}
        for number in range(170)
    ]
    (tmp_path / "posts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )

    def run(answers: str, *flags: str, labels: str = "food,sports") -> Any:
        given = [
            str(tmp_path / "posts.jsonl"),
            "--out",
            str(tmp_path / "out"),
            "--base",
            str(base),
            "--device",
            "cpu",
        ]
        return CliRunner().invoke(
            application(), ["label", *given, "--labels", labels, *flags], input=answers
        )

    return run


def saved(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "out" / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_piped_answers_make_labels_and_a_model(label: Label, tmp_path: Path) -> None:
    """Keys and names of labels are answers; the end of the input ends the command."""
    found = label("1\nsports\n" * 6, "--json")
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout.splitlines()[-1])
    assert (summary["labelled"], summary["labels"]) == (12, {"food": 6, "sports": 6})
    assert (summary["measured_on"], summary["accuracy_error"] > 0) == (10, True)
    assert [row["label"] for row in saved(tmp_path)] == ["food", "sports"] * 6
    assert re.search(
        r"expected accuracy \d\.\d\d ± 0\.\d\d, zero-shot \d", found.stderr
    )
    assert "\x1b" not in found.output
    assert "a\\x1b[31mb" in found.stderr
    settings = Settings(model=summary["model"], device="cpu", dtype="float32")
    model = load_classifier(settings, select_device("cpu", "float32"))
    assert (model.kind, model.label_set(ClassifyOptions()).labels) == (
        "head",
        ("food", "sports"),
    )
    digests = learnt.digests_of(summary["model"])
    answered = {(row["title"], row["body"]) for row in saved(tmp_path)}
    assert digests
    assert len(digests) == len(answered)
    options = TrainOptions(
        source=str(tmp_path / "out" / "labels.csv"), out="x", head=True
    )
    examples = collect(options, FileFlags(), Settings(), Console(quiet=True)).examples
    assert [example.label for example in examples] == ["food", "sports"] * 6


def test_stops_when_more_answers_would_hardly_help(label: Label) -> None:
    for total in (100, 150):  # the same command asks for fifty more
        found = label("1\n" * 170, "--json")
        assert "more would hardly help" in " ".join(found.stderr.split())
        summary = json.loads(found.stdout.splitlines()[-1])
        assert (summary["labelled"], bool(summary["model"])) == (total, True)


def test_undo_skip_and_resume(label: Label, tmp_path: Path) -> None:
    assert label("1\n2\nu\nu\n2\ns\nq\n1\n").exit_code == 0
    first = saved(tmp_path)
    assert [row["label"] for row in first] == ["sports", ""]
    assert label("nonsense\n1\n").exit_code == 0
    resumed = saved(tmp_path)
    assert resumed[:2] == first
    assert [row["label"] for row in resumed[2:]] == ["food"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_resumes_answers_that_a_spreadsheet_has_saved(
    label: Label, tmp_path: Path, encoding: str
) -> None:
    assert label("1\n2\nq\n").exit_code == 0
    first = saved(tmp_path)
    file = tmp_path / "out" / "labels.csv"
    file.write_bytes(file.read_text().encode(encoding))
    assert label("1\n").exit_code == 0
    assert saved(tmp_path)[:2] == first


def test_interrupted_answers_are_kept(
    label: Label, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        label_command, "_answer", Mock(side_effect=["1", "2", KeyboardInterrupt])
    )
    found = label("")
    assert found.exit_code != 0
    assert [row["label"] for row in saved(tmp_path)] == ["food", "sports"]


@pytest.mark.parametrize(
    ("labels", "flags", "words"),
    [
        ("food", [], ["--labels", 1]),
        ("food,music", [], ["sports", "labels.csv", "--out"]),
        ("food,sports", ["--out", "full"], ["full"]),
        ("food,sports", ["--out", "broken"], ["labels.csv"]),
    ],
)
def test_mistakes_are_named(
    label: Label,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    labels: str,
    flags: list[str],
    words: list[Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "labels.csv").write_text(
        "id,title,body,label,picked\np1,bread 1,,sports,random\n"
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "labels.csv").write_text("a,b\n1,2\n")
    found = label("", *flags, labels=labels)
    assert found.exit_code != 0
    with pytest.raises(Exception, match=naming(*words)):
        raise found.exception or AssertionError(found.output)


def test_a_terminal_takes_single_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()

    def press(key: bytes) -> None:
        wait_until(
            lambda: not termios.tcgetattr(keyboard)[3] & termios.ICANON,
            "the terminal passes on single keys",
        )
        os.write(keyboard, key)

    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        before: Any = termios.tcgetattr(stdin)
        for key, answer in ((b"1", "1"), (b"\x04", "")):
            pressing = threading.Thread(target=press, args=(key,))
            pressing.start()
            assert label_command._answer() == answer
            pressing.join()
        assert termios.tcgetattr(stdin) == before
    os.close(keyboard)


def outcomes_of(model: str, texts: list[str], none: float | bool | None) -> list[Any]:
    """Return the label of each text by a model."""
    predictions = Classifier(model=model, device="cpu", dtype="float32").classify(
        texts, none=none
    )
    return [prediction.label for prediction in predictions]


def test_none_of_these_is_an_answer_that_teaches(label: Label, tmp_path: Path) -> None:
    """A post that fits none has an empty label, as a skipped one; `picked` tells them apart."""
    found = label("1\n0\n2\ns\n0\n0\nu\n2\n", "--json")
    assert found.exit_code == 0, found.output
    assert "0 none of these" in found.stderr
    summary = json.loads(found.stdout.splitlines()[-1])
    assert summary["labels"] == {"food": 1, "sports": 2}
    assert (summary["none"], summary["labelled"], summary["skipped"]) == (2, 5, 1)
    rows = saved(tmp_path)
    assert [row["label"] for row in rows] == ["food", "", "sports", "", "", "sports"]
    is_none = [row["picked"] == "none (first)" for row in rows]
    assert is_none == [False, True, False, False, True, False]
    assert {row["picked"] for row in rows} == {"first", "none (first)"}

    promise = summary["none_class"]
    assert 0 < promise["threshold"] <= 1
    texts = [f"bread {number}" for number in range(20)]
    model = summary["model"]
    own = outcomes_of(model, texts, True)
    assert None not in outcomes_of(model, texts, None)
    assert None not in outcomes_of(model, texts, 0)
    assert own == outcomes_of(model, texts, promise["threshold"])
    assert set(outcomes_of(model, texts, 1)) == {None}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_resumes_answers_that_fit_none(
    label: Label, tmp_path: Path, encoding: str
) -> None:
    assert label("1\n0\ns\n0\n").exit_code == 0
    first = saved(tmp_path)
    file = tmp_path / "out" / "labels.csv"
    file.write_bytes(file.read_text().encode(encoding))
    found = label("2\n", "--json")
    assert json.loads(found.stdout.splitlines()[-1])["none"] == 2
    assert saved(tmp_path)[:4] == first


def test_resumes_rows_that_were_added_by_hand(label: Label, tmp_path: Path) -> None:
    assert label("1\n").exit_code == 0
    with (tmp_path / "out" / "labels.csv").open("a") as file:
        file.write("own,bread of mine,,sports\n")
        file.write("other,steam engines,,,none\n")
    found = label("q\n", "--json")
    summary = json.loads(found.stdout.splitlines()[-1])
    assert summary["labels"] == {"food": 1, "sports": 1}
    assert summary["none"] == 1


def test_a_post_that_got_a_label_in_a_spreadsheet_has_that_label(
    label: Label, tmp_path: Path
) -> None:
    assert label("0\n").exit_code == 0
    file = tmp_path / "out" / "labels.csv"
    file.write_text(file.read_text().replace(",,none (first)", ",food,none (first)"))
    found = label("q\n", "--json")
    summary = json.loads(found.stdout.splitlines()[-1])
    assert (summary["none"], summary["labels"]["food"]) == (0, 1)


def test_without_answers_that_fit_none_the_model_gives_each_post_a_label(
    label: Label,
) -> None:
    summary = json.loads(label("1\n2\n", "--json").stdout.splitlines()[-1])
    assert summary["none_class"] is None
    assert None not in outcomes_of(summary["model"], ["bread", "goal"], None)


def test_the_end_says_how_to_label_a_file_first(label: Label, tmp_path: Path) -> None:
    found = label("1\n2\n0\n")
    model = tmp_path / "out" / "model"
    commands = re.findall(r"^  (feedmill .*)$", found.stdout, re.MULTILINE)
    assert re.fullmatch(
        rf"feedmill classify FILE --model {re.escape(str(model))} --none 0\.\d\d",
        commands[0],
    )
    assert commands[1:] == [
        f"feedmill worker --model {model}",
        f"feedmill deploy {model}",
    ]


def test_every_label_is_reached_by_its_key_and_its_name(
    label: Label, tmp_path: Path
) -> None:
    """Also if a name is the key of another label or of a command."""
    names = ["refund", "1", "0", "q"]
    answers = [*names, "2", "1", "0", "q", "!"]
    found = label("\n".join(answers), labels=",".join(names))
    assert "2 refund  1 1  0 0  q q\n! none of these  u undo  s skip  " in found.stderr
    labels = [row["label"] for row in saved(tmp_path)]
    assert labels == [*names, *names, ""]


def test_trains_and_evaluates_from_answers_that_fit_none(
    label: Label, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert label("1\n2\n0\ns\n" * 8).exit_code == 0
    monkeypatch.chdir(tmp_path)
    command = (
        f"train --from out/labels.csv --head --base {base} --out head --device cpu"
    )
    trained = CliRunner().invoke(
        application(), [*command.split(), "--test-share", "0.5", "--json"]
    )
    assert trained.exit_code == 0, trained.output
    record = json.loads(trained.stdout.splitlines()[-1])
    assert (record["train"] + record["test"], record["posts"]["none"]) == (16, 8)
    tested = record["metrics"]
    assert tested["labels"]["no label"]["support"] == tested["posts"] - record["test"]
    assert tested["posts"] > record["test"]
    assert record["zero_shot"]["posts"] == tested["posts"]
    assert record["posts"]["unlabelled"] == 8
    assert 0 < record["plan"]["none"]["threshold"] <= 1
    command = "evaluate out/labels.csv --model head --device cpu --seen --json"
    measured = CliRunner().invoke(application(), command.split())
    assert measured.exit_code == 0, measured.output
    summary = json.loads(measured.stdout.splitlines()[-1])
    assert summary["posts"] == 24
    assert summary["labels"]["no label"]["support"] == 8


def test_resumes_the_answers_of_the_web_pages(label: Label, tmp_path: Path) -> None:
    """Who answered, when, and what the label was stays in the file."""
    answered = AnsweredPost(
        post=Post(id="p1", title="bread 1", body="a\x1b[31mb", run="monday"),
        label="food",
        why="random",
        fits_none=False,
        by="Ana",
        at="2026-11-28T20:00:00Z",
        was="sports",
        was_by="0f",
    )
    AnswerFile(tmp_path / "out").put([answered])
    (tmp_path / "out" / "models" / "taught-2026-11-28-200000").mkdir(parents=True)
    found = label("2\n2\n", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout.splitlines()[-1])["labelled"] == 3
    rows = saved(tmp_path)
    assert (rows[0]["by"], rows[0]["was"], rows[0]["run"]) == (
        "Ana",
        "sports",
        "monday",
    )
    assert [row["label"] for row in rows] == ["food", "sports", "sports"]
    assert AnswerFile(tmp_path / "out").read()[0] == answered
