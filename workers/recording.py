"""From outputs to stored results: each post gets its outcome, each message that is complete ends.

The writer thread's part of the pipeline. A result is stored before its message is finished, and what a message lacks,
its dead letters, before its owner lets go of it: whoever is told of an end can count on it. While Redis is away the
thread waits, and after a few micro-batches so does the device: nothing that was computed is thrown away.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from redis.exceptions import RedisError as RedisFault

from shared.errors import RedisError, printable
from shared.messages import Classification, DeadLetter, Outcome, PostError
from shared.refusals import hopeless
from shared.results import Result
from workers.backlog import Backlog
from workers.batch_loop import Computed
from workers.classifiers import Classifier, Row, Scores
from workers.message import Message, PostAtWork, traced
from workers.statistics import Statistics
from workers.suspects import Suspects
from workers.watch import Watch

logger = logging.getLogger(__name__)

#: Finished micro-batches that may wait for the writer before the device thread does: bounds memory when Redis
#: is away, and is more than enough to bridge a slow write.
WRITE_AHEAD = 4
#: Longest pause, in seconds, between two tries to reach Redis.
LONGEST_PAUSE = 5.0


class Store(Protocol):
    """Where results go."""

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> object:
        """Keep a micro-batch's results and dead letters. Raises redis' errors while they cannot be kept."""

    def find(self, wanted: Sequence[tuple[str, str]]) -> Sequence[Classification | None]:
        """What is kept under each (post id, fingerprint). Raises redis' errors while that cannot be told."""

    def keep(self, found: Sequence[Result]) -> None:
        """Write stored results again, too, should they be lost."""

    def catch_up(self) -> None:
        """Write again what was written lately and may be lost. Raises redis' errors."""


class Recording:
    """Stores what was computed, and ends messages.

    worker: the name that results bear. on_finished, on_recorded: see Pipeline. stopping: ends all waiting. timeout:
    seconds after which the classifier counts as hanging. Waiting for Redis, or for Celery's result backend, may take
    any time, and is not watched.
    """

    def __init__(
        self,
        backlog: Backlog,
        store: Store,
        suspects: Suspects | None,
        statistics: Statistics,
        worker: str,
        on_finished: Callable[[Message], None],
        on_recorded: Callable[[Message], None],
        stopping: threading.Event,
        watch: Watch,
        timeout: float,
    ) -> None:
        self._backlog = backlog
        self._store = store
        self._suspects = suspects
        self._statistics = statistics
        self._worker = worker
        self._on_finished = on_finished
        self._on_recorded = on_recorded
        self._stopping = stopping
        self._watch = watch
        self._timeout = timeout
        #: A message comes by itself when it needed no forward pass.
        self._finished: queue.SimpleQueue[Computed | Message | Callable[[], None]] = queue.SimpleQueue()
        #: Room for what the other threads hand over.
        self._room = threading.Semaphore(WRITE_AHEAD)
        self._thread: threading.Thread | None = None

    # For other threads.

    def hand_over(self, finished: Computed | Message) -> None:
        """Have this recorded; waits while there is no room."""
        while not self._stopping.is_set():
            if self._room.acquire(timeout=1):
                self._finished.put(finished)
                return

    def run(self, job: Callable[[], None]) -> None:
        """Run something that talks to Redis before anything that is handed over from now on; at once where this is the
        writer thread.
        """
        if threading.current_thread() is self._thread:
            job()
        else:
            self._finished.put(job)

    def give_up(self, message: Message, fault: Exception, reason: str) -> bool:
        """See Pipeline.give_up."""
        if not self._backlog.drop(message):
            return False
        self.run(partial(self._record_given_up, message, fault, reason))
        return True

    # Its thread.

    def loop(self) -> None:
        self._thread = threading.current_thread()
        while not self._stopping.is_set():
            try:
                finished = self._finished.get(timeout=1)
            except queue.Empty:
                with suppress(RedisFault):  # the next turn, or the next write, tries again
                    self._store.catch_up()
                continue
            if isinstance(finished, Computed | Message):
                self._room.release()
                self._record(*(self._settle(finished) if isinstance(finished, Computed) else ([], [finished])))
            else:
                finished()

    def until_taken(self, write: Callable[[], object]) -> bool:
        """Write to Redis until it does not raise redis' errors; False when the pipeline stops first.

        Raises RedisError, which ends the worker, where no waiting helps.
        """
        pause = 0.1
        while not self._stopping.is_set():
            try:
                write()
                return True
            except RedisFault as fault:
                if why := hopeless(fault):
                    raise RedisError(f"Redis does not take results: {why}") from None
                logger.warning("results wait for Redis (%s); next try in %.1f s", fault, pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        return False

    def _settle(self, computed: Computed) -> tuple[list[Result], list[Message]]:
        """Give each post of a micro-batch its outcome: what is to be stored, and the messages now complete."""
        loaded, rows, outputs, share = computed
        outcomes: list[tuple[PostAtWork, Outcome]]
        if isinstance(outputs, Exception):
            work = rows[0].owner
            reason = f"{type(outputs).__name__}: {outputs}"
            outcomes = [(work, PostError(id=work.post.id, error=reason))]
            work.message.tracebacks.setdefault(work.index, traced(outputs))
        else:
            with self._watch.step("the scoring of a micro-batch", self._timeout):
                scored = loaded.classifier.finish(rows, outputs)
            self._statistics.count(rows, outputs.seconds, share)
            outcomes = [(row.owner, self._outcome(row, scores, loaded.classifier)) for row, scores in scored]
        results, complete = [], []
        for work, outcome in outcomes:
            if work.message.fault:
                continue  # its posts have an outcome: that it took too long
            if isinstance(outcome, Classification):
                results.append(Result(work.post, outcome))
            if work.message.settle(work.index, outcome):
                complete.append(work.message)
        return results, complete

    def _outcome(self, row: Row, scores: Scores, classifier: Classifier) -> Outcome:
        work: PostAtWork = row.owner
        if not all(map(math.isfinite, scores.values())):
            return PostError(id=work.post.id, error="its scores are not finite: the precision overflowed")
        weights = classifier.weights
        best_first = dict(sorted(scores.items(), key=lambda item: -item[1]))
        now = time.time()
        return Classification(
            id=work.post.id,
            label=next(iter(best_first)),
            scores=best_first,
            model=weights.name,
            revision=weights.revision,
            weights=weights.sha256,
            fingerprint=work.fingerprint,
            classified_at=now,
            worker=self._worker,
            device=classifier.device.name,
            queued_seconds=None if work.message.sent_at is None else max(0.0, now - work.message.sent_at),
        )

    def _record(self, results: Sequence[Result], complete: Sequence[Message]) -> None:
        """Store results, let the owner finish the messages that are complete by them, and store what they lack."""
        if not self._write(results, []):
            return
        self._statistics.totals.posts += len(results)
        stored_at = time.time()
        done = [message for message in complete if self._backlog.finish(message)]
        for message in done:
            if message.sent_at is not None:
                self._statistics.lag.add(max(0.0, stored_at - message.sent_at))
            self._on_finished(message)
        self._bury(done)

    def _record_given_up(self, message: Message, fault: Exception, reason: str) -> None:
        message.give_up(fault, reason)
        self._on_finished(message)
        self._bury([message])

    def _bury(self, done: Sequence[Message]) -> None:
        """Store the dead letters of messages that are done with, and let the owner go of them."""
        now = time.time()
        dead = [letter for message in done for letter in message.dead_letters(self._worker, now)]
        if not self._write([], dead):
            return
        if dead:
            self._statistics.totals.failed += len(dead)
            # An error's words may be the post's: of one the log has the kind alone, in which its traceback ends.
            why = dead[0].traceback.split()[-1] if dead[0].traceback else dead[0].reason
            first = printable(f"{dead[0].id}: {why}")
            logger.warning("%d posts failed; the first, %s", len(dead), first)
        for message in done:
            if message.deaths and self._suspects:
                self._suspects.clear(message.task_id)
            self._on_recorded(message)

    def _write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> bool:
        """Write until Redis takes it: results that were computed are kept. False when the pipeline stops first."""
        if not results and not dead:
            return not self._stopping.is_set()
        return self.until_taken(lambda: self._store.write(results, dead))
