"""A fine-tuned model that learnt from posts that fit none of the labels: trained from answers,
used by commands, and served by a real worker.
"""

import csv
import json
import random
from functools import partial
from pathlib import Path

from tests.support import RedisServer, feedmill, working

WORDS = {
    "sports": "keeper penalty striker goal marathon tennis match league coach final",
    "food": "onions rice bread pizza cheese soup noodles carrots garlic oven",
    "": "tax office landlord deposit network phone puppy insurance form printer",
}
POSTS = [
    {"id": "fits", "title": "The striker scored a goal in the final match"},
    {"id": "other", "title": "The tax office has lost the form of my landlord"},
]


def write_answers(path: Path, count: int) -> None:
    """Write answers as `feedmill label` does: an empty label, and none in the column `picked`."""
    source = random.Random(3)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "title", "body", "label", "picked"])
        for number in range(count):
            for label, words in WORDS.items():
                title = " ".join(source.sample(words.split(), k=4))
                picked = "random" if label else "none (random)"
                writer.writerow(
                    [f"{label}{number}", f"{title} {number}", "", label, picked]
                )


def test_a_fine_tuned_none_class_is_used_everywhere(
    redis: RedisServer, tmp_path: Path
) -> None:
    write_answers(tmp_path / "labels.csv", 24)
    command = partial(feedmill, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    trained = command(
        *["train", "--from", "labels.csv", "--out", "model", "--device", "cpu"],
        *["--epochs", "4", "--no-compare"],
    )
    assert trained.returncode == 0, trained.stderr
    assert "posts that fit none of them" in trained.stderr
    assert "classify FILE --model" in trained.stdout
    assert "--none" in trained.stdout
    record = json.loads((tmp_path / "model/training.json").read_text())
    assert record["labels"] == ["food", "sports"]
    assert set(record["plan"]["none"]) == {"threshold", "precision", "coverage"}
    assert record["metrics"]["posts"] > record["test"]
    assert record["metrics"]["accuracy"] > 0.8
    card = (tmp_path / "model/README.md").read_text()
    assert "posts that fit none of the labels" in card

    lines = "".join(f"{json.dumps(post)}\n" for post in POSTS)
    (tmp_path / "posts.jsonl").write_text(lines)
    expected = {"fits": "sports", "other": None}
    shown = command("classify", "posts.jsonl", "--model", "model", "--none", "--json")
    records = map(json.loads, shown.stdout.splitlines())
    assert {record["id"]: record["label"] for record in records} == expected

    write_answers(tmp_path / "truth.csv", 3)
    evaluated = command(
        "evaluate", "truth.csv", "--model", "model", "--none", "--seen", "--json"
    )
    assert evaluated.returncode == 0, evaluated.stderr
    summary = json.loads(evaluated.stdout.splitlines()[-1])
    assert summary["posts"] == 9
    assert summary["accuracy"] > 0.8

    with working(redis, tmp_path, "worker", "--model", "model", "--device", "cpu"):
        sent = command("enqueue", "posts.jsonl", "--none", "--wait")
        assert sent.returncode == 0, sent.stderr
        plain = command("enqueue", "posts.jsonl", "--wait", "--again", "--run", "plain")
        assert plain.returncode == 0, plain.stderr
    results = command("results", "--json")
    labels: dict[tuple[str, bool], str | None] = {}
    for line in results.stdout.splitlines():
        result = json.loads(line)
        is_plain = result["post"].get("run") == "plain"
        labels[result["id"], is_plain] = result["label"]
    asked = {post_id: label for (post_id, plain), label in labels.items() if not plain}
    assert asked == expected
    assert labels["other", True] in ("sports", "food")
