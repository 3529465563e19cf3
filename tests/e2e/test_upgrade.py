"""Today's code reads a Redis and files that the last commit of 0.1 wrote (tests/upgrade.py)."""

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult
from redis import Redis

from feedmill.producers.live.state import LiveState
from feedmill.shared.broker import queue_depth
from feedmill.testing.fake_reddit import Reddit
from tests.e2e.test_flower import Visitor
from tests.fakes import constants
from tests.fakes.jetstream import Jetstream
from tests.support import (
    ROOT,
    RedisServer,
    application,
    feedmill,
    last_json,
    long_cases,
    running,
    sent_marks,
    wait_until,
    working,
)
from tests.upgrade import LABELS, TTL_S, write_posts

SAVED = ROOT / "tests" / "upgrades" / "0.1"
#: Posts that waited or were held when 0.1 ended, and are due.
DUE = {
    *(f"wait{number}" for number in range(8)),
    *(f"urgent{number}" for number in range(10)),
    *(f"stock-{protocol}-{number}" for protocol in ("one", "two") for number in (0, 1)),
    *(f"{kind}-{protocol}" for kind in ("held",) for protocol in ("one", "two")),
    *(f"eta-{protocol}-soon" for protocol in ("one", "two")),
}
#: Posts whose messages wait until 2126.
DELAYED = {"eta-one-far", "eta-two-far"}
#: Posts with results of 0.1, without the purged one.
CLASSIFIED = {*(f"run{number}" for number in range(7)), "one0", "one1", "two0", "two1"}


class Upgraded:
    """A Redis and a folder as 0.1 left them, with today's commands."""

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        self.redis, self.folder = redis, folder
        self.kept = folder / "kept"
        shutil.copytree(SAVED, self.kept)
        for file in self.kept.rglob("*.json*"):
            text = file.read_text()
            file.write_text(text.replace("{folder}", str(folder)))
        restore(redis.url, json.loads((self.kept / "redis.json").read_text()))
        self.environment = {
            "FEEDMILL_REDIS_URL": redis.url,
            "FEEDMILL_RESULTS_TTL": str(TTL_S),
            "FEEDMILL_SENT_TTL": str(TTL_S),
        }

    def command(self, *arguments: str, status: int = 0, stdin: str = "") -> str:
        done = feedmill(*arguments, cwd=self.folder, stdin=stdin, **self.environment)
        assert done.returncode == status, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout

    def objects(self, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
        lines = self.command(*arguments, "--json", status=status).splitlines()
        return [json.loads(line) for line in lines]

    def result_ids(self) -> list[str]:
        return [each["id"] for each in self.objects("results", "--limit", "1000")]

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Run a worker on each queue. The second one's own model is not the deployed one."""
        own = {"FEEDMILL_INCLUDE": "tests.fakes.own_tasks"}
        tuned = str(self.kept / "tuned")
        taught = ("--queue", "feedmill-taught", "--model", tuned)
        with (
            working(self.redis, self.folder, "worker", **self.environment | own),
            working(self.redis, self.folder, "taught", *taught, **self.environment),
        ):
            yield


def restore(url: str, keys: list[dict[str, Any]]) -> None:
    """Write saved keys to a Redis."""
    redis: Any = Redis.from_url(url)
    for saved in keys:
        key, value = saved["key"], saved["value"]
        match saved["type"]:
            case "string":
                redis.set(key, unpacked(value))
            case "list":
                redis.rpush(key, *map(unpacked, value))
            case "zset":
                redis.zadd(key, {unpacked(member): score for member, score in value})
            case "hash":
                redis.hset(key, mapping=pairs(value))
            case "stream":
                for entry, fields in value:
                    redis.xadd(key, pairs(fields), id=entry)
        if saved["seconds"] > 0:
            redis.expire(key, saved["seconds"])
    redis.close()


def pairs(saved: list[list[str]]) -> dict[bytes, bytes]:
    return {unpacked(name): unpacked(value) for name, value in saved}


def unpacked(text: str) -> bytes:
    is_base64 = text.startswith("\0")
    return base64.b64decode(text[1:]) if is_base64 else text.encode()


@pytest.fixture
def upgraded(redis: RedisServer, tmp_path: Path) -> Upgraded:
    return Upgraded(redis, tmp_path)


# Redis.


def test_commands_show_what_is_stored(upgraded: Upgraded) -> None:
    assert set(upgraded.result_ids()) == CLASSIFIED
    (first,) = upgraded.objects("results", "run0")
    assert first["label"] == "sports"
    assert len(upgraded.objects("results", "--run", "first")) == 7
    letters = upgraded.objects("dead", "list")
    assert [letter["id"] for letter in letters] == [None, "refused0"]
    (status,) = upgraded.objects("status", status=0)
    runs = {run["run"]: run for run in status["runs"]}
    assert (runs["first"]["sent"], runs["first"]["stored"]) == (8, 8)
    assert (runs["second"]["sent"], runs["second"]["pending"]) == (8, 8)
    assert runs["first"]["columns"] == ["shelf"]
    assert status["dead_letters"] == 2
    assert status["unread"] == []
    (gap,) = upgraded.objects("ingest", "gaps")
    assert (gap["source"], gap["since"]) == ("bluesky", 1_700_000_000.0)
    shown = upgraded.command("deploy")
    assert str(upgraded.kept / "head") in shown
    answer: Any = AsyncResult("answered-one", app=application(upgraded.redis))
    assert [outcome["id"] for outcome in answer.get(timeout=120)] == ["one0", "one1"]
    upgraded.command("report", "report.html")


def test_workers_finish_what_waited_and_was_held(upgraded: Upgraded) -> None:
    """Messages of both protocols, of each priority, delayed ones, and a chord."""
    redis = upgraded.redis.client
    with upgraded.workers():
        wait_until(
            lambda: set(upgraded.result_ids()) >= DUE, "all posts are classified"
        )
        wait_until(lambda: redis.llen("feedmill-taught") == 0, "both queues are read")
        total: Any = AsyncResult("chorded", app=application(upgraded.redis))
        assert total.get(timeout=120) == [{"id": "5", "title": "number 5"}]
        answer: Any = AsyncResult("waits-one-", app=application(upgraded.redis))
        assert len(answer.get(timeout=120)) == 2
        wait_until(lambda: upgraded.objects("results", "taught1"), "taught")
        (taught,) = upgraded.objects("results", "taught1")
        assert taught["model"] == str(upgraded.kept / "head")
        (status,) = upgraded.objects("status")
        # Results of 0.1 answer the same posts; the eighth was purged.
        write_posts(upgraded.folder / "run.csv", "run")
        run = ("enqueue", "run.csv", "--run", "first", "--keep", "shelf", "--again")
        upgraded.command(*run, "--labels", LABELS)
        wait_until(
            lambda: redis.hget("feedmill:counters", "answered") == "7",
            "the results are found",
        )
    ids = upgraded.result_ids()
    assert len(ids) == len(set(ids))
    assert (status["queue"]["waiting"], status["queue"]["delayed"]) == (0, 2)
    runs = {run["run"]: run for run in status["runs"]}
    assert (runs["second"]["stored"], runs["second"]["pending"]) == (8, 0)
    assert len(upgraded.objects("dead", "list")) == 2
    # Records of sending: what 0.1 sent is not sent again.
    write_posts(upgraded.folder / "wait.csv", "wait")
    said = upgraded.command(
        "enqueue", "wait.csv", "--run", "second", "--labels", LABELS
    )
    assert said.startswith("0 posts sent")


def test_dead_letters_can_be_retried(upgraded: Upgraded) -> None:
    before = upgraded.redis.client.llen("feedmill-taught")
    assert upgraded.command("dead", "retry", "refused0").startswith("1 retried")
    assert upgraded.redis.client.llen("feedmill-taught") == before + 1
    left = upgraded.objects("dead", "list")
    assert [letter["id"] for letter in left] == [None]


def test_purges_find_posts_everywhere(upgraded: Upgraded) -> None:
    redis = upgraded.redis.client
    posts = ["run0", "wait3", "urgent5", "held-two", "eta-one-far", "stock-one-1"]
    upgraded.command("purge", *posts, "--yes")
    for post in posts:
        assert not sent_marks(redis, post)
    assert upgraded.command("results", "run0", "--json", status=1) == ""
    # A purged post keeps its place in a message, without its text.
    texts = b"".join(bodies(redis)).decode()
    assert "slow kiln" not in texts
    assert '"title":"A soup of lentils and smoked salt 3"' not in texts
    for post in ("urgent5", "eta-one-far", "stock-one-1"):
        assert json.dumps({"id": post}) in texts.replace('":"', '": "')
    # The tombstone of 0.1 still blocks its post.
    (upgraded.folder / "again.csv").write_text("id,title\nrun7,An oven\n")
    said = upgraded.command("enqueue", "again.csv", "--no-run")
    assert said.startswith("0 posts sent")
    upgraded.command("purge", "--run", "first", "--yes")
    assert upgraded.command("results", "run1", "--json", status=1) == ""


def bodies(redis: Any) -> Iterator[bytes]:
    """Yield the bodies of messages that wait or are held."""
    messages = [*redis.hvals("feedmill:reserved"), *redis.hvals("feedmill:delayed")]
    for key in redis.scan_iter("feedmill*", _type="list"):
        messages += redis.lrange(key, 0, -1)
    for message in messages:
        fields = json.loads(message)
        if "body" in fields:
            yield base64.b64decode(fields["body"])


# Files.


def test_exports_continue(upgraded: Upgraded) -> None:
    run = upgraded.kept / "run.csv"
    before = run.read_text()
    columns = "id,label,label_score,title,shelf"
    upgraded.command("export", "again.csv", "--run", "first", "--columns", columns)
    again = (upgraded.folder / "again.csv").read_text()
    assert set(again.splitlines()) <= set(before.splitlines())
    # A folder that 0.1 followed: no row comes twice.
    parts = upgraded.kept / "parts"
    with running(
        "export", str(parts), "--follow", "--part-seconds", "1", "--format", "jsonl",
        cwd=upgraded.folder, **upgraded.environment,
    ) as following, working(upgraded.redis, upgraded.folder, **upgraded.environment):  # fmt: skip
        wait_until(lambda: set(exported(parts)) >= DUE, "new results follow")
        following.end()
    ids = exported(parts)
    assert len(ids) == len(set(ids))
    upgraded.command("purge", "run1", "--yes")
    for file in ("kept/run.csv", "kept/results.jsonl", "kept/parts"):
        upgraded.command("export", file, "--purge")
    assert "run1," not in run.read_text()
    assert '"run1"' not in (upgraded.kept / "results.jsonl").read_text()
    assert "run1" not in exported(parts)


def exported(folder: Path) -> list[str]:
    return [
        json.loads(line)["id"]
        for file in folder.rglob("*.jsonl")
        for line in file.read_text().splitlines()
    ]


@pytest.mark.parametrize("name", ["head", *long_cases("tuned")])
def test_trained_models_classify(upgraded: Upgraded, name: str) -> None:
    command = ("classify", "Beans and soup", "--model", str(upgraded.kept / name))
    (outcome,) = upgraded.objects(*command, "--device", "cpu")
    assert outcome["label"] in LABELS.split(",")


def test_label_resumes(upgraded: Upgraded) -> None:
    said = upgraded.command(
        "label", "kept/trained.csv", "--labels", LABELS, "--out", "kept/labelled",
        "--base", str(upgraded.kept / "tuned"), "--device", "cpu", "--json",
        stdin="food\nq\n",
    )  # fmt: skip
    assert last_json(said)["labelled"] == 6


def test_flower_keeps_its_messages(upgraded: Upgraded) -> None:
    saved = json.loads((upgraded.kept / "flower.json").read_text())
    environment = upgraded.environment | {
        "FEEDMILL_FLOWER_PASSWORD": "sesame",
        "FEEDMILL_DATA_FOLDER": str(upgraded.kept),
    }
    with running("flower", "--port", "0", cwd=upgraded.folder, **environment) as flower:
        wait_until(lambda: flower.says("Flower at "), "Flower runs")
        url = flower.text().split("Flower at ")[1].split()[0]
        tasks = Visitor(url, "sesame").tasks()
        assert {task["uuid"] for task in tasks} == {
            task["uuid"] for task in saved["tasks"]
        }
    assert not list(upgraded.kept.glob("*.damaged"))


# Live sources.


def test_bluesky_resumes_at_the_position(upgraded: Upgraded) -> None:
    redis = upgraded.redis.client
    position = LiveState(redis, "bluesky").position()
    assert position is not None
    waiting = queue_depth(redis, "feedmill").waiting
    with Jetstream() as jetstream:
        environment = upgraded.environment | {"FEEDMILL_BLUESKY_URL": jetstream.url}
        with running("ingest", "bluesky", cwd=upgraded.folder, **environment) as daemon:
            wait_until(lambda: jetstream.queries, "the daemon is connected")
            assert int(jetstream.queries[0]["cursor"]) <= position.cursor
            jetstream.post("a second kettle", langs=["en"])
            wait_until(
                lambda: queue_depth(redis, "feedmill").waiting > waiting,
                "the post is sent",
            )
            wait_until(
                lambda: LiveState(redis, "bluesky").position() != position,
                "the position follows",
            )
            assert daemon.end() == 0, daemon.text()


def test_reddit_resumes_its_subreddits(upgraded: Upgraded) -> None:
    topics = upgraded.folder / "topics.toml"
    topics.write_text(
        'active = 2\n[topics]\n"food" = ["cooking", "nothere", "baking"]\n'
        '"sport" = ["tennis"]\n'
    )
    redis = upgraded.redis.client
    before = redis.hgetall("feedmill:reddit:track:tennis")
    with Reddit(client=("id", "secret")) as reddit:
        for name in ("cooking", "baking", "tennis"):
            reddit.add_subreddit(name)
            for number in range(3):  # as 0.1 read them, with the same ids
                reddit.publish(name, title=f"{name} {number}", score=number)
        post = reddit.publish("tennis", title="a match after the upgrade")
        assert not sent_marks(redis, post)
        environment = upgraded.environment | {
            constants.VARIABLE: json.dumps(constants.reddit(reddit.url)),
            "FEEDMILL_REDDIT_CLIENT_ID": "id",
            "FEEDMILL_REDDIT_CLIENT_SECRET": "secret",
            "FEEDMILL_REDDIT_USER_AGENT": "linux:test:1 (by /u/nobody)",
            "FEEDMILL_REDDIT_TOPICS": str(topics),
            "FEEDMILL_REDDIT_POLL_INTERVAL": "0.2",
            "XDG_CONFIG_HOME": str(upgraded.folder),
        }
        with running("ingest", "reddit", cwd=upgraded.folder, **environment) as daemon:
            wait_until(lambda: daemon.lives() and sent_marks(redis, post), "it is sent")
            assert daemon.end() == 0, daemon.text()
    after = redis.hgetall("feedmill:reddit:track:tennis")
    assert after["beginning"] == before["beginning"]
