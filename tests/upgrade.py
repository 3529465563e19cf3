"""Make the data of tests/e2e/test_upgrade.py with the code of an earlier commit.

Run it in a checkout of that commit, with its environment:

    cd OLD && PYTHONPATH=. .venv/bin/python NEW/tests/upgrade.py NEW/tests/upgrades/VERSION

Real processes of that commit write everything to a Redis and a folder: a worker that is killed
while it holds messages, producers, daemons against loopback servers, exports, trainings, Flower.
`redis.json` has the keys, as commands that every Redis accepts; the files lie beside it. Paths
below the folder of this run are written as {folder}. All texts are made.
"""

import base64
import csv
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from celery import Celery, chord
from celery.result import AsyncResult
from redis import Redis

from tests.fakes import models
from tests.fakes.jetstream import Jetstream
from tests.support import (
    RedisServer,
    application,
    feedmill,
    find,
    redis_servers,
    running,
    wait_until,
    working,
)

#: Ten years: what is stored must not expire before the test reads it.
TTL_S = 315_360_000
LABELS = "food,sports"
TEXTS = (
    "The keeper saved two penalties in the final",
    "How long do dried beans keep?",
    "The team lost every away match this season",
    "A soup of lentils and smoked salt",
    "Who won the race over ten kilometres?",
    "My bread does not rise in a cold kitchen",
    "The coach changed three players at half time",
    "Which oven is good for a small bakery?",
)
#: A message of 2126: it waits for as long as anyone runs this.
FAR_ETA = datetime(2126, 1, 1, tzinfo=UTC)
SOON_S = 120.0
TASK = "feedmill.classify"


def main(out: str) -> None:
    # A collected AsyncResult would look for its Redis, which has ended.
    del AsyncResult.__del__
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        server = RedisServer(next(iter(redis_servers().values())), folder)
        try:
            Maker(server, folder).make()
            keys = list(saved_keys(server.url, str(folder)))
        finally:
            server.stop()
        files = Path(out)
        shutil.copytree(folder / "kept", files)
        for ending in ("json", "jsonl", "md"):
            for file in files.rglob(f"*.{ending}"):
                file.write_text(file.read_text().replace(str(folder), "{folder}"))
        lines = [json.dumps(key, ensure_ascii=False) for key in keys]
        (files / "redis.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def make_posts(prefix: str, count: int = 8) -> list[dict[str, Any]]:
    return [
        {"id": f"{prefix}{number}", "title": f"{TEXTS[number % len(TEXTS)]} {number}"}
        for number in range(count)
    ]


def write_posts(path: Path, prefix: str, count: int = 8) -> None:
    """Write a CSV file of posts with topics and a column of their own."""
    topics = LABELS.split(",")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "title", "topic", "shelf"])
        writer.writeheader()
        for number, post in enumerate(make_posts(prefix, count)):
            topic = topics[(number + 1) % len(topics)]
            writer.writerow({**post, "topic": topic, "shelf": f"shelf {number}"})


class Maker:
    """An installation of the earlier commit."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server, self.folder, self.kept = server, folder, folder / "kept"
        self.kept.mkdir()
        self.environment = {
            "FEEDMILL_REDIS_URL": server.url,
            "FEEDMILL_RESULTS_TTL": str(TTL_S),
            "FEEDMILL_SENT_TTL": str(TTL_S),
        }
        self.client: Celery = application(server)
        self.old_client: Celery = application(server)
        self.old_client.conf.task_protocol = 1

    def make(self) -> None:
        self.train()
        self.follow_sources()
        with self.flower(), self.worker() as worker:
            self.classify()
            self.deploy()
            self.export()
            self.hold()
            worker.process.kill()
        self.wait()

    def command(
        self, *arguments: str, statuses: tuple[int, ...] = (0,), **more: str
    ) -> str:
        stdin = more.pop("stdin", "")
        done = feedmill(
            *arguments, cwd=self.folder, stdin=stdin, **self.environment | more
        )
        assert done.returncode in statuses, (arguments, done.stdout, done.stderr)
        return str(done.stdout)

    def file(self, prefix: str, count: int = 8) -> str:
        """Write a CSV file of posts, and return its name."""
        path = self.folder / f"{prefix}.csv"
        write_posts(path, prefix, count)
        return path.name

    # Files.

    def train(self) -> None:
        """Make small models: a base, a head, a fine-tuned one, and answers of `label`."""
        small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        models.WIDTH.update(small, intermediate_size=16)
        models.ARCHITECTURES["bert"][1].update(models.WIDTH)
        width = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}
        base = str(models.make_sentence_model(self.folder / "base", "bert", width))
        file = self.file("trained", 48)
        shared = ("--base", base, "--device", "cpu")
        # The folder from which the test deploys it must be that of this run.
        self.command("train", "--from", file, "--head", "--out", "kept/head", *shared)
        self.command(
            "train",
            "--from",
            file,
            "--epochs",
            "1",
            "--out",
            "kept/tuned",
            "--no-compare",
            *shared,
        )
        self.command(
            "label", file, "--labels", LABELS, "--out", "kept/labelled", *shared,
            stdin="food\nsports\ns\nfood\nsports\nfood\nq\n",
        )  # fmt: skip
        shutil.rmtree(self.kept / "labelled" / "model")
        shutil.copy(self.folder / file, self.kept)

    def export(self) -> None:
        columns = "id,label,label_score,title,shelf"
        self.command("export", "kept/run.csv", "--run", "first", "--columns", columns)
        self.command("export", "kept/results.jsonl")
        with running(
            "export", "kept/parts", "--follow", "--part-seconds", "1", "--format", "jsonl",
            cwd=self.folder, **self.environment,
        ) as following:  # fmt: skip
            wait_until(
                lambda: list((self.kept / "parts").rglob("*.jsonl")),
                "a part is written",
            )
            following.end()

    @contextmanager
    def flower(self) -> Iterator[None]:
        environment = self.environment | {
            "FEEDMILL_FLOWER_PASSWORD": "sesame",
            "FEEDMILL_DATA_FOLDER": str(self.folder / "data"),
        }
        with running("flower", "--port", "0", cwd=self.folder, **environment) as flower:
            wait_until(flower.text, "Flower runs")
            yield
            assert flower.end() == 0, flower.text()
        shutil.copy(self.folder / "data" / "flower.json", self.kept)

    # Live sources.

    def follow_sources(self) -> None:
        self.follow_bluesky()
        self.follow_reddit()
        # What the daemons sent is not what the test is about.
        self.server.client.delete("feedmill")

    def follow_bluesky(self) -> None:
        state = import_module("feedmill.producers.live.state")
        live = state.LiveState(self.server.client, "bluesky")
        # As if an earlier daemon had read an event that the server no longer has: a gap.
        live.advance(state.Position(1_700_000_000_000_000, 1_700_000_000.0))
        with Jetstream() as jetstream:
            environment = self.environment | {"FEEDMILL_BLUESKY_URL": jetstream.url}
            with running("ingest", "bluesky", cwd=self.folder, **environment) as daemon:
                wait_until(lambda: jetstream.queries, "the daemon is connected")
                jetstream.post("a kettle that whistles", langs=["en"])
                wait_until(
                    lambda: self.server.client.llen("feedmill"), "the post is sent"
                )
                wait_until(lambda: daemon.says("gaps: 1"), "the status is stored")
                assert daemon.end() == 0, daemon.text()

    def follow_reddit(self) -> None:
        fakes = import_module("tests.fakes.reddit")
        constants = import_module("tests.fakes.constants")
        (self.folder / "topics.toml").write_text(
            'active = 2\n[topics]\n"food" = ["cooking", "nothere", "baking"]\n'
            '"sport" = ["tennis"]\n'
        )
        with fakes.Reddit(client=("id", "secret")) as reddit:
            for name in ("cooking", "baking", "tennis"):
                reddit.add_subreddit(name)
                for number in range(3):
                    reddit.publish(name, title=f"{name} {number}", score=number)
            environment = self.environment | {
                constants.VARIABLE: json.dumps(constants.reddit(reddit.url)),
                "FEEDMILL_REDDIT_CLIENT_ID": "id",
                "FEEDMILL_REDDIT_CLIENT_SECRET": "secret",
                "FEEDMILL_REDDIT_USER_AGENT": "linux:test:1 (by /u/nobody)",
                "FEEDMILL_REDDIT_TOPICS": str(self.folder / "topics.toml"),
                "FEEDMILL_REDDIT_POLL_INTERVAL": "0.2",
                "XDG_CONFIG_HOME": str(self.folder),
            }
            redis = self.server.client
            before = redis.llen("feedmill")
            with running("ingest", "reddit", cwd=self.folder, **environment) as daemon:
                wait_until(lambda: redis.llen("feedmill") > before, "posts are sent")
                wait_until(
                    lambda: redis.hexists("feedmill:live:status", "reddit"), "a status"
                )
                wait_until(
                    lambda: redis.exists("feedmill:reddit:track:tennis"), "a track"
                )
                assert daemon.end() == 0, daemon.text()

    # The queue.

    @contextmanager
    def worker(self) -> Iterator[Any]:
        """Run a worker with the bundled model, and one with a small model on another queue."""
        include = {"FEEDMILL_INCLUDE": "tests.fakes.own_tasks"}
        environment = self.environment | include
        with (
            working(
                self.server, self.folder, "taught", "--queue", "feedmill-taught",
                "--model", str(self.kept / "tuned"), **self.environment,
            ),
            working(self.server, self.folder, "worker", **environment) as worker,
        ):  # fmt: skip
            yield worker

    def classify(self) -> None:
        """Classify a run and messages of both protocols; fail; purge."""
        options = ("--labels", LABELS, "--wait")
        self.command(
            "enqueue", self.file("run"), "--run", "first", "--keep", "shelf", *options
        )
        for app, prefix in ((self.client, "two"), (self.old_client, "one")):
            kwargs = {"posts": make_posts(prefix, 2), "labels": LABELS}
            sent = app.send_task(
                TASK, kwargs=kwargs, queue="feedmill", task_id=f"answered-{prefix}"
            )
            assert len(sent.get(timeout=120)) == 2
        # A model with labels of its own refuses others: such a letter can be retried.
        refused = {"posts": make_posts("refused", 1), "labels": "garden,kiln"}
        self.client.send_task(TASK, kwargs=refused, queue="feedmill-taught")
        self.old_client.send_task("feedmill.unknown", args=[1], queue="feedmill")
        redis = self.server.client
        wait_until(lambda: redis.xlen("feedmill:dead") == 2, "there are dead letters")
        self.command("purge", "run7", "--yes")

    def deploy(self) -> None:
        self.command("deploy", str(self.kept / "head"), "--queue", "feedmill-taught")

    def hold(self) -> None:
        """Have the worker hold messages: on its device, and until their ETA."""
        redis = self.server.client
        soon = datetime.fromtimestamp(time.time() + SOON_S, UTC)
        for app, prefix in ((self.client, "eta-two-"), (self.old_client, "eta-one-")):
            for name, eta in (("soon", soon), ("far", FAR_ETA)):
                self.send(app, {"id": prefix + name, "title": TEXTS[1]}, eta=eta)
        header = [self.add(number).set(eta=soon) for number in (1, 2)]
        total = self.client.signature("own.total", queue="feedmill")
        chord(header, total, app=self.client).apply_async(task_id="chorded")
        wait_until(
            lambda: redis.hlen("feedmill:reserved") == 6,
            "the worker holds the messages",
        )
        redis.set("kiln", 1)
        self.send(self.client, {"id": "held-two", "title": "slow kiln"})
        wait_until(lambda: redis.exists("kiln:begun"), "the device is busy")
        self.send(self.old_client, {"id": "held-one", "title": TEXTS[0]})
        assert redis.hlen("feedmill:reserved") >= 7

    def send(self, app: Celery, post: dict[str, str], **options: Any) -> None:
        kwargs = {"posts": [post], "labels": LABELS}
        app.send_task(TASK, kwargs=kwargs, queue="feedmill", **options)

    def add(self, number: int) -> Any:
        posts = [{"id": str(number), "title": f"number {number}"}]
        return self.client.signature(
            "own.add", args=(posts,), queue="feedmill", immutable=True
        )

    def wait(self) -> None:
        """Send messages that wait: of a run, of each priority and of both protocols."""
        self.command(
            "enqueue", self.file("wait"), "--run", "second", "--labels", LABELS
        )
        for priority in range(10):
            name = f"urgent{priority}"
            path = self.folder / f"{name}.csv"
            path.write_text(f"id,title\n{name},{TEXTS[priority % 8]}\n")
            self.command(
                "enqueue",
                path.name,
                "--no-run",
                "--labels",
                LABELS,
                "--priority",
                str(priority),
            )
        for app, prefix in ((self.client, "two-"), (self.old_client, "one-")):
            kwargs = {"posts": make_posts(f"stock-{prefix}", 2), "labels": LABELS}
            app.send_task(
                TASK, kwargs=kwargs, queue="feedmill", task_id=f"waits-{prefix}"
            )
        self.command(
            "enqueue", self.file("taught", 2), "--no-run", "--queue", "feedmill-taught"
        )


# Keys.


def saved_keys(url: str, folder: str) -> Iterator[dict[str, Any]]:
    """Yield each key that docs/reference/keys.md lists, by name."""
    redis = Redis.from_url(url)
    for key in sorted(redis.scan_iter(count=1000)):
        name = key.decode()
        row = find(name)
        if row is None or "_kombu" in name or "celeryev" in name or "pidbox" in name:
            continue  # of the tests themselves, and of clients that no longer live
        kind, value = content(redis, key)
        text = json.dumps(value).replace(folder, "{folder}")
        ttl = redis.pttl(key)
        # Rounded up: a test that restores the key a minute later must find it.
        yield {
            "key": name,
            "type": kind,
            "seconds": ttl and -(-ttl // 1000),
            "value": json.loads(text),
        }


def content(redis: Any, key: bytes) -> tuple[str, Any]:
    """Return the type and the content of a key, as JSON can have it."""
    kind = redis.type(key).decode()
    if kind == "string":
        return kind, packed(redis.get(key))
    if kind == "list":
        return kind, [packed(element) for element in redis.lrange(key, 0, -1)]
    if kind == "set":
        return kind, sorted(packed(member) for member in redis.smembers(key))
    if kind == "zset":
        members = redis.zrange(key, 0, -1, withscores=True)
        return kind, [[packed(member), score] for member, score in members]
    if kind == "hash":
        fields = sorted(redis.hgetall(key).items())
        return kind, [[packed(name), packed(value)] for name, value in fields]
    entries = redis.xrange(key)
    return kind, [
        [
            entry.decode(),
            [[packed(name), packed(value)] for name, value in fields.items()],
        ]
        for entry, fields in entries
    ]


def packed(value: bytes) -> str:
    """Return bytes as text: themselves if they are UTF-8, else in Base64 after a NUL."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text.startswith("\0"):
        return "\0" + base64.b64encode(value).decode()
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
