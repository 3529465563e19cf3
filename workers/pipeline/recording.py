"""Recording: turn outputs into stored results, set each post's outcome, and finish complete
messages.

This is the writer thread's part of the pipeline. A message's results are stored before the message
is finished, and its dead letters before its acknowledgement. While Redis is unreachable, the
writer thread waits; after a few micro-batches, the device waits too. No computed result is lost.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from redis.exceptions import RedisError

from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import RedisUnavailable, clause, printable
from feedmill.shared.language import is_in_another
from feedmill.shared.messages import Classification, DeadLetter, Outcome
from feedmill.shared.redis_errors import is_permanent
from feedmill.shared.results import Origin, Result
from feedmill.workers.models.classifiers import Outputs
from feedmill.workers.pipeline.backlog import Backlog, Computed
from feedmill.workers.pipeline.context import Context, WorkQueue
from feedmill.workers.pipeline.message import Message, PendingPost, traceback_of
from feedmill.workers.pipeline.outcomes import error_of_post, make_outcome

logger = logging.getLogger(__name__)

#: Micro-batches, and messages without one, that may wait for the writer thread; beyond them, the
#: device waits too. Limits memory while Redis is unreachable, and covers slow writes easily.
MAX_UNWRITTEN = 16
#: Posts of several micro-batches at which no more are stored together.
POSTS_TOGETHER = 256
#: Seconds without work after which results that Redis may have lost are written again.
IDLE_S = 1.0
#: Pauses between two attempts to write to Redis.
WRITE_RETRIES = Backoff(first_s=0.1, max_s=5.0)


class Recording:
    """Store results and finish messages."""

    def __init__(self, backlog: Backlog, context: Context) -> None:
        self._backlog = backlog
        self._context = context
        #: Work for the writer thread. A message appears by itself if it needed no forward pass.
        self._finished: WorkQueue[Computed | Message] = WorkQueue(
            self._record_together, _posts_of, lambda: POSTS_TOGETHER
        )
        self._room = threading.Semaphore(MAX_UNWRITTEN)
        self._thread: threading.Thread | None = None

    # Called by other threads.

    def hand_over(self, finished: Computed | Message) -> None:
        """Queue work for the writer thread. Block while the queue is full."""
        while not self._context.stopping.is_set():
            if self._room.acquire(timeout=1):
                self._finished.put(finished)
                return

    def run(self, job: Callable[[], None]) -> None:
        """Run a job that uses Redis before any work handed over later.

        On the writer thread, run it at once.
        """
        if threading.current_thread() is self._thread:
            job()
        else:
            self._finished.put(job)

    def give_up(self, message: Message, fault: Exception, reason: str) -> bool:
        """Fail a whole message now. Return False if it is already finished or dropped.

        The message's waiting rows are not computed, and it ends like other messages, with `fault`
        as its outcome. Posts without an outcome fail with `reason`. Other messages in the same
        micro-batch are not affected.
        """
        if not self._backlog.drop(message):
            return False
        self.run(partial(self._record_given_up, message, fault, reason))
        return True

    # Called on the writer thread.

    def loop(self) -> None:
        """Record work until the pipeline stops.

        Between work, rewrite results that Redis may have lost.
        """
        self._thread = threading.current_thread()
        while not self._context.stopping.is_set():
            try:
                self._finished.work(IDLE_S)
            except queue.Empty:
                with suppress(RedisError):  # retried by the next iteration or write
                    self._context.store.catch_up()

    def _record_together(self, finished: Sequence[Computed | Message]) -> None:
        """Record micro-batches, and messages that needed no forward pass, with one write."""
        self._room.release(len(finished))
        results: list[Result] = []
        complete: list[Message] = []
        for work in finished:
            if isinstance(work, Message):
                complete.append(work)
            else:
                batch_results, batch_complete = self._set_outcomes(work)
                results += batch_results
                complete += batch_complete
        self._record(results, complete)

    def retry_write(self, write: Callable[[], object]) -> bool:
        """Retry a write to Redis until it succeeds. Return False if the pipeline stops first.

        Raises RedisUnavailable, which ends the worker, for a permanent error.
        """
        failures = 0
        while not self._context.stopping.is_set():
            try:
                write()
                return True
            except RedisError as fault:
                if is_permanent(fault):
                    raise RedisUnavailable(
                        f"Redis permanently rejects results ({clause(fault)}). See "
                        "docs/redis.md."
                    ) from None
                delay = WRITE_RETRIES.pause_s(failures)
                failures += 1
                logger.warning(
                    "cannot store results (%s); retrying in %.1f s", fault, delay
                )
                self._context.stopping.wait(delay)
        return False

    def _set_outcomes(self, computed: Computed) -> tuple[list[Result], list[Message]]:
        """Set the outcome of each post in a micro-batch.

        Return the results to store and the messages now complete.
        """
        outputs = computed.outputs
        outcomes: list[tuple[PendingPost, Outcome]]
        if isinstance(outputs, Exception):
            # The batch loop splits a failing micro-batch until a single row fails.
            (row,) = computed.rows
            work: PendingPost = row.owner
            work.message.tracebacks.setdefault(work.index, traceback_of(outputs))
            outcomes = [(work, error_of_post(work.post.id, outputs))]
        else:
            outcomes = self._wait_for_scores(computed, outputs)
            self._context.statistics.count(
                computed.rows, outputs.seconds, computed.share
            )
        self._context.observer.computed(computed)

        results = []
        complete = []
        for work, outcome in outcomes:
            message = work.message
            if message.fault:
                continue  # the whole message failed: its posts already have outcomes
            if isinstance(outcome, Classification):
                results.append(Result(work.post, outcome))
            if message.set_outcome(work.index, outcome):
                complete.append(message)
        return results, complete

    def _wait_for_scores(
        self, computed: Computed, outputs: Outputs
    ) -> list[tuple[PendingPost, Outcome]]:
        """Wait for the device; return each post whose last row was computed, with its outcome."""
        classifier = computed.loaded.classifier
        with self._context.watch.step("the scoring of a micro-batch"):
            scored = classifier.finish(computed.rows, outputs)
        weights = classifier.weights
        origin = Origin(
            model=weights.name,
            revision=weights.revision,
            weights=weights.sha256,
            worker=self._context.worker,
            device=classifier.device.name,
        )
        outcomes = []
        for row, scores in scored:
            work = row.owner
            label_set = row.label_set
            outcome = make_outcome(
                work.post.id,
                scores,
                label_set.none,
                work.fingerprint,
                work.message.sent_at,
                origin,
                language=work.language,
                is_foreign=is_in_another(work.language, label_set.languages),
                labels_threshold=label_set.labels_threshold,
            )
            outcomes.append((work, outcome))
        return outcomes

    def _record(self, results: Sequence[Result], complete: Sequence[Message]) -> None:
        """Store results, finish the messages that they complete, and store those messages' dead
        letters.
        """
        self._context.observer.storing(complete)
        if not self._write(results, []):
            return
        statistics = self._context.statistics
        statistics.totals.posts += len(results)
        stored_at = time.time()
        done = [message for message in complete if self._backlog.finish(message)]
        for message in done:
            if message.sent_at is not None:
                lag = max(0.0, stored_at - message.sent_at)
                statistics.lag.add(lag)
            self._context.owner.finished(message)
        self._write_dead_letters(done)

    def _record_given_up(self, message: Message, fault: Exception, reason: str) -> None:
        message.give_up(fault, reason)
        self._context.observer.storing([message])
        self._context.owner.finished(message)
        self._write_dead_letters([message])

    def _write_dead_letters(self, done: Sequence[Message]) -> None:
        """Store the dead letters of finished messages, then have the owner acknowledge them."""
        worker = self._context.worker
        now = time.time()
        letters: list[DeadLetter] = []
        failed: list[Message] = []
        for message in done:
            letters_of_message = message.dead_letters(worker, now)
            if letters_of_message:
                letters += letters_of_message
                failed.append(message)
        if not self._write([], letters):
            return
        if letters:
            self._context.statistics.totals.failed += len(letters)
            first = _summary_of(letters[0])
            logger.warning(
                "%d posts failed; the first: %s",
                len(letters),
                first,
                extra=failed[0].log_fields(),
            )
        self._context.observer.stored(done)
        for message in done:
            self._context.owner.recorded(message)

    def _write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> bool:
        """Retry a write to the store until it succeeds.

        Return False if the pipeline stops first.
        """
        if not results and not dead:
            return not self._context.stopping.is_set()
        return self.retry_write(lambda: self._context.store.write(results, dead))


def _summary_of(letter: DeadLetter) -> str:
    """Return a dead letter's post and reason for the log.

    An error's text may quote a post, so the log shows only its type, the last word of the
    traceback.
    """
    reason = letter.reason
    if letter.traceback:
        reason = letter.traceback.split()[-1]
    return printable(f"{letter.id}: {reason}")


def _posts_of(finished: Computed | Message) -> int:
    if isinstance(finished, Computed):
        return len(finished.rows)
    return max(1, len(finished.raw_posts))
