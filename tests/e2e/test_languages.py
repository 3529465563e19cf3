"""Languages of results, through a real worker, Redis and the readers."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import feedmill as api
from feedmill.shared.results import Result
from tests.support import RedisServer, feedmill, working

LABELS = ["sports", "food"]
POSTS: list[dict[str, Any]] = [
    {"id": "en", "title": "The keeper saved two penalties and the crowd went home"},
    {"id": "de", "title": "Der Torwart hat am Ende zwei Elfmeter gehalten"},
    {"id": "unknown", "title": "lol"},
]
LANGUAGES = {"en": "en", "de": "de", "unknown": None}


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("worker")
    with working(redis_server, folder, FEEDMILL_LANGUAGES="en,fr"):
        yield redis_server


@pytest.fixture(autouse=True)
def _address(worker: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", worker.url)


@pytest.fixture(scope="module")
def predictions(worker: RedisServer) -> api.Predictions:
    sent = api.submit(POSTS, LABELS, run="r", redis_url=worker.url)
    return sent.results(timeout=120)


def test_only_posts_in_other_languages_have_no_label(
    predictions: api.Predictions,
) -> None:
    english, german, unknown = predictions
    assert english.label == "sports"
    assert german.label is None
    assert german.best_label in LABELS
    assert unknown.label in LABELS
    languages = [prediction.language for prediction in predictions]
    assert languages == list(LANGUAGES.values())
    frame = predictions.to_frame()
    assert frame["language"].dropna().tolist() == ["en", "de"]


@pytest.mark.usefixtures("predictions")
def test_stored_results_have_a_language() -> None:
    languages = {}
    for result in api.results(follow=False, run="r"):
        assert isinstance(result, Result)
        languages[result.post.id.rpartition(":")[2]] = result.classification.language
    assert languages == LANGUAGES


@pytest.mark.usefixtures("predictions")
def test_a_repeated_message_is_answered_with_the_stored_language() -> None:
    again = api.submit(POSTS, LABELS, run="r").results(timeout=120)
    assert [prediction.language for prediction in again] == list(LANGUAGES.values())
    assert [prediction.label is None for prediction in again] == [False, True, False]


@pytest.mark.usefixtures("predictions")
def test_commands_and_exports_show_the_language(
    worker: RedisServer, tmp_path: Path
) -> None:
    command = partial(feedmill, cwd=tmp_path, FEEDMILL_REDIS_URL=worker.url)
    assert "no label, language de (" in command("results", "--run", "r").stdout
    shown = command("results", "--json", "--run", "r").stdout
    languages = {}
    for line in shown.splitlines():
        record = json.loads(line)
        languages[record["id"]] = record.get("language")
        assert ("best_label" in record) == (record["label"] is None)
    assert languages == LANGUAGES
    stored = command("results", "--json", *LANGUAGES).stdout
    records = [json.loads(line) for line in stored.splitlines()]
    assert {record["id"]: record.get("language") for record in records} == LANGUAGES
    command("export", "results.jsonl", "--run", "r")
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["id"]: row["language"] for row in rows} == LANGUAGES
    for row in rows:
        assert row["labels"] == ([row["label"]] if row["label"] else [])
    done = command("report", "report.html")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("predictions")
def test_multi_label_results_list_the_labels_above_the_models_threshold(
    worker: RedisServer, tmp_path: Path
) -> None:
    """The embedded model's cosines are all below 0.5."""
    text = "The football player cooks beans with garlic for his team after the match"
    sent = api.submit([{"id": "m", "title": text}], LABELS, multi_label=True, run="m")
    (prediction,) = sent.results(timeout=120)
    assert prediction.labels_threshold == pytest.approx(0.2, abs=1e-4)
    assert prediction.labels == prediction.labels_above(0.2)
    assert prediction.labels
    command = partial(feedmill, cwd=tmp_path, FEEDMILL_REDIS_URL=worker.url)
    command("export", "m.jsonl", "--run", "m")
    (row,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert row["labels"] == prediction.labels
    shown = json.loads(command("results", "--json", "--run", "m").stdout)
    assert shown["labels"] == prediction.labels


def test_a_worker_without_the_language_ends_with_the_reason(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    done = feedmill(
        "worker",
        "--languages",
        "en,xx",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis_server.url,
    )
    assert done.returncode != 0
    assert "'xx' is not the code of a language" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
