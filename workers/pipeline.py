"""From message to stored result, on three threads that overlap: tokenizer, device, writer.

    submit → [tokenizer] prepare → window → [device] forward → [writer] finish, store → on_finished

The device thread is the one that must never wait: tokenization, Redis and Celery happen on the others. The
pipeline knows what a message of posts is, but nothing of Celery: `on_started` and `on_finished` tell its owner
when a message's first row enters a forward pass and when its last post has an outcome. They are called on the
pipeline's threads.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError as RedisFault

from shared.errors import DeviceLost, RequestRefused
from shared.messages import Classification, Outcome, Post, PostError, fingerprint
from shared.results import Result, ResultsStore
from shared.settings import Settings
from workers.classifiers import Classifier, Row, Scores
from workers.message import Message, PostAtWork
from workers.window import Window

logger = logging.getLogger(__name__)

#: Finished micro-batches that may wait for the writer before the device thread does: bounds memory when Redis
#: is away, and is more than enough to bridge a slow write.
WRITE_AHEAD = 4
#: Longest pause, in seconds, between two tries to reach Redis.
LONGEST_PAUSE = 5.0


@dataclass(slots=True)
class Statistics:
    """Since the worker started. Each field is written by one thread alone."""

    posts: int = 0
    failed: int = 0
    batches: int = 0
    rows: int = 0
    tokens: int = 0
    #: What the device computed: each batch's longest row times its rows.
    padded_tokens: int = 0
    device_seconds: float = 0.0

    @property
    def padding_efficiency(self) -> float:
        """Share of the computed tokens that were real ones."""
        return self.tokens / self.padded_tokens if self.padded_tokens else 0.0


#: What the writer is handed: rows with their outputs, or with what went wrong; or a message that needs no
#: forward pass.
Finished = tuple[Sequence[Row], Any] | Message


class Pipeline:
    """Three threads around a window; see the module's first lines.

    worker: the name that results bear. on_failure is called when a thread dies, which it never should.
    """

    def __init__(
        self,
        classifier: Classifier,
        store: ResultsStore,
        settings: Settings,
        worker: str,
        on_started: Callable[[Message], None],
        on_finished: Callable[[Message], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._classifier = classifier
        self._store = store
        self._worker = worker
        self._on_started = on_started
        self._on_finished = on_finished
        self._on_failure = on_failure
        self._token_budget = settings.token_budget or classifier.device.token_budget
        self._batch_rows = settings.batch_rows
        self.statistics = Statistics()
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        #: Guards the window, the jobs, and every message's `started` and `abandoned`.
        self._ready = threading.Condition()
        self._window: Window[Row] = Window(time.monotonic)
        self._jobs: list[Callable[[], None]] = []
        self._finished: queue.Queue[Finished] = queue.Queue(WRITE_AHEAD)
        #: Posts taken in by `submit`, and those of them that the tokenizer is done with: two counts, since each
        #: is written by one thread.
        self._posts_in = self._posts_prepared = 0
        self._threads = [
            threading.Thread(target=self._watched, args=(loop,), name=name, daemon=True)
            for name, loop in (
                ("tokenizer", self._tokenizer_loop),
                ("device", self._device_loop),
                ("writer", self._writer_loop),
            )
        ]

    # For the owner, on its own thread.

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, message: Message) -> None:
        """Take a message in. It ends with `on_finished`, unless it is forgotten or the pipeline stops."""
        self._posts_in += len(message.raw_posts)
        self._arrived.put(message)

    def waiting(self) -> int:
        """Rows that wait for the device; a post that is not tokenized yet counts as one."""
        return len(self._window) + self._posts_in - self._posts_prepared

    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited for the device."""
        with self._ready:
            return self._window.oldest_age()

    def run_on_device_thread(self, job: Callable[[], None]) -> None:
        """Run something that is no micro-batch between two micro-batches."""
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()

    def forget(self, messages: Iterable[Message]) -> None:
        """Drop those of the messages that have not started: they will be delivered again."""
        with self._ready:
            for message in messages:
                message.abandoned = not message.started

    def stop(self, seconds: float = 5.0) -> None:
        """End the threads, whatever they hold; waits at most `seconds` for each."""
        self._stopping.set()
        self._arrived.put(None)
        with self._ready:
            self._ready.notify()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(seconds)

    # The three threads.

    def _watched(self, loop: Callable[[], None]) -> None:
        """A thread that dies must not leave the others, and the queue, waiting for it."""
        try:
            loop()
        except BaseException as error:
            self.failure = error
            logger.critical(
                "the %s thread died; this worker ends, its messages go back to the queue",
                threading.current_thread().name,
                exc_info=True,
            )
            self._on_failure()

    def _tokenizer_loop(self) -> None:
        while (message := self._arrived.get()) and not self._stopping.is_set():
            rows: list[Row] = []
            try:
                rows = self._prepare(message)
            except RequestRefused as refused:
                message.refused = refused
            except Exception as error:
                logger.exception("a message of %d posts cannot be prepared", len(message.raw_posts))
                message.refused = RequestRefused(f"its posts cannot be prepared: {error!r}")
            if rows:
                with self._ready:
                    for row in rows:
                        self._window.add(row)
                    self._ready.notify()
            else:
                self._hand_to_writer(message)
            self._posts_prepared += len(message.raw_posts)

    def _prepare(self, message: Message) -> list[Row]:
        """Rows for the posts that are good; the others are settled with their error."""
        posts, options = message.read()
        label_set = self._classifier.label_set(options)
        at_work = []
        for index, post in enumerate(posts):
            if isinstance(post, Post):
                at_work.append(PostAtWork(post, message, index))
            else:
                message.settle(index, post)
        prepared = self._classifier.prepare([work.post.text for work in at_work], label_set) if at_work else []
        for work, rows in zip(at_work, prepared, strict=True):
            for row in rows:
                row.owner = work
        return [row for rows in prepared for row in rows]

    def _device_loop(self) -> None:
        while (rows := self._next_batch()) is not None:
            for part, outputs in self._forward(rows):
                self._hand_to_writer((part, outputs))

    def _next_batch(self) -> list[Row] | None:
        """The next micro-batch, once there is one; None when the pipeline stops. Runs jobs in between."""
        while not self._stopping.is_set():
            with self._ready:
                self._ready.wait_for(lambda: self._jobs or self._window or self._stopping.is_set())
                jobs, self._jobs = self._jobs, []
                rows = self._window.take(self._token_budget, self._batch_rows)
                rows = [row for row in rows if not row.owner.message.abandoned]
                messages = {id(row.owner.message): row.owner.message for row in rows}
                starting = [message for message in messages.values() if not message.started]
                for message in starting:
                    message.started = True
            for job in jobs:
                job()
            for message in starting:
                self._on_started(message)
            if rows:
                return rows
        return None

    def _forward(self, rows: Sequence[Row]) -> list[tuple[Sequence[Row], Any]]:
        """Outputs of the batch; when it raises, of its halves, until only the culprit has none."""
        began = time.monotonic()
        try:
            outputs = self._classifier.forward(rows)
        except DeviceLost:
            raise
        except Exception as error:
            if len(rows) == 1:
                logger.exception("post %s cannot be classified", rows[0].owner.post.id)
                return [(rows, error)]
            middle = len(rows) // 2
            return self._forward(rows[:middle]) + self._forward(rows[middle:])
        statistics = self.statistics
        statistics.device_seconds += time.monotonic() - began
        statistics.batches += 1
        statistics.rows += len(rows)
        statistics.tokens += sum(row.length for row in rows)
        statistics.padded_tokens += len(rows) * max(row.length for row in rows)
        return [(rows, outputs)]

    def _hand_to_writer(self, finished: Finished) -> None:
        while not self._stopping.is_set():
            try:
                self._finished.put(finished, timeout=1)
            except queue.Full:
                continue
            return

    def _writer_loop(self) -> None:
        while not self._stopping.is_set():
            try:
                finished = self._finished.get(timeout=1)
            except queue.Empty:
                continue
            results: list[Result] = []
            if isinstance(finished, Message):
                complete = [finished]
            else:
                results, complete = self._settle(*finished)
            failed = sum(message.failed() for message in complete)
            if self._write(results, failed):
                self.statistics.posts += len(results)
                self.statistics.failed += failed
                for message in complete:
                    self._complete(message)

    def _settle(self, rows: Sequence[Row], outputs: Any) -> tuple[list[Result], list[Message]]:
        """Give each post of a micro-batch its outcome: what is to be stored, and the messages now complete."""
        outcomes: list[tuple[PostAtWork, Outcome]]
        if isinstance(outputs, Exception):
            work = rows[0].owner
            outcomes = [(work, PostError(id=work.post.id, error=f"{type(outputs).__name__}: {outputs}"))]
        else:
            scored = self._classifier.finish(rows, outputs)
            outcomes = [(row.owner, self._outcome(row, scores)) for row, scores in scored]
        results, complete = [], []
        for work, outcome in outcomes:
            if isinstance(outcome, Classification):
                results.append(Result(work.post, outcome))
            work.message.settle(work.index, outcome)
            if not work.message.unsettled:
                complete.append(work.message)
        return results, complete

    def _outcome(self, row: Row, scores: Scores) -> Outcome:
        work: PostAtWork = row.owner
        if not all(map(math.isfinite, scores.values())):
            return PostError(id=work.post.id, error="its scores are not finite: the precision overflowed")
        weights = self._classifier.weights
        best_first = dict(sorted(scores.items(), key=lambda item: -item[1]))
        now = time.time()
        return Classification(
            id=work.post.id,
            label=next(iter(best_first)),
            scores=best_first,
            model=weights.name,
            revision=weights.revision,
            weights=weights.sha256,
            fingerprint=fingerprint(work.post, row.label_set.recipe),
            classified_at=now,
            worker=self._worker,
            device=self._classifier.device.name,
            queued_seconds=None if work.message.sent_at is None else max(0.0, now - work.message.sent_at),
        )

    def _complete(self, message: Message) -> None:
        with self._ready:
            if message.abandoned:
                return
            starting, message.started = not message.started, True
        if starting:  # nothing of it needed a forward pass
            self._on_started(message)
        if message.failed():
            reason = message.refused or message.errors()[0].error
            logger.warning("%d of %d posts failed; the first: %s", message.failed(), len(message.outcomes), reason)
        self._on_finished(message)

    def _write(self, results: Sequence[Result], failed: int) -> bool:
        """Write until Redis takes it: results that were computed are kept. False when the pipeline stops first."""
        pause = 0.1
        while not self._stopping.is_set():
            try:
                self._store.write(results, failed)
                return True
            except RedisFault as fault:
                logger.warning("results wait for Redis (%s); next try in %.1f s", fault, pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        return False
