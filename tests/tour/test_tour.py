"""A tour: one post's path through the system, step by step. Read it from top to bottom.

The steps follow docs/how-it-works.md. Redis and the model's weights are real.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from feedmill.outcomes.followers import Follower, batches
from feedmill.producers import files
from feedmill.producers.push import Pusher
from feedmill.shared.broker import CLASSIFY_TASK, connect, make_app, queue_depth
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models import device
from feedmill.workers.models.classifiers import Row
from feedmill.workers.models.classifiers.similarity import Similarity
from feedmill.workers.models.weights import locate
from feedmill.workers.pipeline import context
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.pipeline import Pipeline
from feedmill.workers.pipeline.window import Window
from feedmill.workers.runtime.task import arguments_by_name
from feedmill.workers.transport.redis_transport import lease_options
from tests.support import RedisServer, latest, wait_until

LINE = (
    '{"id": "t3_kettle", "title": "Which kettle for tea &amp; coffee?", "selftext": "Mine '
    'leaks.", "author": "x"}\n'
)


@pytest.fixture
def post() -> Post:
    return Post(
        id="t3_kettle", title="Which kettle for tea &amp; coffee?", body="Mine leaks."
    )


@pytest.fixture(scope="module")
def classifier() -> Similarity:
    settings = Settings()
    return Similarity(locate(settings.model), device.select_device("cpu"), settings)


@contextmanager
def sent_and_reserved(post: Post, settings: Settings) -> Iterator[Any]:
    """Send the post and reserve its message like a worker."""
    Pusher(make_app(settings), connect(settings), settings, ClassifyOptions()).push(
        [post]
    )
    app = make_app(settings)
    received: list[Any] = []
    with app.connection_for_read(**lease_options(settings)) as connection:
        with app.amqp.TaskConsumer(
            connection.default_channel, on_message=received.append
        ):
            while not received:
                connection.drain_events(timeout=60)
        yield received[0]


class Owner(context.Owner):
    """Keep the pipeline's finished messages."""

    def __init__(self, store: ResultsStore) -> None:
        self._store = store
        self.stored_when_finished: list[list[Result]] = []
        self.recorded_messages: list[Message] = []

    def finished(self, message: Message) -> None:  # noqa: ARG002 - the store is what counts
        self.stored_when_finished.append(latest(self._store, 1))

    def recorded(self, message: Message) -> None:
        self.recorded_messages.append(message)


@contextmanager
def pipeline(
    classifier: Similarity, settings: Settings
) -> Iterator[tuple[Pipeline, Owner]]:
    store = ResultsStore(connect(settings), settings)
    owner = Owner(store)
    running = Pipeline(classifier, store, settings, 2048, "tour", owner)
    running.start()
    yield running, owner
    running.stop()


def test_1_a_source_yields_a_post(tmp_path: Path, post: Post) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text(LINE)
    (found,) = files.FileSource(str(path)).items()
    assert found == post
    assert post.text == "Which kettle for tea & coffee?\n\nMine leaks."


def test_2_the_producer_pushes_new_posts(settings: Settings, post: Post) -> None:
    pusher = Pusher(make_app(settings), connect(settings), settings, ClassifyOptions())
    pusher.push([post, post])
    assert (pusher.sent, pusher.skipped) == (1, 1)


def test_3_the_message_waits_in_redis(
    settings: Settings, redis: RedisServer, post: Post
) -> None:
    Pusher(make_app(settings), connect(settings), settings, ClassifyOptions()).push(
        [post]
    )
    assert queue_depth(redis.client, settings.queue) == (1, 0, 0)
    waiting: Any = redis.client.lindex(settings.queue, 0)
    assert json.loads(waiting)["headers"]["task"] == CLASSIFY_TASK


def test_4_a_worker_reserves_the_message(
    settings: Settings, redis: RedisServer, post: Post
) -> None:
    with sent_and_reserved(post, settings) as message:
        assert queue_depth(redis.client, settings.queue) == (0, 1, 0), (
            "no message waits, and one is leased"
        )
        assert message.payload[1]["posts"][0]["id"] == post.id


def test_5_the_pool_reads_the_posts(settings: Settings, post: Post) -> None:
    with sent_and_reserved(post, settings) as reserved:
        arguments, keywords, _ = reserved.payload
        message = Message(arguments_by_name(arguments, keywords), sent_at=time.time())
    assert message.read() == [post]


def test_6_preparation_turns_the_post_into_rows(
    classifier: Similarity, post: Post
) -> None:
    (rows,) = classifier.prepare([post.text], classifier.label_set(ClassifyOptions()))
    assert [row.length for row in rows] == [12], (
        "tokens, including the model's special tokens"
    )


def test_7_the_window_forms_a_micro_batch(classifier: Similarity, post: Post) -> None:
    window: Window[Row] = Window(time.monotonic)
    for text in (
        post.text,
        "A short one",
        "word " * 200,
        ("Which teapot for green tea? Mine drips."),
    ):
        for rows in classifier.prepare([text], classifier.label_set(ClassifyOptions())):
            for row in rows:
                window.add(row)
    batch = window.take(token_budget=100, row_limit=8)
    # the long row waits: in the same batch, all other rows would need padding
    assert len(batch) == 3
    assert len(window) == 1


def test_8_the_classifier_computes_scores(classifier: Similarity, post: Post) -> None:
    """The device thread runs the forward pass; the writer thread turns the outputs into scores."""
    label_set = classifier.label_set(
        ClassifyOptions.parse({"labels": "kitchen,football"})
    )
    rows = classifier.prepare([post.text], label_set)[0]
    ((row, scores),) = classifier.finish(rows, classifier.forward(rows))
    assert row is rows[0]
    assert scores["kitchen"] > scores["football"]


def test_9_the_result_is_stored_before_the_message_ends(
    classifier: Similarity, settings: Settings, post: Post
) -> None:
    with pipeline(classifier, settings) as (running, owner):
        running.submit(Message({"posts": [post.model_dump()]}, sent_at=None))
        wait_until(lambda: owner.stored_when_finished, "the message is finished")
    assert owner.stored_when_finished[0][0].post.id == post.id


def test_10_the_message_is_acknowledged_last(
    classifier: Similarity, settings: Settings, redis: RedisServer, post: Post
) -> None:
    with (
        sent_and_reserved(post, settings) as reserved,
        pipeline(classifier, settings) as (running, owner),
    ):
        running.submit(Message(arguments_by_name(*reserved.payload[:2]), sent_at=None))
        wait_until(
            lambda: owner.recorded_messages, "outcomes and dead letters are stored"
        )
        assert queue_depth(redis.client, settings.queue) == (0, 1, 0), (
            "the message is still leased"
        )
        reserved.ack()
        assert queue_depth(redis.client, settings.queue) == (0, 0, 0)


def test_11_a_reader_finds_the_result(
    classifier: Similarity, settings: Settings, post: Post
) -> None:
    with pipeline(classifier, settings) as (running, owner):
        running.submit(
            Message({"posts": [post.model_dump()], "labels": "tea,cars"}, sent_at=None)
        )
        reading = batches(Follower(connect(settings), history=1))
        found = next(read.item for batch in reading for read in batch)
        wait_until(lambda: owner.recorded_messages, "the message is finished")
    assert isinstance(found, Result)
    assert found.classification.label == "tea"
    (stored,) = ResultsStore(connect(settings), settings).get(post.id)
    assert stored.scores == pytest.approx(found.classification.scores, abs=1e-5), (
        "stored in 16 bits"
    )
    assert (
        stored.model_copy(update={"scores": found.classification.scores})
        == found.classification
    )
    assert owner.recorded_messages[0].result() == [found.classification.model_dump()]
