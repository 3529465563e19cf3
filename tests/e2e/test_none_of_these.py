"""Posts that fit no label, through a real worker, Redis and the readers."""

import csv
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import feedmill as api
from feedmill.shared.broker import CLASSIFY_TASK, make_app
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.results import Result
from feedmill.shared.settings import load
from tests.support import RedisServer, feedmill, working

LABELS = ["sports", "food"]
POSTS = [
    {"id": "fits", "title": "The keeper saved two penalties and the crowd went home"},
    {"id": "other", "title": "Which form does the tax office want for a second flat?"},
]


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with working(redis_server, tmp_path_factory.mktemp("worker")):
        yield redis_server


@pytest.fixture(autouse=True)
def _address(worker: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", worker.url)


@pytest.fixture(scope="module")
def outcomes(worker: RedisServer) -> list[dict[str, Any]]:
    """The reply to a message with `none`, whose results are stored."""
    arguments = {"posts": POSTS, "labels": LABELS, "none": True}
    settings = load(redis_url=worker.url)
    app = make_app(settings, current=False)
    sent = app.send_task(CLASSIFY_TASK, kwargs=arguments)
    reply: list[dict[str, Any]] = sent.get(timeout=120)
    return reply


def test_the_reply_keeps_the_scores_of_a_post_without_a_label(
    outcomes: list[dict[str, Any]],
) -> None:
    fits, other = outcomes
    assert fits["label"] == "sports"
    assert other["label"] is None
    assert set(other["scores"]) == set(LABELS)
    assert sum(other["scores"].values()) < 0.5


def test_stored_results_have_no_label(outcomes: list[dict[str, Any]]) -> None:
    by_id = {}
    for result in api.results(follow=False):
        assert isinstance(result, Result)
        by_id[result.post.id] = result.classification
    classification = by_id["other"]
    assert classification.label is None
    assert classification.best_label == next(iter(outcomes[1]["scores"]))
    assert by_id["fits"].label == "sports"


@pytest.mark.usefixtures("outcomes")
def test_a_repeated_message_is_answered_from_the_store() -> None:
    sent = api.submit(POSTS, LABELS, none=True)
    predictions = sent.results(timeout=120)
    assert [prediction.label for prediction in predictions] == ["sports", None]
    assert predictions[1].best_label in LABELS


def test_without_none_the_same_texts_have_a_label() -> None:
    texts = [post["title"] for post in POSTS]
    predictions = api.submit(texts, LABELS).results(timeout=120)
    assert None not in predictions.counts()


@pytest.mark.usefixtures("outcomes")
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_exports_leave_the_label_empty_and_keep_its_score(
    form: str, worker: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / f"results.{form}"
    feedmill("export", str(file), cwd=tmp_path, FEEDMILL_REDIS_URL=worker.url)
    rows: list[Any]
    if form == "parquet":
        rows = pq.read_table(file).to_pylist()
    elif form == "csv":
        text = file.read_text(encoding="utf-8")
        rows = list(csv.DictReader(io.StringIO(text)))
    else:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    unlabelled = [row for row in rows if row["id"] == "other" and not row["label"]]
    assert unlabelled
    assert float(unlabelled[0]["label_score"]) < 0.5


def test_commands_show_that_a_post_has_no_label(
    worker: RedisServer, outcomes: list[dict[str, Any]], tmp_path: Path
) -> None:
    command = partial(feedmill, cwd=tmp_path, FEEDMILL_REDIS_URL=worker.url)
    best = next(iter(outcomes[1]["scores"]))
    assert f"{NO_LABEL} ({best})" in command("results", "--limit", "1000").stdout
    assert f"{NO_LABEL} ({best})" in command("results", "other").stdout
    shown = command("results", "--limit", "1000", "--json")
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    unlabelled = [record for record in records if record["label"] is None]
    assert {record["best_label"] for record in unlabelled} == {best}
    for record in records:
        assert ("best_label" in record) == (record["label"] is None)
    command("report", "report.html")
    page = tmp_path / "report.html"
    text = page.read_text(encoding="utf-8")
    assert NO_LABEL in text
    assert ">None<" not in text
    assert "None" not in command("status").stdout


@pytest.mark.usefixtures("outcomes")
def test_an_export_with_best_labels_is_read_again(
    worker: RedisServer, tmp_path: Path
) -> None:
    command = partial(feedmill, cwd=tmp_path, FEEDMILL_REDIS_URL=worker.url)
    columns = "id,title,label,label_score,scores,fingerprint,classified_at"
    for form in ("csv", "jsonl"):
        name = f"results.{form}"
        command("export", name, "--columns", f"{columns},best_label,labels")
        again = command("enqueue", name, FEEDMILL_QUEUE="unserved")
        assert again.returncode == 0, again.stderr
        copy = command(
            "classify", name, "--labels", "a,b", "--out", "out.csv", "--prefix", "n_"
        )
        assert copy.returncode == 0, copy.stderr


def test_a_file_gets_no_label_for_rows_that_fit_none(tmp_path: Path) -> None:
    posts = "".join(f"{json.dumps(post)}\n" for post in POSTS)
    (tmp_path / "posts.jsonl").write_text(posts)
    command = partial(
        feedmill,
        "classify",
        "posts.jsonl",
        "--labels",
        ",".join(LABELS),
        "--none",
        "0.36",
        cwd=tmp_path,
    )
    done = command("--out", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert "fits none of the labels" in done.stderr + done.stdout
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["label"] for row in rows] == ["sports", None]
    assert rows[1]["label_score"] < 0.36
    several = command("--multi-label", "--json")
    assert several.returncode == 0, several.stderr
    outcomes = [json.loads(line) for line in several.stdout.splitlines()]
    for outcome in outcomes:
        best = max(outcome["scores"].values())
        assert (outcome["label"] is None) == (best < 0.36)


def test_evaluate_says_how_to_count_posts_that_fit_no_label(tmp_path: Path) -> None:
    """It reads dates in a format of their own, as `enqueue` does."""
    lines = ["Betreff,wann,Thema"]
    for number, topic in enumerate(["sports", "food", ""]):
        lines.append(
            f"the keeper saved {number} penalties,31.01.2026 10:5{number},{topic}"
        )
    (tmp_path / "posts.csv").write_text("\n".join(lines))
    columns = ("--title-column=Betreff", "--date-column=wann", "--label-column=Thema")
    command = partial(
        feedmill,
        "evaluate",
        "posts.csv",
        *columns,
        "--labels=sports,food",
        cwd=tmp_path,
    )
    done = command("--none", "--date-format=%d.%m.%Y %H:%M")
    assert done.returncode == 0, done.stderr
    assert "Excluded: 1 post without a topic" in done.stdout
    assert "wann" not in done.stderr
    done = command("--none=off")
    assert "whose topic is missing or not a label" in done.stdout
    assert "--date-format" in done.stderr


@pytest.mark.parametrize(
    ("form", "option"),
    [
        ("csv", "--none=0.36"),
        ("parquet", "--multi-label"),
        pytest.param("jsonl", "--none=0.36", marks=pytest.mark.long),
        pytest.param("csv", "--multi-label", marks=pytest.mark.long),
    ],
)
def test_labelled_files_are_read_by_every_command(
    worker: RedisServer, tmp_path: Path, form: str, option: str
) -> None:
    """A truth in `topic`, and new columns of which some cells are empty."""
    lines = []
    for number in range(12):
        post = POSTS[number % 2] | {"id": str(number), "topic": LABELS[number % 2]}
        post["title"] += f" {number}"
        lines.append(f"{json.dumps(post)}\n")
    (tmp_path / "posts.jsonl").write_text("".join(lines))
    command = partial(feedmill, cwd=tmp_path, FEEDMILL_REDIS_URL=worker.url)
    labels = ("--labels", ",".join(LABELS))
    out = f"out.{form}"
    done = command("classify", "posts.jsonl", *labels, option, "--out", out)
    assert done.returncode == 0, done.stderr
    for arguments in (
        ("classify", out, *labels, option),
        ("evaluate", out, *labels),
        ("train", "--from", out, "--head", "--out", "model"),
    ):
        done = command(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    if form != "parquet":
        done = command("enqueue", out, FEEDMILL_QUEUE="unserved")
        assert done.returncode == 0, done.stderr


def test_the_event_of_a_message_counts_posts_without_a_label(
    worker: RedisServer,
) -> None:
    """Flower shows it as the message's result."""
    settings = load(redis_url=worker.url)
    app = make_app(settings, current=False)
    arguments = {"posts": POSTS, "labels": LABELS, "none": True}
    results: list[str] = []
    sent: set[str] = set()

    def succeeded(event: dict[str, Any]) -> None:
        if event["uuid"] in sent:
            results.append(event["result"])
            receiver.should_stop = True

    def send(*_: object, **__: object) -> None:
        message = app.send_task(CLASSIFY_TASK, kwargs=arguments, ignore_result=True)
        sent.add(message.id)

    with app.connection() as connection:
        # By the first heartbeat that it receives, it has subscribed to events.
        handlers = {"task-succeeded": succeeded, "worker-heartbeat": send}
        receiver = app.events.Receiver(connection, handlers)
        receiver.capture(limit=None, timeout=60)
    assert set(results) == {"'2 of 2 posts classified, 1 without a label'"}
