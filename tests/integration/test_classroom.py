"""Lessons: what ends them, what they leave, and taking deployments back, on a real Redis."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from feedmill.shared.broker import make_app
from feedmill.shared.errors import UserError
from feedmill.shared.model_routing import RequestedModel, request_model, requested_model
from feedmill.shared.settings import Settings
from feedmill.teaching import classroom as module
from feedmill.teaching.answer_file import AnswerFile
from feedmill.teaching.classroom import Classroom
from feedmill.teaching.models import RECORD_FILE, Replaced
from feedmill.teaching.review import ReviewQueue
from feedmill.web.server import make_server
from tests.fakes.models import make_model
from tests.integration.test_review import answer_all, result, store
from tests.support import RedisServer, naming, wait_until


@pytest.fixture
def queue(redis: RedisServer, settings: Settings, tmp_path: Path) -> ReviewQueue:
    store(settings, redis, [result(number, 0.7) for number in range(60)])
    return ReviewQueue(redis.client, settings, AnswerFile(tmp_path / "answers"))


@pytest.fixture
def classroom(
    redis: RedisServer, settings: Settings, queue: ReviewQueue
) -> Iterator[Classroom]:
    made = Classroom(redis.client, make_app(settings, current=False), settings, queue)
    yield made
    made.stop()


def ended(classroom: Classroom) -> bool:
    return classroom.lesson.state not in ("idle", "running")


def test_a_lesson_needs_answers(classroom: Classroom, queue: ReviewQueue) -> None:
    answer_all(queue, "ana", module.MIN_ANSWERS - 1)
    with pytest.raises(UserError, match=naming(module.MIN_ANSWERS - 1)):
        classroom.teach()
    assert classroom.lesson.state == "idle"
    assert not classroom.models.folder.exists()


def test_a_lesson_that_takes_too_long_is_ended(
    classroom: Classroom, queue: ReviewQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LESSON_TIMEOUT_S", 0.01)
    answer_all(queue, "ana", 12)
    classroom.teach()
    wait_until(lambda: ended(classroom), "the lesson has ended")
    assert classroom.lesson.state == "failed"
    assert "0 s" in classroom.lesson.message
    assert classroom.models.all() == []


def test_a_base_that_does_not_embed_is_named(
    redis: RedisServer, settings: Settings, queue: ReviewQueue, tmp_path: Path
) -> None:
    base = make_model("bert", tmp_path / "nli", {0: "NEGATIVE", 1: "POSITIVE"})
    other = settings.model_copy(update={"model": str(base)})
    classroom = Classroom(redis.client, make_app(other, current=False), other, queue)
    answer_all(queue, "ana", 12)
    classroom.teach()
    wait_until(lambda: ended(classroom), "the lesson has ended")
    assert classroom.lesson.state == "failed"
    assert "nli" in classroom.lesson.message
    assert classroom.models.all() == []
    classroom.stop()


def test_answers_are_taken_where_lessons_are_not_possible(
    settings: Settings, queue: ReviewQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without torch, the pages say so, and answers are stored."""
    monkeypatch.setattr(module, "PACKAGES", ("no_such_package",))
    app = make_server(settings.model_copy(update={"answers": queue.file.folder}))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for path in ("/review", "/teach"):
            assert "feedmill[worker]" in client.get(path).text
        body = {"reviewer": "a-tab-of-ana"}
        for _ in range(12):
            state = client.post("/review/next", json=body).json()
            fields = body | {"token": state["post"]["token"], "label": "food"}
            assert client.post("/review/answer", json=fields).status_code == 200
        assert client.post("/teach/start").status_code == 422
        assert client.get("/teach/state").json()["lesson"]["state"] == "idle"
    assert len(queue.file.read()) == 12


def test_a_damaged_file_of_answers_is_named_and_stays(
    settings: Settings, queue: ReviewQueue
) -> None:
    queue.file.folder.mkdir()
    queue.file.path.write_text("a,b\n1,2\n")
    app = make_server(settings.model_copy(update={"answers": queue.file.folder}))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for path in ("/review", "/teach"):
            page = client.get(path)
            assert page.status_code == 422
            assert "labels.csv" in page.text
        content = {"answers": [{"id": "p1", "label": "food"}]}
        assert client.post("/v1/answers", json=content).status_code == 422
    assert queue.file.path.read_text() == "a,b\n1,2\n"


def test_more_labels_than_keys_are_refused(
    settings: Settings, queue: ReviewQueue
) -> None:
    names = [f"label {number}" for number in range(60)]
    labels = {name: (name,) for name in names}
    fields: dict[str, Any] = {"answers": queue.file.folder, "labels": labels}
    app = make_server(settings.model_copy(update=fields))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        page = client.get("/review")
        assert page.status_code == 422
        assert "60 labels" in page.text


def test_labels_of_other_names_and_models_say_nothing_about_today(
    redis: RedisServer, settings: Settings, queue: ReviewQueue
) -> None:
    """Posts can be answered with labels that today's model does not have."""
    answer_all(queue, "ana", 10)
    own = settings.model_copy(update={"labels": {"food": ("food",), "art": ("art",)}})
    others = ReviewQueue(redis.client, own, queue.file)
    answer_all(others, "ben", 5)
    assert len(queue.file.read()) == 15
    classroom = Classroom(redis.client, make_app(own, current=False), own, others)
    plan = classroom._plan(module.LESSON_POOL)
    assert plan.names == ["food", "art"]
    assert {example.was for example in plan.examples} <= {"food", None}
    request = RequestedModel("/models/new", "f" * 64, 1.0)
    request_model(redis.client, settings.queue, request)
    plan = classroom._plan(module.LESSON_POOL)
    assert {example.was for example in plan.examples} == {None}
    assert {post.was for post in plan.pool} == {None}


def deployed(classroom: Classroom, model: str | None, at: float) -> Replaced:
    """Note a deployment from the page, as if it had ended."""
    request = RequestedModel(model, "00", at)
    history = classroom.models.history()
    before = history[-1].deployed if history else None
    replaced = Replaced(deployed=request, before=before)
    classroom.models._write_history([*history, replaced])
    return replaced


def test_goes_back_one_deployment_after_the_other(
    classroom: Classroom, redis: RedisServer, settings: Settings
) -> None:
    classroom.models.folder.mkdir(parents=True)
    first = deployed(classroom, "/models/one", 1.0)
    second = deployed(classroom, "/models/two", 2.0)
    request_model(redis.client, settings.queue, second.deployed)

    def go_back() -> None:
        classroom.models.back()
        wait_until(
            lambda: classroom.models.deployment.state != "running", "it has ended"
        )

    go_back()
    now = requested_model(redis.client, settings.queue)
    assert now is not None
    assert (now.model, now.weights) == ("/models/one", first.deployed.weights)
    go_back()
    now = requested_model(redis.client, settings.queue)
    assert now is not None
    assert now.model is None
    with pytest.raises(UserError):
        classroom.models.back()


def test_another_deployment_is_not_taken_back(
    classroom: Classroom, redis: RedisServer, settings: Settings
) -> None:
    classroom.models.folder.mkdir(parents=True)
    mine = deployed(classroom, "/models/one", 1.0)
    request_model(redis.client, settings.queue, mine.deployed)
    assert classroom.models.can_go_back() == mine
    theirs = RequestedModel("/models/theirs", "11", time.time())
    request_model(redis.client, settings.queue, theirs)
    assert classroom.models.can_go_back() is None
    with pytest.raises(UserError):
        classroom.models.back()
    assert requested_model(redis.client, settings.queue) == theirs


def test_old_models_are_deleted_except_those_that_may_be_deployed(
    classroom: Classroom, redis: RedisServer, settings: Settings
) -> None:
    for number in range(9):
        folder = classroom.models.folder / f"taught-2026-11-28-12000{number}"
        folder.mkdir(parents=True)
        (folder / RECORD_FILE).write_text("{}")
    other = classroom.models.folder / "of-somebody-else"
    other.mkdir()
    deployed(classroom, str(classroom.models.folder / "taught-2026-11-28-120000"), 1.0)
    request = RequestedModel(
        str(classroom.models.folder / "taught-2026-11-28-120001"), "00", 2.0
    )
    request_model(redis.client, "another-queue", request)
    classroom.models.prune()
    numbers = [path.name[-1] for path in classroom.models.all()]
    assert numbers == ["8", "7", "6", "5", "4", "1", "0"]
    assert other.exists()
    assert settings.queue != "another-queue"
