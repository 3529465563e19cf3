"""An evaluation leaves out the posts that a model has learnt from, and lists the mistakes on
others.
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feedmill
from feedmill.evaluation import page as evaluation_page
from feedmill.evaluation.measure import Evaluation, Measurements, ModelEvaluation
from feedmill.evaluation.metrics import calibration, metrics
from feedmill.evaluation.posts import disputed, unsure, wrong
from feedmill.shared.messages import Outcome, Post
from feedmill.training import learnt
from tests.fakes.models import make_sentence_model
from tests.support import make_classification

LABELS = ("food", "sports")
WORDS = {"food": "bread soup cheese tea", "sports": "goal match team ball"}
#: Measuring a token budget takes most of a minute.
BUDGET = "2048"


def lines_of(numbers: range, **changes: Any) -> str:
    lines = []
    for number in numbers:
        topic = LABELS[number % 2]
        words = WORDS[topic].split()
        title = f"{words[number % 4]} the {words[number % 3]} {number}"
        post = {"id": f"p{number}", "title": title, "topic": topic} | changes
        lines.append(json.dumps(post) + "\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head, `model`, that was fitted to `posts.jsonl`."""
    folder = tmp_path_factory.mktemp("learnt")
    base = make_sentence_model(tmp_path_factory.mktemp("base"))
    (folder / "posts.jsonl").write_text(lines_of(range(60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEEDMILL_TOKEN_BUDGET", BUDGET)
        feedmill.train(
            folder / "posts.jsonl",
            folder / "model",
            base=base,
            head=True,
            device="cpu",
            dtype="float32",
        )
    return folder


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", BUDGET)


def evaluated(folder: Path, posts: str, **options: Any) -> dict[str, Any]:
    path = folder / "asked.jsonl"
    path.write_text(posts)
    measured = feedmill.evaluate(
        path,
        models=[folder / "model"],
        device="cpu",
        dtypes=["float32"],
        **options,
    )
    (summary,) = measured.values()
    return summary


def test_posts_that_were_learnt_are_measured_apart(folder: Path) -> None:
    record = json.loads((folder / "model" / "training.json").read_text())
    known = (folder / "posts.jsonl").read_text()
    shouted = known.upper().replace('"ID"', '"id"').replace('"TITLE"', '"title"')
    shouted = shouted.replace('"TOPIC"', '"topic"')
    for texts in (known, shouted):
        summary = evaluated(folder, texts + lines_of(range(60, 80)))
        assert summary["seen"]["posts"] == record["train"]
        assert summary["posts"] == record["test"] + 20
        assert 0 <= summary["seen"]["accuracy"] <= 1
    whole = evaluated(folder, known, seen=True)
    assert whole["posts"] == 60
    assert "seen" not in whole
    assert "seen" not in evaluated(folder, lines_of(range(60, 80)))


def test_refuses_posts_that_were_all_learnt(folder: Path) -> None:
    digests = learnt.digests_of(str(folder / "model"))
    assert digests
    rows = [json.loads(line) for line in lines_of(range(60)).splitlines()]
    posts = [Post(id=row["id"], title=row["title"], topic=row["topic"]) for row in rows]
    own = [
        row
        for row, post in zip(rows, posts, strict=True)
        if learnt.digest_of(post) in digests
    ]
    text = "".join(json.dumps(row) + "\n" for row in own)
    with pytest.raises(feedmill.UserError, match="learnt from all of these .* posts"):
        evaluated(folder, text)
    assert evaluated(folder, text, seen=True)["posts"] == len(own)


@pytest.mark.parametrize("content", [b"", b"no digests", b"pickle", b"floats"])
def test_a_damaged_list_of_digests_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / learnt.LEARNT_FILE
    if content == b"pickle":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif content == b"floats":
        np.save(path, np.array([0.5]))
    else:
        path.write_bytes(content)
    with pytest.raises(feedmill.UserError, match=r"learnt\.npy.*Train the model again"):
        learnt.digests_of(str(tmp_path))


def test_a_name_of_a_model_has_no_digests(tmp_path: Path) -> None:
    for model in ("somebody/a-model", str(tmp_path), "~nobody-of-this-name/model"):
        assert learnt.digests_of(model) is None


def test_wrong_labels_come_with_the_nearest_training_post(
    folder: Path, tmp_path: Path
) -> None:
    """Every other label is switched: half of the posts are labelled wrong."""
    switched = lines_of(range(60, 80), topic="food")
    out = tmp_path / "wrong.csv"
    summary = evaluated(folder, switched, wrong=out)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == round((1 - summary["accuracy"]) * 20)
    scores = [float(row["label_score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    learnt_ids = {f"p{number}" for number in range(60)}
    for row in rows:
        assert row["label"] != row["topic"] == "food"
        assert float(row["topic_score"]) < float(row["label_score"])
        assert row["nearest_id"] in learnt_ids
        number = int(row["nearest_id"][1:])
        assert row["nearest_label"] == LABELS[number % 2]
        assert row["nearest_title"].endswith(f" {number}")
        assert 0 < float(row["nearest_similarity"]) <= 1.001


def test_without_the_training_file_nothing_is_nearest(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "wrong.csv"
    posts = folder / "posts.jsonl"
    moved = posts.rename(folder / "moved.jsonl")
    try:
        evaluated(folder, lines_of(range(60, 80), topic="food"), wrong=out)
    finally:
        moved.rename(posts)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert {row["nearest_id"] for row in rows} == {""}


def evaluation_of(*labels_by_model: dict[str, tuple[str, float]]) -> Evaluation:
    """Return an evaluation of posts with the topic food. labels_by_model: label and its score, by
    post.
    """
    ids = list(labels_by_model[0])
    known = [(Post(id=own_id, title=f"<b>{own_id}"), "food") for own_id in ids]
    models = []
    for number, labels in enumerate(labels_by_model):
        outcomes: list[Outcome] = []
        for own_id, (label, score) in labels.items():
            (other,) = set(LABELS) - {label}
            scores = {label: score, other: 1 - score}
            outcomes.append(make_classification(own_id, label=label, scores=scores))
        pairs = [("food", label) for label, _ in labels.values()]
        scored = [(score, label == "food") for label, score in labels.values()]
        summary = metrics(LABELS, pairs) | calibration(scored) | {"posts_per_s": 1.0}
        measured = Measurements(summary, failures=[], outcomes=outcomes)
        name = f"model{number}"
        models.append(ModelEvaluation(name, name, "float32", name, measured))
    return Evaluation(models, known, 0, frozenset(), counts_seen=False)


FIRST = {"a": ("food", 0.9), "b": ("sports", 0.6), "c": ("sports", 0.8)}
SECOND = {"a": ("sports", 0.55), "b": ("sports", 0.7), "c": ("food", 0.95)}


def test_posts_worth_a_look_come_in_their_order() -> None:
    one = evaluation_of(FIRST)
    assert [row["id"] for row in wrong(one)] == ["c", "b"]
    assert [row["id"] for row in unsure(one)] == ["b", "c", "a"]
    both = evaluation_of(FIRST, SECOND)
    assert [(row["id"], row["model"]) for row in disputed(both)] == [
        ("c", "model0"),
        ("c", "model1"),
        ("a", "model0"),
        ("a", "model1"),
    ]
    with pytest.raises(feedmill.UserError, match="repeat --model"):
        disputed(one)


def test_the_page_shows_confusion_and_mistakes() -> None:
    html = evaluation_page.page(evaluation_of(FIRST, SECOND))
    assert "food labelled sports: 2" in html
    assert "&lt;b&gt;c" in html
    assert "<b>c" not in html
    assert "model1" in html
