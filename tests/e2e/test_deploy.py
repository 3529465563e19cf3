"""`feedmill deploy` to running workers: no interruption, no lost post, and a reason from every
worker that fails.
"""

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from feedmill.shared.broker import make_app
from feedmill.shared.keys import REQUESTED_MODELS, RESULTS_STREAM
from feedmill.shared.model_routing import known_queues, requested_model
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models.weights import locate
from tests import support
from tests.e2e.test_ending import standin
from tests.fakes.models import make_model
from tests.support import (
    Feedmill,
    RedisServer,
    feedmill,
    make_posts,
    wait_until,
    working,
)

POSTS = 5000


def stored(redis: RedisServer) -> list[dict[str, Any]]:
    entries: Any = redis.client.xrange(RESULTS_STREAM)
    return [json.loads(fields["classification"]) for _, fields in entries]


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server without a worker, separate from that of the fixture `house`."""
    server = RedisServer(next(iter(support.redis_servers().values())), tmp_path)
    yield server
    server.stop()


def test_deploying_under_load_loses_and_repeats_nothing(
    empty: RedisServer, tmp_path: Path
) -> None:
    """No post is lost or classified twice, and each result names its model."""
    redis, settings = empty, Settings.model_validate({"redis_url": empty.url})
    folder = make_model("bert", tmp_path / "tuned", {0: "NEGATIVE", 1: "POSITIVE"})
    sha256 = locate(str(folder)).sha256
    with standin(redis, tmp_path, "worker", row_seconds=0.01):
        said = feedmill("deploy", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert re.search(r"^feedmill  .*\n  worker@", said.stdout)
        support.push(settings, make_posts(POSTS))
        wait_until(
            lambda: redis.client.xlen(RESULTS_STREAM) > 100, "some results are stored"
        )
        said = feedmill(
            "deploy", str(folder), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        assert said.returncode == 0, said.stdout + said.stderr
        assert re.search(r"\b1 workers", said.stdout)
        support.wait_until_empty(redis.client)
    found = stored(redis)
    assert Counter(each["id"] for each in found) == dict.fromkeys(
        (post.id for post in make_posts(POSTS)), 1
    )
    made = [(each["model"], each["weights"]) for each in found]
    before = made.count(("stand-in", "00"))
    assert 0 < before < POSTS
    assert made == [("stand-in", "00")] * before + [(str(folder), sha256)] * (
        POSTS - before
    )
    # Each post's own key holds exactly that one result.
    assert ResultsStore(redis.client, settings).counters()[:2] == (POSTS, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_invalid_request_is_shown_and_replaced(
    empty: RedisServer, tmp_path: Path, workers: int
) -> None:
    redis = empty
    folder = make_model("bert", tmp_path / "tuned", {0: "NEGATIVE", 1: "POSITIVE"})
    with ExitStack() as stack:
        if workers:
            worker = stack.enter_context(support.standing_in(redis, tmp_path))
            wait_until(lambda: worker.says(" ready."), "the worker is ready")
            support.wait_until_registered(redis)
        redis.client.hset(REQUESTED_MODELS, "feedmill", "invalid")
        redis.client.hset(REQUESTED_MODELS, "unserved", "invalid")
        said = deploy(redis, tmp_path)
        assert said.returncode == 0
        assert "--reset --queue feedmill" in said.stderr
        assert "--reset --queue unserved" in said.stderr
        said = deploy(redis, tmp_path, str(folder), "--queue", "feedmill")
        assert said.returncode == 1 - workers, said.stdout + said.stderr
        requested = requested_model(redis.client, "feedmill")
        assert requested is not None
        assert requested.model == str(folder)
        said = deploy(redis, tmp_path, "--reset", "--queue", "unserved")
        assert "No worker serves queue unserved" in said.stdout
        requested = requested_model(redis.client, "unserved")
        assert requested is not None
        assert requested.model is None


def test_a_complete_reset_removes_the_deployment(
    empty: RedisServer, tmp_path: Path
) -> None:
    redis = empty
    with support.standing_in(redis, tmp_path) as worker:
        wait_until(lambda: worker.says(" ready."), "the worker is ready")
        support.wait_until_registered(redis)
        redis.client.hset(REQUESTED_MODELS, "feedmill", "invalid")
        said = deploy(redis, tmp_path, "--reset", "--queue", "feedmill")
        assert said.returncode == 0, said.stdout + said.stderr
        assert "1 of 1 workers" in said.stdout
        assert not redis.client.hexists(REQUESTED_MODELS, "feedmill")
        said = deploy(redis, tmp_path, "--reset")
        assert said.returncode == 0
        assert "Nothing to do" in said.stdout


def deploy(
    redis: RedisServer, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run `feedmill deploy`."""
    return feedmill(
        "deploy",
        *arguments,
        cwd=folder,
        FEEDMILL_REDIS_URL=redis.url,
    )


class House(NamedTuple):
    """A worker with three tiny models: its own, and two trained ones to deploy."""

    redis: RedisServer
    worker: Feedmill
    folder: Path
    metrics_port: int

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Run a command; return its exit status, output and errors."""
        said = feedmill(
            *arguments,
            cwd=self.folder,
            FEEDMILL_REDIS_URL=self.redis.url,
            **environment,
        )
        return said.returncode, said.stdout, said.stderr

    def at_work(self) -> str:
        """Return the folder name of the active model, as results report it."""
        found = make_app(
            Settings.model_validate({"redis_url": self.redis.url})
        ).send_task(
            "feedmill.classify",
            kwargs={"posts": [{"id": "a", "title": "The match ended"}]},
        )
        (outcome,) = found.get(timeout=120)
        return Path(outcome["model"]).name


@pytest.fixture(scope="module")
def house(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    own = make_model("distilbert", folder / "own", {0: "a", 1: "b"})
    make_model("bert", folder / "tuned", {0: "NEGATIVE", 1: "POSITIVE"})
    broken = make_model("bert", folder / "broken", {0: "NEGATIVE", 1: "POSITIVE"})
    weights = load_file(broken / "model.safetensors")
    save_file(
        {name: torch.full_like(each, torch.nan) for name, each in weights.items()},
        broken / "model.safetensors",
    )
    port = support.free_port()
    redis_server.client.flushall()
    with working(
        redis_server, folder, FEEDMILL_MODEL=str(own), FEEDMILL_METRICS_PORT=str(port)
    ) as worker:
        yield House(redis_server, worker, folder, port)
        assert worker.end() == 0
        assert "Traceback" not in worker.text()


def test_deploy_switches_the_worker_and_is_reported(house: House) -> None:
    tuned = str(house.folder / "tuned")
    status, said, complaints = house.run("deploy", "tuned")
    assert (status, complaints) == (0, ""), said
    assert re.search(f"  done      .*{tuned}", said)
    assert re.search(r"\b1 workers", said)
    assert house.at_work() == "tuned"
    wait_until(
        lambda: known_queues(house.redis.client)["feedmill"].model == tuned,
        "the new model is announced",
    )
    (house.folder / "posts.jsonl").write_text('{"id": 1, "title": "x"}\n')
    status, _, complaints = house.run(
        "enqueue", "posts.jsonl", "--labels", "praise,complaint"
    )
    assert (
        status,
        all(word in complaints for word in (tuned, "NEGATIVE", "POSITIVE", "--labels")),
    ) == (2, True)
    (worker,) = json.loads(house.run("status", "--json")[1])["workers"].values()
    assert (worker["model"], worker["queues"]) == (tuned, ["feedmill"])
    assert (
        f'model="{tuned}"'
        in support.fetch(f"http://127.0.0.1:{house.metrics_port}/metrics")[1]
    )
    assert not re.search("WARNING.*queue feedmill", house.worker.text()), (
        "a switch is not a conflict of two models"
    )
    asked = requested_model(house.redis.client, "feedmill")
    shown, *_ = map(json.loads, house.run("deploy", "--json")[1].splitlines())
    assert asked
    assert shown["wanted"] == asdict(asked)
    (pool,) = shown["workers"].values()
    assert (pool["model"], pool["weights"], pool["deploy"]["stage"]) == (
        tuned,
        asked.weights,
        "done",
    )


def test_failed_deploy_rolls_back(house: House) -> None:
    assert house.run("deploy", "tuned")[0] == 0
    before = requested_model(house.redis.client, "feedmill")
    status, _, complaints = house.run("deploy", "no/such")
    assert (status, "no folder" in complaints, "Hub" in complaints) == (2, True, False)
    status, said, _ = house.run("deploy", "broken")
    assert status == 1
    assert re.search(f"{house.folder / 'tuned'} .*{house.folder / 'broken'} ", said)
    assert re.search(r"\b0 of 1 workers", said)
    assert requested_model(house.redis.client, "feedmill") == before
    assert house.at_work() == "tuned"


def test_new_workers_load_the_deployed_model_or_fail(house: House) -> None:
    assert house.run("deploy", "tuned")[0] == 0
    elsewhere = {
        "FEEDMILL_REDIS_URL": house.redis.url,
        "FEEDMILL_MODEL": str(house.folder / "own"),
    }
    with working(
        house.redis,
        house.folder,
        name="later",
        FEEDMILL_MODEL=elsewhere["FEEDMILL_MODEL"],
    ) as later:
        assert later.says(f"{house.folder / 'tuned'} ")
        status, said, _ = house.run("deploy", "--reset", "--json")
        assert status == 0, said
        assert "2 workers" in json.loads(said.splitlines()[-1])["said"]
        assert house.at_work() == "own"
        assert house.run("deploy", "tuned")[0] == 0
        assert later.end() == 0
    shutil.move(house.folder / "tuned", house.folder / "away")
    with support.running(
        "worker", "--name", "later", cwd=house.folder, **elsewhere
    ) as later:
        wait_until(lambda: later.process.poll() is not None, "the worker exits")
        assert later.process.poll() == 1
        assert f"{house.folder / 'tuned'} on " in later.text()
        assert "Traceback" not in later.text()
    assert house.at_work() == "tuned", "the first worker keeps the loaded model"
    shutil.move(house.folder / "away", house.folder / "tuned")


def test_deploy_without_workers_applies_to_later_ones(house: House) -> None:
    status, said, _ = house.run("deploy", "tuned", FEEDMILL_QUEUE="feedmill-nobody")
    assert (status, "feedmill-nobody" in said) == (1, True)
    assert re.search(
        f"feedmill-nobody  .*{house.folder / 'tuned'} \\(", house.run("deploy")[1]
    )
