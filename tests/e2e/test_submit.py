"""`feedmill.submit` with a real worker: progress, results in order, failures, and frames."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest

import feedmill as api
from feedmill import UserError
from feedmill.api import submission
from feedmill.producers.records import id_of_text
from feedmill.shared import runs
from feedmill.shared.broker import CLASSIFY_TASK, make_app
from feedmill.shared.errors import RequestRefused
from feedmill.shared.keys import TOMBSTONE
from feedmill.shared.messages import Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings, load
from tests.e2e.test_python_api import EXPECTED, LABELS, TEXTS, labels
from tests.support import (
    PASSWORD,
    RedisServer,
    feedmill,
    make_classification,
    naming,
    run,
    wait_until,
    working,
)


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with working(redis_server, tmp_path_factory.mktemp("worker")):
        yield redis_server


@pytest.fixture(autouse=True)
def _address(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", redis_server.url)
    redis_server.client.delete("unserved")


def test_results_come_in_the_order_of_the_items(worker: RedisServer) -> None:
    texts = [f"{TEXTS[at % 2]} {at}" for at in range(500)]
    sent = api.submit(iter(texts), LABELS)
    replies = [f"celery-task-meta-{task_id}" for task_id in sent._pending]
    found = sent.results(timeout=120)
    assert [each.text for each in found] == texts
    assert set(labels(found)) == set(LABELS)
    assert sent.progress() == (500, 500, 0)
    assert sent.progress().finished
    assert repr(sent).endswith("500 of 500 done>")
    assert len(replies) == 16
    assert worker.client.exists(*replies) == 0  # collected replies are deleted
    progress = runs.progress(worker.client, sent.name)
    assert progress
    assert (progress.sent, progress.stored, progress.failed) == (500, 500, 0)


@pytest.mark.usefixtures("worker")
def test_scores_equal_those_of_the_worker() -> None:
    arguments = {"posts": [{"id": "a", "title": TEXTS[0]}], "labels": LABELS}
    (outcome,) = (
        make_app(load(), current=False)
        .send_task(CLASSIFY_TASK, kwargs=arguments)
        .get(timeout=120)
    )
    found = api.submit([{"id": "b", "title": TEXTS[0]}], LABELS).results(timeout=120)
    assert dict(found[0].scores) == outcome["scores"]
    assert found[0].id == "b"


@pytest.mark.usefixtures("worker")
def test_repeated_ids_get_their_own_labels() -> None:
    items = [
        {"id": name, "title": text}
        for name, text in zip(("a~2", "a", "a"), (*TEXTS, TEXTS[0]), strict=True)
    ]
    sent = api.submit(items, LABELS)
    found = sent.results(timeout=120)
    assert [each.label for each in found] == [*EXPECTED, EXPECTED[0]]
    results = [
        each
        for each in api.results(run=sent.name, follow=False)
        if isinstance(each, api.Result)
    ]
    assert len({each.post.id for each in results}) == 3


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("package", [pandas, polars])
def test_frame_keeps_its_order(package: Any) -> None:
    frame = package.DataFrame({"id": [7, 7, 8, 9], "review": [*TEXTS, None, TEXTS[0]]})
    if package is pandas:
        frame.index = [5, 5, 1, "x"]
    sent = api.submit(frame, LABELS, body="review", run=f"frame of {package.__name__}")
    with pytest.warns(UserWarning, match=naming("1 of 4 rows", "row 2: no text")):
        found = sent.wait(120).to_frame(scores=True)
    scores = ["score_praise", "score_complaint"]
    assert list(found.columns) == [
        "id",
        "review",
        "label",
        "label_score",
        *scores,
        "label_error",
    ]
    assert list(found["label"])[:2] == EXPECTED
    assert found["label_score"][0:2].min() > 0.5
    assert sent.progress() == (4, 4, 1)
    results = api.results(run=f"frame of {package.__name__}", follow=False)
    assert sorted(each.post.id for each in results if isinstance(each, api.Result)) == [
        "7",
        "7~1",
        "9",
    ]
    if package is pandas:
        assert list(found.index) == [5, 5, 1, "x"]


@pytest.mark.usefixtures("worker")
def test_missing_ids_keep_the_others() -> None:
    # A column of floats, with ids that no other test purges.
    frame = pandas.DataFrame({"id": [81, None, 82], "text": [*TEXTS, "one"]})
    api.submit(frame, LABELS, run="floats").wait(60)
    found = {
        each.post.body: each.post.id
        for each in api.results(run="floats", follow=False)
        if isinstance(each, api.Result)
    }
    assert found == {TEXTS[0]: "81", TEXTS[1]: id_of_text("", TEXTS[1]), "one": "82"}


def test_same_run_uses_stored_results(worker: RedisServer) -> None:
    first = api.submit(TEXTS, LABELS, run="twice").results(60)
    before = int(worker.client.hget("feedmill:counters", "stored") or 0)
    assert (
        labels(api.submit(TEXTS, LABELS, run="twice").results(60))
        == labels(first)
        == EXPECTED
    )
    assert (
        labels(api.submit(TEXTS, [*LABELS[::-1], "other"], run="twice").results(60))
        == EXPECTED
    )
    assert int(worker.client.hget("feedmill:counters", "stored") or 0) == before + 2
    results = [
        each
        for each in api.results(run="twice", follow=False)
        if isinstance(each, api.Result)
    ]
    ids = [each.post.id for each in results]
    assert ids == [id_of_text("", text) for text in TEXTS] * 2


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("key", ["title", "review"])
def test_other_fields_travel_with_a_dictionary(key: str) -> None:
    post = {
        key: TEXTS[0],
        "subreddit": "praise",
        "score": "many",
        "created_utc": float("nan"),
        "author": "x",
    }
    api.submit([post], LABELS, run=f"fields {key}", title=key).wait(120)
    (result,) = api.results(run=f"fields {key}", follow=False)
    with pytest.raises(api.UserError, match="no run 'feilds.*Recent runs: .*fields"):
        next(api.results(run=f"feilds {key}", follow=False))
    assert isinstance(result, api.Result)
    assert (result.post.subreddit, result.post.score, result.post.created_utc) == (
        "praise",
        None,
        None,
    )


def test_purged_posts_are_not_sent(worker: RedisServer) -> None:
    for post_id in ("gone", "0", "1"):
        worker.client.set(TOMBSTONE + post_id, "1")
    assert (
        labels(api.submit(TEXTS, LABELS).results(60)) == EXPECTED
    )  # a position is not an id
    sent = api.submit(
        [{"id": "gone", "title": TEXTS[0]}, {"id": "here", "title": TEXTS[1]}], LABELS
    )
    with pytest.warns(UserWarning, match="item 0: purged"):
        assert labels(sent.results(60)) == [None, "complaint"]


def test_expired_results_are_requested_again(
    worker: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "EXPIRED_AFTER_S", 0)
    sent = api.submit(TEXTS, LABELS)
    (task_id,) = sent._pending
    wait_until(
        lambda: worker.client.delete(f"celery-task-meta-{task_id}"),
        "the result is there",
    )
    before = worker.client.hget("feedmill:counters", "stored")
    assert labels(sent.results(60)) == EXPECTED
    assert worker.client.hget("feedmill:counters", "stored") == before


# Without a worker on the queue.


def submit_unserved(items: Any = TEXTS, **options: Any) -> api.SubmittedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEEDMILL_QUEUE", "unserved")
        with pytest.warns(
            UserWarning, match=naming("No worker serves", "unserved", "feedmill worker")
        ):
            return api.submit(items, LABELS, **options)


def test_wait_ends_at_its_timeout(redis_server: RedisServer) -> None:
    sent = submit_unserved(run="late")
    assert sent.progress() == (2, 0, 0)
    with pytest.raises(
        TimeoutError,
        match=naming("0 of 2", "'late'", "queue unserved", "feedmill status"),
    ):
        sent.wait(timeout=0)
    with pytest.raises(TimeoutError):
        sent.to_frame(timeout=0)
    assert redis_server.client.llen("unserved") == 1
    assert redis_server.client.pubsub_channels() == []


@pytest.mark.parametrize(
    ("flag", "finishes"), [("--run", False), ("--run", True), ("--queue", False)]
)
def test_wait_ends_if_the_messages_are_purged(
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flag: str,
    finishes: bool,
) -> None:
    """finishes: a worker stores a result of the run after the purge."""
    monkeypatch.setattr(submission, "EXPIRED_AFTER_S", 0)
    name = f"{flag} {finishes}"
    targets = {"--run": name, "--queue": "unserved"}
    sent = submit_unserved(run=name)
    assert sent.progress() == (2, 0, 0)
    purged = feedmill(
        "purge",
        flag,
        targets[flag],
        "--yes",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis_server.url,
        FEEDMILL_QUEUE="unserved",
    )
    assert purged.returncode == 0, purged.stderr
    if finishes:
        post = Post(id="late", title="x", run=name)
        result = Result(post, make_classification("late"))
        store = ResultsStore(redis_server.client, Settings())
        store.write([result], [])
    sent.wait(60)
    assert sent.progress() == (2, 2, 2)
    with pytest.warns(UserWarning, match="left the queue without a result"):
        assert labels(sent.results(0)) == [None, None]
    assert redis_server.client.llen("unserved") == 0


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # by Celery
def test_refused_options_are_explained(redis_server: RedisServer) -> None:
    settings = Settings.model_validate({"redis_url": redis_server.url})
    sent = submit_unserved()
    (task_id,) = sent._pending
    make_app(settings, current=False).backend.store_result(
        task_id, RequestRefused("labels: the model has its own"), "FAILURE"
    )
    for _ in range(2):
        with pytest.raises(
            UserError, match=naming("refuses", "labels: the model has its own")
        ):
            sent.wait(timeout=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"run": "x" * 101}, ["name of a run", "100"]),
        ({"run": ""}, ["name of a run"]),
        ({"run": 5}, ["name of a run", "not 5"]),
        ({"labels": "a, b"}, ["labels must be a list"]),
        ({"queue": "no queue"}, ["queue:", "'no queue'"]),
        ({"queue": "nosuch"}, ["'nosuch'", "FEEDMILL_QUEUE"]),
        ({"redis_url": "localhost"}, ["redis_url:"]),
        (
            {"redis_url": f"redis://:{PASSWORD}@127.0.0.1:1/0"},
            ["127.0.0.1:1", "unreachable"],
        ),
        (
            {"items": pandas.DataFrame({"text": ["x"], "label": ["y"]})},
            ["label", "prefix="],
        ),
    ],
)
def test_invalid_arguments_are_explained(
    redis_server: RedisServer, arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError, match=naming(*words)) as raised:
        api.submit(**{"items": TEXTS, **arguments})
    assert PASSWORD not in str(raised.value)
    assert redis_server.client.llen("nosuch") == 0


TASK = """
import feedmill
posts = [{"id": "1", "title": "I love it"}]
sent = feedmill.classify_task.delay(posts=posts, labels=["praise", "complaint"])
print(sent.get(timeout=120)[0]["label"])
"""


def test_task_needs_no_application(worker: RedisServer, tmp_path: Path) -> None:
    """The package's task finds its Redis as `feedmill.results` does.

    In a process that never had an application.
    """
    said = run(
        [sys.executable, "-P", "-c", TASK],
        tmp_path,
        os.environ | {"FEEDMILL_REDIS_URL": worker.url},
    )
    assert (said.stdout, said.stderr) == ("praise\n", "")
