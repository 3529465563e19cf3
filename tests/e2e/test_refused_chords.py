"""A message that is refused before its task runs ends its chord, its chain and its errbacks, as a
failed task does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord
from celery.canvas import Signature
from celery.exceptions import ChordError

from feedmill.shared.broker import CLASSIFY_TASK, queue_depth
from tests.fakes.standin_worker import KILLS_EARLY
from tests.support import RedisServer, application, standing_in, wait_until

# Celery itself causes these warnings: about a default that may change, and about a Redis command.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:task_allow_error_cb_on_chord_header:PendingDeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]

GOOD = {"id": "good", "title": "The keeper saved two penalties"}


@pytest.fixture
def app(redis: RedisServer) -> Celery:
    return application(redis)


def classify(app: Celery, *posts: dict[str, str], **options: Any) -> Signature[Any]:
    return app.signature(CLASSIFY_TASK, kwargs={"posts": list(posts)}, **options)


def refused(app: Celery) -> dict[str, Signature[Any]]:
    """Return messages that no task processes, by the reason."""
    return {
        "unknown task": app.signature("no.such.task", args=[1]),
        "invalid field": classify(app, GOOD).set(headers={"timelimit": "soon"}),
        "unservable options": app.signature(
            CLASSIFY_TASK, kwargs={"posts": [GOOD], "labels": 7}
        ),
    }


@pytest.mark.parametrize(
    "reason", ["unknown task", "invalid field", "unservable options"]
)
def test_ends_a_chord(
    redis: RedisServer, app: Celery, tmp_path: Path, reason: str
) -> None:
    errback: Any = app.signature("errback.of.another.worker", queue="elsewhere")
    body = classify(app).on_error(errback)
    with standing_in(redis, tmp_path):
        result = chord([classify(app, GOOD), refused(app)[reason]], body).apply_async()
        wait_until(result.ready, "the chord's body ends")
        assert isinstance(result.result, ChordError)
        wait_until(
            lambda: redis.client.llen("elsewhere"), "the body's errback is called"
        )
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").held == 0, "nothing is held"
        )


def test_ends_a_chain_and_calls_errbacks(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    first = app.signature(
        "no.such.task", link_error=[app.signature("told", queue="elsewhere")]
    )
    with standing_in(redis, tmp_path):
        result = chain(first, classify(app), classify(app)).apply_async()
        wait_until(result.ready, "the end of the chain fails")
        assert result.state == "FAILURE"
        wait_until(lambda: redis.client.llen("elsewhere"), "the errback is called")


def test_links_to_own_keys_are_never_called(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    errback: Any = app.signature("told", queue="feedmill:results")
    with standing_in(redis, tmp_path):
        sent = app.send_task("no.such.task", link_error=errback)
        wait_until(sent.ready, "the sender has the failure")
    assert not redis.client.exists("feedmill:results")


def test_an_undecodable_member_fails_the_chord_of_others(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    result = chord(
        [classify(app, GOOD), classify(app, GOOD)], classify(app)
    ).apply_async()
    messages: Any = [redis.client.rpop("feedmill") for _ in range(2)]
    broken = json.loads(messages[0]) | {"body": "bm90IEpTT04="}
    with standing_in(redis, tmp_path):
        redis.client.lpush("feedmill", json.dumps(broken))
        wait_until(
            lambda: redis.client.exists("feedmill:dead"), "the message is a dead letter"
        )
        redis.client.lpush("feedmill", messages[1])
        wait_until(result.ready, "the chord's body ends")
        assert isinstance(result.result, ChordError)


def test_a_message_that_kills_workers_ends_its_chord(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    fatal = {"id": "fatal", "title": KILLS_EARLY}
    result = chord(
        [classify(app, GOOD), classify(app, fatal)], classify(app)
    ).apply_async()
    deaths = 0
    while not result.ready():
        with standing_in(redis, tmp_path, STANDIN_LEASE_S="2") as worker:
            wait_until(
                lambda: worker.process.poll() is not None or result.ready(),
                "one of both ends",
            )
            deaths += worker.process.poll() is not None
            assert deaths <= 5, worker.text()
    assert isinstance(result.result, ChordError)
