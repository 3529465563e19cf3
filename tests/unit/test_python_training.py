"""`feedmill.train` and `feedmill.evaluate` from Python, with a small model."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import feedmill
from feedmill.cli.train import TrainFlags
from feedmill.training.options import BOUNDS, CHOICES, TrainOptions
from tests.fakes.models import make_sentence_model

LABELS = ("food", "sports")
WORDS = {"food": "bread soup cheese tea", "sports": "goal match team ball"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentence_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def posts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a hundred posts with topics. Measuring a token budget takes most of a minute."""
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")
    path = tmp_path / "posts.jsonl"
    lines = []
    for number in range(100):
        topic = LABELS[number % 2]
        words = WORDS[topic].split()
        title = f"{words[number % 4]} the {words[number % 3]} {number}"
        lines.append(
            json.dumps({"id": f"p{number}", "title": title, "topic": topic}) + "\n"
        )
    path.write_text("".join(lines))
    return path


def test_trains_and_evaluates_a_head(
    base: Path, posts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    record = feedmill.train(
        posts, out, base=base, head=True, device="cpu", dtype="float32"
    )
    assert record == json.loads((out / "training.json").read_text())
    assert record["labels"] == list(LABELS)
    assert record["metrics"]["accuracy"] > 0.8
    predictions = tmp_path / "predictions.csv"
    measured = feedmill.evaluate(
        posts, models=[out], dtypes=["float32"], device="cpu", out=predictions
    )
    (summary,) = measured.values()
    assert summary["posts"] == record["test"]
    assert summary["seen"]["posts"] == record["train"]
    assert summary["accuracy"] > 0.8
    with predictions.open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["correct"] == "true" for row in rows)
    assert right == round(summary["accuracy"] * summary["posts"])
    assert capfd.readouterr() == ("", "")
    with pytest.raises(feedmill.UserError, match="is not empty"):
        feedmill.train(posts, out, base=base, head=True)


def test_compares_data_types_by_name(base: Path, posts: Path) -> None:
    measured = feedmill.evaluate(
        posts,
        LABELS,
        models=[base],
        dtypes=["float32", "bfloat16"],
        device="cpu",
        limit=20,
    )
    assert [name.rpartition(" in ")[2] for name in measured] == ["float32", "bfloat16"]
    assert [summary["posts"] for summary in measured.values()] == [20, 20]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size must be from 1 to 65,536, not 0"),
        ({"batch_size": 2.5}, "batch_size must be from 1 to 65,536, not 2.5"),
        ({"test_share": 1}, "test_share must be from 0 to 0.9, not 1"),
        ({"epochs": "many"}, "epochs must be from 0.01 to 1,000, not 'many'"),
        ({"epochs": float("nan")}, "epochs must be a finite number"),
        ({"min_score": None}, "min_score must be from 0 to 1, not None"),
        (
            {"targets": "labels"},
            "targets must be one of topic, zero-shot, soft, not 'labels'",
        ),
        ({"head": True, "epochs": 2}, "epochs cannot be combined with head"),
        ({"head": True, "devices": "all"}, "devices cannot be combined with head"),
        ({"labels": "food"}, "labels must be a list"),
    ],
    ids=str,
)
def test_refuses_unsuitable_options(
    posts: Path, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(feedmill.UserError, match=words):
        feedmill.train(posts, tmp_path / "model", **arguments)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"models": "model"}, "models and dtypes must be lists"),
        ({"dtypes": ["float64"]}, "dtype"),
        ({"limit": 0}, "limit must be a whole number above 0"),
        ({"out": "predictions.txt"}, "Cannot tell the format"),
    ],
    ids=str,
)
def test_refuses_unsuitable_evaluations(
    posts: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(feedmill.UserError, match=words):
        feedmill.evaluate(posts, **arguments)


def test_flags_are_the_options() -> None:
    """The command's flags have the defaults of the options, and bounds for each number."""
    flags = TrainFlags(source="posts", out="out")
    assert (
        TrainFlags.__dataclass_fields__.keys()
        == TrainOptions.__dataclass_fields__.keys()
    )
    assert vars(flags) == vars(TrainOptions(source="posts", out="out"))
    for name, value in vars(flags).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        assert not is_number or name in BOUNDS
    assert {
        name: vars(flags)[name] in choices for name, choices in CHOICES.items()
    } == dict.fromkeys(CHOICES, True)
