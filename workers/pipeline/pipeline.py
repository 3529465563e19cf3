"""The pipeline: from message to stored result, on tokenizer, device and writer threads that
overlap.

    submit → [tokenizer] preparation.py: post → rows ─▶ backlog.py: rows wait, sorted by length
           → [device]    backlog.py:     next batch, forward, hand over
           → [writer]    recording.py:   outputs → outcomes → stored → finished → recorded

This module connects the parts and monitors them. The worker ends if a step, such as a forward
pass, hangs (`Watch`) or a thread dies. Independent of Celery: it calls its owner (context.py) on
its own threads.

Relies on Python's `sys._current_frames` (`_current_frames`), to log where a hanging thread is.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

from feedmill.shared.errors import ForwardTimeout, RedisUnavailable
from feedmill.shared.language import languages_of
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.pipeline.backlog import Backlog, BatchLoop, Loaded
from feedmill.workers.pipeline.context import Context, Observer, Owner, Watch
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.preparation import Preparation
from feedmill.workers.pipeline.recording import Recording
from feedmill.workers.pipeline.statistics import Statistics

logger = logging.getLogger(__name__)

#: Maximum waiting rows before the device's speed is known.
FIRST_ROWS = 64
#: Seconds of prefetched work, at the device's recent speed, at which a worker stops fetching
#: messages: enough to hide round trips, and few enough that messages do not wait for a slow device
#: while a faster one is idle.
PREFETCH_S = 2.0
#: Seconds between statistics in the worker's log.
STATISTICS_INTERVAL_S = 60.0


class Pipeline:
    """The connected parts and their threads.

    worker: name recorded in results. observer: told of each step. statistics_level: level at which
    the log has statistics. Raises UserError for languages that cannot be detected.
    """

    def __init__(
        self,
        classifier: Classifier,
        store: ResultsStore,
        settings: Settings,
        budget: int,
        worker: str,
        owner: Owner,
        observer: Observer | None = None,
        statistics_level: int = logging.INFO,
    ) -> None:
        self._owner = owner
        self._statistics_level = statistics_level
        self._window_rows = settings.window_rows
        self._forward_timeout = settings.forward_timeout
        self._lanes = classifier.device.lanes
        self._stopping = threading.Event()
        self._watch_interval = min(1.0, self._forward_timeout / 4)
        self._watch = Watch()
        self.failure: BaseException | None = None
        self.statistics = Statistics(time.monotonic(), classifier.device.shapes)
        context = Context(
            owner,
            store,
            self.statistics,
            self._watch,
            self._stopping,
            worker,
            settings.none,
            languages_of(settings),
            observer or Observer(),
        )
        self.backlog = Backlog(
            Loaded(classifier, budget), self._lanes, settings.batch_rows, context
        )
        self.recording = Recording(self.backlog, context)
        self._preparation = Preparation(self.backlog, context, self.recording)
        self._batch_loop = BatchLoop(
            self.backlog, classifier.device, context, self.recording.hand_over
        )
        loops: dict[str, Callable[[], None]] = {}
        loops["tokenizer"] = self._preparation.loop
        for lane in range(self._lanes):
            loops[_lane_name(lane)] = partial(self._batch_loop.loop, lane)
        loops["writer"] = self.recording.loop
        loops["watcher"] = self._watcher_loop
        self._threads: dict[str, threading.Thread] = {}
        for name, loop in loops.items():
            self._threads[name] = threading.Thread(
                target=self._run_watched,
                args=(loop,),
                name=name,
                daemon=True,
            )

    # Called by the pool, on the consumer thread.

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads.values():
            thread.start()

    def submit(self, message: Message) -> None:
        """Accept a message.

        Calls `Owner.recorded` at its end, unless `Owner.admit` rejects it or the pipeline ends.
        """
        if message.sent_at is not None:
            queued_seconds = max(0.0, time.time() - message.sent_at)
            totals = self.statistics.totals
            totals.messages += 1
            totals.queued_seconds += queued_seconds
        self._preparation.submit(message)

    def replace(
        self, classifier: Classifier, budget: int, on_replaced: Callable[[], None]
    ) -> None:
        """Use another model on the same device for messages submitted from now on.

        Earlier messages finish with the old model. The device then switches between two
        micro-batches. Once all results of the old model are stored, `on_replaced` is called on the
        writer thread.
        """
        self._preparation.load(Loaded(classifier, budget, on_replaced))

    def fail_as_hung(self, what: str) -> None:
        """Fail the pipeline, because a job on the device thread hangs. what: the reason, for the
        log.
        """
        self._fail_as_hanging(self._threads[_lane_name(0)].ident, what)

    def stop(self, seconds: float = 5.0) -> None:
        """End the threads without finishing their work. Wait at most `seconds` for each."""
        self._stopping.set()
        self._preparation.end()
        self.backlog.close()
        self.recording.run(lambda: None)  # wakes the writer thread
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join(seconds)

    # Status.

    @property
    def classifier(self) -> Classifier:
        """The classifier of the active model."""
        return self.backlog.loaded.classifier

    def waiting(self) -> int:
        """Return the number of waiting rows.

        Posts that are not tokenized yet count with the configured labels.
        """
        rows = len(self.backlog)
        posts = self._preparation.posts_waiting()
        return rows + posts * self.backlog.loaded.rows_each

    def max_waiting(self) -> int:
        """Return how many rows may wait: those that the device computes in PREFETCH_S at its
        recent speed.

        A slow device thus takes less of a short queue, and all devices finish at about the same
        time.
        """
        speed = self.statistics.speed.rows_per_second
        rows: float = FIRST_ROWS
        if speed is not None:
            rows = max(1, PREFETCH_S * speed)
        return int(min(self._window_rows, rows))

    # Threads.

    def _run_watched(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop.

        An error fails the pipeline, so that nothing waits for a dead thread.
        """
        try:
            loop()
        except RedisUnavailable as error:
            self._fail(error, str(error))
        except BaseException as error:
            self._fail(error, f"the {threading.current_thread().name} thread died")

    def _fail(self, error: BaseException, what: str) -> None:
        self.failure = error
        cause = None if isinstance(error, RedisUnavailable) else error
        logger.critical(
            "%s; this worker exits and its messages return to the queue",
            what.rstrip("."),
            exc_info=cause,
        )
        self._owner.failed()

    def _watcher_loop(self) -> None:
        """Log statistics periodically, and end the worker when a forward pass or another step
        hangs.
        """
        logged = time.monotonic()
        while not self._stopping.wait(self._watch_interval):
            now = time.monotonic()
            self.statistics.mark(now)
            if now - logged >= STATISTICS_INTERVAL_S:
                logged = now
                self._log_statistics(now)
            for thread, what in self._watch.longer_than(self._forward_timeout):
                limit = f"{self._forward_timeout:.4g} s (FEEDMILL_FORWARD_TIMEOUT)"
                self._fail_as_hanging(thread, f"{what} has hung for {limit}")
                return

    def _log_statistics(self, now: float) -> None:
        rates = self.statistics.recent(now)
        if rates.posts:
            logger.log(
                self._statistics_level,
                "%s; oldest row waiting for %.1f s",
                rates,
                self.backlog.oldest_age(),
            )

    def _fail_as_hanging(self, thread: int | None, what: str) -> None:
        frame = sys._current_frames().get(thread or 0)
        stack = "".join(traceback.format_stack(frame))
        logger.critical("stack of the hung thread:\n%s", stack)
        self._fail(ForwardTimeout(what), what)


def _lane_name(lane: int) -> str:
    return f"device-{lane}"
