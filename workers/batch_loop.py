"""The batch loop: next micro-batch, forward, hand on.

The device thread's part of the pipeline. The device is what must never wait: all else happens on other threads, while
this one computes. A GPU is handed the next micro-batch while the last one runs; a CPU has a device thread, a lane, for
each of its cores, whose forward passes run side by side, and a micro-batch that finds the others idle gets all cores.
A micro-batch that fails is halved until the one post is found that does it. Knows nothing of messages but whose rows
are computed.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from shared.errors import DeviceFull, DeviceLost, printable
from workers.backlog import Backlog, Batch, Loaded
from workers.classifiers import Outputs, Row
from workers.device import Device
from workers.message import traced
from workers.suspects import Suspects
from workers.watch import Watch

logger = logging.getLogger(__name__)

#: Rows with their outputs, or with what went wrong.
Part: TypeAlias = tuple[Sequence[Row], Outputs | Exception]


class Computed(NamedTuple):
    """A part of a micro-batch; `share` of the device was at it."""

    loaded: Loaded
    rows: Sequence[Row]
    outputs: Outputs | Exception
    share: float


class BatchLoop:
    """A loop for each lane of the device.

    hand_over: is given what was computed, and may keep the thread waiting. stopping: ends what waits for the device.
    """

    def __init__(
        self,
        backlog: Backlog,
        device: Device,
        suspects: Suspects | None,
        hand_over: Callable[[Computed], None],
        stopping: threading.Event,
        watch: Watch,
    ) -> None:
        self._backlog = backlog
        self._device = device
        self._suspects = suspects
        self._hand_over = hand_over
        self._stopping = stopping
        self._watch = watch
        #: By lane: when its latest forward pass began, by the watch's clock, and what it left; for who watches.
        self._computing: list[tuple[float, Outputs | None] | None] = [None] * device.lanes
        #: By lane: the posts of that pass, for `_note`.
        self._noted: list[list[tuple[str | None, int]]] = [[] for _ in range(device.lanes)]

    def loop(self, lane: int) -> None:
        while batch := self._backlog.next_batch(lane):
            self._device.take_share(batch.passes)
            parts = self._alone(batch, lane) if batch.apart else self._forward(batch.loaded, batch.rows, lane)
            for rows, outputs in parts:
                self._hand_over(Computed(batch.loaded, rows, outputs, 1 / batch.passes))
            self._backlog.done()
            del batch  # while this waits for the next, its model may be replaced, and is to leave the memory

    def hanging(self, seconds: float) -> int | None:
        """A lane whose forward pass takes longer than that, if there is one; for the thread that watches."""
        for lane, computing in enumerate(self._computing):
            began, outputs = computing or (math.inf, None)
            if self._watch.now() - began > seconds and not (outputs and outputs.ready()):
                return lane
        return None

    def _forward(self, loaded: Loaded, rows: Sequence[Row], lane: int) -> list[Part]:
        """Outputs of the rows; when that raises, of their halves, until only the culprit has none."""
        shared = loaded.budget.shared
        try:
            return [(rows, self._compute(loaded, rows, lane))]
        except DeviceLost:
            raise
        except DeviceFull as error:
            # Anew: the frames of this one keep the tensors of the failed pass.
            fault: Exception = DeviceFull(str(error))
        except Exception as error:
            fault = error
        full = isinstance(fault, DeviceFull)
        # A second model that came or went during the pass took the memory just as well.
        shared = shared or loaded.budget.shared
        if full and len(rows) == 1:
            # No fault of the post: whoever comes next would fail as well.
            raise DeviceLost("the device has no memory for a single row") from fault
        if len(rows) == 1:
            logger.error("post %s cannot be classified:\n%s", printable(rows[0].owner.post.id), traced(fault))
            return [(rows, fault)]
        middle = len(rows) // 2
        halves = self._forward(loaded, rows[:middle], lane) + self._forward(loaded, rows[middle:], lane)
        if full:  # and the halves were not
            loaded.budget.lower(len(rows) * max(row.length for row in rows) // 2, shared)
        return halves

    def _compute(self, loaded: Loaded, rows: Sequence[Row], lane: int) -> Outputs:
        self._note(rows, lane)
        began = self._watch.now()
        self._computing[lane] = began, None
        try:
            outputs = loaded.classifier.forward(rows)
        except BaseException:
            self._computing[lane] = None
            raise
        self._computing[lane] = began, outputs
        return outputs

    def _note(self, rows: Sequence[Row], lane: int) -> None:
        """Have it known which posts are on the device, should this worker vanish now."""
        if self._suspects:
            latest = self._computing[lane]
            running = self._noted[lane] if latest and latest[1] and not latest[1].ready() else []
            self._noted[lane] = [(row.owner.message.task_id, row.owner.index) for row in rows if row.owner]
            self._suspects.note(lane, (*running, *self._noted[lane]))

    def _alone(self, batch: Batch, lane: int) -> list[Part]:
        """As `_forward`, of suspects: nothing else is on the device from before they begin until they have ended."""
        if (computing := self._computing[lane]) and computing[1]:
            self._wait_for(computing[1])
        # That the device computes at all is seen before its failing counts against them.
        self._wait_for(self._compute(batch.loaded, batch.loaded.proof, lane))
        parts = self._forward(batch.loaded, batch.rows, lane)
        for _, outputs in parts:
            if not isinstance(outputs, Exception):
                self._wait_for(outputs)
        self._note((), lane)  # the writer may keep this thread waiting, and what has ended is no suspect
        return parts

    def _wait_for(self, outputs: Outputs) -> None:
        while not outputs.ready() and not self._stopping.wait(0.001):
            pass
