"""`feedmill.dead_letters`: list, retry and drop from Python, on a real Redis."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

import feedmill
from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.producers.push import Pusher
from feedmill.report import gather
from feedmill.shared.broker import make_app, queue_depth
from feedmill.shared.messages import ClassifyOptions, DeadLetter
from feedmill.shared.purge import purge_posts
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, body_of, free_port, make_posts


def letter(post_id: str, **fields: Any) -> DeadLetter:
    values: dict[str, Any] = {
        "post": json.dumps({"id": post_id, "title": "A title"}),
        "options": '{"top_k": 2}',
        "reason": "no",
        "message": "m",
        "worker": "w",
        "failed_at": 0.0,
    }
    return DeadLetter(id=post_id, **values | fields)


def names(letters: feedmill.DeadLetters) -> list[str | None]:
    return [entry.post_id for entry in letters]


@pytest.fixture
def letters(redis: RedisServer) -> Iterator[feedmill.DeadLetters]:
    """Three dead letters: of posts a and b, and of c, which a run sent."""
    store = ResultsStore(redis.client, Settings())
    store.write([], [letter("a"), letter("b"), letter("c", run="monday")])
    with feedmill.dead_letters(redis.url) as opened:
        yield opened


def test_lists_the_newest_oldest_first(letters: feedmill.DeadLetters) -> None:
    assert len(letters) == 3
    assert names(letters) == ["a", "b", "c"]
    assert [entry.post_id for entry in letters.list(count=2)] == ["b", "c"]
    assert [entry.post_id for entry in letters.list("b", "a")] == ["b", "a"]
    (entry,) = letters.list(letters.list("a")[0].name)
    assert (entry.letter.id, entry.letter.reason) == ("a", "no")


def test_lists_the_dead_letters_of_a_run(
    redis: RedisServer, letters: feedmill.DeadLetters
) -> None:
    settings = Settings(redis_url=redis.url)
    app = make_app(settings, current=False)
    Pusher(app, redis.client, settings, ClassifyOptions(), run="monday").push(
        make_posts(1)
    )
    assert [entry.post_id for entry in letters.list(run="monday")] == ["c"]
    with pytest.raises(feedmill.UserError, match="tuesday"):
        letters.list(run="tuesday")


def test_retries_posts_and_says_why_others_stay(
    redis: RedisServer, letters: feedmill.DeadLetters
) -> None:
    purge_posts(redis.client, Settings(), ["gone"])
    redis.client.xadd("feedmill:dead", {"letter": letter("gone").model_dump_json()})
    ResultsStore(redis.client, Settings()).write([], [letter("long", post=None)])
    refused = {entry.post_id: entry.name for entry in letters.list("gone", "long")}
    retries = letters.retry(every=True)
    assert retries.sent == 3
    assert retries.refused.keys() == set(refused.values())
    assert "purged" in retries.refused[str(refused["gone"])]
    assert "does not contain the post" in retries.refused[str(refused["long"])]
    assert sorted(map(str, names(letters))) == ["gone", "long"]
    assert queue_depth(redis.client, "feedmill").waiting == 3


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"other": True}, {}),
        ({"labels": ["x", "y"]}, {"labels": {"x": ["x"], "y": ["y"]}}),
        ({"multi_label": True, "none": 0.5}, {"multi_label": True, "none": 0.5}),
    ],
)
def test_retries_with_other_options(
    redis: RedisServer,
    letters: feedmill.DeadLetters,
    given: dict[str, Any],
    options: dict[str, Any],
) -> None:
    assert letters.retry("a", **given).sent == 1
    message: Any = redis.client.lindex("feedmill", 0)
    sent = body_of(message)[1]
    assert {
        key: sent[key] for key in sent if key not in {"posts", "version"}
    } == options


def test_wrong_options_change_nothing(letters: feedmill.DeadLetters) -> None:
    before = names(letters)
    with pytest.raises(feedmill.UserError, match="template"):
        letters.retry(every=True, template="no place")
    assert names(letters) == before


def test_drops_only_the_selected(letters: feedmill.DeadLetters) -> None:
    assert letters.drop("b") == 1
    assert names(letters) == ["a", "c"]
    assert letters.drop(every=True) == 2
    assert names(letters) == []


@pytest.mark.parametrize("method", ["retry", "drop"])
def test_an_unclear_selection_changes_nothing(
    redis: RedisServer, letters: feedmill.DeadLetters, method: str
) -> None:
    ResultsStore(redis.client, Settings()).write([], [letter("a", queue="other")])
    before = [entry.name for entry in letters]
    act = getattr(letters, method)
    for ids, every in [
        ((), False),
        (("a",), True),
        (("a",), False),
        (("b", "x"), False),
    ]:
        with pytest.raises(feedmill.UserError):
            act(*ids, every=every)
    with pytest.raises(feedmill.UserError, match=r"must be text, not \['b'\]"):
        act(["b"])
    assert [entry.name for entry in DeadLetterStream(redis.client).all()] == before
    assert queue_depth(redis.client, "feedmill").waiting == 0


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "3"])
def test_refuses_a_count_that_is_none(
    letters: feedmill.DeadLetters, count: Any
) -> None:
    with pytest.raises(
        feedmill.UserError, match="count must be a whole number above 0"
    ):
        letters.list(count=count)


def test_an_unreachable_redis_is_a_user_error() -> None:
    with feedmill.dead_letters(f"redis://127.0.0.1:{free_port()}") as letters:
        for act in (
            letters.list,
            lambda: letters.retry("a"),
            lambda: letters.drop("a"),
        ):
            with pytest.raises(feedmill.UserError):
                act()
        with pytest.raises(feedmill.UserError):
            len(letters)


@pytest.mark.parametrize(
    "fields",
    [
        {"letter": "not JSON"},
        {"letter": "[1]"},
        {"letter": '{"id": 1}'},
        {"letter": '{"id": "a", "reason": "of a later version"}'},
        {"other": "field"},
    ],
)
def test_a_damaged_dead_letter_hides_no_other(
    redis: RedisServer, letters: feedmill.DeadLetters, fields: dict[str, str]
) -> None:
    """It is listed with its text, counted, and dropped, but not retried."""
    client: Any = redis.client
    damaged = client.xadd("feedmill:dead", fields)
    assert names(letters) == ["a", "b", "c", None]
    (entry,) = letters.list(damaged)
    assert "cannot be read" in entry.letter.reason
    assert entry.letter.payload == fields.get("letter", "")
    report = gather(redis.client, Settings(), hours=2)
    assert report.reasons == {entry.letter.reason: 1}
    retries = letters.retry(every=True)
    assert retries.sent == 3
    assert [*retries.refused] == [damaged]
    assert letters.drop(damaged) == 1
    assert len(letters) == 0
