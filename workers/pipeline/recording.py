"""Recording: turn outputs into stored results, set each post's outcome, and finish complete messages.

This is the writer thread's part of the pipeline. A message's results are stored before the message is finished, and its
dead letters before its acknowledgement. While Redis is unreachable, the writer thread waits; after a few micro-batches,
the device waits too. No computed result is lost.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter

from redis.exceptions import RedisError

from feedmill.shared.errors import RedisUnavailable, clause, printable
from feedmill.shared.messages import Classification, DeadLetter, Outcome, PostError
from feedmill.shared.redis_errors import is_permanent
from feedmill.shared.results import Result
from feedmill.workers.models.classifiers import Row, Scores
from feedmill.workers.models.weights import Weights
from feedmill.workers.pipeline.backlog import Backlog, Computed
from feedmill.workers.pipeline.context import Context, WorkQueue
from feedmill.workers.pipeline.message import Message, PendingPost, traceback_of

logger = logging.getLogger(__name__)

#: Micro-batches, and messages without one, that may wait for the writer thread; beyond them, the device waits too.
#: Limits memory while Redis is unreachable, and covers slow writes easily.
MAX_UNWRITTEN = 16
#: Posts of several micro-batches at which no more are stored together.
POSTS_TOGETHER = 256
#: Seconds without work after which results that Redis may have lost are written again.
IDLE_S = 1.0
#: The type of scores that need no validation.
FLOAT = frozenset({float})
#: Maximum seconds between two attempts to write to Redis.
MAX_RETRY_DELAY_S = 5.0


class Recording:
    """Store results and finish messages."""

    def __init__(self, backlog: Backlog, context: Context) -> None:
        self._backlog = backlog
        self._context = context
        #: Work for the writer thread. A message appears by itself if it needed no forward pass.
        self._finished: WorkQueue[Computed | Message] = WorkQueue(self._record_together, _posts_of, POSTS_TOGETHER)
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
        """Run a job that uses Redis before any work handed over later. On the writer thread, run it at once."""
        if threading.current_thread() is self._thread:
            job()
        else:
            self._finished.put(job)

    def give_up(self, message: Message, fault: Exception, reason: str) -> bool:
        """Fail a whole message now. Return False if it is already finished or dropped.

        The message's waiting rows are not computed, and it ends like other messages, with `fault` as its outcome. Posts
        without an outcome fail with `reason`. Other messages in the same micro-batch are not affected.
        """
        if not self._backlog.drop(message):
            return False
        self.run(partial(self._record_given_up, message, fault, reason))
        return True

    # Called on the writer thread.

    def loop(self) -> None:
        """Record work until the pipeline stops. Between work, rewrite results that Redis may have lost."""
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
        for each in finished:
            if isinstance(each, Message):
                complete.append(each)
            else:
                stored, completed = self._set_outcomes(each)
                results += stored
                complete += completed
        self._record(results, complete)

    def retry_write(self, write: Callable[[], object]) -> bool:
        """Retry a write to Redis until it succeeds. Return False if the pipeline stops first.

        Raises RedisUnavailable, which ends the worker, for a permanent error.
        """
        delay = 0.1
        while not self._context.stopping.is_set():
            try:
                write()
                return True
            except RedisError as fault:
                if is_permanent(fault):
                    why = f"Redis permanently rejects results ({clause(fault)}). See docs/redis.md."
                    raise RedisUnavailable(why) from None
                logger.warning("cannot store results (%s); retrying in %.1f s", fault, delay)
                self._context.stopping.wait(delay)
                delay = min(2 * delay, MAX_RETRY_DELAY_S)
        return False

    def _set_outcomes(self, computed: Computed) -> tuple[list[Result], list[Message]]:
        """Set the outcome of each post in a micro-batch. Return the results to store and the messages now complete."""
        loaded, rows, outputs, share = computed
        outcomes: list[tuple[PendingPost, Outcome]]
        if isinstance(outputs, Exception):
            work = rows[0].owner
            reason = f"{type(outputs).__name__}: {outputs}"
            outcomes = [(work, PostError(id=work.post.id, error=reason))]
            work.message.tracebacks.setdefault(work.index, traceback_of(outputs))
        else:
            with self._context.watch.step("the scoring of a micro-batch"):
                scored = loaded.classifier.finish(rows, outputs)
            self._context.statistics.count(rows, outputs.seconds, share)
            device = loaded.classifier.device.name
            outcomes = [
                (row.owner, self._outcome(row, scores, loaded.classifier.weights, device)) for row, scores in scored
            ]
        results, complete = [], []
        for work, outcome in outcomes:
            if work.message.fault:
                continue  # the whole message failed: its posts already have outcomes
            if isinstance(outcome, Classification):
                results.append(Result(work.post, outcome))
            if work.message.set_outcome(work.index, outcome):
                complete.append(work.message)
        return results, complete

    def _outcome(self, row: Row, scores: Scores, weights: Weights, device: str) -> Outcome:
        work: PendingPost = row.owner
        if not math.isfinite(sum(scores.values())):
            return PostError(
                id=work.post.id,
                error="the scores are not finite, because the precision overflowed; set FEEDMILL_DTYPE=float32",
            )
        best_first = dict(sorted(scores.items(), key=itemgetter(1), reverse=True))
        now = time.time()
        # Scores of plug-ins can be of other types.
        create = Classification.model_construct if FLOAT.issuperset(map(type, scores.values())) else Classification
        return create(
            id=work.post.id,
            label=next(iter(best_first)),
            scores=best_first,
            model=weights.name,
            revision=weights.revision,
            weights=weights.sha256,
            fingerprint=work.fingerprint,
            classified_at=now,
            worker=self._context.worker,
            device=device,
            queued_seconds=None if work.message.sent_at is None else max(0.0, now - work.message.sent_at),
        )

    def _record(self, results: Sequence[Result], complete: Sequence[Message]) -> None:
        """Store results, finish the messages that they complete, and store those messages' dead letters."""
        if not self._write(results, []):
            return
        self._context.statistics.totals.posts += len(results)
        stored_at = time.time()
        done = [message for message in complete if self._backlog.finish(message)]
        for message in done:
            if message.sent_at is not None:
                self._context.statistics.lag.add(max(0.0, stored_at - message.sent_at))
            self._context.owner.finished(message)
        self._write_dead_letters(done)

    def _record_given_up(self, message: Message, fault: Exception, reason: str) -> None:
        message.give_up(fault, reason)
        self._context.owner.finished(message)
        self._write_dead_letters([message])

    def _write_dead_letters(self, done: Sequence[Message]) -> None:
        """Store the dead letters of finished messages, then have the owner acknowledge them."""
        now = time.time()
        dead = [letter for message in done for letter in message.dead_letters(self._context.worker, now)]
        if not self._write([], dead):
            return
        if dead:
            self._context.statistics.totals.failed += len(dead)
            # An error's text may quote a post, so the log shows only its type, the last word of the traceback.
            why = dead[0].traceback.split()[-1] if dead[0].traceback else dead[0].reason
            first = printable(f"{dead[0].id}: {why}")
            logger.warning("%d posts failed; the first: %s", len(dead), first)
        for message in done:
            self._context.owner.recorded(message)

    def _write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> bool:
        """Retry a write to the store until it succeeds. Return False if the pipeline stops first."""
        if not results and not dead:
            return not self._context.stopping.is_set()
        return self.retry_write(lambda: self._context.store.write(results, dead))


def _posts_of(finished: Computed | Message) -> int:
    return len(finished.rows) if isinstance(finished, Computed) else max(1, len(finished.raw_posts))
