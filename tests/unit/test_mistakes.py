"""Mistakes that commands tell before they ask Redis or load a model, as far as no other test makes them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from feedmill import cli, demo, deploy_commands, flower_commands, measuring_commands, offline_commands, train_commands
from feedmill.cli import app
from feedmill.training_job import within
from feedmill.tuning_report import TuningReport
from shared import logs
from shared.errors import DeviceLost, FeedmillError, ModelError, RequestRefused, StackError, UserError
from shared.messages import Classification, Post, PostError
from shared.settings import Settings
from shared.training import TrainOptions
from tests.support import announced
from workers import tuning

ROOT = Path(__file__).parent.parent.parent
POST = '{"id": "a", "title": "A title", "topic": "food"}\n'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """What a command raises that reads a file of one post, with a stand-in for the model."""
    monkeypatch.setattr(logs, "configure", lambda _: None)
    monkeypatch.setattr(
        measuring_commands, "load_model", lambda _: Mock(label_set=lambda _: SimpleNamespace(labels=["food"]))
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "posts.jsonl").write_text(POST)
    return lambda command: CliRunner().invoke(app, [command, "posts.jsonl"]).exception


def test_packages_of_two_installations(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").touch()
    command = [sys.executable, "-m", "feedmill", "status"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (
        2,
        f"feedmill: the package 'shared' should come from {ROOT / 'shared'}, but Python finds {tmp_path / 'shared'}. "
        "Start `feedmill` as installed, or leave the folder that holds the other one.\n",
    )


def test_an_address_that_nothing_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logs, "configure", lambda _: None)
    monkeypatch.delenv("FEEDMILL_REDIS_URL", raising=False)
    error = CliRunner().invoke(app, ["url", "--data-folder", str(tmp_path)]).exception
    assert isinstance(error, UserError)
    assert str(error) == (
        f"No `feedmill up` runs with its data in {tmp_path}, and FEEDMILL_REDIS_URL is not set: start the one, or set "
        "the other."
    )
    with announced(tmp_path, '{"redis_url": "redis://:p@127.0.0.1:1/0"}'):
        for given, url in (
            ({}, "redis://:p@127.0.0.1:1/0"),
            ({"FEEDMILL_REDIS_URL": "redis://there/0"}, "redis://there/0"),
        ):
            said = CliRunner().invoke(app, ["url", "--data-folder", str(tmp_path)], env=given)
            assert (said.exit_code, said.stdout) == (0, f"{url}\n")
    killed = CliRunner().invoke(app, ["url", "--data-folder", str(tmp_path)])
    assert str(killed.exception) == str(error)


def test_flower_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_commands, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^Flower is not installed: `pip install 'feedmill\[monitor\]'` brings it\.$"):
        flower_commands.flower()


def test_a_model_without_what_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "workers.weights", None)
    with pytest.raises(
        UserError, match=r"^Reading a model needs workers.weights, which `pip install 'feedmill\[worker\]'"
    ):
        deploy_commands._asking(tmp_path)


def test_a_training_without_what_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_commands, "find_spec", lambda _: None)
    with pytest.raises(
        UserError, match=r"^Training needs \w+, which `pip install 'feedmill\[worker,train\]'` brings\.$"
    ):
        train_commands._check_packages()


def test_a_training_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match=r"out is a file: name a folder with --out\.$"):
        train_commands.check_folder(tmp_path / "out", resume=False)


def test_a_training_of_a_base_outside_its_folder(tmp_path: Path) -> None:
    options = TrainOptions.parse({"from": "posts.jsonl", "out": "out", "base": "../base"})
    with pytest.raises(UserError, match=r"base: '\.\./base' is outside of the training folder\."):
        within(options, Settings(training_folder=tmp_path))


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("data", "words", "status"),
    [
        ("foo,bar\n1,2\n", "as CSV it has no column for a title or a body", None),
        ("nope\n{}\n", "posts.jsonl:1: not JSON", 1),
    ],
)
def test_a_file_without_posts_is_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    data: str,
    words: str,
    status: int | None,
) -> None:
    monkeypatch.setattr(offline_commands, "load_model", Mock(side_effect=AssertionError))
    (tmp_path / "posts.jsonl").write_text(data)
    said = CliRunner().invoke(app, ["classify", "posts.jsonl"])
    assert words in f"{said.stderr}{said.exception}"
    assert getattr(said.exception, "code", None) == status


def test_ids_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Results are looked for by them."""
    best = Mock(spec=Classification, label="food", scores={"food": 0.5})
    ids = ["1", f"text-{'a' * 32}", "2", "b" * 128]
    posts = [Post(id=post_id, title="Bread") for post_id in ids]
    outcomes: list[Any] = [best, best, PostError(id="2", error="why"), best]
    assert offline_commands._show_posts(zip(posts, outcomes, strict=True), as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ids
    assert [line.partition(" ")[2].lstrip() for line in lines] == [
        f"{'food 0.50':<48} Bread",
        f"{'food 0.50':<48} Bread",
        "failed: why",
        f"{'food 0.50':<48} Bread",
    ]
    assert lines[2].startswith("2" + " " * 37 + "failed")


def test_several_models_and_one_chart() -> None:
    said = CliRunner().invoke(app, ["evaluate", "x", "--model", "a", "--model", "b", "--png", "x.png"]).exception
    assert str(said) == "--png and --csv are of one model: name one --model, or leave them out."


def test_a_model_without_what_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "workers", None)
    with pytest.raises(UserError, match=r"^This needs workers, which `pip install 'feedmill\[worker\]'` brings\.$"):
        offline_commands.load_model(Settings())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (RequestRefused("labels: too many"), "some/model cannot serve this: labels: too many."),
        (DeviceLost("CUDA error"), "The device failed: CUDA error"),
    ],
)
def test_a_model_that_cannot(fault: FeedmillError, words: str) -> None:
    with pytest.raises(UserError) as told, offline_commands.refusals_told(Settings(model="some/model")):
        raise fault
    assert str(told.value) == words


def test_a_device_that_fails_while_it_is_measured(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.Tuning, "__init__", lambda *_: None)
    monkeypatch.setattr(tuning.Tuning, "steps", 1)
    monkeypatch.setattr(tuning.Tuning, "run", Mock(side_effect=DeviceLost("CUDA error")))
    error = run("tune")
    assert isinstance(error, ModelError)
    assert str(error) == "The device failed, so nothing is known of larger batches: CUDA error"


def test_a_device_without_memory_for_any_size() -> None:
    found = Mock(curve=lambda _: SimpleNamespace(points=(), full=1), tokens=9)
    with pytest.raises(ModelError, match=r" has no memory for .* and a batch of 1 posts\. Use a smaller model"):
        TuningReport(found, Mock(), 1)


def test_posts_of_which_none_can_be_classified(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [(None, PostError(id="a", error="scores that are not finite"))]
    monkeypatch.setattr("workers.offline.classify", lambda *_: iter(outcomes))
    monkeypatch.setattr("workers.calibration.calibrate", lambda *_: None)
    assert str(run("evaluate")).endswith("can be classified. First error: scores that are not finite")


def test_a_demo_whose_worker_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("connect", "make_app"):
        monkeypatch.setattr(demo, name, Mock())
    monkeypatch.setattr(demo, "ResultsStore", lambda *_: SimpleNamespace(latest=lambda _: []))
    monkeypatch.setattr(demo, "worker_statistics", lambda _: {})
    with pytest.raises(StackError, match=r"does not answer. See its log in /data\.$"):
        demo._report(Mock(settings=Settings(data_folder=Path("/data"))), [], 1.0, Mock(), False, False)


def test_up_prints_words_of_the_settings_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stack:
        def __init__(self, *_: object, **__: object) -> None: ...

        def start(self) -> Iterator[str]:
            yield "Flower at http://127.0.0.1:1, user [/x]"

        def stay(self, say: Callable[[str], None]) -> None:
            say("the worker [/x] ended")

        def stop(self) -> None: ...

    monkeypatch.setattr(cli, "Stack", Stack)
    folder = tmp_path / "[b]" / "[" / "x]"
    cli.up(folder)
    said = capsys.readouterr().err
    assert "✓ Flower at http://127.0.0.1:1, user [/x]\n" in said
    assert f"Data and logs are in {folder}." in said
    assert "the worker [/x] ended\n" in said
