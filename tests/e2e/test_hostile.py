"""A real worker with a stand-in model, under hostile messages and on a Redis at its memory
limit.
"""

import json
import re
import signal
import time
import zlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from feedmill.shared.broker import connect, make_app, queue_depth
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests import fuzz, support
from tests.fakes.hostile_messages import Hostile, good
from tests.fakes.standin_worker import KILLS, KILLS_EARLY
from tests.support import Feedmill, RedisServer, make_posts, wait_until

#: Patterns of the modules that store Feedmill's and Celery's results.
RECORDING, CONSUMER = r"pipeline\.recording", r"runtime\.consumer"


def rejected(worker: Feedmill, *modules: str) -> int:
    """Count the modules' log lines about writes that Redis rejected at its memory limit."""
    return len(
        re.findall(
            rf"^.* feedmill\.workers\.(?:{'|'.join(modules)}): .*maxmemory",
            worker.text(),
            re.MULTILINE,
        )
    )


@contextmanager
def serving(redis: RedisServer, folder: Path, **environment: str) -> Iterator[Feedmill]:
    """Run a worker that must survive the test. Yields it once it is ready."""
    with support.standing_in(redis, folder, **environment) as worker:
        wait_until(lambda: worker.says(" ready."), "the worker is ready")
        yield worker
        assert worker.lives()


def _errback(**options: Any) -> dict[str, Any]:
    return {
        "task": "x",
        "args": [],
        "kwargs": {},
        "options": options,
        "subtask_type": None,
        "immutable": False,
    }


@pytest.mark.parametrize("messages", [150, pytest.param(600, marks=pytest.mark.long)])
def test_hostile_messages_neither_stop_the_worker_nor_vanish(
    tmp_path: Path, messages: int
) -> None:
    found = fuzz.run(messages, 1, tmp_path)
    assert not found["vanished"], found
    assert set(found["read"]) >= {"undecodable", "refused", "refused by us", "good"}


#: Changes to a valid message's headers, and to the errbacks that Celery sends when the message
#: fails.
SPOILT: tuple[dict[str, Any], ...] = (
    {"stamped_headers": ["user"], "stamps": {"user": [{"a": 1}]}},
    {"stamped_headers": ["other"], "stamps": {"other": [{"a": 1}]}},
    {"timelimit": [10**400, None]},
    {"timelimit": [None, 10**400]},
    {"errbacks": [_errback(queue="in-the-way")]},
    {"errbacks": [_errback(compression="odd")]},
    {"errbacks": [_errback(serializer="odd")]},
    {"errbacks": [_errback(exchange={"a": 1})]},
)


@pytest.mark.parametrize(
    "posts", [[{"id": "a", "title": "A title"}], [{"id": "a"}]], ids=["good", "failing"]
)
def test_odd_headers_and_links_do_not_stop_the_worker(
    redis: RedisServer, settings: Settings, tmp_path: Path, posts: list[dict[str, str]]
) -> None:
    app = make_app(settings)
    with serving(redis, tmp_path) as worker:
        support.wait_until_registered(redis)
        app.control.revoke_by_stamped_headers(
            {"user": "b"}, reply=True, limit=1, timeout=60
        )

        redis.client.set("in-the-way", "no list")
        for number, changes in enumerate(SPOILT):
            whole: Any = good()
            whole["body"][1]["posts"] = posts
            for name, value in changes.items():
                (whole["headers"] if name in whole["headers"] else whole["body"][2])[
                    name
                ] = value
            redis.client.lpush(
                "feedmill", Hostile("changed", whole).element(f"m{number}")
            )
            wait_until(
                lambda: (
                    worker.lives() and not sum(queue_depth(redis.client, "feedmill"))
                ),
                f"{changes} is done",
            )
            assert app.AsyncResult(f"m{number}").ready(), changes
        # The other dead letters are errbacks, whose task no worker knows.
        letters = [
            letter
            for letter in support.dead_letters(
                ResultsStore(redis.client, settings), 100
            )
            if letter.id == "a"
        ]
        assert len(letters) == (0 if "title" in posts[0] else 1)


BINDINGS = (
    "binding.feedmill",
    "binding.celery.pidbox",
    "binding.reply.celery.pidbox",
    "binding_permanent.feedmill",
)


def plant_bindings(redis: RedisServer, kind: str) -> None:
    """Write the keys of kombu's bindings, which a producer may do."""
    for name in BINDINGS:
        if kind == "set":
            redis.client.sadd(
                f"_kombu.{name}", "x", b"\xff\xfe", "a\x06\x16b\x06\x16c\x06\x16d", ""
            )
        elif kind == "zset":
            # at once: a worker adds its binding to a missing key
            with redis.client.pipeline(transaction=True) as pipe:
                pipe.delete(f"_kombu.{name}")
                pipe.zadd(f"_kombu.{name}", {"x": 1})
                pipe.execute()
    if kind == "deadlines":
        redis.client.delete("_kombu.binding_deadlines")
        redis.client.sadd("_kombu.binding_deadlines", "x")


@pytest.mark.parametrize("kind", ["set", "zset", "deadlines"])
def test_odd_bindings_do_not_keep_workers_from_being_asked(
    redis: RedisServer, tmp_path: Path, kind: str
) -> None:
    with serving(redis, tmp_path) as worker:
        support.wait_until_registered(redis)
        for command in (
            ["status", "--json"],
            ["health", "--check", "workers", "--json"],
            ["deploy", "--json"],
        ):
            plant_bindings(redis, kind)
            said = support.feedmill(
                *command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
            )
            assert said.returncode == 0, (command, said.stderr)
            assert "standin@" in said.stdout, (command, said.stdout, worker.text())


@pytest.mark.parametrize("kind", ["set", "zset", "deadlines"])
def test_odd_bindings_do_not_stop_the_worker(
    redis: RedisServer, tmp_path: Path, kind: str
) -> None:
    """A producer may write the keys of kombu's bindings."""
    plant_bindings(redis, kind)
    with serving(redis, tmp_path) as worker:
        asked = support.application(redis).send_task(
            "feedmill.classify", kwargs={"posts": [{"id": "a", "title": "x"}]}
        )
        assert asked.get(timeout=120)[0]["label"]
        support.wait_until_registered(redis)
        status = support.feedmill(
            "status", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        assert support.last_json(status.stdout)["workers"], (
            status.stderr,
            worker.text(),
        )


@pytest.mark.parametrize("reply_to", [None, [1]], ids=["none", "no name"])
def test_an_odd_reply_queue_does_not_stop_the_worker(
    redis: RedisServer, settings: Settings, tmp_path: Path, reply_to: Any
) -> None:
    with serving(redis, tmp_path, FEEDMILL_CELERY_RESULTS="rpc") as worker:
        for number, headers in enumerate(({"task": "no.such"}, {"eta": "soon"}, {})):
            whole = good()
            whole["headers"] |= headers
            whole["properties"]["reply_to"] = reply_to
            redis.client.lpush(
                "feedmill", Hostile("changed", whole).element(f"m{number}")
            )
        store = ResultsStore(redis.client, settings)
        wait_until(
            lambda: worker.lives() and store.get("m2"), "the last message is classified"
        )
        support.wait_until_empty(redis.client)
        assert [letter.id for letter in support.dead_letters(store, 9)] == ["m0", "m1"]


@pytest.mark.each_redis
def test_results_wait_at_redis_memory_limit(
    redis: RedisServer,
    settings: Settings,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Feedmill's and Celery's results are both kept until Redis has memory again, and the worker
    continues.
    """
    request.addfinalizer(lambda: redis.client.config_set("maxmemory", 0))
    app = make_app(settings)
    support.push(settings, make_posts(400))
    kwargs = {"posts": [{"id": "asked", "title": "Who waits for this?"}]}
    asked = app.send_task("feedmill.classify", kwargs=kwargs)
    redis.client.config_set("maxmemory", 1)
    with serving(redis, tmp_path) as worker:
        wait_until(lambda: rejected(worker, RECORDING), "a result waits")
        assert redis.client.xlen(RESULTS_STREAM) == 0
        redis.client.config_set("maxmemory", 0)
        assert asked.get(timeout=120)[0]["id"] == "asked"
        support.wait_until_empty(redis.client)
        waited = rejected(worker, RECORDING, CONSUMER)
        worker.process.send_signal(signal.SIGSTOP)
        # The classification is already stored: only Celery's result remains to be written.
        asked = app.send_task("feedmill.classify", kwargs=kwargs)
        another = app.send_task("celery.accumulate", (5, 7), {"index": 1})
        redis.client.config_set("maxmemory", 1)
        worker.process.send_signal(signal.SIGCONT)
        wait_until(
            lambda: rejected(worker, RECORDING, CONSUMER) > waited,
            "Celery's result waits",
        )
        wait_until(
            lambda: "the task will run again" in worker.text(),
            ("the other task is postponed"),
        )
        assert queue_depth(redis.client, "feedmill") == (0, 2, 0)
        redis.client.config_set("maxmemory", 0)
        assert asked.get(timeout=120)[0]["id"] == "asked"
        assert another.get(timeout=120) == 7
        support.wait_until_empty(redis.client)
        assert redis.client.xlen(RESULTS_STREAM) == 401


def test_expired_messages_end_after_the_memory_limit_is_lifted(
    redis: RedisServer,
    settings: Settings,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Celery stores REVOKED before it acknowledges: for a message that expired in the queue, and
    one in the worker.
    """
    request.addfinalizer(lambda: redis.client.config_set("maxmemory", 0))
    app, names = make_app(settings), count()

    def send(posts: int, **options: Any) -> Any:
        # 16 such posts fill a micro-batch, so that others wait
        title = "Who waits for this".ljust(512, "?")
        kwargs = {
            "posts": [{"id": f"p{next(names)}", "title": title} for _ in range(posts)]
        }
        return app.send_task("feedmill.classify", kwargs=kwargs, **options)

    # The device is busy for 16 s, so that the second message expires in the worker.
    with serving(redis, tmp_path, STANDIN_ROW_SECONDS="1") as worker:
        busy = send(16)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 1, 0),
            "the worker has the first message",
        )
        late = send(1, expires=12)
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 2, 0),
            "the second message waits for its turn",
        )
        redis.client.config_set("maxmemory", 1)
        wait_until(
            lambda: rejected(worker, r"runtime\.in_flight"),
            ("Redis rejects the result of the expired message"),
        )
        redis.client.config_set("maxmemory", 0)
        worker.process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 0.2
        expired = send(1, expires=0.1)
        redis.client.config_set("maxmemory", 1)
        wait_until(lambda: time.monotonic() > until, "the second message has expired")
        worker.process.send_signal(signal.SIGCONT)
        wait_until(
            lambda: rejected(worker, CONSUMER), "Redis rejects the result on arrival"
        )
        redis.client.config_set("maxmemory", 0)
        support.wait_until_empty(redis.client)
        assert len(busy.get(timeout=120)) == 16
        assert (late.state, expired.state) == ("REVOKED", "REVOKED")


def test_decompression_bombs_do_not_exhaust_memory(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    """The worker rejects a bomb before it creates the bomb's objects, or decodes it while it holds
    no other message.
    """
    app = make_app(settings)
    hostile: tuple[list[Any], ...] = (
        [{}] * 15_000_000,
        [[0] * 1_000_000, {"id": "x", "title": "A good post"}],
    )
    for posts in hostile:
        body = json.dumps([[posts], {}, {}]).encode()
        template = app.send_task("feedmill.classify", ([],))
        found = json.loads(str(redis.client.rpop("feedmill")))
        found["headers"]["compression"], found["body"] = (
            "application/x-gzip",
            b64encode(zlib.compress(body)).decode(),
        )
        for number in range(5):
            found["headers"]["id"] = found["properties"]["correlation_id"] = (
                f"{template.id}-{number}"
            )
            redis.client.lpush("feedmill", json.dumps(found))
    with serving(redis, tmp_path) as worker:
        support.wait_until_empty(redis.client)
        (peak,) = re.findall(
            r"VmHWM:\s+(\d+) kB", Path(f"/proc/{worker.process.pid}/status").read_text()
        )
        assert int(peak) < 1_500_000
    store = ResultsStore(connect(settings), settings)
    assert (store.counters().failed, store.counters().stored) == (10, 1)


def test_scheduled_messages_do_not_delay_due_ones(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    """Scheduled messages, many or large, wait in Redis: they take none of a worker's memory and of
    its prefetch.
    """
    large, small = (
        {"id": "e", "title": "x", "body": "a" * 40_000_000},
        {"id": "l", "title": "Later"},
    )
    for post, messages, compression in ((large, 4, "gzip"), (small, 5000, None)):
        options: dict[str, Any] = {
            "kwargs": {"posts": [post]},
            "countdown": 10_000,
            "compression": compression,
        }
        task_id = make_app(settings).send_task("feedmill.classify", **options).id
        message = str(redis.client.lpop("feedmill"))
        redis.client.lpush(
            "feedmill",
            *(
                message.replace(task_id, f"{task_id}-{number}")
                for number in range(messages)
            ),
        )
    support.push(settings, make_posts(64))
    store = ResultsStore(connect(settings), settings)
    with serving(redis, tmp_path):
        wait_until(
            lambda: store.counters().stored == 64,
            "messages that are due are classified",
        )
        wait_until(
            lambda: queue_depth(redis.client, "feedmill") == (0, 0, 5004),
            "all others wait in Redis",
        )


def test_a_new_worker_reserves_few_messages_at_first(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    """Before its first message, a worker does not know how many posts messages contain, so it
    limits their bytes.
    """
    support.push(settings, make_posts(64 * 32))
    # The first message takes longer than the test.
    with serving(redis, tmp_path, STANDIN_ROW_SECONDS="10"):
        wait_until(
            lambda: redis.client.hlen("feedmill:reserved"),
            ("the worker has reserved messages"),
        )
        assert redis.client.hlen("feedmill:reserved") < 16


@pytest.mark.parametrize(
    ("fatal", "eta"),
    [(KILLS_EARLY, None), (KILLS_EARLY, "2026-01-01T00:00:00+00:00"), (KILLS, None)],
    ids=["at once", "with an ETA", "in a forward pass"],
)
def test_what_kills_workers_is_dead_lettered(
    redis: RedisServer, settings: Settings, tmp_path: Path, fatal: str, eta: str | None
) -> None:
    """After five deliveries, the last three in isolation, it is a dead letter.

    The others are classified.
    """
    app = make_app(settings)
    titles = [
        *(f"Post {number}" for number in range(20)),
        fatal,
        *(f"Post {number}" for number in range(20, 40)),
    ]
    sent = [
        app.send_task(
            "feedmill.classify",
            kwargs={"posts": [{"id": f"p{number}", "title": title}]},
            headers={"eta": eta} if title == fatal else {},
        )
        for number, title in enumerate(titles)
    ]
    store, deaths = ResultsStore(connect(settings), settings), 0
    while not support.dead_letters(store, 1):
        with support.standing_in(redis, tmp_path, STANDIN_LEASE_S="2") as worker:
            wait_until(
                lambda: (
                    worker.process.poll() is not None or support.dead_letters(store, 1)
                ),
                "one of both ends",
            )
            deaths += worker.process.poll() is not None
            assert deaths <= 5, worker.text()
            if worker.process.poll() is None:
                support.wait_until_empty(redis.client)
    (letter,) = support.dead_letters(store, 2)
    assert (deaths, letter.attempts, store.counters().stored) == (
        5,
        5 + (fatal == KILLS),
        40,
    )
    assert fatal in str(letter.post if fatal == KILLS else letter.payload)
    with pytest.raises(Exception, match="3 workers died"):
        sent[titles.index(fatal)].get(timeout=120)
