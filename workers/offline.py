"""Classifying without a queue: the worker's own pipeline with both of its ends swapped.

Posts come from an iterator instead of Celery, outcomes go to an iterator instead of Redis. What lies between (window,
lanes, halving of failing batches) is the worker's, so that what is tried, tuned or measured here is what a worker does.
"""

import logging
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from shared.errors import ModelError
from shared.messages import ClassifyOptions, DeadLetter, Outcome, Post, PostError
from shared.results import Result
from shared.settings import Settings
from workers.calibration import TokenBudget
from workers.classifiers import Classifier
from workers.message import Message
from workers.pipeline import Pipeline

logger = logging.getLogger(__name__)


class Nowhere:
    """Takes the place of the results store: the outcomes are in the messages."""

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> None:
        """Nothing is kept."""

    def find(self, wanted: Sequence[tuple[str, str]]) -> Sequence[None]:
        """Nothing is there."""
        return [None] * len(wanted)

    def keep(self, found: Sequence[Result]) -> None:
        """Nothing is lost."""

    def catch_up(self) -> None:
        """Nothing is lost."""


def classify(
    posts: Iterable[Post],
    classifier: Classifier,
    settings: Settings,
    budget: TokenBudget,
    options: ClassifyOptions | None = None,
) -> Iterator[tuple[Post, Outcome]]:
    """Each post with its outcome, in order, as they come; reads no further ahead than the window is wide.

    Raises RequestRefused for options that the model cannot serve, ModelError where the device fails for good.
    """
    options = options or ClassifyOptions()
    classifier.label_set(options)
    finished: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    pipeline = Pipeline(
        classifier,
        Nowhere(),
        settings,
        budget,
        "offline",
        on_recorded=finished.put,
        on_failure=lambda: finished.put(None),
    )
    pipeline.start()
    source = iter(posts)
    sent: deque[tuple[Message, list[Post]]] = deque()
    done: set[int] = set()
    try:
        while True:
            while pipeline.waiting() < settings.window_rows and (
                some := list(islice(source, settings.posts_per_message))
            ):
                arguments = {"posts": [post.model_dump(exclude_defaults=True) for post in some], **options.arguments()}
                sent.append((Message(arguments, sent_at=None), some))
                pipeline.submit(sent[-1][0])
            if not sent:
                return
            message = finished.get()
            if message is None:
                raise lost(pipeline)
            done.add(id(message))
            while sent and id(sent[0][0]) in done:
                first, its_posts = sent.popleft()
                done.discard(id(first))
                for post, outcome in zip(its_posts, first.outcomes, strict=True):
                    yield post, outcome or PostError(id=post.id, error=str(first.refused))
    finally:
        pipeline.stop()


def lost(pipeline: Pipeline) -> ModelError:
    """The error of whoever waits for a pipeline that has failed."""
    return ModelError(f"The device failed: {pipeline.failure}. See the log above.")
