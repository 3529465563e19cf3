"""`feedmill tune` and `feedmill evaluate`, as a person runs them: what they print, write, and leave for workers."""

import csv
import json
from pathlib import Path

import pytest

from shared.topics import TOPICS
from tests.fakes.models import NLI, make_model
from tests.support import as_jsonl, feedmill, last_json, make_posts
from workers.calibration import CANDIDATES
from workers.tuning import BATCH_SIZE, SIZES, TOKEN_BUDGET, Measured

SAMPLES = str(Path(__file__).parent.parent.parent / "feedmill" / "samples.jsonl")
PNG = b"\x89PNG\r\n\x1a\n"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_tune(tmp_path: Path) -> None:
    # Sixteen rows a post: enough to fill every budget.
    model = make_model("bert", tmp_path / "model", NLI)
    said = feedmill(
        "tune", SAMPLES, "--model", str(model), "--device", "cpu", "--limit", "40", "--rounds", "1", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    found = last_json(said.stdout)
    assert (found["posts"], found["rounds"], found["stored"]) == (40, 1, True)
    figures = rows(tmp_path / "feedmill-tune.csv")
    assert list(figures[0]) == list(Measured._fields)
    sizes = [(BATCH_SIZE, size) for size in SIZES] + [(TOKEN_BUDGET, size) for size in CANDIDATES["cpu"]]
    assert [(line["kind"], int(line["value"])) for line in figures] == sizes
    assert all(float(line["posts_per_s"]) > 0 for line in figures)
    assert (tmp_path / "feedmill-tune.png").read_bytes().startswith(PNG)
    assert f"Batch size {found['batch_size']['knee']} is the smallest within 2% of the fastest: " in said.stdout
    assert f"Token budget {found['token_budget']['knee']} is the smallest within 2% of the fastest: " in said.stdout
    # What the next worker starts with; but the tests' environment sets it.
    (entry,) = json.loads((tmp_path / "cache" / "calibration.json").read_text()).values()
    assert entry["token_budget"] == found["token_budget"]["knee"]
    assert (entry["classifier"], list(entry["tokens_per_second"])) == ("nli", [str(size) for size in CANDIDATES["cpu"]])
    assert "FEEDMILL_TOKEN_BUDGET is set, so workers use" in said.stdout


def test_too_few_posts_store_no_budget(tmp_path: Path) -> None:
    said = feedmill("tune", SAMPLES, "--limit", "6", "--rounds", "1", "--device", "cpu", "--json", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert last_json(said.stdout)["stored"] is False
    assert "Token budget not stored for workers: too few posts" in said.stdout
    assert "Left out: batch size 10 and above, " in said.stdout
    assert not (tmp_path / "cache" / "calibration.json").exists()


def test_evaluate(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    samples = [json.loads(line) for line in Path(SAMPLES).read_text().splitlines()[:32]]
    samples[0]["topic"] = samples[0]["topic"].upper()
    odd = [{"id": "x1", "title": "No topic"}, {"id": "x2", "title": "Another's topic", "topic": "knitting"}]
    records = [post | {"Key": f"key {number}"} for number, post in enumerate([*samples, *odd])]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    said = feedmill(
        "evaluate", str(path), "--id-column", "Key", "--csv", "predictions.csv", "--png", "confusion.png", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    found = last_json(said.stdout)
    assert (found["posts"], found["left_out"], list(found["labels"])) == (32, 2, list(TOPICS))
    assert "Excluded: 2 posts whose topic is missing or not a label." in said.stdout
    predictions = rows(tmp_path / "predictions.csv")
    assert [line["id"] for line in predictions] == [f"key {number}" for number in range(32)]
    assert [line["topic"] for line in predictions] == [post["topic"].lower() for post in samples]
    assert found["accuracy"] == sum(line["topic"] == line["label"] for line in predictions) / 32
    assert found["accuracy"] > 0.5
    assert sum(map(sum, found["confusion"])) == 32
    assert f"Accuracy {found['accuracy']:.3f}, macro-F1 {found['macro_f1']:.3f}, 32 posts." in said.stdout
    assert (tmp_path / "confusion.png").read_bytes().startswith(PNG)


def test_evaluate_a_model_with_labels_of_its_own(tmp_path: Path) -> None:
    model = make_model("bert", tmp_path / "model", {0: "food", 1: "sports", 2: "books"})
    said = feedmill("evaluate", SAMPLES, "--model", str(model), "--json", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    found = last_json(said.stdout)
    assert (list(found["labels"]), found["posts"], found["left_out"]) == (["food", "sports", "books"], 30, 130)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune", "/no/such/file"], "There is no file /no/such/file."),
        (["tune", "bad.jsonl"], "bad.jsonl contains no valid post."),
        (
            ["tune", SAMPLES, "--csv", "no/folder/x.csv"],
            "x.csv. Choose a file in an existing folder",
        ),
        (["evaluate", "/no/such/file"], "There is no file /no/such/file."),
        (["evaluate", "untold.jsonl"], "No post has a topic. Add the true labels"),
        (
            ["evaluate", SAMPLES, "--limit", "3", "--labels", "tea,coffee"],
            "one of the labels (topics: business, climate change; labels: tea, coffee).",
        ),
        (["evaluate", SAMPLES, "--template", "x"], "--template: no {} in 'x'"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "untold.jsonl").write_text(as_jsonl(make_posts(3)))
    said = feedmill(*arguments, cwd=tmp_path)
    assert said.returncode == 2
    assert words in said.stderr
    assert "Traceback" not in said.stderr
