"""docker/users.conf on a real Redis: each user may do its job, and everything else is rejected
with a clear error.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from feedmill.shared.broker import connect, queue_depth
from feedmill.shared.broker import make_app as make_celery
from feedmill.shared.errors import RedisUnavailable
from feedmill.shared.messages import DeadLetter
from feedmill.shared.model_routing import RequestedModel, request_model
from feedmill.shared.purge import BEGINNING, newest_purge, purge, read_purges
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.results import ResultsStore
from feedmill.shared.scripts import call
from feedmill.shared.settings import load
from tests import support
from tests.support import RedisServer, feedmill, make_posts, wait_until, working
from tests.unit.test_web_frame import client_of

pytestmark = pytest.mark.system_redis

USERS = Path(__file__).parent.parent.parent / "docker" / "users.conf"
POSTS = 40


def rules(**passwords: str) -> str:
    """Return docker/users.conf with these users' password hashes filled in."""
    text = USERS.read_text()
    for user, password in passwords.items():
        text = text.replace(
            f"#{user.upper()} ", f"#{hashlib.sha256(password.encode()).hexdigest()} "
        )
    return text


@pytest.fixture(scope="module")
def system_server() -> str:
    """The path of the system's server."""
    path = support.installed_redis()
    if path is None:
        pytest.skip("needs a redis-server of the system: apt install redis-server")
    return path


class Guarded(RedisServer):
    """A Redis with the users of docker/users.conf, after a producer has sent POSTS posts and a
    worker stored them.
    """

    def as_user(self, user: str) -> str:
        return f"redis://{user}:{user}-secret@127.0.0.1:{self.port}/0"

    def refused(self) -> list[tuple[str, str]]:
        """Return the user and object of each rejected command so far."""
        return [
            (str(entry["username"]), str(entry["object"]))
            for entry in self.client.acl_log()
        ]


@pytest.fixture(scope="module")
def guarded(
    system_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    users = {user: f"{user}-secret" for user in ("worker", "producer", "reader", "web")}
    server = Guarded(system_server, tmp_path_factory.mktemp("redis"), rules(**users))
    try:
        yield from _served(server, tmp_path_factory.mktemp("worker"))
    finally:
        server.stop()


def _served(server: Guarded, folder: Path) -> Iterator[Guarded]:
    with working(server, folder, FEEDMILL_REDIS_URL=server.as_user("worker")) as worker:
        assert server.refused() == [], worker.text()
        posts = folder / "posts.jsonl"
        posts.write_text(support.as_jsonl(make_posts(POSTS)))
        sent = feedmill(
            "enqueue",
            str(posts),
            cwd=folder,
            FEEDMILL_REDIS_URL=server.as_user("producer"),
        )
        assert sent.returncode == 0, sent.stderr
        wait_until(
            lambda: server.client.xlen("feedmill:results") == POSTS,
            ("all results are stored"),
        )
        yield server
        assert worker.end() == 0
    assert "Traceback" not in worker.text()


@pytest.fixture(autouse=True)
def _nothing_is_refused(guarded: Guarded) -> Iterator[None]:
    """Check that Redis has rejected no command but those that a test expects and removes from the
    log.
    """
    yield
    assert guarded.refused() == [], "a required command was rejected"


def test_worker_user_may_operate_everything(guarded: Guarded, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": guarded.as_user("worker")}
    for command in (
        ["status", "--json"],
        ["health"],
        ["purge", "p1"],
        ["purge", "--lift", "p1"],
        ["deploy", "--reset"],
    ):
        said = feedmill(*command, cwd=tmp_path, **url)
        assert (said.returncode, said.stderr) == (0, ""), said.stdout
        if command[0] == "status":
            assert support.last_json(said.stdout)["workers"]


def test_worker_user_may_purge_waiting_and_delayed_messages(guarded: Guarded) -> None:
    settings = load(redis_url=guarded.as_user("worker"))
    redis = connect(settings)
    app = make_celery(settings)
    app.send_task(
        "feedmill.classify",
        kwargs={"posts": [{"id": "later", "title": "x"}]},
        countdown=3600,
    )
    wait_until(
        lambda: queue_depth(redis, settings.queue).delayed == 1,
        ("the worker has put the message aside"),
    )
    assert purge(redis, settings, ["later"])["messages"] == 1
    # A purge rewrites waiting messages with these commands. Here none waits, because the worker
    # reserves all at once.
    assert redis.lpos("feedmill", "x") is None
    with pytest.raises(ResponseError, match="no such key"):
        redis.lset("feedmill", 0, "x")
    assert guarded.refused() == []
    with (
        pytest.raises(RedisUnavailable, match=r"user worker .*docs/redis\.md"),
        user_errors(settings),
    ):
        redis.bgrewriteaof()
    guarded.client.acl_log_reset()


def test_worker_user_may_return_messages_of_a_killed_worker(guarded: Guarded) -> None:
    """A worker runs other commands for expired leases than it runs for its own."""
    guarded.client.lpush("feedmill-killed", "x")
    assert (
        support.reserve(
            guarded.client,
            ["feedmill-killed"],
            f"{uuid4().hex}-000000000000",
            seconds=0.05,
        )
        == 1
    )
    wait_until(
        lambda: guarded.refused() or guarded.client.llen("feedmill-killed"),
        "the message is back in its list",
    )
    guarded.client.delete("feedmill-killed")


def test_worker_user_may_manage_dead_letters(guarded: Guarded, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": guarded.as_user("worker")}
    post = json.dumps({"id": "late", "title": "A storm was coming"})
    letter = DeadLetter(
        id="late",
        reason="?",
        post=post,
        options="{}",
        message=None,
        worker="w",
        failed_at=0.0,
    )
    ResultsStore(guarded.client, load(redis_url=guarded.url)).write(
        [], [letter, letter.model_copy(update={"id": "x"})]
    )
    for command in (
        ["list"],
        ["list", "late"],
        ["retry", "late"],
        ["drop", "--all", "--yes"],
    ):
        said = feedmill("dead", *command, cwd=tmp_path, **url)
        assert (said.returncode, said.stderr) == (0, ""), said.stdout
    assert said.stdout.startswith("1 ")
    wait_until(
        lambda: support.has_results(guarded.client, "late"),
        ("the retried post is classified"),
    )


def test_producer_user_may_send_to_any_queue(guarded: Guarded, tmp_path: Path) -> None:
    wait_until(
        lambda: guarded.client.hexists("feedmill:models", "feedmill"),
        "the worker has announced its model",
    )
    posts = support.as_jsonl(
        [post.model_copy(update={"id": f"other-{post.id}"}) for post in make_posts(2)]
    )
    url = {"FEEDMILL_REDIS_URL": guarded.as_user("producer")}
    for flags, said in (
        (["--queue", "feedmill"], "2 "),
        (["--queue", "nobody"], ""),
        (["--priority", "9"], "0 "),
    ):
        sent = feedmill(
            "enqueue", "-", "--run", "a", *flags, cwd=tmp_path, stdin=posts, **url
        )
        assert sent.stdout.startswith(said), sent.stderr
    elsewhere = {"FEEDMILL_QUEUE": "feedmill-other"}
    sent = feedmill(
        "enqueue", "-", "--priority", "9", cwd=tmp_path, stdin=posts, **url, **elsewhere
    )
    assert sent.stdout.startswith("2 "), sent.stderr
    assert guarded.client.delete("feedmill-other\x06\x169") == 1


def test_producer_user_cannot_make_purges_lose_posts(
    guarded: Guarded, tmp_path: Path
) -> None:
    """Whatever it writes where it may, a purge removes a run's messages and their records, or
    neither.
    """
    producer = {
        "FEEDMILL_REDIS_URL": guarded.as_user("producer"),
        "FEEDMILL_QUEUE": "feedmill-nobody",
    }
    worker = {**producer, "FEEDMILL_REDIS_URL": guarded.as_user("worker")}
    posts = support.as_jsonl(make_posts(POSTS))
    client: Any = Redis.from_url(guarded.as_user("producer"))
    for field in ("sent", "failed"):
        for value in ("1.5", "inf", b"\xff"):
            assert (
                feedmill(
                    "enqueue", "-", "--run", "r", cwd=tmp_path, stdin=posts, **producer
                ).returncode
                == 0
            )
            client.hset("feedmill:run:r", field, value)
            client.zadd(
                "feedmill:runs", {f"ghost {number}": 9e15 for number in range(1500)}
            )
            purged = feedmill(
                "purge", "--run", "r", "--yes", "--json", cwd=tmp_path, **worker
            )
            assert json.loads(purged.stdout)["waiting"] == POSTS, purged.stderr
    sent = feedmill("enqueue", "-", "--run", "r", cwd=tmp_path, stdin=posts, **producer)
    assert sent.stdout.startswith(f"{POSTS} posts sent")
    shown = feedmill("status", "--json", cwd=tmp_path, **worker)
    assert support.last_json(shown.stdout)["runs"][0]["run"] == "r"
    assert guarded.client.zcard("feedmill:runs") <= 1000
    assert (
        feedmill("purge", "--run", "r", "--yes", cwd=tmp_path, **worker).returncode == 0
    )
    client.close()


def test_web_user_may_do_what_people_and_applications_ask(guarded: Guarded) -> None:
    settings = load(redis_url=guarded.as_user("web"))
    with client_of(settings) as client:
        labels = {"sports": "matches", "food": "cooking"}
        answer = client.post(
            "/v1/classify", json={"texts": ["The final"], "labels": labels}
        )
        assert answer.status_code == 200, answer.text
        posts = [{"id": "w1", "title": "A soup"}, {"id": "w2", "title": "The match"}]
        sent = client.post("/v1/runs", json={"posts": posts, "run": "web"})
        assert sent.json()["sent"] == 2, sent.text
        upload = client.post("/files/upload", content="id,title\nw3,A goal\n").json()
        started = client.post(upload["address"], data={"run": "web"})
        assert started.status_code == 303
        wait_until(
            lambda: "3 of 3 labelled" in client.get("/run-progress?run=web").text,
            "the run is done",
        )
        letter = DeadLetter(
            id="w4",
            reason="unlucky",
            post='{"id": "w4", "title": "A pass"}',
            options="{}",
            message=None,
            worker="w",
            failed_at=1.0,
        )
        ResultsStore(guarded.client, settings).write([], [letter])
        for path in ("/", "/posts/w3", "/runs", "/runs/web", "/system", "/v1/results"):
            assert client.get(path).status_code == 200, path
        for form in ("csv", "parquet"):
            assert client.get(f"/download?run=web&form={form}").status_code == 200
        retried = client.post("/system/dead", data={"action": "retry-all"})
        assert "sent again" in retried.text
        wait_until(
            lambda: client.get("/v1/posts/w4").status_code == 200, "it is classified"
        )
        ResultsStore(guarded.client, settings).write([], [letter])
        dropped = client.post("/system/dead", data={"action": "drop-all", "sure": "1"})
        assert "dropped" in dropped.text
        assert client.delete("/v1/posts/w3").status_code == 200
        assert client.get("/v1/posts/w3").status_code == 404


def test_web_user_may_review_and_change_models(
    guarded: Guarded, tmp_path: Path
) -> None:
    settings = load(redis_url=guarded.as_user("web"))
    with client_of(settings, answers=tmp_path) as client:
        answer = client.post("/v1/classify", json={"texts": ["The cup final"]})
        assert answer.status_code == 200, answer.text
        tab = {"reviewer": "a-tab-of-ana"}
        shown = client.post("/review/next", json=tab).json()["post"]
        fields = tab | {"token": shown["token"], "label": None}
        assert client.post("/review/answer", json=fields).status_code == 200
        # As if a taught model had been deployed.
        request = RequestedModel("/models/taught", "00", 1.0)
        request_model(guarded.client, settings.queue, request)
        history = [{"deployed": asdict(request), "before": None}]
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "deployments.json").write_text(json.dumps(history))
        assert "Back to each worker" in client.get("/teach").text
        assert client.post("/teach/back").status_code == 303
        wait_until(
            lambda: (
                "1 workers of queue feedmill have switched" in client.get("/teach").text
            ),
            "the worker has its own model",
        )
    request_model(guarded.client, settings.queue, None)


def test_worker_user_may_read_celery_results(guarded: Guarded) -> None:
    app = make_celery(load(redis_url=guarded.as_user("worker")))
    posts = [{"id": "x", "title": "A storm is coming"}]
    result = app.send_task("feedmill.classify", kwargs={"posts": posts})
    assert result.get(timeout=120)[0]["id"] == "x"


@pytest.mark.parametrize(
    "command",
    [
        ["results", "--json"],
        ["dead", "list"],
        ["results", "--group", "readers", "--from-start"],
        ["results", "--group", "readers", "--claim-after", "1"],
        ["export", "--format", "jsonl", "results.jsonl"],
        ["report"],
    ],
    ids=" ".join,
)
def test_reader_user_may_read_results(
    guarded: Guarded, tmp_path: Path, command: list[str]
) -> None:
    said = feedmill(
        *command, cwd=tmp_path, FEEDMILL_REDIS_URL=guarded.as_user("reader")
    )
    assert said.returncode == 0, said.stderr


def test_reader_user_may_follow_purges(guarded: Guarded) -> None:
    worker = load(redis_url=guarded.as_user("worker"))
    purge(connect(worker), worker, ["never sent"])
    reader = connect(load(redis_url=guarded.as_user("reader")))
    (found,) = read_purges(reader, BEGINNING).purges[-1:]
    assert found.ids == ["never sent"]
    assert read_purges(reader, newest_purge(reader)).purges == []


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("producer", ["results"]),
        ("producer", ["results", "--group", "thieves"]),
        ("producer", ["purge", "p1"]),
        ("reader", ["enqueue", "-"]),
        ("reader", ["purge", "p1"]),
        ("producer", ["dead", "list"]),
        ("reader", ["status"]),
    ],
    ids=str,
)
def test_rejected_commands_name_the_user(
    guarded: Guarded, tmp_path: Path, user: str, command: list[str]
) -> None:
    said = feedmill(
        *command,
        cwd=tmp_path,
        stdin=support.as_jsonl(make_posts(1)),
        FEEDMILL_REDIS_URL=guarded.as_user(user),
    )
    assert said.returncode == 2
    assert f"user {user} " in said.stderr
    assert "Traceback" not in said.stderr
    assert guarded.client.acl_log_reset()


NO_RESULTS: tuple[tuple[Any, ...], ...] = (
    ("XRANGE", "feedmill:results", "-", "+"),
    ("XREAD", "STREAMS", "feedmill:results", "0"),
    ("HGETALL", "feedmill:stored:1"),
    ("GET", "celery-task-meta-x"),
    ("XRANGE", "feedmill:dead", "-", "+"),
)
NO_MESSAGES: tuple[tuple[Any, ...], ...] = (
    ("RPOP", "feedmill"),
    ("LRANGE", "feedmill", 0, -1),
    ("BRPOP", "feedmill", 1),
    ("HGETALL", "feedmill:reserved"),
    ("DEL", "feedmill:reserved"),
    ("PUBLISH", "/0.celery.pidbox", "x"),
    ("LPUSH", "x.celery.pidbox", "x"),
)
NO_ADMINISTRATION: tuple[tuple[Any, ...], ...] = (
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("FLUSHALL",),
    ("KEYS", "*"),
    ("SHUTDOWN",),
    ("MONITOR",),
    ("GET", "another-application"),
)
NO_WRITING: tuple[tuple[Any, ...], ...] = (
    ("LPUSH", "feedmill", "x"),
    ("XADD", "feedmill:results", "*", "a", "b"),
    ("XDEL", "feedmill:results", "0-1"),
    ("DEL", "feedmill:results"),
    ("XDEL", "feedmill:dead", "0-1"),
    ("HSET", "feedmill:stored:1", "a", "b"),
    ("HSET", "feedmill:sent-marks:0", "a", "b"),
    ("HSET", "feedmill:models", "a", "b"),
)
NO_TAKING: tuple[tuple[Any, ...], ...] = (
    ("RPOP", "feedmill"),
    ("BRPOP", "feedmill", 1),
    ("FUNCTION", "LOAD", "REPLACE", "#!lua name=test"),
    ("FUNCTION", "FLUSH"),
)
NO_STEERING: tuple[tuple[Any, ...], ...] = (
    ("DEL", "feedmill"),
    ("SET", "feedmill", "x"),
    ("RPOP", "feedmill-other"),
    ("HSET", "feedmill:models", "a", "b"),
)


@pytest.mark.parametrize(
    ("user", "forbidden"),
    [
        ("worker", NO_ADMINISTRATION),
        ("producer", NO_RESULTS + NO_MESSAGES + NO_ADMINISTRATION + NO_STEERING),
        ("reader", NO_WRITING + NO_MESSAGES + NO_ADMINISTRATION),
        ("web", NO_TAKING + NO_ADMINISTRATION),
    ],
    ids=["worker", "producer", "reader", "web"],
)
def test_users_may_do_nothing_else(
    guarded: Guarded, user: str, forbidden: tuple[tuple[Any, ...], ...]
) -> None:
    client: Any = Redis.from_url(guarded.as_user(user))
    allowed = []
    for command in forbidden:
        try:
            client.execute_command(*command)
        except NoPermissionError:
            continue
        allowed.append(command)
    client.close()
    guarded.client.acl_log_reset()
    assert not allowed


def test_functions_have_only_their_users_permissions(guarded: Guarded) -> None:
    settings = load(redis_url=guarded.as_user("producer"))
    with pytest.raises(RedisUnavailable, match="user producer "), user_errors(settings):
        call(connect(settings), "measure")
    guarded.client.acl_log_reset()


@pytest.mark.parametrize("user", ["producer", "reader"])
def test_producers_and_readers_bring_no_code_to_redis(
    guarded: Guarded, user: str
) -> None:
    """Their code could hang Redis: a script that has written cannot be ended."""
    client = Redis.from_url(guarded.as_user(user))
    loop, library = "while true do end", "#!lua name=test\nwhile true do end"
    sha = guarded.client.script_load("return 1")
    for command in (
        ("EVAL", loop, 0), ("EVAL_RO", loop, 0), ("SCRIPT", "LOAD", loop), ("EVALSHA", sha, 0),
        ("EVALSHA_RO", sha, 0),
        ("FUNCTION", "LOAD", library), ("FUNCTION", "RESTORE", b""), ("FUNCTION", "FLUSH"),
        ("SCRIPT", "KILL"),
    ):  # fmt: skip
        with pytest.raises(NoPermissionError):
            client.execute_command(*command)  # type: ignore[no-untyped-call]
    client.close()
    guarded.client.acl_log_reset()


def test_redis_does_not_start_with_placeholder_passwords(
    system_server: str, tmp_path: Path
) -> None:
    said = support.run(
        [system_server, "-"],
        tmp_path,
        os.environ,
        f"port 0\ndir {tmp_path}\n{USERS.read_text()}",
    )
    assert said.returncode != 0
    assert "#WORKER" in said.stderr
