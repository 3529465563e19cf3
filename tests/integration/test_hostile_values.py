"""Values that producers and readers may write never make a function loop, or fail for good or
half-way.

By docker/users.conf, a producer may write feedmill:sent-marks, its generations, feedmill:run:* and
feedmill:runs, and a reader groups of feedmill:results. Whatever stands there, with messages
waiting and dead letters there: posts are sent, stored, purged and retried, other users' commands
work, and nothing is lost.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from feedmill.cli.main import application
from feedmill.producers import push
from feedmill.producers.push import SENT, Mark, Pusher
from feedmill.shared import logs, runs
from feedmill.shared.broker import make_app, queue_depth
from feedmill.shared.keys import DEAD_LETTERS, MARKS, RESULTS_STREAM, RUN, RUNS
from feedmill.shared.messages import ClassifyOptions, DeadLetter, Post, digest
from feedmill.shared.purge import forget
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.runs import Progress
from feedmill.shared.settings import Settings
from tests.integration.test_results import result
from tests.support import RedisServer, dead_letters, make_classification

# Tests with `server` run on each redis-server, whose scripts read these values; the test of all
# commands runs on one.

NUMBERS = (
    "inf",
    "-inf",
    "nan",
    "1e999",
    "-1",
    "0",
    "1.5",
    "17",
    "0x20",
    "9" * 400,
    "99999999999",
    "",
    "text",
    "\x00",
)
BUCKETS = (b"", b"x", b"x" * 13, b"\xff" * 12 * 40 + b"x", b"\x00" * 100_000)
MARKED = [Mark.of(f"t3_{number}", digest(str(number)), "r") for number in range(200)]


@pytest.fixture
def client(server: RedisServer) -> Redis:
    """A client that gives up on a function that loops, before Redis kills the test."""
    return Redis.from_url(server.url, decode_responses=True, socket_timeout=20)


def use_everything(client: Redis) -> None:
    """Send, store, count, bound and forget posts."""
    settings = Settings()
    store = ResultsStore(client, settings)
    push.mark_sent(client, MARKED, 86_400, 10**9, "r")
    assert push.lookup(client, MARKED) == [SENT] * len(MARKED)
    assert push.known_ids(client, [mark.post_id for mark in MARKED]) == {
        mark.post_id for mark in MARKED
    }
    post, classification = result("t3_1")
    stored = Result(
        post.model_copy(update={"run": "r"}),
        classification.model_copy(update={"fingerprint": digest("r")}),
    )
    assert store.write([stored]) == 1
    assert store.get("t3_1")
    found = runs.progress(client, "r")
    assert isinstance(found, Progress)
    assert "r" in [progress.run for progress in runs.recent(client, 10)]
    assert forget(client, ["t3_0"]) == (1, 0)
    low = settings.model_copy(update={"results_memory": 8000})
    ResultsStore(client, low).write([result("another")])


@pytest.mark.parametrize("number", NUMBERS)
def test_any_table(server: RedisServer, client: Redis, number: str) -> None:
    server.client.set(MARKS, number)
    use_everything(client)


@pytest.mark.parametrize("ends", ["inf", "-inf", "0", "1e300", "now"])
def test_any_generations(server: RedisServer, client: Redis, ends: str) -> None:
    seconds, _ = server.client.time()
    score = float(seconds + 1.05 * 86_400 if ends == "now" else ends)
    names = [*NUMBERS, *(f"\xff{number}" for number in range(1000))]
    server.client.zadd(MARKS, dict.fromkeys(names, score))
    for number, name in enumerate(names[:20]):
        if number % 2:
            server.client.set(f"{MARKS}:{name}", "x")
        else:
            server.client.rpush(f"{MARKS}:{name}", "x")
    use_everything(client)


@pytest.mark.parametrize("records", BUCKETS)
def test_any_records_in_buckets(
    server: RedisServer, client: Redis, records: bytes
) -> None:
    push.mark_sent(client, MARKED[:1], 86_400, 10**9)
    (key,) = server.client.scan_iter(f"{MARKS}:*")
    for mark in MARKED:
        server.client.hset(key, mark.content[:2], records)
    use_everything(client)


@pytest.mark.parametrize("number", NUMBERS)
def test_any_fields_of_a_run(server: RedisServer, client: Redis, number: str) -> None:
    names = ("sent", "stored", "failed", "began", "latest", "used", "columns")
    server.client.hset(RUN + "r", mapping=dict.fromkeys(names, number))
    server.client.zadd(RUNS, {"r": float("inf"), "another": float("-inf")})
    use_everything(client)


# Every command, with messages waiting and dead letters there.

#: Posts of the run that wait, that have results, and that are dead letters; and waiting posts of
#: no run.
WAITING, STORED, FAILED, OTHERS = (
    [f"{kind}-{number}" for number in range(12)]
    for kind in ("waiting", "stored", "failed", "other")
)
RUN_NAME = "r"
PER_MESSAGE = 4


class Scene:
    """A Redis with posts in each state, and the commands of users."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.redis = server.client
        self.raw: Any = Redis.from_url(server.url)
        self.url = server.url
        self.folder = folder
        self.settings = Settings(redis_url=server.url, posts_per_message=PER_MESSAGE)
        self.store = ResultsStore(server.client, self.settings)
        self.redis.flushall()
        self.push([*STORED, *FAILED], RUN_NAME)
        self.redis.delete("feedmill")
        results = [
            Result(
                post(name, RUN_NAME),
                make_classification(name, classified_at=time.time()),
            )
            for name in STORED
        ]
        self.store.write(results, [letter(name) for name in FAILED])
        self.push(WAITING, RUN_NAME)
        self.push(OTHERS, None)

    def push(self, names: list[str], run: str | None) -> int:
        pusher = Pusher(
            make_app(self.settings),
            self.redis,
            self.settings,
            ClassifyOptions(),
            run=run,
        )
        pusher.push([post(name, None) for name in names])
        return pusher.sent

    def waiting(self) -> int:
        return queue_depth(self.redis, "feedmill").waiting

    def run(self, *arguments: str, status: int = 0) -> str:
        """Run a command in this process. Return its output."""
        done = CliRunner().invoke(
            application(), arguments, env={"FEEDMILL_REDIS_URL": self.url}
        )
        assert done.exit_code == status, (arguments, done.exception, done.output)
        return done.stdout


def post(name: str, run: str | None) -> Post:
    return Post(id=name, title=f"About {name}", run=run)


def letter(name: str) -> DeadLetter:
    text = post(name, RUN_NAME).model_dump_json(exclude_defaults=True)
    return DeadLetter(
        id=name,
        reason="no",
        post=text,
        options="{}",
        message="m",
        worker="w",
        failed_at=1.0,
        run=RUN_NAME,
    )


def purge_run(scene: Scene) -> None:
    found = json.loads(scene.run("purge", "--run", RUN_NAME, "--yes", "--json"))
    assert (found["results"], found["dead_letters"], found["waiting"]) == (12, 12, 12)
    assert scene.waiting() == 12 / PER_MESSAGE
    assert scene.push([*WAITING, *STORED, *FAILED], RUN_NAME) == 36


def purge_queue(scene: Scene) -> None:
    found = json.loads(scene.run("purge", "--queue", "feedmill", "--yes", "--json"))
    assert (found["messages"], found["posts"], scene.waiting()) == (
        24 / PER_MESSAGE,
        24,
        0,
    )
    assert scene.push(WAITING, RUN_NAME) == 12
    assert scene.push(OTHERS, None) == 12


def purge_ids(scene: Scene) -> None:
    found = json.loads(
        scene.run("purge", "waiting-0", "stored-0", "failed-0", "--yes", "--json")
    )
    assert (
        found["results"],
        found["entries"],
        found["dead_letters"],
        found["messages"],
    ) == (
        1,
        1,
        1,
        1,
    )
    assert scene.push(WAITING, RUN_NAME) <= 11
    assert len(dead_letters(scene.store, 99)) == 11
    scene.run("purge", "--lift", "waiting-0")


def retry(scene: Scene) -> None:
    assert scene.run("dead", "retry", "--all").startswith("12 ")
    assert dead_letters(scene.store, 99) == []
    assert scene.waiting() == 24 / PER_MESSAGE + 12


def drop(scene: Scene) -> None:
    assert scene.run("dead", "drop", "--all", "--yes").startswith("12 ")
    assert scene.waiting() == 24 / PER_MESSAGE


def show(scene: Scene) -> None:
    assert scene.run("dead", "list", "--run", RUN_NAME, "--json").count("\n") == 12
    assert scene.run("results", "--run", RUN_NAME, "--json").count("\n") >= 10
    scene.run("results", "stored-0", "--json")
    scene.run("report", str(scene.folder / "report.html"), "--run", RUN_NAME)
    found = runs.progress(scene.redis, RUN_NAME)
    assert found is None or found.to_dict()
    for progress in runs.recent(scene.redis, 5):
        assert json.dumps(progress.to_dict())


def export(scene: Scene) -> None:
    out = scene.folder / "results.csv"
    out.unlink(missing_ok=True)
    scene.run("export", str(out), "--run", RUN_NAME)
    assert len(out.read_text().splitlines()) == 1 + 12


def enqueue(scene: Scene) -> None:
    file = scene.folder / "posts.jsonl"
    posts = [
        {"id": f"new-{number}", "title": "A title", "mine": number}
        for number in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, posts)))
    said = scene.run("enqueue", str(file), "--run", RUN_NAME, "--keep", "mine")
    assert said.startswith("12 posts sent")
    assert "mine" in (runs.progress(scene.redis, RUN_NAME) or Progress("")).columns
    assert scene.run("enqueue", str(file), "--run", RUN_NAME).startswith("0 posts sent")


def work(scene: Scene) -> None:
    results = [
        Result(post(name, RUN_NAME), make_classification(name)) for name in WAITING
    ]
    letters = [letter(name) for name in OTHERS]
    for new in (12, 0):
        assert scene.store.write(results, letters) == new
    assert scene.redis.xlen(RESULTS_STREAM) == scene.redis.xlen(DEAD_LETTERS) == 24
    before = runs.progress(scene.redis, RUN_NAME)
    scene.store.write(
        [Result(post("one more", RUN_NAME), make_classification("one more"))]
    )
    after = runs.progress(scene.redis, RUN_NAME)
    assert before
    assert after
    assert (after.stored, after.failed) == (before.stored + 1, before.failed)
    assert runs.recent(scene.redis, 5)[0].run == RUN_NAME
    scene.store.keep(results)
    scene.store.catch_up()


ACTIONS: tuple[Callable[[Scene], None], ...] = (
    purge_run,
    purge_queue,
    purge_ids,
    retry,
    drop,
    show,
    export,
    enqueue,
    work,
)
VALUES: tuple[bytes, ...] = (
    b"inf",
    b"nan",
    b"1.5",
    b"-1",
    b"9" * 400,
    b"\xff\xfe",
    b"[" * 2000,
    b'["\xff", 7, {"a": []}, "' + b"x" * 100_000 + b'"]',
    b"[" + b"{}," * 100_000 + b"{}]",
)
FIELDS = ("sent", "stored", "failed", "began", "latest", "used", "columns")
Plant = Callable[[Any], object]


def _fields(value: bytes, *names: str) -> Plant:
    return lambda raw: raw.hset(
        RUN + RUN_NAME, mapping=dict.fromkeys(names or FIELDS, value)
    )


def _of_another_type(key: str, kind: str) -> Plant:
    commands: dict[str, tuple[Any, ...]] = {
        "string": ("SET", key, "x"),
        "list": ("RPUSH", key, "x"),
        "set": ("SADD", key, "x"),
        "zset": ("ZADD", key, 1, "x"),
        "hash": ("HSET", key, "x", "y"),
        "stream": ("XADD", key, "*", "x", "y"),
    }

    def plant(raw: Any) -> None:
        raw.delete(key)
        raw.execute_command(*commands[kind])

    return plant


def _ghosts(raw: Any, score: float, runs_of_their_own: bool) -> None:
    names = [b"ghost %d" % number for number in range(1500)]
    raw.zadd(
        RUNS, dict.fromkeys([*names, b"\xff\xfe", b"", b"a\nb", b"x" * 100_000], score)
    )
    if runs_of_their_own:
        pipe = raw.pipeline()
        for name in names:
            pipe.hset(RUN.encode() + name, "sent", "1")
        pipe.execute()


def _groups(raw: Any) -> None:
    for name in (b"\xff\xfe", b"", b"\x1b[31m", b"x" * 100_000):
        raw.execute_command(
            "XGROUP",
            "CREATE",
            RESULTS_STREAM,
            name,
            "$",
            "MKSTREAM",
            "ENTRIESREAD",
            9 * 10**18,
        )
        raw.execute_command(
            "XREADGROUP",
            "GROUP",
            name,
            name,
            "COUNT",
            1,
            "STREAMS",
            RESULTS_STREAM,
            ">",
        )


def _generations(raw: Any, score: str) -> None:
    """Hide the real generations among others, with keys of other types."""
    for number in range(200):
        raw.execute_command("ZADD", MARKS, score, f"ghost {number}")
    raw.set(f"{MARKS}:ghost 0", "x")
    raw.execute_command("ZADD", MARKS, score, b"\xff\xfe")


PLANTS: dict[str, Plant] = {
    **{f"fields {value[:20]!r}": _fields(value) for value in VALUES},
    **{
        f"{field} 1.5": _fields(b"1.5", field) for field in ("sent", "failed", "latest")
    },
    **{
        f"run is a {kind}": _of_another_type(RUN + RUN_NAME, kind)
        for kind in ("string", "list")
    },
    **{
        f"runs are a {kind}": _of_another_type(RUNS, kind)
        for kind in ("string", "hash")
    },
    **{
        f"marks are a {kind}": _of_another_type(MARKS, kind)
        for kind in ("string", "hash")
    },
    "ghosts of the future": lambda raw: _ghosts(raw, 9e15, runs_of_their_own=False),
    "ghosts for ever": lambda raw: _ghosts(raw, float("inf"), runs_of_their_own=False),
    "ghosts that were never": lambda raw: _ghosts(
        raw, float("-inf"), runs_of_their_own=False
    ),
    "runs of the future": lambda raw: _ghosts(raw, 9e15, runs_of_their_own=True),
    "generations of the future": lambda raw: _generations(raw, "inf"),
    "generations that were never": lambda raw: _generations(raw, "-inf"),
    "groups": _groups,
}


#: Beginnings of the names of plants that differ from another one in the value or the type alone.
#: `make long` has them.
ALIKE = (
    "fields b'nan'", "fields b'-1'", "fields b'9", "fields b'[[", "fields b'[{}",
    "sent", "failed", "latest", "ghosts that were never", "run is a string",
    "runs are a hash", "marks are a hash", "ghosts for ever", "generations that were never",
)  # fmt: skip


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(
            plant, id=name, marks=[pytest.mark.long] if name.startswith(ALIKE) else []
        )
        for name, plant in PLANTS.items()
    ],
)
def test_every_command_survives_what_producers_and_readers_may_write(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    for action in ACTIONS:
        scene = Scene(redis, tmp_path)
        plant(scene.raw)
        action(scene)


def test_marks_that_were_hidden_do_not_appear_again(
    server: RedisServer, tmp_path: Path
) -> None:
    """Else posts whose messages were purged meanwhile would count as sent, and be lost."""
    scene = Scene(server, tmp_path)
    names = [f"more-{number}" for number in range(600)]
    assert scene.push(names, None) == 600
    _generations(scene.raw, "inf")
    scene.run("purge", "--queue", "feedmill", "--yes")
    assert scene.push(names, None) == 600
