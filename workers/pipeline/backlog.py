"""The backlog: rows that wait for the device, per model. One lock guards all of it.

Micro-batches never mix rows of two models. Suspected poison posts (poison.py) run in isolation, while every
other lane is idle, and so does the first micro-batch of a new model. A lane checks whether a message is still wanted as
late as possible: when it takes the message's first row. Jobs, which are not micro-batches, run between two
micro-batches.

Thread-safe. Computes nothing and never talks to Redis.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from feedmill.shared.messages import ClassifyOptions
from feedmill.workers.models.classifiers import Classifier, Row
from feedmill.workers.pipeline.calibration import TokenBudget
from feedmill.workers.pipeline.context import Context
from feedmill.workers.pipeline.message import Message, State
from feedmill.workers.pipeline.window import Window

#: Rows added per acquisition of the lock. Lanes that wait for the lock run in between.
ROWS_PER_LOCK = 256


class Loaded:
    """A loaded model: its classifier, its token budget, and the rows that wait for it."""

    def __init__(
        self, classifier: Classifier, budget: TokenBudget, on_active: Callable[[], None] = lambda: None
    ) -> None:
        self.classifier = classifier
        self.budget = budget
        #: Called on the writer thread once all results of the previous model are stored.
        self.on_active = on_active
        self.window: Window[Row] = Window(time.monotonic, classifier.device.shapes)
        #: The rows of each suspected poison post that waits, sorted by length.
        self.isolated: deque[Sequence[Row]] = deque()
        label_set = classifier.label_set(ClassifyOptions())
        #: A row that belongs to no message. Computing it shows that the device works.
        self.proof = classifier.prepare(["A first post."], label_set)[0]
        #: Rows per post with the configured labels.
        self.rows_each = label_set.rows

    def __len__(self) -> int:
        """Return the number of waiting rows; a suspected poison post counts as one."""
        return len(self.window) + len(self.isolated)

    def take(self, batch_rows: int) -> Sequence[Row]:
        """Take the next micro-batch, which is part of a single post while suspected poison posts wait."""
        if not self.isolated:
            return self.window.take(self.budget.tokens, batch_rows)
        rows = self.isolated.popleft()
        fit = self.classifier.device.shapes.fit(rows[-1].length, self.budget.tokens, batch_rows)
        if rows[fit:]:
            self.isolated.appendleft(rows[fit:])
        return rows[:fit]


class Batch(NamedTuple):
    """A micro-batch taken by a lane."""

    loaded: Loaded
    #: Sorted by length; not empty.
    rows: Sequence[Row]
    #: Number of micro-batches that share the device, including this one.
    passes: int
    #: True if it consists of suspected poison posts, which run in isolation.
    isolated: bool


class Backlog:
    """Rows and jobs that wait for the device's lanes.

    lanes: number of lanes of the device.
    batch_rows: maximum rows of a micro-batch.
    on_replaced: called with a new model once no rows wait for the previous one; called with the lock held.
    """

    def __init__(
        self,
        loaded: Loaded,
        lanes: int,
        batch_rows: int,
        context: Context,
        on_replaced: Callable[[Loaded], None],
    ) -> None:
        #: The active model, followed by its successors in order. Always replaced as a whole. The first one changes only
        #: while no lane has a micro-batch.
        self._models: tuple[Loaded, ...] = (loaded,)
        self._lanes = lanes
        self._batch_rows = batch_rows
        self._owner = context.owner
        self._on_replaced = on_replaced
        #: Guards this object and the state of every message.
        self._ready = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        #: Number of lanes that have a micro-batch.
        self._busy = 0
        #: True while suspected poison posts are on the device; nothing else may run then.
        self._isolating = False
        self._closed = False

    def __len__(self) -> int:
        """Return the number of waiting rows."""
        return sum(map(len, self._models))

    @property
    def active(self) -> Loaded:
        """The active model, whose rows the lanes compute."""
        return self._models[0]

    @property
    def latest(self) -> Loaded:
        """The model that was loaded last. New rows wait for it."""
        return self._models[-1]

    def oldest_age(self) -> float:
        """Return how long the oldest row has waited, in seconds."""
        with self._ready:
            return max(loaded.window.oldest_age() for loaded in self._models)

    # Adding work.

    def load(self, loaded: Loaded) -> None:
        """Append a model. It becomes active once no rows wait for its predecessors."""
        with self._ready:
            self._models += (loaded,)
            self._ready.notify_all()

    def add(self, loaded: Loaded, rows: Sequence[Row], priority: int) -> None:
        """Add rows that wait for a model."""
        for at in range(0, len(rows), ROWS_PER_LOCK):
            with self._ready:
                for row in rows[at : at + ROWS_PER_LOCK]:
                    loaded.window.add(row, priority)
                self._ready.notify_all()

    def add_isolated(self, loaded: Loaded, rows: Sequence[Row]) -> None:
        """Add the rows of one suspected poison post. They wait until every lane is idle."""
        with self._ready:
            loaded.isolated.append(sorted(rows, key=lambda row: row.length))
            self._ready.notify_all()

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job for the first lane, which alternates between jobs and micro-batches."""
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

        Call `done` after each micro-batch. The first lane runs a job, if one waits, before each micro-batch.
        """
        while not self._closed:
            if not lane:
                self._run_job()
            with self._ready:
                self._ready.wait_for(lambda: (not lane and self._jobs) or self._is_due() or self._closed)
                rows = self._take() if self._is_due() and not self._closed else []
                messages = {id(row.owner.message): row.owner.message for row in rows}
                starting = [message for message in messages.values() if self._starts(message)]
                rows = [row for row in rows if row.owner.message.state is State.STARTED]
                alone = not self._busy and not self.active.window
                self._isolating = isolated = self._isolating and bool(rows)
                self._busy += bool(rows)
                batch = Batch(self.active, rows, 1 if alone or isolated else self._lanes, isolated) if rows else None
            for message in starting:
                self._owner.started(message)
            if batch:
                return batch
        return None

    def done(self) -> None:
        """Mark a micro-batch as finished, once its outputs are handed over."""
        with self._ready:
            self._busy -= 1
            self._isolating = False
            self._ready.notify_all()

    def _run_job(self) -> None:
        with self._ready:
            job = self._jobs.popleft() if self._jobs else None
        if job:
            job()

    # Called with the lock held.

    def _is_due(self) -> bool:
        """Return whether a lane may take a micro-batch.

        Suspected poison posts and a new model wait until all lanes are idle.
        """
        if self.active.isolated or self._is_replaced():
            return not self._busy
        return bool(self.active.window) and not self._isolating

    def _is_replaced(self) -> bool:
        """Return whether the active model has a successor and no rows left."""
        return len(self._models) > 1 and not self.active

    def _take(self) -> Sequence[Row]:
        """Return the rows of the next micro-batch. Suspected poison posts go first."""
        while self._is_replaced():
            self._models = self._models[1:]
            self._on_replaced(self.active)
        self._isolating = bool(self.active.isolated)
        return self.active.take(self._batch_rows)

    def _starts(self, message: Message) -> bool:
        """Start a message if it is still wanted, else drop it. Return True if this call started it."""
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
        """End a message that has all its outcomes. Return False if it was dropped or is no longer wanted."""
        with self._ready:
            starting = self._starts(message)  # only for a message that needed no forward pass
            if not message.enter(State.ENDED):
                return False
        if starting:
            self._owner.started(message)
        return True
