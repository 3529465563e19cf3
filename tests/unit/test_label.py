"""`feedmill label`: answers from a pipe and from a terminal, saved after each, and the model made of them."""

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

from feedmill.cli import train as label_command
from feedmill.cli.main import application
from feedmill.cli.options import FileFlags
from feedmill.shared import logs
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.training.data import TrainOptions, collect
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import select_device
from tests.fakes.models import make_sentence_model
from tests.support import naming, wait_until

Label = Callable[..., Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentence_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def label(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Label:
    """Run the command on many posts with these piped answers."""
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    monkeypatch.setenv("FEEDMILL_DTYPE", "float32")
    rows = [{"id": f"p{number}", "title": f"bread {number}", "body": "a\x1b[31mb"} for number in range(170)]
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(answers: str, *flags: str, labels: str = "food,sports") -> Any:
        given = [str(tmp_path / "posts.jsonl"), "--out", str(tmp_path / "out"), "--base", str(base), "--device", "cpu"]
        return CliRunner().invoke(application(), ["label", *given, "--labels", labels, *flags], input=answers)

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
    assert re.search(r"expected accuracy \d\.\d\d ± 0\.\d\d, zero-shot \d", found.stderr)
    assert "\x1b" not in found.output
    assert "a\\x1b[31mb" in found.stderr
    settings = Settings(model=summary["model"], device="cpu", dtype="float32")
    model = load_classifier(settings, select_device("cpu", "float32"))
    assert (model.kind, model.label_set(ClassifyOptions()).labels) == ("head", ("food", "sports"))
    options = TrainOptions(source=str(tmp_path / "out" / "labels.csv"), out="x", head=True)
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


def test_interrupted_answers_are_kept(label: Label, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_command, "_answer", Mock(side_effect=["1", "2", KeyboardInterrupt]))
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
    label: Label, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: str, flags: list[str], words: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "labels.csv").write_text("id,title,body,label,picked\np1,bread 1,,sports,random\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "labels.csv").write_text("a,b\n1,2\n")
    found = label("", *flags, labels=labels)
    assert found.exit_code != 0
    with pytest.raises(Exception, match=naming(*words)):
        raise found.exception or AssertionError(found.output)


def test_a_terminal_takes_single_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()

    def press(key: bytes) -> None:
        wait_until(lambda: not termios.tcgetattr(keyboard)[3] & termios.ICANON, "the terminal passes on single keys")
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
