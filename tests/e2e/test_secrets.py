"""A complete stack with every secret set: other users can read no secret, and code in messages is
never executed.

After a purge, the stack's folder contains none of the post's text: not in Redis' files, in logs or
in a new export.
"""

import json
import os
import pickle
import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from celery import Celery
from celery.exceptions import SecurityError
from kombu.exceptions import DecodeError

from feedmill.shared.broker import CLASSIFY_TASK, connect, make_app, queue_depth
from feedmill.shared.keys import DEAD_LETTERS, RESULTS_STREAM
from feedmill.shared.settings import STACK_FILE, Settings
from feedmill.stack.embedded import WORKER_NODE
from tests.e2e.test_dead_letters import message
from tests.e2e.test_flower import Visitor
from tests.support import (
    Feedmill,
    feedmill,
    fetch,
    free_port,
    running,
    shapes,
    wait_until,
)

#: Secret settings of `feedmill up`.
TOLD = {
    "FEEDMILL_FLOWER_PASSWORD": "flowers-password",
    "FEEDMILL_WEB_PASSWORD": "password-of-the-pages",
    "FEEDMILL_WEB_TOKENS": "archive:read:secret-of-the-archive",
    "FEEDMILL_REDDIT_CLIENT_ID": "reddits-client",
    "FEEDMILL_REDDIT_CLIENT_SECRET": "reddits-secret",
}
WORDS = "Rhubarb and custard, she said"
GONE = {"id": "gone", "title": WORDS, "body": f"{WORDS}. " * 5}


class Up(NamedTuple):
    """A running `feedmill up` with its data folder."""

    command: Feedmill
    data: Path
    settings: Settings
    app: Any
    metrics: str

    @property
    def redis_password(self) -> str:
        return str(urlsplit(self.settings.broker_url).password)

    @property
    def secrets(self) -> set[str]:
        return {*TOLD.values(), self.redis_password}

    def flower(self) -> Visitor:
        told = json.loads((self.data / STACK_FILE).read_text())
        return Visitor(told["flower_url"], told["chosen_password"])


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    data, port = folder / "data", free_port()
    environment = TOLD | {
        "FEEDMILL_LOG_LEVEL": "debug",
        "FEEDMILL_METRICS_PORT": str(port),
    }
    # a forked process would not show its environment in /proc
    environment["NEW_INTERPRETER"] = "1"
    with running(
        "up", "--data-folder", str(data), cwd=folder, **environment
    ) as command:
        wait_until(lambda: command.says("Ctrl-C"), "the stack is up", 150)
        settings = Settings(data_folder=data)
        with make_app(settings) as app:
            yield Up(command, data, settings, app, f"http://127.0.0.1:{port}/metrics")


def processes(up: Up) -> dict[str, Path]:
    """Return the /proc folders of `feedmill up` and its children, by role."""
    found = {"up": Path(f"/proc/{up.command.process.pid}")}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink() == up.data:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found[
                    next(
                        name
                        for name in ("-server", "worker", "flower", "web")
                        if name.encode() in b" ".join(words)
                    )
                ] = entry
    assert len(found) == 5
    return found


def test_no_secret_is_in_a_command_line(up: Up) -> None:
    for name, process in processes(up).items():
        line = (process / "cmdline").read_text()
        assert not any(secret in line for secret in up.secrets), name


def test_each_process_gets_only_the_secrets_it_needs(up: Up) -> None:
    told = {
        name: {
            secret
            for secret in up.secrets
            if secret in (process / "environ").read_text()
        }
        for name, process in processes(up).items()
    }
    assert told == {
        "up": set(TOLD.values()),
        "-server": set(),
        "worker": {up.redis_password},
        "flower": {up.redis_password, TOLD["FEEDMILL_FLOWER_PASSWORD"]},
        "web": {
            up.redis_password,
            TOLD["FEEDMILL_WEB_PASSWORD"],
            TOLD["FEEDMILL_WEB_TOKENS"],
        },
    }


@pytest.mark.parametrize(
    "what", ["stats", "report", "conf", "query_task", "active_queues", "registered"]
)
def test_worker_inspect_replies_contain_no_secret(up: Up, what: str) -> None:
    arguments: dict[str, Any] = {"conf": True, "query_task": ["x"]}
    ask = getattr(up.app.control.inspect(destination=[WORKER_NODE], timeout=60), what)
    told = ask(arguments[what]) if what in arguments else ask()
    assert told
    assert not any(secret in json.dumps(told) for secret in up.secrets)


def test_metrics_and_flower_show_no_secret(up: Up) -> None:
    shown = [fetch(up.metrics)[1]]
    visitor = up.flower()
    assert up.app.control.inspect(destination=[WORKER_NODE], timeout=60).ping()
    for path in (
        "/",
        "/broker",
        f"/worker/{WORKER_NODE}",
        "/api/workers?refresh=1",
        "/api/task/types",
        "/metrics",
    ):
        status, page = visitor.ask(path)
        assert status == 200, path
        shown.append(page)
    assert "feedmill" in shown[0]
    assert not any(secret in page for page in shown for secret in up.secrets)


def own_address() -> str | None:
    """Return an address of this machine other than loopback, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_metrics_listen_only_on_loopback(up: Up) -> None:
    outside = own_address()
    if outside is None:
        pytest.skip("needs a network address beside loopback")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((outside, urlsplit(up.metrics).port or 0), timeout=10)


# Messages are parsed, never executed.


class Evil:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def is_served(up: Up) -> bool:
    """Check that the worker still answers a message."""
    posts = [{"id": "fine", "title": "The keeper saved two penalties"}]
    return bool(
        up.app.send_task(CLASSIFY_TASK, kwargs={"posts": posts}).get(timeout=120)[0][
            "label"
        ]
    )


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Path]:
    """The folder that injected code would create; it must not exist after the test."""
    path = tmp_path / "made"
    yield path
    assert not path.exists()


def test_code_in_messages_is_not_executed(up: Up, made: Path) -> None:
    code = f"!!python/object/apply:os.mkdir ['{made}']"
    pickled = pickle.dumps([[], {"posts": [Evil(made)]}, {}])
    for load in (partial(yaml.unsafe_load, code), partial(pickle.loads, pickled)):
        load()
        made.rmdir()
    for body, content_type in (
        (pickled, "application/x-python-serialize"),
        (pickled, "application/json"),
        (pickled, "pickle"),
        (pickled, "application/data"),
        (code.encode(), "application/x-yaml"),
        (b"\x93\x90\x80\x80", "application/x-msgpack"),
    ):
        hostile = message(
            body, **{"content-type": content_type, "content-encoding": "binary"}
        )
        connect(up.settings).lpush("feedmill", json.dumps(hostile))
    hostile["headers"]["serializer"], hostile["content-type"] = (
        "pickle",
        "application/x-python-serialize",
    )
    connect(up.settings).lpush(
        "feedmill", json.dumps(hostile | {"body": b64encode(pickled).decode()})
    )
    wait_until(
        lambda: not queue_depth(connect(up.settings), "feedmill").waiting,
        "no message is waiting",
    )
    assert is_served(up)


def test_code_in_commands_and_events_is_not_executed(up: Up, made: Path) -> None:
    """Anyone who can publish to Redis could send these to workers and Flower."""
    neighbour: Any = Celery(broker=up.settings.broker_url, set_as_current=False)
    neighbour.control.mailbox.serializer = "pickle"
    neighbour.control.broadcast("ping", arguments={"x": Evil(made)})
    fields = {"name": CLASSIFY_TASK, "args": "()", "kwargs": "{}", "retries": 0}
    with neighbour.connection() as connection:
        for serializer in ("pickle", "json"):
            with neighbour.events.Dispatcher(
                connection, hostname="worker@there", serializer=serializer
            ) as dispatcher:
                dispatcher.send(
                    "task-received",
                    uuid=f"by-{serializer}",
                    **fields,
                    x=Evil(made) if serializer == "pickle" else 0,
                )
    neighbour.close()
    wait_until(
        lambda: "by-json" in {task["uuid"] for task in up.flower().tasks()},
        "Flower receives the next event",
    )
    assert "by-pickle" not in {task["uuid"] for task in up.flower().tasks()}
    assert up.app.control.inspect(destination=[WORKER_NODE], timeout=60).ping()
    assert is_served(up)


def test_code_in_results_is_not_executed(up: Up, made: Path) -> None:
    redis = connect(up.settings)
    redis.set(
        "celery-task-meta-pickled",
        pickle.dumps({"status": "SUCCESS", "result": Evil(made)}),
        ex=60,
    )
    with pytest.raises(DecodeError):
        up.app.AsyncResult("pickled").get(timeout=5)
    # Celery recreates an exception from its stored class name, but only exception classes.
    failed = {
        "exc_type": "system",
        "exc_module": "os",
        "exc_message": [f"touch {made}"],
    }
    told: dict[str, Any] = {
        "status": "FAILURE",
        "result": failed,
        "traceback": None,
        "children": [],
        "task_id": "named",
    }
    redis.set("celery-task-meta-named", json.dumps(told), ex=60)
    with pytest.raises(SecurityError):
        up.app.AsyncResult("named").get(timeout=5)


# Purging.


def test_purge_leaves_no_text_of_a_post(up: Up, tmp_path: Path) -> None:
    redis: Any = connect(up.settings)
    way = {"FEEDMILL_REDIS_URL": up.settings.broker_url}
    foreign = Celery(
        broker=up.settings.broker_url,
        backend=up.settings.broker_url,
        set_as_current=False,
    )
    kept = {"id": "kept", "title": "The keeper saved two penalties"}
    stored = foreign.send_task(CLASSIFY_TASK, [[GONE, kept]], queue="feedmill")
    # Rejected options; posts in place of labels; scheduled for later; an unknown task.
    refused = foreign.send_task(
        CLASSIFY_TASK, kwargs={"posts": [GONE], "template": "none"}, queue="feedmill"
    )
    misplaced = foreign.send_task(CLASSIFY_TASK, [[GONE], [GONE]], queue="feedmill")
    unknown = foreign.send_task("nobody.knows", [[GONE]], queue="feedmill")
    foreign.send_task(CLASSIFY_TASK, [[GONE, kept]], queue="feedmill", countdown=3600)
    assert stored.get(timeout=120)[0]["label"]
    for each in (refused, misplaced, unknown):
        assert each.get(timeout=120, propagate=False)
    wait_until(
        lambda: queue_depth(redis, "feedmill") == (0, 0, 1),
        ("only the scheduled message is left"),
    )
    assert (redis.xlen(DEAD_LETTERS) >= 3, redis.xlen(RESULTS_STREAM) >= 2) == (
        True,
        True,
    )
    foreign.close()
    assert files_with(up.data, WORDS), (
        "the append-only file should contain the text before the purge"
    )

    said = feedmill("purge", "gone", "--json", cwd=tmp_path, **way)
    assert said.returncode == 0, said.stderr
    redis.bgrewriteaof()
    found = json.loads(said.stdout)
    assert (found["entries"], found["dead_letters"], found["messages"]) == (1, 3, 1)

    def is_rewritten() -> bool:
        state = redis.info("persistence")
        return not (state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"])

    wait_until(is_rewritten, "the append-only file is rewritten")
    exported = feedmill(
        "export",
        "--format",
        "jsonl",
        str(tmp_path / "posts.jsonl"),
        cwd=tmp_path,
        **way,
    )
    assert exported.returncode == 0, exported.stderr
    assert "penalties" in (tmp_path / "posts.jsonl").read_text()
    shown = [
        up.flower().ask("/api/tasks?limit=1000")[1],
        str(up.app.control.inspect(destination=[WORKER_NODE], timeout=60).scheduled()),
    ]
    assert all("gone" in each and WORDS not in each for each in shown)
    for folder in (up.data, tmp_path, up.command.output.parent):
        assert files_with(folder, WORDS) == []


def test_no_secret_is_in_logs_or_readable_by_others(up: Up) -> None:
    assert up.data.stat().st_mode & 0o077 == 0
    private = {up.data / STACK_FILE}
    for secret in up.secrets:
        assert set(files_with(up.data.parent, secret)) <= private
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
    assert any(
        "debug" in path.read_text().lower() for path in up.data.glob("worker.log")
    )


def files_with(folder: Path, words: str) -> list[Path]:
    """Return the files below the folder that contain this text, also in Base64."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return [
        path
        for path in files
        if any(shape in path.read_bytes() for shape in shapes(words))
    ]
