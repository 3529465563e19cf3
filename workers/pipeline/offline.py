"""Classify without a queue: the worker's pipeline with both ends replaced.

Posts come from an iterator instead of Celery, and outcomes go to an iterator instead of Redis. All
other steps are the worker's, so results and measurements apply to a worker as well.
"""

import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from feedmill.shared.errors import ModelError, explain_refusals
from feedmill.shared.language import languages_of
from feedmill.shared.messages import (
    Classification,
    ClassifyOptions,
    DeadLetter,
    Outcome,
    Post,
    PostError,
)
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import select_devices
from feedmill.workers.pipeline.backlog import Loaded
from feedmill.workers.pipeline.calibration import calibrate
from feedmill.workers.pipeline.context import Owner
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.pipeline import Pipeline

#: Seconds to wait for the end of a forward pass when the caller stops early. A process that exits
#: during one aborts.
MAX_STOP_S = 60.0


class Call:
    """One iteration over the outcomes of some posts."""

    def __init__(self) -> None:
        #: Finished messages in any order; None if the pipeline fails.
        self.finished: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        #: True once the caller wants no more outcomes.
        self.abandoned = False


class Callers(Owner):
    """An owner that hands each finished message to the call that submitted it, found in
    `Message.pending`.
    """

    def __init__(self) -> None:
        self.calls: set[Call] = set()

    def admit(self, message: Message) -> bool:
        return not message.pending.abandoned

    def recorded(self, message: Message) -> None:
        message.pending.finished.put(message)

    def failed(self) -> None:
        for call in list(self.calls):
            call.finished.put(None)


class NullStore(ResultsStore):
    """A results store that stores nothing. The outcomes are in the messages."""

    def __init__(self) -> None: ...
    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:  # noqa: ARG002
        return 0

    def keep(self, found: Sequence[Result]) -> None: ...
    def catch_up(self) -> None: ...
    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        return [None] * len(wanted)


class OfflinePipeline:
    """A running pipeline for each device, without a queue, until `stop` or garbage collection.

    models: the same model on each device. Several threads may use it at once. It fails as a whole
    if a device fails.
    """

    def __init__(
        self,
        models: Sequence[Loaded],
        settings: Settings,
        store: ResultsStore | None = None,
        worker: str = "offline",
    ) -> None:
        self._settings = settings
        self._callers = Callers()
        self._submitting = threading.Lock()
        self._pipelines = [
            Pipeline(
                model.classifier,
                store or NullStore(),
                settings,
                model.budget,
                worker,
                self._callers,
                statistics_level=logging.DEBUG,
            )
            for model in models
        ]
        for pipeline in self._pipelines:
            pipeline.start()
            weakref.finalize(self, _stop, pipeline, os.getpid())

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the pipeline of a device; None while all work."""
        for pipeline in self._pipelines:
            if pipeline.failure:
                return pipeline.failure
        return None

    def classify(
        self, posts: Iterable[Post], options: ClassifyOptions | None = None
    ) -> Iterator[tuple[Post, Outcome]]:
        """Yield each post with its outcome, in order.

        Read ahead no further than the window's size.

        Closing the iterator early drops the posts that wait. Raises RequestRefused for options
        that the model does not support, and ModelError if the device fails permanently.
        """
        options = options or ClassifyOptions()
        source = iter(posts)
        call = Call()
        #: Messages in the order of their posts.
        sent: deque[tuple[Message, list[Post]]] = deque()
        finished: set[int] = set()
        self._callers.calls.add(call)
        try:
            while True:
                while not sent or self._has_room():
                    batch = list(islice(source, self._settings.posts_per_message))
                    if not batch:
                        break
                    message = self._submit(batch, options, call)
                    sent.append((message, batch))
                if not sent:
                    return
                message = self._wait_for(call)
                finished.add(id(message))
                while sent:
                    first, first_posts = sent[0]
                    if id(first) not in finished:
                        break
                    sent.popleft()
                    finished.discard(id(first))
                    yield from _outcomes(first, first_posts)
        finally:
            call.abandoned = True
            self._callers.calls.discard(call)

    def run(self, message: Message) -> None:
        """Block until a message has its outcomes.

        Raises ModelError if the device fails permanently.
        """
        call = Call()
        message.pending = call
        self._callers.calls.add(call)
        try:
            with self._submitting:
                self._least_loaded().submit(message)
            self._wait_for(call)
        finally:
            self._callers.calls.discard(call)

    def _wait_for(self, call: Call) -> Message:
        """Wait for the call's next finished message.

        The call is in `_callers`, so that a failure is either seen here or queued as None. Raises
        ModelError if the device fails permanently.
        """
        finished = None
        if not self.failure:
            finished = call.finished.get()
        if finished is None:
            raise pipeline_error(self.failure)
        return finished

    def _submit(
        self, posts: Sequence[Post], options: ClassifyOptions, call: Call
    ) -> Message:
        raw_posts = [post.model_dump(exclude_defaults=True) for post in posts]
        arguments = {"posts": raw_posts, **options.arguments()}
        message = Message(
            arguments,
            sent_at=None,
            pending=call,
        )
        with self._submitting:
            self._least_loaded().submit(message)
        return message

    def _has_room(self) -> bool:
        """Return whether the pipeline that gets the next message takes more rows ahead."""
        return self._least_loaded().waiting() < self._settings.window_rows

    def _least_loaded(self) -> Pipeline:
        """Return the pipeline with the least work for its device's speed, which gets the next
        message.
        """
        if len(self._pipelines) == 1:
            return self._pipelines[0]
        return min(self._pipelines, key=_load)

    def stop(self) -> None:
        """End the threads without finishing their work, except a forward pass that runs."""
        for pipeline in self._pipelines:
            pipeline.stop(MAX_STOP_S)


def _outcomes(
    message: Message, posts: Sequence[Post]
) -> Iterator[tuple[Post, Outcome]]:
    """Yield a finished message's posts with their outcomes. Raises RequestRefused."""
    refused = message.refused
    if refused and not message.tracebacks:
        raise refused  # the options, not the posts
    for post, outcome in zip(posts, message.outcomes, strict=True):
        if outcome is None:
            yield post, PostError(id=post.id, error=str(refused))
        else:
            yield post, outcome


def _load(pipeline: Pipeline) -> float:
    """Return how full a pipeline is: its waiting rows, as a share of those that may wait."""
    return pipeline.waiting() / pipeline.max_waiting()


def classify(
    posts: Iterable[Post],
    models: Sequence[Loaded],
    settings: Settings,
    options: ClassifyOptions | None = None,
) -> Generator[tuple[Post, Outcome]]:
    """Yield each post with its outcome, in order, from a pipeline that ends with the iteration.

    models: the same model on each device to use.

    Close the generator to end it early. Raises as `OfflinePipeline.classify` does, and
    RequestRefused before a post is read.
    """
    models[0].classifier.label_set(options or ClassifyOptions())
    pipeline = OfflinePipeline(models, settings)
    try:
        yield from pipeline.classify(posts, options)
    finally:
        pipeline.stop()


def load_models(settings: Settings) -> list[Loaded]:
    """Load the model in the settings onto each device in the settings, and find its token budget
    there.

    Raises UserError for a model that cannot be loaded or languages that cannot be detected, and
    SettingsError if the machine lacks a device.
    """
    languages_of(settings)
    devices = select_devices(
        settings.devices, settings.device, settings.dtype, settings.engine
    )
    models: list[Loaded] = []
    with explain_refusals(settings.model):
        for device in devices:
            classifier = load_classifier(settings, device)
            budget = calibrate(classifier, settings)
            models.append(Loaded(classifier, budget))
    return models


class _Use(NamedTuple):
    """The process that has a pipeline, and the settings and worker that it was made for."""

    process: int
    settings: Settings
    worker: str | None


class _Latest(NamedTuple):
    """A pipeline, and what it was made for."""

    use: _Use
    pipeline: OfflinePipeline


#: The latest pipeline of `run`. A replaced one ends with its last call.
_latest: _Latest | None = None
_lock = threading.Lock()


def run(message: Message, settings: Settings, worker: str | None) -> None:
    """Load the model at the first call, and block until the message has its outcomes.

    Raises UserError, or ModelError if the device fails permanently. worker: name recorded in
    stored results; None stores no results.
    """
    pipeline = _pipeline_for(settings, worker)
    pipeline.run(message)


def _pipeline_for(settings: Settings, worker: str | None) -> OfflinePipeline:
    """Return the latest pipeline, or a new one if that was made for another use."""
    global _latest  # noqa: PLW0603 - one model per process
    use = _Use(os.getpid(), settings, worker)
    with _lock:
        if _latest is not None and _latest.use == use:
            return _latest.pipeline
        # Free the old model before the new one is loaded, unless another thread uses it.
        _latest = None
        pipeline = _open_pipeline(settings, worker)
        _latest = _Latest(use, pipeline)
        return pipeline


def _open_pipeline(settings: Settings, worker: str | None) -> OfflinePipeline:
    models = load_models(settings)
    if worker is None:
        return OfflinePipeline(models, settings)
    # Celery, which callers without results do not need.
    from feedmill.shared.broker import connect  # noqa: PLC0415

    store = ResultsStore(connect(settings), settings)
    return OfflinePipeline(models, settings, store, worker)


def _stop(pipeline: Pipeline, process: int) -> None:
    # a forked child has none of the threads, and maybe a lock that one of them held
    if process == os.getpid():
        pipeline.stop(MAX_STOP_S)


def pipeline_error(failure: BaseException | None) -> ModelError:
    """Return the error for callers that wait for a failed pipeline."""
    return ModelError(
        f"The device failed: {failure}. Try again; the log above shows the cause."
    )
