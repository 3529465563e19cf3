"""Messages of other Celery clients, in both protocols and with or without headers: purged,
classified and shown.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from feedmill.shared.broker import connect
from feedmill.shared.keys import DEAD_LETTERS
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.fakes.clients import CLIENTS, UNREADABLE, message_of, unreadable
from tests.support import (
    RedisServer,
    application,
    dead_letters,
    feedmill,
    has_results,
    long_cases,
    shapes,
    standing_in,
    wait_for_replies,
    wait_until,
    wait_until_empty,
)

WORDS, LATER = "Rhubarb and custard", "Gooseberries next week"


@pytest.fixture
def waiting(redis: RedisServer) -> RedisServer:
    """A Redis in which a message of each client waits, with a post to purge and one to
    classify.
    """
    for number, client in enumerate(CLIENTS):
        posts = [
            {"id": f"gone-{number}", "title": WORDS},
            {"id": f"kept-{number}", "title": "Rain on the coast"},
        ]
        redis.client.lpush("feedmill", message_of(client, {"posts": posts}))
    return redis


def purge(redis: RedisServer, folder: Path, *arguments: str) -> Any:
    done = feedmill(
        "purge", *arguments, "--json", cwd=folder, FEEDMILL_REDIS_URL=redis.url
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def elements(redis: RedisServer) -> Any:
    return redis.client.lrange("feedmill", 0, -1)


def test_an_unrelated_purge_changes_no_message(
    waiting: RedisServer, tmp_path: Path
) -> None:
    before = elements(waiting)
    assert purge(waiting, tmp_path, "some-other-post")["messages"] == 0
    assert elements(waiting) == before


def test_the_other_posts_of_purged_messages_are_classified(
    waiting: RedisServer, tmp_path: Path
) -> None:
    ids = [f"gone-{number}" for number in range(len(CLIENTS))]
    found = purge(waiting, tmp_path, *ids)
    assert (found["messages"], found["unmatched"]) == (len(CLIENTS), 0)
    for element in elements(waiting):
        assert not any(shape in element.encode() for shape in shapes(WORDS))
    # An envelope without properties has nowhere to go; it becomes a dead letter.
    served = [
        number for number, client in enumerate(CLIENTS) if "no properties" not in client
    ]
    with standing_in(waiting, tmp_path) as worker:
        wait_until(
            lambda: (
                worker.lives()
                and all(
                    has_results(waiting.client, f"kept-{number}") for number in served
                )
            ),
            "the other posts are classified",
        )
        wait_until_empty(waiting.client)
    assert not any(has_results(waiting.client, post_id) for post_id in ids)
    letters: Any = waiting.client.xrange(DEAD_LETTERS)
    assert not any(shape in str(letters).encode() for shape in shapes(WORDS))


def test_a_run_and_a_queue_of_other_clients_are_purged(
    redis: RedisServer, tmp_path: Path
) -> None:
    for number, client in enumerate(CLIENTS):
        for run in ("monday", "tuesday"):
            posts = [{"id": f"{run}-{number}", "title": WORDS, "run": run}]
            redis.client.lpush("feedmill", message_of(client, {"posts": posts}))
    found = purge(redis, tmp_path, "--run", "monday", "--yes")
    assert (found["messages"], found["waiting"]) == (len(CLIENTS), len(CLIENTS))
    assert redis.client.llen("feedmill") == len(CLIENTS)
    found = purge(redis, tmp_path, "--queue", "feedmill", "--yes")
    assert (found["messages"], found["posts"]) == (len(CLIENTS), len(CLIENTS))


@pytest.mark.parametrize("kind", [*UNREADABLE[:3], *long_cases(*UNREADABLE[3:])])
def test_dead_letters_of_unreadable_messages_lose_purged_posts(
    redis: RedisServer, tmp_path: Path, kind: str
) -> None:
    """The post is purged while the message waits, or afterwards."""
    posts = [{"id": "gone", "title": WORDS}, {"id": "late", "title": LATER}]
    message = unreadable(kind, posts)
    redis.client.lpush("feedmill", message)
    found = purge(redis, tmp_path, "gone")
    assert (found["messages"], found["unreadable"]) == (0, 1)
    assert redis.client.lrange("feedmill", 0, -1) == [message.decode()]
    with standing_in(redis, tmp_path) as worker:
        wait_until(
            lambda: worker.lives() and redis.client.xlen(DEAD_LETTERS),
            "the message is a dead letter",
        )
        wait_until_empty(redis.client)
        assert letters_with(redis, tmp_path, WORDS) == []
        feedmill("purge", "--lift", "gone", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        feedmill(
            "dead", "drop", "--all", "--yes", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        redis.client.lpush("feedmill", message)
        wait_until(
            lambda: worker.lives() and redis.client.xlen(DEAD_LETTERS),
            "the message is a dead letter again",
        )
        wait_until_empty(redis.client)
    purge(redis, tmp_path, "late")
    assert letters_with(redis, tmp_path, LATER) == []


def letters_with(redis: RedisServer, folder: Path, words: str) -> list[str]:
    """Return the dead letters that contain the words, in any form that can be read."""
    shown = feedmill("dead", "list", "--json", cwd=folder, FEEDMILL_REDIS_URL=redis.url)
    return [
        line
        for line in shown.stdout.splitlines()
        if any(shape in line.encode() for shape in shapes(words))
    ]


@pytest.mark.parametrize(
    "client", [client for client in CLIENTS if "no properties" not in client]
)
def test_senders_are_told_under_the_id_that_they_sent(
    redis: RedisServer, settings: Settings, tmp_path: Path, client: str
) -> None:
    """The message is refused before its task runs, or classified.

    Without properties, there is no sender.
    """
    posts = [{"id": "one", "title": WORDS}]
    redis.client.lpush(
        "feedmill", message_of(client, {"posts": posts}, "refused", "no.such")
    )
    redis.client.lpush("feedmill", message_of(client, {"posts": posts}, "done"))
    keys = ["celery-task-meta-done", "celery-task-meta-refused"]
    with standing_in(redis, tmp_path) as worker:
        wait_until(
            lambda: (
                worker.lives() and len(redis.client.keys("celery-task-meta-*")) == 2
            ),
            "both results are stored",
        )
        wait_until_empty(redis.client)
    assert sorted(redis.client.keys("celery-task-meta-*")) == keys
    done, refused = [json.loads(str(redis.client.get(key))) for key in keys]
    assert done["status"] == "SUCCESS"
    assert (refused["status"], refused["result"]["exc_type"]) == (
        "FAILURE",
        "NotRegistered",
    )
    (letter,) = dead_letters(ResultsStore(connect(settings), settings), 10)
    assert letter.message == "refused"


@pytest.mark.parametrize("client", ["celery", "celery, protocol 1", "gocelery"])
def test_delayed_messages_are_listed_by_the_id_and_the_task_that_were_sent(
    redis: RedisServer, tmp_path: Path, client: str
) -> None:
    app = application(redis)
    message = message_of(client, {"posts": [{"id": "one", "title": WORDS}]}, "later")
    redis.client.hset("feedmill:delayed", "tag feedmill", message.decode())
    redis.client.zadd("feedmill:delayed_index", {"tag feedmill": time.time() + 3600})
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        wait_for_replies(app)
        answers: Any = app.control.inspect(timeout=60, limit=1).scheduled()
    (entries,) = answers.values()
    (entry,) = entries
    assert (entry["request"]["id"], entry["request"]["name"]) == (
        "later",
        "feedmill.classify",
    )
