"""Classify without a queue: the worker's pipeline with both ends replaced.

Posts come from an iterator instead of Celery, and outcomes go to an iterator instead of Redis. All other steps are the
worker's, so results and measurements apply to a worker as well.
"""

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice

from feedmill.shared.errors import ModelError, explain_refusals
from feedmill.shared.messages import Classification, ClassifyOptions, DeadLetter, Outcome, Post, PostError
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import select_device
from feedmill.workers.pipeline.calibration import calibrate
from feedmill.workers.pipeline.context import Owner
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.pipeline import Pipeline

#: Seconds to wait for the end of a forward pass when the caller stops early. A process that exits during one aborts.
MAX_STOP_S = 60.0


class Call:
    """One iteration over the outcomes of some posts."""

    def __init__(self) -> None:
        #: Finished messages in any order; None if the pipeline fails.
        self.finished: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        #: True once the caller wants no more outcomes.
        self.abandoned = False


class Callers(Owner):
    """An owner that hands each finished message to the call that submitted it, found in `Message.pending`."""

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
    """A running pipeline without a queue, until `stop` or garbage collection. Several threads may use it at once."""

    def __init__(
        self,
        classifier: Classifier,
        settings: Settings,
        budget: int,
        store: ResultsStore | None = None,
        worker: str = "offline",
    ) -> None:
        self._settings = settings
        self._callers = Callers()
        self._submitting = threading.Lock()
        self._pipeline = Pipeline(classifier, store or NullStore(), settings, budget, worker, self._callers)
        self._pipeline.start()
        weakref.finalize(self, _stop, self._pipeline, os.getpid())

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the pipeline; None while it works."""
        return self._pipeline.failure

    def classify(self, posts: Iterable[Post], options: ClassifyOptions | None = None) -> Iterator[tuple[Post, Outcome]]:
        """Yield each post with its outcome, in order. Read ahead no further than the window's size.

        Closing the iterator early drops the posts that wait. Raises RequestRefused for options that the model does not
        support, and ModelError if the device fails permanently.
        """
        options = options or ClassifyOptions()
        source = iter(posts)
        call = Call()
        sent: deque[tuple[Message, list[Post]]] = deque()
        done: set[int] = set()
        self._callers.calls.add(call)
        try:
            while True:
                while (not sent or self._pipeline.waiting() < self._settings.window_rows) and (
                    some := list(islice(source, self._settings.posts_per_message))
                ):
                    sent.append((self._submit(some, options, call), some))
                if not sent:
                    return
                # Checked after the call was added, so that a failure is either seen here or queued.
                message = None if self.failure else call.finished.get()
                if message is None:
                    raise pipeline_error(self._pipeline)
                done.add(id(message))
                while sent and id(sent[0][0]) in done:
                    first, its_posts = sent.popleft()
                    done.discard(id(first))
                    if first.refused and not first.tracebacks:  # the options, not the posts
                        raise first.refused
                    for post, outcome in zip(its_posts, first.outcomes, strict=True):
                        yield post, outcome or PostError(id=post.id, error=str(first.refused))
        finally:
            call.abandoned = True
            self._callers.calls.discard(call)

    def run(self, message: Message) -> None:
        """Block until a message has its outcomes. Raises ModelError if the device fails permanently."""
        message.pending = call = Call()
        self._callers.calls.add(call)
        try:
            with self._submitting:
                self._pipeline.submit(message)
            if self.failure or call.finished.get() is None:
                raise pipeline_error(self._pipeline)
        finally:
            self._callers.calls.discard(call)

    def _submit(self, posts: Sequence[Post], options: ClassifyOptions, call: Call) -> Message:
        arguments = {"posts": [post.model_dump(exclude_defaults=True) for post in posts], **options.arguments()}
        message = Message(arguments, sent_at=None, pending=call)
        with self._submitting:
            self._pipeline.submit(message)
        return message

    def stop(self) -> None:
        """End the threads without finishing their work, except a forward pass that runs."""
        self._pipeline.stop(MAX_STOP_S)


def classify(
    posts: Iterable[Post],
    classifier: Classifier,
    settings: Settings,
    budget: int,
    options: ClassifyOptions | None = None,
) -> Generator[tuple[Post, Outcome]]:
    """Yield each post with its outcome, in order, from a pipeline that ends with the iteration.

    Close the generator to end it early. Raises as `OfflinePipeline.classify` does, and RequestRefused before a post is
    read.
    """
    classifier.label_set(options or ClassifyOptions())
    pipeline = OfflinePipeline(classifier, settings, budget)
    try:
        yield from pipeline.classify(posts, options)
    finally:
        pipeline.stop()


#: The latest pipeline of `run`, and the process, settings and worker that it was made for. A replaced one ends with its
#: last call.
_latest: tuple[tuple[int, Settings, str | None], OfflinePipeline] | None = None
_lock = threading.Lock()


def run(message: Message, settings: Settings, worker: str | None) -> None:
    """Load the model at the first call, and block until the message has its outcomes.

    Raises UserError, or ModelError if the device fails permanently. worker: name recorded in stored results; None
    stores no results.
    """
    global _latest  # noqa: PLW0603 - one model per process
    made_for = os.getpid(), settings, worker
    with _lock:
        if _latest is None or _latest[0] != made_for:
            _latest = None  # frees the old model first, unless another thread uses it
            _latest = made_for, _make(settings, worker)
        pipeline = _latest[1]
    pipeline.run(message)


def _make(settings: Settings, worker: str | None) -> OfflinePipeline:
    with explain_refusals(settings.model):
        classifier = load_classifier(settings, select_device(settings.device, settings.dtype, settings.engine))
        budget = calibrate(classifier, settings)
    if worker is None:
        return OfflinePipeline(classifier, settings, budget)
    from feedmill.shared.broker import connect  # noqa: PLC0415 - Celery, which callers without results do not need

    return OfflinePipeline(classifier, settings, budget, ResultsStore(connect(settings), settings), worker)


def _stop(pipeline: Pipeline, process: int) -> None:
    if process == os.getpid():  # a forked child has none of the threads, and maybe a lock that one of them held
        pipeline.stop(MAX_STOP_S)


def pipeline_error(pipeline: Pipeline) -> ModelError:
    """Return the error for callers that wait for a failed pipeline."""
    return ModelError(f"The device failed: {pipeline.failure}. Try again; the log above shows the cause.")
