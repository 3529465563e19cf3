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
from http.client import HTTPConnection
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from celery import Celery
from redis import Redis

from feedmill.monitoring.flower_state import IdSearch
from feedmill.monitoring.watch import HealthPart, check_health
from feedmill.shared.broker import CLASSIFY_TASK, make_app, queue_depth
from feedmill.shared.model_routing import announce
from feedmill.shared.purge import purge
from feedmill.shared.settings import Settings, load
from feedmill.stack import embedded
from feedmill.stack.demo import sample_posts
from feedmill.stack.embedded import WORKER_NODE, Stack
from tests.e2e.test_acl import rules
from tests.e2e.test_tls import SecureRedis, plain_connections
from tests.fakes.proxy import Proxy
from tests.forkserver import ForkedChild
from tests.support import (
    Authority,
    Feedmill,
    RedisServer,
    feedmill,
    fetch,
    forks,
    push,
    running,
    standing_in,
    wait_until,
)

#: Text of posts, which Flower must never show.
WORDS = "Rhubarb and custard"
#: Positional and keyword arguments from another application, whose events carry shortened
#: arguments.
FOREIGN: list[tuple[list[Any], dict[str, Any]]] = [
    (
        [],
        {
            "posts": [{"id": "t3_one", "title": WORDS, "body": WORDS}],
            "labels": ["food", "sports"],
        },
    ),
    ([[{"id": "t3_two", "title": WORDS}]], {"top_k": 1}),
]
#: A message none of whose posts can be classified.
HOPELESS = {"posts": [{"id": "t3_bad", "title": " ", "body": ""}]}
#: Number of our own messages, and of posts in each.
OURS, POSTS = 10, 4
MESSAGES = OURS + len(FOREIGN) + 1


class Visitor:
    """An HTTP client of Flower, with or without a password."""

    def __init__(
        self, url: str, password: str | None = None, user: str = "feedmill"
    ) -> None:
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
        """Return the page's text after its scripts have run in a browser, with single spaces
        between words.
        """
        browser = shutil.which("chromium")
        if browser is None:
            pytest.skip("needs a browser: apt install chromium")
        parts = urlsplit(self.url)
        said = subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu",
            f"--user-data-dir={folder / 'browser'}",
             "--virtual-time-budget=10000", "--dump-dom",
             f"http://{self.user}:{quote(self.password or '', safe='')}@{parts.netloc}{path}"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        text = re.sub(
            r"<(script|style).*?</\1>|<[^>]*>", " ", said.stdout, flags=re.DOTALL
        )
        return " ".join(unescape(text).split())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A Redis, a worker and Flower that have seen some messages; one message is scheduled for
    later.
    """
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
            wait_until(
                lambda: _ended(visitor) == MESSAGES, "Flower has seen all messages end"
            )
            # The scheduled one was sent last.
            wait_until(
                lambda: len(visitor.tasks()) == MESSAGES + 1,
                "Flower has seen the scheduled message",
            )
            with Redis.from_url(made.settings.broker_url) as redis:
                wait_until(
                    lambda: queue_depth(redis, made.settings.queue) == (0, 0, 1),
                    "the scheduled message waits, and the others are acknowledged",
                )
            yield made
        finally:
            made.stop()


def _send(stack: Stack) -> None:
    settings = stack.settings.model_copy(update={"posts_per_message": POSTS})
    push(settings, sample_posts()[: OURS * POSTS])
    sender = Celery(
        broker=settings.broker_url, backend=settings.broker_url, set_as_current=False
    )
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


def test_browser_lists_messages_with_their_outcomes(
    stack: Stack, tmp_path: Path
) -> None:
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
    reason = (
        "MessageFailed('1 of 1 posts failed: t3_bad: title or body must contain text')"
    )
    assert f"FAILURE {{'posts': <1 post: t3_bad>}} {reason}" in failed
    for shown in (page, failed):
        assert WORDS not in shown


def test_nothing_shows_posts_or_passwords(stack: Stack) -> None:
    visitor = visitor_of(stack)
    tasks = [task["uuid"] for task in visitor.tasks()]
    password = str(urlsplit(stack.settings.broker_url).password)
    paths = [
        "/", "/?json=1", "/tasks", "/broker", f"/worker/{WORKER_NODE}", "/metrics", "/api/tasks",
        "/api/task/types",
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
    scheduled = (
        make_app(stack.settings)
        .control.inspect(destination=[WORKER_NODE], timeout=30)
        .scheduled()
    )
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
        for path in (
            "/",
            "/tasks",
            "/tasks/datatable",
            "/broker",
            f"/worker/{WORKER_NODE}",
            "/task/x",
            "/metrics",
        ):
            assert stranger.ask(path)[0] == 401, path
        for path in (
            "/api/tasks",
            "/api/workers",
            "/api/queues/length",
            "/api/task/info/x",
        ):
            assert stranger.ask(path)[0] == 401, path
        assert stranger.ask("/healthcheck") == (200, "OK")
    assert "flower_events_total" in visitor_of(stack).ask("/metrics")[1]


def test_container_health_check_detects_flower(stack: Stack) -> None:
    services = yaml.safe_load(
        (Path(__file__).parent.parent.parent / "docker" / "compose.yaml").read_text()
    )["services"]
    kind, python, *script = services["flower"]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    for port in (urlsplit(stack.addresses.flower_url).port, 1):
        check = [each.replace(":5555/", f":{port}/") for each in script]
        said = subprocess.run(
            [sys.executable, *check],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (said.returncode == 0) == (port != 1), said


# Flower without a worker, on simulated events.


@contextmanager
def flower(
    redis: RedisServer, folder: Path, *arguments: str, **environment: str
) -> Iterator[tuple[Feedmill, Visitor]]:
    # The port is as Kubernetes sets it beside a service named flower.
    given = {"FEEDMILL_FLOWER_PASSWORD": "sesame", "FLOWER_PORT": "tcp://10.0.0.1:5555"}
    environment = given | {"FEEDMILL_DATA_FOLDER": str(folder / "data")} | environment
    environment = {"FEEDMILL_REDIS_URL": redis.url} | environment
    with running(
        "flower", "--port", "0", *arguments, cwd=folder, **environment
    ) as command:
        wait_until(lambda: command.says("Flower at http://"), "Flower is listening")
        found = re.search(r"Flower at (\S+)", command.text())
        assert found
        visitor = Visitor(found[1], "sesame")
        wait_until(lambda: redis.client.pubsub_numpat() >= 1, "Flower receives events")
        yield command, visitor


def tell(redis: RedisServer, event: str, **fields: object) -> None:
    app = Celery(broker=redis.url, set_as_current=False)
    with (
        app.connection() as connection,
        app.events.Dispatcher(connection, hostname="worker@there") as dispatcher,
    ):
        dispatcher.send(event, **fields)
    app.close()


RECEIVED = {
    "name": CLASSIFY_TASK,
    "args": "()",
    "kwargs": "{'posts': <1 post: t3_x>}",
    "retries": 0,
}


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
        wait_until(
            lambda: "SUCCESS" in {task["state"] for task in visitor.tasks()},
            "Flower shows the success",
        )
        assert [task["kwargs"] for task in visitor.tasks()] == [RECEIVED["kwargs"]]


def test_a_damaged_state_file_is_renamed(redis: RedisServer, tmp_path: Path) -> None:
    content = '{"workers": [], "tasks": [{}], "counter": {}}'
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "flower.json").write_text(content)
    with flower(redis, tmp_path) as (command, visitor):
        assert visitor.tasks() == []
        assert "flower.damaged" in command.text()
        assert (tmp_path / "data" / "flower.damaged").read_text() == content


def test_counts_all_priorities_and_drops_unsafe_arguments(
    redis: RedisServer, tmp_path: Path
) -> None:
    app = make_app(Settings(redis_url=redis.url))
    for priority in (0, 3, 6, 9):
        app.send_task(CLASSIFY_TASK, kwargs=HOPELESS, priority=priority)
    app.send_task(CLASSIFY_TASK, kwargs=HOPELESS, queue="feedmill-other")
    announce(redis.client, "feedmill-other", "another model")
    with flower(redis, tmp_path) as (_, visitor):
        lengths = [
            {"name": "feedmill", "messages": 4},
            {"name": "feedmill-other", "messages": 1},
        ]
        assert visitor.json("/api/queues/length") == {"active_queues": lengths}
        # Its REST API sends to any queue, with any priority.
        sent = {"kwargs": HOPELESS, "queue": "feedmill-other", "priority": 3}
        assert visitor.json(f"/api/task/send-task/{CLASSIFY_TASK}", **sent)["task-id"]
        assert redis.client.llen("feedmill-other\x06\x163") == 1
        text = " ".join(re.sub("<[^>]*>", " ", visitor.ask("/broker")[1]).split())
        assert "Idle since feedmill 4 " in text
        assert "redis://:**@127.0.0.1" in text
        sent = {
            "name": CLASSIFY_TASK,
            "args": "()",
            "kwargs": f"{{'posts': [{WORDS}]}}",
        }
        tell(redis, "task-sent", uuid="ours", queue="feedmill", **sent)
        tell(
            redis,
            "task-sent",
            uuid="theirs",
            queue="theirs",
            **sent | {"name": "their.task"},
        )
        wait_until(
            lambda: {task["uuid"] for task in visitor.tasks()} >= {"ours", "theirs"},
            "Flower lists both",
        )
        assert not any(
            task["kwargs"]
            for task in visitor.tasks()
            if task["uuid"] in ("ours", "theirs")
        )


def test_notices_a_silent_connection_and_an_unresponsive_redis(
    redis: RedisServer, tmp_path: Path
) -> None:
    """A firewall that has forgotten a connection drops what is sent, without a reset."""
    proxy = Proxy(redis.port)
    through = redis.url.replace(str(redis.port), str(proxy.port))
    numbers = count()

    def shows_new_messages() -> bool:
        name = f"message-{next(numbers)}"
        tell(redis, "task-received", uuid=name, **RECEIVED)
        return name in {task["uuid"] for task in visitor.tasks()}

    try:
        with flower(redis, tmp_path, FEEDMILL_REDIS_URL=through) as (command, visitor):
            wait_until(shows_new_messages, "Flower shows new messages")
            assert visitor.ask("/healthcheck") == (200, "OK")
            proxy.silence()
            wait_until(lambda: not shows_new_messages(), "the connection is silent")
            wait_until(shows_new_messages, "Flower shows new messages again")
            wait_until(
                lambda: visitor.ask("/healthcheck") == (200, "OK"),
                ("Flower is healthy again"),
            )
            redis.child.process.send_signal(signal.SIGSTOP)
            wait_until(
                lambda: visitor.ask("/healthcheck")[0] == 503, "Flower is unhealthy"
            )
            assert "Redis has not answered" in visitor.ask("/healthcheck")[1]
            redis.child.process.send_signal(signal.SIGCONT)
            wait_until(
                lambda: visitor.ask("/healthcheck") == (200, "OK"),
                ("Flower is healthy again"),
            )
            wait_until(shows_new_messages, "Flower shows new messages again")
            assert command.end() == 0
            assert "Traceback" not in command.text()
    finally:
        redis.child.process.send_signal(signal.SIGCONT)
        proxy.stop()


def test_no_response_may_be_shown_in_a_frame(
    redis: RedisServer, tmp_path: Path
) -> None:
    paths = [
        "/",
        "/tasks",
        "/broker",
        "/task/none",
        "/nowhere",
        "/api/tasks",
        "/healthcheck",
        "/static/js/flower.js",
    ]
    with flower(redis, tmp_path) as (_, visitor):
        for path in paths:
            for headers in (visitor.headers, {}):
                answered = fetch(visitor.url + path, **headers)[2]
                assert answered["X-Frame-Options"] == "DENY", path
                assert (
                    answered["Content-Security-Policy"] == "frame-ancestors 'none'"
                ), path
                assert answered["X-Content-Type-Options"] == "nosniff", path


#: Calls of the REST API that control a worker or one of its tasks, with the status and words of
#: the answer.
CONTROLS = [
    ("task/rate-limit/feedmill.classify", {"ratelimit": "1000/s"}, 200, "rate limit"),
    ("task/rate-limit/own.note", {"ratelimit": "1000/s"}, 200, "rate limit"),
    (
        "task/timeout/feedmill.classify",
        {"soft": "100", "hard": "200"},
        200,
        "time limits",
    ),
    ("task/timeout/own.note", {"hard": "200"}, 200, "time limits"),
    ("task/rate-limit/no.such", {"ratelimit": "1/s"}, 404, "no.such"),
    ("worker/queue/add-consumer/WORKER", {"queue": "second"}, 200, "second"),
    ("worker/queue/cancel-consumer/WORKER", {"queue": "second"}, 200, "second"),
    ("worker/pool/grow/WORKER", {"n": "1"}, 403, "the pool is one device"),
    (
        "worker/pool/autoscale/WORKER",
        {"min": "1", "max": "2"},
        403,
        "Failed to autoscale",
    ),
    (
        "worker/queue/add-consumer/nobody@there",
        {"queue": "second"},
        404,
        "nobody@there",
    ),
]


def test_controls_workers_and_tasks_without_a_visit_to_their_pages(
    redis: RedisServer, tmp_path: Path
) -> None:
    environment = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_INCLUDE": "tests.fakes.own_tasks",
    }
    with (
        flower(redis, tmp_path) as (_, visitor),
        standing_in(redis, tmp_path, "mill@here", **environment),
    ):
        wait_until(
            lambda: "mill@here" in visitor.json("/api/workers"),
            ("Flower has inspected the worker"),
        )

        def post(path: str, form: dict[str, str]) -> tuple[int, str]:
            return visitor.ask(
                f"/api/{path}", urlencode({"workername": "mill@here", **form}).encode()
            )

        limits = {"ratelimit": "1000/s"}
        wait_until(
            lambda: post("task/rate-limit/own.note", limits)[0] == 200,
            "Flower knows the worker's tasks",
        )
        for path, form, status, words in CONTROLS:
            answered = post(path.replace("WORKER", "mill@here"), form)
            assert (answered[0], words in answered[1]) == (status, True), (
                path,
                answered,
            )
        assert visitor.json("/api/task/apply/own.note", args=[5])["result"] == 5
        assert visitor.json(f"/api/task/async-apply/{CLASSIFY_TASK}", kwargs=HOPELESS)[
            "task-id"
        ]


def test_sets_limits_on_the_page_of_a_worker(
    redis: RedisServer, tmp_path: Path
) -> None:
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs a browser: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    environment = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_INCLUDE": "tests.fakes.own_tasks",
    }
    with (
        flower(redis, tmp_path) as (_, visitor),
        standing_in(redis, tmp_path, "mill@here", **environment) as worker,
        playwright.sync_playwright() as playing,
    ):
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        browser = playing.chromium.launch(
            executable_path=executable, args=["--no-sandbox"]
        )
        credentials = {"username": visitor.user, "password": visitor.password}
        context = browser.new_context(http_credentials=credentials)
        context.set_default_timeout(120_000)
        page = context.new_page()
        wait_until(
            lambda: page.goto(f"{visitor.url}/worker/mill@here").status == 200,
            "Flower shows the worker",
        )
        page.get_by_role("tab", name="Limits").click()
        for task in ("own.note", CLASSIFY_TASK):
            page.get_by_label(f"Rate limit for {task}").fill("700")
            page.locator(f'[id="task-rate-limit-{task}"]').click()
            page.get_by_text("new rate limit set").first.wait_for()
            page.reload()
            page.get_by_role("tab", name="Limits").click()
            page.get_by_label(f"Timeout for {task}").fill("90")
            page.locator(f'[id="task-timeout-soft-{task}"]').click()
            page.get_by_text("time limits set").first.wait_for()
            page.locator(f'[id="task-timeout-hard-{task}"]').click()
            page.get_by_text("time limits set").nth(1).wait_for()
            page.reload()
            page.get_by_role("tab", name="Limits").click()
        browser.close()
        assert "[rate_limit=700" in str(visitor.json("/api/workers?refresh=1"))


def test_forgets_offline_workers(redis: RedisServer, tmp_path: Path) -> None:
    """Flower itself only hides them on one page."""
    with flower(redis, tmp_path, FLOWER_PURGE_OFFLINE_WORKERS="1") as (
        command,
        visitor,
    ):

        def is_known() -> bool:
            tell(redis, "worker-heartbeat", freq=0.1, active=0, processed=0)
            return "worker@there" in visitor.json("/api/workers?status=1")

        tell(redis, "task-received", uuid="message", **RECEIVED)
        wait_until(is_known, "Flower has heard of the worker")
        wait_until(
            lambda: visitor.json("/api/workers?status=1") == {},
            ("Flower has forgotten the worker"),
        )
        assert "worker@there" not in visitor.ask("/metrics")[1]
        assert visitor.tasks()[0]["uuid"] == "message"
        assert command.end() == 0, command.text()
    saved = json.loads((tmp_path / "data" / "flower.json").read_text())
    assert saved["workers"] == []
    assert "worker@there" not in saved["counter"]


@pytest.mark.system_redis
def test_runs_with_a_workers_permissions_over_tls(tmp_path: Path) -> None:
    """docker/users.conf has no user for Flower, so Flower must work with exactly the permissions
    of a worker's user.
    """
    authority = Authority(tmp_path)
    redis = SecureRedis(
        tmp_path,
        authority.certificate("server"),
        authority.file,
        users=rules(worker="x", producer="y", reader="z", web="w"),
    )
    redis.url = f"rediss://worker:x@127.0.0.1:{redis.tls_port}/0"
    settings = load(redis_url=redis.url, redis_ca_file=authority.file)
    app = make_app(settings)
    try:
        app.send_task(CLASSIFY_TASK, kwargs=HOPELESS)
        with flower(redis, tmp_path, FEEDMILL_REDIS_CA_FILE=str(authority.file)) as (
            command,
            visitor,
        ):
            with (
                app.connection() as connection,
                app.events.Dispatcher(connection, hostname="worker@there") as told,
            ):
                told.send("task-received", uuid="seen", **RECEIVED)
            wait_until(visitor.tasks, "Flower has seen it")
            assert visitor.json("/api/queues/length") == {
                "active_queues": [{"name": "feedmill", "messages": 1}]
            }
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
    redis: RedisServer,
    tmp_path: Path,
    password: str,
    environment: dict[str, str],
    words: str,
) -> None:
    data = {
        "FEEDMILL_DATA_FOLDER": str(tmp_path / "data"),
        "FEEDMILL_FLOWER_PASSWORD": password,
    }
    environment = data | environment
    said = feedmill(
        "flower",
        "--port",
        "0",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
        **environment,
    )
    assert said.returncode == 2
    assert words in said.stderr
    assert "Traceback" not in said.stderr
    assert "schlüssel" not in said.stderr


def test_health_knows_of_a_flower_that_hears_nothing(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every connection of Flower is cut without a word, and new ones get no answer."""
    settings = Settings(redis_url=redis.url)
    proxy = Proxy(redis.port)
    through = redis.url.replace(str(redis.port), str(proxy.port))

    def finding() -> tuple[bool, str]:
        (found,) = check_health(settings, [HealthPart.FLOWER])
        return found.well, found.said

    try:
        with flower(redis, tmp_path, FEEDMILL_REDIS_URL=through) as (command, _):
            wait_until(
                lambda: finding()[0] and "hears events" in finding()[1], "it reports"
            )
            monkeypatch.setattr("feedmill.shared.problems.MISSED_S", 12.0)
            proxy.is_silent = True
            proxy.silence()
            wait_until(lambda: not finding()[0], "health names it")
            assert "last reported" in finding()[1]
            assert "Restart it" in finding()[1]
            proxy.is_silent = False
            proxy.cut()
            wait_until(lambda: finding()[0], "it hears events again")
            assert command.end() == 0
        assert finding() == (True, "none runs")
    finally:
        proxy.stop()


def test_forgets_messages_with_purged_posts(redis: RedisServer, tmp_path: Path) -> None:
    kwargs = "{'posts': <2 posts: t3_gone, t3_other>}"
    reason = "post t3_gone: no text"
    path = tmp_path / "data" / "flower.json"
    with flower(redis, tmp_path) as (command, visitor):
        for uuid, fields in {
            "named": {"kwargs": kwargs},
            "failed": {"exception": reason},
            "longer": {"kwargs": kwargs.replace("t3_gone", "t3_gone2")},
        }.items():
            event = RECEIVED | fields
            tell(redis, "task-received", uuid=uuid, **event)
            tell(redis, "task-failed", uuid=uuid, exception=fields.get("exception", ""))
        wait_until(lambda: len(visitor.tasks()) == 3, "Flower shows all")
        assert command.end() == 0
    # while Flower does not run, and while it does
    purge(redis.client, Settings(), ["t3_gone"])
    with flower(redis, tmp_path) as (command, visitor):
        tell(redis, "task-received", uuid="later", **RECEIVED | {"kwargs": kwargs})
        wait_until(
            lambda: "later" in {task["uuid"] for task in visitor.tasks()},
            "Flower shows it",
        )
        purge(redis.client, Settings(), ["t3_other", "t3_gone"])
        assert command.end() == 0
    saved = json.loads(path.read_text())
    assert saved["tasks"] == []


def test_finds_whole_ids_only() -> None:
    search = IdSearch({"t3_gone", "7"})
    shown = "{'posts': <2 posts: %s>, 'top_k': 7}"
    for ids in ("t3_gone, x", "x, t3_gone", "7, x"):
        assert search.names_post({"kwargs": shown % ids})
    for ids in ("t3_gone2, x", "at3_gone, x", "17, x"):
        assert not search.names_post({"kwargs": shown % ids})
    assert IdSearch({"Smith, J. 7"}).names_post({"kwargs": shown % "Smith, J. 7, x"})
    assert IdSearch({"Smith, J. 7"}).names_post({"kwargs": shown % "x, Smith, J. 7"})
    assert IdSearch({"a>b"}).names_post({"kwargs": shown % "x, a>b"})
    assert not IdSearch({"Smith, J"}).names_post({"kwargs": shown % "Smith, J. 7, x"})
    assert search.names_post({"exception": "RequestRefused('post t3_gone: no text')"})
    assert search.names_post({"exception": "post 7: no text"})
    assert not search.names_post({"exception": "7 posts failed"})
    assert not IdSearch(()).names_post({"exception": "", "kwargs": shown % "x"})


def test_read_only_refuses_every_change(redis: RedisServer, tmp_path: Path) -> None:
    with flower(redis, tmp_path, FLOWER_READ_ONLY="true") as (_, visitor):
        paths = [path.replace("WORKER", "mill@here") for path, *_ in CONTROLS]
        paths += ["worker/shutdown/mill@here", "worker/pool/restart/mill@here"]
        paths += ["task/apply/own.note", f"task/async-apply/{CLASSIFY_TASK}"]
        paths += [f"task/send-task/{CLASSIFY_TASK}", "task/revoke/x", "task/abort/x"]
        for path in paths:
            status, text = visitor.ask(f"/api/{path}", b"{}")
            assert (status, "ead only" in text) == (403, True), (path, text)
        assert visitor.json("/api/workers") == {}
    assert redis.client.keys("feedmill*") in ([], ["feedmill:flowers"])


class Provider(BaseHTTPRequestHandler):
    """An OAuth provider that knows one person."""

    email = "ann@example.com"

    def answer(self, fields: dict[str, object]) -> None:
        data = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.answer({"access_token": "token"})

    def do_GET(self) -> None:
        self.answer({"email": self.email, "email_verified": True})

    def log_message(self, *_: object) -> None:
        pass


class Person:
    """A browser without a password: keeps cookies, and shows where it is sent."""

    def __init__(self, url: str) -> None:
        self.connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.cookies: dict[str, str] = {}

    def visit(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Return the status, and the address that the response leads to."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        self.connection.request(method, path, headers={"Cookie": cookies})
        response = self.connection.getresponse()
        response.read()
        for text in response.headers.get_all("Set-Cookie") or ():
            for name, morsel in SimpleCookie(text).items():
                self.cookies[name] = morsel.value
        return response.status, response.headers.get("Location", "")

    def log_in(self) -> tuple[int, str]:
        _, provider = self.visit("/login?next=%2Ftasks")
        state = parse_qs(urlsplit(provider).query)["state"][0]
        return self.visit(f"/login?code=code&next=%2Ftasks&state={state}")


@contextmanager
def provider() -> Iterator[dict[str, str]]:
    """Run a provider. Yields the environment of a Flower with it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {
            "FLOWER_AUTH": "ann@example.com|bob@example.com",
            "FLOWER_AUTH_PROVIDER": "flower.views.auth.OktaLoginHandler",
            "FLOWER_OAUTH2_KEY": "key",
            "FLOWER_OAUTH2_SECRET": "secret",
            "FLOWER_OAUTH2_REDIRECT_URI": "http://127.0.0.1/login",
            "FLOWER_OAUTH2_OKTA_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_people_log_in_at_a_provider_beside_the_password(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        provider() as environment,
        flower(redis, tmp_path, **environment) as (command, visitor),
    ):
        # with the password, as scripts do
        assert visitor.ask("/tasks")[0] == 200
        assert visitor.json("/api/workers") == {}
        assert visitor.ask("/metrics")[0] == 200
        for wrong in (f"{visitor.user}:wrong", "é:é", ""):
            encoded = base64.b64encode(wrong.encode()).decode()
            header = {"Authorization": f"Basic {encoded}"}
            assert fetch(f"{visitor.url}/tasks", **header)[0] == 401
        # with the provider
        ann = Person(visitor.url)
        status, location = ann.visit("/tasks")
        assert (status, location.partition("?")[0]) == (302, "/login")
        assert ann.visit("/api/task/revoke/x", "POST")[0] == 403
        assert ann.visit("/metrics")[0] == 302
        assert ann.log_in()[0] == 302
        assert ann.visit("/tasks")[0] == 200
        assert ann.visit("/api/workers")[0] == 200
        # no other site can send for her: the token of the page is missing
        assert ann.visit("/api/task/revoke/x", "POST")[0] == 403
        monkeypatch.setattr(Provider, "email", "eve@example.com")
        eve = Person(visitor.url)
        assert eve.log_in()[0] == 403
        assert eve.visit("/tasks")[0] == 302
        for person in (ann, eve):
            person.connection.close()
        assert command.end() == 0
    assert "Traceback" not in command.text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FLOWER_AUTH": ""}, "FLOWER_AUTH"),
        ({"FLOWER_OAUTH2_SECRET": ""}, "FLOWER_OAUTH2_SECRET"),
        ({"FLOWER_AUTH": "*@*"}, "FLOWER_AUTH is invalid"),
    ],
)
def test_incomplete_logins_are_named(
    redis: RedisServer, tmp_path: Path, change: dict[str, str], words: str
) -> None:
    with provider() as environment:
        done = feedmill(
            "flower",
            cwd=tmp_path,
            FEEDMILL_REDIS_URL=redis.url,
            FEEDMILL_FLOWER_PASSWORD="x",
            **environment | change,
        )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
