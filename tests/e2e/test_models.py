"""Every kind of model in a real worker and in `feedmill classify`."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from tests.fakes.graphs import ExportedModel
from tests.fakes.hub import Hub
from tests.fakes.models import NLI, make_model
from tests.support import RedisServer, application, feedmill, wait_until, working

POSTS = [
    {"id": "a", "title": "The match ended in a draw"},
    {"id": "b"},
    {"id": "c", "title": "Bread", "body": "I baked it. " * 300},
]
LABELS = ["sports", "food", "travel"]


def ask(redis: RedisServer, **options: Any) -> list[dict[str, Any]]:
    sent = application(redis).send_task(
        "feedmill.classify", kwargs={"posts": POSTS, **options}
    )
    found: list[dict[str, Any]] = sent.get(timeout=120)
    return found


def test_worker_classifies_by_entailment(redis: RedisServer, tmp_path: Path) -> None:
    folder = make_model("bart", tmp_path / "model", NLI)
    check_worker(redis, tmp_path, folder, FEEDMILL_ENGINE="torch")


def test_worker_classifies_by_entailment_with_onnx(
    redis: RedisServer, tmp_path: Path, exported_bert: ExportedModel
) -> None:
    folder, cache = exported_bert
    environment = {"FEEDMILL_ENGINE": "onnx", "FEEDMILL_CACHE_FOLDER": str(cache)}
    check_worker(redis, tmp_path, folder, **environment)


def check_worker(
    redis: RedisServer, tmp_path: Path, folder: Path, **environment: str
) -> None:
    """Check that a worker's scores equal those of the transformers pipeline.

    Each post has three rows; one post is invalid. folder: of the model.
    """
    with working(
        redis,
        tmp_path,
        FEEDMILL_MODEL=str(folder),
        FEEDMILL_DTYPE="float32",
        **environment,
    ) as worker:
        one, bad, other = ask(redis, labels=LABELS)
        (first, *_) = ask(redis, labels=LABELS, multi_label=True)
        assert worker.says("nli")
        assert worker.says("cpu in float32")
    assert bad == {"id": "b", "error": "title or body must contain text"}
    zero_shot = pipeline("zero-shot-classification", model=str(folder))
    for found, text in (
        (one, POSTS[0]["title"]),
        (other, f"{POSTS[2]['title']}\n\n{POSTS[2]['body'].strip()}"),
    ):
        expected = zero_shot(text, candidate_labels=LABELS)
        assert found["scores"] == pytest.approx(
            dict(zip(expected["labels"], expected["scores"], strict=True)), abs=1e-3
        )
    expected = zero_shot(POSTS[0]["title"], candidate_labels=LABELS, multi_label=True)
    assert first["scores"] == pytest.approx(
        dict(zip(expected["labels"], expected["scores"], strict=True)), abs=1e-3
    )


def test_worker_downloads_a_model_that_then_works_offline(
    redis: RedisServer, tmp_path: Path
) -> None:
    folder = make_model("bert", tmp_path / "model", NLI)
    where = {"HF_HOME": str(tmp_path / "home"), "FEEDMILL_MODEL": "someone/small-nli"}
    with Hub({"someone/small-nli": folder}) as hub:
        with working(redis, tmp_path, HF_ENDPOINT=hub.url, **where) as worker:
            found, _, _ = ask(redis, labels=LABELS)
            wait_until(
                lambda: worker.says("someone/small-nli"), "the log names the model"
            )
        assert found["model"] == "someone/small-nli"
        assert found["revision"] == hub.commit("someone/small-nli")
        gone = hub.url
    said = feedmill(
        "classify",
        "a text",
        "--json",
        cwd=tmp_path,
        HF_ENDPOINT=gone,
        HF_HUB_OFFLINE="1",
        **where,
    )
    assert said.returncode == 0, said.stderr
    assert set(json.loads(said.stdout)) == {"id", "label", "scores"}
