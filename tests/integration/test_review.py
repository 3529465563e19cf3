"""Review: which posts are asked about, and answers of several people, on a real Redis."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from feedmill.shared import runs
from feedmill.shared.messages import Classification, Post
from feedmill.shared.purge import purge_posts
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.teaching.answer_file import AnswerFile
from feedmill.teaching.candidates import DISAGREEMENT, UNLABELLED
from feedmill.teaching.review import FIRST_PICKS, NotShown, ReviewQueue
from feedmill.training.picked import FIRST, RANDOM, UNCERTAIN
from feedmill.web.server import make_server
from tests.support import RedisServer

TOKENS = (
    "ana:teach:0123456789abcdef,ben:teach:fedcba9876543210,eve:read:00000000aaaaaaaa"
)


def result(number: int, food: float, none: bool = False, **more: Any) -> Result:
    """Return a result of the labels food and sports. number: also of the post."""
    post = Post(id=f"p{number}", title=f"post {number}", url="javascript:alert(1)")
    scores = {"food": food, "sports": 1 - food}
    if food < 0.5:
        scores = {"sports": 1 - food, "food": food}
    label = None if none else next(iter(scores))
    fields = {
        "id": post.id,
        "label": label,
        "scores": scores,
        "model": "one",
        "revision": None,
        "weights": "1" * 64,
        "fingerprint": f"a{number:031x}",
        "classified_at": 1.0 + number,
        "worker": "w",
        "device": "cpu",
        "queued_seconds": None,
    }
    return Result(post, Classification.model_validate(fields | more))


def store(settings: Settings, redis: RedisServer, results: list[Result]) -> None:
    ResultsStore(redis.client, settings).write(results)


@pytest.fixture
def queue(redis: RedisServer, settings: Settings, tmp_path: Path) -> ReviewQueue:
    """A queue over 200 posts, of which every tenth is uncertain, has no label, or two."""
    results: list[Result] = []
    for number in range(200):
        food = 0.9
        none = False
        if number % 10 == 1:
            food = 0.51
        if number % 10 == 2:
            none = True
        if number % 10 == 3:
            other: dict[str, Any] = {
                "model": "two",
                "weights": "2" * 64,
                "fingerprint": f"f{number:031x}",
            }
            results.append(result(number, 0.1, **other))
        results.append(result(number, food, none))
    store(settings, redis, results)
    return ReviewQueue(redis.client, settings, AnswerFile(tmp_path / "answers"))


def answer_all(queue: ReviewQueue, reviewer: str, count: int) -> list[tuple[str, str]]:
    """Answer posts with food. Return their ids, each with why it was picked."""
    picks: list[tuple[str, str]] = []
    for _ in range(count):
        pick = queue.next(reviewer)
        if pick is None:
            break
        picks.append((pick.candidate.post.id, pick.why))
        queue.answer(reviewer, reviewer, pick.candidate.token, "food", skips=False)
    return picks


def test_asks_about_random_uncertain_disputed_and_unlabelled_posts(
    queue: ReviewQueue,
) -> None:
    picks = answer_all(queue, "ana", FIRST_PICKS + 20)
    assert queue.names == ("food", "sports")
    assert {why for _, why in picks[:FIRST_PICKS]} == {FIRST}
    later = picks[FIRST_PICKS:]
    counts = [why for _, why in later]
    assert counts.count(RANDOM) == 4
    last_digits = {
        why: {post_id[-1] for post_id, w in later if w == why} for why in counts
    }
    assert last_digits[UNCERTAIN] == {"1"}
    assert last_digits[DISAGREEMENT] == {"3"}
    assert last_digits[UNLABELLED] == {"2"}
    assert len({post_id for post_id, _ in picks}) == len(picks)


def test_random_picks_are_no_uncertain_ones(queue: ReviewQueue) -> None:
    """Posts are reserved for random picks by their text alone: else these were no sample."""
    picks = answer_all(queue, "ana", 1000)
    assert len(picks) == 200
    reserved = {
        candidate.post.id for candidate in queue.candidates if candidate.is_reserved
    }
    measuring = {post_id for post_id, why in picks if why in (FIRST, RANDOM)}
    assert measuring == reserved
    assert queue.next("ana") is None


def test_descriptions_of_labels_come_from_the_newest_run_with_them(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    results: list[Result] = []
    for number, run in enumerate(("old", "new", "other", "unknown")):
        made = result(number, 0.9)
        post = made.post.model_copy(update={"run": run})
        results.append(Result(post, made.classification))
    store(settings, redis, results)
    described = {"food": ("meals",), "sports": ("teams", "matches")}
    runs.keep_labels(redis.client, "old", {"food": ("food",), "sports": ("s",)}, 60)
    runs.keep_labels(redis.client, "new", described, 60)
    runs.keep_labels(redis.client, "other", {"food": ("food",), "art": ("art",)}, 60)
    queue = ReviewQueue(redis.client, settings, AnswerFile(tmp_path / "answers"))
    assert queue.labels == described
    assert queue.undescribed == []
    own = {"food": ("dishes",), "sports": ("sports",)}
    of_settings = settings.model_copy(update={"labels": own})
    queue = ReviewQueue(redis.client, of_settings, AnswerFile(tmp_path / "answers"))
    assert queue.labels == own
    assert queue.undescribed == ["sports"]


def test_two_reviewers_never_see_the_same_post(queue: ReviewQueue) -> None:
    seen: list[str] = []
    for _ in range(20):
        for reviewer in ("ana", "ben"):
            pick = queue.next(reviewer)
            assert pick is not None
            again = queue.next(reviewer)
            assert again == pick
        for reviewer in ("ana", "ben"):
            pick = queue.next(reviewer)
            assert pick is not None
            seen.append(pick.candidate.post.id)
            queue.answer(reviewer, reviewer, pick.candidate.token, None, skips=False)
    assert len(set(seen)) == len(seen) == 40
    answers = queue.file.read()
    assert [answer.by for answer in answers].count("ana") == 20
    assert all(answer.fits_none for answer in answers)


def test_a_post_that_nobody_answers_is_free_again(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    now = [0.0]
    store(settings, redis, [result(1, 0.9), result(1, 0.9)])
    file = AnswerFile(tmp_path)
    queue = ReviewQueue(redis.client, settings, file, lambda: now[0])
    first = queue.next("ana")
    assert first is not None
    assert queue.next("ben") is None
    now[0] += 601
    assert queue.next("ben") == first
    with pytest.raises(NotShown):
        queue.answer("ana", "ana", first.candidate.token, "food", skips=False)
    queue.answer("ben", "ben", first.candidate.token, "food", skips=False)
    assert [answer.by for answer in file.read()] == ["ben"]


def test_undo_shows_the_post_again_and_leaves_answers_of_others(
    queue: ReviewQueue,
) -> None:
    answer_all(queue, "ben", 1)
    picks = answer_all(queue, "ana", 2)
    assert queue.undo("ana")
    pick = queue.next("ana")
    assert pick is not None
    assert pick.candidate.post.id == picks[1][0]
    assert queue.undo("ana")
    assert not queue.undo("ana")
    assert [answer.by for answer in queue.file.read()] == ["ben"]


def test_answers_to_purged_posts_are_removed(
    queue: ReviewQueue, redis: RedisServer, settings: Settings
) -> None:
    picks = answer_all(queue, "ana", 2)
    purge_posts(redis.client, settings, [picks[0][0]])
    queue.forget_purged()
    assert [answer.post.id for answer in queue.file.read()] == [picks[1][0]]


def test_stores_who_when_and_what_the_label_was(queue: ReviewQueue) -> None:
    pick = queue.next("tab")
    assert pick is not None
    queue.answer("tab", "Ana", pick.candidate.token, "sports", skips=False)
    (answer,) = queue.file.read()
    assert (answer.by, answer.label, answer.why) == ("Ana", "sports", FIRST)
    assert (answer.was, answer.was_by) == (pick.candidate.label, "1" * 16)
    assert answer.at.startswith("20")


@pytest.fixture
def client(queue: ReviewQueue, redis: RedisServer) -> Any:
    """A server with tokens, over the posts and the answers of the queue."""
    fields = {
        "redis_url": redis.url,
        "web_tokens": TOKENS,
        "answers": queue.file.folder,
    }
    app = make_server(Settings.model_validate(fields))
    with TestClient(
        app, base_url="http://127.0.0.1", raise_server_exceptions=False
    ) as made:
        yield made


def headers(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


ANA = headers("0123456789abcdef")
BEN = headers("fedcba9876543210")
EVE = headers("00000000aaaaaaaa")


def test_page_shows_keys_and_takes_answers(
    client: TestClient, queue: ReviewQueue
) -> None:
    page = client.get("/review", headers=ANA)
    assert page.status_code == 200, page.text
    for words in (
        "<kbd>1</kbd> food",
        "<kbd>2</kbd> sports",
        "<kbd>0</kbd> none",
        "undo",
    ):
        assert words in page.text
    tabs = [({"reviewer": "tab-of-ana"}, ANA), ({"reviewer": "tab-of-ben"}, BEN)]
    tokens: list[str] = []
    for body, caller in tabs:
        state = client.post("/review/next", json=body, headers=caller).json()
        tokens.append(state["post"]["token"])
        assert state["post"]["link"] is None  # javascript:
    assert tokens[0] != tokens[1]
    for (body, caller), token in zip(tabs, tokens, strict=True):
        fields = body | {"token": token, "label": "food"}
        state = client.post("/review/answer", json=fields, headers=caller).json()
        assert state["post"]["token"] not in tokens
    assert state["progress"]["answers"] == 2
    fields = tabs[0][0] | {"token": tokens[0], "label": "food"}
    late = client.post("/review/answer", json=fields, headers=ANA)
    assert late.status_code == 409
    undone = client.post("/review/undo", json=tabs[0][0], headers=ANA).json()
    assert (undone["undone"], undone["post"]["token"]) == (True, tokens[0])
    assert [answer.by for answer in queue.file.read()] == ["ben"]


@pytest.mark.parametrize("words", ["food", "meals and recipes"])
def test_page_names_labels_without_a_description(
    settings: Settings, queue: ReviewQueue, words: str
) -> None:
    labels = {"food": (words,), "sports": ("teams and matches",)}
    fields: dict[str, Any] = {"answers": queue.file.folder, "labels": labels}
    app = make_server(settings.model_copy(update=fields))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        page = client.get("/teach")
    assert page.status_code == 200, page.text
    is_named = "No description is known of food:" in page.text
    assert is_named == (words == "food")


def test_answers_need_the_scope_and_the_site(
    client: TestClient, queue: ReviewQueue
) -> None:
    body = {"reviewer": "tab-of-eve"}
    foreign = ANA | {"origin": "https://evil.example"}
    for path in ("next", "answer", "undo", "progress"):
        assert client.post(f"/review/{path}", json=body).status_code == 401
        assert client.post(f"/review/{path}", json=body, headers=EVE).status_code == 403
        assert (
            client.post(f"/review/{path}", json=body, headers=foreign).status_code
            == 403
        )
    for path in ("start", "cancel", "deploy", "back"):
        assert client.post(f"/teach/{path}", headers=EVE).status_code == 403
    # Deploying needs more than teaching.
    form = {"model": "taught-2026-11-28-000000"}
    assert client.post("/teach/deploy", data=form, headers=ANA).status_code == 403
    assert client.post("/teach/back", headers=ANA).status_code == 403
    content = {"answers": [{"id": "p1", "label": "food"}]}
    assert client.post("/v1/answers", json=content, headers=EVE).status_code == 403
    assert queue.file.read() == []


def test_endpoint_stores_answers_in_the_same_file(
    client: TestClient, queue: ReviewQueue, redis: RedisServer, settings: Settings
) -> None:
    purge_posts(redis.client, settings, ["p9"])
    content = {
        "answers": [
            {"id": "p1", "label": "sports"},
            {"id": "p2", "label": None},
            {"id": "p3", "label": "music"},
            {"id": "unknown", "label": "food"},
            {"id": "own", "label": "food", "text": "fresh bread"},
            {"id": 7, "label": "food", "text": " "},
            {"id": "p9", "label": "food", "text": "gone"},
        ]
    }
    answer = client.post("/v1/answers", json=content, headers=ANA)
    assert answer.status_code == 200, answer.text
    assert answer.json()["stored"] == 3
    refused = {row["id"]: row["error"] for row in answer.json()["refused"]}
    assert set(refused) == {"p3", "unknown", "7", "p9"}
    assert "music" in refused["p3"]
    stored = queue.file.read()
    assert [(row.post.id, row.label, row.fits_none) for row in stored] == [
        ("p1", "sports", False),
        ("p2", "", True),
        ("own", "food", False),
    ]
    assert stored[0].was == "food"
    assert {row.by for row in stored} == {"ana"}
    again = {"answers": [{"id": "p1", "label": "food"}]}
    assert client.post("/v1/answers", json=again, headers=BEN).json()["stored"] == 1
    replaced = queue.file.read()[-1]
    assert (replaced.label, replaced.by, replaced.was) == ("food", "ben", "food")
    assert len(queue.file.read()) == 3


def test_purging_a_post_removes_its_answer(
    redis: RedisServer, queue: ReviewQueue
) -> None:
    fields = {"redis_url": redis.url, "answers": queue.file.folder}
    app = make_server(Settings.model_validate(fields))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answers = [{"id": "p1", "label": "food"}, {"id": "p2", "label": "food"}]
        client.post("/v1/answers", json={"answers": answers})
        purged = client.delete("/v1/posts/p1").json()
        assert purged["counts"]["answers"] == 1
        assert "answers" not in client.delete("/v1/posts/p3").json()["counts"]
    assert [answer.post.id for answer in queue.file.read()] == ["p2"]


@pytest.mark.parametrize(
    "content",
    [{}, {"answers": []}, {"answers": [{"id": "p1"}]}, {"answers": [{"id": "", "label": "x"}]},
     {"answers": [{"id": "p1", "label": "food", "by": "x"}]}],
)  # fmt: skip
def test_endpoint_refuses_what_is_no_answer(client: TestClient, content: Any) -> None:
    answer = client.post("/v1/answers", json=content, headers=ANA)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]


def test_pages_without_results_say_so(settings: Settings, tmp_path: Path) -> None:
    app = make_server(settings.model_copy(update={"answers": tmp_path / "new"}))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert "no results yet" in client.get("/review").text
        assert client.get("/teach").status_code == 200
        failed = client.post("/teach/start")
        assert failed.status_code == 422
        assert "answers" in failed.text
    assert not (tmp_path / "new").exists()
