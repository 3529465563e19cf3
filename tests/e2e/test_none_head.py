"""A head that learnt from posts that fit none of the labels: trained from answers, and served by a
real worker.
"""

import csv
import json
from pathlib import Path

from tests.support import RedisServer, feedmill, working

SPORTS = [
    "The keeper saved two penalties in the cup final",
    "Our striker scored twice before half-time",
    "The marathon runners crossed the finish line in the rain",
    "She won the tennis final in three sets",
]
FOOD = [
    "Fry the onions before adding the rice",
    "This sourdough bread needs two days to rise",
    "Which cheese goes best on a pizza?",
    "Grandmother's soup with noodles and carrots",
]
OTHER = [
    "Which form does the tax office want for a second flat?",
    "My landlord refuses to return the deposit",
    "The new phone loses its network connection every hour",
    "How do I train my puppy not to bark at night?",
]
POSTS = [
    {"id": "fits", "title": "Two goals in the last minute won us the match"},
    {"id": "other", "title": "The tax office has lost the form about my flat"},
]


def test_a_trained_none_class_is_served(redis: RedisServer, tmp_path: Path) -> None:
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "title", "body", "label", "picked"])
        for label, titles in (("sports", SPORTS), ("food", FOOD), ("", OTHER)):
            for title in titles:
                picked = "random" if label else "none (random)"
                writer.writerow([title[:12], title, "", label, picked])
    trained = feedmill(
        *[
            "train",
            "--from",
            "labels.csv",
            "--head",
            "--out",
            "model",
            "--split",
            "none",
            "--device",
            "cpu",
        ],
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert "4 posts that fit none of them" in trained.stderr
    (tmp_path / "posts.jsonl").write_text(
        "".join(f"{json.dumps(post)}\n" for post in POSTS)
    )
    with working(redis, tmp_path, "worker", "--model", "model", "--device", "cpu"):
        sent = feedmill(
            *["enqueue", "posts.jsonl", "--none", "0.36", "--wait"],
            cwd=tmp_path,
            FEEDMILL_REDIS_URL=redis.url,
        )
        assert sent.returncode == 0, sent.stderr
    results = feedmill("results", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    labels = {}
    for line in results.stdout.splitlines():
        result = json.loads(line)
        labels[result["id"]] = result["label"]
    assert labels == {"fits": "sports", "other": None}
