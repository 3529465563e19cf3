"""The task without a queue (called directly, `apply`, `task_always_eager`), and sent from another
application.

The calls run in a separate process, like an application's, and without Redis where none is needed.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import (
    NEW_INTERPRETER,
    RedisServer,
    _environment,
    free_port,
    run,
    working,
)

#: Code of the application's process. It runs one program per line of input, and prints the
#: program's variable `said` or its exception.
CALLER = """
import json, sys
names = {}
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        answer = [None, names.pop("said", None)]
    except Exception as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
"""
START = """
import os, threading, feedmill
from celery import Celery, chain, chord, group
POSTS = [{"id": "1", "title": "The keeper saved two penalties in the final"},
         {"id": "2", "title": "How long do dried beans keep?"}]
def labels(outcomes):
    return [outcome.get("label") or outcome["error"] for outcome in outcomes]
"""
APPLICATION = """
app = Celery("mine", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.task_default_queue = "of-mine"
"""
NO_TEXT = "title or body must contain text"


class Caller:
    """A Python process of another application that runs the programs it is given."""

    def __init__(self, folder: Path, **environment: str) -> None:
        nowhere = f"redis://127.0.0.1:{free_port()}/0"
        ours = {
            "FEEDMILL_DATA_FOLDER": str(folder / "no-stack"),
            "FEEDMILL_REDIS_URL": nowhere,
            "BROKER": nowhere,
        }
        self.errors = folder / "caller.log"
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "error::UserWarning", "-c", CALLER],
                cwd=folder,
                env=_environment(folder, **ours | environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.run(START)

    def _ask(self, program: str) -> tuple[str | None, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(program) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.errors.read_text()
        raised, said = json.loads(answer)
        return raised, said

    def run(self, program: str) -> Any:
        """Run the program and return its variable `said`."""
        raised, said = self._ask(program)
        assert raised is None, f"{raised}: {said}\n{self.errors.read_text()}"
        return said

    def say(self, expression: str) -> Any:
        return self.run(f"said = {expression}")

    def fail(self, program: str) -> str:
        """Run the program and return the class and message of its exception."""
        raised, said = self._ask(program)
        assert raised, said
        return f"{raised}: {said}"

    def end(self) -> None:
        """Close standard input; the process must exit by itself despite its threads."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            assert self._process.wait(120) == 0, self.errors.read_text()
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@contextmanager
def calling(folder: Path, **environment: str) -> Iterator[Caller]:
    caller = Caller(folder, **environment)
    try:
        yield caller
    finally:
        caller.end()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A process without Redis, with the embedded model and an eager application."""
    with calling(tmp_path_factory.mktemp("here")) as caller:
        caller.run("before = labels(feedmill.classify_task(posts=POSTS))")
        caller.run(f"{APPLICATION}\napp.conf.task_always_eager = True")
        caller.run('@app.task(name="mine.count")\ndef count(found): return len(found)')
        yield caller


#: Packages that take seconds to import, and that the embedded model does not need.
HEAVY = "huggingface_hub scipy sklearn sympy torch._dynamo transformers"


#: Programs that run one after the other in one interpreter, with what none of them up to there
#: may have imported: a new interpreter for each would take seconds.
PROGRAMS: dict[str, list[tuple[str, str]]] = {
    "commands": [
        ("", "celery pydantic redis torch"),
        (
            "import feedmill.cli.main; feedmill.cli.main.application('--help')",
            "celery pydantic redis rich torch",
        ),
        ("import feedmill.cli.offline, feedmill.cli.running", "celery torch"),
    ],
    "functions": [
        (
            "feedmill.results, feedmill.dead_letters, feedmill.purge",
            "pandas pyarrow torch",
        ),
        ("feedmill.export, feedmill.train, feedmill.evaluate", "pandas pyarrow torch"),
        ("feedmill.classify_task", "torch"),
    ],
    "models": [
        ("feedmill.classify(['rain'])", f"celery kombu pandas {HEAVY}"),
        (
            "import feedmill.workers.run; feedmill.classify(['rain'])",
            f"flower jinja2 pandas {HEAVY}",
        ),
    ],
}


@pytest.mark.parametrize("programs", PROGRAMS.values(), ids=PROGRAMS)
def test_imports_only_what_is_needed(
    tmp_path: Path, programs: list[tuple[str, str]]
) -> None:
    lines = ["import sys, feedmill"]
    for program, absent in programs:
        lines.append(program)
        lines.append(f"print({set(absent.split())} & set(sys.modules))")
    environment = _environment(tmp_path) | NEW_INTERPRETER
    command = [sys.executable, "-P", "-c", "\n".join(lines)]
    said = run(command, tmp_path, environment)
    assert said.stdout == "set()\n" * len(programs), said.stderr


def test_direct_call_returns_outcomes(here: Caller) -> None:
    assert here.say("labels(feedmill.classify_task(posts=POSTS))") == ["sports", "food"]
    assert here.say("labels(feedmill.classify_task([POSTS[0], {'id': 'x'}, 5]))") == [
        "sports", NO_TEXT, "a post must be a JSON object"
    ]  # fmt: skip
    assert here.say(
        "labels(feedmill.classify_task(POSTS, 'tea, football', top_k=1))"
    ) == [
        "football",
        "tea",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("posts=[{'id': 'x'}]", f"MessageFailed: 1 of 1 posts failed: x: {NO_TEXT}"),
        (
            "posts=[*POSTS, {'id': 'x'}], strict=True",
            (f"MessageFailed: 1 of 3 posts failed: x: {NO_TEXT}"),
        ),
        ("", "RequestRefused: posts: expected a list of at least one post"),
        ("posts=POSTS, lables='a'", "RequestRefused: lables: unknown argument"),
        (
            "POSTS, None, None, 0, 0, None, None, 1",
            "RequestRefused: argument 8: unknown argument",
        ),
        ("posts=POSTS, labels=''", "RequestRefused: labels: name at least one label"),
    ],
)
def test_invalid_calls_raise_however_the_task_is_called(
    here: Caller, arguments: str, words: str
) -> None:
    """The exception is the same however the task is called, and the next call works."""
    assert here.fail(f"feedmill.classify_task({arguments})").startswith(words)
    assert here.fail(f"feedmill.classify_task.s({arguments}).apply().get()").startswith(
        words
    )
    assert here.fail(f"feedmill.classify_task.delay({arguments}).get()").startswith(
        words
    )
    assert here.say("labels(feedmill.classify_task(POSTS[1:]))") == ["food"]


def test_threads_share_one_model(here: Caller) -> None:
    here.run("""
found, loaded = {}, feedmill.classify_task(posts=POSTS[:1])
def ask(number):
    titles = [POSTS[(number + at) % 2]["title"] for at in range(7)]
    posts = [{"id": f"{number}-{at}", "title": title} for at, title in enumerate(titles)]
    for turn in range(5):
        outcomes = feedmill.classify_task(posts=posts, top_k=number + 1)
        found[number, turn] = [[one["id"], one["label"], len(one["scores"])] for one in outcomes]
threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")
    found = here.say("[[*key, value] for key, value in found.items()]")
    assert len(found) == 40
    for number, _, outcomes in found:
        assert outcomes == [
            [f"{number}-{at}", ["sports", "food"][(number + at) % 2], number + 1]
            for at in range(7)
        ]
    assert here.say(
        "sorted({thread.name for thread in threading.enumerate() if 'writer' in thread.name})"
    ) == ["writer"]


# With a queue.


def test_sends_from_another_application(redis: RedisServer, tmp_path: Path) -> None:
    """Messages go to FEEDMILL_QUEUE, not to the application's default queue, unless `queue` is
    given.
    """
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text(
        "raise ModuleNotFoundError('No module named torch', name='torch')"
    )
    settings = {"FEEDMILL_QUEUE": "labelled", "FEEDMILL_REDIS_URL": redis.url}
    with calling(
        tmp_path, BROKER=redis.url, PYTHONPATH=str(tmp_path / "hidden"), **settings
    ) as caller:
        caller.run(APPLICATION)
        for call in (
            "feedmill.classify_task(posts=POSTS)",
            "feedmill.classify_task.apply(kwargs={'posts': POSTS}).get()",
        ):
            assert re.match(
                r"UserError: .*torch.*feedmill\[worker\].*feedmill\.classify_task\.delay",
                caller.fail(call),
            )
        caller.run("feedmill.classify_task.apply_async((POSTS,), queue='aside')")
        caller.run("app.send_task('feedmill.classify', (POSTS,))")
        caller.run("sent = feedmill.classify_task.delay(posts=POSTS)")
        assert [
            redis.client.llen(queue)
            for queue in ("labelled", "aside", "of-mine", "feedmill")
        ] == [2, 1, 0, 0]
        with working(redis, tmp_path, FEEDMILL_QUEUE="labelled"):
            assert caller.say(
                "[outcome['id'] for outcome in sent.get(timeout=120)]"
            ) == ["1", "2"]
            assert (
                caller.say(
                    "len(group(feedmill.classify_task.s(POSTS) for _ in "
                    "range(3))().get(timeout=120))"
                )
                == 3
            )
