"""From message to stored result, on threads that overlap: tokenizer, device, writer.

    submit → [tokenizer] workers/preparation.py: post → rows ─▶ workers/backlog.py: rows wait, sorted by length
           → [device]    workers/batch_loop.py:  next batch, forward, hand on
           → [writer]    workers/recording.py:   outputs → outcomes → stored → on_finished → on_recorded

This file puts the parts together, and watches them: a forward pass or another step that hangs (workers/watch.py) ends
the worker, as does any thread that dies. The pipeline knows what a message of posts is, but nothing of Celery. It asks
and tells its owner, on threads of its own: `admits`, whether a message whose turn has come is still wanted, under the
backlog's lock; `on_started`, when its first row enters a forward pass; `on_finished`, when its last post has an outcome
and every result is stored; `on_recorded`, when its dead letters are stored as well, and nothing more is to come.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

from shared.errors import ForwardHangs, RedisError
from shared.settings import Settings
from workers.backlog import Backlog, Job, Loaded
from workers.batch_loop import BatchLoop
from workers.calibration import TokenBudget
from workers.classifiers import Classifier
from workers.message import Message
from workers.preparation import Preparation
from workers.recording import Recording, Store
from workers.statistics import Statistics
from workers.suspects import Suspects
from workers.watch import Watch

logger = logging.getLogger(__name__)

#: Rows that may wait before it is known how fast the device is.
FIRST_ROWS = 64


class Pipeline:
    """The parts on their threads; see the module's first lines.

    worker: the name that results bear. on_failure is called when a thread dies or hangs, which none ever should.
    """

    def __init__(
        self,
        classifier: Classifier,
        store: Store,
        settings: Settings,
        budget: TokenBudget,
        worker: str,
        *,
        suspects: Suspects | None = None,
        admits: Callable[[Message], bool] = lambda _: True,
        on_started: Callable[[Message], None] = lambda _: None,
        on_finished: Callable[[Message], None] = lambda _: None,
        on_recorded: Callable[[Message], None] = lambda _: None,
        on_failure: Callable[[], None],
    ) -> None:
        self._suspects = suspects
        self._on_failure = on_failure
        self._window_rows = settings.window_rows
        self._prefetch_seconds = settings.prefetch_seconds
        self._forward_timeout = settings.forward_timeout
        self._lanes = classifier.device.lanes
        self._stopping = threading.Event()
        self._watch_interval = min(1.0, self._forward_timeout / 4)
        self._watch = Watch(2 * self._watch_interval)
        self.failure: BaseException | None = None
        self.statistics = Statistics(settings.statistics_interval, time.monotonic())
        self._backlog = Backlog(
            Loaded(classifier, budget),
            self._lanes,
            settings.batch_rows,
            admits,
            on_started,
            self._on_replaced,
            self._watch,
        )
        self._recording = Recording(
            self._backlog,
            store,
            suspects,
            self.statistics,
            worker,
            on_finished,
            on_recorded,
            self._stopping,
            self._watch,
            self._forward_timeout,
        )
        self._preparation = Preparation(
            self._backlog,
            store,
            suspects,
            self.statistics,
            self._recording.hand_over,
            self._stopping,
            self._watch,
            self._forward_timeout,
        )
        self._batch_loop = BatchLoop(
            self._backlog, classifier.device, suspects, self._recording.hand_over, self._stopping, self._watch
        )
        self._threads = {
            name: threading.Thread(target=self._watched, args=(loop,), name=name, daemon=True)
            for name, loop in (
                ("tokenizer", self._preparation.loop),
                *((_lane_name(lane), partial(self._batch_loop.loop, lane)) for lane in range(self._lanes)),
                ("writer", self._recording.loop),
                ("watcher", self._watcher_loop),
            )
        }

    # For the owner, on its own thread.

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def submit(self, message: Message) -> None:
        """Take a message in. It ends with `on_recorded`, unless it is withdrawn or the pipeline stops."""
        if message.sent_at is not None:
            self.statistics.totals.messages += 1
            self.statistics.totals.queued_seconds += max(0.0, time.time() - message.sent_at)
        self._preparation.submit(message)

    def give_up(self, message: Message, fault: Exception, reason: str) -> bool:
        """Let a message fail as a whole, now; whether it was not too late for that.

        Nothing more of it is computed, and it ends as others do, with the fault for its outcome. The reason goes to its
        posts that have none. The micro-batch that computes some of it is finished for the others.
        """
        return self._recording.give_up(message, fault, reason)

    def replace(self, classifier: Classifier, budget: TokenBudget, on_replaced: Callable[[], None]) -> None:
        """Compute what is submitted from now on with another model of the same device.

        What came before is finished with the one that it came for. Then, between two micro-batches, the device goes
        over to the other; and when nothing of the one before is left here, `on_replaced` is called, on the writer
        thread.
        """
        self._preparation.load(Loaded(classifier, budget, on_replaced))

    def run_on_device_thread(self, job: Callable[[], None], what: str, limit: float | None = None) -> None:
        """Run something that is no micro-batch between two micro-batches: jobs and micro-batches take turns.

        what: its name in the log. limit: seconds after which it counts as hanging; without one a warning is logged.
        """
        self._backlog.run(Job(job, what, limit))

    def end_as_hanging(self, what: str) -> None:
        """Fail because the job on the device thread, or another step, hangs."""
        self._fail_as_hanging(self._threads[_lane_name(0)].ident, what)

    def run_on_writer_thread(self, job: Callable[[], None]) -> None:
        """Run something that talks to Redis before the writer is handed anything else; at once where this is it."""
        self._recording.run(job)

    def until_taken(self, write: Callable[[], object]) -> bool:
        """For what the owner writes on the writer thread; see Recording."""
        return self._recording.until_taken(write)

    def stop(self, seconds: float = 5.0) -> None:
        """End the threads, whatever they hold; waits at most `seconds` for each."""
        self._stopping.set()
        self._preparation.end()
        self._backlog.close()
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join(seconds)
        if self._suspects and not self.failure:
            self._suspects.release(self._lanes)

    # How it goes.

    @property
    def classifier(self) -> Classifier:
        """That of the model at work."""
        return self._backlog.at_work.classifier

    @property
    def budget(self) -> TokenBudget:
        """That of the model at work."""
        return self._backlog.at_work.budget

    def waiting(self) -> int:
        """Rows that wait for the device; a post that is not tokenized yet counts as with the labels that are set."""
        return len(self._backlog) + self._preparation.posts_waiting() * self._backlog.latest.rows_each

    def most_waiting(self) -> int:
        """Rows that may wait: no more than the device computes in `prefetch_seconds`, as fast as it was lately.

        A device that is slower than others takes less of a short queue, and all are done at about the same time.
        """
        speed = self.statistics.speed.rows_per_second
        return int(min(self._window_rows, FIRST_ROWS if speed is None else max(1, self._prefetch_seconds * speed)))

    def rows_per_post(self) -> int:
        """Rows of a post with the labels that are set."""
        return self._backlog.latest.rows_each

    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited for the device."""
        return self._backlog.oldest_age()

    # Its threads.

    def _watched(self, loop: Callable[[], None]) -> None:
        """A thread that dies must not leave the others, and the queue, waiting for it."""
        try:
            loop()
        except RedisError as error:
            self._fail(error, str(error))
        except BaseException as error:
            self._fail(error, f"the {threading.current_thread().name} thread died")

    def _fail(self, error: BaseException, what: str) -> None:
        self.failure = error
        told = None if isinstance(error, RedisError) else error
        logger.critical("%s; this worker ends, its messages go back to the queue", what.rstrip("."), exc_info=told)
        self._on_failure()

    def _watcher_loop(self) -> None:
        """Says now and then how it goes, and ends the worker when a forward pass or another step hangs."""
        warned_of = 0.0
        while not self._stopping.wait(self._watch_interval):
            self._watch.tick()
            if rates := self.statistics.turn(time.monotonic()):
                logger.info("%s; the oldest row waits for %.1f s", rates, self.oldest_age())
            if (lane := self._batch_loop.hanging(self._forward_timeout)) is not None:
                what = f"a forward pass has hung for {self._forward_timeout:.0f} s (FEEDMILL_FORWARD_TIMEOUT)"
                self._fail_as_hanging(self._threads[_lane_name(lane)].ident, what)
                return
            for step in self._watch.longer_than(self._forward_timeout):
                if step.limit is not None:
                    what = f"{step.what} has hung for {step.limit:.0f} s (FEEDMILL_FORWARD_TIMEOUT)"
                    self._fail_as_hanging(step.thread, what)
                    return
                if step.began != warned_of:
                    warned_of = step.began
                    logger.warning(
                        "%s has kept the device thread for %.0f s. If it hangs, its time_limit ends it; where it has "
                        "none, restart this worker",
                        step.what,
                        self._watch.now() - step.began,
                    )

    def _fail_as_hanging(self, thread: int | None, what: str) -> None:
        frame = sys._current_frames().get(thread or 0)
        logger.critical("the thread that hangs is here:\n%s", "".join(traceback.format_stack(frame)))
        self._fail(ForwardHangs(what), what)

    def _on_replaced(self, loaded: Loaded) -> None:
        """Nothing waits any more for the model before; how fast that was tells nothing any more."""

        def begin_anew() -> None:
            self.statistics.forget_speed()
            loaded.on_at_work()

        # When what it computed is stored.
        self._recording.run(begin_anew)


def _lane_name(lane: int) -> str:
    return f"device-{lane}"
