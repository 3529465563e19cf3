"""`feedmill tune` and `feedmill evaluate`: output, files, and the token budget that
workers use.
"""

import csv
import json
import re
from pathlib import Path

from feedmill.shared.settings import DESCRIBED_TOPICS, TOPICS
from feedmill.workers.pipeline.calibration import CANDIDATES
from tests.fakes.models import NLI, make_model
from tests.support import feedmill, last_json

SAMPLES = str(Path(__file__).parent.parent.parent / "feedmill" / "samples.jsonl")


def test_tune_measures_and_stores_a_token_budget(tmp_path: Path) -> None:
    # Sixteen rows per post fill every budget.
    model = make_model("bert", tmp_path / "model", NLI)
    said = feedmill(
        "tune", SAMPLES, "--model", str(model), "--device", "cpu", "--limit", "100", "--sizes",
        "5:10:5", "--json",
        "--out", "tune.csv", "--page", "tune.html", cwd=tmp_path,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    found = last_json(said.stdout)
    assert (found["posts"], found["stored"]) == (100, True)
    points = found["token_budget"]["points"]
    budgets = [point["budget"] for point in points]
    assert budgets == list(CANDIDATES["cpu"])
    assert [point["posts"] for point in found["arrival"]["points"]] == [5, 10]
    with (tmp_path / "tune.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(budgets) + 2
    assert "<svg" in (tmp_path / "tune.html").read_text()
    assert found["token_budget"]["knee"] in budgets
    assert all(point["tokens_per_s"] > point["posts_per_s"] > 0 for point in points)
    assert (
        f"{found['token_budget']['knee']:,} tokens a batch is the smallest size within 2%"
        in said.stdout
    )
    # The budget that the next worker would use, if the tests' environment did not set one.
    stored = json.loads((tmp_path / "cache" / "calibration.json").read_text())
    assert [*stored.values()] == [found["token_budget"]["knee"]]
    assert "FEEDMILL_TOKEN_BUDGET" in said.stdout


def test_evaluate_prints_measures(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    samples = [json.loads(line) for line in Path(SAMPLES).read_text().splitlines()[:32]]
    samples[0]["topic"] = samples[0]["topic"].upper()
    odd = [
        {"id": "x1", "title": "No topic"},
        {"id": "x2", "title": "Another's topic", "topic": "knitting"},
    ]
    records = [
        post | {"Key": f"key {number}"} for number, post in enumerate([*samples, *odd])
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    said = feedmill("evaluate", str(path), "--id-column", "Key", "--json", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    found = last_json(said.stdout)
    assert (found["posts"], found["left_out"], list(found["labels"])) == (
        32,
        2,
        list(TOPICS),
    )
    assert re.search(r"\b2 posts", said.stdout)
    assert (
        found["accuracy"]
        == sum(row[place] for place, row in enumerate(found["confusion"])) / 32
    )
    assert found["accuracy"] > 0.5
    assert sum(map(sum, found["confusion"])) == 32
    assert re.search(
        rf"{found['accuracy']:.3f}.*{found['macro_f1']:.3f}.*\b32 posts", said.stdout
    )


def test_evaluate_writes_each_prediction_in_each_data_type(tmp_path: Path) -> None:
    samples = [json.loads(line) for line in Path(SAMPLES).read_text().splitlines()[:8]]
    (tmp_path / "posts.jsonl").write_text(
        "".join(json.dumps(sample) + "\n" for sample in samples)
    )
    said = feedmill(
        "evaluate", "posts.jsonl", "--dtype", "float32", "--dtype", "bfloat16", "--out",
        "out.csv", "--json",
        cwd=tmp_path, FEEDMILL_TOKEN_BUDGET="1024",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "16 predictions written to out.csv" in said.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["dtype"] for row in rows] == ["float32"] * 8 + ["bfloat16"] * 8
    models = last_json(said.stdout)["models"]
    for dtype in ("float32", "bfloat16"):
        own = [row for row in rows if row["dtype"] == dtype]
        assert [row["id"] for row in own] == [sample["id"] for sample in samples]
        right = [row for row in own if row["correct"] == "true"]
        assert right == [row for row in own if row["label"] == row["topic"]]
        (accuracy,) = [
            summary["accuracy"]
            for name, summary in models.items()
            if name.endswith(dtype)
        ]
        assert len(right) / 8 == accuracy
    wrong = feedmill("evaluate", "posts.jsonl", "--dtype", "float99", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--dtype" in wrong.stderr


def test_classify_writes_a_labelled_copy(tmp_path: Path) -> None:
    samples = [json.loads(line) for line in Path(SAMPLES).read_text().splitlines()[:30]]
    with (tmp_path / "posts.csv").open(
        "w", newline="", encoding="cp1252", errors="replace"
    ) as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["Nr", "Kommentar", "Score", "Größe"])
        writer.writerows(
            [number, post["title"], "4,5 Sterne", "groß"]
            for number, post in enumerate(samples)
        )
        file.write(";;;\n")
    (tmp_path / "labels.json").write_text(
        json.dumps(
            {name: DESCRIBED_TOPICS[name] for name in ("food", "sports", "music")}
        )
    )
    said = feedmill(
        "classify", "posts.csv", "--encoding", "cp1252", "--body-column", "kommentar",
        "--labels", "labels.json",
        "--out", "labelled.csv", "--scores", "--json", "--none", "off", cwd=tmp_path,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    found = last_json(said.stdout)
    assert (found["rows"], sum(found["labels"].values()), found["left_out"]) == (
        31,
        30,
        {},
    )
    assert list(found["unlabelled"].values()) == [1]
    header, *lines = (tmp_path / "labelled.csv").read_text("utf-8-sig").splitlines()
    assert (
        header
        == "Nr;Kommentar;Score;Größe;label;label_score;score_food;score_sports;score_music"
    )
    table = list(csv.DictReader([header, *lines], delimiter=";"))
    assert [line["Nr"] for line in table] == [*map(str, range(30)), ""]
    best = [
        max(
            ("food", "sports", "music"), key=lambda label: float(line[f"score_{label}"])
        )
        for line in table[:-1]
    ]
    assert [line["label"] for line in table] == [*best, ""]
    assert all(
        line["label_score"] == line[f"score_{line['label']}"] for line in table[:-1]
    )
