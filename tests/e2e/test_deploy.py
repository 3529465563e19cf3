"""`feedmill deploy` to running workers: nothing stops, nothing is lost, and who cannot switch says why not."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import load_file, save_file

from feedmill.processes import free_port
from producers.push import Pusher
from shared.broker import connect, make_app, queue_depth
from shared.keys import RESULTS_STREAM
from shared.messages import ClassifyOptions
from shared.results import ResultsStore
from shared.serving import known, wanted
from shared.settings import Settings
from tests.e2e.test_ending import standin
from tests.fakes.models import make_model
from tests.support import Feedmill, RedisServer, feedmill, make_posts, redis_servers, running, wait_until, working
from workers.weights import locate

POSTS = 5000


def stored(redis: RedisServer) -> list[dict[str, Any]]:
    entries: Any = redis.client.xrange(RESULTS_STREAM)
    return [json.loads(fields["classification"]) for _, fields in entries]


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server apart from the one of the house."""
    server = RedisServer(next(iter(redis_servers().values())), tmp_path)
    yield server
    server.stop()


def test_a_deploy_among_five_thousand_posts(empty: RedisServer, tmp_path: Path) -> None:
    """None is lost, none is done twice, and each result names the model that made it."""
    redis, settings = empty, Settings.model_validate({"redis_url": empty.url})
    folder = make_model("bert", tmp_path / "tuned", {0: "NEGATIVE", 1: "POSITIVE"})
    sha256 = locate(str(folder)).sha256
    with standin(redis, tmp_path, "worker", row_seconds=0.01):
        said = feedmill("deploy", "--show", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert "feedmill  deployed: each worker's own model\n  worker@" in said.stdout
        Pusher(make_app(settings), connect(settings), settings, ClassifyOptions()).push(make_posts(POSTS))
        wait_until(lambda: redis.client.xlen(RESULTS_STREAM) > 100, "some are stored")
        said = feedmill("deploy", str(folder), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert said.returncode == 0, said.stdout + said.stderr
        assert said.stdout.endswith("1 workers of queue feedmill have switched.\n")
        wait_until(lambda: not sum(queue_depth(redis.client, "feedmill")), "the queue is empty")
    found = stored(redis)
    assert Counter(each["id"] for each in found) == dict.fromkeys((post.id for post in make_posts(POSTS)), 1)
    made = [(each["model"], each["weights"]) for each in found]
    before = made.count(("stand-in", "00"))
    assert 0 < before < POSTS
    assert made == [("stand-in", "00")] * before + [(str(folder), sha256)] * (POSTS - before)
    # Under each post's own key lies that result and no other.
    assert ResultsStore(redis.client, settings).counters()[:2] == (POSTS, 0)


class House(NamedTuple):
    """A worker that tiny models are deployed to: its own, and two that were trained."""

    redis: RedisServer
    worker: Feedmill
    folder: Path
    metrics_port: int

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, and what it says on standard output and error."""
        said = feedmill(*arguments, cwd=self.folder, FEEDMILL_REDIS_URL=self.redis.url, **environment)
        return said.returncode, said.stdout, said.stderr

    def at_work(self) -> str:
        """The name of the model's folder, as a result bears it."""
        found = make_app(Settings.model_validate({"redis_url": self.redis.url})).send_task(
            "feedmill.classify", kwargs={"posts": [{"id": "a", "title": "The match ended"}]}
        )
        (outcome,) = found.get(timeout=60)
        return Path(outcome["model"]).name


@pytest.fixture(scope="module")
def house(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    own = make_model("distilbert", folder / "own", {0: "a", 1: "b"})
    make_model("bert", folder / "tuned", {0: "NEGATIVE", 1: "POSITIVE"})
    broken = make_model("bert", folder / "broken", {0: "NEGATIVE", 1: "POSITIVE"})
    weights = load_file(broken / "model.safetensors")
    save_file({name: torch.full_like(each, torch.nan) for name, each in weights.items()}, broken / "model.safetensors")
    port = free_port()
    redis_server.client.flushall()
    with working(redis_server, folder, FEEDMILL_MODEL=str(own), FEEDMILL_METRICS_PORT=str(port)) as worker:
        yield House(redis_server, worker, folder, port)
        assert worker.end() == 0
        assert "Traceback" not in worker.text()


def test_a_worker_goes_over_and_all_who_ask_are_told(house: House) -> None:
    tuned = str(house.folder / "tuned")
    status, said, complaints = house.run("deploy", "tuned")
    assert (status, complaints) == (0, ""), said
    assert f"  done      {tuned} is active" in said
    assert said.endswith("\n1 of 1 workers of queue feedmill have switched.\n")
    assert house.at_work() == "tuned"
    wait_until(lambda: known(house.redis.client)["feedmill"].model == tuned, "senders are told")
    assert f"{tuned}, queue feedmill" in house.run("status")[1]
    with urlopen(f"http://127.0.0.1:{house.metrics_port}/metrics") as answer:
        assert f'model="{tuned}"' in answer.read().decode()
    assert "was served with" not in house.worker.text(), "one that takes over is no mistake"
    asked = wanted(house.redis.client, "feedmill")
    shown, *_ = map(json.loads, house.run("deploy", "--show", "--json")[1].splitlines())
    assert asked
    assert shown["wanted"] == asked._asdict()
    (pool,) = shown["workers"].values()
    assert (pool["model"], pool["weights"], pool["deploy"]["stage"]) == (tuned, asked.weights, "done")


def test_one_that_fails_changes_nothing(house: House) -> None:
    assert house.run("deploy", "tuned")[0] == 0
    before = wanted(house.redis.client, "feedmill")
    status, said, _ = house.run("deploy", "broken")
    assert status == 1
    assert f"{house.folder / 'tuned'} stays active: {house.folder / 'broken'} gives invalid scores" in said
    assert said.endswith("0 of 1 workers of queue feedmill have switched: rolled back to the previous deployment.\n")
    assert wanted(house.redis.client, "feedmill") == before
    assert house.at_work() == "tuned"


def test_a_worker_that_starts_later_loads_what_is_wanted_or_does_not_start(house: House) -> None:
    assert house.run("deploy", "tuned")[0] == 0
    elsewhere = {"FEEDMILL_REDIS_URL": house.redis.url, "FEEDMILL_MODEL": str(house.folder / "own")}
    with working(house.redis, house.folder, name="later", FEEDMILL_MODEL=elsewhere["FEEDMILL_MODEL"]) as later:
        assert later.says(f"model {house.folder / 'tuned'} (sequence) loaded in")
        status, said, _ = house.run("deploy", "--own", "--json")
        assert status == 0, said
        assert json.loads(said.splitlines()[-1])["said"] == "2 of 2 workers of queue feedmill have switched."
        assert house.at_work() == "own"
        assert house.run("deploy", "tuned")[0] == 0
        assert later.end() == 0
    shutil.move(house.folder / "tuned", house.folder / "away")
    with running("worker", "--name", "later", cwd=house.folder, **elsewhere) as later:
        wait_until(lambda: later.process.poll() is not None, "it ends")
        assert later.process.poll() == 1
        assert f"There is no folder {house.folder / 'tuned'} on " in later.text()
        assert "Traceback" not in later.text()
    assert house.at_work() == "tuned", "it is loaded"
    shutil.move(house.folder / "away", house.folder / "tuned")


def test_without_a_worker_it_is_wanted_all_the_same(house: House) -> None:
    status, said, _ = house.run("deploy", "tuned", FEEDMILL_QUEUE="feedmill-nobody")
    assert (status, said) == (
        1,
        "No worker serves queue feedmill-nobody now. The deployment applies when one starts.\n",
    )
    assert f"feedmill-nobody  deployed: {house.folder / 'tuned'} (" in house.run("deploy", "--show")[1]
    status, said, _ = house.run("deploy", "tuned", "--no-wait")
    assert (status, said) == (0, "Asked 1 workers of queue feedmill to switch. See `feedmill deploy --show`.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give exactly one of FOLDER, --own and --show."),
        (["tuned", "--own"], "Give exactly one of "),
        (["none"], "none does not exist."),
        (["."], "has no config.json"),
        (["tuned", "--queue", "feedmil"], "--queue: no worker has served 'feedmil' yet"),
        (["tuned", "--redis-url", "redis://127.0.0.1:1/0"], "Redis at 127.0.0.1:1/0 is unreachable"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_a_sentence(house: House, arguments: list[str], words: str) -> None:
    status, said, complaints = house.run("deploy", *arguments)
    assert (status, said) == (2, "")
    assert words in complaints
    assert complaints.count("\n") == 1
