"""Another application with only `celery[redis]` in its virtual environment, against a real
worker.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from feedmill.shared.broker import connect, make_app, publish
from feedmill.shared.messages import MESSAGE_VERSION, ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.stack.processes import Child
from tests.generated import SCHEMAS as FOLDER
from tests.support import (
    POSTS,
    ROOT,
    RedisServer,
    body_of,
    distributions_of,
    make_posts,
    run,
    wait_until,
)

REQUEST, RESULT = (
    Draft202012Validator(json.loads((FOLDER / name).read_text()))
    for name in ("request.json", "result.json")
)
NEXT = MESSAGE_VERSION + 1
OF_TOMORROW = f"version: .*{NEXT}.*{MESSAGE_VERSION}"
NO_TEXT = "title or body must contain text"

CLIENT = """
import json, os, sys
from celery import Celery, chain, chord, group

URL = os.environ["FEEDMILL_REDIS_URL"]
app = Celery("elsewhere", broker=URL, backend=URL)
GIVEN = POSTS = json.load(sys.stdin)

def send(*args, **options):
    return app.send_task("feedmill.classify", *args, queue="feedmill", **options)

def say(found):
    print(json.dumps(found))

"""


class Elsewhere:
    """Another application's environment, connected to this Redis."""

    def __init__(self, python: Path, redis: RedisServer, folder: Path) -> None:
        self.python = python
        self.folder = folder
        ours = ("FEEDMILL_", "PYTHON")
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ours)
        }
        self.environment |= {
            "FEEDMILL_REDIS_URL": redis.url,
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *arguments: str, given: object = None) -> str:
        """Run Python in the application's environment; return its output.

        `given` is JSON on its standard input.
        """
        said = run(
            [str(self.python), *arguments],
            self.folder,
            self.environment,
            json.dumps(given),
        )
        assert said.returncode == 0, said.stderr
        return said.stdout

    def ask(self, code: str, given: object = POSTS) -> Any:
        """Run the code after CLIENT; return what it passes to `say`.

        `given` is available as `GIVEN` and `POSTS`.
        """
        return json.loads(self.run("-c", CLIENT + code, given=given))


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment with `celery[redis]` and what it requires, as they are
    installed here.
    """
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for installed in map(distribution, distributions_of(["celery[redis]"])):
        for top in {file.parts[0] for file in installed.files or ()} - {
            "..",
            "__pycache__",
        }:
            (packages / top).symlink_to(str(installed.locate_file(top)))
    return folder / "bin" / "python"


@pytest.fixture
def elsewhere(python: Path, served: RedisServer, tmp_path: Path) -> Elsewhere:
    return Elsewhere(python, served, tmp_path)


def test_environment_contains_nothing_of_feedmill(elsewhere: Elsewhere) -> None:
    code = (
        "import importlib.util; say([importlib.util.find_spec(name) for name in GIVEN])"
    )
    assert elsewhere.ask(code, given=["feedmill", "pydantic", "torch"]) == [None] * 3


def test_returns_one_outcome_per_post(elsewhere: Elsewhere) -> None:
    found = elsewhere.ask(
        "say(send(kwargs={'posts': POSTS}).get(timeout=120))",
        given=[POSTS[0], {"id": "x"}, POSTS[1]],
    )
    assert [outcome.get("label") for outcome in found] == ["sports", None, "food"]
    assert found[1] == {"id": "x", "error": NO_TEXT}
    RESULT.validate(found)


def test_classifies_with_custom_labels(elsewhere: Elsewhere) -> None:
    options = {
        "labels": {"tea": "tea", "ball": ["football", "a match"]},
        "template": "On {}.",
        "multi_label": True,
    }
    found = elsewhere.ask(f"say(send((POSTS,), {options!r}).get(timeout=120))")
    assert [list(outcome["scores"]) for outcome in found] == [
        ["ball", "tea"],
        ["tea", "ball"],
    ]
    by_position = elsewhere.ask(
        "say(send((POSTS, 'tea, ball, car', None, False, False, '2')).get(timeout=120))"
    )
    assert [len(outcome["scores"]) for outcome in by_position] == [2, 2]
    RESULT.validate(found)
    RESULT.validate(by_position)


FAILING: list[tuple[list[Any], dict[str, Any], str, str]] = [
    (
        [POSTS[:1] * 1001],
        {},
        "RequestRefused",
        "posts: 1001 in one message; at most 1000",
    ),
    ([POSTS], {"version": NEXT, "of_tomorrow": 1}, "RequestRefused", OF_TOMORROW),
    (
        [POSTS],
        {"posts": POSTS},
        "TypeError",
        r"classify_task\(\) got multiple values for argument 'posts'",
    ),
    (
        [[*POSTS, 5]],
        {"strict": True},
        "MessageFailed",
        ("1 of 3 posts failed: None: a post must be a JSON object"),
    ),
]


def test_errors_are_returned_and_raised_by_class_name(elsewhere: Elsewhere) -> None:
    """The error is both returned and raised, as an exception with this class name."""
    code = """
told = []
for sent in [send(args, kwargs) for args, kwargs, *_ in GIVEN]:
    found = sent.get(timeout=120, propagate=False)
    try:
        sent.get(timeout=120)
    except Exception as error:
        told.append([[type(each).__name__, str(each)] for each in (found, error)])
say(told)
"""
    for (*_, name, words), (returned, raised) in zip(
        FAILING, elsewhere.ask(code, given=FAILING), strict=True
    ):
        assert returned == raised
        assert raised[0] == name
        assert re.match(words, raised[1])


# Its own tasks on its own worker: docs/examples/own_tasks.py.


@pytest.fixture(scope="module")
def own_worker(
    python: Path, served: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Elsewhere]:
    """The other application's worker, on its own queue."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_tasks.py").write_text(
        (ROOT / "docs" / "examples" / "own_tasks.py").read_text()
    )
    there = Elsewhere(python, served, folder)
    command = [
        str(python),
        "-m",
        "celery",
        "-A",
        "own_tasks",
        "worker",
        "--pool",
        "solo",
        "--loglevel",
        "info",
    ]
    worker = Child("own", command, folder, there.environment)
    try:
        wait_until(
            lambda: " ready." in (folder / "own.log").read_text(),
            "the other application's worker is ready",
        )
        yield there
    finally:
        worker.stop(20)


def test_own_tasks_example_runs(own_worker: Elsewhere) -> None:
    assert own_worker.run("own_tasks.py").splitlines() == [
        "group: [2, 1]",
        "chain: {'b1': 'sports', 'b2': 'sports'}",
        "chord: {'sports': 2, 'food': 1}",
    ]


def test_producers_messages_match_the_schema(settings: Settings) -> None:
    """Check real messages in Redis against the schema."""
    options = ClassifyOptions.parse(
        {
            "labels": {"tea": ["tea", "a cup"]},
            "template": "On {}.",
            "strict": True,
            "top_k": 3,
        }
    )
    publish(make_app(settings), [make_posts(40), make_posts(1)], options)
    publish(make_app(settings), [make_posts(2)], ClassifyOptions())
    messages: Any = connect(settings).lrange("feedmill", 0, -1)
    assert len(messages) == 3
    for message in messages:
        args, kwargs, _ = body_of(message)
        assert args == []
        assert kwargs["version"] == MESSAGE_VERSION
        REQUEST.validate(kwargs)
