"""Messages with an ETA or a countdown on a real worker: they wait in Redis, and end as in
Celery.
"""

import json
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from feedmill.shared.broker import CLASSIFY_TASK, connect, queue_depth
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    application,
    feedmill,
    last_json,
    standing_in,
    wait_for_replies,
    wait_until,
)

LATER = 3600
RUN = "2026-11-28-posts"


@pytest.fixture
def app(redis: RedisServer) -> Celery:
    return application(redis)


def send(app: Celery, *ids: str, **options: Any) -> Any:
    posts = [{"id": name, "title": f"Post {name}", "run": RUN} for name in ids]
    return app.send_task(CLASSIFY_TASK, kwargs={"posts": posts}, **options)


def as_protocol_1(redis: RedisServer, eta: datetime) -> None:
    """Queue a message in the form of clients that write protocol 1, such as gocelery."""
    body = {
        "id": "one",
        "task": CLASSIFY_TASK,
        "args": [],
        "kwargs": {"posts": [{"id": "one", "title": "Post one"}]},
        "retries": 0,
        "eta": eta.isoformat(),
    }
    message = {
        "body": json.dumps(body),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {},
        "properties": {
            "body_encoding": "utf-8",
            "correlation_id": "one",
            "delivery_info": {"exchange": "", "routing_key": "feedmill"},
            "delivery_mode": 2,
            "delivery_tag": "one",
        },
    }
    redis.client.lpush("feedmill", json.dumps(message))


def make_due(redis: RedisServer) -> None:
    """Make all delayed messages due now, by Redis' clock."""
    tags: Any = redis.client.hkeys("feedmill:delayed")
    for tag in tags:
        redis.client.zadd("feedmill:delayed_index", {tag: 0})


def test_hundreds_of_messages_start_when_they_are_due(
    redis: RedisServer, app: Celery, settings: Settings, tmp_path: Path
) -> None:
    store = ResultsStore(connect(settings), settings)
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        due_at = datetime.now(UTC) + timedelta(seconds=15)
        sent = [send(app, "p0", eta=due_at)]
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed,
            ("the first message waits in Redis"),
        )
        sent += [send(app, f"p{number}", eta=due_at) for number in range(1, 400)]
        results = [result.get(timeout=120) for result in sent]
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, 0),
            "all messages are acknowledged",
        )
    assert store.counters().stored == 400
    began = [
        datetime.fromtimestamp(outcome["classified_at"], UTC) for (outcome,) in results
    ]
    assert min(began) >= due_at


def test_another_worker_takes_over_delayed_messages(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    sent = send(app, "p", countdown=LATER)
    with standing_in(redis, tmp_path, "first") as worker:
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed == 1,
            "the message waits in Redis",
        )
        worker.process.send_signal(signal.SIGKILL)
        wait_until(lambda: worker.process.poll() is not None, "the worker is dead")
    make_due(redis)
    with standing_in(redis, tmp_path, "second"):
        make_due(redis)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed == 1,
            "the message is not due by its ETA",
        )
        assert not sent.ready(), "Redis' time alone does not start a message early"


def test_revoked_and_expired_messages_end_when_they_are_due(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        # Long enough for a busy machine to deliver all three before one expires.
        revoked = send(app, "revoked", countdown=20)
        expired = send(app, "expired", countdown=20, expires=18)
        served = send(app, "served", countdown=20)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed == 3,
            "all wait in Redis",
        )
        app.control.revoke(revoked.id)
        assert served.get(timeout=120)[0]["label"]
        for result in (revoked, expired):
            wait_until(lambda: result.state == "REVOKED", "the message ends")  # noqa: B023
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, 0),
            "all messages are acknowledged",
        )


def test_a_message_that_expires_before_its_eta_ends_then(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    """It would wait in Redis, and its sender for its result, until the ETA: years, if its sender
    wishes so.
    """
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        sent = send(app, "p", eta=datetime(9999, 12, 31, tzinfo=UTC), expires=12)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed == 1,
            "the message waits in Redis",
        )
        wait_until(lambda: sent.state == "REVOKED", "the message ends")
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, 0),
            "it is acknowledged",
        )


LATER_ETAS = (
    "9999-12-31T23:59:59",
    "9999-12-31T23:59:59+00:00",
    "2999-01-01",
    "2262-04-12T00:00:00-05:00",
)
PAST_ETAS = (
    "0001-01-01T00:00:00",
    "1970-01-01T00:00:00+14:00",
    "2020-01-01",
    "2020-01-01T00:00:00Z",
    "20200101T000000",
)
INVALID_ETAS: tuple[object, ...] = (
    "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00", "inf", "nan", "tomorrow", "",
    "2020-13-01",
    "2020-01-01T00:00:00+99:99", 5, -1, 0, 1e300, float("inf"), True, False, [], ["x"], {"a": 1},
)  # fmt: skip


def test_etas_of_any_form_wait_run_or_are_refused(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        for number, eta in enumerate((*LATER_ETAS, *PAST_ETAS, *INVALID_ETAS)):
            send(app, f"p{number}", task_id=f"p{number}", headers={"eta": eta})
        states: list[AsyncResult[Any]] = [
            AsyncResult(f"p{number}", app=app) for number in range(number + 1)
        ]
        later, past, invalid = len(LATER_ETAS), len(PAST_ETAS), len(INVALID_ETAS)
        ended = states[later:]
        wait_until(
            lambda: all(result.ready() for result in ended), "the others end", 120
        )
        assert [result.state for result in ended] == ["SUCCESS"] * past + [
            "FAILURE"
        ] * invalid
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, later),
            "the others are acknowledged",
        )
        assert worker.lives()
        inspect: Any = app.control.inspect(timeout=30, limit=1)
        ((*shown,),) = inspect.scheduled().values()
        assert len(shown) == later
        said = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert f"{later} due later" in said.stdout


def test_each_due_message_runs_once_although_a_worker_is_killed(
    redis: RedisServer, app: Celery, settings: Settings, tmp_path: Path
) -> None:
    store = ResultsStore(connect(settings), settings)
    with (
        standing_in(redis, tmp_path, "first") as first,
        standing_in(redis, tmp_path, "second") as second,
    ):
        wait_until(
            lambda: first.says("ready.") and second.says("ready."),
            "the workers are ready",
        )
        due_at = datetime.now(UTC) + timedelta(seconds=15)
        sent = [
            send(app, f"p{number}", eta=due_at, priority=number % 10)
            for number in range(200)
        ]
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed,
            "messages wait in Redis",
        )
        first.process.send_signal(signal.SIGKILL)
        for result in sent:
            (outcome,) = result.get(timeout=120)
            assert datetime.fromtimestamp(outcome["classified_at"], UTC) >= due_at
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, 0),
            "all messages are acknowledged",
        )
    assert store.counters().stored == 200


def test_a_delayed_message_of_a_rate_limited_task_runs(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        # A worker is ready a moment before it listens to remote commands.
        wait_until(lambda: redis.client.pubsub_numpat() >= 1, "the worker listens")
        control: Any = app.control
        assert control.rate_limit(CLASSIFY_TASK, "5/s", reply=True, limit=1, timeout=30)
        sent = [send(app, f"p{number}", countdown=2) for number in range(15)]
        assert all(result.get(timeout=120) for result in sent)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, 0),
            "all messages are acknowledged",
        )


@pytest.mark.parametrize(
    "later", ["0", None, "100/s"], ids=["lifted", "removed", "raised"]
)
def test_messages_that_a_rate_limit_holds_follow_a_later_limit(
    redis: RedisServer, app: Celery, tmp_path: Path, later: str | None
) -> None:
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        wait_until(lambda: redis.client.pubsub_numpat() >= 1, "the worker listens")
        control: Any = app.control
        assert control.rate_limit(CLASSIFY_TASK, "1/h", reply=True, limit=1, timeout=30)
        sent = [send(app, f"p{number}") for number in range(40)]
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 39, 0),
            "one message is done, and the worker holds the others",
        )

        def status() -> str:
            return feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).stdout

        # The worker holds back a message a moment after it has taken it.
        wait_until(
            lambda: "1/h · 39 messages held back" in status(), "all are held back"
        )
        assert f"{CLASSIFY_TASK} on standin@" in status()
        assert control.rate_limit(CLASSIFY_TASK, later, reply=True, limit=1, timeout=30)
        assert all(result.get(timeout=120) for result in sent)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, 0),
            "all messages are acknowledged",
        )
        said = feedmill("status", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        (shown,) = last_json(said.stdout)["workers"].values()
        assert bool(shown["rate_limits"]) == (later == "100/s")


def test_messages_that_a_rate_limit_holds_follow_a_lower_limit(
    redis: RedisServer, app: Celery, settings: Settings, tmp_path: Path
) -> None:
    store = ResultsStore(connect(settings), settings)
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        wait_until(lambda: redis.client.pubsub_numpat() >= 1, "the worker listens")
        control: Any = app.control
        assert control.rate_limit(CLASSIFY_TASK, "1/h", reply=True, limit=1, timeout=30)
        for number in range(20):
            send(app, f"p{number}")
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 19, 0),
            "one message is done, and the worker holds the others",
        )
        wait_until(lambda: store.counters().stored == 1, "the first message is done")
        # Each limit lets one message through at once.
        for limit in ("2/h", "1/h", "3/h"):
            assert control.rate_limit(
                CLASSIFY_TASK, limit, reply=True, limit=1, timeout=30
            )
        wait_until(
            lambda: store.counters().stored == 4, "one message per limit is done"
        )
        assert control.ping(timeout=30, limit=1)
        assert store.counters().stored == 4


def test_messages_of_protocol_1_wait_too(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    store = ResultsStore(connect(settings), settings)
    with standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        as_protocol_1(redis, datetime.now(UTC) + timedelta(seconds=12))
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed == 1,
            "the message waits in Redis",
        )
        wait_until(lambda: store.counters().stored == 1, "the post is classified")


def test_status_counts_and_inspect_lists_them(
    redis: RedisServer, app: Celery, tmp_path: Path
) -> None:
    with standing_in(redis, tmp_path):
        sent = send(app, "secret", countdown=LATER)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed == 1,
            "the message waits in Redis",
        )
        wait_for_replies(app)
        said = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert "1 due later" in said.stdout
        as_json = feedmill(
            "status", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        assert last_json(as_json.stdout)["queue"]["delayed"] == 1
        inspect: Any = app.control.inspect(timeout=30, limit=1)
        ((only,),) = inspect.scheduled().values()
        assert only["request"]["id"] == sent.id
        assert only["request"]["name"] == CLASSIFY_TASK
        assert only["request"]["kwargs"] == "{'posts': <1 post: secret>}"
        assert "Post secret" not in json.dumps(only)
        ((answer,),) = (inspect.query_task(sent.id, "another").values(),)
        assert list(answer) == [sent.id]
        state, shown = answer[sent.id]
        assert (state, shown["name"]) == ("scheduled", CLASSIFY_TASK)
        assert "Post secret" not in json.dumps(answer)


@pytest.mark.parametrize(
    "purge",
    [["secret"], ["--run", RUN, "--yes"], ["--queue", "feedmill", "--yes"]],
    ids=["by id", "by run", "by queue"],
)
def test_purges_remove_them(
    redis: RedisServer, app: Celery, tmp_path: Path, purge: list[str]
) -> None:
    with standing_in(redis, tmp_path):
        send(app, "secret", countdown=LATER)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").delayed == 1,
            "the message waits in Redis",
        )
    said = feedmill("purge", *purge, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 0, said.stderr
    assert not any(
        "Post secret" in message for message in redis.client.hvals("feedmill:delayed")
    )
    assert redis.client.hlen("feedmill:delayed") == redis.client.zcard(
        "feedmill:delayed_index"
    )
