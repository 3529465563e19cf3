"""Two workers on one Redis, each with a model and a queue of its own: who sends chooses by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shared.broker import queue_depth
from shared.dead import DeadLetters, Entry
from shared.keys import MODELS, RESULTS_STREAM
from shared.messages import Classification
from shared.results import ResultsStore
from shared.serving import announce, known
from shared.settings import Settings
from tests.fakes.models import make_model
from tests.support import RedisServer, as_jsonl, feedmill, last_json, make_posts, running, wait_until

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
#: Posts that wait when the second worker starts, the last of them urgent.
BACKLOG = 40


class House(NamedTuple):
    """A Redis with the worker of the embedded model on the default queue, and another one on a queue of its own."""

    redis: RedisServer
    store: ResultsStore
    model: str
    folder: Path

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, and what it says on standard output and error."""
        said = feedmill(*arguments, cwd=self.folder, FEEDMILL_REDIS_URL=self.redis.url, **environment)
        return said.returncode, said.stdout, said.stderr

    def results(self, post_id: str) -> dict[str, Classification]:
        """By model."""
        return {found.model: found for found in self.store.get(post_id)}


@pytest.fixture(scope="module")
def house(served: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    model = str(make_model("distilbert", folder / "moods", {0: "NEGATIVE", 1: "POSITIVE"}))
    house = House(served, ResultsStore(served.client, Settings()), model, folder)
    _send_backlog(house)
    url = {"FEEDMILL_REDIS_URL": served.url, "FEEDMILL_BATCH_ROWS": "1"}
    announce(served.client, "feedmill-moods", "yesterday's model")
    flags = ("--model", model, "--queue", "feedmill-moods", "--name", "other")
    with running("worker", *flags, cwd=folder, **url) as worker:
        wait_until(lambda: worker.says(" ready."), "the other worker is ready")
        wait_until(lambda: worker.says("queue feedmill-moods was just served with model yesterday's model"), "it warns")
        wait_until(lambda: "feedmill" in known(served.client), "the other one is known, too")
        yield house
        assert worker.end() == 0
        assert "Traceback" not in worker.text()


def _send_backlog(house: House) -> None:
    """To a queue that no worker has served yet, of which the environment says so."""
    path = house.folder / "backlog.jsonl"
    elsewhere = {"FEEDMILL_QUEUE": "feedmill-moods"}
    path.write_text(as_jsonl(make_posts(BACKLOG)[:-1]))
    sent = house.run("enqueue", str(path), "--priority", "9", "--posts-per-message", "1", **elsewhere)
    assert sent[:2] == (0, "39 posts sent (messages: 39), 0 already sent, 0 malformed\n"), sent[2]
    path.write_text(as_jsonl(make_posts(BACKLOG)[-1:]))
    assert house.run("enqueue", str(path), **elsewhere)[0] == 0
    assert queue_depth(house.redis.client, "feedmill-moods").waiting == BACKLOG


def test_an_urgent_post_overtakes_a_backlog(house: House) -> None:
    """It was sent last. A row is a micro-batch here, and a CPU computes some side by side."""
    wait_until(lambda: len(house.results(f"p{BACKLOG - 2}")) == 1, "the backlog is done")
    entries: Any = house.redis.client.xrange(RESULTS_STREAM)
    mine = [fields["id"] for _, fields in entries if house.model in fields["classification"]]
    assert f"p{BACKLOG - 1}" in mine[:8]


def test_posts_end_with_the_results_of_the_model_that_was_asked_for(house: House) -> None:
    path = house.folder / "posts.jsonl"
    path.write_text(as_jsonl([post.model_copy(update={"id": f"to-{post.id}"}) for post in make_posts(5)]))
    # A worker's setting in a sender's environment diverts nothing.
    for flags in (["--model", "moods"], [], ["--model", "all-MiniLM-L6-v2"], ["--queue", "feedmill-moods"]):
        status, said, complaints = house.run("enqueue", str(path), *flags, FEEDMILL_MODEL=house.model)
        assert status == 0, complaints
        assert said.startswith("0 posts" if flags and flags[1] != "moods" else "5 posts sent"), "sent before, or not"
    wait_until(lambda: len(house.results("to-p4")) == 2, "both models have answered")
    found = house.results("to-p4")
    assert set(found) == {MINILM, house.model}
    assert set(found[house.model].scores) == {"NEGATIVE", "POSITIVE"}
    assert len(found[MINILM].scores) == 16
    assert found[house.model].worker.startswith("other@")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "mods"], "--model: no worker serves 'mods'."),
        (["--queue", "feedmill-mods"], "--queue: no worker has served 'feedmill-mods' yet"),
        (["--model", "moods", "--queue", "feedmill-moods"], "--model and --queue both"),
        (["--priority", "10"], "--priority: input should be less than or equal to 9"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", [["enqueue", "-"], ["ingest", "reddit"]], ids=" ".join)
def test_a_mistake_is_told_in_a_sentence(house: House, command: list[str], flags: list[str], words: str) -> None:
    status, said, complaints = house.run(*command, *flags)
    assert (status, said) == (2, "")
    assert words in complaints
    assert complaints.count("\n") == 1
    if "no worker" in words:
        assert f"{MINILM} (queue feedmill), {house.model} (queue feedmill-moods).\n" in complaints


def test_a_dead_letter_says_which_queue_it_came_out_of(house: House) -> None:
    path = house.folder / "bad.jsonl"
    path.write_text(as_jsonl([make_posts(1)[0].model_copy(update={"id": "bad"})]))
    assert house.run("enqueue", str(path), "--model", "moods", "--labels", "a,b", "--priority", "5")[0] == 0
    dead = DeadLetters(house.redis.client)
    wait_until(lambda: dead.find(["bad"])["bad"], "it is a dead letter: that model has labels of its own")
    (name,) = dead.find(["bad"])["bad"]
    entry = dead.get(name)
    assert isinstance(entry, Entry)
    assert entry.letter.queue == "feedmill-moods"
    assert house.run("dead", "retry", "bad")[:2] == (0, "1 retried\n")
    wait_until(lambda: dead.find(["bad"])["bad"], "it is one again, of the same worker")
    (name,) = dead.find(["bad"])["bad"]
    entry = dead.get(name)
    assert isinstance(entry, Entry)
    assert entry.letter.worker.startswith("other@")


def test_status_shows_each_queue_with_its_model(house: House) -> None:
    queues = last_json(house.run("status", "--json")[1])["queues"]
    assert {name: queue["model"] for name, queue in queues.items()} == {
        "feedmill": MINILM,
        "feedmill-moods": house.model,
    }
    assert house.redis.client.hlen(MODELS) == 2
