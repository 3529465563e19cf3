"""The backlog, rows that wait for the device; and the batch loop, which computes them.

The loop runs on the device threads, called lanes, which must never wait: all other work runs on
other threads. A lane checks whether a message is still wanted as late as possible: when it takes
the message's first row. Jobs, which are not micro-batches, run between two micro-batches.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from feedmill.shared.errors import DeviceFull, DeviceLost, printable
from feedmill.shared.messages import ClassifyOptions
from feedmill.workers.models.classifiers import Classifier, Outputs, Row
from feedmill.workers.models.device import Device
from feedmill.workers.pipeline.context import Context
from feedmill.workers.pipeline.message import Message, State, traceback_of
from feedmill.workers.pipeline.window import Window

logger = logging.getLogger(__name__)

#: Rows added per acquisition of the lock. Lanes that wait for the lock run in between.
ROWS_PER_LOCK = 256


class Loaded:
    """A loaded model: its classifier, and its token budget."""

    def __init__(
        self,
        classifier: Classifier,
        budget: int,
        on_active: Callable[[], None] = lambda: None,
    ) -> None:
        self.classifier = classifier
        #: Maximum tokens of a micro-batch: its longest row times its number of rows.
        self.budget = budget
        #: Called on the writer thread once all results of the previous model are stored.
        self.on_active = on_active
        #: Rows per post with the configured labels.
        self.rows_each = classifier.label_set(ClassifyOptions()).rows

    def lower_budget(self, tokens: int) -> None:
        """Lower the budget to `tokens`, after the device ran out of memory with twice as many."""
        self.budget = max(1, min(tokens, self.budget))
        logger.warning(
            "device out of memory: micro-batches hold at most %d tokens now",
            self.budget,
        )


class Batch(NamedTuple):
    """A micro-batch taken by a lane."""

    loaded: Loaded
    #: Sorted by length; not empty.
    rows: Sequence[Row]
    #: Number of micro-batches that share the device, including this one.
    passes: int


class Backlog:
    """Rows and jobs that wait for the device's lanes.

    lanes: number of lanes of the device.
    batch_rows: maximum rows of a micro-batch.
    """

    def __init__(
        self, loaded: Loaded, lanes: int, batch_rows: int, context: Context
    ) -> None:
        #: The model that computes the rows. The tokenizer thread replaces it while the backlog is
        #: idle.
        self.loaded = loaded
        self._window: Window[Row] = Window(
            time.monotonic, loaded.classifier.device.shapes
        )
        self._lanes = lanes
        self._batch_rows = batch_rows
        self._owner = context.owner
        #: Guards this object and the state of every message.
        self._ready = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        #: Number of lanes that have a micro-batch.
        self._busy = 0
        self._closed = False

    def __len__(self) -> int:
        """Return the number of waiting rows."""
        return len(self._window)

    def is_idle(self) -> bool:
        """Return whether no row waits and no lane has a micro-batch."""
        with self._ready:
            return not self._busy and not self._window

    def oldest_age(self) -> float:
        """Return how long the oldest row has waited, in seconds."""
        with self._ready:
            return self._window.oldest_age()

    # Adding work.

    def add(self, rows: Sequence[Row], priority: int) -> None:
        """Add rows of the loaded model."""
        for begin in range(0, len(rows), ROWS_PER_LOCK):
            end = begin + ROWS_PER_LOCK
            with self._ready:
                for row in rows[begin:end]:
                    self._window.add(row, priority)
                self._ready.notify_all()

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job for the first lane, which alternates between jobs and micro-batches.

        Its time is not watched.
        """
        with self._ready:
            self._jobs.append(job)
            self._ready.notify_all()

    def close(self) -> None:
        """Stop handing out micro-batches."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    # Taking work, on the device threads.

    def next_batch(self, lane: int) -> Batch | None:
        """Wait for the lane's next micro-batch and return it; None after `close`.

        Call `done` after each micro-batch. The first lane runs a job, if one waits, before each
        micro-batch.
        """
        while not self._closed:
            if lane == 0:
                self._run_job()
            with self._ready:
                self._ready.wait_for(lambda: self._has_work(lane))
                rows: list[Row] = []
                if not self._closed:
                    rows = self._window.take(self.loaded.budget, self._batch_rows)
                messages = {id(row.owner.message): row.owner.message for row in rows}
                starting = [
                    message for message in messages.values() if self._starts(message)
                ]
                rows = [row for row in rows if row.owner.message.state is State.STARTED]
                batch = self._begin_batch(rows)
            for message in starting:
                self._owner.started(message)
            if batch:
                return batch
        return None

    def done(self) -> None:
        """Mark a micro-batch as finished, once its outputs are handed over."""
        with self._ready:
            self._busy -= 1
            self._ready.notify_all()

    def _has_work(self, lane: int) -> bool:
        """Return whether a lane need not wait. Needs the lock."""
        if self._window or self._closed:
            return True
        return lane == 0 and bool(self._jobs)

    def _begin_batch(self, rows: Sequence[Row]) -> Batch | None:
        """Count a lane that took `rows`, if any, as busy, and return its micro-batch. Needs the
        lock.
        """
        if not rows:
            return None
        alone = not self._busy and not self._window
        self._busy += 1
        return Batch(
            loaded=self.loaded,
            rows=rows,
            passes=1 if alone else self._lanes,
        )

    def _run_job(self) -> None:
        with self._ready:
            job = self._jobs.popleft() if self._jobs else None
        if job:
            job()

    def _starts(self, message: Message) -> bool:
        """Start a message if it is still wanted, else drop it.

        Return True if this call started it. Needs the lock.
        """
        if message.state is not State.WAITING:
            return False
        admitted = self._owner.admit(message)
        message.enter(State.STARTED if admitted else State.ENDED)
        return admitted

    # Ending messages.

    def drop(self, message: Message) -> bool:
        """Stop computing a message. Return False if it has ended."""
        with self._ready:
            return message.enter(State.ENDED)

    def finish(self, message: Message) -> bool:
        """End a message that has all its outcomes.

        Return False if it was dropped or is no longer wanted.
        """
        with self._ready:
            # Only a message that needed no forward pass starts here.
            starting = self._starts(message)
            if not message.enter(State.ENDED):
                return False
        if starting:
            self._owner.started(message)
        return True


class Part(NamedTuple):
    """Rows of one forward pass with their outputs, or with the error that they raised."""

    rows: Sequence[Row]
    outputs: Outputs | Exception
    #: Time at which the pass began, in nanoseconds since 1970.
    began_at_ns: int


class Computed(NamedTuple):
    """Part of a micro-batch, and the `share` of the device that computed it."""

    loaded: Loaded
    rows: Sequence[Row]
    outputs: Outputs | Exception
    share: float
    #: Time at which the pass began, in nanoseconds since 1970.
    began_at_ns: int = 0


class BatchLoop:
    """Compute micro-batches, in one loop per lane of the device. hand_over: called with each part;
    may block.

    A GPU has one lane and gets its next micro-batch while the previous one still runs; if that one
    hangs, so does its scoring. A CPU has one lane per core, at most four. The lanes' forward
    passes run in parallel, and a micro-batch that finds all other lanes idle gets all cores.
    """

    def __init__(
        self,
        backlog: Backlog,
        device: Device,
        context: Context,
        hand_over: Callable[[Computed], None],
    ) -> None:
        self._backlog = backlog
        self._device = device
        self._context = context
        self._hand_over = hand_over

    def loop(self, lane: int) -> None:
        """Compute the lane's micro-batches until the backlog closes."""
        while batch := self._backlog.next_batch(lane):
            self._device.take_share(batch.passes)
            share = 1 / batch.passes
            for part in self._forward(batch.loaded, batch.rows):
                self._hand_over(
                    Computed(
                        loaded=batch.loaded,
                        rows=part.rows,
                        outputs=part.outputs,
                        share=share,
                        began_at_ns=part.began_at_ns,
                    )
                )
            self._backlog.done()
            del batch  # drop the reference before waiting, so that a replaced model can be freed

    def _forward(self, loaded: Loaded, rows: Sequence[Row]) -> list[Part]:
        """Return the rows' outputs.

        If the pass raises, split the rows until only failing rows have an error.
        """
        began_at_ns = time.time_ns()
        try:
            with self._context.watch.step("a forward pass"):
                outputs = loaded.classifier.forward(rows)
                return [Part(rows, outputs, began_at_ns)]
        except DeviceLost:
            raise
        except DeviceFull as error:
            # A new error: the frames of the caught one keep the tensors of the failed pass in
            # memory.
            fault: Exception = DeviceFull(str(error))
        except Exception as error:
            fault = error
        full = isinstance(fault, DeviceFull)
        if full and len(rows) == 1:
            # The post is not at fault: any other row would fail as well.
            raise DeviceLost(
                "the device has too little memory for a single row: free memory on the device, or "
                "use a smaller model"
            ) from fault
        if len(rows) == 1:
            logger.error(
                "cannot classify post %s:\n%s",
                printable(rows[0].owner.post.id),
                traceback_of(fault),
                extra=rows[0].owner.message.log_fields(),
            )
            return [Part(rows, fault, began_at_ns)]
        middle = len(rows) // 2
        shorter = self._forward(loaded, rows[:middle])
        longer = self._forward(loaded, rows[middle:])
        if full:  # but both halves fit
            longest = max(row.length for row in rows)
            padded_tokens = len(rows) * longest
            loaded.lower_budget(padded_tokens // 2)
        return shorter + longer
