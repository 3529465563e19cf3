"""Classifying without a queue: the worker's own pipeline with its ends swapped.

Posts come from an iterator, or from whoever calls the task, instead of the queue, and outcomes go back there. What lies
between (window, lanes, halving of failing batches) is the worker's, so that what is tried, tuned or measured here is
what a worker does.
"""

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from shared.broker import connect
from shared.errors import DeviceFull, DeviceLost, ModelError
from shared.messages import ClassifyOptions, DeadLetter, Outcome, Post, PostError
from shared.results import Result, ResultsStore
from shared.settings import Settings
from workers import device
from workers.calibration import TokenBudget, calibrate
from workers.classifiers import Classifier
from workers.classifiers.choose import load_classifier
from workers.message import Message
from workers.pipeline import Pipeline

logger = logging.getLogger(__name__)


class _Nowhere:
    """Takes the place of the results store: the outcomes are in the messages."""

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> None:
        """Nothing is kept."""

    def find(self, wanted: Sequence[tuple[str, str]]) -> Sequence[None]:
        """Nothing is there."""
        return [None] * len(wanted)


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
        _Nowhere(),
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
                raise _lost(pipeline)
            done.add(id(message))
            while sent and id(sent[0][0]) in done:
                first, its_posts = sent.popleft()
                done.discard(id(first))
                for post, outcome in zip(its_posts, first.outcomes, strict=True):
                    yield post, outcome or PostError(id=post.id, error=str(first.refused))
    finally:
        pipeline.stop()


class Here:
    """The pipeline of this process, for those who call the task instead of sending it.

    worker: the name that results bear; they are stored then, and else nowhere.
    """

    #: One model a process: the last that was asked for.
    _latest: ClassVar["Here | None"] = None
    _making = threading.Lock()

    @classmethod
    def classify(cls, message: Message, settings: Settings, worker: str | None) -> None:
        """Return when the message has its outcomes. Raises UserError; ModelError where the device fails for good."""
        here = cls._of(settings, worker)
        try:
            here._classify(message)
        finally:
            with cls._making:
                here._users -= 1
                here._end_unless_needed()

    @classmethod
    def _of(cls, settings: Settings, worker: str | None) -> "Here":
        """What was made before, where it is this process's and the same."""
        with cls._making:
            latest, wanted = cls._latest, (os.getpid(), settings, worker)
            if latest is None or latest._made_for != wanted:
                cls._latest = None  # what replaces it may fail
                if latest and latest._made_for[0] == os.getpid():
                    latest._end_unless_needed()
                cls._latest = latest = cls(settings, worker)
            latest._users += 1
            return latest

    def _end_unless_needed(self) -> None:
        """What was replaced ends with the last thread that uses it. Locked."""
        if self is not Here._latest and not self._users:
            self._pipeline.stop()

    def __init__(self, settings: Settings, worker: str | None) -> None:
        self._made_for = (os.getpid(), settings, worker)
        self._users = 0
        try:
            classifier = load_classifier(settings, device.choose(settings.device, settings.dtype, settings.engine))
            budget = calibrate(classifier, settings)
        except (DeviceFull, DeviceLost) as error:
            raise ModelError(f"The device failed: {error}") from None
        self._submitting = threading.Lock()
        self._pipeline = Pipeline(
            classifier,
            ResultsStore(connect(settings), settings) if worker else _Nowhere(),
            settings,
            budget,
            worker or "here",
            on_recorded=lambda message: message.ticket.set(),
            on_failure=lambda: None,
        )
        self._pipeline.start()

    def _classify(self, message: Message) -> None:
        message.ticket = done = threading.Event()
        with self._submitting:
            self._pipeline.submit(message)
        while not done.wait(1):
            if self._pipeline.failure:
                raise _lost(self._pipeline)


def _lost(pipeline: Pipeline) -> ModelError:
    return ModelError(f"The device failed: {pipeline.failure}. See the log above.")
