"""What waits for the device, for each model that is loaded, and whose turn it is: all of it under one lock.

Rows of a model share no micro-batch with those of another. Suspects (workers/suspects.py) go on the device alone,
while every lane is idle, and so does the first micro-batch of another model. A message is asked for at the last moment
whether it is still wanted: when the first of its rows is taken. What runs between two micro-batches, and is none, is a
job. Any thread may call any of this; nothing here computes, or talks to Redis.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shared.messages import ClassifyOptions
from workers.calibration import TokenBudget
from workers.classifiers import Classifier, Row
from workers.message import Message
from workers.suspects import Quarantine
from workers.watch import Watch
from workers.window import Window

#: Rows that enter the window while the device's lanes wait for it.
ROWS_AT_ONCE = 256


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


class Batch(NamedTuple):
    """A micro-batch that a lane has taken."""

    loaded: Loaded
    #: Sorted by length; not empty.
    rows: Sequence[Row]
    #: How many micro-batches share the device, itself counted.
    passes: int
    #: Whether its rows are suspects'.
    apart: bool


class Job(NamedTuple):
    """Something to run between two micro-batches.

    what, limit: for the log, and seconds after which it counts as hanging; see Watch.
    """

    run: Callable[[], None]
    what: str
    limit: float | None


class Backlog:
    """See the module's first lines.

    lanes: of the device. batch_rows: rows of a micro-batch, at most. admits: whether a message whose turn has come is
    still wanted; called with the lock held. on_started: told of each message whose first row was taken, by the thread
    that took it. on_replaced: told, with the lock held, that nothing waits any more for the model before this one.
    """

    def __init__(
        self,
        loaded: Loaded,
        lanes: int,
        batch_rows: int,
        admits: Callable[[Message], bool],
        on_started: Callable[[Message], None],
        on_replaced: Callable[[Loaded], None],
        watch: Watch,
    ) -> None:
        #: The model at work, and those that are to replace it, in turn. Replaced as a whole, and the first of them only
        #: while no lane has a micro-batch.
        self._models: tuple[Loaded, ...] = (loaded,)
        self._lanes = lanes
        self._batch_rows = batch_rows
        self._admits = admits
        self._on_started = on_started
        self._on_replaced = on_replaced
        self._watch = watch
        #: Guards all of this, and every message's `started`, `finished` and `dropped`.
        self._ready = threading.Condition()
        self._jobs: deque[Job] = deque()
        #: Lanes that have a micro-batch.
        self._busy = 0
        #: Whether suspects are on the device: then nothing else may be.
        self._apart = False
        self._closed = False

    def __len__(self) -> int:
        """Rows that wait."""
        return sum(map(len, self._models))

    @property
    def at_work(self) -> Loaded:
        """The model whose rows are computed now."""
        return self._models[0]

    @property
    def latest(self) -> Loaded:
        """The model for which what comes now is to wait."""
        return self._models[-1]

    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited."""
        with self._ready:
            return max(loaded.window.oldest_age() for loaded in self._models)

    # What comes.

    def load(self, loaded: Loaded) -> None:
        """Have a model follow those that are here."""
        with self._ready:
            self._models += (loaded,)
            self._ready.notify_all()

    def add(self, loaded: Loaded, rows: Sequence[Row], priority: int) -> None:
        """Let rows wait for a model."""
        for at in range(0, len(rows), ROWS_AT_ONCE):
            with self._ready:
                for row in rows[at : at + ROWS_AT_ONCE]:
                    loaded.window.add(row, priority)
                self._ready.notify_all()

    def add_suspect(self, loaded: Loaded, rows: Sequence[Row]) -> None:
        """Let the rows of one post wait for a model, and for the device to be idle."""
        with self._ready:
            loaded.quarantine.add(rows)
            self._ready.notify_all()

    def run(self, job: Job) -> None:
        """Have the first lane run something that is no micro-batch: jobs and micro-batches take turns."""
        with self._ready:
            self._jobs.append(job)
            self._ready.notify_all()

    def close(self) -> None:
        """Nobody is given a micro-batch any more."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    # What a lane takes.

    def next_batch(self, lane: int) -> Batch | None:
        """The lane's next micro-batch, once there is one; None when all ends. `done` follows each.

        The first lane runs a job after each micro-batch.
        """
        while not self._closed:
            if not lane:
                self._run_job()
            with self._ready:
                self._ready.wait_for(lambda: (not lane and self._jobs) or self._is_due() or self._closed)
                rows = self._take() if self._is_due() and not self._closed else []
                messages = {id(row.owner.message): row.owner.message for row in rows}
                starting = [message for message in messages.values() if self._starts(message)]
                rows = [row for row in rows if not row.owner.message.dropped]
                alone = not self._busy and not self.at_work.window
                self._apart = apart = self._apart and bool(rows)
                self._busy += bool(rows)
                batch = Batch(self.at_work, rows, 1 if alone or apart else self._lanes, apart) if rows else None
            for message in starting:
                self._on_started(message)
            if batch:
                return batch
        return None

    def done(self) -> None:
        """A lane has handed on the outputs of its micro-batch."""
        with self._ready:
            self._busy -= 1
            self._apart = False
            self._ready.notify_all()

    def _run_job(self) -> None:
        with self._ready:
            job = self._jobs.popleft() if self._jobs else None
        if job:
            with self._watch.step(job.what, job.limit):
                job.run()

    # All of these with the lock held.

    def _is_due(self) -> bool:
        """Whether a lane may take a micro-batch. Suspects, and another model, wait for all lanes."""
        if self.at_work.quarantine or self._is_replaced():
            return not self._busy
        return bool(self.at_work.window) and not self._apart

    def _is_replaced(self) -> bool:
        """Whether nothing waits for the model at work any more, nor will."""
        return len(self._models) > 1 and not self.at_work

    def _take(self) -> list[Row]:
        """The next micro-batch, of suspects where there are any."""
        while self._is_replaced():
            self._models = self._models[1:]
            self._on_replaced(self.at_work)
        at_work = self.at_work
        self._apart = bool(at_work.quarantine)
        return (at_work.quarantine or at_work.window).take(at_work.budget.tokens, self._batch_rows)

    def _starts(self, message: Message) -> bool:
        """Whether the message's turn has come with this, and it is still wanted; drops it where it is not."""
        if message.started or message.dropped:
            return False
        message.started = self._admits(message)
        message.dropped = not message.started
        return message.started

    # How a message ends.

    def drop(self, message: Message) -> bool:
        """Compute nothing more of a message; False where it is too late for that."""
        with self._ready:
            if message.finished or message.dropped:
                return False
            message.dropped = True
        return True

    def finish(self, message: Message) -> bool:
        """Whether a message that has all its outcomes is to be finished: it was not dropped, and is still wanted."""
        with self._ready:
            starting = self._starts(message)  # nothing of it needed a forward pass
            if message.dropped:
                return False
            message.finished = True
        if starting:
            self._on_started(message)
        return True
