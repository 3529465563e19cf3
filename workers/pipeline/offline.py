"""Classify without a queue: the worker's pipeline with both ends replaced.

Posts come from an iterator instead of Celery, and outcomes go to an iterator instead of Redis. All other steps are the
worker's, so results and measurements apply to a worker as well.
"""

import logging
import queue
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from itertools import islice

from shared.errors import ModelError
from shared.messages import ClassifyOptions, DeadLetter, Outcome, Post, PostError
from shared.results import Result
from shared.settings import Settings
from workers.models.classifiers import Classifier
from workers.pipeline.calibration import TokenBudget
from workers.pipeline.context import Owner
from workers.pipeline.message import Message
from workers.pipeline.pipeline import Pipeline

logger = logging.getLogger(__name__)

#: Seconds to wait for the end of a forward pass when the caller stops early. A process that exits during one aborts.
MAX_STOP_S = 60.0


class Finished(Owner):
    """An owner that queues each finished message, and None if the pipeline fails."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def recorded(self, message: Message) -> None:
        self.messages.put(message)

    def failed(self) -> None:
        self.messages.put(None)


class NullStore:
    """A results store that stores nothing. The outcomes are in the messages."""

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> None: ...
    def keep(self, found: Sequence[Result]) -> None: ...
    def catch_up(self) -> None: ...
    def find(self, wanted: Sequence[tuple[str, str]]) -> Sequence[None]:
        return [None] * len(wanted)


def classify(
    posts: Iterable[Post],
    classifier: Classifier,
    settings: Settings,
    budget: TokenBudget,
    options: ClassifyOptions | None = None,
) -> Generator[tuple[Post, Outcome]]:
    """Yield each post with its outcome, in order. Read ahead no further than the window's size.

    Close the generator to stop the pipeline before its end.

    Raises RequestRefused for options that the model does not support, and ModelError if the device fails permanently.
    """
    options = options or ClassifyOptions()
    classifier.label_set(options)
    finished = Finished()
    pipeline = Pipeline(classifier, NullStore(), settings, budget, "offline", finished)
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
            message = finished.messages.get()
            if message is None:
                raise pipeline_error(pipeline)
            done.add(id(message))
            while sent and id(sent[0][0]) in done:
                first, its_posts = sent.popleft()
                done.discard(id(first))
                for post, outcome in zip(its_posts, first.outcomes, strict=True):
                    yield post, outcome or PostError(id=post.id, error=str(first.refused))
    finally:
        pipeline.stop(MAX_STOP_S)


def pipeline_error(pipeline: Pipeline) -> ModelError:
    """Return the error for callers that wait for a failed pipeline."""
    return ModelError(f"The device failed: {pipeline.failure}. Try again; the log above shows the cause.")
