"""From message to stored result, on threads that overlap: tokenizer, device, writer.

    submit → [tokenizer] prepare → window → [device] forward → [writer] finish, store → on_finished

The device is what must never wait: tokenization, Redis and Celery happen on other threads than its own, and a GPU is
handed the next micro-batch while the last one runs. A CPU has a device thread, a lane, for each of its cores, whose
forward passes run side by side; a micro-batch that finds the others idle gets all cores. One more thread watches: a
forward pass that hangs ends the worker, as does any thread that dies. Posts in whose passes workers vanished before
(workers/suspects.py) are computed apart, while every lane else is idle. A model is replaced while all goes on: each has
a window of its own, so no row ever meets another one's forward pass. The pipeline knows what a message of posts is, but
nothing of Celery. It asks and tells its owner, on threads of its own: `admits`, whether a message whose turn has
come is still wanted, under the pipeline's lock; `on_started`, when its first row enters a forward pass; `on_finished`,
when its last post has an outcome and every result is stored; `on_recorded`, when its dead letters are stored as well,
and nothing more is to come.
"""

import logging
import math
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from redis.exceptions import RedisError as RedisFault

from shared.errors import DeviceFull, DeviceLost, ForwardHangs, RedisError, RequestRefused
from shared.messages import Classification, ClassifyOptions, DeadLetter, Outcome, Post, PostError, fingerprint
from shared.refusals import hopeless
from shared.results import Result
from shared.settings import Settings
from workers.calibration import TokenBudget
from workers.classifiers import Classifier, LabelSet, Outputs, Row, Scores
from workers.message import Message, PostAtWork, traced
from workers.statistics import Statistics
from workers.suspects import DEADLY, Quarantine, Suspects
from workers.window import Window

logger = logging.getLogger(__name__)

#: Finished micro-batches that may wait for the writer before the device thread does: bounds memory when Redis
#: is away, and is more than enough to bridge a slow write.
WRITE_AHEAD = 4
#: Rows of one message, at most: they are prepared and held together.
MAX_ROWS_PER_MESSAGE = 32_000
#: Rows that may wait before it is known how fast the device is.
FIRST_ROWS = 64
#: Rows that enter the window while the device's lanes wait for it.
ROWS_AT_ONCE = 256
#: Longest pause, in seconds, between two tries to reach Redis.
LONGEST_PAUSE = 5.0
#: Characters of an exception's text that a post's error keeps.
LONGEST_REASON = 1000


class Loaded:
    """A model that is loaded: what computes with it, how many tokens its micro-batches hold, and what waits for it."""

    def __init__(
        self, classifier: Classifier, budget: TokenBudget, on_at_work: Callable[[], None] = lambda: None
    ) -> None:
        self.classifier = classifier
        self.budget = budget
        #: Called, on the writer thread, when all that came before is stored.
        self.on_at_work = on_at_work
        self.window: Window[Row] = Window(time.monotonic)
        self.quarantine: Quarantine[Row] = Quarantine()
        label_set = classifier.label_set(ClassifyOptions())
        #: A row of no message: what the device must be able to compute.
        self.proof = classifier.prepare(["A first post."], label_set)[0]
        #: Rows of a post, with the labels that are set.
        self.rows_each = label_set.rows

    def __len__(self) -> int:
        """Rows that wait."""
        return len(self.window) + len(self.quarantine)


class Computed(NamedTuple):
    """A micro-batch with its outputs, or with what went wrong; `share` of the device was at it."""

    loaded: Loaded
    rows: Sequence[Row]
    outputs: Outputs | Exception
    share: float


class Store(Protocol):
    """Where results go."""

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> object:
        """Keep a micro-batch's results and dead letters. Raises redis' errors while they cannot be kept."""

    def find(self, wanted: Sequence[tuple[str, str]]) -> Sequence[Classification | None]:
        """What is kept under each (post id, fingerprint). Raises redis' errors while that cannot be told."""


#: What the writer is handed; a message comes by itself when it needs no forward pass.
Finished = Computed | Message | Callable[[], None]


class Pipeline:
    """The threads around a window, and one that watches them; see the module's first lines.

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
        #: The model at work, and those that are to replace it, in turn. Replaced as a whole, under `_ready`, and the
        #: first of them only while no lane has a micro-batch: whoever has one reads it without a lock.
        self._models: tuple[Loaded, ...] = (Loaded(classifier, budget),)
        self._store = store
        self._worker = worker
        self._suspects = suspects
        self._admits = admits
        self._on_started = on_started
        self._on_finished = on_finished
        self._on_recorded = on_recorded
        self._on_failure = on_failure
        self._batch_rows = settings.batch_rows
        self._window_rows = settings.window_rows
        self._prefetch_seconds = settings.prefetch_seconds
        self._forward_timeout = settings.forward_timeout
        self.statistics = Statistics(settings.statistics_interval, time.monotonic())
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        #: Messages, and between them the models that those behind are for; None ends the tokenizer.
        self._arrived: queue.SimpleQueue[Message | Loaded | None] = queue.SimpleQueue()
        #: Guards the models and what waits for them, the jobs, and every message's `started`, `finished` and `dropped`.
        self._ready = threading.Condition()
        #: Whether suspects are on the device: then nothing else may be.
        self._apart = False
        self._jobs: deque[Callable[[], None]] = deque()
        self._lanes = classifier.device.lanes
        #: Lanes that have a micro-batch. Guarded by `_ready` too.
        self._busy = 0
        #: By lane: when its latest forward pass began, and what it left; for the watching thread.
        self._computing: list[tuple[float, Outputs | None] | None] = [None] * self._lanes
        #: By lane: the posts of that pass, for `_note`.
        self._noted: list[list[tuple[str | None, int]]] = [[] for _ in range(self._lanes)]
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        #: Room for what the device and the tokenizer hand to the writer.
        self._room = threading.Semaphore(WRITE_AHEAD)
        #: Posts taken in by `submit`, and those of them that the tokenizer is done with: two counts, since each is
        #: written by a thread of its own.
        self._posts_in = self._posts_prepared = self._messages_in = 0
        self._threads = {
            name: threading.Thread(target=self._watched, args=(loop,), name=name, daemon=True)
            for name, loop in (
                ("tokenizer", self._tokenizer_loop),
                *((_lane_name(lane), partial(self._device_loop, lane)) for lane in range(self._lanes)),
                ("writer", self._writer_loop),
                ("watcher", self._watcher_loop),
            )
        }

    # For the owner, on its own thread.

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def submit(self, message: Message) -> None:
        """Take a message in. It ends with `on_recorded`, unless it is withdrawn or the pipeline stops."""
        self._posts_in += len(message.raw_posts)
        self._messages_in += 1
        if message.sent_at is not None:
            self.statistics.totals.messages += 1
            self.statistics.totals.queued_seconds += max(0.0, time.time() - message.sent_at)
        self._arrived.put(message)

    def waiting(self) -> int:
        """Rows that wait for the device; a post that is not tokenized yet counts as with the labels that are set."""
        models = self._models
        return sum(map(len, models)) + (self._posts_in - self._posts_prepared) * models[-1].rows_each

    def most_waiting(self) -> int:
        """Rows that may wait: no more than the device computes in `prefetch_seconds`, as fast as it was lately.

        A device that is slower than others takes less of a short queue, and all are done at about the same time.
        """
        speed = self.statistics.speed.rows_per_second
        return int(min(self._window_rows, FIRST_ROWS if speed is None else max(1, self._prefetch_seconds * speed)))

    def rows_per_message(self) -> float:
        """The mean of all that came so far, with the labels that are set."""
        each = self._models[-1].rows_each
        return max(1.0, each * self._posts_in / self._messages_in) if self._messages_in else float(each)

    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited for the device."""
        with self._ready:
            return max(loaded.window.oldest_age() for loaded in self._models)

    @property
    def classifier(self) -> Classifier:
        """That of the model at work."""
        return self._models[0].classifier

    @property
    def budget(self) -> TokenBudget:
        """That of the model at work."""
        return self._models[0].budget

    def replace(self, classifier: Classifier, budget: TokenBudget, on_replaced: Callable[[], None]) -> None:
        """Compute what is submitted from now on with another model of the same device.

        What came before is finished with the one that it came for. Then, between two micro-batches, the device goes
        over to the other; and when nothing of the one before is left here, `on_replaced` is called, on the writer
        thread.
        """
        self._arrived.put(Loaded(classifier, budget, on_replaced))

    def run_on_device_thread(self, job: Callable[[], None]) -> None:
        """Run something that is no micro-batch between two micro-batches: jobs and micro-batches take turns."""
        with self._ready:
            self._jobs.append(job)
            self._ready.notify_all()

    def run_on_writer_thread(self, job: Callable[[], None]) -> None:
        """Run something that talks to Redis before the writer is handed anything else; at once where this is it."""
        if threading.current_thread() is self._threads["writer"]:
            job()
        else:
            self._finished.put(job)

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

    def give_up(self, message: Message, fault: Exception, reason: str) -> bool:
        """Let a message fail as a whole, now; whether it was not too late for that.

        Nothing more of it is computed, and it ends as others do, with the fault for its outcome. The reason goes to its
        posts that have none. The micro-batch that computes some of it is finished for the others.
        """
        with self._ready:
            if message.finished or message.dropped:
                return False
            message.dropped = True
        self.run_on_writer_thread(partial(self._record_given_up, message, fault, reason))
        return True

    def stop(self, seconds: float = 5.0) -> None:
        """End the threads, whatever they hold; waits at most `seconds` for each."""
        self._stopping.set()
        self._arrived.put(None)
        with self._ready:
            self._ready.notify_all()
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join(seconds)
        if self._suspects and not self.failure:
            self._suspects.release(self._lanes)

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
        """Says now and then how it goes, and ends the worker when a forward pass hangs."""
        while not self._stopping.wait(min(1.0, self._forward_timeout / 4)):
            if rates := self.statistics.turn(time.monotonic()):
                logger.info("%s; the oldest row waits for %.1f s", rates, self.oldest_age())
            for lane, computing in enumerate(self._computing):
                began, outputs = computing or (math.inf, None)
                if time.monotonic() - began > self._forward_timeout and not (outputs and outputs.ready()):
                    frame = sys._current_frames().get(self._threads[_lane_name(lane)].ident or 0)
                    logger.critical("the device thread is here:\n%s", "".join(traceback.format_stack(frame)))
                    what = f"a forward pass has hung for {self._forward_timeout:.0f} s (FEEDMILL_FORWARD_TIMEOUT)"
                    self._fail(ForwardHangs(what), what)
                    return

    def _tokenizer_loop(self) -> None:
        while (arrived := self._arrived.get()) is not None and not self._stopping.is_set():
            if isinstance(arrived, Message):
                self._take_in(arrived)
            else:
                with self._ready:
                    self._models += (arrived,)
                    self._ready.notify_all()

    def _take_in(self, message: Message) -> None:
        """Prepare a message for the latest model, and let its rows wait for that one."""
        loaded = self._models[-1]
        prepared: list[tuple[PostAtWork, list[Row]]] = []
        try:
            prepared = self._prepare(message, loaded.classifier)
        except RequestRefused as refused:
            message.refused = refused
        except Exception as error:
            logger.exception("a message of %d posts cannot be prepared", len(message.raw_posts))
            message.refused = RequestRefused(f"its posts cannot be prepared: {error!r}")
            message.tracebacks = dict.fromkeys(range(len(message.raw_posts)), traced(error))
        rows = [row for work, each in prepared if work.index not in message.deaths for row in each]
        for at in range(0, len(rows), ROWS_AT_ONCE):
            with self._ready:
                for row in rows[at : at + ROWS_AT_ONCE]:
                    loaded.window.add(row, message.priority)
                self._ready.notify_all()
        with self._ready:
            for work, each in prepared:
                if work.index in message.deaths:
                    loaded.quarantine.add(each)
            self._ready.notify_all()
        if not prepared:
            self._hand_to_writer(message)
        self._posts_prepared += len(message.raw_posts)

    def _prepare(self, message: Message, classifier: Classifier) -> list[tuple[PostAtWork, list[Row]]]:
        """The posts that are to be computed, with their rows; the others are settled."""
        posts = message.read()
        label_set = classifier.label_set(message.options)
        if (rows_in_all := len(posts) * label_set.rows) > MAX_ROWS_PER_MESSAGE:
            raise RequestRefused(
                f"posts: {len(posts)} of {label_set.rows} rows each are {rows_in_all:,} rows; at most "
                f"{MAX_ROWS_PER_MESSAGE:,} in one message"
            )
        at_work = []
        for index, post in enumerate(posts):
            if isinstance(post, Post):
                at_work.append(PostAtWork(post, message, index, fingerprint(post, label_set.recipe)))
            else:
                message.settle(index, post)
        at_work = self._unanswered(at_work)
        if message.redelivered and self._suspects:
            at_work = self._not_deadly(at_work, message, self._suspects)
        prepared = list(zip(at_work, self._rows(at_work, label_set, classifier), strict=True))
        for work, rows in prepared:
            for row in rows:
                row.owner = work
        return [(work, rows) for work, rows in prepared if rows]

    def _rows(self, at_work: Sequence[PostAtWork], label_set: LabelSet, classifier: Classifier) -> list[list[Row]]:
        """Each post's rows; none of one that cannot be prepared, which is settled with the reason."""
        try:
            return classifier.prepare([work.post.text for work in at_work], label_set) if at_work else []
        except BaseException as error:  # a panic of the tokenizer, in Rust, is no Exception
            if len(at_work) > 1:
                return [rows for work in at_work for rows in self._rows([work], label_set, classifier)]
            logger.error("post %s cannot be prepared:\n%s", at_work[0].post.id, traced(error))
            reason = f"it cannot be prepared: {type(error).__name__}: {error}"[:LONGEST_REASON]
            at_work[0].message.tracebacks[at_work[0].index] = traced(error)
            at_work[0].message.settle(at_work[0].index, PostError(id=at_work[0].post.id, error=reason))
            return [[]]

    def _not_deadly(self, at_work: list[PostAtWork], message: Message, suspects: Suspects) -> list[PostAtWork]:
        """Those of a message that came again which may be computed, if apart; the others are settled."""
        message.deaths = suspects.deaths(message.task_id)
        allowed = []
        for work in at_work:
            if (deaths := message.deaths.get(work.index, 0)) < DEADLY:
                allowed.append(work)
            else:
                reason = f"{deaths} workers vanished in forward passes that it was in; in the last two it was alone"
                message.settle(work.index, PostError(id=work.post.id, error=reason))
        if found := [work.post.id for work in allowed if work.index in message.deaths]:
            logger.warning("computed apart, since a worker vanished in their forward pass: %s", ", ".join(found[:10]))
        return allowed

    def _unanswered(self, at_work: list[PostAtWork]) -> list[PostAtWork]:
        """Those of the posts whose classification is not stored; the others are settled with it."""
        try:
            found = self._store.find([(work.post.id, work.fingerprint) for work in at_work])
        except RedisFault as fault:
            logger.debug("the store cannot say what is there (%s): it is computed", fault)
            return at_work
        for work, classification in zip(at_work, found, strict=True):
            if classification is not None:
                work.message.settle(work.index, classification)
                self.statistics.totals.answered += 1
        return [work for work, classification in zip(at_work, found, strict=True) if classification is None]

    def _device_loop(self, lane: int) -> None:
        while batch := self._next_batch(lane):
            rows, passes, apart = batch
            self.classifier.device.take_share(passes)
            if apart:
                self._prove_device(lane)
            parts = self._forward(rows, lane)
            if apart:
                for _, outputs in parts:
                    if not isinstance(outputs, Exception):
                        self._wait_for(outputs)
                self._note((), lane)  # the writer may keep this thread waiting, and what has ended is no suspect
            for part, outputs in parts:
                self._hand_to_writer(Computed(self._models[0], part, outputs, 1 / passes))
            with self._ready:
                self._busy -= 1
                self._apart = False
                self._ready.notify_all()

    def _next_batch(self, lane: int) -> tuple[list[Row], int, bool] | None:
        """The lane's next micro-batch, once there is one; how many share the device with it, itself counted; and
        whether it is one of suspects.

        None when the pipeline stops. The first lane runs a job after each micro-batch.
        """
        while not self._stopping.is_set():
            if not lane:
                self._run_job()
            with self._ready:
                self._ready.wait_for(lambda: (not lane and self._jobs) or self._is_due() or self._stopping.is_set())
                rows = self._take() if self._is_due() else []
                messages = {id(row.owner.message): row.owner.message for row in rows}
                starting = [message for message in messages.values() if self._starts(message)]
                rows = [row for row in rows if not row.owner.message.dropped]
                alone = not self._busy and not self._models[0].window
                self._apart = apart = self._apart and bool(rows)
                self._busy += bool(rows)
            for message in starting:
                self._on_started(message)
            if rows:
                return rows, 1 if alone or apart else self._lanes, apart
        return None

    def _is_due(self) -> bool:
        """Whether a lane may take a micro-batch. Suspects, and another model, wait for all lanes. Locked."""
        at_work = self._models[0]
        if at_work.quarantine or self._is_replaced():
            return not self._busy
        return bool(at_work.window) and not self._apart

    def _is_replaced(self) -> bool:
        """Whether nothing waits for the model at work any more, nor will. Locked."""
        return len(self._models) > 1 and not self._models[0]

    def _take(self) -> list[Row]:
        """The next micro-batch, of suspects where there are any. Locked."""
        while self._is_replaced():
            self._models = self._models[1:]
            self.run_on_writer_thread(partial(self._begin_anew, self._models[0].on_at_work))
        at_work = self._models[0]
        self._apart = bool(at_work.quarantine)
        return (at_work.quarantine or at_work.window).take(at_work.budget.tokens, self._batch_rows)

    def _begin_anew(self, on_at_work: Callable[[], None]) -> None:
        """The writer has stored what the model before computed, and how fast that was tells nothing any more."""
        self.statistics.forget_speed()
        on_at_work()

    def _prove_device(self, lane: int) -> None:
        """See that the device computes at all, before its failing counts against suspects."""
        if (computing := self._computing[lane]) and computing[1]:
            self._wait_for(computing[1])
        self._wait_for(self._compute(self._models[0].proof, lane))

    def _wait_for(self, outputs: Outputs) -> None:
        while not outputs.ready() and not self._stopping.wait(0.001):
            pass

    def _run_job(self) -> None:
        with self._ready:
            job = self._jobs.popleft() if self._jobs else None
        if job:
            job()

    def _starts(self, message: Message) -> bool:
        """Whether the message's turn has come with this, and it is still wanted; drops it where it is not. Locked."""
        if message.started or message.dropped:
            return False
        message.started = self._admits(message)
        message.dropped = not message.started
        return message.started

    def _forward(self, rows: Sequence[Row], lane: int) -> list[tuple[Sequence[Row], Outputs | Exception]]:
        """Outputs of the batch; when it raises, of its halves, until only the culprit has none."""
        try:
            return [(rows, self._compute(rows, lane))]
        except DeviceLost:
            raise
        except DeviceFull as error:
            fault: Exception = DeviceFull(
                str(error)
            )  # anew: the frames of this one keep the tensors of the failed pass
        except Exception as error:
            fault = error
        full = isinstance(fault, DeviceFull)
        if full and len(rows) == 1:
            # No fault of the post: whoever comes next would fail as well.
            raise DeviceLost("the device has no memory for a single row") from fault
        if len(rows) == 1:
            logger.error("post %s cannot be classified:\n%s", rows[0].owner.post.id, traced(fault))
            return [(rows, fault)]
        middle = len(rows) // 2
        halves = self._forward(rows[:middle], lane) + self._forward(rows[middle:], lane)
        if full:  # and the halves were not
            self.budget.lower(len(rows) * max(row.length for row in rows) // 2)
        return halves

    def _note(self, rows: Sequence[Row], lane: int) -> None:
        """Have it known which posts are on the device, should this worker vanish now."""
        if self._suspects:
            latest = self._computing[lane]
            running = self._noted[lane] if latest and latest[1] and not latest[1].ready() else []
            self._noted[lane] = [(row.owner.message.task_id, row.owner.index) for row in rows if row.owner]
            self._suspects.note(lane, (*running, *self._noted[lane]))

    def _compute(self, rows: Sequence[Row], lane: int) -> Outputs:
        self._note(rows, lane)
        began = time.monotonic()
        self._computing[lane] = began, None
        try:
            outputs = self.classifier.forward(rows)
        except BaseException:
            self._computing[lane] = None
            raise
        self._computing[lane] = began, outputs
        return outputs

    def _hand_to_writer(self, finished: Finished) -> None:
        while not self._stopping.is_set():
            if self._room.acquire(timeout=1):
                self._finished.put(finished)
                return

    def _writer_loop(self) -> None:
        while not self._stopping.is_set():
            try:
                finished = self._finished.get(timeout=1)
            except queue.Empty:
                continue
            if isinstance(finished, Computed | Message):
                self._room.release()
                self._record(*(self._settle(finished) if isinstance(finished, Computed) else ([], [finished])))
            else:
                finished()

    def _record(self, results: Sequence[Result], complete: Sequence[Message]) -> None:
        """Store results, let the owner finish the messages that are complete by them, and store what they lack."""
        if not self._write(results, []):
            return
        self.statistics.totals.posts += len(results)
        stored_at = time.time()
        done = [message for message in complete if self._take_over(message)]
        for message in done:
            if message.sent_at is not None:
                self.statistics.lag.add(max(0.0, stored_at - message.sent_at))
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
            self.statistics.totals.failed += len(dead)
            # An error's words may be the post's: of one the log has the kind alone, in which its traceback ends.
            why = dead[0].traceback.split()[-1] if dead[0].traceback else dead[0].reason
            logger.warning("%d posts failed; the first, %s: %s", len(dead), dead[0].id, why)
        for message in done:
            if message.deaths and self._suspects:
                self._suspects.clear(message.task_id)
            self._on_recorded(message)

    def _settle(self, computed: Computed) -> tuple[list[Result], list[Message]]:
        """Give each post of a micro-batch its outcome: what is to be stored, and the messages now complete."""
        loaded, rows, outputs, share = computed
        outcomes: list[tuple[PostAtWork, Outcome]]
        if isinstance(outputs, Exception):
            work = rows[0].owner
            reason = f"{type(outputs).__name__}: {outputs}"[:LONGEST_REASON]
            outcomes = [(work, PostError(id=work.post.id, error=reason))]
            work.message.tracebacks.setdefault(work.index, traced(outputs))
        else:
            scored = loaded.classifier.finish(rows, outputs)
            self.statistics.count(rows, outputs.seconds, share)
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

    def _take_over(self, message: Message) -> bool:
        """Whether a message that is complete is to be finished."""
        with self._ready:
            starting = self._starts(message)  # nothing of it needed a forward pass
            if message.dropped:
                return False
            message.finished = True
        if starting:
            self._on_started(message)
        return True

    def _write(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> bool:
        """Write until Redis takes it: results that were computed are kept. False when the pipeline stops first."""
        if not results and not dead:
            return not self._stopping.is_set()
        return self.until_taken(lambda: self._store.write(results, dead))


def _lane_name(lane: int) -> str:
    return f"device-{lane}"
