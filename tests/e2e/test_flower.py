"""Flower in a real browser and through its API. It must never show the text of posts."""

import base64
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from celery import Celery

from feedmill.shared.broker import CLASSIFY_TASK, make_app
from feedmill.shared.model_routing import announce
from feedmill.shared.settings import Settings, load
from feedmill.stack import embedded
from feedmill.stack.demo import sample_posts
from feedmill.stack.embedded import WORKER_NODE, Stack
from tests.e2e.test_acl import rules
from tests.e2e.test_tls import SecureRedis, plain_connections
from tests.forkserver import ForkedChild
from tests.support import Authority, Feedmill, RedisServer, feedmill, fetch, forks, push, running, wait_until

#: Text of posts, which Flower must never show.
WORDS = "Rhubarb and custard"
#: Positional and keyword arguments from another application, whose events carry shortened arguments.
FOREIGN: list[tuple[list[Any], dict[str, Any]]] = [
    ([], {"posts": [{"id": "t3_one", "title": WORDS, "body": WORDS}], "labels": ["food", "sports"]}),
    ([[{"id": "t3_two", "title": WORDS}]], {"top_k": 1}),
]
#: A message none of whose posts can be classified.
HOPELESS = {"posts": [{"id": "t3_bad", "title": " ", "body": ""}]}
#: Number of our own messages, and of posts in each.
OURS, POSTS = 10, 4
MESSAGES = OURS + len(FOREIGN) + 1


class Visitor:
    """An HTTP client of Flower, with or without a password."""

    def __init__(self, url: str, password: str | None = None, user: str = "feedmill") -> None:
        self.url, self.user, self.password = url, user, password
        self.headers = {}
        if password:
            credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
            self.headers["Authorization"] = f"Basic {credentials}"

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, str]:
        return fetch(self.url + path, body, **self.headers)[:2]

    def json(self, path: str, **body: Any) -> Any:
        status, text = self.ask(path, json.dumps(body).encode() if body else None)
        assert status == 200, (path, text)
        return json.loads(text)

    def tasks(self) -> list[dict[str, Any]]:
        return list(self.json("/api/tasks?limit=1000").values())

    def see(self, path: str, folder: Path) -> str:
        """Return the page's text after its scripts have run in a browser, with single spaces between words."""
        browser = shutil.which("chromium")
        if browser is None:
            pytest.skip("needs a browser: apt install chromium")
        parts = urlsplit(self.url)
        said = subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}",
             "--virtual-time-budget=10000", "--dump-dom",
             f"http://{self.user}:{quote(self.password or '', safe='')}@{parts.netloc}{path}"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        text = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", said.stdout, flags=re.DOTALL)
        return " ".join(unescape(text).split())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A Redis, a worker and Flower that have seen some messages; one message is scheduled for later."""
    folder = tmp_path_factory.mktemp("stack")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEEDMILL_TOKEN_BUDGET", "2048")
        patched.setenv("FEEDMILL_CACHE_FOLDER", str(folder / "cache"))
        patched.delenv("FEEDMILL_FLOWER_PASSWORD", raising=False)
        patched.setattr(embedded, "Child", partial(ForkedChild, forks()))
        made = Stack(Settings(), folder / "data", durable=False)
        try:
            list(made.start())
            _send(made)
            visitor = visitor_of(made)
            wait_until(lambda: _ended(visitor) == MESSAGES, "Flower has seen all messages end")
            yield made
        finally:
            made.stop()


def _send(stack: Stack) -> None:
    settings = stack.settings.model_copy(update={"posts_per_message": POSTS})
    push(settings, sample_posts()[: OURS * POSTS])
    sender = Celery(broker=settings.broker_url, backend=settings.broker_url, set_as_current=False)
    sender.conf.task_send_sent_event = True
    for args, kwargs in FOREIGN:
        sender.send_task(CLASSIFY_TASK, args, kwargs, queue=settings.queue)
    sender.send_task(CLASSIFY_TASK, kwargs=HOPELESS, queue=settings.queue)
    sender.send_task(CLASSIFY_TASK, *FOREIGN[0], queue=settings.queue, countdown=3600)
    sender.close()


def _ended(visitor: Visitor) -> int:
    return sum(task["state"] in ("SUCCESS", "FAILURE") for task in visitor.tasks())


def visitor_of(stack: Stack) -> Visitor:
    return Visitor(stack.addresses.flower_url, stack.addresses.flower_password)


def test_browser_lists_messages_with_their_outcomes(stack: Stack, tmp_path: Path) -> None:
    visitor = visitor_of(stack)
    page = visitor.see("/tasks", tmp_path)
    assert f"Showing 1 to {MESSAGES + 1} of {MESSAGES + 1} tasks" in page
    assert page.count("SUCCESS") == MESSAGES - 1
    assert page.count(f"'{POSTS} of {POSTS} posts classified'") == OURS
    assert f"{{'posts': <{POSTS} posts: s001, s002, s003>" in page
    assert (
        page.count(f"{WORKER_NODE[:-12]} {WORKER_NODE[-12:]}") == MESSAGES + 1
    )  # Flower's page splits off the last twelve characters
    assert re.search(r"RECEIVED \{'posts': <1 post: t3_one>, 'labels': <list>\}", page)
    failed = visitor.see("/tasks?state=FAILURE", tmp_path)
    assert "Showing 1 to 1 of 1 tasks" in failed
    reason = "MessageFailed('1 of 1 posts failed: t3_bad: title or body must contain text')"
    assert f"FAILURE {{'posts': <1 post: t3_bad>}} {reason}" in failed
    for shown in (page, failed):
        assert WORDS not in shown


def test_nothing_shows_posts_or_passwords(stack: Stack) -> None:
    visitor = visitor_of(stack)
    tasks = [task["uuid"] for task in visitor.tasks()]
    password = str(urlsplit(stack.settings.broker_url).password)
    paths = [
        "/", "/?json=1", "/tasks", "/broker", f"/worker/{WORKER_NODE}", "/metrics", "/api/tasks", "/api/task/types",
        "/api/workers?refresh=1", f"/api/workers?workername={WORKER_NODE}", "/api/queues/length",
        *(f"/task/{task}" for task in tasks), *(f"/api/task/info/{task}" for task in tasks),
    ]  # fmt: skip
    for path in paths:
        status, shown = visitor.ask(path)
        assert status == 200, path
        for secret in (WORDS, "custard", password, stack.addresses.flower_password):
            assert secret not in shown, path
    # The page was not empty: it lists the scheduled message.
    assert "t3_one" in visitor.ask(f"/worker/{WORKER_NODE}")[1]
    scheduled = make_app(stack.settings).control.inspect(destination=[WORKER_NODE], timeout=30).scheduled()
    assert scheduled
    assert WORDS not in str(scheduled)
    for log in stack.settings.data_folder.glob("*.log"):
        for secret in (WORDS, password, stack.addresses.flower_password):
            assert secret not in log.read_text(), log


def test_authentication_protects_all_pages_but_health(stack: Stack) -> None:
    for stranger in (
        Visitor(stack.addresses.flower_url),
        Visitor(stack.addresses.flower_url, "wrong"),
        Visitor(stack.addresses.flower_url, stack.addresses.flower_password, "x"),
    ):
        for path in ("/", "/tasks", "/tasks/datatable", "/broker", f"/worker/{WORKER_NODE}", "/task/x", "/metrics"):
            assert stranger.ask(path)[0] == 401, path
        for path in ("/api/tasks", "/api/workers", "/api/queues/length", "/api/task/info/x"):
            assert stranger.ask(path)[0] == 401, path
        assert stranger.ask("/healthcheck") == (200, "OK")
    assert "flower_events_total" in visitor_of(stack).ask("/metrics")[1]


def test_container_health_check_detects_flower(stack: Stack) -> None:
    services = yaml.safe_load((Path(__file__).parent.parent.parent / "docker" / "compose.yaml").read_text())["services"]
    kind, python, *script = services["flower"]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    for port in (urlsplit(stack.addresses.flower_url).port, 1):
        check = [each.replace(":5555/", f":{port}/") for each in script]
        said = subprocess.run([sys.executable, *check], capture_output=True, text=True, timeout=120, check=False)
        assert (said.returncode == 0) == (port != 1), said


# Flower without a worker, on simulated events.


@contextmanager
def flower(redis: RedisServer, folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[Feedmill, Visitor]]:
    # The port is as Kubernetes sets it beside a service named flower.
    given = {"FEEDMILL_FLOWER_PASSWORD": "sesame", "FLOWER_PORT": "tcp://10.0.0.1:5555"}
    environment = given | {"FEEDMILL_DATA_FOLDER": str(folder / "data")} | environment
    with running(
        "flower", "--port", "0", *arguments, cwd=folder, FEEDMILL_REDIS_URL=redis.url, **environment
    ) as command:
        wait_until(lambda: command.says("Flower at http://"), "Flower is listening")
        found = re.search(r"Flower at (\S+)", command.text())
        assert found
        visitor = Visitor(found[1], "sesame")
        wait_until(lambda: redis.client.pubsub_numpat() >= 1, "Flower receives events")
        yield command, visitor


def tell(redis: RedisServer, event: str, **fields: object) -> None:
    app = Celery(broker=redis.url, set_as_current=False)
    with app.connection() as connection, app.events.Dispatcher(connection, hostname="worker@there") as dispatcher:
        dispatcher.send(event, **fields)
    app.close()


RECEIVED = {"name": CLASSIFY_TASK, "args": "()", "kwargs": "{'posts': <1 post: t3_x>}", "retries": 0}


def test_state_survives_restarts(redis: RedisServer, tmp_path: Path) -> None:
    with flower(redis, tmp_path) as (command, visitor):
        tell(redis, "task-received", uuid="message", **RECEIVED)
        wait_until(visitor.tasks, "Flower lists the message")
        assert command.end(signal.SIGTERM) == 0, command.text()
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "data" / "flower.json").stat().st_mode & 0o777 == 0o600
    # Flower continues with the tasks it had seen before.
    with flower(redis, tmp_path) as (_, visitor):
        tell(redis, "task-succeeded", uuid="message", result="'fine'", runtime=0.5)
        wait_until(lambda: "SUCCESS" in {task["state"] for task in visitor.tasks()}, "Flower shows the success")
        assert [task["kwargs"] for task in visitor.tasks()] == [RECEIVED["kwargs"]]


def test_a_damaged_state_file_is_renamed(redis: RedisServer, tmp_path: Path) -> None:
    content = '{"workers": [], "tasks": [{}], "counter": {}}'
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "flower.json").write_text(content)
    with flower(redis, tmp_path) as (command, visitor):
        assert visitor.tasks() == []
        assert "flower.damaged" in command.text()
        assert (tmp_path / "data" / "flower.damaged").read_text() == content


def test_counts_all_priorities_and_drops_unsafe_arguments(redis: RedisServer, tmp_path: Path) -> None:
    app = make_app(Settings(redis_url=redis.url))
    for priority in (0, 3, 6, 9):
        app.send_task(CLASSIFY_TASK, kwargs=HOPELESS, priority=priority)
    app.send_task(CLASSIFY_TASK, kwargs=HOPELESS, queue="feedmill-other")
    announce(redis.client, "feedmill-other", "another model")
    with flower(redis, tmp_path) as (_, visitor):
        lengths = [{"name": "feedmill", "messages": 4}, {"name": "feedmill-other", "messages": 1}]
        assert visitor.json("/api/queues/length") == {"active_queues": lengths}
        # Its REST API sends to any queue, with any priority.
        sent = {"kwargs": HOPELESS, "queue": "feedmill-other", "priority": 3}
        assert visitor.json(f"/api/task/send-task/{CLASSIFY_TASK}", **sent)["task-id"]
        assert redis.client.llen("feedmill-other\x06\x163") == 1
        text = " ".join(re.sub("<[^>]*>", " ", visitor.ask("/broker")[1]).split())
        assert "Idle since feedmill 4 " in text
        assert "redis://:**@127.0.0.1" in text
        sent = {"name": CLASSIFY_TASK, "args": "()", "kwargs": f"{{'posts': [{WORDS}]}}"}
        tell(redis, "task-sent", uuid="ours", queue="feedmill", **sent)
        tell(redis, "task-sent", uuid="theirs", queue="theirs", **sent | {"name": "their.task"})
        wait_until(lambda: {task["uuid"] for task in visitor.tasks()} >= {"ours", "theirs"}, "Flower lists both")
        assert not any(task["kwargs"] for task in visitor.tasks() if task["uuid"] in ("ours", "theirs"))


@pytest.mark.system_redis
def test_runs_with_a_workers_permissions_over_tls(tmp_path: Path) -> None:
    """docker/users.conf has no user for Flower, so Flower must work with exactly the permissions of a worker's user."""
    authority = Authority(tmp_path)
    redis = SecureRedis(
        tmp_path, authority.certificate("server"), authority.file, users=rules(worker="x", producer="y", reader="z")
    )
    redis.url = f"rediss://worker:x@127.0.0.1:{redis.tls_port}/0"
    settings = load(redis_url=redis.url, redis_ca_file=authority.file)
    app = make_app(settings)
    try:
        app.send_task(CLASSIFY_TASK, kwargs=HOPELESS)
        with flower(redis, tmp_path, FEEDMILL_REDIS_CA_FILE=str(authority.file)) as (command, visitor):
            with app.connection() as connection, app.events.Dispatcher(connection, hostname="worker@there") as told:
                told.send("task-received", uuid="seen", **RECEIVED)
            wait_until(visitor.tasks, "Flower has seen it")
            assert visitor.json("/api/queues/length") == {"active_queues": [{"name": "feedmill", "messages": 1}]}
            assert visitor.json("/api/workers?refresh=1") == {}
            assert "rediss://worker:**@127.0.0.1" in visitor.ask("/broker")[1]
            assert redis.client.acl_log() == []
            assert plain_connections(redis) == 0
            assert command.end() == 0
        assert "Traceback" not in command.text()
    finally:
        app.close()
        redis.stop()


@pytest.mark.parametrize(
    ("password", "environment", "words"),
    [
        ("", {}, "FEEDMILL_FLOWER_PASSWORD"),
        ("schlüssel", {}, "FEEDMILL_FLOWER_PASSWORD: "),
        ("p", {"FLOWER_MAX_TASKS": "many"}, "FLOWER_MAX_TASKS"),
        ("p", {"FLOWER_CERTFILE": "no.pem", "FLOWER_KEYFILE": "no.pem"}, "certfile"),
    ],
)
def test_mistakes_name_the_flag_or_variable(
    redis: RedisServer, tmp_path: Path, password: str, environment: dict[str, str], words: str
) -> None:
    data = {"FEEDMILL_DATA_FOLDER": str(tmp_path / "data"), "FEEDMILL_FLOWER_PASSWORD": password}
    environment = data | environment
    said = feedmill("flower", "--port", "0", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, **environment)
    assert said.returncode == 2
    assert words in said.stderr
    assert "Traceback" not in said.stderr
    assert "schlüssel" not in said.stderr
