"""Feedmill inside an application that has its own Celery: the host's tasks stay the host's."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.support import (
    NEW_INTERPRETER,
    ROOT,
    RedisServer,
    _environment,
    feedmill,
    long_cases,
    run,
)

EXAMPLES = ROOT / "docs" / "examples"
#: A program of the host. It creates its application, runs the code on standard input as a module,
#: and sends its own task.
HOST = """
import os, sys
from celery import Celery, current_app, shared_task

host = Celery("host", broker=os.environ["HOST_REDIS"], backend=os.environ["HOST_REDIS"])

@shared_task(name="host.remind")
def remind(): ...

sys.argv = ["host"]
names = {"__name__": "host_module"}
exec(compile(sys.stdin.read(), "snippet", "exec"), names)
assert current_app._get_current_object() is host, current_app
remind.delay()
"""


def python_blocks(page: Path) -> Iterator[str]:
    yield from re.findall(
        r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )


def documented_code() -> dict[str, str]:
    """Return the documented Python code that creates Celery applications, by its place."""
    code = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, block in enumerate(python_blocks(page)):
            code[f"{page.relative_to(ROOT)} {number}"] = block
    for path in sorted(EXAMPLES.rglob("*.py")):
        code[str(path.relative_to(ROOT))] = path.read_text()
    return {
        place: text for place, text in code.items() if re.search(r"\bCelery\(", text)
    }


def run_in_host(code: str, redis: RedisServer, folder: Path, **environment: str) -> str:
    """Run the code in a host, whose broker is another database. Returns the host's output."""
    ours = {
        "FEEDMILL_REDIS_URL": redis.url,
        "HOST_REDIS": host_url(redis),
    } | environment
    said = run(
        [sys.executable, "-P", "-c", HOST],
        folder,
        _environment(folder, **ours) | NEW_INTERPRETER,
        stdin=code,
    )
    assert said.returncode == 0, said.stderr
    return said.stdout


def host_url(redis: RedisServer) -> str:
    return f"{redis.url[:-1]}1"


def assert_host_has_its_task(redis: RedisServer) -> None:
    """Assert that the host's task waits at the host's broker, and none at Feedmill's."""
    with Redis.from_url(host_url(redis)) as of_host:
        (message,) = of_host.lrange("celery", 0, -1)
        assert json.loads(message)["headers"]["task"] == "host.remind"
        of_host.delete("celery")
    assert not redis.client.exists("celery")


@pytest.mark.parametrize("place", documented_code())
def test_documented_application_leaves_the_hosts_tasks_alone(
    served: RedisServer, tmp_path: Path, place: str
) -> None:
    run_in_host(documented_code()[place], served, tmp_path)
    assert_host_has_its_task(served)


@pytest.mark.parametrize("place", documented_code())
def test_documented_applications_are_not_made_current(place: str) -> None:
    """Also those that a test cannot run to their end."""
    calls = [
        node
        for node in ast.walk(ast.parse(documented_code()[place]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Celery"
    ]
    assert calls
    for call in calls:
        assert "set_as_current=False" in ast.unparse(call)


def printed_code(folder: Path, **environment: str) -> str:
    """Return what `feedmill url --celery` prints with these settings."""
    printed = feedmill("url", "--celery", cwd=folder, **environment)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout


#: Sends a message with the application of the printed code, and prints its first label.
SENDS = """
posts = [{"id": "1", "title": "The keeper saved two penalties in the final"}]
sent = app.send_task("feedmill.classify", kwargs={"posts": posts}, queue="feedmill")
print(sent.get(timeout=60)[0]["label"])
"""


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_printed_application_sends_and_leaves_the_hosts_tasks_alone(
    served: RedisServer, tmp_path: Path, scheme: str
) -> None:
    url = served.url.replace("redis://", f"{scheme}://")
    code = printed_code(tmp_path, FEEDMILL_REDIS_URL=url)
    said = run_in_host(code + SENDS, served, tmp_path, FEEDMILL_REDIS_URL=url)
    assert said == "sports\n"
    assert_host_has_its_task(served)


def test_printed_data_are_settings_of_celery(
    served: RedisServer, tmp_path: Path
) -> None:
    url = served.url.replace("redis://", "valkey://")
    printed = feedmill(
        "url", "--celery", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=url
    )
    options = json.loads(printed.stdout)
    assert options == {"broker_url": served.url, "result_backend": served.url}
    code = (
        "from celery import Celery\napp = Celery(set_as_current=False)\n"
        f"app.conf.update({options!r})\n"
    )
    assert run_in_host(code + SENDS, served, tmp_path) == "sports\n"
    assert_host_has_its_task(served)


def test_printed_code_has_no_password(tmp_path: Path) -> None:
    secrets = {
        "FEEDMILL_REDIS_URL": "sentinel://:first-secret@127.0.0.1:1/0",
        "FEEDMILL_REDIS_MASTER": "mine",
        "FEEDMILL_REDIS_SENTINEL_PASSWORD": "second-secret",
    }
    assert "secret" not in printed_code(tmp_path, **secrets)
    printed = feedmill("url", "--celery", "--json", cwd=tmp_path, **secrets)
    assert "first-secret" in printed.stdout
    assert "second-secret" in printed.stdout


@pytest.mark.parametrize("flags", [("--json",), ("--celery", "--flower")])
def test_refuses_flags_that_do_not_go_together(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    refused = feedmill(
        "url", *flags, cwd=tmp_path, FEEDMILL_REDIS_URL="redis://127.0.0.1:1/0"
    )
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert flags[0] in refused.stderr


def test_backend_is_the_workers(tmp_path: Path) -> None:
    """With replies to the sender's queue, the application waits for those."""
    environment = {
        "FEEDMILL_REDIS_URL": "redis://127.0.0.1:1/0",
        "FEEDMILL_CELERY_RESULTS": "rpc",
    }
    names: dict[str, Any] = {}
    code = printed_code(tmp_path, **environment)
    run_code = compile(code, "snippet", "exec")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEEDMILL_REDIS_URL", environment["FEEDMILL_REDIS_URL"])
        exec(run_code, names)  # noqa: S102 - what the command printed
    assert names["app"].conf.result_backend == "rpc://"


#: Imports everything and uses what an application may call, with and without an application of
#: its own. Prints what became the current application instead.
USES_FEEDMILL = """
import celery, importlib, os, pkgutil, sys
from celery import _state

HAS_APP = len(sys.argv) > 1
if HAS_APP:
    from celery import Celery
    host = Celery("host", broker=os.environ["HOST_REDIS"])
else:
    host = None

def check(what):
    if _state._tls.current_app is not host:
        print(what, _state._tls.current_app)
        _state._tls.current_app = host
    if not HAS_APP and _state.default_app is not None and _state.default_app.main != "default":
        print(what, "default", _state.default_app)

import feedmill
check("import feedmill")
for module in pkgutil.walk_packages(feedmill.__path__, "feedmill."):
    if module.name.endswith("__main__"):
        continue
    importlib.import_module(module.name)
    check(module.name)
for name in feedmill.__all__:
    getattr(feedmill, name)
    check(name)

posts = [{"id": "1", "title": "The keeper saved two penalties"}]
url = os.environ["FEEDMILL_REDIS_URL"]
sender = celery.Celery(broker=url, backend=url, set_as_current=False)
calls = {
    "classify": lambda: feedmill.classify(posts),
    "classify_task": lambda: feedmill.classify_task(posts=posts),
    "apply": lambda: feedmill.classify_task.apply(kwargs={"posts": posts}).get(),
    "delay": lambda: feedmill.classify_task.delay(posts=posts),
    "submit": lambda: feedmill.submit(posts, run="mine").wait(timeout=60),
    "results": lambda: list(feedmill.results(follow=False)),
    "a message that fails": lambda: sender.send_task(
        "feedmill.classify", kwargs={"posts": [{"id": "bad"}]}, queue="feedmill"
    ).get(timeout=60, propagate=False),
    "dead_letters": lambda: feedmill.dead_letters().retry(every=True),
    "export": lambda: feedmill.export("out.jsonl"),
    "purge": lambda: feedmill.purge("1"),
}
for name, call in calls.items():
    call()
    check(name)

from typer.testing import CliRunner
from feedmill.cli.main import application
for words in (["status", "--json"], ["health"], ["url"], ["url", "--celery"],
              ["enqueue", "posts.jsonl"], ["dead", "list"], ["results"], ["deploy"]):
    CliRunner().invoke(application(), words)
    check(" ".join(words))
"""


@pytest.mark.parametrize("application", [["its own"], *long_cases([])])
def test_using_feedmill_never_changes_the_current_application(
    served: RedisServer, tmp_path: Path, application: list[str]
) -> None:
    (tmp_path / "posts.jsonl").write_text(
        '{"id": "2", "title": "How long do beans keep?"}\n'
    )
    environment = _environment(
        tmp_path,
        FEEDMILL_REDIS_URL=served.url,
        HOST_REDIS=host_url(served),
        FEEDMILL_DATA_FOLDER=str(tmp_path / "data"),
    )
    said = run(
        [sys.executable, "-P", "-c", USES_FEEDMILL, *application],
        tmp_path,
        environment | NEW_INTERPRETER,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == ""
