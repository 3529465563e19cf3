"""Two workers on one Redis, each with its own model and queue; senders choose by model name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.shared.broker import make_app, queue_depth
from feedmill.shared.keys import MODELS, RESULTS_STREAM
from feedmill.shared.messages import Classification
from feedmill.shared.model_routing import announce, known_queues
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.fakes.models import make_model
from tests.support import (
    RedisServer,
    as_jsonl,
    feedmill,
    last_json,
    make_posts,
    wait_until,
    working,
)

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
#: Posts that wait when the second worker starts; the last one is urgent.
BACKLOG = 40


class House(NamedTuple):
    """A Redis with the embedded model's worker on the default queue, and another model's worker on
    its own queue.
    """

    redis: RedisServer
    store: ResultsStore
    model: str
    folder: Path

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Run a command; return its exit status, output and errors."""
        said = feedmill(
            *arguments,
            cwd=self.folder,
            FEEDMILL_REDIS_URL=self.redis.url,
            **environment,
        )
        return said.returncode, said.stdout, said.stderr

    def results(self, post_id: str) -> dict[str, Classification]:
        """Return the post's results by model."""
        return {found.model: found for found in self.store.get(post_id)}


@pytest.fixture(scope="module")
def house(
    served: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    model = str(
        make_model("distilbert", folder / "moods", {0: "NEGATIVE", 1: "POSITIVE"})
    )
    house = House(served, ResultsStore(served.client, Settings()), model, folder)
    _send_backlog(house)
    # One lane: another one would continue with the backlog while the first has the urgent post.
    one = {"FEEDMILL_BATCH_ROWS": "1", "OMP_NUM_THREADS": "1"}
    announce(served.client, "feedmill-moods", "yesterday's model")
    with working(
        served, folder, "other", "--model", model, "--queue", "feedmill-moods", **one
    ) as worker:
        wait_until(
            lambda: re.search(
                "WARNING.*queue feedmill-moods.*yesterday's model", worker.text()
            ),
            "a warning",
        )
        wait_until(
            lambda: "feedmill" in known_queues(served.client),
            ("the first worker's model is known, too"),
        )
        yield house
        assert worker.end() == 0
        assert "Traceback" not in worker.text()


def _send_backlog(house: House) -> None:
    """Send posts to a queue that no worker has served yet, chosen by FEEDMILL_QUEUE."""
    path = house.folder / "backlog.jsonl"
    elsewhere = {"FEEDMILL_QUEUE": "feedmill-moods"}
    path.write_text(as_jsonl(make_posts(BACKLOG)[:-1]))
    sent = house.run(
        "enqueue", str(path), "--priority", "9", "--posts-per-message", "1", **elsewhere
    )
    assert (sent[0], re.findall(r"\d+", sent[1])) == (0, ["39", "39", "0", "0"]), sent[
        2
    ]
    path.write_text(as_jsonl(make_posts(BACKLOG)[-1:]))
    assert house.run("enqueue", str(path), **elsewhere)[0] == 0
    assert queue_depth(house.redis.client, "feedmill-moods").waiting == BACKLOG


def test_an_urgent_post_overtakes_a_backlog(house: House) -> None:
    """The urgent post is sent last, and classified before the last posts of the backlog.

    Micro-batches have one row.
    """
    wait_until(
        lambda: len(house.results(f"p{BACKLOG - 2}")) == 1, "the backlog is processed"
    )
    entries: Any = house.redis.client.xrange(RESULTS_STREAM)
    mine = [
        fields["id"] for _, fields in entries if house.model in fields["classification"]
    ]
    assert f"p{BACKLOG - 1}" in mine[:8]


def test_posts_are_classified_by_the_chosen_model(house: House) -> None:
    path = house.folder / "posts.jsonl"
    path.write_text(
        as_jsonl(
            [post.model_copy(update={"id": f"to-{post.id}"}) for post in make_posts(5)]
        )
    )
    # FEEDMILL_MODEL, a setting for workers, must not divert a sender's posts.
    for flags, sent in (
        (["--queue", "feedmill-moods"], 5),
        ([], 5),
        (["--queue", "feedmill"], 0),
    ):
        status, said, complaints = house.run(
            "enqueue", str(path), *flags, FEEDMILL_MODEL=house.model
        )
        assert status == 0, complaints
        assert said.startswith(f"{sent} "), said
    wait_until(
        lambda: len(house.results("to-p4")) == 2, "both models have classified the post"
    )
    found = house.results("to-p4")
    assert set(found) == {MINILM, house.model}
    assert set(found[house.model].scores) == {"NEGATIVE", "POSITIVE"}
    assert len(found[MINILM].scores) == 16
    assert found[house.model].worker.startswith("other@")


def test_a_dead_letter_keeps_its_queue(house: House) -> None:
    # `enqueue` refuses labels that the queue's model cannot have. Other applications do not ask.
    kwargs = {
        "posts": [{"id": "bad", "title": "a title"}],
        "labels": ["sports", "food"],
    }
    make_app(Settings(redis_url=house.redis.url)).send_task(
        "feedmill.classify", kwargs=kwargs, queue="feedmill-moods"
    )
    dead = DeadLetterStream(house.redis.client)
    wait_until(
        lambda: dead.find(["bad"])["bad"],
        ("the post is a dead letter: that model has its own labels"),
    )
    (entry,) = dead.all()
    assert entry.letter.queue == "feedmill-moods"
    assert re.search("labels: .*NEGATIVE, POSITIVE", entry.letter.reason)
    assert house.run("dead", "retry", "bad")[0] == 0
    wait_until(
        lambda: dead.find(["bad"])["bad"], "the retried post is a dead letter again"
    )
    (entry,) = dead.all()
    assert entry.letter.worker.startswith("other@")


def test_status_shows_each_queue_with_its_model(house: House) -> None:
    queues = last_json(house.run("status", "--json")[1])["queues"]
    assert {name: queue["model"] for name, queue in queues.items()} == {
        "feedmill": MINILM,
        "feedmill-moods": house.model,
    }
    assert house.redis.client.hlen(MODELS) == 2
