"""`feedmill train` from the command line."""

import json
import random
import re
from pathlib import Path

import pytest

from feedmill.shared.purge import purge
from feedmill.shared.settings import Settings
from tests.fakes.models import make_model
from tests.support import RedisServer, feedmill, last_json

WORDS = {
    "food": "bread soup salt oven",
    "sports": "match goal team keeper",
    "travel": "train visa hotel border",
}


def write_posts(path: Path, count: int = 96) -> Path:
    source = random.Random(7)
    posts = []
    for number in range(count):
        topic = list(WORDS)[number % 3]
        text = " ".join(source.choices(WORDS[topic].split(), k=source.randrange(3, 12)))
        posts.append({"id": f"p{number}", "title": f"{text} {number}", "topic": topic})
    path.write_text("".join(json.dumps(post) + "\n" for post in posts))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model(
        "bert",
        tmp_path / "base",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def test_train_writes_a_model_that_can_be_served(
    redis: RedisServer, tmp_path: Path, base: Path
) -> None:
    """Train from a file and serve the resulting folder; purged posts are left out."""
    posts = write_posts(tmp_path / "posts.jsonl")
    (tmp_path / "out" / "checkpoints").mkdir(
        parents=True
    )  # a kill while the model was saved
    (tmp_path / "out" / "config.json").write_text("{")
    purge(redis.client, Settings.model_validate({"redis_url": redis.url}), ["p5"])
    said = feedmill(
        "train", "--from", "posts.jsonl", "--base", str(base), "--out", "out", "--test-share",
        "0.25",
        "--batch-size", "8", "--accumulation", "2", "--device", "cpu", "--eval", "epoch",
        "--patience", "4",
        "--page", "train.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert re.search(r"\b16 = 8 × 2 .*steps, 4 epochs; .*cpu.* in ", said.stderr)
    assert "loss " in said.stdout
    out = tmp_path / "out"
    assert said.stdout.endswith(
        f"  feedmill classify FILE --model {out}\n"
        f"Or start a worker with it:\n  feedmill worker --model {out}\n"
        f"Or switch running workers to it:\n  feedmill deploy {out}\n"
    )
    record = json.loads((out / "training.json").read_text())
    assert record["posts"]["purged"] == 1
    assert record["train"] + record["test"] == 95
    assert record["metrics"]["posts"] == record["test"]
    assert record["metrics"]["accuracy"] > 0.8
    assert (
        record["zero_shot"] is None
    )  # a bare encoder cannot classify without training
    card = (out / "README.md").read_text()
    assert f"| this model | {record['metrics']['accuracy']:.3f} |" in card
    assert "1 had been purged" in card
    first = record["epochs"][0]
    assert (
        f"| 1 | {first['step']} | {first['loss']:.3f} | {first['evaluation']['loss']:.3f} |"
        in card
    )
    assert (
        f"{record['samples_per_s']:.1f} posts/s, {record['peak_memory_bytes'] / 1e6:,.0f} MB "
        "of memory"
    ) in card
    page = (tmp_path / "train.html").read_text()
    assert page.count("<polyline") == 4, (
        "loss, evaluation loss, accuracy and learning rate"
    )
    assert f"<td>{first['evaluation']['loss']:.3f}</td>" in page
    assert "<script" not in page
    texts = [json.loads(line)["title"] for line in posts.read_text().splitlines()]
    assert not any(
        text in page + card + (out / "training.json").read_text() for text in texts
    )
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", "learnt.npy", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "training.json",
    }  # fmt: skip
    tried = feedmill("classify", "bread soup oven", "--model", "out", cwd=tmp_path)
    assert tried.stdout.split()[2] == "food", tried.stderr

    compared = feedmill(
        "evaluate", "posts.jsonl", "--model", "out", "--model",
        "sentence-transformers/all-MiniLM-L6-v2",
        "--labels", "food,sports,travel", "--seen", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    found = last_json(compared.stdout)
    assert found["posts"] == 96
    assert list(found["models"]) == ["out", "sentence-transformers/all-MiniLM-L6-v2"]
    for figures in found["models"].values():
        assert figures["posts_per_s"] > 0
        assert 0 <= figures["calibration_error"] <= 1
        assert sum(each["posts"] for each in figures["calibration"]) == 96
    assert "calibration error" in compared.stdout
